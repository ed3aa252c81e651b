"""Chunks of tensors on their way between ranks, while the caller's stream computes.

A chunk is what one rank has of a gathered tensor, or the rows of partial sums that one rank gets.
A call gathers, or sends partial sums, or both:

    start           the own parts become readable, and the gathers begin, nearest rank first
    wait_for(step)  the parts of the rank that comes `step` ranks after this one have arrived
    send(step)      the partial sums of that rank's rows leave
    finish          everything has arrived, also the partial sums of this rank's own rows

All ranks of a group make the same calls with the same sizes, in the same order. Ranks of one host copy
to and from each other's memory (PeerMemory), by copy engines, which take no SMs; NVLink multicast is
not used. Others send messages through their process group (Messages).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

_ALIGNMENT = 512  # of a tensor in symmetric memory, in bytes
_GROWTH = 2 << 20  # symmetric memory has a multiple of so many bytes
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Call(NamedTuple):
    """What an exchange moves.

    own: contiguous tensors of this rank. The first `consumed` of them are waited for one rank at a
        time, and gathered first.
    sums: elements and type of the partial sums that a rank gets from each rank; None: there are none.
    """

    own: Sequence[Tensor]
    consumed: int
    sums: tuple[int, torch.dtype] | None
    device: torch.device


class Started:
    """An exchange that is under way; the base of both kinds."""

    gathered: list[Tensor]  # [ranks][elements of an own tensor]
    slots: Tensor  # [ranks][elements]: the partial sums of this rank's rows

    def __init__(self, call: Call, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self.gathered = [each.new_empty((ranks, each.numel())) for each in call.own]

    def peer(self, step: int) -> int:
        """Returns the rank whose parts arrive in a step, and whose partial sums leave in it."""
        return (self.rank + step) % self.ranks

    def keep_own(self, own: Sequence[Tensor], which: range) -> None:
        """Puts the parts of this rank next to the others' in `gathered`."""
        for i in which:
            self.gathered[i][self.rank].copy_(own[i].flatten())

    def wait_for(self, step: int) -> None:
        raise NotImplementedError

    def send(self, step: int, sums: Tensor) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        raise NotImplementedError


class Messages:
    """Messages between the ranks of a process group, of any backend."""

    sms = 16  # that GEMMs leave to the kernels of NCCL

    def __init__(self, process_group: Any) -> None:
        self.process_group = process_group

    def start(self, call: Call) -> Started:
        return _StartedMessages(self.process_group, call)


class _StartedMessages(Started):
    def __init__(self, process_group: Any, call: Call) -> None:
        super().__init__(call, process_group.rank(), process_group.size())
        self.process_group = process_group
        self.works: list[Any] = []
        self.last_of_step: list[int] = [0]
        self.sent: list[Tensor] = []  # a message reads its tensor until it has arrived
        if call.sums is not None:
            self.slots = torch.empty(
                (self.ranks, call.sums[0]), dtype=call.sums[1], device=call.device
            )
        sources = [each.flatten() for each in call.own]
        self.sent += sources
        for which in (range(call.consumed), range(call.consumed, len(sources))):
            for step in range(1, self.ranks):
                there = (self.rank - step) % self.ranks
                self._exchange(
                    [(sources[i], there) for i in which],
                    [(self.gathered[i][self.peer(step)], self.peer(step)) for i in which],
                )
                self.last_of_step.append(len(self.works))

    def _exchange(
        self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]
    ) -> None:
        ends: list[tuple[Callable[..., Any], list[tuple[Tensor, int]]]] = [
            (distributed.isend, sends),
            (distributed.irecv, receives),
        ]
        messages = [
            distributed.P2POp(call, tensor, group=self.process_group, group_peer=peer)
            for call, parts in ends
            for tensor, peer in parts
        ]
        if messages:
            self.works += distributed.batch_isend_irecv(messages)

    def wait_for(self, step: int) -> None:
        for i in range(self.last_of_step[step - 1], self.last_of_step[step]):
            self._wait(i)

    def _wait(self, i: int) -> None:
        work, self.works[i] = self.works[i], None
        if work is not None:
            work.wait()

    def send(self, step: int, sums: Tensor) -> None:
        source = (self.rank - step) % self.ranks
        self.sent.append(sums)
        self._exchange([(sums.flatten(), self.peer(step))], [(self.slots[source], source)])

    def finish(self) -> None:
        for i in range(len(self.works)):
            self._wait(i)
        self.sent.clear()


class PeerMemory:
    """Symmetric memory of GPUs of one host, which the copy engines of all of them reach.

    Memory that is replaced by more is kept: work on its way and captured graphs have its address.
    """

    sms = 0

    def __init__(self, process_group: Any, device: torch.device) -> None:
        self.process_group = process_group
        self.device = device
        self.copies: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._bytes = 0
        self._memory: Any = None
        self._kept: list[Tensor] = []

    def reserve(self, size: int) -> Any:
        """Returns symmetric memory of at least so many bytes; where it grows, all ranks meet."""
        if size > self._bytes:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"float8: async tensor parallelism needs {size} bytes that all ranks reach, and "
                    f"has {self._bytes}; take a step of these shapes before the CUDA graph's capture"
                )
            self._bytes = -(-size // _GROWTH) * _GROWTH
            with _without_multicast():
                from torch._C._distributed_c10d import _SymmetricMemory as SymmetricMemory

                name = self.process_group.group_name
                memory = SymmetricMemory.empty_strided_p2p(
                    (self._bytes,), (1,), torch.uint8, self.device, name
                )
                self._memory = SymmetricMemory.rendezvous(memory)
            self._kept.append(memory)
        return self._memory

    def start(self, call: Call) -> Started:
        return _StartedCopies(self, call)


class _StartedCopies(Started):
    """Own parts are read by the other ranks; partial sums are written to the ranks that get them."""

    def __init__(self, peers: PeerMemory, call: Call) -> None:
        super().__init__(call, peers.process_group.rank(), peers.process_group.size())
        self.copies = peers.copies
        self.events: list[Any] = []
        self.kept: list[Tensor] = []  # the stream of the copies reads them
        self.call = call
        places, end = [], 0
        for each in call.own:
            places.append(end)
            end = _aligned(end + each.numel() * each.element_size())
        self.slots_at = end
        if call.sums is not None:
            end += self.ranks * call.sums[0] * call.sums[1].itemsize
        self.memory = peers.reserve(end)
        # What the latest call left here has been read, and what it wrote to others too.
        self.memory.barrier(channel=0)
        if call.own:
            for place, each in zip(places, call.own, strict=True):
                self._part(self.rank, place, each).copy_(each.flatten())
            self.memory.barrier(channel=0)
        if call.sums is not None:
            self.slots = self._slots_of(self.rank)
        self.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copies):
            for which in (range(call.consumed), range(call.consumed, len(places))):
                for step in range(1, self.ranks):
                    peer = self.peer(step)
                    for i in which:
                        self.gathered[i][peer].copy_(self._part(peer, places[i], call.own[i]))
                    self.events.append(self.copies.record_event())

    def _part(self, rank: int, place: int, like: Tensor) -> Tensor:
        size = like.element_size()
        part: Tensor = self.memory.get_buffer(rank, (like.numel(),), like.dtype, place // size)
        return part

    def _slots_of(self, rank: int) -> Tensor:
        assert self.call.sums is not None
        count, dtype = self.call.sums
        slots: Tensor = self.memory.get_buffer(
            rank, (self.ranks, count), dtype, self.slots_at // dtype.itemsize
        )
        return slots

    def wait_for(self, step: int) -> None:
        torch.cuda.current_stream().wait_event(self.events[step - 1])

    def send(self, step: int, sums: Tensor) -> None:
        self.kept.append(sums)
        self.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copies):
            self._slots_of(self.peer(step))[self.rank].copy_(sums.flatten())

    def finish(self) -> None:
        torch.cuda.current_stream().wait_stream(self.copies)
        self.kept.clear()
        if self.call.sums is not None:
            self.memory.barrier(channel=0)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    """Keeps PyTorch from making a multicast object for memory that is only copied."""
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = before


_exchanges: dict[str, Messages | PeerMemory] = {}


def exchange_of(group: str, ranks: int, device: torch.device) -> Messages | PeerMemory:
    """Returns how the ranks of a group exchange chunks; they meet at its first use.

    ranks: how many the caller takes the group to have (ValueError).
    """
    c10d: Any = distributed.distributed_c10d
    process_group = c10d._resolve_process_group(group)
    known = _exchanges.get(group)
    if known is not None and known.process_group is process_group:
        return known
    if process_group.size() != ranks:
        raise ValueError(
            f"float8: the process group {group!r} has {process_group.size()} ranks, and the linear's "
            f"weight is shared by {ranks}"
        )
    found: Messages | PeerMemory = Messages(process_group)
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "float8: the first call of async tensor parallelism cannot be in a CUDA graph's "
                "capture; take a step before it"
            )
        found = _peer_memory(process_group, device) or found
    _exchanges[group] = found
    return found


def _peer_memory(process_group: Any, device: torch.device) -> PeerMemory | None:
    """Returns symmetric memory where all ranks have it, else None on all of them."""
    if not _agree(process_group, _host(), lambda hosts: len(set(hosts)) == 1):
        return None
    peers: PeerMemory | None = PeerMemory(process_group, device)
    try:
        assert peers is not None
        peers.reserve(_GROWTH)
    except (ImportError, AttributeError, RuntimeError):
        peers = None
    return peers if _agree(process_group, peers is not None, all) else None


def _host() -> str:
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot.read_text().strip() if boot.exists() else "")


def _agree(process_group: Any, value: Any, test: Callable[[list[Any]], bool]) -> bool:
    values: list[Any] = [None] * process_group.size()
    distributed.all_gather_object(values, value, group=process_group)
    return test(values)
