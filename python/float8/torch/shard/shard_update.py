"""The shard of a weight while an optimizer updates it, which leaves the maxima for the next cast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from float8 import recipes
from float8.recipes import Granularity
from float8.torch import _ops
from float8.torch.amaxes import take_back
from float8.torch.shard import fsdp
from float8.torch.shard.expert_gather import ExpertGather
from float8.torch.shard.expert_pair import SecondGather
from float8.torch.shard.weight_gather import WeightGather


class ShardUpdate:
    """A weight that FSDP gathers in fp8.

    words: how many maxima the update finds, of the columns and the weight, and of the rows.
    copies: those that it casts into; empty ones where a cast needs maxima before.
    """

    state = _ops.NO_BYTES  # a gather has no fingerprint
    rows_max = 0
    scales = _ops.NO_BYTES
    scale_state: Any = None
    copies: tuple[Tensor, ...] = (_ops.NO_BYTES, _ops.NO_BYTES)
    words = 0, 0
    config: int

    def __init__(self, parameter: Any, dtype: int) -> None:
        self.parameter: Any = parameter
        self.memory: Tensor = parameter._local_tensor.plain()
        self.dtype = dtype

    def rows_of(self, row_amax: Tensor) -> Tensor:
        """Returns the words of this rank's rows, of which others may have more."""
        return row_amax

    def before(self) -> None:
        """Notes that the shard is about to change."""
        local = self.parameter._local_tensor
        local.changes.note(local)

    def after(self, amax: Tensor, row_amax: Tensor) -> None:
        """Keeps the maxima for the next cast of the shard as it is now, or the copies."""
        raise NotImplementedError


class _LinearUpdate(ShardUpdate):
    def __init__(self, parameter: Any, gather: WeightGather, dtype: int) -> None:
        super().__init__(parameter, dtype)
        self.scale_state = gather.scales
        self._gather = gather
        if gather.scales is not None:
            self.config = gather.config
            self.scales = gather.scale_view
            self.copies = gather.buffers(gather.own_rows)
            return
        self.config, self.rows_max = gather.dynamic_config, gather.rows
        if gather.is_one_pass:
            self.copies = gather.buffers()
        else:
            rows = gather.rows if Granularity.AXIS is gather.granularity("q") else 0
            self.words = gather.words[0], rows

    def rows_of(self, row_amax: Tensor) -> Tensor:
        return row_amax[: self.memory.shape[0]]

    def before(self) -> None:
        super().before()
        if self.scale_state is not None:  # the launch records the amax, as casts of shards do
            take_back([self._gather])
            self._gather.amax = self._gather.amax.after_cast(self._gather)

    def after(self, amax: Tensor, row_amax: Tensor) -> None:
        if self.words == (0, 0):
            self._gather.keep_copies(self.parameter, self.copies)
        else:
            self._gather.keep_maxima(self.parameter, amax, row_amax)


class _ExpertUpdate(ShardUpdate):
    def __init__(
        self,
        parameter: Any,
        gather: ExpertGather | SecondGather,
        dtype: int,
        words: tuple[int, int],
    ) -> None:
        super().__init__(parameter, dtype)
        self.config, self.words = gather.config, words
        self._gather = gather

    def after(self, amax: Tensor, row_amax: Tensor) -> None:
        self._gather.keep_maxima(self.parameter, amax, row_amax)


def shard_update(parameter: Any) -> ShardUpdate | None:
    """Returns the shard of a parameter, None where an update finds nothing for its casts."""
    gather = fsdp.gather_of_weight(parameter)
    if isinstance(gather, WeightGather) and _has_use(gather):
        dtype = _dtype_of_cast(gather, parameter)
        return None if dtype is None else _LinearUpdate(parameter, gather, dtype)
    if isinstance(gather, ExpertGather | SecondGather) and (words := gather.maxima_of_update()):
        dtype = _dtype_of_cast(gather, parameter)
        return None if dtype is None else _ExpertUpdate(parameter, gather, dtype, words)
    return None


def _dtype_of_cast(gather: Any, parameter: Any) -> int | None:
    """Returns the type that the next cast rounds a shard to as it reads it, None where an update cannot know it."""
    memory = parameter._local_tensor
    own = memory.dtype
    rounded = gather.cast_type(own)
    if (
        not (memory.is_cuda or gather.config & recipes.EMULATE)
        or gather.gathered_type(own) not in (own, rounded)
        or rounded not in _ops.ELEMENT_TYPES
        or own not in (rounded, torch.float32)
        or gather.is_unknowable(parameter)
    ):
        return None
    return _ops.ELEMENT_TYPES[rounded]


def _has_use(gather: WeightGather) -> bool:
    """Tells whether an update can find the maxima of a linear's cast, or make it."""
    if gather.own_rows == 0:
        return False
    if gather.scales is not None:  # casts are of whole 16 rows
        return not gather.first_step and gather.own_rows % 16 == 0
    return gather.whole_rows == 0 or gather.is_one_pass
