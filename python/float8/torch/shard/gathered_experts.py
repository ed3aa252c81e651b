"""The ops of experts whose weights are gathered in fp8 (expert_gather.py).

They take the keys of gathers, as the ops of linears do (gathered_ops.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from float8.torch.shard.gathered_ops import direct, gather_of_op, register, shape_of_weight

_experts_forward = torch.ops.float8.experts_forward.default
_experts_backward = torch.ops.float8.experts_backward.default
_moe_forward = torch.ops.float8.moe_forward.default
_moe_backward = torch.ops.float8.moe_backward.default

torch.library.define(
    "float8::gathered_experts_forward",
    "(Tensor x, Tensor gather, int[] shape, ScalarType dtype, Tensor layout, int config, bool save, "
    "Tensor? scales, int scale_layout) -> (Tensor, Tensor)",
)
torch.library.define(
    "float8::gathered_experts_backward",
    "(Tensor dy, Tensor gather, Tensor saved, Tensor layout, int[] shape, int grad_dtype, int config, "
    "int wanted, Tensor? x, Tensor? scales, int scale_layout) -> (Tensor, Tensor)",
)
# An op is given a gather of each weight, or the weight itself where ranks gathered it in high precision.
# A gather of w13 may be that of w1 with the rows of w3. `w3_apart`: gradients are those of w1 and w3. `shape`:
# that of w2.
torch.library.define(
    "float8::gathered_moe_forward",
    "(Tensor x, Tensor? w13_gather, Tensor? w2_gather, Tensor? index, Tensor? w13, Tensor? w2, "
    "Tensor? w3, bool w3_apart, int[] shape, ScalarType dtype, Tensor layout, int config, bool save, "
    "Tensor? w13_state, Tensor? w2_state, int scale_layout) -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "float8::gathered_moe_backward",
    "(Tensor x, Tensor? w13_gather, Tensor? w2_gather, Tensor? dy, Tensor? index, Tensor? score, "
    "Tensor? w13, Tensor? w2, Tensor[] read, Tensor layout, int experts, int hidden, int grad_dtype, "
    "int config, int part, int wanted, Tensor? w13_state, Tensor? w2_state, int scale_layout) -> "
    "(Tensor, Tensor)",
)


def _copy(
    name: str, gather: Any, like: Tensor, size: Sequence[int], records: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """Returns a copy of that size and its scales; none where there is no gather, or torch.compile traces the op.

    records: whether delayed scaling records the forward that reads q.
    """
    known = None if gather is None else gather_of_op(gather)
    if known is None:
        return None, None
    if tuple(size) != known.whole_size:
        names = " and ".join(each.name for each in known.pair)
        raise NotImplementedError(
            f"float8: {names} are gathered in fp8 as one weight, and only the experts they belong to can use it"
        )
    data, scales, _ = known.q(like.dtype, records) if name == "q" else known.qt(like.dtype)
    return data, scales


def _forward(
    x: Tensor,
    gather: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    layout: Tensor,
    config: int,
    save: bool,
    scales: Tensor | None,
    scale_layout: int,
) -> Any:
    copy = _copy("q", gather, x, shape, save)
    weight = shape_of_weight(x, shape, dtype, copy[0] is None)
    return _experts_forward(x, weight, layout, config, save, scales, scale_layout, *copy)


def _backward(
    dy: Tensor,
    gather: Any,
    saved: Tensor,
    layout: Tensor,
    shape: Sequence[int],
    grad_dtype: int,
    config: int,
    wanted: int,
    x: Tensor | None,
    scales: Tensor | None,
    scale_layout: int,
) -> Any:
    copy = _copy("qt", gather, dy, shape) if wanted & 1 else (None, None)
    rest = (grad_dtype, config, wanted, x, scales, scale_layout)
    return _experts_backward(dy, saved, layout, None, *shape, *rest, *copy)


def _forward_of_moe(
    x: Tensor,
    w13_gather: Tensor | None,
    w2_gather: Tensor | None,
    index: Tensor | None,
    w13: Tensor | None,
    w2: Tensor | None,
    w3: Tensor | None,
    w3_apart: bool,
    shape: Sequence[int],
    dtype: torch.dtype,
    layout: Tensor,
    config: int,
    save: bool,
    *states: Any,
) -> Any:
    experts, dim, hidden = shape
    both = (experts, 2 * hidden, dim)
    copies = (*_copy("q", w13_gather, x, both, save), *_copy("q", w2_gather, x, shape, save))
    first = (experts, hidden, dim) if w3_apart else both
    if w3_apart and w3 is None:
        w3 = shape_of_weight(x, first, dtype, is_fake(x))
    w13, w2 = (
        shape_of_weight(x, size, dtype, is_fake(x)) if weight is None else weight
        for weight, size in ((w13, first), (w2, shape))
    )
    return _moe_forward(x, index, w13, w2, layout, config, save, *copies, w3, *states)


def _backward_of_moe(
    x: Tensor,
    w13_gather: Tensor | None,
    w2_gather: Tensor | None,
    dy: Tensor | None,
    index: Tensor | None,
    score: Tensor | None,
    w13: Tensor | None,
    w2: Tensor | None,
    read: Sequence[Tensor],
    layout: Tensor,
    experts: int,
    hidden: int,
    grad_dtype: int,
    config: int,
    part: int,
    wanted: int,
    *states: Any,
) -> Any:
    dim = x.shape[1]
    first = _copy("qt", w13_gather, x, (experts, 2 * hidden, dim))
    copies = (*first, *_copy("qt", w2_gather, x, (experts, dim, hidden)))
    how = (grad_dtype, config, part, wanted)
    return _moe_backward(
        x, dy, index, score, w13, w2, read, layout, experts, hidden, *how, *copies, None, *states
    )


register(
    gathered_experts_forward=_forward,
    gathered_experts_backward=_backward,
    gathered_moe_forward=_forward_of_moe,
    gathered_moe_backward=_backward_of_moe,
)
_gathered_forward = direct(torch.ops.float8.gathered_experts_forward.default, _forward, 1)
_gathered_backward = direct(torch.ops.float8.gathered_experts_backward.default, _backward, 1)
_gathered_moe_forward = torch.ops.float8.gathered_moe_forward.default
_gathered_moe_backward = torch.ops.float8.gathered_moe_backward.default


def _of_forward(
    weight: Any,
    x: Tensor,
    _: Any,
    layout: Tensor,
    config: int,
    save: bool,
    scales: Tensor | None = None,
    scale_layout: int = 0,
    *__: Any,
) -> Any:
    how = (layout, config, save, scales, scale_layout)
    return _gathered_forward(x, weight.key, list(weight.shape), weight.dtype, *how)


def _of_backward(
    weight: Any,
    dy: Tensor,
    saved: Tensor,
    layout: Tensor,
    _: Any,
    experts: int,
    n: int,
    k: int,
    grad_dtype: int,
    config: int,
    wanted: int,
    x: Tensor | None = None,
    scales: Tensor | None = None,
    scale_layout: int = 0,
    *__: Any,
) -> Any:
    how = ([experts, n, k], grad_dtype, config, wanted, x, scales, scale_layout)
    return _gathered_backward(dy, weight.key, saved, layout, *how)


# Neither has copies of other origin. A gather of w1 has the copies of w3, and what backward reads has no w3 that
# was gathered in another way.
def _of_moe_forward(
    _: Any,
    x: Tensor,
    index: Tensor | None,
    w13: Any,
    w2: Any,
    layout: Tensor,
    config: int,
    save: bool,
    *rest: Any,
) -> Any:
    keys, plain = _parts(w13, w2)
    w3 = rest[_COPIES] if len(rest) > _COPIES else None
    of_w3 = (w3 if keys[0] is None else None, w3 is not None)
    shape = (list(w2.shape), w13.dtype, layout, config, save)
    states = _states(rest[_COPIES + 1 :])
    return _gathered_moe_forward(x, *keys, index, *plain, *of_w3, *shape, *states)


def _of_moe_backward(
    _: Any, x: Tensor, dy: Any, index: Any, score: Any, w13: Any, w2: Any, *rest: Any
) -> Any:
    keys, plain = _parts(w13, w2)
    own, states = rest[:_OF_MOE_BACKWARD], _states(rest[_OF_MOE_BACKWARD + _COPIES + 1 :])
    return _gathered_moe_backward(x, *keys, dy, index, score, *plain, *own, *states)


_COPIES = 4  # of w13 and w2, with their scales; w3 is behind them
_OF_MOE_BACKWARD = 8  # read, layout, experts, hidden, grad_dtype, config, part and wanted


def _states(given: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the parts of the scale state that the linears of w13 and w2 have, and its layout."""
    return tuple(given) or (None, None, 0)


def _parts(*weights: Any) -> tuple[list[Any], list[Any]]:
    """Returns the keys of weights that were gathered in fp8, and the others."""
    keys = [getattr(weight, "key", None) for weight in weights]
    plain = [weight if key is None else None for weight, key in zip(weights, keys, strict=True)]
    return keys, plain


# As in gathered_weight.py.
HANDLERS: dict[Any, Callable[..., Any]] = {
    _experts_forward: _of_forward,
    _experts_backward: _of_backward,
    _moe_forward: _of_moe_forward,
    _moe_backward: _of_moe_backward,
}
