"""Selective activation checkpointing by torchtitan's lists of ops: fp8 linears run once."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from calls import Calls
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import float8.torchao
from float8.adapters import selective


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """Modules as torchtitan's, of 0.2 and of 0.3."""
    module: Any = types.ModuleType("torchtitan.models.some.infra.parallelize")
    module._op_sac_save_list = {torch.ops.aten.mm.default}
    later: Any = types.ModuleType("torchtitan.distributed.activation_checkpoint")
    later._get_default_save_ops = lambda: {torch.ops.aten.linear.default}
    for each in (types.ModuleType("torchtitan"), module, later):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    module.later = later
    yield module


def _forwards(model: nn.Module, save_list: set[Any], x: torch.Tensor) -> int:
    """Returns how often linears ran in a step whose blocks are checkpointed by the list."""

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saves = func in save_list
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    with Calls() as calls:
        y = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
        y.square().sum().backward()
    return calls.count(*selective.LINEARS)


def test_a_conversion_adds_the_linears(mlp: Any, device: str, lists: Any) -> None:
    x = torch.randn(16, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    config = float8.torchao.Float8LinearConfig(emulate=device == "cpu")
    before = set(lists._op_sac_save_list)
    model = float8.torchao.convert_to_float8_training(mlp(), config=config)
    assert lists._op_sac_save_list == before | set(selective.LINEARS)
    ops = lists.later._get_default_save_ops()
    assert ops == {torch.ops.aten.linear.default, *selective.LINEARS}
    assert selective.save_linears() == 2  # again, to the same lists
    assert lists.later._get_default_save_ops() == ops
    assert _forwards(model, before, x) == 4  # two linears, each again in backward
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    assert _forwards(model, lists._op_sac_save_list, x) == 2
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_without_torchtitan_there_is_nothing_to_do() -> None:
    assert selective.save_linears() == 0
