"""FSDP2 with weights gathered in fp8: the bits of gathers in high precision, at 1 byte an element.

Ranks are processes on the emulated device.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import ranks
import torch
from gathered_models import (
    RECIPES,
    Checkpointed,
    expect_equal_steps,
    expect_equal_under,
    mlp,
    train_step,
    uneven_rows,
)
from parallel_models import shard
from torch import distributed, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import float8.torch as f8
from float8 import recipes
from float8.torch import _ops
from float8.torch.shard import shard_casts


def _equal(mesh: Any, rank: int, world: int, recipe: str) -> None:
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for reshard in (True, False):
        mixed = {"mp_policy": bf16} if reshard is (world == 2) else {}
        expect_equal_under(mesh, rank, recipe, {"reshard_after_forward": reshard, **mixed})


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("world", (2, 3))
def test_the_bits_of_a_gather_in_high_precision(world: int, recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_equal, world, tmp_path, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
@ranks.needs_gpus(2)
def test_the_bits_of_a_gather_in_high_precision_on_gpus(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_equal, 2, tmp_path, recipe, device="cuda")


def _cut_blocks(mesh: Any, rank: int, world: int) -> None:
    """Shards that begin and end inside blocks of 128 rows; of five ranks, the last has no rows of 16."""
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    torch.manual_seed(1)
    x = torch.randn(world, 16, 64)[rank].to(ranks.device)
    for rows in (16,) if world == 5 else (112, 400, 512):
        for options in ({}, {"mp_policy": bf16, "reshard_after_forward": rows != 400}):
            models = [
                shard(mlp("blockwise", rows, gather), mesh, **options) for gather in (True, False)
            ]
            expect_equal_steps(models, x)
            assert models[0][2]._weight_gather.cuts_blocks is (rows // world % 128 != 0)


@pytest.mark.parametrize("world", (2, 3, 5))
def test_shards_that_cut_blocks_have_the_bits_of_the_whole(world: int, tmp_path: Any) -> None:
    ranks.spawn(_cut_blocks, world, tmp_path)


@ranks.needs_gpus(2)
def test_shards_that_cut_blocks_have_the_bits_of_the_whole_on_gpus(tmp_path: Any) -> None:
    ranks.spawn(_cut_blocks, 2, tmp_path, device="cuda")


def _composed(mesh: Any, rank: int, world: int) -> None:
    torch.manual_seed(1)
    x = torch.randn(world, 16, 64)[rank]
    for recipe in ("tensorwise", "rowwise", "blockwise"):
        models = [
            shard(mlp(recipe, 80, gather, Checkpointed), mesh, reshard_after_forward=True)
            for gather in (True, False)
        ]
        expect_equal_steps(models, x)
    for kind in (nn.Sequential, Checkpointed):
        models = [_compiled(mesh, gather, kind) for gather in (True, False)]
        expect_equal_steps(models, torch.randn(world, 16, 80)[rank])
        own, other = (model.counter.frame_count for model in models)
        assert own == other, (own, other)
    _expect_whole_step(mesh, rank)


def _compiled(mesh: Any, gather: bool, kind: type[nn.Sequential]) -> nn.Module:
    """Returns two blocks that share one graph."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    blocks = []
    counter = CompileCounterWithBackend("aot_eager")
    for _ in range(2):
        block = kind(nn.Linear(80, 80), nn.GELU(), nn.Linear(80, 80, bias=False))
        config = f8.LinearConfig("rowwise", emulate=True, enable_fsdp_float8_all_gather=gather)
        f8.convert_to_float8_training(block, config=config)
        block.compile(fullgraph=ranks.whole_graphs, backend=counter)
        blocks.append(fully_shard(block, mesh=mesh))
    model = fully_shard(nn.Sequential(*blocks), mesh=mesh)
    model.counter = counter
    return model


def test_activation_checkpointing_and_compile(tmp_path: Any) -> None:
    ranks.spawn(_composed, 2, tmp_path)


def _expect_whole_step(mesh: Any, rank: int) -> None:
    """A compiled step has the precompute in it, which is no part of its graphs."""
    torch.manual_seed(rank)
    x = torch.randn(16, 64, device=ranks.device)
    losses = []
    for compiled in (False, True):
        model = shard(mlp("tensorwise", 80, True), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def step(model: Any = model, optimizer: Any = optimizer) -> Any:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            f8.precompute_float8_dynamic_scale_for_fsdp(model)
            return loss.detach()

        call = torch.compile(step, backend="aot_eager") if compiled else step
        losses.append(torch.stack([call() for _ in range(4)]))
    assert torch.equal(*losses) and losses[0].unique().numel() == 4


def _replicated(_: Any, rank: int, world: int) -> None:
    mesh = distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    torch.manual_seed(1)
    x = torch.randn(world, 16, 64)[rank]
    expect_equal_steps([shard(mlp("rowwise", 80, gather), mesh) for gather in (True, False)], x)


def test_shards_that_are_replicated(tmp_path: Any) -> None:
    ranks.spawn(_replicated, 4, tmp_path)


def _failed(mesh: Any, rank: int, world: int) -> None:
    """Delayed scaling goes on after a step that fails, an evaluation and a checkpoint."""
    torch.manual_seed(1)
    x = torch.randn(world, 16, 64)[rank]
    models = [shard(mlp("delayed", 80, gather), mesh) for gather in (True, False)]
    expect_equal_steps(models, x)
    amaxes = []
    for model in models:
        scales = model.float8_scales
        model(2 * x).sum().backward()  # a step that fails: its amaxes are forgotten
        scales.discard_step()
        with torch.no_grad():
            model(4 * x)
        model(x)
        amaxes.append(scales.amaxes().clone())
    whole = amaxes[1].clone()
    distributed.all_reduce(amaxes[0], distributed.ReduceOp.MAX)
    distributed.all_reduce(whole, distributed.ReduceOp.MAX)
    assert torch.equal(amaxes[0], whole)
    assert amaxes[0].count_nonzero() == 4  # of x and w
    expect_equal_steps(models, x)
    for model in models:  # scales of before the first step, with the weights of now
        state = model.state_dict()
        del state["float8_scales.state"]
        model.load_state_dict(state, strict=False)
    expect_equal_steps(models, x)


def test_delayed_scaling_after_a_step_that_fails(tmp_path: Any) -> None:
    ranks.spawn(_failed, 2, tmp_path)


def _bytes(mesh: Any, rank: int, world: int) -> None:
    x = torch.randn(16, 64)
    traffic = ranks.Traffic()
    # Ranks have whole blocks of the larger weights, and share some of the others.
    for recipe, reshard, (hidden, out) in itertools.product(
        RECIPES, (True, False), ((512, 256), (128, 96))
    ):
        model = nn.Sequential(nn.Linear(64, hidden, bias=False), nn.Linear(hidden, out, bias=False))
        config = f8.LinearConfig(recipe, emulate=True, enable_fsdp_float8_all_gather=True)
        f8.convert_to_float8_training(model, config=config)
        for layer in model:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train_step(model, optimizer, x)
        scales, reduced = traffic.of(lambda: f8.precompute_float8_dynamic_scale_for_fsdp(model))  # noqa: B023
        whole_blocks = recipe == "blockwise" and out // world % 128 == 0
        words = (hidden + out) // world if recipe.startswith("rowwise") else 0
        if whole_blocks:  # a rank's blocks of q, in rows of whole 4s, and of qt
            down = hidden // 128 // world, out // 128 // world
            words = down[0] * (4 + 1) + down[1] * (4 + hidden // 128)
        assert scales == ({torch.float32: 4 * words} if words else {})
        # Scales of delayed scaling are known, and those of whole blocks.
        assert reduced == (recipe != "delayed" and not whole_blocks)
        step, reduced = traffic.of(lambda: train_step(model, optimizer, x))  # noqa: B023
        elements = (64 * hidden + hidden * out) // world
        assert step == {torch.uint8: 2 * elements}, step  # q and qt
        assert reduced == (recipe == "delayed")  # all amaxes


def test_a_byte_an_element_and_direction(tmp_path: Any) -> None:
    ranks.spawn(_bytes, 2, tmp_path)


class _Casts:
    """The casts of lists of shards: what they read, and where those ahead of a step leave copies."""

    def __init__(self) -> None:
        for name, into in (("quantize_shard_list", 8), ("quantize_list", 5)):
            setattr(_ops, name, self._recorded(getattr(_ops, name), into))
        self.clear()

    def clear(self) -> None:
        self.read: list[list[torch.Tensor]] = []  # by casts ahead of a step
        self.written: list[list[int]] = []
        self.late: list[list[torch.Tensor]] = []  # read by casts where a unit is gathered

    def _recorded(self, op: Any, into: int) -> Any:
        def cast(x: list[torch.Tensor], *args: Any) -> Any:
            if args[into] is None:
                self.late.append(x)
            else:
                self.read.append(x)
                self.written.append([copy.data_ptr() for copy in args[into]])
            return op(x, *args)

        return cast


# Casts round to the type that shards are given before they know a recipe.
RECIPES_OF_TYPES = [
    *((recipe, torch.bfloat16) for recipe in RECIPES),
    *((recipe, torch.float16) for recipe in ("rowwise", "delayed")),
]


def _in_place(mesh: Any, rank: int, world: int, recipe: str, dtype: torch.dtype) -> None:
    """Casts read the shards as they are; they leave q where it was, and keep no late qt."""
    casts = _Casts()
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    torch.manual_seed(0)
    config = f8.LinearConfig(
        recipe, emulate=ranks.device == "cpu", enable_fsdp_float8_all_gather=True
    )
    sizes = (128, 128 * world, 256 * world)
    model = nn.Sequential(*(nn.Linear(*size) for size in itertools.pairwise(sizes)))
    model = f8.convert_to_float8_training(model.to(ranks.device), config=config)
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=mixed)
    fully_shard(model, mesh=mesh, mp_policy=mixed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_step(model, optimizer, torch.randn(16, 128, device=ranks.device))
    train_step(model, optimizer, torch.randn(16, 128, device=ranks.device))
    linears = [layer for layer in model if isinstance(layer, nn.Linear)]
    rounds = []
    for _ in range(2):
        casts.clear()
        for layer in linears:
            with torch.no_grad():
                layer.weight.mul_(1.25)
        f8.precompute_float8_dynamic_scale_for_fsdp(model)
        assert not casts.late
        train_step(model, optimizer, torch.randn(16, 128, device=ranks.device))
        rounds.append((casts.read, casts.written, casts.late))
        assert not any(layer._weight_gather._cast_late for layer in linears)
        kept = {name for layer in linears for name in layer._weight_gather._shards}
        assert kept == ({"q"} if casts.late else {"q", "qt"})
    own = [layer.weight.to_local().data_ptr() for layer in linears]
    units = 0 if recipe in ("delayed", "blockwise") else 2  # whose qt are late
    for read, written, late in rounds:
        assert written == rounds[0][1], recipe
        assert all(each.dtype == torch.float32 for some in read + late for each in some)
        ahead = [[each.data_ptr() for each in some] for some in read]
        assert ahead == [own], recipe
        assert len(late) == units, recipe
        at = [each.data_ptr() for some in late for each in some]
        assert sorted(at) == sorted(own if units else []), recipe


@pytest.mark.parametrize(("recipe", "dtype"), RECIPES_OF_TYPES)
def test_shards_are_cast_in_place(recipe: str, dtype: torch.dtype, tmp_path: Any) -> None:
    ranks.spawn(_in_place, 2, tmp_path, recipe, dtype)


def _in_pieces(mesh: Any, rank: int, world: int, recipe: str, dtype: torch.dtype) -> None:
    """Shards of rows that copies have with gaps need other copies for a moment, one at a time."""
    casts = _Casts()
    shard_casts._PIECE = 64 * 64
    torch.manual_seed(1)
    x = torch.randn(world, 16, 64)[rank]
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    models = [mlp(recipe, uneven_rows(world), gather) for gather in (True, False)]
    for model in models:
        model[2].bfloat16()  # which float16 has not
    expect_equal_steps([shard(model, mesh, mp_policy=mixed) for model in models], x)
    assert casts.read
    assert max(map(len, casts.read)) == 1


@pytest.mark.parametrize(("recipe", "dtype"), RECIPES_OF_TYPES)
def test_shards_are_cast_in_pieces(recipe: str, dtype: torch.dtype, tmp_path: Any) -> None:
    ranks.spawn(_in_pieces, 2, tmp_path, recipe, dtype)


def _not_a_number(mesh: Any, rank: int, world: int, recipe: str) -> None:
    # all rows are in one block of 128
    models = [shard(mlp(recipe, 80, gather), mesh) for gather in (True, False)]
    results = []
    for model in models:
        with torch.no_grad():
            if rank == world - 1:
                model[2].weight.to_local()[3, 5] = torch.nan
        hidden = torch.randn(16, 80, generator=torch.Generator().manual_seed(2))
        hidden.requires_grad_()
        y = model[2](hidden)
        y.square().sum().backward()
        results.append((y.detach(), hidden.grad))
        assert y.isnan().any()
    for own, other in zip(*results, strict=True):
        assert torch.equal(own.isnan(), other.isnan())
        assert torch.equal(own.nan_to_num(), other.nan_to_num())
    if recipe in ("tensorwise", "delayed"):  # which is in its first step
        assert results[0][0].isnan().all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_nan_on_one_rank_reaches_all(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_not_a_number, 2, tmp_path, recipe)


def _saving(mesh: Any, rank: int, world: int, folder: str) -> None:
    """Saves after a step, changes the weights, and takes them back."""
    x = torch.randn(16, 64)
    model = shard(mlp("rowwise", 80, True), mesh)
    train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), x)
    expected = model(x)
    state = {"model": get_model_state_dict(model)}
    dcp.save(state, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    assert not torch.equal(model(x), expected)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    assert torch.equal(model(x), expected)
    if rank == 0:
        torch.save(expected.detach(), f"{folder}/expected.pt")
        torch.save(x, f"{folder}/x.pt")
    distributed.barrier()


def test_the_state_dict_is_in_high_precision(tmp_path: Any) -> None:
    folder = tmp_path / "checkpoint"
    torch.manual_seed(3)
    ranks.spawn(_saving, 2, tmp_path, str(folder))
    plain = nn.Sequential(nn.Linear(64, 80), nn.GELU(), nn.Linear(80, 80, bias=False))
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    plain.load_state_dict(state["model"])
    f8.convert_to_float8_training(plain, config=f8.LinearConfig("rowwise", emulate=True))
    x = torch.load(folder / "x.pt")
    assert torch.equal(plain(x), torch.load(folder / "expected.pt"))


def _misuse(mesh: Any, rank: int, world: int) -> None:
    model = shard(mlp("rowwise", 80, True), mesh)
    model[0].register_forward_pre_hook(lambda layer, *_: layer.weight + 1)
    with pytest.raises(NotImplementedError, match="no values in high precision"):
        model(torch.randn(16, 64))
    evaluated = shard(mlp("rowwise", 80, True), mesh, reshard_after_forward=False)
    with torch.no_grad():
        evaluated(torch.randn(16, 64))
    with pytest.raises(NotImplementedError, match=r"Call reshard\(\)"):
        [each.detach().clone() for each in evaluated.parameters()]
    for layer in (evaluated[0], evaluated[2]):
        layer.reshard()
    averages = [each.detach().clone() for each in evaluated.parameters()]
    assert all(map(torch.equal, averages, evaluated.parameters()))
    blockwise, rowwise = (recipes.Recipe.named(name) for name in ("blockwise", "rowwise"))
    mixed = dataclasses.replace(blockwise, grad_input=rowwise.grad_input)
    blocks = shard(mlp(mixed, 80, True), mesh)
    with pytest.raises(ValueError, match="40 rows each of a weight of 80 rows"):
        blocks(torch.randn(16, 64))


def test_what_ranks_cannot_do_is_an_error(tmp_path: Any) -> None:
    ranks.spawn(_misuse, 2, tmp_path)


DELAYED, BLOCKWISE = (recipes.Recipe.named(name) for name in ("delayed", "blockwise"))
PARTLY_DELAYED = dataclasses.replace(
    DELAYED, grad_weight=recipes.Recipe.named("tensorwise").grad_weight
)
BY_ROWS = dataclasses.replace(
    BLOCKWISE, output=dataclasses.replace(BLOCKWISE.output, b=BLOCKWISE.output.a)
)


@pytest.mark.parametrize(
    ("recipe", "words"),
    (
        ("bf16", "weight in fp8"),
        (PARTLY_DELAYED, "delayed scaling of all operands, or of none"),
        (BY_ROWS, "custom .* 1x128"),
    ),
    ids=("bf16", "partly delayed", "blocks of 1x128"),
)
def test_recipes_whose_weight_is_not_gathered(recipe: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mlp(recipe, 80, True)


def test_padded_weights_are_not_gathered() -> None:
    config = f8.LinearConfig(
        "rowwise", emulate=True, pad_inner_dim=True, enable_fsdp_float8_all_gather=True
    )
    with pytest.raises(ValueError, match="whole 16s"):
        f8.convert_to_float8_training(nn.Sequential(nn.Linear(40, 64)), config=config)


def _eager(mesh: Any, rank: int, world: int) -> None:
    model = shard(mlp("rowwise", 128 * world, True), mesh)
    x = torch.randn(16, 64, device=ranks.device)
    with torch.profiler.profile() as profile:
        model(x).square().mean().backward()
    ops = {event.key for event in profile.key_averages()}
    assert {"float8::linear_forward", "float8::linear_backward"} <= ops
    assert not ops & {"float8::gathered_forward", "float8::gathered_backward"}


def test_eager_linears_call_no_op_in_python(tmp_path: Any) -> None:
    """An op whose kernel is Python takes tens of microseconds more than a call."""
    ranks.spawn(_eager, 2, tmp_path)


def test_without_fsdp_nothing_changes() -> None:
    models = [mlp("rowwise", 80, gather) for gather in (True, False)]
    x = torch.randn(16, 64)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for _ in range(2):
        ys = [train_step(m, o, x) for m, o in zip(models, optimizers, strict=True)]
        assert torch.equal(*ys)
        assert type(ys[0]) is torch.Tensor
