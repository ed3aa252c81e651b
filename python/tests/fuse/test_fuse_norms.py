"""fuse(norms=True): graphs of torch.compile cast what a norm makes of x as they compute it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import error
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import float8.torch as f8
from float8 import recipes
from float8.torch import _ops
from float8.torch.shard.copy_layout import layout

pytestmark = pytest.mark.usefixtures("untold", "graphs_anew", "large_weights")
K, N = 64, 96


class OfTransformers(nn.Module):
    """The RMSNorm of Llama in transformers, which rounds before it multiplies by the weight."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def unbiased(features: int) -> nn.Module:
    return nn.LayerNorm(features, bias=False)


class Block(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
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


def scatter(norms: list[nn.Module]) -> None:
    """Gives norms other weights and biases than ones and zeros."""
    with torch.no_grad():
        for norm in norms:
            for name, each in norm.named_parameters():
                each.normal_(int(name == "weight"), 0.2)


def block(norm: Callable[[int], nn.Module], device: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    made = Block(norm).to(device, dtype)
    scatter([made.norm, made.second])
    return made


def step(model: nn.Module, call: Any, dtype: torch.dtype, device: str) -> list[Tensor]:
    random = torch.Generator().manual_seed(5)
    x, dy = (torch.randn(2, 33, K, generator=random).to(device, dtype) for _ in range(2))
    x.requires_grad_()
    model.zero_grad()
    y = call(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(each.grad for each in model.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("recipe", "norm", "dtype"),
    [
        ("tensorwise", nn.RMSNorm, torch.bfloat16),
        ("rowwise", OfTransformers, torch.float16),
        ("rowwise", nn.LayerNorm, torch.float16),
        ("rowwise_with_gw_hp", nn.LayerNorm, torch.bfloat16),
        ("blockwise", unbiased, torch.bfloat16),
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
    assert all(each.fused for each in f8.fuse(model, norms=True))
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


@pytest.mark.parametrize(
    ("norm", "case"),
    [
        (nn.RMSNorm, "no weight"),
        (nn.RMSNorm, "autocast"),
        (nn.RMSNorm, "weight of another type"),
        (nn.LayerNorm, "no weight"),
        (nn.LayerNorm, "autocast"),
    ],
)
def test_leaves_what_is_no_norm_of_one_type(
    device: str, options: dict[str, Any], norm: Any, case: str, casts: list[int]
) -> None:
    made: nn.Module = norm(K, elementwise_affine=case != "no weight")
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


class Ops:
    """The casts of norms, and what they take in addition to x of eight rows."""

    def __init__(self, device: str, options: dict[str, Any], recipe: str = "rowwise") -> None:
        self.config = recipes.pack(recipes.Recipe.named(recipe), emulate=options["emulate"])
        self.device = device
        self.weight = torch.ones(K, device=device).bfloat16()
        self.rstd = torch.ones(8, 1, device=device)

    def rms(self, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        made: tuple[Tensor, Tensor] = _ops.quantize_rms_norm(x, weight, rstd, self.config, False)
        return made

    def layer(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, rstd: Tensor
    ) -> tuple[Tensor, Tensor]:
        made: tuple[Tensor, Tensor] = _ops.quantize_layer_norm(
            x, weight, bias, mean, rstd, self.config, False
        )
        return made

    def plain(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made: tuple[Tensor, Tensor] = _ops.quantize(x, self.config, _ops.INPUT, False)
        return made

    def q(self, made: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        at = layout(_ops.ROWS, 8, K, self.config, _ops.INPUT, _ops.Q_ALONE, False)
        copy = at.copies(*made, 8, K)[0]
        return copy.data[:, :K], copy.scales[:8]  # type: ignore[union-attr]


def test_ops_cast_a_norm_of_ones_as_x(device: str, options: dict[str, Any]) -> None:
    ops = Ops(device, options)
    x = torch.randn(8, K, device=device).bfloat16()
    none = torch.zeros_like(ops.rstd)
    factors = ops.weight, None, none, ops.rstd
    expected = ops.q(ops.plain(x))
    for made in (ops.rms(x, ops.weight, ops.rstd), ops.layer(x, *factors)):
        assert all(map(torch.equal, ops.q(made), expected))
    empty = ops.plain(x[:0])[0].shape
    assert ops.rms(x[:0], ops.weight, ops.rstd[:0])[0].shape == empty
    assert ops.layer(x[:0], ops.weight, None, none[:0], ops.rstd[:0])[0].shape == empty


def test_a_bias_is_added_to_a_product_that_is_not_rounded(
    device: str, options: dict[str, Any]
) -> None:
    ops = Ops(device, options, "tensorwise")
    x = torch.full((8, K), 1 + 2**-12, device=device)
    bias = torch.full((K,), -1 - 2**-11, device=device)
    made = ops.layer(x, x[0], bias, torch.zeros_like(ops.rstd), ops.rstd)
    of_remainder = ops.plain(torch.full_like(x, 2**-24))
    assert torch.equal(ops.q(made)[0], ops.q(of_remainder)[0])
    assert ops.q(made)[0].view(torch.uint8).min() > 0


BAD: dict[str, Callable[[Tensor], Tensor]] = {
    "in another type": lambda factor: factor.double(),
    "in the other type": lambda factor: (
        factor.bfloat16() if factor.dtype == torch.float32 else factor.float()
    ),
    "short": lambda factor: factor[:4],
}


@pytest.mark.parametrize("bad", BAD)
def test_ops_refuse_factors_that_do_not_fit(bad: str, device: str, options: dict[str, Any]) -> None:
    ops = Ops(device, options)
    x = torch.randn(8, K, device=device).bfloat16()
    of_rms = [ops.weight, ops.rstd]
    of_layer = [ops.weight, ops.weight, ops.rstd, ops.rstd]
    cases: list[tuple[Any, list[Tensor], str]] = [
        (ops.rms, of_rms, "an RMSNorm"),
        (ops.layer, of_layer, "a LayerNorm"),
    ]
    for op, factors, name in cases:
        for at, factor in enumerate(factors):
            given = [*factors[:at], BAD[bad](factor), *factors[at + 1 :]]
            with pytest.raises((ValueError, RuntimeError), match=name):
                op(x, *given)


def test_names_the_norms_that_stay_apart(options: dict[str, Any]) -> None:
    def model(recipe: str) -> nn.Module:
        made = nn.Sequential(
            nn.LayerNorm(K),
            nn.RMSNorm(K, elementwise_affine=False),
            nn.LayerNorm((4, K)),
            nn.Linear(K, N),
        )
        return f8.convert_to_float8_training(made, config=f8.LinearConfig(recipe, **options))

    assert f8.fuse(model("rowwise")) == []
    left = f8.fuse(model("rowwise"), norms=True)
    assert [(each.name, each.fused) for each in left] == [("1", False), ("2", False)]
    assert "elementwise_affine=False" in left[0].why
    assert "normalized_shape" in left[1].why
    delayed = f8.fuse(model("delayed"), norms=True)
    assert [each.name for each in delayed] == ["0", "1", "2"]
    assert "delayed" in delayed[0].why


def test_refuses_another_choice() -> None:
    with pytest.raises(TypeError, match="norms is 1"):
        f8.fuse(nn.Linear(16, 16), norms=1)  # type: ignore[arg-type]
