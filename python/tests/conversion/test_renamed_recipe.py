"""A recipe's name is for people: the settings of a named recipe alone decide what linears and experts do.

A recipe has no name of its own here, so a renamed one is one whose settings the table of names lacks.
Ops are then given the settings in place of the number of a name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import Calls
from torch import nn

import float8.torch as f8
from float8 import recipes
from float8.torch.experts import recipe as of_experts

NAMED = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise")
_OF_NAMES = 0xF  # the bits of a config that have a name's number
_OF_SETTINGS = ~((1 << 16) - 1)


class Projections(nn.Module):
    """Linears of one x, whose cast they share."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(64, 32), nn.Linear(64, 48, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.q(x), self.k(x)), -1)


def linears(config: f8.LinearConfig, device: str) -> tuple[Any, ...]:
    """Returns the options of converted linears, the results of two steps, and the ops in them."""
    torch.manual_seed(1)
    model = Projections().to(device, torch.bfloat16)
    f8.convert_to_float8_training(model, config=config)
    x = torch.randn(40, 64).to(device, torch.bfloat16)
    results = []
    with Calls() as calls:
        for _ in range(2):
            leaf = x.clone().requires_grad_()
            y = model(leaf)
            y.square().sum().backward()
            results += [y, leaf.grad]
            if config.recipe.delayed:
                f8.sync_float8_amax_and_scale_history(model)
    results += [parameter.grad for parameter in model.parameters()]
    layers: list[Any] = [model.q, model.k]
    options = [
        (
            layer._config & ~_OF_NAMES & ~_OF_SETTINGS,
            layer.shares_input,
            recipes.granularities_of_weights(layer._config),
        )
        for layer in layers
    ]
    return options, results, [op for op, _ in calls.all], [layer._config for layer in layers]


def experts(recipe: recipes.Recipe, options: dict[str, Any], device: str) -> tuple[Any, ...]:
    """Returns whether a pair of weights is joined, the results of a step, and the ops in it."""
    torch.manual_seed(1)
    shapes = ((50, 64), (4, 48, 64), (4, 48, 64), (4, 64, 48))
    leaves = [torch.randn(shape).to(device, torch.bfloat16).requires_grad_() for shape in shapes]
    x, w1, w3, w2 = leaves
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(50)]).to(device)
    scores = torch.rand(50, 2).to(device)
    config = f8.functional.pack_experts(recipe, options["emulate"], False)
    with Calls() as calls:
        y = f8.functional.moe(x, ids, scores, (w1, w3), w2, recipe=recipe, **options)
        y.square().sum().backward()
    results = [y, *(leaf.grad for leaf in leaves)]
    return of_experts.joins_pairs(config), results, [op for op, _ in calls.all], [config]


def expect_same(named: tuple[Any, ...], renamed: tuple[Any, ...]) -> None:
    assert named[0] == renamed[0]
    assert all(torch.equal(a, b) for a, b in zip(named[1], renamed[1], strict=True))
    assert named[2] == renamed[2]
    # What follows shows that the second one was renamed.
    assert all(
        a & _OF_NAMES and not b & _OF_NAMES for a, b in zip(named[3], renamed[3], strict=True)
    )


@pytest.fixture
def forget_names(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function after which no settings have a name."""

    def forget() -> None:
        monkeypatch.setattr(recipes, "_names", dict)
        of_experts.config_of.cache_clear()

    yield forget
    of_experts.config_of.cache_clear()


@pytest.mark.parametrize("name", NAMED)
def test_a_renamed_recipe_s_linears_are_the_named_one_s(
    name: str, device: str, config: Callable[..., f8.LinearConfig], forget_names: Any
) -> None:
    gathers = name != "rowwise_with_gw_hp"
    settings = recipes.Recipe(*(gemm for _, gemm in recipes.Recipe.named(name).gemms()))
    own = config(settings, enable_fsdp_float8_all_gather=gathers)
    assert own.recipe.name == name
    named = linears(own, device)
    forget_names()
    assert own.recipe.name is None
    expect_same(named, linears(own, device))


@pytest.mark.parametrize("name", NAMED)
def test_a_renamed_recipe_s_experts_are_the_named_one_s(
    name: str, device: str, options: dict[str, Any], forget_names: Any
) -> None:
    recipe = recipes.Recipe.named(name)
    if name == "delayed":  # which experts without a state refuse under either name
        forget_names()
        with pytest.raises(ValueError, match=r"recipe custom has delayed scaling"):
            experts(recipe, options, device)
        return
    named = experts(recipe, options, device)
    forget_names()
    expect_same(named, experts(recipe, options, device))
