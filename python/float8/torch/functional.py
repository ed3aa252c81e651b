"""fp8 linears, and those of experts, as functions, for modules that are no nn.Linear."""

from __future__ import annotations

import functools
from typing import Any

import torch

from float8 import recipes
from float8.recipes import Recipe
from float8.torch import _linear, _ops, traced
from float8.torch.experts import call as _call
from float8.torch.experts import modules as _modules
from float8.torch.experts.recipe import config_of
from float8.torch.layer.linear import check_switches, resolve_recipe
from float8.torch.rms_norm import rms_norm as rms_norm
from float8.torch.rotary import apply_rotary_pos_emb as apply_rotary_pos_emb


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    recipe: str | Recipe = "tensorwise",
    emulate: bool = False,
    recompute: bool | None = None,
    saturate: bool = False,
) -> torch.Tensor:
    """Returns x weight^T + bias with fp8 GEMMs: torch.nn.functional.linear under a recipe.

    x: [..., in_features] in bfloat16, float16 or float32; any strides, and any number of rows. Under
        autocast it is cast to autocast's type.
    weight: [out_features, in_features], both multiples of 16, in one of these types; any strides,
        so the transpose of a weight that is stored the other way is legal.
    bias: [out_features] or None.
    recipe and the options: as for Float8Linear. Delayed scaling keeps a state between calls, which
        a function has not.

    The result is [..., out_features] in x's type; gradients have the types of x, weight and bias.
    Raises ValueError for a shape, type, device or recipe that cannot be.
    """
    again = torch.compiler.is_compiling() if recompute is None else recompute
    return apply(x, weight, bias, pack(recipe, emulate, again, saturate))


def pack(recipe: str | Recipe, emulate: bool, recompute: bool, saturate: bool) -> int:
    """Returns the config of a recipe and its options, which `apply` takes."""
    if isinstance(recipe, Recipe):
        return recipe.given_to(_pack, emulate, recompute, saturate)
    config: int = _pack(recipe, emulate, recompute, saturate)
    return config


# In graphs of torch.compile the config is a constant.
traced.constant(Recipe.given_to)


@traced.constant
def _pack(recipe: str | Recipe, emulate: bool, recompute: bool, saturate: bool) -> int:
    return _packed(recipe, emulate, recompute, saturate)


@functools.cache
def _packed(recipe: str | Recipe, emulate: bool, recompute: bool, saturate: bool) -> int:
    check_switches(recompute=recompute, emulate=emulate, saturate=saturate)
    resolved = resolve_recipe(recipe)
    if resolved.delayed:
        raise ValueError(
            "float8: delayed scaling keeps a state between calls, which a function has not; use "
            "Float8Linear, or a recipe with dynamic scaling"
        )
    return recipes.pack(resolved, emulate=emulate, recompute=recompute, saturate=saturate)


def apply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: int
) -> torch.Tensor:
    """Computes the linear of a config from `pack`."""
    x = _ops.of_autocast(x)
    config |= recipes.BIAS if bias is not None else 0
    if torch.compiler.is_compiling():
        return _linear.linear(x, weight, bias, config)
    try:
        return _linear.linear(x, weight, bias, config)
    except (RuntimeError, ValueError):
        _linear.refuse(x, weight)
        raise


def grouped_mm(
    x: torch.Tensor,
    w_t: torch.Tensor,
    offs: torch.Tensor,
    *,
    bias: None = None,
    out_dtype: torch.dtype | None = None,
    recipe: str | Recipe = "tensorwise",
    emulate: bool = False,
    recompute: bool | None = None,
    saturate: bool = False,
) -> torch.Tensor:
    """Returns x_e w_t[e] of each expert e with fp8 GEMMs: torch.nn.functional.grouped_mm under a recipe.

    x: [M, K] in bfloat16, float16 or float32, the rows of one expert after the other; any strides, and
        any number of rows of an expert, also none. Under autocast it is cast to autocast's type.
    w_t: [E, K, N] in one of these types, K and N multiples of 16. It is read without a copy where it is
        the transpose of a parameter [E, N, K] (`weight.transpose(-2, -1)`); of a tensor that is stored as
        [E, K, N], as in Llama 4 and gpt-oss, each call makes a transposed copy.
    offs: int32 [E] on the device: the end of each expert's rows. Only the device reads them: no call
        waits, and a CUDA graph may be replayed with others. See check_routing for bad ones.
    bias, out_dtype: None, as there.
    recipe: "tensorwise", "rowwise", "rowwise_with_gw_hp" or "blockwise", a Recipe of dynamic scales, or
        "bf16", which casts nothing and multiplies operands of bfloat16 or float16.
    recompute: False keeps the fp8 copy that backward reads of the weights, a byte an element; else backward
        casts them again, with the same bits.
    emulate, saturate: as for Float8Linear.

    Each expert has the bits of `linear` with its rows alone. The result is [M, N] in x's type; rows from
    the last end on belong to no expert, are not read, and are 0 in the result and in x's gradient.
    Gradients have the types of x and w_t. Raises ValueError for a shape, type, device or recipe that
    cannot be.
    """
    x = _ops.of_autocast(x)
    if bias is not None or out_dtype not in (None, x.dtype):
        raise ValueError(
            "float8: grouped_mm has no bias, and its result has x's type: add the bias, or cast the "
            "result, after the call"
        )
    weight = w_t.transpose(-2, -1) if w_t.dim() == 3 else w_t
    return _modules.grouped(x, weight, offs, pack_experts(recipe, emulate, saturate, recompute))


def moe(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_scores: torch.Tensor,
    w13: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    w2: torch.Tensor,
    *,
    recipe: str | Recipe = "tensorwise",
    group: Any = None,
    dispatch_dtype: torch.dtype | None = None,
    tp_group: Any = None,
    emulate: bool = False,
    recompute: bool | None = None,
    saturate: bool = False,
) -> torch.Tensor:
    """Returns the sum of each token's SwiGLU experts by their scores, with fp8 GEMMs.

    x: [..., D], the tokens. topk_ids: [..., top_k], the experts of each token; an id outside of [0, E)
        drops the pair. topk_scores: [..., top_k]; they have a gradient.
    w13: [E, 2 F, D], the gates first, or [E, 2, F, D], or the two of [E, F, D], which under "rowwise" and
        "blockwise" have the bits of one, and else are two linears.
    w2: [E, D, F].
    group: a process group of R ranks for expert parallelism. The weights are then the E/R experts of this
        rank, those of rank 0 first, and topk_ids are experts of all ranks. All ranks of the group call it
        as often, also a rank without tokens.
    dispatch_dtype: with a group, torch.float8_e4m3fn rounds tokens to e4m3 with a scale for each token
        before they travel; None sends them in x's type. Results and gradients travel in x's type.
    tp_group: a process group of R ranks for tensor parallelism. The weights are then this rank's F/R hidden
        features of every expert, of gate and up each, and all ranks give the same x, topk_ids and topk_scores.
        Scales are those of the whole weights, and results and gradients of x and scores are summed over the
        ranks, in their types.
    recipe and the options: as for grouped_mm.

    The result is sum_k scores_k w2_e (silu(w1_e x) w3_e x), e = ids_k, in x's type: the sum is in fp32 and
    in the order of top_k, and so is the one of x's gradient. No step waits for the host, but with a group
    one in forward. Raises ValueError for operands that do not fit, and DistributedError where the ranks of
    the group do not fit each other, or one of them ended.
    """
    config = pack_experts(recipe, emulate, saturate, recompute)
    ranks = _call.Ranks(group, dispatch_dtype, tp_group)
    name = recipe if isinstance(recipe, str) else str(recipe)
    return _call.moe(x, topk_ids, topk_scores, w13, w2, config, name, ranks)


def pack_experts(
    recipe: str | Recipe, emulate: bool, saturate: bool, recompute: bool | None = None
) -> int:
    """Returns the config of expert linears; ValueError for a recipe that they do not have."""
    if isinstance(recipe, Recipe):
        return recipe.given_to(_pack_experts, emulate, saturate, recompute)
    config: int = _pack_experts(recipe, emulate, saturate, recompute)
    return config


@traced.constant
def _pack_experts(
    recipe: str | Recipe, emulate: bool, saturate: bool, recompute: bool | None
) -> int:
    check_switches(emulate=emulate, saturate=saturate, recompute=recompute)
    if not isinstance(recipe, str):
        return config_of(resolve_recipe(recipe), emulate, saturate, recompute)
    return _config_of_name(recipe, emulate, saturate, recompute)


@functools.cache
def _config_of_name(name: str, emulate: bool, saturate: bool, recompute: bool | None) -> int:
    return config_of(resolve_recipe(name), emulate, saturate, recompute)
