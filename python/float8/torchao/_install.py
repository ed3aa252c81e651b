"""Answering `import torchao.float8` in programs that cannot be edited."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types

_MODULES = (
    "config",
    "float8_linear",
    "float8_linear_utils",
    "float8_tensor_parallel",
    "fsdp_utils",
)


def install() -> None:
    """Makes `torchao.float8` mean this package, in this process.

    Call it before anything imports torchao.float8: names that were imported earlier keep their
    meaning. The rest of an installed torchao is as before, also what else lies in its folder
    float8; where torchao is not installed, an empty one takes its place.
    """
    import float8.torchao as ours

    spec = importlib.util.find_spec("torchao")
    if spec is None:
        empty = types.ModuleType("torchao", "An empty torchao, made by float8.torchao.install().")
        empty.__path__ = []
        empty.__spec__ = importlib.machinery.ModuleSpec("torchao", None, is_package=True)
        sys.modules["torchao"] = empty
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []

    facade = types.ModuleType("torchao.float8", ours.__doc__)
    facade.__dict__.update({name: getattr(ours, name) for name in dir(ours) if name[:2] != "__"})
    # What this package does not have is found in the installed torchao.
    facade.__path__ = [os.path.join(folder, "float8") for folder in folders]
    facade.__spec__ = importlib.machinery.ModuleSpec("torchao.float8", None, is_package=True)
    sys.modules["torchao.float8"] = facade
    for name in _MODULES:
        module = importlib.import_module(f"float8.torchao.{name}")
        sys.modules[f"torchao.float8.{name}"] = module
        setattr(facade, name, module)
    # The package's own import takes the modules above for its float8, and does not set the name.
    importlib.import_module("torchao").float8 = facade  # type: ignore[attr-defined]
