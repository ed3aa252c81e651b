"""Modules of experts as layers that a filter decides for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from float8.filter import Layer
from float8.torch.experts.modules import Llama4Experts
from float8.torch.layer.experts import Chosen, is_transposed

_TOP_K = ("top_k", "num_experts_per_tok")


def expert_layers(
    model: nn.Module, chosen: list[Chosen], tokens: int, tokens_of: Mapping[str, int] | None
) -> list[Layer]:
    """Returns modules of experts as layers, with the rows that their routers send them.

    tokens_of: as in convert_to_float8_training; the first part that a module's name has decides.

    Raises ValueError where neither it nor the model says how many rows that are.
    """
    own = dict(tokens_of or {})
    layers = []
    for name, module, kind in ((each.name or "root", each.module, each.kind) for each in chosen):
        weight: Any = module.w2 if hasattr(module, "w2") else module.down_proj
        experts, width, hidden = weight.shape
        if is_transposed(module, kind):
            width, hidden = hidden, width
        rows = next((rows for part, rows in own.items() if part in name), None)
        if rows is None and issubclass(kind, Llama4Experts):
            rows = tokens * experts  # every expert has a row of every token
        if rows is None:
            top_k = _top_k(model, name, module)
            if top_k is None:
                raise ValueError(
                    f"float8: no module beside {name!r} says how many experts a token is sent to: give "
                    f'the rows of all its experts, as tokens_of={{"{name}": 4 * tokens}} where it is '
                    "sent to 4"
                )
            rows = tokens * top_k
        layers.append(Layer(name, k=width, n=hidden, tokens=rows, experts=experts))
    return layers


def _top_k(model: nn.Module, name: str, module: nn.Module) -> int | None:
    """Returns how many experts a token is sent to, as the router beside the experts has it."""
    parent = model.get_submodule(name.rpartition(".")[0]) if module is not model else module
    places: list[object] = [module, parent, *parent.children()]
    places += [getattr(each, "config", None) for each in (*places, model)]
    found = (getattr(place, each, None) for place in places for each in _TOP_K)
    return next((each for each in found if type(each) is int and each > 0), None)
