#!/usr/bin/env python3
"""Forward and backward of single linears under torch.compile and CUDA graphs, over bf16.

    linears.py [--variants LIST] [--tokens 2048,8192,16384] [--shapes SHAPES.csv] [--seconds 1]
               [--tuner RESULTS.csv] [--json FILE] [--write-shapes SHAPES.csv] [--emulate]

The shapes are those of the project's table of linears. Operand sets rotate, as many as two L2 caches
cannot hold and at least 2; forward and backward of all sets are one CUDA graph, and the graphs of
all variants are timed in rounds. A shape's row has the time of one linear in bf16 and the
median speedups over it; the end has geometric means. torchao compiles for seconds a shape, so give
one number of tokens a run where time is short. To compare with the tuner on the same machine:

    linears.py --write-shapes shapes.csv
    float8-tune bench linear --shapes shapes.csv --no-tune --seconds 0.09 --csv results.csv \\
        --recipe tensorwise,rowwise,rowwise_with_gw_hp,delayed,blockwise
    linears.py --shapes shapes.csv --tuner results.csv

Then each speedup is followed by the quotient of it and the tuner's. Weights' casts are in all times,
the update of delayed scales, which a model has once, in none.
"""

from __future__ import annotations

import csv
import gc
import pathlib
import statistics
import sys
from collections.abc import Callable

import common
import torch
from torch import nn

import float8.torch as f8

TOKENS = (2048, 8192, 16384)
SIZES = (  # in_features, out_features
    (8192, 8192),
    (4096, 4096),
    (8192, 1024),
    (4096, 1024),
    (2048, 2048),
    (1024, 1024),
    (4096, 14336),
    (14336, 4096),
    (8192, 28672),
    (5120, 13824),
)
TINY_SHAPES = ((32, 48, 64), (16, 64, 32))
MOST_SETS = 32

Shape = tuple[int, int, int]  # M, N, K


class Operands:
    """Sets of x, weight and dy that all variants share."""

    def __init__(self, shape: Shape, device: str) -> None:
        m, n, k = shape
        cached = torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 0
        count = min(MOST_SETS, max(2, -(-2 * cached // (2 * (m * k + n * k + m * n)))))

        def random(*sizes: int) -> list[torch.Tensor]:
            return [
                torch.rand(sizes, device=device).mul_(2).sub_(1).bfloat16() for _ in range(count)
            ]

        self.x = [x.requires_grad_() for x in random(m, k)]
        self.weights = [nn.Parameter(weight) for weight in random(n, k)]
        self.dy = random(m, n)
        self.count = count

    def linears(self) -> nn.ModuleList:
        layers = nn.ModuleList()
        for weight in self.weights:
            n, k = weight.shape
            layer = nn.Linear(k, n, bias=False, device="meta")
            layer.weight = weight
            layers.append(layer)
        return layers


def of_a_layer(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = layer(x)
    return y


def make_round(variant: common.Variant, operands: Operands, emulate: bool) -> Callable[[], None]:
    """Returns forward and backward of all sets, as a CUDA graph where there is a device."""
    layers = variant.convert(operands.linears(), emulate)
    if variant.library == "float8":
        f8.prepare(layers, len(operands.dy[0]))  # kernels are compiled side by side
    call = variant.callable(of_a_layer, emulate)

    def once() -> None:
        # The scale state of delayed scaling is one more module behind the layers.
        for layer, x, dy in zip(layers.children(), operands.x, operands.dy, strict=False):
            torch.autograd.grad(call(layer, x), (x, layer.weight), dy)

    if emulate:
        once()
        return once
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            once()
            variant.end_of_step(layers)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    return graph.replay


def measure(
    shape: Shape, variants: list[common.Variant], options: common.Options, device: str
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Returns the samples of each variant, in us a linear, and why others have none."""
    torch.compiler.reset()
    operands = Operands(shape, device)
    rounds: dict[str, Callable[[], None]] = {}
    failures: dict[str, str] = {}
    for variant in variants:
        try:
            rounds[variant.name] = make_round(variant, operands, options.emulate)
        except Exception as error:
            failures[variant.name] = common.reason(error)
    times = common.interleaved(rounds, 0 if options.emulate else options.seconds, 15)
    of_a_linear = 1e3 / operands.count
    return {name: [ms * of_a_linear for ms in own] for name, own in times.items()}, failures


def read_shapes(path: str) -> list[Shape]:
    with open(path, newline="") as file:
        return [(int(row["m"]), int(row["n"]), int(row["k"])) for row in csv.DictReader(file)]


def read_tuner(path: str) -> dict[tuple[Shape, str], float]:
    """Speedups of `float8-tune bench linear --csv` by shape and recipe."""
    with open(path, newline="") as file:
        return {
            ((int(row["m"]), int(row["n"]), int(row["k"])), row["recipe"]): float(row["speedup"])
            for row in csv.DictReader(file)
            if row["speedup"]
        }


def shapes_of(options: common.Options) -> list[Shape]:
    if options.shapes:
        return read_shapes(options.shapes)
    if options.emulate:
        return list(TINY_SHAPES)
    tokens = [int(m) for m in options.tokens.split(",")] if options.tokens else TOKENS
    return [(m, n, k) for m in tokens for k, n in SIZES]


def print_row(key: str, cells: list[str], names: list[str]) -> None:
    aligned = (f"{cell:>{max(13, len(name))}}" for cell, name in zip(cells, names, strict=True))
    print(f"{key:17}", *aligned, flush=True)


def summary(
    names: list[str], speedups: dict[str, dict[Shape, float]], tuner: dict[tuple[Shape, str], float]
) -> None:
    """Prints the geometric mean of each variant, and that of the quotients with the tuner's."""
    rows = []
    for name in names:
        own = speedups[name]
        if not own:
            continue
        over_tuner = [s / tuner[shape, name] for shape, s in own.items() if (shape, name) in tuner]
        mean = f"{statistics.geometric_mean(over_tuner):.3f}" if over_tuner else "-"
        least = f"{min(over_tuner):.3f}" if over_tuner else "-"
        faster = f"{sum(s >= 1 for s in own.values())} of {len(own)}"
        geometric = f"{statistics.geometric_mean(own.values()):.3f}"
        rows.append([name, geometric, faster, f"{min(own.values()):.3f}", mean, least])
    print()
    header = ["variant", "geometric mean", "at 1.00", "worst", "over tuner's", "worst of it"]
    common.print_table(header, rows)


def main() -> int:
    known = common.variants(eager=False)
    parser = common.parser(__doc__, known)
    parser.add_argument("--tokens", default="", help=f"default {','.join(map(str, TOKENS))}")
    parser.add_argument("--shapes", metavar="CSV", help="shapes, with columns m, n and k")
    parser.add_argument("--write-shapes", metavar="CSV", help="write the shapes and end")
    parser.add_argument("--tuner", metavar="CSV", help="of float8-tune bench linear")
    parser.add_argument("--seconds", type=float, default=1, help="of measuring, for each shape")
    options = parser.parse_args()
    shapes = shapes_of(options)
    if options.write_shapes:
        lines = ["m,n,k", *(",".join(map(str, shape)) for shape in shapes)]
        pathlib.Path(options.write_shapes).write_text("\n".join(lines) + "\n")
        return 0
    variants = common.chosen(options.variants, known)
    tuner = read_tuner(options.tuner) if options.tuner else {}
    device = common.device_of(options)
    title = f"{len(shapes)} linears, forward and backward, compiled, as CUDA graphs"
    print(common.headline(title, device), flush=True)
    names = [variant.name for variant in variants]
    speedups: dict[str, dict[Shape, float]] = {name: {} for name in names}
    us_of_shapes: dict[str, dict[str, list[float]]] = {}
    failures: dict[str, str] = {}
    print_row("M,N,K", ["bf16 us", *names[1:]], names)
    for shape in shapes:
        times, failed = measure(shape, variants, options, device)
        failures.update(failed)
        if names[0] not in times:
            sys.exit(f"{names[0]}: {failed[names[0]]}")
        base = times[names[0]]
        texts = []
        for name in names[1:]:
            if name not in times:
                texts.append("-")
                continue
            speedups[name][shape] = common.ratio(base, times[name])
            text = f"{speedups[name][shape]:.3f}"
            if (shape, name) in tuner:
                text += f" ({speedups[name][shape] / tuner[shape, name]:.3f})"
            texts.append(text)
        key = ",".join(map(str, shape))
        us_of_shapes[key] = times
        common.write_json(options.json, {"us": us_of_shapes, "failures": failures, "title": title})
        print_row(key, [f"{statistics.median(base):.1f}", *texts], names)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    summary(names[1:], speedups, tuner)
    for name, text in failures.items():
        print(f"{name}: {text}")
    return common.status(failures)


if __name__ == "__main__":
    sys.exit(main())
