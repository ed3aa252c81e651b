"""fuse(norms=True): graphs of torch.compile cast what an RMSNorm makes of x as they compute it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from reference import error
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import float8.torch as f8
from float8 import recipes
from float8.torch import _ops, norm_casts, shared_casts
from float8.torch.shard.copy_layout import layout

pytestmark = pytest.mark.usefixtures("untold")
K, N = 64, 96
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")


class OfTransformers(nn.Module):
    """The RMSNorm of Llama in transformers, which rounds before it multiplies by the weight."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.second = norm(K), norm(K)
        self.q, self.k = nn.Linear(K, N, bias=False), nn.Linear(K, N)
        self.o = nn.Linear(N, K, bias=False)
        self.gate, self.up = (nn.Linear(K, N, bias=False) for _ in range(2))
        self.down = nn.Linear(N, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.o(self.q(h) * self.k(h))
        h = self.second(x)
        y: Tensor = x + self.down(functional.silu(self.gate(h)) * self.up(h))
        return y


@pytest.fixture(autouse=True)
def graphs_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def block(norm: type[nn.Module], device: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    made = Block(norm).to(device, dtype)
    with torch.no_grad():
        for each in (made.norm, made.second):
            each.weight.normal_(1, 0.2)  # type: ignore[operator, union-attr]
    return made


def step(model: nn.Module, call: Any, dtype: torch.dtype, device: str) -> list[Tensor]:
    random = torch.Generator().manual_seed(5)
    x, dy = (torch.randn(2, 33, K, generator=random).to(device, dtype) for _ in range(2))
    x.requires_grad_()
    model.zero_grad()
    y = call(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(each.grad for each in model.parameters())]  # type: ignore[list-item]


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts what the pass changed in each graph."""
    found: list[int] = []
    apply = norm_casts.cast_norms

    def counting(graph: Any) -> None:
        apply(graph)
        targets = (_ops.quantize_rms_norm, _ops.quantize_rms_norm_again)
        found.append(sum(node.target in targets for node in graph.nodes))

    monkeypatch.setattr(shared_casts.norm_casts, "cast_norms", counting)
    with torch._inductor.config.patch(force_disable_caches=True):
        yield found


@pytest.mark.parametrize(
    ("recipe", "norm", "dtype"),
    [
        *((recipe, nn.RMSNorm, torch.bfloat16) for recipe in RECIPES),
        ("rowwise", OfTransformers, torch.float16),
    ],
)
def test_equals_the_norm_apart(
    device: str,
    options: dict[str, Any],
    recipe: str,
    norm: Any,
    dtype: torch.dtype,
    casts: list[int],
) -> None:
    model = block(norm, device, dtype)
    exact_model = copy.deepcopy(model).float()
    f8.convert_to_float8_training(model, config=f8.LinearConfig(recipe, **options))
    expected = step(model, torch.compile(model), dtype, device)
    assert casts == [0, 0]
    casts.clear()
    torch._dynamo.reset()
    assert f8.fuse(model, norms=True) == []
    actual = step(model, torch.compile(model), dtype, device)
    # Two in forward, and in backward those whose grad_weight reads a copy.
    assert casts == [2, 0 if recipe == "rowwise_with_gw_hp" else 2]
    if device == "cpu":
        for one, other in zip(actual, expected, strict=True):
            assert torch.equal(one, other)
        return
    # A GPU adds up the squares of a row in another order than Inductor's kernel does, so a norm may
    # round to a neighbour, and the scale of a tensor with it. The error is that of fp8 all the same.
    exact = step(exact_model, exact_model, torch.float32, device)
    for one, other, right in zip(actual, expected, exact, strict=True):
        apart = error(other, right.cpu())
        assert error(one, right.cpu()) < 1.25 * apart + 1e-6
        assert error(one, other.cpu()) < 1.5 * apart + 1e-6


def test_fused_mlps_and_checkpoints_have_it_too(
    device: str, options: dict[str, Any], casts: list[int]
) -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = (nn.Linear(K, N, bias=False) for _ in range(2))
            self.down = nn.Linear(N, K, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
            return y

    f8.register_mlp(Mlp, gate="gate", up="up", down="down", activation="silu")
    torch.manual_seed(2)
    model = nn.Sequential(nn.RMSNorm(K), Mlp()).to(device, torch.bfloat16)
    f8.convert_to_float8_training(model, config=f8.LinearConfig("tensorwise", **options))
    assert [each.fused for each in f8.fuse(model)] == [True]

    def checkpointed(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(model, x, use_reentrant=False)
        return y

    expected = [
        step(model, torch.compile(call), torch.bfloat16, device) for call in (model, checkpointed)
    ]
    casts.clear()
    f8.fuse(model, norms=True)
    torch._dynamo.reset()
    for call, of_call in zip((model, checkpointed), expected, strict=True):
        actual = step(model, torch.compile(call), torch.bfloat16, device)
        assert all(torch.equal(one, other) for one, other in zip(actual, of_call, strict=True))
    assert casts[0] == 1
    assert len(casts) == 4


@pytest.mark.parametrize("case", ["layer_norm", "no weight", "autocast", "weight of another type"])
def test_leaves_what_is_no_norm_of_one_type(
    device: str, options: dict[str, Any], case: str, casts: list[int]
) -> None:
    made: nn.Module = nn.RMSNorm(K)
    if case == "layer_norm":
        made = nn.LayerNorm(K)
    elif case == "no weight":
        made = nn.RMSNorm(K, elementwise_affine=False)
    dtype = torch.float32 if case == "autocast" else torch.bfloat16
    torch.manual_seed(2)
    model = nn.Sequential(made, nn.Linear(K, N)).to(device, dtype)
    if case == "weight of another type":
        made.float()
    f8.convert_to_float8_training(model, config=f8.LinearConfig("rowwise", **options))

    def call(x: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=case == "autocast"):
            h = made(x).to(x.dtype)
            y: Tensor = model[1](h)
            return y

    results = []
    for norms in (False, True):
        f8.fuse(model, norms=norms)
        torch._dynamo.reset()
        x = torch.randn(8, K, generator=torch.Generator().manual_seed(1)).to(device, dtype)
        results.append(torch.compile(call)(x))
    assert torch.equal(*results)
    assert not any(casts)


def test_ops_cast_a_norm_of_ones_as_x(device: str, options: dict[str, Any]) -> None:
    config = recipes.pack(recipes.Recipe.named("rowwise"), emulate=options["emulate"])
    x = torch.randn(8, K, device=device).bfloat16()
    weight, rstd = torch.ones(K, device=device).bfloat16(), torch.ones(8, 1, device=device)
    at = layout(_ops.ROWS, 8, K, config, _ops.INPUT, _ops.Q_ALONE, False)
    made = (
        _ops.quantize(x, config, _ops.INPUT, False),
        _ops.quantize_rms_norm(x, weight, rstd, config, False),
    )
    one, other = (at.copies(q, qt, 8, K)[0] for q, qt in made)
    assert torch.equal(one.data[:, :K], other.data[:, :K])  # type: ignore[union-attr]
    assert torch.equal(one.scales[:8], other.scales[:8])  # type: ignore[union-attr]
    empty = x[:0], weight, rstd[:0]
    assert _ops.quantize_rms_norm(*empty, config, False)[0].shape == (
        _ops.quantize(x[:0], config, _ops.INPUT, False)[0].shape
    )


BAD_FACTORS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "a weight in float32": lambda weight, rstd: (weight.float(), rstd),
    "a short weight": lambda weight, rstd: (weight[:16], rstd),
    "a short rstd": lambda weight, rstd: (weight, rstd[:4]),
    "rstd in float64": lambda weight, rstd: (weight, rstd.double()),
    "rstd in bfloat16": lambda weight, rstd: (weight, rstd.bfloat16()),
}


@pytest.mark.parametrize("bad", BAD_FACTORS)
def test_ops_refuse_factors_that_do_not_fit(bad: str, device: str, options: dict[str, Any]) -> None:
    config = recipes.pack(recipes.Recipe.named("rowwise"), emulate=options["emulate"])
    x = torch.randn(8, K, device=device).bfloat16()
    weight, rstd = torch.ones(K, device=device).bfloat16(), torch.ones(8, 1, device=device)
    with pytest.raises((ValueError, RuntimeError), match="RMSNorm"):
        _ops.quantize_rms_norm(x, *BAD_FACTORS[bad](weight, rstd), config, False)


def test_refuses_another_choice() -> None:
    with pytest.raises(TypeError, match="norms is 1"):
        f8.fuse(nn.Linear(16, 16), norms=1)  # type: ignore[arg-type]
