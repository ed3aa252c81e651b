#!/usr/bin/env python3
"""Host time of a linear, and of a layer of experts, in eager mode, over PyTorch's, interleaved in one run.

    host_time.py [--m 16] [--n 1024] [--k 1024] [--emulate]

The layer has 8 experts of N features, two of them for each of the M tokens, and is compared with the one of
bf16_experts.py. It times bursts of calls that the device's queue holds, so that the device does not hold the host
up; between bursts it waits. With --emulate, on a CPU, M is 0: what is timed is the way to the
library and back.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import bf16_experts
import torch
from torch import nn

import float8.torch as f8

BURST = 50
ROUNDS = 40


def burst(call: Callable[[], object], wait: Callable[[], None]) -> float:
    wait()
    begin = time.perf_counter()
    for _ in range(BURST):
        call()
    return (time.perf_counter() - begin) / BURST * 1e6


def both_ways(
    layers: dict[str, Callable[..., torch.Tensor]],
    operands: tuple[torch.Tensor, ...],
    leaves: tuple[torch.Tensor, ...],
    features: int,
) -> dict[tuple[str, str], Callable[[], object]]:
    """Returns the forward of each layer, and the backward of a graph that is kept."""
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    x = operands[0]
    dy = torch.randn(x.shape[0], features, dtype=x.dtype, device=x.device)
    for name, layer in layers.items():
        y = layer(*operands)
        calls[name, "forward"] = functools.partial(layer, *operands)
        calls[name, "backward"] = functools.partial(
            torch.autograd.grad, y, leaves, dy, retain_graph=True
        )
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("m", 16), ("n", 1024), ("k", 1024)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--emulate", action="store_true")
    options = parser.parse_args()
    device = "cpu" if options.emulate else "cuda"
    m = 0 if options.emulate else options.m
    wait = (lambda: None) if options.emulate else torch.cuda.synchronize
    torch.set_num_threads(1)
    dtype = torch.bfloat16
    plain = nn.Linear(options.k, options.n, bias=False, dtype=dtype, device=device)
    layers: dict[str, Callable[..., torch.Tensor]] = {"nn.Linear": plain}
    for recipe in ("tensorwise", "rowwise"):
        layers[recipe] = f8.Float8Linear.from_float(plain, recipe=recipe, emulate=options.emulate)
    x = torch.randn(m, options.k, dtype=dtype, device=device, requires_grad=True)
    calls = both_ways(layers, (x,), (x, plain.weight), options.n)
    shapes = ((8, 2 * options.n, options.k), (8, options.k, options.n))
    weights = [torch.randn(s, dtype=dtype, device=device, requires_grad=True) for s in shapes]
    scores = torch.rand(m, 2, device=device, requires_grad=True)
    ids = torch.arange(2 * m, device=device).view(m, 2) % 8
    mixtures: dict[str, Callable[..., torch.Tensor]] = {"bf16 experts": bf16_experts.moe}
    for recipe in ("tensorwise", "rowwise"):
        mixtures[f"experts, {recipe}"] = functools.partial(
            f8.functional.moe, recipe=recipe, emulate=options.emulate
        )
    operands = (x, ids, scores, *weights)
    calls.update(both_ways(mixtures, operands, (x, scores, *weights), options.k))
    times = {key: [] for key in calls}
    for _ in range(ROUNDS):
        for key, call in calls.items():
            times[key].append(burst(call, wait))
    print(f"host time, M {m}, N {options.n}, K {options.k}, torch {torch.__version__}, us a call")
    for names in (layers, mixtures):
        first = next(iter(names))
        for way in ("forward", "backward"):
            base = statistics.median(times[first, way])
            for name in names:
                median = statistics.median(times[name, way])
                print(f"{way:9} {name:20} {median:7.1f}  {median / base:5.2f} times {first}")


if __name__ == "__main__":
    main()
