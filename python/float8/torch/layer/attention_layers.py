"""convert_attention_to_float8: the attention of a model's layers in fp8."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from float8.torch import notices
from float8.torch._ops import of_autocast
from float8.torch.attention import (
    HEAD_DIMS,
    check_fp8_recipe,
    refusal,
    scaled_dot_product_attention,
    warn_of,
)
from float8.torch.classes import Made, check_class, known_of, subclass
from float8.torch.layer import transformers_attention
from float8.torch.layer.linear import check_switches

# Whether tokens come before heads, by the package and the name of a class that wraps PyTorch's attention.
_KNOWN = {
    ("torchtitan.models.", "ScaledDotProductAttentionWrapper"): False,
    ("torchtitan.models.", "ScaledDotProductAttention"): True,
}
_registered: dict[type[nn.Module], bool] = {}


class Float8Attention(Made):
    """What the class of a converted module has beside its own."""

    float8_emulate: bool
    float8_recipe: str = "fp8_forward"
    tokens_first: ClassVar[bool]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
        **more: Any,
    ) -> torch.Tensor:
        given = [name for name, value in more.items() if value is not None]
        query, key, value = (
            of_autocast(x.transpose(1, 2) if self.tokens_first else x) for x in (q, k, v)
        )
        reason = refusal(query, key, value, None, 0.0, enable_gqa, scale)
        if given:
            reason = f"{given[0]} is given"
        if reason is not None:
            warn_of(reason)
            y: torch.Tensor = super().forward(  # type: ignore[misc]
                q, k, v, scale=scale, enable_gqa=enable_gqa, is_causal=is_causal, **more
            )
            return y
        y = scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            recipe=self.float8_recipe,
            emulate=self.float8_emulate,
        )
        return y.transpose(1, 2) if self.tokens_first else y


def register_attention(cls: type[nn.Module], *, tokens_first: bool = False) -> None:
    """Tells convert_attention_to_float8 of a class of modules that wrap PyTorch's attention.

    Its forward is forward(q, k, v, *, scale=None, enable_gqa=False, is_causal=True) and returns the result alone.
    tokens_first: its tensors are [B, S, H, D], and not [B, H, S, D].
    """
    check_class("register_attention", cls)
    try:
        inspect.signature(cls.forward).bind(None, None, None, None, is_causal=True)
    except TypeError as error:
        raise TypeError(
            f"float8: register_attention takes a class whose forward is (q, k, v, *, scale, enable_gqa, is_causal); "
            f"{cls.__name__}'s is {inspect.signature(cls.forward)}: move its call of PyTorch's attention to a module"
        ) from error
    _registered[cls] = tokens_first


def convert_attention_to_float8(
    model: nn.Module,
    recipe: str = "fp8_forward",
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    emulate: bool = False,
) -> list[str]:
    """Gives the attention of a model's layers to fp8 (scaled_dot_product_attention).

    recipe: "fp8_forward", or "fp8" with a backward in fp8 too.
    filter_fn: takes a module and its name; attention is converted where it returns True. None: all is.
    emulate: as for Float8Linear.

    Known are the models of transformers that support "sdpa", whose attn_implementation becomes "float8", torchtitan's wrappers of
    PyTorch's attention, and what register_attention names. Parameters, their names and state dicts stay. A call
    that fp8 cannot compute, as one with padding, goes to PyTorch's attention with one warning that says why
    (adapters.transformers.install_attention). Layers whose heads have another size than fp8's stay as they are, with
    a warning.

    Returns the names of the converted modules. Raises ValueError for another recipe, TypeError where `model` is
    no module; it warns where it knows no attention in the model.
    """
    check_fp8_recipe(recipe)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"float8: convert_attention_to_float8 takes an nn.Module, not a {type(model).__name__}"
        )
    check_switches(emulate=emulate)
    wanted = filter_fn or (lambda module, name: True)
    converted = _of_transformers(model, wanted, recipe, emulate)
    for name, module in model.named_modules():
        tokens_first = known_of(module, _registered, _KNOWN)
        is_converted = isinstance(module, Float8Attention)
        if (tokens_first is None and not is_converted) or not wanted(module, name):
            continue
        if not is_converted:
            module.__class__ = subclass(Float8Attention, type(module), tokens_first=tokens_first)
        _set_options(module, recipe, emulate)
        converted.append(name)
    if not converted:
        notices.warn_once(
            "convert_attention_to_float8",
            "convert_attention_to_float8 knows no attention in the model that the filter takes; register_attention "
            "names a module that wraps PyTorch's, or call float8.torch.scaled_dot_product_attention",
        )
    return converted


def _set_options(module: nn.Module, recipe: str, emulate: bool) -> None:
    setattr(module, "float8_recipe", recipe)  # noqa: B010
    setattr(module, "float8_emulate", emulate)  # noqa: B010


def _has_heads_of_fp8(module: nn.Module, name: str) -> bool:
    size = getattr(module, "head_dim", None)
    if not isinstance(size, int) or size in HEAD_DIMS:
        return True
    notices.warn_once(
        f"convert_attention_to_float8 heads {size}",
        f"attention stays in bf16 in {name!r}, and wherever else heads have {size} elements; fp8 has "
        f"heads of {', '.join(map(str, HEAD_DIMS))}",
    )
    return False


def _of_transformers(
    model: nn.Module, wanted: Callable[[nn.Module, str], bool], recipe: str, emulate: bool
) -> list[str]:
    """Converts the attention of the models of transformers in the model, and returns its names."""
    models = [
        (name, each)
        for name, each in model.named_modules()
        if hasattr(each, "set_attn_implementation") and getattr(each, "_supports_sdpa", True)
    ]
    found: list[str] = []
    for prefix, each in models:
        if any(name == prefix or name.startswith(f"{prefix}.") for name in found):
            continue
        names = [
            f"{prefix}.{name}" if prefix else name
            for name, module in each.named_modules()
            if type(module).__name__.endswith("Attention") and hasattr(module, "is_causal")
        ]
        modules = [model.get_submodule(name) for name in names]
        taken = [
            wanted(module, name) and _has_heads_of_fp8(module, name)
            for name, module in zip(names, modules, strict=True)
        ]
        if not any(taken):
            continue
        if transformers_attention.NAME not in transformers_attention.registered:
            transformers_attention.register(
                transformers_attention.NAME, recipe="fp8_forward", emulate=False
            )
        each.set_attn_implementation(transformers_attention.NAME)
        for module, is_taken in zip(modules, taken, strict=True):
            setattr(module, "float8_attention", is_taken)  # noqa: B010
            _set_options(module, recipe, emulate)
        found += [name for name, is_taken in zip(names, taken, strict=True) if is_taken]
    return found
