"""The recipes that expert linears have."""

from __future__ import annotations

import functools

from float8 import recipes
from float8.recipes import Granularity, Recipe, Scaling
from float8.torch import traced

NAMES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "bf16")


def check_recipe(recipe: Recipe, keeps_state: bool = False) -> None:
    """Raises ValueError for a recipe that expert linears do not have, or not without a state."""
    if (why := _obstacle(recipe, keeps_state)) is not None:
        names = (*NAMES, "delayed") if keeps_state else NAMES
        raise ValueError(
            f"float8: recipe {recipe.name or 'custom'} {why}: use one of {', '.join(names)} for experts"
        )


def _obstacle(recipe: Recipe, keeps_state: bool) -> str | None:
    casts = [cast for _, gemm in recipe.gemms() for cast in (gemm.a, gemm.b)]
    if any(cast.scaling == Scaling.DELAYED for cast in casts) and not keeps_state:
        return "has delayed scaling, whose state converted experts and float8.torch.Experts have"
    in_fp8 = [gemm.a.fp8 for _, gemm in recipe.gemms()]
    if in_fp8 not in ([True, True, True], [True, True, False], [False, False, False]):
        return "has some GEMMs in high precision: experts have grad_weight alone, or all three"
    for name, gemm in recipe.gemms():
        own, other = Granularity.BLOCK_128X128, Granularity.BLOCK_1X128
        if name == "grad_weight":
            own, other = other, own
        if gemm.b.granularity == other:
            return (
                f"has scales of {other.name.lower()} for b of {name} in place of {own.name.lower()}, "
                "which experts do not have"
            )
    return None


# In graphs of torch.compile it is a constant.
@traced.constant
def joins_pairs(config: int) -> bool:
    """Tells whether a pair of w1 and w3 is computed as one weight with the rows of both.

    So it is where all GEMMs are in fp8 and no weight has one scale for each expert or for all: a scale of both
    would be that of the larger one.
    """
    if config & recipes.READS_X:
        return False
    return Granularity.TENSOR not in recipes.granularities_of_weights(config)


@functools.cache
def config_of(
    recipe: Recipe,
    emulate: bool,
    saturate: bool,
    recompute: bool | None,
    keeps_state: bool = False,
) -> int:
    """Returns the config of expert linears (recipes.pack). Raises ValueError as check_recipe does.

    It has READS_X where grad_weight is in high precision: weights alone are recomputed.
    """
    check_recipe(recipe, keeps_state)
    again = recompute is not False
    config = recipes.pack(recipe, emulate=emulate, saturate=saturate, recompute=again)
    return config if not recipe.grad_weight.b.fp8 else config & ~recipes.READS_X
