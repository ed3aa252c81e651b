"""FSDP2 (`fully_shard`) with weights that are gathered in fp8: 1 byte an element.

A conversion leaves the weight of a Float8Linear as it is. When `fully_shard`, or the load of a
checkpoint, gives a linear with `enable_fsdp_float8_all_gather` its shard, the DTensor stays the same
parameter and its local tensor becomes a ShardedWeight. FSDP asks that for what it gathers
(fsdp_pre_all_gather) and gives it what came from all ranks (fsdp_post_all_gather): q in forward, qt in
backward. What the linear sees while its weight is gathered is a GatheredWeight.

Copies of a shard that has changed, or may have, are cast again in the next forward, together with all
others of the model that have: `weight_changes.py` says how changes are known. Backward has the copies of
its forward.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from float8.recipes import Granularity, Recipe, Scaling
from float8.torch import notices, traced
from float8.torch.ranks import collectives
from float8.torch.shard import weight_changes
from float8.torch.shard.expert_casts import cast_experts
from float8.torch.shard.expert_gather import ExpertGather, obstacle
from float8.torch.shard.expert_pair import make_pair
from float8.torch.shard.gather import COPIES, Gather
from float8.torch.shard.gathered_weight import GatheredWeight
from float8.torch.shard.shard_casts import cast_late, cast_shards
from float8.torch.shard.weight_changes import Changes
from float8.torch.shard.weight_gather import WeightGather
from float8.torch.shard.weight_mesh import (
    group_of_layer,
    home_of,
    layer_of,
    layers_of,
    param_group,
    params_of_root,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class ShardedWeight(torch.Tensor):
    """A rank's shard of a weight, in high precision, whose gathers are in fp8.

    It sees every op on it, and on tensors that share its memory, and counts those that may write it.
    """

    changes: Changes  # of the memory: tensors that share it have one
    of_parameter: str  # its name in its module
    _fsdp: tuple[Any, Any] | None = None  # FSDP's group and parameter, once they are known

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        _note_writes(func, args, kwargs)
        with _no_dispatch():
            out = func(*args, **kwargs)
        if func not in _KEEPING and not _is_view(func):
            return out
        origin = next(arg for arg in args if isinstance(arg, ShardedWeight))
        changes = Changes() if func in _KEEPING else origin.changes
        if isinstance(out, Tensor):
            return _as_sharded(out, changes, origin.of_parameter)
        return type(out)(_as_sharded(each, changes, origin.of_parameter) for each in out)

    def plain(self) -> Tensor:
        """Returns the same memory as a plain tensor, which is for reading."""
        with _no_dispatch():
            return self.detach()

    def data_ptr(self) -> int:
        """Returns the address, through which anything may change the weight from now on."""
        self.changes.unknowable = True
        return super().data_ptr()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saves a plain tensor: a checkpoint has the weight in high precision, and no class."""
        return self.plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = _as_sharded(self.plain().clone(), Changes(), self.of_parameter)
        return memo[id(self)]  # type: ignore[no-any-return]

    @property
    def fsdp_pre_all_gather(self) -> _PreAllGather:
        """Returns what FSDP calls for the tensors that this rank gives to a gather."""
        return _PreAllGather(self)

    def _to_gather(
        self, mesh: Any, outer_size: torch.Size, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], _Gathered]:
        if self._fsdp is None:
            self._fsdp = param_group(module, self.of_parameter)
        group, param = self._fsdp
        if not _may_gather(param):
            return (self._padded(param, mp_policy.param_dtype),), outer_size
        gather = gather_of(layer_of(module, self.of_parameter))
        gather.join(group, param)
        in_backward = group._training_state.name == "PRE_BACKWARD"
        if not gather.is_cast or not (in_backward or gather.is_current(param.sharded_param)):
            weight_changes.note_cast_in_forward()
            _cast_changed(gather)
        elif not in_backward:
            gather.check(param.sharded_param)
        gather.is_fresh = False
        names = COPIES if gather.both else ("qt",) if in_backward else ("q",)
        if "qt" in names and gather.late and not gather.has_late:
            cast_late(_of_unit(group))
        collectives.progress.begin(gather.operations[names])
        return tuple(gather.shard(name) for name in names), (gather, names)

    def _padded(self, param: Any, dtype: torch.dtype | None) -> Tensor:
        """Returns the shard as FSDP gathers it in high precision."""
        own = self.plain()
        out = own.new_zeros(param.padded_sharded_param_size, dtype=dtype or own.dtype)
        out[: own.shape[0]] = own
        return out

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: _Gathered,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]] | None:
        # FSDP frees what it gathered itself, and fills the same memory with the next gather.
        if isinstance(metadata, torch.Size):
            whole = all_gather_outputs[0].view(-1)[: metadata.numel()].view(metadata)
            return None if out is not None else (whole, [])
        gather, names = metadata
        gather.set_copies(dict(zip(names, all_gather_outputs, strict=True)))
        if out is not None:
            return None
        return GatheredWeight.of(gather, param_dtype), []


# A gather is of these copies of a Gather or, in high precision, of a whole weight of this size.
_Gathered = tuple[Gather, tuple[str, ...]] | torch.Size


class _PreAllGather:
    """fsdp_pre_all_gather of a shard. FSDP asks for its signature before each call; it is made once."""

    __slots__ = ("_weight",)

    def __init__(self, weight: ShardedWeight) -> None:
        self._weight = weight

    def __call__(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor, ...], _Gathered]:
        return self._weight._to_gather(mesh, outer_size, module, mp_policy)


_PreAllGather.__signature__ = inspect.signature(_PreAllGather(None).__call__)  # type: ignore


def _as_sharded(tensor: Tensor, changes: Changes, name: str) -> Tensor:
    if type(tensor) is not torch.Tensor:
        return tensor
    sharded: ShardedWeight = torch.Tensor._make_subclass(ShardedWeight, tensor)
    sharded.changes = changes
    sharded.of_parameter = name
    return sharded


class _no_dispatch:
    """Calls ops without __torch_dispatch__. Every gather enters it, and a generator takes twice the time."""

    __slots__ = ("_guard",)

    def __enter__(self) -> None:
        self._guard = torch._C._DisableTorchDispatch()

    def __exit__(self, *_: object) -> None:
        del self._guard


# FSDP pads with these ops, and modules are moved and copied with them; the result is a shard too.
_KEEPING = frozenset(
    (
        torch.ops.aten._pin_memory.default,
        torch.ops.aten._to_copy.default,
        torch.ops.aten.clone.default,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_zeros.default,
    )
)
# The schemas of these say what an op writes. Those of c10d do not, and nobody knows of others.
_WITH_HONEST_SCHEMAS = frozenset(("aten", "prim", "prims", "_c10d_functional", "float8"))


@functools.cache
def _is_view(func: Any) -> bool:
    """Tells whether an op returns tensors that share the memory of its first tensor."""
    infos = [each.alias_info for each in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


@functools.cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Returns the arguments that an op may write, by their places and names."""
    schema = func._schema
    if schema.name == "c10d::send":
        return ()
    says = func.namespace in _WITH_HONEST_SCHEMAS
    return tuple(
        (place, each.name)
        for place, each in enumerate(schema.arguments)
        if not says or (each.alias_info is not None and each.alias_info.is_write)
    )


def _note_writes(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    for place, name in _written(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, ShardedWeight):
                each.changes.note(each)


def check_recipe(recipe: Recipe, padding: int) -> None:
    """Raises where a weight of that recipe has no fp8 copies that ranks could gather."""
    if not (recipe.output.b.fp8 and recipe.grad_input.b.fp8):
        raise ValueError(
            "float8: enable_fsdp_float8_all_gather is for recipes with the weight in fp8 in output and "
            f"grad_input; recipe {recipe.name or 'custom'} is none"
        )
    if Granularity.BLOCK_1X128 in (recipe.output.b.granularity, recipe.grad_input.b.granularity):
        raise ValueError(
            "float8: enable_fsdp_float8_all_gather is for weights with a scale for the tensor, for rows or "
            f"for blocks of 128x128; recipe {recipe.name or 'custom'} has one for each 1x128"
        )
    casts = {cast.scaling for _, gemm in recipe.gemms() for cast in (gemm.a, gemm.b)}
    if recipe.delayed and casts != {Scaling.DELAYED}:
        raise ValueError(
            "float8: enable_fsdp_float8_all_gather is for delayed scaling of all operands, or of none; "
            f"recipe {recipe.name or 'custom'} has both"
        )
    if padding:
        raise ValueError(
            "float8: enable_fsdp_float8_all_gather is for in_features in whole 16s, since the shards "
            "are not padded"
        )


def shard_in_place(layer: Any, weight: Any) -> None:
    """Makes a layer's new DTensor weight one that FSDP gathers in fp8: the same object and memory.

    FSDP is about to register the weight, or it has one of the same placements that this one replaces.
    """
    local = weight._local_tensor
    if type(local) is torch.Tensor and _shards_more(layer._parameters["weight"], weight):
        _, name = home_of(layer)
        weight._local_tensor = _as_sharded(local, Changes(), name)
        weight_changes.watch_optimizers()


def _shards_more(before: Any, weight: Any) -> bool:
    """Tells whether FSDP shards a weight, whose layer had another one before."""
    if not hasattr(before, "_local_tensor"):
        return True
    if isinstance(before._local_tensor, ShardedWeight):
        return bool(weight.placements == before.placements)
    # Beside FSDP: over a mesh of its own, or over some dimensions of one that is FSDP's too.
    own, other = (sum(not at.is_replicate() for at in each.placements) for each in (weight, before))
    return own > other


def gather_of(layer: Any) -> Any:
    """Returns the gather of a layer whose weight is a shard now."""
    if layer._weight_gather is None:
        pair = getattr(layer, "pair", None)
        if pair is not None and not any(each._weight_gather for each in pair) and _are_alike(pair):
            for each, gather in zip(pair, make_pair(*pair), strict=True):
                each._weight_gather = gather
        else:
            kind = WeightGather if isinstance(layer, nn.Module) else ExpertGather
            layer._weight_gather = kind(layer, layer.weight.dtype)
    return layer._weight_gather


def _are_alike(pair: Sequence[Any]) -> bool:
    """Tells whether FSDP shards w1 and w3 in one way, and gathers both in fp8."""
    (group, first), (other, second) = map(group_of_layer, pair)
    if group is not other or not (_may_gather(first) and _may_gather(second)):
        return False
    one, two = ((*w.placements, w.dtype, *w.shape) for w in (each.weight for each in pair))
    return one == two


def _layer_of(param: Any) -> Any:
    """Returns the layer of a parameter of FSDP, None where it is no Float8Linear's or expert's."""
    return layer_of(param._module_info.module, param._module_info.param_name)


def gather_of_weight(weight: Any) -> Gather | None:
    """Returns the gather of a sharded weight that FSDP has gathered in fp8, None for others."""
    local = getattr(weight, "_local_tensor", None)
    if not isinstance(local, ShardedWeight) or local._fsdp is None:
        return None
    _, param = local._fsdp
    layer = _layer_of(param)
    if param.sharded_param is not weight or layer is None or layer._weight_gather is None:
        return None
    gather: Gather = layer._weight_gather
    return gather if gather.is_cast else None


def _may_gather(param: Any) -> bool:
    """Tells whether a parameter of FSDP is gathered in fp8: other modules cannot read its copies."""
    info = param._module_info
    layer = _layer_of(param)
    if layer is None or info.shared_modules:
        modules = [info.module, *info.shared_modules]
        names = " and ".join(getattr(m, "_layer_name", "") or type(m).__name__ for m in modules)
        notices.warn_once(
            f"the tied weight of {names}",
            f"{names} have one weight, which FSDP gathers in high precision: only linears in fp8 can "
            "read its copies in fp8",
        )
        return False
    is_new_expert = not isinstance(layer, nn.Module) and layer._weight_gather is None
    if is_new_expert and (why := obstacle(layer, param)):
        text = f"FSDP gathers {layer._layer_name} in high precision: {why}"
        notices.warn_once(text, text)
        return False
    return isinstance(getattr(param.sharded_param, "_local_tensor", None), ShardedWeight)


def _cast_changed(gather: Gather) -> None:
    """Casts a shard, and all of the same model that have changed, with few collectives for all.

    Those of which nobody can know are cast with their own unit, since others may run much later.
    """
    changed: list[tuple[Any, DTensor]] = []
    for group, param in params_of_root(gather.fsdp_group):
        weight, layer = param.sharded_param, _layer_of(param)
        if not gathers_in_fp8(layer, weight):
            continue
        other = gather_of(layer)
        other.join(group, param)
        own_unit = group is gather.fsdp_group
        if not other.is_current(weight) and (own_unit or not other.is_unknowable(weight)):
            other.is_fresh = own_unit
            changed.append((other, weight))
    _cast_by_groups(changed)


def _of_unit(group: Any) -> list[Any]:
    """Returns the weights that FSDP gathers together in fp8."""
    gathers = [
        gather_of(_layer_of(param))
        for param in group.fsdp_params
        if gathers_in_fp8(_layer_of(param), param.sharded_param)
    ]
    return [gather for gather in gathers if gather.is_cast]


def _cast_by_groups(weights: Sequence[tuple[Any, DTensor]]) -> None:
    """Casts the shards of weights, those of one kind that one group of ranks shares in one call."""
    groups: dict[Any, list[tuple[Any, DTensor]]] = {}
    for gather, weight in weights:
        cast = cast_shards if isinstance(gather, WeightGather) else cast_experts
        groups.setdefault((cast, gather.group), []).append((gather, weight))
    for (cast, _), own in groups.items():
        cast(own)


@contextlib.contextmanager
def unsharded(layer: Any) -> Iterator[Tensor | None]:
    """Gathers the weight of a layer as FSDP does before forward, None before FSDP's first forward.

    Whether a weight stays gathered after forward is not known before that.
    """
    group, param = group_of_layer(layer)
    if group is None or param._param_fqn is None:
        yield None
        return
    if group.is_unsharded:
        yield layer.weight
        return
    group.unshard()
    group.wait_for_unshard()
    try:
        yield layer.weight
    finally:
        group.reshard()


@traced.untraced  # what gathers remember of the casts is no part of a graph
@torch.no_grad()
def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Casts the sharded weights of the linears and experts in fp8 below `module`, for the next step.

    Call it after the optimizer's step, on all ranks. It finds the maxima of all shards, reduces them
    in one all-reduce (and one over the ranks of tensor parallelism, where there are some), and casts
    the shards with the scales of the whole weights; experts have one all-gather of scales, and an all-reduce
    where ranks have parts of each expert. Forward and backward then only gather. Without it
    the first gather after a change does the same, for all weights that have changed, to the same bits.
    It warns where nothing is in fp8.
    """
    notices.warn_without_linears("precompute_float8_dynamic_scale_for_fsdp", module, experts=True)
    weights: list[tuple[Any, DTensor]] = []
    for name, each in module.named_modules():
        for own, layer in layers_of(each):
            if gathers_in_fp8(layer):
                gather = gather_of(layer)
                gather.name = ".".join(filter(None, (name, own))) or gather.name
                weights.append((gather, layer.weight))
    _cast_by_groups(weights)


def gathers_in_fp8(layer: Any, weight: Any = None) -> bool:
    """Tells whether a layer's weight, as it is or as FSDP has it, is a shard that is gathered in fp8."""
    if not hasattr(layer, "_weight_gather"):
        return False
    weight = layer._parameters.get("weight") if weight is None else weight
    if not isinstance(getattr(weight, "_local_tensor", None), ShardedWeight):
        return False
    if layer._weight_gather is not None:
        return True
    # A checkpoint may be loaded into weights that tensor parallelism alone shares.
    group, param = group_of_layer(layer)
    return group is not None and _may_gather(param)
