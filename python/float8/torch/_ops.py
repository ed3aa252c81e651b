"""The ops of torch.ops.float8, their fake kernels, and their gradient.

The schemas are in _schemas.py, and the kernels in the shim (python/shim/ops.cpp), which is loaded
here.
"""

from __future__ import annotations

import functools
import pathlib
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch.autograd.function import once_differentiable

from float8 import recipes
from float8.torch import _schemas as _schemas

torch.ops.load_library(  # type: ignore[no-untyped-call]
    str(pathlib.Path(__file__).parent.parent / "_C.so")
)

quantize = torch.ops.float8.quantize.default
quantize_again = torch.ops.float8.quantize_again.default
quantize_rms_norm = torch.ops.float8.quantize_rms_norm.default
quantize_rms_norm_again = torch.ops.float8.quantize_rms_norm_again.default
quantize_swiglu = torch.ops.float8.quantize_swiglu.default
quantize_swiglu_backward = torch.ops.float8.quantize_swiglu_backward.default
cast_weight = torch.ops.float8.cast_weight.default
quantize_list = torch.ops.float8.quantize_list.default
quantize_amax = torch.ops.float8.quantize_amax.default
quantize_shard = torch.ops.float8.quantize_shard.default
quantize_amax_list = torch.ops.float8.quantize_amax_list.default
quantize_shard_list = torch.ops.float8.quantize_shard_list.default
gemm_into = torch.ops.float8.gemm_into.default
linear_forward = torch.ops.float8.linear_forward.default
linear_backward = torch.ops.float8.linear_backward.default
ROWS = 512  # kRows of python/shim/plans.hpp
INPUT, WEIGHT, GRAD_OUTPUT = range(3)  # float8_operand of float8.h
BOTH_COPIES, Q_ALONE, QT_ALONE = range(3)  # float8_copies
ELEMENT_TYPES = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 2}  # float8_dtype
WEIGHT_STATE_BYTES = 64  # kWeightStateBytes of python/shim/casts.hpp


def of_autocast(x: torch.Tensor) -> torch.Tensor:
    """Returns x in autocast's type where it is on."""
    device = "cuda" if x.is_cuda else x.device.type
    if not x.is_meta and torch.is_autocast_enabled(device):
        return x.to(torch.get_autocast_dtype(device))
    return x


def copies_of(transposed: bool) -> int:
    """Returns the copies of a cast, as float8_copies has them."""
    return BOTH_COPIES if transposed else Q_ALONE


@functools.cache
def _saved_bytes(n: int, k: int, config: int, x_given: bool, w_given: bool) -> tuple[int, int]:
    """Returns base and step: a buffer for M rows has base + step * ceil(M / ROWS) bytes."""
    one, two = (
        torch.ops.float8.saved_bytes(m, n, k, config, x_given, w_given) for m in (ROWS, 2 * ROWS)
    )
    return 2 * one - two, two - one


@functools.cache
def _quantized_bytes(
    cols: int, config: int, operand: int, backward: bool
) -> tuple[tuple[int, int], ...]:
    """Returns the same for q and for qt of an input or a gradient."""
    one, two = (
        torch.ops.float8.quantized_bytes(m, cols, config, operand, backward)
        for m in (ROWS, 2 * ROWS)
    )
    return tuple((2 * a - b, b - a) for a, b in zip(one, two, strict=True))


def _blocks(x: torch.Tensor) -> int:
    return (x.numel() // x.shape[-1] + ROWS - 1) // ROWS


@torch.library.register_fake("float8::quantize")  # type: ignore[untyped-decorator]
def _fake_quantize(
    x: torch.Tensor,
    config: int,
    operand: int,
    backward: bool,
    scales: torch.Tensor | None = None,
    layout: int = 0,
    evaluate: bool = False,
) -> tuple[torch.Tensor, ...]:
    if operand == WEIGHT:
        rows, cols = map(int, x.shape)
        sizes = torch.ops.float8.quantized_bytes(rows, cols, config, operand, backward)
    else:
        blocks = _blocks(x)
        parts = _quantized_bytes(int(x.shape[-1]), config, operand, backward)
        sizes = tuple(base + step * blocks for base, step in parts)
    return tuple(x.new_empty((size,), dtype=torch.uint8) for size in sizes)


@torch.library.register_fake("float8::quantize_again")  # type: ignore[untyped-decorator]
def _fake_quantize_again(x: torch.Tensor, x_qt: torch.Tensor, config: int) -> torch.Tensor:
    _, (base, step) = _quantized_bytes(
        int(x.shape[-1]), config & ~recipes.RECOMPUTE & ~recipes.READS_X, INPUT, True
    )
    return x.new_empty((base + step * _blocks(x),), dtype=torch.uint8)


@torch.library.register_fake("float8::quantize_rms_norm")  # type: ignore[untyped-decorator]
def _fake_quantize_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    config: int,
    backward: bool,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    copies: tuple[torch.Tensor, torch.Tensor] = _fake_quantize(x, config, INPUT, backward)
    return copies


@torch.library.register_fake("float8::quantize_rms_norm_again")  # type: ignore[untyped-decorator]
def _fake_quantize_rms_norm_again(
    x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, x_qt: torch.Tensor, config: int
) -> torch.Tensor:
    copy: torch.Tensor = _fake_quantize_again(x, x_qt, config)
    return copy


@torch.library.register_fake("float8::quantize_swiglu")  # type: ignore[untyped-decorator]
def _fake_quantize_swiglu(
    gate: torch.Tensor, up: torch.Tensor, config: int, backward: bool, *_: Any, **__: Any
) -> tuple[torch.Tensor, ...]:
    if gate.shape != up.shape:
        raise ValueError(f"float8: gate has shape {tuple(gate.shape)}, up {tuple(up.shape)}")
    copies: tuple[torch.Tensor, ...] = _fake_quantize(gate, config, INPUT, backward)
    return copies


@torch.library.register_fake("float8::quantize_swiglu_backward")  # type: ignore[untyped-decorator]
def _fake_quantize_swiglu_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, config: int, *_: Any
) -> tuple[torch.Tensor, ...]:
    if not gate.shape == up.shape == grad.shape:
        shapes = ", ".join(str(tuple(each.shape)) for each in (grad, gate, up))
        raise ValueError(f"float8: grad, gate and up have the shapes {shapes}")
    copies: tuple[torch.Tensor, ...] = _fake_quantize(gate, config, GRAD_OUTPUT, True)
    return (*copies, *(torch.empty_like(copy) for copy in copies))


@torch.library.register_fake("float8::cast_weight")  # type: ignore[untyped-decorator]
def _fake_cast_weight(*_: Any) -> None:
    pass


@torch.library.register_fake("float8::quantize_amax")  # type: ignore[untyped-decorator]
def _fake_quantize_amax(
    x: torch.Tensor, config: int, operand: int, rows_max: int
) -> tuple[torch.Tensor, ...]:
    sizes = torch.ops.float8.amax_words(rows_max, int(x.shape[-1]), config, operand)
    return tuple(x.new_empty((size,), dtype=torch.int32) for size in sizes)


@torch.library.register_fake("float8::quantize_shard")  # type: ignore[untyped-decorator]
def _fake_quantize_shard(
    x: torch.Tensor,
    amax: torch.Tensor,
    row_amax: torch.Tensor,
    config: int,
    operand: int,
    rows_max: int,
) -> tuple[torch.Tensor, ...]:
    rows = -(-rows_max // 16) * 16
    sizes = torch.ops.float8.quantized_bytes(rows, int(x.shape[-1]), config, operand, True)
    return tuple(x.new_empty((size,), dtype=torch.uint8) for size in sizes)


@torch.library.register_fake("float8::quantize_amax_list")  # type: ignore[untyped-decorator]
def _fake_quantize_amax_list(
    x: list[torch.Tensor],
    config: list[int],
    operand: int,
    rows_max: list[int],
    whole_rows: Sequence[int] = (),
    first_rows: Sequence[int] = (),
    dtypes: Sequence[int] = (),
) -> tuple[torch.Tensor, ...]:
    wholes = whole_rows or [0] * len(x)
    words = [
        torch.ops.float8.amax_words(rows, int(each.shape[-1]), bits, operand, whole)
        for each, bits, rows, whole in zip(x, config, rows_max, wholes, strict=True)
    ]
    return tuple(
        x[0].new_empty((sum(sizes),), dtype=torch.int32) for sizes in zip(*words, strict=True)
    )


@torch.library.register_fake("float8::quantize_shard_list")  # type: ignore[untyped-decorator]
def _fake_quantize_shard_list(
    x: list[torch.Tensor],
    amax: list[torch.Tensor],
    row_amax: list[torch.Tensor],
    config: list[int],
    operand: int,
    rows_max: list[int],
    whole_rows: Sequence[int] = (),
    first_rows: Sequence[int] = (),
    dtypes: Sequence[int] = (),
    into: Sequence[torch.Tensor] | None = None,
    copies: Sequence[int] = (),
) -> list[torch.Tensor]:
    made: list[torch.Tensor] = []
    if into is not None:
        return made
    if any(copies):
        raise NotImplementedError("float8: casts of shards into one copy are not traced")
    wholes = whole_rows or [0] * len(x)
    for each, bits, rows, whole in zip(x, config, rows_max, wholes, strict=True):
        if whole:
            cols = int(each.shape[-1])
            sizes = torch.ops.float8.quantized_bytes(rows, cols, bits, operand, True, whole)
            made += [each.new_empty((size,), dtype=torch.uint8) for size in sizes]
        else:
            made += _fake_quantize_shard(each, amax[0], row_amax[0], bits, operand, rows)
    return made


@torch.library.register_fake("float8::quantize_list")  # type: ignore[untyped-decorator]
def _fake_quantize_list(
    x: list[torch.Tensor],
    config: int,
    operand: int,
    scales: list[torch.Tensor],
    layout: int,
    dtypes: Sequence[int] = (),
    into: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    if into is not None:
        return []
    return [copy for each in x for copy in _fake_quantize(each, config, operand, True)]


@torch.library.register_fake("float8::gemm_into")  # type: ignore[untyped-decorator]
def _fake_gemm_into(*_: Any) -> None:
    pass


@torch.library.register_fake("float8::linear_forward")  # type: ignore[untyped-decorator]
def _fake_forward(
    x: torch.Tensor,
    x_q: torch.Tensor | None,
    x_qt: torch.Tensor | None,
    weight: torch.Tensor,
    w_q: torch.Tensor | None,
    w_qt: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    config: int,
    layout: int,
    save: bool,
    w_scales: torch.Tensor | None = None,
    w_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    n, k = weight.shape
    if x.shape[-1] != k:
        raise ValueError(f"float8: x has shape {tuple(x.shape)}, the weight {(n, k)}")
    if x.device != weight.device:  # a weight on meta comes here
        raise ValueError(f"float8: x is on {x.device}, the weight on {weight.device}")
    size = 0
    if save:
        x_given = x_q is not None or x_qt is not None
        w_given = w_q is not None or w_qt is not None
        base, step = _saved_bytes(int(n), int(k), config, x_given, w_given)
        size = base + step * _blocks(x)
    y = x.new_empty((*x.shape[:-1], n))
    return y, x.new_empty((size,), dtype=torch.uint8)


def _install_pass() -> None:
    """Adds the pass of shared_casts.py to torch.compile's where that is what traces."""
    if "torch._inductor.config" in sys.modules:
        from float8.torch import shared_casts  # it loads the compiler, which takes a while

        shared_casts.install()


@torch.library.register_fake("float8::linear_backward")  # type: ignore[untyped-decorator]
def _fake_backward(
    dy: torch.Tensor,
    saved: torch.Tensor,
    x: torch.Tensor | None,
    x_qt: torch.Tensor | None,
    weight: torch.Tensor,
    w_qt: torch.Tensor | None,
    scales: torch.Tensor | None,
    config: int,
    layout: int,
    wanted: int,
    w_scales: torch.Tensor | None = None,
    w_shards: int = 1,
    dy_q: torch.Tensor | None = None,
    dy_qt: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _install_pass()
    n, k = weight.shape
    dx = dy.new_empty((*dy.shape[:-1], k) if wanted & 1 else (0,))
    dw = weight.new_empty((n, k) if wanted & 2 else (0, 0))
    db = weight.new_empty((n,) if wanted & 4 else (0,))
    return dx, dw, db


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
    config &= ~recipes.BIAS
    key = (source._version, x.dtype, config, save, _place(x))
    latest = SharedInput.latest
    if latest is not None and latest.x() is source and latest.key == key:
        if latest.q is None and (first := latest.owner()) is not None:
            first.shares_input = True
        return latest.q, latest.qt
    latest = SharedInput.latest = SharedInput(owner, source, key)
    if owner.shares_input:
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
    q, qt = quantize(x.detach(), config, INPUT, save)
    return q, qt if save else None


def _gathered(weight: Any) -> bool:
    """Tells whether a weight is FSDP's GatheredWeight, which needs no dispatch to be understood."""
    return not torch.compiler.is_compiling() and hasattr(weight, "forward_of_linear")


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
        if _gathered(weight):
            y, saved = weight.forward_of_linear(x, x_q, x_qt, bias, scales, config, layout, True)
        else:
            y, saved = linear_forward(
                x, x_q, x_qt, weight, w_q, w_qt, bias, scales, config, layout, True, None, w_state
            )
        kept = x if config & recipes.READS_X else None
        ctx.save_for_backward(saved, weight, kept, x_qt, w_qt, scales)
        ctx.config = config
        ctx.layout = layout
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        if not torch.compiler.is_compiling():
            SharedInput.latest = None
        saved, weight, x, x_qt, w_qt, scales = ctx.saved_tensors
        want_x, want_weight, want_bias, *_ = ctx.needs_input_grad
        if torch.compiler.is_compiling() and x is not None and want_weight:
            # AOTAutograd keeps an x between forward and backward that it could compute again if an op
            # reads it there that it cannot fuse. Conversions it can; Inductor takes out these two,
            # one before that choice is made and the other after it, and a clone too early.
            x = x.float().to(x.dtype)
        wanted = want_x | want_weight << 1 | want_bias << 2
        rest = (scales, ctx.config, ctx.layout, wanted)
        if _gathered(weight):
            dx, dw, db = weight.backward_of_linear(dy, saved, x, x_qt, *rest)
        else:
            dx, dw, db = linear_backward(dy, saved, x, x_qt, weight, w_qt, *rest)
        return (
            dx if want_x else None,
            dw if want_weight else None,
            db if want_bias else None,
            *(None,) * 8,
        )


def refuse(x: torch.Tensor, weight: torch.Tensor, words: str = "") -> None:
    """Raises ValueError where a linear failed for its operands; `words` begin with the layer's name.

    It comes after a failure, so that calls which succeed pay nothing. An op says less: it knows no
    layer, and PyTorch 2.15 makes a RuntimeError of all that an op raises.
    """
    for name, each in (("x", x), ("the weight", weight)):
        if each.dtype not in ELEMENT_TYPES:
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
    save = torch.is_grad_enabled() and (
        weight.requires_grad or x.requires_grad or (bias is not None and bias.requires_grad)
    )
    x_q = x_qt = None
    w_q, w_qt, w_state = weight_cast or (None, None, None)
    if owner is not None:
        if torch.compiler.is_compiling():
            x_q, x_qt = _quantize_input(x, config & ~recipes.BIAS, save)
        elif source is not None and not source.is_inference() and not _is_checkpointed():
            x_q, x_qt = _share(owner, source, x, config, save)
    if save:
        return _apply(  # type: ignore[no-any-return]
            x, weight, bias, scales, config, layout, x_q, x_qt, w_q, w_qt, w_state
        )
    y: torch.Tensor = linear_forward(
        x, x_q, x_qt, weight, w_q, w_qt, bias, scales, config, layout, False, None, w_state
    )[0]
    return y
