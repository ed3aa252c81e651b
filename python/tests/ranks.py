"""Ranks of a distributed test: processes with gloo on CPUs, or with NCCL on as many GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

device = "cpu"  # of a rank


def _start(
    rank: int, main: Callable[..., None], world: int, store: str, on: str, *args: Any
) -> None:
    global device
    device = on
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(backend, f"file://{store}", world_size=world, rank=rank)
    mesh = distributed.device_mesh.init_device_mesh(device, (world,))
    main(mesh, rank, world, *args)
    distributed.destroy_process_group()
    # A thread of the gloo backend that still runs aborts a process that tears itself down.
    os._exit(0)


def spawn(
    main: Callable[..., None], world: int, tmp_path: Any, *args: Any, device: str = "cpu"
) -> None:
    """Runs main(mesh, rank, world, *args) on as many ranks; fails where one of them does."""
    arguments = (main, world, str(tmp_path / "store"), device, *args)
    torch.multiprocessing.spawn(_start, arguments, nprocs=world)


class Collectives(TorchDispatchMode):
    """Lists the functional collectives that are called: name, element type, bytes given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, torch.dtype, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "_c10d_functional" and "wait" not in func.__name__:
            given = args[0]
            size = given.numel() * given.element_size()
            self.calls.append((func._opname, given.dtype, size))
        return func(*args, **(kwargs or {}))
