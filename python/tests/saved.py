"""What autograd keeps between a forward and its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def kept(model: nn.Module, x: torch.Tensor, call: Any = None) -> list[tuple[int, int]]:
    """Returns the address and the bytes of what is kept between forward and backward, of what is no parameter."""
    found: dict[int, int] = {}
    own = {each.data_ptr() for each in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if is_traceable_wrapper_subclass(tensor):  # it has no bytes of its own
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x) if call is None else call(x)
    y.float().square().sum().backward()
    return list(found.items())
