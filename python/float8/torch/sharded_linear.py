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
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from float8 import recipes
from float8.torch import _ops
from float8.torch import sharded_operands as operands
from float8.torch.sharded_operands import Copy, Shard, Share, Sharing, Slot
from float8.torch.weight_gather import weight_gemm

CAST, KEPT, GATHERED = range(3)


class Call(NamedTuple):
    """What forward and backward of a linear know beside tensors."""

    to: Sharing
    dim: int  # of the weight, which ranks share
    x_dim: int | None  # of x, which ranks share by tokens
    y_dim: int | None  # of y, likewise
    layout: int  # of the scale state, with delayed scaling
    first: bool  # its first step
    recompute: bool  # backward casts x and the weight again
    weight: int = 0  # whose copies are: CAST here, KEPT since an earlier call, or GATHERED by FSDP

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
    copies: operands.Copies | None = None,
) -> Tensor:
    """Computes this rank's part of y from its parts of x and the weight.

    source: the tensor that the linear was called with, which other linears may read too.
    scales: the linear's part of a scale state, for delayed scaling.
    words: the weight's maxima over ranks, where they are known. copies: the weight's, where it is KEPT.
    """
    if x.numel() == 0:
        return _empty(x, weight, bias, call)
    save = torch.is_grad_enabled() and (
        weight.requires_grad or x.requires_grad or (bias is not None and bias.requires_grad)
    )
    slot = _slot(scales, call)
    share = None
    if call.weight == CAST:
        share = Share(weight.detach().to(x.dtype), _ops.WEIGHT, call.dim, words)
    whole, x_copies, w_copies = _copies(source, x, share, save, slot, call)
    w_copies = copies or w_copies
    shard = x.detach() if call.x_dim is not None and _keeps_x(call) else None
    tensors = (*_flat(x_copies), *_flat(w_copies))
    if save:
        y: Tensor = _apply(whole, weight, bias, shard, scales, call, *tensors)
        return y
    return _forward(whole, weight, bias, call, *tensors)


def _empty(x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    if call.weight == GATHERED:
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


def _copies(
    source: Any, x: Tensor, w_share: Share | None, save: bool, slot: Slot | None, call: Call
) -> tuple[Tensor, operands.Copies, operands.Copies]:
    """Returns what the linear sees as x, and the copies of x and of the weight.

    Where ranks share x by tokens, it sees a tensor of the whole x's shape without values, and q is
    the whole x's. The first linear that reads an x leaves its copies there for the others (query, key
    and value), but for delayed scaling, where each linear records amaxes of its own.
    """
    to = call.to
    key = _sharing_key(source, x, save, call) if slot is None else None
    shares = [] if w_share is None else [w_share]
    w_copies: operands.Copies = (None, None)
    if (left := _find_left(source, key)) is not None:
        if shares:
            (w_copies,) = operands.cast(shares, to, save, slot)
        return left[0], left[1], w_copies
    shares.insert(0, Share(_rows(x.detach()), _ops.INPUT, call.x_share_dim))
    (q, qt), *of_weight = operands.cast(shares, to, save, slot)
    if of_weight:
        (w_copies,) = of_weight
    whole = x
    if call.x_dim is not None:
        shard = _shard(x.shape, call.x_dim, _ops.INPUT)
        operands.check_runs(shard.rows // shard.outer, _ops.INPUT, to)
        assert q is not None
        started = operands.start_gather_q(q, shard, to)
        whole = _whole_input(x, call.x_dim, to)
        q = operands.finish_gather_q(started, q, shard, to)
        if qt is not None:  # it is gathered in backward, without its padding
            qt = Copy(qt.data[:, : shard.rows].contiguous(), qt.scales)
    _leave(source, key, whole, (q, qt))
    return whole, (q, qt), w_copies


def _sharing_key(source: Any, x: Tensor, save: bool, call: Call) -> tuple[Any, ...] | None:
    """Returns what must be equal for linears that share the copies of x, None where none does."""
    own = (x.dtype, save, call)
    if torch.compiler.is_compiling():
        return own
    return None if source.is_inference() else (*own, source._version, _ops._place(x))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _shard(shape: torch.Size, dim: int, operand: int) -> Shard:
    """Describes the rows of a tensor of that shape on this rank, whose dimension `dim` is shared."""
    return Shard(operand, math.prod(shape[:-1]), shape[-1], math.prod(shape[:dim]))


class _WholeInput(torch.autograd.Function):
    """x of all ranks, which has no values: linears read its copies. dx is reduced and scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, to: Sharing) -> Tensor:
        ctx.shape, ctx.outer, ctx.to = x.shape, math.prod(x.shape[:dim]), to
        shape = list(x.shape)
        shape[dim] *= to.ranks
        return x.new_empty((1,)).expand(shape)

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
    x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, *tensors: Tensor | None
) -> Tensor:
    to = call.to
    if call.dim == 1 and to.rank != 0:
        bias = None  # one rank adds it to its partial sums
    if to.rules.is_fp8(operands.OUTPUT):
        xq, wq = _pair(*tensors[0:2]), _pair(*tensors[4:6])
        typed = None if bias is None else bias.to(x.dtype)
        y = _weight_gemm(operands.OUTPUT, xq, wq, weight, x, call, typed)
    else:
        config = _reading(to, 0) | (recipes.BIAS if bias is not None else 0)
        y, _ = _ops.linear_forward(
            _rows(x), None, None, weight, None, None, bias, None, config, 0, False
        )
    shape = [*x.shape[:-1], weight.shape[0]]
    if call.y_dim is not None:
        y = _reduce_scatter(y, math.prod(shape[: call.y_dim]), to)
        shape[call.y_dim] //= to.ranks
    return y.view(shape)


def _weight_gemm(
    gemm: int, a: Copy, b: Any, weight: Tensor, like: Tensor, call: Call, bias: Tensor | None
) -> Tensor:
    """Multiplies with a copy of the weight, `b` or the one that FSDP gathered."""
    if call.weight == GATHERED:
        config = call.to.rules.config
        return weight_gemm(gemm, *a, weight, bias, like.dtype, config)  # type: ignore[no-any-return]
    return operands.gemm(gemm, a, b, weight.shape[1 - gemm], like, call.to, bias)


def _reading(to: Sharing, read: int) -> int:
    """Returns the config of a GEMM in high precision whose backward reads so much."""
    return to.rules.high_precision & ~(recipes.READS_X | recipes.READS_WEIGHT) | read


class _Linear(torch.autograd.Function):
    """y of this rank. Between forward and backward it keeps qt of what the rank has."""

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
    ) -> Tensor:
        ctx.call = call
        ctx.x_shape = x.shape
        kept = (x if shard is None else shard) if _keeps_x(call) else None
        none = (None, None)
        of_x = none if call.recompute else tensors[2:4]
        of_weight = none if call.recompute and call.weight == CAST else tensors[6:8]
        ctx.save_for_backward(weight, kept, scales, *of_x, *of_weight)
        return _forward(x, weight, bias, call, *tensors)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        if not torch.compiler.is_compiling():
            _Latest.x = None
        call, to = ctx.call, ctx.call.to
        weight, x, scales, *saved = ctx.saved_tensors
        xqt, wqt = _pair(*saved[:2]), _pair(*saved[2:])
        if call.recompute:
            xqt, *cast = _cast_again(x, weight, scales, call)
            wqt = cast[0] if cast else wqt
        given = weight
        if call.weight == GATHERED:  # it has no values; what follows reads a shape and a type alone
            weight = dy.new_empty((1,), dtype=weight.dtype).expand(weight.shape)
        want_x, want_weight, want_bias, *_ = ctx.needs_input_grad
        fp8 = to.rules.is_fp8(operands.GRAD_INPUT), to.rules.is_fp8(operands.GRAD_WEIGHT)
        finish_x = _gather_x(x, xqt, ctx.x_shape, call) if want_weight else None
        db = None
        if call.y_dim is not None and not all(fp8):
            dy = _whole_hp(dy, call.y_dim, to)
        by_tokens = call.y_dim is not None and all(fp8)
        if want_bias:
            db = _bias_grad(dy, weight, by_tokens, to)
        dyq: Any = None
        dyqt: Any = None
        if any(fp8):
            dyq, dyqt = _cast_grad(dy, scales, by_tokens, call)
        dx = dw = None
        if want_x and fp8[0]:
            dx = _weight_gemm(operands.GRAD_INPUT, dyq, wqt, given, dy, call, None)
        elif want_x:
            dx = _hp_backward(dy, None, weight, recipes.READS_WEIGHT, 1, to)[0]
        if finish_x is not None:
            xqt, x = finish_x()
            tokens = math.prod(ctx.x_shape[:-1])
            if fp8[1]:
                dw = operands.gemm(operands.GRAD_WEIGHT, dyqt, xqt, tokens, weight, to, None)
            else:
                dw = _hp_backward(dy, x, weight, recipes.READS_X, 2, to)[1]
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
    """Returns qt of x and, where forward cast the weight, of the weight."""
    shares = [Share(_rows(x.detach()), _ops.INPUT, call.x_share_dim)]
    if call.weight == CAST:
        shares.append(Share(weight.detach().to(x.dtype), _ops.WEIGHT, call.dim))
    return [qt for _, qt in operands.cast(shares, call.to, True, _slot(scales, call))]


def _cast_grad(dy: Tensor, scales: Tensor | None, by_tokens: bool, call: Call) -> Any:
    """Returns q and qt of dy: of this rank's columns, or of all columns and tokens."""
    dim = 1 if call.dim == 0 else (0 if by_tokens else None)
    share = Share(_rows(dy), _ops.GRAD_OUTPUT, dim)
    ((q, qt),) = operands.cast([share], call.to, True, _slot(scales, call))
    if not by_tokens:
        return q, qt
    assert call.y_dim is not None and q is not None and qt is not None
    shard = _shard(dy.shape, call.y_dim, _ops.GRAD_OUTPUT)
    operands.check_runs(shard.rows // shard.outer, _ops.GRAD_OUTPUT, call.to)
    return operands.gather_both(q, qt, shard, call.to)


def _whole_hp(x: Tensor, dim: int, to: Sharing) -> Tensor:
    """Gathers a tensor that is shared by tokens, in high precision."""
    gathered = operands.wait(operands.start_gather(x, to)).view(-1, x.shape[-1])
    shape = list(x.shape)
    shape[dim] *= to.ranks
    return operands.whole_rows(gathered, math.prod(x.shape[:dim]), to).view(shape)


def _gather_x(x: Tensor | None, qt: Copy | None, whole_shape: torch.Size, call: Call) -> Any:
    """Starts to gather what grad_weight needs of x; returns the call that gives qt and x."""
    to, dim = call.to, call.x_dim
    if dim is None:
        return lambda: (qt, x)
    if not to.rules.is_fp8(operands.GRAD_WEIGHT):
        assert x is not None
        return lambda: (None, _whole_hp(x, dim, to))
    assert qt is not None
    latest = None if torch.compiler.is_compiling() else _Latest.qt
    if latest is not None and latest[0].data_ptr() == qt.data.data_ptr():
        return lambda: (latest[1], None)
    shape = list(whole_shape)
    shape[dim] //= to.ranks
    shard = _shard(torch.Size(shape), dim, _ops.INPUT)
    started = operands.start_gather_qt(qt, shard, to)

    def finish() -> tuple[Copy, None]:
        whole = operands.finish_gather_qt(started, qt, shard, to)
        if not torch.compiler.is_compiling():
            _Latest.qt = (qt.data, whole)
        return whole, None

    return finish
