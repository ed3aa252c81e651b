"""fuse(norms=True) under FSDP2, whose weights are whole in a forward, and of tensors that ranks share."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import ranks
import torch
from parallel_models import expect_trains_as
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import float8.torch as f8
from float8.torch import rms_norm


class NormOfLlama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.eps = 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def _model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(norm, nn.Linear(64, 64)) for norm in (NormOfLlama(), nn.RMSNorm(64, 1e-5))
    ]
    return f8.convert_to_float8_training(
        nn.Sequential(*blocks), config=f8.LinearConfig("blockwise", emulate=True)
    )


def _count_calls() -> list[int]:
    calls: list[int] = []
    by_kernel = rms_norm.by_kernel
    rms_norm.by_kernel = lambda *arguments: calls.append(1) or by_kernel(*arguments)  # type: ignore[assignment, func-returns-value]
    return calls


def _shards(mesh: Any, rank: int, world: int) -> None:
    model: Any = _model()
    single = copy.deepcopy(model)
    f8.fuse(single, norms=True)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(each.fused for each in f8.fuse(model, norms=True))
    calls = _count_calls()
    expect_trains_as(model, single, rank)
    assert len(calls) == 3 * 2 * (1 + world)


def _sequences(mesh: Any, rank: int, world: int) -> None:
    model: Any = _model()
    plain = copy.deepcopy(model)
    f8.fuse(model, norms=True)
    x = torch.randn(2, 8, 64)
    calls = _count_calls()
    for block, own in zip(model, plain, strict=True):
        parallelize_module(block[0], mesh, SequenceParallel())
        y = block[0](x[:, 4 * rank : 4 * rank + 4])
        torch.testing.assert_close(y.full_tensor(), own[0](x))
    assert not calls


@pytest.mark.parametrize("check", [_shards, _sequences])
def test_norms_of_ranks(check: Any, tmp_path: Any) -> None:
    ranks.spawn(check, 2, tmp_path)
