"""An MLP, down(activation(gate(x)) up(x)) or down(activation(up(x))), of Float8Linear as one function.

What the activation makes, h, and the gradients of what it is made of are computed in fp32, rounded once to
x's type, and cast to fp8 as they are computed, once more after their maxima are found where scales need
these: they are never in memory. The results have the bits of the linears with that rounding between them.
"""

from __future__ import annotations

import itertools
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from float8 import recipes
from float8.torch import _linear, _ops, notices, traced
from float8.torch.base_linear import is_float8
from float8.torch.classes import Made, code_was_replaced
from float8.torch.contexts import wants_gradient
from float8.torch.layer.linear import Float8Linear, is_exporting
from float8.torch.layer.mlps import mlp_function
from float8.torch.layer.mlps.mlp_function import Layer
from float8.torch.layer.mlps.symbol_run import result_of
from float8.torch.layer.mlps.symbols import Symbol, activation_in
from float8.torch.parallel import style_hooks

_FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_HOOKS = (*_BACKWARD_HOOKS, *_FORWARD_HOOKS)
# The activations of PyTorch and transformers by their classes; those of "gelu_tanh" are one function.
_OF_CLASS = {
    "SiLU": "silu", "SiLUActivation": "silu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh", "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh", "ReLUSquaredActivation": "relu2",
}  # fmt: skip
ACTIVATION_MODULES = ("torch.nn.modules.activation", "transformers.activations")


class Names(NamedTuple):
    """The children of an MLP; gate is None where there is none.

    halves: whether up makes gate and up, in one linear of twice as many features, and which comes first.
    """

    gate: str | None
    up: str
    down: str
    halves: int = mlp_function.APART

    def given(self) -> tuple[str, ...]:
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)


class Beside(NamedTuple):
    """What an MLP has besides its linears, by names, which are paths where children hold others.

    before, behind: those that x and y go through, in their order; they are called.
    between: those that h goes through, or what the activation reads. They are not called: an MLP is fused
        where they leave what they get as it is.
    activation: the one that is the activation, None where that is a function.
    dropout: the attribute with the p of a functional.dropout of y behind these, None where there is none.
    around: the modules that hold linears below children. They are not called.
    lists: the names of the children of each list of modules that the forward goes through.
    entered: the classes of the modules whose forward is part of what is known.
    settings: what attributes are, by the path of their module and their name, that the forward's branches depend on;
        `...` is anything but None.
    code: the classes and Python modules, and the names that these have for what is called.
    optional: the arguments behind x that are None by default.
    """

    before: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    activation: str | None = None
    dropout: str | None = None
    around: tuple[str, ...] = ()
    lists: tuple[tuple[str, tuple[str, ...]], ...] = ()
    entered: tuple[tuple[str, type[nn.Module]], ...] = ()
    settings: tuple[tuple[str, str, Any], ...] = ()
    code: tuple[tuple[type[nn.Module] | str, str], ...] = ()
    optional: tuple[str, ...] = ()


def _name_of(module: nn.Module) -> str:
    """Returns an MLP's name in its model as far as its linears know theirs, and its class."""
    kind: Any = type(module)
    names = [getattr(each, "_layer_name", "") for each in module.children()]
    name = next((each.rpartition(".")[0] for each in names if each), "")
    return f"{name or 'an MLP'} ({kind.float8_original.__name__})"


class FusedMLP(Made, nn.Module):
    """The forward of an MLP whose class `fuse` changes; its children are the linears that it had.

    Where a child is no longer what was fused, as with hooks or LoRA that came later, the MLP computes as
    its own class does.
    """

    float8_names: ClassVar[Names]
    float8_activation: ClassVar[str]  # a key of _ops.ACTIVATIONS
    float8_beside: ClassVar[Beside] = Beside()

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        names = self.float8_names.given()
        children = [child_of(self, name) for name in names]
        alone = _has_x_alone(self.float8_beside.optional, args, kwargs)
        why = None if alone else "it was called with other than an x"
        dims = [_shared_dim(each) for each in children]
        why = why or obstacle_beside(self, self.float8_beside, self.float8_activation)
        why = why or obstacle_of_children(self.float8_names, children, dims)
        if not torch.compiler.is_compiling():
            if self.float8_forward_was_replaced():
                why = "the forward of its class was replaced"
            for owner, name in self.float8_beside.code:
                if why is None and code_was_replaced(owner, name):
                    why = f"the {name} that its forward calls was replaced"
        if why is not None or is_exporting():
            if why is not None and not torch.compiler.is_compiling():
                kind, name = self.float8_original.__name__, _name_of(self)
                notices.warn_once(
                    f"fuse {kind} {why}",
                    f"{name} is no longer fused: {why}. Other {kind}s for which the same is true are not named",
                )
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        # Without rows, and where some linears of ranks have scales already, they compute one by one.
        of_ranks = dims[0] is not None
        if of_ranks and (args[0].numel() == 0 or len({e._first_step for e in children}) > 1):  # type: ignore[union-attr]
            return super().forward(args[0])  # type: ignore[no-any-return]
        x = args[0]
        for child in children:
            child.note_call()  # type: ignore[union-attr, operator]
        for name in self.float8_beside.before:
            x = child_of(self, name)(x)  # type: ignore[misc]
        if of_ranks:
            y = _mlp_of_ranks(x, children, self.float8_activation)
        else:
            y = mlp(x, children, self.float8_activation, self.float8_names.halves)  # type: ignore[arg-type]
        for name in self.float8_beside.behind:
            y = child_of(self, name)(y)  # type: ignore[misc]
        if self.float8_beside.dropout is not None:
            y = functional.dropout(y, attribute_of(self, self.float8_beside.dropout), self.training)
        return y


def _has_x_alone(optional: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tells whether a call has an x, and else no more than arguments that are None as by default."""
    return (
        0 < len(args) <= 1 + len(optional)
        and isinstance(args[0], torch.Tensor)
        and all(each is None for each in (*args[1:], *kwargs.values()))
        and all(name in optional for name in kwargs)
    )


def _mlp_of_ranks(x: Any, layers: list[Any], activation: str) -> torch.Tensor:
    """Computes an MLP whose weights ranks share, with the hooks of its linears' styles at its ends."""
    from float8.torch.parallel import tensor_parallel  # it takes a while to load

    inputs = [style_hooks.before(each, x) for each in layers[:-1]]
    y = tensor_parallel.mlp(layers, inputs, _ops.ACTIVATIONS[activation])
    return style_hooks.after(layers[-1], y)  # type: ignore[no-any-return]


def mlp(x: torch.Tensor, layers: list[Float8Linear], activation: str, halves: int) -> torch.Tensor:
    """Computes an MLP of linears that have no obstacle: gate, up and down, or up, which may make both, and down."""
    source, of_autocast = x, None
    device = "cuda" if x.is_cuda else x.device.type
    if not x.is_meta and torch.is_autocast_enabled(device):
        x = of_autocast = x.detach().to(torch.get_autocast_dtype(device))
    first = layers[0]
    parameters = [p for each in layers for p in (each.weight, each.bias) if p is not None]
    save = wants_gradient(source, *parameters)
    of_mode = first._compiled_config if torch.compiler.is_compiling() else first._config
    config = of_mode & ~recipes.BIAS
    try:
        all_of = [_of_layer(each, x.dtype) for each in layers]
        x_q = x_qt = None
        # A linear that reads x alone casts it in its own call, where backward does not cast it again.
        alone = len(layers) == 2 and not config & recipes.RECOMPUTE
        if first._may_share and (not alone or torch.compiler.is_compiling()):
            keeps = save and mlp_function.keeps_input([e.config(config, True) for e in all_of[:-1]])
            x_q, x_qt = _ops.quantize(x.detach(), config, _ops.INPUT, keeps)
            x_qt = x_qt if keeps else None
        of = (_ops.ACTIVATIONS[activation], config, first.layout_of_call(), halves)
        if not save:
            records = _linear.records_amaxes(all_of[0].scales)
            return mlp_function.forward(x, x_q, x_qt, of, all_of, records)[0]
        flat = (each for of_one in all_of for each in of_one)
        return mlp_function.apply(source, of_autocast, x_q, x_qt, *of, *flat)  # type: ignore[no-any-return]
    except (RuntimeError, ValueError):
        if not torch.compiler.is_compiling():
            _linear.refuse(x, first.weight, f"{first._words()}: ")
        raise


def _of_layer(layer: Float8Linear, dtype: torch.dtype) -> Layer:
    weight, cast = layer.weight, layer._weight_cast
    kept = None if cast is None else cast.of(layer, weight, dtype)
    scales = None if layer._scale_view is None else layer.scales_on(weight.device)
    return Layer(weight, layer.bias, scales, *(kept or (None, None, None)))


def _shared_dim(child: Any) -> int | None:
    """Returns the dimension of a linear's weight that ranks share in its forward, where FSDP has gathered it."""
    weight: Any = child._parameters.get("weight") if isinstance(child, nn.Module) else None
    if not hasattr(weight, "_local_tensor"):
        return None
    placement: Any = weight.placements[0]
    return placement.dim if len(weight.placements) == 1 and placement.is_shard() else NO_DIM


NO_DIM = -1  # of a weight that is shared in a way that no linear knows


def obstacle_of_children(names: Names, children: list[Any], dims: list[int | None]) -> str | None:
    """Returns why the children of an MLP cannot be fused, None where they can.

    dims: the dimension of each weight that ranks of tensor parallelism share, None where they do not.
    """
    given = names.given()
    for name, child, dim in zip(given, children, dims, strict=True):
        why = _obstacle_of_child(name, child, dim is not None)
        if why is None and dim is not None:
            why = style_hooks.obstacle_of_hooks(name, child, name == names.down)
        if why is not None:
            return why
    return (
        _obstacle_between(given, children)
        or _obstacle_of_gate(names, children, dims)
        or _obstacle_of_dims(given, children, dims)
    )


def obstacle_beside(module: nn.Module, of: Beside, activation: str | None) -> str | None:
    """Returns why the children of an MLP that are no linears are not those of one that is fused.

    activation: that of the MLP, a key of _ops.ACTIVATIONS.
    """
    for path, names in of.lists:
        if tuple(getattr(child_of(module, path), "_modules", ())) != names:
            return f"{f'its {path}' if path else 'it'} has other children than it had"
    for path, kind in of.entered:
        if type(child_of(module, path)) is not kind:
            return f"its {path} is no {kind.__name__} now"
    for path, name, value in of.settings:
        now = getattr(child_of(module, path), name, None)
        is_same = now is not None if value is ... else type(now) is type(value) and now == value
        if not is_same:
            return f"its {f'{path}.' if path else ''}{name} is {now!r} now, and it was fused with {value!r}"
    for name in (*of.before, *of.behind):
        if child_of(module, name) is None:
            return f"its {name} is no module"
    for name in of.between:
        child = child_of(module, name)
        if type(child) is nn.Dropout and child.p > 0:
            return (
                f"its {name} drops what is between its linears (p={child.p}); with p=0 it is fused"
            )
        if type(child) not in (nn.Dropout, nn.Identity):
            return f"its {name}, a {type(child).__name__}, is between its linears"
    if of.activation is not None:
        own = attribute_of(module, of.activation)
        found = activation_of(own)
        if found is None:
            return (
                f"its {of.activation} is {type(own).__name__}; what is fused is SiLU, GELU, its tanh approximation "
                "and ReLU squared"
            )
        if found != activation:
            return f"its {of.activation} is {found} now, and it was fused with {activation}"
    for name in filter(None, (*of.between, of.activation, *of.around)):
        child = child_of(module, name)
        if child is not None and any(getattr(child, each) for each in _HOOKS):
            return f"its {name} has hooks, which would not be called"
        if child is not None and "forward" in child.__dict__:
            return f"its {name} has a forward of its own"
    return None


def child_of(module: nn.Module, name: str) -> nn.Module | None:
    """Returns a child by its name, or a module below by its path; the module for none, and None where there is none."""
    if not name:
        return module
    child: Any = module._modules.get(name)
    if child is None and "." in name:
        child = module
        for part in name.split("."):
            child = None if child is None else child._modules.get(part)
    return child  # type: ignore[no-any-return]


def attribute_of(module: nn.Module, path: str) -> Any:
    """Returns an attribute, or by a path that of a module below; None where there is none."""
    above, _, name = path.rpartition(".")
    return getattr(child_of(module, above), name, None)


def activation_of(own: Any) -> str | None:
    """Returns the key of an activation, None for one that is not fused."""
    if own is functional.silu:
        return "silu"
    if own is functional.gelu:
        return "gelu"
    if type(own) is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(own.approximate)
    if type(own).__module__ in ACTIVATION_MODULES:
        return _OF_CLASS.get(type(own).__name__)
    return _activation_of_class(type(own)) if isinstance(own, nn.Module) else None


@traced.constant
def _activation_of_class(kind: type[nn.Module]) -> str | None:
    """Returns the activation that the forward of a class computes and nothing else, as those of timm do."""
    y = result_of(kind.forward)
    function = activation_in(y) if isinstance(y, Symbol) else None
    return function.name if function is not None and function.x._how == "x" else None


def _obstacle_of_dims(
    names: tuple[str, ...], children: list[Any], dims: list[int | None]
) -> str | None:
    if all(dim is None for dim in dims):
        return None
    if dims != [0] * (len(dims) - 1) + [1]:
        return (
            f"ranks of tensor parallelism do not share the rows of {' and '.join(names[:-1])} and the columns "
            f"of {names[-1]} (ColwiseParallel and RowwiseParallel)"
        )
    mesh = children[0].weight.device_mesh
    if any(each.weight.device_mesh != mesh for each in children):
        return f"its {' and '.join(names)} are shared over different meshes"
    return None


def _obstacle_of_child(name: str, child: nn.Module | None, is_shared: bool) -> str | None:
    if child is None:
        return f"it has no {name!r}, which register_mlp names; its children are to be named as they are"
    kind: Any = type(child)
    if not is_float8(child):
        return f"its {name} is a {kind.__module__.partition('.')[0]} {kind.__name__}, not a Float8Linear"
    if kind.forward is not Float8Linear.forward or "forward" in child.__dict__:
        return f"its {name} has a forward of its own"
    # The hooks of a style are looked at apart.
    for hooks in _BACKWARD_HOOKS if is_shared else _HOOKS:
        if getattr(child, hooks):
            return (
                f"its {name} has hooks, which would not be called (fully_shard of it adds some too)"
            )
    if child._padding:
        return f"its {name} pads in_features to a multiple of 16"
    if not child._all_fp8:
        return (
            f"recipe {child.recipe} reads what its {name} casts in high precision too, for which it has to be "
            "in memory"
        )
    if child.recompute and is_shared:
        return f"its {name} has recompute=True, and a fused MLP of ranks keeps x and h in fp8"
    return None


def _obstacle_between(names: tuple[str, ...], children: list[Any]) -> str | None:
    """Returns why children that have no obstacle cannot be fused with each other."""
    # A graph has a guard for an id, and so would be of one MLP alone.
    if any(one is other for one, other in itertools.combinations(children, 2)):
        return "one linear is two of its children"
    first, *others = children
    for name, child in zip(names[1:], others, strict=True):
        if (child._config ^ first._config) & ~recipes.BIAS:
            return f"its {names[0]} and {name} differ in recipe, emulate or saturate"
        if child._scales is not first._scales or child._layout != first._layout:
            return f"its {names[0]} and {name} have not one scale state"
    return None


def _obstacle_of_gate(names: Names, children: list[Any], dims: list[int | None]) -> str | None:
    """Returns why an MLP cannot be fused for its gate."""
    if names.gate is not None and any(dim is not None for dim in dims):
        for name, child in zip(names.given()[:-1], children[:-1], strict=True):
            if child.bias is not None:
                return f"its {name} has a bias, and ranks of tensor parallelism share a gated MLP"
    if names.halves == mlp_function.APART:
        return None
    both, down = children
    if any(dim is not None for dim in dims):
        return f"its {names.up} makes gate and up in one, and ranks of tensor parallelism share it"
    if both.out_features != 2 * down.in_features or down.in_features % 128:
        return (
            f"its {names.up} makes {both.out_features} features and its {names.down} reads {down.in_features}; where "
            "one linear makes gate and up, they have a multiple of 128 features each"
        )
    return None
