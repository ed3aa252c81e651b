"""float8.torch.AdamW with experts that FSDP gathers in fp8, whose casts take the maxima that it found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import expert_shards
import pytest
import ranks
import torch
from torch import nn

import float8.torch as f8
from float8.torch.shard.gather import Gather
from float8.torch.shard.weight_gather import WeightGather


def _watch_casts() -> list[bool]:
    """Returns a list that casts of shards lengthen in this process: whether an optimizer found the maxima."""
    kept: list[bool] = []
    take = Gather.take_maxima

    def watched(gather: Any, weight: Any) -> Any:
        words = take(gather, weight)
        if not isinstance(gather, WeightGather):  # of a linear
            kept.append(words is not None)
        return words

    Gather.take_maxima = watched  # type: ignore[method-assign]
    return kept


def _forget(model: nn.Module) -> None:
    """Makes the next casts find the maxima themselves."""
    for module, name in expert_shards.gathered_weights(model):
        own: Any = module
        own.expert_weights[name]._weight_gather._maxima = None


def _train(models: list[Any], kept: list[bool], of: Callable[[Any], torch.Tensor]) -> list[int]:
    """Returns how many casts of the first model had maxima of its optimizer, and how many had not, in each step."""
    optimizers = [f8.AdamW(model.parameters(), lr=1e-2) for model in models]
    before = expert_shards.copies_of(models[0])
    counts = []
    for _ in range(3):
        ys = []
        for model in models:
            kept.clear()
            ys.append(of(model))
            counts += [kept.count(True), kept.count(False)] if model is models[0] else []
        assert torch.equal(*ys)
        for y in ys:
            y.square().mean().backward()
        if hasattr(models[0], "float8_scales"):
            expert_shards.expect_equal_scales(models)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        _forget(models[1])
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(one.to_local(), other.to_local())
    assert f8.verify_distributed(models[0]).ok
    expert_shards.expect_changes(before, models[0])
    return counts[2:]


def _twins(plain: Any, mesh: Any, recipe: str, dim: int) -> list[Any]:
    return [
        expert_shards.shard(expert_shards.convert(copy.deepcopy(plain), recipe, True), mesh, dim)
        for _ in range(2)
    ]


def _steps(mesh: Any, rank: int, world: int, recipe: str) -> None:
    """Also of w1 and w3, which one cast reads where ranks have as many whole experts."""
    x = expert_shards.rows(world)[rank]
    kept = _watch_casts()
    for dim, experts in ((0, 4), (0, 3), (1, 3)):
        models = _twins(expert_shards.layers(experts), mesh, recipe, dim)
        assert _train(models, kept, lambda model: model(x)) == 2 * [6, 0]
        optimizer = f8.AdamW(models[0].parameters(), lr=1e-2)
        for name in ("w2", "w3"):
            models[0](x).sum().backward()
            optimizer.step()
            with torch.no_grad():
                getattr(models[0][1].experts, name).mul_(2)  # which makes the maxima old
            kept.clear()
            models[0](x)
            assert (kept.count(True), kept.count(False)) == (5, 1)
            assert f8.verify_distributed(models[0]).ok


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_casts_behind_a_step_have_the_same_bits(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_steps, 2, tmp_path, recipe)


@ranks.needs_gpus(2)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_on_gpus(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_steps, 2, tmp_path, recipe, device="cuda")


def _transposed(mesh: Any, rank: int, world: int) -> None:
    """The weights of gpt-oss are stored as [E, K, N], and are cast as they lie."""
    kept = _watch_casts()
    models = _twins(expert_shards.gpt_oss(4), mesh, "rowwise", 0)
    batch = expert_shards.batches(world)[rank]
    assert _train(models, kept, lambda model: expert_shards.loss(model, batch)) == [4, 0] * 2


def test_weights_that_are_stored_transposed(tmp_path: Any) -> None:
    pytest.importorskip("transformers")
    ranks.spawn(_transposed, 2, tmp_path)


def _without_maxima(mesh: Any, rank: int, world: int, recipe: str) -> None:
    """Scales of blocks, and delayed ones, need no maxima before a cast: the update is torch's."""
    kept = _watch_casts()
    models = _twins(expert_shards.layers(2), mesh, recipe, 0)
    x = expert_shards.rows(world)[rank]
    assert _train(models, kept, lambda model: model(x)) == [0, 6] * 2


@pytest.mark.parametrize("recipe", ["blockwise", "delayed"])
def test_recipes_whose_casts_need_no_maxima(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_without_maxima, 2, tmp_path, recipe)
