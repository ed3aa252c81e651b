#!/usr/bin/env python3
"""A small MLP with its norm and residual, x + down(gelu(up(norm(x)))), over compiled bf16: forward and backward.

    small_mlp.py [--variants LIST] [--norm layer|rms] [--sizes '1024x1024;1024x4096;2048x8192'] [--tokens 2048,8192]
        [--seconds 1] [--profile FOLDER] [--json FILE] [--emulate]

A size is the model's width and the MLP's. Every variant is compiled, and runs in a CUDA graph, as small layers are bound by the host else.
-fused is with float8.torch.fuse, -norms with the norm too. -keep keeps the copies of forward for backward, as is the default of
small weights, and -again casts again.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable

import common
import kernel_times
import torch
from torch import Tensor, nn
from torch.nn import functional

import float8.torch as f8

NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(functional.gelu(self.up(x)))
        return y


class Layer(nn.Module):
    def __init__(self, norm: str, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.mlp = NORMS[norm](dim), Mlp(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mlp(self.norm(x))
        return y


f8.register_mlp(Mlp, up="up", down="down", activation="gelu")


def step_of(
    variant: common.Variant, size: tuple[int, int], tokens: int, options: common.Options
) -> Callable[[], None]:
    """Returns a call of forward and backward: on a GPU a replay of their CUDA graph."""
    torch.manual_seed(0)
    device = "cpu" if options.emulate else "cuda"
    layer: nn.Module = Layer(options.norm, *size).to(device, torch.bfloat16)
    layer = variant.convert(layer, options.emulate)
    call = variant.callable(layer, options.emulate)
    x, dy = (torch.randn(tokens, size[0], device=device).bfloat16() for _ in range(2))
    x.requires_grad_()

    def step() -> None:
        for leaf in (x, *layer.parameters()):
            leaf.grad = None
        call(x).backward(dy)

    for _ in range(3):
        step()
        variant.end_of_step(layer)
    if options.emulate:
        return step
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(_kept: Callable[[], None] = step) -> None:  # the graph does not keep what it reads
        graph.replay()

    return replay


def main() -> int:
    known = {"bf16": common.Variant("bf16")}
    for recipe in ("tensorwise", "rowwise", "delayed", "blockwise"):
        plain = common.Variant("float8", recipe)
        fused = dataclasses.replace(plain, fuse=True)
        own = [plain, *(dataclasses.replace(fused, recompute=each) for each in (None, True, False))]
        if recipe != "delayed":
            own.append(dataclasses.replace(plain, fuse=True, norms=True))
        known.update({variant.name: variant for variant in own})
    parser = common.parser(__doc__, known)
    parser.add_argument("--norm", choices=NORMS, default="layer")
    parser.add_argument("--sizes", default="1024x1024;1024x4096;2048x8192")
    parser.add_argument("--tokens", default="2048,8192")
    parser.add_argument("--seconds", type=float, default=1, help="of a size")
    parser.add_argument("--profile", metavar="FOLDER")
    options = parser.parse_args()
    device = common.device_of(options)
    if options.emulate:
        options.sizes, options.tokens = "128x128", "128"
    print(common.headline(f"MLP with its {options.norm} norm, forward + backward", device))
    figures = {}
    for text in options.sizes.split(";"):
        size = tuple(int(each) for each in text.split("x"))
        if len(size) != 2:
            sys.exit(f"{text!r} is no size; it is written as 1024x4096")
        for tokens in map(int, options.tokens.split(",")):
            steps, failures = {}, {}
            for variant in common.chosen(options.variants, known):
                try:
                    steps[variant.name] = step_of(variant, size, tokens, options)
                except Exception as error:
                    failures[variant.name] = common.reason(error)
            times = common.interleaved(steps, 0 if options.emulate else options.seconds, 5)
            base = times["bf16"]
            rows = [
                [name, f"{statistics.median(own) * 1e3:.1f}", f"{common.ratio(base, own):.3f}"]
                for name, own in times.items()
            ]
            rows += [[name, words] for name, words in failures.items()]
            common.print_table([f"{text}, {tokens} tokens", "us", "over bf16"], rows)
            figures[f"{text}-{tokens}"] = times
            if options.profile:
                traces = kernel_times.trace_all(options.profile, steps, f"{text}-{tokens}-")
                kernel_times.print_traces(traces, 24)
    common.write_json(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
