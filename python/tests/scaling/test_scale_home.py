"""Delayed scaling of models that are an nn.Sequential, an nn.ModuleList or an nn.ModuleDict themselves."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import float8.torch as f8
from float8.torch import scales

KEY = "float8_scales.state"


class Pipeline(nn.Sequential):
    """A model whose parts have a method of their own, as those of sentence-transformers have."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for _, part in self.named_children():
            x = part(x, scale)
        return x

    def names(self) -> list[str]:
        return [self._modules[name].name() for name in self._modules]  # type: ignore[union-attr, operator]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return self.linear(x).relu() * scale  # type: ignore[no-any-return]

    def name(self) -> str:
        return "part"


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def made(kind: str, device: str) -> Any:
    parts = [Part() for _ in range(3)]
    named = {f"p{i}": each for i, each in enumerate(parts)}
    of_kind = {"list": nn.ModuleList(parts), "dict": nn.ModuleDict(named)}
    return of_kind.get(kind, Pipeline(*parts)).to(device)


def run(model: Any, x: torch.Tensor) -> torch.Tensor:
    for part in model.values() if isinstance(model, nn.ModuleDict) else list(model):
        x = part(x, 1.5)
    return x


def train(model: Any, device: str, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        run(model, torch.randn(24, 32, device=device)).square().mean().backward()
        f8.sync_float8_amax_and_scale_history(model)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ("sequential", "list", "dict"))
def test_children_are_the_model_s_own(kind: str, device: str, config: Any) -> None:
    model = made(kind, device)
    before, keys = list(model.named_children()), set(model.state_dict())
    f8.convert_to_float8_training(model, config=config("delayed"))
    assert list(model.named_children()) == before and len(model) == 3
    assert set(model.state_dict()) == {*keys, KEY}
    if kind == "sequential":
        assert model.names() == ["part"] * 3 and model[-1] is before[2][1]
        model(torch.randn(8, 32, device=device), scale=0.5)
    train(model, device)
    assert model.float8_scales.first == []
    f8.convert_to_float8_training(model, config=config("rowwise"))
    assert set(model.state_dict()) == keys and not hasattr(model, "float8_scales")


@pytest.mark.parametrize("nested", (False, True))
@pytest.mark.parametrize("kind", ("sequential", "list", "dict"))
def test_checkpoints_copies_and_pickles_go_on(
    kind: str, nested: bool, device: str, config: Any
) -> None:
    def whole() -> Any:
        inner = f8.convert_to_float8_training(made(kind, device), config=config("delayed"))
        return Holder(inner) if nested else inner

    def of(model: Any) -> Any:
        return model.inner if nested else model

    model = whole()
    train(of(model), device)
    loaded = whole()
    loaded.load_state_dict({**model.state_dict()})
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (loaded, copy.deepcopy(model), torch.load(file, weights_only=False)):
        own, state = of(other).float8_scales, of(model).float8_scales
        assert own is not state and torch.equal(own.state, state.state) and own.first == []
        assert all(part.linear._scales is own for part in of(other).children())
        with torch.no_grad():
            x = torch.randn(8, 32, device=device)
            assert torch.equal(run(of(other), x), run(of(model), x))
        train(of(other), device, steps=1)
        assert not torch.equal(own.state, state.state)


def test_a_checkpoint_without_scales_begins_anew(device: str, config: Any) -> None:
    model = f8.convert_to_float8_training(made("sequential", device), config=config("delayed"))
    plain = made("sequential", device).state_dict()
    train(model, device)
    model.load_state_dict(plain)
    assert model.float8_scales.first == [0, 1, 2]
    train(model, device)
    wrong = {**model.state_dict(), KEY: torch.zeros(256, dtype=torch.uint8)}
    with pytest.raises(RuntimeError, match=KEY):
        model.load_state_dict(wrong)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*other"):
        model.load_state_dict({**plain, "other": torch.zeros(1)})


def test_a_model_from_meta_compiles_whole(device: str, config: Any) -> None:
    torch._dynamo.reset()
    scales._initial.cache_clear()  # or another test's is on the CPU already
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32))
        f8.convert_to_float8_training(model, config=config("delayed"))
    model.to_empty(device=device)
    for layer in model:
        layer.reset_parameters()  # type: ignore[operator]
    compiled = torch.compile(model, fullgraph=True, backend=CompileCounterWithBackend("aot_eager"))
    for _ in range(2):
        compiled(torch.randn(16, 32, device=device)).sum().backward()
        f8.sync_float8_amax_and_scale_history(model)
    assert model.float8_scales.first == []
