"""The ops of expert linears, their fake kernels, and their gradient (python/shim/experts/)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from float8 import recipes
from float8.torch import _ops, _schemas
from float8.torch.contexts import (
    keep_parts,
    once_differentiable,
    parts_kept,
    wanted_grads,
    wants_gradient,
)
from float8.torch.experts.weight_casts import Kept, kept_in, refresh

experts_layout = torch.ops.float8.experts_layout.default
experts_forward = torch.ops.float8.experts_forward.default
experts_forward_kept = torch.ops.float8.experts_forward_kept.default
experts_backward = torch.ops.float8.experts_backward.default
experts_amax = torch.ops.float8.experts_amax.default
experts_cast_over_ranks = torch.ops.float8.experts_cast_over_ranks.default
moe_forward = torch.ops.float8.moe_forward.default
moe_forward_kept = torch.ops.float8.moe_forward_kept.default
moe_backward = torch.ops.float8.moe_backward.default
moe_route = torch.ops.float8.moe_route.default
moe_combine = torch.ops.float8.moe_combine.default
moe_score_gradient = torch.ops.float8.moe_score_gradient.default
ROWS = 3072  # kExpertRows of python/shim/plans/plans.hpp
MOST_EXPERTS = 1024  # FLOAT8_MAX_EXPERTS of float8/experts.h
_DTYPES = {code: dtype for dtype, code in _ops.ELEMENT_TYPES.items()}  # by float8_dtype
_OF_LAYOUT = (
    16,
    16,
    recipes.NAMES.index("rowwise") + 1,
)  # n, k and config, which a layout does not have


@functools.cache
def _bytes(experts: int, n: int, k: int, config: int) -> tuple[tuple[int, int], ...]:
    """Returns base and step of a layout and of what forward saves: M rows have base + step * ceil(M / ROWS)."""
    none, one = (torch.ops.float8.experts_bytes(m, experts, n, k, config) for m in (0, ROWS))
    return tuple((a, b - a) for a, b in zip(none, one, strict=True))


def _blocks(m: Any) -> Any:
    return (m + ROWS - 1) // ROWS


@_ops.fake_kernel("experts_layout")
def _fake_layout(offs: torch.Tensor, m: int, config: int) -> torch.Tensor:
    (base, step), _ = _bytes(int(offs.shape[0]), *_OF_LAYOUT)
    return offs.new_empty((base + step * _blocks(m),), dtype=torch.uint8)


@_ops.fake_kernel("experts_forward")
def _fake_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    layout: torch.Tensor,
    config: int,
    save: bool,
    scales: torch.Tensor | None = None,
    scale_layout: int = 0,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    experts, n, k = map(int, weight.shape)
    _, (base, step) = _bytes(experts, n, k, config)
    size = base + step * _blocks(x.shape[0]) if save else 0
    return x.new_empty((x.shape[0], n)), x.new_empty((size,), dtype=torch.uint8)


# A graph of torch.compile keeps the order of an op that casts and of one that reads by nothing, so that one op
# does both.
def _forward_kept(
    x: torch.Tensor,
    weight: torch.Tensor,
    layout: torch.Tensor,
    config: int,
    save: bool,
    kept: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    refresh([weight], kept, x, config)
    copies = kept_in(kept[:2], weight.shape, config)[:2]
    return experts_forward(x, weight, layout, config, save, None, 0, *copies)  # type: ignore[no-any-return]


_schemas.LIBRARY.impl("experts_forward_kept", _forward_kept, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("float8::experts_forward_kept", _fake_forward)


@_ops.fake_kernel("experts_backward")
def _fake_backward(
    dy: torch.Tensor,
    saved: torch.Tensor,
    layout: torch.Tensor,
    weight: torch.Tensor | None,
    experts: int,
    n: int,
    k: int,
    grad_dtype: int,
    config: int,
    wanted: int,
    x: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    scale_layout: int = 0,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    dx = dy.new_empty((dy.shape[0] if wanted & 1 else 0, k))
    dw = dy.new_empty((experts if wanted & 2 else 0, n, k), dtype=_DTYPES[grad_dtype])
    return dx, dw


# The parts of moe_backward: float8_moe_call of float8/moe.h.
GRAD_HIDDEN, GRAD_GATE_UP, GRAD_INPUT, GRAD_WEIGHT = range(1, 5)
W3_APART = 1 << 4  # of its `wanted`, behind the bits of its two results


@functools.cache
def _moe_bytes(experts: int, hidden: int, dim: int, dtype: int, config: int) -> Any:
    """Returns base and step, as _bytes does, of what each linear saves, and of the copies q and qt."""
    one, two = (
        torch.ops.float8.moe_bytes(m, experts, hidden, dim, dtype, config) for m in (ROWS, 2 * ROWS)
    )
    return tuple((2 * a - b, b - a) for a, b in zip(one, two, strict=True))


def _moe_buffers(
    x: torch.Tensor, m: Any, experts: int, hidden: int, config: int, wanted: Any
) -> list[torch.Tensor]:
    """Returns these four; those that are not wanted are empty."""
    sizes = _moe_bytes(experts, hidden, int(x.shape[1]), _ops.ELEMENT_TYPES[x.dtype], config)
    return [
        x.new_empty((base + step * _blocks(m) if want else 0,), dtype=torch.uint8)
        for want, (base, step) in zip(wanted, sizes, strict=True)
    ]


@_ops.fake_kernel("moe_forward")
def _fake_moe_forward(
    x: torch.Tensor,
    index: torch.Tensor | None,
    w13: torch.Tensor,
    w2: torch.Tensor,
    layout: torch.Tensor,
    config: int,
    save: bool,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    experts, dim, hidden = map(int, w2.shape)
    m = (x if index is None else index).shape[0]
    of_w13, of_w2 = _moe_buffers(x, m, experts, hidden, config, (save, save, False, False))[:2]
    return x.new_empty((m, dim)), x.new_empty((m if save else 0, 2 * hidden)), of_w13, of_w2


def _moe_forward_kept(
    x: torch.Tensor,
    index: torch.Tensor | None,
    w13: torch.Tensor,
    w2: torch.Tensor,
    layout: torch.Tensor,
    config: int,
    save: bool,
    kept: list[torch.Tensor],
    w3: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    copies: list[torch.Tensor] = []
    for weights, memory in (([w13] if w3 is None else [w13, w3], kept[:3]), ([w2], kept[3:])):
        refresh(weights, memory, x, config)
        experts, n, k = weights[0].shape
        copies += kept_in(memory[:2], (experts, n * len(weights), k), config)[:2]
    return moe_forward(x, index, w13, w2, layout, config, save, *copies, w3)  # type: ignore[no-any-return]


_schemas.LIBRARY.impl("moe_forward_kept", _moe_forward_kept, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("float8::moe_forward_kept", _fake_moe_forward)


@_ops.fake_kernel("moe_backward")
def _fake_moe_backward(
    x: torch.Tensor,
    dy: torch.Tensor | None,
    index: torch.Tensor | None,
    score: torch.Tensor | None,
    w13: torch.Tensor | None,
    w2: torch.Tensor | None,
    read: list[torch.Tensor],
    layout: torch.Tensor,
    experts: int,
    hidden: int,
    grad_dtype: int,
    config: int,
    part: int,
    wanted: int,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    m, dim = (x if index is None else index).shape[0], x.shape[1]
    one, two = bool(wanted & 1), bool(wanted & 2)

    def grad(want: bool, *sizes: Any) -> torch.Tensor:
        return x.new_empty((experts if want else 0, *sizes), dtype=_DTYPES[grad_dtype])

    if part == GRAD_HIDDEN:
        return x.new_empty((m if one else 0, hidden)), grad(two, dim, hidden)
    if part == GRAD_GATE_UP:
        q, qt = _moe_buffers(x, m, experts, hidden, config, (False, False, one, two))[2:]
        return q, qt
    if part == GRAD_INPUT:
        return x.new_empty((m, dim)), x.new_empty((0,), dtype=torch.uint8)
    rows = hidden if wanted & W3_APART else 2 * hidden
    return grad(one, rows, dim), grad(two, rows, dim)


@_ops.fake_kernel("moe_route")
def _fake_route(
    ids: torch.Tensor, scores: torch.Tensor | None, experts: int, config: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    pairs = ids.numel()
    sizes = ((pairs,), ids.shape, (experts,))
    index, position, offsets = (ids.new_empty(size, dtype=torch.int32) for size in sizes)
    row_scores = ids.new_empty((0 if scores is None else pairs,), dtype=torch.float32)
    return index, position, offsets, row_scores


@_ops.fake_kernel("moe_combine")
def _fake_combine(
    y: torch.Tensor,
    scores: torch.Tensor | None,
    position: torch.Tensor,
    offsets: torch.Tensor,
    config: int,
) -> torch.Tensor:
    return y.new_empty((position.shape[0], y.shape[1]))


@_ops.fake_kernel("moe_score_gradient")
def _fake_score_gradient(
    dout: torch.Tensor,
    y: torch.Tensor,
    position: torch.Tensor,
    offsets: torch.Tensor,
    config: int,
) -> torch.Tensor:
    return y.new_empty(position.shape, dtype=torch.float32)


def forward_of(
    x: torch.Tensor,
    weight: torch.Tensor,
    layout: torch.Tensor,
    config: int,
    save: bool,
    scales: torch.Tensor | None,
    scale_layout: int,
    kept: Kept | None,
) -> Any:
    """Calls the op of forward that reads these copies, if any."""
    if kept is not None and kept.memory:
        return experts_forward_kept(x, weight, layout, config, save, list(kept.memory))
    q = () if kept is None else kept[:2]
    return experts_forward(x, weight, layout, config, save, scales, scale_layout, *q)


class ExpertsFunction(torch.autograd.Function):
    """y_e = x_e weight_e^T. Between forward and backward it keeps the fp8 copies of x (or x, where grad_weight
    is in high precision; nothing of x of frozen weights), and of the weights where the config does not recompute these
    (or the weights, where grad_input is)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        layout: torch.Tensor,
        config: int,
        scales: torch.Tensor | None,
        scale_layout: int,
        kept: Kept | None,
    ) -> torch.Tensor:
        qt = (None, None) if kept is None else kept[2:4]
        y, saved = forward_of(x, weight, layout, config, True, scales, scale_layout, kept)
        again = config & recipes.READS_WEIGHT and ctx.needs_input_grad[0] and kept is None
        rows = x if config & recipes.READS_X and ctx.needs_input_grad[1] else None
        ctx.save_for_backward(saved, layout, weight if again else None, rows, scales, *qt)
        keep_parts(ctx, scales)
        ctx.scale_layout = scale_layout
        ctx.sizes = tuple(weight.shape)
        ctx.grad_dtype = _ops.ELEMENT_TYPES[weight.dtype]
        ctx.config = config
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        saved, layout, weight, rows, scales, *qt = ctx.saved_tensors
        (scales,) = parts_kept(ctx, scales)
        want_x, want_weight, *_ = wanted_grads(ctx)
        wanted = want_x | want_weight << 1
        rest = (ctx.grad_dtype, ctx.config, wanted, rows, scales, ctx.scale_layout)
        dx, dw = experts_backward(dy, saved, layout, weight, *ctx.sizes, *rest, *qt)
        return dx if want_x else None, dw if want_weight else None, *[None] * 5


_apply: Any = ExpertsFunction.apply


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    layout: torch.Tensor,
    config: int,
    scales: torch.Tensor | None = None,
    scale_layout: int = 0,
    kept: Kept | None = None,
) -> torch.Tensor:
    """Computes the linears of a config (recipes.pack), with a gradient where one is wanted.

    x: [M, K], one expert's rows after the other, as in the layout.
    weight: [E, N, K], of any strides and in any element type; x and y may have another one.
    layout: experts_layout of the ends of the experts' rows and M.
    scales: the part of a scale state of scale_layout (scales.py), for delayed scaling.
    kept: the weight's fp8 copies, which backward reads too.
    """
    if kept is not None:
        config |= recipes.RECOMPUTE
    if wants_gradient(x, weight):
        if not weight.requires_grad:
            config = recipes.of_frozen_weight(config, scales is not None)
        return _apply(x, weight, layout, config, scales, scale_layout, kept)  # type: ignore[no-any-return]
    y: torch.Tensor = forward_of(x, weight, layout, config, False, scales, scale_layout, kept)[0]
    return y


_types = ", ".join(str(dtype).removeprefix("torch.") for dtype in _ops.ELEMENT_TYPES)


def check(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> None:
    """Raises ValueError for operands that no expert linear can have; the weight is [E, N, K]."""
    refuse_dtensors(offs=offs)
    check_weight(x, weight)
    experts = weight.shape[0]
    of_int32 = isinstance(offs, torch.Tensor) and offs.dtype == torch.int32
    if not of_int32 or offs.dim() != 1 or offs.shape[0] != experts:
        words = f"{list(offs.shape)} of {offs.dtype}" if isinstance(offs, torch.Tensor) else offs
        raise ValueError(
            f"float8: offs is {words}, and w_t has {experts} experts; it is "
            "the end of each expert's rows, as torch.cumsum(counts, 0, dtype=torch.int32) gives them"
        )
    if x.device != offs.device:
        raise ValueError(
            f"float8: x is on {x.device} and offs on {offs.device}; they are on one device"
        )


def check_weight(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Raises ValueError for rows and weights [E, N, K] that no expert linear can have."""
    refuse_dtensors(x=x, weight=weight)
    for name, each in (("x", x), ("a weight", weight)):
        if each.dtype not in _ops.ELEMENT_TYPES:
            raise ValueError(f"float8: {name} is of {each.dtype}; cast it to one of {_types}")
    if x.dim() != 2 or weight.dim() != 3:
        raise ValueError(
            f"float8: x has {x.dim()} dimensions and the weight {weight.dim()}; x is [M, K], the rows of "
            "one expert after the other, and w_t is [E, K, N]"
        )
    experts, n, k = weight.shape
    if x.shape[1] != k:
        raise ValueError(
            f"float8: x has rows of {x.shape[1]} elements, and the {experts} experts' weights have {k} "
            f"inputs and {n} outputs"
        )
    if n % 16 != 0 or k % 16 != 0:
        raise ValueError(
            f"float8: the experts' weights have {k} inputs and {n} outputs; fp8 needs multiples of 16, so "
            "leave these experts in bf16"
        )
    if not 1 <= experts <= MOST_EXPERTS:
        raise ValueError(f"float8: a weight has {experts} experts; they are 1 to {MOST_EXPERTS}")
    if x.device != weight.device:
        raise ValueError(
            f"float8: x is on {x.device} and the weight on {weight.device}; they are on one device"
        )


def check_high_precision(x: torch.Tensor, config: int, words: Callable[[], str]) -> None:
    """Raises ValueError where GEMMs in high precision would read an x in float32, which experts do not have.

    Weights may be in float32, as FSDP's mixed precision and autocast leave them.
    words: returns whose x it is, and the recipe. A graph that read a module's name each time would be of that module alone.
    """
    if config & recipes.READS_X and x.dtype == torch.float32:
        raise ValueError(
            f"float8: x of {words()} is in torch.float32, and a GEMM in high precision reads it in bfloat16 or float16: "
            "call the model under torch.autocast, give FSDP a MixedPrecisionPolicy with such a param_dtype, cast the "
            'model, or use a recipe whose GEMMs are all in fp8, such as "rowwise"'
        )


def refuse_dtensors(**operands: Any) -> None:
    """Raises ValueError for operands, given by their names, that are DTensors."""
    for name, each in operands.items():
        if hasattr(each, "_local_tensor"):
            raise ValueError(
                f"float8: {name} is a DTensor, and experts are computed from what this rank has: give its "
                "to_local(), or share the weights by fully_shard, which gathers them for a forward"
            )
