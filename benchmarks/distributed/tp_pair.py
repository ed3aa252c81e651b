#!/usr/bin/env python3
"""A column-wise and a row-wise linear under tensor and sequence parallelism, forward and backward.

    torchrun --nproc-per-node 2 tp_pair.py [--variants LIST] [--tokens 8192] [--dim 8192]
        [--hidden 28672] [--rounds 8] [--profile FOLDER] [--json FILE] [--emulate]

The pair has the shapes of Llama-3-70B's up and down. Ranks share x and y by tokens: x is gathered, y
is reduced and scattered. A variant that ends in `-async` overlaps communication with GEMMs: float8 by
its own ops, torchao by torch.compile's micro-pipelining, and bf16 by the ops of that pass, called in
eager mode: the pass of PyTorch 2.11 fails where a row-wise linear reads the result of a column-wise
one as it is. The times are the device's, of rank 0, and variants take turns. `exposed` is the part of
a profiled step in which no kernel computes: the communication that nothing hides, and gaps between
kernels.

PyTorch's symmetric memory makes no multicast object here.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd import DeviceType
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import float8.torch as f8

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "pytorch"))

import common
from fsdp_step import take_turns
from kernel_times import profile

os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
_COMMUNICATES = ("nccl", "memcpy", "barrier", "signal")  # parts of names of what runs on a device


@dataclasses.dataclass(frozen=True)
class Parallel(common.Variant):
    """A variant whose two linears ranks share."""

    overlapped: bool = False

    @property
    def name(self) -> str:
        return super().name + ("-async" if self.overlapped else "")

    @property
    def fused(self) -> bool:
        """Tells whether it calls torch's fused ops."""
        return self.library == "bf16" and self.overlapped

    def convert(self, model: nn.Module, emulate: bool) -> nn.Module:
        if self.library != "float8":
            return super().convert(model, emulate)
        config = f8.LinearConfig(
            self.recipe, emulate=emulate, async_tensor_parallel=self.overlapped
        )
        return f8.convert_to_float8_training(model, config=config)

    def styles(self) -> tuple[Any, Any]:
        """Returns the styles of a column-wise and a row-wise linear."""
        if self.library == "float8":
            return f8.Float8ColwiseParallel, f8.Float8RowwiseParallel
        if self.library == "torchao":
            from torchao.float8 import float8_tensor_parallel as of_torchao

            return of_torchao.Float8ColwiseParallel, of_torchao.Float8RowwiseParallel
        return ColwiseParallel, RowwiseParallel


def variants() -> dict[str, Parallel]:
    both = (False, True)
    every = [Parallel("bf16", overlapped=overlapped) for overlapped in both]
    every += [Parallel("torchao", "tensorwise", overlapped=overlapped) for overlapped in both]
    for compiled in (True, False):
        for recipe in common.RECIPES if compiled else ("tensorwise", "rowwise"):
            for overlapped in both:
                every.append(Parallel("float8", recipe, compiled, overlapped=overlapped))
    return {variant.name: variant for variant in every}


class _FusedColumn(torch.autograd.Function):
    """A column-wise linear by torch's fused ops; it keeps the gathered x, as torch.compile does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: str) -> Tensor:
        whole, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [weight.t()], 0, group)
        ctx.save_for_backward(whole, weight)
        ctx.group = group
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dx = torch.ops.symm_mem.fused_matmul_reduce_scatter(dy, weight, "sum", 0, ctx.group)
        return dx, dy.t() @ x, None


class _FusedRow(torch.autograd.Function):
    """A row-wise linear by torch's fused ops."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(  # type: ignore[no-any-return]
            x, weight.t(), "sum", 0, group
        )

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        whole, (dx,) = torch.ops.symm_mem.fused_all_gather_matmul(dy, [weight], 0, ctx.group)
        return dx, whole.t() @ x, None


def fused_step(
    model: Any, x: Tensor, dy: Tensor, group: str, rank: int, ranks: int
) -> Callable[[], None]:
    """Returns a step of the two linears in bf16, whose weights are cut as the styles cut them."""
    importlib.import_module("torch.distributed._symmetric_memory")  # defines the ops

    weights = [
        layer.weight.detach().chunk(ranks, dim)[rank].contiguous().requires_grad_()
        for dim, layer in enumerate(model)
    ]
    calls: Any = (_FusedColumn.apply, _FusedRow.apply)

    def step() -> None:
        y = x.detach().requires_grad_()
        for call, weight in zip(calls, weights, strict=True):
            y = call(y, weight, group)
        y.backward(dy)
        for weight in weights:
            weight.grad = None

    return step


def step_of(
    variant: Parallel, options: argparse.Namespace, mesh: Any, device: str
) -> Callable[[], None]:
    torch.manual_seed(0)
    dim, hidden = options.dim, options.hidden
    with torch.device(device):
        model = nn.Sequential(
            nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)
        ).to(torch.bfloat16)
    ranks, rank = mesh.size(), distributed.get_rank()
    torch.manual_seed(1 + rank)
    # torch.compile's pass does not find the gather of a second dimension where the first one is 1.
    shape = (options.tokens // ranks, dim)
    x, dy = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
    if variant.fused:
        return fused_step(model, x, dy, mesh.get_group().group_name, rank, ranks)
    converted = variant.convert(model, options.emulate)
    column, row = variant.styles()
    plan = {
        "0": column(input_layouts=Shard(0), use_local_output=False),
        "1": row(output_layouts=Shard(0), use_local_output=False),
    }
    parallelize_module(converted, mesh, plan)
    call = variant.callable(converted, options.emulate)

    def step() -> None:
        leaf = x.detach().requires_grad_()
        y = call(DTensor.from_local(leaf, mesh, [Shard(0)], run_check=False))
        y.to_local().backward(dy)
        variant.end_of_step(converted)
        for parameter in converted.parameters():
            parameter.grad = None

    return step


def enable_micro_pipelining(mesh: Any) -> None:
    """Lets torch.compile's pass touch the mesh's group, which it leaves alone otherwise."""
    from torch.distributed import _symmetric_memory

    enable = getattr(_symmetric_memory, "enable_symm_mem_for_group", None)
    if enable is not None:
        enable(mesh.get_group().group_name)


def exposed_ms(step: Callable[[], None], steps: int = 3) -> float:
    """Returns the ms of a step in which no kernel computes."""
    distributed.barrier()
    common.wait()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            step()
        common.wait()
    events = [
        each
        for each in trace.events()
        if each.device_type == DeviceType.CUDA and not each.is_user_annotation
    ]
    begin = min(each.time_range.start for each in events)
    whole = max(each.time_range.end for each in events) - begin
    computed, until = 0.0, begin
    for each in sorted(events, key=lambda each: each.time_range.start):
        start, end = each.time_range.start, each.time_range.end
        if not any(word in each.name.lower() for word in _COMMUNICATES):
            computed += max(0.0, end - max(start, until))
            until = max(until, end)
    return (whole - computed) / 1e3 / steps


def main() -> int:
    known = variants()
    parser = common.parser(__doc__, known)
    parser.add_argument("--tokens", type=int, default=0, help="default 8192")
    parser.add_argument("--dim", type=int, default=0, help="default 8192")
    parser.add_argument("--hidden", type=int, default=0, help="default 28672")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6, help="of a sample")
    parser.add_argument("--profile", metavar="FOLDER")
    options = parser.parse_args()
    for name, size, tiny in (("tokens", 8192, 256), ("dim", 8192, 256), ("hidden", 28672, 512)):
        if not getattr(options, name):
            setattr(options, name, tiny if options.emulate else size)
    device = common.start_ranks(options)
    mesh = common.mesh_of_all(device)
    steps: dict[str, Callable[[], None]] = {}
    failures: dict[str, str] = {}
    for variant in common.chosen(options.variants, dict(known)):
        assert isinstance(variant, Parallel)
        if variant.fused and device == "cpu":
            continue  # the ops are for GPUs
        passes = variant.overlapped and variant.library == "torchao" and device == "cuda"
        torch._inductor.config._micro_pipeline_tp = passes
        if passes:
            enable_micro_pipelining(mesh)
        try:
            step = step_of(variant, options, mesh, device)
            for _ in range(3):
                step()
            steps[variant.name] = step
        except Exception as error:
            failures[variant.name] = common.reason(error)
        common.wait()
    times = take_turns(steps, options.rounds, options.steps)
    if options.profile:
        for name, step in steps.items():
            profile(options.profile, name, step)
    exposed = {name: exposed_ms(step) for name, step in steps.items()} if device == "cuda" else {}
    if distributed.get_rank() == 0:
        what = f"{options.dim} to {options.hidden} and back, {options.tokens} tokens, tensor and "
        what += f"sequence parallel over {distributed.get_world_size()}, forward + backward"
        print(common.headline(what, device))
        base = times["bf16"]
        rows = [
            [
                name,
                f"{statistics.median(own):.3f}",
                f"{common.ratio(base, own):.3f}",
                f"{exposed[name]:.3f}" if name in exposed else "-",
            ]
            for name, own in times.items()
        ]
        rows += [[name, text] for name, text in failures.items()]
        common.print_table(["variant", "ms", "over bf16", "exposed ms"], rows)
        common.write_json(options.json, {"ms": times, "exposed": exposed, "failures": failures})
    return common.leave_ranks(device, common.status(failures))


if __name__ == "__main__":
    sys.exit(main())
