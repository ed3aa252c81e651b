"""An MLP, down(activation(gate(x)) up(x)) or down(activation(up(x))), of Float8Linear as one function.

What the activation makes, h, and the gradients of what it is made of are computed in fp32, rounded once to
x's type, and cast to fp8 as they are computed, once more after their maxima are found where scales need
these: they are never in memory. The results have the bits of the linears with that rounding between them.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from float8 import recipes
from float8.torch import _linear, _ops, notices
from float8.torch.base_linear import is_float8
from float8.torch.classes import Made
from float8.torch.layer.linear import Float8Linear, is_exporting
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

    merged: up makes gate and up in one linear of twice as many features.
    up_first: in the other order, which is not fused.
    """

    gate: str | None
    up: str
    down: str
    merged: bool = False
    up_first: bool = False

    def given(self) -> tuple[str, ...]:
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)


class Beside(NamedTuple):
    """The other children of an MLP, by their names.

    before, behind: those that x and y go through, in their order; they are called.
    between: those that h goes through, or what the activation reads. They are not called: an MLP is fused
        where they leave what they get as it is.
    activation: the one that is the activation, None where that is a function.
    dropout: the attribute with the p of a functional.dropout of y behind these, None where there is none.
    of_sequential: all children, where the forward is that of nn.Sequential.
    """

    before: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    activation: str | None = None
    dropout: str | None = None
    of_sequential: tuple[str, ...] = ()


class _Layer(NamedTuple):
    """What a linear's calls take of it."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    scales: torch.Tensor | None
    q: torch.Tensor | None  # of the weight, as qt and state
    qt: torch.Tensor | None
    state: torch.Tensor | None

    def config(self, of_casts: int) -> int:
        return of_casts if self.bias is None else of_casts | recipes.BIAS


def _layers(flat: tuple[torch.Tensor | None, ...]) -> list[_Layer]:
    fields = len(_Layer._fields)
    return [_Layer(*flat[i : i + fields]) for i in range(0, len(flat), fields)]  # type: ignore[arg-type]


class MLPFunction(torch.autograd.Function):
    """Between forward and backward it keeps x and h in fp8, and what the activation reads in x's type.

    The layers are those of _Layer, one behind the other: gate and up, or up alone; then down.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        x_of_autocast: torch.Tensor | None,
        x_q: torch.Tensor | None,
        x_qt: torch.Tensor | None,
        activation: int,
        config: int,
        layout: int,
        merged: bool,
        *flat: torch.Tensor | None,
    ) -> torch.Tensor:
        layers = _layers(flat)
        ctx.dtype = x.dtype
        ctx.of = (activation, config, layout, merged)
        ctx.configs = [each.config(config) for each in layers]
        x = x if x_of_autocast is None else x_of_autocast
        y, h_qt, read, saved = _forward(x, x_q, x_qt, ctx.of, layers, True)
        of_layers = [(each.weight, each.qt, each.scales) for each in layers]
        ctx.save_for_backward(x_qt, h_qt, *read, *saved, *(each for of in of_layers for each in of))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        if not torch.compiler.is_compiling():
            _linear.SharedInput.latest = None
        activation, config, layout, merged = ctx.of
        count = len(ctx.configs)
        kept = ctx.saved_tensors
        x_qt, h_qt, read = kept[0], kept[1], kept[2 : count + 1]
        saved, of_layers = kept[count + 1 : 2 * count + 1], kept[2 * count + 1 :]
        fields = len(_Layer._fields)
        want_x = ctx.needs_input_grad[0]
        wanted = [ctx.needs_input_grad[8 + i * fields : 10 + i * fields] for i in range(count)]

        def linear(index: int, dy: torch.Tensor, qt: Any, want: int, *dy_copies: Any) -> Any:
            weight, w_qt, scales = of_layers[3 * index : 3 * index + 3]
            return _linear.call_backward(
                dy, saved[index], None, qt, weight, w_qt, scales, ctx.configs[index], layout, want,
                *dy_copies,
            )  # fmt: skip

        grads: list[Any] = [None] * (fields * count)
        want_h = want_x or any(any(each) for each in wanted[:-1])
        of_down, of_bias = wanted[-1]
        dh, dw, db = linear(count - 1, dy, h_qt, want_h | of_down << 1 | of_bias << 2)
        grads[-fields] = dw if of_down else None
        grads[1 - fields] = db if of_bias else None
        dx: Any = None
        if want_h:
            scales = [each for each in of_layers[2:-1:3] if each is not None]
            if merged:
                copies = _ops.quantize_merged_glu_backward(
                    dh, *read, activation, config, scales[0] if scales else None, layout
                )
            elif count == 2:
                want_bias = wanted[0][1]
                *copies, sums = _ops.quantize_activation_backward(
                    dh, *read, activation, config, want_bias, scales[0] if scales else None, layout
                )
                grads[1] = sums.to(of_layers[0].dtype) if want_bias else None
            else:
                copies = _ops.quantize_glu_backward(dh, *read, activation, config, scales, layout)
            for i in range(count - 1):
                of_weight = wanted[i][0]
                if not (want_x or of_weight):
                    continue
                # Of gradients that are given in fp8 the shape alone is read, which `read` has too.
                of_copies = copies[2 * i : 2 * i + 2]
                dx_of_one, dw, _ = linear(i, read[i], x_qt, want_x | of_weight << 1, *of_copies)
                grads[i * fields] = dw if of_weight else None
                if want_x:
                    # The sum is autograd's: each linear casts x for autocast itself.
                    dx_of_one = dx_of_one.to(ctx.dtype)
                    dx = dx_of_one if dx is None else dx + dx_of_one
        return (dx, *(None,) * 7, *grads)


def _forward(
    x: torch.Tensor,
    x_q: torch.Tensor | None,
    x_qt: torch.Tensor | None,
    of: tuple[int, int, int, bool],
    layers: list[_Layer],
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Returns y, qt of h, what the activation reads, and what each linear saves."""
    activation, config, layout, merged = of

    def linear(
        layer: _Layer, x: torch.Tensor, q: torch.Tensor | None, qt: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        made: tuple[torch.Tensor, torch.Tensor] = _linear.call_forward(
            x, q, qt, layer.weight, layer.q, layer.qt, layer.bias, layer.scales,
            layer.config(config), layout, save, layer.state,
        )  # fmt: skip
        return made

    *before, down = layers
    made = [linear(each, x, x_q, x_qt) for each in before]
    read = [each for each, _ in made]
    first, *up = read[0].chunk(2, dim=-1) if merged else read
    h_q, h_qt = _ops.quantize_activation(
        first, up[0] if up else None, activation, config, save, down.scales, layout, not save
    )
    # Of an x that is given in fp8 the shape alone is read.
    y, of_down = linear(down, first, h_q, h_qt if save else None)
    return y, h_qt, read, [*(each for _, each in made), of_down]


_apply: Any = MLPFunction.apply


# Those that MLPs had when they were fused, or first called in a process that loaded them.
def _name_of(module: nn.Module) -> str:
    """Returns an MLP's name in its model as far as its linears know theirs, and its class."""
    kind: Any = type(module)
    names = [getattr(each, "_layer_name", "") for each in module.children()]
    name = next((each.rpartition(".")[0] for each in names if each), "")
    return f"{name or 'an MLP'} ({kind.original.__name__})"


class FusedMLP(Made, nn.Module):
    """The forward of an MLP whose class `fuse` changes; its children are the linears that it had.

    Where a child is no longer what was fused, as with hooks or LoRA that came later, the MLP computes as
    its own class does.
    """

    names: ClassVar[Names]
    activation: ClassVar[str]  # a key of _ops.ACTIVATIONS
    beside: ClassVar[Beside] = Beside()

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        names = self.names.given()
        children = [self._modules.get(name) for name in names]
        alone = len(args) == 1 and isinstance(args[0], torch.Tensor) and not kwargs
        why = None if alone else "it was called with other than an x"
        dims = [_shared_dim(each) for each in children]
        why = why or obstacle_beside(self, self.beside, self.activation)
        why = why or obstacle_of_children(self.names, children, dims)
        if not torch.compiler.is_compiling() and self.forward_was_replaced():
            why = "the forward of its class was replaced"
        if why is not None or is_exporting():
            if why is not None and not torch.compiler.is_compiling():
                kind, name = self.original.__name__, _name_of(self)
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
        for name in self.beside.before:
            x = self._modules[name](x)  # type: ignore[misc]
        if of_ranks:
            y = _mlp_of_ranks(x, children, self.activation)
        else:
            y = mlp(x, children, self.activation, self.names.merged)  # type: ignore[arg-type]
        for name in self.beside.behind:
            y = self._modules[name](y)  # type: ignore[misc]
        if self.beside.dropout is not None:
            y = functional.dropout(y, getattr(self, self.beside.dropout), self.training)
        return y


def _mlp_of_ranks(x: Any, layers: list[Any], activation: str) -> torch.Tensor:
    """Computes an MLP whose weights ranks share, with the hooks of its linears' styles at its ends."""
    from float8.torch.parallel import tensor_parallel  # it takes a while to load

    inputs = [style_hooks.before(each, x) for each in layers[:-1]]
    y = tensor_parallel.mlp(layers, inputs, _ops.ACTIVATIONS[activation])
    return style_hooks.after(layers[-1], y)  # type: ignore[no-any-return]


def mlp(x: torch.Tensor, layers: list[Float8Linear], activation: str, merged: bool) -> torch.Tensor:
    """Computes an MLP of linears that have no obstacle: gate, up and down, or up and down.

    merged: up makes gate and up.
    """
    source, of_autocast = x, None
    device = "cuda" if x.is_cuda else x.device.type
    if not x.is_meta and torch.is_autocast_enabled(device):
        x = of_autocast = x.detach().to(torch.get_autocast_dtype(device))
    first = layers[0]
    parameters = [p for each in layers for p in (each.weight, each.bias) if p is not None]
    save = torch.is_grad_enabled() and any(each.requires_grad for each in (source, *parameters))
    config = first._config & ~recipes.BIAS
    if torch.compiler.is_compiling():
        config |= first._compiled_config & recipes.FUSE_NORMS
    try:
        x_q = x_qt = None
        # A linear that reads x alone casts it in its own call.
        if first._may_share and (len(layers) == 3 or torch.compiler.is_compiling()):
            x_q, x_qt = _ops.quantize(x.detach(), config, _ops.INPUT, save)
            x_qt = x_qt if save else None
        all_of = [_of_layer(each, x.dtype) for each in layers]
        of = (_ops.ACTIVATIONS[activation], config, first._layout, merged)
        if not save:
            return _forward(x, x_q, x_qt, of, all_of, False)[0]
        flat = (each for of_one in all_of for each in of_one)
        return _apply(source, of_autocast, x_q, x_qt, *of, *flat)  # type: ignore[no-any-return]
    except (RuntimeError, ValueError):
        if not torch.compiler.is_compiling():
            _linear.refuse(x, first.weight, f"{first._words()}: ")
        raise


def _of_layer(layer: Float8Linear, dtype: torch.dtype) -> _Layer:
    kept = None if layer._weight_cast is None else layer._weight_cast.of(layer, dtype)
    scales = None if layer._scale_view is None else layer.scales_on(layer.weight.device)
    return _Layer(layer.weight, layer.bias, scales, *(kept or (None, None, None)))


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
    if of.of_sequential not in ((), tuple(module._modules)):
        return "it has other children than it had"
    for name in (*of.before, *of.behind):
        if module._modules.get(name) is None:
            return f"its {name} is no module"
    for name in of.between:
        child = module._modules.get(name)
        if type(child) is nn.Dropout and child.p > 0:
            return (
                f"its {name} drops what is between its linears (p={child.p}); with p=0 it is fused"
            )
        if type(child) not in (nn.Dropout, nn.Identity):
            return f"its {name}, a {type(child).__name__}, is between its linears"
    if of.activation is not None:
        own = getattr(module, of.activation, None)
        found = activation_of(own)
        if found is None:
            return (
                f"its {of.activation} is {type(own).__name__}; what is fused is SiLU, GELU, its tanh approximation "
                "and ReLU squared"
            )
        if found != activation:
            return f"its {of.activation} is {found} now, and it was fused with {activation}"
    for name in (*of.between, of.activation or ""):
        child = module._modules.get(name)
        if child is not None and any(getattr(child, each) for each in _HOOKS):
            return f"its {name} has hooks, which would not be called"
        if child is not None and "forward" in child.__dict__:
            return f"its {name} has a forward of its own"
    return None


def activation_of(own: Any) -> str | None:
    """Returns the key of an activation, None for one that is not fused."""
    if own is functional.silu:
        return "silu"
    if own is functional.gelu:
        return "gelu"
    if type(own) is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(own.approximate)
    if type(own).__module__ not in ACTIVATION_MODULES:
        return None
    return _OF_CLASS.get(type(own).__name__)


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
    if child.recompute:
        return f"its {name} has recompute=True, and a fused MLP keeps x and h in fp8"
    return None


def _obstacle_between(names: tuple[str, ...], children: list[Any]) -> str | None:
    """Returns why children that have no obstacle cannot be fused with each other."""
    if len({id(each) for each in children}) < len(children):
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
    if names.gate is None and not names.merged:
        return None
    # The gradients of biases would be sums of columns of all that one launch casts.
    for name, child in zip(names.given()[:-1], children[:-1], strict=True):
        if child.bias is not None:
            return f"its {name} has a bias, which a gated MLP is fused without"
    if not names.merged:
        return None
    if names.up_first:
        return (
            f"its {names.up} makes up in its first half and gate in its second one; a fused MLP has gate first, so "
            "exchange the halves of the weight, and of the forward, to have it fused"
        )
    both, down = children
    if any(dim is not None for dim in dims):
        return f"its {names.up} makes gate and up in one, and ranks of tensor parallelism share it"
    if both.out_features != 2 * down.in_features or down.in_features % 128:
        return (
            f"its {names.up} makes {both.out_features} features and its {names.down} reads {down.in_features}; where "
            "one linear makes gate and up, they have a multiple of 128 features each"
        )
    return None
