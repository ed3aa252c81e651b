"""fp8 linears as functions, for modules that are no nn.Linear."""

from __future__ import annotations

import functools

import torch

from float8 import recipes
from float8.recipes import Recipe
from float8.torch import _ops
from float8.torch.layer.linear import check_switches, resolve_recipe


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
torch.compiler.assume_constant_result(Recipe.given_to)  # type: ignore[no-untyped-call]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
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
    device = "cuda" if x.is_cuda else x.device.type
    if not x.is_meta and torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    config |= recipes.BIAS if bias is not None else 0
    if torch.compiler.is_compiling():
        return _ops.linear(x, weight, bias, config)
    try:
        return _ops.linear(x, weight, bias, config)
    except (RuntimeError, ValueError):
        _ops.refuse(x, weight)
        raise
