"""Classes of modules: those that are known by their names, and those that a conversion makes of a module's own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from torch import nn

Known = TypeVar("Known")
_made: dict[tuple[Any, ...], type[nn.Module]] = {}
_forwards: dict[type[nn.Module], tuple[Any, ...]] = {}
_code: dict[tuple[type[nn.Module] | str, str], Any] = {}


class Made:
    """What a class that `subclass` makes has before its own class."""

    float8_original: ClassVar[type[nn.Module]]
    float8_made_of: ClassVar[tuple[Any, ...]] = ()  # of a class with a name of its own

    def float8_forward_was_replaced(self, methods: tuple[str, ...] = ()) -> bool:
        """Tells whether the module has another forward of its own class than note_forward saw.

        methods: those that the forward calls, of which the module may also have one of its own.
        """
        own = _code_of(self.float8_original, methods)
        noted = _forwards.setdefault(self.float8_original, own)
        return noted != own or any(name in self.__dict__ for name in methods)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickle looks for a class by its name, which one that is made here has not.
        reduced: Any = super().__reduce_ex__(protocol)
        return (_empty, self.float8_made_of, *reduced[2:]) if self.float8_made_of else reduced


def note_forward(original: type[nn.Module], methods: tuple[str, ...] = ()) -> None:
    """Remembers the forward of a class whose modules get another class, which stands for that forward.

    methods: those that the forward calls.
    """
    _forwards[original] = _code_of(original, methods)


def _code_of(original: Any, methods: tuple[str, ...]) -> tuple[Any, ...]:
    return (original.forward, *(getattr(original, name, None) for name in methods))


def note_code(owner: type[nn.Module] | str, name: str) -> None:
    """Remembers what a class, or a module of Python by its name, has by a name."""
    _code[owner, name] = _named(owner, name)


def code_was_replaced(owner: type[nn.Module] | str, name: str) -> bool:
    """Tells whether a class or a module of Python has something else by a name than note_code saw."""
    now = _named(owner, name)
    return _code.setdefault((owner, name), now) is not now


def _named(owner: type[nn.Module] | str, name: str) -> Any:
    return getattr(sys.modules.get(owner) if isinstance(owner, str) else owner, name, None)


def subclass(
    first: type[Made], original: type[nn.Module], prefix: str = "Float8", /, **attributes: Any
) -> type[nn.Module]:
    """Returns the subclass of a module's class that has the methods of `first` before its own, made once.

    attributes: of the class, hashable.
    """
    key = (first, original, prefix, tuple(attributes.items()))
    if key not in _made:
        own = {
            "__module__": original.__module__,
            "float8_original": original,
            "float8_made_of": key,
        }
        _made[key] = type(f"{prefix}{original.__name__}", (first, original), {**own, **attributes})
    return _made[key]


def _empty(
    first: type[Made],
    original: type[nn.Module],
    prefix: str,
    attributes: tuple[tuple[str, Any], ...],
) -> nn.Module:
    """Makes a module without contents, for pickle and deepcopy."""
    made = subclass(first, original, prefix, **dict(attributes))
    return made.__new__(made)


def check_class(call: str, cls: Any) -> None:
    """Refuses what is no class of modules."""
    if not isinstance(cls, type) or not issubclass(cls, nn.Module):
        raise TypeError(f"float8: {call} takes a class of nn.Module, not {cls!r}")


def is_sharded(module: nn.Module) -> bool:
    """Tells whether a module has the class that fully_shard makes, of FSDPModule and the module's own."""
    return any(each.__name__ == "FSDPModule" for each in type(module).__mro__)


def known_of(
    module: nn.Module,
    registered: Mapping[type[nn.Module], Known],
    named: Mapping[tuple[str, str], Known],
) -> Known | None:
    """Returns what is known of a module's forward, None for another module.

    registered: by the class that has the forward.
    named: by the beginning of its module in Python, and its name.
    """
    for cls in type(module).__mro__:
        if cls.__dict__.get("forward") is None:
            continue  # fully_shard makes a class in front
        if cls in registered:
            return registered[cls]
        for (package, name), known in named.items():
            if cls.__name__ == name and cls.__module__.startswith(package):
                return known
        return None
    return None
