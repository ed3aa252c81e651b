"""Cached casts and plans made ahead, of weights that ranks share.

Ranks are processes on the emulated device.
"""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
from parallel_models import mlp, mlp_plan
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import float8.torch as f8
from float8.torch import _ops
from float8.torch.ranks import verify

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")


class WeightCasts(TorchDispatchMode):
    """Counts the casts of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operand = {_ops.quantize: 2, _ops.quantize_shard: 4, _ops.quantize_amax: 2}.get(func)
        self.count += operand is not None and args[operand] == _ops.WEIGHT
        self.count += func in (_ops.quantize_amax_list, _ops.quantize_shard_list)
        return func(*args, **(kwargs or {}))


def _parallel(mesh: Any, recipe: str, dtype: Any = torch.bfloat16, **options: Any) -> Any:
    sizes = (256, 256) if recipe == "blockwise" else (80, 96)
    return parallelize_module(mlp(recipe, *sizes, dtype, **options), mesh, mlp_plan(True))


def _gradients(model: Any, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    for x in batches:
        model["mlp"](x).square().sum().backward()
    return [p.grad.full_tensor() for p in model.parameters()]


def _expect_equal(models: list[Any], batches: list[torch.Tensor], casts: int | None = 0) -> None:
    """Compares gradients; casts: those of cached weights, None for any number."""
    with WeightCasts() as counted:
        own = _gradients(models[0], batches)
    assert casts is None or counted.count == casts, counted.count
    for a, b in zip(own, _gradients(models[1], batches), strict=True):
        assert torch.equal(a, b)


def _batches(recipe: str, rank: int, dtype: Any = torch.bfloat16) -> list[torch.Tensor]:
    torch.manual_seed(1)
    dim, tokens = (256, 256) if recipe == "blockwise" else (80, 16)
    batches = [torch.randn(2, tokens, dim, dtype=dtype).chunk(2, 1)[rank] for _ in range(2)]
    return [each.to(ranks.device) for each in batches]


def _trained(mesh: Any, rank: int, world: int) -> None:
    for recipe in RECIPES:
        batches = _batches(recipe, rank)
        models = [_parallel(mesh, recipe) for _ in range(2)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, foreach=False) for m in models]
        f8.cache_weight_casts(models[0], optimizers[0])
        for _ in range(2):
            _expect_equal(models, batches)
            with ranks.Collectives() as seen:
                optimizers[0].step()
            optimizers[1].step()
            spans = recipe != "blockwise"
            assert [name for name, *_ in seen.calls] == ["all_reduce"] * spans


def _changed(mesh: Any, rank: int, world: int) -> None:
    """Weights that change otherwise, other types of x, copies that go, and compiled linears."""
    batches = _batches("rowwise", rank)
    models = [_parallel(mesh, "rowwise") for _ in range(2)]
    casts = f8.cache_weight_casts(models[0])
    for model in models:
        with torch.no_grad():
            model["mlp"].up.weight.neg_()
    _expect_equal(models, batches, casts=2)  # maxima and copies of one weight
    _expect_equal(models, batches)
    before = models[0]["mlp"].up._weight_cast.copies
    casts.update()
    assert models[0]["mlp"].up._weight_cast.copies is before
    compiled = torch.compile(models[0]["mlp"], fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(batches[0]), models[1]["mlp"](batches[0]))
    casts.remove()
    _expect_equal(models, batches, casts=None)
    models = [_parallel(mesh, "tensorwise", torch.float32, recompute=True) for _ in range(2)]
    casts = f8.cache_weight_casts(models[0], dtype=torch.bfloat16)
    batches = _batches("tensorwise", rank, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        _expect_equal(models, batches)
    _expect_equal(models, batches, casts=None)  # float32 x finds no copies


@pytest.mark.parametrize("main", (_trained, _changed))
def test_tensor_parallel_weights(main: Any, tmp_path: Any) -> None:
    ranks.spawn(main, 2, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensor_parallel_weights_on_gpus(tmp_path: Any) -> None:
    ranks.spawn(_trained, 2, tmp_path, device="cuda")


def _gathered(_: Any, rank: int, world: int) -> None:
    """FSDP's gathers in fp8 have their casts already; those in high precision have none to keep."""
    mesh = distributed.device_mesh.init_device_mesh(
        "cpu", (world // 2, 2), mesh_dim_names=("shard", "tensor")
    )
    for shared in (True, False):
        model = mlp("rowwise", 80, 96, torch.float32, enable_fsdp_float8_all_gather=True)
        plain = mlp("rowwise", 80, 96, torch.float32)
        for each in (model, plain):
            if shared:
                parallelize_module(each, mesh["tensor"], mlp_plan(False))
            fully_shard(each["mlp"], mesh=mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        f8.cache_weight_casts(model, optimizer)
        assert model["mlp"].up._weight_cast is None
        x = torch.randn(2, 16, 80)
        for step in range(2):
            with WeightCasts() as counted:
                for _ in range(2):
                    model["mlp"](x).sum().backward()
            # The first forward has no shards' casts; the optimizer's step makes those of the next.
            assert (counted.count == 0) == (step > 0)
            optimizer.step()
        with torch.no_grad():
            plain["mlp"](model["mlp"](x))  # the weights stay gathered
        f8.cache_weight_casts(model)
        assert model["mlp"].up._weight_cast is None
        with pytest.raises(ValueError, match=r"'mlp\.gate' in high precision in every forward"):
            f8.cache_weight_casts(plain)


def test_weights_that_fsdp_gathers(tmp_path: Any) -> None:
    ranks.spawn(_gathered, 4, tmp_path)


def _prepared(_: Any, rank: int, world: int) -> None:
    """The plans are those of the parts that a rank computes with, in the type of FSDP's policy."""
    mesh = distributed.device_mesh.init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("shard", "tensor")
    )
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for gather in (True, False):
        columns = 96 + 64 * gather
        model = mlp("rowwise", 80, columns, torch.float32, enable_fsdp_float8_all_gather=gather)
        parallelize_module(model, mesh["tensor"], mlp_plan(False))
        fully_shard(model["mlp"], mesh=mesh["shard"], mp_policy=bf16)
        before = set(verify._plans(-1))
        f8.prepare(model, 48)
        added = set(verify._plans(-1)) - before
        for n, k in ((columns // 2, 80), (80, columns // 2)):
            assert any(f"n {n}, k {k}" in plan for plan in added), added
        assert not any(f"n {columns}, k 80" in plan for plan in added)
    plain = mlp("tensorwise", 80, 96, torch.float32)
    fully_shard(plain["mlp"], mesh=mesh["shard"], mp_policy=bf16)
    f8.prepare(plain, 48)
    before = set(verify._plans(-1))
    plain["mlp"](torch.randn(48, 80)).sum().backward()
    assert set(verify._plans(-1)) == before  # the step made none


def test_plans_are_those_of_a_ranks_part(tmp_path: Any) -> None:
    ranks.spawn(_prepared, 4, tmp_path)
