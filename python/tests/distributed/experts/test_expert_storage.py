"""Experts of transformers whose weights are stored as [experts, in_features, out_features], in fp8 gathers."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import expert_shards
import pytest
import ranks
import torch
from torch import nn

import float8.torch as f8

pytest.importorskip("transformers")


def _equal_steps(mesh: Any, rank: int, world: int, name: str, recipe: str, experts: int) -> None:
    plain = getattr(expert_shards, name)(experts)
    expert_shards.equal_steps_of(plain, mesh, rank, world, recipe, 0, True)


@pytest.mark.parametrize(
    ("name", "recipe", "experts"),
    [
        ("gpt_oss", "tensorwise", 4),
        ("gpt_oss", "rowwise_with_gw_hp", 4),
        ("gpt_oss", "delayed", 3),
        ("llama4", "delayed", 4),
        ("llama4", "rowwise", 3),
        ("llama4", "blockwise", 4),
    ],
)
def test_equal_steps(name: str, recipe: str, experts: int, tmp_path: Any) -> None:
    """A shard of whole experts that are stored as [experts, in_features, out_features] is cast as it lies."""
    ranks.spawn(_equal_steps, 2, tmp_path, name, recipe, experts)


@ranks.needs_gpus(2)
@pytest.mark.parametrize("name", ["gpt_oss", "llama4"])
def test_on_gpus(name: str, tmp_path: Any) -> None:
    ranks.spawn(_equal_steps, 2, tmp_path, name, "rowwise", 3, device="cuda")


def _options(mesh: Any, rank: int, world: int) -> None:
    """Such weights are verified, compiled, gathered once a step, and not gathered in fp8 in parts of in_features."""
    x = torch.randn(4, 24, expert_shards.HIDDEN, device=ranks.device)
    models = []
    for gather in (True, False):
        plain = nn.Sequential(
            *(each.feed_forward.experts for each in expert_shards.llama4(4).model.layers)
        )
        model = expert_shards.convert(plain, "rowwise", gather)
        for layer in model:
            layer.compile(fullgraph=True, backend="aot_eager")
        models.append(expert_shards.shard(model, mesh, reshard_after_forward=False))
    report = f8.verify_distributed(models[0])
    assert report.ok and len(report.layers) == 4
    expert_shards.expect_equal_steps(models, x.flatten(0, 1))
    report = f8.verify_distributed(models[0])
    assert report.ok and len(report.layers) == 4
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain = nn.Sequential(expert_shards.llama4(4).model.layers[0].feed_forward.experts)
        fp8, high = (
            expert_shards.shard(
                expert_shards.convert(copy.deepcopy(plain), "rowwise", gather), mesh, 1
            )
            for gather in (True, False)
        )
        expert_shards.expect_equal_steps([fp8, high], x.flatten(0, 1), 1, all_in_fp8=False)
    words = " ".join(str(each.message) for each in caught)
    assert "0.gate_up_proj in high precision: it is stored as [experts, in_features" in words, words


def test_options(tmp_path: Any) -> None:
    ranks.spawn(_options, 2, tmp_path)
