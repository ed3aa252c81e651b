"""Linears whose weights another module reads, as some attentions of timm do: a warning names them, since nothing of theirs is in fp8."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import float8.torch as f8
from float8.torch import notices

Config = Callable[..., f8.LinearConfig]


@pytest.fixture(autouse=True)
def _without_graphs(untold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "in_graphs", False)


class Attention(nn.Module):
    """It reads the weight of qkv, for a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(32, 96, bias=False), nn.Linear(32, 32)
        self.bias = nn.Parameter(torch.zeros(96))

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = functional.linear(x, self.qkv.weight, self.bias).chunk(3, -1)
        return self.proj(q * k + v)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.idle = nn.Linear(32, 32)  # it is never called, and has no gradient

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def told(model: Any, device: str, call: Any = None, steps: int = 5) -> list[str]:
    optimizer = torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(steps):
            x = torch.randn(2, 16, 32, device=device, requires_grad=True)
            (model if call is None else call)(x).square().mean().backward()
            f8.sync_float8_amax_and_scale_history(model)
            optimizer.step()
            optimizer.zero_grad()
    return [text for each in seen if "computes nothing" in (text := str(each.message))]


def made(config: f8.LinearConfig, device: str, *blocks: nn.Module) -> Any:
    return f8.convert_to_float8_training(Model(*blocks).to(device), config=config)


@pytest.mark.parametrize("recipe", ("tensorwise", "delayed"))
def test_names_linears_that_others_read(recipe: str, device: str, config: Config) -> None:
    model = made(config(recipe), device, Attention(), MLP(), Attention())
    (text,) = told(model, device)
    assert "each of 2 layers ('blocks.*.qkv')" in text and "module_filter_fn" in text
    assert "proj" not in text and "idle" not in text and "up" not in text
    assert not told(model, device)


def _fused(model: Any) -> None:
    assert all(each.fused for each in f8.fuse(model) if each.what == "mlp")


def _plain(model: Any) -> None:
    pass


@pytest.mark.parametrize("change", (_plain, _fused, f8.cache_weight_casts))
def test_says_nothing_of_linears_that_are_called(change: Any, device: str, config: Config) -> None:
    model = made(config("rowwise"), device, MLP(), MLP())
    change(model)
    assert not told(model, device)
    assert not told(model, device, lambda x: checkpoint(model, x, use_reentrant=False))


@pytest.mark.parametrize("fused", (False, True))
def test_says_nothing_of_graphs(fused: bool, device: str, config: Config) -> None:
    torch._dynamo.reset()
    model = made(config("rowwise"), device, MLP(), MLP())
    if fused:
        f8.fuse(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert not told(model, device, compiled)
    assert notices.in_graphs


def test_another_recipe_in_a_step_says_nothing(device: str, config: Config) -> None:
    """A conversion between backward and the optimizer's step, where no linear was called yet."""
    model = Model(MLP()).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6):
            model(torch.randn(16, 32, device=device)).square().mean().backward()
            if step in (1, 3):
                recipe = "rowwise" if step == 1 else "tensorwise"
                f8.convert_to_float8_training(model, config=config(recipe))
            optimizer.step()
            optimizer.zero_grad()
