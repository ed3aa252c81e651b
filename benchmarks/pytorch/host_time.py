#!/usr/bin/env python3
"""Host time of one linear in eager mode, over nn.Linear's, interleaved in one run.

    host_time.py [--m 16] [--n 1024] [--k 1024] [--emulate]

It times bursts of calls that the device's queue holds, so that the device does not hold the host
up; between bursts it waits. With --emulate, on a CPU, M is 0: what is timed is the way to the
library and back.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

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
    layers: dict[str, nn.Module] = {"nn.Linear": plain}
    for recipe in ("tensorwise", "rowwise"):
        layers[recipe] = f8.Float8Linear.from_float(plain, recipe=recipe, emulate=options.emulate)
    x = torch.randn(m, options.k, dtype=dtype, device=device, requires_grad=True)
    dy = torch.randn(m, options.n, dtype=dtype, device=device)
    calls = {}
    for name, layer in layers.items():
        y = layer(x)
        inputs = (x, layer.weight)
        calls[name, "forward"] = lambda layer=layer: layer(x)
        calls[name, "backward"] = lambda y=y, inputs=inputs: torch.autograd.grad(
            y, inputs, dy, retain_graph=True
        )
    times = {key: [] for key in calls}
    for _ in range(ROUNDS):
        for key, call in calls.items():
            times[key].append(burst(call, wait))
    print(f"host time, M {m}, N {options.n}, K {options.k}, torch {torch.__version__}, us a call")
    for way in ("forward", "backward"):
        base = statistics.median(times["nn.Linear", way])
        for name in layers:
            median = statistics.median(times[name, way])
            print(f"{way:9} {name:11} {median:7.1f}  {median / base:5.2f} of nn.Linear's")


if __name__ == "__main__":
    main()
