"""convert_attention_to_float8: the attention of a model's layers in fp8."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from float8.filter import AttentionFile, explain
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
from float8.torch.layer import attention_statistics, transformers_attention
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
    float8_tokens_first: ClassVar[bool]

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
            of_autocast(x.transpose(1, 2) if self.float8_tokens_first else x) for x in (q, k, v)
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
        attention_statistics.count(
            *(self, query, key, value),
            is_causal=is_causal,
            window=None,
            scale=scale,
            emulate=self.float8_emulate,
        )
        return y.transpose(1, 2) if self.float8_tokens_first else y


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
    recipe: str | None = None,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    verdicts: str | os.PathLike[str] | None = None,
    explain: bool = False,
    emulate: bool = False,
) -> list[str]:
    """Gives the attention of a model's layers to fp8 (scaled_dot_product_attention).

    recipe: "fp8_forward", which None is too, or "fp8" with a backward in fp8 too.
    filter_fn: takes a module and its name; attention is converted where it returns True. None: all is.
    verdicts: a filter file of `float8-tune filter --attention --verdicts`, which has the recipe of each layer, in place
        of `recipe`: those that it keeps stay as they are. It has each layer that filter_fn takes.
    explain: print these verdicts.
    emulate: as for Float8Linear.

    Known are the models of transformers that support "sdpa", whose attn_implementation becomes "float8", torchtitan's wrappers of
    PyTorch's attention, and what register_attention names. Parameters, their names and state dicts stay. A call
    that fp8 cannot compute, as one with padding, goes to PyTorch's attention with one warning that says why
    (adapters.transformers.install_attention). Layers whose heads have another size than fp8's stay as they are, with
    a warning.

    Returns the names of the converted modules. Raises ValueError for another recipe, and for a filter file without
    attention, without a layer of the model, or with other heads, RuntimeError for a file that is none; the model is then
    as it was. TypeError where `model` is no module. It warns where it knows no attention in the model, and where the
    file has layers that the model lacks.
    """
    if recipe is not None:
        check_fp8_recipe(recipe)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"float8: convert_attention_to_float8 takes an nn.Module, not a {type(model).__name__}"
        )
    check_switches(emulate=emulate)
    _check_verdicts(recipe, verdicts, explain)
    layers = _attention_of(model)
    wanted = [x for x in layers if filter_fn is None or filter_fn(x.module, x.name)]
    if verdicts is None:
        chosen = {layer.name: recipe or "fp8_forward" for layer in wanted}
    else:
        chosen = _by_file(wanted, verdicts, show=explain, is_all=len(wanted) == len(layers))
    recipes = {x.name: chosen[x.name] for x in wanted if x.name in chosen and _has_heads_of_fp8(x)}
    _convert_transformers(layers, recipes, emulate)
    for layer in layers:
        if layer.model is None and layer.name in recipes:
            cls = type(layer.module)
            if not isinstance(layer.module, Float8Attention):
                layer.module.__class__ = subclass(
                    Float8Attention, cls, float8_tokens_first=layer.tokens_first
                )
            _set_options(layer.module, recipes[layer.name], emulate)
    if not recipes and (verdicts is None or not wanted):
        notices.warn_once(
            "convert_attention_to_float8",
            "convert_attention_to_float8 knows no attention in the model that the filter takes; register_attention "
            "names a module that wraps PyTorch's, or call float8.torch.scaled_dot_product_attention",
        )
    return list(recipes)


class _Attention(NamedTuple):
    name: str
    module: nn.Module
    model: Any = None  # of transformers, whose module it is
    tokens_first: bool | None = None  # of a module that wraps PyTorch's attention


def _attention_of(model: nn.Module) -> list[_Attention]:
    """Returns the attention that is known in the model: transformers', then modules that wrap PyTorch's."""
    found: list[_Attention] = []
    for prefix, each in model.named_modules():
        if not hasattr(each, "set_attn_implementation") or not getattr(
            each, "_supports_sdpa", True
        ):
            continue
        if any(x.name == prefix or x.name.startswith(f"{prefix}.") for x in found):
            continue  # it is a part of a model before it
        for name, module in each.named_modules():
            if type(module).__name__.endswith("Attention") and hasattr(module, "is_causal"):
                found.append(_Attention(f"{prefix}.{name}" if prefix else name, module, each))
    for name, module in model.named_modules():
        tokens_first = known_of(module, _registered, _KNOWN)
        if tokens_first is not None or isinstance(module, Float8Attention):
            found.append(_Attention(name, module, None, tokens_first))
    return found


def counted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules whose attention is in fp8, by their names."""
    return {layer.name: layer.module for layer in _attention_of(model) if _is_in_fp8(layer)}


def _is_in_fp8(layer: _Attention) -> bool:
    if layer.model is None:
        return isinstance(layer.module, Float8Attention)
    config = getattr(layer.module, "config", None) or getattr(layer.model, "config", None)
    is_named = getattr(config, "_attn_implementation", None) in transformers_attention.registered
    return is_named and bool(getattr(layer.module, "float8_attention", True))


def _check_verdicts(recipe: str | None, verdicts: object, explain: bool) -> None:
    if verdicts is None and explain:
        raise ValueError(
            "float8: explain prints the verdicts of a filter file; give it too, as verdicts"
        )
    if verdicts is not None and recipe is not None:
        raise ValueError(
            "float8: the filter file of `verdicts` has the recipe of each layer; give it or recipe, not both"
        )


def _by_file(
    layers: list[_Attention], path: str | os.PathLike[str], show: bool, is_all: bool
) -> dict[str, str]:
    """Returns the recipes that a filter file has for the layers that it converts. `is_all`: the model has no other."""
    with AttentionFile(path) as file:
        found = {layer.name: file.find(layer.name or "root") for layer in layers}
        others = {each.name for each in file.all()}.difference(x.name for x in found.values())
    decided = []
    for name, module, *_ in layers:
        verdict = found[name]
        size = getattr(module, "head_dim", verdict.head_dim)
        if isinstance(size, int) and size != verdict.head_dim:
            raise ValueError(
                f"float8: {name!r} has heads of {size}, the filter file says {verdict.head_dim}; write it again"
            )
        decided.append(dataclasses.replace(verdict, name=name))
    if show:
        print(explain(decided))
        print(f"\n{sum(each.convert for each in decided)} of {len(decided)} attentions to float8")
    if layers and is_all and others:
        notices.warn_once(
            f"convert_attention_to_float8 {os.fspath(path)}",
            f"the model lacks {len(others)} of the attentions that {os.fspath(path)} has, such as {min(others)!r}; "
            "write it again, unless they are on other ranks of a pipeline",
        )
    if layers and not any(each.convert for each in decided):
        notices.warn_once(
            f"convert_attention_to_float8 {os.fspath(path)} bf16",
            f"attention stays in bf16: {os.fspath(path)} keeps all of it; explain=True prints why",
        )
    return {each.name: each.recipe for each in decided if each.convert}


def _set_options(module: nn.Module, recipe: str, emulate: bool) -> None:
    setattr(module, "float8_recipe", recipe)  # noqa: B010
    setattr(module, "float8_emulate", emulate)  # noqa: B010


def _has_heads_of_fp8(layer: _Attention) -> bool:
    size = getattr(layer.module, "head_dim", None) if layer.model is not None else None
    if not isinstance(size, int) or size in HEAD_DIMS:
        return True
    notices.warn_once(
        f"convert_attention_to_float8 heads {size}",
        f"attention stays in bf16 in {layer.name!r}, and wherever else heads have {size} elements; fp8 has "
        f"heads of {', '.join(map(str, HEAD_DIMS))}",
    )
    return False


def _own_config(model: Any) -> None:
    """Gives the model a config that no other model reads: transformers keep the attention's name in it."""
    shared = model.config
    of_parts = {id(shared): copy.deepcopy(shared)}
    todo = [(shared, of_parts[id(shared)])]
    while todo:
        old, new = todo.pop()
        for key in getattr(old, "sub_configs", {}):
            if (part := getattr(old, key, None)) is not None:
                of_parts[id(part)] = getattr(new, key)
                todo.append((part, getattr(new, key)))
    for module in model.modules():
        if (own := of_parts.get(id(module.__dict__.get("config")))) is not None:
            module.config = own


def _convert_transformers(layers: list[_Attention], recipes: dict[str, str], emulate: bool) -> None:
    """Converts the layers that are transformers', where one of their model has a recipe."""
    models = {id(x.model): x.model for x in layers if x.model is not None and x.name in recipes}
    for each in models.values():
        if transformers_attention.NAME not in transformers_attention.registered:
            transformers_attention.register(
                transformers_attention.NAME, recipe="fp8_forward", emulate=False
            )
        _own_config(each)
        each.set_attn_implementation(transformers_attention.NAME)
        for layer in layers:
            if layer.model is each:
                is_taken = layer.name in recipes
                setattr(layer.module, "float8_attention", is_taken)  # noqa: B010
                _set_options(layer.module, recipes.get(layer.name, "fp8_forward"), emulate)
