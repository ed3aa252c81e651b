"""A Llama-like block and its training, on one device and on ranks that share its linears."""

from __future__ import annotations

from typing import Any

import ranks
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional

import float8.torch as f8


def shard(model: Any, mesh: Any, **options: Any) -> Any:
    """Shards two linears, with something between them, each by itself, and what is left."""
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def expect_trains_as(model: Any, single: Any, rank: int) -> None:
    """Trains a model of two ranks, and one that has the rows of both: they have the same weights."""
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, single)]
    x = torch.randn(2, 32, 64)
    for _ in range(3):
        model(x[rank]).square().mean().backward()
        for part in x:
            (single(part).square().mean() / 2).backward()
        for each in (model, single):
            f8.sync_float8_amax_and_scale_history(each)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for sharded, whole in zip(model.parameters(), single.parameters(), strict=True):
        assert torch.equal(sharded.full_tensor(), whole)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head = dim // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        batch, tokens, _ = x.shape
        q, k, v = (
            linear(x).view(batch, tokens, -1, self.head).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, tokens, -1))


class Mlp(nn.Module):
    """Two linears that read one x, and one that reads what they make of it."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, dim: int = 64, hidden: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention, self.mlp = Attention(dim, heads), Mlp(dim, hidden)

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def mlp(recipe: Any, dim: int, hidden: int, dtype: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.ModuleDict({"mlp": Mlp(dim, hidden)}).to(ranks.device, dtype)
    config = f8.LinearConfig(recipe, emulate=ranks.device == "cpu", **options)
    return f8.convert_to_float8_training(model, config=config)


def mlp_plan(by_tokens: bool, plain: bool = False) -> dict[str, Any]:
    """Returns the plan of an Mlp, with our styles or PyTorch's."""
    column = ColwiseParallel if plain else f8.Float8ColwiseParallel
    row = RowwiseParallel if plain else f8.Float8RowwiseParallel
    prepare = PrepareModuleInput if plain else f8.PrepareFloat8ModuleInput
    plan = {
        "mlp.gate": column(),
        "mlp.up": column(),
        "mlp.down": row(output_layouts=Shard(1) if by_tokens else Replicate()),
    }
    if by_tokens:
        plan["mlp"] = prepare(input_layouts=Shard(1), desired_input_layouts=Replicate())
    else:
        plan["mlp"] = prepare(input_layouts=Replicate(), desired_input_layouts=Replicate())
    return plan


def block(recipe: Any) -> Any:
    torch.manual_seed(0)
    config = f8.LinearConfig(recipe, emulate=ranks.device == "cpu")
    return f8.convert_to_float8_training(Block().to(ranks.device), config=config)


def block_plan(by_tokens: bool) -> dict[str, Any]:
    columns = ("attention.wq", "attention.wk", "attention.wv", "mlp.gate", "mlp.up")
    rows = ("attention.wo", "mlp.down")
    plan: dict[str, Any] = {name: f8.Float8ColwiseParallel() for name in columns}
    if not by_tokens:
        return {**plan, **{name: f8.Float8RowwiseParallel() for name in rows}}
    plan.update({name: f8.Float8RowwiseParallel(output_layouts=Shard(1)) for name in rows})
    plan.update({name: SequenceParallel() for name in ("attention_norm", "mlp_norm")})
    for name in ("attention", "mlp"):
        plan[name] = f8.PrepareFloat8ModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate()
        )
    return plan


def train(
    model: Any,
    batches: list[list[torch.Tensor]],
    part: Any = lambda x: x,
    group: Any = None,
) -> list[float]:
    """Trains on batches of micro-batches [B, S, dim]; returns this rank's part of the losses.

    part: takes this rank's tokens. group: the replicas, where it is not all ranks.
    """
    # Some parameters are DTensors and some are not.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    losses = []
    for micro_batches in batches:
        total = 0.0
        for x in micro_batches:
            own, target = part(x), part(x.roll(1, 1).tanh())
            loss = (model(own) - target).square().sum() / (x.numel() * len(micro_batches))
            loss.backward()
            total += loss.item()
        f8.sync_float8_amax_and_scale_history(model, group=group)
        optimizer.step()
        optimizer.zero_grad()
        f8.precompute_float8_dynamic_scale_for_fsdp(model)
        losses.append(total)
    return losses
