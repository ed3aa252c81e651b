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
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from float8 import recipes
from float8.torch import _ops, async_tensor_parallel
from float8.torch import sharded_operands as operands
from float8.torch.sharded_operands import Copy, Gemm, Shard, Share, Sharing, Slot


class Call(NamedTuple):
    """What forward and backward of a linear know beside tensors."""

    to: Sharing
    dim: int  # of the weight, which ranks share
    x_dim: int | None  # of x, which ranks share by tokens
    y_dim: int | None  # of y, likewise
    layout: int  # of the scale state, with delayed scaling
    first: bool  # its first step
    recompute: bool  # backward casts x and the weight again
    overlap: bool = False  # communication runs beside GEMMs (async_tensor_parallel.py)
    gathers: bool = False  # forward gathers x of all ranks by chunks, and backward scatters dx
    leaves: bool = False  # it leaves what it gathered to other linears, which read `whole`

    @property
    def x_share_dim(self) -> int | None:
        """The dimension of the matrix x that ranks share."""
        return 1 if self.dim == 1 else None if self.x_dim is None else 0


def linear(
    source: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    words: tuple[Tensor, Tensor] | None,
    call: Call,
) -> Tensor:
    """Computes this rank's part of y from its parts of x and the weight.

    source: the tensor that the linear was called with, which other linears may read too.
    scales: the linear's part of a scale state, for delayed scaling.
    words: the weight's maxima over ranks, where they are known.
    """
    if x.numel() == 0:
        return _empty(x, weight, bias, call)
    save = torch.is_grad_enabled() and (
        weight.requires_grad or x.requires_grad or (bias is not None and bias.requires_grad)
    )
    slot = _slot(scales, call)
    share = Share(weight.detach().to(x.dtype), _ops.WEIGHT, call.dim, words)
    key = _sharing_key(source, x, save, call) if slot is None else None
    if (left := _find_left(source, key)) is not None:
        (whole, x_copies), (w_copies,) = left, operands.cast([share], call.to, save, slot)
    else:
        x_share = Share(_rows(x.detach()), _ops.INPUT, call.x_share_dim)
        x_copies, w_copies = operands.cast([x_share, share], call.to, save, slot)
        whole = x
        if call.x_dim is not None:
            x_copies = _trimmed(x_copies, x_share.tensor.shape[0])
            call = _gathering(source, key, x, call)
            if not call.gathers:
                whole, x_copies = _gather(x, x_copies, call)
        if not call.gathers:
            _leave(source, key, whole, x_copies)
    shard = x.detach() if call.x_dim is not None and _keeps_x(call) else None
    tensors = (*_flat(x_copies), *_flat(w_copies))
    run = _apply if save else _forward
    outputs = run(whole, weight, bias, shard, scales, call, *tensors)
    if not isinstance(outputs, tuple):
        return outputs  # type: ignore[no-any-return]
    y: Tensor = outputs[0]
    whole, *gathered = outputs[1:]
    q = operands.whole_q(gathered, x_copies[0], _shard_of_x(x, call), call.to)
    _leave(source, key, whole, (q, x_copies[1]))
    return y


def _empty(x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    y = functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    shape = list(y.shape)
    if call.x_dim is not None:
        shape[call.x_dim] *= call.to.ranks
    if call.y_dim is not None:
        shape[call.y_dim] //= call.to.ranks
    return y.reshape(shape)


def _keeps_x(call: Call) -> bool:
    return call.recompute or not call.to.rules.is_fp8(operands.GRAD_WEIGHT)


def _flat(copies: operands.Copies) -> tuple[Tensor | None, ...]:
    return tuple(part for copy in copies for part in (copy or (None, None)))


def _pair(data: Tensor | None, scales: Tensor | None) -> Any:
    return None if data is None or scales is None else Copy(data, scales)


class _Latest:
    """What a linear left for the next one, outside of compiled graphs."""

    x: ClassVar[tuple[Any, ...] | None] = None  # an x, a key, and its copies
    qt: ClassVar[tuple[Tensor, Copy] | None] = None  # this rank's bytes of qt, and the whole


# A compiled graph keeps the same in a list that PrepareFloat8ModuleInput makes in every call.
LEFT = "_float8_copies"


def _find_left(source: Any, key: Any) -> Any:
    """Returns the copies that another linear left of this x, None where there are none."""
    if torch.compiler.is_compiling():
        left = next(iter(getattr(source, LEFT, ())), None)
    else:
        left = _Latest.x
        left = left[1:] if left is not None and left[0]() is source else None
    return left[1:] if left is not None and key is not None and left[0] == key else None


def _leave(source: Any, key: Any, *copies: Any) -> None:
    if key is None:
        return
    if not torch.compiler.is_compiling():
        _Latest.x = (weakref.ref(source), key, *copies)
    elif (left := getattr(source, LEFT, None)) is not None:
        left.append((key, *copies))


def _gathering(source: Any, key: Any, x: Tensor, call: Call) -> Call:
    """Says how a linear whose x is shared by tokens gathers it."""
    assert call.x_dim is not None
    shard = _shard_of_x(x, call)
    operands.check_runs(shard.rows // shard.outer, _ops.INPUT, call.to)
    gathers = _overlaps(shard.rows // shard.outer, x, call)
    leaves = gathers and key is not None
    if leaves and torch.compiler.is_compiling():
        leaves = getattr(source, LEFT, None) is not None
    return call._replace(gathers=gathers, leaves=leaves)


def _trimmed(copies: operands.Copies, rows: int) -> operands.Copies:
    """Returns copies whose qt, which is gathered in backward, has no padding."""
    q, qt = copies
    return q, qt and Copy(qt.data[:, :rows].contiguous(), qt.scales)


def _gather(x: Tensor, copies: operands.Copies, call: Call) -> tuple[Tensor, operands.Copies]:
    """Returns a tensor of the whole x's shape without values, and copies whose q is the whole x's.

    The first linear that reads an x leaves them there for the others (query, key and value), but for
    delayed scaling, where each linear records amaxes of its own.
    """
    assert call.x_dim is not None and copies[0] is not None
    shard = _shard_of_x(x, call)
    started = operands.start_gathers(operands.parts_of_q(copies[0], shard, call.to), call.to)
    whole = _whole_input(x, call.x_dim, call.to)
    q = operands.whole_q(operands.wait_all(started), copies[0], shard, call.to)
    return whole, (q, copies[1])


def _sharing_key(source: Any, x: Tensor, save: bool, call: Call) -> tuple[Any, ...] | None:
    """Returns what must be equal for linears that share the copies of x, None where none does."""
    own = (x.dtype, save, call)
    if torch.compiler.is_compiling():
        return own
    return None if source.is_inference() else (*own, source._version, _ops._place(x))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _shard_of_x(x: Tensor, call: Call) -> Shard:
    assert call.x_dim is not None
    return _shard(x.shape, call.x_dim, _ops.INPUT)


def _whole_shape(shape: Sequence[int], dim: int, ranks: int) -> list[int]:
    whole = list(shape)
    whole[dim] *= ranks
    return whole


def _shard(shape: torch.Size, dim: int, operand: int) -> Shard:
    """Describes the rows of a tensor of that shape on this rank, whose dimension `dim` is shared."""
    return Shard(operand, math.prod(shape[:-1]), shape[-1], math.prod(shape[:dim]))


class _WholeInput(torch.autograd.Function):
    """x of all ranks, which has no values: linears read its copies. dx is reduced and scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, to: Sharing) -> Tensor:
        ctx.shape, ctx.outer, ctx.to = x.shape, math.prod(x.shape[:dim]), to
        return x.new_empty((1,)).expand(_whole_shape(x.shape, dim, to.ranks))

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Any:
        if not torch.compiler.is_compiling():
            _Latest.qt = None
        return _reduce_scatter(_rows(dx), ctx.outer, ctx.to).view(ctx.shape), None, None


_whole_input: Any = _WholeInput.apply


def _reduce_scatter(whole: Tensor, outer: int, to: Sharing) -> Tensor:
    """Returns this rank's rows of the sum over ranks, in the tensor's type."""
    rows = operands.shared_rows(whole, outer, to)
    reduced = torch.ops._c10d_functional.reduce_scatter_tensor(
        rows.contiguous(), "sum", to.ranks, to.group
    )
    return operands.wait(reduced)


def _forward(
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
        config = _reading(to, 0) | (recipes.BIAS if bias is not None else 0)
        y, _ = _ops.linear_forward(
            _rows(x), None, None, weight, None, None, bias, None, config, 0, False
        )
        return _scattered(y, shape, call)
    xq, wq = _pair(*tensors[0:2]), _pair(*tensors[4:6])
    bias = None if bias is None else bias.to(x.dtype)
    gemm = Gemm(operands.OUTPUT, wq, bias, x.shape[-1], x.dtype, to)
    if call.gathers:
        assert call.x_dim is not None
        of_x = _shard_of_x(x, call)
        y, gathered = gemm.of_gathered(xq, of_x, keep=call.leaves)
        y = y.view(_whole_shape(shape, call.x_dim, to.ranks))
        if not call.leaves:
            return y
        return y, x.new_empty((1,)).expand(_whole_shape(x.shape, call.x_dim, to.ranks)), *gathered
    run = 0 if call.y_dim is None else math.prod(shape[call.y_dim : -1]) // to.ranks
    if call.y_dim is not None and _overlaps(run, x, call):
        y, _ = gemm.scattered(xq, math.prod(shape[: call.y_dim]))
        shape[call.y_dim] //= to.ranks
        return y.view(shape)
    return _scattered(gemm.of(xq, x), shape, call)


def _scattered(y: Tensor, shape: list[int], call: Call) -> Tensor:
    """Returns y, or this rank's rows of partial sums where ranks share y by tokens."""
    if call.y_dim is not None:
        y = _reduce_scatter(y, math.prod(shape[: call.y_dim]), call.to)
        shape[call.y_dim] //= call.to.ranks
    return y.view(shape)


def _overlaps(run: int, like: Tensor, call: Call) -> bool:
    """Tells whether a tensor is gathered, or scattered, by chunks of such runs of rows."""
    return call.overlap and call.to.ranks > 1 and async_tensor_parallel.pays(run, like)


def _reading(to: Sharing, read: int) -> int:
    """Returns the config of a GEMM in high precision whose backward reads so much."""
    return to.rules.high_precision & ~(recipes.READS_X | recipes.READS_WEIGHT) | read


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
        ctx.x_shape = x.shape
        kept = (x if shard is None else shard) if _keeps_x(call) else None
        saved = (None,) * 4 if call.recompute else (*tensors[2:4], *tensors[6:8])
        ctx.save_for_backward(weight, kept, scales, *saved)
        outputs = _forward(x, weight, bias, shard, scales, call, *tensors)
        if call.leaves:
            if not torch.compiler.is_compiling():
                ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*outputs[2 if ctx.needs_input_grad[0] else 1 :])
        return outputs

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dx_of_others: Tensor | None = None, *_: Any) -> Any:
        if not torch.compiler.is_compiling():
            _Latest.x = None
        call, to = ctx.call, ctx.call.to
        weight, x, scales, *saved = ctx.saved_tensors
        want_x, want_weight, want_bias, *_ = ctx.needs_input_grad
        if dy is None:  # only other linears of this x have a gradient
            others = dx_of_others
            scattered = None if others is None else _scatter_dx(others, ctx.x_shape, call)
            return scattered, *(None,) * 13
        xqt, wqt = _pair(*saved[:2]), _pair(*saved[2:])
        if call.recompute:
            xqt, wqt = _cast_again(x, weight, scales, call)
        fp8 = to.rules.is_fp8(operands.GRAD_INPUT), to.rules.is_fp8(operands.GRAD_WEIGHT)
        of_x = _GatheredX(x, xqt, ctx.x_shape, call) if want_weight else None
        scatters = call.gathers and want_x and fp8[0]
        # In a compiled graph the gathers of all linears of one x are one collective.
        beside = scatters and not (call.leaves and torch.compiler.is_compiling())
        if of_x is not None and not beside:
            of_x.start()
        by_tokens = call.y_dim is not None and all(fp8)
        gemm = Gemm(operands.GRAD_INPUT, wqt, None, weight.shape[0], dy.dtype, to)
        db = _bias_grad(dy, weight, True, to) if want_bias and by_tokens else None
        dx: Any = None
        dyq: Any = None
        dyqt: Any = None
        if want_x and fp8[0] and call.y_dim is not None and _overlaps(_run(dy, call), dy, call):
            dx, dyqt, dy = _dx_of_gathered(gemm, dy, scales, call)
        else:
            if call.y_dim is not None and not by_tokens:
                dy = _whole_hp(dy, call.y_dim, to)
            if any(fp8):
                dyq, dyqt = _cast_grad(dy, scales, by_tokens, call)
            if scatters:
                outer = math.prod(ctx.x_shape[: call.x_dim])
                own = of_x.own if of_x is not None and beside else []
                dx, gathered = gemm.scattered(dyq, outer, dx_of_others, own)
                if of_x is not None:
                    of_x.gathered = gathered
            elif want_x and fp8[0]:
                dx = gemm.of(dyq, dy)
            elif want_x:
                dx = _hp_backward(dy, None, weight, recipes.READS_WEIGHT, 1, to)[0]
                if call.gathers:
                    dx = _rows(dx if dx_of_others is None else dx + dx_of_others.view(dx.shape))
                    dx = _scatter_dx(dx, ctx.x_shape, call)
        if want_bias and not by_tokens:
            db = _bias_grad(dy, weight, False, to)
        dw = None
        if of_x is not None:
            xqt, x = of_x.finish()
            if fp8[1]:
                dw = operands.gemm(operands.GRAD_WEIGHT, dyqt, xqt, of_x.tokens, weight, to, None)
            else:
                dw = _hp_backward(dy, x, weight, recipes.READS_X, 2, to)[1]
        if call.gathers and not torch.compiler.is_compiling():
            _Latest.qt = None  # the other linears of this x came before
        dx = None if dx is None else dx.view(ctx.x_shape)
        return dx, dw, db, *(None,) * 11


_apply: Any = _Linear.apply


def _hp_backward(
    dy: Tensor, x: Tensor | None, weight: Tensor, reads: int, wanted: int, to: Sharing
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes gradients in high precision: bit 0 of `wanted` is dx, 1 dw, 2 db."""
    config = _reading(to, reads) | (recipes.BIAS if wanted & 4 else 0)
    saved = dy.new_empty((0,), dtype=torch.uint8)
    return _ops.linear_backward(  # type: ignore[no-any-return]
        _rows(dy), saved, x, None, weight, None, None, config, 0, wanted
    )


def _bias_grad(dy: Tensor, weight: Tensor, by_tokens: bool, to: Sharing) -> Tensor:
    if not by_tokens:
        return _hp_backward(dy, None, weight, 0, 4, to)[2]
    sums = _rows(dy).sum(0, dtype=torch.float32)
    sums = operands.wait(torch.ops._c10d_functional.all_reduce(sums, "sum", to.group))
    return sums.to(weight.dtype)


def _slot(scales: Tensor | None, call: Call) -> Slot | None:
    return None if scales is None else Slot(scales, call.layout, call.first)


def _cast_again(x: Tensor, weight: Tensor, scales: Tensor | None, call: Call) -> list[Any]:
    """Returns qt of x and of the weight, as forward had them."""
    shares = [
        Share(_rows(x.detach()), _ops.INPUT, call.x_share_dim),
        Share(weight.detach().to(x.dtype), _ops.WEIGHT, call.dim),
    ]
    return [qt for _, qt in operands.cast(shares, call.to, True, _slot(scales, call))]


def _cast_own_grad(dy: Tensor, scales: Tensor | None, dim: int | None, call: Call) -> Any:
    """Returns q and qt of what this rank has of dy, whose dimension `dim` ranks share."""
    share = Share(_rows(dy), _ops.GRAD_OUTPUT, dim)
    ((q, qt),) = operands.cast([share], call.to, True, _slot(scales, call))
    return q, qt


def _run(dy: Tensor, call: Call) -> int:
    return math.prod(dy.shape[call.y_dim : -1])


def _shard_of_dy(dy: Tensor, call: Call) -> Shard:
    assert call.y_dim is not None
    shard = _shard(dy.shape, call.y_dim, _ops.GRAD_OUTPUT)
    operands.check_runs(shard.rows // shard.outer, _ops.GRAD_OUTPUT, call.to)
    return shard


def _cast_grad(dy: Tensor, scales: Tensor | None, by_tokens: bool, call: Call) -> Any:
    """Returns q and qt of dy: of this rank's columns, or of all columns and tokens."""
    if not by_tokens:
        return _cast_own_grad(dy, scales, 1 if call.dim == 0 else None, call)
    q, qt = _cast_own_grad(dy, scales, 0, call)
    return operands.gather_both(q, qt, _shard_of_dy(dy, call), call.to)


def _dx_of_gathered(gemm: Gemm, dy: Tensor, scales: Tensor | None, call: Call) -> Any:
    """Returns dx, and for grad_weight qt of the whole dy, or the whole dy in high precision."""
    to = call.to
    q, qt = _cast_own_grad(dy, scales, 0, call)
    shard = _shard_of_dy(dy, call)
    if to.rules.one_copy[_ops.GRAD_OUTPUT]:
        dx, gathered = gemm.of_gathered(q, shard, keep=True)
        return dx, operands.transposed(operands.whole_q(gathered, q, shard, to), shard), dy
    if qt is not None:
        dx, gathered = gemm.of_gathered(q, shard, operands.parts_of_qt(qt, shard, to))
        return dx, operands.whole_qt(gathered, qt, shard, to), dy
    dx, gathered = gemm.of_gathered(q, shard, [dy.contiguous()])
    assert call.y_dim is not None
    return dx, None, _in_order(gathered[0], dy.shape, call.y_dim, to)


def _whole_hp(x: Tensor, dim: int, to: Sharing) -> Tensor:
    """Gathers a tensor that is shared by tokens, in high precision."""
    return _in_order(operands.wait(operands.start_gather(x, to)), x.shape, dim, to)


def _in_order(gathered: Tensor, shape: Sequence[int], dim: int, to: Sharing) -> Tensor:
    """Returns the whole tensor of parts of that shape, which lie one after the other."""
    rows = operands.whole_rows(gathered.view(-1, shape[-1]), math.prod(shape[:dim]), to)
    return rows.view(_whole_shape(shape, dim, to.ranks))


def _scatter_dx(dx: Tensor, x_shape: Sequence[int], call: Call) -> Tensor:
    outer = math.prod(x_shape[: call.x_dim])
    return _reduce_scatter(_rows(dx), outer, call.to).view(tuple(x_shape))


class _GatheredX:
    """What grad_weight needs of x: qt of all tokens, or all of x in high precision.

    own: what this rank has of it. Its gather is started here, or runs beside that of another GEMM,
        which sets `gathered`.
    """

    def __init__(self, x: Tensor | None, qt: Copy | None, shape: Sequence[int], call: Call) -> None:
        self.x, self.qt, self.to = x, qt, call.to
        self.dim = call.x_dim
        self.own: list[Tensor] = []
        self.gathered: list[Tensor] = []
        self.started: list[Tensor] = []
        self.tokens = math.prod(shape[:-1]) * (call.to.ranks if call.gathers else 1)
        if self.dim is None:
            return
        own = list(shape)
        own[self.dim] //= 1 if call.gathers else call.to.ranks
        self.shape = torch.Size(own)
        self.shard = _shard(self.shape, self.dim, _ops.INPUT)
        if not call.to.rules.is_fp8(operands.GRAD_WEIGHT):
            assert x is not None
            self.own = [x.contiguous()]
        elif self._latest() is None:
            assert qt is not None
            self.own = operands.parts_of_qt(qt, self.shard, call.to)

    def _latest(self) -> Copy | None:
        """Returns the whole qt that another linear of this x has gathered."""
        latest = None if torch.compiler.is_compiling() else _Latest.qt
        if latest is None or self.qt is None or latest[0].data_ptr() != self.qt.data.data_ptr():
            return None
        return latest[1]

    def start(self) -> None:
        self.started = operands.start_gathers(self.own, self.to)

    def finish(self) -> tuple[Any, Any]:
        """Returns qt and x of all tokens, of which one is None."""
        if self.dim is None:
            return self.qt, self.x
        gathered = operands.wait_all(self.started) if self.started else self.gathered
        if not self.to.rules.is_fp8(operands.GRAD_WEIGHT):
            return None, _in_order(gathered[0], self.shape, self.dim, self.to)
        if not gathered:
            return self._latest(), None
        assert self.qt is not None
        whole = operands.whole_qt(gathered, self.qt, self.shard, self.to)
        if not torch.compiler.is_compiling():
            _Latest.qt = (self.qt.data, whole)
        return whole, None
