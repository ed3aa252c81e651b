"""A torchao that is there for who trains in fp8 with it, and for nobody else.

Libraries look whether torchao is installed, and then import parts of it that have nothing to do with
training, or refuse its version. Where it is not installed, float8.torchao.install() lets

    import torchao, and its float8    find this package
    importlib.util.find_spec, importlib.metadata
                                      find nothing, unless accelerate asks, which looks before it trains
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import pathlib
import sys
import types
from collections.abc import Iterable

# Those that look for torchao before they train with torchao.float8, and for that alone.
_TRAINERS = {"accelerate"}
_VERSION = "0.6.1"  # the first one that accelerate trains with
_EVERYTHING = importlib.metadata.DistributionFinder.Context()


def _who_asks() -> tuple[str, bool]:
    """Returns the package of the code that asks the import system, and whether it only looks."""
    looks, frame = False, sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and name.partition(".")[0] not in ("importlib", "importlib_metadata"):
            break
        looks = looks or name == "importlib.util"
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).partition(".")[0], looks


class _Distribution(importlib.metadata.Distribution):
    def read_text(self, filename: str) -> str | None:
        text = f"Metadata-Version: 2.1\nName: torchao\nVersion: {_VERSION}\n"
        return text if filename == "METADATA" else None

    def locate_file(self, path: str | os.PathLike[str]) -> pathlib.Path:
        return pathlib.Path(__file__).parent / path


class _Loader(importlib.abc.Loader):
    """Makes the module torchao, which has torchao.float8 alone."""

    def exec_module(self, module: types.ModuleType) -> None:
        module.__doc__ = "An empty torchao, made by float8.torchao.install()."
        module.float8 = sys.modules["torchao.float8"]  # type: ignore[attr-defined]


class _Finder(importlib.metadata.DistributionFinder):
    """The last finder, so that a torchao that is installed later goes first."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torchao":
            return None
        package, looks = _who_asks()
        if looks and package not in _TRAINERS:
            return None
        return importlib.machinery.ModuleSpec("torchao", _Loader(), is_package=True)

    def find_distributions(
        self,
        context: importlib.metadata.DistributionFinder.Context = _EVERYTHING,
    ) -> Iterable[importlib.metadata.Distribution]:
        asked = context.name == "torchao" and _who_asks()[0] in _TRAINERS
        return [_Distribution()] if asked else []


def install() -> None:
    """Lets the import system find the stand-in where it finds no torchao."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
