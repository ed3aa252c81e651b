"""The casts of FSDP's shards of experts' weights, once a step.

An expert has scales of its own, so that ranks with whole experts reduce nothing. Where they have parts of each
expert, one all-reduce has the maxima of all weights. One all-gather has the scales. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from float8.torch.ranks import collectives
from float8.torch.ranks.collectives import Operation
from float8.torch.shard.shard_casts import compare, gather_scales, names_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from float8.torch.shard.expert_gather import ExpertGather, SecondGather


@torch.no_grad()
def cast_experts(weights: Sequence[tuple[ExpertGather | SecondGather, DTensor]]) -> None:
    """Casts the shards of weights on all ranks of their group, which is the same for all weights.

    All ranks call it with the same weights in the same order, which the first call with a weight checks. Where
    two weights have their copies together, both are cast.
    """
    if not weights:
        return
    of = _in_pairs(dict(weights))
    compare(list(of))
    gathers: list[ExpertGather] = [gather for gather in of if gather is gather.pair[0]]
    operands = [[gather.operand(of[each]) for each in gather.pair] for gather in gathers]
    words = _find_words(gathers, operands)
    own = [
        torch.cat(parts) if parts else own[0].new_empty(0, dtype=torch.float32)
        for own, parts in (
            (own, gather.cast_into_shards(own, of_weight))
            for gather, own, of_weight in zip(gathers, operands, words, strict=True)
        )
    ]
    for gather, weight in of.items():
        gather.set_cast(weight)
    gather_scales(gathers, own)


def _in_pairs(weights: dict[Any, DTensor]) -> dict[Any, DTensor]:
    """Returns weights by their gathers, each beside the one that has its copies together with it."""
    return {
        each: weights[each] if each in weights else each.latest()
        for gather in weights
        for each in gather.pair
    }


def _find_words(
    gathers: Sequence[ExpertGather], operands: Sequence[Sequence[Tensor]]
) -> Sequence[tuple[Tensor | None, Tensor | None]]:
    """Returns the maxima of each weight of which ranks have parts of the experts."""
    found = [
        gather.find_words(*own) if gather.is_cut else (None, None)
        for gather, own in zip(gathers, operands, strict=True)
    ]
    spanning = [amax for amax, _ in found if amax is not None and amax.numel() > 0]
    if spanning:
        cut = [gather for gather in gathers if gather.is_cut]
        reduced = torch.cat(spanning)
        # A NaN is the largest word, so it wins on every rank.
        operation = Operation("the amax all-reduce of experts", names_of(cut))
        collectives.all_reduce_max(reduced, gathers[0].group, operation)
        torch._foreach_copy_(spanning, torch.split(reduced, [each.numel() for each in spanning]))
    return found
