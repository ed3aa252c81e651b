"""The weight of one linear that ranks hold by rows, in fp8: its shards, and the copies of the whole.

Every rank casts its shard with the scales of the whole weight (shard_casts.py). What ranks gather is
bytes without gaps: of q [rows][K], and of qt [K][rows], with as many rows as the first rank has.
Scales do not travel with a gather: they are known on every rank before. q is cast ahead of a step, and
is kept. Where every rank has the scales of qt once it has the maxima of the whole weight, qt is late: it
is cast where it is gathered, and is not kept. With delayed scaling a cast takes its scale from the scale
state, after a first step, and records the shard's amax there; both copies are kept.

Where tensor parallelism shares the weight too, "the whole" is what a rank of it has: FSDP's shards
are of that, and so are its gathers. Scales are those of all of the weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from float8 import recipes
from float8.recipes import Granularity
from float8.torch import _ops
from float8.torch.shard.copy_layout import Copy, Layout, copy_bytes, layout
from float8.torch.shard.gather import COPIES, Gather, GatheredCopy
from float8.torch.shard.shard_casts import cast_late, cast_shards
from float8.torch.shard.shard_copies import ShardCopies
from float8.torch.shard.weight_mesh import check_split, mesh_dims

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from float8.torch.layer.linear import Float8Linear

_STEP = 128  # elements that a GEMM sums in a step; copies have rows of whole ones


class WeightGather(ShardCopies, Gather):
    """A linear's shard in fp8, and the copies of its whole weight while they are needed."""

    _layer: weakref.ref[Float8Linear]

    def __init__(self, layer: Float8Linear, dtype: torch.dtype) -> None:
        weight: Any = layer.weight
        mesh, placements = weight.device_mesh, weight.placements
        dims = mesh_dims(layer)
        if dims.fsdp is None or placements[dims.fsdp].dim != 0:
            raise ValueError(
                f"float8: a weight is sharded as {placements}; the fp8 all-gather is for weights "
                "that fully_shard shards by rows"
            )
        size = list(map(int, weight.shape))
        self.tensor_dim: int | None = None
        if dims.tensor is not None:
            self.tensor_group = mesh.get_group(dims.tensor)
            self.tensor_dim = placements[dims.tensor].dim
            check_split(layer, self.tensor_dim, self.tensor_group.size())
            size[self.tensor_dim] //= self.tensor_group.size()
        self._own_shape = tuple(map(int, weight._local_tensor.shape))
        group, device = mesh.get_group(dims.fsdp), weight._local_tensor.device
        Gather.__init__(self, layer, dtype, torch.Size(size), group, device)
        ShardCopies.__init__(self, layer, self._own_shape[0])
        # An optimizer made these copies of the shard in this state.
        self._made: tuple[Any, tuple[Tensor, ...]] | None = None

    @property
    def first_step(self) -> bool:
        """Tells whether delayed scaling has no scales for the linear yet."""
        layer = self._layer()
        return layer is not None and layer._first_step

    @property
    def scale_view(self) -> Tensor:
        """Returns the linear's part of the scale state."""
        layer = self._layer()
        assert layer is not None
        view = layer.scales_on(layer.weight.device)
        assert view is not None
        return view

    def facts(self) -> str:
        """Returns what all ranks of the group have in common, and what is wrong on this one."""
        rank, n = self.group.rank(), int(self.size[0])
        rows = max(0, min(self.rows, n - rank * self.rows))
        wrong = ""
        if self._own_shape != (rows, self.cols):
            wrong = f", and a shard of {list(self._own_shape)} in the place of {[rows, self.cols]}"
        shared = (
            "" if self.tensor_dim is None else f", Shard({self.tensor_dim}) of tensor parallelism"
        )
        return (
            f"{self._what}{shared}, {self.ranks} shards of {self.rows} rows, x in "
            f"{self.dtype}{wrong}"
        )

    def source(self, weight: DTensor) -> Tensor:
        """Returns the shard in high precision."""
        local: Any = weight._local_tensor
        plain: Tensor = local.plain()
        # A rank without rows has the scales too.
        return plain if self.own_rows > 0 else plain.new_zeros((1, self.cols))

    def keep_copies(self, weight: DTensor, copies: tuple[Tensor, ...]) -> None:
        """Takes the copies of the shard as it is, which an optimizer made as it wrote it."""
        self._made = self._state_of(weight), copies

    def take_copies(self, weight: DTensor) -> tuple[Tensor, ...] | None:
        """Returns these once, None where they are not those of this shard for this cast."""
        kept, self._made = self._made, None
        if kept is None or self.is_unknowable(weight) or kept[0] != self._state_of(weight):
            return None
        return kept[1]

    def words_of_tensor_ranks(self, amax: Tensor, row_amax: Tensor) -> list[Tensor]:
        """Returns the words of the shard's maxima that span the ranks of tensor parallelism."""
        if self.tensor_dim is None or self.cuts_blocks:
            return []  # ranks of tensor parallelism have whole blocks
        if self.tensor_dim == 0:
            return [amax]
        # The words of columns come first, then the tensor's. The rows are those of all of these ranks.
        columns = amax.numel() - (Granularity.TENSOR in self._granularity.values())
        rows = self.rows if self._granularity["q"] is Granularity.AXIS else 0
        return [amax[columns:], row_amax[:rows]]

    def shard(self, name: str) -> Tensor:
        """Returns what this rank gives to a gather of a copy, which is cast first if it is late."""
        if name == "qt" and self.late and not self.has_late:
            cast_late([self])
        return super().shard(name)

    def cast(self, weight: DTensor) -> None:
        cast_shards([(self, weight)])

    def q(self, dtype: torch.dtype, records: bool) -> GatheredCopy:
        """Returns q for an x of that type. `records`: whether delayed scaling records this forward."""
        data = self._gathered("q", dtype)
        self.note_read(records)
        if self.cols % _STEP == 0:
            whole = self.size.numel()
            return GatheredCopy(data if data.numel() == whole else data[:whole], self._scales["q"])
        n = self.size[0]
        at, out = self._buffer("q", data)
        copy_bytes(out[: n * at.q_pitch].view(n, -1)[:, : self.cols], data.view(-1, self.cols)[:n])
        return _with_scales(out, at.q_scales, self._scales["q"])

    def qt(self, dtype: torch.dtype, reads_shards: Callable[[], bool]) -> GatheredCopy:
        """Returns qt for a dy of that type. `reads_shards`: whether a GEMM takes it as it lies."""
        data = self._gathered("qt", dtype)
        n = self.size[0]
        in_steps = n == self.rows * self.ranks and self.rows % _STEP == 0
        if in_steps and (self.ranks == 1 or reads_shards()):
            return GatheredCopy(data, self._scales["qt"], self.ranks)
        at, out = self._buffer("qt", data)
        rows = out[: self.cols * at.qt_pitch].view(self.cols, -1)
        shards = data.view(self.ranks, self.cols, self.rows)
        whole, rest = divmod(n, self.rows)
        full = rows[:, : whole * self.rows].unflatten(1, (whole, self.rows))  # type: ignore[no-untyped-call]
        copy_bytes(full, shards[:whole].transpose(0, 1))
        if rest:
            copy_bytes(rows[:, whole * self.rows : n], shards[whole, :, :rest])
        return _with_scales(out, at.qt_scales, self._scales["qt"])

    def copy(self, name: str, dtype: torch.dtype) -> Copy:
        """Returns a copy as a GEMM apart from a linear takes it."""
        found = self.q(dtype, True) if name == "q" else self.qt(dtype, lambda: False)
        data, scales = found.data, found.scales
        lines = self.size[COPIES.index(name)]
        if scales is None:
            at = self._layout(name)
            pitch, begin = (at.q_pitch, at.q_scales) if name == "q" else (at.qt_pitch, at.qt_scales)
            data, scales = data[: lines * pitch], data[begin:].view(torch.float32)
        return Copy(data.view(lines, -1), scales)

    def parts(self, name: str) -> Copy:
        """Returns the elements and the scales of a copy of the whole weight, as they were gathered."""
        n = self.size[0]
        data = self._gathered(name, self.dtype)
        if name == "q":
            elements, lines, length = data.view(-1, self.cols), n, self.cols
        else:
            shards = data.view(self.ranks, self.cols, self.rows).transpose(0, 1)
            elements, lines, length = shards.reshape(self.cols, -1), self.cols, n
        return Copy(elements, self._scales[name]).trimmed(lines, length, self._granularity[name])

    def own_parts(self, name: str, parts: Copy) -> Copy:
        """Returns what this rank of tensor parallelism has of a copy of all of the weight."""
        if self.tensor_dim is None:
            return parts
        axis = self.tensor_dim if name == "q" else 1 - self.tensor_dim
        ranks, rank = self.tensor_group.size(), self.tensor_group.rank()
        scales = parts.scales
        granularity = self._granularity[name]
        if granularity is Granularity.BLOCK_128X128 or (
            granularity is Granularity.AXIS and axis == 0
        ):
            scales = scales.chunk(ranks, axis)[rank]
        return Copy(parts.data.chunk(ranks, axis)[rank], scales)

    def _layout(self, name: str) -> Layout:
        """Returns the layout of a copy of the whole weight."""
        n, cols = self.size
        return layout(n, n, cols, self.config, _ops.WEIGHT, _ops.copies_of(name == "qt"), False)

    def _buffer(self, name: str, like: Tensor) -> tuple[Layout, Tensor]:
        """Returns the same, and a buffer for the copy."""
        sizes = torch.ops.float8.quantized_bytes(*self.size, self.config, _ops.WEIGHT, name == "qt")
        return self._layout(name), like.new_empty(sizes[COPIES.index(name)])


def _with_scales(out: Tensor, begin: int, scales: Tensor) -> GatheredCopy:
    data = scales.view(torch.uint8)
    out[begin : begin + data.numel()].copy_(data)
    return GatheredCopy(out, None)


def plain_parts(copies: tuple[Tensor, Tensor], rows: int, layer: Float8Linear) -> dict[str, Copy]:
    """Returns the elements and scales of both copies of a weight, as `quantize` gives them."""
    cols = layer.in_features + layer._padding
    at = layout(
        rows, rows, cols, layer._config & ~recipes.BIAS, _ops.WEIGHT, _ops.BOTH_COPIES, False
    )
    q, qt = at.copies(*copies, rows, cols)
    parts = {}
    if q is not None:
        parts["q"] = q.trimmed(rows, cols, layer.recipe.output.b.granularity)
    if qt is not None:
        parts["qt"] = qt.trimmed(cols, rows, layer.recipe.grad_input.b.granularity)
    return parts
