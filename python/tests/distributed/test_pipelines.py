"""Schedules of torch.distributed.pipelining, with both stages on one rank."""

from __future__ import annotations

from typing import Any

import fused
import pytest
import ranks
import torch
import torch.nn.functional as F
from reference import same
from torch import nn

import float8.torch as f8
from float8.torch import _linear

_MICRO_BATCHES = 2
_DX, _DW = 1, 2  # bits of what a linear's backward is asked for


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, 64)
        self.mlp = fused.FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.project(x)
        return x + self.mlp(x)  # type: ignore[no-any-return]


def _stages(recipe: str, fuse: bool) -> list[nn.Module]:
    config = f8.LinearConfig(recipe, emulate=True)
    stages = [fused.converted(nn.Sequential(_Block()), config) for _ in range(2)]
    if fuse:
        assert [reason for stage in stages for reason in fused.reasons(stage)] == []
    return stages


def _loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(y.float(), target.float())


def _plain_step(stages: list[nn.Module], x: torch.Tensor, target: torch.Tensor) -> None:
    for part, of_part in zip(x.chunk(_MICRO_BATCHES), target.chunk(_MICRO_BATCHES), strict=True):
        _loss(stages[1](stages[0](part)), of_part).backward()
    for each in _parameters(stages):
        each.grad /= _MICRO_BATCHES


def _parameters(stages: list[nn.Module]) -> list[Any]:
    return [each for stage in stages for each in stage.parameters()]


def _train(recipe: str, fuse: bool, name: str) -> None:
    """Steps of a schedule have the gradients of plain steps, and of delayed scaling the same scales."""
    plain, piped = (_stages(recipe, fuse) for _ in range(2))
    for one, other in zip(piped, plain, strict=True):
        one.load_state_dict(other.state_dict())
    from torch.distributed.pipelining import PipelineStage, schedules  # it takes a while to load

    own = [PipelineStage(piped[i], i, 2, torch.device("cpu")) for i in range(2)]
    schedule = getattr(schedules, name)(own, _MICRO_BATCHES, loss_fn=_loss)
    for step in range(2):
        x, target = fused.inputs(piped[0], seed=step), fused.inputs(piped[0], seed=9 + step)
        schedule.step(x, target=target)
        _plain_step(plain, x, target)
        grads = [[each.grad for each in _parameters(stages)] for stages in (piped, plain)]
        assert same(*grads), f"step {step}"
        for stages in (piped, plain):
            for stage in stages:
                f8.sync_float8_amax_and_scale_history(stage)
            torch.optim.SGD(_parameters(stages), lr=0.1).step()
            torch.optim.SGD(_parameters(stages)).zero_grad()


def _schedules(mesh: Any, rank: int, world: int) -> None:
    # Pipelines are loaded behind this conversion, and before the others.
    _train("delayed", True, "ScheduleZBVZeroBubble")
    _train("delayed", False, "ScheduleInterleaved1F1B")


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="this PyTorch sends what a rank's own stages exchange"
)
def test_schedules_have_the_gradients_of_plain_steps(tmp_path: Any) -> None:
    ranks.spawn(_schedules, 1, tmp_path)


@pytest.mark.parametrize("fuse", (False, True))
def test_a_backward_computes_what_is_wanted(fuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[int] = []
    call = _linear.call_backward

    def counted(*args: Any) -> Any:
        wanted.append(args[9] & (_DX | _DW))
        return call(*args)

    (stage, _) = _stages("tensorwise", fuse)
    x = fused.inputs(stage).requires_grad_()
    weights = [each for name, each in stage.named_parameters() if "weight" in name]
    stage(x).sum().backward()
    expected = [x.grad, *(each.grad for each in weights)]
    monkeypatch.setattr(_linear, "call_backward", counted)
    y = stage(x).sum()
    (dx,) = torch.autograd.grad(y, x, retain_graph=True)
    assert wanted == [_DX] * 4
    wanted.clear()
    grads = torch.autograd.grad(y, weights, retain_graph=True)
    assert wanted.count(_DW) >= 1 and all(each & _DW for each in wanted) and len(wanted) == 4
    assert same([dx, *grads], expected)
    wanted.clear()
    stage.zero_grad()
    y.backward(inputs=weights[:1])
    assert same([weights[0].grad], expected[1:2])
    assert [each.grad for each in weights[1:]] == [None] * 3
    assert wanted == [_DX] * 3 + [_DW]
