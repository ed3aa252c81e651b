"""fuse(norms=True) in eager mode: RMSNorms that are written as several operations, as in transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused import converted
from torch import Tensor, nn
from torch.nn import functional

import float8.torch as f8

Config = Callable[..., f8.LinearConfig]
pytestmark = [
    pytest.mark.usefixtures("untold"),
    pytest.mark.filterwarnings("ignore:float8. fuse left"),
]


class Norm(nn.Module):
    def __init__(self, features: int = 64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features))
        self.eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class NormOfGemma(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class NormOfRoundedWeight(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide).to(x.dtype)


class NormOfAPart(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide[..., :64].pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class NormOfADimension(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(2, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class NormWithoutGradient(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        with torch.no_grad():
            inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * inverse).to(x.dtype)


class NormOfData(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.data * wide.to(x.dtype)


class NormOfAProperty(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return found * 2 if name == "weight" else found


class NormByValues(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if bool(x.max() < 100) else x


@pytest.fixture
def norm_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    rms_norm = functional.rms_norm

    def counted(*arguments: Any, **options: Any) -> Tensor:
        calls.append(1)
        return rms_norm(*arguments, **options)

    monkeypatch.setattr(functional, "rms_norm", counted)
    return calls


def normed(
    config: Config, kind: type[nn.Module], dtype: torch.dtype = torch.bfloat16
) -> tuple[Any, Any]:
    torch.manual_seed(2)
    plain = converted(nn.Sequential(kind(), nn.Linear(64, 64)), config("rowwise"), dtype)
    return copy.deepcopy(plain), plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_norms_of_operations(config: Config, dtype: torch.dtype, norm_calls: list[int]) -> None:
    """The sums over features may be in another order, and all that is rounded is rounded where it was."""
    fused, plain = normed(config, Norm, dtype)
    assert f8.fuse(fused, norms=True)[0] == ("0", True, "", "norm") and isinstance(fused[0], Norm)
    assert f8.fuse(fused, norms=True)[0] == ("0", True, "", "norm")
    ends = []
    for model in (fused[0], plain[0]):
        x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(3))
        x = x.to(model.weight.device, dtype).requires_grad_()
        y = model(x)
        (y.float().sin().sum() / 8).backward()
        ends.append([y.detach(), x.grad, model.weight.grad])
    for own, expected in zip(*ends, strict=True):
        assert own.dtype == expected.dtype
        torch.testing.assert_close(
            own, expected, rtol=2**-7 if dtype != torch.float32 else 1e-5, atol=1e-3
        )
    assert len(norm_calls) == 1 and fused.state_dict().keys() == plain.state_dict().keys()
    fused[0].eps = plain[0].eps = 4.0  # it is read in each call
    torch.testing.assert_close(fused[0](x), plain[0](x))


@pytest.mark.parametrize(
    "kind",
    [
        NormOfGemma,
        NormOfRoundedWeight,
        NormByValues,
        NormOfAPart,
        NormOfADimension,
        NormWithoutGradient,
        NormOfData,
        NormOfAProperty,
    ],
)
def test_other_norms_stay(config: Config, kind: type[nn.Module], norm_calls: list[int]) -> None:
    fused, _ = normed(config, kind)
    assert "0" not in [each.name for each in f8.fuse(fused, norms=True)] and type(fused[0]) is kind


def test_names_a_norm_that_stays(config: Config) -> None:
    kind = type("GemmaRMSNorm", (NormOfGemma,), {})
    fused, _ = normed(config, kind)
    (left,) = (each for each in f8.fuse(fused, norms=True) if each.name == "0")
    assert not left.fused and left.what == "norm" and "eager mode computes it" in left.why


def test_norms_stay_without_the_option_and_in_compiled_graphs(
    config: Config, norm_calls: list[int]
) -> None:
    fused, _ = normed(config, Norm)
    f8.fuse(fused)
    assert type(fused[0]) is Norm
    f8.fuse(fused, norms=True)
    x = torch.randn(2, 9, 64).to(fused[0].weight)
    torch.compile(fused, backend="aot_eager", fullgraph=True)(x)
    assert not norm_calls
    fused(x)
    assert len(norm_calls) == 1


def test_a_norm_whose_forward_is_replaced_later(
    config: Config, monkeypatch: pytest.MonkeyPatch, norm_calls: list[int]
) -> None:
    fused, _ = normed(config, Norm)
    f8.fuse(fused, norms=True)
    monkeypatch.setattr(Norm, "forward", lambda _, x: x * 2)
    x = torch.randn(2, 9, 64).to(fused[0].weight)
    with pytest.warns(UserWarning, match="Norm is no longer fused"):
        assert torch.equal(fused[0](x), x * 2) and not norm_calls


def test_norms_on_meta(config: Config) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Norm(), nn.Linear(64, 64))
        f8.convert_to_float8_training(model, config=config("rowwise"))
        assert ("0", True, "", "norm") in f8.fuse(model, norms=True)
