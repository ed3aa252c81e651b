"""The casts of activations, of gated ones and of their gradients, none of which is ever in memory."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as functional_of_torch
from activations import NAMES, activated, glu
from reference import same

import float8.torch as f8
from float8.torch import _ops, functional

DEVICE = os.environ.get("FLOAT8_TEST_DEVICE", "cpu")
EMULATE = DEVICE == "cpu"
RECIPES = ("tensorwise", "rowwise", "blockwise")
SILU = _ops.ACTIVATIONS["silu"]
EXACT = {
    "silu": functional_of_torch.silu,
    "gelu": functional_of_torch.gelu,
    "gelu_tanh": lambda x: functional_of_torch.gelu(x, approximate="tanh"),
    "relu2": lambda x: functional_of_torch.relu(x).square(),
}


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
    got = _ops.quantize_activation(gate, up, SILU, config, True)
    expected = _ops.quantize(product, config, _ops.INPUT, True)
    for one, other in zip(elements(got, *shape), elements(expected, *shape), strict=True):
        assert (one == other).float().mean().item() > 0.99


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("backward", [True, False])
def test_compiles(backward: bool, recipe: str) -> None:
    gate, up = operands(64, 128, torch.bfloat16)
    config = config_of(recipe)

    def cast(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, qt = _ops.quantize_activation(gate, up, SILU, config, backward)
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
    q, _ = _ops.quantize_activation(gate, up, SILU, config, False)
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
    got = _ops.quantize_activation(gate, up, SILU, layer._config, True, scales, layout, True)
    expected = _ops.quantize(product, layer._config, _ops.INPUT, True, scales, layout, True)
    for one, other in zip(elements(got, 96, 64), elements(expected, 96, 64), strict=True):
        assert (one == other).float().mean().item() > 0.99


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernels_round_what_is_close_to_fp64(name: str, dtype: torch.dtype) -> None:
    """Of 16 bits the value and the slope are those of fp64, rounded, but for some that are the next."""
    x = torch.linspace(-5, 8, 4097).to(dtype)  # below, fp64 of torch cancels
    wide = x.double().requires_grad_()
    value = EXACT[name](wide)
    (slope,) = torch.autograd.grad(value.sum(), wide)
    leaf = x.clone().requires_grad_()
    got = activated(leaf, name)
    got.backward(torch.ones_like(got))
    assert leaf.grad is not None
    for one, other in ((got, value), (leaf.grad, slope)):
        rounded = other.to(dtype)
        assert (one == rounded).float().mean().item() > 0.98
        ulp = torch.finfo(dtype).eps * other.abs().clamp(min=torch.finfo(dtype).tiny)
        assert ((one.double() - other).abs() <= 1.01 * ulp).float().mean().item() > 0.999


def test_relu_squared_has_the_bits_of_torch() -> None:
    x, grad = operands(64, 64, torch.bfloat16)
    config, relu2 = config_of("rowwise"), _ops.ACTIVATIONS["relu2"]
    leaf = x.clone().requires_grad_()
    h = EXACT["relu2"](leaf)
    h.backward(grad)
    assert leaf.grad is not None
    for got, of_torch, operand in (
        (_ops.quantize_activation(x, None, relu2, config, True), h.detach(), _ops.INPUT),
        (
            _ops.quantize_activation_backward(grad, x, relu2, config, False),
            leaf.grad + 0.0,  # without the sign of zeros
            _ops.GRAD_OUTPUT,
        ),
    ):
        expected = _ops.quantize(of_torch, config, operand, True)
        values = [
            [copy.view(torch.float8_e4m3fn).float() for copy in elements(copies, 64, 64)]
            for copies in (got[:2], expected)
        ]
        assert all(map(torch.equal, *values))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", NAMES)
def test_has_the_bits_of_casts_of_a_gate_and_its_gradients(name: str, recipe: str) -> None:
    gate, up = operands(130, 272, torch.bfloat16)
    grad, _ = operands(130, 272, torch.bfloat16, seed=1)
    wanted = gate.clone().requires_grad_(), up.clone().requires_grad_()
    h = glu(*wanted, name)
    h.backward(grad)
    config = config_of(recipe)
    made = _ops.quantize_activation(gate, up, _ops.ACTIVATIONS[name], config, True)
    expected = _ops.quantize(h.detach(), config, _ops.INPUT, True)
    assert same(elements(made, 130, 272), elements(expected, 130, 272))
    got = _ops.quantize_glu_backward(grad, gate, up, _ops.ACTIVATIONS[name], config, True, [], 0)
    for copies, of_columns, leaf in zip((got[:2], got[2:4]), got[4].chunk(2), wanted, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(of_columns, leaf.grad.float().sum(0), rtol=1e-4, atol=1e-3)
        expected = _ops.quantize(leaf.grad, config, _ops.GRAD_OUTPUT, True)
        assert same(elements(copies, 130, 272), elements(expected, 130, 272))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 16), (130, 272)])
def test_has_the_bits_of_casts_of_an_activation_and_its_gradient(
    shape: tuple[int, int], name: str, recipe: str
) -> None:
    x, grad = operands(*shape, torch.bfloat16)
    leaf = x.clone().requires_grad_()
    h = activated(leaf, name)
    h.backward(grad)
    assert leaf.grad is not None
    config, activation = config_of(recipe), _ops.ACTIVATIONS[name]
    made = _ops.quantize_activation(x, None, activation, config, True)
    expected = _ops.quantize(h.detach(), config, _ops.INPUT, True)
    assert same(elements(made, *shape), elements(expected, *shape))
    expected = _ops.quantize(leaf.grad, config, _ops.GRAD_OUTPUT, True)
    for sums in (False, True):
        *copies, of_columns = _ops.quantize_activation_backward(grad, x, activation, config, sums)
        assert same(elements(tuple(copies), *shape), elements(expected, *shape))
        assert of_columns.shape == (shape[1] if sums else 0,)
    torch.testing.assert_close(of_columns, leaf.grad.float().sum(0), rtol=1e-4, atol=1e-3)


def test_takes_rows_apart_and_no_rows() -> None:
    config, gelu = config_of("rowwise"), _ops.ACTIVATIONS["gelu"]
    x, grad = (each[:, :64] for each in operands(48, 128, torch.bfloat16))
    for one, other in zip(
        _ops.quantize_activation_backward(grad, x, gelu, config, True),
        _ops.quantize_activation_backward(grad.clone(), x.clone(), gelu, config, True),
        strict=True,
    ):
        assert one.shape == other.shape
    none = x[:0]
    assert _ops.quantize_activation(none, None, gelu, config, True)[0].dtype == torch.uint8
    *_, sums = _ops.quantize_activation_backward(none, none, gelu, config, True)
    assert same([sums], [torch.zeros(64, device=DEVICE)])


def test_refuses_a_gate_and_up_unlike_the_gradient() -> None:
    config = config_of("blockwise")
    both, grad = operands(32, 512, torch.bfloat16)
    for own in (grad, grad[:16, :256], grad[:, :256].half()):
        with pytest.raises(ValueError, match="twice grad's columns"):
            _ops.quantize_merged_glu_backward(own, both, False, SILU, config, False)
    with pytest.raises(RuntimeError, match="cols 384; gate and up have whole 128 columns each"):
        _ops.quantize_merged_glu_backward(grad[:, :192], both[:, :384], True, SILU, config, False)
    q, qt, sums = _ops.quantize_merged_glu_backward(
        grad[:0, :256], both[:0], True, SILU, config, True
    )
    assert q.numel() == 0 and qt.dtype == torch.uint8
    assert same([sums], [torch.zeros(512, device=DEVICE)])


def test_refuses_gradients_in_high_precision() -> None:
    gate, up = operands(32, 64, torch.bfloat16)
    config = config_of("rowwise_with_gw_hp")
    with pytest.raises(ValueError, match="grad_input and grad_weight read fp8"):
        _ops.quantize_glu_backward(gate, gate, up, SILU, config, False, [], 0)


@pytest.mark.parametrize(("rows", "dtype"), ((16, torch.bfloat16), (32, torch.float16)), ids=str)
def test_refuses_an_up_unlike_the_gate(rows: int, dtype: torch.dtype) -> None:
    gate, up = operands(32, 64, torch.bfloat16)
    with pytest.raises(ValueError, match="one shape, one type"):
        _ops.quantize_activation(gate, up[:rows].to(dtype), SILU, config_of("blockwise"), True)


def test_refuses_other_activations_and_gradients_unlike_x() -> None:
    x, grad = operands(32, 64, torch.bfloat16)
    config = config_of("blockwise")
    for activation in (-1, 4):
        with pytest.raises(ValueError, match=r"activation is -?\d; it is 0 \(silu\), 1 \(gelu\)"):
            _ops.quantize_activation(x, None, activation, config, True)
    with pytest.raises(ValueError, match="one shape, one type"):
        _ops.quantize_activation_backward(grad.half(), x, SILU, config, False)
    with pytest.raises(ValueError, match="grad_input and grad_weight read fp8"):
        _ops.quantize_activation_backward(grad, x, SILU, config_of("rowwise_with_gw_hp"), False)


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise", "blockwise"))
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("backward", [True, False])
def test_casts_over_ranks_what_it_computes(backward: bool, gated: bool, recipe: str) -> None:
    """The words and the copies are those of the computed tensors, also where another rank has larger maxima."""
    rows, cols, config = 128, 64, config_of(recipe)
    gate, up = (each.requires_grad_() for each in operands(rows, cols, torch.bfloat16))
    grad = operands(rows, cols, torch.bfloat16, 3)[0]
    h = glu(gate, up) if gated else activated(gate, "silu")
    h.backward(grad)
    operand, computed = _ops.INPUT, [h.detach()]
    if backward:
        operand, computed = _ops.GRAD_OUTPUT, [gate.grad, up.grad] if gated else [gate.grad]
    x, up = gate.detach(), up.detach()
    given = (x, up if gated else None, grad if backward else None)

    def cast(larger: int) -> list[torch.Tensor]:
        left, *found = _ops.quantize_activation_amax(*given, SILU, config)
        words = [each + larger for each in found]
        return [left, *words, *_ops.quantize_activation_shard(*given, left, *words, SILU, config)]

    left, *words = cast(1 << 23)
    of_each = [each.view(len(computed), -1) for each in words[:2]]
    expected: list[torch.Tensor] = []
    for i, tensor in enumerate(computed):
        own = [each + (1 << 23) for each in _ops.quantize_amax(tensor, config, operand, rows)]
        assert same([each[i] for each in of_each], own)
        expected += _ops.quantize_shard(tensor, *own, config, operand, rows)
    for i in range(0, len(expected), 2):
        one, other = (
            elements(tuple(each[i : i + 2]), rows, cols) for each in (words[2:], expected)
        )
        assert same(one, other)
    torch._dynamo.reset()
    compiled = torch.compile(cast, backend="aot_eager", fullgraph=True)(1 << 23)
    assert [each.shape for each in compiled] == [each.shape for each in (left, *words)]
    with pytest.raises((RuntimeError, ValueError), match="maxima of a shard are not the"):
        more = torch.cat((words[0], words[0], words[0][:1], words[0].new_zeros(1)))
        _ops.quantize_activation_shard(*given, left, more, words[1], SILU, config)
    with pytest.raises((RuntimeError, ValueError), match="what quantize_activation_amax left has"):
        more = torch.cat((left, left.new_zeros(16)))
        _ops.quantize_activation_shard(*given, more, *words[:2], SILU, config)
