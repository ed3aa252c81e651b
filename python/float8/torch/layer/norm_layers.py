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
from float8.torch.classes import Made, check_class, known_of
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
    weight: str = "weight"  # the name of its weight
    one_type: bool = False  # of an x in the weight's type alone


_registered: dict[type[nn.Module], Form] = {}


def register_norm(
    cls: type[nn.Module],
    *,
    weight: str = "weight",
    eps: str = "eps",
    weight_offset: float = 0.0,
    rounding: str = "once",
) -> None:
    """Tells `fuse(norms=True)` of a class of RMSNorms whose forward takes x alone.

    weight, eps: the names of its only parameter, of one dimension, and of its epsilon, a float.
    weight_offset, rounding: how it computes, as functional.rms_norm has them. fuse compares each module with that for
        a few tensors, and leaves one that computes something else; what is rounded in between is taken on trust.
    Subclasses with a forward of their own are not meant. An x in another type than the weight's is computed by the
    class's own forward.
    """
    check_class("register_norm", cls)
    for name in (weight, eps):
        if not isinstance(name, str) or not name:
            raise ValueError(f"float8: weight and eps are names of attributes, not {name!r}")
    rms_norm.check_form(weight_offset, rounding)
    _registered[cls] = Form(eps, float(weight_offset), rounding, weight=weight, one_type=True)


def registered_form(module: nn.Module) -> Form | None:
    """Returns what register_norm said of a module's class."""
    return known_of(module, _registered, {})


def obstacle_of_registered(module: nn.Module, form: Form) -> str | None:
    """Returns why a norm is not what register_norm said of its class."""
    given = {name: each for name, each in module._parameters.items() if each is not None}
    weight = given.get(form.weight)
    if weight is None or len(given) > 1 or weight.dim() != 1:
        return f"its only parameter is not {form.weight!r}, of one dimension, which register_norm names"
    if type(getattr(module, form.eps, None)) is not float:
        return f"its {form.eps!r}, which register_norm names, is not a float"
    is_here = type(weight.data) is torch.Tensor and not weight.is_meta and weight.numel() > 0
    if is_here and not _is_close(module, form, weight.detach()):
        return "its forward does not compute what register_norm said of its class"
    return None


def _is_close(module: nn.Module, form: Form, weight: torch.Tensor) -> bool:
    """Tells whether a norm computes a form of an x in its weight's type, also where its epsilon counts."""
    eps = getattr(module, form.eps)
    random = torch.Generator().manual_seed(0)
    for scale in (1.0, eps**0.5):
        x = torch.randn(2, 3, weight.numel(), generator=random, device="cpu") * scale
        x = x.to(weight.device, weight.dtype)
        expected = rms_norm.by_operations(x, weight, eps, form.weight_offset, form.rounding)
        y = _result_of(module, x.clone(), expected)
        if type(y) is not torch.Tensor:
            return False
        if not torch.allclose(y.float(), expected.float(), rtol=0.02, atol=0.02):
            return False
    return True


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
    y = _result_of(module, x, expected)
    if y is None or x._version != version:
        return False
    return bool(((y == expected) | (y.isnan() & expected.isnan())).all())


def _result_of(module: Any, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
    """Returns what the forward of a module's class makes of x, None where it is no tensor of this type and shape."""
    try:
        with torch.no_grad():
            y = type(module).forward(module, x)
    except Exception:  # it has more than a weight and an epsilon, or takes more than x
        return None
    is_like = isinstance(y, torch.Tensor) and (y.dtype, y.shape) == (like.dtype, like.shape)
    return y if is_like else None


class FusedRMSNorm(Made, nn.Module):
    """The forward of such a norm by the kernel, outside of graphs of torch.compile.

    Where that cannot compute it, Llama's are PyTorch's rms_norm and a product, and others are computed as they are written.
    """

    float8_norm_form: ClassVar[Form]
    float8_norm_emulate: ClassVar[bool]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or is_exporting() or torch._C._get_tracing_state():
            return super().forward(*args, **kwargs)
        form = self.float8_norm_form
        weight: Any = self._parameters.get(form.weight)
        if weight is None:  # FSDP1 has gathered weights as plain attributes
            weight = getattr(self, form.weight)
        x = args[0] if len(args) == 1 and not kwargs else None
        if (
            type(x) is not torch.Tensor
            or not x.is_floating_point()
            or weight is None
            or type(weight) not in (nn.Parameter, torch.Tensor)
            or x.shape[-1:] != weight.shape
            or (form.one_type and x.dtype != weight.dtype)
        ):
            return super().forward(*args, **kwargs)
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
