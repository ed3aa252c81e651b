#!/usr/bin/env python3
"""The grouped GEMMs of experts alone, without casts: ours and torch's, in bf16 and fp8.

    grouped_gemms.py [--shapes M,K,N,E[;...]] [--routing even,zipf] [--rounds 12] [--json FILE]

A row is a GEMM of experts with M rows in all, in_features K and out_features N. Times are those of the
kernels, from the profiler, with fresh random data and a cold L2; the GEMMs are timed in rounds, and a
figure is TFLOP/s at the median. torch fp8 is torch._scaled_grouped_mm with scales of rows and fast
accumulation. Of ours, output and grad_input are rowwise, and grad_weight has fast accumulation
(tensorwise) and precise (rowwise); float8 bf16 is the recipe bf16. Groups are whole 16s, as torch's fp8 wants them.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable

import common
import torch
from torch.nn import functional

import float8.torch as f8

SHAPES = (
    "65536,2048,768,128;65536,768,2048,128;65536,7168,2048,64;16640,5120,8192,16;"
    "32768,2048,7168,8;32768,7168,2048,8"
)
FLUSHED = 256 << 20  # bytes, several times an L2
OURS = "float8_gemm"
Calls = dict[str, Callable[[], object]]


def ends(m: int, experts: int, routing: str) -> torch.Tensor:
    """The end of each expert's rows, in whole 16s."""
    odds = torch.ones(experts) if routing == "even" else 1 / torch.arange(1, experts + 1)
    blocks = torch.multinomial(odds, m // 16, replacement=True).bincount(minlength=experts)
    if routing == "even":
        blocks = torch.full((experts,), m // 16 // experts)
    return (blocks * 16).cumsum(0).int().cuda()


def calls_of(m: int, k: int, n: int, experts: int, offs: torch.Tensor) -> Calls:
    """The GEMMs by name; those of ours come with their casts."""
    torch.manual_seed(0)
    x, dy = (torch.randn(m, each, device="cuda").bfloat16() for each in (k, n))
    w = torch.randn(experts, n, k, device="cuda").mul_(0.02).bfloat16()
    q = torch.float8_e4m3fn
    xq, wq, dyq = x.to(q), w.to(q), dy.to(q)
    wqt = wq.transpose(-2, -1).contiguous().transpose(-2, -1)
    xqt, dyqt = xq.t().contiguous(), dyq.t().contiguous()

    def ones(*sizes: int) -> torch.Tensor:
        return torch.ones(sizes, device="cuda")

    fast = {"offs": offs, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    scaled = torch._scaled_grouped_mm
    row, of_n, of_k = ones(m), ones(experts, n), ones(experts, k)
    calls: Calls = {
        "output bf16": lambda: functional.grouped_mm(x, w.transpose(-2, -1), offs=offs),
        "output torch": lambda: scaled(xq, wq.transpose(-2, -1), row, of_n, **fast),
        "grad_input bf16": lambda: functional.grouped_mm(dy, w, offs=offs),
        "grad_input torch": lambda: scaled(dyq, wqt, row, of_k, **fast),
        "grad_weight bf16": lambda: functional.grouped_mm(dy.t(), x, offs=offs),
        "grad_weight torch": lambda: scaled(dyqt, xqt.t(), of_n.flatten(), of_k.flatten(), **fast),
    }

    def ours(recipe: str, of_x: bool, of_w: bool) -> Callable[[], object]:
        own_x, own_w = x.detach().requires_grad_(of_x), w.detach().requires_grad_(of_w)
        y = f8.grouped_mm(own_x, own_w.transpose(-2, -1), offs, recipe=recipe)
        return lambda: torch.autograd.grad(y, own_x if of_x else own_w, dy, retain_graph=True)

    def output(recipe: str) -> object:
        with torch.no_grad():
            return f8.grouped_mm(x, w.transpose(-2, -1), offs, recipe=recipe)

    calls["output float8"] = lambda: output("rowwise")
    calls["output float8 bf16"] = lambda: output("bf16")
    calls["grad_input float8"] = ours("rowwise", of_x=True, of_w=False)
    calls["grad_weight float8"] = ours("tensorwise", of_x=False, of_w=True)
    calls["grad_weight float8 precise"] = ours("rowwise", of_x=False, of_w=True)
    for gemm, of_x in (("grad_input", True), ("grad_weight", False)):
        calls[f"{gemm} float8 bf16"] = ours("bf16", of_x=of_x, of_w=not of_x)
    return calls


def kernel_times(calls: Calls, rounds: int) -> dict[str, float]:
    """The median of each call's kernels in us, of ours the GEMM alone."""
    flushed = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:
        for _ in range(rounds):
            for call in calls.values():
                flushed.zero_()
                call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    events = [e for e in events if e.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy")]
    events.sort(key=lambda e: e["ts"])
    names = list(calls)
    found: list[float] = []  # of each call in turn; a flush begins it
    for event in events:
        if (
            event.get("args", {}).get("bytes") == FLUSHED
            or "FillFunctor<unsigned char>" in event["name"]
        ):
            found.append(0)
        elif found:
            of_ours = "float8" in names[(len(found) - 1) % len(names)]
            found[-1] += event["dur"] if not of_ours or event["name"] == OURS else 0
    if len(found) != rounds * len(names):
        raise RuntimeError(f"{len(found)} flushes in the trace of {rounds * len(names)} calls")
    return {name: statistics.median(found[i :: len(names)]) for i, name in enumerate(names)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--routing", default="even,zipf")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json")
    options = parser.parse_args()
    common.device_of(argparse.Namespace(emulate=False))
    print(common.headline("grouped GEMMs, TFLOP/s", "cuda"), flush=True)
    kinds = ("bf16", "float8 bf16", "torch", "float8", "float8 precise")
    figures = {}
    for text in options.shapes.split(";"):
        m, k, n, experts = map(int, text.split(","))
        for routing in options.routing.split(","):
            times = kernel_times(
                calls_of(m, k, n, experts, ends(m, experts, routing)), options.rounds
            )
            rate = {name: 2e-6 * m * k * n / us for name, us in times.items()}
            rows = [
                [f"{text} {routing} {gemm}"]
                + [
                    f"{rate[f'{gemm} {kind}']:.0f}" if f"{gemm} {kind}" in rate else ""
                    for kind in kinds
                ]
                for gemm in ("output", "grad_input", "grad_weight")
            ]
            common.print_table(
                ["M,K,N,E", "bf16", "float8 bf16", "torch fp8", "float8", "precise"], rows
            )
            figures[f"{text} {routing}"] = rate
            torch.cuda.empty_cache()
    common.write_json(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
