"""fuse: the SwiGLU MLPs of a converted model, each as one function."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn
from torch.nn import functional

from float8.torch import notices
from float8.torch.base_linear import is_float8
from float8.torch.layer.linear import check_switches
from float8.torch.layer.mlp import (
    FusedSwiGLU,
    Names,
    class_of,
    obstacle_between,
    obstacle_of_child,
)
from float8.torch.shard.fsdp import gathers_in_fp8
from float8.torch.shard.weight_mesh import mesh_dims

_HUGGING_FACE = Names("gate_proj", "up_proj", "down_proj")
_TORCHTITAN = Names("w1", "w3", "w2")
# By the package and the name of a class. GELU is left by name of what activates.
_KNOWN = {
    ("transformers.models.", name): _HUGGING_FACE
    for name in (
        "LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "GemmaMLP", "Gemma2MLP", "Gemma3MLP",
    )
} | {("torchtitan.models.", "FeedForward"): _TORCHTITAN}  # fmt: skip
_registered: dict[type[nn.Module], Names] = {}


class Fusion(NamedTuple):
    """What `fuse` did with an MLP."""

    name: str  # in the model
    fused: bool
    why: str  # it was not fused; empty where it was


def register_swiglu(cls: type[nn.Module], *, gate: str, up: str, down: str) -> None:
    """Tells `fuse` of a class of MLPs whose forward is down(silu(gate(x)) * up(x)).

    gate, up, down: the names of its children. Its forward takes x alone. Subclasses with a forward of
    their own are not meant.
    """
    if not isinstance(cls, type) or not issubclass(cls, nn.Module):
        raise TypeError(f"float8: register_swiglu takes a class of nn.Module, not {cls!r}")
    names = Names(gate, up, down)
    if len(set(names)) < 3 or not all(isinstance(each, str) and each for each in names):
        raise ValueError(
            f"float8: gate, up and down are the names of three children, not {tuple(names)}"
        )
    _registered[cls] = names


def fuse(model: nn.Module, *, norms: bool = False) -> list[Fusion]:
    """Makes one function of each SwiGLU MLP of a model that was converted.

    norms: graphs that torch.compile makes of the model from now on cast what an RMSNorm makes of x as they
        compute it, for linears that read it: the product is not in memory, and its bits are the same. x and
        the norm's weight are of one type, bfloat16 or float16; delayed scaling, and eager mode, stay as they
        are.

    It is called after convert_to_float8_training, and before fully_shard of single MLPs and before
    torch.compile. The product silu(gate) up and the gradients of gate and up are then cast to fp8 as they are
    computed, and are never in memory. It is for recipes whose three GEMMs read fp8: of the named ones all
    but "rowwise_with_gw_hp".

    The MLP's class becomes a subclass of its own one; its children, parameters, their names, state dicts
    and the MLP's hooks stay. Known are the MLPs of Llama, Mistral, Qwen2 and Qwen3 in transformers, the
    FeedForward of torchtitan, and what register_swiglu names.

    Returns what was done with each MLP, and why it was left: for children with hooks, LoRA, a bias, or
    recipes and options unlike each other's; for an activation that is not SiLU; for a recipe that reads
    high precision. Raises TypeError where `model` is no module; it warns where
    nothing is fused and norms is False.
    """
    notices.warn_without_linears("fuse", model)
    check_switches(norms=norms)
    if norms:
        for layer in model.modules():
            if is_float8(layer):
                layer.fuse_norms()
    done: list[Fusion] = []
    for name, module in model.named_modules():
        if isinstance(module, FusedSwiGLU):
            why = _obstacle_of_children(module, module.names)
            done.append(Fusion(name, why is None, why or ""))
            continue
        names = _names_of(module)
        if names is None:
            if (why := _resembles(module)) is not None:
                done.append(Fusion(name, False, why))
            continue
        why = _obstacle(module, names)
        if why is None:
            module.__class__ = class_of(type(module), names)
        done.append(Fusion(name, why is None, why or ""))
    if not norms and notices.has_linears(model) and not any(each.fused for each in done):
        reasons = "; ".join(dict.fromkeys(each.why for each in done))
        notices.warn_once(
            f"fuse {reasons}",
            f"fuse left {type(model).__name__} as it was: "
            + (reasons or "it has no MLP that is known; see register_swiglu"),
        )
    return done


def _names_of(module: nn.Module) -> Names | None:
    """Returns the children of an MLP whose forward is known, None for another module."""
    for cls in type(module).__mro__:
        if cls.__dict__.get("forward") is None:
            continue  # fully_shard makes a class in front
        if cls in _registered:
            return _registered[cls]
        for (package, name), names in _KNOWN.items():
            if cls.__name__ == name and cls.__module__.startswith(package):
                return names
        return None
    return None


def _resembles(module: nn.Module) -> str | None:
    """Returns why an MLP that looks like one that is known was left."""
    for names in (_HUGGING_FACE, _TORCHTITAN):
        if all(is_float8(module._modules.get(each)) for each in names):  # type: ignore[arg-type]
            return (
                f"its class {type(module).__name__} is not known: name it by "
                "float8.torch.register_swiglu if its forward is down(silu(gate(x)) * up(x))"
            )
    return None


def _obstacle(module: nn.Module, names: Names) -> str | None:
    """Returns why an MLP of a known class is not fused."""
    forward: Any = type(module).forward
    if "forward" in module.__dict__ or forward.__module__ != _home(module):
        return "its forward was replaced"
    if any(each.__name__ == "FSDPModule" for each in type(module).__mro__):
        return "fully_shard was called on it: call fuse before"
    activation = getattr(module, "act_fn", functional.silu)
    if not (
        activation is functional.silu
        or isinstance(activation, nn.SiLU)
        or type(activation).__name__ == "SiLUActivation"
    ):
        return f"its act_fn is {type(activation).__name__}, and SiLU is what is fused"
    return _obstacle_of_children(module, names)


def _obstacle_of_children(module: nn.Module, names: Names) -> str | None:
    children = [module._modules.get(each) for each in names]
    for name, child in zip(names, children, strict=True):
        why = obstacle_of_child(name, child) or _obstacle_of_options(name, child)
        if why is not None:
            return why
    return obstacle_between(names, children)


def _home(module: nn.Module) -> str:
    """Returns the module of Python that the class with the forward is from."""
    return next(each.__module__ for each in type(module).__mro__ if "forward" in each.__dict__)


def _obstacle_of_options(name: str, child: Any) -> str | None:
    if child._weight_gather is not None or gathers_in_fp8(child):
        return f"the weight of its {name} is gathered in fp8"
    if child.enable_fsdp_float8_all_gather:
        return f"its {name} has enable_fsdp_float8_all_gather"
    if hasattr(child.weight, "placements") and mesh_dims(child).tensor is not None:
        return f"the weight of its {name} is shared by tensor parallelism"
    return None
