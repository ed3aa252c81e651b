"""RMSNorm, in one launch and two for its gradients."""

from __future__ import annotations

from typing import Any

import torch

from float8 import recipes
from float8.torch import _ops
from float8.torch.contexts import is_transformed, once_differentiable, wanted_grads

MAX_COLS = 32768
ROUNDINGS = {"once": 0, "normalized": 1}  # float8_norm_rounding


def _empty_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor of x's shape whose heads and tokens lie in memory as those of x."""
    return _ops.empty_heads(x, dtype, x.dim() == 4 and x.stride(1) < x.stride(2))


@_ops.fake_kernel("rms_norm")
def _fake_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    rounding: int,
    dtype: int,
    with_rstd: bool,
    config: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.numel() // x.shape[-1] if with_rstd else 0
    rstd = x.new_empty((rows,), dtype=torch.float32)
    return _empty_like(x, _ops.element_type(dtype)), rstd


@_ops.fake_kernel("rms_norm_backward")
def _fake_rms_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    weight_offset: float,
    rounding: int,
    with_dx: bool,
    with_dweight: bool,
    config: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    dx = _empty_like(x, x.dtype) if with_dx else x.new_empty((0,))
    return dx, weight.new_empty(weight.shape if with_dweight else (0,))


class _RMSNorm(torch.autograd.Function):
    """The norm of the kernel: save is False where no gradient will be asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        weight_offset: float,
        rounding: int,
        dtype: torch.dtype,
        save: bool,
        config: int,
    ) -> torch.Tensor:
        of_result = _ops.ELEMENT_TYPES[dtype]
        y, rstd = _ops.rms_norm(x, weight, eps, weight_offset, rounding, of_result, save, config)
        if save:
            ctx.save_for_backward(x, weight, rstd)
            ctx.options = (weight_offset, rounding)
            ctx.config = config
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        needs = wanted_grads(ctx)[:2]
        found = _ops.rms_norm_backward(dy, *ctx.saved_tensors, *ctx.options, *needs, ctx.config)
        gradients = (each if need else None for each, need in zip(found, needs, strict=True))
        return (*gradients, *(None,) * 6)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    weight_offset: float = 0.0,
    rounding: str = "once",
    emulate: bool = False,
) -> torch.Tensor:
    """Returns x / sqrt(mean(x^2) + eps) (weight_offset + weight), where the mean is over the last dimension.

    x: [..., N] in bfloat16, float16 or float32; any strides, without a copy where rows of N elements lie a fixed
        stride apart, as in heads [B, S, H, N] and in their transpose [B, H, S, N].
    weight: [N] in x's type or in float32; with others PyTorch's operations compute it.
    rounding: "once" computes in float32 and rounds once, to x's type: torch.nn.RMSNorm, and with weight_offset=1 the norm
        of Gemma. "normalized" rounds x / sqrt(...) to x's type before it is multiplied by the weight, and has the type of
        this product: Llama's; it has no weight_offset.
    emulate: as for Float8Linear.

    On a Hopper GPU it is one launch, and two for both gradients, in eager mode, with N a multiple of 8, up to 32768. What
    that cannot compute, and all elsewhere, PyTorch's operations do, also under torch.compile. The sums over rows that the
    weight's gradient has are in float32, in the same order every time. There is no gradient of a gradient: the kernel's
    raises RuntimeError. TypeError and ValueError name an argument that cannot be.
    """
    check_form(weight_offset, rounding)
    _check(x, weight, eps)
    if fits(x, weight, emulate):
        return by_kernel(x, weight, eps, weight_offset, rounding, emulate)
    return by_operations(x, weight, eps, weight_offset, rounding)


def check_form(weight_offset: float, rounding: str) -> None:
    """Raises for what is no way to compute a norm."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"float8: rounding is {rounding!r}; it is one of {', '.join(ROUNDINGS)}")
    if rounding == "normalized" and weight_offset != 0:
        raise ValueError(
            f"float8: weight_offset is {weight_offset}; with rounding='normalized' there is none"
        )


def _check(x: Any, weight: Any, eps: Any) -> None:
    for name, each in (("x", x), ("the weight", weight)):
        if not isinstance(each, torch.Tensor):
            raise TypeError(
                f"float8: {name} of rms_norm is a {type(each).__name__}; it is a torch.Tensor"
            )
        if not each.is_floating_point():
            raise TypeError(
                f"float8: {name} of rms_norm is {each.dtype}; it is of a floating-point type"
            )
    if x.dim() == 0 or x.shape[-1:] != weight.shape:
        raise ValueError(
            f"float8: the weight of rms_norm is {list(weight.shape)} and x {list(x.shape)}; it has one dimension, x's last one"
        )
    if not isinstance(eps, (float, int)) or not 0 <= eps < float("inf"):
        raise ValueError(f"float8: eps of rms_norm is {eps!r}; it is a number, 0 or more")


def by_operations(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float, rounding: str
) -> torch.Tensor:
    """Computes it by PyTorch's operations."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if rounding == "normalized":
        return weight * normalized.to(x.dtype)
    weights = weight.to(wide.dtype)
    return (normalized * (weights + weight_offset if weight_offset else weights)).to(x.dtype)


def fits(x: Any, weight: Any, emulate: bool) -> bool:
    """Tells whether the kernel can compute it here."""
    if torch.compiler.is_compiling() or type(x) is not torch.Tensor or is_transformed():
        return False
    return (
        type(weight) in (torch.nn.Parameter, torch.Tensor)
        and x.shape[-1:] == weight.shape
        and 0 < weight.numel() <= MAX_COLS
        and weight.numel() % 8 == 0
        and x.numel() > 0
        and x.dtype in _ops.ELEMENT_TYPES
        and weight.dtype in (x.dtype, torch.float32)
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and x.device == weight.device
        and (emulate or (x.is_cuda and _ops.is_hopper(x.get_device())))
    )


def by_kernel(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    rounding: str,
    emulate: bool,
) -> torch.Tensor:
    """Computes it by the kernel, of tensors that fit."""
    dtype = torch.promote_types(x.dtype, weight.dtype) if rounding == "normalized" else x.dtype
    save = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    config = recipes.EMULATE if emulate else 0
    number = ROUNDINGS[rounding]
    return _RMSNorm.apply(x, weight, eps, weight_offset, number, dtype, save, config)  # type: ignore[no-any-return, no-untyped-call]
