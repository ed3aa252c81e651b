"""The ends of what ranks share of experts: tensors that each has whole, and sums of what each has a part of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from float8.torch.parallel.sharded_operands import wait


class _Enter(torch.autograd.Function):
    """What every rank has whole, of whose gradient each has a part of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _sum(grad, ctx.group), None


class _Leave(torch.autograd.Function):
    """The sum over ranks, whose gradient every rank has whole."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: str) -> Tensor:
        return _sum(y, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def _sum(x: Tensor, group: str) -> Tensor:
    return wait(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", group))


enter: Any = _Enter.apply
leave: Any = _Leave.apply
