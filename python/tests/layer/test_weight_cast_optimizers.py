"""Optimizers that cached casts of weights are told of: wrappers, several of them, and what is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import float8.torch as f8

Config = Callable[..., f8.LinearConfig]


class _Wrapper(torch.optim.Optimizer):
    """Steps an optimizer as accelerate's wrapper does: it has the class, and none of its attributes."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


def test_optimizers_may_be_wrapped(config: Config, device: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64)).to(device)
    f8.convert_to_float8_training(model, config=config("rowwise"))
    optimizers = [torch.optim.SGD(model.parameters(), lr=1) for _ in range(2)]
    casts = f8.cache_weight_casts(model, _Wrapper(optimizers[0]))
    casts.update_after(_Wrapper(_Wrapper(optimizers[1])))
    before = model[0].weight.detach().clone()
    x = torch.randn(40, 64, device=device, dtype=torch.bfloat16)
    model(x).square().sum().backward()
    _Wrapper(optimizers[0]).step()
    assert not torch.equal(model[0].weight, before)
    assert [len(each._optimizer_step_post_hooks) for each in optimizers] == [1, 1]
    casts.remove()
    assert [len(each._optimizer_step_post_hooks) for each in optimizers] == [0, 0]


@pytest.mark.parametrize("optimizer", [[], "adamw"])
def test_what_is_no_optimizer_is_refused_before_a_layer_changes(
    optimizer: Any, config: Config
) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    f8.convert_to_float8_training(model, config=config("rowwise"))
    with pytest.raises(TypeError, match="one optimizer of PyTorch's, and each further one"):
        f8.cache_weight_casts(model, optimizer)
    assert model[0]._weight_cast is None
