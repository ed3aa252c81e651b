"""silu(gate) up and its gradients as the kernels compute them, for x in 16 bits: each rounded once."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def _fma(a: Any, b: Any, c: Any) -> torch.Tensor:
    """Returns a b + c, rounded once to fp32: the product of two in fp32 is exact in fp64."""
    wide = [torch.as_tensor(each).double() for each in (a, b, c)]
    return (wide[0] * wide[1] + wide[2]).float()


def _parts(gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns exp(-|gate|) and the inverse of 1 more (codegen/kernels/cast/swiglu.cuh)."""
    number = float.fromhex
    down = 2.0**-64
    x = gate.abs().clamp(max=110.0)
    rounded = _fma(x, -number("0x1.715476p+0"), number("0x1.8p+23"))
    n = rounded - number("0x1.8p+23")
    f = _fma(x, -number("0x1.715476p+0"), -n)
    power = _fma(down * number("0x1.3a02ccp-7"), f, down * number("0x1.c9fc46p-5"))
    for factor in ("0x1.ec0378p-3", "0x1.62e12cp-1", "0x1p0"):
        power = _fma(power, f, down * number(factor))
    e = power * ((n.int() + 64 + 127) << 23).view(torch.float32)
    d = 1 + e
    inverse = _fma(d, -number("0x1.e1e1e2p-2"), number("0x1.69696ap+0"))
    rest = _fma(-d, inverse, 1.0)
    inverse = _fma(inverse, _fma(rest, rest, rest), inverse)
    return e, _fma(inverse, _fma(-d, inverse, 1.0), inverse)


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        g = gate.float()
        e, inverse = _parts(g)
        return (g * torch.where(g < 0, e, 1.0) * inverse * up.float()).to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        g, u, dh = (each.float() for each in (gate, up, grad))
        e, inverse = _parts(g)
        sigmoid = torch.where(g < 0, e, 1.0) * inverse
        slope = sigmoid * _fma(g, torch.where(g < 0, 1.0, e) * inverse, 1.0)
        silu = g * torch.where(g < 0, e, 1.0) * inverse
        return (dh * u * slope).to(gate.dtype), (dh * silu).to(gate.dtype)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return SwiGLU.apply(gate, up)  # type: ignore[no-any-return,no-untyped-call]
