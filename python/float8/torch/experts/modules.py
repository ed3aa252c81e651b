"""Modules of experts whose forward computes in fp8: subclasses of their own classes, made when needed.

Their parameters, the names and the state dict are those of the original class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from float8 import recipes
from float8.torch import _ops, traced
from float8.torch.classes import Made
from float8.torch.experts import ops, tensor_parallel
from float8.torch.experts.delayed import ExpertLinear
from float8.torch.experts.moe import (
    DelayedScales,
    Own,
    Weights,
    layout_of,
    mlp,
    mlp_of_rows,
    parts_of,
    shaped,
    silu_and_mul,
    swiglu_over_ranks,
)
from float8.torch.experts.recipe import joins_pairs
from float8.torch.experts.routing import combine, dispatch, experts_of_rows, route
from float8.torch.experts.weight_casts import ExpertCast, Kept, kept_copies
from float8.torch.shard import fsdp
from float8.torch.shard.gathered_weight import GatheredWeight


def weights_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the weights of a module that have a matrix for each expert, by their names."""
    own = module._parameters.items()
    return {name: each for name, each in own if each is not None and each.dim() == 3}


class Float8Experts(Made, nn.Module):
    """What a converted module has before its own class."""

    experts_kind: ClassVar[type[Float8Experts]]  # which of the classes below
    experts_config: int  # of experts.recipe.config_of
    experts_recipe: str
    experts_name: str = ""  # in the model that was converted
    experts_in_fp8: bool = True  # forward reads the weights in fp8
    expert_linears: Sequence[ExpertLinear] = ()  # with delayed scaling, one for each weight
    weight_casts: Mapping[str, ExpertCast] = MappingProxyType({})  # of cache_weight_casts
    expert_weights: Mapping[str, ExpertLinear] = MappingProxyType(
        {}
    )  # those that FSDP gathers in fp8, by their names

    def __setattr__(self, name: str, value: Any) -> None:
        # FSDP gives and takes weights, as it does a Float8Linear's.
        if name in self.expert_weights and isinstance(value, nn.Parameter):
            if hasattr(value, "_local_tensor"):
                fsdp.shard_in_place(self.expert_weights[name], value)
            self._parameters[name] = value
        else:
            super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        make, of, state, *more = super().__reduce_ex__(protocol)
        # A copy has weights of its own.
        own = {name: value for name, value in state.items() if name != "weight_casts"}
        return (make, of, own, *more)

    def extra_repr(self) -> str:
        emulate = "emulate=True" if self.experts_config & recipes.EMULATE else ""
        words = (super().extra_repr(), f"recipe={self.experts_recipe}", emulate)
        return ", ".join(filter(None, words))


def check_x(module: Any, x: torch.Tensor, config: int) -> None:
    """Raises ValueError for an x that the recipe of a module does not have, with the module's name."""
    ops.check_high_precision(x, config, lambda: _words_of(module))


def _words_of(module: Any) -> str:
    name, recipe = getattr(module, "experts_name", ""), getattr(module, "experts_recipe", "")
    words = f"the experts {name!r}" if name else type(module).__name__
    return f"{words}, recipe {recipe}," if recipe else words


class TransformersExperts(Float8Experts):
    """The experts of transformers that have use_experts_implementation, with all of its forms."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        return of_transformers(self, hidden_states, top_k_index, top_k_weights, self.experts_config)


class Llama4Experts(Float8Experts):
    """The experts of transformers' Llama 4, which all have as many rows: the tokens times their scores."""

    is_transposed: ClassVar[bool] = True  # the weights are [E, K, N]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return of_llama4(self, hidden_states, self.experts_config)


class TorchtitanGemms(Float8Experts):
    """torchtitan's GroupedExperts of which a method for grouped GEMMs is known, and no more."""

    def _grouped_mm(
        self, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor
    ) -> torch.Tensor:
        return grouped(A, B_t.transpose(-2, -1), offs, self.experts_config)


class TorchtitanExperts(Float8Experts):
    """torchtitan's GroupedExperts with w1, w2 and w3, of releases 0.2 and 0.3."""

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        return of_torchtitan(self, x, num_tokens_per_expert, self.experts_config)


# The names of w1, w3 and w2 in torchtitan's releases.
_TORCHTITAN = (("w1", "w3", "w2"), ("w1_EFD", "w3_EFD", "w2_EDF"))


def names_in_torchtitan(module: nn.Module) -> tuple[str, str, str] | None:
    """Returns the names of w1, w3 and w2 of torchtitan's SwiGLU experts; None where they are others."""
    own = weights_of(module).keys()
    return next((names for names in _TORCHTITAN if own == set(names)), None)


def of_torchtitan(module: Any, x: torch.Tensor, counts: torch.Tensor, config: int) -> torch.Tensor:
    """Computes a GroupedExperts of torchtitan, whose dispatcher has put the rows of x in place.

    counts: the rows of each expert.
    """
    names = next(names for names in _TORCHTITAN if hasattr(module, names[0]))
    given = [getattr(module, name) for name in names]
    w1, w3, w2 = (_local(each) for each in given)
    rows = x.bfloat16()
    ops.check_weight(rows, w1)
    offs = torch.cumsum(counts, dim=0, dtype=torch.int32)
    layout = ops.experts_layout(offs, rows.shape[0], config)
    group = tensor_parallel.group_of(given, (1, 1, 2))
    if group is not None:
        _check_shared(module, rows, (w1, w3), w2, config, group)
        states = _first_states(module, names, w1)
        if tensor_parallel.spans_ranks(config) or states:
            own = silu_and_mul if joins_pairs(config) else _silu_then_mul
            shares = (offs, layout, config, group.group_name, own, states)
            return swiglu_over_ranks(rows, (w1, w3), w2, *shares).type_as(x)
    gathered = any(isinstance(each, GatheredWeight) for each in (w1, w3))
    if joins_weights(module, config) and not (gathered and _is_apart(module, names[0])):
        copies = _both(module, {names[0]: w1, names[2]: w2}, rows.dtype, w3)
        return mlp_of_rows(rows, (w1, w3), w2, layout, config, copies).type_as(x)
    gate = linear_of(module, names[0], rows, w1, layout, config)
    up = linear_of(module, names[1], rows, w3, layout, config)
    h = _silu_then_mul(gate, up)
    return linear_of(module, names[2], h, w2, layout, config).type_as(x)


def _silu_then_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Returns h as torchtitan computes it."""
    return functional.silu(gate) * up


def _check_shared(
    module: Any, x: torch.Tensor, w13: Weights, w2: torch.Tensor, config: int, group: Any
) -> None:
    """Raises where ranks cannot share the hidden dimension of a module's experts; else steps end over these ranks."""
    tensor_parallel.share_state(getattr(module, "expert_linears", ()), group)
    tensor_parallel.check(x, parts_of(w13, w2), config, module, group)


def joins_weights(module: Any, config: int) -> bool:
    """Tells whether w1 and w3 of a module are computed as one weight, where FSDP does not gather them apart in fp8."""
    return joins_pairs(config) and not getattr(module, "expert_linears", ())


def is_one_call(module: Float8Experts) -> bool:
    """Tells whether one call computes with all weights of a module, which then all are in a first step or none is."""
    if module.experts_config & recipes.READS_X or issubclass(
        module.experts_kind, TorchtitanExperts
    ):
        return False
    if issubclass(module.experts_kind, TransformersExperts):
        return _is_swiglu(module)
    return not issubclass(module.experts_kind, Llama4Experts) or _has_silu(module)


def _is_apart(module: Any, name: str) -> bool:
    """Tells whether FSDP gathers w1 of a module, which has this name, in fp8 or not, apart from w3."""
    gather = module.expert_weights[name]._weight_gather
    return gather is None or len(gather.pair) == 1


def cast_together(module: Float8Experts) -> list[tuple[str, ...]]:
    """Returns the names of the weights whose copies are one, in the order of their rows."""
    names = (
        names_in_torchtitan(module) if issubclass(module.experts_kind, TorchtitanExperts) else None
    )
    if names is None or not joins_weights(module, module.experts_config):
        return [(name,) for name in weights_of(module)]
    return [names[:2], names[2:]]


def _both(
    module: Any, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, *w3: torch.Tensor
) -> tuple[Kept, Kept] | None:
    """Returns the kept copies of the weights of an MLP, by their names; None where it keeps none.

    w3: whose rows the copy of the first one has too.
    """
    (name, w13), (last, w2) = weights.items()
    first = kept_copies(module, name, dtype, w13, *w3)
    second = kept_copies(module, last, dtype, w2)
    return None if first is None or second is None else (first, second)


def _local(weight: Any) -> torch.Tensor:
    """Returns a rank's own experts, as torchtitan's forward takes them."""
    local: torch.Tensor = weight.to_local() if hasattr(weight, "_local_tensor") else weight
    return local


def grouped(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, config: int) -> torch.Tensor:
    """Computes functional.grouped_mm of a config, for a weight [E, N, K]."""
    ops.check(x, weight, offs)
    layout = ops.experts_layout(offs, x.shape[0], config)
    return ops.linear(x, weight, layout, config)


def linear_of(
    module: Any,
    name: str,
    rows: torch.Tensor,
    weight: torch.Tensor,
    layout: torch.Tensor,
    config: int,
) -> torch.Tensor:
    """Computes the linears of all experts with a module's weight of that name, which is given as [E, N, K]."""
    for each in getattr(module, "expert_linears", ()):
        if each.name == name:
            return ops.linear(rows, weight, layout, config, *each.scales_on(weight.device))
    kept = kept_copies(module, name, rows.dtype, weight)
    return ops.linear(rows, weight, layout, config, kept=kept)


def of_transformers(
    module: Any,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_scores: torch.Tensor,
    config: int,
) -> torch.Tensor:
    """Computes the experts of a module with the interface of transformers' ALL_EXPERTS_FUNCTIONS.

    Expert parallelism there marks pairs of other ranks by ids beyond the rank's experts, which are dropped.
    """
    x = _ops.of_autocast(x)
    check_x(module, x, config)
    shape = x.shape
    x = x.reshape(-1, shape[-1])
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    first, last = (_weight(module, name) for name in names)
    weights = dict(zip(names, (first, last), strict=True))
    ops.check_weight(x, first)
    ids, scores = (each.reshape(-1, each.shape[-1]) for each in (topk_ids, topk_scores))
    routing = route(ids, scores, first.shape[0], config)
    is_swiglu = _is_swiglu(module)

    def activation(h: torch.Tensor) -> torch.Tensor:
        if is_swiglu and not config & recipes.READS_X:
            return silu_and_mul(*h.chunk(2, dim=-1))
        return module._apply_gate(h) if module.has_gate else module.act_fn(h)  # type: ignore[no-any-return]

    if (group := _group_in_transformers(module.__dict__.get("forward"))) is not None:
        shares = (routing.offs, layout_of(routing), config, group)
        part = _part_of_sum(module, dispatch(x, routing), weights, *shares, activation)
        if part is not None:
            return shaped(combine(part, routing), shape)
    if is_swiglu and not config & recipes.READS_X:
        own = own_of(module, weights, x.dtype)
        return shaped(mlp(x, first, last, routing, own.copies, own.scales), shape)
    layout = layout_of(routing)
    of_rows = experts_of_rows(routing) if module.has_bias else None

    def linear(rows: torch.Tensor, weight: torch.Tensor, name: str) -> torch.Tensor:
        y = linear_of(module, name, rows, weight, layout, config)
        if of_rows is not None:
            y = y + getattr(module, f"{name}_bias")[of_rows].to(y.dtype)
        return y

    h = linear(dispatch(x, routing), first, names[0])
    y = linear(activation(h), last, names[1])
    if getattr(module, "has_post_expert_norm", False):
        y = module.post_expert_norm(y)
    return shaped(combine(y, routing), shape)


# In graphs of torch.compile it is a constant.
@traced.constant
def _group_in_transformers(forward: Any) -> Any:
    """Returns the process group whose ranks share the hidden dimension of a module's experts by transformers' tensor
    parallelism, None without.

    forward: the module's own. This parallelism gives it one that has local parts of the weights, and sums the results
        up: "moe_tp_experts" of a plan. (PyTorch 2.10 and 2.11 take no module for a constant.)
    """
    names = getattr(getattr(forward, "__code__", None), "co_freevars", ())
    cells = {
        name: cell.cell_contents
        for name, cell in zip(names, getattr(forward, "__closure__", ()) or (), strict=True)
    }
    style, mesh = cells.get("self"), cells.get("mesh")
    if mesh is None or type(style).__name__ != "MoeExpertsParallel":
        return None
    group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
    return group if group.size() > 1 else None


def _part_of_sum(
    module: Any,
    rows: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    offs: torch.Tensor,
    layout: torch.Tensor,
    config: int,
    group: Any,
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor | None:
    """Computes this rank's part of the sum that y of the experts' rows is, where ranks share the hidden dimension of
    transformers' experts; None where a rank computes it as if it was alone.

    weights: w13 and w2, by their names in the module.
    """
    if getattr(module, "has_bias", False) or getattr(module, "has_post_expert_norm", False):
        raise ValueError(
            "float8: ranks share the hidden dimension of experts with a bias or a norm behind, which are not parts of "
            "a sum: leave these experts in bf16, or share whole experts"
        )
    w13, w2 = weights.values()
    _check_shared(module, rows, w13, w2, config, group)
    states = _first_states(module, weights, w13)
    if not tensor_parallel.spans_ranks(config) and not states:
        return None
    own = (offs, layout, config, group.group_name, states)
    first, second = tensor_parallel.linears(parts_of(w13, w2), rows, *own)
    return second(activation(first(rows)))


_OF_LLAMA4 = ("gate_up_proj", "down_proj")


def of_llama4(module: Any, x: torch.Tensor, config: int) -> torch.Tensor:
    """Computes the experts of Llama 4 in transformers, of which each has an equal part of the rows of x."""
    x = _ops.of_autocast(x)
    check_x(module, x, config)
    first, last = (_weight(module, name) for name in _OF_LLAMA4)
    experts, dim = last.shape[:2]
    per_expert = x.view(experts, -1, dim).shape[1]
    rows = x.view(-1, dim)
    ops.check_weight(rows, first)
    ends = torch.arange(1, experts + 1, dtype=torch.int32, device=x.device) * per_expert
    layout = ops.experts_layout(ends, rows.shape[0], config)

    def activation(h: torch.Tensor) -> torch.Tensor:
        gate, up = h.chunk(2, dim=-1)
        if _has_silu(module) and not config & recipes.READS_X:
            return silu_and_mul(gate, up)
        return up * module.act_fn(gate)  # type: ignore[no-any-return]

    if (group := _group_in_transformers(module.__dict__.get("forward"))) is not None:
        shares = (ends, layout, config, group)
        weights = dict(zip(_OF_LLAMA4, (first, last), strict=True))
        part = _part_of_sum(module, rows, weights, *shares, activation)
        if part is not None:
            return part
    if _has_silu(module) and not config & recipes.READS_X:
        return mlp_of_rows(
            rows, first, last, layout, config, scales=_scales_of(module, _OF_LLAMA4, first)
        )
    h = activation(linear_of(module, "gate_up_proj", rows, first, layout, config))
    return linear_of(module, "down_proj", h, last, layout, config)


def _first_states(
    module: Any, names: Iterable[str], like: torch.Tensor
) -> list[tuple[torch.Tensor, int]]:
    """Returns the parts of the scale state that the weights of these names have, where one has no scales yet."""
    linears = {each.name: each for each in getattr(module, "expert_linears", ())}
    if not any(each._first_step for each in linears.values()):
        return []
    parts = [linears[name].scales_on(like.device) for name in names]
    return [(part, layout) for part, layout in parts if part is not None]


def _scales_of(module: Any, names: Iterable[str], like: torch.Tensor) -> DelayedScales:
    """Returns the parts of the scale state that the weights of these names have; none without delayed scaling."""
    linears = {each.name: each for each in getattr(module, "expert_linears", ())}
    if not linears:
        return DelayedScales()
    (w13, layout), (w2, _) = (linears[name].scales_on(like.device) for name in names)
    return DelayedScales(w13, w2, layout)


def own_of(module: Any, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Own:
    """Returns what a module has for its w13 and w2, which are given by their names."""
    like = next(iter(weights.values()))
    first = bool(_first_states(module, weights, like))
    return Own(_both(module, weights, dtype), _scales_of(module, weights, like), first)


def _is_swiglu(module: Any) -> bool:
    """Tells whether y is down(silu(gate) up) and nothing else, of gate and up side by side in one weight."""
    return (
        module.has_gate
        and not module.has_bias
        and getattr(module, "is_concatenated", True)
        and not getattr(module, "has_post_expert_norm", False)
        and type(module)._apply_gate.__name__ == "_default_apply_gate"
        and _has_silu(module)
    )


def _has_silu(module: Any) -> bool:
    return type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")


def _weight(module: Any, name: str) -> torch.Tensor:
    """Returns a module's weight as [E, N, K]."""
    weight: torch.Tensor = getattr(module, name)
    if hasattr(weight, "_local_tensor"):
        raise ValueError(
            f"float8: the {name} of {type(module).__name__} is a DTensor in its forward, where transformers' own "
            'plans ("moe_tp_experts") give a rank its part: share these experts by such a plan, or by FSDP2'
        )
    return weight.transpose(-2, -1) if module.is_transposed else weight
