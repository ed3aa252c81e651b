"""Warnings where an optimizer trains parameters that the model no longer has, or a weight that no linear in fp8 reads.

A conversion keeps parameters, but fully_shard, load_state_dict(assign=True), to_empty and others put new ones
into a model. An optimizer that was made before goes on with the old ones: the model computes, the
loss may even fall by what else is trained, and its linears stay as they were.

The sign is a step of an optimizer whose parameters of some shape are in no converted model and have no
gradient, while weights of that shape have one and no optimizer has them. Frozen layers have no
gradient, a second optimizer's weights are known from its own steps, and a wrapper's copies of the weights
have the gradients that it gave them.

A weight that has gradients, and whose linear is never called, is read by another module, such as by
functional.linear(x, self.qkv.weight) in some attentions of timm: nothing is wrong but that no fp8 computes it.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from float8.torch import notices
from float8.torch.layer.convertible import listed
from float8.torch.layer.linear import Float8Linear

_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_uncalled: weakref.WeakSet[Float8Linear] = weakref.WeakSet()  # in an earlier look
_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def watch(model: nn.Module) -> None:
    """Looks at the optimizers' steps for those that have lost parameters of a converted model."""
    _hook()
    _models.add(model)


@functools.cache
def _hook() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    steps = _steps[optimizer] = _steps.get(optimizer, 0) + 1
    # In the second step other optimizers have had their first. Later ones are looked at ever more seldom.
    if steps == 1 or steps & (steps - 1) != 0:
        return
    if names := untrained(optimizer):
        notices.warn_once(
            f"untrained: {names}",
            f"{type(optimizer).__name__} has parameters that are no longer in the model, and "
            f"{listed(names)} is not trained: no optimizer has its weight. Make the optimizer after "
            "the conversion, fully_shard, and load_state_dict(assign=True)",
        )
    if names := uncalled(optimizer):
        notices.warn_once(
            f"uncalled: {names}",
            f"{listed(names)} computes nothing in fp8: its weight has gradients, and it is never called, so something "
            "else reads the weight, as functional.linear(x, layer.weight) does. Call the layer there, or leave it "
            "out with module_filter_fn",
        )


def untrained(optimizer: torch.optim.Optimizer) -> list[str]:
    """Returns the names of the linears whose weights this optimizer should have, and has not."""
    own = _parameters(optimizer)
    if all(each.grad is not None for each in own):
        return []
    of_models = {id(each) for model in _models for each in model.parameters()}
    strangers = [each for each in own if id(each) not in of_models]
    lost = {each.shape for each in strangers if each.grad is None}
    lost -= {each.shape for each in strangers if each.grad is not None}
    held = {id(each) for other in list(_steps) for each in _parameters(other)}
    return [
        name or "root"
        for model in _models
        for name, layer in model.named_modules()
        if isinstance(layer, Float8Linear)
        and (weight := layer._parameters.get("weight")) is not None
        and weight.grad is not None
        and weight.shape in lost
        and id(weight) not in held
    ]


def uncalled(optimizer: torch.optim.Optimizer) -> list[str]:
    """Returns the names of the linears of this optimizer that no step has called, now and in the look before."""
    if notices.in_graphs:
        return []
    own = {id(each) for each in _parameters(optimizer) if each.grad is not None}
    found = [
        (name or "root", layer)
        for model in _models
        for name, layer in model.named_modules()
        if isinstance(layer, Float8Linear)
        and not layer._is_called
        and id(layer._parameters.get("weight")) in own
    ]
    names = [name for name, layer in found if layer in _uncalled]
    _uncalled.update(layer for _, layer in found)
    return names


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]
