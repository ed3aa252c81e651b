"""The experts of a mixture: from tokens and their experts to tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from float8.torch.experts import ops
from float8.torch.experts.routing import Routing, combine, dispatch, route

Weights = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def swiglu_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_scores: torch.Tensor,
    w13: Weights,
    w2: torch.Tensor,
    config: int,
) -> torch.Tensor:
    """Computes functional.moe of a config, for x [T, D] and operands that fit (check)."""
    routing = route(topk_ids, w2.shape[0])
    rows = dispatch(x, routing)
    layout = layout_of(routing, config)
    if isinstance(w13, torch.Tensor):
        gate, up = ops.linear(rows, w13, layout, config).chunk(2, dim=-1)
    else:
        gate, up = (ops.linear(rows, each, layout, config) for each in w13)
    y = ops.linear(functional.silu(gate) * up, w2, layout, config)
    return combine(y, topk_scores, routing)


def layout_of(routing: Routing, config: int) -> torch.Tensor:
    """Returns what the expert linears of a routing read."""
    layout: torch.Tensor = ops.experts_layout(routing.offs, routing.tokens.shape[0], config)
    return layout


def check(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_scores: torch.Tensor, w13: Any, w2: torch.Tensor
) -> None:
    """Raises ValueError for operands that functional.moe cannot have; x is [T, D]."""
    pairs = topk_ids.shape
    if len(pairs) != 2 or pairs[0] != x.shape[0] or topk_scores.shape != pairs or pairs[1] < 1:
        raise ValueError(
            f"float8: x has {x.shape[0]} tokens, topk_ids is {list(pairs)} and topk_scores "
            f"{list(topk_scores.shape)}; both are [tokens, top_k]"
        )
    if topk_ids.dtype not in (torch.int32, torch.int64) or not topk_scores.is_floating_point():
        raise ValueError(
            f"float8: topk_ids is of {topk_ids.dtype} and topk_scores of {topk_scores.dtype}; these are "
            "int64 or int32, and floating point"
        )
    if not x.device == topk_ids.device == topk_scores.device:
        raise ValueError(
            f"float8: x is on {x.device}, topk_ids on {topk_ids.device} and topk_scores on "
            f"{topk_scores.device}; they are on one device"
        )
    weights = (w13,) if isinstance(w13, torch.Tensor) else tuple(w13)
    rows = 2 * w2.shape[-1] if len(weights) == 1 else w2.shape[-1]
    if (
        len(weights) > 2
        or w2.dim() != 3
        or any(each.shape != (w2.shape[0], rows, w2.shape[1]) for each in weights)
    ):
        shapes = " and ".join(str(list(each.shape)) for each in weights)
        raise ValueError(
            f"float8: w13 is {shapes}, and w2 {list(w2.shape)}; w2 is [E, D, F], and w13 [E, 2 F, D] with "
            "the gates first, [E, 2, F, D], or the two of [E, F, D]"
        )
