"""The activations as the kernels compute them, for x in 16 bits: each result is rounded once."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

NAMES = ("silu", "gelu", "gelu_tanh", "relu2")


def _hex(*numbers: str) -> list[float]:
    return [float.fromhex(each) for each in numbers]


def _fma(a: Any, b: Any, c: Any) -> torch.Tensor:
    """Returns a b + c, rounded once to fp32: the product of two in fp32 is exact in fp64."""
    wide = [torch.as_tensor(each).double() for each in (a, b, c)]
    return (wide[0] * wide[1] + wide[2]).float()


def _polynomial(x: torch.Tensor, *factors: float) -> torch.Tensor:
    value: Any = factors[0]
    for factor in factors[1:]:
        value = _fma(value, x, factor)
    return torch.as_tensor(value)


def _exp_of_minus(x: torch.Tensor) -> torch.Tensor:
    """Returns what exp_of_minus of codegen/kernels/cast/activations.cuh does."""
    log2e, shift = _hex("0x1.715476p+0", "0x1.8p+23")
    n = _fma(x, -log2e, shift) - shift
    f = _fma(x, -log2e, -n)
    factors = _hex("0x1.3a02ccp-7", "0x1.c9fc46p-5", "0x1.ec0378p-3", "0x1.62e12cp-1", "0x1p0")
    power = _polynomial(f, *factors)
    return ((n.nan_to_num().int() << 23) + power.view(torch.int32)).view(torch.float32)


def _inverse(d: torch.Tensor) -> torch.Tensor:
    return torch.where(d > 2.0**126, 0.0, 1 / d)


def _sigmoid(x: torch.Tensor, z: torch.Tensor, grown: torch.Tensor) -> Any:
    """Returns x sigmoid(z) and its slope; grown is x times that of z."""
    e = _exp_of_minus(z)
    sigmoid = _inverse(1 + e)
    return x * sigmoid, sigmoid * _fma(grown, e * sigmoid, 1.0)


def _silu(x: torch.Tensor) -> Any:
    within = x.clamp(-88.0, 87.0)
    return _sigmoid(x, within, within)


def _gelu_tanh(x: torch.Tensor) -> Any:
    line, cube = _hex("0x1.988454p+0", "0x1.2444f2p-4")
    within = x.clamp(*torch.tensor((-10.03, 9.9)).tolist())
    square = within * within
    grown = within * _fma(square, 3 * cube, line)
    return _sigmoid(x, within * _fma(square, cube, line), grown)


def _gelu(x: torch.Tensor) -> Any:
    density, growth = _hex("0x1.988454p-2", "0x1.3d70a4p-2")
    most = x.abs().clamp(max=15.0)
    half = 0.5 * most
    e = _exp_of_minus(half * half).square()
    y = _inverse(_fma(most, growth, 1.0))
    p = y * _polynomial(
        y,
        *_hex(
            "-0x1.2ecf1ap-4", "0x1.718e3ep-3", "0x1.0204a4p-6", "0x1.1142bap-3", "0x1.ed5442p-4",
            "0x1.fb5552p-4",
        ),
    )  # fmt: skip
    side, base = torch.where(x < 0, e, -e), torch.where(x < 0, 0.0, 1.0)
    return x * _fma(side, p, base), _fma(side, _fma(-density, most, p), base)


def _relu2(x: torch.Tensor) -> Any:
    positive = torch.where(x < 0, 0.0, x)
    return positive * positive, 2 * positive


_ALL = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "relu2": _relu2}


class Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.name = name
        return _ALL[name](x.float())[0].to(x.dtype)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return (grad.float() * _ALL[ctx.name](x.float())[1]).to(x.dtype), None


class Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, name: str) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.name = name
        return (_ALL[name](gate.float())[0] * up.float()).to(gate.dtype)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        gate, up = ctx.saved_tensors
        value, slope = _ALL[ctx.name](gate.float())
        u, dh = up.float(), grad.float()
        return (dh * u * slope).to(gate.dtype), (dh * value).to(gate.dtype), None


def activated(x: torch.Tensor, name: str) -> torch.Tensor:
    return Activated.apply(x, name)  # type: ignore[no-any-return,no-untyped-call]


def glu(gate: torch.Tensor, up: torch.Tensor, name: str = "silu") -> torch.Tensor:
    return Gated.apply(gate, up, name)  # type: ignore[no-any-return,no-untyped-call]
