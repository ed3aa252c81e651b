"""Two weights of experts that are computed as one (w1 and w3), in the gathers of FSDP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from float8.recipes import Granularity
from float8.torch.shard.copy_layout import BLOCK
from float8.torch.shard.expert_casts import cast_experts
from float8.torch.shard.expert_gather import ExpertGather, wrong_shape
from float8.torch.shard.gather import Gather

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from float8.torch.experts.delayed import ExpertLinear


class SecondGather(Gather):
    """The shard of a weight whose rows are in the copies of another one's gather (w3 in those of w1).

    It is watched as others are, and a change of it makes both be cast again; ranks give nothing else for it.
    """

    def __init__(self, layer: ExpertLinear, dtype: torch.dtype, first: ExpertGather) -> None:
        super().__init__(layer, dtype, first.stored_size, first.group, first.device)
        self._own_shape = tuple(map(int, layer.weight._local_tensor.shape))
        self._expected = (first._own, *map(int, self.size[1:]))
        first.make_pair_with(self)
        self._nothing = torch.empty((0, *self.size[1:]), device=self.device, dtype=torch.uint8)
        self.whole_size = self._nothing.shape

    @property
    def casts(self) -> tuple[Gather, ...]:
        return ()

    @property
    def config(self) -> int:
        first: Any = self.pair[0]
        config: int = first.config
        return config

    def maxima_of_update(self) -> tuple[int, int] | None:
        """Returns what that of the other weight does, which has as many rows."""
        first: Any = self.pair[0]
        words: tuple[int, int] | None = first.maxima_of_update()
        return words

    def facts(self) -> str:
        wrong = wrong_shape(self._own_shape, self._expected)
        return f"{self._what}, as one weight with another{wrong}"

    def shard(self, name: str) -> Tensor:
        return self._nothing

    def cast(self, weight: DTensor) -> None:
        cast_experts([(self, weight)])


def make_pair(first: ExpertLinear, second: ExpertLinear) -> tuple[ExpertGather, Gather]:
    """Returns the gathers of w1 and w3, which ranks share in one way."""
    one = ExpertGather(first, first.weight.dtype, may_have_second=True)
    if one.has_second:
        return one, SecondGather(second, second.weight.dtype, one)
    other = ExpertGather(second, second.weight.dtype)
    cuts_blocks = Granularity.BLOCK_128X128 in one._granularity.values() and one.size[1] % BLOCK
    if not cuts_blocks:  # of 128x128, which would have rows of both
        one.make_pair_with(other)
    return one, other
