"""Tensor and sequence parallelism: a sharded run computes what one device computes.

Ranks are processes on the emulated device.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import ranks
import torch
from reference import agree, sqnr
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

import float8
import float8.torch as f8

ROWS = float8.Cast(granularity=float8.Granularity.AXIS)
E5M2 = float8.Cast(format=float8.Format.E5M2)
HIGH = float8.Cast(float8.Scaling.HIGH_PRECISION)
GEMM = float8.recipes.Gemm
# Each has another GEMM in high precision.
CUSTOM = (
    float8.Recipe(GEMM(ROWS, float8.Cast(), fast=True), GEMM(HIGH, HIGH), GEMM(E5M2, ROWS)),
    float8.Recipe(GEMM(HIGH, HIGH), GEMM(E5M2, ROWS), GEMM(ROWS, E5M2)),
)
RECIPES = (*float8.recipes.NAMES, *CUSTOM)


class Mlp(nn.Module):
    """Two linears that read one x, and one that reads what they make of it."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.silu(self.gate(x)) * self.up(x)
        return self.down(hidden)  # type: ignore[no-any-return]


def _mlp(recipe: Any, dim: int, hidden: int, dtype: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.ModuleDict({"mlp": Mlp(dim, hidden)}).to(ranks.device, dtype)
    config = f8.LinearConfig(recipe, emulate=ranks.device == "cpu", **options)
    return f8.convert_to_float8_training(model, config=config)


def _plan(by_tokens: bool, plain: bool = False) -> dict[str, Any]:
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


class Step:
    """The results of a forward and backward, and the output of `up`."""

    def __init__(self, model: Any, x: torch.Tensor, dy: torch.Tensor) -> None:
        x = x.clone().requires_grad_()
        hook = model["mlp"].up.register_forward_hook(lambda *args: setattr(self, "up", args[2]))
        self.y = model["mlp"](x)
        hook.remove()
        self.y.backward(dy)
        assert x.grad is not None
        self.dx = x.grad
        self.grads = {name: _whole(p.grad) for name, p in model.named_parameters()}
        model.zero_grad()


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _expect_equal(own: Step, single: Step, rank: int, world: int, by_tokens: bool) -> None:
    """Compares what ranks have with one device: bits, but where partial sums are added."""
    columns = single.up.chunk(world, -1)[rank]
    assert agree(own.up, columns), sqnr(own.up, columns)
    sums = [(own.y, single.y), (own.dx, single.dx)]
    if by_tokens:
        sums = [(part, whole.chunk(world, 1)[rank]) for part, whole in sums]
    for name, grad in single.grads.items():
        if by_tokens and name == "mlp.down.bias":
            sums.append((own.grads[name], grad))
        else:
            assert agree(own.grads[name], grad), (name, sqnr(own.grads[name], grad))
    for summed, expected in sums:
        least = 40 if summed.dtype == torch.bfloat16 or summed.is_cuda else 100
        assert sqnr(summed, expected) > least, sqnr(summed, expected)


def _compare(
    mesh: Any,
    rank: int,
    recipe: Any,
    by_tokens: bool,
    sizes: tuple[int, int, int],
    dtype: Any,
    plain: bool = False,
    **options: Any,
) -> None:
    """Runs two steps of ranks and of one device."""
    dim, hidden, tokens = sizes
    world = mesh.size()
    single = _mlp(recipe, dim, hidden, dtype, **options)
    model = copy.deepcopy(single)
    parallelize_module(model, mesh, _plan(by_tokens, plain))
    torch.manual_seed(1)
    for step in range(2):
        x, dy = (torch.randn(2, tokens, dim).to(ranks.device, dtype) for _ in range(2))
        shards = [each.chunk(world, 1)[rank] if by_tokens else each for each in (x, dy)]
        own, whole = Step(model, *shards), Step(single, x, dy)
        _expect_equal(own, whole, rank, world, by_tokens)
        for each in (model, single):
            f8.sync_float8_amax_and_scale_history(each)
        if step == 0:
            f8.precompute_float8_dynamic_scale_for_fsdp(model)
            state = model.state_dict().get("float8_scales.state")
            if state is not None and dtype == torch.float32 and not state.is_cuda:
                assert torch.equal(state, single.state_dict()["float8_scales.state"])
    with torch.no_grad():
        y, expected = model["mlp"](shards[0]), single["mlp"](x)
        expected = expected.chunk(world, 1)[rank] if by_tokens else expected
        assert sqnr(y, expected) > 40


def _every_recipe(mesh: Any, rank: int, world: int) -> None:
    for recipe in RECIPES:
        blocks = recipe == "blockwise"  # ranks have whole ones
        sizes = (128 * world, 128 * world, 128 * world) if blocks else (64, 128, 16 * world)
        for by_tokens in (False, True):
            _compare(mesh, rank, recipe, by_tokens, sizes, torch.bfloat16)


def test_every_recipe_computes_what_one_device_computes(tmp_path: Any) -> None:
    ranks.spawn(_every_recipe, 2, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_every_recipe_on_gpus(tmp_path: Any) -> None:
    ranks.spawn(_every_recipe, 2, tmp_path, device="cuda")


def _odd_sizes(mesh: Any, rank: int, world: int) -> None:
    """The rows of x are no multiple of 16, nor their runs; in_features are no multiple of 128."""
    sizes = (48 * world, 16 * world, 5 * world)
    for recipe in RECIPES:
        if recipe == "blockwise":
            continue
        for by_tokens in (False, True):
            _compare(mesh, rank, recipe, by_tokens, sizes, torch.float32)
    for recipe in ("tensorwise", "rowwise"):
        for by_tokens in (False, True):
            _compare(mesh, rank, recipe, by_tokens, sizes, torch.float32, recompute=True)
            _compare(mesh, rank, recipe, by_tokens, sizes, torch.float32, plain=True)


def test_odd_sizes_and_three_ranks(tmp_path: Any) -> None:
    ranks.spawn(_odd_sizes, 3, tmp_path)
