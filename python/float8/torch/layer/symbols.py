"""The values of a forward whose code runs over symbols: each says how it came to be, and of what."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

# Methods and functions of these names make pieces, of which a forward takes two.
_PIECES = ("chunk", "split", "unbind")


class Symbol:
    """A value of a forward that is not known: `how` it came to be, and of what.

    It can be read, called, multiplied, raised to a power, divided and indexed, and be taken apart where it is
    pieces; whatever else is done with it is an error.
    """

    _calls: list[Symbol]
    _how: str
    _of: tuple[Any, ...]
    __slots__ = ("_calls", "_how", "_of")
    __hash__ = object.__hash__

    def __init__(self, calls: list[Symbol], how: str, *of: Any) -> None:
        for name, value in zip(Symbol.__slots__, (calls, how, of), strict=True):
            object.__setattr__(self, name, value)
        if how == "call":
            calls.append(self)  # all that the forward calls

    def __getattr__(self, name: str) -> Symbol:
        return Symbol(self._calls, "attribute", self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Symbol:
        return Symbol(self._calls, "call", self, args, kwargs)

    def __mul__(self, other: Any) -> Symbol:
        return Symbol(self._calls, "product", self, other)

    def __floordiv__(self, other: Any) -> Symbol:
        return Symbol(self._calls, "quotient", self, other)

    def __pow__(self, other: Any) -> Symbol:
        return self.pow(other)

    def __getitem__(self, index: Any) -> Symbol:
        return Symbol(self._calls, "item", self, index)

    def __iter__(self) -> Iterator[Symbol]:
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

    def __eq__(self, other: object) -> bool:
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
    if isinstance(value, Symbol) and value._how == "attribute" and value._of[0]._how == "self":
        return str(value._of[1])
    return None


def object_of(function: Symbol) -> Any:
    """Returns the global, or what a Python module has, that a symbol stands for; None for others."""
    if function._how == "global":
        return function._of[0]
    if function._how == "attribute":
        home = object_of(function._of[0])
        if isinstance(home, types.ModuleType):
            return getattr(home, function._of[1], None)
    return None
