"""The weight of one linear that ranks hold by rows, in fp8: its shards, and the copies of the whole.

Every rank casts its shard with the scales of the whole weight (shard_casts.py). What ranks gather is
bytes without gaps: of q [rows][K], and of qt [K][rows], with as many rows as the first rank has.
Scales do not travel with a gather: they are known on every rank before. q is cast ahead of a step, and
is kept. Where every rank has the scales of qt once it has the maxima of the whole weight, qt is late: it
is cast where it is gathered, and is not kept. With delayed scaling a cast takes its scale from the scale
state, after a first step, and records the shard's amax there; both copies are kept.

Where tensor parallelism shares the weight too, "the whole" is what a rank of it has: FSDP's shards
are of that, and so are its gathers. Scales are those of all of the weight.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from float8 import recipes
from float8.recipes import Granularity
from float8.torch import _ops
from float8.torch.amaxes import WeightAmax
from float8.torch.ranks import collectives
from float8.torch.ranks.collectives import Operation
from float8.torch.shard import weight_changes
from float8.torch.shard.copy_layout import Copy, Layout, layout
from float8.torch.shard.shard_casts import cast_late, cast_shards
from float8.torch.shard.shard_copies import COPIES, ShardCopies
from float8.torch.shard.weight_changes import is_capturing
from float8.torch.shard.weight_mesh import check_split, mesh_dims

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from float8.torch.layer.linear import Float8Linear
    from float8.torch.scales import ScaleState

_gathers: weakref.WeakValueDictionary[int, WeightGather] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_STEP = 128  # elements that a GEMM sums in a step; copies have rows of whole ones


class WeightGather(ShardCopies):
    """A linear's shard in fp8, and the copies of its whole weight while they are needed."""

    def __init__(self, layer: Float8Linear, dtype: torch.dtype) -> None:
        weight: Any = layer.weight
        mesh, placements = weight.device_mesh, weight.placements
        dims = mesh_dims(layer)
        if dims.fsdp is None or placements[dims.fsdp].dim != 0:
            raise ValueError(
                f"float8: a weight is sharded as {placements}; the fp8 all-gather is for weights "
                "that fully_shard shards by rows"
            )
        size = list(map(int, weight.shape))
        self.tensor_group: Any = None  # that of tensor parallelism
        self.tensor_dim: int | None = None
        if dims.tensor is not None:
            self.tensor_group = mesh.get_group(dims.tensor)
            self.tensor_dim = placements[dims.tensor].dim
            check_split(layer, self.tensor_dim, self.tensor_group.size())
            size[self.tensor_dim] //= self.tensor_group.size()
        self._own_shape = tuple(map(int, weight._local_tensor.shape))
        group, device = mesh.get_group(dims.fsdp), weight._local_tensor.device
        super().__init__(layer, torch.Size(size), group, self._own_shape[0], device)
        self.dtype = dtype  # of x
        self.param_dtype: torch.dtype | None = None  # of FSDP's policy
        self.amax = WeightAmax()
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
        self.is_fresh = False  # it was cast for the gather that comes next
        self._checked: Tensor | None = None  # what was cast, where copies are checked
        self._weight: DTensor
        number = next(_numbers)
        self.key = torch.tensor(number)
        self.key.of_gather = weakref.ref(self)  # type: ignore[attr-defined]
        _gathers[number] = self

    # The shard

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
    def first_step(self) -> bool:
        """Tells whether delayed scaling has no scales for the linear yet."""
        layer = self._layer()
        return layer is not None and layer._first_step

    @property
    def scale_view(self) -> Tensor:
        """Returns the linear's part of the scale state."""
        layer = self._layer()
        assert layer is not None
        view = layer.scales_on(layer.weight.device)
        assert view is not None
        return view

    @property
    def amax_word(self) -> Tensor:
        """Returns the word of the scale state in which casts record the weight's amax."""
        layer = self._layer()
        assert layer is not None and layer._scales is not None
        return layer._scales.amax_of_weight(layer._scale_index)

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

    def facts(self) -> str:
        """Returns what all ranks of the group have in common, and what is wrong on this one."""
        rank, n = self.group.rank(), int(self.size[0])
        rows = max(0, min(self.rows, n - rank * self.rows))
        wrong = ""
        if self._own_shape != (rows, self.cols):
            wrong = f", and a shard of {list(self._own_shape)} in the place of {[rows, self.cols]}"
        shared = (
            "" if self.tensor_dim is None else f", Shard({self.tensor_dim}) of tensor parallelism"
        )
        return (
            f"{self._what}{shared}, {self.ranks} shards of {self.rows} rows, x in "
            f"{self.dtype}{wrong}"
        )

    @property
    def weight(self) -> DTensor:
        """Returns the weight that was cast, or whose maxima are known."""
        return self._weight

    def source(self, weight: DTensor) -> Tensor:
        """Returns the shard in high precision."""
        local: Any = weight._local_tensor
        plain: Tensor = local.plain()
        # A rank without rows has the scales too.
        return plain if self.own_rows > 0 else plain.new_zeros((1, self.cols))

    def words_of_tensor_ranks(self, amax: Tensor, row_amax: Tensor) -> list[Tensor]:
        """Returns the words of the shard's maxima that span the ranks of tensor parallelism."""
        if self.tensor_dim is None or self.cuts_blocks:
            return []  # ranks of tensor parallelism have whole blocks
        if self.tensor_dim == 0:
            return [amax]
        # The words of columns come first, then the tensor's. The rows are those of all of these ranks.
        columns = amax.numel() - (Granularity.TENSOR in self._granularity.values())
        rows = self.rows if self._granularity["q"] is Granularity.AXIS else 0
        return [amax[columns:], row_amax[:rows]]

    def set_cast(self, weight: DTensor) -> None:
        """Notes that the scales, and the copies that are kept, are those of the weight as it is."""
        # The references keep the ids of _version from being used again.
        self._weight, self._local = weight, weight._local_tensor
        self._seen = self._version(weight)
        self._copies = {}
        self._checked = self.source(weight).clone() if weight_changes.checks_copies else None

    def shard(self, name: str) -> Tensor:
        """Returns what this rank gives to a gather of a copy, which is cast first if it is late."""
        if name == "qt" and self.late and not self.has_late:
            cast_late([self])
        return super().shard(name)

    # The copies of the whole weight

    def set_copies(self, gathered: dict[str, Tensor]) -> None:
        """Takes gathers of some of the copies; the others are gathered where they are asked for."""
        self._copies = {name: data.view(-1) for name, data in gathered.items()}

    def q(self, dtype: torch.dtype, records: bool) -> GatheredCopy:
        """Returns q for an x of that type. `records`: whether delayed scaling records this forward."""
        data = self._gathered("q", dtype)
        if records and self.amax.unread is not None:
            self.amax = WeightAmax(read=self.amax.unread)
        if self.cols % _STEP == 0:
            whole = self.size.numel()
            return GatheredCopy(data if data.numel() == whole else data[:whole], self._scales["q"])
        n = self.size[0]
        at, out = self._buffer("q", data)
        _copy(out[: n * at.q_pitch].view(n, -1)[:, : self.cols], data.view(-1, self.cols)[:n])
        return _with_scales(out, at.q_scales, self._scales["q"])

    def qt(self, dtype: torch.dtype, reads_shards: Callable[[], bool]) -> GatheredCopy:
        """Returns qt for a dy of that type. `reads_shards`: whether a GEMM takes it as it lies."""
        data = self._gathered("qt", dtype)
        n = self.size[0]
        in_steps = n == self.rows * self.ranks and self.rows % _STEP == 0
        if in_steps and (self.ranks == 1 or reads_shards()):
            return GatheredCopy(data, self._scales["qt"], self.ranks)
        at, out = self._buffer("qt", data)
        rows = out[: self.cols * at.qt_pitch].view(self.cols, -1)
        shards = data.view(self.ranks, self.cols, self.rows)
        whole, rest = divmod(n, self.rows)
        full = rows[:, : whole * self.rows].unflatten(1, (whole, self.rows))  # type: ignore[no-untyped-call]
        _copy(full, shards[:whole].transpose(0, 1))
        if rest:
            _copy(rows[:, whole * self.rows : n], shards[whole, :, :rest])
        return _with_scales(out, at.qt_scales, self._scales["qt"])

    def copy(self, name: str, dtype: torch.dtype) -> Copy:
        """Returns a copy as a GEMM apart from a linear takes it."""
        found = self.q(dtype, True) if name == "q" else self.qt(dtype, lambda: False)
        data, scales = found.data, found.scales
        lines = self.size[COPIES.index(name)]
        if scales is None:
            at = self._layout(name)
            pitch, begin = (at.q_pitch, at.q_scales) if name == "q" else (at.qt_pitch, at.qt_scales)
            data, scales = data[: lines * pitch], data[begin:].view(torch.float32)
        return Copy(data.view(lines, -1), scales)

    def _gathered(self, name: str, dtype: torch.dtype) -> Tensor:
        """Returns what all ranks' shards of a copy are, one after the other.

        Where FSDP did not gather it (the forward that activation checkpointing runs again), it is
        gathered here.
        """
        if dtype != self.dtype:
            own = self._weight.dtype
            before = self.cast_type(own)
            self.dtype = dtype
            if self.cast_type(own) != before:
                cast_shards([(self, self._weight)])
        found = self._copies.get(name)
        if found is None or found.untyped_storage().size() == 0:
            shard = self.shard(name).flatten()
            if self.ranks == 1:
                return shard
            found = self._copies[name] = shard.new_empty(self.ranks * shard.numel())
            operation = Operation(f"the all-gather of {name}", lambda: (self.name,))
            collectives.all_gather(found, shard, self.group, operation)
        return found

    def parts(self, name: str) -> Copy:
        """Returns the elements and the scales of a copy of the whole weight, as they were gathered."""
        n = self.size[0]
        data = self._gathered(name, self.dtype)
        if name == "q":
            elements, lines, length = data.view(-1, self.cols), n, self.cols
        else:
            shards = data.view(self.ranks, self.cols, self.rows).transpose(0, 1)
            elements, lines, length = shards.reshape(self.cols, -1), self.cols, n
        return Copy(elements, self._scales[name]).trimmed(lines, length, self._granularity[name])

    def own_parts(self, name: str, parts: Copy) -> Copy:
        """Returns what this rank of tensor parallelism has of a copy of all of the weight."""
        if self.tensor_dim is None:
            return parts
        axis = self.tensor_dim if name == "q" else 1 - self.tensor_dim
        ranks, rank = self.tensor_group.size(), self.tensor_group.rank()
        scales = parts.scales
        granularity = self._granularity[name]
        if granularity is Granularity.BLOCK_128X128 or (
            granularity is Granularity.AXIS and axis == 0
        ):
            scales = scales.chunk(ranks, axis)[rank]
        return Copy(parts.data.chunk(ranks, axis)[rank], scales)

    def _layout(self, name: str) -> Layout:
        """Returns the layout of a copy of the whole weight."""
        n, cols = self.size
        return layout(n, n, cols, self.config, _ops.WEIGHT, _ops.copies_of(name == "qt"), False)

    def _buffer(self, name: str, like: Tensor) -> tuple[Layout, Tensor]:
        """Returns the same, and a buffer for the copy."""
        sizes = torch.ops.float8.quantized_bytes(*self.size, self.config, _ops.WEIGHT, name == "qt")
        return self._layout(name), like.new_empty(sizes[COPIES.index(name)])


def gather_at(key: Tensor) -> WeightGather:
    """Returns the gather that an op is told."""
    own = getattr(key, "of_gather", None)  # reading a tensor's value takes a while
    gather: WeightGather | None = None if own is None else own()
    return _gathers[int(key)] if gather is None else gather


class GatheredCopy(NamedTuple):
    """A copy of the whole weight, as the linears' ops take it."""

    data: Tensor
    scales: Tensor | None  # None: they are in `data`
    shards: int = 1


def _with_scales(out: Tensor, begin: int, scales: Tensor) -> GatheredCopy:
    data = scales.view(torch.uint8)
    out[begin : begin + data.numel()].copy_(data)
    return GatheredCopy(out, None)


def plain_parts(copies: tuple[Tensor, Tensor], rows: int, layer: Float8Linear) -> dict[str, Copy]:
    """Returns the elements and scales of both copies of a weight, as `quantize` gives them."""
    cols = layer.in_features + layer._padding
    at = layout(
        rows, rows, cols, layer._config & ~recipes.BIAS, _ops.WEIGHT, _ops.BOTH_COPIES, False
    )
    q, qt = at.copies(*copies, rows, cols)
    parts = {}
    if q is not None:
        parts["q"] = q.trimmed(rows, cols, layer.recipe.output.b.granularity)
    if qt is not None:
        parts["qt"] = qt.trimmed(cols, rows, layer.recipe.grad_input.b.granularity)
    return parts


def _copy(to: Tensor, of: Tensor) -> None:
    """Copies bytes; 16 at once where rows are whole 16s, which takes a quarter of the time."""
    if to.shape[-1] % 16 == 0 and all(
        stride % 16 == 0 for x in (to, of) for stride in x.stride()[:-1]
    ):
        to, of = to.view(torch.complex128), of.view(torch.complex128)
    to.copy_(of)
