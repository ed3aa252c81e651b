"""RMSNorms that are written as several operations, as in transformers, which `fuse` gives PyTorch's own one."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from float8.torch import notices
from float8.torch.classes import Made
from float8.torch.layer.known_code import is_plain, names_alone
from float8.torch.layer.linear import is_exporting

_TYPES = (
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
)


def eps_of(module: nn.Module) -> str | None:
    """Returns the name of a norm's epsilon where its forward computes weight * (x / rms(x)) and nothing else.

    x / rms(x) is computed in float32, and rounded to x's type before it is multiplied. None for other modules.
    """
    names = [name for name, value in module.__dict__.items() if type(value) is float]
    is_alike = (
        list(module._parameters) == ["weight"]
        and isinstance(module.weight, torch.Tensor)
        and module.weight.dim() == 1
        and not module._modules
        and not module._buffers
        and len(names) == 1
        and not isinstance(module, nn.RMSNorm)
    )
    kind: Any = next(each for each in type(module).__mro__ if "forward" in each.__dict__)
    return names[0] if is_alike and _computes_it(kind, names[0]) else None


@functools.lru_cache(maxsize=256)
def _computes_it(cls: type[nn.Module], eps: str) -> bool:
    """Tells whether the forward of a class has the bits of weight * (x / rms(x)), where sums are exact.

    What it does does not depend on values (known_code.py), and its weight and epsilon are no properties.
    """
    forward: Any = cls.__dict__["forward"]
    computed = any(inspect.getattr_static(cls, name, None) is not None for name in ("weight", eps))
    if (
        computed
        or cls.__getattr__ is not nn.Module.__getattr__
        or cls.__getattribute__ is not object.__getattribute__
        or not isinstance(forward, types.FunctionType)
        or not names_alone(forward.__code__, of_self=("weight", eps))
    ):
        return False
    random = torch.Generator().manual_seed(0)
    made = functools.partial(torch.randint, -3, 4, generator=random, device="cpu")
    return all(
        _is_equal(cls, eps, made((2, 3, 64)).to(dtype), made((64,)).to(of_weight) / 8, epsilon)
        for dtype, of_weight in _TYPES
        for epsilon in (0.5, 1e-5)
    )


def _is_equal(cls: Any, eps: str, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> bool:
    """Tells whether a norm of this class has the bits of weight * (x / rms(x)), where that is computed and rounded."""
    module: Any = nn.Module.__new__(cls)
    nn.Module.__init__(module)
    module.weight = nn.Parameter(weight)
    setattr(module, eps, epsilon)
    if not is_plain(module):
        return False
    wide = x.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    expected = weight * (wide * inverse).to(x.dtype)
    try:
        with torch.no_grad():
            y = cls.forward(module, x)
    except Exception:  # it has more than a weight and an epsilon, or takes more than x
        return False
    return isinstance(y, torch.Tensor) and y.dtype == expected.dtype and torch.equal(y, expected)


class FusedRMSNorm(Made, nn.Module):
    """The forward of such a norm by torch.nn.functional.rms_norm, outside of graphs of torch.compile."""

    eps_name: ClassVar[str]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or is_exporting():
            return super().forward(*args, **kwargs)
        weight = self._parameters.get("weight")
        x = args[0] if len(args) == 1 and not kwargs else None
        if (
            type(x) is not torch.Tensor
            or not x.is_floating_point()
            or weight is None
            or type(weight) not in (nn.Parameter, torch.Tensor)
            or x.shape[-1:] != weight.shape
        ):
            return super().forward(*args, **kwargs)
        if self.forward_was_replaced():
            kind = self.original.__name__
            notices.warn_once(
                f"fuse {kind}", f"{kind} is no longer fused: the forward of its class was replaced"
            )
            return super().forward(*args, **kwargs)
        eps: float = getattr(self, self.eps_name)
        return weight * functional.rms_norm(x, x.shape[-1:], None, eps).to(x.dtype)
