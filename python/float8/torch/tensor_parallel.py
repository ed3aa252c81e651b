"""Tensor and sequence parallelism: linears whose weight is a DTensor that ranks share.

The weight is shared by rows (Shard(0), column-wise parallel) or by columns (Shard(1), row-wise
parallel). Each rank computes with its part of each operand in fp8, whose scales are the whole
operand's:

            x                      w         y              dy                     dx
Shard(0)    whole, or by tokens    rows      columns        columns                partial sums
Shard(1)    columns                columns   partial sums   whole, or by tokens    columns

What is shared by tokens is cast before it is gathered.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.nn import functional

from float8 import recipes
from float8.torch import _ops
from float8.torch import sharded_operands as operands
from float8.torch.sharded_operands import Copy, Shard, Share, Sharing, Slot

if TYPE_CHECKING:
    from float8.torch.linear import Float8Linear


class Call(NamedTuple):
    """What forward and backward of a linear know beside tensors."""

    to: Sharing
    dim: int  # of the weight, which ranks share
    x_dim: int | None  # of x, which ranks share by tokens
    y_dim: int | None  # of y, likewise
    layout: int  # of the scale state, with delayed scaling
    first: bool  # its first step
    recompute: bool  # backward casts x and the weight again

    @property
    def x_share_dim(self) -> int | None:
        """The dimension of the matrix x that ranks share."""
        return 1 if self.dim == 1 else None if self.x_dim is None else 0


def linear(layer: Float8Linear, input: Any, source: Any) -> Any:
    """Computes a Float8Linear whose weight is a DTensor.

    source: the DTensor that the layer was called with, before any change of type.
    """
    weight: Any = layer.weight
    dim, to = sharing_of(layer, weight)
    if not isinstance(input, DTensor):
        raise ValueError(
            "float8: the weight is a DTensor and x is not; parallelize the layer with a style that "
            "makes x a DTensor, such as ColwiseParallel"
        )
    mesh = weight.device_mesh
    last = input.dim() - 1
    x_dim = None
    at = input.placements[0]
    if dim == 1:
        if not at.is_shard(last):
            input = input.redistribute(mesh, [ShardPlacement(last)])
        x = input.to_local()
    elif isinstance(at, ShardPlacement) and at.dim < last and to.rules.is_fp8(operands.OUTPUT):
        x, x_dim = input.to_local(), at.dim
        _check_tokens(input.shape[x_dim], to)
    else:
        if not at.is_replicate():
            input = input.redistribute(mesh, [Replicate()])
        x = input.to_local(grad_placements=[Partial()])
    y_dim = layer._output_dim if dim == 1 else None
    if y_dim is not None:
        y_dim %= input.dim()
        if y_dim < last:
            _check_tokens(input.shape[y_dim], to)
        else:
            y_dim = None
    scales = layer._scale_view
    first = layer._scales is not None and layer._scales._is_first
    call = Call(to, dim, x_dim, y_dim, layer._layout, first, layer.recompute)
    bias: Any = layer.bias
    local_bias = None if bias is None else bias.to_local()
    y = _local_linear(layer, source, x, weight.to_local(), local_bias, scales, call)
    if dim == 0:
        return DTensor.from_local(y, mesh, [ShardPlacement(last)], run_check=False)
    out = Partial() if y_dim is None else ShardPlacement(y_dim)
    return DTensor.from_local(y, mesh, [out], run_check=False)


def _local_linear(
    layer: Float8Linear,
    source: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    call: Call,
) -> Tensor:
    """Computes this rank's part of y from its parts of x and the weight."""
    if x.numel() == 0:
        return _empty(x, weight, bias, call)
    save = torch.is_grad_enabled() and (
        weight.requires_grad or x.requires_grad or (bias is not None and bias.requires_grad)
    )
    slot = _slot(scales, call)
    share = Share(weight.detach().to(x.dtype), _ops.WEIGHT, call.dim, _weight_words(layer, x.dtype))
    whole, x_copies, w_copies = _copies(source, x, share, save, slot, call)
    shard = x.detach() if call.x_dim is not None and _keeps_x(call) else None
    tensors = (*_flat(x_copies), *_flat(w_copies))
    if save:
        y: Tensor = _apply(whole, weight, bias, shard, scales, call, *tensors)
        return y
    return _forward(whole, weight, bias, call, *tensors)


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


def _copies(
    source: Any, x: Tensor, w_share: Share, save: bool, slot: Slot | None, call: Call
) -> tuple[Tensor, operands.Copies, operands.Copies]:
    """Returns what the linear sees as x, and the copies of x and of the weight.

    Where ranks share x by tokens, it sees a tensor of the whole x's shape without values, and q is
    the whole x's. The first linear that reads an x leaves its copies there for the others (query, key
    and value), but for delayed scaling, where each linear records amaxes of its own.
    """
    to = call.to
    key = _sharing_key(source, x, save, call) if slot is None else None
    if (left := _find_left(source, key)) is not None:
        (w_copies,) = operands.cast([w_share], to, save, slot)
        return left[0], left[1], w_copies
    x_share = Share(_rows(x.detach()), _ops.INPUT, call.x_share_dim)
    (q, qt), w_copies = operands.cast([x_share, w_share], to, save, slot)
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
        y = operands.gemm(operands.OUTPUT, xq, wq, x.shape[-1], x, to, typed)
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
        saved = (None,) * 4 if call.recompute else (*tensors[2:4], *tensors[6:8])
        ctx.save_for_backward(weight, kept, scales, *saved)
        return _forward(x, weight, bias, call, *tensors)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        if not torch.compiler.is_compiling():
            _Latest.x = None
        call, to = ctx.call, ctx.call.to
        weight, x, scales, *saved = ctx.saved_tensors
        xqt, wqt = _pair(*saved[:2]), _pair(*saved[2:])
        if call.recompute:
            xqt, wqt = _cast_again(x, weight, scales, call)
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
            dx = operands.gemm(operands.GRAD_INPUT, dyq, wqt, weight.shape[0], dy, to, None)
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
    """Returns qt of x and of the weight, as forward had them."""
    shares = [
        Share(_rows(x.detach()), _ops.INPUT, call.x_share_dim),
        Share(weight.detach().to(x.dtype), _ops.WEIGHT, call.dim),
    ]
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


# Layers


def sharing_of(layer: Float8Linear, weight: Any) -> tuple[int, Sharing]:
    """Returns the weight's dimension that ranks share, and how (ValueError)."""
    mesh, placements = weight.device_mesh, weight.placements
    known = layer._sharing
    if known is not None and known[0] == (mesh, placements, layer._config):
        return known[1], known[2]
    if len(placements) != 1 or not (placements[0].is_shard(0) or placements[0].is_shard(1)):
        raise ValueError(
            f"float8: a weight is a DTensor with placements {placements}; a linear in fp8 has "
            "Shard(0) or Shard(1) on one dimension of a mesh"
        )
    dim = placements[0].dim
    check(layer, dim, mesh.size())
    to = Sharing(layer._rules, mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())
    layer._sharing = ((mesh, placements, layer._config), dim, to)
    return dim, to


def check(layer: Float8Linear, dim: int, ranks: int) -> None:
    """Raises ValueError, with the layer's name, where ranks cannot share its weight."""
    name = f"layer {layer._layer_name!r}" if layer._layer_name else "a Float8Linear"
    extent, what = (
        (layer.out_features, "out_features") if dim == 0 else (layer.in_features, "in_features")
    )
    blocks = layer._rules.has_blocks
    multiple = operands.BLOCK if blocks else 16
    if extent % (ranks * multiple) != 0 or layer._padding:
        why = "whole blocks of 128" if blocks else "multiples of 16"
        raise ValueError(
            f"float8: {name} has {what} {extent}, which {ranks} ranks cannot share in {why}; leave "
            "it out of the parallelize plan, or out of the conversion"
        )
    if layer._rules.mixed:
        raise ValueError(
            f"float8: {name} has a custom recipe with delayed and other casts; tensor parallelism is "
            "for delayed scaling of all operands, or of none"
        )
    if layer.enable_fsdp_float8_all_gather:
        raise ValueError(
            f"float8: {name} has enable_fsdp_float8_all_gather, which is for weights that "
            "fully_shard alone shards; convert the model without it"
        )


def _check_tokens(tokens: int, to: Sharing) -> None:
    if tokens % to.ranks != 0:
        raise ValueError(
            f"float8: {to.ranks} ranks cannot share a sequence of {tokens} evenly; pad it"
        )


def _version(weight: Any, dtype: torch.dtype) -> tuple[Any, ...]:
    local = weight._local_tensor
    return id(weight), weight._version, id(local), local._version, dtype


def _weight_words(layer: Float8Linear, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Returns the maxima that `find_weight_words` left, None where the weight has changed since."""
    known = layer._weight_words
    if known is None or torch.compiler.is_compiling():
        return None
    return known[1] if known[0] == _version(layer.weight, dtype) else None


@torch.no_grad()
def find_weight_words(layers: list[Float8Linear]) -> None:
    """Finds the maxima of the layers' weights over ranks, in one all-reduce for each group.

    A weight that FSDP shards too is left to its forwards, which find them with those of x.
    """
    groups: dict[Sharing, list[tuple[Float8Linear, Share]]] = {}
    for layer in layers:
        weight: Any = layer.weight
        if len(weight.placements) != 1:
            continue
        dim, to = sharing_of(layer, weight)
        share = Share(weight._local_tensor.detach(), _ops.WEIGHT, dim)
        if not to.rules.delayed and operands.spans_ranks(share, to):
            groups.setdefault(to, []).append((layer, share))
    for to, own in groups.items():
        found = operands.find_words([share for _, share in own], to)
        for (layer, _), words in zip(own, found, strict=True):
            layer._weight_words = (_version(layer.weight, layer.weight.dtype), words)
