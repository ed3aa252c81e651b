"""The experts of a mixture: from tokens and their experts to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from float8 import recipes
from float8.torch import _ops
from float8.torch.contexts import (
    keep_parts,
    once_differentiable,
    parts_kept,
    release_saved,
    wanted_grads,
    wants_gradient,
)
from float8.torch.experts import ops, tensor_parallel
from float8.torch.experts.recipe import joins_pairs
from float8.torch.experts.routing import Routing, combine, dispatch, route
from float8.torch.experts.tensor_parallel import COLUMNS, ROWS, Group, Part, State
from float8.torch.experts.weight_casts import Kept

Weights = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # of gate and up: w13, or w1 and w3


class DelayedScales(NamedTuple):
    """The parts of a scale state that the expert linears of w13 and w2 have, and its layout (scales.py)."""

    w13: torch.Tensor | None = None
    w2: torch.Tensor | None = None
    layout: int = 0


_DYNAMIC = DelayedScales()


class Own(NamedTuple):
    """What a module has for the expert linears of w13 and w2: fp8 copies that it keeps, and parts of a scale state."""

    copies: tuple[Kept, Kept] | None = None
    scales: DelayedScales = _DYNAMIC
    first: bool = False  # one of the parts has no scales yet

    def states(self) -> list[State]:
        """Returns what a first step over ranks reads of the state; nothing in other steps."""
        w13, w2, layout = self.scales
        return [(w13, layout), (w2, layout)] if self.first and None not in (w13, w2) else []  # type: ignore[list-item]


NOTHING = Own()


def swiglu_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_scores: torch.Tensor,
    w13: Weights,
    w2: torch.Tensor,
    config: int,
    shared: Group = None,
    own: Own = NOTHING,
) -> torch.Tensor:
    """Computes functional.moe of a config, for x [T, D] and operands that fit (check).

    shared: the ranks that share F, whose results are parts of a sum.
    own: what a module has for its weights, of which w13 is one.
    """
    routing = route(topk_ids, topk_scores, w2.shape[0], config)
    if shared is not None and (tensor_parallel.spans_ranks(config) or own.first):
        places = (routing.offs, layout_of(routing), config, shared)
        y = swiglu_over_ranks(dispatch(x, routing), w13, w2, *places, states=own.states())
        return combine(y, routing)
    if joins_pairs(config) if isinstance(w13, tuple) else not config & recipes.READS_X:
        return mlp(x, w13, w2, routing, own.copies, own.scales)
    rows = dispatch(x, routing)
    layout = layout_of(routing)
    first, second = own.copies or (None, None)
    state = own.scales
    if isinstance(w13, torch.Tensor):
        of_w13 = (config, state.w13, state.layout, first)
        gate, up = ops.linear(rows, w13, layout, *of_w13).chunk(2, dim=-1)
    else:
        gate, up = (ops.linear(rows, each, layout, config) for each in w13)
    h = silu_and_mul(gate, up)
    return combine(ops.linear(h, w2, layout, config, state.w2, state.layout, second), routing)


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) up, which is rounded once."""
    return (functional.silu(gate.float()) * up.float()).to(gate.dtype)


def shaped(y: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Returns y, which nobody else has, in another shape.

    It is no view, whose change in place would drop the hook of a fully_shard that has the module; FSDP warns of views.
    """
    return torch.ops.aten._unsafe_view(y, shape)  # type: ignore[no-any-return]


def parts_of(w13: Weights, w2: torch.Tensor) -> list[Part]:
    """Returns the weights of a rank that has a part of F."""
    firsts = (w13,) if isinstance(w13, torch.Tensor) else w13
    return [*(Part(each, ROWS) for each in firsts), Part(w2, COLUMNS)]


def swiglu_over_ranks(
    rows: torch.Tensor,
    w13: Weights,
    w2: torch.Tensor,
    offs: torch.Tensor,
    layout: torch.Tensor,
    config: int,
    group: str,
    activation: Any = silu_and_mul,
    states: Sequence[State] = (),
) -> torch.Tensor:
    """Computes this rank's part of the sum that y of the experts' rows is, of weights whose F ranks share.

    activation: h of gate and up.
    states: as in tensor_parallel.linears.
    """
    if isinstance(w13, tuple) and joins_pairs(config):
        w13 = torch.cat(w13, dim=1)
    parts = parts_of(w13, w2)
    *first, second = tensor_parallel.linears(parts, rows, offs, layout, config, group, states)
    results = [linear(rows) for linear in first]
    gate, up = results[0].chunk(2, dim=-1) if len(results) == 1 else results
    return second(activation(gate, up))


class Mlp(torch.autograd.Function):
    """The SwiGLU experts of tokens, whose casts gather the tokens and compute what SwiGLU has.

    Between forward and backward it keeps x where w13 trains, gate and up of each row, the fp8 copy of h where w2
    trains, y of each row where scores have a gradient, and the fp8 copies of the weights where the config does not
    recompute them. Without scores x has the rows
    of experts already, and so has the result; then there is no routing but the layout.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        scores: torch.Tensor | None,
        w13: torch.Tensor,
        w3: torch.Tensor | None,
        w2: torch.Tensor,
        tokens: torch.Tensor | None,
        position: torch.Tensor | None,
        offs: torch.Tensor | None,
        row_scores: torch.Tensor | None,
        layout: torch.Tensor,
        config: int,
        copies: tuple[Kept, Kept] | None,
        scales: DelayedScales,
    ) -> torch.Tensor:
        y, *saved = _forward(x, tokens, w13, w2, layout, config, True, copies, w3, scales)
        of_backward = (None,) * 4 if copies is None else (*copies[0][2:4], *copies[1][2:4])
        cast_again = config & recipes.RECOMPUTE and copies is None
        again = (w13, w3, w2) if cast_again else (None, None, None)
        of_rows = (tokens, position, offs, row_scores, layout)
        kept = y if ctx.needs_input_grad[1] else None
        inputs = None if config & recipes.FROZEN else x
        ctx.save_for_backward(inputs, *again, *of_rows, kept, *saved, *of_backward, *scales[:2])
        keep_parts(ctx, *scales[:2])
        ctx.scale_layout = scales.layout
        ctx.sizes = (w2.shape[0], w2.shape[2])
        ctx.grad_dtype = _ops.ELEMENT_TYPES[w13.dtype]
        ctx.is_pair = w3 is not None
        ctx.config = config
        if scores is None:
            return y  # type: ignore[no-any-return]
        return ops.moe_combine(y, scores, position, offs, config)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w13, w3, w2, tokens, position, offs, row_scores, layout, y, *rest = ctx.saved_tensors
        gate_up, of_w13, of_w2, *copies, w13_state, w2_state = rest
        w13_state, w2_state = parts_kept(ctx, w13_state, w2_state)
        del rest
        release_saved(ctx)
        x = grad if x is None else x  # which has its sizes and its type
        want_x, want_scores, want_w13, want_w3, want_w2 = wanted_grads(ctx)[:5]
        want_first = want_w13 or want_w3
        dx = dw13 = dw3 = dw2 = dscores = None

        def part(
            number: int,
            one: bool,
            two: bool,
            read: list[torch.Tensor],
            of_rows: tuple[torch.Tensor | None, ...] = (None, None),
            weights: tuple[torch.Tensor | None, ...] = (None, None, None),
        ) -> tuple[torch.Tensor, torch.Tensor]:
            dy, score = of_rows
            first, third, second = weights
            wanted = one | two << 1 | ctx.is_pair * ops.W3_APART
            sizes = (layout, *ctx.sizes, ctx.grad_dtype, ctx.config, number, wanted)
            scales = (third, w13_state, w2_state, ctx.scale_layout)
            results = ops.moe_backward(
                x, dy, tokens, score, first, second, read, *sizes, *copies, *scales
            )
            return results  # type: ignore[no-any-return]

        # Each tensor is freed behind the part that reads it last, before the next one takes memory.
        if want_scores:
            dscores = ops.moe_score_gradient(grad, y, position, offs, ctx.config)
        del y
        if want_x or want_first or want_w2:
            wanted = (want_x or want_first, want_w2)
            of_rows, weights = (grad, row_scores), (None, None, w2)
            hidden_grad, dw2 = part(ops.GRAD_HIDDEN, *wanted, [of_w2], of_rows, weights)
        del of_w2
        if want_x or want_first:
            q, qt = part(ops.GRAD_GATE_UP, want_x, want_first, [gate_up, hidden_grad])
            del gate_up, hidden_grad
            if want_x:
                weights = (w13, w3, None)
                dx, _ = part(ops.GRAD_INPUT, True, False, [of_w13, q, qt], weights=weights)
            del of_w13, q
            if want_x and tokens is not None:
                dx = ops.moe_combine(dx, None, position, offs, ctx.config)
            if want_first:
                dw13, dw3 = part(ops.GRAD_WEIGHT, want_w13, want_w3, [qt])
        grads = zip((dw13, dw3, dw2), (want_w13, want_w3, want_w2), strict=True)
        own = (each if want else None for each, want in grads)
        return dx, dscores, *own, *[None] * 8


_apply: Any = Mlp.apply


def _forward(
    x: torch.Tensor,
    tokens: torch.Tensor | None,
    w13: torch.Tensor,
    w2: torch.Tensor,
    layout: torch.Tensor,
    config: int,
    save: bool,
    copies: tuple[Kept, Kept] | None,
    w3: torch.Tensor | None,
    scales: DelayedScales,
) -> Any:
    """Calls the op of forward that reads these copies, if any."""
    call = (x, tokens, w13, w2, layout, config, save)
    if copies is None:
        return ops.moe_forward(*call, *(None,) * 4, w3, *scales)
    if copies[0].memory:
        return ops.moe_forward_kept(*call, [*copies[0].memory, *copies[1].memory], w3)
    return ops.moe_forward(*call, *copies[0][:2], *copies[1][:2], w3, *scales)


def mlp(
    x: torch.Tensor,
    w13: Weights,
    w2: torch.Tensor,
    routing: Routing,
    copies: tuple[Kept, Kept] | None = None,
    scales: DelayedScales = _DYNAMIC,
) -> torch.Tensor:
    """Computes swiglu_experts of a routing, for w13 [E, 2 F, D], or for w1 and w3 as if they were one.

    copies: those in fp8 of w13 and of w2, where they are kept.
    """
    return _mlp(x, w13, w2, layout_of(routing), routing.config, routing, copies, scales)


def mlp_of_rows(
    rows: torch.Tensor,
    w13: Weights,
    w2: torch.Tensor,
    layout: torch.Tensor,
    config: int,
    copies: tuple[Kept, Kept] | None = None,
    scales: DelayedScales = _DYNAMIC,
) -> torch.Tensor:
    """Computes the same for the rows of experts, which a dispatcher has put in place: y has a row of each."""
    return _mlp(rows, w13, w2, layout, config, None, copies, scales)


def _mlp(
    x: torch.Tensor,
    w13: Weights,
    w2: torch.Tensor,
    layout: torch.Tensor,
    config: int,
    routing: Routing | None,
    copies: tuple[Kept, Kept] | None,
    scales: DelayedScales,
) -> torch.Tensor:
    first, w3 = (w13, None) if isinstance(w13, torch.Tensor) else w13
    w2 = w2.to(first.dtype)  # gradients have one type
    w3 = None if w3 is None else w3.to(first.dtype)
    if copies is not None:
        config |= recipes.RECOMPUTE
    tokens = position = offs = row_scores = scores = None
    if routing is not None:
        tokens, position, offs, row_scores, scores, _ = routing
    given = (x, scores, first, w3, w2)
    if wants_gradient(*given):
        places = (tokens, position, offs, row_scores, layout)
        keeps_state = scales.w13 is not None
        if not (first.requires_grad or (w3 is not None and w3.requires_grad)):
            config = recipes.of_frozen_weight(config, keeps_state)
        if not w2.requires_grad:
            config = recipes.of_frozen_weight(config, keeps_state, recipes.FROZEN_W2)
        return _apply(*given, *places, config, copies, scales)  # type: ignore[no-any-return]
    y: torch.Tensor = _forward(x, tokens, first, w2, layout, config, False, copies, w3, scales)[0]
    return y if routing is None else combine(y, routing)


def layout_of(routing: Routing) -> torch.Tensor:
    """Returns what the expert linears of a routing read."""
    rows = routing.tokens.shape[0]
    layout: torch.Tensor = ops.experts_layout(routing.offs, rows, routing.config)
    return layout


def check(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_scores: torch.Tensor, w13: Any, w2: torch.Tensor
) -> None:
    """Raises ValueError for operands that functional.moe cannot have; w13 is without a dimension of 2."""
    weights = (w13,) if isinstance(w13, torch.Tensor) else tuple(w13)
    for each in weights:
        ops.refuse_dtensors(x=x, topk_ids=topk_ids, topk_scores=topk_scores, w13=each, w2=w2)
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
