"""The ways in which a forward takes gate and up of what one linear makes: what fuse knows of them, and what not."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from activations import glu
from fused import converted, inputs, reasons, step
from reference import same
from torch import nn
from torch.nn import functional

import float8.torch as f8
from float8.torch.layer.mlps import mlp_function

Config = Callable[..., f8.LinearConfig]
pytestmark = pytest.mark.filterwarnings("ignore:float8. fuse left")
HALF = 128


class Merged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(64, 256, bias=False)
        self.down = nn.Linear(128, 64)
        self.hidden, self.whole, self.less = 128, 256, 100
        self.config = types.SimpleNamespace(hidden=128)
        self.other = Computed()

    @property
    def made(self) -> int:
        return 128

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(glu(*self.both(x).chunk(2, dim=-1)))


class Computed:
    """Its number is computed where it is read."""

    def __getattr__(self, name: str) -> Any:
        if name == "hidden":
            return 128
        raise AttributeError(name)


# The expressions of gate and up, of h.
KNOWN = {
    "a split": "h.split(128, dim=-1)",
    "a split by a function": "torch.split(h, 128, -1)",
    "a split by name": "torch.split(h, split_size_or_sections=self.hidden, dim=-1)",
    "a split's name of a method": "h.split(split_size=self.hidden, dim=-1)",
    "a split into sizes": "h.split([self.hidden, self.hidden], -1)",
    "a split into a tuple": "torch.split(h, (HALF, HALF), dim=-1)",
    "a split by its own size": "h.split(h.shape[-1] // 2, dim=-1)",
    "a split by what down reads": "h.split(self.down.in_features, -1)",
    "a split by half of what is made": "h.split(self.both.out_features // 2, -1)",
    "slices": "(h[..., :128], h[..., 128:])",
    "slices with zero and one": "(h[..., 0:HALF:1], h[..., HALF:])",
    "slices by an attribute": "(h[..., :self.hidden], h[..., self.hidden:])",
    "slices by a configuration": "(h[..., :self.config.hidden], h[..., self.config.hidden:])",
    "slices by a size": "(h[..., :h.size(-1) // 2], h[..., h.size(-1) // 2:])",
    "slices by sizes": "(h[..., :h.size()[-1] // 2], h[..., h.size()[-1] // 2:])",
    "an unflatten": "h.unflatten(-1, (2, 128)).unbind(-2)",
    "an unflatten by a function": "torch.unbind(torch.unflatten(h, -1, [2, -1]), dim=-2)",
    "rows of an unflatten": "(h.unflatten(-1, (2, -1))[..., 0, :], h.unflatten(-1, (2, -1))[..., 1, :])",
    "items from the end": "(h.chunk(2, -1)[-2], h.chunk(2, -1)[-1])",
    "a reshape by a function": "torch.reshape(h, (*h.shape[:-1], 2, -1)).unbind(-2)",
    "a view": "h.view(*h.shape[:-1], 2, self.hidden).unbind(-2)",
    "a view of sizes": "h.reshape((*h.size()[:-1], 2, -1)).unbind(dim=-2)",
    "a view like x": "h.view(*x.shape[:-1], 2, -1).unbind(-2)",
}
# Other code, some of which computes the same with luck, and some of which cannot run.
OTHERS = {
    "unequal sizes": "h.split([100, 156], -1)",
    "a size too small": "h.split(100, dim=-1)",
    "a size that makes four": "h.split(64, -1)",
    "three sizes": "h.split([128, 64, 64], -1)[:2]",
    "a wrong attribute": "(h[..., :self.less], h[..., self.less:])",
    "another dimension": "h.split(128, dim=1)",
    "the first dimension": "torch.split(h, 128)",
    "overlapping slices": "(h[..., :192], h[..., 64:])",
    "equal slices that overlap": "(h[..., :128], h[..., 64:192])",
    "a step": "(h[..., ::2], h[..., 1::2])",
    "a step behind a start": "(h[..., :128:1], h[..., 128::2])",
    "a slice of another dimension": "(h[:, :128], h[:, 128:])",
    "a dimension counted from the front": "(h[:, :, :128], h[:, :, 128:])",
    "the same half twice": "(h[..., :128], h[..., :128])",
    "the same piece twice": "(h.split(128, -1)[0], h.split(128, -1)[-2])",
    "a third piece": "(h.split(128, -1)[0], h.split(128, -1)[2])",
    "other halves": "(h[..., :128], self.both(x)[..., 128:])",
    "halves of x": "(x[..., :32], x[..., 32:])",
    "pairs": "h.unflatten(-1, (128, 2)).unbind(-1)",
    "pairs of rows": "(h.unflatten(-1, (128, 2))[..., 0], h.unflatten(-1, (128, 2))[..., 1])",
    "a row of pieces": "(h.chunk(2, -1)[..., 0, :], h.chunk(2, -1)[..., 1, :])",
    "an item of rows": "(h.unflatten(-1, (2, -1))[0], h.unflatten(-1, (2, -1))[1])",
    "four rows": "(h.unflatten(-1, (4, 64))[..., 0, :], h.unflatten(-1, (4, 64))[..., 1, :])",
    "rows of another dimension": "h.unflatten(1, (2, -1)).unbind(-2)",
    "another unbind": "h.unflatten(-1, (2, 128)).unbind(-1)",
    "a view that moves tokens": "h.view(x.shape[0], 2, -1, 128).unbind(1)",
    "a view of other sizes": "h.view(*x.shape[:-2], 2, -1, 128).unbind(-2)",
    "a view without a size for tokens": "h.view(-1, 2, 128).unbind(-2)",
    "a view as another type": "h.view(torch.int16).split(128, -1)",
    "a property": "(h[..., :self.made], h[..., self.made:])",
    "a number that is computed": "h.split(self.other.hidden, -1)",
    "two expressions": "(h[..., :self.hidden], h[..., self.config.hidden:])",
    "a size of another tensor": "h.split(x.shape[-1] * 2, -1)",
    "a true size": "(h[..., :True], h[..., True:])",
    "a size below zero": "(h[..., :-128], h[..., -128:])",
}  # fmt: skip


def kind_of(halves: str, order: str = "gate, up") -> type[Merged]:
    """Returns a class of MLPs whose forward takes the halves by this code."""
    code = f"h = self.both(x)\n    {order} = {halves}\n    return self.down(silu(gate) * up)"
    room: dict[str, Any] = {"torch": torch, "silu": functional.silu, "HALF": HALF}
    room["__name__"] = __name__
    exec(f"def forward(self, x):\n    {code}", room)
    return type("Other", (Merged,), {"forward": room["forward"], "__module__": __name__})


def model_of(kind: type[Merged], options: f8.LinearConfig) -> Any:
    torch.manual_seed(1)
    return converted(nn.Sequential(kind()), options)


@pytest.mark.parametrize("halves", KNOWN.values(), ids=KNOWN.keys())
def test_knows_halves_and_has_the_bits_of_linears_one_by_one(config: Config, halves: str) -> None:
    fused, plain = model_of(kind_of(halves), config("rowwise")), model_of(Merged, config("rowwise"))
    assert f8.fuse(fused) == [("0", True, "", "mlp")]
    x = inputs(fused, 8)
    assert same(step(fused, x), step(plain, x))
    as_written, chunked = (
        model_of(kind_of(each), config("rowwise")) for each in (halves, "h.chunk(2, dim=-1)")
    )
    assert same(step(as_written, x), step(chunked, x))


@pytest.mark.parametrize("halves", OTHERS.values(), ids=OTHERS.keys())
def test_leaves_other_pieces(config: Config, halves: str) -> None:
    (why,) = reasons(model_of(kind_of(halves), config("rowwise")))
    assert "is none that is known" in why


@pytest.mark.parametrize(
    "halves",
    ["h.split(128, -1)", "(h[..., :128], h[..., 128:])", "h.unflatten(-1, (2, -1)).unbind(-2)"],
)
def test_knows_an_up_that_comes_first(config: Config, halves: str) -> None:
    model = model_of(kind_of(halves, "up, gate"), config("rowwise"))
    assert reasons(model) == []
    assert model[0].float8_names.halves == mlp_function.UP_FIRST


def test_sizes_are_those_of_each_module(config: Config) -> None:
    """A module of a class that is fused already is left where its size is another one."""
    kind = kind_of("h.split(self.hidden, -1)")
    first, second = model_of(kind, config("rowwise")), model_of(kind, config("rowwise"))
    second[0].hidden = 64
    assert f8.fuse(first)[0].fused
    (why,) = reasons(second)
    assert "computes something else" in why
