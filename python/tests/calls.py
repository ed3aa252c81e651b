"""Counting the ops that a test calls."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Lists the ops that are called, and which of their arguments are given."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[Any, list[bool]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.all.append((func, [each is not None for each in args]))
        return func(*args, **(kwargs or {}))

    def count(self, *ops: Any, given: int = 0) -> int:
        """Returns how often the ops were called, with the argument of this number."""
        return sum(op in ops and args[given] for op, args in self.all)
