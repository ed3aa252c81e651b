"""What only a GPU has: graphs, streams, a plan that is made too late."""

from __future__ import annotations

import copy
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import reference
import torch
from torch import nn

import float8.torch as f8
from float8 import explain as f8_explain

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise", "delayed"))
def test_cuda_graph(recipe: str, mlp: Any, config: Any) -> None:
    model = f8.convert_to_float8_training(mlp(), config=config(recipe))
    x = torch.randn(256, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    dy = torch.randn(256, 64, dtype=torch.bfloat16, device="cuda")

    def step() -> list[torch.Tensor]:
        y = model(x)
        return [y, *torch.autograd.grad(y, (x, *model.parameters()), dy)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        f8.sync_float8_amax_and_scale_history(model)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        assert reference.same(captured, step())


def test_capture_before_the_plan(config: Any) -> None:
    layer = f8.Float8Linear(80, 48, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(32, 80, dtype=torch.bfloat16, device="cuda")
    with (
        pytest.raises(RuntimeError, match="before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        layer(x)


def test_capture_after_prepare(config: Any) -> None:
    layer = f8.Float8Linear(96, 48, dtype=torch.bfloat16, device="cuda", recipe="rowwise")
    f8.prepare(layer, 300)
    x = torch.randn(300, 96, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
        y.sum().backward()
    graph.replay()
    assert torch.equal(y, layer(x)) and layer.weight.grad is not None


def test_capture_after_prepare_with_a_shared_input(config: Any) -> None:
    layers = nn.ModuleList(nn.Linear(96, n, dtype=torch.bfloat16) for n in (48, 64)).cuda()
    f8.convert_to_float8_training(layers, config=config("rowwise"))
    f8.prepare(layers, 300)
    layers[0].shares_input = True
    x = torch.randn(300, 96, dtype=torch.bfloat16, device="cuda")
    before = layers[0](x)  # its cast is not the graph's
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ys = [layer(x) for layer in layers]
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    for y, layer in zip(ys, layers, strict=True):
        assert torch.equal(y, layer(x))
    assert not torch.equal(before, ys[0])


def test_a_graph_reads_cached_casts(mlp: Any, config: Any) -> None:
    model = f8.convert_to_float8_training(mlp(), config=config("rowwise"))
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, fused=True) for m in (model, twin)]
    f8.cache_weight_casts(model, optimizers[0])
    x = torch.randn(64, 64, dtype=torch.bfloat16, device="cuda")
    for m in (model, twin):
        m(x).sum().backward()
    graph = torch.cuda.CUDAGraph()
    for parameter in model.parameters():
        parameter.grad.zero_()
    with torch.cuda.graph(graph):
        model(x).sum().backward()
    for _ in range(3):
        for parameter in (*model.parameters(), *twin.parameters()):
            parameter.grad.zero_()
        graph.replay()
        twin(x).sum().backward()
        for one, two in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(one.grad, two.grad)
        for optimizer in optimizers:
            optimizer.step()


def test_make_graphed_callables(mlp: Any, config: Any) -> None:
    model = f8.convert_to_float8_training(mlp(), config=config())
    x = torch.randn(64, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), (x, *model.parameters()))
    graphed = torch.cuda.make_graphed_callables(model, (x,))
    assert reference.same(expected, torch.autograd.grad(graphed(x).sum(), (x, *model.parameters())))


@pytest.mark.parametrize("recipe", ("rowwise", "delayed"))
def test_reduce_overhead(recipe: str, mlp: Any, config: Any) -> None:
    torch._dynamo.reset()
    model = f8.convert_to_float8_training(mlp(), config=config(recipe))
    warm = torch.randn(64, 64, dtype=torch.bfloat16, device="cuda")
    model(warm).sum().backward()
    f8.sync_float8_amax_and_scale_history(model)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for _ in range(6):
        x = torch.randn(64, 64, dtype=torch.bfloat16, device="cuda")
        y = compiled(x)
        expected = twin(x)
        y.sum().backward()
        expected.sum().backward()
        assert reference.sqnr(y, expected) > 60
        for step in (model, twin):
            f8.sync_float8_amax_and_scale_history(step)
    if recipe == "delayed":  # what the graph recorded is what eager calls record
        words = [one.float8_scales.state.view(torch.float32) for one in (model, twin)]
        assert words[0].count_nonzero() > 24 and torch.allclose(*words, rtol=0.02)


def test_capture_in_the_first_delayed_step(mlp: Any, config: Any) -> None:
    model = f8.convert_to_float8_training(mlp(), config=config("delayed"))
    x = torch.randn(64, 64, dtype=torch.bfloat16, device="cuda")
    model(x).sum().backward()
    with (
        pytest.raises(RuntimeError, match="whole step"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        model(x)


def test_delayed_step_in_a_graph(mlp: Any, config: Any) -> None:
    """The sync is in the graph: replays go on as eager steps do."""
    model = f8.convert_to_float8_training(mlp(), config=config("delayed"))
    x = torch.randn(64, 64, dtype=torch.bfloat16, device="cuda")

    def step(model: Any) -> torch.Tensor:
        y: torch.Tensor = model(x)
        y.sum().backward()
        f8.sync_float8_amax_and_scale_history(model)
        return y

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(model)
    torch.cuda.synchronize()
    eager = copy.deepcopy(model)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(model)
    for scale in (1, 8, 1):
        x.mul_(scale)
        graph.replay()
        assert torch.equal(captured, step(eager))
    assert torch.equal(model.float8_scales.state, eager.float8_scales.state)


def test_streams(mlp: Any, config: Any) -> None:
    model = f8.convert_to_float8_training(mlp(), config=config())
    xs = [torch.randn(512, 64, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    expected = [model(x) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        for x, stream in zip(xs, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(model(x))
    torch.cuda.synchronize()
    for i, y in enumerate(results):
        assert torch.equal(y, expected[i % 4])


def test_backward_on_a_stream_of_its_own(mlp: Any, config: Any) -> None:
    """Autograd runs backward on forward's stream, and the caller's stream waits for the gradients."""
    model = f8.convert_to_float8_training(mlp(), config=config("rowwise"))
    xs = [torch.randn(512, 64, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    expected = [torch.autograd.grad(model(x).sum(), list(model.parameters())) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    for _ in range(5):
        results = []
        for x, stream in zip(xs, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(torch.autograd.grad(model(x).sum(), list(model.parameters())))
        torch.cuda.synchronize()
        for own, other in zip(results, expected, strict=True):
            assert reference.same(own, other)


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise"))
def test_gradient_accumulation_in_a_graph(recipe: str, mlp: Any, config: Any) -> None:
    """A captured step of two micro-batches sees the weights that the optimizer left."""
    model = f8.convert_to_float8_training(mlp(torch.float32), config=config(recipe))
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (model, twin)]
    xs = [torch.randn(256, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2)]

    def micro_steps(model: Any) -> None:
        for x in xs:
            model(x).square().mean().backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for own in (model, twin):
            micro_steps(own)
            own.zero_grad(set_to_none=False)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        micro_steps(model)
    model.zero_grad(set_to_none=False)
    for _ in range(4):
        for x in xs:
            x.copy_(torch.randn_like(x))
        graph.replay()
        micro_steps(twin)
        for one, two in zip(model.parameters(), twin.parameters(), strict=True):
            assert one.grad is not None and two.grad is not None
            assert torch.equal(one.grad, two.grad)
        for own, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.step()
            own.zero_grad(set_to_none=False)


def test_weight_on_another_device(config: Any) -> None:
    layer = f8.Float8Linear(64, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="the weight is on another device"):
        layer(torch.randn(2, 64, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.parametrize("recipe", ("rowwise", "delayed"))
def test_layers_on_two_devices(recipe: str, config: Any) -> None:
    """A model whose halves are on two GPUs, with one scale state on each."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.manual_seed(0)
    halves = [torch.nn.Linear(64, 64, dtype=torch.bfloat16, device="cuda:0") for _ in range(2)]
    single = [f8.convert_to_float8_training(half, config=config(recipe)) for half in halves]
    split = [copy.deepcopy(half).to(f"cuda:{i}") for i, half in enumerate(single)]
    for _ in range(3):
        x = torch.randn(32, 64, dtype=torch.bfloat16, device="cuda:0")
        results = []
        for first, second in (single, split):
            leaf = x.clone().requires_grad_()
            y = second(first(leaf).to(second.weight.device))
            y.float().square().sum().backward()
            results.append((y.to("cuda:0"), leaf.grad))
            for half in (first, second):
                f8.sync_float8_amax_and_scale_history(half)
        assert reference.same(*results)


def test_conversion_asks_the_table_of_the_device(config: Any, capsys: Any) -> None:
    linear = torch.nn.Linear(4096, 14336, dtype=torch.bfloat16, device="cuda")
    model = torch.nn.Sequential(linear, torch.nn.Linear(64, 64, device="cuda"))
    f8.convert_to_float8_training(model, config=config("rowwise"), tokens=8192, explain=True)
    assert [type(m).__name__ for m in model] == ["Float8Linear", "Linear"]
    table = f8.verdicts(torch.nn.Sequential(linear, model[1]), "rowwise", 8192, device=0)
    assert capsys.readouterr().out == (
        f"{f8_explain(table)}\n\n1 of 2 linears to float8 (M 8192, {table[0].device})\n"
    )
    assert table[0].device == torch.cuda.get_device_name()


def test_two_devices(config: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    layer = f8.Float8Linear(64, 64, dtype=torch.bfloat16, device="cuda:0")
    x = torch.randn(32, 64, dtype=torch.bfloat16, device="cuda:0")
    expected = layer(x).cpu()
    assert torch.equal(layer.to("cuda:1")(x.to("cuda:1")).cpu(), expected)


_FIRST_USE = """
import sys, torch, float8.torch as f8
f8.tune_on_first_use(10, database=sys.argv[1])
layer = f8.Float8Linear(1104, 1360, dtype=torch.bfloat16, device="cuda", recipe="rowwise")
layer(torch.randn(512, 1104, dtype=torch.bfloat16, device="cuda")).sum().backward()
torch.cuda.synchronize()
try:
    f8.tune_on_first_use(1, database=sys.argv[1])
except RuntimeError as error:
    assert "too late" in str(error), error
else:
    raise AssertionError("it was not refused")
"""


def test_tuning_at_first_use(tmp_path: Any) -> None:
    database = tmp_path / "t.f8db"
    program = pathlib.Path(f8.__file__).parents[1] / "bin" / "float8-tune"
    runs, texts = [], []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", _FIRST_USE, str(database)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        texts.append(done.stderr)
        info = [str(program), "db", "info", "--db", str(database), "--json"]
        told = subprocess.run(info, capture_output=True, text=True)
        assert told.returncode == 0, told.stderr
        runs.append(json.loads(told.stdout)["runs"])
    assert database.exists() and "untuned" not in texts[0], texts
    assert runs[0] and runs[1] == runs[0], (runs, texts)
    asked = ["query", "--mnk", "512,1360,1104", "--recipe", "rowwise", "--db", str(database)]
    found = subprocess.run([str(program), *asked, "--json"], capture_output=True, text=True)
    assert json.loads(found.stdout), found.stderr
