"""The weight of one linear that ranks hold by rows, in fp8: its shards, and the copies of the whole.

Every rank casts its shard with the scales of the whole weight. What ranks gather is bytes without
gaps: of q [rows][K], and of qt [K][rows], with as many rows as the first rank has. Scales are known
on every rank before, so they do not travel with a gather.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from float8 import recipes
from float8.recipes import Granularity
from float8.torch import _ops, agreement, collectives
from float8.torch.collectives import Operation

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from float8.torch.linear import Float8Linear

COPIES = ("q", "qt")
_gathers: weakref.WeakValueDictionary[int, WeightGather] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_BLOCK = 128  # rows and columns of a block with one scale
_STEP = 128  # elements that a GEMM sums in a step; copies have rows of whole ones


class WeightGather:
    """A linear's shard in fp8, and the copies of its whole weight while they are needed."""

    def __init__(self, layer: Float8Linear, dtype: torch.dtype) -> None:
        from torch.distributed.tensor import DTensor, Shard  # takes a while to load

        weight = layer.weight
        assert isinstance(weight, DTensor)
        # FSDP x TP has a subclass of Shard here.
        dims = [i for i, at in enumerate(weight.placements) if type(at) is Shard and at.dim == 0]
        if len(dims) != 1 or any(
            not (at.is_replicate() or at == Shard(0)) for at in weight.placements
        ):
            raise ValueError(
                f"float8: a weight is sharded as {weight.placements}; the fp8 all-gather is for "
                "weights that fully_shard alone shards, by rows"
            )
        self.group = weight.device_mesh.get_group(dims[0])
        self.size = weight.shape
        self.dtype = dtype  # of x
        self.device = weight._local_tensor.device
        self.ranks = self.group.size()
        n, self.cols = map(int, weight.shape)
        self.rows = -(-n // self.ranks)  # of a shard without padding
        self._own_shape = tuple(map(int, weight._local_tensor.shape))
        self.own_rows = self._own_shape[0]
        self.name = f"a weight of [{n}, {self.cols}]"  # the layer's, once somebody knows it
        self.agreed = False  # the ranks have compared it
        self._what = agreement.describe(layer)
        self.operations: dict[tuple[str, ...], Operation] = {
            names: Operation("FSDP's all-gather of " + " and ".join(names), lambda: (self.name,))
            for names in (("q",), ("qt",), COPIES)
        }
        self.both: bool | None = None  # every gather is of both copies
        self.fsdp_group: Any = None  # FSDP's group of parameters, once it is known
        self._config = layer._config & ~recipes.BIAS
        self._granularity = {
            "q": layer.recipe.output.b.granularity,
            "qt": layer.recipe.grad_input.b.granularity,
        }
        blocks = Granularity.BLOCK_128X128 in self._granularity.values()
        if blocks and self.ranks > 1 and self.rows % _BLOCK != 0:
            raise ValueError(
                f"float8: layer {layer._layer_name!r}: {self.ranks} ranks hold {self.rows} rows each of a "
                f"weight of {n} rows, which cuts its blocks of 128 rows; convert this layer without "
                "enable_fsdp_float8_all_gather, in a conversion with a module_filter_fn of its own"
            )
        self._shards: dict[str, Tensor] = {}
        self._scales: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}
        self._seen: tuple[Any, ...] | None = None
        self._weight: DTensor
        number = next(_numbers)
        self.key = torch.tensor(number)
        _gathers[number] = self

    # The shard

    def is_current(self, weight: DTensor) -> bool:
        """Tells whether the shard in fp8 was cast from these values."""
        return self._seen is not None and self._seen == _version(weight)

    def forget(self) -> None:
        """Makes the next gather cast the shard again."""
        self._seen = None

    def shard(self, name: str) -> Tensor:
        """Returns what this rank gives to a gather of a copy: bytes in the shape of its shard."""
        return self._shards[name].view(self.rows, self.cols)

    def facts(self) -> str:
        """Returns what all ranks of the group have in common, and what is wrong on this one."""
        rank, n = self.group.rank(), int(self.size[0])
        rows = max(0, min(self.rows, n - rank * self.rows))
        wrong = ""
        if self._own_shape != (rows, self.cols):
            wrong = f", and a shard of {list(self._own_shape)} in the place of {[rows, self.cols]}"
        return f"{self._what}, {self.ranks} shards of {self.rows} rows, x in {self.dtype}{wrong}"

    def operand(self, weight: DTensor) -> Tensor:
        """Returns the shard in the type that FSDP gathers without us."""
        local: Any = weight._local_tensor
        plain: Tensor = local.plain().to(self.dtype)
        # A rank without rows has the scales too.
        return plain if self.own_rows > 0 else plain.new_zeros((1, self.cols))

    def set_shard(self, weight: DTensor, q: Tensor, qt: Tensor) -> Tensor:
        """Takes the shard's copies; returns its scales, for `set_scales`."""
        rows = max(self.own_rows, 1)  # of the operand
        at = _layout(self.rows, rows, self.cols, self._config, True, True)
        self._shards = {
            "q": _packed(q, rows, self.cols, at.q_pitch, self.rows, self.cols),
            "qt": _packed(qt, self.cols, rows, at.qt_pitch, self.cols, self.rows),
        }
        q_scales = (qt if at.scales_in_qt else q)[at.q_scales :].view(torch.float32)
        qt_scales = qt[at.qt_scales :].view(torch.float32)
        own = [self._own_q_scales(q_scales, rows), self._own_qt_scales(qt_scales, rows)]
        # The references keep the ids of _version from being used again.
        self._seen, self._weight, self._local = _version(weight), weight, weight._local_tensor
        self._copies = {}
        return torch.cat(own)

    def _own_q_scales(self, scales: Tensor, rows: int) -> Tensor:
        granularity = self._granularity["q"]
        if granularity is Granularity.TENSOR:
            self._scales["q"] = scales[:1]
            return scales[:0]
        pitch = 1 if granularity is Granularity.AXIS else _padded4(_blocks(self.cols))
        lines = rows if granularity is Granularity.AXIS else _blocks(rows)
        most = self.rows if granularity is Granularity.AXIS else _blocks(self.rows)
        own = scales.new_ones(most * pitch)  # rows that are only padding have the scale 1
        own[: lines * pitch] = scales[: lines * pitch]
        return own

    def _own_qt_scales(self, scales: Tensor, rows: int) -> Tensor:
        granularity = self._granularity["qt"]
        if granularity is not Granularity.BLOCK_128X128:
            count = 1 if granularity is Granularity.TENSOR else self.cols
            self._scales["qt"] = scales[:count]
            return scales[:0]
        down = _blocks(self.cols)
        own = scales.new_ones((down, _blocks(self.rows)))
        pitch = _padded4(_blocks(rows))
        own[:, : _blocks(rows)] = scales[: down * pitch].view(down, pitch)[:, : _blocks(rows)]
        return own.flatten()

    def set_scales(self, gathered: Tensor) -> None:
        """Takes what `cast` returned on every rank, a row each."""
        n = self.size[0]
        if self._granularity["q"] is Granularity.AXIS:
            self._scales["q"] = _aligned(gathered[:, : self.rows].reshape(-1)[:n])
        elif self._granularity["q"] is Granularity.BLOCK_128X128:
            pitch = _padded4(_blocks(self.cols))
            count = _blocks(self.rows) * pitch
            self._scales["q"] = _aligned(gathered[:, :count].reshape(-1)[: _blocks(n) * pitch])
        if self._granularity["qt"] is Granularity.BLOCK_128X128:
            down, across = _blocks(self.cols), _blocks(self.rows)
            own = gathered[:, -down * across :].view(-1, down, across)
            whole = own.new_ones((down, _padded4(_blocks(n))))
            whole[:, : _blocks(n)] = own.transpose(0, 1).reshape(down, -1)[:, : _blocks(n)]
            self._scales["qt"] = whole.flatten()

    # The copies of the whole weight

    def set_copies(self, gathered: dict[str, Tensor]) -> None:
        """Takes gathers of some of the copies; the others are gathered where they are asked for."""
        self._copies = {name: data.view(-1) for name, data in gathered.items()}

    def q(self, dtype: torch.dtype) -> GatheredCopy:
        """Returns q for an x of that type."""
        data = self._gathered("q", dtype)
        if self.cols % _STEP == 0:
            return GatheredCopy(data[: self.size.numel()], self._scales["q"])
        n = int(self.size[0])
        at, bytes = self._whole("q")
        out = data.new_empty(bytes)
        _copy(out[: n * at.q_pitch].view(n, -1)[:, : self.cols], data.view(-1, self.cols)[:n])
        return _with_scales(out, at.q_scales, self._scales["q"])

    def qt(self, dtype: torch.dtype, reads_shards: Callable[[], bool]) -> GatheredCopy:
        """Returns qt for a dy of that type. `reads_shards`: whether a GEMM takes it as it lies."""
        data = self._gathered("qt", dtype)
        n = int(self.size[0])
        in_steps = n == self.rows * self.ranks and self.rows % _STEP == 0
        if in_steps and (self.ranks == 1 or reads_shards()):
            return GatheredCopy(data, self._scales["qt"], self.ranks)
        at, bytes = self._whole("qt")
        out = data.new_empty(bytes)
        rows = out[: self.cols * at.qt_pitch].view(self.cols, -1)
        shards = data.view(self.ranks, self.cols, self.rows)
        whole, rest = divmod(n, self.rows)
        full = rows[:, : whole * self.rows].unflatten(1, (whole, self.rows))  # type: ignore[no-untyped-call]
        _copy(full, shards[:whole].transpose(0, 1))
        if rest:
            _copy(rows[:, whole * self.rows : n], shards[whole, :, :rest])
        return _with_scales(out, at.qt_scales, self._scales["qt"])

    def _gathered(self, name: str, dtype: torch.dtype) -> Tensor:
        """Returns what all ranks' shards of a copy are, one after the other.

        Where FSDP did not gather it (the forward that activation checkpointing runs again), it is
        gathered here.
        """
        if dtype != self.dtype:
            self.dtype = dtype
            cast_shards([(self, self._weight)])
        found = self._copies.get(name)
        if found is None or found.untyped_storage().size() == 0:
            shard = self._shards[name].flatten()
            found = self._copies[name] = shard.new_empty(self.ranks * shard.numel())
            operation = Operation(f"the all-gather of {name}", lambda: (self.name,))
            collectives.all_gather(found, shard, self.group, operation)
        return found

    def parts(self, name: str) -> tuple[Tensor, Tensor]:
        """Returns the elements and the scales of a copy of the whole weight, as they were gathered."""
        n = int(self.size[0])
        data, scales = self._gathered(name, self.dtype), self._scales[name]
        if name == "q":
            elements, lines, length = data.view(-1, self.cols)[:n], n, self.cols
        else:
            shards = data.view(self.ranks, self.cols, self.rows).transpose(0, 1)
            elements, lines, length = shards.reshape(self.cols, -1)[:, :n], self.cols, n
        if self._granularity[name] is not Granularity.BLOCK_128X128:
            return elements, scales
        return elements, scales.view(_blocks(lines), -1)[:, : _blocks(length)]

    def expected_parts(self, name: str, copy: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the same of a copy that `quantize` made of the whole weight alone."""
        n = int(self.size[0])
        at = _layout(n, n, self.cols, self._config, name == "qt", False)
        return at.parts(name, copy, copy, n, self.cols, self._granularity[name])

    def _whole(self, name: str) -> tuple[_Layout, int]:
        """Returns the layout and the bytes of a copy of the whole weight."""
        n = int(self.size[0])
        of = (n, self.cols, self._config)
        bytes = torch.ops.float8.quantized_bytes(*of, _ops.WEIGHT, name == "qt")
        return _layout(n, *of, name == "qt", False), bytes[COPIES.index(name)]


class GatheredCopy(NamedTuple):
    """A copy of the whole weight, as the linears' ops take it."""

    data: Tensor
    scales: Tensor | None  # None: they are in `data`
    shards: int = 1


def _with_scales(out: Tensor, begin: int, scales: Tensor) -> GatheredCopy:
    data = scales.view(torch.uint8)
    out[begin : begin + data.numel()].copy_(data)
    return GatheredCopy(out, None)


@torch.no_grad()
def cast_shards(weights: Sequence[tuple[WeightGather, DTensor]]) -> None:
    """Casts the shards of weights on all ranks of their group.

    Few launches find the maxima of all weights and cast them. The maxima are reduced in one
    all-reduce, and the scales gathered in one all-gather; nothing waits for the device. All ranks
    call it with the same weights in the same order, which the first call with a weight checks.
    """
    if not weights:
        return
    group = weights[0][0].group

    def names() -> list[str]:
        return [gather.name for gather, _ in weights]

    _compare([gather for gather, _ in weights])
    operands = [gather.operand(weight) for gather, weight in weights]
    configs = [gather._config for gather, _ in weights]
    rows = [gather.rows for gather, _ in weights]
    # A NaN is the largest word, so it wins on every rank.
    words, row_words = _ops.quantize_amax_list(operands, configs, _ops.WEIGHT, rows)
    if words.numel() > 0:
        collectives.all_reduce_max(words, group, Operation("the amax all-reduce", names))
    copies = _ops.quantize_shard_list(operands, words, row_words, configs, _ops.WEIGHT, rows)
    own = [
        gather.set_shard(weight, q, qt)
        for (gather, weight), q, qt in zip(weights, copies[::2], copies[1::2], strict=True)
    ]
    sizes = [scales.numel() for scales in own]
    if sum(sizes) == 0:
        return
    scales = torch.cat(own)
    everyone = scales.new_empty(group.size() * scales.numel())
    try:
        collectives.all_gather(everyone, scales, group, Operation("the scales' all-gather", names))
    except collectives.DistributedError:
        for gather, _ in weights:
            gather.forget()
        raise
    parts = torch.split(everyone.view(group.size(), -1), sizes, dim=1)
    for (gather, _), part in zip(weights, parts, strict=True):
        gather.set_scales(part)


def _compare(gathers: Sequence[WeightGather]) -> None:
    """Raises on all ranks where they have not the same weights; each weight is compared once."""
    new = [gather for gather in gathers if not gather.agreed]
    if not new:
        return
    layers = {f"{i}: {gather.name}": gather.facts() for i, gather in enumerate(new)}
    agreement.agree_once(new[0].group, {"layers": layers}, new[0].device)
    for gather in new:
        gather.agreed = True


def _version(weight: DTensor) -> tuple[Any, ...]:
    """Returns what changes with a weight on every rank: FSDP may move the shards of some alone."""
    local = weight._local_tensor
    return id(weight), weight._version, id(local), local._version


def _packed(
    copy: Tensor, lines: int, length: int, pitch: int, most_lines: int, most_length: int
) -> Tensor:
    """Returns a copy's lines without gaps, and with zeros where another shard has more."""
    data = copy[: lines * pitch]
    if pitch == most_length and lines == most_lines:
        return data
    out = data.new_zeros((most_lines, most_length))
    out[:lines, :length] = data.view(lines, pitch)[:, :length]
    return out


def _aligned(scales: Tensor) -> Tensor:
    return scales if scales.data_ptr() % 16 == 0 else scales.clone()


class _Layout:
    """Where copies and inverse scales lie in their buffers, in bytes (python/shim/plans.hpp)."""

    def __init__(self, values: tuple[int, ...]) -> None:
        self.q_pitch, self.q_scales, in_qt, self.qt_pitch, self.qt_scales = values
        self.scales_in_qt = bool(in_qt)

    def parts(
        self,
        name: str,
        copy: Tensor,
        with_scales: Tensor,
        rows: int,
        cols: int,
        granularity: Granularity,
    ) -> tuple[Tensor, Tensor]:
        """Returns a copy's elements and scales, without the bytes between them.

        with_scales: the copy that has the scales, which is qt for q where `scales_in_qt`.
        """
        if name == "q":
            lines, length, pitch, begin = rows, cols, self.q_pitch, self.q_scales
        else:
            lines, length, pitch, begin = cols, rows, self.qt_pitch, self.qt_scales
        data = copy[: lines * pitch].view(lines, pitch)[:, :length]
        scales = with_scales[begin:].view(torch.float32)
        if granularity is not Granularity.BLOCK_128X128:
            return data, scales[: 1 if granularity is Granularity.TENSOR else lines]
        down, across = _blocks(lines), _blocks(length)
        of_blocks = scales[: down * _padded4(across)].view(down, -1)
        return data, of_blocks[:, :across]


def plain_parts(
    copies: tuple[Tensor, Tensor], rows: int, layer: Float8Linear
) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns the elements and scales of both copies of a weight, as `quantize` gives them."""
    q, qt = copies
    cols = layer.in_features + layer._padding
    at = _layout(rows, rows, cols, layer._config & ~recipes.BIAS, True, False)
    parts = {}
    if q.numel() > 0 and at.q_pitch > 0:
        scales = qt if at.scales_in_qt else q
        parts["q"] = at.parts("q", q, scales, rows, cols, layer.recipe.output.b.granularity)
    if qt.numel() > 0 and at.qt_pitch > 0:
        parts["qt"] = at.parts("qt", qt, qt, rows, cols, layer.recipe.grad_input.b.granularity)
    return parts


@functools.cache
def _layout(
    rows_max: int, rows: int, cols: int, config: int, transposed: bool, over_ranks: bool
) -> _Layout:
    return _Layout(
        torch.ops.float8.copy_layout(
            rows_max, rows, cols, config, _ops.WEIGHT, transposed, over_ranks
        )
    )


def _copy(to: Tensor, of: Tensor) -> None:
    """Copies bytes; 16 at once where rows are whole 16s, which takes a quarter of the time."""
    if to.shape[-1] % 16 == 0 and all(
        stride % 16 == 0 for x in (to, of) for stride in x.stride()[:-1]
    ):
        to, of = to.view(torch.complex128), of.view(torch.complex128)
    to.copy_(of)


def _blocks(extent: int) -> int:
    return -(-extent // _BLOCK)


def _padded4(scales: int) -> int:
    return -(-scales // 4) * 4


# The ops of a linear whose weight is gathered. They take the key of its WeightGather in a tensor on
# the host, which torch.compile passes on: one graph serves the layers of many blocks.
torch.library.define(
    "float8::gathered_forward",
    "(Tensor x, Tensor? x_q, Tensor? x_qt, Tensor gather, int n, ScalarType dtype, Tensor? bias, "
    "int config, bool save) -> (Tensor, Tensor)",
)
torch.library.define(
    "float8::gathered_backward",
    "(Tensor dy, Tensor saved, Tensor? x, Tensor? x_qt, Tensor gather, int[] shape, "
    "ScalarType dtype, int config, int wanted) -> (Tensor, Tensor, Tensor)",
)


def _weight(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns an element in the weight's shape: nobody reads it."""
    return like.new_zeros((), dtype=dtype).expand(shape)


def _forward(
    x: Tensor,
    x_q: Tensor | None,
    x_qt: Tensor | None,
    gather: Tensor,
    n: int,
    dtype: torch.dtype,
    bias: Tensor | None,
    config: int,
    save: bool,
) -> Any:
    weight = _weight(x, (n, x.shape[-1]), dtype)
    q = GatheredCopy(x, None) if is_fake(gather) else _gathers[int(gather)].q(x.dtype)
    return _ops.linear_forward(
        x, x_q, x_qt, weight, q.data, None, bias, None, config, 0, save, q.scales
    )


def _backward(
    dy: Tensor,
    saved: Tensor,
    x: Tensor | None,
    x_qt: Tensor | None,
    gather: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    config: int,
    wanted: int,
) -> Any:
    weight = _weight(dy, shape, dtype)
    if is_fake(gather):
        qt = GatheredCopy(dy, None)
    else:
        qt = _gathers[int(gather)].qt(
            dy.dtype, lambda: torch.ops.float8.reads_shards(dy, weight, config)
        )
    return _ops.linear_backward(
        dy, saved, x, x_qt, weight, qt.data, None, config, 0, wanted, qt.scales, qt.shards
    )


for name, call in (("gathered_forward", _forward), ("gathered_backward", _backward)):
    torch.library.impl(f"float8::{name}", ("cpu", "cuda"), call)
    torch.library.register_fake(f"float8::{name}", call)
gathered_forward = torch.ops.float8.gathered_forward.default
gathered_backward = torch.ops.float8.gathered_backward.default
