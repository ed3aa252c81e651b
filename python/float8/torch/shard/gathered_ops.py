"""The ops of a linear whose weight is gathered in fp8 (weight_gather.py).

They take the key of its WeightGather in a tensor on the host, which torch.compile passes on: one graph
serves the layers of many blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from float8.recipes import Granularity
from float8.torch import _ops
from float8.torch.shard import weight_changes
from float8.torch.shard.copy_layout import BLOCK, blocks, in_4s
from float8.torch.shard.gather import COPIES, Gather, GatheredCopy, gather_at

torch.library.define(
    "float8::gathered_forward",
    "(Tensor x, Tensor? x_q, Tensor? x_qt, Tensor gather, int n, ScalarType dtype, Tensor? bias, "
    "Tensor? scales, int config, int layout, bool save) -> (Tensor, Tensor)",
)
torch.library.define(
    "float8::gathered_backward",
    "(Tensor dy, Tensor saved, Tensor? x, Tensor? x_qt, Tensor gather, int[] shape, "
    "ScalarType dtype, Tensor? scales, int config, int layout, int wanted, Tensor? dy_q=None, "
    "Tensor? dy_qt=None) -> (Tensor, Tensor, Tensor)",
)


# One GEMM with a copy of the gathered weight: q for `output`, qt for `grad_input`. weight_gemm takes
# the weight itself, which is a GatheredWeight (fsdp.py).
torch.library.define(
    "float8::weight_gemm",
    "(int gemm, Tensor a, Tensor a_scales, Tensor weight, Tensor? bias, ScalarType dtype, "
    "int config) -> Tensor",
)
torch.library.define(
    "float8::gathered_gemm",
    "(int gemm, Tensor a, Tensor a_scales, Tensor gather, int[] shape, Tensor? bias, "
    "ScalarType dtype, int config) -> Tensor",
)


# The copy for such a GEMM, where it is one of chunks. It is a clone in compiled graphs, which may write
# over a result that they have read. Nothing is read of `like`, which orders the ops of a graph.
torch.library.define(
    "float8::weight_copy",
    "(int gemm, Tensor like, Tensor weight, ScalarType dtype, int granularity) -> (Tensor, Tensor)",
)
torch.library.define(
    "float8::gathered_copy",
    "(int gemm, Tensor like, Tensor gather, int[] shape, ScalarType dtype, int granularity, "
    "bool clone) -> (Tensor, Tensor)",
)


_shapes: dict[tuple[Any, ...], Tensor] = {}


def shape_of_weight(like: Tensor, shape: Sequence[int], dtype: torch.dtype, fake: bool) -> Tensor:
    """Returns an element in the weight's shape: nobody reads it."""
    if fake:
        return like.new_empty((), dtype=dtype).expand(shape)
    key = (like.device, dtype, *shape)
    found = _shapes.get(key)
    if found is None:
        with torch.inference_mode(False):
            found = torch.empty((), dtype=dtype, device=like.device).expand(shape)
        if not weight_changes.is_capturing(like):  # or a CUDA graph has the memory
            _shapes[key] = found
    return found


def gather_of_op(key: Any) -> Any:
    """Returns the gather that an op is told, None where torch.compile traces the op."""
    if isinstance(key, Gather):
        return key
    return None if is_fake(key) else gather_at(key)


def _forward(
    x: Tensor,
    x_q: Tensor | None,
    x_qt: Tensor | None,
    gather: Any,
    n: int,
    dtype: torch.dtype,
    bias: Tensor | None,
    scales: Tensor | None,
    config: int,
    layout: int,
    save: bool,
) -> Any:
    known = gather_of_op(gather)
    weight = shape_of_weight(x, (n, x.shape[-1]), dtype, known is None)
    q = GatheredCopy(x, None) if known is None else known.q(x.dtype, save)
    return _ops.linear_forward(
        x, x_q, x_qt, weight, q.data, None, bias, scales, config, layout, save, q.scales
    )


def _backward(
    dy: Tensor,
    saved: Tensor,
    x: Tensor | None,
    x_qt: Tensor | None,
    gather: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    scales: Tensor | None,
    config: int,
    layout: int,
    wanted: int,
    dy_q: Tensor | None = None,
    dy_qt: Tensor | None = None,
) -> Any:
    known = gather_of_op(gather)
    weight = shape_of_weight(dy, shape, dtype, known is None)
    if known is None:
        qt = GatheredCopy(dy, None)
    else:
        qt = known.qt(dy.dtype, lambda: _reads_shards(dy, weight, config))
    return _ops.linear_backward(
        dy, saved, x, x_qt, weight, qt.data, scales, config, layout, wanted, qt.scales, qt.shards,
        dy_q, dy_qt,
    )  # fmt: skip


def _gemm(
    gemm: int,
    a: Tensor,
    a_scales: Tensor,
    gather: Tensor,
    shape: Sequence[int],
    bias: Tensor | None,
    dtype: torch.dtype,
    config: int,
) -> Tensor:
    contracted, columns = shape[1 - gemm], shape[gemm]
    d = a.new_empty((a.shape[0], columns), dtype=dtype)
    if not is_fake(gather):
        b = gather_at(gather).copy(COPIES[gemm], dtype)
        _ops.gemm_into(a, a_scales, *b, d, bias, contracted, config, gemm, False)
    return d


def _copy_of(
    gemm: int,
    like: Tensor,
    gather: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    granularity: int,
    clone: bool,
) -> tuple[Tensor, Tensor]:
    lines, length = shape[gemm], shape[1 - gemm]
    count = {Granularity.TENSOR: 1, Granularity.AXIS: lines}.get(
        Granularity(granularity), blocks(lines) * in_4s(blocks(length))
    )
    if is_fake(gather):
        data = like.new_empty((lines, BLOCK * blocks(length)), dtype=torch.uint8)
        return data, like.new_empty((count,), dtype=torch.float32)
    copy = gather_at(gather).copy(COPIES[gemm], dtype)
    data, scales = copy.data, copy.scales[:count]
    return (data.clone(), scales.clone()) if clone else (data, scales)


def register(**calls: Callable[..., Any]) -> None:
    """Makes each call the op of its name, of fake tensors too."""
    for name, call in calls.items():
        torch.library.impl(f"float8::{name}", ("cpu", "cuda"), call)
        torch.library.register_fake(f"float8::{name}", call)


def direct(op: Any, call: Callable[..., Any], at: int) -> Callable[..., Any]:
    """Returns what calls the op, or its kernel where nobody sees ops: an op in Python takes a while.

    at: the place of the gather among the op's arguments.
    """

    def run(*args: Any) -> Any:
        key = args[at]
        if type(key) is not Tensor or torch._C._len_torch_dispatch_stack() > 0:
            return op(*args)
        return call(*args[:at], gather_at(key), *args[at + 1 :])

    return run


register(
    gathered_copy=_copy_of,
    gathered_forward=_forward,
    gathered_backward=_backward,
    gathered_gemm=_gemm,
)
gathered_forward = direct(torch.ops.float8.gathered_forward.default, _forward, 3)
gathered_backward = direct(torch.ops.float8.gathered_backward.default, _backward, 4)
gathered_gemm = torch.ops.float8.gathered_gemm.default
gathered_copy = torch.ops.float8.gathered_copy.default
weight_gemm = torch.ops.float8.weight_gemm.default
weight_copy = torch.ops.float8.weight_copy.default
_reads_shards = torch.ops.float8.reads_shards.default
