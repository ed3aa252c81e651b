"""Delayed scaling of experts whose weights FSDP gathers in fp8: what casts of shards record, and first steps."""

from __future__ import annotations

import copy
from typing import Any

import expert_shards
import pytest
import ranks
import torch
from torch import distributed, nn

import float8.torch as f8

BF16 = torch.bfloat16


class _Layer(nn.Module):
    """SwiGLU experts of tokens that are for two of them each."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = f8.Experts(experts, expert_shards.HIDDEN, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        experts = self.experts.w2.shape[0]
        ids = torch.arange(2 * len(x), device=x.device).view(-1, 2) % experts
        y: torch.Tensor = self.experts(x, ids, torch.ones(ids.shape, device=x.device))
        return x + y


def _pair(mesh: Any, dim: int = 0, experts: int = 3, no_up: bool = False) -> list[Any]:
    """Returns two layers with fp8 gathers and with gathers in high precision. `no_up`: up begins with zeros."""
    torch.manual_seed(0)
    plain = nn.Sequential(_Layer(experts), _Layer(experts)).to(ranks.device)
    if no_up:
        for layer in plain:
            layer.experts.w13.data[:, 48:] = 0
    return [
        expert_shards.shard(
            expert_shards.convert(copy.deepcopy(plain), "delayed", gather), mesh, dim
        )
        for gather in (True, False)
    ]


def _compute(model: Any, x: torch.Tensor, within: torch.dtype | None) -> torch.Tensor:
    with torch.autocast(ranks.device, within or BF16, enabled=within is not None):
        y: torch.Tensor = model(x)
    return y


@torch.no_grad()
def _evaluate(models: list[Any], x: torch.Tensor, within: torch.dtype | None, factor: int) -> None:
    """Compares results with weights that are larger by a power of two for a while."""
    ys = []
    for model in models:
        torch._foreach_mul_(list(model.parameters()), factor)
        ys.append(_compute(model, x, within))
        torch._foreach_div_(list(model.parameters()), factor)
    assert torch.equal(*ys)


def _update(models: list[Any], optimizers: list[torch.optim.Optimizer]) -> None:
    expert_shards.expect_equal_scales(models)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one.to_local(), other.to_local())


def _optimizers(models: list[Any]) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]


def _evaluates(mesh: Any, rank: int, world: int, dim: int) -> None:
    x = expert_shards.rows(world)[rank]
    models = _pair(mesh, dim)
    optimizers = _optimizers(models)
    before = expert_shards.copies_of(models[0])
    _evaluate(models, x, None, 4)  # before the first step too
    for step in range(3):
        for within in (BF16, None, BF16)[: 2 + step % 2]:  # of micro-batches, and both are recorded
            ys = [_compute(model, x, within) for model in models]
            assert torch.equal(*ys), (step, within)
            for y in ys:
                y.float().square().mean().backward()
        _evaluate(models, x, BF16, 1)
        _evaluate(models, x, None, 1)
        _evaluate(models, x, BF16, 4)
        _update(models, optimizers)
        f8.precompute_float8_dynamic_scale_for_fsdp(models[0])
        _evaluate(models, x, BF16, 4)
    expert_shards.expect_equal_scales(models)  # no forward with gradients was between
    expert_shards.expect_changes(before, models[0])


@pytest.mark.parametrize("dim", [0, 1])
def test_evaluations_leave_no_amax(dim: int, tmp_path: Any) -> None:
    """Nor do casts for another type of x, and of weights that changed again."""
    ranks.spawn(_evaluates, 2, tmp_path, dim)


def _begins_with_zeros(mesh: Any, rank: int, world: int) -> None:
    """One call computes with w13 and w2: where w2 has no scales yet, w13 has those of its values too."""
    x = expert_shards.rows(world)[rank]
    models = _pair(mesh, no_up=True)
    optimizers = _optimizers(models)
    before = expert_shards.copies_of(models[0])
    first = []
    for _ in range(4):
        first.append([each._first_step for each in models[0][0].experts.expert_linears])
        ys = [model(x) for model in models]
        assert torch.equal(*ys), first
        for y in ys:
            y.square().mean().backward()
        _update(models, optimizers)
    assert first == [[True, True], *3 * [[False, True]]]  # x of w2 grows
    expert_shards.expect_changes(before, models[0])


def test_weights_that_begin_with_zeros(tmp_path: Any) -> None:
    ranks.spawn(_begins_with_zeros, 2, tmp_path)


def _failed(mesh: Any, rank: int, world: int) -> None:
    """A step that fails, one that is not finite, and a checkpoint without scales."""
    x = expert_shards.rows(world)[rank]
    models = _pair(mesh, dim=1)
    expert_shards.expect_equal_steps(models, x)
    amaxes = []
    for model in models:
        scales = model.float8_scales
        model(2 * x).sum().backward()
        scales.discard_step()
        with torch.no_grad():
            model(4 * x)
        model(x)
        amaxes.append(scales.amaxes().clone())
        distributed.all_reduce(amaxes[-1], distributed.ReduceOp.MAX)
        model.zero_grad()
    assert torch.equal(*amaxes)
    assert amaxes[0].count_nonzero() == 8  # of x and w of two weights of each layer
    kept = models[0].float8_scales._live.clone()
    for model in models:
        model(x * (torch.inf if rank == 1 else 1)).sum().backward()
        model.zero_grad()
    expert_shards.expect_equal_scales(models)
    live = models[0].float8_scales
    begin, end = live._history_bytes()
    assert torch.equal(live._live[begin:end], kept[begin:end])
    for model in models:
        torch._foreach_mul_([p.detach() for p in model.parameters()], 2)
    expert_shards.expect_equal_steps(models, x)
    for model in models:
        state = model.state_dict()
        del state["float8_scales.state"]
        model.load_state_dict(state, strict=False)
    expert_shards.expect_equal_steps(models, x)


def test_steps_that_fail(tmp_path: Any) -> None:
    ranks.spawn(_failed, 2, tmp_path)
