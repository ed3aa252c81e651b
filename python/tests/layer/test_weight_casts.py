"""Cached casts of weights: the bits of uncached ones, and never those of an older weight."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import Calls
from reference import same
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import float8.torch as f8
from float8.torch import _ops

Config = Callable[..., f8.LinearConfig]
Gradients = list[torch.Tensor]
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")


def given(calls: Calls) -> int:
    """Returns how many forwards were given copies of their weight."""
    return calls.count(_ops.linear_forward, given=4)


def micro_batches(model: nn.Module, xs: list[torch.Tensor]) -> Gradients:
    model.zero_grad()
    for x in xs:
        model(x).square().sum().backward()
    return _gradients(model)


def _gradients(model: nn.Module) -> Gradients:
    return [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]


def poison(model: nn.Module) -> None:
    """Writes garbage into the copies, which a forward reads until it casts again."""
    f8.check_copies(False)  # which would find it
    for layer in model.modules():
        if isinstance(layer, f8.Float8Linear) and layer._weight_cast is not None:
            for each in layer._weight_cast.copies:
                each.bitwise_xor_(0x11)


def is_poisoned(model: nn.Module, plain: nn.Module, x: torch.Tensor) -> bool:
    return not torch.equal(model(x), plain(x))


@pytest.fixture
def xs(device: str) -> list[torch.Tensor]:
    return [torch.randn(40, 64, device=device, dtype=torch.bfloat16) for _ in range(3)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_are_the_same(
    recipe: str, mlp: Callable[..., nn.Module], xs: list[torch.Tensor], config: Config
) -> None:
    plain = f8.convert_to_float8_training(mlp(), config=config(recipe))
    cached = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, fused=True) for m in (plain, cached)]
    f8.cache_weight_casts(cached, optimizers[1])
    for _ in range(3):
        with Calls() as calls:
            gradients = micro_batches(cached, xs)
        assert given(calls) == 6
        assert same(micro_batches(plain, xs), gradients)
        with Calls() as calls:
            for optimizer in optimizers:
                optimizer.step()
        assert calls.count(_ops.cast_weight) == 0  # the next forward casts


# --- every way in which weights change


def _step(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[nn.Module], Any]:
    def change(model: nn.Module) -> None:
        optimizer = make(model.parameters(), lr=0.1, **options)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()

    return change


def _hooks(model: nn.Module) -> None:
    """Has optimizers that step in the backward, as LOMO and torchtitan's do."""

    def step(p: torch.Tensor) -> None:
        torch.optim.SGD([p], lr=0.01, foreach=True).step()

    model.zero_grad()
    hooks = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    x = torch.linspace(-1, 1, 512, dtype=torch.bfloat16, device=next(model.parameters()).device)
    model(x.view(8, 64)).sum().backward()
    for hook in hooks:
        hook.remove()


def _swap_averages(model: nn.Module) -> None:
    """Evaluates with averaged weights and goes back, as EMA callbacks do."""
    trained = [p.data.clone() for p in model.parameters()]
    x = torch.ones(8, 64, dtype=torch.bfloat16, device=trained[0].device)
    for p in model.parameters():
        p.data.copy_(p.data * 0.75)
    with torch.no_grad():
        averaged = model(x)
        assert torch.equal(averaged, copy.deepcopy(model)(x))
    for p, old in zip(model.parameters(), trained, strict=True):
        p.data.copy_(old)
    with torch.no_grad():
        assert not torch.equal(averaged, model(x))


def _through_storage(model: nn.Module) -> None:
    for p in model.parameters():
        storage = torch.empty(0, dtype=torch.uint8, device=p.device)
        storage.set_(p.data.untyped_storage())
        storage[::2] ^= 1


def _through_pointer(model: nn.Module) -> None:
    """Writes as numpy, ctypes and kernels of Triton and apex do: PyTorch sees nothing of it."""
    for p in model.parameters():
        other = torch.utils.dlpack.from_dlpack(p.detach())
        if other.is_cuda:
            other.neg_()
        else:
            other.view(torch.int16).numpy()[...] ^= 3


def _no_grad_copy(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p * 2)


def _load(assign: bool) -> Callable[[nn.Module], Any]:
    def change(model: nn.Module) -> None:
        state = {name: value.clone().neg_() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=assign)

    return change


def _new_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data * 2


def _merge_adapter(model: nn.Module) -> None:
    for p in model.parameters():
        delta = torch.linspace(-1, 1, p.numel(), device=p.device, dtype=p.dtype).view_as(p)
        p.data += delta


def _from_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector.flip(0).contiguous(), model.parameters())


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "sgd": _step(torch.optim.SGD, foreach=False),
    "sgd foreach": _step(torch.optim.SGD, foreach=True),
    "adam fused": _step(torch.optim.Adam, fused=True),
    "adamw": _step(torch.optim.AdamW, foreach=False),
    "adamw foreach": _step(torch.optim.AdamW, foreach=True),
    "adamw fused": _step(torch.optim.AdamW, fused=True),
    "optimizers in backward hooks": _hooks,
    "data.add_": lambda m: [p.data.add_(0.5) for p in m.parameters()],
    "data.mul_ of a row": lambda m: [p.data[-1:].mul_(-1) for p in m.parameters()],
    "data +=": _merge_adapter,
    "new data": _new_data,
    "averages and back": _swap_averages,
    "load_state_dict": _load(False),
    "load_state_dict(assign=True)": _load(True),
    "storage": _through_storage,
    "pointer": _through_pointer,
    "no_grad copy_": _no_grad_copy,
    "detach().neg_": lambda m: [p.detach().neg_() for p in m.parameters()],
    "vector_to_parameters": _from_vector,
    "new parameter": lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach() * 2)),
}


RUNS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "eager": lambda model, x: model(x),
    "no_grad": torch.no_grad()(lambda model, x: model(x)),
    "inference": torch.inference_mode()(lambda model, x: model(x)),
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_seen(
    name: str, run: str, mlp: Callable[..., nn.Module], xs: list[torch.Tensor], config: Config
) -> None:
    model = f8.convert_to_float8_training(mlp(), config=config("rowwise"))
    f8.cache_weight_casts(model)
    RUNS[run](model, xs[0])
    CHANGES[name](model)
    plain = copy.deepcopy(model)  # without the copies
    expected = plain(xs[0])
    y = RUNS[run](model, xs[0])
    assert torch.equal(y, expected)
    model.zero_grad()
    plain.zero_grad()
    if y.requires_grad:
        y.sum().backward()
        expected.sum().backward()
        assert same(_gradients(model), _gradients(plain))
    assert same(micro_batches(model, xs[:1]), micro_batches(plain, xs[:1]))


def test_compiled_forwards_see_every_change(
    mlp: Callable[..., nn.Module], xs: list[torch.Tensor], config: Config
) -> None:
    model = f8.convert_to_float8_training(mlp(), config=config("rowwise"))
    f8.cache_weight_casts(model)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    plain = copy.deepcopy(model)
    micro_batches(compiled, xs)
    for name, change in CHANGES.items():
        if name in ("new parameter", "load_state_dict(assign=True)"):
            continue  # PyTorch may compile again for other tensors
        change(model)
        before, plain = plain, copy.deepcopy(model)
        if name != "averages and back":
            assert not same([*before.parameters()], [*plain.parameters()]), name
        assert same(micro_batches(compiled, xs[:1]), micro_batches(plain, xs[:1])), name
        poison(model)  # nothing is cast for an unchanged weight
        assert is_poisoned(compiled, plain, xs[0]), name
        poison(model)  # the second time takes it out again
    assert graphs.frame_count == 1


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_micro_batches_cast_nothing(
    recipe: str, run: str, mlp: Callable[..., nn.Module], xs: list[torch.Tensor], config: Config
) -> None:
    model = f8.convert_to_float8_training(mlp(), config=config(recipe))
    f8.cache_weight_casts(model)
    plain = copy.deepcopy(model)
    assert not is_poisoned(model, plain, xs[0])
    poison(model)
    assert not torch.equal(RUNS[run](model, xs[0]), plain(xs[0]))
    layer: Any = model[0]
    assert layer._weight_cast.differs(layer)
    for p in model.parameters():
        p.data.mul_(2)
    plain = copy.deepcopy(model)
    assert not is_poisoned(model, plain, xs[0])
    assert not layer._weight_cast.differs(layer)


def test_update_casts_ahead(
    mlp: Callable[..., nn.Module], xs: list[torch.Tensor], config: Config
) -> None:
    model = f8.convert_to_float8_training(mlp(), config=config("rowwise"))
    casts = f8.cache_weight_casts(model)
    model(xs[0])
    for p in model.parameters():
        p.data.mul_(2)
    casts.update()
    plain = copy.deepcopy(model)
    poison(model)
    assert is_poisoned(model, plain, xs[0])  # the forward casts nothing then


def test_an_update_leaves_backwards_alone(
    mlp: Callable[..., nn.Module], xs: list[torch.Tensor], config: Config
) -> None:
    model = f8.convert_to_float8_training(mlp(), config=config("rowwise"))
    casts = f8.cache_weight_casts(model)
    plain = copy.deepcopy(model)
    losses = [model(x).square().sum() for x in xs]
    casts.update()
    for loss in losses:
        loss.backward()
    for x in xs:
        plain(x).square().sum().backward()
    assert same(_gradients(model), _gradients(plain))


def test_a_backward_after_a_change_reads_the_latest_copy(
    options: dict[str, Any], device: str
) -> None:
    layer = f8.Float8Linear(
        64, 32, bias=False, device=device, dtype=torch.bfloat16, recipe="rowwise", **options
    )
    f8.cache_weight_casts(layer)
    x = torch.randn(8, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    first = layer(x)
    layer.weight.data.mul_(2)
    second = layer(x)
    first.sum().backward()
    of_first, x.grad = x.grad, None
    second.sum().backward()
    assert torch.equal(of_first, x.grad)  # type: ignore[arg-type]


def test_autocast_of_float32_weights(
    mlp: Callable[..., nn.Module], device: str, config: Config
) -> None:
    plain = f8.convert_to_float8_training(mlp(torch.float32), config=config("tensorwise"))
    cached = copy.deepcopy(plain)
    f8.cache_weight_casts(cached, dtype=torch.bfloat16)
    xs = [torch.randn(40, 64, device=device)]
    with torch.autocast(device, torch.bfloat16), Calls() as calls:
        assert same(micro_batches(cached, xs), micro_batches(plain, xs))
    assert given(calls) == 2
    with Calls() as calls:  # float32 x finds no copies
        assert same(micro_batches(cached, xs), micro_batches(plain, xs))
    assert given(calls) == 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_copies_serve_x_of_any_type(
    recipe: str, mlp: Callable[..., nn.Module], device: str, config: Config
) -> None:
    plain = f8.convert_to_float8_training(mlp(torch.float32), config=config(recipe))
    cached = copy.deepcopy(plain)
    f8.cache_weight_casts(cached)
    x = torch.randn(40, 64, device=device)
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        for _ in range(2):
            for p, q in zip(plain.parameters(), cached.parameters(), strict=True):
                p.data.mul_(1.25)
                q.data.mul_(1.25)
            on = dtype is torch.bfloat16
            with torch.autocast(device, torch.bfloat16, enabled=on), Calls() as calls:
                assert same(micro_batches(cached, [x]), micro_batches(plain, [x]))
            assert given(calls) == 2
        poison(cached)
        with torch.autocast(device, torch.bfloat16, enabled=on):
            assert is_poisoned(cached, plain, x)


def test_padded_weights(options: dict[str, Any], device: str) -> None:
    layer = f8.Float8Linear(
        50,
        32,
        device=device,
        dtype=torch.bfloat16,
        recipe="rowwise",
        pad_inner_dim=True,
        **options,
    )
    f8.cache_weight_casts(layer)
    xs = [torch.randn(8, 50, device=device, dtype=torch.bfloat16)]
    for _ in range(2):
        plain = copy.deepcopy(layer)
        assert same(micro_batches(layer, xs), micro_batches(plain, xs))
        poison(layer)
        assert is_poisoned(layer, plain, xs[0])
        layer.weight.data.neg_()


def test_a_cache_made_in_inference_mode_serves_training(
    mlp: Callable[..., nn.Module], xs: list[torch.Tensor], config: Config
) -> None:
    model = f8.convert_to_float8_training(mlp(), config=config("rowwise"))
    with torch.inference_mode():
        f8.cache_weight_casts(model)
        model(xs[0])
    assert same(micro_batches(model, xs), micro_batches(copy.deepcopy(model), xs))


def test_compiled(mlp: Callable[..., nn.Module], xs: list[torch.Tensor], config: Config) -> None:
    model = f8.convert_to_float8_training(mlp(), config=config("rowwise"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    f8.cache_weight_casts(model, optimizer)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        plain = copy.deepcopy(model)
        assert same(micro_batches(compiled, xs), micro_batches(plain, xs))
        optimizer.step()


@pytest.mark.gpu
def test_a_captured_forward_sees_every_change(
    mlp: Callable[..., nn.Module], xs: list[torch.Tensor], config: Config
) -> None:
    model = f8.convert_to_float8_training(mlp(), config=config("rowwise"))
    f8.cache_weight_casts(model)
    micro_batches(model, xs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        y = model(xs[0])
    for name in ("adamw fused", "data.add_", "storage", "averages and back", "no_grad copy_"):
        CHANGES[name](model)
        plain = copy.deepcopy(model)
        graph.replay()
        assert torch.equal(y, plain(xs[0])), name
        poison(model)
        graph.replay()
        assert not torch.equal(y, plain(xs[0])), name


def test_remove_gives_the_memory_back(
    mlp: Callable[..., nn.Module], xs: list[torch.Tensor], config: Config
) -> None:
    model = f8.convert_to_float8_training(mlp(), config=config("rowwise"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    casts = f8.cache_weight_casts(model, optimizer)
    casts.remove()
    with Calls() as calls:
        micro_batches(model, xs)
        optimizer.step()
        model.load_state_dict(model.state_dict())
    assert given(calls) == calls.count(_ops.cast_weight) == 0


def test_delayed_scaling_has_no_cast_to_cache(
    mlp: Callable[..., nn.Module], config: Config
) -> None:
    delayed = f8.convert_to_float8_training(mlp(), config=config("delayed"))
    with pytest.raises(ValueError, match="delayed scaling"):
        f8.cache_weight_casts(delayed)


def test_a_meta_model_has_no_cast_to_cache(config: Config) -> None:
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(64, 64))
    f8.convert_to_float8_training(empty, config=config("rowwise"))
    with pytest.raises(ValueError, match="tensors with values"):
        f8.cache_weight_casts(empty)
    assert empty[0]._weight_cast is None


@pytest.fixture
def layer(options: dict[str, Any], device: str) -> f8.Float8Linear:
    return f8.Float8Linear(64, 32, device=device, dtype=torch.bfloat16, recipe="rowwise", **options)


@pytest.mark.parametrize(
    ("at", "count", "words"), ((0, -1, "kept copy of a weight"), (2, 8, "it needs 64"))
)
def test_copies_that_are_short_are_refused(
    at: int, count: int, words: str, layer: f8.Float8Linear, device: str
) -> None:
    weight = layer.weight.detach()
    state = torch.zeros(_ops.WEIGHT_STATE_BYTES, dtype=torch.uint8, device=device)
    copies = [*_ops.quantize(weight, layer._config, _ops.WEIGHT, True), state]
    copies[at] = copies[at][:count]
    with pytest.raises(ValueError, match=words):
        _ops.cast_weight(weight, *copies, weight, layer._config)


def test_copies_of_another_shape_are_refused(layer: f8.Float8Linear, device: str) -> None:
    weight, bias = layer.weight.detach(), layer.bias.detach()
    q, qt = _ops.quantize(weight, layer._config, _ops.WEIGHT, True)
    x = torch.randn(8, 64, device=device, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="shape or recipe"):
        _ops.linear_forward(x, None, None, weight, q[:16], qt, bias, None, layer._config, 0, True)


@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize("fuse", (False, True))
def test_functional_call_leaves_the_copies_alone(
    fuse: bool,
    compiled: bool,
    mlp: Callable[..., nn.Module],
    xs: list[torch.Tensor],
    config: Config,
) -> None:
    """A forward with other weights has its own results, and changes no gradient of a forward before it."""
    cached, *plain = (f8.convert_to_float8_training(mlp(), config=config()) for _ in range(3))
    plain[0].load_state_dict(cached.state_dict())
    for each in (cached, *plain):
        assert not fuse or f8.fuse(each)[0].fused
    f8.cache_weight_casts(cached)
    others = {name: p.detach().clone().requires_grad_() for name, p in plain[1].named_parameters()}

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(cached, others, (x,))

    own, other = (
        torch.compile(each, backend="aot_eager", disable=not compiled) for each in (cached, call)
    )
    (own(xs[0]).square().sum() + other(xs[0]).square().sum()).backward()
    actual = [*_gradients(cached), *(p.grad for p in others.values())]
    assert same(actual, [*micro_batches(plain[0], xs[:1]), *micro_batches(plain[1], xs[:1])])
    with Calls() as calls:
        cached(xs[1])
    assert given(calls) == 2
