"""Attention with a forward in fp8 as an implementation that transformers' attn_implementation names."""

from __future__ import annotations

from typing import Any

import torch

from float8.torch._ops import of_autocast
from float8.torch.attention import refusal, scaled_dot_product_attention, warn_of

NAME = "float8"


def register(name: str, emulate: bool) -> None:
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
        query, key, value = (of_autocast(x) for x in (query, key, value))
        reason = _obstacle(module, query, key, value, attention_mask, dropout, scaling, more)
        if reason is not None:
            if reason:
                warn_of(reason)
            out: tuple[torch.Tensor, None] = sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout, scaling, is_causal, **more
            )
            return out
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causal and key.shape[2] > query.shape[2]:  # an empty static cache is behind them
            key, value = (x[:, :, : query.shape[2]] for x in (key, value))
        y = scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=scaling, enable_gqa=True, emulate=emulate
        )
        return y.transpose(1, 2), None

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, sdpa_mask)


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
        window = more.get("sliding_window")
        why = (
            "a batch has padding" if window is None else f"a layer has a window of {window} tokens"
        )
        return f"{why}; in fp8 there is the causal mask alone"
    for name in ("softcap", "position_bias", "cache", "s_aux"):
        if more.get(name) is not None:
            return f"the model uses {name}"
    return refusal(query, key, value, None, dropout, True, scaling)
