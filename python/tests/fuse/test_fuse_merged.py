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


class UpFirst(Merged):
    def forward(self, x: torch.Tensor) -> Any:
        up, gate = self.gate_up(x).chunk(2, dim=-1)
        return self.down(up * functional.silu(gate))


class UpFirstOneByOne(Merged):
    def forward(self, x: torch.Tensor) -> Any:
        up, gate = self.gate_up(x).chunk(2, dim=-1)
        return self.down(glu(gate, up))


class ByFunction(Merged):
    def forward(self, x: torch.Tensor) -> Any:
        gate, up = torch.chunk(self.gate_up(x), 2, -1)
        return self.down(up * functional.silu(gate))


class ByItem(Merged):
    def forward(self, x: torch.Tensor) -> Any:
        both = self.gate_up(x).chunk(2, -1)
        return self.down(functional.silu(both[0]) * both[1])


class Block(nn.Module):
    def __init__(self, kind: type[Merged] = Merged, bias: bool = False) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(64), kind(bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))  # type: ignore[no-any-return]


def pair(
    config: Config,
    recipe: str,
    dtype: torch.dtype = torch.bfloat16,
    kind: type[Merged] = Merged,
    bias: bool = False,
) -> tuple[Any, Any]:
    """Returns a fused model, and one with the same weights whose linears compute one by one."""
    models = []
    for each in (kind, UpFirstOneByOne if issubclass(kind, UpFirst) else OneByOne):
        torch.manual_seed(1)
        blocks = nn.Sequential(Block(each, bias), Block(each, bias))
        models.append(converted(blocks, config(recipe), dtype))
    fused, plain = models
    assert f8.fuse(fused) == [("0.mlp", True, "", "mlp"), ("1.mlp", True, "", "mlp")]
    return fused, plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", FUSED)
@pytest.mark.parametrize("kind", [Merged, UpFirst])
def test_has_the_bits_of_linears_one_by_one(
    config: Config, recipe: str, dtype: torch.dtype, kind: type[Merged]
) -> None:
    expect_equal_steps(*pair(config, recipe, dtype, kind, bias=dtype == torch.float16))


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("frozen", ["gate_up", "down", "gate_up down", "weight", "bias"])
def test_leaves_out_gradients_that_nobody_wants(config: Config, frozen: str, recipe: str) -> None:
    fused, plain = pair(config, recipe, kind=UpFirst, bias=True)
    for model in (fused, plain):
        for name, parameter in model.named_parameters():
            if any(each in name.split(".") for each in frozen.split()):
                parameter.requires_grad_(False)
    x = inputs(fused)
    assert same(step(fused, x), step(plain, x))


@pytest.mark.parametrize("kind", [ByItem, ByFunction])
def test_knows_the_halves_by_other_code(config: Config, kind: type[Merged]) -> None:
    fused, plain = pair(config, "rowwise", kind=kind)
    x = inputs(fused)
    assert same(step(fused, x), step(plain, x))


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_compiled_and_checkpointed_steps_have_the_same_bits(config: Config, recipe: str) -> None:
    fused, plain = pair(config, recipe, kind=UpFirst, bias=True)
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


def test_says_why_an_mlp_is_left(config: Config) -> None:
    (why,) = reasons(converted(nn.Sequential(Merged(hidden=144)), config("rowwise")))
    assert "a multiple of 128 features each" in why


class Registered(Merged):
    """Its forward is written in a way that is not known."""

    def forward(self, x: torch.Tensor) -> Any:
        if x.dim() == 0:
            return x
        return super().forward(x)


class RegisteredUpFirst(UpFirst):
    def forward(self, x: torch.Tensor) -> Any:
        if x.dim() == 0:
            return x
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "name"), [(Registered, "gate_up"), (RegisteredUpFirst, "up_gate")]
)
def test_takes_a_class_that_is_registered(config: Config, kind: type[Merged], name: str) -> None:
    options: dict[str, Any] = {name: "gate_up"}
    f8.register_mlp(kind, **options, down="down", activation="silu")
    fused, plain = pair(config, "rowwise", kind=kind)
    x = inputs(fused)
    assert same(step(fused, x), step(plain, x))


@pytest.mark.parametrize(
    ("kind", "name"), [(Registered, "up_gate"), (RegisteredUpFirst, "gate_up")]
)
def test_tells_the_halves_of_a_registered_class_apart(
    config: Config, kind: type[Merged], name: str
) -> None:
    options: dict[str, Any] = {name: "gate_up"}
    f8.register_mlp(kind, **options, down="down", activation="silu")
    (why,) = reasons(converted(nn.Sequential(kind()), config("rowwise")))
    assert "does not compute what register_mlp said" in why


@pytest.mark.parametrize(
    "names",
    [
        {},
        {"up": "a", "gate_up": "b"},
        {"gate": "a", "gate_up": "b"},
        {"gate": "a", "up_gate": "b"},
        {"up_gate": "a", "gate_up": "b"},
        {"gate_up": "down"},
    ],
)
def test_refuses_names_that_cannot_be(names: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"register_mlp takes|names of different children"):
        f8.register_mlp(Registered, **names, down="down", activation="silu")  # type: ignore[arg-type]
