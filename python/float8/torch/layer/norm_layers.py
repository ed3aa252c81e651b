"""RMSNorms, which `fuse` gives a kernel in eager mode: those of several operations, as in transformers, and PyTorch's."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from float8.torch import notices, rms_norm
from float8.torch.classes import Made
from float8.torch.layer.known_code import is_plain, names_alone
from float8.torch.layer.linear import is_exporting

_TYPES = (
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
)
_MOST_EPS = torch.finfo(torch.float32).max
# The options of rms_norm that are known: Llama's, Gemma's, and those of OLMo 2 and of torch.nn.RMSNorm.
_OPTIONS = ((0.0, "normalized"), (1.0, "once"), (0.0, "once"))


class Form(NamedTuple):
    """How a norm calls rms_norm."""

    eps: str  # the name of its epsilon
    weight_offset: float
    rounding: str
    methods: tuple[str, ...] = ()  # that its forward calls


def form_of(module: nn.Module) -> Form | None:
    """Returns the form of a norm whose forward computes that of a weight and nothing else; None for other modules."""
    weight = module._parameters.get("weight")
    if (
        list(module._parameters) != ["weight"]
        or not isinstance(weight, torch.Tensor)
        or weight.dim() != 1
        or module._modules
        or module._buffers
    ):
        return None
    if isinstance(module, nn.RMSNorm):
        is_own = type(module).forward is nn.RMSNorm.forward and _has_plain_attributes(
            type(module), ("weight", "eps")
        )
        return Form("eps", 0.0, "once") if is_own else None
    kind: Any = type(module)
    names = [name for name, value in module.__dict__.items() if type(value) is float]
    form = _known_form(kind, names[0]) if len(names) == 1 else None
    return None if form is None or any(x in module.__dict__ for x in form.methods) else form


def is_like(module: nn.Module) -> bool:
    """Tells whether a module looks like an RMSNorm: by the name of its class, or since a weight is all that it has."""
    name = type(module).__name__
    return (
        "RMSNorm" in name
        or isinstance(module, nn.RMSNorm)
        or (
            "Norm" in name
            and list(module._parameters) == ["weight"]
            and not isinstance(module, nn.LayerNorm)
        )
    )


def _has_plain_attributes(cls: type[nn.Module], names: tuple[str, ...]) -> bool:
    """Tells whether attributes of a module are what it keeps by these names, and no properties."""
    return (
        all(inspect.getattr_static(cls, name, None) is None for name in names)
        and cls.__getattr__ is nn.Module.__getattr__
        and cls.__getattribute__ is object.__getattribute__
    )


@functools.lru_cache(maxsize=256)
def _known_form(cls: type[nn.Module], eps: str) -> Form | None:
    """Returns the form whose bits the forward of a class has, where sums are exact.

    What it does does not depend on values (known_code.py), and its weight and epsilon are no properties.
    """
    if not _has_plain_attributes(cls, ("weight", eps)):
        return None
    methods = _methods_of_plain(cls, eps)
    if methods is None:
        return None
    module: Any = nn.Module.__new__(cls)
    nn.Module.__init__(module)
    module.weight = nn.Parameter(torch.ones(64, device="cpu"))
    setattr(module, eps, 1.0)
    if not is_plain(module):
        return None
    for options in _OPTIONS:
        form = Form(eps, *options, methods)
        if _has_form(module, form):
            return form
    return None


def _methods_of_plain(cls: type[nn.Module], eps: str) -> tuple[str, ...] | None:
    """Returns the methods of its class that a forward calls, None where they or it name more than operations."""
    called: dict[str, None] = {}
    found: list[Any] = [cls.forward]
    for each in found:
        if not isinstance(each, types.FunctionType):
            return None
        methods = {
            name: method
            for name in each.__code__.co_names
            if not hasattr(nn.Module, name)
            and isinstance(method := inspect.getattr_static(cls, name, None), types.FunctionType)
        }
        if not names_alone(each.__code__, of_self=("weight", eps, *methods)):
            return None
        called.update(dict.fromkeys(methods))
        found += [method for method in methods.values() if method not in found]
    return tuple(called)


def _has_form(module: Any, form: Form) -> bool:
    """Tells whether the forward of a module has the bits of a form for weights of any bits, also where squares overflow or are 0."""
    random = torch.Generator().manual_seed(0)
    made = functools.partial(torch.randint, -3, 4, generator=random, device="cpu")

    def weight() -> torch.Tensor:
        return torch.randn(64, generator=random, device="cpu")

    return all(
        _is_equal(
            module, form, (made((2, 3, 64)) * scale).to(dtype), weight().to(of_weight), epsilon
        )
        for dtype, of_weight in _TYPES
        for epsilon in (0.5, 1e-5, 0.0)
        for scale in (1.0, 2.0**40, 2.0**70, 2.0**-40, 2.0**-70, 0.0)
    )


def _is_equal(
    module: Any, form: Form, x: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> bool:
    """Tells whether a norm with this weight and epsilon has the bits of a form."""
    module.weight = nn.Parameter(weight)
    setattr(module, form.eps, epsilon)
    expected = rms_norm.by_operations(x, weight, epsilon, form.weight_offset, form.rounding)
    version = x._version
    try:
        with torch.no_grad():
            y = type(module).forward(module, x)
    except Exception:  # it has more than a weight and an epsilon, or takes more than x
        return False
    if not isinstance(y, torch.Tensor) or y.dtype != expected.dtype or x._version != version:
        return False
    return y.shape == expected.shape and bool(
        ((y == expected) | (y.isnan() & expected.isnan())).all()
    )


class FusedRMSNorm(Made, nn.Module):
    """The forward of such a norm by the kernel, outside of graphs of torch.compile.

    Where that cannot compute it, Llama's are PyTorch's rms_norm and a product, and others are computed as they are written.
    """

    float8_norm_form: ClassVar[Form]
    float8_norm_emulate: ClassVar[bool]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or is_exporting() or torch._C._get_tracing_state():
            return super().forward(*args, **kwargs)
        weight: Any = self._parameters.get("weight")
        if weight is None:  # FSDP1 has gathered weights as plain attributes
            weight = self.weight
        x = args[0] if len(args) == 1 and not kwargs else None
        if (
            type(x) is not torch.Tensor
            or not x.is_floating_point()
            or weight is None
            or type(weight) not in (nn.Parameter, torch.Tensor)
            or x.shape[-1:] != weight.shape
        ):
            return super().forward(*args, **kwargs)
        form = self.float8_norm_form
        if self.float8_forward_was_replaced(form.methods):
            kind = self.float8_original.__name__
            notices.warn_once(
                f"fuse {kind}",
                f"{kind} is no longer fused: the forward of its class, or a method that it calls, was replaced",
            )
            return super().forward(*args, **kwargs)
        # torch.nn.RMSNorm computes in another type under autocast, and an epsilon of None is that of float32.
        of_torch = isinstance(self, nn.RMSNorm)
        eps: Any = getattr(self, form.eps)
        if eps is None and of_torch:
            eps = torch.finfo(torch.float32).eps
        if type(eps) is not float or not 0 <= eps < _MOST_EPS:
            return super().forward(*args, **kwargs)
        if rms_norm.fits(x, weight, self.float8_norm_emulate) and not (
            of_torch and torch.is_autocast_enabled(x.device.type)
        ):
            return rms_norm.by_kernel(
                x, weight, eps, form.weight_offset, form.rounding, self.float8_norm_emulate
            )
        if form.rounding == "normalized":
            return weight * functional.rms_norm(x, x.shape[-1:], None, eps).to(x.dtype)
        return super().forward(*args, **kwargs)
