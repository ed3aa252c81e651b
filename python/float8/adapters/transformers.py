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
from float8.torch.attention import check_fp8_recipe
from float8.torch.experts.modules import of_transformers
from float8.torch.layer import transformers_attention

NAME = transformers_attention.NAME


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


def install_attention(
    recipe: str = "fp8_forward", *, name: str = NAME, emulate: bool = False
) -> None:
    """Registers attention in fp8 under a name that `attn_implementation` takes.

    recipe: "fp8_forward", or "fp8" with a backward in fp8 too.

    It is float8.torch.scaled_dot_product_attention, in training and in evaluation. A call that it cannot compute
    goes to transformers' own "sdpa", with one warning that says why: a batch with padding, another mask than the causal
    one with or without a sliding window, dropout, another head than 64, 128 or 256. A single query, as in generation, goes
    there without one. Packed sequences, as of DataCollatorWithFlattening(return_flash_attn_kwargs=True), are those of
    float8.torch.varlen_attention. A model with capped scores or attention sinks, which "sdpa" has not, is a ValueError at
    its first forward.

    Raises ValueError for another recipe, and ImportError where transformers has no such implementations, which came with
    its version 4.53.
    """
    check_fp8_recipe(recipe)
    transformers_attention.register(name, recipe, emulate)
