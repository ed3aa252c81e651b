"""transformers: fp8 experts as an implementation of experts, and fp8 attention as one of attention.

import float8.adapters.transformers

float8.adapters.transformers.install()
float8.adapters.transformers.install_attention()
model = AutoModelForCausalLM.from_pretrained(
    name, experts_implementation="float8", attn_implementation="float8")
"""

from __future__ import annotations

from typing import Any

import torch

from float8.recipes import Recipe
from float8.torch import functional
from float8.torch._ops import of_autocast
from float8.torch.attention import refusal, scaled_dot_product_attention, warn_of
from float8.torch.experts.modules import of_transformers

NAME = "float8"


def install(
    recipe: str | Recipe = "rowwise",
    *,
    name: str = NAME,
    emulate: bool = False,
    saturate: bool = False,
) -> None:
    """Registers fp8 experts under a name that `experts_implementation` takes.

    recipe, emulate, saturate: as for float8.torch.grouped_mm. Another call with the same name replaces
        them, also for models that are there.

    The linears of the model are converted by float8.torch.convert_to_float8_training, which can
    convert its experts too, and without this call.

    Raises ValueError for a recipe that experts do not have, and ImportError where transformers has no
    such implementations, which came with its version 5.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ImportError(
            "float8: implementations of experts need transformers 5 or later: pip install -U transformers"
        ) from error
    config = functional.pack_experts(recipe, emulate, saturate)

    def experts_forward(
        module: Any,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        return of_transformers(module, hidden_states, top_k_index, top_k_weights, config)

    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)


def install_attention(*, name: str = NAME, emulate: bool = False) -> None:
    """Registers attention with a forward in fp8 under a name that `attn_implementation` takes.

    It is float8.torch.scaled_dot_product_attention, in training and in evaluation. A call that it cannot compute
    goes to transformers' own "sdpa", with one warning that says why: a batch with padding, a window that is
    shorter than the sequence, dropout, another head than 128, a score that is capped. A single query, as in
    generation, goes there without one.

    Raises ImportError where transformers has no such implementations, which came with its version 4.53.
    """
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
