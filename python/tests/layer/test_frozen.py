"""Linears with frozen weights, such as those below LoRA: nothing is kept of x, whose copies the weight's gradient alone reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused import FeedForward, converted, inputs, step
from reference import same, sqnr
from saved import kept
from torch import nn
from torch.utils.checkpoint import checkpoint

import float8.torch as f8

Config = Callable[..., f8.LinearConfig]
pytestmark = pytest.mark.usefixtures("large_weights")
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise")
ROWS = 2 * 40


class Pair(nn.Module):
    """Two linears that read the same x."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(64, 96), nn.Linear(64, 96)

    def forward(self, x: torch.Tensor) -> Any:
        return self.one(x) * self.other(x)


def model_of(config: Config, recipe: str, kind: type[nn.Module] = Pair, **options: Any) -> Any:
    torch.manual_seed(1)
    return converted(kind(), config(recipe, **options))


@pytest.mark.parametrize("recompute", [None, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_other_gradients_have_the_same_bits(config: Config, recipe: str, recompute: Any) -> None:
    trained, frozen = (model_of(config, recipe, recompute=recompute) for _ in range(2))
    frozen.one.weight.requires_grad_(False)
    for seed in range(3):  # the second one shares the cast of x where it may
        x = inputs(trained, seed=seed)
        y, dx, _, *rest = step(trained, x)
        assert same(step(frozen, x), [y, dx, *rest])
        assert frozen.one.weight.grad is None
        for model in (trained, frozen):
            f8.sync_float8_amax_and_scale_history(model)
    called = step(frozen, x, lambda x: checkpoint(frozen, x, use_reentrant=False))
    assert same(called, step(frozen, x))
    frozen.one.weight.requires_grad_()
    assert same(step(frozen, x), step(trained, x))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_keeps_nothing_of_x(config: Config, recipe: str, compiled: bool) -> None:
    torch._dynamo.reset()
    model = model_of(config, recipe).requires_grad_(False)
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    if recipe == "delayed":
        step(model, inputs(model))
        f8.sync_float8_amax_and_scale_history(model)
    x = inputs(model).requires_grad_()
    of_product = 2 * 2 * ROWS * 96  # y of both, in bfloat16
    copies = 0 if compiled else 2 * 64 * 96
    size = sum(bytes_ for at, bytes_ in kept(model, x, call) if at != x.data_ptr())
    assert copies + of_product <= size < copies + of_product + 2048 + 6 * 64 * 4 * 4
    assert x.grad is not None and same([x.grad], [step(model, inputs(model))[1]])


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed", "blockwise"])
@pytest.mark.parametrize("recompute", [None, True])
def test_a_fused_mlp_keeps_neither_x_nor_h(config: Config, recipe: str, recompute: Any) -> None:
    sizes = {}
    for trains in (True, False):
        model = model_of(config, recipe, FeedForward, recompute=recompute)
        assert all(each.fused for each in f8.fuse(model))
        model.requires_grad_(trains)
        x = inputs(model)
        results = step(model, x)[:2]
        sizes[trains] = sum(size for _, size in kept(model, x.requires_grad_()))
        if trains:
            wanted = results
    assert same(results, wanted)
    of_x = 2 if recompute else 1  # bytes an element
    assert sizes[True] - sizes[False] >= ROWS * (64 * of_x + (0 if recompute else 144))


def test_a_bias_trains(config: Config) -> None:
    model = model_of(config, "rowwise")
    for each in (model.one, model.other):
        each.weight.requires_grad_(False)
    expected = [step(model_of(config, "rowwise"), inputs(model))[i] for i in (0, 1, 3, 5)]
    assert same(step(model, inputs(model)), expected)
    model(inputs(model)).sum().backward()  # of an x without a gradient
    assert model.one.bias.grad is not None


def test_a_weight_that_is_frozen_between_two_steps(config: Config) -> None:
    """Gradients of the step before are left as they are."""
    model = model_of(config, "tensorwise")
    x = inputs(model)
    step(model, x)
    before = model.one.weight.grad.clone()
    model.one.weight.requires_grad_(False)
    y = model(x.requires_grad_())
    model.one.weight.requires_grad_()
    y.sum().backward()  # the weight had no gradient when y was made
    assert torch.equal(model.one.weight.grad, before)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_scales_of_a_frozen_tower_follow_its_data(
    config: Config, fused: bool, compiled: bool
) -> None:
    """Linears below all that trains need no gradient, and have the scales of their own x all the same."""
    torch._dynamo.reset()
    model = model_of(config, "delayed", FeedForward)
    if fused:
        assert all(each.fused for each in f8.fuse(model))
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    x = inputs(model)
    for frozen, factor in ((False, 1), (True, 1), *[(True, 64)] * 4):
        model.requires_grad_(not frozen)
        y = call(factor * x)
        if not frozen:
            y.sum().backward()
        f8.sync_float8_amax_and_scale_history(model)
    scales = model.float8_scales.state.clone()
    with torch.no_grad():
        y = call(64 * x)
    assert torch.equal(scales, model.float8_scales.state)
    dynamic = model_of(config, "tensorwise", FeedForward)
    assert sqnr(y, dynamic(64 * x)) > 20
