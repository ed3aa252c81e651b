"""register_norm: RMSNorms whose code fuse does not know, as those of litgpt, torchtune and diffusers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import float8.torch as f8
from float8.torch.layer import norm_layers

Config = Callable[..., f8.LinearConfig]
pytestmark = pytest.mark.filterwarnings("ignore:float8. fuse left")


class Options(nn.Module):
    """As litgpt writes it."""

    def __init__(self, add_unit_offset: bool = False, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64) + 0.5)
        self.eps, self.dim, self.add_unit_offset = eps, -1, add_unit_offset

    def forward(self, x: torch.Tensor) -> Any:
        dtype, x = x.dtype, x.float()
        x = x * torch.rsqrt(torch.mean(x * x, dim=self.dim, keepdim=True) + self.eps)
        weight = (1 + self.weight) if self.add_unit_offset else self.weight
        return (x * weight.float()).to(dtype)


class WithOffset(Options):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x)


class Scaled(nn.Module):
    """As torchtune writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.eps, self.scale = 1e-5, nn.Parameter(torch.rand(64) + 0.5)

    def forward(self, x: torch.Tensor) -> Any:
        return F.rms_norm(x.float(), (64,), self.scale.float(), self.eps).to(x.dtype)


class Branching(nn.Module):
    """As diffusers writes it: a weight in 16 bits multiplies what was rounded."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.eps, self.weight = 1e-6, nn.Parameter(torch.rand(64) + 0.5)
        self.bias = nn.Parameter(torch.rand(64)) if bias else None

    def forward(self, x: torch.Tensor) -> Any:
        x = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            x = x.to(self.weight.dtype)
        x = x * self.weight
        return x if self.bias is None else x + self.bias


@pytest.fixture(autouse=True)
def none_registered() -> Iterator[None]:
    before = dict(norm_layers._registered)
    yield
    norm_layers._registered.clear()
    norm_layers._registered.update(before)


def model_of(norm: nn.Module, config: Config, device: str) -> Any:
    model = nn.Sequential(norm, nn.Linear(64, 96)).to(device, torch.bfloat16)
    return f8.convert_to_float8_training(model, config=config("rowwise"))


def step(model: nn.Module, device: str) -> list[torch.Tensor]:
    x = torch.randn(24, 64, generator=torch.Generator().manual_seed(3))
    leaf = x.to(device, torch.bfloat16).requires_grad_()
    y = model(leaf)
    y.float().square().mean().backward()
    return [y.detach(), leaf.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("norm", "options"),
    [
        (Options(), {}),
        (WithOffset(True), {"weight_offset": 1.0}),
        (Scaled(), {"weight": "scale"}),
        (Branching(), {"rounding": "normalized"}),
    ],
    ids=["options", "offset", "scale", "branching"],
)
def test_is_one_function(
    norm: nn.Module, options: dict[str, Any], config: Config, device: str
) -> None:
    model = model_of(copy.deepcopy(norm), config, device)
    plain = copy.deepcopy(model)
    (left,) = [each for each in f8.fuse(plain, norms=True) if each.what == "norm"] or [None]
    assert left is None or (not left.fused and "register_norm" in left.why)
    f8.register_norm(type(norm), **options)
    (found,) = [each for each in f8.fuse(model, norms=True) if each.what == "norm"]
    assert found.fused, found.why
    assert isinstance(model[0], norm_layers.FusedRMSNorm)
    for own, expected in zip(step(model, device), step(plain, device), strict=True):
        norm_of = (own.float() - expected.float()).norm() / expected.float().norm()
        assert norm_of < 0.05
    assert list(model.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize(
    ("norm", "options", "why"),
    [
        (Options(), {"weight_offset": 1.0}, "does not compute what register_norm said"),
        (Options(), {"eps": "epsilon"}, "its 'epsilon', which register_norm names, is not a float"),
        (Options(eps=1), {}, "its 'eps', which register_norm names, is not a float"),
        (Scaled(), {}, "its only parameter is not 'weight'"),
        (Branching(True), {"rounding": "normalized"}, "its only parameter is not 'weight'"),
    ],
)
def test_another_norm_is_left(
    norm: nn.Module, options: dict[str, Any], why: str, config: Config, device: str
) -> None:
    f8.register_norm(type(norm), **options)
    model = model_of(copy.deepcopy(norm), config, device)
    assert why in f8.fuse(model, norms=True)[0].why
    assert not isinstance(model[0], norm_layers.FusedRMSNorm)


def test_an_epsilon_that_it_does_not_have_shows(config: Config, device: str) -> None:
    norm = Options(eps=1e-3)
    norm.other = 1e-6  # type: ignore[assignment]
    f8.register_norm(Options, eps="other")
    model = model_of(norm, config, device)
    assert "does not compute" in f8.fuse(model, norms=True)[0].why


def test_an_x_in_another_type_is_computed_by_its_own_forward(config: Config, device: str) -> None:
    f8.register_norm(Branching, rounding="normalized")
    model = model_of(Branching(), config, device)
    plain = copy.deepcopy(model[0])
    assert f8.fuse(model, norms=True)[0].fused
    x = torch.randn(24, 64, device=device)
    assert torch.equal(model[0](x), plain(x)) and model[0](x).dtype == torch.bfloat16


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="register_norm takes a class"):
        f8.register_norm(Options())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="names of attributes"):
        f8.register_norm(Options, weight="")
    with pytest.raises(ValueError, match="rounding is 'twice'"):
        f8.register_norm(Options, rounding="twice")
    with pytest.raises(ValueError, match="there is none"):
        f8.register_norm(Options, rounding="normalized", weight_offset=1.0)
