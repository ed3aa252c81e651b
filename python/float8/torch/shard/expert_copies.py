"""The fp8 copies of the weight of all experts: where they lie, and which maxima their scales come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from float8 import recipes
from float8.recipes import Granularity
from float8.torch import traced
from float8.torch.shard.gather import GatheredCopy


# In graphs of torch.compile it is a constant.
@traced.constant
def _layout_of(experts: int, n: int, k: int, config: int) -> tuple[Any, ...]:
    return tuple(torch.ops.float8.experts_copies(experts, n, k, config, False))


def copies_of(
    weight: Tensor,
    config: int,
    scales: Tensor | None = None,
    scale_layout: int = 0,
    first_step: bool = False,
) -> dict[str, GatheredCopy]:
    """Casts a weight of all experts as one device does, apart from its calls.

    scales: the part of a scale state of scale_layout (scales.py), for delayed scaling.
    """
    sizes = torch.ops.float8.experts_copies(*weight.shape, config, False)[:2]
    buffers = tuple(weight.new_zeros(size, dtype=torch.uint8) for size in sizes)
    words = torch.ops.float8.experts_amax(weight, config, -1) if first_step else (None, None)
    how = (*words, config, -1, None, scales, scale_layout)
    torch.ops.float8.experts_cast(weight, *buffers, *how)
    return copies_in(buffers, weight.shape, config)


def copies_in(
    buffers: Sequence[Tensor], shape: Sequence[int], config: int
) -> dict[str, GatheredCopy]:
    """Returns the copies of a weight of that shape which lie in the buffers of a cast."""
    q, qt = buffers
    experts, n, k = shape
    _, _, q_pitch, q_scales, in_qt, qt_pitch, qt_scales = _layout_of(experts, n, k, config)
    places = {
        "q": (q[: experts * n * q_pitch], (qt if in_qt else q)[q_scales:]),
        "qt": (qt[: experts * k * qt_pitch], qt[qt_scales:]),
    }
    return {
        name: GatheredCopy(data, scales.view(torch.float32))
        for name, (data, scales) in places.items()
    }


def maxima_of_both(words: Sequence[tuple[Tensor, Tensor]], experts: int) -> tuple[Tensor, Tensor]:
    """Returns the maxima of a cast that reads one weight, or two as one, from those of each weight."""
    if len(words) == 1:
        return words[0]
    amaxes, row_amaxes = zip(*words, strict=True)
    rows = [each.view(experts, -1) for each in row_amaxes]  # of an expert those of both weights
    return torch.maximum(*amaxes), torch.cat(rows, 1).view(-1)


def maxima_of_update(shape: Sequence[int], config: int) -> tuple[int, int] | None:
    """Returns how many words an optimizer leaves for a cast with given maxima: those of experts or of their columns,
    and of rows; none where the cast needs no maxima, and None where it takes others.

    shape: [experts, n, k] as it is stored.
    """
    experts, n, k = shape
    q, qt = recipes.granularities_of_weights(config)
    if q == qt == Granularity.BLOCK_128X128:
        return 0, 0
    in_qt = torch.ops.float8.experts_copies(experts, n, k, config, True)[4]
    return {
        (Granularity.TENSOR, Granularity.TENSOR): (experts, 0) if in_qt else None,
        (Granularity.AXIS, Granularity.TENSOR): (experts, experts * n),
        (Granularity.AXIS, Granularity.AXIS): (experts * k, experts * n),
    }.get((q, qt))
