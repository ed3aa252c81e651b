"""FSDP over tensor parallel linears: weights gathered in fp8, to the bits of tensor parallelism alone.

Ranks are processes on the emulated device: two replicas of two ranks that share each linear.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import ranks
import torch
from parallel_models import mlp, mlp_plan
from reference import same, sqnr
from torch import distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import float8.torch as f8
from float8.torch.shard.gathered_weight import GatheredWeight

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "delayed")


def _mesh(world: int, tensor: int = 2) -> Any:
    names: tuple[str, ...] = ("shard", "tensor")
    shape: tuple[int, ...] = (world // tensor, tensor)
    if world == 8:
        names, shape = ("replica", *names), (2, 2, 2)
    return distributed.device_mesh.init_device_mesh(ranks.device, shape, mesh_dim_names=names)


def _shard(model: Any, mesh: Any, **options: Any) -> Any:
    # Linears of one group share an x, as those of tensor parallelism alone do.
    fully_shard(model["mlp"].down, mesh=mesh, **options)
    fully_shard(model["mlp"], mesh=mesh, **options)
    return model


def _sizes(recipe: str) -> tuple[int, int]:
    """Returns in and hidden features; FSDP shards no whole 128s of rows."""
    return (336, 256) if recipe == "blockwise" else (80, 96)


class Model:
    """An Mlp, its optimizer, and what a step gave."""

    def __init__(self, model: Any, checkpointed: bool = False) -> None:
        self.model = model
        self.checkpointed = checkpointed
        # Some parameters are DTensors of other meshes.
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def step(self, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        block = self.model["mlp"]
        y = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        y.backward(dy)
        f8.sync_float8_amax_and_scale_history(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert x.grad is not None
        return [y.detach(), x.grad]

    def weights(self) -> list[torch.Tensor]:
        return [_whole(each) for each in self.model.parameters()]


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor().detach() if hasattr(tensor, "full_tensor") else tensor.detach()


def _equal(_: Any, rank: int, world: int) -> None:
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # With two ranks FSDP or tensor parallelism has a single one.
    for tensor, recipes in ((1, RECIPES[3:]), (2, RECIPES[:2])) if world == 2 else ((2, RECIPES),):
        mesh = _mesh(world, tensor)
        for index, recipe in enumerate(recipes):
            by_tokens = index % 2 == 0
            _expect_equal(mesh, recipe, by_tokens, {})
            _expect_equal(mesh, recipe, not by_tokens, {"mp_policy": bf16})
            if recipe == "rowwise":
                _expect_equal(mesh, recipe, by_tokens, {"reshard_after_forward": False})


def _expect_equal(mesh: Any, recipe: str, by_tokens: bool, options: dict[str, Any]) -> None:
    """Compares steps with fp8 gathers, with others, and of tensor parallelism and one device."""
    dtype = torch.bfloat16 if "mp_policy" in options else torch.float32
    dim, hidden = _sizes(recipe)
    own, parts = mesh["tensor"].get_local_rank(), mesh["tensor"].size()
    plain = mlp(recipe, dim, hidden, torch.float32)
    gathers = mlp(recipe, dim, hidden, torch.float32, enable_fsdp_float8_all_gather=True)
    models = {"single": Model(plain)}
    for name, model in (
        ("fp8", gathers),
        ("hp", copy.deepcopy(plain)),
        ("tp", copy.deepcopy(plain)),
    ):
        parallelize_module(model, mesh["tensor"], mlp_plan(by_tokens))
        dp = mesh["replica", "shard"] if mesh.ndim == 3 else mesh["shard"]
        if name != "tp":
            _shard(model, dp, **options)
        models[name] = Model(model)
    torch.manual_seed(1)
    rows = 256 if recipe == "blockwise" else 32  # of which a rank has half
    for step in range(3):
        # All replicas have the same tokens, so that their gradients' mean is one device's.
        x, dy = (torch.randn(2, rows, dim) for _ in range(2))
        x, dy = (each.to(ranks.device, dtype) for each in (x, dy / 16))
        shards = [each.chunk(parts, 1)[own] if by_tokens else each for each in (x, dy)]
        found = {}
        for name, model in models.items():
            if name in ("single", "tp") and dtype != torch.float32:
                continue
            found[name] = model.step(*(shards if name != "single" else (x, dy)))
        if step == 0:
            f8.precompute_float8_dynamic_scale_for_fsdp(gathers)
        # A mean over three equal gradients is rounded.
        for name in ("hp", "tp") if mesh["shard"].size() != 3 or step == 0 else ("hp",):
            for a, b in zip(found["fp8"], found.get(name, found["fp8"]), strict=True):
                assert torch.equal(a, b), (recipe, by_tokens, options, step, name)
        assert same(models["fp8"].weights(), models["hp"].weights())
        if "single" in found:
            expected = [e.chunk(parts, 1)[own] if by_tokens else e for e in found["single"]]
            for a, b in zip(found["fp8"], expected, strict=True):
                # Plans of a GPU have sums in other orders, as `agree` says.
                assert sqnr(a, b) > (36 if a.is_cuda else 60), (recipe, sqnr(a, b))
    seen: list[Any] = []
    hook = gathers["mlp"].up.register_forward_pre_hook(lambda layer, *_: seen.append(layer.weight))
    with torch.no_grad():
        y = gathers["mlp"](shards[0])
        f8.precompute_float8_dynamic_scale_for_fsdp(gathers)  # some weights are gathered still
        assert torch.equal(gathers["mlp"](shards[0]), y)
    hook.remove()
    assert isinstance(seen[0].to_local(), GatheredWeight)


@pytest.mark.parametrize("world", (2, 4))
def test_the_bits_of_tensor_parallelism_alone(world: int, tmp_path: Any) -> None:
    ranks.spawn(_equal, world, tmp_path)


@pytest.mark.parametrize("world", ranks.gpus(2, 4))
def test_the_bits_of_tensor_parallelism_alone_on_gpus(world: int, tmp_path: Any) -> None:
    ranks.spawn(_equal, world, tmp_path, device="cuda")


def _rowwise(_: Any, rank: int, world: int) -> None:
    _expect_equal(_mesh(world), "rowwise", True, {})


@pytest.mark.parametrize("world", (6, 8))
def test_shards_that_are_uneven_or_replicated(world: int, tmp_path: Any) -> None:
    ranks.spawn(_rowwise, world, tmp_path)


def _saved(_: Any, rank: int, world: int, folder: str) -> None:
    """Saves after a step, and loads into a model of other weights."""
    mesh = _mesh(world)
    models = []
    for _ in range(2):
        model = mlp("rowwise", 80, 96, torch.float32, enable_fsdp_float8_all_gather=True)
        parallelize_module(model, mesh["tensor"], mlp_plan(False))
        models.append(Model(_shard(model, mesh["shard"])))
    torch.manual_seed(1)
    x = torch.randn(2, 16, 80)
    models[0].step(x, x)
    state = {"model": get_model_state_dict(models[0].model)}
    dcp.save(state, checkpoint_id=folder)
    state = {"model": get_model_state_dict(models[1].model)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(models[1].model, state["model"])
    with torch.no_grad():
        own, expected = (model.model["mlp"](x) for model in models[::-1])
    assert torch.equal(own, expected)
    if rank == 0:
        torch.save((x, expected + 0), f"{folder}/expected.pt")


def test_a_checkpoint_is_that_of_plain_linears(tmp_path: Any) -> None:
    folder = str(tmp_path / "checkpoint")
    ranks.spawn(_saved, 4, tmp_path, folder)
    plain = mlp("rowwise", 80, 96, torch.float32)
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    plain.load_state_dict(state["model"])
    x, expected = torch.load(f"{folder}/expected.pt")
    assert sqnr(expected, plain["mlp"](x).detach()) > 60


def _wire(_: Any, rank: int, world: int, recipe: str) -> None:
    """A gather has a byte an element; maxima are reduced once in each group for all weights."""
    mesh, traffic = _mesh(world), ranks.Traffic()
    dim, hidden = 128, 256
    elements = 3 * dim * hidden // world  # of a rank's shards
    # Rows of the shards of gate, up and down; their scales are gathered.
    rows = 2 * hidden // world + dim // 2
    model = mlp(recipe, dim, hidden, torch.bfloat16, enable_fsdp_float8_all_gather=True)
    parallelize_module(model, mesh["tensor"], mlp_plan(False))
    _shard(model, mesh["shard"], reshard_after_forward=True)
    own = Model(model)
    x = torch.randn(2, 16, dim, dtype=torch.bfloat16)
    own.step(x, x)
    scales, reduced = traffic.of(lambda: f8.precompute_float8_dynamic_scale_for_fsdp(model))
    assert scales == ({} if recipe == "tensorwise" else {torch.float32: 4 * rows})
    assert reduced == 2
    with ranks.Collectives() as seen:
        found, reduced = traffic.of(lambda: own.step(x, x))
    # q and qt; FSDP gathers biases with them, twice, with 2 bytes an element.
    biases = hidden // world + dim // 2
    assert found == {torch.uint8: 2 * elements + 2 * 2 * biases}, found
    # Words of weights are in no all-reduce of a step.
    words = [size // 4 for _, dtype, size in seen.calls if dtype == torch.int32]
    assert all(count in {1, 32} for count in words), words


@pytest.mark.parametrize("recipe", RECIPES[:3])
def test_bytes_on_the_wire(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_wire, 4, tmp_path, recipe)


def _not_a_number(_: Any, rank: int, world: int, recipe: str) -> None:
    """A NaN in one rank's shard has the effect that it has on one device."""
    mesh = _mesh(world)
    own = mesh["tensor"].get_local_rank()
    plain = mlp(recipe, 80, 96, torch.float32)
    model = mlp(recipe, 80, 96, torch.float32, enable_fsdp_float8_all_gather=True)
    parallelize_module(model, mesh["tensor"], mlp_plan(False))
    _shard(model, mesh["shard"])
    with torch.no_grad():
        # The second rank of both groups has the last rows and columns.
        plain["mlp"].down.weight[-1, -1] = torch.nan
        plain["mlp"].up.weight[-1, -1] = torch.nan
        if rank == world - 1:
            model["mlp"].down.weight.to_local()[-1, -1] = torch.nan
            model["mlp"].up.weight.to_local()[-1, -1] = torch.nan
    torch.manual_seed(3)
    x = torch.randn(2, 16, 80)
    found = []
    for each in (model, plain):
        up: list[Any] = []
        hook = each["mlp"].up.register_forward_hook(lambda *args: up.append(args[2]))  # noqa: B023
        inputs = x.clone().requires_grad_()
        y = each["mlp"](inputs)
        hook.remove()
        y.sum().backward()
        found.append((up[0], y, inputs.grad))
    (own_up, *rest), (up, *expected) = found
    for a, b in zip((own_up, *rest), (up.chunk(2, -1)[own], *expected), strict=True):
        assert torch.equal(a.isnan(), b.isnan()), recipe
    assert own_up.isnan().any() == (recipe == "tensorwise" or own == 1)


@pytest.mark.parametrize("recipe", RECIPES[:3])
def test_a_nan_on_one_rank_reaches_what_it_reaches_on_one_device(
    recipe: str, tmp_path: Any
) -> None:
    ranks.spawn(_not_a_number, 4, tmp_path, recipe)


def _delayed(_: Any, rank: int, world: int) -> None:
    """FSDP's shards of a tensor parallel weight have 24 rows, which no plan of a linear takes."""
    mesh = _mesh(world)
    own = mesh["tensor"].get_local_rank()
    single = mlp("delayed", 80, 96, torch.float32)
    model = copy.deepcopy(single)
    parallelize_module(model, mesh["tensor"], mlp_plan(True))
    _shard(model, mesh["shard"])
    assert model["mlp"].up.weight.to_local().shape == (24, 80)
    models = Model(model), Model(single)
    torch.manual_seed(1)
    for _ in range(3):
        x, dy = torch.randn(2, 16, 80), torch.randn(2, 16, 80)
        found = models[0].step(*(each.chunk(2, 1)[own] for each in (x, dy)))
        for a, b in zip(found, models[1].step(x, dy), strict=True):
            assert sqnr(a, b.chunk(2, 1)[own]) > 60


def test_delayed_scaling_of_shards_that_are_no_linears(tmp_path: Any) -> None:
    ranks.spawn(_delayed, 4, tmp_path)


def _composed(_: Any, rank: int, world: int) -> None:
    """Compiled and checkpointed blocks, autocast and an empty x give what they give eagerly."""
    mesh = _mesh(world)
    own = mesh["tensor"].get_local_rank()
    for recipe, by_tokens in (("rowwise", True), ("tensorwise", False)):
        torch._dynamo.reset()  # FSDP's modules are not guarded, so a graph is that of any recipe
        models = {}
        # A graph that gathers tokens, too, is that of async tensor parallelism below.
        names = ("eager", "checkpointed") if by_tokens else ("eager", "compiled", "checkpointed")
        for name in names:
            model = mlp(recipe, 80, 96, torch.float32, enable_fsdp_float8_all_gather=True)
            parallelize_module(model, mesh["tensor"], mlp_plan(by_tokens))
            block = model["mlp"]
            if name == "compiled":
                block.compile(fullgraph=True, backend="aot_eager")
            fully_shard(block, mesh=mesh["shard"], reshard_after_forward=True)
            models[name] = Model(model, checkpointed=name == "checkpointed")
        torch.manual_seed(1)
        for _ in range(2):
            x, dy = torch.randn(2, 16, 80), torch.randn(2, 16, 80)
            if by_tokens:
                x, dy = (each.chunk(2, 1)[own] for each in (x, dy))
            found = {name: model.step(x, dy) for name, model in models.items()}
            for name in names[1:]:
                for a, b in zip(found[name], found["eager"], strict=True):
                    assert torch.equal(a, b), name
        for name in names[1:]:
            for a, b in zip(models[name].weights(), models["eager"].weights(), strict=True):
                assert torch.equal(a, b), name
        model = models["eager"].model
        y = model["mlp"](torch.randn(2, 0, 80, requires_grad=True))
        assert y.shape == (2, 0, 80)
        y.sum().backward()
        assert not model["mlp"].up.weight.grad.to_local().any()


def test_what_it_is_composed_with(tmp_path: Any) -> None:
    ranks.spawn(_composed, 4, tmp_path)


def _overlapped(_: Any, rank: int, world: int) -> None:
    """Async tensor parallelism reads gathered weights too, eagerly and compiled."""
    mesh = _mesh(world)
    own = mesh["tensor"].get_local_rank()
    for recipe in RECIPES:
        dim, hidden = _sizes(recipe)
        models = {}
        gathers = {"enable_fsdp_float8_all_gather": True}
        kinds: dict[str, Any] = {"fp8": gathers, "hp": {}}
        if recipe in ("rowwise", "delayed"):  # graphs of the others differ in scales alone
            kinds["compiled"] = gathers
        for name, options in kinds.items():
            torch._dynamo.reset()
            model = mlp(recipe, dim, hidden, torch.float32, async_tensor_parallel=True, **options)
            parallelize_module(model, mesh["tensor"], mlp_plan(True))
            if name == "compiled":
                model["mlp"].compile(fullgraph=True, backend="aot_eager")
            fully_shard(model["mlp"], mesh=mesh["shard"], reshard_after_forward=True)
            models[name] = Model(model)
        torch.manual_seed(1)
        for _ in range(2):
            rows = 256 if recipe == "blockwise" else 32
            x, dy = (torch.randn(2, rows, dim).chunk(2, 1)[own] for _ in range(2))
            found = {name: model.step(x, dy) for name, model in models.items()}
            for name in kinds:
                for a, b in zip(found[name], found["hp"], strict=True):
                    assert torch.equal(a, b), (recipe, name)
        for name in kinds:
            for a, b in zip(models[name].weights(), models["hp"].weights(), strict=True):
                assert torch.equal(a, b), (recipe, name)


def test_async_tensor_parallelism(tmp_path: Any) -> None:
    ranks.spawn(_overlapped, 4, tmp_path)
