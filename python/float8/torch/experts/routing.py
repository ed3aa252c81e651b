"""Which rows the pairs of a token and an expert have, the sums over each token's rows, and bad ends."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from float8.torch.contexts import once_differentiable, wanted_grads
from float8.torch.experts import ops


class Routing(NamedTuple):
    """The rows of expert linears for T tokens with K experts each: M = T K pairs, sorted by expert.

    An id outside of [0, experts) drops its pair: it has one of the last rows, which no expert has.
    """

    tokens: torch.Tensor  # int32 [M]: the token of each row
    position: torch.Tensor  # int32 [T, K]: the row of each pair
    offs: torch.Tensor  # int32 [E]: the end of each expert's rows
    row_scores: torch.Tensor  # fp32 [M]: the score of each row, 0 where its pair is dropped
    scores: torch.Tensor  # fp32 [T, K], with a gradient
    config: int


def route(topk_ids: torch.Tensor, topk_scores: torch.Tensor, experts: int, config: int) -> Routing:
    """Sorts pairs by expert; those of one expert keep their order."""
    scores = topk_scores.float()
    tokens, position, offs, row_scores = ops.moe_route(topk_ids, scores.detach(), experts, config)
    return Routing(tokens, position, offs, row_scores, scores, config)


def experts_of_rows(routing: Routing) -> torch.Tensor:
    """Returns the expert of each row, the last one where it has none."""
    offs = routing.offs
    rows = torch.arange(routing.tokens.shape[0], device=offs.device, dtype=torch.int32)
    return torch.searchsorted(offs, rows, right=True).clamp(max=offs.shape[0] - 1)


class Dispatch(torch.autograd.Function):
    """The row of each pair. Its gradient is a sum in a fixed order, without atomic adds."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        tokens: torch.Tensor,
        position: torch.Tensor,
        offs: torch.Tensor,
        config: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(position, offs)
        ctx.config = config
        return x.index_select(0, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        dx = ops.moe_combine(grad, None, *ctx.saved_tensors, ctx.config)
        return dx, None, None, None, None


class Combine(torch.autograd.Function):
    """The sum of each token's rows of y by their scores, in fp32 and in the order of its experts."""

    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        scores: torch.Tensor,
        tokens: torch.Tensor,
        position: torch.Tensor,
        offs: torch.Tensor,
        row_scores: torch.Tensor,
        config: int,
    ) -> torch.Tensor:
        kept = y if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(kept, tokens, position, offs, row_scores)
        ctx.config = config
        return ops.moe_combine(y, scores, position, offs, config)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        y, tokens, position, offs, row_scores = ctx.saved_tensors
        want_y, want_scores, *_ = wanted_grads(ctx)
        dy = dscores = None
        if want_y:
            dy = (grad.index_select(0, tokens) * row_scores[:, None]).to(grad.dtype)
        if want_scores:
            dscores = ops.moe_score_gradient(grad, y, position, offs, ctx.config)
        return dy, dscores, *[None] * 5


def dispatch(x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Returns the rows [M, D] of tokens [T, D]."""
    places = (routing.tokens, routing.position, routing.offs)
    rows: torch.Tensor = Dispatch.apply(x, *places, routing.config)  # type: ignore[no-untyped-call]
    return rows


def combine(y: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Returns tokens [T, D] of rows [M, D]; a dropped pair adds nothing, whatever its row has."""
    places = (routing.tokens, routing.position, routing.offs, routing.row_scores)
    tokens: torch.Tensor = Combine.apply(y, routing.scores, *places, routing.config)  # type: ignore[no-untyped-call]
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
