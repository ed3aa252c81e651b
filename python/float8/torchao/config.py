"""The configuration of torchao.float8, name by name, and what it means here.

A config that contradicts itself, or that asks for what cannot be done, says so when it is made:
ConfigError, which is both the AssertionError that torchao raises and a ValueError, or
NotImplementedError.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from typing import Literal

import torch

from float8.recipes import Cast, Format, Gemm, Granularity, Recipe, Scaling
from float8.torch.layer.convert import LinearConfig
from float8.torch.layer.linear import resolve_recipe
from float8.torchao import _asked, _options

e4m3_dtype = torch.float8_e4m3fn
e5m2_dtype = torch.float8_e5m2


class ConfigError(ValueError, AssertionError):
    """A config that contradicts itself."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(f"float8: {message}")


class ScalingType(enum.Enum):
    """Where a scale comes from. DELAYED is of torchao's releases of 2024."""

    DYNAMIC = "dynamic"
    DELAYED = "delayed"
    DISABLED = "disabled"

    def short_str(self) -> str:
        return self.value[:3]


class ScalingGranularity(enum.Enum):
    """The elements that share a scale: the tensor, or a row that the GEMM sums over.

    The blocks are not torchao's: 128 elements of such a row, or 128 of 128 rows.
    """

    TENSORWISE = "tensorwise"
    AXISWISE = "axiswise"
    BLOCK_1X128 = "block_1x128"
    BLOCK_128X128 = "block_128x128"

    def short_str(self) -> str:
        short = {
            "tensorwise": "ten",
            "axiswise": "axs",
            "block_1x128": "b1",
            "block_128x128": "b128",
        }
        return short[self.value]


@dataclasses.dataclass
class Float8TypeConfig:
    e4m3_dtype: torch.dtype = e4m3_dtype
    e5m2_dtype: torch.dtype = e5m2_dtype


type_config = Float8TypeConfig()

_FORMATS = {e4m3_dtype: Format.E4M3, e5m2_dtype: Format.E5M2}


@dataclasses.dataclass(frozen=True)
class CastConfig:
    """The cast of one tensor. target_dtype None: e4m3, and e5m2 for grad_output."""

    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    target_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        _require(
            self.scaling_granularity is ScalingGranularity.TENSORWISE
            or self.scaling_type is ScalingType.DYNAMIC,
            f"{self.scaling_granularity.value} scaling is dynamic; use ScalingType.DYNAMIC with it",
        )
        _require(
            self.target_dtype is None or self.target_dtype in _FORMATS,
            f"target_dtype is {self.target_dtype}; it is torch.float8_e4m3fn or torch.float8_e5m2",
        )

    def short_str(self) -> str:
        dtype = "e5m2" if self.target_dtype is e5m2_dtype else "e4m3"
        return f"{self.scaling_type.short_str()}_{self.scaling_granularity.short_str()}_{dtype}"


@dataclasses.dataclass(frozen=True)
class Float8GemmConfig:
    """use_fast_accum: sums stay in the tensor cores, which keep about 14 bits."""

    use_fast_accum: bool = False


@dataclasses.dataclass(frozen=True)
class DelayedScalingConfig:
    """The history of delayed scaling, as in torchao's releases of 2024."""

    history_len: int = 16
    scale_fn_name: Literal["max"] = "max"

    def __post_init__(self) -> None:
        _require(1 <= self.history_len <= 1024, f"history_len is {self.history_len}; 1 to 1024")
        _require(
            self.scale_fn_name == "max", f"scale_fn_name is {self.scale_fn_name!r}; it is 'max'"
        )


class Float8LinearRecipeName(enum.Enum):
    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"


_SCALINGS = {
    ScalingType.DYNAMIC: Scaling.DYNAMIC,
    ScalingType.DELAYED: Scaling.DELAYED,
    ScalingType.DISABLED: Scaling.HIGH_PRECISION,
}
_GRANULARITIES = {
    ScalingGranularity.TENSORWISE: Granularity.TENSOR,
    ScalingGranularity.AXISWISE: Granularity.AXIS,
    ScalingGranularity.BLOCK_1X128: Granularity.BLOCK_1X128,
    ScalingGranularity.BLOCK_128X128: Granularity.BLOCK_128X128,
}


@dataclasses.dataclass(frozen=True)
class Float8LinearConfig:
    """How the linears of a model are converted. The fields are torchao's.

    cast_config_*: the cast of a tensor for `output`, and that for the gradient which it takes part
        in where it is another.
    enable_fsdp_float8_all_gather: `fully_shard` gathers the weights in fp8.
    pad_inner_dim: in_features that are no multiple of 16 are padded with zeros.
    emulate: compute on the CPU, wherever the tensors are.
    force_recompute_fp8_weight_in_bwd: nothing is kept in fp8 between forward and backward.
    delayed_scaling_config: the history of casts with ScalingType.DELAYED.
    """

    cast_config_input: CastConfig = CastConfig()
    cast_config_input_for_grad_weight: CastConfig | None = None
    cast_config_weight: CastConfig = CastConfig()
    cast_config_weight_for_grad_input: CastConfig | None = None
    cast_config_grad_output: CastConfig = CastConfig()
    cast_config_grad_output_for_grad_weight: CastConfig | None = None
    gemm_config_output: Float8GemmConfig = Float8GemmConfig(use_fast_accum=True)
    gemm_config_grad_input: Float8GemmConfig = Float8GemmConfig()
    gemm_config_grad_weight: Float8GemmConfig = Float8GemmConfig()
    enable_fsdp_float8_all_gather: bool = False
    pad_inner_dim: bool = False
    emulate: bool = False
    force_recompute_fp8_weight_in_bwd: bool = False
    round_scales_to_power_of_2: bool = False
    delayed_scaling_config: DelayedScalingConfig = DelayedScalingConfig()

    def __post_init__(self) -> None:
        for name, gradient, dtype in (
            ("input", "grad_weight", e4m3_dtype),
            ("weight", "grad_input", e4m3_dtype),
            ("grad_output", "grad_weight", e5m2_dtype),
        ):
            self._resolve(f"cast_config_{name}", f"cast_config_{name}_for_{gradient}", dtype)
        for gemm, (first, second) in self._operands().items():
            _require(
                (first.scaling_type is ScalingType.DISABLED)
                == (second.scaling_type is ScalingType.DISABLED),
                f"incompatible operand precision for {gemm}: both operands are DISABLED or neither",
            )
        if self.enable_fsdp_float8_all_gather:
            _require(
                self.cast_config_weight.scaling_granularity is ScalingGranularity.TENSORWISE,
                "enable_fsdp_float8_all_gather needs a tensorwise weight, got "
                f"{self.cast_config_weight.scaling_granularity}",
            )
        try:
            resolve_recipe(self.recipe())
        except ValueError as error:
            raise ConfigError(str(error)) from None
        _asked.config_made()

    def _resolve(self, first: str, second: str, dtype: torch.dtype) -> None:
        """Fills in what is None: the second cast by the first one, types by the tensor's."""
        for name in (first, second):
            cast = getattr(self, name) or getattr(self, first)
            if cast.target_dtype is None:
                cast = dataclasses.replace(cast, target_dtype=dtype)
            object.__setattr__(self, name, cast)  # the class is frozen
        _require(
            getattr(self, first).target_dtype is getattr(self, second).target_dtype,
            f"{first} and {second} have different target_dtype; a tensor has one",
        )

    def _operands(self) -> dict[str, tuple[CastConfig, CastConfig]]:
        """The casts of each GEMM's operands a and b."""
        weight = self.cast_config_weight_for_grad_input
        grad_output = self.cast_config_grad_output_for_grad_weight
        input = self.cast_config_input_for_grad_weight
        assert weight is not None and grad_output is not None and input is not None
        return {
            "output": (self.cast_config_input, self.cast_config_weight),
            "grad_input": (self.cast_config_grad_output, weight),
            "grad_weight": (grad_output, input),
        }

    def recipe(self) -> Recipe:
        """Returns the casts and accumulations as a recipe."""

        def cast(of: CastConfig) -> Cast:
            if of.scaling_type is ScalingType.DISABLED:
                return Cast(Scaling.HIGH_PRECISION)
            return Cast(
                _SCALINGS[of.scaling_type],
                _GRANULARITIES[of.scaling_granularity],
                _FORMATS[of.target_dtype or e4m3_dtype],
                self.round_scales_to_power_of_2,
            )

        gemms = {}
        for name, (first, second) in self._operands().items():
            a, b = cast(first), cast(second)
            fast: bool = getattr(self, f"gemm_config_{name}").use_fast_accum
            gemms[name] = Gemm(a, b, fast and a.fp8)
        return Recipe(**gemms)

    def as_installed(self) -> Float8LinearConfig:
        """Returns the config with what install() was told, which this class by itself may refuse."""
        options = _options.installed
        if options.recipe is None and not options.enable_fsdp_float8_all_gather:
            return self
        own = self
        if options.recipe is not None:
            kept = ("emulate", "pad_inner_dim", "force_recompute_fp8_weight_in_bwd")
            fields = {each: getattr(self, each) for each in (*kept, "delayed_scaling_config")}
            own = Float8LinearConfig.from_recipe_name(options.recipe)
            own = dataclasses.replace(own, **fields)
        made = copy.copy(own)
        gathers = self.enable_fsdp_float8_all_gather or options.enable_fsdp_float8_all_gather
        object.__setattr__(made, "enable_fsdp_float8_all_gather", gathers)  # the class is frozen
        return made

    def linear_config(self) -> LinearConfig:
        recipe = self.recipe()
        return LinearConfig(
            recipe=recipe,
            emulate=bool(self.emulate),
            recompute=bool(self.force_recompute_fp8_weight_in_bwd) or None,
            pad_inner_dim=bool(self.pad_inner_dim),
            enable_fsdp_float8_all_gather=bool(self.enable_fsdp_float8_all_gather),
            # torchao allows a history without delayed scaling, which nothing reads.
            history=self.delayed_scaling_config.history_len if recipe.delayed else 16,
        )

    @staticmethod
    def from_recipe_name(recipe_name: Float8LinearRecipeName | str) -> Float8LinearConfig:
        """Returns the config of a recipe of torchao's, or of "delayed" or "blockwise"."""
        if isinstance(recipe_name, str):
            names = [*(name.value for name in Float8LinearRecipeName), "delayed", "blockwise"]
            _require(
                recipe_name in names,
                f"recipe_name is {recipe_name!r}; it is one of {', '.join(names)}",
            )
            if recipe_name == "blockwise":
                rows, square = (
                    CastConfig(scaling_granularity=granularity, target_dtype=e4m3_dtype)
                    for granularity in (
                        ScalingGranularity.BLOCK_1X128,
                        ScalingGranularity.BLOCK_128X128,
                    )
                )
                return Float8LinearConfig(
                    cast_config_input=rows,
                    cast_config_weight=square,
                    cast_config_grad_output=rows,
                    gemm_config_output=Float8GemmConfig(),
                    round_scales_to_power_of_2=True,
                )
            if recipe_name == "delayed":
                delayed = CastConfig(ScalingType.DELAYED)
                return Float8LinearConfig(
                    cast_config_input=delayed,
                    cast_config_weight=delayed,
                    cast_config_grad_output=delayed,
                )
            recipe_name = Float8LinearRecipeName(recipe_name)
        if recipe_name is Float8LinearRecipeName.TENSORWISE:
            return Float8LinearConfig()
        axis = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=e4m3_dtype)
        if recipe_name is Float8LinearRecipeName.ROWWISE:
            return Float8LinearConfig(
                cast_config_input=axis,
                cast_config_weight=axis,
                cast_config_grad_output=axis,
                round_scales_to_power_of_2=True,
            )
        _require(
            recipe_name is Float8LinearRecipeName.ROWWISE_WITH_GW_HP,
            f"recipe_name is {recipe_name!r}; it is a Float8LinearRecipeName",
        )
        disabled = CastConfig(ScalingType.DISABLED, target_dtype=e4m3_dtype)
        return Float8LinearConfig(
            cast_config_input=axis,
            cast_config_input_for_grad_weight=disabled,
            cast_config_weight=axis,
            cast_config_weight_for_grad_input=CastConfig(target_dtype=e4m3_dtype),
            cast_config_grad_output=axis,
            cast_config_grad_output_for_grad_weight=disabled,
            round_scales_to_power_of_2=True,
        )
