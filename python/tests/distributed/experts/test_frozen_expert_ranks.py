"""Frozen experts over ranks: the other results have the bits of experts that train, and nothing is kept for gradients of weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import expert_shards
import pytest
import ranks
import torch
from saved import kept
from torch import Tensor, nn

import float8.torch as f8

E, D, F, T, TOP = 4, 64, 64, 40, 2
Made = Callable[[tuple[int, ...]], tuple[Any, list[Tensor]]]


def _tokens(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(rank)
    x = torch.randn(T, D, generator=random).bfloat16()
    ids = torch.randint(E, (T, TOP), generator=random)
    scores = torch.rand(T, TOP, generator=random)
    return tuple(each.to(ranks.device) for each in (x, ids, scores))  # type: ignore[return-value]


def _compare(made: Made, x: Tensor, *sets: tuple[int, ...]) -> list[int]:
    """Compares the gradients of x and of the weights where all train and where those of each set are frozen.

    It returns the bytes that are kept for each backward.
    """
    results, sizes = [], []
    for frozen in ((), *sets):
        call, weights = made(frozen)
        of_x = x.detach().clone().requires_grad_()
        found = kept(nn.ParameterList(weights), of_x, call)
        grads = (getattr(each.grad, "_local_tensor", each.grad) for each in weights)
        results.append([of_x.grad, *grads])
        sizes.append(sum(size for _, size in found))
        for i, (one, other) in enumerate(zip(results[-1], results[0], strict=True)):
            assert one is None if i - 1 in frozen else torch.equal(one, other), (frozen, i)
    return sizes


def _of_moe(mesh: Any, rank: int, recipe: str, over: str) -> None:
    random = torch.Generator().manual_seed(1)
    whole = [torch.randn(size, generator=random) / 8 for size in ((E, 2 * F, D), (E, D, F))]
    own = [w.chunk(2)[rank] for w in whole]
    if over == "tp_group":
        gate, up = whole[0].chunk(2, 1)
        own = [torch.cat([each.chunk(2, 1)[rank] for each in (gate, up)], 1)]
        own.append(whole[1].chunk(2, 2)[rank])
    x, ids, scores = _tokens(rank if over == "group" else 0)

    def made(frozen: tuple[int, ...]) -> tuple[Any, list[Tensor]]:
        weights: list[Any] = [nn.Parameter(w.to(ranks.device, torch.bfloat16)) for w in own]
        for i in frozen:
            weights[i].requires_grad_(False)
        how: Any = {over: mesh.get_group(), "recipe": recipe, "emulate": ranks.device == "cpu"}
        return lambda x: f8.functional.moe(x, ids, scores, *weights, **how), weights

    sizes = _compare(made, x, (0,), (1,), (0, 1))
    assert sizes[3] < min(sizes[1:3]) and max(sizes[1:3]) < sizes[0]


def _of_fsdp(mesh: Any, rank: int, recipe: str, kind: type[nn.Module], gather: bool) -> None:
    single = expert_shards.convert(expert_shards.layers(E, kind), recipe, gather)

    def made(frozen: tuple[int, ...]) -> tuple[Any, list[Tensor]]:
        model = copy.deepcopy(single)
        for i, (_, weight) in enumerate(model.named_parameters()):
            weight.requires_grad_(i not in frozen)
        model = expert_shards.shard(model, mesh)
        seen = expert_shards.watch(model)
        weights = list(model.parameters())

        def call(x: Tensor) -> Tensor:
            y: Tensor = model(x)
            assert all(seen) == gather
            return y

        return call, weights

    _compare(made, expert_shards.rows(2)[rank], (0, 2), (1,), tuple(range(6)))


def _rank(mesh: Any, rank: int, world: int, recipe: str) -> None:
    for over in ("group", "tp_group"):
        _of_moe(mesh, rank, recipe, over)
    _of_fsdp(mesh, rank, recipe, expert_shards.GroupedExperts, True)
    for gather in (False, True):
        _of_fsdp(mesh, rank, recipe, expert_shards.FirstGroupedExperts, gather)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_other_gradients_have_the_same_bits(recipe: str, tmp_path: Any) -> None:
    """Of expert parallelism, of ranks that share the hidden features, and of FSDP with gathers in fp8 and without."""
    ranks.spawn(_rank, 2, tmp_path, recipe)
