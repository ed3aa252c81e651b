"""float8.torch.fuse of MLPs in which one linear makes gate and up, as in Phi-3, GLM and ModernBERT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from activations import glu
from fused import converted, expect_equal_steps, expect_trains, inputs, reasons, step
from reference import same
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import float8.torch as f8

Config = Callable[..., f8.LinearConfig]
pytestmark = pytest.mark.filterwarnings("ignore:float8. fuse left")
FUSED = ("tensorwise", "rowwise", "delayed", "blockwise")


class Merged(nn.Module):
    def __init__(self, hidden: int = 128, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = nn.Linear(64, 2 * hidden, bias=bias)
        self.down = nn.Linear(hidden, 64)

    def forward(self, x: torch.Tensor) -> Any:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class OneByOne(Merged):
    """The MLP with the rounding of the kernels, whose linears cast h and its gradients."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(glu(*self.gate_up(x).chunk(2, dim=-1)))


class ByFunction(Merged):
    def forward(self, x: torch.Tensor) -> Any:
        gate, up = torch.chunk(self.gate_up(x), 2, -1)
        return self.down(up * functional.silu(gate))


class ByItem(Merged):
    def forward(self, x: torch.Tensor) -> Any:
        both = self.gate_up(x).chunk(2, -1)
        return self.down(functional.silu(both[0]) * both[1])


class Block(nn.Module):
    def __init__(self, kind: type[Merged] = Merged) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(64), kind()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))  # type: ignore[no-any-return]


def pair(
    config: Config, recipe: str, dtype: torch.dtype = torch.bfloat16, kind: type[Merged] = Merged
) -> tuple[Any, Any]:
    """Returns a fused model, and one with the same weights whose linears compute one by one."""
    models = []
    for each in (kind, OneByOne):
        torch.manual_seed(1)
        models.append(converted(nn.Sequential(Block(each), Block(each)), config(recipe), dtype))
    fused, plain = models
    assert f8.fuse(fused) == [("0.mlp", True, "", "mlp"), ("1.mlp", True, "", "mlp")]
    return fused, plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", FUSED)
def test_has_the_bits_of_linears_one_by_one(
    config: Config, recipe: str, dtype: torch.dtype
) -> None:
    expect_equal_steps(*pair(config, recipe, dtype))


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("frozen", ["gate_up", "down", "gate_up down"])
def test_leaves_out_gradients_that_nobody_wants(config: Config, frozen: str, recipe: str) -> None:
    fused, plain = pair(config, recipe)
    for model in (fused, plain):
        for name in frozen.split():
            for block in model:
                getattr(block.mlp, name).requires_grad_(False)
    x = inputs(fused)
    assert same(step(fused, x), step(plain, x))


@pytest.mark.parametrize("kind", [ByItem, ByFunction])
def test_knows_the_halves_by_other_code(config: Config, kind: type[Merged]) -> None:
    fused, plain = pair(config, "rowwise", kind=kind)
    x = inputs(fused)
    assert same(step(fused, x), step(plain, x))


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_compiled_and_checkpointed_steps_have_the_same_bits(config: Config, recipe: str) -> None:
    fused, plain = pair(config, recipe)
    graph = torch.compile(fused[1], fullgraph=True, backend="aot_eager")
    for seed in range(2):
        x = inputs(fused, seed=seed)
        expected = step(plain, x)
        assert same(step(fused, x), expected)
        f8.sync_float8_amax_and_scale_history(plain)
        f8.sync_float8_amax_and_scale_history(fused)
        x, expected = inputs(fused, seed=5), step(plain, inputs(fused, seed=5))
        call = lambda x: graph(checkpoint(fused[0], x, use_reentrant=False))  # noqa: E731
        assert same(step(fused, x, call), expected)


def test_trains(config: Config) -> None:
    torch.manual_seed(0)
    model = converted(nn.Sequential(Block(), Block()), config("rowwise"), torch.float32)
    f8.fuse(model)
    expect_trains(model)


class UpFirst(Merged):
    def forward(self, x: torch.Tensor) -> Any:
        up, gate = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Thirds(Merged):
    def forward(self, x: torch.Tensor) -> Any:
        gate, up, _ = self.gate_up(x).chunk(3, dim=-1)
        return self.down(functional.silu(gate) * up)


class OfRows(Merged):
    def forward(self, x: torch.Tensor) -> Any:
        gate, up = self.gate_up(x).chunk(2, dim=0)
        return self.down(functional.silu(gate) * up)


class Same(Merged):
    def forward(self, x: torch.Tensor) -> Any:
        gate, _ = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * gate)


@pytest.mark.parametrize("kind", [Thirds, OfRows, Same])
def test_leaves_forwards_that_compute_something_else(config: Config, kind: type[Merged]) -> None:
    (why,) = reasons(converted(nn.Sequential(kind()), config("rowwise")))
    assert "is none that is known" in why
    assert "with gate_up= where one linear makes gate, in its first half" in why


def test_names_an_up_that_comes_first(config: Config) -> None:
    (why,) = reasons(converted(nn.Sequential(UpFirst()), config("rowwise")))
    assert "its gate_up makes up in its first half" in why


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hidden": 144}, "a multiple of 128 features each"),
        ({"bias": True}, "its gate_up has a bias"),
    ],
)
def test_says_why_an_mlp_is_left(config: Config, options: dict[str, Any], words: str) -> None:
    (why,) = reasons(converted(nn.Sequential(Merged(**options)), config("rowwise")))
    assert words in why


class Registered(Merged):
    """Its forward is written in a way that is not known."""

    def forward(self, x: torch.Tensor) -> Any:
        if x.dim() == 0:
            return x
        return super().forward(x)


def test_takes_a_class_that_is_registered(config: Config) -> None:
    f8.register_mlp(Registered, gate_up="gate_up", down="down", activation="silu")
    fused, plain = pair(config, "rowwise", kind=Registered)
    x = inputs(fused)
    assert same(step(fused, x), step(plain, x))


@pytest.mark.parametrize(
    "names",
    [{}, {"up": "a", "gate_up": "b"}, {"gate": "a", "gate_up": "b"}, {"gate_up": "down"}],
)
def test_refuses_names_that_cannot_be(names: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"register_mlp takes|names of different children"):
        f8.register_mlp(Registered, **names, down="down", activation="silu")  # type: ignore[arg-type]
