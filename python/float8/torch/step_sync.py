"""The sync of delayed scaling at an optimizer's steps, for programs whose loop has no place for it."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from float8.torch import notices, traced
from float8.torch.scales import sync_float8_amax_and_scale_history

_active: set[StepSync] = set()


class StepSync:
    """Synchronises a module at the steps of one optimizer, until `remove()` is called."""

    def __init__(self, module: nn.Module, group: Any) -> None:
        self._module = weakref.ref(module)
        self._group = group
        self._within: weakref.ref[Optimizer] | None = None  # an optimizer in whose step others step

    def remove(self) -> None:
        """Ends it."""
        _active.discard(self)

    def before_step(self, optimizer: Optimizer) -> None:
        module = self._module()
        if module is None:
            self.remove()
            return
        outer = None if self._within is None else self._within()
        if outer is not None and outer is not optimizer:
            return
        first = next((each for each in module.parameters() if each.requires_grad), None)
        if any(each is first for group in optimizer.param_groups for each in group["params"]):
            self._within = weakref.ref(optimizer)
            found_inf = getattr(optimizer, "found_inf", None)  # GradScaler's, of fused optimizers
            sync_float8_amax_and_scale_history(module, group=self._group, found_inf=found_inf)

    def after_step(self, optimizer: Optimizer) -> None:
        if self._within is not None and self._within() is optimizer:
            self._within = None


def sync_at_optimizer_steps(module: nn.Module, *, group: Any = None) -> StepSync:
    """Begins each step of the module's optimizer with sync_float8_amax_and_scale_history(module), from now on.

    group: as there.

    It is for loops that belong to others, under delayed scaling; under other recipes it does nothing. The optimizer is the one that has the
    module's first trained parameter, whatever others there are. A step that GradScaler leaves out has no sync, and one that a
    fused optimizer leaves out for it changes no scales. A step with a closure, whose forward runs in it, begins with the sync of the step
    before. A compiled step calls nothing, which is warned of: synchronise in the loop then.

    `remove()` of what it returns ends it. Raises TypeError where `module` is no module; it warns where no linear or experts are in fp8.
    """
    notices.warn_without_linears("sync_at_optimizer_steps", module, experts=True)
    made = StepSync(module, group)
    _active.add(made)
    _hook()
    return made


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
