#!/usr/bin/env python3
"""float8's casts and results against torchao's, on the same tensors.

    numerics.py [--variants tensorwise,rowwise,rowwise_with_gw_hp] [--size 2048] [--json FILE]
                [--emulate]

Casts: a GEMM with an identity gives the other operand as it was cast, as no two products meet in a
sum. The first table has, for each operand of each GEMM, how many elements differ from torchao's fp8
data, up to the sign of zeros, and, with float32 operands, by how much at most the dequantised values
differ relatively: not at all where scales are powers of two, by the roundings of the GEMM's own
scaling where they are not. Rows have different magnitudes, and one is all zeros.

Results: the signal to noise ratio of y, dx and dw of a linear against fp64, in dB, for normal data
and for x with features that are 50 times larger. The exit status is 1 where a cast differs or a
ratio is more than 0.05 dB below torchao's.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

import common
import torch
from torch import Tensor, nn

LEAST_DB = -0.05
FLOAT32_TOLERANCE = 2.0**-21
SHAPES = ((4096, 4096, 4096), (8192, 1024, 4096), (2048, 4096, 14336))  # M, N, K
TINY_SHAPES = ((64, 48, 32),)

Run = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def run_of(variant: common.Variant, emulate: bool) -> Run:
    """Returns what computes y, dx and dw of x, weight and dy."""

    def run(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n, k = weight.shape
        linear = nn.Linear(k, n, bias=False, device="meta")
        linear.weight = nn.Parameter(weight)
        layer = variant.convert(nn.Sequential(linear), emulate)
        x = x.detach().requires_grad_()
        y = layer(x)
        dx, dw = torch.autograd.grad(y, (x, linear.weight), dy)
        return y.detach(), dx, dw

    return run


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand of a GEMM, and how to see it as it was cast."""

    name: str
    config: str  # the field of torchao's config
    dim: int  # along which torchao takes an axis' maximum, for the tensor as it lies here
    seen: Callable[[Run, Tensor, Tensor], Tensor]  # from a run, the tensor and an identity


OPERANDS = (
    Operand("x in output", "input", -1, lambda run, t, one: run(t, one, one)[0]),
    Operand("w in output", "weight", -1, lambda run, t, one: run(one, t, one)[0].t()),
    Operand("dy in grad_input", "grad_output", -1, lambda run, t, one: run(one, one, t)[1]),
    Operand("w in grad_input", "weight_for_grad_input", 0, lambda run, t, one: run(one, t, one)[1]),
    Operand(
        "dy in grad_weight",
        "grad_output_for_grad_weight",
        0,
        lambda run, t, one: run(one, one, t)[2].t(),
    ),
    Operand(
        "x in grad_weight", "input_for_grad_weight", 0, lambda run, t, one: run(t, one, one)[2]
    ),
)


def torchao_cast(tensor: Tensor, operand: Operand, config: Any) -> tuple[Tensor, Tensor] | None:
    """Returns torchao's fp8 data and scale, None where the operand stays in high precision."""
    from torchao.float8 import float8_scaling_utils
    from torchao.float8.config import ScalingType
    from torchao.float8.float8_training_tensor import LinearMMConfig

    cast = getattr(config, f"cast_config_{operand.config}")
    if cast.scaling_type is ScalingType.DISABLED:
        return None
    quantised = float8_scaling_utils.hp_tensor_to_float8_dynamic(
        tensor,
        cast.target_dtype,
        LinearMMConfig(),
        scaling_granularity=cast.scaling_granularity,
        axiswise_dim=float8_scaling_utils.get_maybe_axiswise_dim(
            operand.dim, cast.scaling_granularity
        ),
        round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )
    return quantised._data, quantised._scale


def compare_cast(
    operand: Operand, config: Any, run: Run, tensor: Tensor
) -> tuple[int, float] | None:
    """Returns how many elements differ, and the largest relative difference."""
    expected = torchao_cast(tensor, operand, config)
    if expected is None:
        return None
    data, scale = expected[0].double(), expected[1].double()
    one = torch.eye(tensor.shape[0], dtype=tensor.dtype, device=tensor.device)
    seen = operand.seen(run, tensor, one).double()
    own = (seen * scale).float().to(expected[0].dtype).double()
    relative = ((seen * scale - data) / data)[data != 0].abs().max()
    return int((own != data).sum()), float(relative)


def rows_of_magnitudes(size: int, dtype: torch.dtype, device: str) -> Tensor:
    magnitudes = torch.logspace(-12, 6, size, base=2, device=device)[:, None]
    tensor = torch.randn(size, size, device=device) * magnitudes
    tensor[size // 2] = 0
    return tensor.to(torch.bfloat16).to(dtype)


def casts(recipe: str, size: int, device: str) -> list[list[str]]:
    """Returns the rows of the table of casts."""
    import torchao.float8

    config = torchao.float8.Float8LinearConfig.from_recipe_name(recipe)
    run = run_of(common.Variant("float8", recipe, compiled=False), device == "cpu")
    rows = []
    for operand in OPERANDS:
        for dtype in (torch.bfloat16, torch.float32):
            tensor = rows_of_magnitudes(size, dtype, device)
            found = compare_cast(operand, config, run, tensor)
            if found is None:
                continue
            different, relative = found
            exact = different == 0 and (dtype != torch.float32 or relative < FLOAT32_TOLERANCE)
            relative_text = f"{relative:.1e}" if dtype == torch.float32 else ""
            kind = str(dtype).removeprefix("torch.")
            verdict = "same" if exact else "DIFFERENT"
            rows.append([recipe, operand.name, kind, str(different), relative_text, verdict])
    return rows


def decibels(actual: Tensor, exact: Tensor) -> float:
    error = (actual.double() - exact).norm()
    return 20 * math.log10(float(exact.norm() / error))


def ratios(
    recipe: str, shape: tuple[int, int, int], outliers: bool, device: str
) -> list[list[str]]:
    """Returns the rows of the table of results for a shape."""
    m, n, k = shape
    x, weight, dy = (
        torch.randn(rows, columns, device=device) for rows, columns in ((m, k), (n, k), (m, n))
    )
    if outliers:
        x[:, torch.randperm(k, device=device)[: max(1, k // 1000)]] *= 50
    x, weight, dy = x.bfloat16(), (weight / k**0.5).bfloat16(), dy.bfloat16()
    exact = (
        x.double() @ weight.double().t(),
        dy.double() @ weight.double(),
        dy.double().t() @ x.double(),
    )
    found = []
    for library in ("float8", "torchao"):
        run = run_of(common.Variant(library, recipe, compiled=False), device == "cpu")
        results = run(x, weight, dy)
        found.append([decibels(own, e) for own, e in zip(results, exact, strict=True)])
    rows = []
    for name, own, theirs in zip(("y", "dx", "dw"), *found, strict=True):
        verdict = "no lower" if own - theirs >= LEAST_DB else "LOWER"
        cell = f"{m},{n},{k}" + (" outliers" if outliers else "")
        texts = (f"{db:.2f}" for db in (own, theirs, own - theirs))
        rows.append([recipe, cell, name, *texts, verdict])
    return rows


def main() -> int:
    known = {
        recipe: common.Variant("float8", recipe, compiled=False)
        for recipe in common.TORCHAO_RECIPES
    }
    parser = common.parser(__doc__, known)
    parser.add_argument("--size", type=int, default=0, help="of the square casts, default 2048")
    options = parser.parse_args()
    recipes = [variant.recipe for variant in common.chosen(options.variants, known, based=False)]
    device = common.device_of(options)
    torch.manual_seed(0)
    try:
        import torchao
    except ModuleNotFoundError as error:
        print(common.reason(error))
        return 0
    size = options.size or (64 if options.emulate else 2048)
    print(common.headline(f"against torchao {torchao.__version__}", device), flush=True)
    cast_rows = [row for recipe in recipes for row in casts(recipe, size, device)]
    header = ["recipe", "operand", "type", "different", "relative", "verdict"]
    common.print_table(header, cast_rows)
    print()
    shapes = TINY_SHAPES if options.emulate else SHAPES
    ratio_rows = [
        row
        for recipe in recipes
        for shape in shapes
        for outliers in (False, True)
        for row in ratios(recipe, shape, outliers, device)
    ]
    header = ["recipe", "M,N,K", "result", "float8 dB", "torchao dB", "difference", "verdict"]
    common.print_table(header, ratio_rows)
    common.write_json(options.json, {"casts": cast_rows, "results": ratio_rows})
    return int(any(row[-1] in ("DIFFERENT", "LOWER") for row in cast_rows + ratio_rows))


if __name__ == "__main__":
    sys.exit(main())
