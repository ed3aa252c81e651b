"""SwiGLU experts in bf16 by torch alone: a stable sort, gathered rows, and torch's grouped GEMMs."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


def route(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the token of each row, the row of each pair [T, K], and the end of each expert's rows."""
    key, order = torch.sort(ids.reshape(-1), stable=True)
    ends = torch.arange(experts, device=key.device, dtype=key.dtype)
    offs = torch.searchsorted(key, ends, right=True, out_int32=True)
    numbers = torch.arange(order.shape[0], device=order.device)
    rows = torch.empty_like(order).scatter_(0, order, numbers)
    return order // ids.shape[1], rows.view(ids.shape), offs


class Dispatch(torch.autograd.Function):
    """x[tokens], whose gradient is a sum of each token's rows, without atomic adds."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return x[tokens]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        total = grad[rows[:, 0]].float()
        for k in range(1, rows.shape[1]):
            total += grad[rows[:, k]]
        return total.to(grad.dtype), None, None


class Combine(torch.autograd.Function):
    """The sum of each token's rows of y by their scores, in fp32."""

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, scores: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(y, scores, tokens, rows)
        total = y[rows[:, 0]] * scores[:, :1]
        for k in range(1, rows.shape[1]):
            total += y[rows[:, k]] * scores[:, k, None]
        return total.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        y, scores, tokens, rows = ctx.saved_tensors
        of_rows = torch.empty_like(scores.reshape(-1))
        of_rows.scatter_(0, rows.reshape(-1), scores.reshape(-1))
        dy = (grad[tokens] * of_rows[:, None]).to(y.dtype)
        wide = grad.float()
        dscores = [(y[rows[:, k]] * wide).sum(-1) for k in range(rows.shape[1])]
        return dy, torch.stack(dscores, 1), None, None


def moe(
    x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """Computes float8.torch.functional.moe by torch's grouped GEMMs, for scores in fp32."""
    tokens, rows, offs = route(ids, w2.shape[0])
    x_rows: torch.Tensor = Dispatch.apply(x, tokens, rows)  # type: ignore[no-untyped-call]
    gate, up = functional.grouped_mm(x_rows, w13.transpose(-2, -1), offs=offs).chunk(2, dim=-1)
    y = functional.grouped_mm(functional.silu(gate) * up, w2.transpose(-2, -1), offs=offs)
    total: torch.Tensor = Combine.apply(y, scores, tokens, rows)  # type: ignore[no-untyped-call]
    return total
