"""A SwiGLU MLP, down(silu(gate(x)) up(x)), of three Float8Linear as one function.

The product h and the gradients of gate and up are computed in fp32, rounded once to x's type, and cast
to fp8 as they are computed, once more after their maxima are found where scales need these: they are never
in memory. The results have the bits of the three linears with
that rounding between them.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from float8 import recipes
from float8.torch import _linear, _ops, notices
from float8.torch.base_linear import is_float8
from float8.torch.layer.linear import Float8Linear, is_exporting

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_Copies = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class Names(NamedTuple):
    """The children of a SwiGLU MLP."""

    gate: str
    up: str
    down: str


class SwiGLUFunction(torch.autograd.Function):
    """y = (silu(x gate^T) (x up^T)) down^T. Between forward and backward it keeps x and h in fp8."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w_gate: torch.Tensor,
        w_up: torch.Tensor,
        w_down: torch.Tensor,
        x_of_autocast: torch.Tensor | None,
        x_q: torch.Tensor | None,
        x_qt: torch.Tensor | None,
        *rest: Any,
    ) -> torch.Tensor:
        ctx.dtype = x.dtype
        x = x if x_of_autocast is None else x_of_autocast
        weights, (config, layout), scales, copies = (w_gate, w_up, w_down), *_unpacked(rest)
        y, *kept = _forward(x, weights, x_q, x_qt, scales, copies, config, layout, True)
        ctx.save_for_backward(*weights, *scales, *(each[1] for each in copies), x_qt, *kept)
        ctx.config = config
        ctx.layout = layout
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        if not torch.compiler.is_compiling():
            _linear.SharedInput.latest = None
        kept = ctx.saved_tensors
        (w_gate, w_up, w_down), (s_gate, s_up, s_down) = kept[:3], kept[3:6]
        (gate_qt, up_qt, down_qt), x_qt = kept[6:9], kept[9]
        gate, up, h_qt, of_gate, of_up, of_down = kept[10:]
        of = (ctx.config, ctx.layout)
        want_x, want_gate, want_up, want_down, *_ = ctx.needs_input_grad
        dx: Any = None
        d_gate = d_up = None
        want_h = want_x or want_gate or want_up
        dh, d_down, _ = _ops.linear_backward(
            dy, of_down, None, h_qt, w_down, down_qt, s_down, *of, want_h | want_down << 1
        )
        if want_h:
            scales = [each for each in (s_gate, s_up) if each is not None]
            copies = _ops.quantize_swiglu_backward(dh, gate, up, ctx.config, scales, ctx.layout)
            # Of gradients that are given in fp8 the shape alone is read, which gate and up have too.
            if want_x or want_gate:
                wanted = want_x | want_gate << 1
                given = (x_qt, w_gate, gate_qt, s_gate, *of, wanted, None, 1, *copies[:2])
                dx, d_gate, _ = _ops.linear_backward(gate, of_gate, None, *given)
            if want_x or want_up:
                wanted = want_x | want_up << 1
                given = (x_qt, w_up, up_qt, s_up, *of, wanted, None, 1, *copies[2:])
                dx_of_up, d_up, _ = _ops.linear_backward(up, of_up, None, *given)
                # The sum is autograd's: each linear casts x for autocast itself.
                dx = dx.to(ctx.dtype) + dx_of_up.to(ctx.dtype) if want_x else None
        return (
            dx if want_x else None,
            d_gate if want_gate else None,
            d_up if want_up else None,
            d_down if want_down else None,
            *(None,) * 17,
        )


def _unpacked(
    rest: tuple[Any, ...],
) -> tuple[tuple[int, int], tuple[torch.Tensor | None, ...], tuple[_Copies, ...]]:
    copies = rest[5:]
    return rest[:2], rest[2:5], (copies[:3], copies[3:6], copies[6:9])


def _forward(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    x_q: torch.Tensor | None,
    x_qt: torch.Tensor | None,
    scales: tuple[torch.Tensor | None, ...],
    copies: tuple[_Copies, ...],
    config: int,
    layout: int,
    save: bool,
) -> tuple[torch.Tensor, ...]:
    """Returns y, gate, up, qt of h, and what each linear saves."""

    def linear(
        index: int, x: torch.Tensor, q: torch.Tensor | None, qt: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        w_q, w_qt, w_state = copies[index]
        made: tuple[torch.Tensor, torch.Tensor] = _ops.linear_forward(
            x, q, qt, weights[index], w_q, w_qt, None, scales[index], config, layout, save, None,
            w_state,
        )  # fmt: skip
        return made

    gate, of_gate = linear(0, x, x_q, x_qt)
    up, of_up = linear(1, x, x_q, x_qt)
    h_q, h_qt = _ops.quantize_swiglu(gate, up, config, save, scales[2], layout, not save)
    # Of an x that is given in fp8 the shape alone is read.
    y, of_down = linear(2, gate, h_q, h_qt if save else None)
    return y, gate, up, h_qt, of_gate, of_up, of_down


_apply: Any = SwiGLUFunction.apply


class FusedSwiGLU(nn.Module):
    """The forward of an MLP whose class `fuse` changes; its children are the linears that it had.

    Where a child is no longer what was fused, as with hooks or LoRA that came later, the MLP computes as
    its own class does.
    """

    names: ClassVar[Names]
    original: ClassVar[type[nn.Module]]

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        children = [self._modules.get(name) for name in self.names]
        alone = isinstance(x, torch.Tensor) and not args and not kwargs
        why = None if alone else "it was called with other than an x"
        for name, child in zip(self.names, children, strict=True):
            why = why or obstacle_of_child(name, child) or _obstacle_of_weight(name, child)
        why = why or obstacle_between(self.names, children)
        if why is not None or is_exporting():
            if why is not None and not torch.compiler.is_compiling():
                kind = self.original.__name__
                notices.warn_once(f"fuse {kind} {why}", f"a {kind} is no longer fused: {why}")
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        return swiglu(x, *children)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        made: Any = super().__reduce_ex__(protocol)
        return (_remake, (self.original, self.names), *made[2:])


def _remake(original: type[nn.Module], names: Names) -> nn.Module:
    kind = class_of(original, names)
    return kind.__new__(kind)


_classes: dict[tuple[type[nn.Module], Names], type[nn.Module]] = {}


def class_of(original: type[nn.Module], names: Names) -> type[nn.Module]:
    """Returns the class of a fused MLP: it is the original one's subclass, made once."""
    key = (original, names)
    if key not in _classes:
        own = {"names": names, "original": original, "__module__": original.__module__}
        _classes[key] = type(f"Fused{original.__name__}", (FusedSwiGLU, original), own)
    return _classes[key]


def swiglu(
    x: torch.Tensor, gate: Float8Linear, up: Float8Linear, down: Float8Linear
) -> torch.Tensor:
    """Computes down(silu(gate(x)) up(x)) of linears that have no obstacle."""
    source, of_autocast = x, None
    device = "cuda" if x.is_cuda else x.device.type
    if not x.is_meta and torch.is_autocast_enabled(device):
        x = of_autocast = x.detach().to(torch.get_autocast_dtype(device))
    layers = (gate, up, down)
    weights = (gate.weight, up.weight, down.weight)
    save = torch.is_grad_enabled() and any(each.requires_grad for each in (source, *weights))
    config = gate._config & ~recipes.BIAS
    if torch.compiler.is_compiling():
        config |= gate._compiled_config & recipes.FUSE_NORMS
    try:
        x_q = x_qt = None
        if gate._may_share:
            x_q, x_qt = _ops.quantize(x.detach(), config, _ops.INPUT, save)
            x_qt = x_qt if save else None
        scales = tuple(
            None if each._scale_view is None else each.scales_on(each.weight.device)
            for each in layers
        )
        copies = tuple(_copies_of_weight(each, x.dtype) for each in layers)
        if not save:
            y, *_ = _forward(x, weights, x_q, x_qt, scales, copies, config, gate._layout, False)
            return y
        flat = (each for of_one in copies for each in of_one)
        of = (config, gate._layout, *scales, *flat)
        return _apply(source, *weights, of_autocast, x_q, x_qt, *of)  # type: ignore[no-any-return]
    except (RuntimeError, ValueError):
        if not torch.compiler.is_compiling():
            _linear.refuse(x, weights[0], f"{gate._words()}: ")
        raise


def _copies_of_weight(layer: Float8Linear, dtype: torch.dtype) -> _Copies:
    kept = None if layer._weight_cast is None else layer._weight_cast.of(layer, dtype)
    return kept or (None, None, None)


def obstacle_of_child(name: str, child: nn.Module | None) -> str | None:
    """Returns why a child of an MLP is none that can be fused, None where it is one."""
    kind: Any = type(child)
    if child is None or not is_float8(child):
        return f"its {name} is a {kind.__module__.partition('.')[0]} {kind.__name__}, not a Float8Linear"
    if kind.forward is not Float8Linear.forward or "forward" in child.__dict__:
        return f"its {name} has a forward of its own"
    for hooks in _HOOKS:
        if getattr(child, hooks):
            return (
                f"its {name} has hooks, which would not be called (fully_shard of it adds some too)"
            )
    if child.bias is not None:
        return f"its {name} has a bias"
    if child._padding:
        return f"its {name} pads in_features to a multiple of 16"
    if not child._all_fp8:
        return (
            f"recipe {child.recipe} reads silu(gate) up or its gradients in high precision too, for which "
            "they have to be in memory"
        )
    if child.recompute:
        return f"its {name} has recompute=True, and a fused MLP keeps x and h in fp8"
    return None


def obstacle_between(names: Names, children: list[Any]) -> str | None:
    """Returns why children that have no obstacle cannot be fused with each other."""
    gate, up, down = children
    if gate is up or up is down or gate is down:
        return "one linear is two of its children"
    for name, child in ((names.up, up), (names.down, down)):
        if (child._config ^ gate._config) & ~recipes.BIAS:
            return f"its {names.gate} and {name} differ in recipe, emulate or saturate"
        if child._scales is not gate._scales or child._layout != gate._layout:
            return f"its {names.gate} and {name} have not one scale state"
    return None


def _obstacle_of_weight(name: str, child: Any) -> str | None:
    """Returns why the weight is none that a fused forward reads."""
    weight = child._parameters.get("weight")
    if weight is None or hasattr(weight, "_local_tensor"):
        return f"the weight of its {name} is shared by tensor parallelism"
    if not torch.compiler.is_compiling() and hasattr(weight, "forward_of_linear"):
        return f"the weight of its {name} is gathered in fp8"
    return None
