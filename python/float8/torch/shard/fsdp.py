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
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import return_and_correct_aliasing

from float8.recipes import Granularity, Recipe, Scaling
from float8.torch import _ops, notices
from float8.torch.ranks import collectives
from float8.torch.shard import weight_changes
from float8.torch.shard.gathered_ops import (
    gathered_backward,
    gathered_copy,
    gathered_forward,
    gathered_gemm,
    weight_copy,
    weight_gemm,
)
from float8.torch.shard.shard_casts import cast_late, cast_shards
from float8.torch.shard.shard_copies import COPIES
from float8.torch.shard.weight_changes import Changes
from float8.torch.shard.weight_gather import WeightGather
from float8.torch.shard.weight_mesh import param_group, params_of_root

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class ShardedWeight(torch.Tensor):
    """A rank's shard of a weight, in high precision, whose gathers are in fp8.

    It sees every op on it, and on tensors that share its memory, and counts those that may write it.
    """

    changes: Changes  # of the memory: tensors that share it have one
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
        if func in _KEEPING:
            return _as_sharded(out, Changes())
        if _is_view(func):
            origin = next(arg for arg in args if isinstance(arg, ShardedWeight))
            if isinstance(out, Tensor):
                return _as_sharded(out, origin.changes)
            return type(out)(_as_sharded(each, origin.changes) for each in out)
        return out

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
            memo[id(self)] = _as_sharded(self.plain().clone(), Changes())
        return memo[id(self)]  # type: ignore[no-any-return]

    @property
    def fsdp_pre_all_gather(self) -> _PreAllGather:
        """Returns what FSDP calls for the tensors that this rank gives to a gather."""
        return _PreAllGather(self)

    def _to_gather(
        self, mesh: Any, outer_size: torch.Size, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], _Gathered]:
        if self._fsdp is None:
            self._fsdp = param_group(module)
        group, param = self._fsdp
        if not _may_gather(param):
            return (self._padded(outer_size, mesh.size(), mp_policy.param_dtype),), outer_size
        gather = gather_of(module)
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

    def _padded(self, size: torch.Size, ranks: int, dtype: torch.dtype | None) -> Tensor:
        """Returns the shard as FSDP gathers it in high precision."""
        own = self.plain()
        out = own.new_zeros((-(-size[0] // ranks), *size[1:]), dtype=dtype or own.dtype)
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
            return None if out is not None else (all_gather_outputs[0][: metadata[0]], [])
        gather, names = metadata
        gather.set_copies(dict(zip(names, all_gather_outputs, strict=True)))
        if out is not None:
            return None
        return GatheredWeight(gather.key, gather.size, param_dtype, gather.device), []


# A gather is of these copies of a WeightGather or, in high precision, of a whole weight of this size.
_Gathered = tuple[WeightGather, tuple[str, ...]] | torch.Size


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


def _as_sharded(tensor: Tensor, changes: Changes) -> Tensor:
    if type(tensor) is not torch.Tensor:
        return tensor
    sharded: ShardedWeight = torch.Tensor._make_subclass(ShardedWeight, tensor)
    sharded.changes = changes
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


class GatheredWeight(torch.Tensor):
    """The whole weight, which has no values but its copies in fp8; what linears and autograd see.

    Its only tensor is the key of its WeightGather, so that torch.compile traces it, and one graph
    serves the layers of many blocks.
    """

    key: Tensor

    @staticmethod
    def __new__(
        cls, key: Tensor, size: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> GatheredWeight:
        weight: GatheredWeight = torch.Tensor._make_wrapper_subclass(
            cls, size, dtype=dtype, device=device
        )
        weight.key = key
        return weight

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, torch.device]]:
        return ["key"], (self.dtype, self.device)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor],
        context: tuple[torch.dtype, torch.device],
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
    ) -> GatheredWeight:
        return GatheredWeight(inner["key"], outer_size, *context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        weight = next(arg for arg in args if isinstance(arg, GatheredWeight))
        if func in _ALIASES:
            alias = GatheredWeight(weight.key, weight.shape, weight.dtype, weight.device)
            return return_and_correct_aliasing(func, args, kwargs or {}, alias)  # type: ignore[no-untyped-call]
        if func is torch.ops.aten.zeros_like.default:
            return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        if func is _ops.linear_forward:
            return weight.forward_of_linear(*args[:3], *args[6:])
        if func is _ops.linear_backward:
            return weight.backward_of_linear(*args[:4], *args[6:])
        if func is weight_gemm:
            gemm, a, a_scales, _, bias, dtype, config = args
            shape = list(weight.shape)
            return gathered_gemm(gemm, a, a_scales, weight.key, shape, bias, dtype, config)
        if func is weight_copy:
            gemm, like, _, dtype, granularity = args
            shape = list(weight.shape)
            clone = type(weight.key) is not torch.Tensor or is_fake(weight.key)
            return gathered_copy(gemm, like, weight.key, shape, dtype, granularity, clone)
        raise NotImplementedError(
            f"float8: {func} was called with a weight that FSDP gathered in fp8, which has no "
            "values in high precision; only the linear it belongs to can use it"
        )

    def forward_of_linear(self, x: Tensor, x_q: Any, x_qt: Any, *rest: Any) -> Any:
        """Computes linear_forward; `rest` begins with the bias."""
        return gathered_forward(x, x_q, x_qt, self.key, self.shape[0], self.dtype, *rest)

    def backward_of_linear(self, dy: Tensor, saved: Tensor, x: Any, x_qt: Any, *rest: Any) -> Any:
        """Computes linear_backward; `rest` begins with the scales."""
        shape = list(self.shape)
        return gathered_backward(dy, saved, x, x_qt, self.key, shape, self.dtype, *rest)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype})"


_ALIASES = (
    torch.ops.aten.alias.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.view.default,
)


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
        weight._local_tensor = _as_sharded(local, Changes())
        weight_changes.watch_optimizers()


def _shards_more(before: Any, weight: Any) -> bool:
    """Tells whether FSDP shards a weight, whose layer had another one before."""
    if not hasattr(before, "_local_tensor"):
        return True
    if isinstance(before._local_tensor, ShardedWeight):
        return bool(weight.placements == before.placements)
    return bool(weight.device_mesh.ndim > before.device_mesh.ndim)  # beside tensor parallelism


def gather_of(layer: Any) -> WeightGather:
    """Returns the gather of a layer whose weight is a shard now."""
    if layer._weight_gather is None:
        layer._weight_gather = WeightGather(layer, layer.weight.dtype)
    return layer._weight_gather  # type: ignore[no-any-return]


def _may_gather(param: Any) -> bool:
    """Tells whether a parameter of FSDP is gathered in fp8: other modules cannot read its copies."""
    info = param._module_info
    if not hasattr(info.module, "_weight_gather") or info.shared_modules:
        modules = [info.module, *info.shared_modules]
        names = " and ".join(getattr(m, "_layer_name", "") or type(m).__name__ for m in modules)
        notices.warn_once(
            f"the tied weight of {names}",
            f"{names} have one weight, which FSDP gathers in high precision: only linears in fp8 can "
            "read its copies in fp8",
        )
        return False
    return isinstance(getattr(param.sharded_param, "_local_tensor", None), ShardedWeight)


def _cast_changed(gather: WeightGather) -> None:
    """Casts a shard, and all of the same model that have changed, with few collectives for all.

    Those of which nobody can know are cast with their own unit, since others may run much later.
    """
    changed: list[tuple[WeightGather, DTensor]] = []
    for group, param in params_of_root(gather.fsdp_group):
        weight = param.sharded_param
        if not gathers_in_fp8(param._module_info.module, weight):
            continue
        other = gather_of(param._module_info.module)
        other.join(group, param)
        own_unit = group is gather.fsdp_group
        if not other.is_current(weight) and (own_unit or not other.is_unknowable(weight)):
            other.is_fresh = own_unit
            changed.append((other, weight))
    _cast_by_groups(changed)


def _of_unit(group: Any) -> list[WeightGather]:
    """Returns the weights that FSDP gathers together in fp8."""
    gathers = [
        gather_of(param._module_info.module)
        for param in group.fsdp_params
        if gathers_in_fp8(param._module_info.module, param.sharded_param)
    ]
    return [gather for gather in gathers if gather.is_cast]


def _cast_by_groups(weights: Sequence[tuple[WeightGather, DTensor]]) -> None:
    """Casts the shards of weights, those that one group of ranks shares in one call."""
    groups: dict[Any, list[tuple[WeightGather, DTensor]]] = {}
    for gather, weight in weights:
        groups.setdefault(gather.group, []).append((gather, weight))
    for own in groups.values():
        cast_shards(own)


@contextlib.contextmanager
def unsharded(layer: Any) -> Iterator[Tensor | None]:
    """Gathers the weight of a layer as FSDP does before forward, None before FSDP's first forward.

    Whether a weight stays gathered after forward is not known before that.
    """
    group, param = param_group(layer)
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


@torch.no_grad()
def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Casts the sharded weights of the Float8Linear layers below `module`, for the next step.

    Call it after the optimizer's step, on all ranks. It finds the maxima of all shards, reduces them
    in one all-reduce (and one over the ranks of tensor parallelism, where there are some), and casts
    the shards with the scales of the whole weights; forward and backward then only gather. Without it
    the first gather after a change does the same, for all weights that have changed, to the same bits.
    It warns where no linear is in fp8.
    """
    notices.warn_without_linears("precompute_float8_dynamic_scale_for_fsdp", module)
    weights: list[tuple[WeightGather, DTensor]] = []
    for name, layer in module.named_modules():
        if gathers_in_fp8(layer):
            gather = gather_of(layer)
            gather.name = name or gather.name
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
    group, param = param_group(layer)
    return group is not None and _may_gather(param)
