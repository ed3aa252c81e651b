"""fuse: the MLPs of a converted model, each as one function, its rotary positions, and its norms."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn
from torch.nn import functional

from float8.torch import _ops, notices
from float8.torch.base_linear import is_float8
from float8.torch.classes import (
    check_class,
    is_sharded,
    known_of,
    note_code,
    note_forward,
    subclass,
)
from float8.torch.layer import norm_layers, rotary_layers
from float8.torch.layer.linear import check_switches
from float8.torch.layer.mlps import mlp_code, mlp_trial
from float8.torch.layer.mlps.mlp import (
    ACTIVATION_MODULES,
    Beside,
    FusedMLP,
    Names,
    activation_of,
    attribute_of,
    child_of,
    obstacle_beside,
    obstacle_of_children,
)
from float8.torch.layer.mlps.mlp_code import Known
from float8.torch.layer.mlps.mlp_function import APART, GATE_FIRST, UP_FIRST
from float8.torch.shard.weight_mesh import mesh_dims

_registered: dict[type[nn.Module], Known] = {}
_OTHER_NORM = (
    "its forward is not known as an RMSNorm of one weight and one epsilon (docs/fusing.md has the forms), so that eager "
    "mode computes it as it is written: name it by float8.torch.register_norm if functional.rms_norm computes it"
)


class Fusion(NamedTuple):
    """What `fuse` did with an MLP, the rotary positions of a module or a norm, or why it leaves it."""

    name: str  # in the model
    fused: bool
    why: str  # it was not fused; empty where it was
    what: str = "mlp"  # or "rotary", or "norm"


def register_mlp(
    cls: type[nn.Module],
    *,
    up: str | None = None,
    down: str,
    gate: str | None = None,
    gate_up: str | None = None,
    up_gate: str | None = None,
    activation: str,
) -> None:
    """Tells `fuse` of a class of MLPs whose forward is down(activation(up(x))).

    With `gate` it is down(activation(gate(x)) * up(x)), such as SwiGLU. With `gate_up` in the place of both it is
    that too, of one linear whose first half of features is gate and whose second half is up, and with `up_gate` of
    one whose first half is up.

    up, down, gate, gate_up, up_gate: the names of its children, or paths to modules below, as "net.0.proj". Its forward takes x
        alone. Subclasses with a forward of their own are not meant.
    activation: "silu", "gelu", "gelu_tanh" (GELU's approximation) or "relu2" (ReLU squared).

    fuse runs the forward of each such module with small linears in the places of its own ones, and leaves it where that
    computes something else. What needs its own sizes, or a GPU, is taken on trust.
    """
    check_class("register_mlp", cls)
    ways = {APART: up, GATE_FIRST: gate_up, UP_FIRST: up_gate}
    found = [(way, name) for way, name in ways.items() if name is not None]
    if len(found) != 1 or (gate is not None and up is None):
        raise ValueError(
            "float8: register_mlp takes up, maybe with gate, or one linear that makes both: gate_up, whose first half "
            "is gate, or up_gate, whose first half is up"
        )
    names = Names(gate, found[0][1], down, found[0][0])
    given = names.given()
    if len(set(given)) < len(given) or not all(isinstance(each, str) and each for each in given):
        raise ValueError(
            f"float8: up, down, gate, gate_up and up_gate are the names of different children, not {given}"
        )
    if activation not in _ops.ACTIVATIONS:
        raise ValueError(
            f"float8: activation is {activation!r}; it is one of {', '.join(_ops.ACTIVATIONS)}"
        )
    around = {parent: None for each in given for parent in _parents_of(each)}
    _registered[cls] = Known(names, activation, Beside(around=tuple(around)))


def _parents_of(path: str) -> Iterable[str]:
    """Returns the paths of the modules above one: "net" and "net.0" of "net.0.proj"."""
    return itertools.accumulate(path.split(".")[:-1], "{}.{}".format)


def fuse(model: nn.Module, *, norms: bool = False, rotary: bool = True) -> list[Fusion]:
    """Makes one function of each MLP of a model that was converted, and of its rotary positions in eager mode.

    norms: graphs that torch.compile makes of the model from now on cast what an RMSNorm or a LayerNorm makes
        of x as they compute it, for linears that read it: that is not in memory, and its bits are the same
        (docs/fusing.md says where). x, the norm's weight and its bias, if it has one, are of one type,
        bfloat16 or float16; delayed scaling stays as it is. In eager mode torch.nn.RMSNorm with a weight of one
        dimension, and RMSNorms that are written as several operations, as in transformers, have one launch on a Hopper
        GPU, and two for their gradients (functional.rms_norm). The sums over features may be in another order; what
        forward rounds is the same.
    rotary: modules with linears in fp8 whose forward calls a function of (q, k, cos, sin, ...), by its name, that
        computes x cos + rotate_half(x) sin, as most models of transformers do, have it in one launch on a Hopper GPU
        (functional.apply_rotary_pos_emb). The bits are the same; compiled graphs stay as they are.

    It is called after convert_to_float8_training, before or after parallelize_module, and before fully_shard of
    single MLPs and before torch.compile. What the activation makes, activation(gate(x)) up(x) or
    activation(up(x)), where one linear may make gate and up, and the gradients of what it reads are then cast
    to fp8 as they are computed, and are never in memory. It is for recipes whose three GEMMs read fp8: of the
    named ones all but "rowwise_with_gw_hp". The activation is SiLU, GELU, its tanh approximation or ReLU
    squared, rounded once.

    The class of what is fused becomes a subclass of its own one; children, parameters, their names, state dicts
    and hooks stay. Known is each module whose forward computes that and nothing else, by its code and that of modules in it which hold a linear
    (mlp_code.py), such as those of most models of transformers and the FeedForward of torchtitan, and what
    register_mlp names.

    Returns what was done with each MLP, then with the others (`what`), and why one was left: for children with hooks, LoRA, a bias of gate
    or up that ranks share, halves of gate and up that are no multiples of 128, weights that ranks share other than column-wise
    and row-wise, or recipes and options unlike each other's; for another activation; for a recipe that reads
    high precision. With `norms` it also names the RMSNorms of eager mode, and the other norms that no graph will cast so,
    and why: those without a weight or of several dimensions, and LayerNorms where no linear shares its casts. Raises TypeError where
    `model` is no module; it warns where nothing is fused and norms is False.
    """
    notices.warn_without_linears("fuse", model)
    check_switches(norms=norms, rotary=rotary)
    if norms:
        for layer in model.modules():
            if is_float8(layer):
                layer.fuse_norms()
    done = _fuse_mlps(model)
    if not norms and notices.has_linears(model) and not any(each.fused for each in done):
        reasons = "; ".join(dict.fromkeys(each.why for each in done))
        notices.warn_once(
            f"fuse {reasons}",
            f"fuse left the MLPs of {type(model).__name__} as they were: "
            + (reasons or "it has none that is known; see register_mlp"),
        )
    if rotary:
        done += _fuse_rotary(model)
    if norms:
        found = _fuse_norms(model)
        done += found + _norms_left(model, {each.name for each in found})
    return done


def _fuse_mlps(model: nn.Module) -> list[Fusion]:
    done: list[Fusion] = []
    # Modules come behind what they hold, which is an MLP rather than they.
    for name, module in reversed(list(model.named_modules())):
        if isinstance(module, FusedMLP):
            why = _obstacle_of_children(
                module, module.float8_names, module.float8_beside, module.float8_activation
            )
            done.append(Fusion(name, why is None, why or ""))
            continue
        registered = known_of(module, _registered, {})
        known = registered or mlp_code.known_of(module)
        if known is not None and known.beside.entered and _holds(name, done):
            continue
        if known is None:
            if (why := _resembles(module)) is not None:
                done.append(Fusion(name, False, why))
            continue
        of_child = known.beside.activation
        activation = known.activation
        if activation is None:
            activation = activation_of(attribute_of(module, of_child or ""))
        why = _obstacle(module, known, activation)
        if why is None and registered is not None:
            why = mlp_trial.obstacle_of_registered(module, known.names, activation or "")
        if why is None:
            note_forward(type(module))
            for owner, of_code in known.beside.code:
                note_code(owner, of_code)
            module.__class__ = subclass(
                FusedMLP, type(module), "Fused", float8_names=known.names, float8_activation=activation,
                float8_beside=known.beside,
            )  # fmt: skip
        done.append(Fusion(name, why is None, why or ""))
    return done[::-1]


def _holds(name: str, done: list[Fusion]) -> bool:
    """Tells whether a module holds one of these."""
    return any(each.name.startswith(f"{name}." if name else "") for each in done)


def _fuse_rotary(model: nn.Module) -> list[Fusion]:
    """Gives modules that have linears in fp8 rotary positions in one launch."""
    done = []
    for name, module in model.named_modules():
        linears: list[Any] = [each for each in module.children() if is_float8(each)]
        if isinstance(module, FusedMLP) or not linears:
            continue
        if isinstance(module, rotary_layers.FusedRotary):
            done.append(Fusion(name, True, "", "rotary"))
            continue
        found = rotary_layers.found_in(type(module))
        if found is None:
            continue
        why = _obstacle_of_forward(module) or found.why
        if not why:
            module.__class__ = subclass(
                rotary_layers.FusedRotary, type(module), "Fused", float8_rotary_name=found.name,
                float8_rotary_form=found.form, float8_rotary_emulate=any(each.emulate for each in linears),
            )  # fmt: skip
        done.append(Fusion(name, not why, why, "rotary"))
    return done


def _fuse_norms(model: nn.Module) -> list[Fusion]:
    """Gives RMSNorms one function, for eager mode."""
    emulate = any(is_float8(each) and each.emulate for each in model.modules())
    done = []
    for name, module in model.named_modules():
        if isinstance(module, norm_layers.FusedRMSNorm):
            done.append(Fusion(name, True, "", "norm"))
            continue
        registered = norm_layers.registered_form(module)
        form = registered or norm_layers.form_of(module)
        if form is None:
            if norm_layers.is_like(module) and type(module).forward is not nn.RMSNorm.forward:
                done.append(Fusion(name, False, _OTHER_NORM, "norm"))
            continue
        why = _obstacle_of_forward(module)
        if why is None and registered is not None:
            why = norm_layers.obstacle_of_registered(module, registered)
        if why is None:
            note_forward(type(module), form.methods)
            module.__class__ = subclass(
                norm_layers.FusedRMSNorm,
                type(module),
                "Fused",
                float8_norm_form=form,
                float8_norm_emulate=emulate,
            )
        done.append(Fusion(name, why is None, why or "", "norm"))
    return done


def _norms_left(model: nn.Module, named: set[str]) -> list[Fusion]:
    """Returns the other norms that stay as they are in eager mode, and are seen to stay so whatever the graphs are."""
    shares = any(is_float8(each) and each._may_share for each in model.modules())
    left = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or name in named:
            continue
        if module.weight is None:
            left.append(Fusion(name, False, "it has no weight (elementwise_affine=False)", "norm"))
        elif len(module.normalized_shape) != 1:
            shape = tuple(module.normalized_shape)
            left.append(
                Fusion(name, False, f"its normalized_shape is {shape}, not one dimension", "norm")
            )
        elif not shares:
            why = (
                "no linear's cast of x is apart: under delayed scaling each has a scale of its own"
            )
            left.append(Fusion(name, False, why, "norm"))
    return left


def _resembles(module: nn.Module) -> str | None:
    """Returns why a module that looks like an MLP was left, None where it does not."""
    linears: dict[str, Any] = {name: e for name, e in module.named_children() if is_float8(e)}
    if len(linears) not in (2, 3) or not _has_activation(module):
        return None
    pairs = [
        (name, up.out_features / down.in_features)
        for (name, up), (_, down) in itertools.permutations(linears.items(), 2)
        if up.in_features == down.out_features
    ]
    is_merged = len(linears) == 2 and any(ratio == 2 for _, ratio in pairs)
    if not is_merged and all(ratio != 1 for _, ratio in pairs):
        return None
    if _is_replaced(module):
        return "its forward was replaced"
    return (
        f"the forward of its class {type(module).__name__} is none that is known, since it "
        f"{mlp_code.why_unknown(type(module))}: name it by float8.torch.register_mlp if it is "
        "down(activation(gate(x)) * up(x)), or down(activation(up(x))), and nothing else, not even a dropout of h"
        + (
            "; with gate_up= where one linear makes gate, in its first half, and up, or up_gate= where up comes first"
            if is_merged
            else ""
        )
    )


def _has_activation(module: nn.Module) -> bool:
    """Tells whether a module has an activation, or its forward names a function that is one."""
    own = (*module._modules.values(), *module.__dict__.values())
    return mlp_code.calls_an_activation(type(module)) or any(
        type(each).__module__ in ACTIVATION_MODULES
        or getattr(each, "__module__", None) == functional.__name__
        for each in own
    )


def _obstacle(module: nn.Module, known: Known, activation: str | None) -> str | None:
    """Returns why an MLP of a known class is not fused."""
    if (why := _obstacle_of_forward(module)) is not None:
        return why
    above, _, name = (known.beside.activation or "").rpartition(".")
    if isinstance(getattr(type(child_of(module, above)), name, None), property):
        return f"its {name} is a property, which may be another one in each call"
    return _obstacle_of_children(module, known.names, known.beside, activation)


def _obstacle_of_forward(module: nn.Module) -> str | None:
    """Returns why a module is not given another forward."""
    if _is_replaced(module):
        return "its forward was replaced"
    if is_sharded(module):
        return "fully_shard was called on it: call fuse before"
    return None


def _obstacle_of_children(
    module: nn.Module, names: Names, beside: Beside, activation: str | None
) -> str | None:
    children = [child_of(module, each) for each in names.given()]
    dims = [_tensor_dim(each) for each in children]
    return obstacle_beside(module, beside, activation) or obstacle_of_children(
        names, children, dims
    )


def _tensor_dim(child: Any) -> int | None:
    """Returns the dimension of a linear's weight that ranks of tensor parallelism share, None without."""
    weight = getattr(child, "weight", None)
    if not is_float8(child) or not hasattr(weight, "placements"):
        return None
    at = mesh_dims(child).tensor
    return None if at is None else weight.placements[at].dim  # type: ignore[union-attr]


def _is_replaced(module: nn.Module) -> bool:
    """Tells whether a module's forward is another than the one that its class was made with."""
    home = next(each.__module__ for each in type(module).__mro__ if "forward" in each.__dict__)
    forward: Any = type(module).forward
    return "forward" in module.__dict__ or forward.__module__ != home
