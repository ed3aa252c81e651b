"""Children that are forked while other threads compute: they work, or their first call says why not.

Each scenario has a process of its own: in one where autograd's own threads run, such as that of other
tests, PyTorch refuses a backward in a child.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import float8.torch as f8
from float8 import _library
from float8.torch.shard import weight_changes

SECONDS = 60  # after which a child that waits for ever is ended


def _model(recipe: str) -> Any:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return f8.convert_to_float8_training(model, config=f8.LinearConfig(recipe=recipe, emulate=True))


def _step(model: nn.Module, rows: int) -> None:
    # torch.randn takes a lock of PyTorch's, which knows nothing of forks.
    model(torch.ones(rows, 64)).square().mean().backward()
    f8.sync_float8_amax_and_scale_history(model)


def _in_child(body: Callable[[], object]) -> str:
    """Returns what the body raised in a child of this process, or nothing."""
    own, its = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        torch.set_num_threads(1)  # PyTorch's own threads are not in the child
        try:
            body()
        except BaseException as error:
            words = "".join(traceback.format_exception_only(error))
            os.write(its, words.encode())
        os._exit(0)
    os.close(its)
    with os.fdopen(own) as words:
        said = words.read()
    _, status = os.waitpid(child, 0)
    return said.strip() + (f" (the child ended with {status})" if status else "")


def _fork_while_threads_train(recipe: str) -> None:
    stop = threading.Event()
    errors: list[BaseException] = []
    models = [_model(recipe) for _ in range(3)]
    for model in models:
        _step(model, 16)

    def train(model: nn.Module) -> None:
        try:
            while not stop.is_set():
                _step(model, 16)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(model,)) for model in models[1:]]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            assert _in_child(lambda: _step(models[0], 16)) == ""
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors
    # New plans take the locks that are held for long.
    assert _in_child(lambda: _step(_model(recipe), 600)) == ""


def _fork_while_a_thread_stays_in_a_call() -> None:
    model = _model("rowwise")
    _step(model, 16)
    library: Any = ctypes.CDLL(_library.library()._name)
    inside, forked = threading.Event(), threading.Event()

    def stay() -> None:
        library.float8_calls_begin()
        inside.set()
        forked.wait()
        library.float8_calls_end()

    thread = threading.Thread(target=stay)
    thread.start()
    inside.wait()
    try:
        said = _in_child(lambda: _step(model, 16))
    finally:
        forked.set()
        thread.join()
    assert said.startswith("RuntimeError: float8: ") and said.count("\n") == 0
    assert "forked" in said and "spawn" in said
    _step(model, 16)
    assert _in_child(lambda: _step(model, 16)) == ""


def _run(scenario: str) -> None:
    """Runs a scenario of this file in a process of its own."""
    run = subprocess.run(
        (
            sys.executable,
            "-W",
            "ignore::DeprecationWarning",
            "-c",
            f"import test_fork as t; t.{scenario}",
        ),
        cwd=pathlib.Path(__file__).parent,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # autograd has threads for each GPU
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("recipe", ("rowwise", "delayed"))
def test_a_fork_while_threads_train(recipe: str) -> None:
    _run(f"_fork_while_threads_train({recipe!r})")


def test_a_fork_while_a_thread_stays_in_a_call() -> None:
    _run("_fork_while_a_thread_stays_in_a_call()")


def test_optimizers_ask_nothing_of_a_gpu_that_has_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a child of a process with CUDA each such question is an error."""

    def no_answer() -> bool:
        raise RuntimeError("CUDA error: initialization error")

    model = _model("rowwise")
    weight_changes.watch_optimizers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(model, 16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", no_answer)
    optimizer.step()
