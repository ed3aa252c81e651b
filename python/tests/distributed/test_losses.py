"""Losses of sharded training, step by step: those of one device, or within the noise of sums.

Ranks are processes on the emulated device, or on GPUs. The programs are those of the benchmark.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

import pytest
import ranks
import torch

sys.path.append(str(pathlib.Path(__file__).parents[3] / "benchmarks/distributed"))

import losses
import scales
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from training import Masters, Sizes

BENCHMARKS = pathlib.Path(losses.__file__).parent

SMALL = Sizes(128, 128, 2, 2, 64, batch=4, tokens=32, steps=5)
# Ranks have whole blocks of weights; whole blocks of tokens, for tp-sp, are left to GPUs.
BLOCKS = Sizes(256, 256, 2, 1, 32, batch=2, tokens=64, steps=5)
TINIEST = Sizes(64, 64, 2, 1, 32, batch=2, tokens=32, steps=2)
ON_GPUS = Sizes(steps=20)
MOST = 5.0  # times the noise; both are of one run, and a step may amplify either
SCHEMES = losses.SCHEMES[:-1]


def _rank(
    mesh: Any, rank: int, world: int, recipe: str, sizes: Sizes, schemes: tuple[str, ...]
) -> list[losses.Result]:
    losses.deterministic()
    train = losses.trainer(sizes, ranks.device)
    compared = (each for scheme in schemes for each in losses.comparisons(scheme, recipe, world))
    return [losses.compare(each, train) for each in compared]


def _expect(results: list[list[losses.Result]], sizes: Sizes) -> None:
    first = results[0]
    assert first and all(each == first for each in results)  # ranks report the same
    for result in first:
        print(*result.cells())
        assert len(result.own) == sizes.steps
        assert result.reference[-1] < 0.95 * result.reference[0]  # it learns
        assert not result.fails, result
        assert result.comparison.bits or result.times < MOST, result


@pytest.mark.parametrize("recipe", losses.RECIPES)
def test_losses_are_those_of_one_device(recipe: str, tmp_path: Any) -> None:
    sizes, schemes = SMALL, SCHEMES
    if recipe == "blockwise":
        sizes, schemes = BLOCKS, SCHEMES[:3]
    _expect(ranks.spawn(_rank, 2, tmp_path, recipe, sizes, schemes), sizes)


@pytest.mark.parametrize(("world", "schemes"), ((3, SCHEMES[:2]), (4, SCHEMES[5:])))
def test_more_ranks(world: int, schemes: tuple[str, ...], tmp_path: Any) -> None:
    """Gradients are added in the order of ranks; FSDP is over pairs of tensor-parallel ranks."""
    sizes = dataclasses.replace(SMALL, layers=1, batch=world)
    results = ranks.spawn(_rank, world, tmp_path, "rowwise", sizes, schemes)
    _expect(results, sizes)
    assert sum(result.comparison.bits for result in results[0]) == (2 if world == 3 else 1)


def _gradients(mesh: Any, rank: int, world: int) -> None:
    def model() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64, bias=False))

    sharded, single, x = model(), model().bfloat16(), torch.randn(256, 64).bfloat16()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    fully_shard(sharded, mesh=mesh, mp_policy=policy)
    masters = Masters(single, model())
    for each in (sharded, single):
        each(x).float().square().mean().backward()
    masters.add()
    for parameter, master in zip(sharded.parameters(), masters.parameters(), strict=True):
        assert torch.equal(parameter.grad.full_tensor(), master.grad)


def test_one_device_rounds_gradients_as_fsdp(tmp_path: Any) -> None:
    """Which PyTorch's releases do at unlike places: the gradient of a norm's weight tells."""
    ranks.spawn(_gradients, 2, tmp_path)


@pytest.mark.parametrize("recipe", losses.RECIPES)
@pytest.mark.parametrize("world", ranks.gpus(2, 4))
def test_losses_on_gpus(world: int, recipe: str, tmp_path: Any) -> None:
    for schemes in (SCHEMES[:2], SCHEMES[2:4], *([SCHEMES[4:]] if world >= 4 else [])):
        args = (recipe, ON_GPUS, schemes)
        found = ranks.spawn(_rank, world, tmp_path, *args, device="cuda")
        _expect(found, ON_GPUS)


FAILING = """
import sys, losses
own = losses.Arrangement("bf16", partial_sums=2)
claim = losses.Comparison("reverse", own, losses.Arrangement("bf16"), True)
losses.comparisons = lambda *_: iter([claim])
sys.exit(losses.main())
"""


def test_bits_that_differ_are_the_exit_status() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    path = os.pathsep.join((str(BENCHMARKS), *filter(None, sys.path)))
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    options = ("--emulate", "--recipes=bf16", "--schemes=fsdp", "--steps=3")
    ended = subprocess.run(
        [sys.executable, "-c", FAILING, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **rank},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert ended.returncode == 1 and "bits FAILS" in ended.stdout, ended.stderr


def test_the_program_of_losses(tmp_path: Any) -> None:
    table = tmp_path / "losses.csv"
    sizes = [f"--{name}={size}" for name, size in dataclasses.asdict(TINIEST).items()]
    options = ("--emulate", "--schemes=fsdp,tp", "--recipes=bf16", f"--csv={table}", *sizes)
    text = ranks.run_program(BENCHMARKS / "losses.py", *options)
    text = text[text.index("\nvariant ") + 1 :]  # gloo prints lines before it, with PyTorch 2.10
    rows = {line.rsplit(maxsplit=8)[0]: line.split() for line in text.splitlines()[1:]}
    assert rows["fsdp bf16"][2:4] == ["bits", "none"]
    assert rows["tp bf16"][2] == "noise"
    with table.open(newline="") as file:
        steps = list(csv.DictReader(file))
    assert [(row["variant"], row["step"]) for row in steps] == [
        (name, str(step)) for name in ("fsdp bf16", "tp bf16") for step in (1, 2)
    ]
    assert all(row["loss"] == row["reference"] for row in steps[:2])


def test_the_program_of_scales(tmp_path: Any) -> None:
    figures = tmp_path / "figures.json"
    names = [name for name in scales.VARIANTS if not name.startswith("torchao")]
    options = (f"--variants={','.join(names)}", f"--json={figures}", f"--profile={tmp_path}")
    ranks.run_program(BENCHMARKS / "scales.py", "--emulate", "--rounds=1", *options)
    for name in names:
        assert json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"]
    found = json.loads(figures.read_text())
    assert list(found["ms"]) == names and found["weights"] == 14
    assert all(ms > 0 for own in found["ms"].values() for kind in own.values() for ms in kind)


def _scales_rank(mesh: Any, rank: int, world: int) -> None:
    """The parts give the scales of the whole."""
    shape = dataclasses.replace(scales.TINY, layers=1)
    for recipe in scales.RECIPES:
        variant = scales.Sharded("float8", recipe, gather=True)
        weights = scales.Weights(scales.sharded(variant, shape, "cpu"), torch.bfloat16)
        found = []
        for cast in (weights.singly, lambda: scales.shard_casts.cast_shards(weights.weights)):  # noqa: B023
            cast()
            # The next cast overwrites the scales.
            found.append(
                [
                    tuple(part.clone() for part in gather.parts(name))
                    for gather, _ in weights.weights
                    for name in ("q", "qt")
                ]
            )
        for one, other in zip(*found, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        words = scales.maxima(weights.weights)
        before = words.clone()
        weights.reduce(words)
        expected = [torch.empty_like(words) for _ in range(world)]
        torch.distributed.all_gather(expected, before)
        assert torch.equal(words, torch.stack(expected).amax(0)) and (words > 0).all()


def test_the_scales_of_variants(tmp_path: Any) -> None:
    ranks.spawn(_scales_rank, 2, tmp_path)
