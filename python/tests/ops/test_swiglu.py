"""The cast of silu(gate) up, whose product is never in memory."""

from __future__ import annotations

import os

import pytest
import torch
from reference import same
from swiglu import swiglu

import float8.torch as f8
from float8.torch import _ops, functional

DEVICE = os.environ.get("FLOAT8_TEST_DEVICE", "cpu")
EMULATE = DEVICE == "cpu"
RECIPES = ("tensorwise", "rowwise", "blockwise")


def config_of(recipe: str) -> int:
    return functional.pack(recipe, EMULATE, False, False)


def operands(
    rows: int, cols: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    gate, up = (4 * torch.randn(rows, cols) for _ in range(2))
    return gate.to(DEVICE, dtype), up.to(DEVICE, dtype)


def elements(copies: tuple[torch.Tensor, ...], rows: int, cols: int) -> list[torch.Tensor]:
    """Returns the elements of q and qt, whose rows lie whole 128s apart."""
    found = []
    for copy, (height, width) in zip(copies, ((rows, cols), (cols, rows)), strict=False):
        pitch = (width + 127) // 128 * 128
        found.append(copy[: height * pitch].view(height, pitch)[:, :width])
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 16), (130, 272), (256, 512)])
def test_is_close_to_the_cast_of_the_product(
    shape: tuple[int, int], dtype: torch.dtype, recipe: str
) -> None:
    """One rounding of the product to dtype apart, an element becomes at most the next one in fp8."""
    gate, up = operands(*shape, dtype)
    product = (torch.nn.functional.silu(gate.double()) * up.double()).to(dtype)
    config = config_of(recipe)
    got = _ops.quantize_swiglu(gate, up, config, True)
    expected = _ops.quantize(product, config, _ops.INPUT, True)
    for one, other in zip(elements(got, *shape), elements(expected, *shape), strict=True):
        assert (one == other).float().mean().item() > 0.99


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("backward", [True, False])
def test_compiles(backward: bool, recipe: str) -> None:
    gate, up = operands(64, 128, torch.bfloat16)
    config = config_of(recipe)

    def cast(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, qt = _ops.quantize_swiglu(gate, up, config, backward)
        return q, qt

    compiled = torch.compile(cast, backend="aot_eager", fullgraph=True)(gate, up)
    eager = cast(gate, up)
    assert [each.shape for each in compiled] == [each.shape for each in eager]
    parts = 2 if backward else 1
    assert same(elements(compiled[:parts], 64, 128), elements(eager[:parts], 64, 128))


@pytest.mark.parametrize("recipe", RECIPES)
def test_serves_a_linear(recipe: str) -> None:
    gate, up = operands(96, 64, torch.bfloat16)
    weight = torch.randn(32, 64, device=DEVICE).bfloat16()
    config = config_of(recipe)
    q, _ = _ops.quantize_swiglu(gate, up, config, False)
    y, _ = _ops.linear_forward(
        gate, q, None, weight, None, None, None, None, config, 0, False, None, None
    )
    product = torch.nn.functional.silu(gate.float()) * up.float()
    expected = product @ weight.float().T
    assert torch.nn.functional.cosine_similarity(y.float(), expected, -1).min() > 0.99


def test_delayed_scales_are_those_of_a_linear() -> None:
    """Under delayed scaling: the first step finds its scale, a later one takes it and records."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False)).to(DEVICE, torch.bfloat16)
    f8.convert_to_float8_training(
        model, config=f8.LinearConfig("delayed", emulate=EMULATE), module_filter_fn=lambda *_: True
    )
    layer = model[0]
    gate, up = operands(96, 64, torch.bfloat16)
    product = (torch.nn.functional.silu(gate.double()) * up.double()).bfloat16()
    for _ in range(2):
        model(product).float().sum().backward()
        f8.sync_float8_amax_and_scale_history(model)
    scales, layout = layer.scales_on(layer.weight.device), layer._layout
    got = _ops.quantize_swiglu(gate, up, layer._config, True, scales, layout, True)
    expected = _ops.quantize(product, layer._config, _ops.INPUT, True, scales, layout, True)
    for one, other in zip(elements(got, 96, 64), elements(expected, 96, 64), strict=True):
        assert (one == other).float().mean().item() > 0.99


@pytest.mark.parametrize("recipe", RECIPES)
def test_has_the_bits_of_casts_of_its_gradients(recipe: str) -> None:
    gate, up = operands(130, 272, torch.bfloat16)
    grad, _ = operands(130, 272, torch.bfloat16, seed=1)
    wanted = gate.clone().requires_grad_(), up.clone().requires_grad_()
    swiglu(*wanted).backward(grad)
    config = config_of(recipe)
    got = _ops.quantize_swiglu_backward(grad, gate, up, config, [], 0)
    for copies, leaf in zip((got[:2], got[2:]), wanted, strict=True):
        assert leaf.grad is not None
        expected = _ops.quantize(leaf.grad, config, _ops.GRAD_OUTPUT, True)
        assert same(elements(copies, 130, 272), elements(expected, 130, 272))


def test_refuses_gradients_in_high_precision() -> None:
    gate, up = operands(32, 64, torch.bfloat16)
    config = config_of("rowwise_with_gw_hp")
    with pytest.raises(ValueError, match="grad_input and grad_weight read fp8"):
        _ops.quantize_swiglu_backward(gate, gate, up, config, [], 0)


@pytest.mark.parametrize(("rows", "dtype"), ((16, torch.bfloat16), (32, torch.float16)), ids=str)
def test_refuses_an_up_unlike_the_gate(rows: int, dtype: torch.dtype) -> None:
    gate, up = operands(32, 64, torch.bfloat16)
    with pytest.raises(ValueError, match="one shape, one type"):
        _ops.quantize_swiglu(gate, up[:rows].to(dtype), config_of("blockwise"), True)
