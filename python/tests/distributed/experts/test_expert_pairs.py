"""torchtitan's experts, whose w1 and w3 are computed as one weight, under FSDP with fp8 gathers."""

from __future__ import annotations

import copy
from typing import Any

import expert_shards
import pytest
import ranks
import torch

import float8.torch as f8
from float8.torch.experts import moe


def _models(mesh: Any, recipe: str, experts: int, n: int, dim: int, **options: Any) -> list[Any]:
    """Returns the layers of torchtitan with fp8 gathers, with gathers in high precision, and on one rank."""
    plain = expert_shards.layers(experts, n=n)
    fp8, single = (
        expert_shards.convert(copy.deepcopy(plain), recipe, gather) for gather in (True, False)
    )
    high = expert_shards.shard(single, mesh, dim, **options)
    return [expert_shards.shard(fp8, mesh, dim, **options), high, single]


def _watch_mlps() -> list[int]:
    """Returns a list with an element for each MLP that this process computes in one op from now on."""
    calls: list[int] = []
    of_rows = moe._forward

    def watched(*args: Any) -> Any:
        calls.append(1)
        return of_rows(*args)

    moe._forward = watched
    return calls


def _equal_steps(
    mesh: Any, rank: int, world: int, recipe: str, experts: int, n: int, dim: int
) -> None:
    fp8, high, single = models = _models(mesh, recipe, experts, n, dim)
    x = expert_shards.rows(world)
    seen, mlps = expert_shards.watch(fp8), _watch_mlps()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True) for each in models]
    before = expert_shards.copies_of(fp8)
    for step in range(3):
        for part in x:
            (single(part).square().mean() / world).backward()
        mlps.clear()
        ys = [model(x[rank]) for model in models[:2]]
        assert len(mlps) == 4, "two layers of each model are an MLP in one op"
        assert torch.equal(*ys) and torch.equal(ys[0], single(x[rank]))
        for y in ys:
            y.square().mean().backward()
        for (name, own), other, one in zip(
            fp8.named_parameters(), high.parameters(), single.parameters(), strict=True
        ):
            assert torch.equal(own.grad.to_local(), other.grad.to_local()), (step, name)
            assert torch.equal(own.grad.full_tensor(), one.grad), (step, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 0:
            f8.precompute_float8_dynamic_scale_for_fsdp(fp8)
    assert seen[0] and seen[2]  # w1 and w3 have copies alone
    expert_shards.expect_changes(before, fp8)


@pytest.mark.parametrize(
    ("recipe", "experts", "n", "dim"),
    [("rowwise", 4, 48, 0), ("blockwise", 4, 48, 0)],
)
def test_equal_steps(recipe: str, experts: int, n: int, dim: int, tmp_path: Any) -> None:
    """Steps are those of one rank without gathers, also where blocks of 128x128 have rows of w1 and of w3."""
    ranks.spawn(_equal_steps, 2, tmp_path, recipe, experts, n, dim)
