"""Fused MLPs that keep nothing in fp8 between forward and backward, and cast x, h and the weights again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused import FeedForward, converted, expect_equal_steps, expect_trains, inputs, step
from reference import same
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import float8.torch as f8

Config = Callable[..., f8.LinearConfig]
pytestmark = pytest.mark.usefixtures("large_weights")
FUSED = ("tensorwise", "rowwise", "delayed", "blockwise")


class Merged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(64, 256, bias=False)
        self.down = nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> Any:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 144), nn.Linear(144, 64)

    def forward(self, x: torch.Tensor) -> Any:
        return self.fc2(functional.gelu(self.fc1(x)))


KINDS = (FeedForward, Merged, Plain)


class Block(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(64), kind()

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.mlp(self.norm(x))


def model_of(config: Config, recipe: str, kind: type[nn.Module], recompute: bool | None) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(Block(kind), Block(kind))
    model = converted(model, config(recipe, recompute=recompute))
    assert all(each.fused for each in f8.fuse(model))
    return model


def saved_bytes(model: Any, x: torch.Tensor, call: Any = None) -> int:
    """Returns the bytes that are kept between forward and backward, of what is no parameter."""
    found: dict[int, int] = {}
    own = {each.data_ptr() for each in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = (call or model)(x.clone().requires_grad_())
    y.float().sum().backward()
    return sum(found.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", FUSED)
def test_has_the_bits_of_copies_that_are_kept(
    config: Config, recipe: str, kind: type[nn.Module]
) -> None:
    again, kept = (model_of(config, recipe, kind, recompute) for recompute in (True, None))
    expect_equal_steps(again, kept)
    x = inputs(again)
    for reentrant in (False, True):
        called = step(again, x, lambda x, r=reentrant: checkpoint(again, x, use_reentrant=r))
        assert same(called, step(kept, x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen", ["first", "down", "both", "x"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
def test_leaves_out_gradients_that_nobody_wants(
    config: Config, recipe: str, frozen: str, kind: type[nn.Module]
) -> None:
    results = []
    for recompute in (True, None):
        model = model_of(config, recipe, kind, recompute)
        for block in (model[0], model[1]):
            first, *others = (each for each in block.mlp.children() if hasattr(each, "weight"))
            if frozen in ("first", "both"):
                first.weight.requires_grad_(False)
            if frozen in ("down", "both"):
                others[-1].weight.requires_grad_(False)
        if frozen == "x":
            model[0].norm.requires_grad_(False)
            model[0].mlp(inputs(model)).float().sum().backward()
            results.append([p.grad for p in model[0].mlp.parameters()])
        else:
            results.append(step(model, inputs(model)))
    assert same(*results)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", FUSED)
def test_graphs_keep_nothing_in_fp8(config: Config, recipe: str, kind: type[nn.Module]) -> None:
    """A graph keeps what bf16 keeps and scales; with recompute=False it keeps copies of x, h and the weights too."""
    torch._dynamo.reset()
    kept, sizes = [], []
    for recompute in (None, False):
        model = model_of(config, recipe, kind, recompute)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        x = inputs(model)
        for _ in range(2):  # the first step of delayed scaling and a later one
            kept.append(step(model, x, compiled))
            assert same(kept[-1], step(model, x))
            f8.sync_float8_amax_and_scale_history(model)
        sizes.append(saved_bytes(model, x, compiled))
    assert all(same(one, other) for one, other in zip(kept[:2], kept[2:], strict=True))
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    rows = x.numel() // 64
    hidden = {FeedForward: 144, Merged: 128, Plain: 144}[kind]
    assert sizes[1] - sizes[0] > 0.9 * (weights + 2 * rows * hidden)


class Alive(TorchDispatchMode):
    """Counts which of these memories are still there at each op that computes gradients of a linear."""

    def __init__(self, of: list[StorageWeakRef]) -> None:
        super().__init__()
        self.of = of
        self.counts: list[int] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.float8.linear_backward.default:
            self.counts.append(sum(not each.expired() for each in self.of))
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_activation_reads_is_freed(
    config: Config, kind: type[nn.Module], compiled: bool
) -> None:
    """The linears that made it have their gradients in fp8 by then."""
    torch._dynamo.reset()
    model = model_of(config, "tensorwise", kind, None)[1]
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    read: list[StorageWeakRef] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 3 and tensor.shape[-1] > 64:
            read.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = call(inputs(model).requires_grad_())
    linears = 2 if kind is FeedForward else 1
    assert len(read) == linears
    with Alive(read) as alive:
        y.float().sum().backward()
    assert alive.counts == [linears, *(0,) * linears]


@pytest.mark.parametrize("recompute", [None, True])
def test_a_graph_that_is_kept_has_a_second_backward(config: Config, recompute: bool | None) -> None:
    model = model_of(config, "rowwise", FeedForward, recompute)
    y = model(inputs(model)).float().sum()
    y.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    y.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), once, strict=True))


def test_eager_mode_keeps_no_copies_where_it_is_asked(config: Config) -> None:
    sizes = {}
    for recompute in (True, False):
        model = model_of(config, "tensorwise", FeedForward, recompute)
        sizes[recompute] = saved_bytes(model, inputs(model))
    assert sizes[True] < 0.8 * sizes[False]


@pytest.mark.parametrize("recipe", FUSED)
def test_trains(config: Config, recipe: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(FeedForward), Block(Plain))
    model = converted(model, config(recipe, recompute=True), torch.float32)
    f8.fuse(model)
    expect_trains(model)


def test_reads_kept_casts_of_weights_and_autocast(config: Config) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(FeedForward), Block(Plain))
    model = converted(model, config("rowwise", recompute=True), torch.float32)
    f8.fuse(model)
    other = copy.deepcopy(model)
    f8.cache_weight_casts(other)
    x = inputs(model)
    for _ in range(2):
        with torch.autocast(x.device.type, torch.bfloat16):
            assert same(step(model, x), step(other, x))
        with torch.no_grad():
            for each in (*model.parameters(), *other.parameters()):
                each.mul_(1.25)
