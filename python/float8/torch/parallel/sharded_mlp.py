"""An MLP whose linears ranks share, down(activation(gate(x)) up(x)) or down(activation(up(x))), as one function.

A rank has rows of gate and up, and columns of down: so it has columns of h, which the activation makes, and of the
gradients of gate and up. These are cast to fp8 as they are computed. Where their scales are those of tensors or of
rows, maxima span ranks, and one launch finds them, an all-reduce is next, and another launch casts. The linears are
those of sharded_linear.py, to their bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.torch import _ops
from float8.torch.contexts import (
    keep_parts,
    once_differentiable,
    parts_kept,
    wanted_grads,
    wants_gradient,
)
from float8.torch.parallel import sharded_grads as grads
from float8.torch.parallel import sharded_linear as linears
from float8.torch.parallel import sharded_operands as operands
from float8.torch.parallel.sharded_grads import Call
from float8.torch.parallel.sharded_operands import Copies, Share, Sharing, Slot
from float8.torch.ranks import collectives


class Part(NamedTuple):
    """What this rank has of a linear."""

    weight: Tensor
    bias: Tensor | None
    scales: Tensor | None  # of a scale state, for delayed scaling
    call: Call

    def slots(self) -> list[Slot]:
        """The scales that its casts have; torch.compile of PyTorch 2.10 takes no property of a tuple."""
        slot = grads.slot_of(self.scales, self.call)
        return [] if slot is None else [slot]


def mlp(
    x: Tensor, x_of_up: Tensor | None, shared: bool, parts: Sequence[Part], activation: int
) -> Tensor:
    """Computes this rank's part of y from its part of x.

    x_of_up: up's own x, of the same values, where its gradient goes another way than gate's.
    shared: gate and up have one x, as linears that are called with one DTensor do: it is gathered once, and
        their dx are added before they are scattered.
    parts: gate, up and down, or up and down.
    activation: one of _ops.ACTIVATIONS.
    """
    tensors = (x, x_of_up, *(each for part in parts for each in part[:2]))
    save = wants_gradient(*tensors)
    if parts[0].call.x_dim is not None:
        parts = _gathering(x, parts, shared)
    x_copies, w_copies = _cast(x.detach(), parts, save)
    copies = [each for pair in (*x_copies, *w_copies) for each in linears.flat(pair)]
    flat = [each for part in parts for each in part[:3]]
    *before, down = (part.call for part in parts)
    calls = (before[0], before[1] if len(before) == 2 else None, down)
    if not save:
        return _forward(x, activation, _linears(calls, [*flat, *copies]), False)[0]
    return _apply(x, x_of_up, shared, activation, *calls, *flat, *copies)  # type: ignore[no-any-return]


def _gathering(x: Tensor, parts: Sequence[Part], shared: bool) -> list[Part]:
    """Says how the linears that read x gather it."""
    first, *others = parts
    result = [first._replace(call=linears.gathering(x, first.call, shared and len(others) == 2))]
    for part in others[:-1]:  # up reads what gate leaves, or gathers x itself
        call = part.call if shared else linears.gathering(x, part.call, False)
        result.append(part._replace(call=call))
    return [*result, others[-1]]


def _cast(x: Tensor, parts: Sequence[Part], save: bool) -> tuple[list[Copies], list[Copies]]:
    """Returns the copies of x, one for all that read it or with delayed scaling one for each, and of the weights."""
    of_x = Share(grads.rows_of(x), _ops.INPUT, parts[0].call.x_share_dim())
    groups = [[part] for part in parts] if parts[0].slots() else [parts]
    x_copies, w_copies = [], []
    for i, group in enumerate(groups):
        reads_x = i < len(parts) - 1  # The group of down alone does not.
        shares = [of_x] if reads_x else []
        # One copy of x is enough where all that read it are frozen.
        readers = [part.call.to for part in group[: len(parts) - 1]]
        to = next((each for each in readers if not each.is_frozen), readers[0])
        for part in group:
            if not part.call.gathered:
                weight = part.weight.detach().to(x.dtype)
                shares.append(Share(weight, _ops.WEIGHT, part.call.dim))
        slots = group[0].slots()
        found = operands.cast(shares, to, save, slots[0] if slots else None)
        if reads_x:
            x_copies.append(found.pop(0))
        for part in group:
            w_copies.append((None, None) if part.call.gathered else found.pop(0))
    if parts[0].call.x_dim is not None:
        x_copies = [linears.trimmed(each, of_x.tensor.shape[0]) for each in x_copies]
    return x_copies, w_copies


class _Linear(NamedTuple):
    """A linear with what it reads; down has no copies of x, which gate and up may have in common."""

    part: Part
    x_copies: Any
    w_copies: Copies

    def forward(self, x: Tensor, x_copies: Copies) -> Any:
        weight, bias, scales, call = self.part
        copies = (*linears.flat(x_copies), *linears.flat(self.w_copies))
        return linears.forward(x, weight, bias, None, scales, call, *copies)


def _linears(calls: Sequence[Call | None], tensors: Sequence[Any]) -> list[_Linear]:
    """Returns the linears of an MLP: `tensors` are the weight, bias and scales of each, then all copies."""
    given = [each for each in calls if each is not None]
    count = len(given)
    copies = tensors[3 * count :]
    pairs = [
        (linears.pair(*copies[i : i + 2]), linears.pair(*copies[i + 2 : i + 4]))
        for i in range(0, len(copies), 4)
    ]
    of_x, of_weights = pairs[:-count], pairs[-count:]
    if len(of_x) < count - 1:
        of_x = of_x * (count - 1)
    return [
        _Linear(Part(tensors[i], tensors[i + 1], tensors[i + 2], call), own, of_weight)
        for i, call, own, of_weight in zip(
            range(0, 3 * count, 3), given, [*of_x, None], of_weights, strict=True
        )
    ]


def _forward(
    x: Tensor, activation: int, layers: Sequence[_Linear], save: bool
) -> tuple[Tensor, Any, list[Tensor]]:
    """Returns y, qt of h, and what the activation reads."""
    *before, down = layers
    read: list[Tensor] = []
    left: Any = None
    for layer in before:
        call, copies, own = layer.part.call, layer.x_copies, x
        if call.x_dim is not None and not call.gathers:
            if left is None or layer.part.slots():
                left = linears.gather_q(x, copies, call)
            copies = left
            own = x.new_empty((1,)).expand(grads.whole_shape(x.shape, call.x_dim, call.to.ranks))
        y = layer.forward(own, copies)
        if call.leaves:
            y, _, *gathered = y
            q = operands.whole_q(gathered, copies[0], grads.shard_of_x(x, call), call.to)
            left = q, copies[1]
        read.append(y)
    of = _activation(activation, read)
    (h_copies,), _ = cast_activation(of, down.part.call.to, save, down.part.slots())
    # A linear whose x has its copies reads the shape of x alone.
    return down.forward(read[0], h_copies), h_copies[1], read


class _MLP(torch.autograd.Function):
    """y of this rank. Between forward and backward it keeps what the activation reads, and x and h in fp8 where the
    weights that read them train."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        x_of_up: Tensor | None,
        shared: bool,
        activation: int,
        first: Call,
        second: Call | None,
        down: Call,
        *tensors: Tensor | None,
    ) -> Tensor:
        calls = (first, second, down)
        layers = _linears(calls, tensors)
        ctx.operation = None if torch.compiler.is_compiling() else grads.Latest.backward
        ctx.of = (x.shape, shared, x_of_up is not None, activation, calls, len(tensors))
        y, h_qt, read = _forward(x, activation, layers, True)
        kept: list[Tensor | None] = []
        for i, layer in enumerate(layers):
            x_qt = h_qt if layer.x_copies is None else layer.x_copies[1]
            if 0 < i < len(layers) - 1 and not layer.part.slots():
                x_qt = None  # up's is gate's
            kept += [layer.part.weight, layer.part.scales]
            kept += linears.flat((x_qt, layer.w_copies[1]))
        ctx.save_for_backward(*read, *kept)
        keep_parts(ctx, *(layer.part.scales for layer in layers))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        if not torch.compiler.is_compiling():
            grads.Latest.x = None
        if ctx.operation is not None:
            collectives.progress.begin(ctx.operation)
        x_shape, shared, apart, activation, calls, count = ctx.of
        given = [each for each in calls if each is not None]
        read, saved = _unpack(ctx.saved_tensors, len(given))
        parts = parts_kept(ctx, *(each.scales for each in saved))
        saved = [each._replace(scales=part) for each, part in zip(saved, parts, strict=True)]
        needs = wanted_grads(ctx)
        want_x = (needs[0], needs[1] if apart else needs[0])
        wanted = [needs[7 + 3 * i : 9 + 3 * i] for i in range(len(given))]
        want_h = any(want_x) or any(any(each) for each in wanted[:-1])
        dh, dw, db = linears.backward(
            dy, saved[-1], read[0].shape, given[-1], (want_h, *wanted[-1])
        )
        dx: Any = [None, None]
        of_parts: list[Any] = [None] * (3 * len(given) - 3)
        if dh is not None:
            first = list(zip(given[:-1], read, saved[:-1], strict=True))
            gradients = _activation(activation, read, grads.rows_of(dh))
            dx, of_parts = _first_gradients(gradients, first, x_shape, shared, want_x, wanted)
        if not shared and not apart and dx[1] is not None:
            dx = [dx[1] + dx[0], None]
        if not torch.compiler.is_compiling():
            grads.Latest.x_grad = None
        of_parts += [dw, db, None]
        return (*dx, *(None,) * 5, *of_parts, *(None,) * (count - len(of_parts)))


def _unpack(tensors: Sequence[Any], count: int) -> tuple[Sequence[Tensor], list[linears.Saved]]:
    """Returns what the activation of so many linears reads, and what each of them kept."""
    read, kept = tensors[: count - 1], tensors[count - 1 :]
    saved: list[linears.Saved] = []
    for i in range(count):
        weight, scales, *copies = kept[6 * i : 6 * i + 6]
        x_qt, w_qt = linears.pair(*copies[:2]), linears.pair(*copies[2:])
        if 0 < i < count - 1:
            x_qt = x_qt or saved[0].x_copy
        saved.append(linears.Saved(weight, None, scales, x_qt, w_qt))
    return read, saved


def _first_gradients(
    of: Activation,
    first: Sequence[tuple[Call, Tensor, linears.Saved]],
    x_shape: Sequence[int],
    shared: bool,
    want_x: Sequence[bool],
    wanted: Sequence[Sequence[bool]],
) -> tuple[list[Any], list[Any]]:
    """Returns the gradients of x, and those of the weights, biases and scales, of gate and up, or of up alone."""
    to = first[0][0].while_trained().to  # casts of both gradients make both copies
    slots = [grads.slot_of(saved.scales, call) for call, _, saved in first]
    want_bias = len(first) == 1 and wanted[0][1]
    copies, made = cast_activation(
        of._replace(sums=want_bias), to, True, [each for each in slots if each is not None]
    )
    dx: list[Any] = [None, None]
    of_parts: list[Any] = [None] * (3 * len(first))
    for i in reversed(range(len(first))):
        call, y, saved = first[i]
        shape = x_shape
        if call.x_dim is not None and not call.gathers:
            shape = grads.whole_shape(x_shape, call.x_dim, call.to.ranks)
        want = (want_x[i], wanted[i][0], False)
        if any(want):
            others = dx[1] if call.leaves else None
            dx[i], of_parts[3 * i], _ = linears.backward(
                y, saved, shape, call, want, others, copies[i]
            )
    if want_bias:
        weight = first[0][2].weight
        # A gathered weight has no values; its shape and type are read.
        like = of.x.new_empty((1,), dtype=weight.dtype).expand(weight.shape)
        assert made is not None
        is_sums = made.dim() == 1
        of_parts[1] = made.to(weight.dtype) if is_sums else grads.bias_grad(made, like, False, to)
    call = first[0][0]
    if shared and dx[1] is not None:
        dx = [dx[0] if call.leaves else dx[1] + dx[0], None]
    return [
        each
        if each is None or own.x_dim is None or own.gathers
        else grads.scatter_dx(each, x_shape, own)
        for each, own in zip(dx, (call, first[-1][0]), strict=True)
    ], of_parts


_apply: Any = _MLP.apply


class Activation(NamedTuple):
    """What an activation makes of this rank's columns, and with `grad` the gradients of these."""

    kind: int  # one of _ops.ACTIVATIONS
    x: Tensor  # [rows][cols], a gate where there is `up`
    up: Tensor | None = None
    grad: Tensor | None = None
    sums: bool = False  # of the columns of x's gradient are wanted, where there is no `up`


def _activation(kind: int, read: Sequence[Tensor], grad: Tensor | None = None) -> Activation:
    x, *up = map(grads.rows_of, read)
    return Activation(kind, x, up[0] if up else None, grad)


def cast_activation(
    of: Activation, to: Sharing, save: bool, slots: Sequence[Slot]
) -> tuple[list[Copies], Tensor | None]:
    """Casts what an activation makes as it is computed, with the scales of the whole tensors.

    slots: with delayed scaling that of the linear that reads it, or those of the linears that made x and up.
    Returns the copies of h, or those of the gradients of x and of up. Where the sums of columns are wanted these
    follow, in fp32, or the gradient itself where it is in memory.
    """
    operand = _ops.INPUT if of.grad is None else _ops.GRAD_OUTPUT
    share = Share(of.x, operand, 1)
    first = len(slots) > 0 and slots[0].first
    if first or (not slots and operands.spans_ranks(share, to)):
        return _cast_over_ranks(of, share, to, slots if save else ())
    config, layout, scales = to.rules.config, 0, [slot.scales for slot in slots]
    both = save and to.rules.is_fp8(operands.GRAD_WEIGHT)
    if slots:
        config, layout = to.rules.delayed, slots[0].layout
    one = scales[0] if scales else None
    sums = None
    if of.grad is None:
        buffers = _ops.quantize_activation(
            of.x, of.up, of.kind, config, both, one, layout, not save
        )
    elif of.up is None:
        *buffers, sums = _ops.quantize_activation_backward(
            of.grad, of.x, of.kind, config, of.sums, one, layout
        )
    else:
        *buffers, _ = _ops.quantize_glu_backward(
            of.grad, of.x, of.up, of.kind, config, False, scales, layout
        )
    return [
        operands.copies_in((buffers[i], buffers[i + 1]), share, config, both, False)
        for i in range(0, len(buffers), 2)
    ], sums


def _cast_over_ranks(
    of: Activation, share: Share, to: Sharing, slots: Sequence[Slot]
) -> tuple[list[Copies], Tensor | None]:
    """Casts with maxima that span ranks: those of both gradients are reduced in one all-reduce."""
    config = to.rules.config
    given = (of.x, of.up, of.grad)
    left, *found = _ops.quantize_activation_amax(*given, of.kind, config)
    count = 2 if of.up is not None and of.grad is not None else 1
    parts = [words.view(count, -1).unbind() for words in found]
    own = [(parts[0][i], parts[1][i]) for i in range(count)]
    whole = [
        operands.recorded(words, share.operand, slots[i] if slots else None)
        for i, words in enumerate(operands.whole_words(own, [share] * count, to))
    ]
    words = [torch.cat([each[i] for each in whole]) for i in range(2)]
    buffers = _ops.quantize_activation_shard(*given, left, *words, of.kind, config)
    made = None
    if of.sums:
        made = left[: of.x.numel() * of.x.element_size()].view(of.x.dtype).view(of.x.shape)
    return [
        operands.copies_in((buffers[i], buffers[i + 1]), share, config, True, True)
        for i in range(0, len(buffers), 2)
    ], made
