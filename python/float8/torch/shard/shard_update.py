"""The shard of a weight while an optimizer updates it, which leaves the maxima for the next cast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from float8 import recipes
from float8.recipes import Granularity
from float8.torch import _ops
from float8.torch.shard import fsdp
from float8.torch.shard.weight_gather import WeightGather


class ShardUpdate:
    """A weight that FSDP gathers in fp8 with dynamic scales.

    words: how many maxima the update finds, of the columns and the weight, and of the rows.
    copies: those that it casts into; empty ones where a cast needs maxima before.
    """

    state = _ops.NO_BYTES  # a gather has no fingerprint

    def __init__(self, parameter: Any, gather: WeightGather, dtype: int) -> None:
        self.parameter: Any = parameter
        self.memory: Tensor = parameter._local_tensor.plain()
        self.config = gather.dynamic_config
        self.dtype = dtype
        rows = gather.rows if Granularity.AXIS is gather.granularity("q") else 0
        self.words = gather.words[0], rows
        self.rows_max = gather.rows
        self.copies: tuple[Tensor, ...] = (_ops.NO_BYTES, _ops.NO_BYTES)
        if gather.is_one_visit:
            self.copies = gather.buffers()
        self._gather = gather

    def rows_of(self, row_amax: Tensor) -> Tensor:
        """Returns the words of this rank's rows, of which others may have more."""
        return row_amax[: self.memory.shape[0]]

    def before(self) -> None:
        """Notes that the shard is about to change."""
        local = self.parameter._local_tensor
        local.changes.note(local)

    def after(self, amax: Tensor, row_amax: Tensor) -> None:
        """Keeps the maxima for the next cast of the shard as it is now, or the copies."""
        if self._gather.is_one_visit:
            self._gather.keep_copies(self.parameter, self.copies)
        else:
            self._gather.keep_maxima(self.parameter, amax, row_amax)


def shard_update(parameter: Any) -> ShardUpdate | None:
    """Returns the shard of a parameter, None where an update finds nothing for its casts."""
    gather = fsdp.gather_of_weight(parameter)
    if not isinstance(gather, WeightGather) or gather.scales is not None:
        return None
    own = parameter._local_tensor.dtype
    rounded = gather.cast_type(own)
    memory = parameter._local_tensor
    if (
        gather.own_rows == 0
        or not (memory.is_cuda or gather.config & recipes.EMULATE)
        or (gather.whole_rows > 0 and not gather.is_one_visit)
        or gather.gathered_type(own) not in (own, rounded)
        or rounded not in _ops.ELEMENT_TYPES
        or own not in (rounded, torch.float32)
        or gather.is_unknowable(parameter)
    ):
        return None
    return ShardUpdate(parameter, gather, _ops.ELEMENT_TYPES[rounded])
