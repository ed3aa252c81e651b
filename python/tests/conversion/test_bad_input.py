"""Mistakes around a conversion after which a training would do nothing: a word that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from copies import COPIES
from torch import nn

import float8.torch as f8
from float8.torch.layer import stale_optimizers

Config = Callable[..., f8.LinearConfig]


pytestmark = pytest.mark.usefixtures("untold")


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
    with pytest.warns(UserWarning, match="optimizer after the conversion") as told:
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


def _sgd(*modules: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD([p for each in modules for p in each.parameters()], lr=0.1)]


def _frozen(model: Any) -> list[Any]:
    model[0].requires_grad_(False)
    return _sgd(model)


def _with_what_has_no_gradient(model: Any) -> list[Any]:
    return _sgd(model, nn.Linear(64, 64).to(model[0].weight.device))


WORKING: dict[str, Callable[[Any], list[Any]]] = {
    "several": lambda model: [own for each in model for own in _sgd(each)],
    "frozen": _frozen,
    "of the head": lambda model: _sgd(model[1:]),
    "masters": lambda model: [Masters(model)],
    "with what has no gradient": _with_what_has_no_gradient,
}


@pytest.mark.parametrize("kind", WORKING)
@pytest.mark.filterwarnings("error")
def test_nothing_is_said_of_trainings_that_work(kind: str, config: Config, device: str) -> None:
    model = _model(config(), device)
    optimizers = WORKING[kind](model)
    for _ in range(9):
        _step(model, *optimizers)


@pytest.mark.filterwarnings("error")
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


@pytest.fixture
def delayed(config: Config, device: str) -> Any:
    model = _model(config("delayed"), device)
    _step(model)
    f8.sync_float8_amax_and_scale_history(model)
    return model


@pytest.mark.parametrize("how", ("itself", *COPIES))
@pytest.mark.parametrize("prefix", ("", "inner."))
@pytest.mark.parametrize("recipe", ("tensorwise", "bf16"))
def test_a_checkpoint_of_delayed_scaling(
    recipe: str, prefix: str, how: str, delayed: Any, config: Config, device: str
) -> None:
    checkpoint = delayed.state_dict()
    keys = list(checkpoint)
    model = _model(config(recipe), device)
    f8.convert_to_float8_training(model, config=config("rowwise"))
    beside = nn.Linear(4, 4, device=device)
    outer = nn.ModuleDict({"inner": model, "beside": beside}) if prefix else model
    state = {prefix + key: value for key, value in checkpoint.items()}
    if prefix:
        state |= {f"beside.{key}": value for key, value in beside.state_dict().items()}
    other = COPIES[how](outer) if how in COPIES else outer
    with pytest.warns(UserWarning, match=rf"'{prefix}float8_scales\.state'"):
        other.load_state_dict(state)
    loaded = other["inner"] if prefix else other
    assert torch.equal(loaded[0].weight, delayed[0].weight)
    assert list(checkpoint) == keys


@pytest.mark.filterwarnings("ignore:float8")
@pytest.mark.parametrize("recipe", ("tensorwise", "bf16"))
def test_another_key_beside_the_scales_is_refused(
    recipe: str, delayed: Any, config: Config, device: str
) -> None:
    model = _model(config(recipe), device)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*another"):
        model.load_state_dict({**delayed.state_dict(), "another": torch.zeros(1)})


@pytest.mark.filterwarnings("error")
def test_a_checkpoint_of_delayed_scaling_is_loaded_by_its_own_model(delayed: Any) -> None:
    delayed.load_state_dict(delayed.state_dict())


def test_nothing_converted(config: Config, device: str) -> None:
    model = nn.Sequential(nn.LayerNorm(64))
    with pytest.warns(UserWarning, match=r"nothing in Sequential: .* no nn.Linear"):
        f8.convert_to_float8_training(model, config=config())
    assert model not in stale_optimizers._models


@pytest.mark.parametrize("module", (None, 3, torch.ones(1), nn.Linear), ids=repr)
@pytest.mark.parametrize(
    ("call", "options"),
    (
        (f8.prepare, (16,)),
        (f8.sync_float8_amax_and_scale_history, ()),
        (f8.cache_weight_casts, ()),
        (f8.precompute_float8_dynamic_scale_for_fsdp, ()),
    ),
)
def test_calls_with_something_else_than_a_model(call: Any, options: Any, module: Any) -> None:
    with pytest.raises(TypeError, match=rf"^float8: {call.__name__} .*nn.Module, not a \w+$"):
        call(module, *options)


@pytest.mark.parametrize("tokens", (torch.float32, None, "16", 16.0, True), ids=repr)
def test_tokens_that_are_no_number(tokens: Any, config: Config, device: str) -> None:
    with pytest.raises(TypeError, match=r"^float8: tokens is .*rows of x"):
        f8.prepare(_model(config(), device), tokens)


def test_a_dtype_that_is_none(config: Config, device: str) -> None:
    with pytest.raises(TypeError, match=r"^float8: dtype is 'bf16'; .*torch.dtype"):
        f8.prepare(_model(config(), device), 16, dtype="bf16")  # type: ignore[arg-type]
