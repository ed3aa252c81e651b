#!/usr/bin/env python3
"""Bytes on the wire of a linear's weight under FSDP2: bf16, torchao and float8.

    torchrun --nproc-per-node 2 gather_bytes.py [--variants LIST] [--shape NxK] [--json FILE] [--emulate]

What all ranks give to all-gathers in a step, divided by the elements of the weight: in forward, in
backward, and in what makes the weight's scales after the optimizer's step. The weight is resharded
after forward. Nothing is timed, so --emulate has the figures of GPUs for a shape. A variant that ends
in `-gather` gathers weights in fp8; torchao has that for tensorwise alone.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "pytorch"))

import common
from fsdp_step import Sharded

VARIANTS = {
    variant.name: variant
    for variant in (
        Sharded("bf16"),
        *(Sharded("torchao", recipe) for recipe in common.TORCHAO_RECIPES),
        Sharded("torchao", "tensorwise", gather=True),
        *(Sharded("float8", recipe, gather=True) for recipe in common.RECIPES),
    )
}
PHASES = ("forward", "backward", "scales")


class Wire:
    """Counts the bytes that this rank gives to all-gathers."""

    def __init__(self) -> None:
        self.bytes = 0
        group: Any = distributed.ProcessGroup
        single = "all_gather_single"  # PyTorch before 2.13 has the other name
        single = single if hasattr(group, single) else "_allgather_base"
        gather = getattr(group, single)

        def counting(self_: Any, output: Any, given: Any, *args: Any, **options: Any) -> Any:
            self.bytes += given.numel() * given.element_size()
            if given.element_size() == 1:  # gloo has no fp8
                output, given = output.view(torch.uint8), given.view(torch.uint8)
            return gather(self_, output, given, *args, **options)

        setattr(group, single, counting)

    def of(self, call: Callable[[], object]) -> int:
        """Returns the bytes of a call."""
        self.bytes = 0
        call()
        return self.bytes


def phases(variant: Sharded, n: int, k: int, device: str, wire: Wire) -> dict[str, float]:
    """Returns the bytes an element in each phase of a second step."""
    torch.manual_seed(0)
    linear = nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16)
    model: Any = variant.convert(nn.Sequential(linear), device == "cpu")
    mesh = common.mesh_of_all(device)
    fully_shard(model[0], mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    x = torch.randn(128, k, dtype=torch.bfloat16, device=device, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts: list[int] = []
    for _ in range(2):
        outputs: list[torch.Tensor] = []
        counts = [
            wire.of(lambda: outputs.append(model(x))),  # noqa: B023
            wire.of(lambda: outputs[0].sum().backward()),  # noqa: B023
        ]
        variant.end_of_step(model)
        optimizer.step()
        optimizer.zero_grad()
        counts.append(wire.of(lambda: variant.after_step(model)))
    ranks = distributed.get_world_size()
    return {phase: sent * ranks / (n * k) for phase, sent in zip(PHASES, counts, strict=True)}


def main() -> int:
    parser = common.parser(__doc__, VARIANTS)
    parser.add_argument("--shape", default="", metavar="NxK", help="default 14336x4096")
    options = parser.parse_args()
    device = common.start_ranks(options)
    shape = options.shape or ("512x256" if options.emulate else "14336x4096")
    n, k = map(int, shape.split("x"))
    wire = Wire()
    figures: dict[str, dict[str, float]] = {}
    failures: dict[str, str] = {}
    for variant in common.chosen(options.variants, dict(VARIANTS)):
        try:
            figures[variant.name] = phases(variant, n, k, device, wire)  # type: ignore[arg-type]
        except Exception as error:
            failures[variant.name] = common.reason(error)
    if distributed.get_rank() == 0:
        ranks = distributed.get_world_size()
        print(common.headline(f"bytes an element of {shape} over {ranks} ranks", device))
        rows = [[name, *(f"{own[p]:.4f}" for p in PHASES)] for name, own in figures.items()]
        rows += [[name, text] for name, text in failures.items()]
        common.print_table(["variant", *PHASES], rows)
        common.write_json(options.json, {"figures": figures, "failures": failures})
    return common.leave_ranks(device, common.status(failures))


if __name__ == "__main__":
    sys.exit(main())
