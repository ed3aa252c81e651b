"""What forward and backward of a linear share whose operands ranks share, and the parts of backward.

sharded_linear.py has the linear itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from float8 import recipes
from float8.torch import _ops
from float8.torch.parallel import async_tensor_parallel
from float8.torch.parallel import sharded_operands as operands
from float8.torch.parallel.sharded_operands import Copy, Gemm, Shard, Share, Sharing, Slot
from float8.torch.ranks.collectives import Operation
from float8.torch.shard.gathered_ops import weight_copy


class Call(NamedTuple):
    """What forward and backward of a linear know apart from tensors."""

    to: Sharing
    dim: int  # of the weight, which ranks share
    x_dim: int | None  # of x, which ranks share by tokens
    y_dim: int | None  # of y, likewise
    layout: int  # of the scale state, with delayed scaling
    first: bool  # its first step
    recompute: bool  # backward casts x and the weight again
    overlap: bool = False  # communication overlaps with GEMMs (async_tensor_parallel.py)
    gathers: bool = False  # forward gathers x of all ranks by chunks, and backward scatters dx
    leaves: bool = False  # it leaves what it gathered to other linears, which read `whole`
    gathered: bool = False  # FSDP gathers the weight's copies

    def x_share_dim(self) -> int | None:
        """The dimension of the matrix x that ranks share; no property, as `Part.slots`."""
        return 1 if self.dim == 1 else None if self.x_dim is None else 0

    def while_trained(self) -> Call:
        """What it is while the weight trains, which may be frozen now."""
        return self if self.to.trained is None else self._replace(to=self.to.trained)


class Latest:
    """What a linear left for the next one, outside of compiled graphs."""

    x: ClassVar[tuple[Any, ...] | None] = None  # an x, a key, and its copies
    # What this rank has of an x for grad_weight, its version, and that of all ranks.
    x_grad: ClassVar[tuple[Tensor, int, Any] | None] = None
    backward: ClassVar[Operation | None] = None  # what the backward of this forward is called


def rows_of(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def shard_of_x(x: Tensor, call: Call) -> Shard:
    assert call.x_dim is not None
    return _shard(x.shape, call.x_dim, _ops.INPUT)


def whole_shape(shape: Sequence[int], dim: int, ranks: int) -> list[int]:
    whole = list(shape)
    whole[dim] *= ranks
    return whole


def _shard(shape: torch.Size, dim: int, operand: int) -> Shard:
    """Describes the rows of a tensor of that shape on this rank, whose dimension `dim` is shared."""
    return Shard(operand, math.prod(shape[:-1]), shape[-1], math.prod(shape[:dim]))


def reduce_scatter(whole: Tensor, outer: int, to: Sharing) -> Tensor:
    """Returns this rank's rows of the sum over ranks, in the tensor's type."""
    rows = operands.shared_rows(whole, outer, to)
    reduced = torch.ops._c10d_functional.reduce_scatter_tensor(
        rows.contiguous(), "sum", to.ranks, to.group
    )
    return operands.wait(reduced)


def overlaps(run: int, like: Tensor, call: Call) -> bool:
    """Tells whether a tensor is gathered, or scattered, by chunks of such runs of rows."""
    return call.overlap and call.to.ranks > 1 and async_tensor_parallel.pays(run, like)


def reading(to: Sharing, read: int) -> int:
    """Returns the config of a GEMM in high precision whose backward reads so much."""
    return to.rules.high_precision & ~(recipes.READS_X | recipes.READS_WEIGHT) | read


def gathered_copy(gemm: int, like: Tensor, weight: Tensor, call: Call) -> Copy:
    """Returns the copy of a weight that FSDP gathered; a gradient comes after what it is `like`."""
    granularity = call.to.rules.granularities[_ops.WEIGHT][gemm]
    return Copy(*weight_copy(gemm, like, weight, like.dtype, granularity))


def hp_backward(
    dy: Tensor, x: Tensor | None, weight: Tensor, reads: int, wanted: int, to: Sharing
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes gradients in high precision: bit 0 of `wanted` is dx, 1 dw, 2 db."""
    config = reading(to, reads) | (recipes.BIAS if wanted & 4 else 0)
    saved = dy.new_empty((0,), dtype=torch.uint8)
    return _ops.linear_backward(  # type: ignore[no-any-return]
        rows_of(dy), saved, x, None, weight, None, None, config, 0, wanted
    )


def bias_grad(dy: Tensor, weight: Tensor, by_tokens: bool, to: Sharing) -> Tensor:
    if not by_tokens:
        return hp_backward(dy, None, weight, 0, 4, to)[2]
    sums = rows_of(dy).sum(0, dtype=torch.float32)
    sums = operands.wait(torch.ops._c10d_functional.all_reduce(sums, "sum", to.group))
    return sums.to(weight.dtype)


def slot_of(scales: Tensor | None, call: Call) -> Slot | None:
    return None if scales is None else Slot(scales, call.layout, call.first)


def cast_again(
    x: Tensor | None, weight: Tensor, dtype: torch.dtype, scales: Tensor | None, call: Call
) -> list[Any]:
    """Returns qt of x, where the weight trains, and, where forward cast the weight, of the weight."""
    shares = []
    if x is not None:
        shares.append(Share(rows_of(x.detach()), _ops.INPUT, call.x_share_dim()))
    if not call.gathered:
        shares.append(Share(weight.detach().to(dtype), _ops.WEIGHT, call.dim))
    return [qt for _, qt in operands.cast(shares, call.to, True, slot_of(scales, call))]


def _cast_own_grad(dy: Tensor, scales: Tensor | None, dim: int | None, call: Call) -> Any:
    """Returns q and qt of what this rank has of dy, whose dimension `dim` ranks share."""
    share = Share(rows_of(dy), _ops.GRAD_OUTPUT, dim)
    ((q, qt),) = operands.cast([share], call.to, True, slot_of(scales, call))
    return q, qt


def run_of_dy(dy: Tensor, call: Call) -> int:
    return math.prod(dy.shape[call.y_dim : -1])


def _shard_of_dy(dy: Tensor, call: Call) -> Shard:
    assert call.y_dim is not None
    shard = _shard(dy.shape, call.y_dim, _ops.GRAD_OUTPUT)
    operands.check_runs(shard.rows // shard.outer, _ops.GRAD_OUTPUT, call.to)
    return shard


def cast_grad(dy: Tensor, scales: Tensor | None, by_tokens: bool, call: Call) -> Any:
    """Returns q and qt of dy: of this rank's columns, or of all columns and tokens."""
    if not by_tokens:
        return _cast_own_grad(dy, scales, 1 if call.dim == 0 else None, call)
    q, qt = _cast_own_grad(dy, scales, 0, call)
    return operands.gather_both(q, qt, _shard_of_dy(dy, call), call.to)


def dx_of_gathered(
    gemm: Gemm, dy: Tensor, scales: Tensor | None, by_tokens: bool, call: Call
) -> Any:
    """Returns dx, and for grad_weight qt of the whole dy, or without `by_tokens` the whole dy in high precision."""
    to = call.to
    q, qt = _cast_own_grad(dy, scales, 0, call)
    shard = _shard_of_dy(dy, call)
    if by_tokens and qt is None:
        return gemm.of_gathered(q, shard)[0], None, dy
    if to.rules.one_copy[_ops.GRAD_OUTPUT]:
        dx, gathered = gemm.of_gathered(q, shard, keep=True)
        return dx, operands.transposed(operands.whole_q(gathered, q, shard, to), shard), dy
    if qt is not None:
        dx, gathered = gemm.of_gathered(q, shard, operands.parts_of_qt(qt, shard, to))
        return dx, operands.whole_qt(gathered, qt, shard, to), dy
    dx, gathered = gemm.of_gathered(q, shard, [dy.contiguous()])
    assert call.y_dim is not None
    return dx, None, _in_order(gathered[0], dy.shape, call.y_dim, to)


def whole_hp(x: Tensor, dim: int, to: Sharing) -> Tensor:
    """Gathers a tensor that is shared by tokens, in high precision."""
    return _in_order(operands.wait(operands.start_gather(x, to)), x.shape, dim, to)


def _in_order(gathered: Tensor, shape: Sequence[int], dim: int, to: Sharing) -> Tensor:
    """Returns the whole tensor of parts of that shape, which lie one after the other."""
    rows = operands.whole_rows(gathered.view(-1, shape[-1]), math.prod(shape[:dim]), to)
    return rows.view(whole_shape(shape, dim, to.ranks))


def scatter_dx(dx: Tensor, x_shape: Sequence[int], call: Call) -> Tensor:
    outer = math.prod(x_shape[: call.x_dim])
    return reduce_scatter(rows_of(dx), outer, call.to).view(tuple(x_shape))


class GatheredX:
    """What grad_weight needs of x: qt of all tokens, or all of x in high precision.

    own: what this rank has of it. Its gather is started here, or overlaps with the GEMM of dx, whose
        caller sets `gathered`.
    beside: that is how it should be gathered. In a compiled graph the gathers of all linears of one x
        are one collective.
    """

    def __init__(self, x: Tensor | None, qt: Copy | None, shape: Sequence[int], call: Call) -> None:
        self.x, self.qt, self.to = x, qt, call.to
        self.dim = call.x_dim
        self.own: list[Tensor] = []
        self.gathered: list[Tensor] = []
        self.started: list[Tensor] = []
        self.tokens = math.prod(shape[:-1]) * (call.to.ranks if call.gathers else 1)
        self.beside = False
        if self.dim is None:
            return
        own = list(shape)
        own[self.dim] //= 1 if call.gathers else call.to.ranks
        self.shape = torch.Size(own)
        self.shard = _shard(self.shape, self.dim, _ops.INPUT)
        self.known = self._latest()
        if self.known is not None:
            return
        if not call.to.rules.is_fp8(operands.GRAD_WEIGHT):
            assert x is not None
            self.own = [x.contiguous()]
        else:
            assert qt is not None
            self.own = operands.parts_of_qt(qt, self.shard, call.to)
        shared = torch.compiler.is_compiling() and (call.leaves or not call.gathers)
        run = self.shard.rows // self.shard.outer
        self.beside = not shared and overlaps(run, self.own[0], call)

    def _own(self) -> Any:
        """Returns this rank's tensor, by which linears of one x know each other."""
        fp8 = self.to.rules.is_fp8(operands.GRAD_WEIGHT)
        return self.qt.data if fp8 and self.qt is not None else self.x

    def _latest(self) -> Any:
        """Returns what another linear of this x has gathered."""
        latest = None if torch.compiler.is_compiling() else Latest.x_grad
        if latest is None:
            return None
        own, version, whole = latest
        found = self._own()
        same = own.data_ptr() == found.data_ptr() and version == found._version
        return whole if same and own.shape == found.shape else None

    def start(self) -> None:
        self.started = operands.start_gathers(self.own, self.to)

    def finish(self) -> tuple[Any, Any]:
        """Returns qt and x of all tokens, of which one is None."""
        if self.dim is None:
            return self.qt, self.x
        whole = self.known
        fp8 = self.to.rules.is_fp8(operands.GRAD_WEIGHT)
        if whole is None:
            gathered = operands.wait_all(self.started) if self.started else self.gathered
            if fp8:
                assert self.qt is not None
                whole = operands.whole_qt(gathered, self.qt, self.shard, self.to)
            else:
                whole = _in_order(gathered[0], self.shape, self.dim, self.to)
            if not torch.compiler.is_compiling():
                own = self._own()
                Latest.x_grad = (own, own._version, whole)
        return (whole, None) if fp8 else (None, whole)
