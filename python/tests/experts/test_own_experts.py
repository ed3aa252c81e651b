"""float8.torch.Experts: the experts of a layer of one's own, also with delayed scaling."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import float8
import float8.torch as f8
from float8.torch import scale_home
from float8.torch.experts.modules import of_transformers
from float8.torch.scales import ScaleState

E, D, F, TOP = 4, 64, 48, 2
Config = Callable[..., f8.LinearConfig]


class Layer(nn.Module):
    """A linear, a router, and experts behind them."""

    def __init__(self, device: str, recipe: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        where: Any = {"device": device, "dtype": torch.bfloat16}
        self.linear = nn.Linear(D, D, **where)
        self.router = nn.Linear(D, E, bias=False, **where)
        self.experts = f8.Experts(E, D, F, recipe=recipe, emulate=device == "cpu", **where)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        scores, ids = self.router(x).softmax(-1).topk(TOP)
        y: Tensor = self.experts(x, ids, scores)
        return x + y


def layer(device: str, recipe: str, **more: Any) -> Layer:
    config = f8.LinearConfig(recipe, emulate=device == "cpu", **more)
    made = Layer(device, recipe)
    f8.convert_to_float8_training(
        made, config=config, experts=False, module_filter_fn=lambda _, name: name == "linear"
    )
    return made


def step(model: nn.Module, device: str, seed: int) -> Tensor:
    x = torch.randn(40, D, generator=torch.Generator().manual_seed(seed))
    y: Tensor = model(x.to(device, torch.bfloat16))
    y.float().square().mean().backward()
    f8.sync_float8_amax_and_scale_history(model)
    return y.detach()


def state_of(model: nn.Module) -> ScaleState:
    (state,) = scale_home.states_below(model)
    return state


def test_trains_with_delayed_scaling(device: str) -> None:
    """Its parts of the model's state end a step with the linears', and checkpoints have them."""
    model = layer(device, "delayed")
    state = state_of(model)
    assert state.linears == 3 and len(state.first) == 3
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = f8.AdamW(model.parameters(), lr=1e-2)
    for seed in range(3):
        step(model, device, seed)
        assert not state.first
        optimizer.step()
        optimizer.zero_grad()
    for name, p in model.named_parameters():
        changed = (p != before[name]).flatten(1).any(1) if p.dim() == 3 else (p != before[name])
        assert changed.all() if p.dim() == 3 else changed.any(), name
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = layer(device, "delayed")
    other.load_state_dict(torch.load(file))
    for seed in (3, 4):
        assert torch.equal(step(model, device, seed), step(other, device, seed))
    assert torch.equal(state_of(model).state, state_of(other).state)


def test_a_copy_has_a_state_of_its_own(device: str) -> None:
    model = layer(device, "delayed")
    step(model, device, 0)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.no_grad():
        expected = model(_x(device, 1))
    before = state_of(model).state.clone()
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(step(other, device, 1), expected)
        assert torch.equal(state_of(model).state, before)
        assert not torch.equal(state_of(other).state, before)


def _x(device: str, seed: int) -> Tensor:
    x = torch.randn(40, D, generator=torch.Generator().manual_seed(seed))
    return x.to(device, torch.bfloat16)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp", "blockwise"])
def test_is_functional_moe(recipe: str, device: str) -> None:
    experts = Layer(device, recipe).experts
    x = _x(device, 0).requires_grad_()
    ids = torch.randint(E, (40, TOP), device=device)
    scores = torch.rand(40, TOP, device=device)
    operands = (x, ids, scores)
    weights = [p.detach().clone().requires_grad_() for p in experts.parameters()]
    y = experts(*operands)
    options: Any = {"recipe": recipe, "emulate": device == "cpu"}
    expected = f8.functional.moe(*operands, *weights, **options)
    assert torch.equal(y, expected)
    y.sum().backward()
    expected.sum().backward()
    assert all(
        torch.equal(p.grad, w.grad)  # type: ignore[arg-type]
        for p, w in zip(experts.parameters(), weights, strict=True)
    )


def test_has_the_bits_of_converted_experts(device: str) -> None:
    """Those of transformers compute the same with delayed scaling."""
    model = layer(device, "delayed")
    step(model, device, 0)
    own = model.experts

    class Stand(nn.Module):
        has_gate, has_bias, is_transposed, act_fn = True, False, False, nn.SiLU()

        def _default_apply_gate(self) -> None: ...

        _apply_gate = _default_apply_gate

    stand: Any = Stand()
    stand.gate_up_proj, stand.down_proj = own.w13, own.w2
    names = {"w13": "gate_up_proj", "w2": "down_proj"}
    stand.expert_linears = [copy.copy(each) for each in own.expert_linears]
    for each in stand.expert_linears:
        each.name = names[each.name]
    x, ids = _x(device, 1), torch.randint(E, (40, TOP), device=device)
    scores = torch.rand(40, TOP, device=device)
    with torch.no_grad():
        expected = of_transformers(stand, x, ids, scores, own.experts_config)
        assert torch.equal(own(x, ids, scores), expected)


def test_conversions_give_it_other_recipes(device: str, config: Config) -> None:
    model = Layer(device, "tensorwise")
    expected = f8.Experts(E, D, F, recipe="rowwise", emulate=device == "cpu").to(device)
    expected.load_state_dict(model.experts.state_dict())
    expected.bfloat16()
    only: Any = {"experts": True, "module_filter_fn": lambda *_: False}
    f8.convert_to_float8_training(model, config=config("rowwise"), **only)
    ids = torch.randint(E, (40, TOP), device=device)
    operands = (_x(device, 0), ids, torch.rand(40, TOP, device=device))
    assert torch.equal(model.experts(*operands), expected(*operands))
    assert "recipe=rowwise" in repr(model.experts)
    casts = f8.cache_weight_casts(model)
    assert len(model.experts.weight_casts) == 2
    assert torch.equal(model.experts(*operands), expected(*operands))
    casts.remove()
    f8.convert_to_float8_training(model, config=config("delayed"), **only)
    assert state_of(model).linears == 2


def test_refuses_what_experts_cannot_be(device: str) -> None:
    for sizes in ((E, 40, F), (E, D, 8), (0, D, F), (1025, 16, 16)):
        with pytest.raises(ValueError, match=r"multiples of 16|experts; they are"):
            f8.Experts(*sizes)
    mixed = dataclasses.replace(
        float8.Recipe.named("rowwise"), output=float8.Recipe.named("bf16").output
    )
    with pytest.raises(ValueError, match="use one of"):
        f8.Experts(E, D, F, recipe=mixed)
    alone = f8.Experts(E, D, F, recipe="delayed", emulate=device == "cpu").to(device)
    ids = torch.randint(E, (40, TOP), device=device)
    with pytest.raises(ValueError, match=r"call float8\.torch\.attach_scales"):
        alone(_x(device, 0), ids, torch.rand(40, TOP, device=device))
    with pytest.raises(ValueError, match=r"x has 40 tokens, topk_ids is \[39, 2\]"):
        Layer(device, "rowwise").experts(_x(device, 0), ids[1:], torch.rand(40, TOP, device=device))


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_runs_in_compiled_graphs(recipe: str, device: str) -> None:
    model = layer(device, recipe)
    if recipe == "delayed":
        step(model, device, 0)
        model.zero_grad()
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for seed in (1, 2):
        found, expected = compiled(_x(device, seed)), model(_x(device, seed))
        assert torch.equal(found, expected)
        for y, own in ((found, other), (expected, model)):
            y.float().square().mean().backward()
            f8.sync_float8_amax_and_scale_history(own) if recipe == "delayed" else None
    for p, own in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, own.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", ["rowwise_with_gw_hp", "bf16"])
def test_names_experts_whose_x_is_in_float32(device: str, recipe: str) -> None:
    """GEMMs in high precision read x in 16 bits. Weights may be in float32, as autocast leaves them."""
    layer = nn.Sequential(f8.Experts(E, D, F, emulate=device == "cpu", device=device))
    f8.convert_to_float8_training(
        layer, config=f8.LinearConfig(recipe, emulate=device == "cpu"), experts=True
    )
    x = torch.randn(16, D, device=device)
    ids = torch.arange(16 * TOP, device=device).view(16, TOP) % E
    scores = torch.rand(16, TOP, device=device)
    with pytest.raises(ValueError, match=f"x of the experts '0', recipe {recipe}, is in torch.fl"):
        layer[0](x, ids, scores)
    with pytest.raises(ValueError, match=f"x of experts, recipe {recipe}, is in torch.float32"):
        weights = (each.detach() for each in layer[0].parameters())
        f8.functional.moe(x, ids, scores, *weights, recipe=recipe, emulate=device == "cpu")
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        layer[0](x, ids, scores).square().sum().backward()
    assert all(weight.grad.abs().sum() > 0 for weight in layer.parameters())
