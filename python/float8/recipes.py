"""Recipes: how the operands of a linear's three GEMMs are cast.

GEMM          a        b        sums over   gives
output        x        w        K           y  [M,N]
grad_input    dy       w        N           dx [M,K]
grad_weight   dy       x        M           dw [N,K]
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator

from float8 import _library

# The order is that of the shim's config (python/shim/base/config.hpp).
NAMES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise", "bf16")


class Scaling(enum.IntEnum):
    """Where an operand's scale comes from."""

    DYNAMIC = 0
    DELAYED = 1
    HIGH_PRECISION = 2


class Granularity(enum.IntEnum):
    """The elements that share a scale."""

    TENSOR = 0
    AXIS = 1
    BLOCK_1X128 = 2
    BLOCK_128X128 = 3


class Format(enum.IntEnum):
    E4M3 = 0
    E5M2 = 1


@dataclasses.dataclass(frozen=True)
class Cast:
    """The cast of one operand. `pow2` rounds scales down to powers of two."""

    scaling: Scaling = Scaling.DYNAMIC
    granularity: Granularity = Granularity.TENSOR
    format: Format = Format.E4M3
    pow2: bool = False

    @property
    def fp8(self) -> bool:
        return self.scaling != Scaling.HIGH_PRECISION

    def __str__(self) -> str:
        if not self.fp8:
            return "high precision"
        parts = (self.scaling.name, self.granularity.name, self.format.name)
        return " ".join(part.lower() for part in parts) + " pow2" * self.pow2


@dataclasses.dataclass(frozen=True)
class Gemm:
    """The casts of a GEMM's operands; `fast` keeps its sums in the tensor cores."""

    a: Cast = Cast()
    b: Cast = Cast()
    fast: bool = False

    def __str__(self) -> str:
        return f"{self.a} by {self.b}{', fast' * self.fast}"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The settings of the three GEMMs. `named` gives those with a name, `dataclasses.replace` others.

    A recipe that makes no sense is refused, with the GEMM's name, when it is made (ValueError).
    """

    output: Gemm = Gemm()
    grad_input: Gemm = Gemm()
    grad_weight: Gemm = Gemm()

    def __post_init__(self) -> None:
        for name, gemm in self.gemms():
            if gemm.a.fp8 != gemm.b.fp8:
                raise ValueError(
                    f"float8: {name}: one operand is fp8 and the other in high precision; both or neither"
                )

    @staticmethod
    def named(name: str) -> Recipe:
        """Returns the recipe of that name, one of `float8.recipes.NAMES` (ValueError)."""
        struct = _library.sized(_library.RecipeStruct)
        _library.check(
            _library.library().float8_recipe_named(str(name).encode(), ctypes.byref(struct))
        )
        gemms = (struct.output, struct.grad_input, struct.grad_weight)
        return Recipe(*(_gemm_of(gemm) for gemm in gemms))

    @property
    def name(self) -> str | None:
        """The name of these settings, None for settings of one's own."""
        return _names().get(self)

    @property
    def delayed(self) -> bool:
        return any(
            cast.scaling == Scaling.DELAYED for _, gemm in self.gemms() for cast in (gemm.a, gemm.b)
        )

    def __str__(self) -> str:
        """The name, or the settings in words; other settings have other words."""
        if self.name is not None:
            return self.name
        return f"custom ({'; '.join(f'{name}: {gemm}' for name, gemm in self.gemms())})"

    def given_to(self, function: Callable[..., int], *args: bool | None) -> int:
        """Returns function(self, *args).

        torch.compile of PyTorch 2.11 takes a dataclass for the self of a constant's call, but not
        for an argument.
        """
        return function(self, *args)

    def gemms(self) -> Iterator[tuple[str, Gemm]]:
        for field in dataclasses.fields(self):
            yield field.name, getattr(self, field.name)


def is_fp8_throughout(recipe: Recipe) -> bool:
    """Tells whether all three GEMMs read fp8, and none of them x or dy in high precision."""
    return recipe.output.a.fp8 and recipe.grad_input.a.fp8 and recipe.grad_weight.a.fp8


def _gemm_of(struct: _library.GemmSetting) -> Gemm:
    def cast(of: _library.CastSetting) -> Cast:
        if of.scaling == Scaling.HIGH_PRECISION:
            return Cast(Scaling.HIGH_PRECISION)
        return Cast(
            Scaling(of.scaling), Granularity(of.granularity), Format(of.format), bool(of.pow2)
        )

    return Gemm(cast(struct.a), cast(struct.b), bool(struct.fast))


@functools.cache
def validate(recipe: Recipe) -> None:
    """Raises ValueError, with the library's words, where no linear can have these settings."""
    struct = recipe_struct(recipe)
    _library.check(_library.library().float8_recipe_check(ctypes.byref(struct)))


def recipe_struct(recipe: Recipe) -> _library.RecipeStruct:
    """Returns the settings as the C interface has them."""
    struct: _library.RecipeStruct = _library.sized(_library.RecipeStruct)
    for name, gemm in recipe.gemms():
        target = getattr(struct, name)
        for operand in ("a", "b"):
            cast = getattr(gemm, operand)
            setting = _library.CastSetting(
                cast.scaling, cast.granularity, cast.format, int(cast.pow2)
            )
            setattr(target, operand, setting)
        target.fast = int(gemm.fast)
    return struct


_by_recipe: dict[Recipe, str] = {}


def _names() -> dict[Recipe, str]:
    if not _by_recipe:
        _by_recipe.update({Recipe.named(name): name for name in NAMES})
    return _by_recipe


# The bits of a config; python/shim/base/config.hpp has the grammar.
NAME = 15  # 0: custom settings
EMULATE = 1 << 4
RECOMPUTE = 1 << 5
HOLD = 1 << 6
READS_X = 1 << 7
READS_WEIGHT = 1 << 8
BIAS = 1 << 9
FUSE_NORMS = 1 << 10
STAGED = 1 << 11
FROZEN = 1 << 12  # of an MLP of experts: w13
FROZEN_W2 = 1 << 13


def pack(
    recipe: Recipe,
    *,
    emulate: bool = False,
    recompute: bool = False,
    saturate: bool = False,
    bias: bool = False,
) -> int:
    """Returns the integer that tells an op of torch.ops.float8 what to do."""
    name = recipe.name
    bits = NAMES.index(name) + 1 if name is not None else _custom_bits(recipe)
    flags = {
        EMULATE: emulate,
        RECOMPUTE: recompute,
        HOLD: saturate,
        READS_X: recompute or not recipe.grad_weight.b.fp8,
        READS_WEIGHT: recompute or not recipe.grad_input.b.fp8,
        BIAS: bias,
    }
    return bits | sum(bit for bit, is_set in flags.items() if is_set)


def of_frozen_weight(config: int, keeps_state: bool, which: int = FROZEN) -> int:
    """Returns the config of a linear whose weight has no gradient: nothing of x is kept, and dy has one copy.

    keeps_state: whether the recipe has delayed scaling. A custom one keeps its own config, since its scales may be of
        other copies, whose amaxes the weight needs once it trains again.
    which: the bit of the weight.
    """
    is_custom = not config & NAME
    return config if is_custom and keeps_state else (config | which) & ~READS_X


@functools.cache
def granularities_of_weights(config: int) -> tuple[Granularity, Granularity]:
    """Returns the granularities of the weight's casts for output and grad_input, of what pack() has returned."""
    output, grad_input = (Granularity(cast >> 2 & 3) for cast in _casts_of(config)[1])
    return output, grad_input


@functools.cache
def dynamic_granularities(
    config: int,
) -> tuple[tuple[Granularity | None, Granularity | None], ...]:
    """Returns the granularities of the rowwise and the columnwise cast of x, w and dy, of what pack() has
    returned; None for a cast whose scale is delayed, and where there is no cast, as for the gradient of a weight
    that is frozen."""
    q, qt = (
        tuple(
            Granularity(pair[i] >> 2 & 3) if pair[i] & 3 == Scaling.DYNAMIC else None
            for pair in _casts_of(config)
        )
        for i in range(2)
    )
    return tuple(zip(q, qt, strict=True))


def _casts_of(config: int) -> tuple[tuple[int, int], ...]:
    """Returns the bits of the rowwise and the columnwise cast of x, w and dy."""
    number = config & 0xF
    bits = _custom_bits(Recipe.named(NAMES[number - 1])) if number else config
    output, grad_input, grad_weight = (
        (bits >> 16 + 12 * i & 0x3F, bits >> 22 + 12 * i & 0x3F) for i in range(3)
    )
    if config & FROZEN:
        grad_weight = (Scaling.HIGH_PRECISION, Scaling.HIGH_PRECISION)
    return (
        (output[0], grad_weight[1]),
        (output[1], grad_input[1]),
        (grad_input[0], grad_weight[0]),
    )


def _custom_bits(recipe: Recipe) -> int:
    bits = 0
    for i, (_, gemm) in enumerate(recipe.gemms()):
        for j, cast in enumerate((gemm.a, gemm.b)):
            six = cast.scaling | cast.granularity << 2 | cast.format << 4 | int(cast.pow2) << 5
            bits |= six << (16 + 6 * (2 * i + j))
        bits |= int(gemm.fast) << (52 + i)
    return bits
