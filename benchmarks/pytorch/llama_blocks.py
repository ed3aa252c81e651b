#!/usr/bin/env python3
"""Forward and backward of Llama-3-8B blocks: bf16, torchao and float8, interleaved in one run.

    llama_blocks.py [--variants bf16,rowwise,torchao-rowwise-eager,...] [--blocks 2] [--mlps] [--tokens 8192]
                    [--seconds 60] [--profile FOLDER] [--json FILE] [--emulate]

Every variant is a model of its own with the same random parameters, and runs in every round: one
step fills the device's queue, and CUDA events time those behind it. x and dy are random and differ
from step to step; gradients are None before each step. The table has the median and the quartiles
of a step, how many times faster than compiled bf16 it is (the median over the rounds), and the wall
time of the first step, in which torch.compile and the kernels' compiler run. float8's eager variants
find the kernels of the compiled ones. With --mlps a block is x + mlp(norm(x)), without attention. --profile writes a trace of some steps of each variant, and
prints where their time on the device goes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import common
import kernel_times
import torch

POOL = 4  # pairs of x and dy


class Mlp(torch.nn.Module):
    """A block without its attention."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = block.mlp_norm, block.mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.mlp(self.norm(x))
        return y


def make_model(options: common.Options, tokens: int, device: str) -> torch.nn.Module:
    model = common.blocks(options.blocks, tokens, device, options.emulate)
    return torch.nn.Sequential(*map(Mlp, model.blocks)) if options.mlps else model


def make_step(
    variant: common.Variant,
    model: torch.nn.Module,
    pool: list[tuple[torch.Tensor, torch.Tensor]],
    emulate: bool,
) -> Callable[[], None]:
    """Returns one step of the variant: forward and backward."""
    model = variant.convert(model, emulate)
    call = variant.callable(model, emulate)
    count = 0

    def step() -> None:
        nonlocal count
        x, dy = pool[count % len(pool)]
        count += 1
        model.zero_grad(set_to_none=True)
        call(x.detach().requires_grad_()).backward(dy)
        variant.end_of_step(model)

    return step


def main() -> int:
    known = common.variants(keep=True, fused=True)
    parser = common.parser(__doc__, known)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--mlps", action="store_true", help="the MLPs alone, with norm and sum")
    parser.add_argument("--tokens", type=int, default=0, help="default 8192")
    parser.add_argument("--seconds", type=float, default=60, help="of measuring, without compiling")
    parser.add_argument("--profile", metavar="FOLDER")
    options = parser.parse_args()
    variants = common.chosen(options.variants, known)
    device = common.device_of(options)
    tokens = options.tokens or (32 if options.emulate else 8192)
    shape = (1, tokens, common.width(options.emulate))
    pool = [
        (torch.randn(shape, device=device).bfloat16(), torch.randn(shape, device=device).bfloat16())
        for _ in range(POOL)
    ]
    parts = "MLPs of Llama-3-8B with norm and residual" if options.mlps else "Llama-3-8B blocks"
    title = f"{options.blocks} {parts}, 1 x {tokens} tokens, forward and backward"
    print(common.headline(title, device), flush=True)
    steps: dict[str, Callable[[], None]] = {}
    first: dict[str, float] = {}
    failures: dict[str, str] = {}
    with common.attention():
        for variant in variants:
            try:
                model = make_model(options, tokens, device)
                step = make_step(variant, model, pool, options.emulate)
                first[variant.name] = common.seconds(step)
                common.seconds(step)
                steps[variant.name] = step
            except Exception as error:  # the other variants are measured still
                failures[variant.name] = common.reason(error)
            print(f"  {variant.name}: ready", file=sys.stderr, flush=True)
        if variants[0].name in failures:
            sys.exit(f"{variants[0].name}: {failures[variants[0].name]}")
        times = common.interleaved(steps, 0 if options.emulate else options.seconds, 120)
        traces = {}
        if options.profile:
            traces = kernel_times.trace_all(options.profile, steps)
    base = times[variants[0].name]
    rows = []
    for name, samples in times.items():
        spread = common.Spread.of(samples)
        milliseconds = (f"{ms:.2f}" for ms in (spread.median, spread.low, spread.high))
        rows.append(
            [name, *milliseconds, f"{common.ratio(base, samples):.3f}", f"{first[name]:.1f}"]
        )
    rows += [[name, text] for name, text in failures.items()]
    common.print_table(["variant", "ms", "25 %", "75 %", "over bf16", "first step s"], rows)
    print(f"rounds: {len(base)}")
    kernel_times.print_traces(traces, 16)
    common.write_json(
        options.json, {"ms": times, "first_step_s": first, "failures": failures, "title": title}
    )
    return common.status(failures)


if __name__ == "__main__":
    sys.exit(main())
