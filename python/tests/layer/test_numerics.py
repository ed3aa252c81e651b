"""Float8Linear against a plain PyTorch reference of each recipe."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from torch import nn

import float8
import float8.torch as f8

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "bf16")
CUSTOM = float8.Recipe(
    output=float8.Gemm(float8.Cast(granularity=float8.Granularity.AXIS), float8.Cast(pow2=True)),
    grad_input=float8.Gemm(float8.Cast(format=float8.Format.E5M2), float8.Cast()),
    grad_weight=float8.Gemm(float8.Cast(format=float8.Format.E5M2), float8.Cast(), fast=True),
)


def tolerance(dtype: torch.dtype, fast: bool) -> float:
    rounding = {torch.bfloat16: 2.5e-3, torch.float16: 1e-3, torch.float32: 1e-3}[dtype]
    return 1e-2 if fast else rounding


def run(
    recipe: str | float8.Recipe,
    dtype: torch.dtype,
    device: str,
    options: dict[str, Any],
    m: int = 200,
) -> None:
    n, k = 160, 272
    linear = nn.Linear(k, n, dtype=dtype, device=device)
    layer = f8.Float8Linear.from_float(linear, recipe=recipe, **options)
    x = torch.randn(m, k, dtype=dtype, device=device, requires_grad=True)
    dy = torch.randn(m, n, dtype=dtype, device=device)
    y = layer(x)
    y.backward(dy)
    assert y.dtype == dtype and linear.bias is not None and x.grad is not None
    settings = recipe if isinstance(recipe, float8.Recipe) else float8.Recipe.named(recipe)
    host = [t.detach().cpu() for t in (x, linear.weight, linear.bias, dy)]
    expected_y = reference.forward(*host[:3], settings)
    dx, dw, db = reference.backward(host[3], host[0], host[1], settings)
    assert reference.error(y, expected_y) < tolerance(dtype, settings.output.fast)
    assert reference.error(x.grad, dx) < tolerance(dtype, settings.grad_input.fast)
    assert linear.weight.grad is not None and linear.bias.grad is not None
    assert reference.error(linear.weight.grad, dw) < tolerance(dtype, settings.grad_weight.fast)
    assert reference.error(linear.bias.grad, db) < tolerance(dtype, False)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe(recipe: str, dtype: torch.dtype, device: str, options: dict[str, Any]) -> None:
    run(recipe, dtype, device, options)


def test_custom_recipe(device: str, options: dict[str, Any]) -> None:
    run(CUSTOM, torch.bfloat16, device, options)


@pytest.mark.parametrize("m", (1, 16, 513))
def test_any_m(m: int, device: str, options: dict[str, Any]) -> None:
    run("rowwise", torch.bfloat16, device, options, m)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recompute_gives_the_same_bits(recipe: str, device: str, options: dict[str, Any]) -> None:
    linear = nn.Linear(128, 64, dtype=torch.bfloat16, device=device)
    x = torch.randn(48, 128, dtype=torch.bfloat16, device=device)
    results = []
    for recompute in (False, True):
        layer = f8.Float8Linear.from_float(linear, recipe=recipe, recompute=recompute, **options)
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        results.append([y, *torch.autograd.grad(y.sum(), (leaf, layer.weight, layer.bias))])
    assert reference.same(*results)


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise"))
def test_close_to_high_precision(recipe: str, device: str, options: dict[str, Any]) -> None:
    linear = nn.Linear(256, 128, dtype=torch.bfloat16, device=device)
    x = torch.randn(64, 256, dtype=torch.bfloat16, device=device)
    layer = f8.Float8Linear.from_float(linear, recipe=recipe, **options)
    assert reference.sqnr(layer(x), linear(x)) > 25


@pytest.mark.parametrize("saturate", (False, True))
def test_saturate(saturate: bool, device: str, options: dict[str, Any]) -> None:
    x = torch.ones(16, 64, dtype=torch.bfloat16, device=device)
    x[0, 0] = float("inf")
    layer = f8.Float8Linear(
        64, 32, dtype=torch.bfloat16, device=device, saturate=saturate, **options
    )
    assert bool(layer(x).isfinite().all()) is saturate
