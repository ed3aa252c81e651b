"""The fp8 copies of experts' weights that are cast once after they change, and not in every forward."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.torch import _ops
from float8.torch.shard import weight_changes
from float8.torch.shard.expert_copies import (
    copies_in,
    copies_of,
    maxima_of_both,
    maxima_of_update,
)
from float8.torch.shard.gathered_weight import GatheredWeight


class Kept(NamedTuple):
    """The copies of a weight, as the ops of experts take them.

    memory: the buffers of the copies, and their state, where the op that reads the copies is to cast a changed
        weight into them before; else they are of the weight already.
    """

    q: Tensor
    q_scales: Tensor
    qt: Tensor
    qt_scales: Tensor
    memory: tuple[Tensor, ...] = ()


def kept_in(buffers: Sequence[Tensor], shape: Sequence[int], config: int) -> Kept:
    """Returns the copies of a weight of that shape which lie in these buffers."""
    copies = copies_in(buffers, shape, config)
    q, qt = copies["q"], copies["qt"]
    assert q.scales is not None and qt.scales is not None
    return Kept(q.data, q.scales, qt.data, qt.scales)


def refresh(weights: Sequence[Tensor], memory: Sequence[Tensor], like: Tensor, config: int) -> None:
    """Casts a weight, or two that are computed as one, for an x like this one, if it changed."""
    first, *second = weights
    torch.ops.float8.experts_refresh(first, *memory, like, config, *second)


class OwnWeights:
    """The weights that copies are kept of.

    A forward with others, as `torch.func.functional_call` has them, does without the copies: casting those into the
    same memory would change what a backward of an earlier forward reads. What takes a weight's place for good, as
    load_state_dict(assign=True) does, is a weight of the copies once the former one is gone.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._references = [weakref.ref(each) for each in weights]

    def are(self, weights: Sequence[Tensor]) -> bool:
        """Tells whether these are the weights."""
        for index, weight in enumerate(weights):
            own = self._references[index]()
            if own is not weight:
                if own is not None:
                    return False
                self._references[index] = weakref.ref(weight)
        return True

    def may_be(self, weights: Sequence[Tensor]) -> bool:
        """Tells the same to a graph of torch.compile, which remembers no weights."""
        own = [each() for each in self._references]
        return all(a is None or a is b for a, b in zip(own, weights, strict=True))


class ExpertCast:
    """The copies of one weight of all experts, or of two that are computed as one (w1 and w3), which stay
    where they are.

    Their state has a fingerprint of the bytes that they were made from. Every forward compares it with the
    weights' on the device, and casts where they differ, whoever changed a weight; a compiled one does so in
    the op that reads the copies, since nothing else holds a graph to that order.
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
        self.own = OwnWeights(weights)
        self._make(weights)

    def of(self, weights: Sequence[Tensor], dtype: torch.dtype) -> Kept | None:
        """Returns the copies for an x of that type, None where its forward does without."""
        if self.dtype is not None and dtype != self.dtype:
            return None
        if any(isinstance(each, GatheredWeight) for each in weights):
            return None
        fits = weights[0].device == self._device and weights[0].shape == self._shape
        if torch.compiler.is_compiling():
            return self._kept_in_graphs if fits else None
        if not fits:
            self._make(weights)
        self._latest = dtype
        self.update(weights)
        if weight_changes.checks_copies and not weight_changes.is_capturing(self._state):
            self._check(weights)
        return self._kept

    def update(self, weights: Sequence[Tensor]) -> None:
        """Casts the weights, if they changed."""
        own = [each.detach() for each in weights]
        like = own[0].new_empty(0, dtype=self._latest)
        refresh(own, (*self._buffers, self._state), like, self._config)

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
        self._states: Tensor | None = None
        self._kept = kept_in(self._buffers, size, self._config)
        memory = (*self._buffers, self._state)
        self._kept_in_graphs = self._kept._replace(memory=memory)
        for tensor in (*self._kept[:4], *memory):
            torch._dynamo.mark_static_address(tensor, guard=False)

    def cast_with(self, updated: Sequence[CachedExperts]) -> None:
        """Casts the weights that a step of an optimizer updated, with the maxima that it found.

        Where it updated one of two, the next forward casts both, as behind any other change.
        """
        if len(updated) < len(self.names):
            return
        first, *second = updated = sorted(updated, key=lambda each: each.index)
        experts = self._shape[0]
        words: tuple[Tensor | None, Tensor | None] = (None, None)
        if first.words != (0, 0):
            words = maxima_of_both([each.maxima for each in updated], experts)
        how = (*words, self._config, _ops.ELEMENT_TYPES[self._latest])
        rest = [each.memory for each in second]
        torch.ops.float8.experts_cast(first.memory, *self._buffers, *how, *rest)
        # If the casts fail, the states stay those of the copies before, and forwards cast again. The fingerprints
        # of experts add up to that of their weight.
        values = [each.state.view(torch.int64).view(experts, -1)[:, :2].sum(0) for each in updated]
        states = self._state.view(torch.int64).view(len(values), -1)
        states[:, :2].copy_(torch.stack(values))
        self._state.view(torch.int32)[_ops.FLAG_OF_WEIGHT_STATE] = 1

    def states(self, index: int) -> Tensor:
        """Returns the memory in which an optimizer leaves the states of the experts of one of the weights."""
        size = self._shape[0] * _ops.WEIGHT_STATE_BYTES
        if self._states is None:
            whole = size * len(self.names)
            self._states = torch.zeros(whole, dtype=torch.uint8, device=self._device)
        return self._states[index * size : (index + 1) * size]

    def serves(self, weight: Tensor) -> bool:
        """Tells whether an optimizer may leave what casts of this weight need."""
        wanted = self._latest
        return (
            wanted in _ops.ELEMENT_TYPES
            and weight.dtype in (wanted, torch.float32)
            and weight.device == self._device
            and weight.shape == self._shape
        )

    def maxima(self) -> tuple[int, int] | None:
        """Returns what maxima_of_update does, of each of the weights."""
        return maxima_of_update(self._shape, self._config)

    def _check(self, weights: Sequence[Tensor]) -> None:
        """Raises where check_copies is on and the copies are of another weight."""
        fresh = copies_of(torch.cat(list(weights), 1).detach().to(self._latest), self._config)
        own = {"q": self._kept.q, "qt": self._kept.qt}
        if not all(torch.equal(own[name], fresh[name].data) for name in own):
            raise RuntimeError(
                f"float8: the fp8 copies of {self.name} are not those of the weight, though their "
                "fingerprint is; please report it"
            )


class CachedExperts:
    """The weight of all experts with kept copies while an optimizer updates it (optim.py).

    words: how many maxima the update finds, of the experts or their columns, and of the rows.
    index: its place among the weights that one cast reads.
    """

    rows_max = 0  # it is no shard
    scale_state: Any = None  # delayed scaling keeps no copies
    scales = _ops.NO_BYTES
    copies = _ops.NO_BYTES, _ops.NO_BYTES  # the casts come behind the update

    maxima: tuple[Tensor, Tensor]

    def __init__(
        self, parameter: Tensor, cast: ExpertCast, index: int, words: tuple[int, int]
    ) -> None:
        self.parameter = parameter
        self.index = index
        self.memory = parameter.detach()
        self.config = cast._config
        self.dtype = _ops.ELEMENT_TYPES[cast._latest]
        self.words = words
        self.state = cast.states(index)
        self.kept_by = cast

    def rows_of(self, row_amax: Tensor) -> Tensor:
        """Returns the words of the weight's rows."""
        return row_amax

    def before(self) -> None:
        """Is called before the weight changes."""

    def after(self, amax: Tensor, row_amax: Tensor) -> None:
        """Takes the maxima of the weight as it is now."""
        self.maxima = amax, row_amax


def cached_experts(module: Any, parameter: Tensor) -> CachedExperts | None:
    """Returns a weight of a module with kept copies whose update may find the maxima for their casts, or None."""
    casts: dict[str, ExpertCast] = getattr(module, "weight_casts", {})
    for cast in casts.values():
        for index, name in enumerate(cast.names):
            if getattr(module, name) is not parameter or not cast.serves(parameter):
                continue
            if (words := cast.maxima()) is not None:
                return CachedExperts(parameter, cast, index, words)
    return None


def kept_copies(module: Any, name: str, dtype: torch.dtype, *weights: Tensor) -> Kept | None:
    """Returns the copies of a module's weights for an x of that type, None where it keeps none.

    name: of the first weight.
    """
    cast: ExpertCast | None = getattr(module, "weight_casts", {}).get(name)
    if cast is None:
        return None
    own = [getattr(module, each) for each in cast.names]
    fits = cast.own.may_be(own) if torch.compiler.is_compiling() else cast.own.are(own)
    return cast.of(weights, dtype) if fits else None
