"""float8's collectives: what they are, how long they wait, and which rank did not come.

A collective that fails raises DistributedError. Ranks that fail say so in the store of the process
groups, under the keys below, and read there what the others say; nothing is written on the way.

    float8/first_failure    JSON failure of the first rank that failed
    float8/failed/RANK      JSON failure: {state, "error", "rank", "cause"}
    float8/heartbeat/RANK   JSON {state, "heartbeat"}; only under watch()

state := "count", "sequence", "operation". A cause is "collective", "raised" where the rank's program
raised the error, or "stalled" where its watch saw no progress. All ranks have operations in the same
order, and so have the ranks of a process group its collectives, whose numbers are `sequence`: of ranks
that stand still, the one with the smallest numbers is behind.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, distributed

_FIRST_FAILURE = "float8/first_failure"
_GRACE = 3.0  # seconds, at most, between the failures of ranks that fail for one reason
_SLICE = 0.5  # seconds of a wait, after which a rank looks for failures of others


class DistributedError(RuntimeError):
    """Ranks do not agree, or a collective failed.

    operation: the operation of this rank. rank: this rank. ranks: those that did not come to the
    operation, or that differ from the others. layers: the operation's. All ranks are numbers in the
    default process group.
    """

    def __init__(
        self,
        message: str,
        *,
        operation: str,
        rank: int,
        ranks: Iterable[int] = (),
        layers: Iterable[str] = (),
    ) -> None:
        super().__init__(message)
        self.operation = operation
        self.rank = rank
        self.ranks = tuple(ranks)
        self.layers = tuple(layers)


class Operation:
    """What a rank is doing; its text is made when somebody asks."""

    __slots__ = ("_layers", "name")

    def __init__(self, name: str, layers: Callable[[], Sequence[str]] = tuple) -> None:
        self.name = name
        self._layers = layers

    def layers(self) -> tuple[str, ...]:
        return tuple(self._layers())

    def __str__(self) -> str:
        layers = self.layers()
        if not layers:
            return self.name
        more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
        return f"{self.name} of {layers[0]}{more}"


class _Progress:
    """Counts the operations of this process."""

    def __init__(self) -> None:
        self.count = 0
        self.marks = 0  # of progress that other ranks need not have
        self.operation = Operation("start")
        self.timeout = 60.0  # seconds
        self.rank = -1  # and the store, of the latest default process group
        self.store: Any = None

    def begin(self, operation: Operation) -> None:
        self.operation = operation
        self.count += 1

    def sequence(self) -> dict[str, int]:
        """Returns the number of collectives that each process group has begun."""
        if not distributed.is_initialized():
            return {}
        groups: list[Any] = list(distributed.distributed_c10d._world.pg_map)
        try:
            return {each.group_name: each._get_sequence_number_for_group() for each in groups}
        except RuntimeError:  # a backend that does not count
            return {}

    def seen(self) -> tuple[int, int, int]:
        """Returns what changes with all progress."""
        return self.count, self.marks, sum(self.sequence().values())

    def report(self, **more: Any) -> str:
        state = {"count": self.count, "sequence": self.sequence(), "operation": str(self.operation)}
        return json.dumps({**state, **more})


progress = _Progress()


def all_reduce_max(tensor: Tensor, group: Any, operation: Operation) -> None:
    """Reduces int32 words over the ranks of the group (None: all), in place."""

    def call(async_op: bool) -> Any:
        return distributed.all_reduce(
            tensor, distributed.ReduceOp.MAX, group=group, async_op=async_op
        )

    _run(call, tensor, group, operation)


def all_gather(output: Tensor, input: Tensor, group: Any, operation: Operation) -> None:
    """Gathers the inputs of all ranks, one after the other."""
    name = "all_gather_single"  # PyTorch before 2.13 has the other name
    gather = getattr(distributed, name, None) or distributed.all_gather_into_tensor

    def call(async_op: bool) -> Any:
        return gather(output, input, group=group, async_op=async_op)

    _run(call, input, group, operation)


def broadcast(tensor: Tensor, group: Any, operation: Operation) -> None:
    """Gives all ranks what the group's first rank has."""
    source = distributed.get_process_group_ranks(group)[0]

    def call(async_op: bool) -> Any:
        return distributed.broadcast(tensor, source, group=group, async_op=async_op)

    _run(call, tensor, group, operation)


def all_to_all(
    output: Tensor,
    input: Tensor,
    received: Sequence[int],
    sent: Sequence[int],
    group: Any,
    operation: Operation,
) -> None:
    """Sends `sent[r]` rows to rank r of the group, and gets `received[r]` of it, in the order of ranks.

    Rows may be of any type, which the backend need not know; both tensors are contiguous.
    """
    to, of = output.view(torch.uint8), input.view(torch.uint8)

    def call(async_op: bool) -> Any:
        return distributed.all_to_all_single(
            to, of, list(received), list(sent), group=group, async_op=async_op
        )

    _run(call, input, group, operation)


def _run(call: Callable[[bool], Any], tensor: Tensor, group: Any, operation: Operation) -> None:
    progress.begin(operation)
    start = time.monotonic()
    own_rank()  # it is remembered for the time after the groups, as is the store
    store_or_none()
    try:
        # On a GPU the host waits for nothing; NCCL's watchdog and watch() notice a hang.
        work = call(not tensor.is_cuda)
        if work is not None and not tensor.is_cuda:
            _wait(work, start + progress.timeout)
    except Exception as error:
        raise failed(operation, error, ranks_of(group), time.monotonic() - start) from error


def _wait(work: Any, deadline: float) -> None:
    store = store_or_none()
    while True:
        left = deadline - time.monotonic()
        try:
            work.wait(datetime.timedelta(seconds=max(0.01, min(_SLICE, left))))
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # it raises what failed, if anything did
                return
            if left <= 0:
                raise TimeoutError(f"it took more than {progress.timeout:g} s") from None
            first = None if store is None else first_failure(store)
            if first is not None:
                text = f"rank {first['rank']} failed in {first['operation']}: {first['error']}"
                raise RuntimeError(text) from None


def ranks_of(group: Any) -> list[int]:
    """Returns the ranks of a group in the default one; of a group that is gone, none."""
    try:
        return list(distributed.get_process_group_ranks(group))
    except (ValueError, KeyError, RuntimeError):
        return []


def own_rank() -> int:
    """Returns this process's rank, -1 without process groups; it stays when they are destroyed."""
    if distributed.is_initialized():
        progress.rank = distributed.get_rank()
    return progress.rank


def store_or_none() -> Any:
    """Returns the store of the default process group, also of a destroyed one; None without."""
    if distributed.is_initialized():
        progress.store = distributed.distributed_c10d._get_default_store()
    return progress.store


# Failures


def post_failure(error: BaseException, cause: str, store: Any = None) -> None:
    """Says in the store that this rank has failed; a store that is gone is no error."""
    store = store or store_or_none()
    if store is None:
        return
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    report = progress.report(error=text, rank=own_rank(), cause=cause)
    try:
        store.set(f"float8/failed/{own_rank()}", report)
        store.compare_set(_FIRST_FAILURE, "", report)
    except RuntimeError:
        pass


def first_failure(store: Any) -> dict[str, Any] | None:
    """Returns the failure that was posted first."""
    return _read(store, _FIRST_FAILURE)


def forget_failure(store: Any) -> None:
    """Removes what this rank left in a store that earlier process groups used."""
    first = first_failure(store)
    keys = [f"float8/failed/{own_rank()}"]
    if first is not None and first["rank"] == own_rank():
        keys.append(_FIRST_FAILURE)
    for key in keys:
        if store.check([key]):
            store.delete_key(key)


def _read(store: Any, key: str) -> dict[str, Any] | None:
    # A get would wait for the key.
    if not store.check([key]):
        return None
    text = store.get(key)
    return json.loads(text) if text else None


def failed(
    operation: Operation, error: BaseException, ranks: Sequence[int], seconds: float
) -> DistributedError:
    """Returns the error of a collective that failed, after asking the store about the others."""
    rank = own_rank()
    post_failure(error, "collective")
    # A rank whose groups are gone has not waited for anybody.
    initialized = distributed.is_initialized()
    missing, words = absent(ranks) if initialized else ([], "its process groups are gone")
    message = (
        f"float8: rank {rank}: {operation} failed after {seconds:.1f} s"
        f"{': ' + words if words else ''}. The step is void, and its scales were not updated: end "
        f"all ranks and restart from the latest checkpoint. The cause: "
        f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
    )
    return DistributedError(
        message, operation=operation.name, rank=rank, ranks=missing, layers=operation.layers()
    )


def absent(ranks: Sequence[int], store: Any = None) -> tuple[list[int], str]:
    """Returns the ranks that a failure is due to, as far as the store knows, and words about them.

    Those are the ranks that raised something of their own; else those that neither failed nor came
    to the operation of this rank.
    """
    store = store or store_or_none()
    others = [rank for rank in ranks if rank != own_rank()]
    if store is None or not others:
        return [], ""
    try:
        return _absent(store, others)
    except RuntimeError:
        return [0], "the store does not answer, so the process that keeps it, rank 0's, has ended"


def _absent(store: Any, others: list[int]) -> tuple[list[int], str]:
    before = {rank: _read(store, f"float8/heartbeat/{rank}") for rank in others}
    deadline = time.monotonic() + max(_GRACE, len(others) / 500)
    reports: dict[int, dict[str, Any]] = {}
    while len(reports) < len(others) and time.monotonic() < deadline:
        for rank in others:
            report = None if rank in reports else _read(store, f"float8/failed/{rank}")
            if report is not None:
                reports[rank] = report
        time.sleep(0.05)
    raised = [rank for rank, report in reports.items() if report["cause"] == "raised"]
    if raised:
        return raised, "; ".join(f"rank {rank} raised {reports[rank]['error']}" for rank in raised)
    own = progress.sequence()
    now = {rank: _read(store, f"float8/heartbeat/{rank}") for rank in others if rank not in reports}
    # A rank that lives and has come waits: what failed is on this side.
    silent = [
        rank
        for rank, state in now.items()
        if not (_lives(state, before[rank]) and _delay(state, own) >= (progress.count, 0))
    ]
    if silent:
        return silent, "; ".join(_silence(rank, now[rank], before[rank]) for rank in silent)
    delays = {rank: _delay(report, own) for rank, report in reports.items()}
    least = min(delays.values(), default=(progress.count, 0))
    behind = [rank for rank, delay in delays.items() if delay == least < (progress.count, 0)]
    if behind:
        return behind, "; ".join(_behind(rank, reports[rank], delays[rank][1]) for rank in behind)
    first = first_failure(store)
    if first is None or first["rank"] not in reports:
        return [], ""
    return [first["rank"]], (
        f"rank {first['rank']} failed first, in {first['operation']}: {first['error']}"
    )


def _delay(report: dict[str, Any], own: dict[str, int]) -> tuple[int, int]:
    """Returns a rank's operations, and how many collectives it is ahead in the groups of both."""
    sequence = report["sequence"]
    return report["count"], sum(sequence[name] - own[name] for name in sequence.keys() & own.keys())


def _behind(rank: int, report: dict[str, Any], collectives: int) -> str:
    more = (
        f", {-collectives} collective{'s' * (collectives < -1)} behind" if collectives < 0 else ""
    )
    if report["cause"] == "stalled":
        return f"rank {rank} did not come: it was last seen in {report['operation']}{more}"
    return f"rank {rank} is behind, in {report['operation']}{more}, and failed: {report['error']}"


def _lives(now: dict[str, Any] | None, before: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    """Tells whether a rank has said since then that it lives."""
    return now is not None and (before is None or now["heartbeat"] != before["heartbeat"])


def _silence(rank: int, now: dict[str, Any] | None, before: dict[str, Any] | None) -> str:
    if now is None:
        return f"rank {rank} did not come and says nothing: it was killed, or hangs"
    alive = _lives(now, before)
    state = "lives and hangs" if alive else "gives no sign of life, so it was killed or stopped"
    return f"rank {rank} did not come: it {state}; it was last seen in {now['operation']}"


def is_failure_of_a_collective(error: BaseException) -> bool:
    """Tells whether an error is c10d's, whose words name no rank."""
    if isinstance(error, distributed.DistError):
        return True
    words = ("gloo", "NCCL", "Operation timed out", "Connection closed by peer", "process group")
    return isinstance(error, (RuntimeError, ValueError)) and any(w in str(error) for w in words)


def device_of(group: Any) -> torch.device:
    """Returns a device whose tensors the group's collectives take."""
    config = distributed.get_backend_config(group)
    devices = [each.split(":")[0] for each in config.split(",")]
    if "cpu" in devices or "cuda" not in devices:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
