"""What a conversion leaves as it was: parameters and all that hangs on them, hooks, ties, optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from copies import COPIES
from torch import nn

import float8.torch as f8

Config = Callable[..., f8.LinearConfig]


@pytest.fixture(params=(False, True), ids=("plain", "gather option"))
def fields(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"enable_fsdp_float8_all_gather": request.param}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = (
        model(torch.randn(8, 64, device=device, dtype=torch.bfloat16)).float().sum()
    )
    loss.backward()
    optimizer.step()
    return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0, fused=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps_before", (0, 1))
def test_an_optimizer_made_before_trains(
    mlp: Any, config: Config, device: str, fields: Any, optimizer: str, steps_before: int
) -> None:
    """What accelerate and the Trainer of transformers do: the optimizer exists, with a state or none."""
    model = mlp()
    own = OPTIMIZERS[optimizer](model.parameters())
    for _ in range(steps_before):
        _step(model, own, device)
    states = {name: own.state.get(p) for name, p in model.named_parameters()}
    parameters = dict(model.named_parameters())
    f8.convert_to_float8_training(model, config=config("rowwise", **fields))
    assert isinstance(model[0], f8.Float8Linear)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name] and type(parameter) is nn.Parameter
        assert own.state.get(parameter) is states[name]
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        _step(model, own, device)
    for p, old in zip(model.parameters(), before, strict=True):
        assert not torch.equal(p, old)


def test_hooks_and_attributes_stay(mlp: Any, config: Config, device: str, fields: Any) -> None:
    model = mlp()
    linear = model[0]
    linear.weight.no_weight_decay = True
    linear.weight.grad = torch.ones_like(linear.weight)
    linear.note = {"of": "mine"}
    called: list[str] = []
    linear.weight.register_hook(lambda _: called.append("gradient"))
    linear.weight.register_post_accumulate_grad_hook(lambda _: called.append("accumulated"))
    handles = {
        "forward": linear.register_forward_hook(lambda *_: called.append("forward")),
        "before": linear.register_forward_pre_hook(
            lambda *_, **__: called.append("before"), with_kwargs=True
        ),
        "backward": linear.register_full_backward_hook(lambda *_: called.append("backward")),
        "state": linear.register_state_dict_post_hook(lambda *_: called.append("state")),
        "load": linear.register_load_state_dict_post_hook(lambda *_: called.append("load")),
    }
    f8.convert_to_float8_training(model, config=config("rowwise", **fields))
    converted = model[0]
    assert converted.weight.no_weight_decay and converted.note is linear.note
    assert torch.equal(converted.weight.grad, torch.ones_like(converted.weight))

    def run() -> set[str]:
        called.clear()
        model(torch.randn(8, 64, device=device, dtype=torch.bfloat16)).sum().backward()
        model.load_state_dict(model.state_dict())
        return set(called)

    assert run() == {"gradient", "accumulated", *handles}
    for handle in handles.values():
        handle.remove()
    assert run() == {"gradient", "accumulated"}


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 64)
        self.head = nn.Linear(64, 96, bias=False)
        self.other = nn.Linear(64, 96, bias=False)
        self.other.weight = self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.embedding(x)
        return self.head(hidden) + self.other(hidden)


def test_tied_weights_stay_tied(config: Config, device: str, fields: Any) -> None:
    model: Any = _Tied().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    f8.convert_to_float8_training(model, config=config("rowwise", **fields))
    tokens = torch.randint(0, 96, (4, 8), device=device)
    before = model.embedding.weight.detach().clone()
    for _ in range(2):
        model(tokens).square().mean().backward()
        optimizer.step()
    assert len(list(model.parameters())) == 1
    assert model.head.weight is model.embedding.weight is model.other.weight
    assert not torch.equal(model.embedding.weight, before)


@pytest.mark.parametrize("how", COPIES)
def test_copies_are_plain(how: str, mlp: Any, config: Config, device: str, fields: Any) -> None:
    model = f8.convert_to_float8_training(mlp(), config=config("rowwise", **fields))
    x = torch.randn(8, 64, device=device, dtype=torch.bfloat16)
    other = COPIES[how](model)
    assert type(other[0].weight) is nn.Parameter
    assert torch.equal(other(x), model(x))
    other[0].weight = nn.Parameter(torch.zeros_like(other[0].weight))
    assert not torch.equal(other(x), model(x))
    del other[0].weight
    assert "weight" not in dict(other[0].named_parameters())


def test_the_gather_option_does_nothing_without_fsdp(mlp: Any, config: Config, device: str) -> None:
    """Eager and compiled: accelerate's default asks for it on one process too."""
    torch.manual_seed(0)
    one = mlp()
    models = [copy.deepcopy(one) for _ in range(2)]
    for model, gather in zip(models, (True, False), strict=True):
        f8.convert_to_float8_training(
            model, config=config("rowwise", enable_fsdp_float8_all_gather=gather)
        )
    x = torch.randn(8, 64, device=device, dtype=torch.bfloat16)
    expected = models[1](x)
    assert torch.equal(models[0](x), expected)
    compiled: Any = torch.compile(models[0], backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)
