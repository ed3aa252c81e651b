"""What the forward of a module computes, as the code of its class says, whatever its children are called.

The code of a forward runs over symbols: of its own function alone, with symbols in the place of self, x and all
globals, so that nothing of the module or of others is called. What it returns says which child reads what.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from float8.torch.layer.mlp import Beside, Names, activation_of

_ACTIVATIONS = frozenset(("silu", "gelu", "relu", "sigmoid", "mish", "selu", "elu", "leaky_relu"))
# A forward with one of these flags is called in another way than by x alone.
_OTHER_CALLS = (
    inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)  # fmt: skip
# A forward with an instruction that begins so changes what others see, or makes a function.
_STATEMENTS = ("STORE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR", "DELETE_", "IMPORT_", "MAKE_FUNCTION")


class Known(NamedTuple):
    """The linears of an MLP, its activation as a key of _ops.ACTIVATIONS, and its other children.

    Where one of these is the activation, `beside` names it, and `activation` is None.
    """

    names: Names
    activation: str | None
    beside: Beside = Beside()


class _Symbol:
    """A value of a forward that is not known: `how` it came to be, and of what.

    It can be read, called, multiplied and raised to a power, and be taken apart where it is two halves; whatever
    else is done with it is an error.
    """

    _calls: list[_Symbol]
    _how: str
    _of: tuple[Any, ...]
    __slots__ = ("_calls", "_how", "_of")
    __hash__ = object.__hash__

    def __init__(self, calls: list[_Symbol], how: str, *of: Any) -> None:
        for name, value in zip(_Symbol.__slots__, (calls, how, of), strict=True):
            object.__setattr__(self, name, value)
        if how == "call":
            calls.append(self)  # all that the forward calls

    def __getattr__(self, name: str) -> _Symbol:
        return _Symbol(self._calls, "attribute", self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> _Symbol:
        return _Symbol(self._calls, "call", self, args, kwargs)

    def __mul__(self, other: Any) -> _Symbol:
        return _Symbol(self._calls, "product", self, other)

    def __pow__(self, other: Any) -> _Symbol:
        return self.pow(other)

    def __iter__(self) -> Iterator[_Symbol]:
        if _halved(self) is None:
            raise TypeError
        return (_Symbol(self._calls, "half", self, i) for i in range(2))

    def __getitem__(self, index: Any) -> _Symbol:
        return tuple(self)[index]  # type: ignore[no-any-return]

    def __imul__(self, other: Any) -> _Symbol:  # it changes what other names stand for, too
        raise TypeError

    __ipow__ = __imul__

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError

    def __bool__(self) -> bool:
        raise TypeError

    def __eq__(self, other: object) -> bool:
        raise TypeError


def known_of(module: nn.Module) -> Known | None:
    """Returns what the forward of a module computes, None for other than an MLP."""
    kind = type(module)
    forward = kind.forward
    if kind.__getattribute__ is not object.__getattribute__:
        return None  # its children may be others than they seem
    if forward is nn.Sequential.forward:
        if kind.__iter__ is not nn.Sequential.__iter__:  # type: ignore[attr-defined]
            return None
        chain = _of_children(module)
        known = None if chain is None else _known_of(module, chain)
        if known is None:
            return None
        return known._replace(beside=known.beside._replace(of_sequential=tuple(module._modules)))
    y = _result_of(forward)
    return _known_of(module, y) if isinstance(y, _Symbol) else None


def why_unknown(cls: type[nn.Module]) -> str:
    """Returns what the forward of a class does, of which known_of knows nothing."""
    y = _result_of(cls.forward)
    return y if isinstance(y, str) else "computes something else"


def calls_an_activation(cls: type[nn.Module]) -> bool:
    """Tells whether the forward of a class reads a name that is an activation of PyTorch's."""
    code = getattr(cls.forward, "__code__", None)
    return code is not None and not _ACTIVATIONS.isdisjoint(code.co_names)


def _of_children(module: nn.Module) -> _Symbol | None:
    """Returns what a Sequential returns, None where a child is more than a linear and has some."""
    deeper = (each for each in module.children() if not isinstance(each, nn.Linear))
    if any(isinstance(each, nn.Linear) for child in deeper for each in child.modules()):
        return None
    calls: list[_Symbol] = []
    own, y = _Symbol(calls, "self"), _Symbol(calls, "x")
    for name in module._modules:
        y = getattr(own, name)(y)
    return y


@functools.lru_cache(maxsize=256)
def _result_of(forward: Any) -> _Symbol | str:
    """Returns what a forward of x alone returns, or what one does that does more than compute it."""
    if not isinstance(forward, types.FunctionType):
        return "is no function"
    code = forward.__code__
    if code.co_argcount != 2 or code.co_kwonlyargcount or code.co_flags & _OTHER_CALLS:
        return "takes other arguments than x, or is decorated"
    if code.co_freevars:
        return "calls super(), or reads variables of a function around it"
    handlers: Any = getattr(code, "co_exceptiontable", b"")  # since Python 3.11
    steps = list(dis.get_instructions(code))
    if handlers or any(each.opcode in (*dis.hasjrel, *dis.hasjabs) for each in steps):
        return "has a branch, a loop, a with or a try"
    if any(each.opname.startswith(_STATEMENTS) for each in steps) or any(
        each.startswith("__") for each in code.co_names
    ):
        return "keeps something, imports, or makes a function"
    calls: list[_Symbol] = []
    names = {
        each: _Symbol(calls, "global", forward.__globals__[each])
        for each in code.co_names
        if each in forward.__globals__
    }
    run = types.FunctionType(code, {**names, "__builtins__": {}})
    try:
        y = run(_Symbol(calls, "self"), _Symbol(calls, "x"))
    except Exception:
        return "does more than to call, multiply and square"
    if not isinstance(y, _Symbol) or {id(each) for each in calls} != _calls_in(y):
        return "calls something that its result is not made of"
    return y


def _calls_in(y: _Symbol) -> set[int]:
    """Returns the ids of the calls that a value was made by."""
    found: dict[int, _Symbol] = {}
    rest: list[Any] = [y]
    while rest:
        each = rest.pop()
        if isinstance(each, _Symbol):
            if id(each) not in found and each._how != "global":
                found[id(each)] = each
                rest += each._of
        elif isinstance(each, (tuple, list)):
            rest += each
        elif isinstance(each, dict):
            rest += each.values()
    return {key for key, each in found.items() if each._how == "call"}


def _known_of(module: nn.Module, y: _Symbol) -> Known | None:
    dropout = _dropout_of(y)
    behind, y = _through(module, y if dropout is None else dropout.x)
    down = _called(y)
    if down is None:
        return None
    between, h = _through(module, down.x)
    made = _gated(module, h) if h._how == "product" else _plain(module, h, between)
    if made is None:
        return None
    before, x = _through(module, made.up.x)
    if x._how != "x":
        return None
    names = Names(made.gate, made.up.name, down.name, made.merged, made.up_first)
    beside = Beside(
        tuple(before[::-1]), tuple(between), tuple(behind[::-1]), made.child,
        dropout.name if dropout else None,
    )  # fmt: skip
    return Known(names, made.function, beside)


class _Called(NamedTuple):
    name: str  # an attribute of self, or a key of _ops.ACTIVATIONS
    x: _Symbol


class _Made(NamedTuple):
    """How h is made: by a function, a key of _ops.ACTIVATIONS, or by a child that is the activation."""

    function: str | None
    child: str | None
    gate: str | None
    up: _Called
    merged: bool = False  # up makes gate and up
    up_first: bool = False  # in that order


class _Both(NamedTuple):
    linear: _Called
    up_first: bool


def _plain(module: nn.Module, h: _Symbol, between: list[str]) -> _Made | None:
    """Returns how h is made without a gate; it moves the activation out of `between`, and adds what it reads through."""
    function, child = _activation(h), None
    if function is not None:
        more, h = _through(module, function.x)
        between += more
    elif between:
        child = max(between, key=lambda name: _likeness(getattr(module, name, None)))
        between.remove(child)
    up = _called(h)
    if up is None or (function is None and child is None):
        return None
    return _Made(function.name if function else None, child, None, up)


def _gated(module: nn.Module, h: _Symbol) -> _Made | None:
    """Returns how a product is made with a gate."""
    for activated, other in (h._of, h._of[::-1]):
        if not (isinstance(activated, _Symbol) and isinstance(other, _Symbol)):
            return None
        function, child = _activation(activated), _called(activated)
        made = function or child
        key, own = (
            function.name if function else None,
            None if function or not child else child.name,
        )
        both = None if made is None else _merged(made.x, other)
        if both is not None and _is_linear(module, both.linear.name):
            return _Made(key, own, None, both.linear, True, both.up_first)
        gate, up = None if made is None else _called(made.x), _called(other)
        if gate is None or up is None or gate.x is not up.x:
            continue
        if not (_is_linear(module, gate.name) and _is_linear(module, up.name)):
            continue
        return _Made(key, own, gate.name, up)
    return None


def _merged(gate: _Symbol, up: _Symbol) -> _Both | None:
    """Returns the attribute of self that returned both, each as a half, and which is the first one."""
    if gate._how != "half" or up._how != "half" or gate._of[0] is not up._of[0]:
        return None
    both = _halved(gate._of[0])
    linear = None if both is None else _called(both)
    if linear is None or gate._of[1] == up._of[1]:
        return None
    return _Both(linear, gate._of[1] == 1)


def _halved(y: _Symbol) -> _Symbol | None:
    """Returns what y is two halves of, of its last dimension; None for another y."""
    if y._how != "call":
        return None
    function, args, kwargs = y._of
    if _object_of(function) is not torch.chunk:
        if function._how != "attribute" or function._of[1] != "chunk" or _object_of(function):
            return None
        args = (function._of[0], *args)  # of a method
    x, *rest = args or (None,)
    given = dict(zip(("chunks", "dim"), rest, strict=False)) | kwargs
    is_half = len(rest) <= 2 and given == {"chunks": 2, "dim": -1}
    return x if is_half and isinstance(x, _Symbol) else None


def _called(y: _Symbol) -> _Called | None:
    """Returns the attribute of self that returned y, and what it was called with."""
    if y._how != "call":
        return None
    function, args, kwargs = y._of
    name = _attribute_of_self(function)
    if name is None or len(args) != 1 or kwargs or not isinstance(args[0], _Symbol):
        return None
    return _Called(name, args[0])


def _through(module: nn.Module, y: _Symbol) -> tuple[list[str], _Symbol]:
    """Returns the attributes of self that y went through last, the last one first, and what they were given."""
    names = []
    while (call := _called(y)) is not None and not _is_linear(module, call.name):
        names.append(call.name)
        y = call.x
    return names, y


def _is_linear(module: nn.Module, name: str) -> bool:
    """Tells whether a child is a linear, or something around one, such as LoRA's."""
    child = module._modules.get(name)
    return child is not None and any(isinstance(each, nn.Linear) for each in child.modules())


def _likeness(child: Any) -> int:
    """Returns how much a child is like an activation."""
    if type(child) in (nn.Dropout, nn.Identity):
        return 0
    return 1 if activation_of(child) is None else 2


def _activation(y: _Symbol) -> _Called | None:
    """Returns the key of the function of PyTorch that returned y, and what it was called with."""
    if y._how != "call":
        return None
    function, args, kwargs = y._of
    found = _object_of(function)
    x = args[0] if args else None
    if found is functional.silu and len(args) == 1 and not kwargs:
        key = "silu"
    elif found is functional.gelu and len(args) == 1 and set(kwargs) <= {"approximate"}:
        key = {"none": "gelu", "tanh": "gelu_tanh"}.get(kwargs.get("approximate", "none"), "")
    else:
        key, x = "relu2", _relu_of(_squared(y))
    return _Called(key, x) if key and isinstance(x, _Symbol) else None


def _dropout_of(y: _Symbol) -> _Called | None:
    """Returns the attribute of self with the p of the functional.dropout that returned y, None for another y."""
    if y._how != "call" or _object_of(y._of[0]) is not functional.dropout:
        return None
    _, args, kwargs = y._of
    names = {name: _attribute_of_self(value) for name, value in kwargs.items()}
    if len(args) != 1 or set(names) != {"p", "training"} or names["training"] != "training":
        return None
    p = names["p"]
    return _Called(p, args[0]) if p and isinstance(args[0], _Symbol) else None


def _attribute_of_self(value: Any) -> str | None:
    if isinstance(value, _Symbol) and value._how == "attribute" and value._of[0]._how == "self":
        return str(value._of[1])
    return None


def _squared(y: _Symbol) -> Any:
    """Returns what y is the square of, None for another y."""
    function, args, kwargs = y._of
    if kwargs:
        return None
    name, found = function._of[1] if function._how == "attribute" else "", _object_of(function)
    if found is None:
        args = (function._of[0], *args)  # of a method
    elif found is not torch.square and found is not torch.pow:
        return None
    by = args[1] if len(args) == 2 else None
    is_two = isinstance(by, (int, float)) and by == 2
    squares = (name == "square" and len(args) == 1) or (name == "pow" and is_two)
    return args[0] if squares else None


def _relu_of(y: Any) -> Any:
    """Returns what y is the ReLU of, None for another y."""
    if not isinstance(y, _Symbol) or y._how != "call":
        return None
    function, args, kwargs = y._of
    found = _object_of(function)
    is_relu = found is functional.relu or found is torch.relu
    return args[0] if is_relu and len(args) == 1 and not kwargs else None


def _object_of(function: _Symbol) -> Any:
    """Returns the global, or what a Python module has, that a symbol stands for; None for others."""
    if function._how == "global":
        return function._of[0]
    if function._how == "attribute":
        home = _object_of(function._of[0])
        if isinstance(home, types.ModuleType):
            return getattr(home, function._of[1], None)
    return None
