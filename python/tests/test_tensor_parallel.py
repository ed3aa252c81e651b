"""Tensor and sequence parallelism: a sharded run computes what one device computes.

Ranks are processes on the emulated device.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import ranks
import torch
from parallel_models import Mlp, block, block_plan, train
from reference import agree, sqnr
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
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
            options = {"recompute": True} if by_tokens else {"plain": True}
            _compare(mesh, rank, recipe, by_tokens, sizes, torch.float32, **options)


def test_odd_sizes_and_three_ranks(tmp_path: Any) -> None:
    ranks.spawn(_odd_sizes, 3, tmp_path)


def _batches(steps: int, count: int, tokens: int = 32) -> list[list[torch.Tensor]]:
    torch.manual_seed(2)
    return [
        [torch.randn(2, tokens, 64).to(ranks.device) for _ in range(count)] for _ in range(steps)
    ]


def _summed(losses: list[float]) -> list[float]:
    total = torch.tensor(losses, dtype=torch.float64, device=ranks.device)
    distributed.all_reduce(total)
    return total.tolist()  # type: ignore[no-any-return]


def _expect_losses(losses: list[float], expected: list[float]) -> None:
    """Partial sums in another order change a loss by less; other scales by more."""
    for own, single in zip(losses, expected, strict=True):
        assert own == pytest.approx(single, rel=2e-3 if ranks.device == "cuda" else 3e-6)


def _trains(mesh: Any, rank: int, world: int) -> None:
    batches = _batches(20, 1)
    for recipe, by_tokens in (
        ("tensorwise", True),
        ("rowwise", True),
        ("rowwise_with_gw_hp", False),
        ("delayed", True),
    ):
        expected = train(block(recipe), batches)
        model = parallelize_module(block(recipe), mesh, block_plan(by_tokens))
        if by_tokens:
            losses = _summed(train(model, batches, lambda x: x.chunk(world, 1)[rank]))
        else:
            losses = train(model, batches)
        _expect_losses(losses, expected)


def test_a_block_trains_as_on_one_device(tmp_path: Any) -> None:
    ranks.spawn(_trains, 2, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_block_trains_on_gpus(tmp_path: Any) -> None:
    ranks.spawn(_trains, 2, tmp_path, device="cuda")


def _with_fsdp(_: Any, rank: int, world: int) -> None:
    mesh = distributed.device_mesh.init_device_mesh(
        ranks.device, (2, 2), mesh_dim_names=("data", "tensor")
    )
    replica, own = mesh["data"].get_local_rank(), mesh["tensor"].get_local_rank()
    batches = _batches(3, 2)
    for recipe, by_tokens in (("tensorwise", False), ("rowwise", True), ("delayed", True)):
        expected = train(block(recipe), batches)
        model = parallelize_module(block(recipe), mesh["tensor"], block_plan(by_tokens))
        fully_shard(model, mesh=mesh["data"])
        part = (lambda x: x.chunk(2, 1)[own]) if by_tokens else (lambda x: x)
        losses = train(model, [[batch[replica]] for batch in batches], part)
        equal = 2 if by_tokens else 4  # ranks whose parts make one loss are 2 or 1
        _expect_losses([total / equal for total in _summed(losses)], expected)


def test_with_fsdp_on_another_dimension_of_the_mesh(tmp_path: Any) -> None:
    ranks.spawn(_with_fsdp, 4, tmp_path)


def _collectives(call: Any) -> list[tuple[str, torch.dtype, int]]:
    with ranks.Collectives() as seen:
        call()
    return sorted(seen.calls, key=str)


def _wire(mesh: Any, rank: int, world: int) -> None:
    """One gather of x serves both linears that read it, and everything is 1 byte an element."""
    u8, f32, i32, bf16 = torch.uint8, torch.float32, torch.int32, torch.bfloat16
    tokens, dim, hidden = 32, 128, 256  # a rank's
    gather, reduce, scatter = "all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor"
    bytes_of_x, rows = tokens * dim, 2 * tokens  # rows: of the whole x
    grads = [
        (scatter, bf16, 2 * rows * dim),  # dx, once
        (gather, u8, bytes_of_x),  # qt of x, once
        (gather, u8, bytes_of_x),  # q of dy
    ]
    for recipe, forward, backward in (
        (
            "rowwise",
            # The scales of the rows of x; maxima of its columns; maxima of the rows of down's x.
            [(gather, f32, 4 * tokens), (reduce, i32, 4 * dim), (reduce, i32, 4 * rows)],
            # qt of dy, and its scales; maxima: of dy's columns, and of the rows of two other dy.
            [
                (gather, u8, bytes_of_x),
                (gather, f32, 4 * tokens),
                (reduce, i32, 4 * dim),
                (reduce, i32, 4 * rows),
                (reduce, i32, 4 * rows),
            ],
        ),
        ("tensorwise", [(reduce, i32, 4)] * 2, [(reduce, i32, 4)] * 3),
    ):
        model = parallelize_module(_mlp(recipe, dim, hidden, bf16), mesh, _plan(True))
        f8.precompute_float8_dynamic_scale_for_fsdp(model)
        x = torch.randn(2, tokens // 2, dim, dtype=bf16, requires_grad=True)
        y: list[torch.Tensor] = []
        calls = _collectives(lambda: y.append(model["mlp"](x)))  # noqa: B023
        shared = [(gather, u8, bytes_of_x), (scatter, bf16, 2 * rows * dim)]
        assert calls == sorted([*shared, *forward], key=str)
        bias = [(reduce, f32, 4 * dim)]
        calls = _collectives(lambda: y[0].backward(torch.randn_like(y[0])))  # noqa: B023
        assert calls == sorted([*grads, *bias, *backward], key=str)
        with torch.no_grad():
            model["mlp"].up.weight.mul_(2)
        again = _collectives(lambda: model["mlp"](x))  # noqa: B023
        words = 4 * (dim if recipe == "rowwise" else 1)  # of the weight that changed
        assert again == sorted([*calls_of(shared, forward), (reduce, i32, words)], key=str)


def calls_of(*lists: list[Any]) -> list[Any]:
    return [call for each in lists for call in each]


def test_bytes_on_the_wire(tmp_path: Any) -> None:
    ranks.spawn(_wire, 2, tmp_path)
