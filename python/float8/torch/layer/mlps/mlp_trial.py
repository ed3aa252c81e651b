"""Whether an MLP computes what register_mlp said of its class: its forward runs with small linears in its linears' places."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from float8.torch.base_linear import is_float8
from float8.torch.layer.mlps.mlp import Names, child_of
from float8.torch.layer.mlps.mlp_function import APART, UP_FIRST

_ACTIVATIONS: dict[str, Any] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "relu2": lambda x: functional.relu(x).square(),
}
_FEATURES, _HIDDEN = 16, 32


def obstacle_of_registered(module: nn.Module, names: Names, activation: str) -> str | None:
    """Returns why an MLP whose children have no obstacle is not what register_mlp said, None where it is or nothing shows.

    A forward that needs its own sizes, or a GPU, shows nothing.
    """
    drops = [name for name, each in module.named_modules() if type(each) is nn.Dropout and each.p]
    if drops:
        return f"its {drops[0]} drops; with p=0 it is fused"
    own = {name: child_of(module, name) for name in names.given()}
    others = [name for name, each in module.named_modules() if is_float8(each) and name not in own]
    if others:
        return f"it has another linear, {others[0]}, which register_mlp does not name"
    linears = _small(names, own)
    if linears is None:
        return "the sizes of its linears are not those of an MLP as register_mlp names them"
    x = torch.randn(3, _FEATURES, device="cpu", dtype=torch.float64, generator=_random())
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        torch.autocast("cpu", enabled=False),
    ):
        expected = _computed(x, names, linears, _ACTIVATIONS[activation])
        kind: Any = type(module)
        try:
            y = kind.forward(_with_children(module, linears), x.clone())
        except Exception:
            return None
    is_like = isinstance(y, torch.Tensor) and y.shape == expected.shape
    if is_like and torch.allclose(y.double(), expected, rtol=1e-5, atol=1e-5):
        return None
    return (
        "its forward does not compute what register_mlp said of its class: other children, another "
        "activation, or more than these"
    )


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _small(names: Names, linears: dict[str, Any]) -> dict[str, nn.Linear] | None:
    """Returns linears of few features, of which as many are equal as are in the MLP; None where its do not fit each other."""
    down = linears[names.down]
    first = [linears[name] for name in names.given()[:-1]]
    times = 1 if names.halves == APART else 2
    if any(
        each.in_features != first[0].in_features or each.out_features != times * down.in_features
        for each in first
    ):
        return None
    outputs = _FEATURES if down.out_features == first[0].in_features else _FEATURES + 8
    random = _random()
    made = {}
    for name, each in linears.items():
        sizes = (outputs, _HIDDEN) if each is down else (times * _HIDDEN, _FEATURES)
        own = nn.Linear(sizes[1], sizes[0], each.bias is not None, "meta", torch.float64)
        for key, of in list(own._parameters.items()):
            if of is not None:
                values = torch.randn(of.shape, generator=random, device="cpu", dtype=torch.float64)
                setattr(own, key, nn.Parameter(values, False))
        made[name] = own
    return made


def _computed(
    x: torch.Tensor, names: Names, linears: dict[str, nn.Linear], activate: Any
) -> torch.Tensor:
    first, *rest = (linears[name](x) for name in names.given()[:-1])
    if names.halves != APART:
        first, *rest = first.chunk(2, dim=-1)[:: -1 if names.halves == UP_FIRST else 1]
    h = activate(first) * rest[0] if rest else activate(first)
    return linears[names.down](h)  # type: ignore[no-any-return]


def _with_children(module: nn.Module, new: dict[str, nn.Linear]) -> nn.Module:
    """Returns a module that is this one but for the children of these names, which may be a path each."""
    own: Any = type(module).__new__(type(module))
    own.__dict__.update(module.__dict__)
    children = own.__dict__["_modules"] = dict(module._modules)
    below: dict[str, dict[str, nn.Linear]] = {}
    for path, child in new.items():
        name, _, rest = path.partition(".")
        if rest:
            below.setdefault(name, {})[rest] = child
        else:
            children[name] = child
    for name, of in below.items():
        children[name] = _with_children(module.get_submodule(name), of)
    return own  # type: ignore[no-any-return]
