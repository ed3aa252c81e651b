#!/usr/bin/env python3
"""A column-wise and a row-wise linear under tensor and sequence parallelism, forward and backward.

    torchrun --nproc-per-node 2 tp_pair.py [--variants LIST] [--tokens 8192] [--dim 8192]
        [--hidden 28672] [--rounds 8] [--profile FOLDER] [--json FILE] [--emulate]

The pair has the shapes of Llama-3-70B's up and down. Ranks share x and y by tokens: x is gathered, y
is reduced and scattered. `bf16-async` and the like overlap communication with GEMMs by
torch.compile's micro-pipelining. A variant compiles forward and backward; the times are the
device's, of rank 0, and variants take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import float8.torch as f8

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "pytorch"))

import common
from fsdp_step import profile, take_turns


@dataclasses.dataclass(frozen=True)
class Parallel(common.Variant):
    """A variant whose two linears ranks share."""

    overlapped: bool = False  # by torch.compile, of torch's own GEMMs

    @property
    def name(self) -> str:
        return super().name + ("-async" if self.overlapped else "")

    def styles(self) -> tuple[Any, Any]:
        """Returns the styles of a column-wise and a row-wise linear."""
        if self.library == "float8":
            return f8.Float8ColwiseParallel, f8.Float8RowwiseParallel
        if self.library == "torchao":
            from torchao.float8 import float8_tensor_parallel as of_torchao

            return of_torchao.Float8ColwiseParallel, of_torchao.Float8RowwiseParallel
        return ColwiseParallel, RowwiseParallel


def variants() -> dict[str, Parallel]:
    every = [Parallel("bf16"), Parallel("bf16", overlapped=True)]
    every += [Parallel("torchao", "tensorwise"), Parallel("torchao", "tensorwise", overlapped=True)]
    every += [Parallel("float8", recipe) for recipe in common.RECIPES]
    every += [Parallel("float8", recipe, compiled=False) for recipe in ("tensorwise", "rowwise")]
    return {variant.name: variant for variant in every}


def step_of(
    variant: Parallel, options: argparse.Namespace, mesh: Any, device: str
) -> Callable[[], None]:
    torch.manual_seed(0)
    dim, hidden = options.dim, options.hidden
    with torch.device(device):
        model = nn.Sequential(
            nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)
        ).to(torch.bfloat16)
    converted = variant.convert(model, options.emulate)
    column, row = variant.styles()
    plan = {
        "0": column(input_layouts=Shard(1), use_local_output=False),
        "1": row(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(converted, mesh, plan)
    ranks = mesh.size()
    torch.manual_seed(1 + distributed.get_rank())
    shape = (1, options.tokens // ranks, dim)
    x, dy = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
    call = variant.callable(converted, options.emulate)

    def step() -> None:
        leaf = x.detach().requires_grad_()
        y = call(DTensor.from_local(leaf, mesh, [Shard(1)], run_check=False))
        y.to_local().backward(dy)
        variant.end_of_step(converted)
        for parameter in converted.parameters():
            parameter.grad = None

    return step


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
    for name, size, tiny in (("tokens", 8192, 32), ("dim", 8192, 256), ("hidden", 28672, 512)):
        if not getattr(options, name):
            setattr(options, name, tiny if options.emulate else size)
    device = common.device_of(options)
    if "RANK" not in os.environ:
        sys.exit("start this with torchrun --nproc-per-node N")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (distributed.get_world_size(),))
    steps: dict[str, Callable[[], None]] = {}
    failures: dict[str, str] = {}
    for variant in common.chosen(options.variants, dict(known)):
        assert isinstance(variant, Parallel)
        overlap = variant.overlapped and device == "cuda"
        torch._inductor.config._micro_pipeline_tp = overlap
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
    if distributed.get_rank() == 0:
        what = f"{options.dim} to {options.hidden} and back, {options.tokens} tokens, tensor and "
        what += f"sequence parallel over {distributed.get_world_size()}, forward + backward"
        print(common.headline(what, device))
        base = times["bf16"]
        rows = [
            [name, f"{statistics.median(own):.3f}", f"{common.ratio(base, own):.3f}"]
            for name, own in times.items()
        ]
        rows += [[name, text] for name, text in failures.items()]
        common.print_table(["variant", "ms", "over bf16"], rows)
        common.write_json(options.json, {"ms": times, "failures": failures})
    distributed.destroy_process_group()
    return common.status(failures)


if __name__ == "__main__":
    sys.exit(main())
