"""What the forward of a module computes, as its code says, whatever its children are called.

The code of a forward runs over symbols, with symbols in the place of self, x and globals, so that nothing of the module
or of others is called. What it returns says which child reads what. The code of its class alone tells it for all modules of a class; where
it has branches, loops or children that hold a linear, it runs for each module (symbol_run.py).
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any, NamedTuple

from torch import nn
from torch.nn import functional

from float8.torch.layer.mlps.halves import half_of
from float8.torch.layer.mlps.mlp import (
    ACTIVATION_MODULES,
    Beside,
    Names,
    activation_of,
    attribute_of,
    child_of,
)
from float8.torch.layer.mlps.mlp_function import APART, GATE_FIRST, UP_FIRST
from float8.torch.layer.mlps.symbol_run import Run, result_of
from float8.torch.layer.mlps.symbols import (
    Called,
    Symbol,
    activation_in,
    attribute_of_self,
    called,
    object_of,
)

_ACTIVATIONS = frozenset(("silu", "gelu", "relu", "sigmoid", "mish", "selu", "elu", "leaky_relu"))


class Known(NamedTuple):
    """The linears of an MLP, its activation as a key of _ops.ACTIVATIONS, and its other children.

    Where one of these is the activation, `beside` names it, and `activation` is None.
    """

    names: Names
    activation: str | None
    beside: Beside = Beside()


def known_of(module: nn.Module) -> Known | None:
    """Returns what the forward of a module computes, None for other than an MLP."""
    if type(module).__getattribute__ is not object.__getattribute__:
        return None  # its children may be others than they seem
    y = result_of(type(module).forward)
    known = _known_of(module, y) if isinstance(y, Symbol) else None
    child = known.beside.activation if known is not None else None
    if known is None or (child is not None and activation_of(attribute_of(module, child)) is None):
        return _known_of_its_own(module) or known
    return known


def _known_of_its_own(module: nn.Module) -> Known | None:
    """Returns what the forward of this module computes, with the children that it has."""
    linears = [each for each in module.modules() if isinstance(each, nn.Linear)]
    if len(linears) not in (2, 3):
        return None
    run = Run(module, _is_stepped_into)
    try:
        y = run.forward()
    except Exception:
        return None
    known = _known_of(module, y)
    if known is None or (run.entered and not _has_activation(module, known)):
        return None
    beside = known.beside._replace(
        around=tuple(run.entered),
        lists=tuple(run.children.items()),
        entered=tuple(run.entered.items()),
        settings=tuple((*key, value) for key, value in run.settings.items()),
        code=tuple(run.code),
        optional=_optional_of(type(module).forward),
    )
    return known._replace(beside=beside)


def _optional_of(forward: Any) -> tuple[str, ...]:
    """Returns the arguments of a forward behind x that are None by default, up to the first one that is not."""
    behind_x = list(inspect.signature(forward).parameters.values())[2:]
    return tuple(
        each.name for each in itertools.takewhile(lambda each: each.default is None, behind_x)
    )


def _is_stepped_into(child: nn.Module) -> bool:
    """Tells whether a child's own forward tells of an MLP: it holds a linear, or joins a gate with up."""
    if isinstance(child, nn.Linear):
        return False
    if any(isinstance(each, nn.Linear) for each in child.modules()):
        return True
    has_none = next(child.parameters(), None) is None
    is_of_torch = type(child).__module__.startswith("torch.nn.")
    return has_none and not is_of_torch and activation_of(child) is None


def _has_activation(module: nn.Module, known: Known) -> bool:
    """Tells whether an activation is between the linears, fused or not: two blocks with a norm between them are no MLP."""
    child = attribute_of(module, known.beside.activation or "")
    is_one = activation_of(child) is not None or type(child).__module__ in ACTIVATION_MODULES
    return known.activation is not None or is_one


def why_unknown(cls: type[nn.Module]) -> str:
    """Returns what the forward of a class does, of which known_of knows nothing."""
    y = result_of(cls.forward)
    return y if isinstance(y, str) else "computes something else"


def calls_an_activation(cls: type[nn.Module]) -> bool:
    """Tells whether the forward of a class reads a name that is an activation of PyTorch's."""
    code = getattr(cls.forward, "__code__", None)
    return code is not None and not _ACTIVATIONS.isdisjoint(code.co_names)


def _known_of(module: nn.Module, y: Symbol) -> Known | None:
    dropout = _dropout_of(y)
    behind, y = _through(module, y if dropout is None else dropout.x)
    down = called(y)
    if down is None:
        return None
    between, h = _through(module, down.x)
    made = _gated(module, h) if h._how == "product" else _plain(module, h, between)
    if made is None:
        return None
    before, x = _through(module, made.up.x)
    if x._how != "x":
        return None
    names = Names(made.gate, made.up.name, down.name, made.halves)
    beside = Beside(
        tuple(before[::-1]), tuple(between), tuple(behind[::-1]), made.child,
        dropout.name if dropout else None,
    )  # fmt: skip
    return Known(names, made.function, beside)


class _Made(NamedTuple):
    """How h is made: by a function, a key of _ops.ACTIVATIONS, or by a child that is the activation."""

    function: str | None
    child: str | None
    gate: str | None
    up: Called
    halves: int = APART


class _Both(NamedTuple):
    linear: Called
    halves: int


def _plain(module: nn.Module, h: Symbol, between: list[str]) -> _Made | None:
    """Returns how h is made without a gate; it moves the activation out of `between`, and adds what it reads through."""
    function, child = activation_in(h), None
    if function is not None:
        more, h = _through(module, function.x)
        between += more
    elif between:
        child = max(between, key=lambda name: _likeness(attribute_of(module, name)))
        between.remove(child)
    up = called(h)
    if up is None or (function is None and child is None):
        return None
    # A module around a linear may be more than that.
    is_alone = isinstance(child_of(module, up.name), nn.Linear)
    if function is None and not is_alone and _likeness(attribute_of(module, child or "")) == 0:
        return None
    return _Made(function.name if function else None, child, None, up)


def _gated(module: nn.Module, h: Symbol) -> _Made | None:
    """Returns how a product is made with a gate."""
    for activated, other in (h._of, h._of[::-1]):
        if not (isinstance(activated, Symbol) and isinstance(other, Symbol)):
            return None
        function, child = activation_in(activated), called(activated)
        made = function or child
        key, own = (
            function.name if function else None,
            None if function or not child else child.name,
        )
        both = None if made is None else _merged(module, made.x, other)
        if both is not None and _is_linear(module, both.linear.name):
            return _Made(key, own, None, both.linear, both.halves)
        gate, up = None if made is None else called(made.x), called(other)
        if gate is None or up is None or gate.x is not up.x:
            continue
        if not (_is_linear(module, gate.name) and _is_linear(module, up.name)):
            continue
        return _Made(key, own, gate.name, up)
    return None


def _merged(module: nn.Module, gate: Symbol, up: Symbol) -> _Both | None:
    """Returns the attribute of self that returned both, each as a half, and which is the first one."""
    of_gate, of_up = half_of(module, gate), half_of(module, up)
    if of_gate is None or of_up is None or of_gate.both is not of_up.both:
        return None
    linear = called(of_gate.both)
    # A forward that runs with one size for both has halves, whatever becomes of an attribute that has it.
    if linear is None or of_gate.size != of_up.size or of_gate.at == of_up.at:
        return None
    return _Both(linear, UP_FIRST if of_gate.at == 1 else GATE_FIRST)


def _through(module: nn.Module, y: Symbol) -> tuple[list[str], Symbol]:
    """Returns the attributes of self that y went through last, the last one first, and what they were given."""
    names = []
    while (call := called(y)) is not None and not _is_linear(module, call.name):
        names.append(call.name)
        y = call.x
    return names, y


def _is_linear(module: nn.Module, name: str) -> bool:
    """Tells whether a child is a linear, or something around one, such as LoRA's."""
    child = child_of(module, name)
    return child is not None and any(isinstance(each, nn.Linear) for each in child.modules())


def _likeness(child: Any) -> int:
    """Returns how much a child is like an activation."""
    if type(child) in (nn.Dropout, nn.Identity):
        return 0
    return 1 if activation_of(child) is None else 2


def _dropout_of(y: Symbol) -> Called | None:
    """Returns the attribute of self with the p of the functional.dropout that returned y, None for another y."""
    if y._how != "call" or object_of(y._of[0]) is not functional.dropout:
        return None
    _, args, kwargs = y._of
    names = {name: attribute_of_self(value) for name, value in kwargs.items()}
    if len(args) != 1 or set(names) != {"p", "training"} or names["training"] != "training":
        return None
    p = names["p"]
    return Called(p, args[0]) if p and isinstance(args[0], Symbol) else None
