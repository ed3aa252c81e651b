"""Which modules of experts a conversion takes, and why it leaves out the others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import UninitializedParameter

from float8 import recipes
from float8.recipes import Recipe
from float8.torch import _ops, notices
from float8.torch.classes import is_sharded, subclass
from float8.torch.experts.delayed import ExpertLinear
from float8.torch.experts.modules import (
    Float8Experts,
    Llama4Experts,
    TorchtitanExperts,
    TorchtitanGemms,
    TransformersExperts,
    cast_together,
    is_one_call,
    names_in_torchtitan,
    weights_of,
)
from float8.torch.experts.recipe import config_of
from float8.torch.layer.convertible import kind_of_parameter, listed, modules_of_fsdp
from float8.torch.layer.linear import resolve_recipe

_LINEARS = "expert_linears"  # of Float8Experts

# True: all; a function of a module of experts and its name; or None, which is False with a warning.
Experts = bool | Callable[[nn.Module, str], bool] | None


class Chosen(NamedTuple):
    """A module of experts that a conversion takes."""

    name: str
    module: nn.Module
    kind: type[Float8Experts]
    config: int
    recipe: Recipe
    linears: list[ExpertLinear]  # those of a scale state, with delayed scaling
    weights: dict[str, ExpertLinear]  # those whose gathers are in fp8
    kept: bool  # the module has these linears already


def choose_experts(
    model: nn.Module,
    experts: Experts,
    recipe: str | Recipe,
    emulate: bool,
    saturate: bool,
    recompute: bool | None,
    options_of_scales: int = 0,
    gather: bool = False,
) -> list[Chosen]:
    """Returns the modules of experts that are to compute in fp8; a warning names those that cannot.

    options_of_scales: the history and margin of delayed scaling, as a scale state's layout has them above
        bit 32.

    Raises TypeError or ValueError for `experts`, or a recipe that they do not have.
    """
    if experts is not None and not isinstance(experts, bool) and not callable(experts):
        raise TypeError(
            f"float8: experts is {experts!r}; it is True, False, or a function of a module and its name"
        )
    if not isinstance(model, nn.Module):
        return []
    if experts is None:
        _warn_of_experts(model)
    if not experts:
        return []
    resolved = resolve_recipe(recipe)
    # Backward has what FSDP gathers for it.
    config = config_of(resolved, emulate, saturate, True if gather else recompute, True)
    # A scale state has one config for its linears and experts.
    of_state = recipes.pack(
        resolved, emulate=emulate, saturate=saturate, recompute=recompute is True
    )
    chosen = []
    sharded = modules_of_fsdp(model)
    left_out: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        kind = _kind_of(module)
        if kind is None and not _resembles(module):
            continue
        if callable(experts) and not experts(module, name):
            continue
        why = _obstacle(module, kind)
        if why is None and module in sharded:
            why = _obstacle_of_shards(module, gather)
        if why is None and kind is TorchtitanGemms and resolved.delayed:
            why = "its forward does not say of which weight a GEMM is, which delayed scaling has to know"
        if why is None and kind is not None:
            own = list(getattr(module, _LINEARS, ())) if resolved.delayed else []
            gathers = bool(getattr(module, "expert_weights", ()))  # linears are made anew likewise
            kept = bool(own) and gathers == gather
            kept = kept and all(
                each._config == of_state
                and (each._scales is None or each._layout >> 32 == options_of_scales)
                for each in own
            )
            if resolved.delayed and not kept:
                own = [
                    ExpertLinear(module, each, resolved, of_state) for each in weights_of(module)
                ]
            linears = own or [
                ExpertLinear(module, each, resolved, config) for each in weights_of(module)
            ]
            weights = {each.name: each for each in linears} if gather else {}
            chosen.append(Chosen(name, module, kind, config, resolved, own, weights, kept))
        elif why is not None:
            stays = "stays as it is, and its experts are not in fp8"
            if isinstance(module, Float8Experts):
                stays = f"keeps its recipe, {module.experts_recipe}"
            left_out.setdefault(f"{stays}: {why}", []).append(name or "root")
    _warn_of_left(left_out)
    return chosen


def _warn_of_left(left_out: dict[str, list[str]]) -> None:
    """Warns of modules that a conversion leaves, by what becomes of them."""
    for why, names in left_out.items():
        text = f"{listed(names)} {why}"
        notices.warn_once(text, text)


def is_transposed(module: nn.Module, kind: type[Float8Experts]) -> bool:
    """Tells whether the weights of a module, also of one before its conversion, are [E, K, N]."""
    return issubclass(kind, Llama4Experts) or getattr(module, "is_transposed", False)


def names_of_experts(model: nn.Module) -> list[str]:
    """Returns the names of the modules of experts whose forward is known."""
    return [name or "root" for name, each in model.named_modules() if _kind_of(each) is not None]


def _warn_of_experts(model: nn.Module) -> None:
    """Warns where a conversion that was not asked about experts leaves some as they are."""
    left = names_of_experts(model)
    if left and not any(isinstance(each, Float8Experts) for each in model.modules()):
        notices.warn_once(
            "convert experts",
            f"the experts of {listed(left)} stay as they are: experts=True converts them too, and "
            "experts=False leaves them without this warning",
        )


@contextlib.contextmanager
def expert_linears(chosen: list[Chosen]) -> Iterator[None]:
    """Gives these modules their linears of a scale state, unless what is done with them fails."""
    before = [getattr(each.module, _LINEARS, ()) for each in chosen]
    for each in chosen:
        setattr(each.module, _LINEARS, each.linears)
    try:
        yield
    except BaseException:
        for each, old in zip(chosen, before, strict=True):
            setattr(each.module, _LINEARS, old)
        raise


def convert_experts(chosen: list[Chosen]) -> None:
    """Lets these modules compute in fp8, in place. It cannot fail."""
    for each in chosen:
        own: Any = each.module
        if not isinstance(own, Float8Experts):
            own.__class__ = subclass(each.kind, type(own), experts_kind=each.kind)
        own.expert_weights = each.weights
        own.experts_config = each.config
        for names in cast_together(own) if each.weights else ():
            if len(names) == 2:
                first, second = (each.weights[name] for name in names)
                first.pair = second.pair = (first, second)
        for linear in each.linears:
            linear.together = each.linears if is_one_call(own) else []
        for linear in each.weights.values():
            linear._layer_name = ".".join(filter(None, (each.name, linear.name)))
        own.weight_casts = {}
        own.experts_recipe = each.recipe.name or "custom"
        own.experts_name = each.name
        own.experts_in_fp8 = each.recipe.output.b.fp8


def _resembles(module: nn.Module) -> bool:
    """Tells whether a module of another class looks like one with the weights of all experts."""
    return "Experts" in type(module).__name__ and any(
        not isinstance(each, UninitializedParameter) and each is not None and each.dim() == 3
        for each in module._parameters.values()
    )


def _home(module: nn.Module) -> tuple[type, Any]:
    """Returns the class with the forward of a module, and that forward."""
    cls = next(each for each in type(module).__mro__ if "forward" in each.__dict__)
    return cls, cls.__dict__["forward"]


def _kind_of(module: nn.Module) -> type[Float8Experts] | None:
    """Returns the class of fp8 experts for a module; None where its forward is not known."""
    if isinstance(module, Float8Experts):
        return module.experts_kind
    cls, forward = _home(module)
    # The decorator use_experts_implementation has the forward in its own module.
    if getattr(forward, "__globals__", {}).get("__name__") == "transformers.integrations.moe":
        return TransformersExperts
    if cls.__name__ == "Llama4TextExperts" and cls.__module__.startswith("transformers."):
        return Llama4Experts
    if cls.__name__ == "GroupedExperts" and cls.__module__.startswith("torchtitan.models"):
        own = [each for each in type(module).__mro__ if "_grouped_mm" in each.__dict__]
        if own and own[0] is not cls:
            return None
        known = names_in_torchtitan(module) is not None
        return TorchtitanExperts if known else TorchtitanGemms if own else None
    return None


def _obstacle(module: nn.Module, kind: type[Float8Experts] | None) -> str | None:
    """Returns why experts are left as they are, None where they can be in fp8."""
    if kind is None:
        return (
            f"the forward of {type(module).__name__} is not known; known are transformers' experts with "
            "use_experts_implementation, those of its Llama 4 and torchtitan's GroupedExperts, and other code can call "
            "float8.torch.grouped_mm"
        )
    if of_instance := [name for name in ("forward", "_grouped_mm") if name in module.__dict__]:
        return f"its {of_instance[0]} was replaced: convert the model before"
    if is_sharded(module) and not isinstance(module, Float8Experts):  # it would be another class
        return "fully_shard was called on it: convert the model before"
    if getattr(module, "_compiled_call_impl", None) is not None:
        return "it was compiled by nn.Module.compile: convert the model before"
    if hasattr(module, "parametrizations"):
        return "its weights are parametrised: convert the model before"
    for name, weight in weights_of(module).items():
        if (of_class := kind_of_parameter(weight)) is not None:
            return f"its {name} is a {of_class}, whose values are not those of a plain parameter"
        if weight.dtype not in _ops.ELEMENT_TYPES:
            return f"its {name} is of {weight.dtype}, and not in bfloat16, float16 or float32"
        if weight.shape[1] % 16 != 0 or weight.shape[2] % 16 != 0:
            sizes = f"{weight.shape[1]} by {weight.shape[2]}"
            return f"its {name} is {sizes} for each expert, and fp8 needs multiples of 16"
    return None


def _obstacle_of_shards(module: nn.Module, gather: bool) -> str | None:
    """Returns why experts whose weights FSDP has cannot be gathered in fp8, or no longer be; None where they can."""
    gathers = bool(getattr(module, "expert_weights", ()))
    if gathers == gather:
        return None
    way = "fp8" if gathers else "their own type"
    return f"FSDP gathers its weights in {way}, as fully_shard was told: convert the model before"
