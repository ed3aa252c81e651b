"""Layers of the torchtitan adapter whose weights tensor parallelism shares.

Where torchtitan is not installed a small model of its interface runs. What its Module.parallelize does
for a sharding config is done here: parameters are distributed, and forward is wrapped.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import ranks
import torch
import torchtitan_model
from reference import agree, sqnr
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

if not torchtitan_model.is_there():
    torchtitan_model.install()

from torchtitan.protocols.module import Module  # type: ignore[import-not-found]

from float8.adapters import torchtitan


def _layers(recipe: str, dim: int, hidden: int) -> nn.ModuleList:
    options = {"recipe": recipe, "emulate": ranks.device == "cpu", "bias": True}
    config = torchtitan.Float8Linear.Config
    up = config(in_features=dim, out_features=hidden, **options).build()
    down = config(in_features=hidden, out_features=dim, **options).build()
    return nn.ModuleList([up, down]).to(ranks.device)


def _distribute(mesh: Any, dim: int) -> Any:
    """Returns what stands for Module.parallelize with a column-wise (0) or row-wise (1) config."""

    def parallelize(layer: Any) -> None:
        bias = Shard(0) if dim == 0 else Replicate()
        for name, placement in (("weight", Shard(dim)), ("bias", bias)):
            shared = distribute_tensor(getattr(layer, name), mesh, [placement])
            layer.register_parameter(name, nn.Parameter(shared))
        whole = layer.forward

        def forward(x: Any) -> Any:
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
            y = whole(x)
            return y if dim == 0 else y.redistribute(mesh, [Replicate()]).to_local()

        layer.forward = forward

    return parallelize


def _columns_and_rows(mesh: Any, rank: int, world: int, recipe: str) -> None:
    Module.parallelize = lambda layer, parallel_dims: parallel_dims(layer)
    single = _layers(recipe, 128 * world, 256 * world)
    shared = copy.deepcopy(single)
    for dim, layer in enumerate(shared):
        layer.parallelize(_distribute(mesh, dim))
    x, dy = (torch.randn(128 * world, 128 * world, device=ranks.device) for _ in range(2))
    results = []
    for up, down in (single, shared):
        own = x.clone().requires_grad_()
        y = down(torch.relu(up(own)))
        y.backward(dy)
        results.append((y, own.grad))
    for expected, found in zip(*results, strict=True):
        assert sqnr(found, expected) > 36, (recipe, sqnr(found, expected))
    for (name, one), part in zip(single.named_parameters(), shared.parameters(), strict=True):
        whole = part.grad.full_tensor()
        assert agree(whole, one.grad), (recipe, name, sqnr(whole, one.grad))


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"))
def test_columns_and_rows_compute_what_one_device_computes(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_columns_and_rows, 2, tmp_path, recipe)


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"))
@ranks.needs_gpus(2)
def test_columns_and_rows_on_gpus(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_columns_and_rows, 2, tmp_path, recipe, device="cuda")


def _experts(mesh: Any, rank: int, world: int) -> None:
    """The override's experts, whose hidden dimension a sharding config of 0.3.0 shares."""
    sizes = {"dim": 64, "hidden_dim": 96, "num_experts": 3}
    options = {"recipe": "tensorwise", "emulate": ranks.device == "cpu"}
    single = torchtitan.Float8GroupedExperts.Config(**sizes, **options).build().to(ranks.device)
    for p in single.parameters():
        nn.init.normal_(p, std=0.1)
    shared = copy.deepcopy(single)
    for name, dim in (("w1_EFD", 1), ("w2_EDF", 2), ("w3_EFD", 1)):
        part = distribute_tensor(getattr(shared, name).data, mesh, [Shard(dim)])
        shared.register_parameter(name, nn.Parameter(part))
    x, dy = (torch.randn(40, 64, device=ranks.device).bfloat16() for _ in range(2))
    counts = torch.tensor([10, 0, 30], device=ranks.device)
    for module in (single, shared):
        module(x, counts).backward(dy)
    for one, part in zip(single.parameters(), shared.parameters(), strict=True):
        assert torch.equal(part.grad.full_tensor(), one.grad)


def test_experts_share_the_hidden_dimension(tmp_path: Any) -> None:
    ranks.spawn(_experts, 2, tmp_path)
