"""The repository's other folders: their programs run inside the tests, and what scripts/python-test fetched."""

from __future__ import annotations

import contextlib
import os
import pathlib
import runpy
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import float8

ROOT = pathlib.Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def _undone() -> Iterator[None]:
    """Undoes what a program sets for its process."""
    threads = torch.get_num_threads()
    path = list(sys.path)
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):
        yield
    sys.path[:] = path
    torch.set_num_threads(threads)
    torch.compiler.reset()


def run(script: str, *arguments: str) -> str | int | None:
    """Runs a Python program, and returns what it exits with."""
    path = ROOT / script
    with _undone(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(path), *arguments])
        patch.setattr(os, "_exit", sys.exit)  # of a rank of gloo
        patch.syspath_prepend(str(path.parent))
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            return end.code
    return None


def float8_tune(*arguments: str) -> str:
    """Runs the program of the wheel, and returns what it prints."""
    program = pathlib.Path(float8.__file__).parent / "bin" / "float8-tune"
    if not program.exists():
        pytest.skip("the wheel is not installed")
    command = [str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200, check=True).stdout


def torchtitan_folder(release: str) -> str:
    """Returns the folder that has a release of torchtitan, or skips the test."""
    for folder in (pathlib.Path(sys.prefix), ROOT / ".deps" / "python"):
        if (folder / f"torchtitan-{release}" / "torchtitan").exists():
            return str(folder / f"torchtitan-{release}")
    pytest.skip(f"torchtitan {release} is not installed; scripts/python-test does it")
