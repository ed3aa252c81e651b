"""What the code of a function may do, if it is to be known by its results for a few tensors."""

from __future__ import annotations

import dis
import operator
import types
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

# Each result depends on the arguments alone, and none is changed.
_FUNCTIONS = frozenset(
    (
        operator.mul,
        operator.add,
        operator.neg,
        operator.getitem,
        operator.floordiv,
        getattr,
        torch.cat,
        torch.rsqrt,
    )
)
_METHODS = frozenset(
    ("unsqueeze", "chunk", "size", "to", "float", "type_as", "pow", "square", "mean", "rsqrt")
)
# The code may name these and functions of its own kind, so that it reads no state and switches nothing.
_NAMES = frozenset(("torch", "cat", "float32", "dtype", "shape", *_METHODS))


def reached(function: types.FunctionType) -> tuple[types.FunctionType, ...] | None:
    """Returns a function and those that it calls by their names, None where it may read or do anything else.

    Any other of them is another function.
    """
    found = [function]
    for each in found:
        if not _stands_alone(each.__code__):
            return None
        for name in each.__code__.co_names:
            value = each.__globals__.get(name)
            if isinstance(value, types.FunctionType) and name not in _NAMES:
                if value not in found:
                    found.append(value)
            elif name not in _NAMES or not (value is None or value is torch):
                return None
    return tuple(found)


def globals_of(code: types.CodeType) -> list[str]:
    """Returns the names that code reads as globals, each once, and no attributes."""
    named = (x.argval for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL")
    return list(dict.fromkeys(named))


def names_alone(code: types.CodeType, *, of_self: Collection[str]) -> bool:
    """Tells whether a forward names nothing but such operations, and these attributes of its module."""
    return _stands_alone(code) and _NAMES.issuperset(set(code.co_names).difference(of_self))


def _stands_alone(code: types.CodeType) -> bool:
    """Tells whether code reads no variables of other code, and makes no functions."""
    return not code.co_freevars and not any(isinstance(x, types.CodeType) for x in code.co_consts)


def is_plain(function: Any) -> bool:
    """Tells whether a function or a module does nothing but these operations, whatever values it is given.

    It is traced, which fails where the code asks for a value or a size to decide what it does. No slice has a
    number for a bound, and a mean is over the last dimension, so that what holds for some sizes does for others.
    """
    try:
        graph = fx.symbolic_trace(function).graph
    except Exception:  # whatever the code does with what stands for a value
        return False
    return all(_is_known(node) for node in graph.nodes)


def _is_known(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output", "get_attr"):
        return True
    if node.op == "call_method":
        if node.target == "mean":
            dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
            return dim in (-1, (-1,), [-1])
        return node.target in _METHODS
    if node.op != "call_function" or node.target not in _FUNCTIONS:
        return False
    if node.target is operator.getitem:
        of, index = node.args
        parts = index if isinstance(index, tuple) else (index,)
        return all(_is_known_index(part, of) for part in parts)
    return True


def _is_known_index(part: Any, of: Any) -> bool:
    """Tells whether an index is a bound that sizes give, or a number of a list, and no number of elements."""
    if isinstance(part, slice):
        return all(x is None or isinstance(x, fx.Node) for x in (part.start, part.stop, part.step))
    if isinstance(part, int):
        return isinstance(of, fx.Node) and (
            (of.target is getattr and of.args[1] == "shape") or of.target in ("chunk", "size")
        )
    return part is Ellipsis
