"""What the code of a function may do, if it is to be known by its results."""

from __future__ import annotations

import operator
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


def is_plain(function: Any) -> bool:
    """Tells whether a function or a module does nothing but these operations, whatever values it is given.

    It is traced, which fails where the code asks for a value or a size to decide what it does.
    """
    try:
        graph = fx.symbolic_trace(function).graph
    except Exception:  # whatever the code does with what stands for a value
        return False
    known = {
        "placeholder": None,
        "output": None,
        "get_attr": None,
        "call_function": _FUNCTIONS,
        "call_method": _METHODS,
    }
    return all(
        node.op in known and ((of_op := known[node.op]) is None or node.target in of_op)
        for node in graph.nodes
    )
