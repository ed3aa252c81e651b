"""FSDP2 over two ranks of one machine, on the emulated device: what one device computes."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import float8.torch as f8


def _rank(rank: int, store: str, recipe: str) -> None:
    distributed.init_process_group("gloo", f"file://{store}", world_size=2, rank=rank)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (2,))  # also beside a GPU
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    f8.convert_to_float8_training(model, config=f8.LinearConfig(recipe, emulate=True))
    single = copy.deepcopy(model)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, single)]
    x = torch.randn(2, 32, 64)
    for _ in range(3):
        model(x[rank]).square().mean().backward()
        for part in x:
            (single(part).square().mean() / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for sharded, whole in zip(model.parameters(), single.parameters(), strict=True):
        assert torch.equal(sharded.full_tensor(), whole)
    distributed.destroy_process_group()
    # A thread of the gloo backend that still runs aborts a process that tears itself down.
    os._exit(0)


def test_fsdp2(tmp_path: Any) -> None:
    torch.multiprocessing.spawn(_rank, (str(tmp_path / "store"), "rowwise"), nprocs=2)
