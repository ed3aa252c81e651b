#!/usr/bin/env python3
"""Losses of a sharded training run, step by step, beside those of one device.

    torchrun --nproc-per-node 2 losses.py [--schemes LIST] [--recipes LIST] [--steps 200]
        [--csv FILE] [--dim 512 --hidden 1024 --heads 8 --layers 3 --batch 8 --tokens 512] [--emulate]

A small Llama learns a Markov chain. Every rank trains it as one device would, too, with the same
micro-batches. A row that claims `bits` has the same losses in every step, else the exit status is 1.
That is so where sums are in the same order: under FSDP the gradients of 2 ranks are a sum of two,
and those of more are with `-ordered`, which adds them in the order of the ranks.

The other rows claim `noise`: their sums are in another order. What that alone does to losses is in
two columns: `order` has one device whose sums are rounded as those of ranks are, and `bf16` has
bf16 under the same scheme. `times` is the row's largest relative difference over the larger one.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import distributed

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "pytorch"))

import common
from training import Arrangement, Sizes, corpus, losses

RECIPES = ("bf16", *common.RECIPES)
SCHEMES = ("fsdp", "fsdp-gather", "tp", "tp-sp", "fsdp-tp", "fsdp-tp-sp", "torchao")
TINY = Sizes(256, 256, 4, 2, 64, batch=4, tokens=256, steps=2)
Losses = Sequence[float]
Trainer = Callable[[Arrangement], Losses]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs, and whether their losses have to be the same bits."""

    name: str
    own: Arrangement
    reference: Arrangement
    bits: bool


@dataclasses.dataclass(frozen=True)
class Result:
    """What two runs made of it; the noises are relative differences of losses, 0 under `bits`."""

    comparison: Comparison
    own: Losses
    reference: Losses
    order: float  # noise of one device that rounds sums as ranks do
    bf16: float  # noise of bf16 under the same scheme

    @property
    def first_difference(self) -> int | None:
        """The first step, from 1, whose losses are not the same bits."""
        pairs = enumerate(zip(self.own, self.reference, strict=True), 1)
        return next((step for step, (a, b) in pairs if a != b), None)

    @property
    def largest(self) -> float:
        return relative(self.own, self.reference)

    @property
    def times(self) -> float:
        """The largest difference over the noise."""
        return self.largest / max(self.order, self.bf16, 1e-12)

    @property
    def fails(self) -> bool:
        return self.comparison.bits and self.first_difference is not None

    def cells(self) -> list[str]:
        claim = "bits" if self.comparison.bits else "noise"
        last = (f"{self.own[-1]:.5f}", f"{self.reference[-1]:.5f}")
        noises = [f"{each:.1e}" for each in (self.order, self.bf16)] + [f"{self.times:.1f}"]
        if self.comparison.bits:
            noises = ["-"] * len(noises)
        first = str(self.first_difference or "none")
        claim += " FAILS" * self.fails
        return [self.comparison.name, claim, first, f"{self.largest:.1e}", *noises, *last]


HEADER = ("variant", "claim", "first", "largest", "order", "bf16", "times", "final", "one device")


def relative(own: Losses, other: Losses) -> float:
    """Returns the largest relative difference of two runs' losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(own, other, strict=True))


def comparisons(scheme: str, recipe: str, world: int) -> Iterator[Comparison]:
    """Yields what is to be compared of a scheme on so many ranks, which may be nothing."""
    name = f"{scheme} {recipe}"
    if scheme in ("fsdp", "fsdp-gather"):
        gather = scheme == "fsdp-gather"
        if gather and recipe == "bf16":
            return
        own = Arrangement(recipe, data=world, micro_batches=world, gather=gather)
        single = Arrangement(recipe, micro_batches=world)
        yield Comparison(name, own, single, world == 2)
        if world > 2:
            ordered = dataclasses.replace(own, ordered=True)
            yield Comparison(f"{scheme}-ordered {recipe}", ordered, single, True)
    elif scheme in ("tp", "tp-sp"):
        own = Arrangement(recipe, tensor=world, by_tokens=scheme == "tp-sp")
        yield Comparison(name, own, Arrangement(recipe), False)
    elif scheme in ("fsdp-tp", "fsdp-tp-sp") and world >= 4:
        data = world // 2
        by_tokens = scheme == "fsdp-tp-sp"
        own = Arrangement(
            recipe, data=data, tensor=2, by_tokens=by_tokens, micro_batches=data, ordered=data > 2
        )
        yield Comparison(name, own, Arrangement(recipe, micro_batches=data), False)
        tensor = Arrangement(recipe, tensor=2, by_tokens=by_tokens, micro_batches=data)
        yield Comparison(f"{name}, to tp of 2", own, tensor, True)
    elif scheme == "torchao" and recipe == "tensorwise":
        own = Arrangement(recipe, "torchao", data=world, micro_batches=world, gather=True)
        yield Comparison(
            "torchao's fsdp-gather", own, Arrangement(recipe, "torchao", micro_batches=world), False
        )


def compare(comparison: Comparison, train: Trainer) -> Result:
    """Runs the two, and what shows the noise. `train` keeps what it has run."""
    own, reference = comparison.own, comparison.reference
    if comparison.bits:
        return Result(comparison, train(own), train(reference), 0.0, 0.0)
    single = dataclasses.replace(reference, tensor=1, by_tokens=False)
    order = relative(
        train(dataclasses.replace(single, partial_sums=max(2, own.tensor))), train(single)
    )
    plain = {"recipe": "bf16", "library": "float8"}
    bf16 = relative(
        train(dataclasses.replace(own, **plain, gather=False)),  # type: ignore[arg-type]
        train(dataclasses.replace(single, **plain)),  # type: ignore[arg-type]
    )
    return Result(comparison, train(own), train(reference), order, bf16)


def trainer(sizes: Sizes, device: str) -> Trainer:
    """Returns a call that trains under an arrangement, once for each."""
    data = corpus(sizes)
    return functools.cache(lambda arrangement: losses(arrangement, sizes, data, device))


def deterministic() -> None:
    """Makes PyTorch's own kernels give the same bits in every run."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def write_csv(path: str, results: Sequence[Result]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("variant", "claim", "step", "loss", "reference"))
        for result in results:
            claim = "bits" if result.comparison.bits else "noise"
            pairs = enumerate(zip(result.own, result.reference, strict=True), 1)
            for step, (own, reference) in pairs:
                writer.writerow((result.comparison.name, claim, step, repr(own), repr(reference)))


def listed(text: str, known: Sequence[str]) -> list[str]:
    names = text.split(",") if text else list(known)
    for name in names:
        if name not in known:
            sys.exit(f"there is no {name!r}; there are {', '.join(known)}")
    return names


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schemes", default="", metavar="LIST", help=",".join(SCHEMES))
    parser.add_argument("--recipes", default="", metavar="LIST", help=",".join(RECIPES))
    for field in dataclasses.fields(Sizes):
        kind = float if field.name == "lr" else int
        parser.add_argument(f"--{field.name}", type=kind, metavar=field.name.upper())
    parser.add_argument("--csv", metavar="FILE", help="the losses of all steps")
    parser.add_argument("--emulate", action="store_true", help="tiny sizes on the CPU")
    return parser.parse_args()


def main() -> int:
    options = parse()
    recipes, schemes = listed(options.recipes, RECIPES), listed(options.schemes, SCHEMES)
    deterministic()
    device = common.start_ranks(options)
    rank, world = distributed.get_rank(), distributed.get_world_size()
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(Sizes)}
    changes = {name: value for name, value in given.items() if value is not None}
    sizes = dataclasses.replace(TINY if options.emulate else Sizes(), **changes)
    train = trainer(sizes, device)
    results: list[Result] = []
    failures: dict[str, str] = {}
    for scheme in schemes:
        for comparison in (c for r in recipes for c in comparisons(scheme, r, world)):
            try:
                results.append(compare(comparison, train))
            except ImportError as error:
                failures[comparison.name] = common.reason(error)
            if rank == 0:
                print(".", end="", file=sys.stderr, flush=True)
    if rank == 0:
        what = f"{sizes.steps} steps of {sizes.batch} x {sizes.tokens} tokens on {world} ranks"
        print("\n" + common.headline(what, device))
        rows = [result.cells() for result in results]
        common.print_table(HEADER, [*rows, *([name, text] for name, text in failures.items())])
        if options.csv:
            write_csv(options.csv, results)
    fails = any(result.fails for result in results)
    return common.leave_ranks(device, int(fails))


if __name__ == "__main__":
    sys.exit(main())
