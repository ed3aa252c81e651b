"""The console script float8-tune: the program of that name in the wheel."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
from typing import NoReturn


def cuda_folders() -> list[str]:
    """Returns the folders of CUDA 13's libraries that lie next to PyTorch as wheels."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec is not None else None
    folders = [pathlib.Path(root, "cu13", "lib") for root in roots or ()]
    return [str(folder) for folder in folders if folder.is_dir()]


def main() -> NoReturn:
    program = pathlib.Path(__file__).parent / "bin" / "float8-tune"
    environment = dict(os.environ)
    paths = [environment.get("LD_LIBRARY_PATH", ""), *cuda_folders()]
    environment["LD_LIBRARY_PATH"] = ":".join(path for path in paths if path)
    os.execve(program, ["float8-tune", *sys.argv[1:]], environment)
