"""The fp8 copies of experts' weights that are cast once after they change, and not in every forward."""

from __future__ import annotations

from collections.abc import Sequence
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
    """The copies of one weight of all experts, or of two that are computed as one (w1 and w3), which stay
    where they are.

    Their state has a fingerprint of the bytes that they were made from. Every forward in eager mode compares
    it with the weights' on the device, and casts where they differ, whoever changed a weight.
    """

    def __init__(
        self,
        name: str,
        names: tuple[str, ...],
        weights: Sequence[Tensor],
        config: int,
        dtype: torch.dtype | None,
    ) -> None:
        self.name = name
        self.names = names  # in their module
        self.dtype = dtype
        self._latest = dtype or weights[0].dtype  # x's type in the latest forward
        self._config = config
        self._make(weights)

    def of(self, weights: Sequence[Tensor], dtype: torch.dtype) -> Kept | None:
        """Returns the copies for an x of that type, None where its forward does without."""
        if torch.compiler.is_compiling() or self.dtype not in (None, dtype):
            return None
        if any(isinstance(each, GatheredWeight) for each in weights):
            return None
        if weights[0].device != self._device or weights[0].shape != self._shape:
            self._make(weights)
        self._latest = dtype
        self.update(weights)
        if weight_changes.checks_copies and not weight_changes.is_capturing(self._state):
            self._check(weights)
        return self._kept

    def update(self, weights: Sequence[Tensor]) -> None:
        """Casts the weights, if they changed."""
        first, *second = (each.detach() for each in weights)
        like = first.new_empty(0, dtype=self._latest)
        torch.ops.float8.experts_refresh(
            first, *self._buffers, self._state, like, self._config, *second
        )

    def _make(self, weights: Sequence[Tensor]) -> None:
        weight = weights[0]
        self._device, self._shape = weight.device, weight.shape
        experts, rows, cols = weight.shape
        size = (experts, rows * len(weights), cols)
        sizes = torch.ops.float8.experts_copies(*size, self._config, False)[:2]
        with torch.inference_mode(False):  # or backwards could not save them later
            self._buffers = tuple(
                torch.zeros(size, dtype=torch.uint8, device=weight.device) for size in sizes
            )
            self._state = torch.zeros(
                _ops.WEIGHT_STATE_BYTES * len(weights), dtype=torch.uint8, device=weight.device
            )
        copies = copies_in(self._buffers, torch.Size(size), self._config)
        q, qt = copies["q"], copies["qt"]
        assert q.scales is not None and qt.scales is not None
        self._kept = Kept(q.data, q.scales, qt.data, qt.scales)

    def _check(self, weights: Sequence[Tensor]) -> None:
        """Raises where check_copies is on and the copies are of another weight."""
        fresh = copies_of(torch.cat(list(weights), 1).detach().to(self._latest), self._config)
        own = {"q": self._kept.q, "qt": self._kept.qt}
        if not all(torch.equal(own[name], fresh[name].data) for name in own):
            raise RuntimeError(
                f"float8: the fp8 copies of {self.name} are not those of the weight, though their "
                "fingerprint is; please report it"
            )


def kept_copies(module: Any, name: str, dtype: torch.dtype, *weights: Tensor) -> Kept | None:
    """Returns the copies of a module's weights for an x of that type, None where it keeps none.

    name: of the first weight.
    """
    cast = getattr(module, "weight_casts", {}).get(name)
    return None if cast is None else cast.of(weights, dtype)
