"""Runs the code of a forward over symbols, for a class, or for one module, whose children it steps into.

For a class nothing of a module is known, and the code has no branches. For a module attributes that are None, a
bool or a string are what they are, so that branches on them are followed, as are loops over children, methods of the module, functions of
Python, and the forwards of children that hold linears. All that this relied on is noted in the run.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from float8.torch.layer.mlps.symbols import Symbol, attribute_of_self, is_device_type, object_of

_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# A forward with one of these flags is called in another way than by x alone.
_OTHER_CALLS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | _GENERATORS
# A forward with an instruction that begins so changes what others see, or makes a function.
_STATEMENTS = ("STORE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR", "DELETE_", "IMPORT_", "MAKE_FUNCTION")
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_MOST_CALLS = 8  # within each other
# What attributes of tensors are never None.
_SURE = ("device", "dtype", "shape")


class Unknown(Exception):
    """The code does what symbols do not tell of."""


class Run:
    """A forward that runs over symbols.

    module: whose forward it is; None: that of any module of a class.
    steps_into: tells whether a child's own forward is to be run.
    calls: all calls whose result is a symbol.
    settings: the attributes that were read as values, by the path of their module and their name, and `...` for those
        that are not None where code asks for that.
    children: the names of the children of each list of modules that was gone through, by its path.
    entered: the classes of the modules whose forward ran too, by their paths.
    code: the classes and Python modules, and the names that were read of them.
    """

    def __init__(
        self, module: nn.Module | None = None, steps_into: Callable[[nn.Module], bool] | None = None
    ) -> None:
        self.module, self.steps_into = module, steps_into
        self.calls: list[Symbol] = []
        self.settings: dict[tuple[str, str], Any] = {}
        self.children: dict[str, tuple[str, ...]] = {}
        self.entered: dict[str, type[nn.Module]] = {}
        self.code: dict[tuple[type[nn.Module] | str, str], None] = {}
        self._depth = 0
        self._compares_none = False
        self._maybe_none: dict[int, Symbol] = {}  # attributes of values that were not called
        self._given: dict[tuple[str, str], None] = {}  # attributes of modules that are not None

    def forward(self) -> Symbol:
        """Returns what the module's forward of x alone returns."""
        assert self.module is not None
        y = self._enter(type(self.module), "", (Symbol(self, "x"),), {})
        if not isinstance(y, Symbol) or not self.is_all_of(y):
            raise Unknown
        if self._compares_none:
            if self._maybe_none:
                raise Unknown
            self.settings = {**dict.fromkeys(self._given, ...), **self.settings}
        return y

    def is_all_of(self, y: Symbol) -> bool:
        """Tells whether y is made of all calls."""
        return {id(each) for each in self.calls} == _calls_in(y)

    def attribute(self, of: Symbol, name: str) -> Any:
        """Returns an attribute of a symbol, as a value where it is a setting of a module."""
        made = Symbol(self, "attribute", of, name)
        if self.module is None:
            return made
        path = self.path_of(of)
        if path is None:
            if object_of(made) is None and name not in _SURE and not is_device_type(made):
                self._maybe_none[id(made)] = made
            return made
        owner: Any = self._at(path)
        if name == "training":
            return made
        own = {**owner._parameters, **owner._buffers, **owner._modules}
        value = own[name] if name in own else inspect.getattr_static(owner, name)
        if value is None or type(value) in (bool, str):
            self.settings[path, name] = value
            return value
        is_own = name in own or name in owner.__dict__ or inspect.isfunction(value)
        if not is_own and hasattr(type(value), "__get__"):
            raise Unknown  # computed by each read
        if not inspect.isfunction(value):
            self._given[path, name] = None
        return made

    def call(self, function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what a call returns: a symbol of it, or what the code that is called makes."""
        self._maybe_none.pop(id(function), None)
        if self.module is not None:
            before = {name: value.copy() for name, value in vars(self).items() if name in _NOTED}
            try:
                return self._called(function, args, kwargs)
            except Exception:
                vars(self).update(before)
        return Symbol(self, "call", function, args, kwargs)

    def _called(self, function: Symbol, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path = self.path_of(function)
        if path is not None:
            child = self._at(path)
            if self.steps_into is None or not self.steps_into(child):
                raise Unknown
            return self._enter(type(child), path, args, kwargs)
        if function._how == "attribute":
            owner, name = function._of
            path = self.path_of(owner)
            if path is not None:
                method = inspect.getattr_static(self._at(path), name)
                kind = type(self._at(path))
                if getattr(kind, name, None) is not method:
                    raise Unknown  # no method, or one of the module itself
                self.code[kind, name] = None
                return self._call(method, (Symbol(self, "self", path), *args), kwargs)
            home = object_of(owner)
            if isinstance(home, types.ModuleType):
                self.code[home.__name__, name] = None
        found = object_of(function)
        if not isinstance(found, types.FunctionType) or found.__module__.startswith("torch."):
            raise Unknown
        return self._call(found, args, kwargs)

    def _enter(
        self, kind: type[nn.Module], path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        module: Any = self._at(path)
        is_plain = kind.__getattribute__ is object.__getattribute__
        if not is_plain or kind.__call__ is not nn.Module.__call__ or "forward" in module.__dict__:
            raise Unknown  # its children, or its call, may be others than they seem
        if path:
            self.entered[path] = kind
            self.code[kind, "forward"] = None
        return self._call(kind.forward, (Symbol(self, "self", path), *args), kwargs)

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function of Python over symbols."""
        if not isinstance(function, types.FunctionType) or self._depth == _MOST_CALLS:
            raise Unknown
        code = function.__code__
        if code.co_freevars or code.co_flags & _GENERATORS or _statement_in(code) is not None:
            raise Unknown
        self._compares_none |= _compares_none(code)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if not all(each is None or type(each) in (bool, int, float, str) for each in defaults):
            raise Unknown
        home = sys.modules.get(function.__globals__["__name__"])
        if home is None or home.__dict__ is not function.__globals__:
            raise Unknown
        names: dict[str, Any] = {"__builtins__": {"len": len}}
        for name in code.co_names:
            if name not in function.__globals__:
                continue
            self.code[home.__name__, name] = None
            value = function.__globals__[name]
            is_value = value is None or type(value) is bool
            names[name] = value if is_value else Symbol(self, "global", value)
        run = types.FunctionType(code, names, code.co_name, function.__defaults__)
        run.__kwdefaults__ = function.__kwdefaults__
        self._depth += 1
        try:
            return run(*args, **kwargs)
        finally:
            self._depth -= 1

    def is_one(self, value: Any) -> bool:
        """Tells whether a product with a value is what it is without it."""
        if self.module is None:
            return False
        path, _, name = (attribute_of_self(value) or "").rpartition(".")
        if name:
            number = inspect.getattr_static(self._at(path), name, None)
            if type(number) is float and number == 1:
                self.settings[path, name] = number
                return True
        return type(value) in (int, float) and value == 1

    def children_of(self, value: Symbol) -> list[Symbol] | None:
        """Returns the children of a list of modules, None for another value."""
        path = self.path_of(value)
        if path is None:
            return None
        of: Any = self._at(path)
        if getattr(type(of), "__iter__", None) not in _LISTS:
            return None
        self.children[path] = tuple(of._modules)
        return [Symbol(self, "attribute", value, name) for name in of._modules]

    def path_of(self, value: Symbol) -> str | None:
        """Returns the path of a symbol that is the module or one below, None for another value."""
        if self.module is None:
            return None
        path = value._of[0] if value._how == "self" else attribute_of_self(value)
        return path if path is not None and isinstance(self._at(path), nn.Module) else None

    def _at(self, path: str) -> Any:
        found: Any = self.module
        for name in path.split(".") if path else ():
            found = None if found is None else found._modules.get(name)
        return found


# What a call that is not followed leaves as it was.
_NOTED = ("calls", "settings", "children", "entered", "code", "_maybe_none", "_given")
_LISTS = (nn.ModuleList.__iter__, nn.Sequential.__iter__)


@functools.lru_cache(maxsize=256)
def result_of(forward: Any) -> Symbol | str:
    """Returns what a forward of x alone returns, or what one does that does more than compute it."""
    if not isinstance(forward, types.FunctionType):
        return "is no function"
    code = forward.__code__
    if code.co_argcount != 2 or code.co_kwonlyargcount or code.co_flags & _OTHER_CALLS:
        return "takes other arguments than x, or is decorated"
    if code.co_freevars:
        return "calls super(), or reads variables of a function around it"
    if _has_handlers(code) or any(each.opcode in _JUMPS for each in dis.get_instructions(code)):
        return "has a branch, a loop, a with or a try"
    if (why := _statement_in(code)) is not None:
        return why
    run = Run()
    names = {
        each: Symbol(run, "global", forward.__globals__[each])
        for each in code.co_names
        if each in forward.__globals__
    }
    function = types.FunctionType(code, {**names, "__builtins__": {}})
    try:
        y = function(Symbol(run, "self", ""), Symbol(run, "x"))
    except Exception:
        return "does more than to call, multiply and square"
    if not isinstance(y, Symbol) or not run.is_all_of(y):
        return "calls something that its result is not made of"
    return y


def _has_handlers(code: types.CodeType) -> bool:
    """Tells whether code has a with or a try."""
    steps = dis.get_instructions(code)
    since_311 = getattr(code, "co_exceptiontable", b"")
    return bool(since_311) or any(each.opname.startswith("SETUP_") for each in steps)


def _statement_in(code: types.CodeType) -> str | None:
    """Returns what code does that a run does not, None where it does nothing of that."""
    steps = list(dis.get_instructions(code))
    if any(each.opname.startswith(_STATEMENTS) for each in steps) or any(
        each.startswith("__") for each in code.co_names
    ):
        return "keeps something, imports, or makes a function"
    at = {each.offset: each for each in steps}
    for each in steps:
        # A loop over what is known to end: `for`, whose end jumps back to its begin.
        is_back = each.opcode in _JUMPS and each.argval <= each.offset
        if is_back and at[each.argval].opname != "FOR_ITER":
            return "has a loop that may not end"
    return "has a with or a try" if _has_handlers(code) else None


def _compares_none(code: types.CodeType) -> bool:
    """Tells whether code asks for an identity, of which a symbol tells that it is not None."""
    steps = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    found = False
    for before, each in zip([None, *steps], steps, strict=False):
        if each.opname == "IS_OP":
            if before is None or before.opname != "LOAD_CONST" or before.argval is not None:
                raise Unknown
            found = True
        found |= "NONE" in each.opname
    return found


def _calls_in(y: Symbol) -> set[int]:
    """Returns the ids of the calls that a value was made by."""
    found: dict[int, Symbol] = {}
    rest: list[Any] = [y]
    while rest:
        each = rest.pop()
        if isinstance(each, Symbol):
            if id(each) not in found and each._how not in ("global", "self"):
                found[id(each)] = each
                rest += each._of
        elif isinstance(each, (tuple, list)):
            rest += each
        elif isinstance(each, dict):
            rest += each.values()
        elif isinstance(each, slice):
            rest += (each.start, each.stop, each.step)
    return {key for key, each in found.items() if each._how == "call"}
