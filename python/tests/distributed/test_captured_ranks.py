"""What ranks capture in CUDA graphs. On the emulated device a graph is the call that it records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from reference import same
from torch import nn
from torch.distributed.fsdp import fully_shard

import float8.torch as f8

DYNAMIC = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")
RECIPES = (*DYNAMIC, "delayed")


def _captured(call: Callable[[], None]) -> Callable[[], None]:
    """Returns the replay of a call, which is not made yet."""
    if ranks.device == "cpu":
        return call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _on_a_side_stream(call: Callable[[], None]) -> None:
    """Runs what a capture needs to have run once."""
    if ranks.device == "cpu":
        call()
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)


def _model(recipe: str | None, gather: bool = False) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 256, bias=False))
    model.to(ranks.device, torch.bfloat16)
    if recipe is None:
        return model
    emulate = ranks.device == "cpu"
    config = f8.LinearConfig(recipe, emulate=emulate, enable_fsdp_float8_all_gather=gather)
    return f8.convert_to_float8_training(model, config=config)


def _input(rank: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(rank)
    return torch.randn(64, 128, generator=random).to(ranks.device, torch.bfloat16)


def _sync(mesh: Any, rank: int, world: int) -> None:
    """The end of a step of delayed scaling: the all-reduce of all amaxes, then the scales."""
    models = [_model("delayed") for _ in range(2)]
    x = _input(rank)

    def step(model: Any) -> None:
        model(x).square().mean().backward()

    for model in models:
        step(model)
        f8.sync_float8_amax_and_scale_history(model)  # the first step ends in another way
    replay = _captured(lambda: f8.sync_float8_amax_and_scale_history(models[0]))
    for _ in range(3):
        x = 2 * x
        for model in models:
            step(model)
        replay()
        f8.sync_float8_amax_and_scale_history(models[1])
        own, expected = (model.state_dict()["float8_scales.state"] for model in models)
        assert torch.equal(own, expected)
    assert torch.equal(models[0](x), models[1](x))


def _casts(mesh: Any, rank: int, world: int, recipe: str) -> None:
    """The casts of all shards, with their all-reduce and their all-gather."""
    models = [fully_shard(_model(recipe, True), mesh=mesh) for _ in range(2)]
    for model in models:
        model(_input(rank)).square().mean().backward()  # the first step ends in another way
        f8.sync_float8_amax_and_scale_history(model)
        f8.precompute_float8_dynamic_scale_for_fsdp(model)
    replay = _captured(lambda: f8.precompute_float8_dynamic_scale_for_fsdp(models[0]))
    for _ in range(2):
        with torch.no_grad():
            for model in models:
                model[0].weight.to_local().mul_(3)
                model[2].weight.to_local().add_(rank)
        replay()
        f8.precompute_float8_dynamic_scale_for_fsdp(models[1])
        for i in (0, 2):
            own, expected = (model[i]._weight_gather for model in models)
            for name in ("q", "qt"):
                assert torch.equal(own.shard(name), expected.shard(name)), (recipe, i, name)
                assert torch.equal(own._scales[name], expected._scales[name])
    assert torch.equal(models[0](_input(rank)), models[1](_input(rank)))


class _Step:
    """A training step of FSDP2, whose forward and backward may be in a graph."""

    def __init__(self, mesh: Any, recipe: str | None, rank: int) -> None:
        model = _model(recipe, gather=recipe is not None)
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        self.model: Any = fully_shard(model, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.x = _input(rank)
        self.y = self.x

    def cast(self) -> None:
        f8.precompute_float8_dynamic_scale_for_fsdp(self.model)

    def compute(self) -> None:
        self.model.zero_grad(set_to_none=True)
        y = self.model(self.x)
        y.square().mean().backward()
        self.y = y.detach()

    def cast_and_compute(self) -> None:
        self.cast()
        self.compute()


def _whole_step(mesh: Any, rank: int, world: int, recipe: str | None) -> None:
    """Forward and backward with FSDP's gathers; casts in the graph, or between its replays."""
    for casts_in_graph in (True, False):
        own, expected = (_Step(mesh, recipe, rank) for _ in range(2))
        for each in (own, expected):
            _on_a_side_stream(each.cast_and_compute)
            each.optimizer.step()
        if not casts_in_graph:
            own.cast()
        replay = _captured(own.cast_and_compute if casts_in_graph else own.compute)
        for _ in range(3):
            if not casts_in_graph:
                own.cast()
            replay()
            expected.cast_and_compute()
            assert torch.equal(own.y, expected.y)
            for a, b in zip(own.model.parameters(), expected.model.parameters(), strict=True):
                assert torch.equal(a.grad.to_local(), b.grad.to_local())
            for each in (own, expected):
                each.optimizer.step()


def _in_place(mesh: Any, rank: int, world: int, recipe: str) -> None:
    """Shards that a graph reads stay where they are, with the bits of those that move."""
    models = [fully_shard(_model(recipe, True), mesh=mesh) for _ in range(2)]
    for model in models:
        f8.precompute_float8_dynamic_scale_for_fsdp(model)
    gathers = [models[0][i]._weight_gather for i in (0, 2)]
    parts = [part for g in gathers for part in (*g._shards.values(), *g._scales.values())]
    for gather in gathers:
        gather.in_graph = True
    for model in models:
        with torch.no_grad():
            model[0].weight.to_local().mul_(3)
            model[2].weight.to_local().add_(rank)
        f8.precompute_float8_dynamic_scale_for_fsdp(model)
    expected = [models[1][i]._weight_gather for i in (0, 2)]
    others = [part for g in expected for part in (*g._shards.values(), *g._scales.values())]
    assert same(parts, others)


def test_a_sync(tmp_path: Any) -> None:
    ranks.spawn(_sync, 2, tmp_path)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("main", (_casts, _in_place))
def test_ranks(main: Any, recipe: str, tmp_path: Any) -> None:
    ranks.spawn(main, 2, tmp_path, recipe)


def test_a_whole_step(tmp_path: Any) -> None:
    ranks.spawn(_whole_step, 2, tmp_path, "rowwise")


@pytest.mark.parametrize("world", ranks.gpus(1, 2))
def test_a_sync_on_gpus(world: int, tmp_path: Any) -> None:
    ranks.spawn(_sync, world, tmp_path, device="cuda")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("world", ranks.gpus(1, 2))
def test_casts_on_gpus(world: int, recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_casts, world, tmp_path, recipe, device="cuda")


@pytest.mark.parametrize("world", ranks.gpus(2))
def test_a_whole_step_on_gpus(world: int, tmp_path: Any) -> None:
    """PyTorch does not promise that FSDP2 can be captured, so plain linears go first."""
    plain = ranks.run(_whole_step, world, tmp_path, None, on="cuda", timeout=20, limit=40)
    for outcome in plain:
        if outcome.exit_code != 0:
            pytest.skip(f"torch {torch.__version__} does not capture FSDP2: {outcome.error}")
    for recipe in DYNAMIC:
        ranks.spawn(_whole_step, world, tmp_path, recipe, device="cuda")
