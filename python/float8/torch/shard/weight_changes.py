"""What is known of changes to weights, by those who keep copies of them.

PyTorch's version counters miss fused and foreach optimizers on DTensors, whatever goes through `.data`,
kernels that are given a pointer, and replays of CUDA graphs. So a weight that FSDP gathers in fp8 is
watched in three ways: it sees the ops on it and on what shares its memory (fsdp.ShardedWeight), every
step of an optimizer that may write unseen counts as a change of all weights, and where a change may come
that nobody sees, the weight is unknowable from then on, and its copies are made anew for every forward.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from float8.torch import traced


class Changes:
    """The changes of one memory that tensors share."""

    __slots__ = ("count", "unknowable")

    def __init__(self) -> None:
        self.count = 0
        self.unknowable = False

    def note(self, of: torch.Tensor) -> None:
        """Counts a change that is about to happen. One in a CUDA graph comes with every replay."""
        self.count += 1
        if is_capturing(of):
            self.unknowable = True


class _Steps(Changes):
    """The steps of optimizers of the process whose kernels may write through pointers."""

    __slots__ = ("cast_within",)

    def __init__(self) -> None:
        super().__init__()
        self.cast_within = False  # a forward in an optimizer's closure has cast weights


_steps = _Steps()
_seen: set[type] = set()  # the optimizers that tell of all of their writes
checks_copies = False


def check_copies(enabled: bool = True) -> None:
    """Makes forwards compare the fp8 copies of weights with the weights, where they use them again.

    It is for tests, and for a trainer in doubt: it waits for the device, and keeps what was cast in
    high precision. A copy that is not its weight's raises RuntimeError, with the layer's name. It is for
    copies that are cast from now on, in eager mode, in all threads.
    """
    global checks_copies
    checks_copies = enabled


def steps() -> int:
    """Returns the number of optimizers' steps."""
    return _steps.count


def steps_are_unknowable() -> bool:
    """Tells whether optimizers step that nobody sees: those that are compiled or in a CUDA graph."""
    return _steps.unknowable


def note_cast_in_forward() -> None:
    """Is called where a forward casts weights, which may be in an optimizer's step."""
    _steps.cast_within = True


def all_writes_are_seen(kind: type) -> None:
    """Says of an optimizer, but not of its subclasses, that a step of it writes no weight unseen."""
    _seen.add(kind)


@functools.cache
def watch_optimizers() -> None:
    """Makes the steps of all optimizers of the process count, from now on.

    A step counts when it begins, so that casts in hooks behind it are current.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        _note_compiled_step()
        return
    _steps.count += type(optimizer) not in _seen
    _steps.cast_within = False
    # A process that forked from one with CUDA has none, and may not ask for a capture.
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        _steps.unknowable = True


def _after_step(*_: Any) -> None:
    if not torch.compiler.is_compiling() and _steps.cast_within:
        _steps.count += 1


@traced.constant
def _note_compiled_step() -> bool:
    """Runs while torch.compile traces a step, whose graph calls no hook when it runs."""
    _steps.unknowable = True
    return True


def is_capturing(tensor: torch.Tensor) -> bool:
    """Tells whether work on a tensor goes into a CUDA graph now."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
