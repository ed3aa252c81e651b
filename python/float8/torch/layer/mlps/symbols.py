"""The values of a forward whose code runs over symbols: each says how it came to be, and of what.

symbol_run.py runs it, for a class or for one module.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from float8.torch.layer.mlps.symbol_run import Run

# Methods and functions of these names make pieces, of which a forward takes two.
_PIECES = ("chunk", "split", "unbind")
# The devices of linears.
_DEVICES = ("cuda", "cpu", "meta")


class Symbol:
    """A value of a forward that is not known: `how` it came to be, and of what.

    It can be read, called, multiplied, raised to a power, divided and indexed, and be taken apart where it is
    pieces; whatever else is done with it is an error. "self" is of a path from the module whose forward runs.
    """

    _run: Run
    _how: str
    _of: tuple[Any, ...]
    __slots__ = ("_how", "_of", "_run")
    __hash__: Any = None  # a set would tell two symbols of one value apart

    def __init__(self, run: Run, how: str, *of: Any) -> None:
        for name, value in (("_run", run), ("_how", how), ("_of", of)):
            object.__setattr__(self, name, value)
        if how == "call":
            run.calls.append(self)  # all that the forward calls

    def __getattr__(self, name: str) -> Any:
        return self._run.attribute(self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run.call(self, args, kwargs)

    def __mul__(self, other: Any) -> Symbol:
        return self if self._run.is_one(other) else Symbol(self._run, "product", self, other)

    def __floordiv__(self, other: Any) -> Symbol:
        return Symbol(self._run, "quotient", self, other)

    def __pow__(self, other: Any) -> Any:
        return self.pow(other)

    def __getitem__(self, index: Any) -> Symbol:
        children = self._run.children_of(self) if type(index) is int else None
        return Symbol(self._run, "item", self, index) if children is None else children[index]

    def __iter__(self) -> Iterator[Symbol]:
        children = self._run.children_of(self)
        if children is not None:
            return iter(children)
        if called_by_name(self, *_PIECES) is not None:
            return iter((self[0], self[1]))
        if leading_of(self) is not None:  # as *x.shape[:-1] has it among others
            return iter((self,))
        raise TypeError

    def __imul__(self, other: Any) -> Symbol:  # it changes what other names stand for, too
        raise TypeError

    __ipow__ = __ifloordiv__ = __imul__

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError

    def __bool__(self) -> bool:
        raise TypeError

    def __contains__(self, other: object) -> bool:
        raise TypeError

    def __eq__(self, other: object) -> bool:
        if is_device_type(self) and isinstance(other, str) and other not in _DEVICES:
            return False
        raise TypeError


def matches(value: Any, expected: Any) -> bool:
    """Tells whether a value, which may have symbols in it, is what is expected, of its types."""
    if type(value) is not type(expected):
        return False
    if isinstance(expected, slice):
        return matches(
            (value.start, value.stop, value.step), (expected.start, expected.stop, expected.step)
        )
    if isinstance(expected, (tuple, list)):
        return len(value) == len(expected) and all(map(matches, value, expected))
    if isinstance(expected, dict):
        return value.keys() == expected.keys() and all(
            matches(value[key], each) for key, each in expected.items()
        )
    return bool(value == expected)


class Called(NamedTuple):
    name: str  # an attribute of self, or a key of _ops.ACTIVATIONS
    x: Symbol


class Call(NamedTuple):
    """A call of a method of x, or of the function of PyTorch that has its name and takes x first."""

    name: str
    x: Symbol
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def given(self, *names: str) -> dict[str, Any] | None:
        """Returns the arguments by their names, None where there are more than these."""
        if len(self.args) > len(names):
            return None
        return dict(zip(names, self.args, strict=False)) | self.kwargs


def called(y: Symbol) -> Called | None:
    """Returns the attribute of self that returned y, and what it was called with."""
    if y._how != "call":
        return None
    function, args, kwargs = y._of
    name = attribute_of_self(function)
    if name is None or len(args) != 1 or kwargs or not isinstance(args[0], Symbol):
        return None
    return Called(name, args[0])


def called_by_name(y: Any, *names: str) -> Call | None:
    """Returns the call that returned y, None where it is of no function that has one of these names."""
    if not isinstance(y, Symbol) or y._how != "call":
        return None
    function, args, kwargs = y._of
    if function._how not in ("attribute", "global"):
        return None
    found = object_of(function)
    if found is not None:
        name = next((each for each in names if found is getattr(torch, each, None)), None)
    else:
        name = function._of[1] if function._how == "attribute" else None
        args = (function._of[0], *args)
    if name not in names or not args or not isinstance(args[0], Symbol):
        return None
    return Call(name, args[0], args[1:], kwargs)


def leading_of(y: Any) -> Symbol | None:
    """Returns the tensor whose sizes but the last one y is, None for another y."""
    is_leading = isinstance(y, Symbol) and y._how == "item" and matches(y._of[1], slice(None, -1))
    return _shaped(y._of[0]) if is_leading else None


def last_size_of(y: Any) -> Symbol | None:
    """Returns the tensor whose last size y is, None for another y."""
    size = called_by_name(y, "size")
    if size is not None:
        return size.x if matches(size.given("dim"), {"dim": -1}) else None
    is_last = isinstance(y, Symbol) and y._how == "item" and matches(y._of[1], -1)
    return _shaped(y._of[0]) if is_last else None


def _shaped(shape: Symbol) -> Symbol | None:
    """Returns the tensor that has a shape, None where the symbol is none."""
    if shape._how == "attribute" and shape._of[1] == "shape":
        return shape._of[0]  # type: ignore[no-any-return]
    size = called_by_name(shape, "size")
    return size.x if size is not None and not size.args and not size.kwargs else None


def attribute_of_self(value: Any) -> str | None:
    """Returns the path of an attribute of self, or of a module below that the forward runs through."""
    if not isinstance(value, Symbol) or value._how != "attribute":
        return None
    owner, name = value._of
    path = owner._of[0] if owner._how == "self" else owner._run.path_of(owner)
    return None if path is None else f"{path}.{name}" if path else str(name)


def is_device_type(y: Symbol) -> bool:
    """Tells whether y is x.device.type of some x."""
    if y._how != "attribute" or y._of[1] != "type":
        return False
    return bool(y._of[0]._how == "attribute" and y._of[0]._of[1] == "device")


def object_of(function: Symbol) -> Any:
    """Returns the global, or what a Python module has, that a symbol stands for; None for others."""
    if function._how == "global":
        return function._of[0]
    if function._how == "attribute":
        home = object_of(function._of[0])
        if isinstance(home, types.ModuleType):
            return getattr(home, function._of[1], None)
    return None


def activation_in(y: Symbol) -> Called | None:
    """Returns the key of the function of PyTorch that returned y, and what it was called with.

    What one makes of x in float32 and is rounded to x's type is what it makes of x.
    """
    rounded = called_by_name(y, "to")
    if rounded is None or len(rounded.args) != 1 or rounded.kwargs:
        return _activated(y)
    of, dtype = _activated(rounded.x), rounded.args[0]
    wide = None if of is None else called_by_name(of.x, "float")
    is_of_x = isinstance(dtype, Symbol) and dtype._how == "attribute" and dtype._of[1] == "dtype"
    if of is None or wide is None or wide.args or wide.kwargs or not is_of_x:
        return None
    return Called(of.name, wide.x) if dtype._of[0] is wide.x else None


def _activated(y: Symbol) -> Called | None:
    """Returns the same of a function that was called with x itself."""
    if y._how != "call":
        return None
    function, args, kwargs = y._of
    found = object_of(function)
    x = args[0] if args else None
    if (
        found is functional.silu
        and len(args) == 1
        and matches(kwargs or {"inplace": False}, {"inplace": False})
    ):
        key = "silu"
    elif found is functional.gelu and len(args) == 1 and set(kwargs) <= {"approximate"}:
        key = {"none": "gelu", "tanh": "gelu_tanh"}.get(kwargs.get("approximate", "none"), "")
    else:
        key, x = "relu2", _relu_of(_squared(y))
    return Called(key, x) if key and isinstance(x, Symbol) else None


def _squared(y: Symbol) -> Any:
    """Returns what y is the square of, None for another y."""
    call = called_by_name(y, "square", "pow")
    if call is None or call.kwargs:
        return None
    by = call.args[0] if len(call.args) == 1 else None
    is_two = isinstance(by, (int, float)) and by == 2
    squares = (call.name == "square" and not call.args) or (call.name == "pow" and is_two)
    return call.x if squares else None


def _relu_of(y: Any) -> Any:
    """Returns what y is the ReLU of, None for another y."""
    if not isinstance(y, Symbol) or y._how != "call":
        return None
    function, args, kwargs = y._of
    found = object_of(function)
    is_relu = found is functional.relu or found is torch.relu
    return args[0] if is_relu and len(args) == 1 and not kwargs else None
