"""What torch.compile is told of functions.

torch.compiler's own decorators load all of torch.compile, which takes as long as PyTorch itself, also for those
who compile nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._compile import _disable_dynamo

_Function = TypeVar("_Function", bound=Callable[..., Any])

untraced = _disable_dynamo  # as torch.compiler.disable


def constant(function: _Function) -> _Function:
    """Marks what is a constant of a graph, as torch.compiler.assume_constant_result does."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
