"""Delayed scaling on ranks alone, under DistributedDataParallel, which copies rank 0's buffers before each forward,
and under FSDP2 from a model on the meta device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import ranks
import torch
from parallel_models import shard
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

import float8.torch as f8


class Outer(nn.Module):
    """A model of which a part was converted before the whole was wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        self.norm = nn.BatchNorm1d(64, affine=False)  # it has buffers that are to be copied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x)
        return y


def _outer(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = Outer()
    f8.convert_to_float8_training(model.body, config=f8.LinearConfig("delayed", emulate=True))
    return model


def _state(model: Any) -> torch.Tensor:
    state: torch.Tensor = model.body.float8_scales.state
    return state


def _batches(step: int) -> torch.Tensor:
    """Of two ranks two micro-batches each: rank 1's first one is the largest."""
    torch.manual_seed(step)
    scale = torch.tensor([[1.0, 2.0], [40.0, 1.0]])
    return torch.randn(2, 2, 16, 64) * scale[:, :, None, None]


def _training_rank(mesh: Any, rank: int, world: int, how: str) -> None:
    model, single = _outer(), _outer()
    wrapped = model if how == "no wrapper" else DistributedDataParallel(model)
    for step in range(3):
        x = _batches(step)
        expected = [[single(micro) for micro in of_rank] for of_rank in x]
        for of_rank in expected:
            for y in of_rank:
                y.square().mean().backward()
        # The amaxes of one process are those of all ranks already.
        single.body.float8_scales._reduce = lambda group: None
        f8.sync_float8_amax_and_scale_history(single)
        if how != "two forwards":
            ys = []
            for micro in x[rank]:
                ys.append(wrapped(micro))
                ys[-1].square().mean().backward()
        else:
            ys = [wrapped(micro) for micro in x[rank]]
            sum(y.square().mean() for y in ys).backward()
        f8.sync_float8_amax_and_scale_history(wrapped)
        for y, want in zip(ys, expected[rank], strict=True):
            assert torch.equal(y, want), f"step {step}"
        assert torch.equal(_state(model), _state(single))
        wrapped.zero_grad()
        single.zero_grad()


@pytest.mark.parametrize("how", ("micro-batches", "two forwards", "no wrapper"))
def test_all_amaxes_of_a_step_count(how: str, tmp_path: Any) -> None:
    ranks.spawn(_training_rank, 2, tmp_path, how)


def _step(wrapped: Any, rank: int) -> None:
    wrapped(_batches(1)[rank][0]).square().mean().backward()
    f8.sync_float8_amax_and_scale_history(wrapped)


def _saving_rank(mesh: Any, rank: int, world: int) -> None:
    wrapped, other = DistributedDataParallel(_outer()), DistributedDataParallel(_outer(1))
    _step(wrapped, rank)
    state = copy.deepcopy(get_model_state_dict(wrapped))
    assert torch.equal(state["body.float8_scales.state"], _state(wrapped.module))
    set_model_state_dict(other, state)
    assert torch.equal(_state(other.module), _state(wrapped.module))
    _step(wrapped, rank)
    _step(other, rank)
    assert torch.equal(_state(other.module), _state(wrapped.module))
    other.load_state_dict(wrapped.state_dict())
    assert torch.equal(_state(other.module), _state(wrapped.module))


def test_checkpoints_have_the_state(tmp_path: Any) -> None:
    ranks.spawn(_saving_rank, 2, tmp_path)


def _loading_rank(mesh: Any, rank: int, world: int) -> None:
    """Rank 0 alone loads, and DDP copies what it has to the others."""
    trained = _outer()
    trained.body.float8_scales._reduce = lambda group: None
    trained(1000 * _batches(0)[0][0]).sum().backward()
    f8.sync_float8_amax_and_scale_history(trained)
    model = _outer(1 + rank)
    if rank == 0:
        model.load_state_dict(copy.deepcopy(trained.state_dict()))
    wrapped = DistributedDataParallel(model)
    _step(wrapped, rank)
    own = _state(model)
    of_all = [torch.empty_like(own) for _ in range(world)]
    distributed.all_gather(of_all, own)
    assert torch.equal(of_all[0], of_all[1])
    history = model.body.float8_scales._histories().view(16, -1).view(torch.float32)
    before = trained.body.float8_scales._histories().view(16, -1).view(torch.float32)
    assert torch.equal(history[1], before[0]) and history[0, 0] < history[1, 0]


def test_one_rank_loads_for_all(tmp_path: Any) -> None:
    ranks.spawn(_loading_rank, 2, tmp_path)


def _meta_rank(mesh: Any, rank: int, world: int, broadcast: bool, scales: bool) -> None:
    """Shards a model on the meta device, then loads a full state dict, as PyTorch's tutorial does."""
    trained = _outer().body
    _step(trained, rank)
    state = copy.deepcopy(trained.state_dict())
    if not scales:
        del state["float8_scales.state"]
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    f8.convert_to_float8_training(model, config=f8.LinearConfig("delayed", emulate=True))
    shard(model, mesh)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    loaded = copy.deepcopy(state) if rank == 0 or not broadcast else {}
    set_model_state_dict(model, loaded, options=options)
    own: Any = model.float8_scales
    trained.load_state_dict(state)
    assert own.first == trained.float8_scales.first == ([] if scales else [0, 1])
    assert torch.equal(own.state, trained.float8_scales.state)
    for _ in range(2):
        _step(model, rank)
        _step(trained, rank)
        assert torch.equal(own.state, trained.float8_scales.state)


@pytest.mark.parametrize("broadcast", (False, True))
@pytest.mark.parametrize("scales", (False, True))
def test_meta_model_under_fsdp(scales: bool, broadcast: bool, tmp_path: Any) -> None:
    ranks.spawn(_meta_rank, 2, tmp_path, broadcast, scales)
