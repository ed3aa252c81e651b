"""Ranks that agree: the library, the tuning table, the device and the layers are those of all ranks.

Ranks compare 24 bytes each, in one all-gather. Where they differ, a second one tells every rank
which rank has what, and all of them raise the same error.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import hashlib
import json
import os
import pathlib
import re
import tempfile
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from float8 import _library
from float8.torch.base_linear import is_float8
from float8.torch.ranks import collectives
from float8.torch.ranks.collectives import DistributedError, Operation

# What a rank has: by topic a text, or texts by name.
Facts = dict[str, str | dict[str, str]]

_MAGIC = (
    0xF8A62EE  # the first word of a rank that is in this comparison, and in no other collective
)
_EMULATED = -1

_REMEDY = {
    "version": "install the same package on all hosts",
    "build": "install the same wheel on all hosts",
    "device": "use hosts with one class of device, or one process group for each class",
    "table": "give all ranks one tuning table with float8.torch.agree(table=...)",
    "plans": "call float8.torch.agree before the first step and before float8.torch.prepare",
    "layers": "build and convert the model in the same way on all ranks",
    "scales": "build and convert the model in the same way on all ranks, and where ranks are stages of a pipeline, "
    "give the sync the group of those with the same stage",
    "experts": "give all ranks of the group as many experts of one size, one recipe, the same options and a like x",
    "shards": "shard the weights with fully_shard alone",
    "inputs": "give all ranks that share a weight the same batch",
}


def agree(
    model: nn.Module | None = None,
    *,
    table: str | os.PathLike[str] | None = None,
    group: Any = None,
) -> str:
    """Compares over the ranks of `group` (None: all) what decides results and kernels.

    Call it on all ranks after the process groups are made and the model is converted, before the
    first step; without process groups it only loads the table. Returns the tuning table's hash.

    model: its Float8Linear layers are compared too: names, shapes, recipes and options.
    table: the tuning table of the group's first rank, a file; all ranks load its contents, and need
        no such file. Where that rank has None, the table in use stays.

    Raises DistributedError on every rank, which names the rank that differs and what differs. FSDP
    with fp8 gathers, delayed scaling and tensor parallelism compare without a call.
    """
    collectives.progress.begin(Operation("agree"))
    devices = _devices(model)
    text, complaint = _first_ranks_table(table, group)
    facts: Facts = {}
    if text is not None:
        # A table that one rank cannot load is told to all of them.
        try:
            changed = [_load(device, text) for device in devices]
        except (ValueError, RuntimeError, OSError) as error:
            complaint = str(error).removeprefix("float8: ")
        else:
            facts["plans"] = next((each for each in changed if each), "")
    if complaint is not None:
        facts["table"] = complaint
    facts = {**_start_facts(devices[0]), **facts}
    if model is not None:
        facts["layers"] = _layers(model)
    compare(facts, group)
    _raise_own(facts, group, ("plans",) if complaint is None else ("table",))
    return table_hash(devices[0])


def agree_once(group: Any, facts: Facts, device: torch.device) -> None:
    """Compares facts over a group, and with them, for the first time, what agree() compares."""
    if group.size() == 1:
        return
    if group not in _agreed:
        facts = {**_start_facts(device.index if device.type == "cuda" else _EMULATED), **facts}
    compare(facts, group)
    _agreed.add(group)


_agreed: weakref.WeakSet[Any] = weakref.WeakSet()


# What a rank has


def _start_facts(device: int) -> Facts:
    return {
        "version": f"float8 {_version()}, torch {torch.__version__}",
        "build": _build(),
        "device": _device_class(device),
        "table": table_hash(device),
    }


def _version() -> str:
    text: bytes = _library.library().float8_version()
    return text.decode()


@functools.cache
def _build() -> str:
    """Returns a hash of the package: its libraries, which have the kernels' sources, and its code."""
    folder = pathlib.Path(_library.__file__).parent
    files = [folder / "_C.so", *folder.glob("lib/libfloat8.so.*"), *folder.rglob("*.py")]
    digest = hashlib.sha256()
    for file in sorted(files):
        data = file.read_bytes()
        # The size keeps apart what one file ends with and the next one begins with.
        digest.update(f"{file.relative_to(folder).as_posix()} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()[:16]


def _device_class(device: int) -> str:
    if device == _EMULATED:
        return "emulated"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.multi_processor_count} SMs"


def _context(device: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.ops.float8.context(device))


def table_hash(device: int) -> str:
    """Returns the hash of the tuning table that a device's linears are planned with."""
    text = _library.info(_library.library().float8_context_info, _context(device))
    found = re.search(r"tuning table: .*hash (\w+)", text)
    return found[1] if found else "none"


def _devices(model: nn.Module | None) -> list[int]:
    """Returns the devices that this process computes on."""
    layers = [] if model is None else [m for m in model.modules() if is_float8(m)]
    if any(layer.emulate for layer in layers) or not torch.cuda.is_available():
        return [_EMULATED]
    return [torch.cuda.current_device()]


def _layers(model: nn.Module) -> dict[str, str]:
    return {name: m.describe() for name, m in model.named_modules() if is_float8(m)}


# The table


def _first_ranks_table(path: Any, group: Any) -> tuple[bytes | None, str | None]:
    """Returns the contents of the first rank's table, or why it has none."""
    ranks = collectives.ranks_of(group) if distributed.is_initialized() else []
    message = b""
    if len(ranks) < 2 or ranks[0] == distributed.get_rank():
        if path is None:
            message = b"N"
        else:
            try:
                message = b"T" + pathlib.Path(path).read_bytes()
            except OSError as error:
                message = f"E{error}".encode()
    if len(ranks) > 1:
        message = _broadcast(message, group)
    kind, body = message[:1], message[1:]
    return (body if kind == b"T" else None), (body.decode() if kind == b"E" else None)


def _broadcast(message: bytes, group: Any) -> bytes:
    operation = Operation("the broadcast of the tuning table")
    device = collectives.device_of(group)
    words = torch.tensor([_MAGIC, len(message)], device=device)
    collectives.broadcast(words, group, operation)
    _, size = words.tolist()
    data = torch.zeros(size, dtype=torch.uint8, device=device)
    if message:
        data.copy_(_bytes(message))
    collectives.broadcast(data, group, operation)
    return bytes(data.tolist())


def _bytes(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _load(device: int, text: bytes) -> str:
    """Loads a table; returns a complaint where linears were planned with another one."""
    before = table_hash(device)
    with tempfile.NamedTemporaryFile(prefix="float8-table-") as file:
        file.write(text)
        file.flush()
        load = _library.library().float8_context_load_table
        try:
            _library.check(load(_context(device), file.name.encode(), None))
        except (ValueError, RuntimeError) as error:
            raise ValueError(str(error).replace(file.name, "the given file")) from None
    plans = len(torch.ops.float8.plans(device))
    if plans == 0 or table_hash(device) == before:
        return ""
    return f"{plans} linears that were planned with table {before}"


# The comparison


def compare(facts: Facts, group: Any) -> None:
    """Raises DistributedError on all ranks of the group where their facts differ."""
    if not distributed.is_initialized() or distributed.get_world_size(group) == 1:
        return
    layers = facts.get("layers", {})
    operation = Operation(
        "the comparison of ranks", lambda: tuple(layers) if isinstance(layers, dict) else ()
    )
    text = json.dumps(facts, sort_keys=True)
    ranks = collectives.ranks_of(group)
    words = _headers(text, group, operation)
    if all(each == words[0] for each in words):
        return
    all_facts = [json.loads(each) for each in _bodies(text, words, group, operation)]
    differing, found = difference(ranks, all_facts)
    raise _error(operation, found, differing)


def gather_texts(text: str, group: Any, operation: Operation) -> list[str]:
    """Returns the texts of all ranks of the group, which are gathered where they differ."""
    words = _headers(text, group, operation)
    if all(each == words[0] for each in words):
        return [text] * len(words)
    return _bodies(text, words, group, operation)


def _headers(text: str, group: Any, operation: Operation) -> list[list[int]]:
    """Gathers a magic number, the size of each rank's text, and its hash."""
    message = text.encode()
    digest = int.from_bytes(hashlib.sha256(message).digest()[:8], "big", signed=True)
    device = collectives.device_of(group)
    own = torch.tensor([_MAGIC, len(message), digest], device=device)
    words: list[list[int]] = _gathered(own, group, operation).tolist()
    ranks = collectives.ranks_of(group)
    lost = [rank for rank, each in zip(ranks, words, strict=True) if each[0] != _MAGIC]
    if lost:
        raise _error(operation, f"ranks {lost} are in another operation", lost)
    return words


def _bodies(text: str, words: list[list[int]], group: Any, operation: Operation) -> list[str]:
    message = text.encode()
    size = max(each[1] for each in words)
    data = torch.zeros(size, dtype=torch.uint8, device=collectives.device_of(group))
    data[: len(message)].copy_(_bytes(message))
    rows = _gathered(data, group, operation).cpu()
    return [bytes(row[: each[1]].tolist()).decode() for row, each in zip(rows, words, strict=True)]


def _gathered(own: Tensor, group: Any, operation: Operation) -> Tensor:
    size = distributed.get_world_size(group)
    everyone = own.new_empty(size * own.numel())
    collectives.all_gather(everyone, own, group, operation)
    return everyone.view(size, -1)


def _error(operation: Operation, text: str, ranks: Sequence[int]) -> DistributedError:
    return DistributedError(
        f"float8: {text}", operation=operation.name, rank=collectives.own_rank(), ranks=ranks
    )


def difference(ranks: Sequence[int], facts: Sequence[Facts]) -> tuple[list[int], str]:
    """Returns the ranks that differ in the first topic that differs, and words about the first.

    What most ranks have is right; of two that are equally many, what the first rank has.
    """
    for topic in dict.fromkeys(topic for each in facts for topic in each):
        values = [each.get(topic) for each in facts]
        if all(isinstance(value, dict) for value in values):
            names = dict.fromkeys(name for value in values for name in value)  # type: ignore[union-attr]
            found = [(f"{topic}: {n!r}", [v.get(n) for v in values]) for n in names]  # type: ignore[union-attr]
        else:
            found = [(topic, [v if isinstance(v, str) else json.dumps(v) for v in values])]
        for what, texts in found:
            if len(set(texts)) == 1:
                continue
            most = collections.Counter(texts).most_common(1)[0][0]
            differing = [rank for rank, text in zip(ranks, texts, strict=True) if text != most]
            other = next(rank for rank, text in zip(ranks, texts, strict=True) if text == most)
            text = texts[list(ranks).index(differing[0])]
            more = f" (as do ranks {differing[1:]})" if len(differing) > 1 else ""
            return differing, (
                f"rank {differing[0]} differs{more} in {what}: it has {text or 'none'}, and rank "
                f"{other} has {most or 'none'}; {_REMEDY.get(topic, 'make the ranks equal')}"
            )
    raise AssertionError("the facts are equal")


def _raise_own(facts: Facts, group: Any, topics: Sequence[str]) -> None:
    """Raises what all ranks complain of alike."""
    for topic in topics:
        if not facts.get(topic):
            continue
        text = f"{topic}: {facts[topic]}; {_REMEDY[topic]}"
        if not distributed.is_initialized():
            raise ValueError(f"float8: {text}")
        raise _error(Operation("the comparison of ranks"), text, collectives.ranks_of(group))
