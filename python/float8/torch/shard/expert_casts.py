"""The casts of FSDP's shards of experts' weights, once a step.

An expert has scales of its own, so that ranks with whole experts reduce nothing. Where they have parts of each
expert, one all-reduce has the maxima of all weights. One all-gather has the scales. Nothing waits for the device.
Delayed scaling has one scale for all experts, which is known behind a first step: there one all-reduce has the maxima.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from float8.torch.amaxes import take_back
from float8.torch.ranks import collectives
from float8.torch.ranks.collectives import Operation
from float8.torch.shard.shard_casts import compare, gather_scales, names_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from float8.torch.shard.expert_gather import ExpertGather
    from float8.torch.shard.expert_pair import SecondGather


@torch.no_grad()
def cast_experts(weights: Sequence[tuple[ExpertGather | SecondGather, DTensor]]) -> None:
    """Casts the shards of weights on all ranks of their group, which is the same for all weights.

    All ranks call it with the same weights in the same order, which the first call with a weight checks. Where
    two weights are computed as one, both are cast.
    """
    if not weights:
        return
    of = _in_pairs(dict(weights))
    compare(list(of))
    gathers: list[ExpertGather] = [gather for gather in of if gather.casts]
    take_back(gathers)
    for gather in gathers:
        if gather.scales is not None:
            gather.amax = gather.amax.after_cast(gather)
    operands = [[gather.operand(of[each]) for each in gather.casts] for gather in gathers]
    words = _find_words(
        [(gather, [of[each] for each in gather.casts]) for gather in gathers], operands
    )
    own = []
    for gather, shards, of_weight in zip(gathers, operands, words, strict=True):
        parts = gather.cast_into_shards(shards, of_weight)
        own.append(torch.cat(parts) if parts else shards[0].new_empty(0, dtype=torch.float32))
    for each, weight in of.items():
        each.set_cast(weight)
    gather_scales(gathers, own)


def _in_pairs(weights: dict[Any, DTensor]) -> dict[Any, DTensor]:
    """Returns weights by their gathers, each beside the one that is computed as one weight with it."""
    return {
        each: weights[each] if each in weights else each.latest()
        for gather in weights
        for each in gather.pair
    }


def _find_words(
    weights: Sequence[tuple[ExpertGather, Sequence[DTensor]]], operands: Sequence[Sequence[Tensor]]
) -> Sequence[tuple[Tensor | None, Tensor | None]]:
    """Returns the maxima of each weight that an optimizer found, or that has scales of more than this rank's rows."""
    found: dict[ExpertGather, tuple[Tensor | None, Tensor | None]] = {
        gather: gather.words_of(of_cast, own)
        for (gather, of_cast), own in zip(weights, operands, strict=True)
    }
    gathers = [gather for gather, _ in weights]
    for gather in gathers:
        pair: Any = gather.pair
        if gather.second is not None and gather.takes_maxima:  # a NaN is the largest word
            amaxes, row_amaxes = zip(*(found[each] for each in pair), strict=True)
            of_both = torch.maximum(*amaxes)
            found.update(zip(pair, ((of_both, rows) for rows in row_amaxes), strict=True))
    cut = [gather for gather in gathers if gather.spans_ranks]
    spanning = {id(amax): amax for amax, _ in map(found.__getitem__, cut) if amax is not None}
    words = [amax for amax in spanning.values() if amax.numel() > 0]
    if words:
        reduced = torch.cat(words)
        operation = Operation("the amax all-reduce of experts", names_of(cut))
        collectives.all_reduce_max(reduced, gathers[0].group, operation)
        torch._foreach_copy_(words, torch.split(reduced, [each.numel() for each in words]))
    return list(found.values())
