"""FSDP2 (`fully_shard`) with weights that are gathered in fp8: 1 byte an element.

A Float8Linear with `enable_fsdp_float8_all_gather` has a ShardedWeight for its weight, which
`fully_shard` shards as any other. FSDP asks the shard for what it gathers (fsdp_pre_all_gather) and
gives it what came from all ranks (fsdp_post_all_gather): q in forward, qt in backward. What the
linear sees while its weight is gathered is a GatheredWeight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import return_and_correct_aliasing

from float8.recipes import Granularity, Recipe, Scaling
from float8.torch import _ops, notices
from float8.torch.gathered_ops import (
    gathered_backward,
    gathered_copy,
    gathered_forward,
    gathered_gemm,
    weight_copy,
    weight_gemm,
)
from float8.torch.ranks import collectives
from float8.torch.shard_casts import cast_shards
from float8.torch.weight_gather import COPIES, WeightGather
from float8.torch.weight_mesh import mesh_dims, param_group

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class ShardedWeight(torch.Tensor):
    """A weight, or a rank's shard of one, in high precision, whose gathers are in fp8."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with _no_dispatch():
            out = func(*args, **(kwargs or {}))
        if func not in _KEEPING:
            return out
        if isinstance(out, Tensor):
            return _as_sharded(out)
        return type(out)(_as_sharded(each) for each in out)

    def plain(self) -> Tensor:
        """Returns the same memory as a plain tensor."""
        with _no_dispatch():
            return self.detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saves a plain tensor: a checkpoint has the weight in high precision, and no class."""
        return self.plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied = _as_sharded(self.plain().clone())
            is_parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = nn.Parameter(copied, self.requires_grad) if is_parameter else copied
        return memo[id(self)]  # type: ignore[no-any-return]

    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor, ...], tuple[WeightGather, tuple[str, ...]]]:
        gather = gather_of(module)
        if gather.fsdp_group is None:
            gather.fsdp_group, param = param_group(module)
            name = getattr(param, "_param_fqn", None) or ""
            gather.name = name.removesuffix(".weight") or gather.name
        if gather.both is None:
            gather.dtype = mp_policy.param_dtype or self.dtype
        # FSDP moves the shards of some ranks before the first gather, but all ranks cast or none.
        weight: Any = module.weight
        if gather.both is None or not gather.is_current(weight):
            cast_shards([(gather, weight)])
        names = _wanted(gather)
        collectives.progress.begin(gather.operations[names])
        return tuple(gather.shard(name) for name in names), (gather, names)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: tuple[WeightGather, tuple[str, ...]],
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]] | None:
        gather, names = metadata
        gather.set_copies(dict(zip(names, all_gather_outputs, strict=True)))
        if out is not None:
            return None
        weight = GatheredWeight(gather.key, gather.size, param_dtype, gather.device)
        return weight, []  # FSDP frees what it gathered itself


def _as_sharded(tensor: Tensor) -> Tensor:
    if type(tensor) is not torch.Tensor:
        return tensor
    return torch.Tensor._make_subclass(ShardedWeight, tensor)


@contextlib.contextmanager
def _no_dispatch() -> Iterator[None]:
    guard = torch._C._DisableTorchDispatch()
    try:
        yield
    finally:
        del guard


# FSDP shards and pads with these ops, and modules are moved and copied with them.
_KEEPING = frozenset(
    (
        torch.ops.aten._pin_memory.default,
        torch.ops.aten._to_copy.default,
        torch.ops.aten.alias.default,
        torch.ops.aten.as_strided.default,
        torch.ops.aten.clone.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_zeros.default,
        torch.ops.aten.slice.Tensor,
        torch.ops.aten.split.Tensor,
        torch.ops.aten.view.default,
    )
)


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
            x, x_q, x_qt, _, _, _, *rest = args
            return gathered_forward(x, x_q, x_qt, weight.key, weight.shape[0], weight.dtype, *rest)
        if func is _ops.linear_backward:
            dy, saved, x, x_qt, _, _, *rest = args
            shape = list(weight.shape)
            return gathered_backward(dy, saved, x, x_qt, weight.key, shape, weight.dtype, *rest)
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


def sharded_parameter(weight: Any) -> Any:
    """Returns a parameter with the weight's own memory, which is gathered in fp8."""
    if isinstance(weight, ShardedWeight) or type(weight.data) is not torch.Tensor:
        return weight
    return nn.Parameter(_as_sharded(weight.data), weight.requires_grad)


def gather_of(layer: Any) -> WeightGather:
    """Returns the gather of a layer whose weight is a shard now."""
    if layer._weight_gather is None:
        layer._weight_gather = WeightGather(layer, layer.weight.dtype)
    return layer._weight_gather  # type: ignore[no-any-return]


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


def _wanted(gather: WeightGather) -> tuple[str, ...]:
    """Returns the copies that this gather is for.

    FSDP keeps the number of tensors of the first gather, so that it is decided once: both copies
    where the weight stays gathered between forward and backward, or where nobody knows.
    """
    group = gather.fsdp_group
    if gather.both is None:
        gather.both = gather.ranks > 1 and (group is None or not group._reshard_after_forward)
    if gather.both:
        return COPIES
    state = None if group is None else group._training_state.name
    return ("qt",) if state == "PRE_BACKWARD" else ("q",)


@torch.no_grad()
def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Casts the sharded weights of the Float8Linear layers below `module`, for the next step.

    Call it after the optimizer's step, on all ranks. It finds the maxima of all shards, reduces them
    in one all-reduce (and one over the ranks of tensor parallelism, where there are some), and casts
    the shards with the scales of the whole weights; forward and backward then only gather. Without it
    each weight does the same in its first gather after a change, with collectives of its own, to the
    same bits. It warns where no linear is in fp8.
    """
    notices.warn_without_linears("precompute_float8_dynamic_scale_for_fsdp", module)
    groups: dict[Any, list[tuple[WeightGather, DTensor]]] = {}
    for name, layer in module.named_modules():
        if gathers_in_fp8(layer):
            gather = gather_of(layer)
            gather.name = name or gather.name
            groups.setdefault(gather.group, []).append((gather, layer.weight))
    for weights in groups.values():
        cast_shards(weights)
    shared: list[Any] = [m for m in module.modules() if getattr(m, "_sharing", None)]
    if shared:
        from float8.torch import tensor_parallel

        tensor_parallel.find_weight_words(shared)


def gathers_in_fp8(layer: Any) -> bool:
    """Tells whether a layer's weight is a shard now that FSDP gathers in fp8."""
    if not hasattr(layer, "_weight_gather"):
        return False
    local = getattr(layer._parameters.get("weight"), "_local_tensor", None)
    # Tensor parallelism alone has such weights too, and gathers none.
    return isinstance(local, ShardedWeight) and (
        layer._weight_gather is not None or mesh_dims(layer).fsdp is not None
    )
