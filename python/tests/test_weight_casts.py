"""Cached casts of weights: the bits of uncached ones, and never those of an older weight."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import float8.torch as f8
from float8.torch import _ops

Config = Callable[..., f8.LinearConfig]
Gradients = list[torch.Tensor]


class Casts(TorchDispatchMode):
    """Counts the casts of weights, and the forwards that were given one."""

    def __init__(self) -> None:
        super().__init__()
        self.casts = 0
        self.given = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.casts += func is _ops.quantize_into
        self.given += func is _ops.linear_forward and args[4] is not None
        return func(*args, **(kwargs or {}))


def micro_batches(model: nn.Module, xs: list[torch.Tensor]) -> Gradients:
    model.zero_grad()
    for x in xs:
        model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]


def equal(left: Gradients, right: Gradients) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture
def xs(device: str) -> list[torch.Tensor]:
    return [torch.randn(40, 64, device=device, dtype=torch.bfloat16) for _ in range(3)]


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"))
def test_steps_are_the_same(
    recipe: str, mlp: Callable[..., nn.Module], xs: list[torch.Tensor], config: Config
) -> None:
    plain = f8.convert_to_float8_training(mlp(), config=config(recipe))
    cached = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, fused=True) for m in (plain, cached)]
    f8.cache_weight_casts(cached, optimizers[1])
    for _ in range(3):
        with Casts() as casts:
            gradients = micro_batches(cached, xs)
        assert casts.casts == 0
        assert casts.given == 6
        assert equal(micro_batches(plain, xs), gradients)
        for optimizer in optimizers:
            optimizer.step()


def test_a_weight_that_changed_is_cast_again(
    mlp: Callable[..., nn.Module], xs: list[torch.Tensor], config: Config
) -> None:
    model = f8.convert_to_float8_training(mlp(), config=config("rowwise"))
    f8.cache_weight_casts(model)
    fresh = f8.convert_to_float8_training(mlp(), config=config("rowwise"))
    changes: list[Callable[[nn.Module], Any]] = [
        lambda m: m.load_state_dict(fresh.state_dict()),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1).step(),
        lambda m: m[0].weight.detach().neg_(),
        lambda m: setattr(m[0].weight, "data", m[0].weight.detach() * 2),
        lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach() * 2)),
    ]
    for change in changes:
        micro_batches(model, xs)
        change(model)
        plain = copy.deepcopy(model)  # without the copies
        assert all(layer._weight_cast is None for layer in plain if isinstance(layer, nn.Linear))
        assert equal(micro_batches(model, xs), micro_batches(plain, xs))


def test_autocast_of_float32_weights(
    mlp: Callable[..., nn.Module], device: str, config: Config
) -> None:
    plain = f8.convert_to_float8_training(mlp(torch.float32), config=config("tensorwise"))
    cached = copy.deepcopy(plain)
    f8.cache_weight_casts(cached, dtype=torch.bfloat16)
    xs = [torch.randn(40, 64, device=device)]
    with torch.autocast(device, torch.bfloat16), Casts() as casts:
        assert equal(micro_batches(cached, xs), micro_batches(plain, xs))
    assert casts.given == 2
    with Casts() as casts:  # float32 x finds no copies
        assert equal(micro_batches(cached, xs), micro_batches(plain, xs))
    assert casts.given == 0


def test_compiled(mlp: Callable[..., nn.Module], xs: list[torch.Tensor], config: Config) -> None:
    model = f8.convert_to_float8_training(mlp(), config=config("rowwise"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    f8.cache_weight_casts(model, optimizer)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert equal(micro_batches(compiled, xs), micro_batches(model, xs))
        optimizer.step()


def test_remove_gives_the_memory_back(
    mlp: Callable[..., nn.Module], xs: list[torch.Tensor], config: Config
) -> None:
    model = f8.convert_to_float8_training(mlp(), config=config("rowwise"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    casts = f8.cache_weight_casts(model, optimizer)
    casts.remove()
    with Casts() as counted:
        micro_batches(model, xs)
        optimizer.step()
        model.load_state_dict(model.state_dict())
    assert counted.given == counted.casts == 0


def test_what_has_no_cast_is_refused(mlp: Callable[..., nn.Module], config: Config) -> None:
    delayed = f8.convert_to_float8_training(mlp(), config=config("delayed"))
    with pytest.raises(ValueError, match="delayed scaling"):
        f8.cache_weight_casts(delayed)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(64, 64))
    f8.convert_to_float8_training(empty, config=config("rowwise"))
    with pytest.raises(ValueError, match="plain tensors with values"):
        f8.cache_weight_casts(empty)
    assert empty[0]._weight_cast is None


def test_copies_of_another_shape_are_refused(options: dict[str, Any], device: str) -> None:
    layer = f8.Float8Linear(
        64, 32, device=device, dtype=torch.bfloat16, recipe="rowwise", **options
    )
    weight = layer.weight.detach()
    q, qt = _ops.quantize(weight, layer._config, _ops.WEIGHT, True)
    with pytest.raises(ValueError, match="as quantize gives them"):
        _ops.quantize_into(weight, q[:-1], qt, layer._config, _ops.WEIGHT)
    x = torch.randn(8, 64, device=device, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="another shape or recipe"):
        _ops.linear_forward(
            x, None, None, weight, q[:16], qt, layer.bias.detach(), None, layer._config, 0, True
        )
