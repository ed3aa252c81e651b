#!/usr/bin/env python3
"""What collectives take, from a few KB to hundreds of MB: the rows of `float8-tune wire fit`.

    torchrun --nproc-per-node 2 wire.py --csv wire.csv [--largest BYTES] [--rounds 9] [--emulate]
    float8-tune wire fit --rows wire.csv -o tuning_db/estimate/wire_constants.cpp

All-gathers of bf16 and of bytes, reduce-scatters of bf16, and all-reduces (MAX) of fp32 words, such
as amaxes. `bytes` are those of the whole tensor. A sample is a few collectives back to back on the
device's clock, behind a pause in which the host runs ahead; `us` is the median over the rounds of the
slowest rank's sample, and `low` and `high` are its quartiles. The operands are random.
"""

from __future__ import annotations

import argparse
import csv
import os
import pathlib
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, distributed

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "pytorch"))

import common
from gather import sample

SMALLEST = 4 << 10
LARGEST = 512 << 20
WORDS = tuple(4**i for i in range(11))  # to 1,048,576
COLUMNS = ("collective", "dtype", "ranks", "hosts", "bytes", "us", "low", "high")
WANTED_US = 2_000  # of a sample


def filled(count: int, dtype: torch.dtype, device: str) -> Tensor:
    """Returns random numbers, which draw the power of real ones."""
    if dtype == torch.uint8:
        return torch.randint(1, 256, (count,), dtype=dtype, device=device)
    return torch.randn(count, device=device).to(dtype)


def collectives(largest: int, device: str) -> Iterator[tuple[str, str, int, Callable[[], object]]]:
    """Yields name, type, bytes and a call of each collective."""
    ranks = distributed.get_world_size()
    size = SMALLEST
    while size <= largest:
        for dtype in (torch.bfloat16, torch.uint8):
            count = size // dtype.itemsize // ranks * ranks
            whole, part = filled(count, dtype, device), filled(count // ranks, dtype, device)
            name, moved = str(dtype).removeprefix("torch."), count * dtype.itemsize
            yield (
                *("all_gather", name, moved),
                lambda a=whole, b=part: distributed.all_gather_into_tensor(a, b),
            )
            if dtype == torch.bfloat16:
                yield (
                    *("reduce_scatter", name, moved),
                    lambda a=whole, b=part: distributed.reduce_scatter_tensor(b, a),
                )
        size *= 2
    for count in WORDS:
        words = filled(count, torch.float32, device).abs()
        yield (
            *("all_reduce", "float32", 4 * count),
            lambda a=words: distributed.all_reduce(a, op=distributed.ReduceOp.MAX),
        )


def slowest(value: float, device: str) -> float:
    """Returns the largest of all ranks' values."""
    held = torch.tensor(value, dtype=torch.float64, device=device)
    distributed.all_reduce(held, op=distributed.ReduceOp.MAX)
    return held.item()


def measure(call: Callable[[], object], rounds: int, device: str) -> common.Spread:
    """Returns the microseconds of a collective, warm; all ranks make the same calls."""
    for _ in range(3):
        call()
    once = slowest(1e3 * sample(call, 1, device), device)
    calls = max(1, min(50, int(WANTED_US / max(once, 1e-3))))
    times = [slowest(1e3 * sample(call, calls, device), device) for _ in range(rounds)]
    return common.Spread.of(times)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--csv", metavar="FILE", help="also write the rows to a file")
    parser.add_argument("--largest", type=int, default=0, help="bytes of a tensor; default 512 MB")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--emulate", action="store_true", help="gloo on the CPU, small sizes")
    options = parser.parse_args()
    device = common.start_ranks(options)
    ranks = distributed.get_world_size()
    if ranks < 2:
        sys.exit("a collective takes two ranks and more: torchrun --nproc-per-node 2")
    hosts = ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    torch.manual_seed(distributed.get_rank())
    largest = options.largest or (64 << 10 if options.emulate else LARGEST)
    rows = []
    for name, dtype, moved, call in collectives(largest, device):
        spread = measure(call, options.rounds, device)
        figures = (f"{us:.2f}" for us in (spread.median, spread.low, spread.high))
        rows.append((name, dtype, str(ranks), str(hosts), str(moved), *figures))
    if distributed.get_rank() == 0:
        print(common.headline(f"collectives of {ranks} ranks on {hosts} host(s)", device))
        common.print_table(COLUMNS, rows)
        if options.csv:
            with open(options.csv, "w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    return common.leave_ranks(device, 0)


if __name__ == "__main__":
    sys.exit(main())
