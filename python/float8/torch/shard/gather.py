"""What is known of a weight that FSDP gathers in fp8: its shard, who has it, and whether its copies are current."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from float8.torch import _ops
from float8.torch.amaxes import WeightAmax
from float8.torch.ranks import collectives
from float8.torch.ranks.collectives import Operation
from float8.torch.shard import weight_changes
from float8.torch.shard.weight_changes import is_capturing

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from float8.torch.scales import ScaleState

COPIES = ("q", "qt")
_gathers: weakref.WeakValueDictionary[int, Gather] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class GatheredCopy(NamedTuple):
    """A copy of the whole weight, as the ops take it."""

    data: Tensor
    scales: Tensor | None  # None: they are in `data`
    shards: int = 1


def turned(size: torch.Size) -> torch.Size:
    """Returns a size with its last two dimensions in the other order."""
    return torch.Size((*size[:-2], size[-1], size[-2]))


class Gather:
    """The shard of one layer's weight in fp8, and what ranks gathered of it while it is needed.

    A layer is a Float8Linear, or the linears of all experts with one weight. Subclasses have the copies.
    """

    late: bool = False  # qt is cast where it is gathered, and is not kept
    tensor_group: Any = None  # that of tensor parallelism
    second: Gather | None = None  # of a pair that this is the first one of
    _first: weakref.ref[Gather] | None = None  # of a pair that this is the second one of
    is_transposed: bool = False  # the weight is stored with its last two dimensions turned

    def __init__(
        self, layer: Any, dtype: torch.dtype, size: torch.Size, group: Any, device: torch.device
    ) -> None:
        self.size = size  # of the copies
        self.stored_size = size  # of the weight
        self.group = group
        self.device = device
        self.ranks: int = group.size()
        self.dtype = dtype  # of x
        self.param_dtype: torch.dtype | None = None  # of FSDP's policy
        self.name = f"a weight of {list(size)}"  # the layer's, once somebody knows it
        self.agreed = False  # the ranks have compared it
        self._what = layer.describe()
        self.operations: dict[tuple[str, ...], Operation] = {
            names: Operation("FSDP's all-gather of " + " and ".join(names), lambda: (self.name,))
            for names in (("q",), ("qt",), COPIES)
        }
        self.both = False  # every gather is of both copies
        self.fsdp_group: Any = None  # FSDP's group of parameters, once it is known
        self._layer = weakref.ref(layer)
        self._copies: dict[str, Tensor] = {}
        self.amax = WeightAmax()
        self.in_graph = False  # a captured CUDA graph reads the shard and the scales where they are
        self.is_fresh = False  # it was cast for the gather that comes next
        self._checked: Tensor | None = None  # what was cast, where copies are checked
        self._seen: tuple[Any, ...] | None = None  # the state of the weight that was cast
        self._weight: DTensor
        # An optimizer found these maxima of the shard in this state.
        self._maxima: tuple[Any, Tensor, Tensor] | None = None
        number = next(_numbers)
        self.key = torch.tensor(number)
        self.key.of_gather = weakref.ref(self)  # type: ignore[attr-defined]
        _gathers[number] = self

    @property
    def pair(self) -> tuple[Gather, ...]:
        """Returns the gathers of the weights that are computed as one with this one, in the order of their rows."""
        first = None if self._first is None else self._first()
        first = self if first is None else first
        return (first,) if first.second is None else (first, first.second)

    def make_pair_with(self, second: Gather) -> None:
        """Lets the weight of another gather be computed as one with this one."""
        self.second, second._first = second, weakref.ref(self)

    # The shard

    @property
    def has_late(self) -> bool:
        """Tells whether a late qt has been cast for the gather that comes next."""
        return False

    def join(self, group: Any, param: Any) -> None:
        """Takes what is known once FSDP has the weight: its group of parameters and its policy.

        FSDP keeps the number of tensors of the first gather, so that it is decided once: both copies
        where the weight stays gathered between forward and backward.
        """
        if self.fsdp_group is None:
            self.forget()  # FSDP moves the shards of some ranks before, but all ranks cast or none
            self.fsdp_group = group
            self.name = (param._param_fqn or "").removesuffix(".weight") or self.name
            self.param_dtype = param.mp_policy.param_dtype
            self.dtype = self.param_dtype or param.sharded_param.dtype
            if torch.is_autocast_enabled(self.device.type):
                self.dtype = torch.get_autocast_dtype(self.device.type)
            self.both = self.ranks > 1 and not group._reshard_after_forward

    @property
    def is_cast(self) -> bool:
        """Tells whether the shard has copies, of these values or of earlier ones, that were not forgotten."""
        return self._seen is not None

    def is_current(self, weight: DTensor) -> bool:
        """Tells whether the shard in fp8 was cast from these values."""
        if self._seen is None or self._seen != self._version(weight):
            return False
        return self.is_fresh or not self.is_unknowable(weight)

    def is_unknowable(self, weight: DTensor) -> bool:
        """Tells whether the weight may change without anybody seeing it."""
        local: Any = weight._local_tensor
        return local.changes.unknowable or weight_changes.steps_are_unknowable()

    def _version(self, weight: DTensor) -> tuple[Any, ...]:
        """Returns what changes with a weight on every rank: FSDP may move the shards of some alone.

        A cast in a CUDA graph is made when the graph runs, and is current for the rest of the graph.
        """
        local: Any = weight._local_tensor
        scales = 0 if self.scales is None else self.scales.generation
        capture = torch.ops.float8.capture_id(local.plain()) if is_capturing(local) else 0
        return (
            *(id(weight), weight._version, id(local), local._version),
            *(local.changes.count, weight_changes.steps(), scales, capture),
        )

    def check(self, weight: DTensor) -> None:
        """Raises where check_copies is on and the copies are not those of the shard."""
        if self._checked is None or not weight_changes.checks_copies or is_capturing(self._checked):
            return
        # A NaN is equal to itself, by its bits.
        own, now = (each.view(torch.uint8) for each in (self._checked, self.source(weight)))
        if not torch.equal(own, now):
            raise RuntimeError(
                f"float8: the fp8 copies of {self.name} are not those of the weight, which has changed "
                "unseen. Call precompute_float8_dynamic_scale_for_fsdp after the change, and please "
                "report it"
            )

    @property
    def scales(self) -> ScaleState | None:
        """Returns the scale state of delayed scaling."""
        layer = self._layer()
        return None if layer is None else layer._scales

    @property
    def amax_word(self) -> Tensor:
        """Returns the word of the scale state in which casts record the weight's amax."""
        layer = self._layer()
        assert layer is not None and layer._scales is not None
        word: Tensor = layer._scales.amax_of_weight(layer._scale_index)
        return word

    def note_read(self, records: bool) -> None:
        """Notes that a forward reads the copies. `records`: whether delayed scaling records this forward."""
        if records and self.amax.unread is not None:
            self.amax = WeightAmax(read=self.amax.unread)

    def gathered_type(self, own: torch.dtype) -> torch.dtype:
        """Returns the type in which FSDP would gather a weight of its own type, in as few bits as do.

        float32 has every number of bfloat16 and float16.
        """
        to = self.param_dtype
        return own if to is None or to == torch.float32 else to

    def cast_type(self, own: torch.dtype) -> torch.dtype:
        """Returns the type in which a linear would cast a weight of its own type: x's, rounded once more."""
        gathered = self.gathered_type(own)
        as_gathered = self.dtype == torch.float32 and gathered in _ops.ELEMENT_TYPES
        return gathered if as_gathered else self.dtype

    def forget(self) -> None:
        """Makes the next gather cast the shard again."""
        self._seen = None

    @property
    def weight(self) -> DTensor:
        """Returns the weight that was cast, or whose maxima are known."""
        return self._weight

    def latest(self) -> DTensor:
        """Returns the weight as it is sharded now; while FSDP has it gathered, the one that was cast."""
        layer = self._layer()
        local = None if layer is None else getattr(layer.weight, "_local_tensor", None)
        return layer.weight if hasattr(local, "changes") else self._weight  # type: ignore[union-attr]

    def source(self, weight: DTensor) -> Tensor:
        """Returns the shard in high precision."""
        local: Any = weight._local_tensor
        plain: Tensor = local.plain()
        return plain

    def set_cast(self, weight: DTensor) -> None:
        """Notes that the scales, and the copies that are kept, are those of the weight as it is."""
        # The references keep the ids of _version from being used again.
        self._weight, self._local = weight, weight._local_tensor
        self._seen = self._version(weight)
        self._copies = {}
        self._checked = self.source(weight).clone() if weight_changes.checks_copies else None

    def keep_maxima(self, weight: DTensor, amax: Tensor, row_amax: Tensor) -> None:
        """Takes the maxima of the shard as it is, which an optimizer found as it wrote it."""
        self._maxima = self._state_of(weight), amax, row_amax

    def take_maxima(self, weight: DTensor) -> tuple[Tensor, Tensor] | None:
        """Returns these once, None where they are not those of this shard for this cast."""
        kept, self._maxima = self._maxima, None
        if kept is None or self.is_unknowable(weight) or kept[0] != self._state_of(weight):
            return None
        return kept[1:]

    def _state_of(self, weight: DTensor) -> tuple[Any, ...]:
        return (*self._version(weight), self.cast_type(weight._local_tensor.dtype))

    def facts(self) -> str:
        """Returns what all ranks of the group have in common, and what is wrong on this one."""
        raise NotImplementedError

    def shard(self, name: str) -> Tensor:
        """Returns what this rank gives to a gather of a copy: bytes in the shape of its shard."""
        raise NotImplementedError

    def cast(self, weight: DTensor) -> None:
        """Casts the shard on all ranks of its group, apart from other weights."""
        raise NotImplementedError

    # The copies of the whole weight

    def set_copies(self, gathered: dict[str, Tensor]) -> None:
        """Takes gathers of some of the copies; the others are gathered where they are asked for."""
        self._copies = {name: data.view(-1) for name, data in gathered.items()}

    def _gathered(self, name: str, dtype: torch.dtype) -> Tensor:
        """Returns what all ranks' shards of a copy are, one after the other.

        Where FSDP did not gather it (the forward that activation checkpointing runs again), it is
        gathered here.
        """
        if dtype != self.dtype:
            own = self._weight.dtype
            before = self.cast_type(own)
            for each in self.pair:
                each.dtype = dtype
            if self.cast_type(own) != before:
                self.cast(self._weight)
        found = self._copies.get(name)
        if found is None or found.untyped_storage().size() == 0:
            shard = self.shard(name).flatten()
            if self.ranks == 1:
                return shard
            found = self._copies[name] = shard.new_empty(self.ranks * shard.numel())
            operation = Operation(f"the all-gather of {name}", lambda: (self.name,))
            collectives.all_gather(found, shard, self.group, operation)
        return found


def gather_at(key: Tensor) -> Any:
    """Returns the gather that an op is told."""
    own = getattr(key, "of_gather", None)  # reading a tensor's value takes a while
    gather: Gather | None = None if own is None else own()
    return _gathers[int(key)] if gather is None else gather
