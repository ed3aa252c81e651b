#!/usr/bin/env python3
"""Training steps of Llama-3-8B blocks under FSDP2: bf16, torchao and float8, in one run.

    torchrun --nproc-per-node 2 fsdp_step.py [--variants LIST] [--blocks 4] [--tokens 8192]
        [--rounds 8] [--eager] [--json FILE] [--profile FOLDER] [--emulate]

Parameters and AdamW's states are sharded and in fp32, compute is in bf16, and gradients are reduced
in fp32. A step is forward, backward, fused AdamW and what the recipe does behind it. Each rank has
one sequence. The variants take turns; a sample is of several steps, on the device's clock of rank
0. A variant with `-gather` gathers weights in fp8, and with `-adamw` it has float8.torch.AdamW. --profile writes traces of some
steps of each variant, and prints where the time of rank 0's device goes.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import float8.torch as f8

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "pytorch"))

import common
import kernel_times


@dataclasses.dataclass(frozen=True)
class Sharded(common.Variant):
    """A variant whose weights ranks share, gathered in fp8 or in bf16."""

    gather: bool = False
    adamw: bool = False  # float8.torch.AdamW

    @property
    def name(self) -> str:
        return super().name + "-gather" * self.gather + "-adamw" * self.adamw

    def convert(self, model: nn.Module, emulate: bool) -> nn.Module:
        if not self.gather:
            return super().convert(model, emulate)
        if self.library == "float8":
            config = f8.LinearConfig(
                self.recipe, emulate=emulate, enable_fsdp_float8_all_gather=True
            )
            return f8.convert_to_float8_training(model, config=config)
        import torchao.float8 as torchao

        options = torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=emulate)
        converted: nn.Module = torchao.convert_to_float8_training(model, config=options)
        return converted

    def after_step(self, model: nn.Module) -> None:
        """Makes the weights' scales for the next step."""
        if not self.gather:
            return
        if self.library == "float8":
            f8.precompute_float8_dynamic_scale_for_fsdp(model)
            return
        import torchao.float8 as torchao

        torchao.precompute_float8_dynamic_scale_for_fsdp(model)


def variants(compiled: bool) -> dict[str, Sharded]:
    every = [
        Sharded("bf16", compiled=compiled),
        Sharded("torchao", "tensorwise", compiled),
        Sharded("torchao", "tensorwise", compiled, gather=True),
        Sharded("torchao", "rowwise", compiled),
    ]
    for recipe in common.RECIPES:
        every.append(Sharded("float8", recipe, compiled))
        every.append(Sharded("float8", recipe, compiled, gather=True))
        every.append(Sharded("float8", recipe, compiled, gather=True, adamw=True))
    return {variant.name: variant for variant in every}


def step_of(variant: Sharded, options: common.Options, device: str) -> Callable[[], None]:
    """Returns a call that takes a training step of a model of its own."""
    emulate = options.emulate
    model: Any = common.blocks(options.blocks, options.tokens, device, emulate).float()
    variant.convert(model, emulate)
    # All ranks reduce in fp32, and compute in bf16 as a single device would.
    mesh = common.mesh_of_all(device)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        block.forward = variant.callable(block.forward, emulate)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    # The caller's buffers are no parameters: FSDP leaves them in fp32.
    model.cos, model.sin = model.cos.bfloat16(), model.sin.bfloat16()
    kind = f8.AdamW if variant.adamw else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-5, fused=True)
    torch.manual_seed(distributed.get_rank())
    shape = (1, options.tokens, common.width(emulate))
    x, dy = (torch.randn(shape, device=device).bfloat16() for _ in range(2))

    def step() -> None:
        model(x.detach().requires_grad_()).backward(dy)
        variant.end_of_step(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        variant.after_step(model)

    return step


def take_turns(
    steps: dict[str, Callable[[], None]], rounds: int, calls: int
) -> dict[str, list[float]]:
    """Returns samples of each step in ms; all ranks make the same calls."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            distributed.barrier()
            times[name].append(common.sample(step, calls))
    return times


def main() -> int:
    parser = common.parser(__doc__, variants(True))
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=0, help="default 8192")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6, help="of a sample")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--profile", metavar="FOLDER")
    options = parser.parse_args()
    options.tokens = options.tokens or (32 if options.emulate else 8192)
    device = common.start_ranks(options)
    steps: dict[str, Callable[[], None]] = {}
    failures: dict[str, str] = {}
    with common.attention():
        for variant in common.chosen(options.variants, dict(variants(not options.eager))):
            step = step_of(variant, options, device)  # type: ignore[arg-type]
            try:
                for _ in range(2):
                    step()
                steps[variant.name] = step
            except Exception as error:
                failures[variant.name] = common.reason(error)
            common.wait()
        times = take_turns(steps, options.rounds, options.steps)
        traces = {}
        if options.profile:
            folder = pathlib.Path(options.profile, f"rank{distributed.get_rank()}")
            traces = kernel_times.trace_all(folder, steps)
    if distributed.get_rank() == 0:
        ranks = distributed.get_world_size()
        print(
            common.headline(
                f"{options.blocks} Llama-3-8B blocks, 1 x {options.tokens} tokens a rank, "
                f"{ranks} ranks, FSDP2, forward + backward + AdamW",
                device,
            )
        )
        base = next(iter(times.values()))
        rows = [
            [name, f"{statistics.median(own):.2f}", f"{common.ratio(base, own):.3f}"]
            for name, own in times.items()
        ]
        rows += [[name, text] for name, text in failures.items()]
        common.print_table(["variant", "ms", "over bf16"], rows)
        kernel_times.print_traces(traces, 16)
        common.write_json(options.json, {"ms": times, "failures": failures, "ranks": ranks})
    return common.leave_ranks(device, common.status(failures))


if __name__ == "__main__":
    sys.exit(main())
