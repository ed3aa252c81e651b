"""The function of a fused MLP (mlp.py) and its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from float8 import recipes
from float8.torch import _linear, _ops
from float8.torch.amaxes import keep_parts, parts_kept
from float8.torch.wanted_grads import wanted_grads

if TYPE_CHECKING:
    from collections.abc import Sequence


class Layer(NamedTuple):
    """What a linear's calls take of it."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    scales: torch.Tensor | None
    q: torch.Tensor | None  # of the weight, as qt and state
    qt: torch.Tensor | None
    state: torch.Tensor | None

    def config(self, of_casts: int) -> int:
        return of_casts if self.bias is None else of_casts | recipes.BIAS


def _layers(flat: tuple[torch.Tensor | None, ...]) -> list[Layer]:
    fields = len(Layer._fields)
    return [Layer(*flat[i : i + fields]) for i in range(0, len(flat), fields)]  # type: ignore[arg-type]


class MLPFunction(torch.autograd.Function):
    """Between forward and backward it keeps x and h in fp8, and what the activation reads in x's type.

    Where its linears recompute it keeps x instead, and casts both again in backward.
    The layers are those of Layer, one behind the other: gate and up, or up alone; then down.
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
        y, h_qt, read, saved = forward(x, x_q, x_qt, ctx.of, layers, True)
        of_layers = [(each.weight, each.qt, each.scales) for each in layers]
        kept = x if config & recipes.RECOMPUTE else None
        ctx.save_for_backward(
            kept, x_qt, h_qt, *read, *saved, *(each for of in of_layers for each in of)
        )
        keep_parts(ctx, *(each.scales for each in layers))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        if not torch.compiler.is_compiling():
            _linear.SharedInput.latest = None
        activation, config, layout, merged = ctx.of
        count = len(ctx.configs)
        x, x_qt, h_qt, *kept = ctx.saved_tensors
        read, saved = kept[: count - 1], kept[count - 1 : 2 * count - 1]
        of_layers = kept[2 * count - 1 :]
        states = parts_kept(ctx, *of_layers[2::3])
        fields = len(Layer._fields)
        needs = wanted_grads(ctx)
        want_x = needs[0]
        wanted = [needs[8 + i * fields : 10 + i * fields] for i in range(count)]

        def linear(
            index: int, dy: torch.Tensor, x: Any, qt: Any, want: int, *dy_copies: Any
        ) -> Any:
            weight, w_qt, _ = of_layers[3 * index : 3 * index + 3]
            return _linear.call_backward(
                dy, saved[index], x, qt, weight, w_qt, states[index], ctx.configs[index], layout,
                want, *dy_copies,
            )  # fmt: skip

        grads: list[Any] = [None] * (fields * count)
        want_h = want_x or any(any(each) for each in wanted[:-1])
        of_down, of_bias = wanted[-1]
        h = None
        if x is not None:
            h, h_qt = _product_again(read, h_qt, ctx.of, states[-1], of_down, dy)
        dh, dw, db = linear(count - 1, dy, h, h_qt, want_h | of_down << 1 | of_bias << 2)
        grads[-fields] = dw if of_down else None
        grads[1 - fields] = db if of_bias else None
        dx: Any = None
        if want_h:
            scales = [each for each in states[:-1] if each is not None]
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
            want_weights = [of_weight for of_weight, _ in wanted[:-1]]
            inputs = [(x, x_qt)] * (count - 1)
            if x is not None:
                inputs = _inputs_again(x, x_qt, config, layout, states[:-1], want_weights, dh)
            for i in range(count - 1):
                of_weight = want_weights[i]
                if not (want_x or of_weight):
                    continue
                # A linear reads the shape alone of gradients that it has in fp8, and `read` has it too.
                of_copies = copies[2 * i : 2 * i + 2]
                want = want_x | of_weight << 1
                dx_of_one, dw, _ = linear(i, read[i], *inputs[i], want, *of_copies)
                grads[i * fields] = dw if of_weight else None
                if want_x:
                    # The sum is autograd's: each linear casts x for autocast itself.
                    dx_of_one = dx_of_one.to(ctx.dtype)
                    dx = dx_of_one if dx is None else dx + dx_of_one
        return (dx, *(None,) * 7, *grads)


def _product_again(
    read: list[torch.Tensor],
    h_qt: torch.Tensor,
    of: tuple[int, int, int, bool],
    scales: torch.Tensor | None,
    of_weight: bool,
    dy: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Returns h and h_qt for the backward of a down that recomputes, which reads h_qt for its weight's gradient."""
    if not of_weight:
        return read[0], h_qt  # no gradient reads more of it than its shape
    activation, config, layout, merged = of
    first, up = _operands(read, merged)
    return None, _ops.quantize_activation_again(
        first, up, activation, h_qt, config, scales, layout, dy
    )


def _inputs_again(
    x: torch.Tensor,
    x_qt: torch.Tensor | None,
    config: int,
    layout: int,
    scales: Sequence[torch.Tensor | None],
    want_weights: list[bool],
    dh: torch.Tensor,
) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Returns x and x_qt for the backward of each linear that reads x and recomputes.

    x is cast once for all whose weight has a gradient; under delayed scaling, where x_qt is None, for each of them.
    """
    if torch.compiler.is_compiling():
        x = _linear.recomputable(x)

    def cast(state: torch.Tensor | None) -> torch.Tensor:
        kept = x.new_empty((0,), dtype=torch.uint8) if x_qt is None else x_qt
        return _ops.quantize_again(x, kept, config, state, layout, dh)  # type: ignore[no-any-return]

    shared = cast(None) if x_qt is not None and any(want_weights) else None
    return [
        (None, cast(state) if shared is None else shared) if wants else (x, x_qt)
        for state, wants in zip(scales, want_weights, strict=True)
    ]


def _operands(read: list[torch.Tensor], merged: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns what the activation reads and what it is multiplied by, if anything."""
    first, *up = read[0].chunk(2, dim=-1) if merged else read
    return first, up[0] if up else None


def forward(
    x: torch.Tensor,
    x_q: torch.Tensor | None,
    x_qt: torch.Tensor | None,
    of: tuple[int, int, int, bool],
    layers: list[Layer],
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Returns y, qt of h, what the activation reads, and what each linear saves."""
    activation, config, layout, merged = of

    def linear(
        layer: Layer, x: torch.Tensor, q: torch.Tensor | None, qt: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        made: tuple[torch.Tensor, torch.Tensor] = _linear.call_forward(
            x, q, qt, layer.weight, layer.q, layer.qt, layer.bias, layer.scales,
            layer.config(config), layout, save, layer.state,
        )  # fmt: skip
        return made

    *before, down = layers
    made = [linear(each, x, x_q, x_qt) for each in before]
    read = [each for each, _ in made]
    first, up = _operands(read, merged)
    h_q, h_qt = _ops.quantize_activation(
        first, up, activation, config, save, down.scales, layout, not save
    )
    # A linear reads the shape alone of an x that it has in fp8.
    y, of_down = linear(down, first, h_q, h_qt if save else None)
    return y, h_qt, read, [*(each for _, each in made), of_down]


apply: Any = MLPFunction.apply
