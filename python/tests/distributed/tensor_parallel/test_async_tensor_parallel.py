"""Async tensor parallelism: GEMMs by chunks compute what GEMMs after whole collectives compute.

Ranks are processes on the emulated device, which exchange chunks as messages, or GPUs.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import ranks
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from parallel_models import mlp, mlp_plan
from reference import agree, sqnr
from torch import distributed
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import float8
import float8.torch as f8
from float8.torch.parallel import async_tensor_parallel, chunk_exchange
from float8.torch.parallel import sharded_operands as operands
from float8.torch.parallel.sharded_operands import Gemm, Sharing, rules_of


class Calls(TorchDispatchMode):
    """Lists the collectives and the GEMMs by chunks that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._opname
        if name in ("gather_gemm", "gemm_scatter", "gemm_beside") or (
            func.namespace == "_c10d_functional" and name not in ("wait_tensor", "all_reduce")
        ):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def _models(recipe: Any, mesh: Any, sizes: tuple[int, int], dtype: Any, **options: Any) -> Any:
    """Returns a model without overlap, and one with it."""
    model = mlp(recipe, *sizes, dtype, async_tensor_parallel=False, **options)
    overlapped = copy.deepcopy(model)
    for layer in overlapped.modules():
        if isinstance(layer, f8.Float8Linear):
            layer.async_tensor_parallel = True
    return tuple(parallelize_module(each, mesh, mlp_plan(True)) for each in (model, overlapped))


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _step(model: Any, x: torch.Tensor, dy: torch.Tensor, call: Any = None) -> dict[str, Any]:
    """Returns the results of a forward and backward: sums over ranks, and what is a rank's own."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    own = {}
    if call is None:
        hook = model["mlp"].up.register_forward_hook(lambda *args: own.update(up=args[2].detach()))
        y = model["mlp"](x)
        hook.remove()
    else:  # a hook is one more compilation
        y = call(x)
    y.backward(dy)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            own[name] = parameter.grad.full_tensor()
    f8.sync_float8_amax_and_scale_history(model)
    return {"own": own, "y": y.detach(), "dx": x.grad}


def _expect_equal(plain: Any, overlapped: Any, world: int) -> None:
    for name, expected in plain["own"].items():
        assert agree(overlapped["own"][name], expected), name
    for name in ("y", "dx"):
        own, expected = overlapped[name], plain[name]
        # Sums of two ranks are in the same order; dx of two linears in bf16 has one rounding less.
        if world == 2 and not own.is_cuda and (name == "y" or own.dtype == torch.float32):
            assert torch.equal(own, expected)
        least = 36 if own.is_cuda else 40 if own.dtype == torch.bfloat16 else 100
        assert sqnr(own, expected) > least, (name, sqnr(own, expected))


def _every_recipe(mesh: Any, rank: int, world: int, recipe: str) -> None:
    on_gpu = ranks.device == "cuda"
    blocks = recipe == "blockwise"
    run = 512 if on_gpu else 128 if blocks else 16
    sizes = (128 * world, 128 * world) if blocks or on_gpu else (64, 48 * world)
    for dtype in (torch.bfloat16,) if on_gpu else (torch.bfloat16, torch.float32):
        plain, overlapped = _models(recipe, mesh, sizes, dtype)
        torch.manual_seed(1 + rank)
        for batch in (1, 2):
            shape = (batch, run, sizes[0])
            x, dy = (torch.randn(shape).to(ranks.device, dtype) for _ in range(2))
            expected, own = _step(plain, x, dy), _step(overlapped, x, dy)
            _expect_equal(expected, own, world)
        with torch.no_grad():
            assert sqnr(overlapped["mlp"](x), plain["mlp"](x)) > 36


# Each recipe is with 2 ranks, whose bits are equal, and each number of ranks with scales of blocks.
@pytest.mark.parametrize(
    ("world", "recipe"),
    [
        *((2, recipe) for recipe in float8.recipes.NAMES),
        *((3, recipe) for recipe in ("blockwise", "delayed", "rowwise_with_gw_hp")),
        *((4, recipe) for recipe in ("blockwise", "rowwise")),
    ],
)
def test_chunks_compute_what_whole_collectives_compute(
    world: int, recipe: str, tmp_path: Any
) -> None:
    ranks.spawn(_every_recipe, world, tmp_path, recipe)


@pytest.mark.parametrize("recipe", float8.recipes.NAMES)
@ranks.needs_gpus(2)
def test_chunks_on_gpus(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_every_recipe, 2, tmp_path, recipe, device="cuda")


class _Stream:
    """A stream of a device that does everything at once."""

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> None: ...


class _Files:
    """Memory that all ranks map, as symmetric memory is; it has what an exchange calls."""

    def __init__(self, folder: str, size: int, rank: int, ranks: int) -> None:
        self.size, self.barriers = size, 0
        distributed.barrier()
        self.parts = [
            torch.from_file(f"{folder}/{size}.{i}", shared=True, size=size, dtype=torch.uint8)
            for i in range(ranks)
        ]
        self.parts[rank].fill_(255)

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, offset: int) -> torch.Tensor:
        count = torch.Size(sizes).numel()
        return self.parts[rank].view(dtype)[offset : offset + count].view(sizes)

    def barrier(self, channel: int) -> None:
        self.barriers += 1
        distributed.barrier()


class _MappedMemory(chunk_exchange.PeerMemory):
    """Peer memory that lies in files."""

    def __init__(self, process_group: Any, folder: str) -> None:
        self.process_group = process_group
        self.copies = _Stream()
        self.folder = folder
        self.files: list[_Files] = []

    def reserve(self, size: int) -> Any:
        if not self.files or self.files[-1].size < size:
            size = -(-size // 4096) * 4096
            group = self.process_group
            self.files.append(_Files(self.folder, size, group.rank(), group.size()))
        return self.files[-1]


def _mapped(mesh: Any, rank: int, world: int, recipe: str, folder: str) -> None:
    torch.cuda.current_stream = lambda *_: _Stream()  # type: ignore[assignment,return-value]
    torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment,return-value]
    memory = _MappedMemory(mesh.get_group(), folder)
    chunk_exchange._exchanges[mesh.get_group().group_name] = memory
    _every_recipe(mesh, rank, world, recipe)
    assert memory.files[-1].barriers > 0


@pytest.mark.parametrize(
    ("world", "recipe"),
    [
        (2, "tensorwise"),
        (2, "rowwise_with_gw_hp"),
        (2, "blockwise"),
        (3, "rowwise"),
        (3, "delayed"),
        (3, "blockwise"),
    ],
)
def test_copies_to_and_from_memory_of_other_ranks(world: int, recipe: str, tmp_path: Any) -> None:
    """The copies that GPUs make, with the same places and the same barriers."""
    (tmp_path / "memory").mkdir()
    ranks.spawn(_mapped, world, tmp_path, recipe, str(tmp_path / "memory"))


def _what_is_called(mesh: Any, rank: int, world: int, recipe: str) -> None:
    """A step has no collective of x, y, dx or dy; grad_weight's x is gathered once for two linears."""
    size = 128 * world
    _, model = _models(recipe, mesh, (size, size), torch.bfloat16)
    f8.precompute_float8_dynamic_scale_for_fsdp(model)
    x = torch.randn(1, 128, size, dtype=torch.bfloat16, requires_grad=True)
    with Calls() as forward:
        y = model["mlp"](x)
    assert forward.names == ["gather_gemm", "gemm_scatter"]
    with Calls() as backward:
        y.backward(torch.randn_like(y))
    assert backward.names == ["gather_gemm", "gemm_beside", "gemm_scatter"]


@pytest.mark.parametrize("recipe", ("rowwise", "rowwise_with_gw_hp", "blockwise"))
def test_what_is_called(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_what_is_called, 2, tmp_path, recipe)


def _falls_back(mesh: Any, rank: int, world: int) -> None:
    """Runs of rows whose scales no kernel can read are not chunks; 1 rank has none."""
    plain, overlapped = _models("rowwise", mesh, (64, 96), torch.float32)
    x, dy = torch.randn(2, 5, 64), torch.randn(2, 5, 64)
    expected = _step(plain, x, dy)
    with Calls() as calls:
        own = _step(overlapped, x, dy)
    assert not any("gemm" in name for name in calls.names)
    for name in ("y", "dx"):
        assert torch.equal(own[name], expected[name])
    with pytest.raises(ValueError, match=r"2 ranks, .* shared by 3"):
        chunk_exchange.exchange_of(mesh.get_group().group_name, 3, torch.device("cpu"))


def test_what_falls_back(tmp_path: Any) -> None:
    ranks.spawn(_falls_back, 2, tmp_path)


def _partial_use(mesh: Any, rank: int, world: int) -> None:
    """Some of the linears of one x have no gradient; x has none; all that is kept is x."""
    plain, overlapped = _models("rowwise", mesh, (64, 96), torch.float32)
    torch.manual_seed(1 + rank)
    x = torch.randn(1, 32, 64)
    for used in (("gate",), ("up",), ("gate", "up")):
        grads = []
        for model in (plain, overlapped):
            model.zero_grad()
            leaf = x.clone().requires_grad_()
            outputs = {}
            for name in ("gate", "up"):
                getattr(model["mlp"], name).register_forward_hook(
                    lambda *args, name=name, outputs=outputs: outputs.update({name: args[2]})
                )
            model["mlp"](leaf)
            sum(outputs[name].square().sum() for name in used).backward()
            grads.append([leaf.grad, *(p.grad for p in model.parameters())])
        for own, expected in zip(*reversed(grads), strict=True):
            if own is not None:  # PyTorch 2.11 makes zeros where a DTensor has no gradient
                own = _whole(own)
                expected = torch.zeros_like(own) if expected is None else expected
                assert agree(own, _whole(expected))
            else:
                assert expected is None
    plain, overlapped = _models("rowwise_with_gw_hp", mesh, (64, 96), torch.float32, recompute=True)
    for model in (plain, overlapped):
        model["mlp"](x).square().sum().backward()
    for own, expected in zip(overlapped.parameters(), plain.parameters(), strict=True):
        assert agree(own.grad.full_tensor(), expected.grad.full_tensor())


def test_partial_use(tmp_path: Any) -> None:
    ranks.spawn(_partial_use, 2, tmp_path)


def _composed(_: Any, rank: int, world: int, recipe: str) -> None:
    """Groups that are a part of all ranks; activation checkpointing."""
    mesh = distributed.device_mesh.init_device_mesh(
        ranks.device, (2, 2), mesh_dim_names=("data", "tensor")
    )["tensor"]
    plain, overlapped = _models(recipe, mesh, (64, 96), torch.bfloat16)
    torch.manual_seed(1 + rank)
    for _ in range(2):
        x, dy = (torch.randn(2, 16, 64).to(ranks.device, torch.bfloat16) for _ in range(2))
        expected, own = _step(plain, x, dy), _step(overlapped, x, dy)
        _expect_equal(expected, own, 2)
        if recipe == "delayed":
            continue  # one more step has other scales
        again = _step(
            overlapped,
            x,
            dy,
            lambda x: checkpoint(overlapped["mlp"], x, use_reentrant=False),
        )
        assert torch.equal(again["y"], own["y"])
        assert torch.equal(again["dx"], own["dx"])
        for name, grad in again["own"].items():
            assert torch.equal(grad, own["own"][name]), name


@pytest.mark.parametrize("recipe", ("rowwise", "rowwise_with_gw_hp", "delayed"))
def test_what_it_is_composed_with(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_composed, 4, tmp_path, recipe)


def _compiled(mesh: Any, rank: int, world: int) -> None:
    """A compiled graph has the ops as they are, and eager mode's results; None asks Inductor."""
    for recipe in ("tensorwise", "delayed"):
        _, model = _models(recipe, mesh, (64, 96), torch.bfloat16)
        # A frozen linear, the first one of its x, needs q alone; the next one casts x to both copies.
        model["mlp"].gate.weight.requires_grad_(recipe == "delayed")
        eager = copy.deepcopy(model)
        for layer in model.modules():
            if isinstance(layer, f8.Float8Linear):
                layer.async_tensor_parallel = None
        names: list[str] = []

        def note(graph: Any, _: Any) -> Any:
            names.extend(str(node.target) for node in graph.graph.nodes)  # noqa: B023
            return make_boxed_func(graph)

        backend = aot_autograd(
            fw_compiler=note, bw_compiler=note, partition_fn=min_cut_rematerialization_partition
        )
        torch._dynamo.reset()
        run = torch.compile(lambda x: model["mlp"](x), backend=backend, fullgraph=True)  # noqa: B023
        torch.manual_seed(1 + rank)
        with torch._inductor.config.patch(_micro_pipeline_tp=True):
            assert async_tensor_parallel.wanted(None)
            for step in range(2):
                names.clear()
                x, dy = (torch.randn(2, 16, 64, dtype=torch.bfloat16) for _ in range(2))
                expected, own = _step(eager, x, dy), _step(model, x, dy, run)
                assert torch.equal(own["y"], expected["y"])
                assert torch.equal(own["dx"], expected["dx"])
                for name in [name for name in expected["own"] if name != "up"]:
                    assert torch.equal(own["own"][name], expected["own"][name]), name
                if step == 1 and recipe != "delayed":  # its first step has another graph
                    assert not names
                    continue
                assert not any("reduce_scatter" in name for name in names)
                # With delayed scaling each linear has a scale of its own.
                expected_calls = 3 if recipe == "delayed" else 2
                for op in ("gather_gemm", "gemm_scatter"):
                    assert len([name for name in names if op in name]) == expected_calls
    assert not async_tensor_parallel.wanted(None)


def test_compiled_graphs(tmp_path: Any) -> None:
    ranks.spawn(_compiled, 2, tmp_path)


def _sums(mesh: Any, rank: int, world: int) -> None:
    """Partial sums of ranks are added in fp32 and rounded once; ops pass PyTorch's checks."""
    to = Sharing(
        rules_of(float8.Recipe.named("rowwise"), True, False),
        mesh.get_group().group_name,
        world,
        rank,
    )
    torch.manual_seed(1 + rank)
    rows, size = 16 * world, 64
    x, w = (torch.randn(n, size, dtype=torch.bfloat16) for n in (rows, 96))
    (xq, _), (wq, _) = operands.cast(
        [operands.Share(each, i, None) for i, each in enumerate((x, w))], to, True, None
    )
    more = torch.randn(rows, 96, dtype=torch.bfloat16)
    partial = operands.gemm(operands.OUTPUT, xq, wq, size, x, to, None)
    gemm = Gemm(operands.OUTPUT, wq, None, size, torch.bfloat16, to)
    parts = [torch.empty_like(partial) for _ in range(world)]
    distributed.all_gather(parts, partial)
    whole = sum(each.float() for each in parts).bfloat16()
    y, (gathered,) = gemm.scattered(xq, 1, None, [x])
    assert torch.equal(y, whole.chunk(world)[rank])
    distributed.all_gather(parts := [torch.empty_like(x) for _ in range(world)], x)
    assert torch.equal(gathered.view(-1, size), torch.cat(parts))
    y, _ = gemm.scattered(xq, 1, more)
    with_more = (partial.float() + more.float()).bfloat16()
    distributed.all_gather(parts := [torch.empty_like(partial) for _ in range(world)], with_more)
    whole = sum(each.float() for each in parts).bfloat16()
    assert sqnr(y, whole.chunk(world)[rank]) > 48
    shard = operands.Shard(0, rows, size, 1)
    own = operands.parts_of_q(xq, shard, to)
    rest = gemm._rest(1)
    for op, arguments in (
        (async_tensor_parallel.gather_gemm, (own, xq.scales, *wq, None, 2, True, *rest)),
        (async_tensor_parallel.gemm_scatter, (*xq, *wq, None, more, [x], *rest)),
        (async_tensor_parallel.gemm_beside, (*xq, *wq, [x], *rest[1:2], *rest[3:])),
    ):
        torch.library.opcheck(op, arguments)


@pytest.mark.parametrize("world", (2, 3))
def test_sums_over_ranks(world: int, tmp_path: Any) -> None:
    ranks.spawn(_sums, world, tmp_path)


def _captured(mesh: Any, rank: int, world: int) -> None:
    """A step that is captured in a CUDA graph gives what it gave before, over peer memory."""
    size = 128 * world
    _, model = _models("rowwise", mesh, (size, size), torch.bfloat16)
    x = torch.randn(1, 1024, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    expected = [_step(model, x.detach(), dy) for _ in range(2)][1]
    exchange = chunk_exchange.exchange_of(mesh.get_group().group_name, world, x.device)
    assert isinstance(exchange, chunk_exchange.PeerMemory)
    model.zero_grad()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model["mlp"](x).backward(dy)
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad()
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model["mlp"](x)
        y.backward(dy)
    for _ in range(3):
        for each in (x.grad, *(p.grad for p in model.parameters())):
            each.zero_()
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(y, expected["y"])
    assert torch.equal(x.grad, expected["dx"])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad.full_tensor(), expected["own"][name])


@ranks.needs_gpus(2)
def test_a_captured_step_on_gpus(tmp_path: Any) -> None:
    ranks.spawn(_captured, 2, tmp_path, device="cuda")


def _messages_on_gpus(mesh: Any, rank: int, world: int) -> None:
    """Ranks of several hosts exchange messages through NCCL."""
    name = mesh.get_group().group_name
    group = mesh.get_group()
    chunk_exchange._exchanges[name] = chunk_exchange.Messages(group)
    for recipe in float8.recipes.NAMES:
        _every_recipe(mesh, rank, world, recipe)
    assert isinstance(chunk_exchange._exchanges[name], chunk_exchange.Messages)


@ranks.needs_gpus(2)
def test_messages_on_gpus(tmp_path: Any) -> None:
    ranks.spawn(_messages_on_gpus, 2, tmp_path, device="cuda")
