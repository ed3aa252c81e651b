"""The routing of a mixture of experts, and the sums over its rows, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def route(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the token of each row, the row of each pair, the end of each expert's rows, and which pairs
    have an expert; all of int64 but the last."""
    known = (ids >= 0) & (ids < experts)
    key = torch.where(known, ids, experts).flatten().long()
    order = key.argsort(stable=True)
    ends = key.bincount(minlength=experts + 1).cumsum(0)[:experts]
    return order // ids.shape[1], order.argsort().view(ids.shape), ends, known


def weighted_sum(y: Tensor, scores: Tensor | None, position: Tensor, known: Tensor) -> Tensor:
    """Adds each token's rows of y by their scores, in fp32 and in order; autograd knows its gradients."""
    total = torch.zeros(position.shape[0], y.shape[1], device=y.device)
    for k in range(position.shape[1]):
        row = torch.where(known[:, k, None], y[position[:, k]].float(), 0.0)
        weight = 1.0 if scores is None else torch.where(known[:, k, None], scores[:, k, None], 0.0)
        total = total + row * weight
    return total.to(y.dtype)
