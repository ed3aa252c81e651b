"""verify_distributed: it finds what is planted, finds nothing else, and leaves no trace.

Ranks are processes on the emulated device.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import ranks
import torch
from parallel_models import shard
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import parallelize_module

import float8.torch as f8
from float8.torch.checks import verify, verify_layer
from float8.torch.ranks import agreement


def _model(recipe: str, gather: bool, rows: int = 96) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, rows), nn.GELU(), nn.Linear(rows, rows, bias=False))
    config = f8.LinearConfig(
        recipe, emulate=ranks.device == "cpu", enable_fsdp_float8_all_gather=gather
    )
    return f8.convert_to_float8_training(model.to(ranks.device), config=config)


def _step(model: Any, optimizer: Any, rank: int) -> None:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank)).to(ranks.device)
    model(x).square().mean().backward()
    f8.sync_float8_amax_and_scale_history(model)
    optimizer.step()


def _state(model: Any) -> list[torch.Tensor]:
    """Returns everything that a check must leave as it is."""
    tensors = [torch.get_rng_state()]
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        grad = parameter.grad
        tensors += [local.detach(), torch.zeros(0) if grad is None else grad.to_local()]
    tensors += list(model.buffers())
    return [copy.deepcopy(each.detach()).cpu() for each in tensors]


RIGHT: Any = (
    ("tensorwise", True, {}),
    ("rowwise", True, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}),
    ("rowwise_with_gw_hp", True, {"reshard_after_forward": False}),
    ("blockwise", True, {}),
    ("rowwise", False, {}),
    ("delayed", False, {}),
    ("delayed", True, {}),
)


def _right(
    mesh: Any, rank: int, world: int, recipe: str, gather: bool, options: dict[str, Any]
) -> None:
    model = shard(_model(recipe, gather), mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reference = shard(_model(recipe, gather), mesh, **options)
    other = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    before_first = f8.verify_distributed(model)
    assert before_first.ok
    for _ in range(2):
        _step(model, optimizer, rank)
        _step(reference, other, rank)
        before = _state(model)
        report = f8.verify_distributed(model, tokens=32)
        assert all(torch.equal(a, b) for a, b in zip(before, _state(model), strict=True))
        assert report.ok, report
        for layer in report.layers:
            names = {"q", "qt"} if gather else {"w"}
            names |= {"y", "dx", "dw"} | ({"db"} if layer.name == "0" else set())
            assert set(layer.tensors) == names, report
            assert all(each.bits for each in layer.tensors.values()), report
    # A model that was looked at trains as one that was not.
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local())
    assert "layer  shape" in str(report)
    assert "bits" in str(report)


@pytest.mark.parametrize(
    ("world", "recipe", "gather", "options"),
    [*((2, *each) for each in RIGHT), *((3, *each) for each in RIGHT[1::2])],
)
def test_right_models_have_equal_bits(
    world: int, recipe: str, gather: bool, options: dict[str, Any], tmp_path: Any
) -> None:
    ranks.spawn(_right, world, tmp_path, recipe, gather, options)


@pytest.mark.parametrize(("recipe", "gather", "options"), RIGHT)
@ranks.needs_gpus(2)
def test_right_models_have_equal_bits_on_gpus(
    recipe: str, gather: bool, options: dict[str, Any], tmp_path: Any
) -> None:
    ranks.spawn(_right, 2, tmp_path, recipe, gather, options, device="cuda")


def _in_autocast(_: Any, rank: int, world: int, recipe: str) -> None:
    mesh = distributed.device_mesh.init_device_mesh(
        ranks.device, (world // 2, 2), mesh_dim_names=("data", "tensor")
    )
    for gather, shares in ((True, False), (False, False), (True, True), (False, True)):
        model = _model(recipe, gather, 128)
        if shares:
            plan = {"0": f8.Float8ColwiseParallel(), "2": f8.Float8RowwiseParallel()}
            parallelize_module(model, mesh["tensor"], plan)
        shard(model, mesh["data"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with torch.autocast(ranks.device, torch.bfloat16):
                _step(model, optimizer, rank // 2)
        outside = f8.verify_distributed(model)
        with torch.autocast(ranks.device, torch.bfloat16):
            inside = f8.verify_distributed(model)
        for report in (outside, inside):
            for layer in report.layers:
                assert ("q" in layer.tensors) is gather, report
                assert {"y", "dx", "dw"} <= set(layer.tensors), report
                assert layer.tensors["dw"].bits, report


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise", "delayed"))
def test_autocast_is_no_difference(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_in_autocast, 4, tmp_path, recipe)


def test_another_type_is_no_other_scale() -> None:
    own, expected = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bfloat16)
    found = verify_layer._comparison(own, expected, True)
    assert not found.allowed
    text = verify._words(verify_layer.Layer("0", "[2, 2]", "gathers", {"dw": found}))
    assert text.startswith("dw ") and "torch.float32 of [2, 2], not torch" in text
    assert "scale" not in text
    assert str(found) == "DIFFERS in type or shape"


def _find(model: Any, words: str, culprit: int) -> None:
    with pytest.raises(f8.DistributedError) as caught:
        f8.verify_distributed(model)
    assert words in str(caught.value), caught.value
    assert culprit in caught.value.ranks
    report = f8.verify_distributed(model, raise_on_difference=False)
    assert not report.ok
    assert words in str(report), report


def _wrong(mesh: Any, rank: int, world: int) -> None:
    last = world - 1
    # A shard that is changed unseen is cast no more.
    model = shard(_model("rowwise", True), mesh)
    f8.precompute_float8_dynamic_scale_for_fsdp(model)
    assert f8.verify_distributed(model).ok
    if rank == last:
        model[2].weight._local_tensor.plain().data[0, 0] += 8
    _find(model, "layer '2': q is not that of one device at [", last)
    # HSDP whose replicas have other weights.
    if world == 4:
        replicated = distributed.device_mesh.init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("replica", "shard")
        )
        model = shard(_model("tensorwise", True), replicated)
        with torch.no_grad():
            model[0].weight.to_local().add_(rank // 2)
        _find(model, "layer '0': w is not that of the others", 2)
    # Plain copies that are not equal.
    model = _model("rowwise", False)
    assert f8.verify_distributed(model).ok
    with torch.no_grad():
        model[0].weight[1, 2] += rank == last
    _find(model, f"rank {last}: layer '0': w is not that of the others", last)
    # Another table, whose kernels may be others.
    with pytest.MonkeyPatch.context() as patch:
        if rank == last:
            patch.setattr(agreement, "table_hash", lambda _: "another")
        _find(_model("rowwise", False), f"rank {last} differs in table", last)


@pytest.mark.parametrize("world", (2, 4))
def test_what_is_planted_is_found_on_all_ranks(world: int, tmp_path: Any) -> None:
    ranks.spawn(_wrong, world, tmp_path)


def _kernels(mesh: Any, rank: int, world: int) -> None:
    original = verify._plans

    def plans(device: int) -> dict[str, str]:
        return {
            key: "other kernels" if rank == 1 else text for key, text in original(device).items()
        }

    verify._plans = plans
    _find(
        _model("rowwise", False),
        "rank 1: the kernels of linear m up to 512, n 96, k 64: recipe rowwise",
        1,
    )


def test_other_kernels_are_found(tmp_path: Any) -> None:
    ranks.spawn(_kernels, 3, tmp_path)


def test_one_process() -> None:
    model = _model("delayed", False)
    _step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    report = f8.verify_distributed(model)
    assert report.ok
    assert report.ranks == 1
    f8.cache_weight_casts(rowwise := _model("rowwise", False))
    report = f8.verify_distributed(rowwise)
    assert all(layer.tensors["q"].bits and layer.tensors["qt"].bits for layer in report.layers)
    rowwise[0].weight.data.mul_(2)  # which the next cast sees
    assert f8.verify_distributed(rowwise).ok
    rowwise[0]._weight_cast.copies[0].bitwise_xor_(1)
    with pytest.raises(f8.DistributedError, match="layer '0': q "):
        f8.verify_distributed(rowwise)


def _parallel(_: Any, rank: int, world: int) -> None:
    mesh = distributed.device_mesh.init_device_mesh(
        ranks.device, (world // 2, 2), mesh_dim_names=("data", "tensor")
    )
    cases = [("tensorwise", False), ("rowwise", False), ("delayed", False)]
    if world == 4:
        gathered = ("delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp")
        cases += [(recipe, True) for recipe in gathered]
    for recipe, gather in cases:
        model = _model(recipe, gather, 128)
        plan = {"0": f8.Float8ColwiseParallel(), "2": f8.Float8RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
        if world == 4:
            shard(model, mesh["data"])
        _step(model, torch.optim.SGD(model.parameters(), lr=0.1), rank // 2)
        report = f8.verify_distributed(model)
        assert report.ok, report
        for layer in report.layers:
            assert ("q" in layer.tensors) is gather, report
        columns, rows = (layer.tensors for layer in report.layers)
        assert columns["y"].bits, report
        assert columns["dw"].bits, report
        assert rows["dx"].bits, report
        assert rows["dw"].bits, report
        assert columns["dx"].db > 100, report  # sums of two ranks in float32
        assert rows["y"].db > 100, report
    if world == 4:
        # Another scale on one rank, whose part of y the rank beside it reads too.
        f8.precompute_float8_dynamic_scale_for_fsdp(model)
        if rank == 3:
            model[2]._weight_gather._scales["q"].data.mul_(2)
        _find(model, "rank 2: layer '2': y is not that of one device", 2)


@pytest.mark.parametrize("world", (2, 4))
def test_tensor_parallel_linears(world: int, tmp_path: Any) -> None:
    pytest.importorskip("float8.torch.parallel.tensor_parallel")
    ranks.spawn(_parallel, world, tmp_path)
