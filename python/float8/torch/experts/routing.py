"""Which expert has which rows: the order of the pairs of a token and an expert, and its errors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable


class Routing(NamedTuple):
    """The rows of expert linears for T tokens with K experts each."""

    tokens: torch.Tensor  # [T K]: the token of each row
    rows: torch.Tensor  # [T, K]: the row of each pair
    offs: torch.Tensor  # int32 [E]: the end of each expert's rows
    known: torch.Tensor  # [T, K]: false where the pair has no expert, and its row no group
    experts: torch.Tensor  # [T K]: the expert of each row, the last one where it has none


def route(topk_ids: torch.Tensor, experts: int) -> Routing:
    """Sorts pairs by expert; those of one expert keep their order. An id outside of [0, experts) is none."""
    ids = topk_ids.reshape(-1)
    known = (ids >= 0) & (ids < experts)
    key, order = torch.sort(torch.where(known, ids, experts), stable=True)
    ends = torch.arange(experts, device=key.device, dtype=key.dtype)
    offs = torch.searchsorted(key, ends, right=True, out_int32=True)
    numbers = torch.arange(order.shape[0], device=order.device)
    rows = torch.empty_like(order).scatter_(0, order, numbers)
    return Routing(
        tokens=order // topk_ids.shape[1],
        rows=rows.view(topk_ids.shape),
        offs=offs,
        known=known.view(topk_ids.shape),
        experts=key.clamp(max=experts - 1),
    )


def sum_of_pairs(rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Adds the values of each token's pairs in fp32, in the order of its experts."""
    total = values[rows[:, 0]].float()
    for k in range(1, rows.shape[1]):
        total += values[rows[:, k]]
    return total


def weighted_sum(y: torch.Tensor, scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Adds the rows of y of each token's pairs by their scores, likewise."""
    weights = scores.float()
    total = y[rows[:, 0]] * weights[:, :1]
    for k in range(1, rows.shape[1]):
        total += y[rows[:, k]] * weights[:, k, None]
    return total.to(y.dtype)


def scores_of_rows(scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Returns the score of each row, in fp32."""
    of_rows = torch.empty_like(scores.reshape(-1), dtype=torch.float32)
    return of_rows.scatter_(0, rows.reshape(-1), scores.reshape(-1).float())


def score_gradient(y: torch.Tensor, grad: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of weighted_sum's scores, in fp32."""
    wide = grad.float()
    return torch.stack([(y[rows[:, k]] * wide).sum(-1) for k in range(rows.shape[1])], 1)


class Dispatch(torch.autograd.Function):
    """The row of each pair: x[tokens]. Its gradient is a sum in a fixed order, without atomic adds."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return x[tokens]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        return sum_of_pairs(rows, grad).to(grad.dtype), None, None


class Combine(torch.autograd.Function):
    """The sum of each token's rows of y by their scores, in fp32 and in the order of its experts."""

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, scores: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(y, scores, tokens, rows)
        return weighted_sum(y, scores, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        y, scores, tokens, rows = ctx.saved_tensors
        want_y, want_scores, *_ = ctx.needs_input_grad
        dy = dscores = None
        if want_y:
            dy = (grad[tokens] * scores_of_rows(scores, rows)[:, None]).to(y.dtype)
        if want_scores:
            dscores = score_gradient(y, grad, rows).to(scores.dtype)
        return dy, dscores, None, None


def dispatch(x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Returns the rows [T K, D] of tokens [T, D]."""
    rows: torch.Tensor = Dispatch.apply(x, routing.tokens, routing.rows)  # type: ignore[no-untyped-call]
    return rows


def combine(y: torch.Tensor, scores: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Returns tokens [T, D] of rows [T K, D] and scores [T, K]; a pair without an expert adds nothing."""
    scores = scores.masked_fill(~routing.known, 0.0)
    tokens: torch.Tensor = Combine.apply(y, scores, routing.tokens, routing.rows)  # type: ignore[no-untyped-call]
    return tokens


# By float8_group_error_code.
_ERRORS = {1: "is negative", 2: "is below the one before", 3: "is above the rows of x"}


def check_routing() -> None:
    """Raises ValueError where the ends of experts' rows in a call since the last check were bad.

    Ends that are negative, fall, or lie beyond the rows of x are replaced by the largest end before them,
    or by the rows of x, so that no call leaves its tensors; the results are then those of other groups.
    The device alone sees that, so a trainer asks as often as it likes, as after each hundredth step. The
    host waits for the current device.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    found = torch.ops.float8.routing_errors()
    words = [
        f"on {'the emulated device' if device < 0 else f'cuda:{device}'} the end of expert {expert} "
        f"{_ERRORS[code]}"
        for device, code, expert in zip(found[::3], found[1::3], found[2::3], strict=True)
    ]
    if words:
        raise ValueError(
            f"float8: offs of a grouped_mm since the last check_routing were bad: {'; '.join(words)}; "
            "offs are the sums of the experts' rows, as torch.cumsum(counts, 0, dtype=torch.int32) gives them"
        )
