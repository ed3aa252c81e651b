#!/usr/bin/env python3
"""From a sharded weight to the operand of a GEMM: bf16, torchao's fp8 gather and float8's.

    torchrun --nproc-per-node 2 gather.py [--shapes NxK,...] [--rounds 5] [--json FILE]
        [--profile FOLDER] [--emulate]

Each weight is a linear of its own under FSDP2, which is unsharded and resharded. The times are those
of a gather until the GEMM may start: FSDP2's copies into and out of its buffers, the wire, and what
the library does to what came: nothing for bf16, a copy for some fp8 gathers. The columns `q` and
`qt` are the gathers before forward and before backward. A pause on the device first lets the host
run ahead, so that its time does not count. `ratio` is bf16's time over the mean of both gathers.
--profile writes a trace of each gather, of rank 0.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "pytorch"))

import common
from fsdp_step import Sharded
from kernel_times import profile

# Llama-3-8B: q and o, k and v, gate and up, down; then those of 70B.
SHAPES = "4096x4096,1024x4096,14336x4096,4096x14336,8192x8192,28672x8192,8192x28672"
PAUSE = 80_000_000  # cycles of the device
VARIANTS = {
    variant.name: variant
    for variant in (
        Sharded("bf16"),
        Sharded("torchao", "tensorwise", gather=True),
        Sharded("float8", "tensorwise", gather=True),
        Sharded("float8", "rowwise", gather=True),
        Sharded("float8", "blockwise", gather=True),
    )
}


def gathers(variant: Sharded, n: int, k: int, device: str) -> dict[str, Callable[[], None]]:
    """Returns calls that unshard and reshard a weight for forward, and for backward."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16))
    variant.convert(model, device == "cpu")
    layer = fully_shard(model[0], mesh=common.mesh_of_all(device), reshard_after_forward=True)
    variant.after_step(model)
    state = layer._get_fsdp_state()
    state._lazy_init()
    groups = getattr(state, "_fsdp_param_groups", None)
    group = groups[0] if groups else state._fsdp_param_group
    dy = torch.empty(8192 if device == "cuda" else 32, n, dtype=torch.bfloat16, device=device)
    ours = variant.library == "float8"
    weight = torch.empty((), dtype=torch.bfloat16, device=device).expand(n, k)

    def gather(training_state: TrainingState) -> None:
        group._training_state = training_state
        layer.unshard()
        if ours and training_state is TrainingState.FORWARD:
            layer._weight_gather.q(torch.bfloat16, True)
        elif ours:
            layer._weight_gather.qt(
                torch.bfloat16,
                lambda: torch.ops.float8.reads_shards(dy, weight, layer._config),
            )
        layer.reshard()

    return {
        "q": lambda: gather(TrainingState.FORWARD),
        "qt": lambda: gather(TrainingState.PRE_BACKWARD),
    }


def sample(call: Callable[[], None], calls: int, device: str) -> float:
    """Returns the device's time of one call in ms."""
    if device == "cpu":
        return common.sample(call, calls)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    common.wait()
    distributed.barrier()
    torch.cuda._sleep(PAUSE)
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / calls


def main() -> int:
    parser = common.parser(__doc__, VARIANTS)
    parser.add_argument("--shapes", default="", metavar="LIST", help=f"default: {SHAPES}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=10, help="of a sample")
    parser.add_argument("--profile", metavar="FOLDER")
    options = parser.parse_args()
    device = common.start_ranks(options)
    chosen = common.chosen(options.variants, dict(VARIANTS))
    default = "256x128" if options.emulate else SHAPES
    shapes = [tuple(map(int, text.split("x"))) for text in (options.shapes or default).split(",")]
    figures = []
    for n, k in shapes:
        calls = {v.name: gathers(v, n, k, device) for v in chosen}  # type: ignore[arg-type]
        times: dict[str, dict[str, list[float]]] = {}
        for _ in range(options.rounds + 1):  # the first is not counted
            for name, both in calls.items():
                for copy, call in both.items():
                    own = times.setdefault(name, {}).setdefault(copy, [])
                    own.append(sample(call, options.calls, device))
        if options.profile:
            for name, both in calls.items():
                for copy, call in both.items():
                    profile(options.profile, f"{n}x{k}-{name}-{copy}", call)
        medians = {
            name: {copy: statistics.median(own[1:]) for copy, own in both.items()}
            for name, both in times.items()
        }
        base = statistics.mean(medians["bf16"].values())
        for name, both in medians.items():
            figures.append([f"{n}x{k}", name, both["q"], both["qt"], 2 * base / sum(both.values())])
    if distributed.get_rank() == 0:
        print(common.headline(f"gathers over {distributed.get_world_size()} ranks", device))
        rows = [[a, b, f"{q:.3f}", f"{qt:.3f}", f"{r:.2f}"] for a, b, q, qt, r in figures]
        common.print_table(["weight", "variant", "q ms", "qt ms", "ratio"], rows)
        common.write_json(options.json, {"figures": figures})
    return common.leave_ranks(device, 0)


if __name__ == "__main__":
    sys.exit(main())
