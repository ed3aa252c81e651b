"""FSDP2 over two ranks of one machine, on the emulated device: what one device computes."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import ranks
import torch
from parallel_models import expect_trains_as, shard
from reference import same
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import float8.torch as f8
from float8.torch import notices


def _plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def _mlp(recipe: str) -> nn.Sequential:
    return f8.convert_to_float8_training(_plain(), config=f8.LinearConfig(recipe, emulate=True))


def _rank(mesh: Any, rank: int, world: int, recipe: str) -> None:
    torch.manual_seed(0)
    model = _mlp(recipe)
    single = copy.deepcopy(model)
    shard(model, mesh)
    expect_trains_as(model, single, rank)


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise"))
def test_fsdp2(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_rank, 2, tmp_path, recipe)


def _saving_rank(mesh: Any, rank: int, world: int, folder: str, recipe: str) -> None:
    """Trains a step, saves, and loads again into a model of other weights."""
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(_mlp(recipe))
        fully_shard(models[-1], mesh=mesh)
    x = torch.randn(2, 32, 64)[rank]
    models[0](x).square().mean().backward()
    f8.sync_float8_amax_and_scale_history(models[0])
    dcp.save({"model": get_model_state_dict(models[0])}, checkpoint_id=folder)
    state = {"model": get_model_state_dict(models[1])}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(models[1], state["model"])
    for own, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(own.full_tensor(), other.full_tensor())
    assert torch.equal(models[0](x), models[1](x))


@pytest.mark.parametrize("recipe", ("rowwise", "delayed"))
def test_distributed_checkpoint(recipe: str, tmp_path: Any) -> None:
    """What two ranks save is loaded by two ranks, and by plain linears of one process."""
    folder = str(tmp_path / "checkpoint")
    ranks.spawn(_saving_rank, 2, tmp_path, folder, recipe)
    torch.manual_seed(0)
    expected = _mlp(recipe)
    plain = _plain()
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    plain.load_state_dict(state["model"])
    assert same(plain.parameters(), expected.parameters())


def _preparing_rank(mesh: Any, rank: int, world: int) -> None:
    """A step of FSDP in bfloat16 needs the plans that `prepare` made, and no other."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = _mlp("rowwise")
    shard(model, mesh, mp_policy=policy)
    f8.prepare(model, 32)
    plans = len(torch.ops.float8.plans(-1))
    model(torch.randn(32, 64)).sum().backward()
    assert len(torch.ops.float8.plans(-1)) == plans > 0
    with pytest.raises(ValueError, match="layer '0'"):
        f8.cache_weight_casts(model)


def test_plans_are_made_ahead(tmp_path: Any) -> None:
    ranks.spawn(_preparing_rank, 2, tmp_path)


def _late_rank(mesh: Any, rank: int, world: int, recipe: str, shard_layers: bool) -> None:
    model = _mlp(recipe)
    plain = _plain()
    config = f8.LinearConfig(recipe, emulate=True)
    for each in (model, plain):
        if shard_layers:
            fully_shard(each[0], mesh=mesh)
        fully_shard(each, mesh=mesh)
    for each, other in ((plain, config), (model, f8.LinearConfig("tensorwise", emulate=True))):
        before = dict(each.named_modules())
        with pytest.raises(ValueError, match=r"layer '0' is sharded by FSDP.*before fully_shard"):
            f8.convert_to_float8_training(each, config=other)
        assert dict(each.named_modules()) == before
        with pytest.raises(ValueError, match=r"layer 'root' is sharded by FSDP"):
            f8.convert_to_float8_training(each[2], config=other)
    f8.convert_to_float8_training(model, config=config)  # it has that config
    model(torch.randn(16, 64)).square().mean().backward()
    with pytest.raises(ValueError, match=r"layer '2' is sharded by FSDP"):
        f8.convert_to_float8_training(
            model, config="bf16", module_filter_fn=lambda _, name: name == "2"
        )


@pytest.mark.parametrize("shard_layers", (False, True))
@pytest.mark.parametrize("recipe", ("rowwise", "delayed"))
def test_a_conversion_after_fully_shard_is_refused(
    recipe: str, shard_layers: bool, tmp_path: Any
) -> None:
    """FSDP would set weights on the linears that the conversion replaces."""
    ranks.spawn(_late_rank, 2, tmp_path, recipe, shard_layers)


def _optimizing_rank(mesh: Any, rank: int, world: int, before: bool, gather: bool) -> None:
    """An optimizer that was made before fully_shard is told of, and one that comes after is not."""
    config = f8.LinearConfig("rowwise", emulate=True, enable_fsdp_float8_all_gather=gather)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    f8.convert_to_float8_training(model, config=config)
    optimizer = torch.optim.AdamW(model.parameters())
    shard(model, mesh)
    if not before:
        optimizer = torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(4):
            model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    told = [str(each.message) for each in found if "is not trained" in str(each.message)]
    assert len(told) == before, (before, gather, told)
    notices._told.clear()
    assert all("('0', '2') is not trained" in each for each in told), told


@pytest.mark.parametrize(
    ("before", "gather"), ((False, False), (False, True), (True, True), (True, False))
)
def test_an_optimizer_that_was_made_before_fully_shard(
    before: bool, gather: bool, tmp_path: Any
) -> None:
    ranks.spawn(_optimizing_rank, 2, tmp_path, before, gather)
