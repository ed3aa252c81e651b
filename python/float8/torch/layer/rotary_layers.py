"""Modules whose forward gives queries and keys their rotary positions by a function, which `fuse` replaces."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from float8.torch import notices, rotary
from float8.torch.classes import Made
from float8.torch.layer.known_code import globals_of, is_plain, reached
from float8.torch.layer.linear import is_exporting

_PROBES = ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32))
_MIXED = (torch.bfloat16, torch.float32)


class Form(NamedTuple):
    """How a function is called that has the bits of rotary.by_operations."""

    dims: int  # of cos and sin: 3, [B or 1, S, D], or 2, [S, D]
    rounds: bool  # cos and sin to q's type, before they are multiplied


class Found(NamedTuple):
    """A function of rotary positions that a forward calls by its name."""

    name: str
    form: Form | None  # None: it computes something else
    why: str = ""


def found_in(cls: type[nn.Module]) -> Found | None:
    """Returns the function of rotary positions that the forward of a class calls, None where it names none.

    It is one whose arguments are q, k, cos and sin, in this order and before others.
    """
    forward: Any = cls.forward
    if not isinstance(forward, types.FunctionType):
        return None
    written = inspect.unwrap(forward)
    for name in globals_of(written.__code__):
        function = written.__globals__.get(name)
        if not isinstance(function, types.FunctionType) or _arguments(function)[2:4] != (
            "cos",
            "sin",
        ):
            continue
        if hasattr(forward, "__wrapped__"):
            return Found(name, None, "its forward has a decorator")
        form = form_of(function)
        why = (
            "" if form else f"{name} computes other than x cos + rotate_half(x) sin of whole heads"
        )
        return Found(name, form, why)
    return None


def _arguments(function: types.FunctionType) -> tuple[str, ...]:
    code = function.__code__
    return code.co_varnames[: code.co_argcount]


def form_of(function: types.FunctionType) -> Form | None:
    """Returns how a function is called that has the bits of rotary.by_operations, None for another function.

    What it does does not depend on values (known_code.py), and it has these bits for random heads.
    """
    own = reached(function)
    return None if own is None else _form_of(own)


@functools.lru_cache(maxsize=256)
def _form_of(functions: tuple[types.FunctionType, ...]) -> Form | None:
    """Returns the form of the first function, which calls the others."""
    function = functions[0]
    if not is_plain(function):
        return None
    for dims in (3, 2):
        if all(_is_equal(function, dims, *types_) for types_ in _PROBES):
            for rounds in (False, True):
                if _is_equal(function, dims, *_MIXED, rounds):
                    return Form(dims, rounds)
    return None


def _is_equal(
    function: Callable[..., Any],
    dims: int,
    dtype: torch.dtype,
    of_cos: torch.dtype,
    rounds: bool = False,
) -> bool:
    random = torch.Generator().manual_seed(0)
    made = functools.partial(torch.randn, generator=random, device="cpu")
    return all(
        _is_equal_for(
            function,
            *(made(batch, each, tokens, dim).to(dtype) for each in heads),
            *(made(batch, tokens, dim).to(of_cos) for _ in range(2)),
            dims=dims,
            rounds=rounds,
        )
        for batch, heads, tokens, dim in ((2, (3, 2), 5, 32), (3, (1, 4), 7, 48))
    )


def _is_equal_for(
    function: Callable[..., Any],
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    dims: int,
    rounds: bool,
) -> bool:
    if dims == 2:
        cos, sin = cos[0], sin[0]
    try:
        y = function(q, k, cos, sin)
    except Exception:  # of other shapes, or types
        return False
    if dims == 2:
        cos, sin = cos[None], sin[None]
    if rounds:
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
    expected = rotary.by_operations(q, k, cos, sin)
    return (
        isinstance(y, tuple)
        and len(y) == 2
        and all(
            isinstance(a, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
            for a, b in zip(y, expected, strict=True)
        )
    )


class FusedRotary(Made, nn.Module):
    """The forward of a module's own class, in which one launch gives queries and keys their positions.

    In graphs of torch.compile, whose kernels read and write as little, it is the class's own.
    """

    float8_rotary_name: ClassVar[str]
    float8_rotary_form: ClassVar[Form]
    float8_rotary_emulate: ClassVar[bool]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or is_exporting():
            return super().forward(*args, **kwargs)
        forward = _forward_of(
            self.float8_original.forward,
            self.float8_rotary_name,
            self.float8_rotary_form,
            self.float8_rotary_emulate,
        )
        if forward is None:
            notices.warn_once(
                f"fuse {self.float8_original.__name__} rotary",
                f"{self.float8_original.__name__} no longer has its rotary positions in one launch: its forward, "
                f"{self.float8_rotary_name} or what that calls was replaced",
            )
            return super().forward(*args, **kwargs)
        return forward(self, *args, **kwargs)


def _forward_of(forward: Any, name: str, form: Form, emulate: bool) -> Any:
    """Returns a forward whose function of this name is the kernel's, None where one of both is no longer the same."""
    if not isinstance(forward, types.FunctionType):
        return None
    function = forward.__globals__.get(name)
    if not isinstance(function, types.FunctionType):
        return None
    functions = reached(function)
    return None if functions is None else _replaced(forward, functions, name, form, emulate)


class _Globals(dict[str, Any]):
    """The globals of a function but for one name. The others are looked up where they are, as they are then."""

    def __init__(self, globals_: dict[str, Any], name: str, value: Any) -> None:
        super().__init__({name: value, "__builtins__": globals_["__builtins__"]})
        self._globals = globals_

    def __missing__(self, name: str) -> Any:
        return self._globals[name]


def _positions(q: Any, cos: Any, sin: Any, form: Form) -> Any:
    """Returns cos and sin as the kernel takes them, None where they are other than the form's."""
    if not all(isinstance(x, torch.Tensor) for x in (q, cos, sin)) or cos.dim() != form.dims:
        return None
    if form.rounds:
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
    return (cos, sin) if form.dims == 3 else (cos[None], sin[None])


@functools.lru_cache(maxsize=256)
def _replaced(
    forward: types.FunctionType,
    functions: tuple[types.FunctionType, ...],
    name: str,
    form: Form,
    emulate: bool,
) -> Any:
    if _form_of(functions) != form:
        return None
    function = functions[0]

    @functools.wraps(function)
    def turned(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs:
            own = _positions(q, cos, sin, form)
            if own is not None and rotary.fits(q, k, own[0], own[1], emulate):
                return rotary.turn(q, k, own[0], own[1], emulate)
        return function(q, k, cos, sin, *args, **kwargs)

    own = _Globals(forward.__globals__, name, turned)
    copy = types.FunctionType(
        forward.__code__, own, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy
