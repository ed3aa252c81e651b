"""An MLP, a converted model, its steps, and what `fuse` leaves of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import float8.torch as f8


class FeedForward(nn.Module):
    """As torchtitan's."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(64, 144, bias=False) for _ in range(2))
        self.w2 = nn.Linear(144, 64, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def converted(
    model: nn.Module, options: f8.LinearConfig, dtype: torch.dtype = torch.bfloat16
) -> Any:
    device = "cpu" if options.emulate else "cuda"

    def fits(linear: Any, _: str) -> bool:
        return linear.out_features % 16 == 0  # type: ignore[no-any-return]

    return f8.convert_to_float8_training(
        model.to(device, dtype), config=options, module_filter_fn=fits
    )


def inputs(model: nn.Module, rows: int = 40, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    weight = next(model.parameters())
    return torch.randn(2, rows, 64).to(weight.device, weight.dtype)


def step(model: nn.Module, x: torch.Tensor, call: Any = None) -> list[torch.Tensor]:
    """Returns y and all gradients."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = (call or model)(x)
    y.float().square().sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert x.grad is not None
    return [y.detach(), x.grad, *grads]


def reasons(model: nn.Module) -> list[str]:
    return [each.why for each in f8.fuse(model) if not each.fused]
