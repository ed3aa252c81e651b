"""Where elements and inverse scales lie in the buffers that a cast fills (python/shim/plans/plans.hpp)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from float8.recipes import Granularity
from float8.torch import _ops

BLOCK = 128  # elements of a block with one scale; the pitch of a copy's lines is a multiple of it


class Copy(NamedTuple):
    """A copy in fp8: bytes [lines][pitch] with zeros behind a line, and its inverse scales."""

    data: Tensor
    scales: Tensor

    def trimmed(self, lines: int, length: int, granularity: int) -> Copy:
        """Returns the elements and the scales without what pads them."""
        data, scales = self.data[:lines, :length], self.scales
        if granularity != Granularity.BLOCK_128X128:
            return Copy(data, scales[: 1 if granularity == Granularity.TENSOR else lines])
        pitch = in_4s(blocks(length))
        of_blocks = scales[: blocks(lines) * pitch].view(-1, pitch)
        return Copy(data, of_blocks[:, : blocks(length)])


Copies = tuple[Copy | None, Copy | None]  # q and qt


def blocks(extent: int) -> int:
    return -(-extent // BLOCK)


def in_4s(scales: int) -> int:
    return -(-scales // 4) * 4


def copy_bytes(to: Tensor, of: Tensor) -> None:
    """Copies bytes; 16 at once where rows are whole 16s, which takes a quarter of the time."""
    if to.shape[-1] % 16 == 0 and all(
        stride % 16 == 0 for x in (to, of) for stride in x.stride()[:-1]
    ):
        to, of = to.view(torch.complex128), of.view(torch.complex128)
    to.copy_(of)


class Layout(NamedTuple):
    """Pitches, and where scales begin, in bytes; a copy that is not made has a pitch of 0."""

    q_pitch: int
    q_scales: int
    scales_in_qt: int  # not 0: q's scales are in qt's buffer
    qt_pitch: int
    qt_scales: int

    def copies(self, q: Tensor, qt: Tensor, rows: int, cols: int) -> Copies:
        """Returns the copies that lie in two buffers."""
        copies: list[Copy | None] = [None, None]
        if self.q_pitch:
            scales = (qt if self.scales_in_qt else q)[self.q_scales :].view(torch.float32)
            copies[0] = Copy(q[: rows * self.q_pitch].view(rows, self.q_pitch), scales)
        if self.qt_pitch:
            scales = qt[self.qt_scales :].view(torch.float32)
            copies[1] = Copy(qt[: cols * self.qt_pitch].view(cols, self.qt_pitch), scales)
        return copies[0], copies[1]


def layout(
    rows_max: int,
    rows: int,
    cols: int,
    config: int,
    operand: int,
    copies: int,
    over_ranks: bool,
    whole_rows: int = 0,
) -> Layout:
    """Returns the layout of a cast into `copies` (_ops.BOTH_COPIES, Q_ALONE or QT_ALONE).

    over_ranks: of a shard of up to rows_max rows.
    whole_rows: those of the whole, where a shard may cut 128x128 blocks; the scales are the whole's.
    """
    key = (rows_max, rows, cols, config, operand, copies, over_ranks, whole_rows)
    # torch.compile does not look into caches.
    find = torch.ops.float8.copy_layout.default if torch.compiler.is_compiling() else _cached
    at = Layout(*find(*key))
    if copies == _ops.Q_ALONE:
        return at._replace(qt_pitch=0)
    return at._replace(q_pitch=0) if copies == _ops.QT_ALONE else at


_cached = functools.cache(torch.ops.float8.copy_layout.default)
