"""torch.compile: one graph, a dynamic M, the same bits as eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import float8.torch as f8
from float8 import recipes
from float8.torch import _ops


def step(model: Any, parameters: list[Any], x: torch.Tensor, dy: torch.Tensor) -> list[Any]:
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    return [y, *torch.autograd.grad(y, (leaf, *parameters), dy)]


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"))
def test_dynamic_m(recipe: str, device: str, mlp: Any, config: Any) -> None:
    torch._dynamo.reset()
    model = f8.convert_to_float8_training(mlp(), config=config(recipe))
    parameters = list(model.parameters())
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for m in (32, 48, 640, 1000, 8):
        x = torch.randn(m, 64, dtype=torch.bfloat16, device=device)
        dy = torch.randn(m, 64, dtype=torch.bfloat16, device=device)
        eager = step(model, parameters, x, dy)
        assert reference.same(eager, step(compiled, parameters, x, dy))
    assert counter.frame_count <= 2


def test_no_rows(device: str, mlp: Any, config: Any) -> None:
    torch._dynamo.reset()
    model = f8.convert_to_float8_training(mlp(), config=config("rowwise"))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for m in (16, 0, 24):
        x = torch.randn(m, 64, dtype=torch.bfloat16, device=device)
        dy = torch.randn(m, 64, dtype=torch.bfloat16, device=device)
        parameters = list(model.parameters())
        assert reference.same(step(model, parameters, x, dy), step(compiled, parameters, x, dy))


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one row": lambda wide: wide[0, 0, 0, :64],
    "columns": lambda wide: wide[..., 64:],
    "transposed": lambda wide: wide[..., :64].transpose(0, 1),
}


@pytest.mark.parametrize("view", VIEWS)
def test_ranks_and_strides(view: str, device: str, mlp: Any, config: Any) -> None:
    torch._dynamo.reset()
    model = f8.convert_to_float8_training(mlp(), config=config("rowwise"))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = VIEWS[view](torch.randn(3, 4, 2, 128, dtype=torch.bfloat16, device=device))
    parameters = list(model.parameters())
    dy = torch.randn_like(x)
    assert reference.same(step(model, parameters, x, dy), step(compiled, parameters, x, dy))


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_without_gradients(mode: Any, device: str, mlp: Any, config: Any) -> None:
    torch._dynamo.reset()
    model = f8.convert_to_float8_training(mlp(), config=config("rowwise"))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(16, 64, dtype=torch.bfloat16, device=device)
    with mode():
        assert torch.equal(compiled(x), model(x))


def test_inductor(device: str, mlp: Any, config: Any) -> None:
    torch._dynamo.reset()
    model = f8.convert_to_float8_training(mlp(), config=config())
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(3, 8, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    y = compiled(x)
    y.sum().backward()
    # Inductor's GELU rounds otherwise, so that a few elements are cast to a neighbour.
    assert reference.sqnr(y, model(x)) > 25 and x.grad is not None
    with torch.no_grad():
        assert reference.sqnr(compiled(x), y) > 25


def test_autocast_with_float32_weights(device: str, mlp: Any, config: Any) -> None:
    torch._dynamo.reset()
    model = f8.convert_to_float8_training(mlp(torch.float32), config=config("rowwise"))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(16, 64, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y, expected = compiled(x), model(x)
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)
    y.float().sum().backward()


# PyTorch's own checks of schema and fake kernels.
OPCHECKS = ("test_schema", "test_faketensor")
CHECKED = pytest.mark.parametrize("recipe", ("tensorwise", "rowwise", "rowwise_with_gw_hp"))


@CHECKED
@pytest.mark.parametrize("transposed", (True, False))
@pytest.mark.parametrize("operand", (_ops.INPUT, _ops.WEIGHT))
def test_opcheck_of_casts(
    operand: int, transposed: bool, recipe: str, device: str, options: Any
) -> None:
    layer = f8.Float8Linear(64, 32, dtype=torch.bfloat16, device=device, recipe=recipe, **options)
    x = torch.randn(3, 7, 64, dtype=torch.bfloat16, device=device)
    tensor = x if operand == _ops.INPUT else layer.weight.detach()
    arguments = (tensor, layer._config, operand, transposed)
    torch.library.opcheck(_ops.quantize, arguments, test_utils=OPCHECKS)


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise", "blockwise"))
@pytest.mark.parametrize("rows", (0, 7, 600))
def test_an_input_is_cast_again(rows: int, recipe: str, device: str, options: Any) -> None:
    layer = f8.Float8Linear(
        64, 32, dtype=torch.bfloat16, device=device, recipe=recipe, recompute=True, **options
    )
    x = torch.randn(rows, 64, dtype=torch.bfloat16, device=device)
    _, left = _ops.quantize(x, layer._config, _ops.INPUT, True)
    arguments = (x, left, layer._config)
    torch.library.opcheck(_ops.quantize_again, arguments, test_utils=OPCHECKS)
    if rows > 0:
        with pytest.raises((RuntimeError, ValueError), match="what quantize left of x has 3 bytes"):
            _ops.quantize_again(x, left.new_empty(3), layer._config)
    with pytest.raises((RuntimeError, ValueError), match="linears that recompute"):
        _ops.quantize_again(x, left, layer._config & ~recipes.RECOMPUTE)


@CHECKED
@pytest.mark.parametrize("weight_is_cast", (False, True))
@pytest.mark.parametrize("x_is_cast", (False, True))
def test_opcheck_of_linears(
    x_is_cast: bool, weight_is_cast: bool, recipe: str, device: str, options: Any
) -> None:
    """Tracing is not checked of forward: `saved` has bytes that nobody writes, for a smaller M."""
    layer = f8.Float8Linear(64, 32, dtype=torch.bfloat16, device=device, recipe=recipe, **options)
    x = torch.randn(3, 7, 64, dtype=torch.bfloat16, device=device)
    weight, config, none = layer.weight.detach(), layer._config, (None, None)
    x_q, x_qt = _ops.quantize(x, config, _ops.INPUT, True) if x_is_cast else none
    w_q, w_qt = _ops.quantize(weight, config, _ops.WEIGHT, True) if weight_is_cast else none
    arguments = (x, x_q, x_qt, weight, w_q, w_qt, layer.bias.detach(), None, config, 0, True)
    torch.library.opcheck(_ops.linear_forward, arguments, test_utils=OPCHECKS)
    y, saved = _ops.linear_forward(*arguments)
    dy = torch.randn_like(y)
    for wanted in (7, 3, 1, 2):  # what a backward has to compute
        torch.library.opcheck(
            _ops.linear_backward,
            (dy, saved, x, x_qt, weight, w_qt, None, config, 0, wanted),
            test_utils=(*OPCHECKS, "test_aot_dispatch_dynamic"),
        )


@pytest.mark.parametrize(
    ("sizes", "given", "expected"),
    (
        ([(2048, 4096), (64, 64)], None, False),
        ([(2048, 4112), (64, 64)], None, None),
        ([(2048, 4096), (64, 64)], True, True),
        ([(2048, 4112), (64, 64)], False, False),
    ),
)
def test_graphs_of_models_without_large_weights_keep_copies(
    sizes: list[tuple[int, int]], given: bool | None, expected: bool | None
) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(*each) for each in sizes))
    options = f8.LinearConfig("rowwise", emulate=True, recompute=given)
    for _ in range(2):  # also where it is converted already
        f8.convert_to_float8_training(model, config=options)
        assert [each.recompute for each in model] == [expected] * 2
    alone = f8.Float8Linear(64, 64, recipe="rowwise", emulate=True)
    assert alone.recompute is None
