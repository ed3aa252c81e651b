"""Experts whose weights FSDP gathers in fp8, whole ones or parts of each."""

from __future__ import annotations

import copy
from typing import Any

import expert_shards
import pytest
import ranks
import torch

import float8.torch as f8

pytest.importorskip("transformers")

DYNAMIC = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")


def _equal_steps(
    mesh: Any, rank: int, world: int, recipe: str, experts: int, size: int, dim: int, fused: bool
) -> None:
    """Trains with fp8 gathers, with gathers in high precision and on one rank."""
    single = expert_shards.convert(expert_shards.qwen(experts, size), recipe, False)
    in_f32 = recipe != "rowwise_with_gw_hp"
    if not in_f32:
        single.bfloat16()
    high = expert_shards.shard(single, mesh, dim)
    fp8 = expert_shards.shard(expert_shards.convert(copy.deepcopy(single), recipe, True), mesh, dim)
    seen = expert_shards.watch(fp8)
    kind = {"fused": True} if fused else {"foreach": True}
    with_single = world == 2 and in_f32  # sums of gradients have one order, and one rounding
    trained = [fp8, high, single] if with_single else [fp8, high]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, **kind) for m in trained]
    before = expert_shards.copies_of(single)
    batch = expert_shards.batches(world)
    for step in range(3):
        losses = [expert_shards.loss(model, batch[rank]) for model in (fp8, high)]
        losses.append(expert_shards.loss(trained[-1], batch[rank]))
        assert all(torch.equal(each, losses[0]) for each in losses), step
        for each in losses[:2]:
            each.backward()
        if with_single:
            for part in batch:
                (expert_shards.loss(single, part) / world).backward()
        for (name, a), b in zip(fp8.named_parameters(), high.parameters(), strict=True):
            assert torch.equal(a.grad.to_local(), b.grad.to_local()), (step, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 0:
            f8.precompute_float8_dynamic_scale_for_fsdp(fp8)
        weights = [expert_shards.copies_of(model) for model in trained]
        for name, own in weights[0].items():
            assert all(torch.equal(own, other[name]) for other in weights[1:]), (step, name)
    assert len(seen) == 3 * 4 and all(seen)
    expert_shards.expect_changes(before, fp8)


@pytest.mark.parametrize("recipe", DYNAMIC)
def test_whole_experts(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_equal_steps, 2, tmp_path, recipe, 4, 48, 0, False)


@pytest.mark.parametrize(("world", "experts"), [(2, 3), (3, 4)])
def test_uneven_numbers_of_experts(world: int, experts: int, tmp_path: Any) -> None:
    """Of three ranks with four experts, the last has none."""
    ranks.spawn(_equal_steps, world, tmp_path, "rowwise", experts, 48, 0, True)


@pytest.mark.parametrize("recipe", DYNAMIC[:3])
def test_parts_of_each_expert(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_equal_steps, 2, tmp_path, recipe, 3, 48, 1, True)
