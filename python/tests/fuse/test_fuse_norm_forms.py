"""Which norms fuse(norms=True) knows as RMSNorms: their code, its methods, and details that few values show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import float8.torch as f8

Config = Callable[..., f8.LinearConfig]
pytestmark = [
    pytest.mark.usefixtures("untold"),
    pytest.mark.filterwarnings("ignore:float8. fuse left"),
]


class WrittenNorm(nn.Module):
    """An RMSNorm as Gemma writes it, for classes that differ in a detail."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64) * 0.3 + 0.7)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1 + self.weight.float())).to(x.dtype)


class RoundsTheSumNorm(WrittenNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1 + self.weight)).to(x.dtype)


class ChangesItsInputNorm(WrittenNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        x *= 2
        return (wide * (1 + self.weight.float())).to(x.dtype)


class HasAnotherEpsilonNorm(WrittenNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps + 1e-12)
        return (wide * (1 + self.weight.float())).to(x.dtype)


class OverflowsNorm(WrittenNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(4).pow(0.5).mean(-1, keepdim=True) + self.eps)
        return (wide * (1 + self.weight.float())).to(x.dtype)


class ByMethodNorm(WrittenNorm):
    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self._norm(x.float()) * (1 + self.weight.float())).to(x.dtype)


class DoubledNorm(nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class WeightNorm(WrittenNorm):
    """No name tells it, but a weight is all that it has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x if x.dtype == torch.float64 else x


def fused_norm(config: Config, norm: nn.Module) -> tuple[Any, list[tuple[bool, str]]]:
    device = "cpu" if config("rowwise").emulate else "cuda"
    model = nn.Sequential(norm, nn.Linear(64, 64)).to(device, torch.bfloat16)
    f8.convert_to_float8_training(model, config=config("rowwise"))
    return model[0], [(x.fused, x.why) for x in f8.fuse(model, norms=True) if x.what == "norm"]


@pytest.mark.parametrize("kind", [WrittenNorm, ByMethodNorm])
def test_knows_other_spellings(config: Config, kind: type[nn.Module]) -> None:
    assert fused_norm(config, kind())[1] == [(True, "")]


@pytest.mark.parametrize(
    "kind",
    [RoundsTheSumNorm, ChangesItsInputNorm, HasAnotherEpsilonNorm, OverflowsNorm, WeightNorm],
)
def test_leaves_and_names_what_differs_in_a_detail(config: Config, kind: type[WrittenNorm]) -> None:
    ((fused, why),) = fused_norm(config, kind())[1]
    assert not fused and "not known" in why


def test_names_a_subclass_with_a_forward_of_its_own(config: Config) -> None:
    ((fused, why),) = fused_norm(config, DoubledNorm(64))[1]
    assert not fused and "not known" in why


@pytest.mark.filterwarnings("ignore:float8. ByMethodNorm is no longer fused")
def test_a_method_that_is_replaced_is_called(config: Config) -> None:
    def nothing(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 0

    own = ByMethodNorm()
    own._norm = nothing.__get__(own)  # type: ignore[method-assign]
    assert not fused_norm(config, own)[1][0][0]
    norm, _ = fused_norm(config, ByMethodNorm())
    other, _ = fused_norm(config, ByMethodNorm())
    x = torch.randn(3, 64, device=norm.weight.device).bfloat16()
    assert norm(x).abs().max() > 0
    norm._norm = nothing.__get__(norm)
    assert norm(x).abs().max() == 0
    method = ByMethodNorm._norm
    try:
        ByMethodNorm._norm = nothing  # type: ignore[method-assign]
        assert other(x).abs().max() == 0
    finally:
        ByMethodNorm._norm = method  # type: ignore[method-assign]
    assert other(x).abs().max() > 0


def test_an_epsilon_that_is_no_number_is_the_class_s_own(config: Config) -> None:
    norm, _ = fused_norm(config, WrittenNorm())
    x = torch.randn(3, 64, device=norm.weight.device).bfloat16()
    norm.eps = torch.tensor(0.1, device=x.device, requires_grad=True)
    norm(x).float().sum().backward()
    assert norm.eps.grad is not None
    norm.eps = -1e-9
    assert torch.equal(norm(x), WrittenNorm.forward(norm, x))
    norm.eps = None
    with pytest.raises(TypeError):
        norm(x)


def test_transforms_and_traces_see_operations(config: Config) -> None:
    norm, done = fused_norm(config, WrittenNorm())
    assert done == [(True, "")]
    norm.float()
    x = torch.randn(4, 64, device=norm.weight.device)
    mapped = torch.func.vmap(norm)(x)
    torch.testing.assert_close(mapped, norm(x))
    _, tangent = torch.func.jvp(norm, (x,), (torch.ones_like(x),))
    assert tangent.shape == x.shape
    traced = torch.jit.trace(norm, x)
    torch.testing.assert_close(traced(x), norm(x))
