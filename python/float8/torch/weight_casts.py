"""Weights that are cast once after they change, and not in every forward.

Over the micro-batches of a step the weights stay the same, so their fp8 copies may too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from float8 import recipes
from float8.torch import _ops, notices

if TYPE_CHECKING:
    from float8.torch.linear import Float8Linear


class WeightCast:
    """The fp8 copies of one linear's weight, which stay where they are."""

    def __init__(self, layer: Float8Linear, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._config = layer._config & ~recipes.BIAS
        weight = self._operand(layer)
        self.copies: tuple[torch.Tensor, torch.Tensor] = _ops.quantize(
            weight, self._config, _ops.WEIGHT, True
        )
        for copy in self.copies:
            torch._dynamo.mark_static_address(copy, guard=False)
        self._seen = self._state(layer)

    def of(
        self, layer: Float8Linear, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns the copies for an x of that type, None where they are of another one."""
        if dtype != self.dtype:
            return None
        if not torch.compiler.is_compiling() and self._seen != self._state(layer):
            self.update(layer)
        return self.copies

    def update(self, layer: Float8Linear) -> None:
        """Casts the weight again."""
        _ops.quantize_into(self._operand(layer), *self.copies, self._config, _ops.WEIGHT)
        self._seen = self._state(layer)

    def _operand(self, layer: Float8Linear) -> torch.Tensor:
        weight = layer.weight.detach().to(self.dtype)
        return functional.pad(weight, (0, layer._padding)) if layer._padding else weight

    @staticmethod
    def _state(layer: Float8Linear) -> tuple[int, int]:
        """Returns what changes with the weight."""
        return layer.weight._version, layer.weight.data_ptr()


class WeightCasts:
    """The cached casts of a model's weights; `cache_weight_casts` makes it."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        from float8.torch.linear import Float8Linear

        self._layers = [
            layer
            for layer in module.modules()
            if isinstance(layer, Float8Linear)
            and (layer.recipe.output.b.fp8 or layer.recipe.grad_input.b.fp8)
        ]
        _check(self._layers)
        casts = [WeightCast(layer, dtype or layer.weight.dtype) for layer in self._layers]
        for layer, cast in zip(self._layers, casts, strict=True):
            layer._weight_cast = cast
        self._hooks: list[Any] = [
            module.register_load_state_dict_post_hook(self._loaded)  # type: ignore[no-untyped-call]
        ]

    def update(self) -> None:
        """Casts all weights again, on the current stream. A CUDA graph may capture it."""
        for layer in self._layers:
            if layer._weight_cast is not None:
                layer._weight_cast.update(layer)

    def update_after(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes every step of the optimizer end with an update."""
        self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.update()))

    def remove(self) -> None:
        """Frees the copies; the layers cast their weights in every forward again."""
        for layer in self._layers:
            layer._weight_cast = None
        for hook in self._hooks:
            hook.remove()
        self._layers, self._hooks = [], []

    def _loaded(self, *_: Any) -> None:
        self.update()


def _check(layers: list[Float8Linear]) -> None:
    for layer in layers:
        if layer.recipe.delayed:
            raise ValueError(
                "float8: weights with delayed scaling are cast in every forward, which records "
                "their amaxes; cache_weight_casts is for dynamic scaling"
            )
        if type(layer.weight.data) is not torch.Tensor or layer.weight.is_meta:
            raise ValueError(
                f"float8: a weight is a {type(layer.weight.data).__name__} on "
                f"{layer.weight.device}; cache_weight_casts needs plain tensors with values. "
                "Shards of FSDP are cast once a step with enable_fsdp_float8_all_gather"
            )


def cache_weight_casts(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> WeightCasts:
    """Keeps the fp8 copies of the weights of the Float8Linear layers below `module`.

    Forwards then read the copies instead of casting the weights, with the same results; they take 2
    bytes for each element. This is worth it where a step has several micro-batches.

    optimizer: its steps end with casting all weights again. Without one, call `update` after each
        step. In eager mode a forward also sees a weight that was changed otherwise, and casts it
        again, unless it was changed in place through `.data`, which autograd does not see either. A
        compiled forward and a CUDA graph do not look, and need the `update`.
    dtype: x's; None: the weights'. Name autocast's where it is on. Other x do without the copies.

    Raises ValueError for delayed scaling, and for weights that are no plain tensors, such as
    DTensors; no layer is changed then. Layers that have copies already get new ones. It warns where
    no linear is in fp8.
    """
    notices.warn_without_linears("cache_weight_casts", module)
    casts = WeightCasts(module, dtype)
    if optimizer is not None:
        casts.update_after(optimizer)
    return casts
