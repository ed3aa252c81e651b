"""The fp8 copies of experts' weights that are cast once after they change, and not in every forward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.torch import _ops
from float8.torch.shard import weight_changes
from float8.torch.shard.expert_gather import copies_in, copies_of
from float8.torch.shard.gathered_weight import GatheredWeight


class Kept(NamedTuple):
    """The copies of a weight, as the ops of experts take them."""

    q: Tensor
    q_scales: Tensor
    qt: Tensor
    qt_scales: Tensor


class ExpertCast:
    """The copies of one weight of all experts, which stay where they are.

    Their state has a fingerprint of the bytes that they were made from. Every forward in eager mode compares
    it with the weight's on the device, and casts where they differ, whoever changed the weight.
    """

    def __init__(self, name: str, weight: Tensor, config: int, dtype: torch.dtype | None) -> None:
        self.name = name
        self.dtype = dtype
        self._latest = dtype or weight.dtype  # x's type in the latest forward
        self._config = config
        self._make(weight)

    def of(self, weight: Tensor, dtype: torch.dtype) -> Kept | None:
        """Returns the copies for an x of that type, None where its forward does without."""
        if torch.compiler.is_compiling() or self.dtype not in (None, dtype):
            return None
        if isinstance(weight, GatheredWeight):
            return None
        if weight.device != self._device or weight.shape != self._shape:
            self._make(weight)
        self._latest = dtype
        self.update(weight)
        if weight_changes.checks_copies and not weight_changes.is_capturing(self._state):
            self._check(weight)
        return self._kept

    def update(self, weight: Tensor) -> None:
        """Casts the weight, if it changed."""
        like = weight.new_empty(0, dtype=self._latest)
        torch.ops.float8.experts_refresh(
            weight.detach(), *self._buffers, self._state, like, self._config
        )

    def _make(self, weight: Tensor) -> None:
        self._device, self._shape = weight.device, weight.shape
        sizes = torch.ops.float8.experts_copies(*weight.shape, self._config, False)[:2]
        with torch.inference_mode(False):  # or backwards could not save them later
            self._buffers = tuple(
                torch.zeros(size, dtype=torch.uint8, device=weight.device) for size in sizes
            )
            self._state = torch.zeros(
                _ops.WEIGHT_STATE_BYTES, dtype=torch.uint8, device=weight.device
            )
        copies = copies_in(self._buffers, weight.shape, self._config)
        q, qt = copies["q"], copies["qt"]
        assert q.scales is not None and qt.scales is not None
        self._kept = Kept(q.data, q.scales, qt.data, qt.scales)

    def _check(self, weight: Tensor) -> None:
        """Raises where check_copies is on and the copies are of another weight."""
        fresh = copies_of(weight.detach().to(self._latest), self._config)
        own = {"q": self._kept.q, "qt": self._kept.qt}
        if not all(torch.equal(own[name], fresh[name].data) for name in own):
            raise RuntimeError(
                f"float8: the fp8 copies of {self.name} are not those of the weight, though their "
                "fingerprint is; please report it"
            )


def kept_copies(module: Any, name: str, weight: Tensor, dtype: torch.dtype) -> Kept | None:
    """Returns the copies of a module's weight for an x of that type, None where it keeps none."""
    cast = getattr(module, "weight_casts", {}).get(name)
    return None if cast is None else cast.of(weight, dtype)
