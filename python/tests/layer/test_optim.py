"""float8.torch.AdamW: torch's fused AdamW, and the casts of weights whose copies are kept behind it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import Calls
from reference import same
from torch import nn

import float8.torch as f8
from float8.torch import _ops

Config = Callable[..., f8.LinearConfig]
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"weight_decay": 0.0},
    {"amsgrad": True, "maximize": True},
    {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3, "amsgrad": True},
)


class Block(nn.Sequential):
    """Linears of several shapes between parameters that are no linear's."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        super().__init__(
            nn.Linear(64, 144), nn.LayerNorm(144), nn.GELU(), nn.Linear(144, 64, bias=False)
        )
        self.to(device, dtype)


@pytest.fixture
def make(device: str, config: Config) -> Callable[..., Any]:
    def make(
        recipe: str = "tensorwise", dtype: torch.dtype = torch.float32, cached: bool = True
    ) -> Any:
        torch.manual_seed(1)
        model = f8.convert_to_float8_training(Block(dtype, device), config=config(recipe))
        if cached:
            f8.cache_weight_casts(model)
        return model

    return make


def backward(model: nn.Module, step: int) -> torch.Tensor:
    model.zero_grad()
    generator = torch.Generator().manual_seed(step)
    weight = next(model.parameters())
    x = torch.randn(32, 64, generator=generator).to(weight.device, torch.bfloat16)
    with torch.autocast(weight.device.type, torch.bfloat16):
        y = model(x)
    y.float().square().mean().backward()
    return y.detach()  # type: ignore[no-any-return]


def layers_of(model: nn.Module) -> list[f8.Float8Linear]:
    return [each for each in model.modules() if isinstance(each, f8.Float8Linear)]


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def expect_near(own: torch.Tensor, other: torch.Tensor) -> None:
    """Compares with torch's, of whose kernels that of a GPU rounds as float8's does."""
    if own.is_cuda:
        assert torch.equal(own, other)
    else:
        exact = own.dtype == torch.float32
        torch.testing.assert_close(
            own, other, rtol=1e-5 if exact else 0.02, atol=1e-7 if exact else 1e-4
        )


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_trains_as_torch(make: Any, dtype: torch.dtype, options: dict[str, Any]) -> None:
    model = make("rowwise", dtype)
    second = copy.deepcopy(Block(dtype, str(next(model.parameters()).device)))
    second.load_state_dict(model.state_dict())
    optimizer = f8.AdamW(model.parameters(), lr=1e-2, **options)
    reference = torch.optim.AdamW(second.parameters(), lr=1e-2, fused=True, **options)
    for step in range(3):
        before = values(model)
        backward(model, step)
        for own, other in zip(model.parameters(), second.parameters(), strict=True):
            assert own.grad is not None
            other.grad = own.grad.clone()
        with Calls() as calls:
            optimizer.step()
        assert calls.count(_ops.adamw) == 1
        reference.step()
        assert not any(map(torch.equal, before, values(model)))
        for own, other in zip(model.parameters(), second.parameters(), strict=True):
            expect_near(own, other)
            states, of_torch = optimizer.state[own], reference.state[other]
            assert list(states) == list(of_torch)
            for name, state in states.items():
                assert (state.dtype, state.device) == (of_torch[name].dtype, of_torch[name].device)
                expect_near(state, of_torch[name])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_end_with_the_copies_of_the_weights(make: Any, recipe: str, dtype: Any) -> None:
    model = make(recipe, dtype)
    optimizer = f8.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        backward(model, step)
        with Calls() as calls:
            optimizer.step()
        assert calls.count(_ops.adamw) == 1
        assert calls.count(_ops.quantize_shard_list) == (
            recipe != "blockwise"
        )  # which is cast in it
        assert calls.count(_ops.quantize_amax, _ops.quantize_amax_list) == 0  # no pass for them
        uncached = copy.deepcopy(model)
        expected = backward(uncached, step + 5)
        assert torch.equal(backward(model, step + 5), expected)
        for layer in layers_of(model):
            assert not layer._weight_cast.differs(layer)  # type: ignore[union-attr]


@pytest.mark.parametrize("recipe", ("rowwise", "blockwise"))
def test_forwards_behind_a_step_do_not_cast(make: Any, recipe: str) -> None:
    model = make(recipe)
    optimizer = f8.AdamW(model.parameters(), lr=1e-2)
    backward(model, 0)
    optimizer.step()
    f8.check_copies(False)  # which would find the garbage
    expected = backward(copy.deepcopy(model), 1)
    for layer in layers_of(model):
        for each in layer._weight_cast.copies:  # type: ignore[union-attr]
            each.bitwise_xor_(0x11)
    assert not torch.equal(backward(model, 1), expected)


def test_changes_behind_a_step_are_seen(make: Any) -> None:
    model = make("rowwise")
    optimizer = f8.AdamW(model.parameters(), lr=1e-2)
    backward(model, 0)
    optimizer.step()
    model[0].weight.data.mul_(1.5)
    assert torch.equal(backward(model, 1), backward(copy.deepcopy(model), 1))


@pytest.mark.parametrize("recipe", ("tensorwise", "blockwise"))
def test_a_resumed_run_is_an_unbroken_one(make: Any, recipe: str) -> None:
    unbroken = make(recipe)
    optimizer = f8.AdamW(unbroken.parameters(), lr=1e-2, amsgrad=True)
    for step in range(2):
        backward(unbroken, step)
        optimizer.step()
    saved = io.BytesIO()
    torch.save([unbroken.state_dict(), optimizer.state_dict()], saved)
    saved.seek(0)
    resumed = make(recipe)
    again = f8.AdamW(resumed.parameters(), lr=1.0)
    of_model, of_optimizer = torch.load(saved)
    resumed.load_state_dict(of_model)
    again.load_state_dict(of_optimizer)
    for model, own in ((unbroken, optimizer), (resumed, again)):
        for step in range(2, 4):
            backward(model, step)
            own.step()
    assert same(values(unbroken), values(resumed))
    assert same(
        [s for each in optimizer.state.values() for s in each.values()],
        [s for each in again.state.values() for s in each.values()],
    )


@pytest.mark.parametrize("options", ({"fused": True}, {"foreach": True}, {"foreach": False}, {}))
def test_state_dicts_are_those_of_torch(make: Any, options: dict[str, Any]) -> None:
    model = make()
    of_torch = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    own = f8.AdamW(model.parameters())
    for step, (optimizer, other) in enumerate(((of_torch, own), (own, of_torch))):
        backward(model, step)
        optimizer.step()
        other.load_state_dict(optimizer.state_dict())
        before, after = optimizer.state_dict(), other.state_dict()
        assert list(before["state"]) == list(after["state"])
        for i, states in before["state"].items():
            assert list(states) == list(after["state"][i])
            for name, state in states.items():
                assert torch.equal(state.cpu(), after["state"][i][name].cpu())
        assert [set(g) for g in before["param_groups"]] == [set(g) for g in after["param_groups"]]
        backward(model, step)
        other.step()  # goes on from there


def test_a_grad_scaler_stays_on_the_device(make: Any) -> None:
    model, second = make("rowwise"), make("rowwise")
    optimizers = [f8.AdamW(m.parameters(), lr=torch.tensor(1e-2)) for m in (model, second)]
    device = next(model.parameters()).device
    for step, bad in enumerate((0.0, 1.0, 0.0)):
        for each in (model, second):
            backward(each, step)
        for p in model.parameters():
            p.grad.mul_(1024.0)
        optimizers[0].grad_scale = torch.tensor(1024.0, device=device)
        optimizers[0].found_inf = torch.tensor(bad, device=device)
        before = values(model)
        optimizers[0].step()
        if bad:
            assert same(before, values(model))
        else:
            optimizers[1].step()
        assert same(values(model), values(second))
        for layer in layers_of(model):
            assert not layer._weight_cast.differs(layer)  # type: ignore[union-attr]
    assert all(state["step"].item() == 2 for state in optimizers[0].state.values())


def test_without_kept_copies_it_is_torchs(make: Any) -> None:
    model = make(cached=False)
    second = copy.deepcopy(model)
    own = f8.AdamW(model.parameters(), lr=1e-2)
    of_torch = torch.optim.AdamW(second.parameters(), lr=1e-2, fused=True)
    for step in range(2):
        for each in (model, second):
            backward(each, step)
        with Calls() as calls:
            own.step()
            of_torch.step()
        assert calls.count(_ops.adamw) == 0
        assert same(values(model), values(second))


def test_groups_and_layers_that_stay_with_torch(make: Any) -> None:
    """Frozen weights, unlike gradients, an lr of each group, and casts that are removed again."""
    model = make("rowwise")
    groups = [{"params": [model[0].weight], "lr": 0.0}, {"params": list(model[3].parameters())}]
    optimizer = f8.AdamW(groups, lr=1e-2, weight_decay=0.0)
    before = values(model)
    backward(model, 0)
    if model[3].weight.is_cpu:  # torch's kernel of GPUs refuses them
        model[3].weight.grad = model[3].weight.grad.T.contiguous().T
    optimizer.step()
    changed = [not torch.equal(*pair) for pair in zip(before, values(model), strict=True)]
    assert changed == [False] * 4 + [True]
    assert torch.equal(backward(model, 1), backward(copy.deepcopy(model), 1))


def test_bad_input(make: Any) -> None:
    model = make()
    with pytest.raises(ValueError, match=r"float8: .*torch\.optim\.AdamW has the other"):
        f8.AdamW(model.parameters(), fused=False)
    with pytest.raises(ValueError, match="learning rate"):
        f8.AdamW(model.parameters(), lr=-1.0)
    optimizer = f8.AdamW(model.parameters())
    backward(model, 0)
    optimizer.step()
    before = values(model)
    backward(model, 1)
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match=r"float8_adamw_args\.lr is nan"):
        optimizer.step()
    assert torch.equal(before[0], model[0].weight)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ("rowwise", "blockwise"))
def test_steps_in_a_graph(make: Any, recipe: str) -> None:
    models = [make(recipe) for _ in range(2)]
    captured, eager = (f8.AdamW(m.parameters(), lr=1e-2, capturable=True) for m in models)
    for model, optimizer in zip(models, (captured, eager), strict=True):
        backward(model, 0)
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for _ in range(3):
        for own, second in zip(*(model.parameters() for model in models), strict=True):
            own.grad.normal_()
            second.grad.copy_(own.grad)
        graph.replay()
        eager.step()
        assert same(*map(values, models))
        for layer in layers_of(models[0]):
            assert not layer._weight_cast.differs(layer)  # type: ignore[union-attr]


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_the_bits_of_torchs_fused_kernel(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Over many steps and magnitudes, with and without the maxima of rows and columns."""
    for row, column in ((0, 0), (1, 1)):
        own = torch.randn(384, 512, device="cuda").mul_(0.02).to(dtype).requires_grad_()
        second = own.detach().clone().requires_grad_()
        reference = torch.optim.AdamW([second], lr=1e-3, fused=True, **options)
        group = reference.param_groups[0]
        states = [torch.zeros_like(own) for _ in range(3)]
        step = torch.zeros((), device="cuda")
        for number in range(1, 200):
            size = 10.0 ** (number % 7 - 4)
            second.grad = torch.randn_like(own).mul_(size)
            step += 1
            amax = torch.zeros(512 * column + 1, dtype=torch.int32, device="cuda")
            rows = torch.zeros(384 * row, dtype=torch.int32, device="cuda")
            none = torch.empty(0, dtype=torch.uint8, device="cuda")
            numbers = [group["lr"], *group["betas"], group["eps"], group["weight_decay"]]
            most = [states[2]] if group["amsgrad"] else []
            _ops.adamw(
                *([own.detach()], [second.grad], [states[0]], [states[1]], most, [step]),
                *(
                    [amax],
                    [rows],
                    [none],
                    [none, none],
                    [1],
                    [_ops.ELEMENT_TYPES[dtype]],
                    [0],
                    [],
                    0,
                    numbers,
                ),
                group["maximize"],
            )
            reference.step()
            of_torch = reference.state[second]
            assert torch.equal(states[0], of_torch["exp_avg"]), number
            assert torch.equal(states[1], of_torch["exp_avg_sq"]), number
            assert torch.equal(own, second), number
