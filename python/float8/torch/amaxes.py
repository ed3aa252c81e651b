"""The amaxes that delayed scaling records in a scale state (scales.py), apart from the casts of linears.

A cast of a shard that FSDP gathers in fp8 records the weight's amax, ahead of the forwards that read the
copies. Without fp8 gathers a forward with gradients records it. So the amax of copies that no such
forward read is taken back: those of another type of x, of a weight that changed again, or of an
evaluation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

PART_BYTES = 16  # of a linear's part of a scale state


# A tensor parallel first step finds the amaxes of whole tensors apart from the casts. As in
# linear_forward, that the state changes is not declared.
_library: Any = torch.library.Library("float8", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("record_amax(Tensor amax, Tensor scales, int operand) -> Tensor")


@torch.library.impl(_library, "record_amax", "CompositeExplicitAutograd")
def _record_amax(amax: torch.Tensor, scales: torch.Tensor, operand: int) -> torch.Tensor:
    word = 3 * (scales.storage_offset() // PART_BYTES) + operand
    # set_ and out= resize what is too small.
    if (
        amax.dtype != torch.int32
        or amax.numel() != 1
        or scales.dtype != torch.uint8
        or not 0 <= operand < 3
        or 4 * (word + 1) > scales.untyped_storage().nbytes()
    ):
        raise ValueError(
            "float8: record_amax takes one int32 word, a linear's part of a scale state, and an "
            "operand from 0 to 2"
        )
    recorded = torch.empty(0, dtype=torch.int32, device=scales.device)
    recorded.set_(scales.untyped_storage(), word, (1,))  # type: ignore[call-overload]
    torch.maximum(recorded, amax, out=recorded)
    return amax.clone()


@torch.library.register_fake("float8::record_amax")  # type: ignore[untyped-decorator]
def _fake_record_amax(amax: torch.Tensor, scales: torch.Tensor, operand: int) -> torch.Tensor:
    return torch.empty_like(amax)


def record_amax(amax: torch.Tensor, scales: torch.Tensor, operand: int) -> torch.Tensor:
    """Raises the amax of an operand in a linear's part of a scale state; returns the amax.

    All operands of the linear have delayed scaling.
    """
    return torch.ops.float8.record_amax.default(amax, scales, operand)  # type: ignore[no-any-return]


class WeightAmax(NamedTuple):
    """What the casts of one weight recorded. Epochs are those of the scale state (scales.py)."""

    read: int | None = None  # the latest epoch in which a forward with gradients read a cast
    unread: int | None = None  # that of the latest cast, until such a forward reads it
    before: Tensor | None = None  # the word before that cast; None: 0

    def after_cast(self, gather: Any) -> WeightAmax:
        """Returns the same for the cast that comes, which raises the word.

        Nobody sees what a CUDA graph reads, and when it synchronises: its casts count as read.
        """
        epoch = gather.scales.epoch
        if gather.in_graph or gather.scales.in_graph or _is_capturing(gather):
            return WeightAmax(read=epoch)
        before = gather.amax_word.clone() if self.read == epoch else None
        return WeightAmax(self.read, epoch, before)


def take_back(gathers: Iterable[Any]) -> None:
    """Takes back the amaxes of casts that no forward with gradients read since the latest sync."""
    unread = [
        gather
        for gather in gathers
        if gather.scales is not None and gather.amax.unread == gather.scales.epoch
    ]
    if not unread or _is_capturing(unread[0]):
        return
    for gather in unread:
        before = gather.amax.before
        if before is None:
            gather.amax_word.zero_()
        else:
            gather.amax_word.copy_(before)
        gather.amax = WeightAmax(read=gather.amax.read)


def _is_capturing(gather: Any) -> bool:
    return gather.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
