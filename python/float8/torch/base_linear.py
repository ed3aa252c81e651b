"""What tells a linear in fp8 from other modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from torch import nn

if TYPE_CHECKING:
    from float8.torch.layer.linear import Float8Linear


class BaseLinear(nn.Linear):
    """The base of Float8Linear alone (layer/linear.py), for what lies below it and looks for it."""


def is_float8(module: nn.Module) -> TypeGuard[Float8Linear]:
    """Tells whether a module is a Float8Linear."""
    return isinstance(module, BaseLinear)
