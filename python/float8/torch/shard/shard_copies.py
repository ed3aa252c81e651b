"""A rank's shard of a weight in fp8: its copies, their scales, and the maxima that scales come from."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from float8 import recipes
from float8.recipes import Granularity
from float8.torch import _ops
from float8.torch.shard.copy_layout import BLOCK, blocks, in_4s, layout
from float8.torch.shard.gather import COPIES

if TYPE_CHECKING:
    from float8.torch.layer.linear import Float8Linear


class ShardCopies:
    """What a rank keeps of a weight that ranks share by rows; weight_gather.py has the whole of it.

    own_rows: this rank's, of which the first rank has the most.
    """

    # These fields are those of Gather.
    size: torch.Size
    group: Any
    device: torch.device
    ranks: int
    _seen: tuple[Any, ...] | None
    late: bool
    in_graph: bool

    def __init__(self, layer: Float8Linear, own_rows: int) -> None:
        n, self.cols = self.size
        self.rows = -(-n // self.ranks)  # of a shard without padding
        self.own_rows = own_rows
        self.config = layer._config & ~recipes.BIAS
        self.dynamic_config = layer._rules.config if layer._rules.delayed else self.config
        self._granularity = {
            "q": layer.recipe.output.b.granularity,
            "qt": layer.recipe.grad_input.b.granularity,
        }
        # Where shards cut 128x128 blocks, each rank has the maxima of all blocks, and all scales.
        in_blocks = Granularity.BLOCK_128X128 in self._granularity.values()
        self.cuts_blocks = in_blocks and n > self.rows and self.rows % BLOCK != 0
        self.whole_rows = n if in_blocks else 0
        self.first_row = self.group.rank() * self.rows if own_rows > 0 else 0
        if self.cuts_blocks and len(set(self._granularity.values())) > 1:
            raise ValueError(
                f"float8: layer {layer._layer_name!r}: {self.ranks} ranks hold {self.rows} rows each of a "
                f"weight of {n} rows, which cuts its blocks of 128 rows, and its other copy in fp8 has "
                "scales of another granularity; convert this layer without "
                "enable_fsdp_float8_all_gather, in a conversion with a module_filter_fn of its own"
            )
        self.words = self._counts(_ops.BOTH_COPIES)
        in_qt = self._granularity["qt"]
        self.late = not layer._rules.delayed and in_qt in (Granularity.TENSOR, Granularity.AXIS)
        self.kept = COPIES[:1] if self.late else COPIES
        of_qt = layer.recipe.grad_input.b
        self._one_scale = in_qt is Granularity.TENSOR and of_qt == layer.recipe.output.b
        self._words: dict[str, Tensor] = {}  # the maxima that the cast of a late qt takes
        self._cast_late: tuple[Any, Tensor] | None = None  # a late qt for the next gather
        self._shards: dict[str, Tensor] = {}
        self._buffers: tuple[Tensor, ...] = ()  # q and qt of a cast in which the shards lie
        self._of_cast: tuple[
            int, ...
        ] = ()  # what the layout of the last cast's copies follows from
        self._cast_scales: tuple[Tensor, ...] = ()  # in these buffers
        self._scales: dict[str, Tensor] = {}

    @property
    def is_one_pass(self) -> bool:
        """Tells whether a cast of whole blocks finds its maxima itself."""
        return not self.cuts_blocks and set(self._granularity.values()) == {
            Granularity.BLOCK_128X128
        }

    def granularity(self, name: str) -> Granularity:
        """Returns the elements that share a scale of a copy."""
        return self._granularity[name]

    def shard(self, name: str) -> Tensor:
        """Returns what this rank gives to a gather of a copy: bytes in the shape of its shard."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.in_graph = True
        if name == "q" or not self.late:
            return self._shards[name].view(self.rows, self.cols)
        assert self._cast_late is not None
        _, qt = self._cast_late
        self._cast_late = None
        return qt

    @property
    def has_late(self) -> bool:
        """Tells whether qt has been cast for the gather that comes next."""
        return self._cast_late is not None and self._cast_late[0] is self._seen

    def set_words(self, amax: Tensor, row_amax: Tensor) -> None:
        """Takes the maxima of the whole weight, for the cast of a late qt."""
        if self.late:
            amax, row_amax = self.words_for(_ops.QT_ALONE, amax, row_amax)
            self._take(self._words, "amax", amax)
            self._take(self._words, "row_amax", row_amax)

    def words_for(self, copies: int, amax: Tensor, row_amax: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the part of the weight's words that a cast into these copies takes."""
        count, rows = self._counts(copies)
        # Those of columns, which qt with scales of its lines has, come first; the tensor's is the last.
        in_lines = copies == _ops.QT_ALONE and self._granularity["qt"] is Granularity.AXIS
        begin = 0 if in_lines else amax.numel() - count
        if amax.numel() != count:
            amax = amax[begin : begin + count]
        if row_amax.numel() < rows:
            row_amax = row_amax.new_empty(rows)  # a cast into one copy does not read them
        return amax, row_amax if row_amax.numel() == rows else row_amax[:rows]

    def _counts(self, copies: int) -> tuple[int, int]:
        """Returns how many words a cast into these copies takes."""
        return _amax_words(self.rows, self.cols, self.dynamic_config, self.whole_rows, copies)

    @property
    def late_words(self) -> tuple[Tensor, Tensor]:
        """Returns the maxima that the cast of a late qt takes."""
        return self._words["amax"], self._words["row_amax"]

    def set_late(self, qt: Tensor) -> tuple[Tensor, Tensor] | None:
        """Takes a late qt; returns where its scales are to be copied to, and the scales."""
        rows = max(self.own_rows, 1)
        of_cast = (self.rows, rows, self.cols, self.dynamic_config)
        at = layout(*of_cast, _ops.WEIGHT, _ops.QT_ALONE, True, self.whole_rows)
        if at.qt_pitch == rows == self.rows:
            lines = qt[: self.cols * rows]
        else:
            lines = qt[: self.cols * at.qt_pitch].view(self.cols, at.qt_pitch)[:, :rows]
            lines = _packed(lines, self.cols, self.rows)
        self._cast_late = self._seen, lines.view(self.rows, self.cols)
        if self._one_scale:
            return None
        scales = qt[at.qt_scales :].view(torch.float32)
        count = 1 if self._granularity["qt"] is Granularity.TENSOR else self.cols
        if "qt" not in self._scales:
            with torch.inference_mode(False):  # or nothing else could write them
                self._scales["qt"] = scales.new_empty(count)
        return self._scales["qt"], scales[:count]

    @property
    def keeps_buffers(self) -> bool:
        """Tells whether a cast overwrites the copies of the cast before."""
        return bool(self._buffers)

    def buffers(self, padded_rows: int = 0) -> tuple[Tensor, ...]:
        """Returns q and qt that a cast fills: those of the last cast, or new ones.

        padded_rows: as in `set_shard`.
        """
        both = not self.late
        if padded_rows:
            sizes = _quantized_bytes(padded_rows, self.cols, self.config, both, 0)
        else:
            rows = self.rows if self.whole_rows else -(-self.rows // 16) * 16
            sizes = _quantized_bytes(rows, self.cols, self.dynamic_config, both, self.whole_rows)
        # Nothing else writes to tensors of an inference mode.
        writable = torch.is_inference_mode_enabled() or not any(
            buffer.is_inference() for buffer in self._buffers
        )
        if writable and tuple(buffer.numel() for buffer in self._buffers) == sizes:
            return self._buffers
        return tuple(torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes)

    def _take(self, to: dict[str, Tensor], name: str, new: Tensor) -> None:
        """Keeps a shard or scales, where they were before if a graph reads them there."""
        if self.in_graph and name in to:
            if to[name].data_ptr() != new.data_ptr():
                to[name].copy_(new)
        else:
            to[name] = new

    def set_shard(self, q: Tensor, qt: Tensor, padded_rows: int = 0) -> Tensor:
        """Takes the copies of the shard that are kept; returns the scales, for `set_scales`.

        padded_rows: those of what was cast as if it were the whole weight.
        """
        rows = max(self.own_rows, 1)  # of the operand
        if padded_rows:
            of_cast = (padded_rows, padded_rows, self.cols, self.config)
        else:
            of_cast = (self.rows, rows, self.cols, self.dynamic_config)
        in_place = bool(self._buffers) and q is self._buffers[0] and of_cast == self._of_cast
        if not in_place:
            copies = _ops.copies_of(not self.late)
            at = layout(*of_cast, _ops.WEIGHT, copies, padded_rows == 0, self.whole_rows)
            own = dict(zip(COPIES, at.copies(q, qt, padded_rows or rows, self.cols), strict=True))
            cut = {"q": (slice(rows), slice(self.cols)), "qt": (slice(None), slice(rows))}
            sizes = {"q": (self.rows, self.cols), "qt": (self.cols, self.rows)}
            for name in self.kept:
                lines = own[name].data[cut[name]]  # type: ignore[union-attr]
                self._take(self._shards, name, _packed(lines, *sizes[name]))
            lie_there = all(map(self._lies_in, self.kept, (q, qt)))
            self._buffers = (q, qt) if lie_there else ()
            self._of_cast = of_cast
            scales = tuple(own[name].scales for name in self.kept)  # type: ignore[union-attr]
            self._cast_scales = scales if lie_there else ()
        else:
            scales = self._cast_scales
        found = []
        if not (in_place and self._granularity["q"] is Granularity.TENSOR):
            found.append(self._own_q_scales(scales[0], rows))
        if len(scales) == 2 and not (
            in_place and self._granularity["qt"] is not Granularity.BLOCK_128X128
        ):
            found.append(self._own_qt_scales(scales[1], rows))
        if self.late and self._one_scale:
            self._scales["qt"] = self._scales["q"]
        return torch.cat(found) if found else scales[0][:0]

    def _lies_in(self, name: str, buffer: Tensor) -> bool:
        return self._shards[name].data_ptr() == buffer.data_ptr()

    def _alone(self, scales: Tensor) -> Tensor:
        """Returns scales that keep no buffer in which the shards do not lie."""
        return scales if self._buffers else scales.clone()

    def _own_q_scales(self, scales: Tensor, rows: int) -> Tensor:
        granularity = self._granularity["q"]
        if granularity is Granularity.TENSOR:
            self._take(self._scales, "q", self._alone(scales[:1]))
            return scales[:0]
        if self.cuts_blocks:
            count = blocks(self.size[0]) * in_4s(blocks(self.cols))
            self._take(self._scales, "q", scales[:count].clone())
            return scales[:0]
        pitch = 1 if granularity is Granularity.AXIS else in_4s(blocks(self.cols))
        lines = rows if granularity is Granularity.AXIS else blocks(rows)
        most = self.rows if granularity is Granularity.AXIS else blocks(self.rows)
        own = scales.new_ones(most * pitch)  # rows that are only padding have the scale 1
        own[: lines * pitch] = scales[: lines * pitch]
        return own

    def _own_qt_scales(self, scales: Tensor, rows: int) -> Tensor:
        granularity = self._granularity["qt"]
        if granularity is not Granularity.BLOCK_128X128:
            count = 1 if granularity is Granularity.TENSOR else self.cols
            self._take(self._scales, "qt", self._alone(scales[:count]))
            return scales[:0]
        down = blocks(self.cols)
        if self.cuts_blocks:
            count = down * in_4s(blocks(self.size[0]))
            self._take(self._scales, "qt", scales[:count].clone())
            return scales[:0]
        own = scales.new_ones((down, blocks(self.rows)))
        pitch = in_4s(blocks(rows))
        own[:, : blocks(rows)] = scales[: down * pitch].view(down, pitch)[:, : blocks(rows)]
        return own.flatten()

    def set_scales(self, gathered: Tensor) -> None:
        """Takes what `cast` returned on every rank, a row each."""
        if self.cuts_blocks:
            return
        n = self.size[0]
        if self._granularity["q"] is Granularity.AXIS:
            self._take(self._scales, "q", _aligned(gathered[:, : self.rows].reshape(-1)[:n]))
        elif self._granularity["q"] is Granularity.BLOCK_128X128:
            pitch = in_4s(blocks(self.cols))
            count = blocks(self.rows) * pitch
            of_blocks = gathered[:, :count].reshape(-1)[: blocks(n) * pitch]
            self._take(self._scales, "q", _aligned(of_blocks))
        if self._granularity["qt"] is Granularity.BLOCK_128X128:
            down, across = blocks(self.cols), blocks(self.rows)
            own = gathered[:, -down * across :].view(-1, down, across)
            whole = own.new_ones((down, in_4s(blocks(n))))
            whole[:, : blocks(n)] = own.transpose(0, 1).reshape(down, -1)[:, : blocks(n)]
            self._take(self._scales, "qt", whole.flatten())


@functools.cache
def _quantized_bytes(
    rows: int, cols: int, config: int, both: bool, whole_rows: int
) -> tuple[int, ...]:
    sizes = torch.ops.float8.quantized_bytes(rows, cols, config, _ops.WEIGHT, both, whole_rows)
    return tuple(sizes)


@functools.cache
def _amax_words(rows: int, cols: int, config: int, whole_rows: int, copies: int) -> tuple[int, int]:
    return tuple(torch.ops.float8.amax_words(rows, cols, config, _ops.WEIGHT, whole_rows, copies))


def _packed(lines: Tensor, most_lines: int, most_length: int) -> Tensor:
    """Returns a copy's lines without gaps, and with zeros where another shard has more."""
    if lines.is_contiguous() and lines.shape == (most_lines, most_length):
        return lines
    out = lines.new_zeros((most_lines, most_length))
    out[: lines.shape[0], : lines.shape[1]] = lines
    return out


def _aligned(scales: Tensor) -> Tensor:
    return scales if scales.data_ptr() % 16 == 0 else scales.clone()
