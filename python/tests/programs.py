"""Running the programs of the repository's other folders inside the tests."""

from __future__ import annotations

import contextlib
import os
import pathlib
import runpy
import sys
from collections.abc import Iterator

import pytest
import torch

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
