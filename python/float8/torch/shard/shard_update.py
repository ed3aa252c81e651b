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
from float8.torch.shard.weight_gather import WeightGather


class ShardUpdate:
    """A weight that FSDP gathers in fp8.

    words: how many maxima the update finds, of the columns and the weight, and of the rows.
    copies: those that it casts into; empty ones where a cast needs maxima before.
    """

    state = _ops.NO_BYTES  # a gather has no fingerprint

    def __init__(self, parameter: Any, gather: WeightGather, dtype: int) -> None:
        self.parameter: Any = parameter
        self.memory: Tensor = parameter._local_tensor.plain()
        self.dtype = dtype
        self.scale_state = gather.scales
        self._gather = gather
        self.words = 0, 0
        self.copies: tuple[Tensor, ...] = (_ops.NO_BYTES, _ops.NO_BYTES)
        if gather.scales is not None:
            self.config, self.rows_max = gather.config, 0
            self.scales = gather.scale_view
            self.copies = gather.buffers(gather.own_rows)
            return
        self.config, self.rows_max = gather.dynamic_config, gather.rows
        self.scales = _ops.NO_BYTES
        if gather.is_one_pass:
            self.copies = gather.buffers()
        else:
            rows = gather.rows if Granularity.AXIS is gather.granularity("q") else 0
            self.words = gather.words[0], rows

    def rows_of(self, row_amax: Tensor) -> Tensor:
        """Returns the words of this rank's rows, of which others may have more."""
        return row_amax[: self.memory.shape[0]]

    def before(self) -> None:
        """Notes that the shard is about to change."""
        local = self.parameter._local_tensor
        local.changes.note(local)
        if self.scale_state is not None:  # the launch records the amax, as casts of shards do
            take_back([self._gather])
            self._gather.amax = self._gather.amax.after_cast(self._gather)

    def after(self, amax: Tensor, row_amax: Tensor) -> None:
        """Keeps the maxima for the next cast of the shard as it is now, or the copies."""
        if self.words == (0, 0):
            self._gather.keep_copies(self.parameter, self.copies)
        else:
            self._gather.keep_maxima(self.parameter, amax, row_amax)


def shard_update(parameter: Any) -> ShardUpdate | None:
    """Returns the shard of a parameter, None where an update finds nothing for its casts."""
    gather = fsdp.gather_of_weight(parameter)
    if not isinstance(gather, WeightGather):
        return None
    own = parameter._local_tensor.dtype
    rounded = gather.cast_type(own)
    memory = parameter._local_tensor
    if (
        gather.own_rows == 0
        or not (memory.is_cuda or gather.config & recipes.EMULATE)
        or not _has_use(gather)
        or gather.gathered_type(own) not in (own, rounded)
        or rounded not in _ops.ELEMENT_TYPES
        or own not in (rounded, torch.float32)
        or gather.is_unknowable(parameter)
    ):
        return None
    return ShardUpdate(parameter, gather, _ops.ELEMENT_TYPES[rounded])


def _has_use(gather: WeightGather) -> bool:
    """Tells whether an update can find the maxima of a cast, or make it."""
    if gather.scales is not None:  # casts are of whole 16 rows
        return not gather.first_step and gather.own_rows % 16 == 0
    return gather.whole_rows == 0 or gather.is_one_pass
