"""The two halves of what one linear makes, as the code of a forward takes them apart.

They are those of the last dimension: chunk, split, slices, or unbind and items of an unflatten or a view into two.
Where a size is given, it is a number, or one that a module has as an attribute, and is half of what the linear makes.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from torch import nn

from float8.torch.layer.mlps.symbols import (
    Call,
    Symbol,
    called,
    called_by_name,
    last_size_of,
    leading_of,
    matches,
)


class Size(NamedTuple):
    """A size as the code says it: a number, the path of one from self, or () for the last size of both."""

    of: int | tuple[str, ...]
    over: int = 1


class Half(NamedTuple):
    both: Symbol  # what has both
    at: int  # 0: the first one
    size: Size | None = None  # where the code gives it


def half_of(module: nn.Module, y: Symbol) -> Half | None:
    """Returns which half y is, in a forward of the module; None for another y."""
    if y._how != "item":
        return None
    of, index = y._of
    return _of_slice(module, of, index) or _of_pieces(module, of, index)


def _of_slice(module: nn.Module, both: Symbol, index: Any) -> Half | None:
    """Returns the half that both[..., :n] or both[..., n:] is."""
    if type(index) is not tuple or len(index) != 2 or index[0] is not ...:
        return None
    cut = index[1]
    if type(cut) is not slice or not (cut.step is None or matches(cut.step, 1)):
        return None
    if cut.start is None or matches(cut.start, 0):
        n, at = cut.stop, 0
    elif cut.stop is None:
        n, at = cut.start, 1
    else:
        return None
    size = _half_size(module, both, n)
    return None if size is None else Half(both, at, size)


def _of_pieces(module: nn.Module, pieces: Symbol, index: Any) -> Half | None:
    """Returns the half that an item of a chunk, a split or an unbind is, or an item of both as two rows."""
    if type(index) is tuple:  # [..., i, :]
        is_row = len(index) == 3 and matches((index[0], index[2]), (..., slice(None)))
        found = _rows(module, pieces) if is_row else None
        index = index[1] if is_row else None
    else:
        found = _chunked(pieces) or _split(module, pieces) or _unbound(module, pieces)
    if found is None or type(index) is not int or not -2 <= index < 2:
        return None
    return found._replace(at=index % 2)


def _chunked(pieces: Symbol) -> Half | None:
    """Returns the half that is the first one of a chunk into two."""
    call = called_by_name(pieces, "chunk")
    is_two = call is not None and matches(call.given("chunks", "dim"), {"chunks": 2, "dim": -1})
    return Half(call.x, 0) if call is not None and is_two else None


def _split(module: nn.Module, pieces: Symbol) -> Half | None:
    """Returns the half that is the first one of a split into two."""
    call = called_by_name(pieces, "split")
    if call is None:
        return None
    # A method and a function name the size in two ways.
    name = next((each for each in _SPLIT_SIZES if each in call.kwargs), _SPLIT_SIZES[0])
    given = call.given(name, "dim")
    if given is None or given.keys() != {name, "dim"} or not matches(given["dim"], -1):
        return None
    sizes = given[name]
    if type(sizes) not in (list, tuple):
        sizes = (sizes, sizes)
    made = {_half_size(module, call.x, each) for each in sizes}
    size = made.pop() if len(made) == 1 else None
    return Half(call.x, 0, size) if size is not None and len(sizes) == 2 else None


_SPLIT_SIZES = ("split_size", "split_size_or_sections")


def _unbound(module: nn.Module, pieces: Symbol) -> Half | None:
    """Returns the half that is the first one of an unbind of two rows."""
    call = called_by_name(pieces, "unbind")
    is_of_rows = call is not None and matches(call.given("dim"), {"dim": -2})
    return _rows(module, call.x) if call is not None and is_of_rows else None


def _rows(module: nn.Module, y: Symbol) -> Half | None:
    """Returns the first half of what y has as two rows, [..., 2, n]."""
    call = called_by_name(y, "unflatten", "view", "reshape")
    if call is None:
        return None
    sizes: Any
    if call.name == "unflatten":
        given = call.given("dim", "sizes") or {}
        sizes = given.pop("sizes", None)
        fits = matches(given, {"dim": -1})
    else:
        leading, *sizes = _sizes_of(call) or (None,)
        of = leading_of(leading)
        linear = called(call.x)
        # A linear leaves all sizes of what it reads but the last one.
        fits = of is not None and (of is call.x or (linear is not None and of is linear.x))
    if not fits or type(sizes) not in (list, tuple) or len(sizes) != 2:
        return None
    first, n = sizes
    if not matches(first, 2):
        return None
    size = None if matches(n, -1) else _half_size(module, call.x, n)
    return Half(call.x, 0, size) if size is not None or matches(n, -1) else None


def _sizes_of(call: Call) -> tuple[Any, ...]:
    """Returns the sizes of a view or a reshape, none where they are given by name."""
    if call.kwargs:
        return ()
    alone = call.args[0] if len(call.args) == 1 else None
    return tuple(alone) if isinstance(alone, (list, tuple)) else call.args


def _half_size(module: nn.Module, both: Symbol, n: Any) -> Size | None:
    """Returns how code says n, None where it is not known to be half of the last size of both."""
    linear = called(both)
    made = None
    if linear is not None:
        made = _number(module, (*linear.name.split("."), "out_features"))
    size = _said(both, n)
    if made is None or size is None:
        return None
    of = size.of
    if not isinstance(of, int):
        of = made if of == () else _number(module, of) or 0
    return size if 2 * (of // size.over) == made else None


def _said(both: Symbol, n: Any) -> Size | None:
    """Returns a size as code says it, None where it says it in another way."""
    if isinstance(n, Symbol) and n._how == "quotient":
        of, by = _said(both, n._of[0]), n._of[1]
        return of._replace(over=of.over * by) if of and type(by) is int and by > 0 else None
    if isinstance(n, Symbol) and n._how == "global":
        n = n._of[0]
    if type(n) is int:
        return Size(n)
    if last_size_of(n) is both:
        return Size(())
    path: list[str] = []
    while isinstance(n, Symbol) and n._how == "attribute":
        path.append(n._of[1])
        n = n._of[0]
    if not (isinstance(n, Symbol) and n._how == "self" and path):
        return None
    above = n._of[0].split(".") if n._of[0] else ()
    return Size((*above, *path[::-1]))


def _number(module: nn.Module, path: tuple[str, ...]) -> int | None:
    """Returns the number that attributes lead to, of which none is computed; None where there is none."""
    found: Any = module
    for name in path:
        children = found._modules if isinstance(found, nn.Module) else {}
        found = children.get(name) or inspect.getattr_static(found, name, None)
    return found if type(found) is int else None
