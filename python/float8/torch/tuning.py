"""Tuning of shapes that nobody has measured on this device, when they are planned first."""

from __future__ import annotations

import os
from typing import Any

import torch

from float8.torch import _ops  # noqa: F401  (it loads the ops)


def tune_on_first_use(seconds: float, *, database: str | os.PathLike[str] | None = None) -> None:
    """Measures a linear whose shape was not measured on its device, before its first call.

    `float8-tune` does it in a process of its own on the same GPU, for at most so many seconds a shape
    (some 10 are worth while; 0: no more), and the call waits. A shape is a recipe, out_features and
    in_features, at a number of tokens within a factor of 2. What it measures is kept in a database,
    which later processes read before they measure. What fails is a warning of the library's on
    standard error, and the linear runs untuned.

    database: a file, which need not exist; None: the one that FLOAT8_DB names.

    Call it before the first linear on a GPU. Ranks of one host take turns. Ranks of several hosts would
    have kernels of their own: tune on one, export its table, and give it to all with `agree`.

    Raises ValueError for a time below 0, and without a database; RuntimeError after a linear's first
    call on a GPU.
    """
    path: Any = database if database is not None else os.environ.get("FLOAT8_DB", "")
    path = os.fspath(path)
    if not 0 <= seconds <= 1e6:
        raise ValueError(f"float8: tune_on_first_use takes seconds, got {seconds!r}")
    if seconds > 0 and not path:
        raise ValueError(
            "float8: tune_on_first_use needs a database that keeps what is measured; pass database=, "
            "or set FLOAT8_DB"
        )
    path = os.path.abspath(path) if path else ""
    torch.ops.float8.tune_on_first_use(round(seconds * 1000), path)
