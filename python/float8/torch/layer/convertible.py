"""Which modules a conversion takes, and why it leaves out or refuses the others.

A Float8Linear takes the place of an nn.Linear whose forward is nn.Linear's, and whose weight is a
parameter of its own. A module that only looks like one would become a layer that computes something
else, or whose weight nothing trains.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter

from float8.filter import layer_pattern
from float8.torch import notices
from float8.torch.layer.linear import Float8Linear
from float8.torch.shard.weight_mesh import fsdp_params

# A conversion would lose these where a subclass has its own.
_OF_CLASS = (
    "forward",
    "__call__",
    "_call_impl",
    "_wrapped_call_impl",
    "__getattr__",
    "__getattribute__",
    "_load_from_state_dict",
    "_save_to_state_dict",
)


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Tells whether a module is an nn.Linear that is called.

    nn.MultiheadAttention reads the weight of its out_proj itself.
    """
    return isinstance(module, nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear)


def is_convertible(module: nn.Module, name: str = "") -> TypeGuard[nn.Linear]:
    """Tells whether a conversion makes a Float8Linear of a module of that name."""
    return is_linear(module) and obstacle(module, name) is None


def obstacle(linear: nn.Linear, name: str = "") -> str | None:
    """Returns why a conversion leaves a linear as it is, None where it takes it."""
    kind = type(linear)
    if name.rpartition(".")[2] == "_orig_mod":
        return "torch.compile was called on it, and goes on with it: convert the model before"
    if hasattr(linear, "parametrizations"):
        return (
            f"its {' and '.join(linear.parametrizations)} is parametrised: convert the model before "  # type: ignore[arg-type]
            "torch.nn.utils.parametrize and the norms that use it"
        )
    if of_instance := [name for name in ("forward", "_call_impl") if name in linear.__dict__]:
        return (
            f"its {of_instance[0]} was replaced, as accelerate's hooks do: convert the model before"
        )
    if getattr(linear, "_compiled_call_impl", None) is not None:
        return "it was compiled by nn.Module.compile: convert the model before"
    base = Float8Linear if isinstance(linear, Float8Linear) else nn.Linear
    for method in _OF_CLASS:
        if getattr(kind, method, None) is not getattr(base, method, None):
            return f"its class {kind.__name__} has a {method} of its own"
    for own in ("weight", "bias"):
        if (why := _obstacle_of(linear, own)) is not None:
            return why
    return None


def _obstacle_of(linear: nn.Module, name: str) -> str | None:
    """Returns why a parameter of a linear is none that a Float8Linear could have."""
    own = linear._parameters.get(name)
    if inspect.getattr_static(type(linear), name, None) is not None:
        return f"its {name} is an attribute of its class {type(linear).__name__}"
    if name in linear.__dict__ or (own is None and name not in linear._parameters):
        return (
            f"its {name} is no parameter, as after torch.nn.utils.weight_norm, spectral_norm or "
            "prune: convert the model before"
        )
    if own is None:
        return "it has no weight" if name == "weight" else None
    kind = kind_of_parameter(own)
    if kind is not None:
        return f"its {name} is a {kind}, whose values are not those of a plain parameter"
    if not isinstance(own, UninitializedParameter) and not (
        own.is_floating_point() and own.element_size() > 1
    ):
        return f"its {name} is of {own.dtype}, which is quantised already"
    if own.dtype == torch.float64:
        return (
            f"its {name} is of {own.dtype}: cast the model to bfloat16, float16 or float32 before"
        )
    return None


# The classes of parameters whose values a linear reads; a DTensor's shard may be of them too.
_KNOWN = ("float8.", "torch.nn.parameter", "torch._subclasses.fake_tensor")


def kind_of_parameter(parameter: Any) -> str | None:
    """Returns the name of a parameter's class, or of its shard's, that is none of the known ones."""
    kind = type(parameter)
    if kind.__module__.startswith("torch.distributed.tensor"):
        kind = type(parameter._local_tensor)
        if kind is torch.Tensor:
            return None
    return None if kind.__module__.startswith(_KNOWN) else kind.__qualname__


def without_unusual(chosen: Mapping[str, nn.Linear]) -> dict[str, nn.Linear]:
    """Returns the linears that a conversion takes; a warning names those that it leaves out.

    Raises ValueError for one that does not know its size yet.
    """
    taken: dict[str, nn.Linear] = {}
    left_out: dict[str, list[str]] = {}
    for name, linear in chosen.items():
        refuse_lazy(linear, name)
        if (why := obstacle(linear, name)) is None:
            taken[name] = linear
        else:
            left_out.setdefault(why, []).append(name or "root")
    for why, names in left_out.items():
        text = f"{listed(names)} stays as it is, and is not in fp8: {why}"
        notices.warn_once(text, text)
    return taken


def refuse_lazy(linear: nn.Module, name: str) -> None:
    """Raises where a linear does not know its size yet."""
    if isinstance(linear._parameters.get("weight"), UninitializedParameter):
        raise ValueError(
            f"float8: layer {name or 'root'!r} is a {type(linear).__name__} that has not seen an x, "
            "so its in_features are unknown: call the model once before the conversion, or make an "
            "nn.Linear"
        )


def refuse_sharded(module: nn.Module, replaced: Collection[nn.Module]) -> None:
    """Raises where FSDP or DeepSpeed has a linear that is to be replaced, and would train the old one.

    FSDP sets the gathered weights and the shards on the modules that it was given. Hooks of ZeRO-3 do so, and
    know these modules.
    """
    if not replaced:
        return
    known = modules_of_fsdp(module)
    for name, each in module.named_modules():
        if each in replaced and each in known:
            raise ValueError(
                f"float8: layer {name or 'root'!r} is sharded by FSDP, which would go on with the "
                "linear that a conversion replaces: convert the model, also to another recipe, "
                "before fully_shard"
            )
        if each in replaced and _has_hooks_of_deepspeed(each):
            raise ValueError(
                f"float8: layer {name or 'root'!r} has hooks of DeepSpeed's ZeRO-3, which would go on with the "
                "linear that a conversion replaces: convert the model, also to another recipe, "
                "before deepspeed.initialize"
            )


def _has_hooks_of_deepspeed(linear: nn.Module) -> bool:
    hooks = linear._forward_pre_hooks.values()
    return any((getattr(each, "__module__", None) or "").startswith("deepspeed.") for each in hooks)


def modules_of_fsdp(module: nn.Module) -> set[nn.Module]:
    """Returns the modules that FSDP, of either version, sets weights on, or calls with its hooks."""
    found: set[nn.Module] = set()
    for owner, _, param in fsdp_params():
        info = param._module_info
        found.update((owner, info.module, *info.shared_modules))
    for each in module.modules():  # of FSDP1
        flat = getattr(getattr(each, "_handle", None), "flat_param", None)
        found.update(info.module for info in getattr(flat, "_param_infos", ()))
    return found


def listed(names: Collection[str]) -> str:
    """Returns the layers of these names in words, with one name for many blocks."""
    kinds = list(
        dict.fromkeys(
            each if kind == "*" else kind for each in names for kind in [layer_pattern(each)]
        )
    )
    shown = ", ".join(repr(kind) for kind in kinds[:6]) + (", ..." if kinds[6:] else "")
    return f"layer {shown}" if len(names) == 1 else f"each of {len(names)} layers ({shown})"


def device_of(layers: Collection[nn.Module]) -> int | None:
    """Returns the CUDA device of the first weight that is on one.

    Where none is, as in a model on meta, it is PyTorch's current one; None without a Hopper GPU.
    """
    for layer in layers:
        for weight in layer._parameters.values():
            if weight is not None and weight.is_cuda:
                return weight.get_device()
    has_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return torch.cuda.current_device() if has_hopper else None
