"""Fused MLPs under FSDP2: block by block, and the MLP as a unit of its own."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import ranks
import torch
from activations import activated, glu
from parallel_models import expect_trains_as
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

import float8.torch as f8


class FeedForward(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return y


class Ungated(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.fc2(functional.gelu(self.fc1(x)))
        return y


class Merged(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.w12 = nn.Linear(width, 4 * width, bias=False)
        self.w3 = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.w12(x).chunk(2, dim=-1)
        y: torch.Tensor = self.w3(functional.silu(gate) * up)
        return y


f8.register_mlp(FeedForward, gate="w1", up="w3", down="w2", activation="silu")
f8.register_mlp(Ungated, up="fc1", down="fc2", activation="gelu")


def _model(
    recipe: str = "blockwise", kind: type[nn.Module] = FeedForward, gather: bool = False
) -> nn.Sequential:
    blocks = [nn.Sequential(nn.LayerNorm(64), kind()) for _ in range(2)]
    config = f8.LinearConfig(recipe, emulate=True, enable_fsdp_float8_all_gather=gather)
    return f8.convert_to_float8_training(nn.Sequential(*blocks), config=config)  # type: ignore[return-value]


def _rank(
    mesh: Any,
    rank: int,
    world: int,
    unit: str,
    recipe: str,
    kind: type[nn.Module] = FeedForward,
    gather: bool = False,
    reshard: bool = True,
    compiled: bool = False,
) -> None:
    torch.manual_seed(0)
    model = _model(recipe, kind, gather)
    single = copy.deepcopy(model)
    f8.fuse(single)
    if unit == "mlp":
        f8.fuse(model)
    for block in model:
        own: Any = block[1] if unit == "mlp" else block  # type: ignore[index]
        fully_shard(own, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    assert [each.fused for each in f8.fuse(model)] == [True, True]
    warnings.filterwarnings("error", message=".*no longer fused.*")
    if compiled:
        for block in model:
            block.compile(backend="aot_eager", fullgraph=ranks.whole_graphs)
    before = [p.detach().clone() for p in single.parameters()]
    expect_trains_as(model, single, rank)
    assert not any(map(torch.equal, before, single.parameters()))
    for layer in model.modules():
        if isinstance(layer, f8.Float8Linear):
            assert (layer._weight_gather is not None) == gather


@pytest.mark.parametrize(
    ("unit", "recipe"),
    [("block", "blockwise"), ("mlp", "blockwise"), ("block", "tensorwise"), ("mlp", "rowwise")],
)
def test_fsdp2_shards_a_fused_model(unit: str, recipe: str, tmp_path: Any) -> None:
    """Blocks that are units are sharded before it is fused, and MLPs that are after it."""
    ranks.spawn(_rank, 2, tmp_path, unit, recipe)


@pytest.mark.parametrize(
    ("unit", "recipe", "reshard", "compiled"),
    [
        ("block", "tensorwise", True, False),
        ("block", "tensorwise", True, True),
        ("block", "rowwise", False, False),
        ("block", "delayed", True, False),
        ("mlp", "blockwise", True, False),
    ],
)
def test_fsdp2_gathers_a_fused_model_in_fp8(
    unit: str, recipe: str, reshard: bool, compiled: bool, tmp_path: Any
) -> None:
    ranks.spawn(_rank, 2, tmp_path, unit, recipe, FeedForward, True, reshard, compiled)


def test_fsdp2_gathers_an_mlp_with_biases_in_fp8(tmp_path: Any) -> None:
    ranks.spawn(_rank, 2, tmp_path, "block", "rowwise", Ungated, True)


@pytest.mark.parametrize(("recipe", "gather"), [("delayed", True), ("rowwise", False)])
def test_fsdp2_shards_an_mlp_with_one_gate_and_up(recipe: str, gather: bool, tmp_path: Any) -> None:
    ranks.spawn(_rank, 2, tmp_path, "block", recipe, Merged, gather)


def test_fsdp2_shards_an_mlp_with_biases(tmp_path: Any) -> None:
    ranks.spawn(_rank, 2, tmp_path, "block", "rowwise", Ungated)


def _left_rank(mesh: Any, rank: int, world: int) -> None:
    """Units of children, and MLPs that are units already, are left and named."""
    model = _model()
    fully_shard(model[0][1].w1, mesh=mesh)  # type: ignore[index,union-attr]
    fully_shard(model[1][1], mesh=mesh)  # type: ignore[index]
    fully_shard(model, mesh=mesh)
    first, second = f8.fuse(model)
    assert not first.fused and "its w1 has hooks" in first.why
    assert not second.fused and "call fuse before" in second.why
    model(torch.randn(32, 64)).sum().backward()


@pytest.mark.filterwarnings("ignore:float8. fuse left")
def test_units_of_fsdp_are_left(tmp_path: Any) -> None:
    ranks.spawn(_left_rank, 2, tmp_path)


class OneByOne(FeedForward):
    """The linears one by one, with an activation that is rounded once, as that of a fused MLP."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.w2(glu(self.w1(x), self.w3(x)))
        return y


class UngatedOneByOne(Ungated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.fc2(activated(self.fc1(x), "gelu"))
        return y


class Block(nn.Module):
    def __init__(self, kind: type[nn.Module], width: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(width), kind(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.mlp(self.norm(x))
        return y


def _plan(kind: type[nn.Module], way: str) -> dict[str, Any]:
    """Returns the plan of a block: float8's styles or PyTorch's, by tokens or not, or without one for the MLP."""
    plain = way.startswith("plain")
    column = ColwiseParallel if plain else f8.Float8ColwiseParallel
    row = RowwiseParallel if plain else f8.Float8RowwiseParallel
    prepare = PrepareModuleInput if plain else f8.PrepareFloat8ModuleInput
    at: Any = Shard(1) if "tokens" in way else Replicate()
    first = ("w1", "w3") if issubclass(kind, FeedForward) else ("fc1",)
    down = "w2" if issubclass(kind, FeedForward) else "fc2"
    own: Any = at if "alone" in way else None
    plan: dict[str, Any] = {f"mlp.{name}": column(input_layouts=own) for name in first}
    plan[f"mlp.{down}"] = row(output_layouts=at)
    if "alone" not in way:
        plan["mlp"] = prepare(input_layouts=at, desired_input_layouts=Replicate())
    if "tokens" in way:
        plan["norm"] = SequenceParallel()
    return plan


def _tensor_model(
    kind: type[nn.Module], recipe: str, width: int, way: str, options: dict[str, Any]
) -> nn.Sequential:
    torch.manual_seed(0)
    config = f8.LinearConfig(recipe, emulate=ranks.device == "cpu", **options)
    count = 1 if "compile" in way else 2  # graphs take most of the time
    model = nn.Sequential(*(Block(kind, width) for _ in range(count)))
    model.to(ranks.device, torch.float32 if "autocast" in way else torch.bfloat16)
    return f8.convert_to_float8_training(model, config=config)  # type: ignore[return-value]


def _tensor_rank(
    mesh: Any, rank: int, world: int, recipe: str, way: str, gated: bool = True, **options: Any
) -> None:
    """Steps of fused MLPs and of their linears one by one have the same bits.

    way: words that say how the model is parallelized, and what is done with it then.
    """
    warnings.filterwarnings("error", message=".*no longer fused.*")
    kinds = (FeedForward, OneByOne) if gated else (Ungated, UngatedOneByOne)
    width = 256 if recipe == "blockwise" else 64
    names = mesh.mesh_dim_names or ()
    tensor = mesh["tensor"] if "tensor" in names else mesh
    results = []
    for kind in kinds:
        model = _tensor_model(kind, recipe, width, way, options)
        blocks = [each for each in model if isinstance(each, Block)]
        if "before" in way and kind is kinds[0]:
            f8.fuse(model)
        for block in blocks:
            parallelize_module(block, tensor, _plan(kind, way))
        if "after" not in way and kind is kinds[0]:
            f8.fuse(model)
        if "checkpoint" in way:
            for block in blocks:
                checkpoint_wrapper.apply_activation_checkpointing(
                    block, check_fn=lambda each: isinstance(each, kinds)
                )
        if "shard" in names:
            for block in blocks:
                fully_shard(block, mesh=mesh["shard"])
            fully_shard(model, mesh=mesh["shard"])
        if kind is kinds[0]:
            done = f8.fuse(model)
            assert all(each.fused for each in done) and len(done) == len(blocks), done
        if "compile" in way and kind is kinds[0]:  # the linears one by one stay in eager mode
            torch._dynamo.reset()
            for block in blocks:
                graph = "shard" not in names
                block.compile(backend="aot_eager", fullgraph=graph, dynamic=False)
        results.append(_train(model, tensor, way, width))
    for own, expected in zip(*results, strict=True):
        assert torch.equal(own, expected)


def _every_way(mesh: Any, rank: int, world: int, recipe: str) -> None:
    ways = ["float8 tokens"]
    if recipe != "blockwise":  # its matrices are large
        _tensor_rank(mesh, rank, world, recipe, "float8 tokens", async_tensor_parallel=True)
        ways += ["float8 autocast", "float8 tokens alone", "plain tokens", "plain alone"]
    for way in ways:
        _tensor_rank(mesh, rank, world, recipe, way)
    for way in ("float8 tokens", "plain"):
        _tensor_rank(mesh, rank, world, recipe, way, gated=False)


def _train(model: Any, mesh: Any, way: str, width: int) -> list[torch.Tensor]:
    """Returns y and dx of steps, and the weights behind them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)
    before = [_whole(p) for p in model.parameters()]
    autocast = torch.autocast(ranks.device, torch.bfloat16, enabled="autocast" in way)
    found = []
    torch.manual_seed(1)
    for _ in range(2):
        tokens = 128 * mesh.size() if width > 64 else 32
        x = torch.randn(2, tokens, width).to(ranks.device, before[0].dtype)
        if "tokens" in way:
            x = x.chunk(mesh.size(), 1)[mesh.get_local_rank()]
        x = x.requires_grad_()
        with autocast:
            y = model(x)
        y.float().square().mean().backward()
        f8.sync_float8_amax_and_scale_history(model)
        optimizer.step()
        optimizer.zero_grad()
        assert x.grad is not None
        found += [y.detach(), x.grad]
    if "compile" not in way:
        with torch.no_grad(), autocast:
            found.append(model(x))
    after = [_whole(p) for p in model.parameters()]
    assert not any(map(torch.equal, before, after))
    return [*found, *after]


def _whole(parameter: Any) -> torch.Tensor:
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach().clone()  # type: ignore[no-any-return]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed", "blockwise"])
def test_tensor_parallel_mlps_are_fused(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_every_way, 2, tmp_path, recipe)


def _composed(mesh: Any, rank: int, world: int, recipe: str, ways: tuple[str, ...]) -> None:
    for way in ways:
        _tensor_rank(mesh, rank, world, recipe, way)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
def test_tensor_parallel_mlps_are_fused_before_compiled_and_checkpointed(
    recipe: str, tmp_path: Any
) -> None:
    ways = ("float8 before tokens compile", "float8 tokens checkpoint")
    ranks.spawn(_composed, 2, tmp_path, recipe, ways)


def _sharded(mesh: Any, rank: int, world: int, recipe: str, ways: tuple[str, ...]) -> None:
    names = ("shard", "tensor")
    mesh = init_device_mesh(ranks.device, (2, 2), mesh_dim_names=names)
    for way in ways:
        gathers = {"enable_fsdp_float8_all_gather": "gather" in way}
        _tensor_rank(mesh, rank, world, recipe, way, **gathers)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
def test_fsdp2_shards_tensor_parallel_mlps_that_are_fused(recipe: str, tmp_path: Any) -> None:
    ways = ("float8 tokens after", "float8 tokens gather", "float8 gather checkpoint")
    ranks.spawn(_sharded, 4, tmp_path, recipe, ways)


def _left_of_tensor_parallelism(mesh: Any, rank: int, world: int) -> None:
    def why(style: str, name: str, change: Any = lambda block: None, **layouts: Any) -> str:
        model = _tensor_model(FeedForward, "tensorwise", 64, "compile", {})
        block: Any = model[0]
        change(block)
        plan = {**_plan(FeedForward, "float8"), f"mlp.{name}": getattr(f8, style)(**layouts)}
        parallelize_module(block, mesh, plan)
        forward, classes = type(block.mlp).forward, [type(each) for each in model.modules()]
        (done,) = f8.fuse(model)
        assert not done.fused and type(block.mlp).forward is forward
        assert classes == [type(each) for each in model.modules()]
        return done.why

    column, row = "Float8ColwiseParallel", "Float8RowwiseParallel"
    assert "its w1 gives (Replicate(),)" in why(column, "w1", output_layouts=Replicate())
    assert "its w2 takes (Replicate(),)" in why(row, "w2", input_layouts=Replicate())
    assert "has not the hooks of one RowwiseParallel alone" in why(column, "w2")

    def hook(block: Any) -> None:
        block.mlp.w3.register_forward_hook(lambda *args: None)

    assert "its w3, whose weight ranks share, has not the hooks" in why(column, "w3", hook)

    # A hook that comes later is called, and the linears compute one by one.
    model: Any = _tensor_model(FeedForward, "tensorwise", 64, "compile", {})
    parallelize_module(model[0], mesh, _plan(FeedForward, "float8"))
    f8.fuse(model)
    seen: list[Any] = []
    model[0].mlp.w1.register_forward_hook(lambda *args: seen.append(args[2]))
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="no longer fused: its w1"):
        model(x)
    assert len(seen) == 1


@pytest.mark.filterwarnings("ignore:float8. fuse left")
def test_other_styles_are_left(tmp_path: Any) -> None:
    ranks.spawn(_left_of_tensor_parallelism, 2, tmp_path)
