"""The autograd of a linear whose operands ranks share, over what this rank has of them.

Each rank computes with its part of each operand in fp8, whose scales are the whole operand's:

weight by      x                      w         y              dy                     dx
rows           whole, or by tokens    rows      columns        columns                partial sums
columns        columns                columns   partial sums   whole, or by tokens    columns

What is shared by tokens is cast before it is gathered.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from float8 import recipes
from float8.torch import _linear, _ops
from float8.torch.contexts import (
    keep_parts,
    once_differentiable,
    parts_kept,
    wanted_grads,
    wants_gradient,
)
from float8.torch.parallel import sharded_grads as grads
from float8.torch.parallel import sharded_operands as operands
from float8.torch.parallel.sharded_grads import Call
from float8.torch.parallel.sharded_operands import Copy, Gemm, Share, Sharing
from float8.torch.ranks import collectives
from float8.torch.shard.gathered_ops import weight_gemm


def linear(
    source: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    call: Call,
) -> Tensor:
    """Computes this rank's part of y from its parts of x and the weight.

    source: the tensor that the linear was called with, which other linears may read too.
    scales: the linear's part of a scale state, for delayed scaling.
    """
    if x.numel() == 0:
        return _empty(x, weight, bias, call)
    save = wants_gradient(x, weight, bias)
    slot = grads.slot_of(scales, call)
    shares = []
    if not call.gathered:
        shares.append(Share(weight.detach().to(x.dtype), _ops.WEIGHT, call.dim))
    key = _sharing_key(source, x, save, call) if slot is None else None
    left = _find_left(source, key)
    # A linear with a frozen weight, which needs q alone, may have been the first.
    lacks = left is not None and _needs_qt(call, save) and left[1][1] is None
    if left is not None and not lacks:
        (whole, x_copies), of_weight = left, operands.cast(shares, call.to, save, slot)
    else:
        x_share = Share(grads.rows_of(x.detach()), _ops.INPUT, call.x_share_dim())
        x_copies, *of_weight = operands.cast([x_share, *shares], call.to, save, slot)
        whole = x
        if call.x_dim is not None:
            x_copies = trimmed(x_copies, x_share.tensor.shape[0])
            if left is not None:
                check_runs(x, call)
                whole, x_copies = left[0], (left[1][0], x_copies[1])
            else:
                call = _gathering(source, key, x, call)
                if not call.gathers:
                    whole, x_copies = _gather(x, x_copies, call)
        if not call.gathers:
            _leave(source, key, whole, x_copies)
    x_copies = x_copies if _needs_qt(call, save) else (x_copies[0], None)
    shard = x.detach() if call.x_dim is not None and _keeps_x(call) else None
    w_copies = of_weight[0] if of_weight else (None, None)
    tensors = (*flat(x_copies), *flat(w_copies))
    run = _apply if save else forward
    outputs = run(whole, weight, bias, shard, scales, call, *tensors)
    if not isinstance(outputs, tuple):
        return outputs  # type: ignore[no-any-return]
    y: Tensor = outputs[0]
    whole, *gathered = outputs[1:]
    q = operands.whole_q(gathered, x_copies[0], grads.shard_of_x(x, call), call.to)
    _leave(source, key, whole, (q, x_copies[1]))
    return y


def _empty(x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    if call.gathered:
        weight = _zeros(weight)
    y = functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    shape = list(y.shape)
    if call.x_dim is not None:
        shape[call.x_dim] *= call.to.ranks
    if call.y_dim is not None:
        shape[call.y_dim] //= call.to.ranks
    return y.reshape(shape)


class _Zeros(torch.autograd.Function):
    """Zeros in the place of a weight without values."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return torch.zeros_like(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


_zeros: Any = _Zeros.apply


def _keeps_x(call: Call) -> bool:
    in_fp8 = call.to.rules.is_fp8(operands.GRAD_WEIGHT)
    return (call.recompute or not in_fp8) and not call.to.is_frozen


def _needs_qt(call: Call, save: bool) -> bool:
    return save and call.to.rules.is_fp8(operands.GRAD_WEIGHT)


def flat(copies: operands.Copies) -> tuple[Tensor | None, ...]:
    return tuple(part for copy in copies for part in (copy or (None, None)))


def pair(data: Tensor | None, scales: Tensor | None) -> Any:
    return None if data is None or scales is None else Copy(data, scales)


# A compiled graph keeps the same in a list that PrepareFloat8ModuleInput makes in every call.
LEFT = "_float8_copies"


def _find_left(source: Any, key: Any) -> Any:
    """Returns the copies that another linear left of this x, None where there are none."""
    if torch.compiler.is_compiling():
        left = next(iter(getattr(source, LEFT, ())), None)
    else:
        left = grads.Latest.x
        left = left[1:] if left is not None and left[0]() is source else None
    return left[1:] if left is not None and key is not None and left[0] == key else None


def _leave(source: Any, key: Any, *copies: Any) -> None:
    if key is None:
        return
    if not torch.compiler.is_compiling():
        grads.Latest.x = (weakref.ref(source), key, *copies)
    elif (left := getattr(source, LEFT, None)) is not None:
        left.insert(0, (key, *copies))


def _gathering(source: Any, key: Any, x: Tensor, call: Call) -> Call:
    """Says how a linear whose x is shared by tokens gathers it."""
    leaves = key is not None
    if leaves and torch.compiler.is_compiling():
        leaves = getattr(source, LEFT, None) is not None
    return gathering(x, call, leaves)


def gathering(x: Tensor, call: Call, leaves: bool) -> Call:
    """Says how a linear gathers its x, and whether it leaves it to others."""
    assert call.x_dim is not None
    gathers = grads.overlaps(check_runs(x, call), x, call)
    return call._replace(gathers=gathers, leaves=gathers and leaves)


def check_runs(x: Tensor, call: Call) -> int:
    """Returns the rows of a run of x that this rank has; raises where these cut blocks."""
    shard = grads.shard_of_x(x, call)
    run = shard.rows // shard.outer
    operands.check_runs(run, _ops.INPUT, call.to)
    return run


def trimmed(copies: operands.Copies, rows: int) -> operands.Copies:
    """Returns copies whose qt, which is gathered in backward, has no padding."""
    q, qt = copies
    return q, qt and Copy(qt.data[:, :rows].contiguous(), qt.scales)


def _gather(x: Tensor, copies: operands.Copies, call: Call) -> tuple[Tensor, operands.Copies]:
    """Returns a tensor of the whole x's shape without values, and copies whose q is the whole x's.

    The first linear that reads an x leaves them there for the others (query, key and value), but for
    delayed scaling, where each linear records amaxes of its own.
    """
    assert call.x_dim is not None
    whole = _whole_input(x, call.x_dim, call.to)
    return whole, gather_q(x, copies, call)


def gather_q(x: Tensor, copies: operands.Copies, call: Call) -> operands.Copies:
    """Returns copies whose q is that of all tokens of x."""
    assert copies[0] is not None
    shard = grads.shard_of_x(x, call)
    started = operands.start_gathers(operands.parts_of_q(copies[0], shard, call.to), call.to)
    return operands.whole_q(operands.wait_all(started), copies[0], shard, call.to), copies[1]


def _sharing_key(source: Any, x: Tensor, save: bool, call: Call) -> tuple[Any, ...] | None:
    """Returns what must be equal for linears that share the copies of x, None where none does."""
    own = (x.dtype, save, call.while_trained())  # q of x is not the weight's
    if torch.compiler.is_compiling():
        return own
    return None if source.is_inference() else (*own, source._version, _linear._place(x))


class _WholeInput(torch.autograd.Function):
    """x of all ranks, which has no values: linears read its copies. dx is reduced and scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, to: Sharing) -> Tensor:
        ctx.shape, ctx.outer, ctx.to = x.shape, math.prod(x.shape[:dim]), to
        return x.new_empty((1,)).expand(grads.whole_shape(x.shape, dim, to.ranks))

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Any:
        if not torch.compiler.is_compiling():
            grads.Latest.x_grad = None
        return (
            grads.reduce_scatter(grads.rows_of(dx), ctx.outer, ctx.to).view(ctx.shape),
            None,
            None,
        )


_whole_input: Any = _WholeInput.apply


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shard: Tensor | None,
    scales: Tensor | None,
    call: Call,
    *tensors: Tensor | None,
) -> Any:
    """Returns y; where the linear leaves what it gathers, also a whole x without values, and q."""
    to = call.to
    if call.dim == 1 and to.rank != 0:
        bias = None  # one rank adds it to its partial sums
    shape = [*x.shape[:-1], weight.shape[0]]
    if not to.rules.is_fp8(operands.OUTPUT):
        config = grads.reading(to, 0) | (recipes.BIAS if bias is not None else 0)
        y, _ = _ops.linear_forward(
            grads.rows_of(x), None, None, weight, None, None, bias, None, config, 0, False
        )
        return _scattered(y, shape, call)
    xq, wq = pair(*tensors[0:2]), pair(*tensors[4:6])
    bias = None if bias is None else bias.to(x.dtype)
    if call.gathered:
        if not call.overlap:
            y = weight_gemm(operands.OUTPUT, *xq, weight, bias, x.dtype, to.rules.config)
            return _scattered(y, shape, call)
        wq = grads.gathered_copy(operands.OUTPUT, x, weight, call)
    gemm = Gemm(operands.OUTPUT, wq, bias, x.shape[-1], x.dtype, to)
    if call.gathers:
        assert call.x_dim is not None
        of_x = grads.shard_of_x(x, call)
        y, gathered = gemm.of_gathered(xq, of_x, keep=call.leaves)
        y = y.view(grads.whole_shape(shape, call.x_dim, to.ranks))
        if not call.leaves:
            return y
        return (
            y,
            x.new_empty((1,)).expand(grads.whole_shape(x.shape, call.x_dim, to.ranks)),
            *gathered,
        )
    run = 0 if call.y_dim is None else math.prod(shape[call.y_dim : -1]) // to.ranks
    if call.y_dim is not None and grads.overlaps(run, x, call):
        y, _ = gemm.scattered(xq, math.prod(shape[: call.y_dim]))
        shape[call.y_dim] //= to.ranks
        return y.view(shape)
    return _scattered(gemm.of(xq, x), shape, call)


def _scattered(y: Tensor, shape: list[int], call: Call) -> Tensor:
    """Returns y, or this rank's rows of partial sums where ranks share y by tokens."""
    if call.y_dim is not None:
        y = grads.reduce_scatter(y, math.prod(shape[: call.y_dim]), call.to)
        shape[call.y_dim] //= call.to.ranks
    return y.view(shape)


class _Linear(torch.autograd.Function):
    """y of this rank. Between forward and backward it keeps qt of what the rank has.

    Where it gathers x itself, x is the rank's; it gets the dx of the linears that read `whole` too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shard: Tensor | None,
        scales: Tensor | None,
        call: Call,
        *tensors: Tensor | None,
    ) -> Any:
        ctx.call = call
        ctx.operation = None if torch.compiler.is_compiling() else grads.Latest.backward
        ctx.x_shape = x.shape
        kept = (x if shard is None else shard) if _keeps_x(call) else None
        none = (None, None)
        of_x = none if call.recompute else tensors[2:4]
        of_weight = none if call.recompute and not call.gathered else tensors[6:8]
        ctx.save_for_backward(weight, kept, scales, *of_x, *of_weight)
        keep_parts(ctx, scales)
        outputs = forward(x, weight, bias, shard, scales, call, *tensors)
        if call.leaves:
            if not torch.compiler.is_compiling():
                ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*outputs[2 if ctx.needs_input_grad[0] else 1 :])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dx_of_others: Tensor | None = None, *_: Any) -> Any:
        if not torch.compiler.is_compiling():
            grads.Latest.x = None
        if ctx.operation is not None:
            collectives.progress.begin(ctx.operation)
        call = ctx.call
        weight, x, scales, *copies = ctx.saved_tensors
        (scales,) = parts_kept(ctx, scales)
        wanted = wanted_grads(ctx)[:3]
        if dy is None:  # only other linears of this x have a gradient
            others = dx_of_others
            scattered = None if others is None else grads.scatter_dx(others, ctx.x_shape, call)
            return scattered, *(None,) * 13
        saved = Saved(weight, x, scales, pair(*copies[:2]), pair(*copies[2:]))
        dx, dw, db = backward(dy, saved, ctx.x_shape, call, wanted, dx_of_others)
        return dx, dw, db, *(None,) * 11


class Saved(NamedTuple):
    """What the backward of a linear reads: copies are qt."""

    weight: Tensor
    x: Any
    scales: Tensor | None
    x_copy: Any
    w_copy: Any


def backward(
    dy: Tensor,
    saved: Saved,
    x_shape: Sequence[int],
    call: Call,
    wanted: Sequence[bool],
    dx_of_others: Tensor | None = None,
    dy_copies: operands.Copies | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of x, the weight and the bias, as far as they are wanted.

    x_shape: of the x that forward had. Where it gathered x itself, the linear gets the dx of those that read
        what it left, and scatters the sum.
    dy_copies: q and qt of this rank's columns of dy, where they are there; of dy the shape alone is read
        then, and no bias is wanted.
    """
    to = call.to
    weight, x, scales, xqt, wqt = saved
    want_x, want_weight, want_bias = wanted
    if call.recompute:
        cast = grads.cast_again(x, weight, dy.dtype, scales, call)
        xqt = None if x is None else cast.pop(0)
        wqt = cast[0] if cast else wqt
    given = weight
    if call.gathered:
        if call.overlap and want_x:
            wqt = grads.gathered_copy(operands.GRAD_INPUT, dy, weight, call)
        # It has no values; what follows reads a shape and a type alone.
        weight = dy.new_empty((1,), dtype=weight.dtype).expand(weight.shape)
    fp8 = to.rules.is_fp8(operands.GRAD_INPUT), to.rules.is_fp8(operands.GRAD_WEIGHT)
    if to.trained is not None:  # the bias alone may read dy in high precision
        fp8 = fp8[0], not want_bias or to.trained.rules.is_fp8(operands.GRAD_WEIGHT)
    of_x = grads.GatheredX(x, xqt, x_shape, call) if want_weight else None
    scatters = call.gathers and want_x and fp8[0]
    beside = of_x is not None and of_x.beside and want_x and fp8[0]
    if of_x is not None and not beside:
        of_x.start()
    by_tokens = call.y_dim is not None and all(fp8)
    gemm = Gemm(operands.GRAD_INPUT, wqt, None, weight.shape[0], dy.dtype, to)
    db = grads.bias_grad(dy, weight, True, to) if want_bias and by_tokens else None
    dx: Any = None
    dyq: Any = None
    dyqt: Any = None
    if (
        want_x
        and fp8[0]
        and call.y_dim is not None
        and grads.overlaps(grads.run_of_dy(dy, call), dy, call)
    ):
        dx, dyqt, dy = grads.dx_of_gathered(gemm, dy, scales, by_tokens, call)
    else:
        if call.y_dim is not None and not by_tokens:
            dy = grads.whole_hp(dy, call.y_dim, to)
        if dy_copies is not None:
            dyq, dyqt = dy_copies
        elif any(fp8):
            dyq, dyqt = grads.cast_grad(dy, scales, by_tokens, call)
        own = of_x.own if of_x is not None and beside else []
        gathered: list[Tensor] = []
        if scatters:
            outer = math.prod(x_shape[: call.x_dim])
            dx, gathered = gemm.scattered(dyq, outer, dx_of_others, own)
        elif own:
            dx, gathered = gemm.beside(dyq, own)
        elif want_x and fp8[0]:
            if call.gathered and not call.overlap:
                config = to.rules.config
                dx = weight_gemm(operands.GRAD_INPUT, *dyq, given, None, dy.dtype, config)
            else:
                dx = gemm.of(dyq, dy)
        elif want_x:
            dx = _hp_input_gradient(dy, weight, x_shape, dx_of_others, call)
        if of_x is not None and beside:
            of_x.gathered = gathered
    if want_bias and not by_tokens:
        db = grads.bias_grad(dy, weight, False, to)
    dw = None if of_x is None else _weight_gradient(of_x, dy, dyqt, weight, to)
    if call.gathers and not torch.compiler.is_compiling():
        grads.Latest.x_grad = None  # the other linears of this x came before
    dx = None if dx is None else dx.view(x_shape)
    return dx, dw, db


def _hp_input_gradient(
    dy: Tensor, weight: Tensor, x_shape: Sequence[int], dx_of_others: Tensor | None, call: Call
) -> Tensor:
    dx: Tensor = grads.hp_backward(dy, None, weight, recipes.READS_WEIGHT, 1, call.to)[0]
    if not call.gathers:
        return dx
    dx = grads.rows_of(dx if dx_of_others is None else dx + dx_of_others.view(dx.shape))
    return grads.scatter_dx(dx, x_shape, call)


def _weight_gradient(
    of_x: grads.GatheredX, dy: Tensor, dyqt: Any, weight: Tensor, to: operands.Sharing
) -> Tensor | None:
    xqt, x = of_x.finish()
    if to.rules.is_fp8(operands.GRAD_WEIGHT):
        return operands.gemm(operands.GRAD_WEIGHT, dyqt, xqt, of_x.tokens, weight, to, None)
    return grads.hp_backward(dy, x, weight, recipes.READS_X, 2, to)[1]


_apply: Any = _Linear.apply
