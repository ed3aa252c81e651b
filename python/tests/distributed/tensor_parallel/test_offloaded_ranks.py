"""Activation offload, whose hooks copy saved tensors, with weights that ranks of tensor parallelism share."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
from fused import FeedForward
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import float8.torch as f8


def _grads(model: Any, x: torch.Tensor, offload: bool) -> list[torch.Tensor]:
    if offload:
        with saved_tensors_hooks(torch.clone, torch.clone):
            y = model.mlp(x)
    else:
        y = model.mlp(x)
    y.float().square().sum().backward()
    f8.sync_float8_amax_and_scale_history(model)
    grads: list[Any] = [p.grad for p in model.parameters()]
    model.zero_grad()
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in grads]


def _offloaded(mesh: Any, rank: int, world: int, fused: bool) -> None:
    both = []
    config = f8.LinearConfig("delayed", emulate=ranks.device == "cpu")
    columns, rows = f8.Float8ColwiseParallel, f8.Float8RowwiseParallel
    for _ in range(2):
        torch.manual_seed(0)
        model: Any = nn.ModuleDict({"mlp": FeedForward()}).to(ranks.device, torch.bfloat16)
        f8.convert_to_float8_training(model, config=config)
        parallelize_module(
            model, mesh, {"mlp.w1": columns(), "mlp.w3": columns(), "mlp.w2": rows()}
        )
        if fused:
            assert all(each.fused for each in f8.fuse(model))
        both.append(model)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(2, 16, 64, dtype=torch.bfloat16, device=ranks.device)
        found, expected = (_grads(model, x, model is both[0]) for model in both)
        assert len(found) == 3 and all(map(torch.equal, found, expected))
    assert torch.equal(*(model.float8_scales.state for model in both))


@pytest.mark.parametrize("fused", (False, True))
def test_saved_tensors_may_move(fused: bool, tmp_path: Any) -> None:
    ranks.spawn(_offloaded, 3, tmp_path, fused)
