"""The linear of eager mode and of torch.compile: its gradient, and one cast of an x that several read."""

from __future__ import annotations

import threading
import weakref
from typing import Any, ClassVar

import torch

from float8 import recipes
from float8.torch import _ops
from float8.torch.contexts import (
    keep_parts,
    once_differentiable,
    parts_kept,
    wanted_grads,
    wants_gradient,
)


class SharedInput:
    """An x that a linear cast, for the next linear that reads the same x.

    The linears of one x (query, key and value; gate and up) follow each other. The first of them
    casts x in a call of its own once it is known that a second one comes, which is seen in the
    first step; the others take what it left. torch.compile sees equal casts itself.
    """

    __slots__ = ("key", "owner", "q", "qt", "x")

    latest: ClassVar[SharedInput | None] = None

    def __init__(self, owner: Any, x: torch.Tensor, key: tuple[Any, ...]) -> None:
        self.owner = weakref.ref(owner)
        self.x = weakref.ref(x)
        self.key = key
        self.q: torch.Tensor | None = None
        self.qt: torch.Tensor | None = None


def _place(x: torch.Tensor) -> tuple[int, ...]:
    """Returns what tells threads, streams and captured graphs apart."""
    thread = threading.get_ident()
    if not x.is_cuda:
        return (thread,)
    device = x.get_device()
    stream = torch._C._cuda_getCurrentRawStream(device)
    if torch.cuda.is_current_stream_capturing():
        return thread, stream, torch.ops.float8.capture_id(x)
    return thread, stream


def _share(
    owner: Any, source: torch.Tensor, x: torch.Tensor, config: int, save: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns x's copies where several linears read it, as far as that is known, else None.

    owner: the linear's module. source: the x that it was called with, before any change of type.
    """
    config &= ~(recipes.BIAS | recipes.FROZEN | recipes.READS_X)
    key = (source._version, x.dtype, config, _place(x))
    latest = SharedInput.latest
    first = None if latest is None else latest.owner()
    # The first linear reads x again in another forward, in which x may have other values that no version tells of,
    # as those of a buffer that a collective fills, or `.data`. Training has a backward between them.
    if latest is not None and first is not owner and latest.x() is source and latest.key == key:
        if latest.q is None and first is not None:
            first.shares_input = True
        # A linear with a frozen weight, which needs q alone, may have been the first.
        casts = save and latest.q is not None and latest.qt is None
    else:
        latest = SharedInput.latest = SharedInput(owner, source, key)
        casts = owner.shares_input
    if casts:
        latest.q, latest.qt = _quantize_input(x, config, save)
    return latest.q, latest.qt


def _is_checkpointed() -> bool:
    """Tells whether activation checkpointing runs this forward, for the first time or again.

    Both have to save the same tensors, so what was learned between them must not matter.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def _quantize_input(
    x: torch.Tensor, config: int, save: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    q, qt = _ops.quantize(x.detach(), config, _ops.INPUT, save)
    return q, qt if save else None


def _gathered(weight: Any) -> bool:
    """Tells whether a weight is FSDP's GatheredWeight, which needs no dispatch to be understood."""
    return not torch.compiler.is_compiling() and hasattr(weight, "forward_of_linear")


def call_forward(
    x: torch.Tensor,
    x_q: torch.Tensor | None,
    x_qt: torch.Tensor | None,
    weight: Any,
    w_q: torch.Tensor | None,
    w_qt: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    config: int,
    layout: int,
    save: bool,
    w_state: torch.Tensor | None,
) -> Any:
    """Calls linear_forward, of a gathered weight without a dispatch."""
    if _gathered(weight):
        return weight.forward_of_linear(x, x_q, x_qt, bias, scales, config, layout, save)
    return _ops.linear_forward(
        x, x_q, x_qt, weight, w_q, w_qt, bias, scales, config, layout, save, None, w_state
    )


def call_backward(
    dy: torch.Tensor,
    saved: torch.Tensor,
    x: torch.Tensor | None,
    x_qt: torch.Tensor | None,
    weight: Any,
    w_qt: torch.Tensor | None,
    scales: torch.Tensor | None,
    config: int,
    layout: int,
    wanted: int,
    *dy_copies: torch.Tensor,
) -> Any:
    """Calls linear_backward, of a gathered weight without a dispatch; dy_copies are q and qt of dy, or none."""
    rest = (scales, config, layout, wanted)
    if _gathered(weight):
        return weight.backward_of_linear(dy, saved, x, x_qt, *rest, *dy_copies)
    given = (None, 1, *dy_copies) if dy_copies else ()
    return _ops.linear_backward(dy, saved, x, x_qt, weight, w_qt, *rest, *given)


class LinearFunction(torch.autograd.Function):
    """y = x weight^T + bias. Between forward and backward it keeps the fp8 copies."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: Any,
        bias: torch.Tensor | None,
        scales: torch.Tensor | None,
        config: int,
        layout: int,
        x_q: torch.Tensor | None,
        x_qt: torch.Tensor | None,
        w_q: torch.Tensor | None,
        w_qt: torch.Tensor | None,
        w_state: torch.Tensor | None,
    ) -> torch.Tensor:
        y, saved = call_forward(
            x, x_q, x_qt, weight, w_q, w_qt, bias, scales, config, layout, True, w_state
        )
        kept = x if config & recipes.READS_X else None
        x_qt = None if config & recipes.FROZEN else x_qt
        ctx.save_for_backward(saved, weight, kept, x_qt, w_qt, scales)
        keep_parts(ctx, scales)
        ctx.config = config
        ctx.layout = layout
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        if not torch.compiler.is_compiling():
            SharedInput.latest = None
        saved, weight, x, x_qt, w_qt, scales = ctx.saved_tensors
        (scales,) = parts_kept(ctx, scales)
        want_x, want_weight, want_bias, *_ = wanted_grads(ctx)
        if torch.compiler.is_compiling() and x is not None and want_weight:
            x = recomputable(x)
        wanted = want_x | want_weight << 1 | want_bias << 2
        dx, dw, db = call_backward(
            dy, saved, x, x_qt, weight, w_qt, scales, ctx.config, ctx.layout, wanted
        )
        return (
            dx if want_x else None,
            dw if want_weight else None,
            db if want_bias else None,
            *(None,) * 8,
        )


def records_amaxes(scales: torch.Tensor | None) -> bool:
    """Tells whether a forward that needs no gradient records amaxes, as a frozen tower's below what trains.

    Its scales would stay those of the step before it was frozen, and clip what grows. Evaluation, which changes
    nothing, is under torch.no_grad.
    """
    return scales is not None and torch.is_grad_enabled()


def refuse(x: torch.Tensor, weight: torch.Tensor, words: str = "") -> None:
    """Raises ValueError where a linear failed for its operands; `words` begin with the layer's name.

    It comes after a failure, so that calls which succeed pay nothing. An op says less: it knows no
    layer, and PyTorch 2.15 makes a RuntimeError of all that an op raises.
    """
    for name, each in (("x", x), ("the weight", weight)):
        if each.dtype not in _ops.ELEMENT_TYPES:
            kind = str(each.dtype).removeprefix("torch.")
            raise ValueError(
                f"float8: {words}{name} is neither bfloat16, float16 nor float32, but {kind}; cast it first"
            )
    if x.dim() == 0:
        raise ValueError(f"float8: {words}x has no dimension; it has at least one dimension")
    if weight.dim() != 2:
        raise ValueError(f"float8: {words}a weight has two dimensions, this one has {weight.dim()}")
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"float8: {words}x has rows of {x.shape[-1]} elements, and the weight is {list(weight.shape)}"
        )


def recomputable(x: torch.Tensor) -> torch.Tensor:
    """Returns an x of forward for an op of backward, so that graphs of torch.compile may compute it again.

    AOTAutograd keeps an x between forward and backward that it could compute again if an op reads it there
    that it cannot fuse. Conversions it can; Inductor takes out these two, one before that choice is made and
    the other after it, and a clone too early.
    """
    return x.float().to(x.dtype)


_apply: Any = LinearFunction.apply


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    config: int,
    scales: torch.Tensor | None = None,
    layout: int = 0,
    owner: Any = None,
    source: torch.Tensor | None = None,
    weight_cast: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Computes a linear of that config (recipes.pack), with a gradient where one is wanted.

    scales: the linear's part of a scale state of that layout (scales.py), for delayed scaling.
    owner: a module with `shares_input`, where x may be cast apart, once for all linears that read
        it; `source` is then the tensor that the module was called with.
    weight_cast: the weight's kept copies in fp8 and their state (weight_casts.py).
    """
    trains = weight.requires_grad
    save = wants_gradient(x, weight, bias)
    records = save or records_amaxes(scales)
    if records and not trains:
        config = recipes.of_frozen_weight(config, scales is not None)
    trains = trains and save
    x_q = x_qt = None
    w_q, w_qt, w_state = weight_cast or (None, None, None)
    if owner is not None:
        if torch.compiler.is_compiling():
            x_q, x_qt = _quantize_input(x, config & ~recipes.BIAS, trains)
        elif source is not None and not source.is_inference() and not _is_checkpointed():
            x_q, x_qt = _share(owner, source, x, config, trains)
    if save:
        return _apply(  # type: ignore[no-any-return]
            x, weight, bias, scales, config, layout, x_q, x_qt, w_q, w_qt, w_state
        )
    y: torch.Tensor = call_forward(
        x, x_q, x_qt, weight, w_q, w_qt, bias, scales, config, layout, records, w_state
    )[0]
    return y
