"""Watching the ranks of a training run: which one failed or hangs, in words, within a timeout."""

from __future__ import annotations

import faulthandler
import functools
import os
import sys
import threading
import time
from typing import Any

import torch
from torch import distributed, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from float8.torch.ranks import collectives
from float8.torch.ranks.collectives import DistributedError, Operation, progress
from float8.torch.scale_home import states_below

EXIT_STATUS = 75  # of a process that a watch ends
_STDERR = 2  # the interpreter's own file may be a test's


def watch(
    model: nn.Module | None = None, *, timeout: float = 60.0, end_process: bool = True
) -> Watch:
    """Names the rank that fails or hangs, for all ranks whose training loop runs in this context.

        with float8.torch.watch(model, timeout=60):
            for batch in batches: ...

    Collectives and steps of optimizers are progress. A thread tells the store of the process groups
    about it, every few seconds, and looks whether another rank has failed. Nothing is added to the
    step but counting.

    - A collective that fails, float8's or another, becomes a DistributedError which names the ranks
      that did not come. What a rank raises otherwise leaves as it is, and the others get to know it.
    - A rank without progress for `timeout` seconds, or for a few seconds after another one failed,
      prints who is behind on stderr and aborts its process groups. NCCL's kernels end then; where
      the main thread still does not come back, the process ends with status 75, so that
      torchrun can start all ranks again; with status 1 and the stacks of its threads where the
      interpreter's lock is not given up.

    model: its scale states of delayed scaling forget the step that failed.
    timeout: longer than the longest phase without progress, such as saving a checkpoint, an
        evaluation or the compilation of the first step; `mark` tells of progress there. It is also
        the timeout of float8's own collectives where the host waits for them.
    end_process: False leaves a process alone that does not come back.
    """
    return Watch(model, timeout, end_process)


class Watch:
    """What `watch` returns."""

    def __init__(self, model: nn.Module | None, timeout: float, end_process: bool) -> None:
        if timeout <= 0:
            raise ValueError(f"float8: the timeout is {timeout} s, and has to be more than 0")
        self._model = model
        self._timeout = timeout
        self._end_process = end_process
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._ranks: list[int] = []
        self._changed = 0.0  # when progress was seen last
        self._tripped: DistributedError | None = None  # why the process groups were aborted

    def mark(self, what: str) -> None:
        """Tells that this rank is getting on, and with what."""
        progress.operation = Operation(what)
        progress.marks += 1

    def __enter__(self) -> Watch:
        _count_optimizer_steps()
        self._changed = time.monotonic()
        self._stop.clear()
        self._tripped = None
        self._timeout_before, progress.timeout = progress.timeout, self._timeout
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            store = collectives.store_or_none()
            self._ranks = list(range(distributed.get_world_size()))
            self._rank = distributed.get_rank()
            # A get of the main thread would keep the thread out of a store that both use.
            self._store = store.clone() if hasattr(store, "clone") else store
            collectives.forget_failure(self._store)
            self._thread = threading.Thread(target=self._run, name="float8 watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if self._tripped is not None:
                # What ran on after the groups were aborted may have read half of a gather.
                self._discard_step()
                raise self._tripped from error
            if error is not None:
                self._leave(error)
        finally:
            self.close()

    def close(self) -> None:
        """Ends the watch."""
        progress.timeout = self._timeout_before
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2 * self._interval)

    def _leave(self, error: BaseException) -> None:
        self._discard_step()
        if not self._ranks or isinstance(error, DistributedError):
            return
        if collectives.is_failure_of_a_collective(error):
            # A rank that was stuck in it for as long did not wait for its peers to fail.
            raise collectives.failed(
                progress.operation, error, self._ranks, time.monotonic() - self._changed
            ) from error
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            collectives.post_failure(error, "raised", self._store)

    def _discard_step(self) -> None:
        for state in [] if self._model is None else states_below(self._model):
            try:
                state.discard_step()
            except RuntimeError:  # a device that is lost
                return

    # The thread

    @property
    def _interval(self) -> float:
        # Ten thousand ranks would keep a store busy with a heartbeat a second each.
        return min(max(self._timeout / 8, 0.05), max(1.0, len(self._ranks) / 1000))

    def _run(self) -> None:
        seen, heartbeats = progress.seen(), 0
        while not self._stop.wait(self._interval):
            if seen != (now := progress.seen()):
                seen, self._changed = now, time.monotonic()
            heartbeats += 1
            still = time.monotonic() - self._changed
            try:
                self._store.set(
                    f"float8/heartbeat/{self._rank}", progress.report(heartbeat=heartbeats)
                )
                reason = self._reason(still)
            except RuntimeError:
                reason = "the store of the process groups is gone" if still > 1 else ""
            if reason:
                self._trip(reason, seen)
                return

    def _reason(self, still: float) -> str:
        """Returns why this rank should give up, if it should."""
        if still > self._timeout:
            return f"no progress for {still:.0f} s"
        first = collectives.first_failure(self._store)
        # A rank that gets on will meet the failure in its next collective.
        if first is not None and first["rank"] != self._rank and still > self._grace():
            return f"rank {first['rank']} failed in {first['operation']}: {first['error']}"
        return ""

    def _grace(self) -> float:
        return min(5.0, self._timeout / 2)

    def _trip(self, reason: str, seen: tuple[int, int, int]) -> None:
        stuck = progress.operation
        collectives.post_failure(TimeoutError(reason), "stalled", self._store)
        ranks, words = collectives.absent(self._ranks, self._store)
        text = f"{stuck}: {reason}{'; ' + words if words else ''}; the process groups are aborted"
        self._say(text)
        self._tripped = DistributedError(
            f"float8: rank {self._rank}: {text}",
            operation=stuck.name,
            rank=self._rank,
            ranks=ranks,
            layers=stuck.layers(),
        )
        if self._end_process:
            # What aborts may keep the interpreter's lock, and this thread from going on.
            faulthandler.dump_traceback_later(3 * self._grace() + 2, exit=True, file=_STDERR)
        # An abort may itself wait for a rank that is gone.
        aborting = threading.Thread(target=_abort, name="float8 abort", daemon=True)
        aborting.start()
        aborting.join(self._grace())
        self._wait_for_main_thread(seen, stuck)

    def _wait_for_main_thread(self, seen: Any, stuck: Operation) -> None:
        """Ends the process where the main thread does not leave the context."""
        wait = self._grace()
        while self._end_process and not self._stop.wait(wait):
            before, seen = seen, progress.seen()
            if before == seen:
                self._say(f"the main thread did not come back from {stuck}; the process ends")
                os._exit(EXIT_STATUS)
            wait = self._timeout  # it did come back, and may be stuck in something else
            faulthandler.dump_traceback_later(2 * wait, exit=True, file=_STDERR)
        faulthandler.cancel_dump_traceback_later()

    def _say(self, text: str) -> None:
        print(f"float8: rank {self._rank}: {text}", file=sys.stderr, flush=True)


def _abort() -> None:
    """Ends what NCCL runs on the device; gloo has nothing to end.

    The groups stay: c10d's own function of this name destroys them, which waits for their threads
    and keeps the interpreter's lock all the while.
    """
    try:
        if "nccl" in distributed.get_backend_config():
            groups = [each for each in distributed.distributed_c10d._world.pg_names if each]
            nccl: Any = distributed.group.WORLD._get_backend(torch.device("cuda"))  # type: ignore[union-attr]
            nccl._group_start()
            for group in sorted(groups, key=lambda each: str(each.group_name), reverse=True):
                group.abort()
            nccl._group_end()
    except (RuntimeError, ValueError) as error:
        print(f"float8: the process groups could not be aborted: {error}", file=sys.stderr)


@functools.cache
def _count_optimizer_steps() -> None:
    operation = Operation("what follows an optimizer's step")

    def after(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            progress.begin(operation)

    register_optimizer_step_post_hook(after)
