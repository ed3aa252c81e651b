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
from float8.torch.fsdp import gathers_in_fp8, precompute_float8_dynamic_scale_for_fsdp
from float8.torch.weight_mesh import is_sharded_by_fsdp, mesh_dims

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

        self._module, self._dtype = module, dtype
        layers = [
            layer
            for layer in module.modules()
            if isinstance(layer, Float8Linear)
            and (layer.recipe.output.b.fp8 or layer.recipe.grad_input.b.fp8)
        ]
        kinds = [_kind(layer) for layer in layers]
        # FSDP's gathers in fp8 keep the shards' casts themselves.
        self._gathers = "gathered" in kinds
        self._layers = [x for x, kind in zip(layers, kinds, strict=True) if kind == "plain"]
        self._shared = [x for x, kind in zip(layers, kinds, strict=True) if kind == "shared"]
        casts: list[Any] = [WeightCast(x, dtype or x.weight.dtype) for x in self._layers]
        if self._shared:
            from float8.torch import tensor_parallel  # it takes a while to load

            tensor_parallel.find_weight_words(self._shared, dtype)
            make = tensor_parallel.SharedWeightCast
            casts += [make(x, dtype or x.weight.dtype) for x in self._shared]
        self._layers += self._shared
        for layer, cast in zip(self._layers, casts, strict=True):
            layer._weight_cast = cast
        self._hooks: list[Any] = [
            module.register_load_state_dict_post_hook(self._loaded)  # type: ignore[no-untyped-call]
        ]

    def update(self) -> None:
        """Casts all weights again, on the current stream. A CUDA graph may capture it.

        Where ranks share weights, all of them call it: their maxima take one all-reduce a group.
        """
        if self._gathers:
            precompute_float8_dynamic_scale_for_fsdp(self._module)
        if self._shared:
            from float8.torch import tensor_parallel

            tensor_parallel.find_weight_words(self._shared, self._dtype)
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
        self._layers, self._shared, self._hooks = [], [], []
        self._gathers = False

    def _loaded(self, *_: Any) -> None:
        self.update()


def _kind(layer: Float8Linear) -> str:
    """Returns who has the weight: "plain", "shared" by tensor parallelism or "gathered" by FSDP."""
    weight: Any = layer.weight
    if layer._weight_gather is not None or gathers_in_fp8(layer):
        return "gathered"
    if layer.recipe.delayed:
        raise ValueError(
            "float8: weights with delayed scaling are cast in every forward, which records "
            "their amaxes; cache_weight_casts is for dynamic scaling"
        )
    if is_sharded_by_fsdp(layer):
        raise ValueError(
            f"float8: fully_shard gathers the weight of layer {layer._layer_name!r} in high "
            "precision in every forward, so that no copy stays; with "
            "enable_fsdp_float8_all_gather its shards are cast once a step"
        )
    if not weight.is_meta:
        if hasattr(weight, "placements") and mesh_dims(layer).tensor is not None:
            return "shared"
        if type(weight.data) is torch.Tensor:
            return "plain"
    raise ValueError(
        f"float8: a weight is a {type(weight.data).__name__} on {weight.device}; "
        "cache_weight_casts needs plain tensors with values, or what FSDP or tensor parallelism makes "
        "of them"
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

    Ranks of tensor parallelism keep the copies of their parts. FSDP's gathers in fp8 keep none beside
    the shards' casts, which a forward makes where none are of this weight: for them `update` is
    precompute_float8_dynamic_scale_for_fsdp, and micro-batches cast nothing without this call too.

    Raises ValueError for delayed scaling, for weights that FSDP gathers in high precision, and for
    other weights that are no plain tensors; no layer is changed then. Layers that have copies already
    get new ones. It warns where no linear is in fp8.
    """
    notices.warn_without_linears("cache_weight_casts", module)
    casts = WeightCasts(module, dtype)
    if optimizer is not None:
        casts.update_after(optimizer)
    return casts
