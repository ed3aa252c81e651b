"""What the forward of a class of MLPs computes, as its byte code says, whatever its children are called.

A class is an MLP where its forward has the instructions of one of the functions below. They name their
children by what these are for, and the places of names in both say which child is which.
"""

from __future__ import annotations

import inspect
import types
from typing import Any, NamedTuple

from torch import nn
from torch.nn import functional

from float8.torch.layer.mlp import Names

_FUNCTIONS = {functional.silu: "silu", functional.gelu: "gelu"}
_ACTIVATIONS = frozenset(("silu", "gelu", "relu", "sigmoid", "mish", "selu", "elu", "leaky_relu"))
_COUNTS = ("co_argcount", "co_posonlyargcount", "co_kwonlyargcount")
# These flags of a function say how it is called.
_CALL = (
    inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)  # fmt: skip


class Known(NamedTuple):
    """The children of an MLP, and its activation: a key of _ops.ACTIVATIONS, or an attribute that has it."""

    names: Names
    activation: str
    is_attribute: bool


# These are never called.
def _gated(self: Any, x: Any) -> Any:
    return self.down(self.activation(self.gate(x)) * self.up(x))


def _gated_named(self: Any, x: Any) -> Any:
    y = self.down(self.activation(self.gate(x)) * self.up(x))
    return y


def _gated_by_steps(self: Any, x: Any) -> Any:
    h = self.activation(self.gate(x)) * self.up(x)
    return self.down(h)


def _gated_by_function(self: Any, x: Any) -> Any:
    return self.down(functional.activation(self.gate(x)) * self.up(x))  # type: ignore[attr-defined]


def _gated_by_function_named(self: Any, x: Any) -> Any:
    y = self.down(functional.activation(self.gate(x)) * self.up(x))  # type: ignore[attr-defined]
    return y


def _plain(self: Any, x: Any) -> Any:
    return self.down(self.activation(self.up(x)))


def _plain_by_steps(self: Any, x: Any) -> Any:
    x = self.up(x)
    x = self.activation(x)
    x = self.down(x)
    return x


def _plain_by_function(self: Any, x: Any) -> Any:
    return self.down(functional.activation(self.up(x)))  # type: ignore[attr-defined]


def _plain_by_function_named(self: Any, x: Any) -> Any:
    y = self.down(functional.activation(self.up(x)))  # type: ignore[attr-defined]
    return y


_FORMS: list[types.CodeType] = [
    each.__code__
    for each in (
        _gated,
        _gated_named,
        _gated_by_steps,
        _gated_by_function,
        _gated_by_function_named,
        _plain,
        _plain_by_steps,
        _plain_by_function,
        _plain_by_function_named,
    )
]


def known_of(cls: type[nn.Module]) -> Known | None:
    """Returns what the forward of a class computes, None for other than an MLP."""
    forward = cls.forward
    if not isinstance(forward, types.FunctionType):
        return None
    code = forward.__code__
    for form in _FORMS:
        if not _is_same(code, form):
            continue
        of = dict(zip(form.co_names, code.co_names, strict=True))
        names = Names(of.get("gate"), of["up"], of["down"])
        if "functional" not in of:
            return Known(names, of["activation"], True)
        if forward.__globals__.get(of["functional"]) is not functional:
            return None
        activation = _FUNCTIONS.get(getattr(functional, of["activation"], None))  # type: ignore[arg-type]
        return None if activation is None else Known(names, activation, False)
    return None


def calls_an_activation(cls: type[nn.Module]) -> bool:
    """Tells whether the forward of a class reads a name that is an activation of PyTorch's."""
    code = getattr(cls.forward, "__code__", None)
    return code is not None and not _ACTIVATIONS.isdisjoint(code.co_names)


def _is_same(code: types.CodeType, form: types.CodeType) -> bool:
    """Tells whether two functions have the same instructions; those of the forms read no constant."""
    return (
        code.co_code == form.co_code
        and len(code.co_names) == len(form.co_names)
        and (code.co_flags ^ form.co_flags) & _CALL == 0
        and all(getattr(code, each) == getattr(form, each) for each in _COUNTS)
    )
