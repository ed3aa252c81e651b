"""The ops of torch.ops.float8 and their fake kernels; _linear.py has the gradient of a linear.

The schemas are in _schemas.py, and the kernels in the shim (python/shim/ops.cpp), which is loaded
here.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from float8 import recipes
from float8.torch import _schemas as _schemas

if torch.__version__ < "2.10.0a0":
    raise ImportError(f"float8.torch needs PyTorch 2.10 or newer, and this is {torch.__version__}")
_SHIM = str(pathlib.Path(__file__).parent.parent / "_C.so")
torch.ops.load_library(_SHIM)  # type: ignore[no-untyped-call]

# A collection of garbage may call it while a graph is traced, which would trace an op.
forget_state = ctypes.CDLL(_SHIM).float8_forget_state
forget_state.argtypes = [ctypes.c_void_p]
forget_state.restype = None

quantize = torch.ops.float8.quantize.default
quantize_again = torch.ops.float8.quantize_again.default
quantize_rms_norm = torch.ops.float8.quantize_rms_norm.default
quantize_rms_norm_again = torch.ops.float8.quantize_rms_norm_again.default
quantize_layer_norm = torch.ops.float8.quantize_layer_norm.default
quantize_layer_norm_again = torch.ops.float8.quantize_layer_norm_again.default
quantize_activation = torch.ops.float8.quantize_activation.default
quantize_activation_again = torch.ops.float8.quantize_activation_again.default
quantize_activation_backward = torch.ops.float8.quantize_activation_backward.default
quantize_glu_backward = torch.ops.float8.quantize_glu_backward.default
quantize_merged_glu_backward = torch.ops.float8.quantize_merged_glu_backward.default
cast_weight = torch.ops.float8.cast_weight.default
quantize_list = torch.ops.float8.quantize_list.default
quantize_amax = torch.ops.float8.quantize_amax.default
quantize_shard = torch.ops.float8.quantize_shard.default
quantize_activation_amax = torch.ops.float8.quantize_activation_amax.default
quantize_activation_shard = torch.ops.float8.quantize_activation_shard.default
quantize_amax_list = torch.ops.float8.quantize_amax_list.default
quantize_shard_list = torch.ops.float8.quantize_shard_list.default
adamw = torch.ops.float8.adamw.default
rotary = torch.ops.float8.rotary.default
rms_norm = torch.ops.float8.rms_norm.default
rms_norm_backward = torch.ops.float8.rms_norm_backward.default
gemm_into = torch.ops.float8.gemm_into.default
linear_forward = torch.ops.float8.linear_forward.default
linear_backward = torch.ops.float8.linear_backward.default
ROWS = 512  # kRows of python/shim/plans/plans.hpp
INPUT, WEIGHT, GRAD_OUTPUT = range(3)  # float8_operand of float8.h
BOTH_COPIES, Q_ALONE, QT_ALONE = range(3)  # float8_copies
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu2": 3}  # float8_activation
ELEMENT_TYPES = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 2}  # float8_dtype
ALIGNMENT = 256  # kAlign of runtime/device/memory.hpp, of what a launch leaves for the next one
WEIGHT_STATE_BYTES = 64  # kWeightStateBytes of python/shim/casts/casts.hpp
NO_BYTES = torch.empty(0, dtype=torch.uint8)  # in the place of what an op is not given
FLAG_OF_WEIGHT_STATE = 12  # behind FLOAT8_FINGERPRINT_BYTES, as an int32


def of_autocast(x: torch.Tensor) -> torch.Tensor:
    """Returns x in autocast's type where it is on. Raises TypeError where x is no tensor."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"float8: a {type(x).__name__} is given for a tensor; torch.as_tensor makes one of it"
        )
    device = "cuda" if x.is_cuda else x.device.type
    if not x.is_meta and torch.is_autocast_enabled(device):
        return x.to(torch.get_autocast_dtype(device))
    return x


@functools.cache
def is_hopper(device: int) -> bool:
    """Tells whether a CUDA device has these kernels."""
    return torch.cuda.get_device_capability(device) == (9, 0)


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
    cols: int, config: int, operand: int, backward: bool, of_activation: bool = False
) -> tuple[tuple[int, int], ...]:
    """Returns the same for q and for qt of an input or a gradient; `of_activation`: of an input that is one."""
    one, two = (
        torch.ops.float8.quantized_bytes(
            m, cols, config, operand, backward, of_activation=of_activation
        )
        for m in (ROWS, 2 * ROWS)
    )
    return tuple((2 * a - b, b - a) for a, b in zip(one, two, strict=True))


_Kernel = TypeVar("_Kernel", bound=Callable[..., object])


def fake_kernel(op: str) -> Callable[[_Kernel], _Kernel]:
    """Registers what an op of float8 returns for tensors without values."""
    decorator: Callable[[_Kernel], _Kernel] = torch.library.register_fake(f"float8::{op}")
    return decorator


def _blocks(x: torch.Tensor) -> int:
    return (x.numel() // x.shape[-1] + ROWS - 1) // ROWS


@fake_kernel("quantize")
def _fake_quantize(
    x: torch.Tensor,
    config: int,
    operand: int,
    backward: bool,
    scales: torch.Tensor | None = None,
    layout: int = 0,
    evaluate: bool = False,
    of_activation: bool = False,
) -> tuple[torch.Tensor, ...]:
    if operand == WEIGHT:
        rows, cols = map(int, x.shape)
        sizes = torch.ops.float8.quantized_bytes(rows, cols, config, operand, backward)
    else:
        blocks = _blocks(x)
        parts = _quantized_bytes(int(x.shape[-1]), config, operand, backward, of_activation)
        sizes = tuple(base + step * blocks for base, step in parts)
    return tuple(x.new_empty((size,), dtype=torch.uint8) for size in sizes)


@fake_kernel("quantize_again")
def _fake_quantize_again(x: torch.Tensor, x_qt: torch.Tensor, config: int, *_: Any) -> torch.Tensor:
    _, (base, step) = _quantized_bytes(
        int(x.shape[-1]), config & ~recipes.RECOMPUTE & ~recipes.READS_X, INPUT, True
    )
    return x.new_empty((base + step * _blocks(x),), dtype=torch.uint8)


@fake_kernel("quantize_rms_norm")
def _fake_quantize_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    config: int,
    backward: bool,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    return _fake_quantize(x, config, INPUT, backward)


@fake_kernel("quantize_rms_norm_again")
def _fake_quantize_rms_norm_again(
    x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, x_qt: torch.Tensor, config: int
) -> torch.Tensor:
    return _fake_quantize_again(x, x_qt, config)


@fake_kernel("quantize_layer_norm")
def _fake_quantize_layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    config: int,
    backward: bool,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    return _fake_quantize(x, config, INPUT, backward)


@fake_kernel("quantize_layer_norm_again")
def _fake_quantize_layer_norm_again(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    x_qt: torch.Tensor,
    config: int,
) -> torch.Tensor:
    return _fake_quantize_again(x, x_qt, config)


def _check_shapes(**operands: torch.Tensor | None) -> None:
    given = {name: each for name, each in operands.items() if each is not None}
    first = next(iter(given.values()))
    if any(each.shape != first.shape for each in given.values()):
        shapes = ", ".join(f"{name} {tuple(each.shape)}" for name, each in given.items())
        raise ValueError(f"float8: the operands of an activation have one shape, not {shapes}")


@fake_kernel("quantize_activation")
def _fake_quantize_activation(
    x: torch.Tensor,
    up: torch.Tensor | None,
    activation: int,
    config: int,
    backward: bool,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, ...]:
    _check_shapes(x=x, up=up)
    return _fake_quantize(x, config, INPUT, backward, of_activation=True)


@fake_kernel("quantize_activation_again")
def _fake_quantize_activation_again(
    x: torch.Tensor,
    up: torch.Tensor | None,
    activation: int,
    x_qt: torch.Tensor,
    config: int,
    *_: Any,
) -> torch.Tensor:
    _check_shapes(x=x, up=up)
    return _fake_quantize_again(x, x_qt, config)


@fake_kernel("quantize_activation_backward")
def _fake_quantize_activation_backward(
    grad: torch.Tensor, x: torch.Tensor, activation: int, config: int, sums: bool, *_: Any
) -> tuple[torch.Tensor, ...]:
    _check_shapes(grad=grad, x=x)
    return _fake_quantize_gradient(x, config, sums)


def _fake_quantize_gradient(x: torch.Tensor, config: int, sums: bool) -> tuple[torch.Tensor, ...]:
    copies = _fake_quantize(x, config, GRAD_OUTPUT, True)
    return (*copies, x.new_empty((int(x.shape[-1]) if sums else 0,), dtype=torch.float32))


@fake_kernel("quantize_glu_backward")
def _fake_quantize_glu_backward(
    grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: int,
    config: int,
    sums: bool,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    _check_shapes(grad=grad, gate=gate, up=up)
    *copies, of_one = _fake_quantize_gradient(gate, config, sums)
    return (*copies, *map(torch.empty_like, copies), torch.cat((of_one, of_one)))


@fake_kernel("quantize_merged_glu_backward")
def _fake_quantize_merged_glu_backward(
    grad: torch.Tensor,
    gate_up: torch.Tensor,
    up_first: bool,
    activation: int,
    config: int,
    sums: bool,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    _check_shapes(grad=grad, gate=gate_up.chunk(2, dim=-1)[0])
    return _fake_quantize_gradient(gate_up, config, sums)


@fake_kernel("cast_weight")
def _fake_cast_weight(*_: Any) -> None:
    pass


@fake_kernel("quantize_amax")
def _fake_quantize_amax(
    x: torch.Tensor, config: int, operand: int, rows_max: int
) -> tuple[torch.Tensor, ...]:
    sizes = torch.ops.float8.amax_words(rows_max, int(x.shape[-1]), config, operand)
    return tuple(x.new_empty((size,), dtype=torch.int32) for size in sizes)


@fake_kernel("quantize_shard")
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


@fake_kernel("quantize_activation_amax")
def _fake_quantize_activation_amax(
    x: torch.Tensor,
    up: torch.Tensor | None,
    grad: torch.Tensor | None,
    activation: int,
    config: int,
) -> tuple[torch.Tensor, ...]:
    _check_shapes(x=x, up=up, grad=grad)
    operand = INPUT if grad is None else GRAD_OUTPUT
    rows, cols = x.numel() // x.shape[-1], int(x.shape[-1])
    amax, row_amax = torch.ops.float8.amax_words(rows, cols, config, operand)
    both = up is not None and grad is not None
    # One that is not of both gradients is left, if maxima come before its cast.
    left = 0 if both or amax + row_amax == 0 else x.numel() * x.element_size()
    sizes = [-(-left // ALIGNMENT) * ALIGNMENT, amax * (1 + both), row_amax * (1 + both)]
    dtypes = (torch.uint8, torch.int32, torch.int32)
    return tuple(
        x.new_empty((size,), dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)
    )


@fake_kernel("quantize_activation_shard")
def _fake_quantize_activation_shard(
    x: torch.Tensor,
    up: torch.Tensor | None,
    grad: torch.Tensor | None,
    left: torch.Tensor,
    amax: torch.Tensor,
    row_amax: torch.Tensor,
    activation: int,
    config: int,
) -> list[torch.Tensor]:
    operand = INPUT if grad is None else GRAD_OUTPUT
    count = 2 if up is not None and grad is not None else 1
    return [
        each
        for _ in range(count)
        for each in _fake_quantize_shard(
            x, amax, row_amax, config, operand, x.numel() // x.shape[-1]
        )
    ]


@fake_kernel("quantize_amax_list")
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


@fake_kernel("quantize_shard_list")
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


@fake_kernel("quantize_list")
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


def element_type(number: int) -> torch.dtype:
    """Returns the type of a float8_dtype."""
    return next(each for each, own in ELEMENT_TYPES.items() if own == number)


def empty_heads(x: torch.Tensor, dtype: torch.dtype, transposed: bool) -> torch.Tensor:
    """Returns a tensor of x's shape, whose middle dimensions of four may lie in memory in the other order."""
    if transposed:
        return x.new_empty(x.transpose(1, 2).shape, dtype=dtype).transpose(1, 2)
    return x.new_empty(x.shape, dtype=dtype)


@fake_kernel("adamw")
def _fake_adamw(*_: Any) -> None:
    pass


@fake_kernel("gemm_into")
def _fake_gemm_into(*_: Any) -> None:
    pass


@fake_kernel("linear_forward")
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


@fake_kernel("linear_backward")
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
