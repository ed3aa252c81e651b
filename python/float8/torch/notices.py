"""Warnings that a call or an option does nothing, each once in a process.

A program that calls in every step is told once, also where other code resets Python's own memory of
warnings, as PyTorch does.
"""

from __future__ import annotations

import os
import sys
import warnings

import torch
from torch import nn

from float8.torch.base_linear import is_float8

conversions = 0  # calls that convert a model
in_graphs = False  # a graph of torch.compile has linears in fp8, whose calls nobody sees
_told: set[str] = set()
_FOLDERS = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (torch.__file__, os.path.dirname(__file__))
)


def warn_once(key: str, text: str) -> None:
    """Warns with the program's line that led here, unless the key was warned of."""
    if key not in _told:
        _told.add(key)
        warnings.warn(f"float8: {text}", stacklevel=_level_of_program())


def _level_of_program() -> int:
    """Returns the stacklevel of the first frame above warn_once that is not PyTorch's or float8's."""
    level, frame = 2, sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_FOLDERS):
        level, frame = level + 1, frame.f_back
    return level


def note_conversion() -> None:
    """Counts a call that converts a model, or a layer that is made in fp8."""
    global conversions
    conversions += 1


def has_linears(module: nn.Module) -> bool:
    """Tells whether a Float8Linear is below the module."""
    return any(is_float8(each) for each in module.modules())


def warn_without_linears(call: str, module: nn.Module, experts: bool = False) -> None:
    """Warns where a call has nothing to do: no Float8Linear is below the module.

    experts: nor are experts in fp8.

    Raises TypeError where it is no module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"float8: {call} takes an nn.Module, not a {type(module).__name__}")
    if experts and any(hasattr(each, "expert_weights") for each in module.modules()):
        return
    if not has_linears(module):
        warn_once(call, f"{call} {nothing_done(module)}")


def nothing_done(module: nn.Module) -> str:
    """Returns the words about a call that has nothing to do."""
    return (
        f"did nothing, for {type(module).__name__} has no Float8Linear: convert the model before "
        "with convert_to_float8_training, or leave the call out"
    )
