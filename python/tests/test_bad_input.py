"""Mistakes around a conversion after which a training would do nothing: a word that says what to do."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import float8.torch as f8
from float8.torch import notices
from float8.torch.layer import stale_optimizers

Config = Callable[..., f8.LinearConfig]


@pytest.fixture(autouse=True)
def _untold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_told", set())


@pytest.fixture
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def _model(config: f8.LinearConfig, device: str, layers: int = 2) -> Any:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)), nn.LayerNorm(64))
    return f8.convert_to_float8_training(model.to(device), config=config)


def _step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    device = next(model.parameters()).device
    model(torch.randn(16, 64, device=device)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    model.zero_grad()


def _assign(model: Any) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def _new_weight(model: Any) -> None:
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())


@pytest.mark.parametrize("make", (torch.optim.SGD, torch.optim.AdamW))
@pytest.mark.parametrize("replace", (_assign, _new_weight))
def test_an_optimizer_of_parameters_that_are_gone(
    replace: Any, make: Any, config: Config, device: str
) -> None:
    model = _model(config(), device)
    optimizer = make(model.parameters(), lr=0.1)
    _step(model, optimizer)
    replace(model)
    with pytest.warns(UserWarning, match=r"Make the optimizer after the conversion") as told:
        for _ in range(8):
            _step(model, optimizer)
    (words,) = {str(each.message) for each in told}
    expected = "each of 2 layers ('0', '1')" if replace is _assign else "layer '1'"
    assert words.startswith(f"float8: {make.__name__} has parameters") and expected in words


def test_an_optimizer_of_a_meta_model(config: Config, device: str) -> None:
    with torch.device("meta"):
        model = _model(config(), "meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to_empty(device=device)
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(0.01)
    with pytest.warns(UserWarning, match="is not trained"):
        for _ in range(2):
            _step(model, optimizer)


def test_a_warning_comes_again_for_another_model(config: Config, device: str) -> None:
    for layers in (2, 3):
        model = _model(config(), device, layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _assign(model)
        with pytest.warns(UserWarning, match=f"each of {layers} layers"):
            for _ in range(2):
                _step(model, optimizer)


class Masters:
    """An optimizer over copies of the weights, as mixed precision wrappers have it."""

    def __init__(self, model: nn.Module) -> None:
        self.own = list(model.parameters())
        self.copies = [nn.Parameter(each.detach().clone()) for each in self.own]
        self.optimizer = torch.optim.SGD(self.copies, lr=0.1)

    def step(self) -> None:
        for own, master in zip(self.own, self.copies, strict=True):
            master.grad = own.grad
        self.optimizer.step()
        for own, master in zip(self.own, self.copies, strict=True):
            own.data.copy_(master.detach())

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


@pytest.mark.usefixtures("silent")
def test_nothing_is_said_of_trainings_that_work(config: Config, device: str) -> None:
    def several(model: Any) -> list[Any]:
        return [torch.optim.SGD(each.parameters(), lr=0.1) for each in model]

    def frozen(model: Any) -> list[Any]:
        model[0].requires_grad_(False)
        return [torch.optim.SGD(model.parameters(), lr=0.1)]

    def of_the_head(model: Any) -> list[Any]:
        return [torch.optim.SGD(model[1:].parameters(), lr=0.1)]

    def masters(model: Any) -> list[Any]:
        return [Masters(model)]

    def with_what_has_no_gradient(model: Any) -> list[Any]:
        unused = nn.Linear(64, 64).to(device)
        return [torch.optim.SGD([*model.parameters(), *unused.parameters()], lr=0.1)]

    for make in (several, frozen, of_the_head, masters, with_what_has_no_gradient):
        model = _model(config(), device)
        optimizers = make(model)
        for _ in range(9):
            _step(model, *optimizers)


@pytest.mark.usefixtures("silent")
def test_an_unused_layer_beside_masters(config: Config, device: str) -> None:
    """A copy without a gradient is one of a layer that the step did not use."""
    model = _model(config(), device, 3)
    unused = model[2]
    model[2] = nn.Identity()
    wrapper = Masters(nn.ModuleList([model, unused]))
    for _ in range(9):
        _step(model, wrapper)  # type: ignore[arg-type]


def test_models_and_optimizers_may_go(config: Config, device: str) -> None:
    model = _model(config(), device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(model, optimizer)
    assert model in stale_optimizers._models and optimizer in stale_optimizers._steps
    known = len(stale_optimizers._models), len(stale_optimizers._steps)
    del model, optimizer
    assert (len(stale_optimizers._models), len(stale_optimizers._steps)) < known


@pytest.mark.parametrize("recipe", ("tensorwise", "bf16"))
def test_a_checkpoint_of_delayed_scaling(recipe: str, config: Config, device: str) -> None:
    delayed = _model(config("delayed"), device)
    _step(delayed)
    f8.sync_float8_amax_and_scale_history(delayed)
    checkpoint = delayed.state_dict()
    keys = list(checkpoint)
    model = _model(config(recipe), device)
    f8.convert_to_float8_training(model, config=config("rowwise"))
    outer = nn.ModuleDict({"inner": model, "other": nn.Linear(4, 4, device=device)})
    for each, prefix in (
        (model, ""),
        (pickle.loads(pickle.dumps(model)), ""),
        (outer, "inner."),
        (copy.deepcopy(outer), "inner."),
    ):
        notices._told.clear()
        state = {prefix + key: value for key, value in checkpoint.items()}
        if prefix:
            state |= {f"other.{key}": v for key, v in outer["other"].state_dict().items()}
        expected = rf"'{prefix}float8_scales\.state', the scales of delayed scaling"
        with pytest.warns(UserWarning, match=expected):
            each.load_state_dict(state)
        loaded = each["inner"] if prefix else each
        assert torch.equal(loaded[0].weight, delayed[0].weight)
    assert list(checkpoint) == keys
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        delayed.load_state_dict(checkpoint)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*another"):
        model.load_state_dict({**checkpoint, "another": torch.zeros(1)})


def test_nothing_converted(config: Config, device: str) -> None:
    model = nn.Sequential(nn.LayerNorm(64))
    with pytest.warns(UserWarning, match="converted nothing in Sequential: it has no nn.Linear"):
        f8.convert_to_float8_training(model, config=config())
    assert model not in stale_optimizers._models


def test_calls_with_something_else_than_a_model(config: Config, device: str) -> None:
    for call in (
        lambda module: f8.prepare(module, 16),
        f8.sync_float8_amax_and_scale_history,
        f8.cache_weight_casts,
        f8.precompute_float8_dynamic_scale_for_fsdp,
    ):
        for module in (None, 3, torch.ones(1), nn.Linear):
            with pytest.raises(TypeError, match=r"^float8: \w+ takes an nn.Module, not a \w+$"):
                call(module)
    model = _model(config(), device)
    for tokens in (torch.float32, None, "16", 16.0, True):
        with pytest.raises(
            TypeError, match=r"^float8: tokens is .*; it is the number of rows of x"
        ):
            f8.prepare(model, tokens)
    with pytest.raises(TypeError, match=r"^float8: dtype is 'bf16'; it is a torch.dtype, or None$"):
        f8.prepare(model, 16, dtype="bf16")  # type: ignore[arg-type]
