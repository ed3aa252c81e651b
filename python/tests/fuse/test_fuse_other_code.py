"""Forwards that compute an MLP and more, or something that resembles one: fuse leaves them, and says what they do."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fused import FeedForward, converted, reasons
from torch import nn

import float8.torch as f8

Config = Callable[..., f8.LinearConfig]
pytestmark = pytest.mark.filterwarnings("ignore:float8. fuse left")


class Cubed(FeedForward):
    def forward(self, x: torch.Tensor) -> Any:
        return self.w2(F.silu(self.w1(x)) * self.w3(self.w3(x)))


class Added(FeedForward):
    def forward(self, x: torch.Tensor) -> Any:
        return self.w2(F.silu(self.w1(x)) + self.w3(x))


class More(FeedForward):
    def forward(self, x: torch.Tensor, mask: Any) -> Any:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Other:
    silu = staticmethod(torch.tanh)


class NotTheirs(FeedForward):
    def forward(self, x: torch.Tensor) -> Any:
        return self.w2(Other.silu(self.w1(x)) * self.w3(x))


class Counted(FeedForward):
    """It calls what its result does not tell of."""

    def forward(self, x: torch.Tensor) -> Any:
        SEEN.append(x)
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Kept(FeedForward):
    def forward(self, x: torch.Tensor) -> Any:
        self.h = F.silu(self.w1(x)) * self.w3(x)
        return self.w2(self.h)


class KeptOutside(FeedForward):
    def forward(self, x: torch.Tensor) -> Any:
        global LATEST
        LATEST = F.silu(self.w1(x)) * self.w3(x)
        return self.w2(LATEST)


class KeptInItsClass(FeedForward):
    latest: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        self.__class__.latest = x
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class KeptByAFunction(FeedForward):
    def forward(self, x: torch.Tensor) -> Any:
        def keep(h: Any) -> Any:
            global LATEST
            LATEST = h
            return h

        return self.w2(keep(F.silu(self.w1(x)) * self.w3(x)))


class Powers(FeedForward):
    """Its product has more factors than can be followed one by one."""

    def forward(self, x: torch.Tensor) -> Any:
        a = F.silu(self.w1(x)) * self.w3(x)
        b = a * a
        c = b * b
        d = c * c
        e = d * d
        f = e * e
        return self.w2(f * f)


class Chosen(FeedForward):
    """Which one it is depends on a mode."""

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            return self.w2(F.silu(self.w3(x)) * self.w1(x))
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class ChosenByRows(Chosen):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) if len(x) > 7 else self.w2(F.silu(self.w1(x)) * self.w3(x))


class ChosenElsewhere(FeedForward):
    """What an object says is not known to stay."""

    config = types.SimpleNamespace(scale=None, swapped=False)

    def forward(self, x: torch.Tensor) -> Any:
        if self.config.scale is None:
            return self.w2(F.silu(self.w3(x)) * self.w1(x))
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class ChosenByATruth(ChosenElsewhere):
    def forward(self, x: torch.Tensor) -> Any:
        if self.config.swapped:
            return self.w2(F.silu(self.w3(x)) * self.w1(x))
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class ChosenAmong(ChosenElsewhere):
    def forward(self, x: torch.Tensor) -> Any:
        if self.config.swapped in (1, 2):
            return self.w2(F.silu(self.w3(x)) * self.w1(x))
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class ChosenByDevice(FeedForward):
    def forward(self, x: torch.Tensor) -> Any:
        if x.device.type == "cuda":
            return self.w2(F.silu(self.w3(x)) * self.w1(x))
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class ChosenByGradient(FeedForward):
    def forward(self, x: torch.Tensor) -> Any:
        if x.grad_fn is None:
            return self.w2(F.silu(self.w3(x)) * self.w1(x))
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class ChosenBySameness(FeedForward):
    def forward(self, x: torch.Tensor) -> Any:
        if self.w1 is self.w1:
            return self.w2(F.silu(self.w1(x)) * self.w3(x))
        return self.w2(F.silu(self.w3(x)) * self.w1(x))


class Repeated(FeedForward):
    def forward(self, x: torch.Tensor) -> Any:
        h = F.silu(self.w1(x)) * self.w3(x)
        while self.once:
            h = self.w2(h)
        return self.w2(h)

    once = False


class Guarded(FeedForward):
    def forward(self, x: torch.Tensor) -> Any:
        try:
            return self.w2(F.silu(self.w1(x)) * self.w3(x))
        except RuntimeError:
            return x


class OfTwo(FeedForward):
    """gate and up read different tensors."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.w2(F.silu(self.w1(x)) * self.w3(x * 2))


class AlwaysDropped(FeedForward):
    def forward(self, x: torch.Tensor) -> Any:
        return F.dropout(self.w2(F.silu(self.w1(x)) * self.w3(x)), p=self.p, training=True)

    p = 0.3


class ThroughAnotherName(FeedForward):
    def forward(self, x: torch.Tensor) -> Any:
        up = self.w3(x)
        h = gate = F.silu(self.w1(x))
        gate *= up
        return self.w2(h * up)


class OfSomePower(FeedForward):
    power = 2

    def forward(self, x: torch.Tensor) -> Any:
        return self.w2(F.relu(self.w1(x)) ** self.power)


class InPlace(FeedForward):
    def forward(self, x: torch.Tensor) -> Any:
        return self.w2(F.silu(self.w1(x), inplace=True) * self.w3(x))


SEEN: list[torch.Tensor] = []
LATEST: Any = None
OTHERS: dict[type[nn.Module], str] = {
    Cubed: "computes something else",
    Added: "does more than to call, multiply and square",
    More: "takes other arguments than x",
    NotTheirs: "computes something else",
    Counted: "calls something that its result is not made of",
    Kept: "keeps something",
    KeptOutside: "keeps something",
    KeptInItsClass: "keeps something",
    KeptByAFunction: "keeps something",
    Chosen: "has a branch",
    ChosenByRows: "calls super()",
    ChosenElsewhere: "has a branch",
    ChosenByATruth: "has a branch",
    ChosenAmong: "has a branch",
    ChosenByDevice: "has a branch",
    ChosenByGradient: "has a branch",
    ChosenBySameness: "has a branch",
    Repeated: "has a branch, a loop",
    Guarded: "has a branch, a loop, a with or a try",
    OfTwo: "computes something else",
    InPlace: "computes something else",
    AlwaysDropped: "computes something else",
    ThroughAnotherName: "does more than",
    OfSomePower: "computes something else",
    Powers: "computes something else",
}


@pytest.mark.parametrize("kind", OTHERS)
def test_leaves_and_names_other_code(config: Config, kind: type[nn.Module]) -> None:
    model = converted(nn.Sequential(kind()), config("blockwise"))
    (why,) = reasons(model)
    assert f"the forward of its class {kind.__name__} is none that is known" in why
    assert f"since it {OTHERS[kind]}" in why
    assert type(model[0]) is kind
    assert not SEEN and LATEST is None
