"""A step's time on the device by kernel, from PyTorch's profiler."""

from __future__ import annotations

import collections
import json
import pathlib
from collections.abc import Callable, Mapping

import common
import torch
from torch import distributed

STEPS = 3
# The kinds of kernels and what their names have; the first that fits counts.
_KINDS = {
    "collectives": ("nccl",),
    "fp8 GEMMs, ours": ("float8_gemm",),
    "attention": (
        "flash",
        "fmha",
        "sdpa",
        "float8_attention_forward",
        "float8_attention_backward_d",
    ),
    "casts, amaxes": ("float8_",),
    "GEMMs": ("nvjet", "gemm", "cutlass"),
    "Inductor's": ("triton",),
    "optimizer": ("adam", "multi_tensor"),
}


def kind(name: str) -> str:
    """Returns the kind of a kernel of that name."""
    low = name.lower()
    found = (each for each, parts in _KINDS.items() if any(part in low for part in parts))
    return next(found, "others")


def trace(step: Callable[[], None], file: pathlib.Path) -> dict[str, tuple[float, float]]:
    """Writes a trace of some steps; returns ms and launches a step of each kernel and copy."""
    step()
    common.wait()
    with torch.profiler.profile() as profile:
        for _ in range(STEPS):
            step()
        common.wait()
    profile.export_chrome_trace(str(file))
    found: dict[str, list[float]] = collections.defaultdict(list)
    for event in json.loads(file.read_text())["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            found[event["name"]].append(event["dur"])
    return {name: (sum(us) / 1e3 / STEPS, len(us) / STEPS) for name, us in found.items()}


def trace_all(
    folder: str | pathlib.Path, steps: Mapping[str, Callable[[], None]], title: str = ""
) -> dict[str, dict[str, tuple[float, float]]]:
    """Writes a trace of each variant's steps to `folder`; returns what trace does of each."""
    to = pathlib.Path(folder)
    to.mkdir(parents=True, exist_ok=True)
    return {name: trace(step, to / f"{title}{name}.json") for name, step in steps.items()}


def print_traces(traces: Mapping[str, Mapping[str, tuple[float, float]]], most: int) -> None:
    """Prints the kinds of kernels of all variants, and the longest kernels of each."""
    print_kinds(traces)
    for name, kernels in traces.items():
        print_longest(name, kernels, most)


def profile(folder: str, name: str, call: Callable[[], None]) -> None:
    """Writes a trace of one call, of rank 0."""
    with torch.profiler.profile() as found:
        call()
        common.wait()
    if distributed.get_rank() == 0:
        found.export_chrome_trace(f"{folder}/{name}.json")


def print_kinds(traces: Mapping[str, Mapping[str, tuple[float, float]]]) -> None:
    """Prints ms a step by kind of kernel, a column for each variant."""
    totals = {variant: collections.Counter[str]() for variant, kernels in traces.items() if kernels}
    if not totals:
        return
    for variant, total in totals.items():
        for name, (ms, _) in traces[variant].items():
            total[kind(name)] += ms  # type: ignore[assignment]
    rows = [
        [each, *(f"{total[each]:.2f}" for total in totals.values())]
        for each in (*_KINDS, "others")
        if any(total[each] for total in totals.values())
    ]
    rows.append(["all", *(f"{sum(total.values()):.2f}" for total in totals.values())])
    common.print_table(["ms a step by kernels", *totals], rows)


def print_longest(variant: str, kernels: Mapping[str, tuple[float, float]], most: int) -> None:
    """Prints the kernels that take longest in a step."""
    longest = sorted(kernels.items(), key=lambda item: -item[1][0])[:most]
    rows = [[name[:70], f"{ms:.3f}", f"{count:.0f}"] for name, (ms, count) in longest]
    if rows:
        common.print_table([variant, "ms a step", "launches"], rows)
