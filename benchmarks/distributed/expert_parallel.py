#!/usr/bin/env python3
"""A layer of SwiGLU experts whose experts are spread over the ranks, forward and backward.

    torchrun --nproc-per-node 2 expert_parallel.py [--models qwen3,mixtral] [--routing even,zipf]
        [--variants LIST] [--rounds 8] [--profile FOLDER] [--json FILE] [--emulate]

Each rank has the tokens of the model and its share of the experts. bf16 sends rows by torch's all-to-all
and computes with torch.nn.functional.grouped_mm (bf16_experts.py); the others are
float8.torch.functional.moe with a group, whose rows travel in bf16, or with `-fp8` in e4m3 on their way to
the experts. The host waits for the numbers of rows in each of them. The times are the device's, of rank 0,
and variants take turns.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import _functional_collectives as collectives

import float8.torch as f8

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "pytorch"))

import bf16_experts
import common
import experts
from fsdp_step import take_turns
from kernel_times import profile

RECIPES = ("tensorwise", "rowwise", "blockwise")
VARIANTS = ("bf16", *RECIPES, *(f"{recipe}-fp8" for recipe in RECIPES))


def bf16_moe(x: Tensor, ids: Tensor, scores: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Computes the layer by torch alone."""
    group = distributed.group.WORLD
    ranks, own = distributed.get_world_size(), w2.shape[0]
    tokens, rows, offs = bf16_experts.route(ids, ranks * own)
    counts = torch.diff(offs, prepend=offs.new_zeros(1)).view(ranks, own)
    of_ranks = torch.empty_like(counts)
    distributed.all_to_all_single(of_ranks, counts)
    sent, received = torch.stack((counts.sum(1), of_ranks.sum(1))).tolist()
    move: Any = collectives.all_to_all_single_autograd
    sorted_rows = bf16_experts.Dispatch.apply(x, tokens, rows)  # type: ignore[no-untyped-call]
    there = collectives.wait_tensor(move(sorted_rows, received, sent, group))
    each = torch.arange(own, device=x.device).repeat(ranks)
    of_rows = each.repeat_interleave(of_ranks.flatten(), output_size=sum(received))[:, None]
    ones = torch.ones(of_rows.shape, device=x.device)
    y = bf16_experts.moe(there, of_rows, ones, w13, w2)
    back = collectives.wait_tensor(move(y, sent, received, group))
    total: Tensor = bf16_experts.Combine.apply(back, scores, tokens, rows)  # type: ignore[no-untyped-call]
    return total


def layer_of(name: str, emulate: bool) -> Callable[..., Tensor]:
    if name == "bf16":
        return bf16_moe
    recipe, _, sent = name.partition("-")
    dispatch_dtype = torch.float8_e4m3fn if sent else None
    group = distributed.group.WORLD

    def call(*operands: Tensor) -> Tensor:
        return f8.functional.moe(
            *operands, recipe=recipe, emulate=emulate, group=group, dispatch_dtype=dispatch_dtype
        )

    return call


def step_of(name: str, model: experts.Model, routing: str, emulate: bool) -> Callable[[], None]:
    """Returns forward and backward of a variant; ranks have unlike tokens."""
    device = "cpu" if emulate else "cuda"
    torch.manual_seed(distributed.get_rank())
    own = model.experts // distributed.get_world_size()
    ids = experts.pairs(model, routing, device)
    scores = torch.rand(ids.shape, device=device).softmax(-1).requires_grad_()
    pool = [
        tuple(torch.randn(model.tokens, model.dim, device=device).bfloat16() for _ in range(2))
        for _ in range(experts.POOL)
    ]
    shapes = ((own, 2 * model.hidden, model.dim), (own, model.dim, model.hidden))
    weights = [torch.randn(s, device=device).mul_(0.02).bfloat16().requires_grad_() for s in shapes]
    call = layer_of(name, emulate)
    turn = 0

    def step() -> None:
        nonlocal turn
        x, dy = pool[turn % experts.POOL]
        turn += 1
        for each in (*weights, scores):
            each.grad = None
        call(x.detach().requires_grad_(), ids, scores, *weights).backward(dy)

    return step


def measure(name: str, routing: str, options: Any, device: str) -> dict[str, Any]:
    model = experts.TINY if options.emulate else experts.MODELS[name]
    steps: dict[str, Callable[[], None]] = {}
    failures: dict[str, str] = {}
    for variant in dict.fromkeys(["bf16", *options.chosen]):
        try:
            step = step_of(variant, model, routing, options.emulate)
            for _ in range(2):
                step()
            steps[variant] = step
        except Exception as error:  # the other variants are measured still
            failures[variant] = common.reason(error)
        common.wait()
    times = take_turns(steps, options.rounds, options.steps)
    if options.profile:
        for variant, step in steps.items():
            profile(options.profile, f"{name}-{routing}-{variant}", step)
    if distributed.get_rank() == 0:
        rows = [
            [
                f"{name}-{routing}-{variant}",
                f"{statistics.median(own):.3f}",
                f"{common.ratio(times['bf16'], own):.3f}",
            ]
            for variant, own in times.items()
        ]
        rows += [[f"{name}-{routing}-{variant}", text] for variant, text in failures.items()]
        common.print_table(["layer", "ms", "over bf16"], rows)
    return {"ms": times, "failures": failures}


def main() -> int:
    parser = common.parser(__doc__, VARIANTS)
    parser.add_argument("--models", default="qwen3,mixtral")
    parser.add_argument("--routing", default="even,zipf")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6, help="of a sample")
    parser.add_argument("--profile", metavar="FOLDER")
    options = parser.parse_args()
    options.chosen = experts.words(options.variants or ",".join(VARIANTS), "variant", VARIANTS)
    models = experts.words(options.models, "model", list(experts.MODELS))
    routings = experts.words(options.routing, "routing", ("even", "zipf"))
    device = common.start_ranks(options)
    if distributed.get_rank() == 0:
        ranks = distributed.get_world_size()
        print(common.headline(f"experts over {ranks} ranks, forward + backward", device))
    found = {
        f"{model} {routing}": measure(model, routing, options, device)
        for model in models
        for routing in routings
    }
    if distributed.get_rank() == 0:
        common.write_json(options.json, found)
    failures = {key: text for each in found.values() for key, text in each["failures"].items()}
    return common.leave_ranks(device, common.status(failures))


if __name__ == "__main__":
    sys.exit(main())
