#!/usr/bin/env python3
"""Trains a small transformer with tensor and sequence parallelism, compiled, its linears in fp8.

    torchrun --nproc-per-node 2 tensor_parallel.py [--recipe rowwise] [--steps 20]
    torchrun --nproc-per-node 2 tensor_parallel.py --loss-parallel  # no rank has whole logits
    torchrun --nproc-per-node 2 tensor_parallel.py --emulate        # on a CPU, without a GPU

Every rank has a part of each linear's weight and, between the linears, its part of the sequence. All
ranks see the same batches, which are random windows of this file's bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import sys

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

import float8.torch as f8
from float8 import recipes
from float8.torch.ranks import gloo

VOCABULARY = 256


class Attention(nn.Module):
    def __init__(self, dim: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        # A rank's columns of q, k and v are whole heads, so it attends on its own.
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.wo(y.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    def __init__(self, dim: int, head: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention, self.mlp = Attention(dim, head), Mlp(dim, 4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Transformer(nn.Module):
    def __init__(self, dim: int, head: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(Block(dim, head) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.layers:
            x = block(x)
        logits: Tensor = self.output(self.norm(x))
        return logits


def block_plan() -> dict[str, object]:
    """Returns how ranks share a block: norms by tokens, linears by columns, then by rows."""
    gather = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    return {
        "attention_norm": SequenceParallel(),
        "attention": f8.PrepareFloat8ModuleInput(**gather),
        "attention.wq": f8.Float8ColwiseParallel(),
        "attention.wk": f8.Float8ColwiseParallel(),
        "attention.wv": f8.Float8ColwiseParallel(),
        "attention.wo": f8.Float8RowwiseParallel(output_layouts=Shard(1)),
        "mlp_norm": SequenceParallel(),
        "mlp": f8.PrepareFloat8ModuleInput(**gather),
        "mlp.gate": f8.Float8ColwiseParallel(),
        "mlp.up": f8.Float8ColwiseParallel(),
        "mlp.down": f8.Float8RowwiseParallel(output_layouts=Shard(1)),
    }


def build(options: argparse.Namespace, device: str) -> nn.Module:
    """Returns the model: converted, then shared by the ranks, then compiled."""
    torch.manual_seed(0)  # the ranks begin with the same weights
    model = Transformer(options.dim, options.head, options.layers).to(device)
    # The head stays in high precision. Blocks are converted in one call, as delayed scaling wants.
    config = f8.LinearConfig(options.recipe, emulate=options.emulate)
    f8.convert_to_float8_training(model.layers, config=config)

    mesh = init_device_mesh(device, (distributed.get_world_size(),), mesh_dim_names=("tensor",))
    head = {"output_layouts": Replicate()}
    if options.loss_parallel:  # logits stay in parts, by the vocabulary
        head = {"output_layouts": Shard(-1), "use_local_output": False}
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), **head),
    }
    parallelize_module(model, mesh["tensor"], ends)
    for block in model.layers:
        parallelize_module(block, mesh["tensor"], block_plan())
    f8.agree(model)  # ranks that differ are an error here, and no hang later
    model.compile(fullgraph=True, backend=options.backend)
    return model


def train(model: nn.Module, options: argparse.Namespace, device: str) -> list[float]:
    """Trains, and returns the losses."""
    text = torch.frombuffer(bytearray(pathlib.Path(__file__).read_bytes()), dtype=torch.uint8)
    random = torch.Generator().manual_seed(1)
    windows = torch.arange(options.seq + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses = []
    with f8.watch(model, timeout=300):  # a rank that fails or hangs is named
        for step in range(options.steps):
            starts = torch.randint(len(text) - options.seq, (options.batch, 1), generator=random)
            tokens = text[starts + windows].to(device).long()
            with torch.autocast(device, torch.bfloat16):
                logits = model(tokens[:, :-1])
            targets = tokens[:, 1:].flatten()
            with loss_parallel() if options.loss_parallel else contextlib.nullcontext():
                loss = functional.cross_entropy(logits.float().flatten(0, 1), targets)
                loss.backward()
            if options.recipe == "delayed":
                f8.sync_float8_amax_and_scale_history(model)
            optimizer.step()
            optimizer.zero_grad()
            # The maxima of all weights over ranks, in one all-reduce.
            f8.precompute_float8_dynamic_scale_for_fsdp(model)
            losses.append(loss.item())
            if distributed.get_rank() == 0:
                print(f"step {step + 1:4}  loss {losses[-1]:.4f}", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", choices=recipes.NAMES, default="rowwise")
    sizes = {"dim": 1024, "head": 64, "layers": 4, "seq": 1024, "batch": 4, "steps": 20}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--lr", type=float, default=1e-3, help="default 1e-3")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument(
        "--loss-parallel", action="store_true", help="leave the logits in parts of the vocabulary"
    )
    parser.add_argument("--emulate", action="store_true", help="on a CPU, with small sizes")
    options = parser.parse_args()
    device = "cpu" if options.emulate else "cuda"
    if not options.emulate:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    gloo.use_one_thread()
    distributed.init_process_group("gloo" if options.emulate else "nccl")
    train(build(options, device), options, device)
    distributed.barrier()
    distributed.destroy_process_group()
    if options.emulate:
        # FSDP keeps gloo's threads alive. One that lets go of a tensor while Python ends would abort
        # the process, so Python's end is left out. NCCL has no such threads.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
