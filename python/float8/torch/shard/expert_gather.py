"""The weight of all experts of a module that FSDP shards, in fp8: its shards, and the copies of the whole.

Ranks hold whole experts (Shard(0)), or a part of the rows of each (Shard(1)). Every rank casts its part with
the scales of the experts, which are their own (expert_casts.py). Where expert parallelism shares the weight too,
"all experts" are those of a rank of it: FSDP's shards are of these, and no rank has scales of others. What ranks gather is bytes without gaps: of
q [experts][N][K], and of qt [experts][K][N], with as many experts as the first rank has. Scales do not travel
with a gather: ranks exchange them where they cast. Both copies are kept, and each cast overwrites them.

With delayed scaling all experts have one scale, that of the scale state, and a cast records the amax of this rank's
part there. In a first step ranks reduce the maximum of the weight, and a rank without experts casts zeros, since it
has the scale too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from float8 import recipes
from float8.recipes import Granularity
from float8.torch import _ops
from float8.torch.shard.copy_layout import BLOCK, blocks, copy_bytes, in_4s
from float8.torch.shard.expert_casts import cast_experts
from float8.torch.shard.expert_copies import maxima_of_both, maxima_of_update
from float8.torch.shard.gather import Gather, GatheredCopy, turned
from float8.torch.shard.weight_mesh import (
    dims_of_others,
    fsdp_dim,
    group_of_layer,
    size_without_fsdp,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from float8.torch.experts.delayed import ExpertLinear

_STRIDE = 8  # FLOAT8_EXPERT_SCALE_STRIDE of float8/expert_quantizer.h
_INVERSE = 4  # where a matrix's inverse scale is behind its scale


def obstacle(layer: ExpertLinear, param: Any) -> str | None:
    """Returns why FSDP gathers its parameter, a weight of experts, in high precision, None where in fp8."""
    weight, fsdp = param.sharded_param, fsdp_dim(param)
    placements = weight.placements
    if fsdp is None or getattr(placements[fsdp], "dim", None) not in (0, 1):
        return (
            f"it is shared as {placements}, and fp8 gathers are for Shard(0) and Shard(1) of FSDP"
        )
    if any(getattr(placements[i], "dim", None) != 0 for i in dims_of_others(weight, fsdp)):
        return (
            f"it is shared as {placements}, and beside FSDP only expert parallelism may share it, which gives whole "
            "experts to each rank (Shard(0))"
        )
    if placements[fsdp].dim == 0:
        return None
    if layer.is_transposed:
        return "it is stored as [experts, in_features, out_features], of which ranks have parts of in_features"
    ranks = weight.device_mesh.size(fsdp)
    rows, rest = divmod(weight.shape[1], ranks)
    if rest:
        return f"{ranks} ranks have other numbers of its {weight.shape[1]} rows of each expert"
    granularities = (layer.recipe.output.b.granularity, layer.recipe.grad_input.b.granularity)
    if Granularity.BLOCK_128X128 in granularities and rows % BLOCK != 0:
        return f"{ranks} ranks have {rows} rows of each expert, which cuts its blocks of 128x128"
    return None


def wrong_shape(shard: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Says what is wrong with the shape of a shard."""
    if shard == expected:
        return ""
    return f", and a shard of {list(shard)} in the place of {list(expected)}"


def _turned_config(layer: ExpertLinear) -> int:
    """Returns the config of casts whose q and qt are qt and q of a layer's."""
    recipe, config = layer.recipe, layer._config
    output, grad_input = recipe.output, recipe.grad_input
    turned_recipe = dataclasses.replace(
        recipe,
        output=dataclasses.replace(output, b=grad_input.b),
        grad_input=dataclasses.replace(grad_input, b=output.b),
    )
    return recipes.pack(
        turned_recipe,
        emulate=bool(config & recipes.EMULATE),
        saturate=bool(config & recipes.HOLD),
    )


class ExpertGather(Gather):
    """The shard of one weight of all experts in fp8, and the copies of the whole while they are needed.

    Two weights that are computed as one (w1 and w3) are a `pair`, whose copies have each expert's rows of both:
    those of the first one's gather. It casts and gathers both at once where it has_second: where all ranks have
    as many whole experts, since FSDP wants the size of the parameter itself where ranks pad or have parts of each
    expert. There each is cast with the scales of both and gathered by itself, and they are put together behind it.

    A weight that is stored as [experts][K][N] is cast as it lies: what such a cast calls q is qt here.
    """

    def __init__(
        self, layer: ExpertLinear, dtype: torch.dtype, may_have_second: bool = False
    ) -> None:
        weight: Any = layer.weight
        at = fsdp_dim(group_of_layer(layer)[1])
        assert at is not None  # or the weight has an obstacle
        self.fsdp_dim = at
        self.dim: int = weight.placements[at].dim
        local = weight._local_tensor
        stored_size = size_without_fsdp(weight, at)
        self.is_transposed = layer.is_transposed
        experts, n, k = turned(stored_size) if self.is_transposed else stored_size
        is_even = self.dim == 0 and experts % weight.device_mesh.size(at) == 0
        self.has_second = may_have_second and is_even
        n *= 1 + self.has_second
        size = torch.Size((experts, n, k))
        super().__init__(layer, dtype, size, weight.device_mesh.get_group(at), local.device)
        self.config = layer._config & ~recipes.BIAS
        # The cast of a weight as it is stored has other names for q and qt, and another config.
        self._of_cast = ("qt", "q") if self.is_transposed else ("q", "qt")
        self._cast_config = _turned_config(layer) if self.is_transposed else self.config
        self.stored_size = stored_size
        self._own_shape = tuple(map(int, local.shape))
        if self.dim == 0:
            self._own, self._part = self._own_shape[0], (-(-experts // self.ranks), n, k)
        else:
            self._own, self._part = experts, (experts, n // self.ranks, k)
        self._granularity = {
            "q": layer.recipe.output.b.granularity,
            "qt": layer.recipe.grad_input.b.granularity,
        }
        self.is_delayed = layer.recipe.delayed
        self._buffers: tuple[Tensor, ...] = ()  # q and qt of a cast, with their scales
        self._shards: dict[str, Tensor] = {}
        self._scales: dict[str, Tensor] = {}

    def facts(self) -> str:
        """Returns what all ranks of the group have in common, and what is wrong on this one."""
        experts, rank = int(self.size[0]), self.group.rank()
        most = self._part[0]
        own = max(0, min(most, experts - rank * most)) if self.dim == 0 else experts
        _, n, k = self._part
        expected = self._as_stored((own, n // len(self.casts), k))
        wrong = wrong_shape(self._own_shape, expected)
        how = f"Shard({self.dim}) of {self.ranks} ranks, x in {self.dtype}"
        pair = "" if len(self.pair) == 1 else ", as one weight with another"
        return f"{self._what}, {how}{pair}{wrong}"

    @property
    def casts(self) -> tuple[Gather, ...]:
        """Returns the gathers of the weights that its cast reads."""
        return self.pair if self.has_second else (self,)

    @property
    def whole_size(self) -> torch.Size:
        """Returns the experts, N and K of the copies that q and qt return."""
        experts, n, k = self.size
        if self.second is None or self.has_second:
            return self.size
        return torch.Size((experts, 2 * n, k))

    # The cast of the shard

    @property
    def is_cut(self) -> bool:
        """Tells whether ranks have parts of each expert, whose maxima they reduce."""
        return self.dim == 1

    @property
    def first_step(self) -> bool:
        """Tells whether delayed scaling has no scales for the weight yet."""
        layer = self._layer()
        return layer is not None and layer.in_first_step

    @property
    def spans_ranks(self) -> bool:
        """Tells whether the scales are of maxima that ranks reduce."""
        return self.first_step if self.is_delayed else self.is_cut

    @property
    def takes_maxima(self) -> bool:
        """Tells whether the scales are of more than this rank's rows of the weight."""
        return self.spans_ranks or (len(self.pair) > 1 and not self.has_second)

    def operand(self, weight: DTensor) -> Tensor:
        """Returns what a cast reads: the shard, where need be in another type."""
        source = self.source(weight)
        if self.is_delayed and self._own == 0:
            source = source.new_zeros(self._as_stored((1, *self._part[1:])))
        gathered, dtype = self.gathered_type(source.dtype), self.cast_type(source.dtype)
        if gathered not in (source.dtype, dtype):
            source = source.to(gathered)
        return source if source.dtype in (torch.float32, dtype) else source.to(dtype)

    def maxima_of_update(self) -> tuple[int, int] | None:
        """Returns how many maxima an optimizer finds for the cast of the shard, None where it finds none."""
        if self.is_delayed or self._own == 0:
            return None  # delayed scales need none
        words = maxima_of_update(self._own_shape, self._cast_config)
        return None if words == (0, 0) else words

    def words_of(
        self, weights: Sequence[DTensor], operands: Sequence[Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns the maxima of the shards as a cast takes them, which an optimizer of float8 may have found."""
        casts = zip(self.casts, weights, strict=True)
        kept = [words for gather, weight in casts if (words := gather.take_maxima(weight))]
        if len(kept) < len(operands):
            return self.find_words(*operands) if self.takes_maxima else (None, None)
        return maxima_of_both(kept, self._own)

    def find_words(self, operand: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the maxima of a part of each expert: those that span the parts, and those of its own rows."""
        if operand.shape[0] == 0:
            return operand.new_empty(0, dtype=torch.int32), operand.new_empty(0, dtype=torch.int32)
        words: tuple[Tensor, Tensor] = torch.ops.float8.experts_amax(
            operand, self._cast_config, self._code(operand)
        )
        return words

    def cast_into_shards(
        self, operands: Sequence[Tensor], words: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Casts the shards of the weights; returns the inverse scales that other ranks lack, for set_scales."""
        experts = self._own
        if not self._buffers:
            self._allocate()
        q, qt = self._buffers
        _, _, *at = self._layout()
        first, *second = operands
        if first.shape[0] > 0:
            how = (*words, self._cast_config, self._code(first), second[0] if second else None)
            torch.ops.float8.experts_cast(first, q, qt, *how, *self._part_of_state())
        q_pitch, q_scales, in_qt, qt_pitch, qt_scales = at
        own: list[Tensor] = []
        places = (
            (q, q_pitch, qt if in_qt else q, q_scales),
            (qt, qt_pitch, qt, qt_scales),
        )
        for name, place in zip(self._of_cast, places, strict=True):
            buffer, pitch, with_scales, begin = place
            lines, length = self._extents(name, self._part)
            shard = self._shards[name]
            if shard.data_ptr() != buffer.data_ptr() and experts > 0:
                copy = buffer[: experts * lines * pitch].view(experts, lines, pitch)
                shard.view(-1, lines, length)[:experts].copy_(copy[..., :length])
            if name == self._of_cast[0] and in_qt:
                continue  # they are those of the other copy
            scales = self._own_scales(name, with_scales, begin)
            if self._travels(name):
                own.append(scales.reshape(-1))
            else:
                self._scales[name].copy_(scales)
        return own

    def _part_of_state(self) -> tuple[Tensor | None, int]:
        """Returns the part of the scale state that casts read and raise, and its layout; none without delayed scaling."""
        layer = self._layer()
        assert layer is not None
        return layer.scales_on(self.device) if self.is_delayed else (None, 0)

    def _code(self, operand: Tensor) -> int:
        """Returns the type that a cast rounds to, -1 for one that no cast has and the op refuses."""
        return _ops.ELEMENT_TYPES.get(self.cast_type(operand.dtype), -1)

    def _layout(self) -> tuple[Any, ...]:
        shape = self._as_stored((max(self._own, 1), *self._part[1:]))
        over_ranks = self.takes_maxima or self.is_delayed
        return tuple(torch.ops.float8.experts_copies(*shape, self._cast_config, over_ranks))

    def _as_stored(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns a shape [experts][N][K] as that of the weight as it is stored."""
        return tuple(turned(torch.Size(shape)) if self.is_transposed else shape)

    @torch.inference_mode(False)  # or nothing else could write them
    def _allocate(self) -> None:
        """Makes the memory of the copies and scales, which stays: a CUDA graph may read it."""

        def zeros(size: int) -> Tensor:
            return torch.zeros(size, device=self.device, dtype=torch.uint8)

        q_bytes, qt_bytes, q_pitch, _, in_qt, qt_pitch, _ = self._layout()
        self._buffers = tuple(map(zeros, (q_bytes, qt_bytes)))
        pitches = (q_pitch, qt_pitch)
        for name, buffer, pitch in zip(self._of_cast, self._buffers, pitches, strict=True):
            lines, length = self._extents(name, self._part)
            size = self._part[0] * lines * length
            lies_there = pitch == length and self._own == self._part[0]
            shard = buffer[:size] if lies_there else zeros(size)
            self._shards[name] = shard.view(self._as_stored(self._part))
            if not (name == self._of_cast[0] and in_qt):
                shape = (self._matrices(self.size[0]), *self._scale_shape(name, self.size))
                self._scales[name] = torch.ones(shape, device=self.device, dtype=torch.float32)
        if in_qt:
            one, other = self._of_cast
            self._scales[one] = self._scales[other]

    # The inverse scales

    def _extents(self, name: str, shape: Sequence[int]) -> tuple[int, int]:
        """Returns the lines of each expert's copy, and their length."""
        return (shape[1], shape[2]) if name == "q" else (shape[2], shape[1])

    def _matrices(self, experts: int) -> int:
        """Returns how many matrices have scales of their own."""
        return 1 if self.is_delayed else experts

    def _scale_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the scales of one expert's copy."""
        lines, length = self._extents(name, shape)
        match self._granularity[name]:
            case Granularity.TENSOR:
                return (_STRIDE,)
            case Granularity.AXIS:
                return (lines,)
        return (blocks(lines), in_4s(blocks(length)))

    def _travels(self, name: str) -> bool:
        """Tells whether other ranks have some of the scales."""
        if self.is_delayed:
            return False
        if not self.is_cut:
            return self.ranks > 1
        granularity = self._granularity[name]
        in_rows = granularity is Granularity.AXIS and name == "q"
        return self.ranks > 1 and (in_rows or granularity is Granularity.BLOCK_128X128)

    def _own_scales(self, name: str, buffer: Tensor, begin: int) -> Tensor:
        """Returns the scales that the cast left, with ones for experts that are only padding."""
        inner = self._scale_shape(name, self._part)
        if self._granularity[name] is Granularity.TENSOR:
            begin -= 4 * _INVERSE
        floats = buffer[begin:].view(torch.float32)
        matrices = self._matrices(self._own)
        own = floats[: matrices * math.prod(inner)].view(matrices, *inner)
        if matrices == self._matrices(self._part[0]):
            return own
        padded = own.new_ones((self._part[0], *inner))
        padded[: self._own] = own
        return padded

    def _is_apart(self, name: str) -> bool:
        return name == self._of_cast[1] or self._scales["q"] is not self._scales["qt"]

    def set_scales(self, gathered: Tensor) -> None:
        """Takes what cast_into_shards returned on every rank, a row each."""
        begin = 0
        for name in self._of_cast:
            if not (self._is_apart(name) and self._travels(name)):
                continue
            inner = self._scale_shape(name, self._part)
            count = self._part[0] * math.prod(inner)
            parts = gathered[:, begin : begin + count].view(self.ranks, self._part[0], *inner)
            begin += count
            whole = self._scales[name]
            if not self.is_cut:
                whole.copy_(parts.flatten(0, 1)[: self.size[0]])
            elif name == "q":
                whole.copy_(parts.transpose(0, 1).flatten(1, 2))
            else:
                columns = blocks(self._part[1])
                of_rows = parts[..., :columns].permute(1, 2, 0, 3).flatten(2)
                whole[..., : of_rows.shape[-1]].copy_(of_rows)

    def cast(self, weight: DTensor) -> None:
        cast_experts([(self, weight)])

    def shard(self, name: str) -> Tensor:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.in_graph = True
        return self._shards[name]

    # The copies of the whole weight

    def q(self, dtype: torch.dtype, records: bool = False) -> GatheredCopy:
        """Returns q for an x of that type: [experts][N], rows in whole 128s. `records`: as in note_read."""
        copy = self._copy("q", dtype)
        self.note_read(records)
        return copy

    def qt(self, dtype: torch.dtype) -> GatheredCopy:
        """Returns qt for a dy of that type: [experts][K], rows in whole 128s."""
        return self._copy("qt", dtype)

    def parts(self, name: str, copy: GatheredCopy) -> tuple[Tensor, Tensor]:
        """Returns the elements and the inverse scales of a copy of the whole, without what pads them."""
        lines, length = self._extents(name, self.whole_size)
        experts, inner = self.size[0], self._scale_shape(name, self.whole_size)
        data = copy.data.view(experts, lines, -1)[..., :length]
        assert copy.scales is not None
        if self.is_delayed:
            return data, copy.scales[:1]
        if self._granularity[name] is Granularity.TENSOR:
            return data, copy.scales[: _STRIDE * (experts - 1) + 1 : _STRIDE]
        scales = copy.scales[: experts * math.prod(inner)].view(experts, *inner)
        return data, scales if len(inner) == 1 else scales[..., : blocks(length)]

    def _copy(self, name: str, dtype: torch.dtype) -> GatheredCopy:
        """Returns a copy of the weight, or of the pair, which lies in two gathers where they were not cast at once."""
        own: Any = self.pair if self.whole_size != self.size else (self,)
        parts = [each._lines(name, dtype) for each in own]
        lines, length = self._extents(name, self.whole_size)
        pitch = BLOCK * blocks(length)
        if len(parts) == 1 and pitch == length and parts[0].is_contiguous():
            data = parts[0]
        else:
            size = (self.size[0], lines, pitch)
            data = parts[0].new_empty(size) if pitch == length else parts[0].new_zeros(size)
            # The lines of q are below each other, those of qt side by side.
            into = data[..., :length].chunk(len(parts), 1 if name == "q" else 2)
            for to, part in zip(into, parts, strict=True):
                copy_bytes(to.unflatten(2, part.shape[2:]), part)
        scales = own[0]._scales[name] if len(own) == 1 else self._scales_of_pair(name, own)
        scales = scales.view(-1)
        if self._granularity[name] is Granularity.TENSOR:
            scales = scales[_INVERSE:]
        return GatheredCopy(data.view(-1), scales)

    def _lines(self, name: str, dtype: torch.dtype) -> Tensor:
        """Returns the gathered elements [experts][lines][length]; of a qt in parts [experts][lines][ranks][length]."""
        experts, n, k = self.size
        data = self._whole(name, dtype)[: self.size.numel()]
        if name == "q":
            return data.view(experts, n, k)
        if self.is_cut:
            return data.view(experts, self.ranks, k, self._part[1]).transpose(1, 2)
        return data.view(experts, k, n)

    def _scales_of_pair(self, name: str, own: Sequence[ExpertGather]) -> Tensor:
        """Returns the inverse scales of the copies of two weights together."""
        first, second = (each._scales[name] for each in own)
        if name == "q":
            return torch.cat((first, second), 1)
        if self._granularity[name] is Granularity.AXIS:
            return first  # a column has one for both
        columns = blocks(self.size[1])
        whole = first.new_ones((self.size[0], *self._scale_shape(name, self.whole_size)))
        whole[..., : 2 * columns] = torch.cat((first[..., :columns], second[..., :columns]), 2)
        return whole

    def _whole(self, name: str, dtype: torch.dtype) -> Tensor:
        """Returns the gathered bytes, of an expert all that ranks have of it, one rank after the other."""
        before = self._copies.get(name)
        data = self._gathered(name, dtype)
        if self.is_cut and self._copies.get(name) is not before and self.ranks > 1:
            # FSDP has put the parts of each expert next to each other; here they came rank by rank.
            data = data.view(self.ranks, self.size[0], -1).transpose(0, 1).reshape(-1)
            self._copies[name] = data
        return data
