"""The names that a class of float8 adds to a module's own hide nothing that the module calls by them."""

from __future__ import annotations

import copy
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fused import converted, inputs, step
from reference import same
from torch import nn

import float8.torch as f8
from float8.torch import notices
from float8.torch.classes import Made

# These override methods of the module's own.
_OVERRIDES = {"forward", "extra_repr", "reset_parameters", "_grouped_mm"}
# Experts of transformers have the second one themselves, of the same meaning.
_OF_EXPERTS = {"weight_casts", "is_transposed"}


def _made(cls: type) -> Iterator[type]:
    yield cls
    for each in cls.__subclasses__():
        # Other tests have made classes of modules.
        if each.__module__.startswith("float8.") and "float8_original" not in each.__dict__:
            yield from _made(each)


def test_names_are_none_that_a_module_would_have() -> None:
    for found in pkgutil.walk_packages(f8.__path__, "float8.torch."):
        importlib.import_module(found.name)
    for cls in _made(Made):
        own = {*cls.__dict__, *inspect.get_annotations(cls)}
        others = {
            each
            for each in own - _OVERRIDES - _OF_EXPERTS
            if not each.startswith(("__", "_abc_", "float8_", "_float8_", "expert_", "experts_"))
        }
        assert not others, f"{cls.__name__}: {sorted(others)}"


class Named(nn.Module):
    """An MLP with names that classes of float8 once had, as children and as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.original, self.names = nn.Linear(64, 144), nn.Linear(144, 64)
        self.activation, self.beside, self.made_of = nn.GELU(), "", ["parts"]

    def forward(self, x: torch.Tensor) -> Any:
        x = self.original(x)
        x = self.activation(x)
        return self.names(x)


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_a_child_may_have_any_name(config: Callable[..., f8.LinearConfig], recipe: str) -> None:
    model = converted(nn.Sequential(Named(), nn.Tanh(), Named()), config(recipe))
    x = inputs(model)
    assert [each.fused for each in f8.fuse(model)] == [True, True]
    first = step(model, x)
    assert model[0].beside == "" and model[0].made_of == ["parts"]
    assert isinstance(model[0].activation, nn.GELU)
    assert same(step(copy.deepcopy(model), x), step(model, x)) and first
    # A hook has each MLP compute as its own class does.
    notices._told.clear()
    model[0].activation.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="its activation has hooks"):
        step(model, x)
