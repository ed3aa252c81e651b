"""The casts of FSDP's shards of many weights, once a step, with the scales of the whole weights.

The maxima of all weights are reduced in one all-reduce for each group of ranks that shares them:
FSDP's, and that of tensor parallelism. Delayed scaling has scales after its first step, and needs
none. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from float8.torch import _ops
from float8.torch.amaxes import record_amax, take_back
from float8.torch.ranks import agreement, collectives
from float8.torch.ranks.collectives import Operation

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from float8.torch.scales import ScaleState
    from float8.torch.shard.gather import Gather
    from float8.torch.shard.weight_gather import WeightGather

_ROWS = 16  # a weight that is cast as a whole has multiples of so many rows
_PIECE = 1 << 27  # elements of the weights without copies to cast into that are cast at once


@torch.no_grad()
def cast_shards(weights: Sequence[tuple[WeightGather, DTensor]]) -> None:
    """Casts the shards of weights on all ranks of their groups; FSDP's is the same for all weights.

    Few launches find the maxima of all weights and cast them, and one all-gather has all scales. All
    ranks call it with the same weights in the same order, which the first call with a weight checks.
    """
    if not weights:
        return
    compare([gather for gather, _ in weights])
    weights = [each for each in weights if not _is_cast_by_optimizer(*each)]
    take_back([gather for gather, _ in weights])
    delayed: dict[ScaleState, list[tuple[WeightGather, DTensor]]] = {}
    dynamic = []
    for gather, weight in weights:
        if gather.scales is not None:
            gather.amax = gather.amax.after_cast(gather)
        if gather.scales is not None and not gather.first_step:
            delayed.setdefault(gather.scales, []).append((gather, weight))
        else:
            dynamic.append((gather, weight))
    for scales, own in delayed.items():
        _cast_delayed(own, scales)
    if dynamic:
        _cast_dynamic(dynamic)


def _is_cast_by_optimizer(gather: WeightGather, weight: DTensor) -> bool:
    """Takes the copies with a delayed scale that an optimizer of float8 made, if they are there."""
    if gather.scales is None or gather.first_step or (copies := gather.take_copies(weight)) is None:
        return False
    q, qt = copies
    gather.set_shard(q, qt, gather.own_rows)
    gather.set_cast(weight)
    return True


def _cast_delayed(weights: Sequence[tuple[WeightGather, DTensor]], scales: ScaleState) -> None:
    """Casts shards with the scales of earlier steps, and records their amaxes."""
    rest = list(weights)
    for gathers in _pieces([gather for gather, _ in weights]):
        some, rest = rest[: len(gathers)], rest[len(gathers) :]
        operands = _operands(some, _ROWS)
        copies = [
            copy
            for gather, operand in zip(gathers, operands, strict=True)
            for copy in gather.buffers(operand.shape[0])
        ]
        views = [gather.scale_view for gather in gathers]
        rounded = cast_types(operands, gathers)
        config = gathers[0].config
        _ops.quantize_list(operands, config, _ops.WEIGHT, views, scales.layout, rounded, copies)
        for (gather, weight), operand, q, qt in zip(
            some, operands, copies[::2], copies[1::2], strict=True
        ):
            gather.set_shard(q, qt, operand.shape[0])
            gather.set_cast(weight)


def _cast_dynamic(weights: Sequence[tuple[WeightGather, DTensor]]) -> None:
    """Casts shards with scales of the weights' maxima."""
    gathers = [gather for gather, _ in weights]
    operands = _operands(weights)
    words = _find_words(weights, operands)
    own: list[Tensor] = []
    at = 0
    for some in _pieces(gathers):
        end = at + len(some)
        own += _cast(weights[at:end], operands[at:end], words[at:end])
        at = end
    for (gather, weight), of_weight in zip(weights, words, strict=True):
        gather.set_words(*of_weight)
        gather.set_cast(weight)
    gather_scales(gathers, own)


@torch.no_grad()
def cast_late(gathers: Sequence[WeightGather]) -> None:
    """Casts qt of shards, of the weights whose qt is late, for the gather that comes next.

    It overlaps with the compute of other units, which leaves each launch to wait for a GEMM to end. So it
    is one cast, and a copy of scales where qt has scales of its own.
    """
    gathers = [gather for gather in gathers if gather.late]
    operands = _operands([(gather, gather.weight) for gather in gathers])
    words = [gather.late_words for gather in gathers]
    cast = _cast_shards(gathers, operands, words, [_ops.QT_ALONE] * len(gathers), None)
    found = [gather.set_late(qt) for gather, qt in zip(gathers, cast[1::2], strict=True)]
    scales = [pair for pair in found if pair is not None]
    if scales:
        torch._foreach_copy_([to for to, _ in scales], [of for _, of in scales])


def names_of(gathers: Sequence[Gather]) -> Callable[[], list[str]]:
    return lambda: [gather.name for gather in gathers]


def _of_tensor_groups(gathers: Sequence[Gather]) -> dict[Any, list[int]]:
    """Returns the groups of tensor parallelism, and the indices of their weights."""
    groups: dict[Any, list[int]] = {}
    for i, gather in enumerate(gathers):
        if gather.tensor_group is not None:
            groups.setdefault(gather.tensor_group, []).append(i)
    return groups


def compare(gathers: Sequence[Gather]) -> None:
    """Raises on all ranks where they have not the same weights; each weight is compared once."""
    new = [gather for gather in gathers if not gather.agreed]
    if not new:
        return
    groups = {new[0].group: range(len(new)), **_of_tensor_groups(new)}
    for group, indices in groups.items():
        layers = {f"{i}: {new[i].name}": new[i].facts() for i in indices}
        agreement.agree_once(group, {"layers": layers}, new[0].device)
    for gather in new:
        gather.agreed = True


def _find_in_shards(
    gathers: Sequence[WeightGather], operands: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns the maxima of shards, those of one weight after those of the other."""
    configs = [gather.dynamic_config for gather in gathers]
    rows = [gather.rows for gather in gathers]
    where = (*_rows_in_wholes(gathers), cast_types(operands, gathers))
    found: tuple[Tensor, Tensor] = _ops.quantize_amax_list(
        operands, configs, _ops.WEIGHT, rows, *where
    )
    return found


def _maxima_of_shards(
    weights: Sequence[tuple[WeightGather, DTensor]], operands: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Returns the words of all shards that ranks reduce, in one tensor, and those of rows, apart.

    An optimizer of float8 found those of the shards that it updated.
    """
    found = {
        i: kept
        for i, (gather, weight) in enumerate(weights)
        if (kept := gather.take_maxima(weight))
    }
    rest = [i for i in range(len(weights)) if i not in found]
    if rest:
        gathers = [weights[i][0] for i in rest]
        amax, row_amax = _find_in_shards(gathers, [operands[i] for i in rest])
        of_rows = torch.split(row_amax, [gather.words[1] for gather in gathers])
        if not found:
            return amax, list(of_rows)
        of_rest = torch.split(amax, [gather.words[0] for gather in gathers])
        found.update(zip(rest, zip(of_rest, of_rows, strict=True), strict=True))
    parts = [found[i] for i in range(len(weights))]
    return torch.cat([amax for amax, _ in parts]), [rows for _, rows in parts]


def _find_words(
    weights: Sequence[tuple[WeightGather, DTensor]], operands: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Returns the maxima of the whole weights."""
    gathers = [gather for gather, _ in weights]
    amax, row_amax = _maxima_of_shards(weights, operands)
    # A NaN is the largest word, so it wins on every rank.
    if amax.numel() > 0:
        operation = Operation("the amax all-reduce", names_of(gathers))
        collectives.all_reduce_max(amax, gathers[0].group, operation)
    groups = _of_tensor_groups(gathers)
    parts = list(
        zip(
            torch.split(amax, [gather.words[0] for gather in gathers]),
            row_amax,
            strict=True,
        )
    )
    for group, indices in groups.items():
        shared = [w for i in indices for w in gathers[i].words_of_tensor_ranks(*parts[i])]
        shared = [words for words in shared if words.numel() > 0]
        if shared:
            own = [gathers[i] for i in indices]
            operation = Operation("the amax all-reduce of tensor parallel weights", names_of(own))
            reduced = torch.cat(shared)
            collectives.all_reduce_max(reduced, group, operation)
            torch._foreach_copy_(shared, torch.split(reduced, [each.numel() for each in shared]))
    for (own_amax, _), gather in zip(parts, gathers, strict=True):
        if gather.scales is not None:
            record_amax(own_amax, gather.scale_view, _ops.WEIGHT)
    return parts


def _pieces(gathers: Sequence[WeightGather]) -> Iterator[Sequence[WeightGather]]:
    """Yields runs of the weights: what a cast needs for a moment does not grow with the model.

    A weight whose copies are cast where they are needs nothing.
    """
    begin = size = 0
    for i, gather in enumerate(gathers):
        elements = 0 if gather.keeps_buffers else gather.rows * gather.cols
        if i > begin and elements and size + elements > _PIECE:
            yield gathers[begin:i]
            begin, size = i, 0
        size += elements
    yield gathers[begin:]


def _cast(
    weights: Sequence[tuple[WeightGather, DTensor]],
    operands: Sequence[Tensor],
    words: Sequence[tuple[Tensor, Tensor]],
) -> list[Tensor]:
    """Casts the copies of some shards that are kept; returns the scales that other ranks lack.

    An optimizer of float8 has made some of them.
    """
    made = [gather.take_copies(weight) for gather, weight in weights]
    into = [copies or gather.buffers() for copies, (gather, _) in zip(made, weights, strict=True)]
    rest = [i for i, copies in enumerate(made) if copies is None]
    if rest:
        gathers = [weights[i][0] for i in rest]
        copies = [_ops.copies_of(not gather.late) for gather in gathers]
        of_casts = [
            gather.words_for(each, *words[i])
            for gather, each, i in zip(gathers, copies, rest, strict=True)
        ]
        buffers = [buffer for i in rest for buffer in into[i]]
        _cast_shards(gathers, [operands[i] for i in rest], of_casts, copies, buffers)
    return [gather.set_shard(q, qt) for (gather, _), (q, qt) in zip(weights, into, strict=True)]


def _cast_shards(
    gathers: Sequence[WeightGather],
    operands: Sequence[Tensor],
    words: Sequence[tuple[Tensor, Tensor]],
    copies: Sequence[int],
    into: Sequence[Tensor] | None,
) -> list[Tensor]:
    """Casts shards into these copies of each, with the words of each."""
    configs = [gather.dynamic_config for gather in gathers]
    rows = [gather.rows for gather in gathers]
    amax, row_amax = map(list, zip(*words, strict=True))
    where = (*_rows_in_wholes(gathers), cast_types(operands, gathers))
    cast: list[Tensor] = _ops.quantize_shard_list(
        operands, amax, row_amax, configs, _ops.WEIGHT, rows, *where, into, copies
    )
    return cast


def _rows_in_wholes(gathers: Sequence[WeightGather]) -> tuple[list[int], list[int]]:
    """Returns the rows of the wholes and the first rows of shards that cut blocks, 0 for others."""
    return [gather.whole_rows for gather in gathers], [gather.first_row for gather in gathers]


def cast_types(operands: Sequence[Tensor], gathers: Sequence[WeightGather]) -> list[int]:
    """Returns the types that casts round operands to: x's, which a weight is rounded to before."""
    return [
        _ops.ELEMENT_TYPES.get(gather.cast_type(operand.dtype), -1)  # the op refuses other types
        for operand, gather in zip(operands, gathers, strict=True)
    ]


def _operands(weights: Sequence[tuple[WeightGather, DTensor]], multiple: int = 1) -> list[Tensor]:
    """Returns what casts read: the shards, or copies with zeros up to whole multiples of rows.

    Casts round float32 as they read it. From bfloat16 to float16 and back a copy is rounded, also where
    FSDP's policy has the one and x the other.
    """
    operands: list[Tensor] = []
    to: list[Tensor] = []
    of: list[Tensor] = []
    for gather, weight in weights:
        source = gather.source(weight)
        rows, cols = source.shape
        missing = -rows % multiple
        dtype = gather.cast_type(source.dtype)
        gathered = gather.gathered_type(source.dtype)
        if gathered not in (source.dtype, dtype):
            source = source.to(gathered)
        if source.dtype in (torch.float32, dtype) and not missing:
            operands.append(source)
            continue
        operand = source.new_empty((rows + missing, cols), dtype=dtype)
        operand[rows:].zero_()
        operands.append(operand)
        to.append(operand[:rows])
        of.append(source)
    if to:
        torch._foreach_copy_(to, of)
    return operands


def gather_scales(gathers: Sequence[Any], own: Sequence[Tensor]) -> None:
    """Gives each weight the scales of all ranks, of which `own` are this rank's."""
    sizes = [scales.numel() for scales in own]
    if sum(sizes) == 0:
        return
    group = gathers[0].group
    scales = torch.cat(list(own))
    everyone = scales.new_empty(group.size() * scales.numel())
    operation = Operation("the scales' all-gather", names_of(gathers))
    try:
        collectives.all_gather(everyone, scales, group, operation)
    except collectives.DistributedError:
        for gather in gathers:
            gather.forget()
        raise
    parts = torch.split(everyone.view(group.size(), -1), sizes, dim=1)
    for gather, part in zip(gathers, parts, strict=True):
        gather.set_scales(part)
