"""Linears and modules of experts as the layers that a filter decides for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from float8.filter import AUTO_FILTER, Layer, layer_pattern
from float8.torch.experts.modules import Llama4Experts
from float8.torch.layer.experts import Chosen, is_transposed

_TOP_K = ("top_k", "num_experts_per_tok")


def layers_of(
    module: nn.Module,
    linears: dict[str, nn.Linear],
    tokens_of: Mapping[str, int] | None,
    experts: Sequence[str] = (),
) -> list[Layer]:
    """Returns the linears as layers, with the tokens of the first part that their names have.

    experts: the names of modules that tokens_of may be about too.
    """
    own = dict(tokens_of or {})
    check_names(module, list(own), "tokens_of: {!r} is part of no linear's name", experts)
    return [
        Layer(
            name or "root",
            linear.in_features,
            linear.out_features,
            next((rows for part, rows in own.items() if part in (name or "root")), None),
        )
        for name, linear in linears.items()
    ]


def check_names(
    module: nn.Module,
    names: Sequence[str],
    wrong: str = "names: {!r} is part of no linear's name, so it keeps no layer in bf16",
    more: Sequence[str] = (),
) -> None:
    """Raises ValueError, with names that there are, where one is part of no linear's name, nor of `more`."""
    own = [name or "root" for name, m in module.named_modules() if isinstance(m, nn.Linear)]
    own += more
    for name in names:
        if name != AUTO_FILTER and not any(name in each for each in own):
            patterns = ((layer_pattern(each), each) for each in own)
            kinds = list(dict.fromkeys(each if kind == "*" else kind for kind, each in patterns))
            shown = ", ".join(repr(kind) for kind in kinds[:8]) + (", ..." if kinds[8:] else "")
            raise ValueError(
                f"float8: {wrong.format(name)}; the model has {shown}: mend the name, or leave it out"
            )


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
