"""Fused MLPs under FSDP2: block by block, and the MLP as a unit of its own."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import ranks
import torch
from parallel_models import expect_trains_as
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import float8.torch as f8


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(64, 128, bias=False) for _ in range(2))
        self.w2 = nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return y


class Ungated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.fc2(functional.gelu(self.fc1(x)))
        return y


f8.register_mlp(FeedForward, gate="w1", up="w3", down="w2", activation="silu")
f8.register_mlp(Ungated, up="fc1", down="fc2", activation="gelu")


def _model(
    recipe: str = "blockwise", kind: type[nn.Module] = FeedForward, gather: bool = False
) -> nn.Sequential:
    blocks = [nn.Sequential(nn.LayerNorm(64), kind()) for _ in range(2)]
    config = f8.LinearConfig(recipe, emulate=True, enable_fsdp_float8_all_gather=gather)
    return f8.convert_to_float8_training(nn.Sequential(*blocks), config=config)  # type: ignore[return-value]


def _rank(
    mesh: Any,
    rank: int,
    world: int,
    unit: str,
    recipe: str,
    kind: type[nn.Module] = FeedForward,
    gather: bool = False,
    reshard: bool = True,
    compiled: bool = False,
) -> None:
    torch.manual_seed(0)
    model = _model(recipe, kind, gather)
    single = copy.deepcopy(model)
    f8.fuse(single)
    if unit == "mlp":
        f8.fuse(model)
    for block in model:
        own: Any = block[1] if unit == "mlp" else block  # type: ignore[index]
        fully_shard(own, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    assert [each.fused for each in f8.fuse(model)] == [True, True]
    warnings.filterwarnings("error", message=".*no longer fused.*")
    if compiled:
        for block in model:
            block.compile(backend="aot_eager", fullgraph=True)
    before = [p.detach().clone() for p in single.parameters()]
    expect_trains_as(model, single, rank)
    assert not any(map(torch.equal, before, single.parameters()))
    for layer in model.modules():
        if isinstance(layer, f8.Float8Linear):
            assert (layer._weight_gather is not None) == gather


@pytest.mark.parametrize(
    ("unit", "recipe"),
    [("block", "blockwise"), ("mlp", "blockwise"), ("block", "tensorwise"), ("mlp", "rowwise")],
)
def test_fsdp2_shards_a_fused_model(unit: str, recipe: str, tmp_path: Any) -> None:
    """Blocks that are units are sharded before it is fused, and MLPs that are after it."""
    ranks.spawn(_rank, 2, tmp_path, unit, recipe)


@pytest.mark.parametrize(
    ("unit", "recipe", "reshard", "compiled"),
    [
        ("block", "tensorwise", True, False),
        ("block", "tensorwise", True, True),
        ("block", "rowwise", False, False),
        ("block", "delayed", True, False),
        ("mlp", "blockwise", True, False),
    ],
)
def test_fsdp2_gathers_a_fused_model_in_fp8(
    unit: str, recipe: str, reshard: bool, compiled: bool, tmp_path: Any
) -> None:
    ranks.spawn(_rank, 2, tmp_path, unit, recipe, FeedForward, True, reshard, compiled)


def test_fsdp2_gathers_an_mlp_with_biases_in_fp8(tmp_path: Any) -> None:
    ranks.spawn(_rank, 2, tmp_path, "block", "rowwise", Ungated, True)


def test_fsdp2_shards_an_mlp_with_biases(tmp_path: Any) -> None:
    ranks.spawn(_rank, 2, tmp_path, "block", "rowwise", Ungated)


def _left_rank(mesh: Any, rank: int, world: int) -> None:
    """Units of children, and MLPs that are units already, are left and named."""
    model = _model()
    fully_shard(model[0][1].w1, mesh=mesh)  # type: ignore[index,union-attr]
    fully_shard(model[1][1], mesh=mesh)  # type: ignore[index]
    fully_shard(model, mesh=mesh)
    first, second = f8.fuse(model)
    assert not first.fused and "its w1 has hooks" in first.why
    assert not second.fused and "call fuse before" in second.why
    model(torch.randn(32, 64)).sum().backward()


@pytest.mark.filterwarnings("ignore:float8. fuse left")
def test_units_of_fsdp_are_left(tmp_path: Any) -> None:
    ranks.spawn(_left_rank, 2, tmp_path)
