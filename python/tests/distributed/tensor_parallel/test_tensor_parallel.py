"""Tensor and sequence parallelism: a sharded run computes what one device computes.

Ranks are processes on the emulated device.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import ranks
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from parallel_models import Mlp, block, block_plan, mlp, mlp_plan, train
from reference import agree, sqnr
from torch import distributed, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import float8
import float8.torch as f8
import float8.torchao
from float8.torch.ranks import agreement

ROWS = float8.Cast(granularity=float8.Granularity.AXIS)
E5M2 = float8.Cast(format=float8.Format.E5M2)
HIGH = float8.Cast(float8.Scaling.HIGH_PRECISION)
GEMM = float8.recipes.Gemm
# Each has another GEMM in high precision.
CUSTOM = (
    float8.Recipe(GEMM(ROWS, float8.Cast(), fast=True), GEMM(HIGH, HIGH), GEMM(E5M2, ROWS)),
    float8.Recipe(GEMM(HIGH, HIGH), GEMM(E5M2, ROWS), GEMM(ROWS, E5M2)),
)
RECIPES = (*float8.recipes.NAMES, *CUSTOM)


class Step:
    """The results of a forward and backward, and the output of `up`."""

    def __init__(self, model: Any, x: torch.Tensor, dy: torch.Tensor) -> None:
        x = x.clone().requires_grad_()
        hook = model["mlp"].up.register_forward_hook(lambda *args: setattr(self, "up", args[2]))
        self.y = model["mlp"](x)
        hook.remove()
        self.y.backward(dy)
        assert x.grad is not None
        self.dx = x.grad
        self.grads = {name: _whole(p.grad) for name, p in model.named_parameters()}
        model.zero_grad()


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _expect_equal(own: Step, single: Step, rank: int, world: int, by_tokens: bool) -> None:
    """Compares what ranks have with one device: bits, but where partial sums are added."""
    columns = single.up.chunk(world, -1)[rank]
    assert agree(own.up, columns), sqnr(own.up, columns)
    sums = [(own.y, single.y), (own.dx, single.dx)]
    if by_tokens:
        sums = [(part, whole.chunk(world, 1)[rank]) for part, whole in sums]
    for name, grad in single.grads.items():
        if by_tokens and name == "mlp.down.bias":
            sums.append((own.grads[name], grad))
        else:
            assert agree(own.grads[name], grad), (name, sqnr(own.grads[name], grad))
    for summed, expected in sums:
        # Plans of a GPU have sums in other orders, as `agree` says.
        least = 36 if summed.is_cuda else 40 if own.y.dtype == torch.bfloat16 else 100
        assert sqnr(summed, expected) > least, sqnr(summed, expected)


def _compare(
    mesh: Any,
    rank: int,
    recipe: Any,
    by_tokens: bool,
    sizes: tuple[int, int, int],
    dtype: Any,
    plain: bool = False,
    **options: Any,
) -> None:
    """Runs two steps of ranks and of one device."""
    dim, hidden, tokens = sizes
    world = mesh.size()
    single = mlp(recipe, dim, hidden, dtype, **options)
    model = copy.deepcopy(single)
    parallelize_module(model, mesh, mlp_plan(by_tokens, plain))
    torch.manual_seed(1)
    for step in range(2):
        x, dy = (torch.randn(2, tokens, dim).to(ranks.device, dtype) for _ in range(2))
        shards = [each.chunk(world, 1)[rank] if by_tokens else each for each in (x, dy)]
        own, whole = Step(model, *shards), Step(single, x, dy)
        _expect_equal(own, whole, rank, world, by_tokens)
        for each in (model, single):
            f8.sync_float8_amax_and_scale_history(each)
        if step == 0:
            f8.precompute_float8_dynamic_scale_for_fsdp(model)
            state = model.state_dict().get("float8_scales.state")
            if state is not None and dtype == torch.float32 and not state.is_cuda:
                assert torch.equal(state, single.state_dict()["float8_scales.state"])
    with torch.no_grad():
        y, expected = model["mlp"](shards[0]), single["mlp"](x)
        expected = expected.chunk(world, 1)[rank] if by_tokens else expected
        assert sqnr(y, expected) > 36


def _every_recipe(mesh: Any, rank: int, world: int, recipe: str) -> None:
    blocks = recipe == "blockwise"  # ranks have whole ones
    sizes = (128 * world, 128 * world, 128 * world) if blocks else (64, 128, 16 * world)
    for by_tokens in (False, True):
        _compare(mesh, rank, recipe, by_tokens, sizes, torch.bfloat16)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_computes_what_one_device_computes(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_every_recipe, 2, tmp_path, recipe)


def _plain_styles(mesh: Any, rank: int, world: int, recipe: str) -> None:
    """PyTorch's own styles on the same layers."""
    blocks = recipe == "blockwise"
    sizes = (128 * world, 128 * world, 128 * world) if blocks else (64, 96, 16 * world)
    for by_tokens in (False, True):
        _compare(mesh, rank, recipe, by_tokens, sizes, torch.float32, plain=True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_plain_styles_compute_what_one_device_computes(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_plain_styles, 2, tmp_path, recipe)


def _four_ranks(mesh: Any, rank: int, world: int, recipe: str) -> None:
    blocks = recipe == "blockwise"
    sizes = (128 * world, 128 * world, 128 * world) if blocks else (64, 128, 16 * world)
    for by_tokens in (True,) if blocks else (False, True):
        plain = by_tokens and recipe in RECIPES[1::2]
        _compare(mesh, rank, recipe, by_tokens, sizes, torch.float32, plain=plain)


# Two ranks have the others.
@pytest.mark.parametrize("recipe", ("rowwise", "delayed", "blockwise", CUSTOM[0]))
def test_four_ranks_compute_what_one_device_computes(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_four_ranks, 4, tmp_path, recipe)


def _captured(mesh: Any, rank: int, world: int, recipe: str) -> None:
    """A step that is captured in a CUDA graph gives what it gave before."""
    model = mlp(recipe, 128 * world, 128 * world, torch.bfloat16)
    parallelize_module(model, mesh, mlp_plan(True))
    x = torch.randn(2, 128, 128 * world, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        steps = [Step(model, x, dy) for _ in range(2)]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model["mlp"](x)
        y.backward(dy)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, steps[1].y)
    for name, parameter in model.named_parameters():
        assert torch.equal(_whole(parameter.grad), steps[1].grads[name])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("world", ranks.gpus(1, 2))
def test_every_recipe_on_gpus(world: int, recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_every_recipe, world, tmp_path, recipe, device="cuda")


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"))
@pytest.mark.parametrize("world", ranks.gpus(1, 2))
def test_a_captured_step_on_gpus(world: int, recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_captured, world, tmp_path, recipe, device="cuda")


def _odd_sizes(mesh: Any, rank: int, world: int, recipe: str) -> None:
    """The rows of x are no multiple of 16, nor their runs; in_features are no multiple of 128."""
    sizes = (48 * world, 16 * world, 5 * world)
    for by_tokens in (False, True):
        _compare(mesh, rank, recipe, by_tokens, sizes, torch.float32)
        if recipe == "tensorwise":
            _compare(mesh, rank, recipe, by_tokens, sizes, torch.float32, recompute=True)
        if recipe == "rowwise":
            _compare(mesh, rank, recipe, by_tokens, sizes, torch.float32, plain=True)
    if recipe != "delayed":
        _expect_nan(mesh, rank, recipe, sizes)


def _expect_nan(mesh: Any, rank: int, recipe: str, sizes: tuple[int, int, int]) -> None:
    """A NaN that one rank has reaches what it reaches on one device."""
    dim, hidden, tokens = sizes
    single = mlp(recipe, dim, hidden, torch.float32)
    model = parallelize_module(copy.deepcopy(single), mesh, mlp_plan(True))
    x, dy = torch.randn(2, tokens, dim), torch.randn(2, tokens, dim)
    distributed.broadcast(x, 0)
    distributed.broadcast(dy, 0)
    x[1, -1, 7] = torch.nan
    own, whole = (
        Step(each, *parts)
        for each, parts in (
            (model, [each.chunk(mesh.size(), 1)[rank] for each in (x, dy)]),
            (single, [x, dy]),
        )
    )
    assert torch.equal(own.y.isnan(), whole.y.chunk(mesh.size(), 1)[rank].isnan())
    assert torch.equal(own.dx.isnan(), whole.dx.chunk(mesh.size(), 1)[rank].isnan())
    for name, grad in whole.grads.items():
        assert torch.equal(own.grads[name].isnan(), grad.isnan())


@pytest.mark.parametrize("recipe", [each for each in RECIPES if each != "blockwise"])
def test_odd_sizes_and_three_ranks(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_odd_sizes, 3, tmp_path, recipe)


def _batches(steps: int, count: int, tokens: int = 32) -> list[list[torch.Tensor]]:
    torch.manual_seed(2)
    return [
        [torch.randn(2, tokens, 64).to(ranks.device) for _ in range(count)] for _ in range(steps)
    ]


def _summed(losses: list[float]) -> list[float]:
    total = torch.tensor(losses, dtype=torch.float64, device=ranks.device)
    distributed.all_reduce(total)
    return total.tolist()  # type: ignore[no-any-return]


def _expect_losses(losses: list[float], expected: list[float]) -> None:
    """Partial sums in another order change a loss by less; other scales by more."""
    for own, single in zip(losses, expected, strict=True):
        assert own == pytest.approx(single, rel=2e-3 if ranks.device == "cuda" else 3e-6)


def _trains(mesh: Any, rank: int, world: int, recipe: str, by_tokens: bool) -> None:
    batches = _batches(20, 1)
    expected = train(block(recipe), batches)
    model = parallelize_module(block(recipe), mesh, block_plan(by_tokens))
    if by_tokens:
        losses = _summed(train(model, batches, lambda x: x.chunk(world, 1)[rank]))
    else:
        losses = train(model, batches)
    _expect_losses(losses, expected)


@pytest.mark.parametrize(
    ("recipe", "by_tokens"),
    (
        ("tensorwise", True),
        ("rowwise", True),
        ("rowwise_with_gw_hp", False),
        ("delayed", True),
    ),
)
def test_a_block_trains_as_on_one_device(recipe: str, by_tokens: bool, tmp_path: Any) -> None:
    ranks.spawn(_trains, 2, tmp_path, recipe, by_tokens)


@pytest.mark.parametrize(
    ("recipe", "by_tokens"),
    (
        ("tensorwise", True),
        ("rowwise", True),
        ("rowwise_with_gw_hp", False),
        ("delayed", True),
    ),
)
@pytest.mark.parametrize("world", ranks.gpus(1, 2))
def test_a_block_trains_on_gpus(world: int, recipe: str, by_tokens: bool, tmp_path: Any) -> None:
    ranks.spawn(_trains, world, tmp_path, recipe, by_tokens, device="cuda")


def _with_fsdp(_: Any, rank: int, world: int, recipe: str, by_tokens: bool) -> None:
    mesh = distributed.device_mesh.init_device_mesh(
        ranks.device, (2, 2), mesh_dim_names=("data", "tensor")
    )
    replica, own = mesh["data"].get_local_rank(), mesh["tensor"].get_local_rank()
    batches = _batches(3, 2)
    expected = train(block(recipe), batches)
    model = parallelize_module(block(recipe), mesh["tensor"], block_plan(by_tokens))
    fully_shard(model, mesh=mesh["data"])
    part = (lambda x: x.chunk(2, 1)[own]) if by_tokens else (lambda x: x)
    replicas = mesh["data"].get_group()
    losses = train(model, [[batch[replica]] for batch in batches], part, replicas)
    equal = 2 if by_tokens else 4  # ranks whose parts make one loss are 2 or 1
    _expect_losses([total / equal for total in _summed(losses)], expected)


@pytest.mark.parametrize(
    ("recipe", "by_tokens"), (("tensorwise", False), ("rowwise", True), ("delayed", True))
)
def test_with_fsdp_on_another_dimension_of_the_mesh(
    recipe: str, by_tokens: bool, tmp_path: Any
) -> None:
    ranks.spawn(_with_fsdp, 4, tmp_path, recipe, by_tokens)


def _collectives(call: Any) -> list[tuple[str, torch.dtype, int]]:
    with ranks.Collectives() as seen:
        call()
    return sorted(seen.calls, key=str)


def _wire(mesh: Any, rank: int, world: int) -> None:
    """One gather of x serves both linears that read it, and everything is 1 byte an element."""
    u8, f32, i32, bf16 = torch.uint8, torch.float32, torch.int32, torch.bfloat16
    tokens, dim, hidden = 32, 128, 256  # a rank's
    gather, reduce, scatter = "all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor"
    bytes_of_x, rows = tokens * dim, 2 * tokens  # rows: of the whole x
    grads = [
        (scatter, bf16, 2 * rows * dim),  # dx, once
        (gather, u8, bytes_of_x),  # qt of x, once
        (gather, u8, bytes_of_x),  # q of dy
    ]
    for recipe, forward, backward in (
        (
            "rowwise",
            # The scales of the rows of x; maxima of its columns and of those of a weight, then of the
            # other weight that reads x; maxima of the rows of down's x and of its weight.
            [
                (gather, f32, 4 * tokens),
                (reduce, i32, 4 * (dim + dim)),
                (reduce, i32, 4 * dim),
                (reduce, i32, 4 * (rows + dim)),
            ],
            # qt of dy, and its scales; maxima: of dy's columns, and of the rows of two other dy.
            [
                (gather, u8, bytes_of_x),
                (gather, f32, 4 * tokens),
                (reduce, i32, 4 * dim),
                (reduce, i32, 4 * rows),
                (reduce, i32, 4 * rows),
            ],
        ),
        ("tensorwise", [(reduce, i32, 4 * n) for n in (2, 1, 2)], [(reduce, i32, 4)] * 3),
    ):
        model = parallelize_module(mlp(recipe, dim, hidden, bf16), mesh, mlp_plan(True))
        x = torch.randn(2, tokens // 2, dim, dtype=bf16, requires_grad=True)
        y: list[torch.Tensor] = []
        calls = _collectives(lambda: y.append(model["mlp"](x)))  # noqa: B023
        shared = [(gather, u8, bytes_of_x), (scatter, bf16, 2 * rows * dim)]
        assert calls == sorted([*shared, *forward], key=str)
        bias = [(reduce, f32, 4 * dim)]
        calls = _collectives(lambda: y[0].backward(torch.randn_like(y[0])))  # noqa: B023
        assert calls == sorted([*grads, *bias, *backward], key=str)


def test_bytes_on_the_wire(tmp_path: Any) -> None:
    ranks.spawn(_wire, 2, tmp_path)


def _composed(mesh: Any, rank: int, world: int) -> None:
    """Compiled, checkpointed and autocast blocks give what eager ones give."""
    _expect_compiled(mesh)
    _expect_checkpointed(mesh)
    _expect_autocast(mesh, rank, world)
    _expect_state(mesh)
    _torchao_example(mesh, rank, world)


def _pair(recipe: Any, mesh: Any) -> Any:
    return tuple(
        parallelize_module(mlp(recipe, 64, 128, torch.bfloat16), mesh, mlp_plan(True))
        for _ in range(2)
    )


def _expect_equal_steps(eager: Any, other: Any, run: Any) -> None:
    for _ in range(2):
        x = torch.randn(2, 8, 64, dtype=torch.bfloat16)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        ys = eager["mlp"](inputs[0]), run(inputs[1])
        dy = torch.randn_like(ys[0])
        for y in ys:
            y.backward(dy)
        assert torch.equal(*ys)
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        for own, single in zip(other.parameters(), eager.parameters(), strict=True):
            assert torch.equal(own.grad.full_tensor(), single.grad.full_tensor())
        for model in (eager, other):
            f8.sync_float8_amax_and_scale_history(model)
            model.zero_grad()


def _expect_compiled(mesh: Any) -> None:
    """Also the compiled linears of one x share its gather."""
    graphs: list[Any] = []

    def note(graph: Any, _: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph)

    eager, model = _pair("rowwise", mesh)
    backend = aot_autograd(
        fw_compiler=note, bw_compiler=note, partition_fn=min_cut_rematerialization_partition
    )
    compiled = torch.compile(lambda x: model["mlp"](x), backend=backend, fullgraph=True)

    def run(x: torch.Tensor) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(agreement, "compare", None)  # a graph compares no ranks
            return compiled(x)

    _expect_equal_steps(eager, model, run)
    calls = [name for graph in graphs for name in graph]
    gathers = [name for name in calls if "all_gather" in name]
    assert len(gathers) == 6  # q, qt and scales of x and of dy
    assert len([name for name in calls if "reduce_scatter" in name]) == 2  # y and dx


def _expect_checkpointed(mesh: Any) -> None:
    eager, model = _pair("rowwise", mesh)
    _expect_equal_steps(eager, model, lambda x: checkpoint(model["mlp"], x, use_reentrant=False))


def _expect_autocast(mesh: Any, rank: int, world: int) -> None:
    """The weights are float32, and x becomes bfloat16."""
    single = mlp("rowwise", 64, 128, torch.float32)
    model = parallelize_module(copy.deepcopy(single), mesh, mlp_plan(True))
    f8.precompute_float8_dynamic_scale_for_fsdp(model)
    x, dy = torch.randn(2, 16, 64), torch.randn(2, 16, 64).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        shards = [each.chunk(world, 1)[rank] for each in (x, dy)]
        own, whole = Step(model, *shards), Step(single, x, dy)
    assert own.grads["mlp.up.weight"].dtype == torch.float32
    _expect_equal(own, whole, rank, world, True)


def _expect_state(mesh: Any) -> None:
    """The state dict is that of nn.Linear, in both directions."""
    model, other = _pair("rowwise", mesh)
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=options)
    plain = nn.ModuleDict({"mlp": Mlp(64, 128)}).bfloat16()
    plain.load_state_dict(state)
    with torch.no_grad():
        plain["mlp"].up.weight.mul_(2)
    set_model_state_dict(other, plain.state_dict(), options=options)
    assert torch.equal(other["mlp"].up.weight.full_tensor(), plain["mlp"].up.weight)
    assert not torch.equal(other["mlp"].up.weight.full_tensor(), state["mlp.up.weight"])


def _torchao_example(mesh: Any, rank: int, world: int) -> None:
    """A program that uses torchao's names, with the one line that changes its imports."""
    float8.torchao.install()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_tensor_parallel import (
        Float8ColwiseParallel,
        Float8RowwiseParallel,
        PrepareFloat8ModuleInput,
    )

    config = Float8LinearConfig(emulate=True)
    whole = convert_to_float8_training(nn.ModuleDict({"ffn": Mlp(32, 64)}), config=config)
    inputs = torch.rand(2, 16 * world, 32)
    distributed.broadcast(inputs, 0)
    expected = whole["ffn"](inputs)
    expected.sum().backward()
    plan = {
        "ffn.gate": Float8ColwiseParallel(),
        "ffn.up": Float8ColwiseParallel(),
        "ffn.down": Float8RowwiseParallel(),
    }
    tensor = parallelize_module(copy.deepcopy(whole), mesh, plan)
    tensor_y = tensor["ffn"](inputs)
    torch.testing.assert_close(tensor_y, expected)
    for name in (None, "up"):
        plan["ffn"] = PrepareFloat8ModuleInput(
            input_layouts=Shard(1),
            desired_input_layouts=Replicate(),
            fwd_config_submodule_fqn=name,
        )
        plan["ffn.down"] = Float8RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        sequence = parallelize_module(copy.deepcopy(whole), mesh, plan)
        sequence.zero_grad()
        y = sequence["ffn"](distribute_tensor(inputs, mesh, [Shard(1)]))
        y.sum().backward()
        torch.testing.assert_close(y.full_tensor(), expected)
        for own, single in zip(sequence.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(own.grad.full_tensor(), single.grad)


def test_what_it_is_composed_with(tmp_path: Any) -> None:
    ranks.spawn(_composed, 2, tmp_path)
