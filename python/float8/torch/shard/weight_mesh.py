"""Who shares a layer's weight over which ranks: FSDP, tensor or expert parallelism, or FSDP and one of these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from float8.torch.shard.copy_layout import BLOCK


class MeshDims(NamedTuple):
    """Dimensions of the weight's mesh."""

    fsdp: int | None
    tensor: int | None


def mesh_dims(layer: Any) -> MeshDims:
    """Returns the dimensions that FSDP and tensor parallelism share a layer's DTensor weight over.

    FSDP shards what a rank of tensor parallelism has, and puts its dimensions in front.
    """
    weight = layer.weight
    sharded = [i for i, at in enumerate(weight.placements) if not at.is_replicate()]
    if len(sharded) > 2:
        raise ValueError(
            f"float8: layer {layer._layer_name!r} has a weight with placements {weight.placements}; "
            "fully_shard and tensor parallelism share it over one dimension of a mesh each"
        )
    if len(sharded) == 2:
        return MeshDims(*sharded)
    if not sharded:
        return MeshDims(None, None)
    if layer._sharing is not None:
        tensor = weight.device_mesh.get_group(sharded[0]) is layer._sharing[0][0].get_group()
    else:
        tensor = not is_sharded_by_fsdp(layer)
    return MeshDims(None, sharded[0]) if tensor else MeshDims(sharded[0], None)


def size_of_rank(layer: Any) -> tuple[int, int]:
    """Returns the size of the weight that a rank's linear has: FSDP gathers it, others keep theirs."""
    weight = layer.weight
    size = [layer.out_features, layer.in_features + layer._padding]
    if hasattr(weight, "placements") and (at := mesh_dims(layer).tensor) is not None:
        size[weight.placements[at].dim] //= weight.device_mesh.size(at)
    return size[0], size[1]


def dtype_of_rank(layer: Any) -> Any:
    """Returns the type of the weight that a rank's linear has, which FSDP's policy may name."""
    _, param = param_group(layer) if hasattr(layer.weight, "placements") else (None, None)
    return (param is not None and param.mp_policy.param_dtype) or layer.weight.dtype


def fsdp_dim(param: Any) -> int | None:
    """Returns the dimension of its weight's mesh that FSDP shards a parameter over, None for a replicated one."""
    mesh = param.sharded_param.device_mesh
    group = getattr(param.mesh_info, "shard_process_group", None)
    return next((i for i in range(mesh.ndim) if mesh.get_group(i) is group), None)


def dims_of_others(weight: Any, fsdp: int) -> list[int]:
    """Returns the other dimensions of a weight's mesh over which ranks have parts of it."""
    mesh, placements = weight.device_mesh, weight.placements
    return [
        i
        for i, each in enumerate(placements)
        if i != fsdp and not each.is_replicate() and mesh.size(i) > 1
    ]


def size_without_fsdp(weight: Any, fsdp: int) -> torch.Size:
    """Returns the size of what FSDP gathers of experts: those that expert parallelism gave to this rank."""
    size = list(map(int, weight.shape))
    mesh = weight.device_mesh
    for i in dims_of_others(weight, fsdp):
        most = -(-size[0] // mesh.size(i))
        size[0] = max(0, min(most, size[0] - mesh.get_local_rank(i) * most))
    return torch.Size(size)


def is_sharded_by_fsdp(layer: nn.Module) -> bool:
    """Tells whether a layer's weight is one of FSDP's."""
    return param_group(layer)[0] is not None


def home_of(layer: Any) -> tuple[nn.Module, str]:
    """Returns the module with a layer's weight, and the name that this has there."""
    return (layer, "weight") if isinstance(layer, nn.Module) else (layer.module, layer.name)


def layer_of(module: Any, name: str) -> Any:
    """Returns the layer with a module's parameter of that name whose gathers may be in fp8, or None."""
    if hasattr(module, "_weight_gather"):
        return module if name == "weight" else None
    return getattr(module, "expert_weights", {}).get(name)


def layers_of(module: Any) -> Iterator[tuple[str, Any]]:
    """Goes through the layers of a module whose gathers may be in fp8, with the names of their weights.

    A linear has an empty one.
    """
    if hasattr(module, "_weight_gather"):
        yield "", module
    yield from getattr(module, "expert_weights", {}).items()


def group_of_layer(layer: Any) -> tuple[Any, Any]:
    """Returns FSDP's group that a layer's weight is in, and FSDP's parameter, None for none."""
    return param_group(*home_of(layer))


def param_group(module: nn.Module, name: str = "weight") -> tuple[Any, Any]:
    """Returns FSDP's group that a module's parameter is in, and FSDP's parameter, None for none."""
    for _, group, param in fsdp_params():
        info = param._module_info
        if info.module is module and info.param_name == name:
            return group, param
        for shared, own in zip(info.shared_modules, info.shared_param_names, strict=True):
            if shared is module and own == name:
                return group, param
    return None, None


def params_of_root(group: Any) -> list[tuple[Any, Any]]:
    """Returns the groups and parameters of the FSDP modules that have one root with a group's."""
    for _, state in _fsdp_states():
        if any(own is group for own in _groups(state)):
            states = state._state_ctx.all_states or [state]
            return [
                (each, param)
                for own in states
                for each in _groups(own)
                for param in each.fsdp_params
            ]
    return []


def fsdp_params() -> Iterator[tuple[nn.Module, Any, Any]]:
    """Goes through FSDP2's parameters: the module that was sharded, the group, and the parameter."""
    for module, state in _fsdp_states():
        for group in _groups(state):
            for param in group.fsdp_params:
                yield module, group, param


def _fsdp_states() -> Iterator[tuple[nn.Module, Any]]:
    from torch.distributed import _composable_state

    for module, reference in list(_composable_state._module_state_mapping.items()):
        state: Any = reference() if callable(reference) else reference
        if state is not None:
            yield module, state


def _groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)  # from PyTorch 2.12 on
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def check_split(layer: Any, dim: int, ranks: int) -> None:
    """Raises ValueError, with the layer's name, where ranks cannot share its weight."""
    name = f"layer {layer._layer_name!r}" if layer._layer_name else "a Float8Linear"
    extent, what = (
        (layer.out_features, "out_features") if dim == 0 else (layer.in_features, "in_features")
    )
    blocks = layer._rules.has_blocks
    multiple = BLOCK if blocks else 16
    if extent % (ranks * multiple) != 0 or layer._padding:
        why = "whole blocks of 128" if blocks else "multiples of 16"
        raise ValueError(
            f"float8: {name} has {what} {extent}, which {ranks} ranks cannot share in {why}; leave "
            "it out of the parallelize plan, or out of the conversion"
        )
    if layer._rules.mixed:
        raise ValueError(
            f"float8: {name} has a custom recipe with delayed and other casts; tensor parallelism is "
            "for delayed scaling of all operands, or of none"
        )
