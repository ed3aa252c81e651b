"""The sync of delayed scaling at an optimizer's steps, for programs whose loop has no place for it."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from float8.torch import notices, traced
from float8.torch.scales import states_of, sync_float8_amax_and_scale_history

_active: set[StepSync] = set()


class StepSync:
    """Synchronises a module at the steps of one optimizer, until `remove()` is called."""

    def __init__(self, module: nn.Module, group: Any) -> None:
        self._module = weakref.ref(module)
        self._group = group
        self._within: weakref.ref[Optimizer] | None = None  # an optimizer in whose step others step
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._leader: weakref.ref[Optimizer] | None = None  # it had the first trained parameter
        self._steps_of_others = 0
        self._backward = -1  # the latest one in which an optimizer stepped

    def remove(self) -> None:
        """Ends it."""
        _active.discard(self)

    def before_step(self, optimizer: Optimizer) -> None:
        module = self._module()
        if module is None:
            self.remove()
            return
        outer = None if self._within is None else self._within()
        if outer is not None and outer is not optimizer and _is_stepping(outer):
            return
        if not self._leads(module, optimizer):
            return
        self._within = weakref.ref(optimizer)
        backward = torch._C._current_graph_task_id()
        if backward == -1:
            found_inf = getattr(optimizer, "found_inf", None)  # GradScaler's, of fused optimizers
            sync_float8_amax_and_scale_history(module, group=self._group, found_inf=found_inf)
        elif backward != self._backward:
            # Hooks of gradients release them by a step for each parameter.
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _leads(self, module: nn.Module, optimizer: Optimizer) -> bool:
        """Tells whether the optimizer has the module's first trained parameter, or the first one that any has.

        Programs leave parameters out that are not frozen. Who has the others is known when all have stepped.
        """
        first = next((each for each in module.parameters() if each.requires_grad), None)
        if first is None:
            return False
        if _has(optimizer, first):
            self._leader = weakref.ref(optimizer)
            return True
        leader = None if self._leader is None else self._leader()
        is_new = optimizer not in self._seen
        self._seen.add(optimizer)
        if is_new or (leader is not None and _has(leader, first)):
            return False
        held = {id(each) for known in self._seen for each in _parameters(known)}
        first = next((p for p in module.parameters() if p.requires_grad and id(p) in held), None)
        if first is None:
            self._warn_of_copies(module)
        return first is not None and _has(optimizer, first)

    def _warn_of_copies(self, module: nn.Module) -> None:
        """Warns, once, where optimizers step and have no parameter of a module whose forwards record amaxes."""
        self._steps_of_others += 1
        if self._steps_of_others == 3 and any(bool(s.amaxes().any()) for s in states_of(module)):
            notices.warn_once(
                "optimizers of copies",
                "optimizers step again and again, and none has a parameter of the module that sync_at_optimizer_steps was "
                "given, but copies perhaps: delayed scaling has no sync. Call "
                "sync_float8_amax_and_scale_history(model) in the loop, before the step",
            )

    def _after_backward(self) -> None:
        module = self._module()
        if module is not None:
            sync_float8_amax_and_scale_history(module, group=self._group)

    def after_step(self, optimizer: Optimizer) -> None:
        if self._within is not None and self._within() is optimizer:
            self._within = None


def sync_at_optimizer_steps(module: nn.Module, *, group: Any = None) -> StepSync:
    """Begins each step of the module's optimizer with sync_float8_amax_and_scale_history(module), from now on.

    group: as there.

    It is for loops that belong to others, under delayed scaling; under other recipes it does nothing. The optimizer is the one
    that has the module's first trained parameter, whatever others there are; where none has it, from the second step on the one
    that has the first of those that optimizers have. A step that GradScaler leaves out has no sync, and one that a fused
    optimizer leaves out for it changes no scales. A step with a closure, whose forward runs in it, begins with the sync of the
    step before. Where hooks of gradients step (gradient release), the sync is at the end of backward. A compiled step calls
    nothing, which is warned of, as is an optimizer of copies of the parameters: synchronise in the loop then.

    `remove()` of what it returns ends it. Raises TypeError where `module` is no module; it warns where no linear or experts are in fp8.
    """
    notices.warn_without_linears("sync_at_optimizer_steps", module, experts=True)
    made = StepSync(module, group)
    _active.add(made)
    _hook()
    return made


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _has(optimizer: Optimizer, parameter: torch.Tensor) -> bool:
    return any(each is parameter for each in _parameters(optimizer))


def _is_stepping(optimizer: Optimizer) -> bool:
    """Tells whether a method of the optimizer runs. No hook tells of the end of a step that raised, as in its closure."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


@functools.cache
def _hook() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        _warn_of_compiled_step()
        return
    for each in list(_active):
        each.before_step(optimizer)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        for each in _active:
            each.after_step(optimizer)


@traced.constant
def _warn_of_compiled_step() -> bool:
    if _active:
        notices.warn_once(
            "a compiled step",
            "a step of an optimizer is compiled, and calls no sync of delayed scaling: call "
            "sync_float8_amax_and_scale_history(model) in the loop, before the step",
        )
    return True
