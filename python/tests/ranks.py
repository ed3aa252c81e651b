"""Ranks as processes of this machine, on the emulated device or on GPUs.

The processes are forked by a server that has imported PyTorch once, and has no CUDA context.
"""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import multiprocessing
import multiprocessing.forkserver
import os
import pathlib
import pickle
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import costs
import pytest
import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

import float8.torch
from float8.torch.ranks import collectives, gloo

device = "cpu"  # of a rank
whole_graphs = torch.__version__ < "2.14.0a0"  # later ones refuse fullgraph=True over FSDP's hooks
_PRELOAD = [  # what ranks would each import
    "ranks",
    "functorch.compile",
    "float8.torch.parallel.tensor_parallel",
    "torch._dynamo.backends.common",
    "torch._inductor.lowering",  # which the partition of every compiled graph imports
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed._ops.device_mesh",  # which DTensors in graphs import
    "torch.distributed.fsdp",
    "torch.distributed.tensor.experimental",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
]


@dataclasses.dataclass
class Outcome:
    """How a rank ended."""

    exit_code: int | None
    value: Any = None  # what its main returned
    error: str = ""  # the type and the words of what it raised
    trace: str = ""
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)  # of what it raised

    @property
    def killed(self) -> bool:
        return self.exit_code == -signal.SIGKILL

    @property
    def by_signal(self) -> bool:
        return self.exit_code is not None and self.exit_code < 0


def _start(
    rank: int,
    main: Callable[..., Any],
    world: int,
    folder: str,
    on: str,
    timeout: float,
    init: str,
    args: tuple[Any, ...],
) -> None:
    global device
    device = on
    if on == "cpu":  # meshes that name no device are the GPUs' where there are some
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    costs.begin()
    stacks = open(pathlib.Path(folder, f"stacks{rank}"), "w")  # noqa: SIM115 (open until the end)
    faulthandler.register(signal.SIGUSR1, stacks)
    faulthandler.enable(stacks)
    os.dup2(stacks.fileno(), 2)  # what malloc and C++ say before a signal ends the rank
    torch.set_num_threads(1)
    torch.manual_seed(0)
    float8.torch.check_copies()
    collectives.progress.timeout = max(collectives.progress.timeout, timeout)
    gloo.use_one_thread()
    if on == "cuda":
        torch.cuda.set_device(rank)
    outcome: dict[str, Any] = {}
    try:
        distributed.init_process_group(
            "nccl" if on == "cuda" else "gloo",
            init,
            world_size=world,
            rank=rank,
            timeout=datetime.timedelta(seconds=timeout),
        )
        mesh = distributed.device_mesh.init_device_mesh(on, (world,))
        outcome["value"] = main(mesh, rank, world, *args)
    except BaseException as error:
        outcome["error"] = f"{type(error).__name__}: {error}"
        outcome["trace"] = traceback.format_exc()
        outcome["fields"] = {k: v for k, v in vars(error).items() if not k.startswith("_")}
    pathlib.Path(folder, f"outcome{rank}").write_bytes(pickle.dumps(outcome))
    # gloo's groups end with the process (docs/lab/gloo-ranks.md).
    if on == "cuda" and not outcome.get("error") and distributed.is_initialized():
        distributed.destroy_process_group()
    pathlib.Path(folder, f"ended{rank}").touch()
    if not outcome.get("error"):
        _wait_for_all(pathlib.Path(folder), world)
    os._exit(1 if outcome.get("error") else 0)


def _wait_for_all(folder: pathlib.Path, world: int) -> None:
    """Waits for ranks that may still read what this one sent: its end would reset the connection."""
    until = time.monotonic() + 2  # for one that was killed
    while time.monotonic() < until:
        if all((folder / f"ended{each}").exists() for each in range(world)):
            return
        time.sleep(0.01)


def run(
    main: Callable[..., Any],
    world: int,
    folder: Any,
    *args: Any,
    on: str = "cpu",
    timeout: float = 60,
    init: str = "file",
    limit: float = 1200,
) -> list[Outcome]:
    """Runs main(mesh, rank, world, *args) in processes that end by themselves, or after `limit`.

    timeout: that of the process groups, and limit: that of the processes, in seconds.
    init: "file", or "tcp" for a store that rank 0 keeps.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        (folder / f"ended{rank}").unlink(missing_ok=True)
    context = _context()
    where = f"file://{folder / f'store{time.monotonic_ns()}'}"
    if init == "tcp":
        where = f"tcp://127.0.0.1:{_free_port()}"
    processes = [
        context.Process(
            target=_start, args=(rank, main, world, str(folder), on, timeout, where, args)
        )
        for rank in range(world)
    ]
    start = time.monotonic()
    for process in processes:
        process.start()
    outcomes = []
    for rank, process in enumerate(processes):
        process.join(max(0.1, start + limit - time.monotonic()))
        outcome = Outcome(None)
        if process.is_alive():
            outcome.trace = _stacks(process.pid, folder / f"stacks{rank}")
            process.kill()
            process.join()
        outcome.exit_code = process.exitcode
        file = folder / f"outcome{rank}"
        if file.exists():
            outcome = dataclasses.replace(outcome, **pickle.loads(file.read_bytes()))
            file.unlink()
        elif outcome.by_signal and not outcome.trace:
            stacks = folder / f"stacks{rank}"
            outcome.trace = stacks.read_text() if stacks.exists() else ""
        outcomes.append(outcome)
    return outcomes


def _start_program(
    rank: int, world: int, port: int, folder: str, script: str, arguments: tuple[str, ...]
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    costs.begin()
    for descriptor, name in ((1, "output"), (2, "errors")):
        with open(pathlib.Path(folder, f"{name}{rank}"), "wb") as file:
            os.dup2(file.fileno(), descriptor)
    torch.set_num_threads(1)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(pathlib.Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def run_program(script: Any, *arguments: object, world: int = 2) -> str:
    """Runs a program for torchrun on ranks that fork from the server, and returns what rank 0 prints.

    torchrun takes several times as long: it imports PyTorch once for itself and once for each rank.
    """
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        given = (world, port, folder, str(script), tuple(map(str, arguments)))
        processes = [
            _context().Process(target=_start_program, args=(rank, *given)) for rank in range(world)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(1200)
            if process.exitcode is None:
                process.kill()
                process.join()
        outputs, errors = (
            [pathlib.Path(folder, f"{name}{rank}").read_text() for rank in range(world)]
            for name in ("output", "errors")
        )
        codes = [process.exitcode for process in processes]
        assert codes == [0] * world, f"exit codes {codes}\n" + "\n".join(outputs + errors)
        return outputs[0]


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with pytest.MonkeyPatch.context() as patch:  # the server finds this file
        patch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parent), prepend=os.pathsep)
        multiprocessing.forkserver.ensure_running()
    return context


def _stacks(process: int | None, file: pathlib.Path) -> str:
    """Returns where a process that does not end is."""
    assert process is not None
    if file.exists():
        os.kill(process, signal.SIGUSR1)
        time.sleep(0.2)
    return "did not end; its stacks:\n" + (file.read_text() if file.exists() else "none")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def spawn(
    main: Callable[..., Any],
    world: int,
    folder: Any,
    *args: Any,
    device: str = "cpu",
    limit: float | None = None,
) -> list[Any]:
    """Runs ranks that all end well, and returns what they returned.

    limit: seconds, of which a rank waits half for another one; None: what a busy machine may take.
    """
    limit = limit or (1200 if device == "cpu" else 120)
    outcomes = run(main, world, folder, *args, on=device, timeout=limit / 2, limit=limit)
    failed = [
        f"rank {rank}: exit code {outcome.exit_code}\n{outcome.trace}"
        for rank, outcome in enumerate(outcomes)
        if outcome.exit_code != 0
    ]
    assert not failed, "\n".join(failed)
    return [outcome.value for outcome in outcomes]


def _gpu_marks(count: int) -> tuple[pytest.MarkDecorator, ...]:
    few = torch.cuda.device_count() < count
    return pytest.mark.gpu, pytest.mark.skipif(few, reason=f"needs {count} GPUs")


def gpus(*worlds: int) -> list[Any]:
    """Returns parameters of tests on so many GPUs."""
    return [pytest.param(world, marks=_gpu_marks(world)) for world in worlds]


def needs_gpus(count: int) -> Callable[[Any], Any]:
    """Marks a test that needs so many GPUs."""

    def mark(test: Any) -> Any:
        for each in _gpu_marks(count):
            test = each(test)
        return test

    return mark


class Traffic:
    """Counts the bytes that a rank gives to all-gathers, and the all-reduces."""

    def __init__(self) -> None:
        self.gathered: list[tuple[torch.dtype, int]] = []
        self.reduced = 0
        group = distributed.ProcessGroup
        single = "all_gather_single"  # PyTorch before 2.13 has the other name
        self._patch(group, single if hasattr(group, single) else "_allgather_base", self._gather)
        self._patch(group, "allreduce", self._reduce)

    def _patch(self, group: Any, name: str, count: Callable[..., None]) -> None:
        original = getattr(group, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            count(*args)
            return original(*args, **kwargs)

        setattr(group, name, counting)

    def _gather(self, group: Any, output: Any, input: torch.Tensor, *_: Any) -> None:
        self.gathered.append((input.dtype, input.numel() * input.element_size()))

    def _reduce(self, *_: Any) -> None:
        self.reduced += 1

    def of(self, call: Callable[[], object]) -> tuple[dict[torch.dtype, int], int]:
        """Returns the bytes by type, and the all-reduces, of a call."""
        self.gathered, self.reduced = [], 0
        call()
        total: dict[torch.dtype, int] = {}
        for dtype, size in self.gathered:
            total[dtype] = total.get(dtype, 0) + size
        return total, self.reduced


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
