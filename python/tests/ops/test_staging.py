"""Emulated linears whose tensors are not where the emulated device reads them: on a GPU.

Without a GPU, a bit of the config stages CPU tensors as if they were on one.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from reference import same, words_of_each
from torch import nn

import float8.torch as f8
from float8 import recipes
from float8.recipes import STAGED, Recipe
from float8.torch import _ops, functional

# A place that is not the CPU's memory, and what a config needs for it.
PLACES = [
    pytest.param(("cpu", STAGED), id="cpu"),
    pytest.param(("cuda", 0), id="cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the device of staged tensors; layers that are made on it are staged."""
    device, bit = request.param
    own = recipes.pack

    def staged(*args: Any, **kwargs: Any) -> int:
        config = own(*args, **kwargs)
        return config | bit if config & recipes.EMULATE else config

    monkeypatch.setattr(recipes, "pack", staged)
    return str(device)


_BF16, _F32 = _ops.ELEMENT_TYPES[torch.bfloat16], _ops.ELEMENT_TYPES[torch.float32]


def _config(recipe: str, **options: Any) -> int:
    return recipes.pack(Recipe.named(recipe), emulate=True, **options)


def _direct(config: int) -> int:
    return config & ~STAGED


def _flat(values: Any) -> list[Any]:
    if isinstance(values, (list, tuple)):
        return [each for value in values for each in _flat(value)]
    return [values]


def _same(op: Any, place: str, config: Any, *args: Any, at: int) -> tuple[Any, Any]:
    """Returns what an op gives on the CPU, and staged; all but new bytes are the same afterwards.

    Bytes in fp8 have gaps that nobody writes.
    """

    def moved(value: Any, device: str) -> Any:
        if isinstance(value, list):
            return [moved(each, device) for each in value]
        return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value

    results, after = [], []
    for device, own in (("cpu", False), (place, True)):
        bits = [each if own else _direct(each) for each in _flat(config)]
        given = [moved(arg, device) for arg in args]
        given.insert(at, bits if isinstance(config, list) else bits[0])
        results.append(op(*given))
        found = _flat(results[-1])
        for value in found:
            assert not isinstance(value, torch.Tensor) or value.device.type == device
        new = [each for each in found if getattr(each, "dtype", None) is not torch.uint8]
        after.append([each for each in _flat(given) if isinstance(each, torch.Tensor)] + new)
    for expected, value in zip(*after, strict=True):
        if isinstance(value, torch.Tensor):
            assert value.dtype == expected.dtype and torch.equal(value.cpu(), expected)
        else:
            assert value == expected
    return results[0], results[1]


@pytest.mark.parametrize("shape", ((32, 64), (2, 3, 5, 64), (7, 64), (0, 64)), ids=str)
@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise", "blockwise", "rowwise_with_gw_hp"))
def test_linear_ops(recipe: str, shape: tuple[int, ...], place: str) -> None:
    bias, config = torch.randn(48), _config(recipe, bias=True)
    x = torch.randn(64, 7).T if shape == (7, 64) else torch.randn(shape)
    weight = torch.randn(48, 64)
    args = (x, None, None, weight, None, None, bias, None, 0, True)
    (y, saved), (_, own_saved) = _same(_ops.linear_forward, place, config, *args, at=8)
    dy = torch.randn(y.shape)
    kept = x if config & recipes.READS_X else None
    args = (kept, None, weight, None, None, 0, 7)
    direct, _ = _same(_ops.linear_backward, place, config, dy, saved, *args, at=7)
    staged, _ = _same(_ops.linear_backward, place, config, dy, own_saved.cpu(), *args, at=7)
    assert same(staged, direct)


def test_a_weight_of_one_element(place: str) -> None:
    """A gathered weight is given by its shape alone."""
    x, config = torch.randn(32, 64), _config("rowwise")
    weight = torch.randn(48, 64)
    q, qt = _ops.quantize(weight, _direct(config), _ops.WEIGHT, True)
    none = torch.zeros(()).expand(48, 64)
    expected, _ = _ops.linear_forward(
        x, None, None, weight, None, None, None, None, _direct(config), 0, False
    )
    y, _ = _ops.linear_forward(
        *(x.to(place), None, None, none.to(place), q.to(place), qt.to(place), None, None),
        *(config, 0, False),
    )
    assert torch.equal(y.cpu(), expected)


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise", "blockwise"))
def test_casts(recipe: str, place: str) -> None:
    x, config = torch.randn(32, 64, dtype=torch.bfloat16), _config(recipe)
    direct, staged = _same(_ops.quantize, place, config, x, _ops.WEIGHT, True, at=1)
    copies = []
    for fill in (7, 9):
        again = [torch.full_like(each, fill) for each in direct]
        state = torch.zeros(_ops.WEIGHT_STATE_BYTES, dtype=torch.uint8)
        _same(_ops.cast_weight, place, config, x, *again, state, x[:0], at=5)
        _ops.cast_weight(x, *again, state, x[:0], _direct(config))
        copies.append(again)
    for expected, own, first, second in zip(direct, staged, *copies, strict=True):
        written = first == second
        assert written.sum() >= x.numel() or not expected.numel()
        assert torch.equal(own.cpu()[written], expected[written])
        assert torch.equal(first[written], expected[written])


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise"))
def test_shards(recipe: str, place: str) -> None:
    """Shards that were cast apart and in a list have the same copies, which multiply as the whole's."""
    x, config = torch.randn(32, 64), _config(recipe)
    (amax, rows), _ = _same(_ops.quantize_amax, place, config, x, _ops.WEIGHT, 32, at=1)
    args = (x, amax, rows, _ops.WEIGHT, 32)
    found = _same(_ops.quantize_shard, place, config, *args, at=3)
    many, both, sizes = [x, torch.randn(16, 64)], [config, config], [32, 16]
    words, _ = _same(_ops.quantize_amax_list, place, both, many, _ops.WEIGHT, sizes, at=1)
    each = words_of_each(words, many, [_direct(config)] * 2, _ops.WEIGHT, sizes)
    args = (many, *each, _ops.WEIGHT, sizes)
    lists = _same(_ops.quantize_shard_list, place, both, *args, at=3)
    y = set()
    for q, qt in (*found, *(each[:2] for each in lists)):
        result, _ = _ops.linear_forward(
            *(torch.ones(16, 64), None, None, x, q.cpu(), qt.cpu(), None, None),
            *(_direct(config), 0, False),
        )
        y.add(tuple(result.flatten().tolist()))
    assert len(y) == 1


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise"))
def test_activations_over_ranks(recipe: str, place: str) -> None:
    config, silu = _config(recipe), _ops.ACTIVATIONS["silu"]
    gate, up, grad = (torch.randn(32, 64) for _ in range(3))
    for given in ((gate, up, None), (gate, up, grad)):
        (left, *words), (own, *own_words) = _same(
            _ops.quantize_activation_amax, place, config, *given, silu, at=4
        )
        assert torch.equal(left, own.cpu()) and same(words, [each.cpu() for each in own_words])
        args = (*given, left, *words, silu)
        copies, staged = _same(_ops.quantize_activation_shard, place, config, *args, at=7)
        for q, own_q in zip(copies[::2], staged[::2], strict=True):
            rows = [each.cpu()[: 32 * 128].view(32, 128)[:, :64] for each in (q, own_q)]
            assert torch.equal(*rows)


@pytest.mark.parametrize("recipe", ("rowwise", "blockwise"))
def test_an_update_of_weights(recipe: str, place: str) -> None:
    """The maxima of rows and columns, or the copies, and the fingerprint of what it leaves."""
    config, shapes = _config(recipe), ((48, 64), (128, 32))
    lists = [[torch.rand(shape) for shape in shapes] for _ in range(4)]
    steps = [torch.tensor(3.0) for _ in shapes]
    blocks = recipe == "blockwise"
    sizes = [(0, 0) if blocks else (k, n) for n, k in shapes]
    words = [[torch.zeros(each[i], dtype=torch.int32) for each in sizes] for i in range(2)]
    states = [torch.zeros(_ops.WEIGHT_STATE_BYTES, dtype=torch.uint8) for _ in shapes]
    bytes_of = torch.ops.float8.quantized_bytes
    copies = [
        torch.zeros(size if blocks else 0, dtype=torch.uint8)
        for n, k in shapes
        for size in bytes_of(n, k, config, _ops.WEIGHT, True)
    ]
    numbers = [1e-2, 0.9, 0.99, 1e-8, 0.1]
    args = (*lists, [], steps, *words, states, copies, [_BF16, _F32], [0, 0], [], 0, numbers, False)
    _same(_ops.adamw, place, [config] * 2, *args, at=10)


@pytest.mark.parametrize("accumulate", (False, True))
def test_a_gemm(accumulate: bool, place: str) -> None:
    config = _config("tensorwise")
    a, b = (torch.randint(0, 100, (rows, 128), dtype=torch.uint8) for rows in (32, 48))
    d, bias = torch.randn(32, 48), None if accumulate else torch.randn(48)
    scales = torch.tensor([0.5]), torch.tensor([2.0])
    args = (a, scales[0], b, scales[1], d, bias, 128, 0, accumulate)
    _same(_ops.gemm_into, place, config, *args, at=7)
    moved = [each.to(place) if isinstance(each, torch.Tensor) else each for each in args]
    moved[4] = own = d.to(place, copy=True)
    _ops.gemm_into(*moved[:7], config, *moved[7:])
    assert not torch.equal(own.cpu(), d)


def test_what_asks_for_plans(place: str) -> None:
    config = _config("rowwise")
    dy, weight = torch.randn(32, 48), torch.randn(48, 64)
    _same(torch.ops.float8.reads_shards, place, config, dy, weight, at=2)
    before = len(torch.ops.float8.plans(-1))
    n = 208 if place == "cpu" else 224  # a shape that no other call has planned
    for _ in range(2):
        x, w = torch.empty(0, device=place), torch.empty(0, device=place)
        torch.ops.float8.prepare(x, w, [n], [192], 64, config, True)
    assert len(torch.ops.float8.plans(-1)) == before + 1


def _pair(recipe: str, place: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Any]:
    """Returns a model on the CPU, and its twin that is staged."""
    plain = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64, bias=False))
    config = f8.LinearConfig(recipe, emulate=True, **options)
    own = recipes.pack
    with monkeypatch.context() as direct:
        direct.setattr(recipes, "pack", lambda *args, **fields: _direct(own(*args, **fields)))
        models = [f8.convert_to_float8_training(copy.deepcopy(plain), config=config)]
    models.append(f8.convert_to_float8_training(plain.to(place), config=config))
    assert models[1][0]._config & STAGED == (STAGED if place == "cpu" else 0)
    assert not models[0][0]._config & STAGED
    return models


def _equal(one: Any, two: Any) -> None:
    for name, expected in one.state_dict().items():
        assert torch.equal(two.state_dict()[name].cpu(), expected), name


@pytest.mark.parametrize("recompute", (False, True))
@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise", "delayed", "blockwise", "bf16"))
def test_training(
    recipe: str, recompute: bool, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and scales after some steps are those of a training on the CPU, bit for bit."""
    models = _pair(recipe, place, monkeypatch, recompute=recompute)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    for step in range(4):
        x, dy = torch.randn(24, 64), torch.randn(24, 64)
        results = []
        for model, optimizer in zip(models, optimizers, strict=True):
            own = x.to(model[0].weight.device, copy=True).requires_grad_()
            y = model(own)
            y.backward(dy.to(y.device))
            assert own.grad is not None
            results.append((y, own.grad))
            if step:  # the first step has two forwards
                f8.sync_float8_amax_and_scale_history(model)
            optimizer.step()
            optimizer.zero_grad()
        for expected, own in zip(*results, strict=True):
            assert torch.equal(own.detach().cpu(), expected.detach())
        _equal(*models)
    if recipe == "delayed":
        assert not models[1].float8_scales.first


def test_a_scale_state_is_loaded(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state before its first step, and one after it, scale as they do on the CPU."""
    models = _pair("delayed", place, monkeypatch)
    first = copy.deepcopy(models[0].state_dict())
    x = torch.randn(16, 64)
    for model in models:
        model(x.to(model[0].weight.device)).sum().backward()
        f8.sync_float8_amax_and_scale_history(model)
    later = copy.deepcopy(models[0].state_dict())
    for checkpoint in (first, later, first):
        for model in models:
            model.load_state_dict(checkpoint)
        with torch.no_grad():
            y = [model(100 * x.to(model[0].weight.device)).cpu() for model in models]
        assert torch.equal(*y)


def test_lists_of_delayed_casts(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All parts of a list are of one copy of the state, and all amaxes come back."""
    models = _pair("delayed", place, monkeypatch)
    weights = [torch.randn(128, 64), 3 * torch.randn(64, 128)]
    results = []
    for model in models:
        layers = [model[0], model[2]]
        device = layers[0].weight.device
        state = model.float8_scales
        copies = torch.ops.float8.quantize_list(
            [each.to(device) for each in weights],
            state.config,
            _ops.WEIGHT,
            [layer._scale_view for layer in layers],
            state.layout,
        )
        for i, layer in enumerate(layers):
            x = torch.ones(16, layer.in_features, device=device)
            y, _ = _ops.linear_forward(
                *(x, None, None, layer.weight, *copies[2 * i : 2 * i + 2], layer.bias),
                *(layer._scale_view, layer._config, layer._layout, False),
            )
            results.append(y.cpu())
    assert torch.equal(results[2], results[0]) and torch.equal(results[3], results[1])
    _equal(*models)
    amaxes = models[1].float8_scales.amaxes().view(torch.float32)
    assert sorted(amaxes.tolist())[-2:] == sorted(each.abs().max().item() for each in weights)


def test_cached_casts_of_weights(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = _pair("rowwise", place, monkeypatch)
    x = torch.randn(16, 64)
    results = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        f8.cache_weight_casts(model, optimizer)
        for _ in range(2):
            y = model(x.to(model[0].weight.device))
            y.sum().backward()
            optimizer.step()
        results.append(y.detach().cpu())
    assert torch.equal(*results)
    _equal(*models)


def test_the_function(place: str) -> None:
    x, weight = torch.randn(16, 64), torch.randn(32, 64)
    config = _config("tensorwise")
    own = functional.apply(x.to(place), weight.to(place), None, config)
    assert torch.equal(own.cpu(), functional.apply(x, weight, None, _direct(config)))


def test_a_compiled_model(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = _pair("rowwise", place, monkeypatch)
    x = torch.randn(16, 64)
    results = []
    for model in models:
        y = torch.compile(model, backend="aot_eager", fullgraph=True)(x.to(model[0].weight.device))
        y.sum().backward()
        results.append([y.detach().cpu(), model[0].weight.grad.cpu()])
    assert same(*results)


def _linear(x: torch.Tensor, weight: torch.Tensor, config: int) -> Any:
    return _ops.linear_forward(x, None, None, weight, *(None,) * 4, config, 0, False)


def test_a_weight_of_other_rows(place: str) -> None:
    x, weight = torch.randn(16, 64, device=place), torch.randn(32, 48, device=place)
    with pytest.raises(ValueError, match="rows of 64"):
        _linear(x, weight, _config("rowwise"))


@pytest.mark.gpu
def test_a_weight_on_another_device() -> None:
    x, weight = torch.randn(16, 64, device="cuda"), torch.randn(32, 64)
    with pytest.raises(ValueError, match="different devices"):
        _linear(x, weight, _config("rowwise"))


def test_a_list_of_no_tensor(place: str) -> None:
    state = torch.zeros(16, dtype=torch.uint8, device=place)
    with pytest.raises(ValueError, match="at least one tensor"):
        _ops.quantize_list([], _config("rowwise"), _ops.WEIGHT, [state], 1 | 16 << 32)


def test_a_cast_of_float64(place: str) -> None:
    x = torch.randn(16, 64, device=place).double()
    with pytest.raises(ValueError, match="bfloat16, float16 nor float32"):
        _ops.quantize(x, _config("rowwise"), _ops.INPUT, True)


@pytest.mark.gpu
def test_a_captured_graph_is_refused() -> None:
    layer = f8.convert_to_float8_training(
        nn.Linear(64, 64, device="cuda"), config=f8.LinearConfig("rowwise", emulate=True)
    )
    x = torch.randn(16, 64, device="cuda")
    layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match=r"captured.*without emulate"),
        torch.cuda.graph(graph),
        torch.no_grad(),
    ):
        layer(x)
    torch.cuda.synchronize()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.gpu
def test_copies_are_in_the_order_of_the_stream() -> None:
    """A linear on another stream reads what the stream wrote before, and the stream what it gave."""
    layer = f8.convert_to_float8_training(
        nn.Linear(64, 64, device="cuda"), config=f8.LinearConfig("rowwise", emulate=True)
    )
    x = torch.randn(16, 64)
    expected = copy.deepcopy(layer).cpu()(2 * x)
    stream = torch.cuda.Stream()
    own = x.cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), torch.no_grad():
        torch.cuda._sleep(100_000_000)
        own.mul_(2)
        y = layer(own) + 0
    stream.synchronize()
    assert torch.equal(y.cpu(), expected)


@pytest.mark.gpu
def test_other_gpus_than_hopper_are_asked_for_nothing() -> None:
    """An emulated model leaves no plan on the GPU, and no context."""
    before = len(torch.ops.float8.plans(0))
    layer = f8.convert_to_float8_training(
        nn.Linear(96, 80, device="cuda"), config=f8.LinearConfig("delayed", emulate=True)
    )
    layer(torch.randn(16, 96, device="cuda")).sum().backward()
    f8.sync_float8_amax_and_scale_history(layer)
    assert len(torch.ops.float8.plans(0)) == before
