"""Ranks that fail: the others end in time with an error that names the rank, and the next run goes on.

Ranks are processes on the emulated device.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import ranks
import torch
from parallel_models import shard
from torch import distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import float8.torch as f8
from float8.torch.checks import rank_watch
from float8.torch.ranks import collectives

TIMEOUT = 3.0
STEPS = 3


def _model(mesh: Any, recipe: str) -> Any:
    """Returns a model that FSDP shards, or tensor parallelism, as the dimensions of the mesh say."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).to(ranks.device)
    names = mesh.mesh_dim_names or ("shard",)
    config = f8.LinearConfig(
        recipe,
        emulate=ranks.device == "cpu",
        history=2 if recipe == "delayed" else 16,
        enable_fsdp_float8_all_gather=recipe != "delayed" and "shard" in names,
    )
    f8.convert_to_float8_training(model, config=config)
    if "tensor" in names:
        plan = {"0": f8.Float8ColwiseParallel(), "2": f8.Float8RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
    if "shard" in names:
        shard(model, mesh if mesh.ndim == 1 else mesh["shard"])
    return model


def _mesh(mesh: Any, tensor: int) -> Any:
    """Returns the mesh of FSDP over so many ranks of tensor parallelism, or of either alone."""
    if tensor == 1:
        return mesh
    if tensor == mesh.size():
        return distributed.device_mesh.init_device_mesh(
            ranks.device, (tensor,), mesh_dim_names=("tensor",)
        )
    numbers = torch.arange(mesh.size()).view(-1, tensor)
    groups = []
    for rows in (numbers.t(), numbers):
        # The groups of init_device_mesh have a timeout of half an hour.
        made = [
            (row, distributed.new_group(row, timeout=datetime.timedelta(seconds=TIMEOUT)))
            for row in rows.tolist()
        ]
        groups += [group for row, group in made if distributed.get_rank() in row]
    return distributed.device_mesh.DeviceMesh.from_group(
        groups, ranks.device, numbers, mesh_dim_names=("shard", "tensor")
    )


def _replica(mesh: Any) -> int:
    """Returns the number of the batch that this rank has."""
    if mesh.ndim == 2:
        return int(mesh["shard"].get_local_rank())
    return 0 if mesh.mesh_dim_names == ("tensor",) else int(mesh.get_local_rank())


def _step(model: Any, optimizer: Any, step: int, rank: int, in_backward: Any = None) -> float:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * step + rank))
    loss = model(x).square().mean()
    if in_backward is not None:
        loss.register_hook(in_backward)
    loss.backward()
    f8.sync_float8_amax_and_scale_history(model)
    optimizer.step()
    optimizer.zero_grad()
    f8.precompute_float8_dynamic_scale_for_fsdp(model)
    return loss.item()


def _latest(folder: pathlib.Path) -> int:
    """Returns the number of the steps that the latest whole checkpoint has seen."""
    return max((int(each.name) for each in folder.glob("[0-9]*")), default=0)


def _save(folder: pathlib.Path, step: int, model: Any, optimizer: Any, rank: int) -> None:
    own, steps = get_state_dict(model, optimizer)
    dcp.save({"model": own, "optimizer": steps}, checkpoint_id=str(folder / f"new{step}"))
    distributed.barrier()
    if rank == 0:
        (folder / f"new{step}").rename(folder / str(step))


def _load(folder: pathlib.Path, model: Any, optimizer: Any) -> int:
    step = _latest(folder)
    if step > 0:
        own, steps = get_state_dict(model, optimizer)
        state = {"model": own, "optimizer": steps}
        dcp.load(state, checkpoint_id=str(folder / str(step)))
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    return step


def train(
    mesh: Any,
    rank: int,
    folder: str,
    recipe: str,
    fault: str = "",
    at: int = 1,
    tensor: int = 1,
) -> list[float]:
    """Trains from the latest checkpoint on; rank 1 has the fault in a step."""
    mesh = _mesh(mesh, tensor)
    model = _model(mesh, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    path = pathlib.Path(folder)
    collectives._GRACE = 2.0
    losses = []
    scales = None
    try:
        # A run that nothing holds up may take its time, as on a machine with other work.
        with f8.watch(model, timeout=TIMEOUT if fault in ("kill", "hang", "raise") else 60):
            for step in range(_load(path, model, optimizer), STEPS):
                if hasattr(model, "float8_scales"):
                    scales = model.float8_scales.state.clone()
                has_fault = rank == 1 and step == at
                losses.append(
                    _step(
                        model, optimizer, step, _replica(mesh), FAULTS[fault] if has_fault else None
                    )
                )
                _save(path, step + 1, model, optimizer, rank)
    except f8.DistributedError:
        assert _latest(path) == at
        assert scales is None or torch.equal(model.float8_scales.state, scales)
        raise
    return losses


def _kill(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang(_: Any) -> None:
    time.sleep(600)


def _raise(_: Any) -> None:
    raise ZeroDivisionError("no data")


def _die_once(_: Any) -> None:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        _kill(None)


FAULTS = {"": None, "kill": _kill, "hang": _hang, "raise": _raise, "die once": _die_once}


def _main(mesh: Any, rank: int, world: int, *args: Any) -> list[float]:
    return train(mesh, rank, *args)


HUNG = "rank 1 did not come: it was last seen in "
TENSOR_FORWARD = "the tensor parallel forward of 2"
BACKWARD = "the tensor parallel backward of 0 failed after"


@pytest.mark.parametrize(
    ("world", "tensor", "recipe", "fault", "words", "resumes"),
    (
        (3, 1, "delayed", "kill", ("rank 1 did not come", "killed"), True),
        (2, 1, "delayed", "hang", (HUNG, "1 collective behind"), False),
        (4, 1, "rowwise", "hang", (HUNG + "FSDP's all-gather of q of 2",), True),
        (3, 1, "rowwise", "raise", ("rank 1 raised ZeroDivisionError: no data",), False),
        (2, 2, "rowwise", "kill", (BACKWARD, "rank 1 did not come", "killed"), True),
        (3, 3, "tensorwise", "hang", (BACKWARD, HUNG + TENSOR_FORWARD), False),
        (4, 2, "rowwise", "kill", ("rank 1 did not come", "killed"), True),
        (4, 2, "tensorwise", "hang", (HUNG + TENSOR_FORWARD,), False),
    ),
)
def test_the_others_name_the_rank_and_the_next_run_goes_on(
    world: int,
    tensor: int,
    recipe: str,
    fault: str,
    words: tuple[str, ...],
    resumes: bool,
    tmp_path: Any,
) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "faulty"
    whole.mkdir()
    folder.mkdir()
    outcomes = ranks.run(
        _main, world, tmp_path, str(folder), recipe, fault, 1, tensor, timeout=TIMEOUT
    )
    for rank, outcome in enumerate(outcomes):
        if rank == 1:
            assert outcome.exit_code != 0
            continue
        assert outcome.error.startswith(f"DistributedError: float8: rank {rank}: "), outcome.trace
        assert all(each in outcome.error for each in words), outcome.error
        assert outcome.fields["ranks"] == (1,)
    if resumes:
        resumed, expected = (
            ranks.spawn(_main, world, tmp_path, str(each), recipe, "", 1, tensor)
            for each in (folder, whole)
        )
        assert resumed == [losses[1:] for losses in expected]


def _without_watch(mesh: Any, rank: int, world: int, folder: str) -> None:
    model = _model(mesh, "rowwise")
    f8.precompute_float8_dynamic_scale_for_fsdp(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().mul_(2)
    before = [layer._weight_gather._seen for layer in (model[0], model[2])]
    collectives.progress.timeout = 0.5
    collectives._GRACE = 0.5
    if rank == 1:  # does not come before the others have ended
        while not all(pathlib.Path(folder, f"outcome{each}").exists() for each in (0, 2)):
            time.sleep(0.01)
        return
    try:
        f8.precompute_float8_dynamic_scale_for_fsdp(model)
    finally:
        # The copies are those of the weights before.
        assert before == [layer._weight_gather._seen for layer in (model[0], model[2])]


def test_a_collective_of_float8_ends_in_time_without_a_watch(tmp_path: Any) -> None:
    first, second, third = ranks.run(_without_watch, 3, tmp_path, str(tmp_path), timeout=1000)
    for outcome in (first, third):
        assert "the amax all-reduce of 0 and 1 more" in outcome.error
        assert "rank 1 did not come" in outcome.error
        assert outcome.fields["operation"] == "the amax all-reduce"
        assert outcome.fields["layers"] == ("0", "2")
        assert outcome.fields["ranks"] == (1,)
    assert second.exit_code == 0


def _late(mesh: Any, rank: int, world: int) -> list[int]:
    words = torch.tensor([rank, 5 - rank], dtype=torch.int32)
    time.sleep(1.2 * rank)
    collectives.all_reduce_max(words, mesh.get_group(), collectives.Operation("a test"))
    return words.tolist()  # type: ignore[no-any-return]


def test_a_rank_that_is_late_is_waited_for(tmp_path: Any) -> None:
    assert ranks.spawn(_late, 2, tmp_path) == [[1, 5], [1, 5]]


def _destroyed(mesh: Any, rank: int, world: int) -> None:
    model = _model(mesh, "delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(model, optimizer, 0, rank)
    before = model.float8_scales.state.clone()
    model(torch.randn(16, 64))
    if rank == 1:
        distributed.destroy_process_group()
    try:
        f8.sync_float8_amax_and_scale_history(model)
    except f8.DistributedError:
        assert torch.equal(model.float8_scales.state, before)
        raise


def test_a_group_that_is_destroyed_from_outside(tmp_path: Any) -> None:
    for rank, outcome in enumerate(ranks.run(_destroyed, 2, tmp_path, timeout=1000)):
        words = f"float8: rank {rank}: the amax all-reduce of delayed scaling failed"
        assert words in outcome.error, outcome.trace


def _aborted(*_: Any, **__: Any) -> None:
    raise RuntimeError("NCCL communicator was aborted on rank 1.")


def _without_groups(mesh: Any, rank: int, world: int, tensor: int, changed: bool) -> None:
    """Rank 1 loses its process groups between two steps; gloo's go on where somebody holds them."""
    mesh = _mesh(mesh, tensor)
    model = _model(mesh, "rowwise")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    collectives._GRACE = 2.0
    with f8.watch(model, timeout=TIMEOUT):
        _step(model, optimizer, 0, _replica(mesh))
        if changed:  # the weights have to be cast, with collectives of float8
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2)
        if rank == 1 and tensor > 1:
            distributed.destroy_process_group()
        elif rank == 1:
            for name in ("all_gather_single", "_allgather_base", "allreduce"):
                setattr(distributed.ProcessGroup, name, _aborted)
        model(torch.randn(16, 64, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize(
    ("tensor", "changed", "words"),
    (
        (1, False, "FSDP's all-gather of q of 0"),
        (1, True, "the amax all-reduce of 0"),
        (2, False, "the tensor parallel forward of 0"),
    ),
)
def test_a_rank_that_loses_its_groups(
    tensor: int, changed: bool, words: str, tmp_path: Any
) -> None:
    if tensor > 1 and torch.__version__ < "2.11.0a0":
        pytest.skip(
            "PyTorch 2.10 closes gloo's connections with the groups, so that both ranks fail at once"
        )
    cause = "Could not resolve the process group" if tensor > 1 else "aborted on rank 1."
    outcomes = ranks.run(_without_groups, 2, tmp_path, tensor, changed, timeout=TIMEOUT)
    for rank, outcome in enumerate(outcomes):
        # The watch may come before the collective's own error.
        start = f"DistributedError: float8: rank {rank}: {words}"
        assert outcome.error.startswith(start), outcome.trace
        assert "\n" not in outcome.error and cause in outcome.error
        assert outcome.fields["operation"] in words
        assert outcome.fields["ranks"] == ((1,) if rank == 0 else ()), outcome.error
    state = "failed first" if tensor > 1 else "is behind"
    assert f"rank 1 {state}, in {words}" in outcomes[0].error


def _stuck(mesh: Any, rank: int, world: int, folder: str) -> None:
    """Rank 1 hangs, and the timeout of the process groups is far away."""
    with pathlib.Path(folder, f"stderr{rank}").open("w") as file:
        os.dup2(file.fileno(), 2)
    model = _model(mesh, "rowwise")
    x = torch.randn(16, 64).to(ranks.device)
    # A GPU's kernels are compiled here; no rank enters the watch while another one compiles.
    model(x).square().mean().backward()
    distributed.barrier()
    if ranks.device == "cuda":
        torch.cuda.synchronize()
    collectives._GRACE = 1.0
    pathlib.Path(folder, f"began{rank}").touch()
    with f8.watch(model, timeout=2.0):
        loss = model(x).square().mean()
        if rank == 1:
            loss.register_hook(_hang)
        loss.backward()
        loss.item()
        if ranks.device == "cuda":
            torch.cuda.synchronize()


def _expect_ends(outcomes: list[ranks.Outcome], folder: Any) -> None:
    assert outcomes[0].exit_code != 0, outcomes
    assert outcomes[1].exit_code == 75, outcomes
    for rank in range(len(outcomes)):
        # A rank that ends itself says so last. Its whole time has the compilation of kernels.
        began, said = (folder / f"{name}{rank}" for name in ("began", "stderr"))
        assert said.stat().st_mtime - began.stat().st_mtime < 25
        words = said.read_text()
        assert f"float8: rank {rank}: FSDP's all-gather of q" in words, words
        assert "aborted" in words
        if rank != 1:
            assert re.search("rank 1 .* last seen in FSDP's all-gather of q of 2", words), words


def test_a_process_that_is_stuck_ends(tmp_path: Any) -> None:
    outcomes = ranks.run(_stuck, 2, tmp_path, str(tmp_path), timeout=1000)
    _expect_ends(outcomes, tmp_path)


@ranks.needs_gpus(2)
def test_a_process_that_is_stuck_in_nccl_ends(tmp_path: Any) -> None:
    outcomes = ranks.run(_stuck, 2, tmp_path, str(tmp_path), on="cuda", timeout=1000)
    _expect_ends(outcomes, tmp_path)


def _stuck_with_the_lock(mesh: Any, rank: int, world: int, folder: str) -> None:
    rank_watch._abort = lambda: ctypes.PyDLL(None).sleep(600)
    _stuck(mesh, rank, world, folder)


def test_a_process_whose_interpreter_is_stuck_ends(tmp_path: Any) -> None:
    for outcome in ranks.run(_stuck_with_the_lock, 2, tmp_path, str(tmp_path), timeout=1000):
        assert outcome.exit_code == 1
    for rank in range(2):
        words = (tmp_path / f"stderr{rank}").read_text()
        assert "aborted" in words
        assert "_stuck_with_the_lock" in words and "most recent call first" in words


def test_one_process_needs_no_ranks() -> None:
    before = collectives.progress.timeout
    with f8.watch(timeout=1) as watching:
        watching.mark("nothing")
        assert collectives.progress.timeout == 1
    assert collectives.progress.timeout == before


def test_a_watch_lets_errors_through() -> None:
    with pytest.raises(ZeroDivisionError), f8.watch(nn.Linear(1, 1)):
        raise ZeroDivisionError


def test_a_watch_of_no_time() -> None:
    with pytest.raises(ValueError, match="more than 0"):
        f8.watch(timeout=0)


def _store_gone(mesh: Any, rank: int, world: int) -> None:
    model = _model(mesh, "rowwise")
    with f8.watch(model, timeout=TIMEOUT):
        f8.precompute_float8_dynamic_scale_for_fsdp(model)
        if rank == 0:
            _kill(None)
        model(torch.randn(16, 64)).sum().backward()


def test_the_rank_that_keeps_the_store_is_killed(tmp_path: Any) -> None:
    first, second = ranks.run(_store_gone, 2, tmp_path, init="tcp", timeout=TIMEOUT)
    assert first.killed
    assert "rank 0's, has ended" in second.error, second.error
    assert second.fields["ranks"] == (0,)


def _not_a_number(mesh: Any, rank: int, world: int, saturate: bool) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    config = f8.LinearConfig("delayed", emulate=True, history=2, saturate=saturate)
    fully_shard(f8.convert_to_float8_training(model, config=config), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    states = []
    for step in range(3):
        x = torch.randn(16, 64)
        if step == 1 and rank == 1:
            x[3, 5] = torch.nan
        with f8.watch(model, timeout=60):
            model(x).square().mean().backward()
            f8.sync_float8_amax_and_scale_history(model)
            optimizer.zero_grad()
        states.append(model.float8_scales.state.tolist())
    return states


@pytest.mark.parametrize("saturate", (False, True))
def test_a_nan_on_one_rank_gives_equal_scales(saturate: bool, tmp_path: Any) -> None:
    first, second, third = ranks.spawn(_not_a_number, 3, tmp_path, saturate)
    assert first == second == third


def test_torchrun_restarts_and_the_run_goes_on(tmp_path: Any) -> None:
    (tmp_path / "whole").mkdir()
    expected = ranks.spawn(_main, 2, tmp_path, str(tmp_path / "whole"), "rowwise")
    program = pathlib.Path(__file__).with_name("elastic_training.py")
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    command += ("--max-restarts=1", "--monitor-interval=0.1", str(program), str(tmp_path))
    # A store that outlives the processes keeps the addresses of those that died.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # for ranks.py
    ended = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=1200
    )
    assert ended.returncode == 0, ended.stderr
    losses = [json.loads((tmp_path / f"losses{rank}").read_text()) for rank in range(2)]
    assert losses == [each[1:] for each in expected]


def _frees_what_is_no_block(_: Any, rank: int, world: int) -> int:
    if rank == 1:
        libc = ctypes.CDLL(None)
        libc.calloc.restype = ctypes.c_void_p
        libc.free(ctypes.c_void_p(libc.calloc(1, 64) + 8))
    return rank


def test_a_rank_that_a_signal_ends_fails_the_test_with_its_last_words(tmp_path: Any) -> None:
    # The allocator's words, and where Python was.
    words = r"rank 1: exit code -6\n(?s:.*)free\(\): invalid pointer(?s:.*)_frees_what_is_no_block"
    with pytest.raises(AssertionError, match=words):
        ranks.spawn(_frees_what_is_no_block, 2, tmp_path)
