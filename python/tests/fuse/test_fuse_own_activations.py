"""Activations by classes of other libraries, such as timm's GELU, which fuse knows by their code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fused import converted, expect_equal_steps, expect_trains, inputs, reasons
from torch import nn

import float8.torch as f8

Config = Callable[..., f8.LinearConfig]
pytestmark = pytest.mark.filterwarnings("ignore:float8. fuse left")


class GELU(nn.Module):
    """As timm's, whose argument does nothing."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.gelu(input)


class Tanh(GELU):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.gelu(input, approximate="tanh")


class Swish(GELU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.silu(x)
        return y


class Squared(GELU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x).square()


class InFloat32(GELU):
    """As diffusers' FP32SiLU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x.float(), inplace=False).to(x.dtype)


class StaysInFloat32(GELU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x.float())


class RoundedTo16Bits(GELU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x.float()).to(torch.bfloat16)


class RoundedFirst(GELU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x.half()).to(x.dtype)


class Doubled(GELU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x) * 2


class Scaled(GELU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x * 2)


class Twice(GELU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.gelu(x))


class InPlace(GELU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x, inplace=True)


class Chosen(GELU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x) if self.training else x


class MLP(nn.Module):
    """As timm's."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(64, 144), activation, nn.Linear(144, 64)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.fc1(x)
        x = self.act(x)
        return self.fc2(x)


KNOWN = {
    GELU: nn.GELU,
    Tanh: lambda: nn.GELU("tanh"),
    Swish: nn.SiLU,
    Squared: None,
    InFloat32: nn.SiLU,
}


@pytest.mark.parametrize("recipe", ("tensorwise", "delayed"))
@pytest.mark.parametrize("kind", KNOWN)
def test_fuses_what_computes_a_known_activation(
    config: Config, kind: type[GELU], recipe: str
) -> None:
    torch.manual_seed(1)
    model = converted(nn.Sequential(MLP(kind()), MLP(kind())), config(recipe))
    assert all(each.fused for each in f8.fuse(model))
    if KNOWN[kind] is not None:
        other = copy.deepcopy(model)
        for mlp in other:
            mlp.__class__ = MLP
            mlp.act = KNOWN[kind]()
        assert all(each.fused for each in f8.fuse(other))
        expect_equal_steps(model, other)
    expect_trains(model)


@pytest.mark.parametrize(
    "kind", (Doubled, Scaled, Twice, InPlace, Chosen, StaysInFloat32, RoundedTo16Bits, RoundedFirst)
)
def test_leaves_what_computes_more(config: Config, kind: type[GELU]) -> None:
    model = converted(nn.Sequential(MLP(kind())), config("rowwise"))
    (why,) = reasons(model)
    assert f"its act is {kind.__name__}" in why and type(model[0]) is MLP


def test_a_forward_that_changes_later_is_called(
    config: Config, monkeypatch: pytest.MonkeyPatch, untold: None
) -> None:
    model = converted(nn.Sequential(MLP(GELU())), config("rowwise"))
    f8.fuse(model)
    x = inputs(model)
    fused = model(x)
    monkeypatch.setattr(GELU, "forward", lambda self, x: x * 0)
    with pytest.warns(UserWarning, match="is no longer fused: its act is GELU"):
        assert not torch.equal(model(x), fused)
    assert torch.equal(model(x), model[0].fc2.bias.expand_as(x))


def test_compiles_whole(config: Config) -> None:
    torch._dynamo.reset()
    model = converted(nn.Sequential(MLP(GELU()), MLP(Tanh())), config("rowwise"))
    f8.fuse(model)
    x = inputs(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), model(x))
