"""The function of a fused MLP (mlp.py) and its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from float8 import recipes
from float8.torch import _linear, _ops
from float8.torch.contexts import (
    keep_parts,
    once_differentiable,
    parts_kept,
    release_saved,
    wanted_grads,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


# How the linears make gate and up: in two, or in one, of which one is the first half; or there is no gate.
APART, GATE_FIRST, UP_FIRST = range(3)


class Layer(NamedTuple):
    """What a linear's calls take of it."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    scales: torch.Tensor | None
    q: torch.Tensor | None  # of the weight, as qt and state
    qt: torch.Tensor | None
    state: torch.Tensor | None

    def config(self, of_casts: int, save: bool) -> int:
        own = of_casts if self.bias is None else of_casts | recipes.BIAS
        is_frozen = save and not self.weight.requires_grad
        return recipes.of_frozen_weight(own, self.scales is not None) if is_frozen else own


def keeps_input(configs: Sequence[int]) -> bool:
    """Tells whether the gradient of any of these linears' weights reads their x."""
    return not all(each & recipes.FROZEN for each in configs)


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
        halves: int,
        *flat: torch.Tensor | None,
    ) -> torch.Tensor:
        layers = _layers(flat)
        ctx.dtype = x.dtype
        ctx.of = (activation, config, layout, halves)
        ctx.configs = [each.config(config, True) for each in layers]
        x = x if x_of_autocast is None else x_of_autocast
        y, h_qt, read, saved = forward(x, x_q, x_qt, ctx.of, layers, True)
        of_layers = [(each.weight, each.qt, each.scales) for each in layers]
        again = config & recipes.RECOMPUTE and keeps_input(ctx.configs[:-1])
        kept = x if again else None
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
        activation, config, layout, halves = ctx.of
        count = len(ctx.configs)
        x, x_qt, h_qt, *kept = ctx.saved_tensors
        read, saved = kept[: count - 1], kept[count - 1 : 2 * count - 1]
        of_layers = kept[2 * count - 1 :]
        del kept
        states = parts_kept(ctx, *of_layers[2::3])
        release_saved(ctx)
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
        if config & recipes.RECOMPUTE and keeps_input(ctx.configs[-1:]):
            h, h_qt = _product_again(read, h_qt, ctx.of, states[-1], of_down, dy)
        dh, dw, db = linear(count - 1, dy, h, h_qt, want_h | of_down << 1 | of_bias << 2)
        grads[-fields] = dw if of_down else None
        grads[1 - fields] = db if of_bias else None
        del h, h_qt
        dx: Any = None
        if want_h:
            scales = [each for each in states[:-1] if each is not None]
            want_biases = [of_bias for _, of_bias in wanted[:-1]]
            common = (activation, config, any(want_biases))
            one = scales[0] if scales else None
            if count == 3:
                *copies, sums = _ops.quantize_glu_backward(dh, *read, *common, scales, layout)
            elif halves == APART:
                *copies, sums = _ops.quantize_activation_backward(dh, *read, *common, one, layout)
            else:
                *copies, sums = _ops.quantize_merged_glu_backward(
                    dh, *read, halves == UP_FIRST, *common, one, layout
                )
            for i, of_one in enumerate(sums.chunk(count - 1)):
                if want_biases[i]:
                    grads[i * fields + 1] = of_one.to(of_layers[3 * i].dtype)
            rows = [_rows_of(each) for each in read]
            del read, dh  # before the next GEMMs take memory
            want_weights = [of_weight for of_weight, _ in wanted[:-1]]
            inputs = [(x, x_qt)] * (count - 1)
            if x is not None:
                behind = copies[0]
                inputs = _inputs_again(x, x_qt, config, layout, states[:-1], want_weights, behind)
            for i in range(count - 1):
                of_weight = want_weights[i]
                if not (want_x or of_weight):
                    continue
                of_copies = copies[2 * i : 2 * i + 2]
                want = want_x | of_weight << 1
                given = (None, None) if ctx.configs[i] & recipes.FROZEN else inputs[i]
                dx_of_one, dw, _ = linear(i, rows[i], *given, want, *of_copies)
                grads[i * fields] = dw if of_weight else None
                if want_x:
                    # The sum is autograd's: each linear casts x for autocast itself.
                    dx_of_one = dx_of_one.to(ctx.dtype)
                    dx = dx_of_one if dx is None else dx + dx_of_one
        return (dx, *(None,) * 7, *grads)


def _rows_of(read: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the rows of gradients that a linear has in fp8, of which it reads nothing else."""
    return read.new_empty((*read.shape[:-1], 0))


def _product_again(
    read: list[torch.Tensor],
    h_qt: torch.Tensor,
    of: tuple[int, int, int, int],
    scales: torch.Tensor | None,
    of_weight: bool,
    dy: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Returns h and h_qt for the backward of a down that recomputes, which reads h_qt for its weight's gradient."""
    if not of_weight:
        return read[0], h_qt  # no gradient reads more of it than its shape
    activation, config, layout, halves = of
    first, up = _operands(read, halves)
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
    behind: torch.Tensor,
) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Returns x and x_qt for the backward of each linear that reads x and recomputes.

    x is cast once for all whose weight has a gradient; under delayed scaling, where x_qt is None, for each of them.
    It is cast once `behind` is there.
    """
    if torch.compiler.is_compiling():
        x = _linear.recomputable(x)

    def cast(state: torch.Tensor | None) -> torch.Tensor:
        kept = x.new_empty((0,), dtype=torch.uint8) if x_qt is None else x_qt
        return _ops.quantize_again(x, kept, config, state, layout, behind)  # type: ignore[no-any-return]

    shared = cast(None) if x_qt is not None and any(want_weights) else None
    return [
        (None, cast(state) if shared is None else shared) if wants else (x, x_qt)
        for state, wants in zip(scales, want_weights, strict=True)
    ]


def _operands(read: list[torch.Tensor], halves: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns what the activation reads and what it is multiplied by, if anything."""
    first, *up = read if halves == APART else read[0].chunk(2, dim=-1)
    if halves == UP_FIRST:
        return up[0], first
    return first, up[0] if up else None


def forward(
    x: torch.Tensor,
    x_q: torch.Tensor | None,
    x_qt: torch.Tensor | None,
    of: tuple[int, int, int, int],
    layers: list[Layer],
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor], list[torch.Tensor]]:
    """Returns y, qt of h where a gradient reads it, what the activation reads, and what each linear saves."""
    activation, config, layout, halves = of

    def linear(
        layer: Layer, x: torch.Tensor, q: torch.Tensor | None, qt: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        made: tuple[torch.Tensor, torch.Tensor] = _linear.call_forward(
            x, q, qt, layer.weight, layer.q, layer.qt, layer.bias, layer.scales,
            layer.config(config, save), layout, save, layer.state,
        )  # fmt: skip
        return made

    *before, down = layers
    made = [linear(each, x, x_q, x_qt) for each in before]
    read = [each for each, _ in made]
    first, up = _operands(read, halves)
    keeps = save and keeps_input([down.config(config, save)])
    h_q, h_qt = _ops.quantize_activation(
        first, up, activation, config, keeps, down.scales, layout, not save
    )
    # A linear reads the shape alone of an x that it has in fp8.
    y, of_down = linear(down, first, h_q, h_qt if keeps else None)
    return y, h_qt if keeps else None, read, [*(each for _, each in made), of_down]


apply: Any = MLPFunction.apply
