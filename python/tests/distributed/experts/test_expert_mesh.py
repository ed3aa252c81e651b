"""Experts that expert parallelism and FSDP share over a mesh of two dimensions, with fp8 gathers."""

from __future__ import annotations

import copy
import ctypes
import warnings
from typing import Any

import expert_shards
import pytest
import ranks
import repository
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import float8.torch as f8

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise")


class _Meshes:
    """A mesh whose first dimensions are FSDP's, and whose last one is that of expert parallelism."""

    def __init__(self, *sizes: int) -> None:
        names = ("replicate", "efsdp", "ep")[-len(sizes) :]
        mesh: Any = init_device_mesh(ranks.device, sizes, mesh_dim_names=names)
        self.fsdp, self.ep = mesh[names[:-1]], mesh["ep"]
        self.all: Any = init_device_mesh(ranks.device, (mesh.size(),), mesh_dim_names=("fsdp",))


def _give_experts(experts: Any, mesh: Any, *at: Any) -> None:
    """Shares weights as the styles of torchtitan do, and the second one by an assignment."""
    for name, weight in list(experts.named_parameters()):
        placements = [Shard(2)] if name == "w2" and at == (Shard(1),) else at  # the hidden features
        own = nn.Parameter(distribute_tensor(weight.detach(), mesh, placements))
        if name == "w2":
            experts.w2 = own
        else:
            experts.register_parameter(name, own)


def _share(model: nn.Sequential, meshes: _Meshes, dim: int, at: Shard, **options: Any) -> Any:
    """Gives ranks their experts, and lets FSDP share these by that dimension."""
    for own in expert_shards.own_layers(model):
        _give_experts(own.experts, meshes.ep, at)
        if at.dim == 0:
            own.count //= meshes.ep.size()
        where = {"mesh": meshes.fsdp, "shard_placement_fn": lambda _: Shard(dim)}
        fully_shard(own.experts, **where, **options)
    return fully_shard(model, mesh=meshes.fsdp, **options)


def _pair(
    meshes: _Meshes,
    recipe: str,
    experts: int,
    dim: int = 0,
    n: int = 48,
    at: Shard | None = None,
    **options: Any,
) -> list[Any]:
    """Returns the layers of torchtitan with fp8 gathers and with gathers in high precision."""
    plain = expert_shards.layers(experts, n=n)
    return [
        _share(
            expert_shards.convert(copy.deepcopy(plain), recipe, gather),
            meshes,
            dim,
            at or Shard(0),
            **options,
        )
        for gather in (True, False)
    ]


def _steps(_: Any, rank: int, world: int, fsdp: int, recipe: str) -> None:
    """Of three experts of a rank of expert parallelism, the second one's rank of FSDP has one."""
    meshes = _Meshes(fsdp, world // fsdp)
    x = expert_shards.rows(world)[rank]
    for dim, experts, n in ((0, 6, 128), (1, 2, 256)):
        models = _pair(meshes, recipe, experts, dim, n)
        cut = recipe == "blockwise" and dim == 1 and fsdp > 1  # the blocks of w2
        seen = expert_shards.expect_equal_steps(models, x, all_in_fp8=not cut)
        assert seen.count(True) == (4 if cut else 6) * 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_equal_steps(recipe: str, tmp_path: Any) -> None:
    """Weights and results are those of gathers in high precision, whole experts or parts of each."""
    ranks.spawn(_steps, 4, tmp_path, 2, recipe)


@pytest.mark.parametrize("fsdp", [1, 2])
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_one_rank_of_either(recipe: str, fsdp: int, tmp_path: Any) -> None:
    ranks.spawn(_steps, 2, tmp_path, fsdp, recipe)


@ranks.needs_gpus(2)
@pytest.mark.parametrize("fsdp", [1, 2])
@pytest.mark.parametrize("recipe", RECIPES[:4])
def test_on_gpus(recipe: str, fsdp: int, tmp_path: Any) -> None:
    ranks.spawn(_steps, 2, tmp_path, fsdp, recipe, device="cuda")


def _options(_: Any, rank: int, world: int) -> None:
    meshes = _Meshes(2, 2)
    x = expert_shards.rows(world)[rank]
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for dim, options in ((0, {"reshard_after_forward": False}), (1, {"mp_policy": policy})):
        models = _pair(meshes, "rowwise", 4, dim, **options)
        expert_shards.expect_equal_steps(models, x, micro_batches=2)
    with_replicas = _Meshes(2, 1, 2)
    for recipe in ("rowwise", "delayed"):
        models = _pair(with_replicas, recipe, 4)
        expert_shards.expect_equal_steps(models, x)
        assert f8.verify_distributed(models[0]).ok


def test_options_of_fully_shard(tmp_path: Any) -> None:
    """Also with micro-batches, and with replicas of FSDP's groups."""
    ranks.spawn(_options, 4, tmp_path)


def _compiled(_: Any, rank: int, world: int) -> None:
    models = _pair(_Meshes(2, 1), "rowwise", 4)
    models[0][0].experts.compile(fullgraph=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    expert_shards.expect_equal_steps(models, expert_shards.rows(world)[rank])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_compiled_experts(tmp_path: Any) -> None:
    ranks.spawn(_compiled, 2, tmp_path)


class _Routed(nn.Module):
    """Experts behind a linear, which is shared over all ranks."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.router = nn.Linear(expert_shards.HIDDEN, expert_shards.HIDDEN, bias=False)
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(self.router(x))


def _of_one_unit(_: Any, rank: int, world: int) -> None:
    """A unit of FSDP has another mesh for experts, as in torchtitan 0.3."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common as common

    meshes = _Meshes(2, 2)
    of_experts, of_others = (common.FSDPMeshInfo(m, 0) for m in (meshes.fsdp, meshes.all))

    def placement(weight: nn.Parameter) -> Any:
        return common.ShardPlacementResult(Shard(0), of_experts if weight.dim() == 3 else of_others)

    torch.manual_seed(2)
    plain = nn.Sequential(*map(_Routed, expert_shards.layers(4))).to(ranks.device)
    models = []
    for gather in (True, False):
        model = expert_shards.convert(copy.deepcopy(plain), "rowwise", gather)
        for unit in model:
            _give_experts(unit.layer.experts, meshes.ep, Shard(0))
            unit.layer.count = 2
            fully_shard(unit, mesh=meshes.all, shard_placement_fn=placement)
        models.append(fully_shard(model, mesh=meshes.all))
    x = expert_shards.rows(world)[rank]
    expert_shards.expect_equal_steps(models, x)
    report = f8.verify_distributed(models[0])
    assert report.ok and len(report.layers) == 6


def test_one_unit_of_two_meshes(tmp_path: Any) -> None:
    common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(common, "ShardPlacementResult"):
        pytest.skip("FSDP has one mesh for a unit before PyTorch 2.12")
    ranks.spawn(_of_one_unit, 4, tmp_path)


def _of_one_mesh(_: Any, rank: int, world: int) -> None:
    """Weights are DTensors over FSDP's dimension too, which has copies of them before."""
    mesh: Any = init_device_mesh(ranks.device, (2, 2), mesh_dim_names=("efsdp", "ep"))
    models = []
    for gather in (True, False):
        model = expert_shards.convert(expert_shards.layers(4), "rowwise", gather)
        for layer in model:
            _give_experts(layer.experts, mesh, Replicate(), Shard(0))
            layer.count = 2
            dims = torch.distributed.fsdp.DataParallelMeshDims(shard="efsdp")
            fully_shard(layer.experts, mesh=mesh, dp_mesh_dims=dims)
        models.append(model)
    expert_shards.expect_equal_steps(models, expert_shards.rows(world)[rank])


def test_one_mesh_of_both(tmp_path: Any) -> None:
    if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
        pytest.skip("this PyTorch's FSDP has a mesh of its own")
    ranks.spawn(_of_one_mesh, 4, tmp_path)


def _torchtitan(_: Any, rank: int, world: int, folder: str) -> None:
    """Experts of torchtitan 0.2.2, whose style sends rows to their ranks."""
    styles = expert_shards.import_torchtitan(folder)
    from torchtitan.models.moe.moe import GroupedExperts

    meshes = _Meshes(2, 2)
    torch.manual_seed(0)
    plain = GroupedExperts(expert_shards.HIDDEN, 48, 4, True).to(ranks.device)
    for p in plain.parameters():
        nn.init.normal_(p, std=0.1)
    models = []
    for gather in (True, False):
        model = expert_shards.convert(nn.ModuleList([copy.deepcopy(plain)]), "rowwise", gather)
        styles.ExpertParallel()._apply(model[0], meshes.ep)
        models.append(fully_shard(model[0], mesh=meshes.fsdp))
    counts = torch.tensor([5, 0, 24, 11] if rank % 2 else [9, 3, 0, 17], device=ranks.device)
    x = torch.randn(int(counts.sum()), expert_shards.HIDDEN, device=ranks.device)
    expert_shards.expect_equal_steps(models, x, of=lambda model, rows: model(rows, counts))


def test_under_torchtitans_expert_parallel(tmp_path: Any) -> None:
    ranks.spawn(_torchtitan, 4, tmp_path, repository.torchtitan_folder("0.2.2"))


def _transformers(_: Any, rank: int, world: int, kind: str, recipe: str) -> None:
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    meshes = _Meshes(2, 2)
    alone: Any = init_device_mesh(ranks.device, (world, 1), mesh_dim_names=("dp", "tp"))["tp"]
    plain = getattr(expert_shards, kind)(4)
    models = []
    for gather in (True, False):
        model = expert_shards.convert(copy.deepcopy(plain), recipe, gather)
        names = {name for name, _ in (*model.named_parameters(), *model.named_modules())}
        plan = {
            f"model.{name.replace('*', str(i))}": style
            for name, style in plain.config.base_model_ep_plan.items()
            for i in range(2)
        }
        apply_expert_parallelism(
            model, meshes.ep, alone, {n: s for n, s in plan.items() if n in names}
        )
        for layer in model.model.layers:
            fully_shard(layer.mlp.experts, mesh=meshes.fsdp)
            fully_shard(layer, mesh=meshes.all)
        models.append(fully_shard(model, mesh=meshes.all))
    batch = expert_shards.batches(world)[rank]
    expert_shards.expect_equal_steps(models, batch, of=expert_shards.loss)
    assert f8.verify_distributed(models[0]).ok


@pytest.mark.parametrize(
    ("kind", "recipe"), [("qwen", "rowwise"), ("qwen", "delayed"), ("gpt_oss", "rowwise")]
)
def test_under_transformers_expert_parallelism(kind: str, recipe: str, tmp_path: Any) -> None:
    """The weights of gpt-oss are stored as [E, K, N]."""
    pytest.importorskip("transformers.distributed.expert_parallel")
    ranks.spawn(_transformers, 4, tmp_path, kind, recipe)


def _changed(_: Any, rank: int, world: int, folder: str) -> None:
    """Each change is seen by the next forward, and verify_distributed finds what nobody saw."""
    x = expert_shards.rows(world)[rank]
    models = _pair(_Meshes(2, 2), "tensorwise", 4)
    names = list(expert_shards.layers(4).state_dict())
    with torch.no_grad():
        before = models[0](x)
        for number, (way, change) in enumerate(expert_shards.WAYS_TO_DOUBLE.items()):
            for i, model in enumerate(models):
                change(model, f"{folder}/{number}_{i}")
                assert list(model.state_dict()) == names
            ys = [model(x) for model in models]
            assert torch.equal(*ys) and not torch.equal(ys[0], before), way
            for model in models:
                torch._foreach_div_(list(model.parameters()), 2)
            assert torch.equal(models[0](x), before), way
    assert f8.verify_distributed(models[0]).ok
    local: Any = models[0][1].experts.w2._local_tensor
    address = local.plain().data_ptr()  # as a kernel might have it from elsewhere
    ctypes.c_float.from_address(address).value += 64
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"1\.experts\.w2.*please"):
        models[0](x)
    f8.check_copies(False)
    with pytest.raises(f8.DistributedError, match=r"1\.experts\.w2.*precompute"):
        f8.verify_distributed(models[0])


def test_changes_of_weights(tmp_path: Any) -> None:
    ranks.spawn(_changed, 4, tmp_path, str(tmp_path))


def _left(_: Any, rank: int, world: int) -> None:
    """What else ranks share is gathered in high precision, and a warning says why."""
    x = expert_shards.rows(world)[rank]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        models = _pair(_Meshes(2, 1), "rowwise", 2, 2)
        seen = expert_shards.expect_equal_steps(models, x, 1, all_in_fp8=False)
        models = _pair(_Meshes(1, 2), "rowwise", 2, n=64, at=Shard(1))
        seen += expert_shards.expect_equal_steps(models, x, 1, all_in_fp8=False)
    assert not any(seen)
    words = " ".join(str(each.message) for each in caught)
    assert "0.experts.w1 in high precision" in words and "Shard(1) of FSDP" in words
    assert "whole experts to each rank" in words


def test_what_gathers_in_high_precision(tmp_path: Any) -> None:
    ranks.spawn(_left, 2, tmp_path)


def _unlike(_: Any, rank: int, world: int) -> None:
    """Ranks of FSDP whose recipes differ say so on all of them, by the weight's name."""
    recipe = "rowwise" if rank == 0 else "tensorwise"
    model, _high = _pair(_Meshes(2, 1), recipe, 4)
    with pytest.raises(f8.DistributedError, match=r"experts\.w1"):
        model(expert_shards.rows(world)[rank])


def test_ranks_with_other_recipes(tmp_path: Any) -> None:
    ranks.spawn(_unlike, 2, tmp_path)


class _Own(nn.Module):
    """float8's experts, which send rows to their ranks themselves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = f8.Experts(4, expert_shards.HIDDEN, 48).to(ranks.device)
        self.group: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(2 * len(x), device=x.device).view(-1, 2) % 4
        scores = torch.ones(ids.shape, device=x.device)
        y: torch.Tensor = self.experts(x, ids, scores, group=self.group)
        return y


def _own_experts(_: Any, rank: int, world: int) -> None:
    """Results and gradients are those of one rank with all experts and tokens."""
    meshes = _Meshes(1, 2)
    single = expert_shards.convert(_Own(), "rowwise", False)
    models = []
    for gather in (True, False):
        model = expert_shards.convert(_Own(), "rowwise", gather)
        _give_experts(model.experts, meshes.ep, Shard(0))
        with pytest.raises(ValueError, match=r"placements \(Shard\(dim=0\),\).*as group"):
            model(expert_shards.rows(world)[rank])
        model.group = meshes.ep.get_group()
        fully_shard(model.experts, mesh=meshes.fsdp)
        models.append(model)
    x = expert_shards.rows(world)
    y = single(x.flatten(0, 1))
    assert torch.equal(models[0](x[rank]), y.view(world, -1, y.shape[-1])[rank])
    models[0].experts.reshard()
    expert_shards.expect_equal_steps(models, x[rank])
    delayed = []
    for gather in (True, False):
        model = expert_shards.convert(_Own(), "delayed", gather)
        _give_experts(model.experts, meshes.ep, Shard(0))
        model.group = meshes.ep.get_group()
        fully_shard(model.experts, mesh=meshes.fsdp)
        delayed.append(model)
    expert_shards.expect_equal_steps(delayed, x[rank], 3)


def test_own_experts(tmp_path: Any) -> None:
    ranks.spawn(_own_experts, 2, tmp_path)
