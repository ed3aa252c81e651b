"""Linears that are no nn.Linear: modules with a weight, an optional bias and a forward of their own.

from float8.adapters import modules

modules.convert(model, [fast_llm.layers.common.linear.linear.Linear], recipe="rowwise")
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from float8.recipes import Recipe
from float8.torch import functional
from float8.torch.classes import Made, subclass
from float8.torch.layer.convert import ModuleFilter
from float8.torch.layer.linear import check_sizes


def convert(
    model: nn.Module,
    kinds: Collection[type[nn.Module]],
    *,
    recipe: str | Recipe = "tensorwise",
    module_filter_fn: ModuleFilter | None = None,
    emulate: bool = False,
    recompute: bool = False,
    saturate: bool = False,
) -> nn.Module:
    """Lets the modules of these classes compute in fp8, in place, and returns the model.

    kinds: the exact classes of the modules; a subclass is another kind. Such a module has `weight`,
        [out_features, in_features], or its transpose where its `transposed_weight` is true; it may
        have a `bias`, [out_features] or None; and its forward(x) is a linear of x, without
        communication. The class of a module that is converted becomes a subclass of its own one,
        whose forward is `float8.torch.functional.linear`; parameters and attributes are left alone,
        and are read in each call.
    module_filter_fn: called with a module and its name; it stays as it is where False is returned.
    recipe, emulate, recompute, saturate: as for Float8Linear; not delayed scaling.

    Gradients are autograd's, and come into `weight.grad`. A program that collects them elsewhere
    needs a hook on them, which Fast-LLM has.

    Raises ValueError or TypeError that names the module; the model is then as it was. A second call
    gives modules that were converted another recipe.
    """
    config = functional.pack(recipe, emulate, recompute, saturate)
    wanted = tuple(kinds)
    chosen = []
    for name, module in model.named_modules():
        if _own_kind(module) not in wanted:
            continue
        if module_filter_fn is not None and not module_filter_fn(module, name):
            continue
        try:
            _check(module)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error} (layer {name or 'root'!r})") from None
        chosen.append(module)
    for module in chosen:
        module.__class__ = subclass(_Fp8, _own_kind(module))
        module._float8_config = config
    return model


def _check(module: nn.Module) -> None:
    """Raises where a module is no linear, or one that fp8 cannot have."""
    kind = _own_kind(module).__name__
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        raise TypeError(f"float8: {kind} has no weight of two dimensions, so it is no linear")
    if next(module.children(), None) is not None:
        raise TypeError(
            f"float8: {kind} has submodules, such as those of LoRA, so its forward is more than a "
            "linear; leave it out with module_filter_fn"
        )
    rows, cols = reversed(weight.shape) if _is_transposed(module) else weight.shape
    check_sizes(kind, cols, rows, pad_inner_dim=False)


class _Fp8(Made):
    """What a class of converted modules has before its own class."""

    _float8_config: int

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        module: Any = self
        weight = module.weight.t() if _is_transposed(module) else module.weight
        bias = getattr(module, "bias", None)
        return functional.apply(input_, weight, bias, self._float8_config)

    def extra_repr(self) -> str:
        text: str = self.float8_original.extra_repr(self)  # type: ignore[arg-type]
        return f"{text}, float8" if text else "float8"


def _is_transposed(module: nn.Module) -> bool:
    return bool(getattr(module, "transposed_weight", False))


def _own_kind(module: nn.Module) -> type[nn.Module]:
    return module.float8_original if isinstance(module, _Fp8) else type(module)
