"""Derivatives that nobody computes in fp8 are errors: no gradient of a gradient, of forward mode or of torch.func is silently 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call

import float8.torch as f8

Config = Callable[..., f8.LinearConfig]
RECIPES = ("rowwise", "delayed")


def made(device: str, config: Config, recipe: str = "rowwise") -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(
        device, torch.bfloat16
    )
    f8.convert_to_float8_training(model, config=config(recipe))
    return model, torch.randn(16, 64, dtype=torch.bfloat16, device=device)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gradient_penalty(device: str, config: Config, recipe: str, last: bool) -> None:
    """Also where dy has no gradient, and where autograd.grad asks for leaves alone."""
    model, x = made(device, config, recipe)
    weight = model[2].weight if last else model[0].weight
    y = (model[2] if last else model)(x.requires_grad_())
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert dx.requires_grad
    penalty = dx.float().norm(dim=1).sub(1).square().mean()
    for inputs in (weight, x):
        with pytest.raises(RuntimeError, match="no second derivatives: leave"):
            torch.autograd.grad(penalty + weight.sum(), inputs, retain_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives: leave"):
        penalty.backward()


def test_first_derivatives_keep_a_graph(device: str, config: Config) -> None:
    model, x = made(device, config)
    graphs = []
    for create_graph in (False, True):
        model.zero_grad()
        model(x).square().sum().backward(create_graph=create_graph)
        graphs.append([each.grad.detach().clone() for each in model.parameters()])
    assert all(map(torch.equal, *graphs))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_forward_mode(device: str, config: Config, frozen: bool, compiled: bool) -> None:
    torch._dynamo.reset()
    model, x = made(device, config)
    model.requires_grad_(not frozen)

    def tangent(x: torch.Tensor) -> Any:
        return torch.func.jvp(model, (x,), (x,))[1]

    call = torch.compile(tangent, backend="aot_eager") if compiled else tangent
    with pytest.raises(RuntimeError, match=r"gradients of forward mode.*use backward"):
        call(x)
    with forward_ad.dual_level(), torch.no_grad():
        model(x)  # has no tangent
        with pytest.raises(RuntimeError, match="gradients of forward mode"):
            model(forward_ad.make_dual(x, x))


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_torch_func(device: str, config: Config, compiled: bool) -> None:
    torch._dynamo.reset()
    model, x = made(device, config)
    model.requires_grad_(False)
    of_sum = torch.func.grad(lambda x: model(x).float().sum())
    call = torch.compile(of_sum, backend="aot_eager") if compiled else of_sum
    with pytest.raises(RuntimeError, match=r"gradients of torch.func.*use backward"):
        call(x)


@pytest.mark.parametrize("trains", ["weights", "x"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_ensemble_that_trains(device: str, config: Config, recipe: str, trains: str) -> None:
    """vmap does not say of a tensor that it maps that it requires a gradient."""
    models, (x, *_) = zip(*(made(device, config, recipe) for _ in range(3)), strict=True)
    parameters, _ = torch.func.stack_module_state(list(models))
    xs = torch.stack([x, x, x])
    if trains == "x":
        parameters = {name: each.detach() for name, each in parameters.items()}
        xs.requires_grad_()
    with pytest.raises(RuntimeError, match=r"gradients of torch.func.*use backward"):
        torch.func.vmap(lambda own, x: functional_call(models[0], own, (x,)))(parameters, xs)


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_ensemble(device: str, config: Config, recipe: str) -> None:
    """What computes without gradients may be mapped."""
    models, (x, *_) = zip(*(made(device, config, recipe) for _ in range(3)), strict=True)
    parameters, _ = torch.func.stack_module_state(list(models))
    with torch.no_grad():
        y = torch.func.vmap(lambda own: functional_call(models[0], own, (x,)))(parameters)
        assert torch.equal(y, torch.stack([model(x) for model in models]))
