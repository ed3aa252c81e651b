"""Attention in fp8 as an implementation that transformers' attn_implementation names."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from float8.torch import varlen
from float8.torch._ops import of_autocast
from float8.torch.attention import (
    refusal,
    scaled_dot_product_attention,
    warn_of,
    window_mask,
)
from float8.torch.layer import attention_statistics

NAME = "float8"
registered: set[str] = set()


def register(name: str, recipe: str, emulate: bool) -> None:
    """Registers it (adapters.transformers.install_attention says what it is)."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(
            "float8: implementations of attention need transformers 4.53 or later: pip install -U transformers"
        ) from error

    def attention_forward(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **more: Any,
    ) -> tuple[torch.Tensor, None]:
        _check_scores(module, more)
        query, key, value = (of_autocast(x) for x in (query, key, value))
        window = _window_of(attention_mask)
        if window is not None:
            attention_mask = None
        own: dict[str, Any] = {
            "recipe": getattr(module, "float8_recipe", recipe),
            "emulate": getattr(module, "float8_emulate", emulate),
        }
        causal = window is not None or _is_causal(module, is_causal)
        count = functools.partial(
            attention_statistics.count,
            module,
            is_causal=causal,
            scale=scaling,
            emulate=own["emulate"],
        )
        pack = _pack_of(query, key, attention_mask, window, more)
        mask = attention_mask if pack is None else None
        reason = _obstacle(module, query, key, value, mask, dropout, scaling, more)
        if reason is None and pack is not None:
            o = _attend_pack(query, key, value, pack, causal, scaling, own)
            if isinstance(o, torch.Tensor):
                count(query, key, value, window=pack.window, offsets=pack.offsets)
                return o, None
            reason = o
        if reason is not None:
            if reason:
                warn_of(reason)
            attention_mask = _whole_mask(attention_mask, query, key, causal, window, pack)
            out: tuple[torch.Tensor, None] = sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout, scaling, is_causal, **more
            )
            return out
        if causal and key.shape[2] > query.shape[2]:  # an empty static cache is behind them
            key, value = (x[:, :, : query.shape[2]] for x in (key, value))
        y = scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=causal,
            scale=scaling,
            enable_gqa=True,
            window=window,
            **own,
        )
        count(query, key, value, window=window)
        return y.transpose(1, 2), None

    def attention_mask(**options: Any) -> torch.Tensor | None:
        own = dict(options)
        window = _sliding_window(**options)
        if window is not None:  # sdpa_mask leaves out no mask of a local size
            options["local_size"] = None
        mask: torch.Tensor | None = sdpa_mask(**options)
        if mask is not None:
            _mark(mask, **own)
        if mask is None and window is not None and options["kv_length"] > window:
            return torch.empty((0, 1, 1, window), dtype=torch.bool, device=options["device"])
        return mask

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
    registered.add(name)


def _check_scores(module: Any, more: dict[str, Any]) -> None:
    for kind in ("softcap", "s_aux"):
        if more.get(kind) is not None:
            raise ValueError(
                f"float8: {type(module).__name__} uses {kind}, which neither attention in fp8 nor PyTorch's has; "
                "load the model with attn_implementation='eager'"
            )


def _whole_mask(
    mask: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    causal: bool,
    window: int | None,
    pack: _Pack | None,
) -> torch.Tensor | None:
    """Returns the mask that "sdpa" needs, which reads neither offsets nor windows."""
    if pack is not None and mask is None:
        offsets, tokens = (pack.offsets, pack.offsets), (query.shape[2], key.shape[2])
        return varlen.mask_of_pack(offsets, tokens, causal, window)
    return mask if window is None else window_mask(window, query, key)


def _is_causal(module: Any, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


# A mask that a model made of the positions of packed sequences alone is what their offsets say too: it is left with the
# window that it has. A compiled graph has no attributes of tensors, and takes PyTorch's attention.
def _mark(
    mask: torch.Tensor,
    *,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    config: Any = None,
    use_vmap: bool = False,
    **more: Any,
) -> None:
    of_positions = getattr(mask_function, "__qualname__", "").startswith("and_masks.")
    if attention_mask is not None or use_vmap or not of_positions or torch.compiler.is_compiling():
        return
    if getattr(config, "attention_chunk_size", None) is not None or mask.shape[0] != 1:
        return
    if local_size in (None, getattr(config, "sliding_window", None)):
        mask.float8_window = local_size  # type: ignore[attr-defined]


class _Pack(NamedTuple):
    offsets: torch.Tensor
    longest: int
    window: int | None


def _pack_of(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    window: int | None,
    more: dict[str, Any],
) -> _Pack | None:
    """Returns the packed sequences that a call is given, or None. Queries and keys of a self-attention have the same
    offsets."""
    offsets, longest = more.get("cu_seq_lens_q"), more.get("max_length_q")
    if offsets is None or longest is None or query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        return None
    if mask is not None:
        if not hasattr(mask, "float8_window"):
            return None
        window = mask.float8_window
    return _Pack(offsets, longest, window)


def _attend_pack(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pack: _Pack,
    causal: bool,
    scaling: float | None,
    own: dict[str, Any],
) -> torch.Tensor | str:
    """Returns the result, or why it is not fp8's."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    offsets, longest = (pack.offsets, pack.offsets), (pack.longest, pack.longest)
    reason = varlen.refusal_of_pack(q, k, offsets, longest, causal)
    if reason is None:
        reason = varlen.refusal(q, k, v, True, scaling)
    if reason is not None:
        return reason
    o: torch.Tensor = varlen.varlen_attention(
        q,
        k,
        v,
        *offsets,
        *longest,
        is_causal=causal,
        window=pack.window,
        scale=scaling,
        enable_gqa=True,
        **own,
    )
    return o[None]


# Where a mask is a window and nothing else, layers are handed one without elements, whose last size is the window. It
# takes no S^2 bytes, and any other attention fails on it. A layer's own argument sliding_window does not do: Qwen2MoE
# and PhiMoE have windows in their masks alone.
def _window_of(mask: torch.Tensor | None) -> int | None:
    return mask.shape[-1] if mask is not None and mask.dim() == 4 and mask.shape[0] == 0 else None


def _sliding_window(
    *,
    local_size: int | None = None,
    config: Any = None,
    q_length: int | None = None,
    kv_length: int | None = None,
    allow_is_causal_skip: bool = True,
    **more: Any,
) -> int | None:
    """Returns the window of a mask of whole sequences that sdpa_mask is asked for, or None where it has none or is more
    than that: chunks, images, packed sequences."""
    if (
        local_size is None
        or local_size != getattr(config, "sliding_window", None)
        or getattr(config, "attention_chunk_size", None) is not None
        or not allow_is_causal_skip
        or q_length is None
        or q_length != kv_length
    ):
        return None
    return local_size


def _obstacle(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    more: dict[str, Any],
) -> str | None:
    """Returns why a call goes to "sdpa", "" where nobody needs to know, or None where it is fp8's."""
    if query.shape[2] == 1 or not getattr(module, "float8_attention", True):
        return ""
    if mask is not None:
        return "a batch has padding or a mask of its own; in fp8 there is the causal mask alone, with or without a window"
    for name in ("position_bias", "cache"):
        if more.get(name) is not None:
            return f"the model uses {name}"
    return refusal(query, key, value, None, dropout, True, scaling)
