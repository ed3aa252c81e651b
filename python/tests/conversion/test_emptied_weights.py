"""Weights that are empty between calls, as DeepSpeed's ZeRO-3 leaves them: hooks put values into `.data`, and take them away."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import float8.torch as f8

Config = Callable[..., f8.LinearConfig]
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise")


class Emptied:
    """The weights of a model's linears, which have values while a forward or a backward of theirs runs."""

    def __init__(self, model: nn.Module) -> None:
        self.values: dict[Any, torch.Tensor] = {}
        self.grads: dict[Any, torch.Tensor] = {}
        for each in model.modules():
            if isinstance(each, nn.Linear):
                self.values[each.weight] = each.weight.data
                self._take(each)
                each.register_forward_pre_hook(self._give)
                each.register_forward_hook(self._take)
                each.register_full_backward_pre_hook(self._give)
                each.weight.register_post_accumulate_grad_hook(self._keep)

    def _give(self, layer: Any, *_: Any) -> None:
        layer.weight.data = self.values[layer.weight]

    def _take(self, layer: Any, *_: Any) -> None:
        layer.weight.data = layer.weight.data.new_empty(0)

    def _keep(self, weight: Any) -> None:
        self.grads[weight] = weight.grad
        weight.grad = None
        weight.data = weight.data.new_empty(0)

    def step(self) -> None:
        for weight, grad in self.grads.items():
            self.values[weight].sub_(grad.to(weight.dtype), alpha=0.1)


def made(device: str) -> Any:
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32)).to(device, torch.bfloat16)


@pytest.mark.parametrize("recompute", (None, True))
@pytest.mark.parametrize("recipe", RECIPES)
def test_train_as_weights_that_stay(
    recipe: str, recompute: bool | None, device: str, config: Config
) -> None:
    model = made(device)
    f8.convert_to_float8_training(model, config=config(recipe, recompute=recompute))
    other = copy.deepcopy(model)
    emptied, before = Emptied(model), [p.detach().clone() for p in other.parameters()]
    assert all(m.weight.numel() == 0 for m in model if isinstance(m, nn.Linear))
    for _ in range(3):
        x = torch.randn(40, 64, dtype=torch.bfloat16, device=device)
        ys = []
        for each in (model, other):
            ys.append(each(x))
            ys[-1].float().square().mean().backward()
            f8.sync_float8_amax_and_scale_history(each)
        assert torch.equal(*ys)
        emptied.step()
        with torch.no_grad():
            for layer in (other[0], other[2]):
                layer.weight.sub_(layer.weight.grad, alpha=0.1)
        for each in (model, other):
            each.zero_grad()
    weights = [layer.weight for layer in (other[0], other[2])]
    assert all(map(torch.equal, emptied.values.values(), weights))
    assert not any(torch.equal(p, old) for p, old in zip(weights, before[::2], strict=True))


def test_calls_that_look_at_weights(device: str, config: Config) -> None:
    model = f8.convert_to_float8_training(made(device), config=config("rowwise"))
    plain = f8.agree(model)
    Emptied(model)
    assert f8.agree(model) == plain
    with pytest.raises(
        ValueError, match=r"layer '0' is empty between its calls.*leave cache_weight_casts out"
    ):
        f8.cache_weight_casts(model)
    assert all(layer._weight_cast is None for layer in (model[0], model[2]))
    report = f8.verify_distributed(model)
    assert all("empty between calls" in each.skipped for each in report.layers)
    f8.prepare(model, 64)


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise"))
def test_refuses_what_deepspeed_has(recipe: str, device: str, config: Config) -> None:
    def hook(*_: Any) -> None:
        pass

    hook.__module__ = "deepspeed.runtime.zero.parameter_offload"
    model = f8.convert_to_float8_training(made(device), config=config("rowwise"))
    model[2].register_forward_pre_hook(hook)
    before = list(model)
    if recipe == "rowwise":  # which has nothing to replace
        f8.convert_to_float8_training(model, config=config(recipe))
    else:
        with pytest.raises(ValueError, match=r"layer '2'.*ZeRO-3.*before deepspeed\.initialize"):
            f8.convert_to_float8_training(model, config=config(recipe))
    assert list(model) == before
