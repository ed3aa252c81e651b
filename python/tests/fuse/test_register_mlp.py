"""What register_mlp says is tried, and may name modules below children, as diffusers' feed-forwards have them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from activations import activated
from fused import converted, inputs, step
from reference import same
from torch import nn

import float8.torch as f8
from float8.torch import notices
from float8.torch.layer import fuse as fusing

Config = Callable[..., f8.LinearConfig]
pytestmark = pytest.mark.filterwarnings("ignore:float8. fuse left")


class Gated(nn.Module):
    """A forward whose code says too little."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(64, 128, False), nn.Linear(128, 64, False), nn.Linear(64, 128, False)  # fmt: skip
        self.twice = twice

    def forward(self, x: torch.Tensor, scale: float | None = None) -> Any:
        h = F.silu(self.w1(x)) * self.w3(x)
        return self.w2(2 * h if self.twice else h)


class Viewing(Gated):
    """It needs its own sizes."""

    def forward(self, x: torch.Tensor, scale: float | None = None) -> Any:
        return self.w2((F.silu(self.w1(x)) * self.w3(x)).view(-1, 128))


class Projected(nn.Module):
    def __init__(self, approximate: str, times: int = 1) -> None:
        super().__init__()
        self.proj, self.approximate, self.times = nn.Linear(64, 128 * times), approximate, times

    def forward(self, x: torch.Tensor) -> Any:
        x = self.proj(x)
        if self.times == 2:
            x, gate = x.chunk(2, dim=-1)
            return x * F.gelu(gate)
        return F.gelu(x, approximate=self.approximate)


class FeedForward(nn.Module):
    """As diffusers has it."""

    def __init__(self, act: nn.Module, p: float = 0.0) -> None:
        super().__init__()
        self.net = nn.ModuleList([act, nn.Dropout(p), nn.Linear(128, 64)])

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for module in self.net:
            x = module(x)
        return x


@pytest.fixture(autouse=True)
def none_registered() -> Iterator[None]:
    before = dict(fusing._registered)
    notices._told.clear()
    yield
    fusing._registered.clear()
    fusing._registered.update(before)


def fused(mlp: nn.Module, config: Config, recipe: str = "rowwise") -> tuple[Any, list[f8.Fusion]]:
    model = converted(nn.Sequential(mlp), config(recipe))
    return model, f8.fuse(model)


@pytest.mark.parametrize(
    ("mlp", "said"),
    [
        (Gated(), {"gate": "w3", "up": "w1", "down": "w2", "activation": "silu"}),
        (Gated(), {"gate": "w1", "up": "w3", "down": "w2", "activation": "gelu"}),
        (Gated(True), {"gate": "w1", "up": "w3", "down": "w2", "activation": "silu"}),
        (FeedForward(Projected("none")), {"up": "net.0.proj", "down": "net.2", "activation": "gelu_tanh"}),
    ],
    ids=["swapped", "activation", "more", "approximation"],
)  # fmt: skip
def test_what_it_does_not_compute_is_left(mlp: Any, said: dict[str, str], config: Config) -> None:
    f8.register_mlp(type(mlp), **said)  # type: ignore[arg-type]
    state = torch.random.get_rng_state()
    model, (found,) = fused(copy.deepcopy(mlp), config)
    assert not found.fused and "does not compute what register_mlp said" in found.why
    assert type(model[0]) is type(mlp)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("kind", [Gated, Viewing])
def test_what_it_computes_or_does_not_show_is_fused(kind: type[Any], config: Config) -> None:
    f8.register_mlp(kind, gate="w1", up="w3", down="w2", activation="silu")
    _, (found,) = fused(kind(), config)
    assert found.fused, found.why


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_linears_may_lie_below_children(approximate: str, recipe: str, config: Config) -> None:
    key = "gelu" if approximate == "none" else "gelu_tanh"
    f8.register_mlp(FeedForward, up="net.0.proj", down="net.2", activation=key)
    mlp = FeedForward(Projected(approximate))
    keys = list(mlp.state_dict())
    plain = converted(nn.Sequential(copy.deepcopy(mlp)), config(recipe))
    model, (found,) = fused(mlp, config, recipe)
    assert found.fused, found.why
    assert list(model[0].state_dict()) == keys

    def one_by_one(x: torch.Tensor) -> Any:
        return plain[0].net[2](activated(plain[0].net[0].proj(x), key))

    plain[0].forward = one_by_one
    x = inputs(model)
    assert same(step(model, x), step(plain, x))
    before = [p.detach().clone() for p in model.parameters()]
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    assert not any(torch.equal(*each) for each in zip(before, model.parameters(), strict=True))


def test_a_hook_on_what_is_left_out_has_it_called(config: Config) -> None:
    f8.register_mlp(FeedForward, up="net.0.proj", down="net.2", activation="gelu")
    model, (found,) = fused(FeedForward(Projected("none")), config)
    assert found.fused
    seen: list[Any] = []
    model[0].net[0].register_forward_hook(lambda *args: seen.append(args[2]))
    with pytest.warns(UserWarning, match="its net.0 has hooks, which would not be called"):
        model(inputs(model)[0])
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("mlp", "why"),
    [
        (FeedForward(Projected("none", times=2)), "sizes of its linears are not those of an MLP"),
        (FeedForward(Projected("none"), p=0.1), "its net.1 drops; with p=0 it is fused"),
        (FeedForward(nn.GELU()), "it has no 'net.0.proj', which register_mlp names"),
    ],
)
def test_others_of_the_class_are_left(mlp: nn.Module, why: str, config: Config) -> None:
    f8.register_mlp(FeedForward, up="net.0.proj", down="net.2", activation="gelu")
    _, (found,) = fused(copy.deepcopy(mlp), config)
    assert not found.fused and why in found.why, found.why


def test_a_linear_that_is_not_named_is_told(config: Config) -> None:
    f8.register_mlp(Gated, up="w1", down="w2", activation="silu")
    _, (found,) = fused(Gated(), config)
    assert not found.fused and "another linear, w3, which register_mlp does not name" in found.why
