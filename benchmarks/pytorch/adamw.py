#!/usr/bin/env python3
"""A step of AdamW and the casts of the weights behind it: torch's fused kernel and float8's, in one run.

    adamw.py [--variants LIST] [--blocks 4] [--seconds 2] [--json FILE] [--emulate]

The weights are those of the linears of Llama-3-8B blocks, whose fp8 copies `cache_weight_casts` keeps. With
torch.optim.AdamW the casts read the updated weights, their bytes first, then their maxima; float8.torch.AdamW leaves
both as it updates them, and makes the copies of blockwise itself. The variants, a recipe and the weights' dtype, are timed in turn. GB/s are those of the bytes that
float8's has to move: gradients read, weights and both states read and written, both copies written, and weights
read once more where the cast has to know their maxima first.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import common
import torch
from torch import nn

import float8.torch as f8

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
RECIPES = ("tensorwise", "rowwise", "blockwise")


def step_of(
    recipe: str, dtype: torch.dtype, optimizer: type[torch.optim.Optimizer], options: common.Options
) -> tuple[Callable[[], None], float]:
    """Returns a call that steps and casts, and the GB that it has to move."""
    device = "cpu" if options.emulate else "cuda"
    model: nn.Module = common.blocks(options.blocks, 64, device, options.emulate).to(dtype)
    config = f8.LinearConfig(recipe=recipe, emulate=options.emulate)
    f8.convert_to_float8_training(model, config=config)
    weights = [m.weight for m in model.modules() if isinstance(m, f8.Float8Linear)]
    copies = f8.cache_weight_casts(model, dtype=torch.bfloat16)
    for weight in weights:
        weight.grad = torch.randn_like(weight) * 1e-3
    stepped = optimizer(weights, lr=1e-5, fused=True)  # type: ignore[call-arg]
    own = isinstance(stepped, f8.AdamW)

    def step() -> None:
        stepped.step()
        if not own:
            copies.update()

    read_again = 0 if recipe == "blockwise" else dtype.itemsize
    bytes_of_element = 7 * dtype.itemsize + 2 + read_again
    return step, sum(w.numel() for w in weights) * bytes_of_element / 1e9


def main() -> int:
    known = [f"{recipe}-{name}" for name in DTYPES for recipe in RECIPES]
    parser = common.parser(__doc__, known)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2, help="of a variant")
    options = parser.parse_args()
    device = common.device_of(options)
    print(common.headline(f"linears of {options.blocks} Llama-3-8B blocks", device))
    table, figures = [], {}
    for variant in common.names_of(options.variants, known):
        recipe, _, name = variant.rpartition("-")
        steps = {}
        for key, optimizer in (("torch", torch.optim.AdamW), ("float8", f8.AdamW)):
            steps[key], gigabytes = step_of(recipe, DTYPES[name], optimizer, options)
            for _ in range(2):
                steps[key]()
        times = common.interleaved(steps, 0 if options.emulate else options.seconds, 20)
        ms = [statistics.median(times[key]) for key in steps]
        figures[variant] = times
        ratio = common.ratio(times["torch"], times["float8"])
        row = [f"{ms[0]:.3f}", f"{ms[1]:.3f}", f"{ratio:.3f}", f"{gigabytes / ms[1] * 1e3:.0f}"]
        table.append([variant, *row])
        del steps
    common.print_table(["ms", "torch", "float8", "times as fast", "GB/s"], table)
    common.write_json(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
