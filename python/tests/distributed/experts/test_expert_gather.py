"""Experts whose weights FSDP gathers in fp8, whole ones or parts of each."""

from __future__ import annotations

import copy
import ctypes
import importlib.util
import io
import warnings
from collections.abc import Callable
from typing import Any

import expert_shards
import pytest
import ranks
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import float8.torch as f8
from float8.torch.shard.fsdp import ShardedWeight

IN_ANY_ROWS = (
    "tensorwise",
    "rowwise",
    "rowwise_with_gw_hp",
    "delayed",
)  # blockwise wants whole blocks
RECIPES = (*IN_ANY_ROWS, "blockwise")


def _equal_steps(
    mesh: Any, rank: int, world: int, recipe: str, experts: int, size: int, dim: int, fused: bool
) -> None:
    expert_shards.equal_steps_of(
        expert_shards.qwen(experts, size), mesh, rank, world, recipe, dim, fused
    )


# Without transformers the layers of torchtitan are tested alone.
_needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
)


@_needs_transformers
@pytest.mark.parametrize("recipe", RECIPES)
def test_whole_experts(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_equal_steps, 2, tmp_path, recipe, 4, 48, 0, False)


@_needs_transformers
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
@pytest.mark.parametrize(("world", "experts"), [(2, 3), (3, 4)])
def test_uneven_numbers_of_experts(world: int, experts: int, recipe: str, tmp_path: Any) -> None:
    """Of three ranks with four experts, the last has none."""
    ranks.spawn(_equal_steps, world, tmp_path, recipe, experts, 48, 0, True)


@_needs_transformers
@ranks.needs_gpus(2)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("recipe", IN_ANY_ROWS)
def test_on_gpus(recipe: str, dim: int, tmp_path: Any) -> None:
    ranks.spawn(_equal_steps, 2, tmp_path, recipe, 3, 48, dim, True, device="cuda")


@_needs_transformers
def test_one_of_two_weights(tmp_path: Any) -> None:
    """Ranks have whole blocks of the first weight's rows, and gather the second in high precision."""
    ranks.spawn(_equal_steps, 2, tmp_path, "blockwise", 3, 128, 1, False)


@_needs_transformers
@pytest.mark.parametrize("recipe", IN_ANY_ROWS)
def test_parts_of_each_expert(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_equal_steps, 2, tmp_path, recipe, 3, 48, 1, True)


def _pair(mesh: Any, recipe: str, experts: int, dim: int = 0, **options: Any) -> list[Any]:
    """Returns the layers of torchtitan with fp8 gathers and with gathers in high precision."""
    kind, n = options.pop("kind", expert_shards.GroupedExperts), options.pop("n", 48)
    plain = expert_shards.layers(experts, kind, n)
    return [
        expert_shards.shard(
            expert_shards.convert(copy.deepcopy(plain), recipe, gather), mesh, dim, **options
        )
        for gather in (True, False)
    ]


def _classes(mesh: Any, rank: int, world: int) -> None:
    x = expert_shards.rows(world)[rank]
    for kind in (expert_shards.GroupedExperts, expert_shards.FirstGroupedExperts):
        for recipe in ("rowwise", "delayed"):
            expert_shards.expect_equal_steps(_pair(mesh, recipe, 3, kind=kind), x, 3)
    # Rows in whole 128s are read as they are gathered.
    expert_shards.expect_equal_steps(_pair(mesh, "blockwise", 2, n=256), x)
    # Blocks of w1 and w3 are whole on each rank, and those of w2 are not.
    seen = expert_shards.expect_equal_steps(
        _pair(mesh, "blockwise", 2, 1, n=256), x, 1, all_in_fp8=False
    )
    assert seen == 2 * [True, False, True]


def test_classes_of_torchtitan(tmp_path: Any) -> None:
    ranks.spawn(_classes, 2, tmp_path)


def _joined(mesh: Any, rank: int, world: int) -> None:
    """Gathers in high precision leave w1 and w3 one weight, whose bits are those of one rank."""
    x = expert_shards.rows(world)
    for recipe, dim in (("rowwise", 0), ("blockwise", 1)):
        single = expert_shards.convert(expert_shards.layers(3), recipe, False)
        model = expert_shards.shard(single, mesh, dim)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        before = expert_shards.copies_of(model)
        y = model(x[rank])
        assert torch.equal(y, single(x[rank]))
        for part in x:
            (single(part).square().mean() / world).backward()
        y.square().mean().backward()
        for own, other in zip(model.parameters(), single.parameters(), strict=True):
            assert own.grad is not None and other.grad is not None
            assert torch.equal(own.grad.full_tensor(), other.grad)  # type: ignore[attr-defined]
        for _ in range(2):
            optimizer.step()
            optimizer.zero_grad()
            model(x[rank]).square().mean().backward()
        optimizer.step()
        expert_shards.expect_changes(before, model)


def test_pairs_of_torchtitan(tmp_path: Any) -> None:
    ranks.spawn(_joined, 2, tmp_path)


class _Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=False)


def _options(mesh: Any, rank: int, world: int) -> None:
    x = expert_shards.rows(world)[rank]
    for dim, experts in ((0, 4), (0, 3), (1, 3)):
        expert_shards.expect_equal_steps(
            _pair(mesh, "rowwise", experts, dim, reshard_after_forward=False), x
        )
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for recipe, experts in (("tensorwise", 3), ("rowwise", 4), ("delayed", 3)):
        expert_shards.expect_equal_steps(_pair(mesh, recipe, experts, mp_policy=policy), x)
    plain = expert_shards.layers(4)
    for i, layer in enumerate(plain):
        plain[i] = _Checkpointed(layer)
    for recipe, dim in (("rowwise", 0), ("rowwise", 1), ("delayed", 1)):
        models = [
            expert_shards.shard(
                expert_shards.convert(copy.deepcopy(plain), recipe, gather), mesh, dim
            )
            for gather in (True, False)
        ]
        expert_shards.expect_equal_steps(models, x, micro_batches=2)
    for recipe in ("rowwise", "delayed"):
        with torch.autocast(ranks.device, torch.bfloat16):
            expert_shards.expect_equal_steps(_pair(mesh, recipe, 4), x)
        with torch.no_grad():  # no backward reads the copies
            fp8, high = _pair(mesh, recipe, 4)
            assert torch.equal(fp8(x), high(x))


def test_options_of_fully_shard(tmp_path: Any) -> None:
    ranks.spawn(_options, 2, tmp_path)


def _hybrid(_: Any, rank: int, world: int) -> None:
    mesh = init_device_mesh(ranks.device, (2, 2), mesh_dim_names=("replicate", "shard"))
    for recipe in ("rowwise", "delayed"):
        expert_shards.expect_equal_steps(_pair(mesh, recipe, 4), expert_shards.rows(world)[rank])


def test_hybrid_sharding(tmp_path: Any) -> None:
    ranks.spawn(_hybrid, 4, tmp_path)


def _compiled(mesh: Any, rank: int, world: int, recipe: str) -> None:
    x = expert_shards.rows(world)[rank]
    models = []
    for gather in (True, False):
        model = expert_shards.convert(expert_shards.layers(4), recipe, gather)
        models.append(expert_shards.shard(model, mesh))  # copies have no compiled layers
        for layer in models[-1]:
            layer.compile(fullgraph=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    expert_shards.expect_equal_steps(models, x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_compiled_layers(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_compiled, 2, tmp_path, recipe)


def _traffic(mesh: Any, rank: int, world: int, recipe: str, dim: int) -> None:
    experts, n = 4, 128
    model, _ = _pair(mesh, recipe, experts, dim, n=n)
    x = expert_shards.rows(world)[rank]
    traffic = ranks.Traffic()
    model(x).sum().backward()
    if recipe == "delayed":
        f8.sync_float8_amax_and_scale_history(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f8.cache_weight_casts(model).update()  # there is no linear, but experts
    elements = 2 * 3 * experts * n * expert_shards.HIDDEN
    gathered, reduced = traffic.of(lambda: f8.precompute_float8_dynamic_scale_for_fsdp(model))
    scales = 2 * (2 * n + expert_shards.HIDDEN) * experts // world  # of q, which ranks have rows of
    if dim == 0:
        scales += 2 * (expert_shards.HIDDEN + n) * experts // world  # of qt: w1 and w3 share theirs
    of_casts = ({torch.float32: 4 * scales}, dim) if recipe == "rowwise" else ({}, 0)
    assert (gathered, reduced) == of_casts
    with torch.no_grad():
        gathered, reduced = traffic.of(lambda: model(x))
    assert gathered == {torch.uint8: elements // world}, gathered
    assert reduced == 0


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_bytes_of_gathers(recipe: str, dim: int, tmp_path: Any) -> None:
    """A byte an element; whole experts reduce nothing, and delayed scales are known."""
    ranks.spawn(_traffic, 2, tmp_path, recipe, dim)


def _left(mesh: Any, rank: int, world: int) -> None:
    """What cannot gather in fp8 says so by name, and trains."""
    x = expert_shards.rows(world)[rank]

    def told(recipe: str, dim: int, expected: str, **options: Any) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model, high = _pair(mesh, recipe, 2, dim, **options)
            y = model(x)
        words = " ".join(str(each.message) for each in caught)
        assert expected in words and "in high precision" in words, words
        assert torch.equal(y, high(x))
        y.sum().backward()
        assert not any(
            isinstance(weight, f8_weight) for weight in expert_shards.weights_in_forward(model, x)
        )

    f8_weight = expert_shards.GatheredWeight
    told("blockwise", 1, "1.experts.w3", n=128)


def test_what_gathers_in_high_precision(tmp_path: Any) -> None:
    ranks.spawn(_left, 2, tmp_path)


def _other_recipe(mesh: Any, rank: int, world: int) -> None:
    """Ranks that do not agree on the weights of experts all say so, with their names."""
    recipe = "rowwise" if rank == 0 else "tensorwise"
    model, _ = _pair(mesh, recipe, 3)
    with pytest.raises(f8.DistributedError, match=r"experts\.w1"):
        model(expert_shards.rows(world)[rank])


def test_ranks_with_other_recipes(tmp_path: Any) -> None:
    ranks.spawn(_other_recipe, 2, tmp_path)


def _double(weight: Any) -> None:
    """Writes through a pointer, which nobody sees."""
    local = weight._local_tensor
    values = (ctypes.c_float * local.numel()).from_address(local.data_ptr())
    for i in range(local.numel()):
        values[i] *= 2


def _by_load(model: nn.Module, folder: str) -> None:
    state = {name: p.detach().clone() for name, p in model.state_dict().items()}
    for name, _ in model.named_parameters():
        state[name].mul_(2)
    model.load_state_dict(state)


_WAYS: dict[str, Callable[[Any, str], object]] = {
    **expert_shards.WAYS_TO_DOUBLE,
    "load_state_dict": _by_load,
    "a pointer": lambda model, _: [_double(p) for p in model.parameters()],
}


def _changed(mesh: Any, rank: int, world: int, folder: str, recipe: str, dim: int) -> None:
    """Each change of the weights is seen by the forward that follows, without a call."""
    x = expert_shards.rows(world)[rank]
    models = _pair(mesh, recipe, 4, dim)
    with torch.no_grad():
        before = models[0](x)
        for number, (way, change) in enumerate(_WAYS.items()):
            for i, model in enumerate(models):
                change(model, f"{folder}/{number}_{i}")
            ys = [model(x) for model in models]
            assert torch.equal(*ys), way
            assert not torch.equal(ys[0], before), way
            for model in models:
                for p in model.parameters():
                    p.div_(2)
                assert torch.equal(model(x), before), way


@pytest.mark.parametrize(("recipe", "dim"), [("rowwise", 0), ("rowwise", 1), ("delayed", 0)])
def test_changes_of_weights(recipe: str, dim: int, tmp_path: Any) -> None:
    ranks.spawn(_changed, 2, tmp_path, str(tmp_path), recipe, dim)


def _unseen(mesh: Any, rank: int, world: int) -> None:
    """check_copies, which all ranks have on, finds copies that are not their weight's."""
    x = expert_shards.rows(world)[rank]
    for recipe in ("rowwise", "delayed"):
        model, _ = _pair(mesh, recipe, 4)
        with torch.no_grad():
            model(x)
            local: Any = model[1].experts.w2._local_tensor
            address = local.plain().data_ptr()  # as a kernel might have it from elsewhere
            ctypes.c_float.from_address(address).value += 1
            with pytest.raises(RuntimeError, match=r"1\.experts\.w2.*please"):
                model(x)


def test_a_change_that_nobody_saw(tmp_path: Any) -> None:
    ranks.spawn(_unseen, 2, tmp_path)


def _verified(mesh: Any, rank: int, world: int) -> None:
    """verify_distributed compares each weight, also before a step, and finds what was changed unseen."""
    x = expert_shards.rows(world)[rank]
    delayed = (("delayed", 0), ("delayed", 1))
    for recipe, dim in (
        *(("tensorwise", 0), ("rowwise", 1)),
        *delayed,
        *(("rowwise", 0), ("blockwise", 0)),
    ):
        model, _ = _pair(mesh, recipe, 4 if recipe == "blockwise" else 3, dim)
        for _ in range(2):
            report = f8.verify_distributed(model)
            apart = recipe in ("tensorwise", "delayed")
            names = ["w1", "w2", "w3"] if apart else ["w1 and w3", "w2"]
            expected = [f"{i}.experts.{name}" for i in range(2) for name in names]
            assert report.ok and [each.name for each in report.layers] == expected
            assert all(
                list(each.tensors) == ["w", "q", "qt", "y", "dx", "dw"][1:]
                for each in report.layers
            )
            model(x).sum().backward()
            if recipe == "delayed":
                f8.sync_float8_amax_and_scale_history(model)
    f8.check_copies(False)
    local: Any = model[1].experts.w2._local_tensor
    if rank == 1:
        ctypes.c_float.from_address(local.plain().data_ptr()).value += 64
    with pytest.raises(f8.DistributedError, match=r"1\.experts\.w2.*precompute"):
        f8.verify_distributed(model)


def test_verify_distributed(tmp_path: Any) -> None:
    ranks.spawn(_verified, 2, tmp_path)


def _saved(mesh: Any, rank: int, world: int, folder: str, recipe: str) -> None:
    """A checkpoint has plain tensors, which a model without fp8 loads, and a new one has their steps."""
    x = expert_shards.rows(world)[rank]
    model, high = _pair(mesh, recipe, 4)
    assert all(isinstance(p._local_tensor, ShardedWeight) for p in model.parameters())
    expert_shards.expect_equal_steps([model, high], x, 2)
    scales = ["float8_scales.state"] if recipe == "delayed" else []
    assert set(model.state_dict()) == {*expert_shards.layers(4).state_dict(), *scales}
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    others = _pair(mesh, recipe, 4)
    for other in others:
        state = get_model_state_dict(other)
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(other, state)
    with torch.no_grad():
        ys = [each(x) for each in (model, high, *others)]
    assert all(torch.equal(y, ys[0]) for y in ys)
    expert_shards.expect_equal_steps([*others, model], x, 2)
    again = copy.deepcopy(others[0][0].experts.w1._local_tensor)
    assert torch.equal(again, others[1][0].experts.w1._local_tensor)
    bytes_of = io.BytesIO()
    torch.save(model[0].experts.w1._local_tensor, bytes_of)
    bytes_of.seek(0)
    assert type(torch.load(bytes_of)) is torch.Tensor


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_saves_and_loads(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_saved, 2, tmp_path, str(tmp_path / "checkpoint"), recipe)


def _own(mesh: Any, rank: int, world: int, recipe: str) -> None:
    """float8.torch.Experts are gathered in fp8 as converted ones are."""
    emulate = ranks.device == "cpu"
    sizes = (4, expert_shards.HIDDEN, 48)
    single = f8.Experts(*sizes, recipe=recipe, emulate=emulate).to(ranks.device)
    models = []
    for gather in (True, False):
        config = f8.LinearConfig(recipe, emulate=emulate, enable_fsdp_float8_all_gather=gather)
        model = f8.convert_to_float8_training(copy.deepcopy(single), config=config, experts=True)
        models.append(fully_shard(model, mesh=mesh))
    assert models[0].expert_weights.keys() == {"w13", "w2"}
    x = torch.randn(2, 40, expert_shards.HIDDEN, device=ranks.device)[rank]
    ids = torch.randint(4, (2, 40, 2), device=ranks.device)[rank]
    scores = torch.rand(2, 40, 2, device=ranks.device)[rank]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in models]
    for _ in range(2):
        results = [each(x, ids, scores) for each in models]
        assert torch.equal(*results)
        for y in results:
            y.square().sum().backward()
        if recipe == "delayed":
            expert_shards.expect_equal_scales(models)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, other, old in zip(*(m.parameters() for m in (*models, single)), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())
        assert (one.full_tensor() != old).flatten(1).any(1).all()


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_own_experts(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_own, 2, tmp_path, recipe)
