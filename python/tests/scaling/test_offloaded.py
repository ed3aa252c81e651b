"""Delayed scaling where hooks of saved tensors copy these, as activation offload does: a copy is no part of a scale state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused import FeedForward
from reference import same
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import float8.torch as f8

Config = Callable[..., f8.LinearConfig]
D, EXPERTS = 64, 4


class Routed(nn.Module):
    """Experts whose gradients are those of whole layers, or of each GEMM."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D, device=device, dtype=torch.bfloat16)
        self.experts = f8.Experts(
            EXPERTS, D, 96, recipe="delayed", emulate=device == "cpu", device=device, dtype=torch.bfloat16
        )  # fmt: skip
        for p in self.experts.parameters():
            nn.init.normal_(p, std=0.1)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.linear(x)
        ids = torch.arange(2 * len(x), device=x.device).view(-1, 2) % EXPERTS
        return self.experts(x, ids, torch.full(ids.shape, 0.5, device=x.device))


def steps(model: Any, device: str, offload: bool) -> list[torch.Tensor]:
    found = []
    for seed in range(3):
        x = torch.randn(48, D, generator=torch.Generator().manual_seed(seed))
        leaf = x.to(device, torch.bfloat16).requires_grad_()
        if offload:
            with saved_tensors_hooks(torch.clone, torch.clone):
                y = model(leaf)
        else:
            y = model(leaf)
        y.float().square().mean().backward()
        f8.sync_float8_amax_and_scale_history(model)
        grads = [p.grad for p in (leaf, *model.parameters()) if p.grad is not None]
        assert len(grads) == 1 + len(list(model.parameters()))
        found += [y.detach(), *grads]
        model.zero_grad()
    return found


@pytest.mark.parametrize("recompute", (None, True))
@pytest.mark.parametrize("kind", ("linears", "fused", "experts"))
def test_steps_have_the_same_bits(
    kind: str, recompute: bool | None, device: str, config: Config
) -> None:
    model: Any = Routed(device) if kind == "experts" else FeedForward().to(device, torch.bfloat16)
    options = config("delayed", recompute=recompute)
    f8.convert_to_float8_training(model, config=options, experts=kind == "experts")
    if kind == "fused":
        assert all(each.fused for each in f8.fuse(model))
    other = copy.deepcopy(model)
    assert same(steps(other, device, True), steps(model, device, False))
    assert model.float8_scales.first == other.float8_scales.first == []
    assert torch.equal(model.float8_scales.state, other.float8_scales.state)


def test_a_compiled_graph_says_what_copied_its_part(device: str, config: Config) -> None:
    """What a graph saves is copied, since nothing keeps it besides."""
    model: Any = FeedForward().to(device, torch.bfloat16)
    f8.convert_to_float8_training(model, config=config("delayed"))
    graph = torch.compile(model, backend="aot_eager")
    with pytest.raises((ValueError, RuntimeError), match="hooks that copy what a compiled graph"):
        steps(graph, device, True)
