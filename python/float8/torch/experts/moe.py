"""The experts of a mixture: from tokens and their experts to tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from float8 import recipes
from float8.torch import _ops
from float8.torch.experts import ops
from float8.torch.experts.routing import Routing, combine, dispatch, route
from float8.torch.experts.weight_casts import Kept

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
    routing = route(topk_ids, topk_scores, w2.shape[0], config)
    if isinstance(w13, torch.Tensor) and not config & recipes.READS_X:
        return mlp(x, w13, w2, routing)
    rows = dispatch(x, routing)
    layout = layout_of(routing)
    if isinstance(w13, torch.Tensor):
        gate, up = ops.linear(rows, w13, layout, config).chunk(2, dim=-1)
    else:
        gate, up = (ops.linear(rows, each, layout, config) for each in w13)
    h = (functional.silu(gate.float()) * up.float()).to(x.dtype)
    y = ops.linear(h, w2, layout, config)
    return combine(y, routing)


class Mlp(torch.autograd.Function):
    """The SwiGLU experts of tokens, whose casts gather the tokens and compute what SwiGLU has.

    Between forward and backward it keeps x, gate and up of each row, y of each where scores have a gradient,
    and the fp8 copies of the weights where the config does not recompute them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        scores: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        tokens: torch.Tensor,
        position: torch.Tensor,
        offs: torch.Tensor,
        row_scores: torch.Tensor,
        layout: torch.Tensor,
        config: int,
        copies: tuple[Kept, Kept] | None,
    ) -> torch.Tensor:
        of_forward, of_backward = _split(copies)
        y, saved = ops.moe_forward(x, tokens, w13, w2, layout, config, True, *of_forward)
        again = (w13, w2) if config & recipes.RECOMPUTE and copies is None else (None, None)
        of_rows = (tokens, position, offs, row_scores, layout, saved)
        kept = y if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(x, *again, *of_rows, kept, *of_backward)
        ctx.sizes = (w2.shape[0], w2.shape[2])
        ctx.grad_dtypes = (w13.dtype, w2.dtype)
        ctx.config = config
        return ops.moe_combine(y, scores, position, offs, config)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w13, w2, tokens, position, offs, row_scores, layout, saved, y, *copies = (
            ctx.saved_tensors
        )
        want_x, want_scores, want_w13, want_w2, *_ = ctx.needs_input_grad
        dx = dscores = dw13 = dw2 = None
        if want_x or want_w13 or want_w2:
            dtype = _ops.ELEMENT_TYPES[ctx.grad_dtypes[0]]
            wanted = want_x | want_w13 << 1 | want_w2 << 2
            of_rows, dw13, dw2 = ops.moe_backward(
                grad,
                x,
                tokens,
                row_scores,
                w13,
                w2,
                saved,
                layout,
                *ctx.sizes,
                dtype,
                ctx.config,
                wanted,
                *copies,
            )
            if want_x:
                dx = ops.moe_combine(of_rows, None, position, offs, ctx.config)
        if want_scores:
            dscores = ops.moe_score_gradient(grad, y, position, offs, ctx.config)
        return dx, dscores, dw13 if want_w13 else None, dw2 if want_w2 else None, *[None] * 7


_apply: Any = Mlp.apply


def _split(copies: tuple[Kept, Kept] | None) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns what the ops of forward and of backward take of the copies of w13 and w2."""
    if copies is None:
        return (), ()
    w13, w2 = copies
    return (*w13[:2], *w2[:2]), (*w13[2:], *w2[2:])


def mlp(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    routing: Routing,
    copies: tuple[Kept, Kept] | None = None,
) -> torch.Tensor:
    """Computes swiglu_experts of a routing, for w13 [E, 2 F, D].

    copies: those in fp8 of both weights, where they are kept.
    """
    tokens, position, offs, row_scores, scores, config = routing
    if copies is not None:
        config |= recipes.RECOMPUTE
    layout = layout_of(routing)
    w2 = w2.to(w13.dtype)  # gradients have one type
    if torch.is_grad_enabled() and any(each.requires_grad for each in (x, scores, w13, w2)):
        places = (tokens, position, offs, row_scores, layout)
        return _apply(x, scores, w13, w2, *places, config, copies)  # type: ignore[no-any-return]
    y, _ = ops.moe_forward(x, tokens, w13, w2, layout, config, False, *_split(copies)[0])
    return combine(y, routing)


def layout_of(routing: Routing) -> torch.Tensor:
    """Returns what the expert linears of a routing read."""
    rows = routing.tokens.shape[0]
    layout: torch.Tensor = ops.experts_layout(routing.offs, rows, routing.config)
    return layout


def check(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_scores: torch.Tensor, w13: Any, w2: torch.Tensor
) -> None:
    """Raises ValueError for operands that functional.moe cannot have; w13 is without a dimension of 2."""
    pairs, tokens = topk_ids.shape, x.shape[:-1].numel()
    fits = len(pairs) > 1 or x.dim() == 1
    if not fits or pairs[:-1].numel() != tokens or topk_scores.shape != pairs or pairs[-1] < 1:
        raise ValueError(
            f"float8: x has {tokens} tokens, topk_ids is {list(pairs)} and topk_scores "
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
