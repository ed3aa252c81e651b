"""FSDP's fp8 gathers against its gathers in high precision, where the weight's type is not x's.

Under autocast, and under FSDP's policy, a linear rounds its weight to x's type. Both kinds of gathers
have the same bits, of results and of the scale states, whatever rounds the weights.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import ranks
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import float8
import float8.torch as f8

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise")


class Model(nn.Sequential):
    """Three linears; `inside` is the type of an autocast that the model enters itself."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 96, bias=False), nn.GELU())
        self.append(nn.Linear(96, 48))
        self.inside: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with _autocast(self.inside):
            y: torch.Tensor = super().forward(x)
        return y


def _autocast(dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(ranks.device, dtype)


def _model(mesh: Any, recipe: str, gather: bool, weights: torch.dtype, policy: Any) -> Any:
    model = Model().to(ranks.device, weights)
    emulate = ranks.device == "cpu"
    config = f8.LinearConfig(recipe, emulate=emulate, enable_fsdp_float8_all_gather=gather)
    f8.convert_to_float8_training(model, config=config)
    if mesh is not None:
        options = {} if policy is None else {"mp_policy": policy}
        for index in (0, 2, 4):
            fully_shard(model[index], mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
    return model


def _batch(step: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2 * step + rank)
    return torch.randn(16, 64, generator=generator).to(ranks.device, dtype)


class Run:
    """Trains a model step by step, and keeps what is to have the same bits."""

    def __init__(self, model: Any, of_ranks: tuple[int, ...], x: torch.dtype, within: Any) -> None:
        self.model, self._ranks, self._x, self._within = model, of_ranks, x, within
        # Some parameters are DTensors of one mesh and some of another.
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, foreach=False)
        self._step = 0
        self.kept: list[torch.Tensor] = []

    def step(self) -> None:
        for rank in self._ranks:
            with _autocast(self._within):
                y = self.model(_batch(self._step, rank, self._x))
            loss = y.float().square().mean()
            (loss / len(self._ranks)).backward()
            self.kept.append(loss.detach())
        f8.sync_float8_amax_and_scale_history(self.model)
        self._keep_scales()
        self._optimizer.step()
        self._optimizer.zero_grad()
        f8.precompute_float8_dynamic_scale_for_fsdp(self.model)
        self._step += 1

    def evaluate(self, within: torch.dtype | None, factor: float = 1) -> None:
        """Runs a forward without gradients, with other weights, such as averages of them."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(factor)
            with _autocast(within):
                self.kept.append(self.model(_batch(99, 0, self._x)))
            for parameter in self.model.parameters():
                parameter.div_(factor)

    def _keep_scales(self) -> None:
        scales = getattr(self.model, "float8_scales", None)
        self.kept += [] if scales is None else [scales.state.clone()]

    def weights(self) -> list[torch.Tensor]:
        return [
            (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
            for p in self.model.parameters()
        ]


def _assert_equal(own: list[torch.Tensor], expected: list[torch.Tensor], what: Any) -> None:
    for index, (a, b) in enumerate(zip(own, expected, strict=True)):
        assert bool(a.float().isfinite().all()), f"{what}: the tensor {index} is not finite"
        assert torch.equal(a, b), f"{what}: the tensor {index} differs"


def _trains(mesh: Any, rank: int, world: int, recipe: str) -> None:
    runs = [
        Run(_model(mesh, recipe, gather, F32, None), (rank,), F32, BF16) for gather in (True, False)
    ]
    single = Run(_model(None, recipe, False, F32, None), tuple(range(world)), F32, BF16)
    for weight in runs[0].weights():
        assert not torch.equal(weight, weight.to(BF16).to(F32))
    if recipe == "delayed":  # the amaxes of one process are those of all ranks already
        single.model.float8_scales._reduce = lambda group: None
    for _ in range(5):
        for run in (*runs, single):
            run.step()
    _assert_equal(runs[0].kept, runs[1].kept, recipe)
    own = [each for each in single.kept if each.dim() == 0][rank::world]
    _assert_equal([each for each in runs[0].kept if each.dim() == 0], own, recipe)
    _assert_equal(runs[0].weights(), single.weights(), recipe)
    report = f8.verify_distributed(runs[0].model)
    assert report.ok, report


@pytest.mark.parametrize("recipe", RECIPES)
def test_autocast_trains_as_with_gathers_in_high_precision_and_as_one_device(
    recipe: str, tmp_path: Any
) -> None:
    assert {*RECIPES, "bf16"} == set(float8.recipes.NAMES)
    ranks.spawn(_trains, 2, tmp_path, recipe)


# The weights' type, FSDP's param_dtype, x's, autocast's around the model, and that inside it.
TYPES = (
    (F32, None, F32, F16, None),
    (F32, None, F32, None, BF16),  # before FSDP's first gather nobody knows of it
    (F32, BF16, F32, F16, None),  # the weight is rounded twice
    (F32, BF16, F32, None, None),  # x stays in float32
    (BF16, None, BF16, F16, None),
    (F16, None, F16, BF16, None),
    (BF16, None, F32, None, None),
    (BF16, F32, F32, F16, None),
    (F16, BF16, F32, F32, None),
)


def _types(mesh: Any, rank: int, world: int) -> None:
    for weights, gathered, x, within, inside in TYPES:
        policy = None
        if gathered is not None:
            policy = MixedPrecisionPolicy(
                param_dtype=gathered, reduce_dtype=F32, cast_forward_inputs=False
            )
        for recipe in ("delayed", "rowwise"):
            what = (weights, gathered, x, within, inside, recipe)
            found = []
            for gather in (True, False):
                run = Run(_model(mesh, recipe, gather, weights, policy), (rank,), x, within)
                run.model.inside = inside
                f8.precompute_float8_dynamic_scale_for_fsdp(run.model)
                for _ in range(4):
                    run.step()
                if gather:
                    report = f8.verify_distributed(run.model)
                    assert report.ok, (what, report)
                found.append(run.kept + run.weights())
            _assert_equal(*found, what)


def test_every_pair_of_types_rounds_as_in_high_precision(tmp_path: Any) -> None:
    ranks.spawn(_types, 2, tmp_path)


def _with_tensor_parallelism(_: Any, rank: int, world: int, recipe: str) -> None:
    mesh = init_device_mesh(ranks.device, (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": f8.Float8ColwiseParallel(), "2": f8.Float8RowwiseParallel()}
    found = []
    for gather in (True, False):
        model = _model(None, recipe, gather, F32, None)
        parallelize_module(model, mesh["tensor"], plan)
        fully_shard(model, mesh=mesh["data"])
        run = Run(model, (rank // 2,), F32, BF16)
        f8.precompute_float8_dynamic_scale_for_fsdp(model)
        for _ in range(4):
            run.step()
        found.append(run.kept + run.weights())
    _assert_equal(*found, recipe)


@pytest.mark.parametrize("recipe", ("delayed", "rowwise"))
def test_autocast_with_tensor_parallelism(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_with_tensor_parallelism, 4, tmp_path, recipe)


def _evaluates(mesh: Any, rank: int, world: int) -> None:
    found = []
    for gather in (True, False):
        run = Run(_model(mesh, "delayed", gather, F32, None), (rank,), F32, BF16)
        run.evaluate(None, 3)  # before the first step too
        for _ in range(3):
            run.step()
            run.evaluate(BF16)
            run.evaluate(None)  # in another type than training
            run.evaluate(BF16, 3)  # with other weights
        f8.precompute_float8_dynamic_scale_for_fsdp(run.model)
        f8.sync_float8_amax_and_scale_history(run.model)  # no forward was between
        run._keep_scales()
        found.append(run.kept + run.weights())
    _assert_equal(*found, "evaluations")


def test_evaluations_leave_no_amax(tmp_path: Any) -> None:
    ranks.spawn(_evaluates, 2, tmp_path)


def _two_types(mesh: Any, rank: int, world: int) -> None:
    found = []
    for gather in (True, False):
        run = Run(_model(mesh, "delayed", gather, F32, None), (rank,), F32, None)
        for step in range(4):
            # The micro-batches of a step have types of their own, and both are recorded.
            for within in (BF16, None, BF16)[: 2 + step % 2]:
                with _autocast(within):
                    y = run.model(_batch(7, rank, F32))
                y.float().square().mean().backward()
                run.kept.append(y.detach())
            run.step()
        found.append(run.kept + run.weights())
    _assert_equal(*found, "micro-batches of two types")


def test_micro_batches_of_two_types(tmp_path: Any) -> None:
    ranks.spawn(_two_types, 2, tmp_path)
