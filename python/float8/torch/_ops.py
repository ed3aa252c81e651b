"""The ops of torch.ops.float8, their fake kernels, and their gradient.

The kernels are in the shim (python/shim/ops.cpp), which is loaded here.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import torch

from float8 import recipes

torch.ops.load_library(  # type: ignore[no-untyped-call]
    str(pathlib.Path(__file__).parent.parent / "_C.so")
)

linear_forward = torch.ops.float8.linear_forward.default
linear_backward = torch.ops.float8.linear_backward.default
ROWS = 512  # kRows of python/shim/plans.hpp


@functools.cache
def _saved_bytes(n: int, k: int, config: int) -> tuple[int, int]:
    base, per_block = torch.ops.float8.saved_bytes(n, k, config)
    return base, per_block


@torch.library.register_fake("float8::linear_forward")  # type: ignore[untyped-decorator]
def _fake_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    config: int,
    layout: int,
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    n, k = weight.shape
    if x.shape[-1] != k:
        raise ValueError(f"float8: x has shape {tuple(x.shape)}, the weight {(n, k)}")
    if x.device != weight.device:  # a weight on meta comes here
        raise ValueError(f"float8: x is on {x.device}, the weight on {weight.device}")
    size = 0
    if save:
        m = x.numel() // k
        base, per_block = _saved_bytes(int(n), int(k), config)
        size = base + per_block * ((m + ROWS - 1) // ROWS)
    y = x.new_empty((*x.shape[:-1], n))
    return y, x.new_empty((size,), dtype=torch.uint8)


@torch.library.register_fake("float8::linear_backward")  # type: ignore[untyped-decorator]
def _fake_backward(
    dy: torch.Tensor,
    saved: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    config: int,
    layout: int,
    wanted: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n, k = weight.shape
    dx = dy.new_empty((*dy.shape[:-1], k) if wanted & 1 else (0,))
    dw = weight.new_empty((n, k) if wanted & 2 else (0, 0))
    db = weight.new_empty((n,) if wanted & 4 else (0,))
    return dx, dw, db


class LinearFunction(torch.autograd.Function):
    """y = x weight^T + bias. Between forward and backward it keeps the fp8 copies."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scales: torch.Tensor | None,
        config: int,
        layout: int,
    ) -> torch.Tensor:
        y, saved = linear_forward(x, weight, bias, scales, config, layout, True)
        kept = x if config & recipes.READS_X else None
        if scales is None:
            ctx.save_for_backward(saved, weight, kept)
        else:
            ctx.save_for_backward(saved, weight, kept, scales)
        ctx.config = config
        ctx.layout = layout
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        saved, weight, x, *scales = ctx.saved_tensors
        want_x, want_weight, want_bias, *_ = ctx.needs_input_grad
        dx, dw, db = linear_backward(
            dy,
            saved,
            x,
            weight,
            scales[0] if scales else None,
            ctx.config,
            ctx.layout,
            want_x | want_weight << 1 | want_bias << 2,
        )
        return (
            dx if want_x else None,
            dw if want_weight else None,
            db if want_bias else None,
            None,
            None,
            None,
        )


_apply: Any = LinearFunction.apply


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    config: int,
    scales: torch.Tensor | None = None,
    layout: int = 0,
) -> torch.Tensor:
    """Computes a linear of that config (recipes.pack), with a gradient where one is wanted.

    scales: the linear's part of a scale state of that layout (scales.py), for delayed scaling.
    """
    if torch.is_grad_enabled() and (
        weight.requires_grad or x.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return _apply(x, weight, bias, scales, config, layout)  # type: ignore[no-any-return]
    y: torch.Tensor = linear_forward(x, weight, bias, scales, config, layout, False)[0]
    return y
