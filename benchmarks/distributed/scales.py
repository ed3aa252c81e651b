#!/usr/bin/env python3
"""Scales of the weights of Llama-3-8B under FSDP2, between an optimizer's step and a forward.

    torchrun --nproc-per-node 2 scales.py [--variants LIST] [--layers 32] [--scale 1] [--rounds 9]
        [--compute bf16] [--json FILE] [--profile FOLDER] [--emulate]

The 7 linears of each of 32 layers have fp32 shards of random numbers, 14 GB a rank on two, so that
no cache holds them; casts round them to bf16 as they read them, as for compute in bf16 (--compute
fp32: not). The variants take turns. For a recipe of float8 they are

    NAME             what training calls: maxima, one all-reduce, and the cast to q and qt
    NAME-amax        the maxima and the one all-reduce alone
    NAME-reduces     the maxima, and an all-reduce for each weight
    NAME-singly      each weight alone: its maxima, its all-reduce and its cast

`torchao` is its precompute_float8_dynamic_scale_for_fsdp, which casts nothing; `torchao-cast` has
the cast too, which torchao makes in each gather, twice a step. `idle` is the time on the device's
clock where the host starts with it, `queued` where the host is far ahead, so that only the
device's work counts. Both are medians of all rounds, of rank 0. --profile writes a trace of a call of
each variant, of rank 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import float8.torch as f8
from float8.torch import _ops
from float8.torch.ranks import collectives
from float8.torch.shard import shard_casts
from float8.torch.shard.fsdp import gather_of

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "pytorch"))

import common
from fsdp_step import Sharded
from kernel_times import profile
from llama import LLAMA_3_8B, Block, Shape

LINEARS = 7  # of a block
PAUSE = 700_000_000  # cycles of the device, longer than the host takes for any variant
RECIPES = ("tensorwise", "rowwise")
COMPUTE = {"bf16": torch.bfloat16, "fp32": torch.float32}
KINDS = ("", "-amax", "-reduces", "-singly")
VARIANTS = (*(recipe + kind for recipe in RECIPES for kind in KINDS), "torchao", "torchao-cast")
TINY = Shape(dim=256, hidden=512, heads=4, kv_heads=2, layers=32)


def shape_of(options: argparse.Namespace) -> Shape:
    whole = TINY if options.emulate else LLAMA_3_8B
    return dataclasses.replace(
        whole,
        dim=whole.dim // options.scale,
        hidden=whole.hidden // options.scale,
        layers=options.layers,
    )


def sharded(variant: Sharded, shape: Shape, device: str) -> nn.ModuleList:
    """Returns blocks with random weights, of which no more than one is whole at a time."""
    torch.manual_seed(0)
    mesh = common.mesh_of_all(device)
    blocks = nn.ModuleList()
    for _ in range(shape.layers):
        with torch.device(device):
            block: nn.Module = Block(shape)
        blocks.append(fully_shard(variant.convert(block, device == "cpu"), mesh=mesh))
    return blocks


def linears_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def maxima(weights: list[tuple[Any, Any]]) -> torch.Tensor:
    """Returns the words of weights' shards."""
    sources = [gather.source(weight) for gather, weight in weights]
    configs = [gather.config for gather, _ in weights]
    rows = [gather.rows for gather, _ in weights]
    types = shard_casts.cast_types(sources, [gather for gather, _ in weights])
    shards = (sources, configs, _ops.WEIGHT, rows, [], [], types)
    words: torch.Tensor = _ops.quantize_amax_list(*shards)[0]
    return words


class Weights:
    """The gathers of a model's weights, and parts of what training calls."""

    def __init__(self, model: nn.Module, compute: torch.dtype) -> None:
        self.weights = [(gather_of(layer), layer.weight) for layer in linears_of(model)]
        for gather, _ in self.weights:
            gather.dtype = compute  # FSDP says so in its first forward
        self.group = self.weights[0][0].group
        self.sizes = [maxima([weight]).numel() for weight in self.weights]

    def amax(self) -> None:
        self.reduce(maxima(self.weights))

    def reduces(self) -> None:
        for words in maxima(self.weights).split(self.sizes):
            self.reduce(words)

    def reduce(self, words: torch.Tensor) -> None:
        collectives.all_reduce_max(words, self.group, collectives.Operation("a benchmark"))

    def singly(self) -> None:
        for weight in self.weights:
            shard_casts.cast_shards([weight])


def of_float8(
    recipe: str, shape: Shape, device: str, compute: torch.dtype
) -> dict[str, Callable[[], None]]:
    model = sharded(Sharded("float8", recipe, gather=True), shape, device)
    weights = Weights(model, compute)
    return {
        recipe: lambda: f8.precompute_float8_dynamic_scale_for_fsdp(model),
        f"{recipe}-amax": weights.amax,
        f"{recipe}-reduces": weights.reduces,
        f"{recipe}-singly": weights.singly,
    }


def of_torchao(shape: Shape, device: str) -> dict[str, Callable[[], None]]:
    import torchao.float8 as torchao

    model = sharded(Sharded("torchao", "tensorwise", gather=True), shape, device)
    weights = [layer.weight for layer in linears_of(model)]

    def precompute() -> None:
        torchao.precompute_float8_dynamic_scale_for_fsdp(model)

    @torch.no_grad()
    def with_cast() -> None:
        precompute()
        for weight in weights:
            weight._local_tensor.fsdp_pre_all_gather(weight.device_mesh)

    return {"torchao": precompute, "torchao-cast": with_cast}


def sample(call: Callable[[], None], device: str, queued: bool) -> float:
    """Returns the time of one call in ms; all ranks make it at once."""
    common.wait()
    distributed.barrier()
    if device == "cpu":
        return common.seconds(call) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    common.wait()
    if queued:
        torch.cuda._sleep(PAUSE)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def measure(
    calls: dict[str, Callable[[], None]], rounds: int, device: str
) -> dict[str, dict[str, list[float]]]:
    """Returns samples of each variant, without those of the first two rounds."""
    times: dict[str, dict[str, list[float]]] = {}
    for index in range(rounds + 2):
        for name, call in calls.items():
            own = times.setdefault(name, {"idle": [], "queued": []})
            for kind, samples in own.items():
                took = sample(call, device, kind == "queued")
                if index >= 2:
                    samples.append(took)
    return times


def parse() -> argparse.Namespace:
    parser = common.parser(__doc__, VARIANTS)
    parser.add_argument("--layers", type=int, default=0, help="default 32")
    parser.add_argument("--scale", type=int, default=1, help="divides in_features and out_features")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--compute", choices=COMPUTE, default="bf16", help="type that is cast to fp8"
    )
    parser.add_argument("--profile", metavar="FOLDER")
    options = parser.parse_args()
    options.layers = options.layers or (2 if options.emulate else 32)
    options.variants = common.names_of(options.variants, VARIANTS)
    return options


def main() -> int:
    options = parse()
    device = common.start_ranks(options)
    shape = shape_of(options)
    calls: dict[str, Callable[[], None]] = {}
    failures: dict[str, str] = {}
    for library in (*RECIPES, "torchao"):
        wanted = [name for name in options.variants if name.split("-")[0] == library]
        if not wanted:
            continue
        try:
            if library == "torchao":
                found = of_torchao(shape, device)
            else:
                found = of_float8(library, shape, device, COMPUTE[options.compute])
            calls.update((name, found[name]) for name in wanted)
        except ImportError as error:
            failures[library] = common.reason(error)
    times = measure(calls, options.rounds, device)
    if options.profile:
        for name, call in calls.items():
            profile(options.profile, name, call)
    if distributed.get_rank() == 0:
        ranks, count = distributed.get_world_size(), LINEARS * shape.layers
        what = f"scales of {count} weights of Llama-3-8B / {options.scale}, {options.compute}, {ranks} ranks"
        print(common.headline(what, device))
        rows = [
            [name, *(f"{statistics.median(own[kind]):.3f}" for kind in ("idle", "queued"))]
            for name, own in times.items()
        ]
        rows += [[name, text] for name, text in failures.items()]
        common.print_table(["variant", "idle ms", "queued ms"], rows)
        common.write_json(options.json, {"ms": times, "failures": failures, "weights": count})
    return common.leave_ranks(device, common.status(failures))


if __name__ == "__main__":
    sys.exit(main())
