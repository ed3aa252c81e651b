"""Spares the processes of tests CPU time; conftest and the server of ranks import it before PyTorch."""

from __future__ import annotations

import gc

gc.disable()  # what imports make lives on


def begin() -> None:
    """Begins the tests of a process, or a rank: the collector leaves out what imports made, and most of its walks.

    Behind each graph Dynamo would collect garbage, and clear the CPU's caches to measure how long the guards take.
    """
    from torch._dynamo import config, guards

    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000)
    config.run_gc_after_compile = False
    guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[assignment]
