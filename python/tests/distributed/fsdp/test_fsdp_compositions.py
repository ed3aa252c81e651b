"""FSDP2 with weights gathered in fp8, composed with what FSDP2 has: prefetches, types, any number of ranks.

A model with fp8 gathers has the bits of the same model without them. Ranks are processes on the
emulated device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import ranks
import torch
from gathered_models import (
    RECIPES,
    Checkpointed,
    expect_equal_steps,
    expect_equal_under,
    mlp,
    train_step,
    uneven_rows,
)
from parallel_models import shard
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import float8
import float8.torch as f8

AXIS = float8.Cast(granularity=float8.Granularity.AXIS)
TENSOR = float8.Cast()
E5M2 = float8.Cast(format=float8.Format.E5M2)
HIGH = float8.Cast(float8.Scaling.HIGH_PRECISION)
GEMM = float8.recipes.Gemm
# The copies of the weight have scales of other kinds, in both orders.
CUSTOM = (
    float8.Recipe(GEMM(AXIS, TENSOR, fast=True), GEMM(E5M2, AXIS), GEMM(HIGH, HIGH)),
    float8.Recipe(GEMM(TENSOR, AXIS), GEMM(AXIS, TENSOR), GEMM(E5M2, TENSOR)),
)


class Ahead(nn.Sequential):
    """Blocks of which each one starts the gather of the next, as a program of its own may."""

    def forward(self, x: torch.Tensor) -> Any:
        blocks: list[Any] = list(self)
        for block, following in itertools.zip_longest(blocks, blocks[1:]):
            handle = None if following is None else following.unshard(async_op=True)
            x = block(x)
            if handle is not None:
                handle.wait()
        return x


def _chain(mesh: Any, gather: bool, kind: type[nn.Sequential], prefetch: str) -> Any:
    """Returns four sharded blocks with two linears each, which are gathered ahead."""
    torch.manual_seed(0)
    blocks: list[Any] = [
        kind(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64, bias=False)) for _ in range(4)
    ]
    model: Any = (Ahead if prefetch == "unshard" else nn.Sequential)(*blocks)
    config = f8.LinearConfig("rowwise", emulate=True, enable_fsdp_float8_all_gather=gather)
    f8.convert_to_float8_training(model, config=config)
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    if prefetch == "explicit":  # one block ahead, and two
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 2 + i % 2])
            block.set_modules_to_backward_prefetch(blocks[max(0, i - 1 - i % 2) : i][::-1])
    return model


def _prefetched(mesh: Any, rank: int, world: int) -> None:
    """Also a byte an element and direction, and another one where forward runs again."""
    torch.manual_seed(1)
    x = torch.randn(world, 16, 64)[rank]
    traffic = ranks.Traffic()
    for kind, prefetch in itertools.product((nn.Sequential, Checkpointed), ("explicit", "unshard")):
        models = [_chain(mesh, gather, kind, prefetch) for gather in (True, False)]
        expect_equal_steps(models, x)
        f8.precompute_float8_dynamic_scale_for_fsdp(models[0])
        optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
        found, reduced = traffic.of(lambda: train_step(models[0], optimizer, x))  # noqa: B023
        copies = 2 if kind is nn.Sequential else 3
        weights, biases = 4 * 2 * 64 * 96, 4 * 2 * 4 * 96  # a bias is gathered twice, in fp32
        assert found == {torch.uint8: (copies * weights + biases) // world}, (kind, prefetch)
        assert reduced == 0


def test_prefetches_that_a_program_chooses(tmp_path: Any) -> None:
    ranks.spawn(_prefetched, 2, tmp_path)


def _two_ranks(mesh: Any, rank: int, world: int) -> None:
    """Gradients reduced in bf16, custom recipes, and a root that is gathered before its first forward."""
    torch.manual_seed(1)
    x = torch.randn(world, 16, 64)[rank]
    types = {
        "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "param": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "reduce": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    }
    for recipe, policy in (
        *((each, "bf16") for each in RECIPES),
        ("rowwise", "param"),
        ("rowwise", "reduce"),
    ):
        rows = uneven_rows(world)
        models = [
            shard(mlp(recipe, rows, gather), mesh, mp_policy=types[policy])
            for gather in (True, False)
        ]
        expect_equal_steps(models, x)
    for custom in CUSTOM:
        for reshard in (True, False):
            expect_equal_under(mesh, rank, custom, {"reshard_after_forward": reshard})
    models = [fully_shard(mlp("rowwise", 80, gather), mesh=mesh) for gather in (True, False)]
    for model in models:
        model.unshard(async_op=True).wait()
    expect_equal_steps(models, x)


def test_types_of_gradients_and_recipes_of_ones_own(tmp_path: Any) -> None:
    ranks.spawn(_two_ranks, 2, tmp_path)


def _shards(mesh: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    for recipe in (*RECIPES, CUSTOM[0]):
        if recipe != "blockwise" or mesh.size() < 5:
            yield recipe, {"reshard_after_forward": True}
    yield "rowwise", {"reshard_after_forward": False}


def _four_ranks(mesh: Any, rank: int, world: int) -> None:
    """Shards of four ranks, and two shards on two ranks each (HSDP)."""
    pairs = distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    for each in (mesh, pairs):
        for recipe, options in _shards(mesh):
            expect_equal_under(each, rank, recipe, options)


def test_four_ranks_and_replicas(tmp_path: Any) -> None:
    ranks.spawn(_four_ranks, 4, tmp_path)


def _empty(mesh: Any, rank: int, world: int) -> None:
    """Four ranks have four rows each, and the last one none."""
    for recipe, options in _shards(mesh):
        model = shard(mlp(recipe, 16, True), mesh)
        assert model[2].weight.to_local().shape == ((0 if rank == 4 else 4), 16)
        if options["reshard_after_forward"]:
            expect_equal_under(mesh, rank, recipe, options)


def test_a_rank_without_rows(tmp_path: Any) -> None:
    ranks.spawn(_empty, 5, tmp_path)


class _Tied(nn.Module):
    """A head that reads its input's embedding."""

    def __init__(self, head_first: bool) -> None:
        super().__init__()
        if head_first:
            self.head = nn.Linear(64, 96, bias=False)
        self.embedding = nn.Embedding(96, 64)
        if not head_first:
            self.head = nn.Linear(64, 96, bias=False)
        self.middle = nn.Linear(64, 64)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.middle(self.embedding(x)))


def _tied(mesh: Any, rank: int, world: int) -> None:
    tokens = torch.randint(0, 96, (4, 16), generator=torch.Generator().manual_seed(rank))
    for head_first in (False, True):
        models = []
        for gather in (True, False):
            torch.manual_seed(0)
            model: Any = _Tied(head_first)
            parameters = list(model.parameters())
            config = f8.LinearConfig("rowwise", emulate=True, enable_fsdp_float8_all_gather=gather)
            f8.convert_to_float8_training(model, config=config)
            assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
            models.append(fully_shard(model, mesh=mesh))
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, fused=True) for model in models]
        for _ in range(3):
            losses = []
            for model, optimizer in zip(models, optimizers, strict=True):
                assert model.head.weight is model.embedding.weight
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            assert torch.equal(*losses)
        assert models[0].middle._weight_gather is not None
        for own, other in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(own.to_local(), other.to_local())


def test_tied_weights_stay_tied(tmp_path: Any) -> None:
    ranks.spawn(_tied, 2, tmp_path)
