"""What a training loop does with a Float8Linear."""

from __future__ import annotations

import concurrent.futures
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from calls import Calls
from copies import COPIES
from torch import nn
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

import float8
import float8.torch as f8

Options = dict[str, Any]


def make(device: str, options: Options, **fields: Any) -> f8.Float8Linear:
    fields = {"dtype": torch.bfloat16, **fields}
    return f8.Float8Linear(64, 32, device=device, **fields, **options)


def grads(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.detach().requires_grad_()
    y = layer(leaf)
    return [y, *torch.autograd.grad(y, (leaf, *layer.parameters()), dy)]


@pytest.mark.parametrize("shape", ((64,), (5, 64), (2, 3, 64), (2, 1, 3, 64), (1, 1, 64)))
def test_rank(shape: tuple[int, ...], device: str, options: Options) -> None:
    layer = make(device, options)
    x = torch.randn(shape, dtype=torch.bfloat16, device=device)
    dy = torch.randn(*shape[:-1], 32, dtype=torch.bfloat16, device=device)
    y, dx, dw, db = grads(layer, x, dy)
    flat = grads(layer, x.view(-1, 64), dy.view(-1, 32))
    assert y.shape == dy.shape and dx.shape == x.shape
    assert reference.same([y.view(-1, 32), dx.view(-1, 64), dw, db], flat)


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"))
@pytest.mark.parametrize("shape", ((0, 64), (2, 0, 64)))
def test_no_rows(shape: tuple[int, ...], recipe: str, device: str, options: Options) -> None:
    layer = make(device, options, recipe=recipe)
    x = torch.empty(shape, dtype=torch.bfloat16, device=device)
    y, dx, dw, db = grads(layer, x, x.new_empty(*shape[:-1], 32))
    assert y.shape == (*shape[:-1], 32) and dx.shape == shape
    assert not dw.any() and not db.any()


@pytest.mark.parametrize("kind", ("transposed", "columns", "odd_columns", "offset", "permuted"))
def test_non_contiguous(kind: str, device: str, options: Options) -> None:
    layer = make(device, options)
    x = {
        "transposed": lambda: torch.randn(64, 24, device=device).bfloat16().t(),
        "columns": lambda: torch.randn(24, 128, device=device).bfloat16()[:, 64:],
        "odd_columns": lambda: torch.randn(24, 67, device=device).bfloat16()[:, 3:],
        "offset": lambda: torch.randn(24 * 64 + 1, device=device).bfloat16()[1:].view(24, 64),
        "permuted": lambda: torch.randn(6, 4, 64, device=device).bfloat16().transpose(0, 1),
    }[kind]()
    dy = torch.randn(32, x.numel() // 64, device=device).bfloat16().t().reshape(*x.shape[:-1], 32)
    assert reference.same(grads(layer, x, dy), grads(layer, x.clone(), dy.contiguous()))


def test_parameters_at_any_place_of_a_file(device: str, options: Options) -> None:
    """safetensors maps a file to memory, in which a tensor begins at any multiple of 8 bytes."""
    layer = make(device, options)
    moved = copy.deepcopy(layer)
    for name, parameter in layer.named_parameters():
        memory = torch.zeros(parameter.numel() + 4, dtype=torch.bfloat16, device=device)
        memory[4:] = parameter.detach().flatten()
        setattr(moved, name, nn.Parameter(memory[4:].view(parameter.shape)))
    x, dy = (torch.randn(8, n, dtype=torch.bfloat16, device=device) for n in (64, 32))
    assert reference.same(grads(moved, x, dy), grads(layer, x, dy))


def test_expanded_gradient(device: str, options: Options) -> None:
    layer = make(device, options)
    x = torch.randn(16, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    layer(x).sum().backward()  # its dy has strides of 0
    expected = grads(layer, x, torch.ones(16, 32, dtype=torch.bfloat16, device=device))
    assert x.grad is not None and torch.equal(x.grad, expected[1])


def test_float32_weights_have_float32_gradients(device: str, options: Options) -> None:
    layer = make(device, options, dtype=torch.float32)
    twin = copy.deepcopy(layer).to(torch.bfloat16)
    with torch.no_grad():
        for own, other in zip(layer.parameters(), twin.parameters(), strict=True):
            own.copy_(other)
    x = torch.randn(16, 64, dtype=torch.bfloat16, device=device)
    dy = torch.randn(16, 32, dtype=torch.bfloat16, device=device)
    y, dx, dw, db = grads(layer, x, dy)
    other_y, other_dx, other_dw, other_db = grads(twin, x, dy)
    assert dw.dtype == db.dtype == torch.float32 and y.dtype == dx.dtype == torch.bfloat16
    assert reference.same([y, dx, db.bfloat16()], [other_y, other_dx, other_db])
    assert reference.agree(dw.bfloat16(), other_dw)
    assert not torch.equal(dw, other_dw.float())


def test_autocast(device: str, options: Options) -> None:
    layer = make(device, options, dtype=torch.float32)
    x = torch.randn(16, 64, device=device, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = layer(x)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
    assert torch.equal(y, layer(x.bfloat16()))
    assert layer(x).dtype == torch.float32


@pytest.mark.parametrize("recompute", (False, True))
@pytest.mark.parametrize("recipe", ("rowwise_with_gw_hp", "bf16"))
@pytest.mark.parametrize(
    ("of_weight", "of_x"), ((torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16))
)
def test_autocast_to_the_other_type_of_16_bits(
    of_weight: torch.dtype,
    of_x: torch.dtype,
    recipe: str,
    recompute: bool,
    device: str,
    options: Options,
) -> None:
    """The gradients are those of float32 weights with these values, rounded to the weight's type."""
    layer, twin = (
        make(device, options, recipe=recipe, recompute=recompute, dtype=dtype)
        for dtype in (of_weight, torch.float32)
    )
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(16, 64, dtype=of_weight, device=device)
    dy = torch.randn(16, 32, dtype=of_x, device=device)
    for each in (layer, twin):
        with torch.autocast(device, dtype=of_x):
            y = each(x)
        assert y.dtype == of_x
        y.backward(dy)
    for own, other in zip(layer.parameters(), twin.parameters(), strict=True):
        assert own.grad is not None and other.grad is not None
        assert own.grad.dtype == of_weight and other.grad.dtype == torch.float32
        assert torch.equal(own.grad, other.grad.to(of_weight))
    layer(x[:0].to(of_x)).sum().backward()
    f8.prepare(layer, 16, dtype=of_x)


def test_float16_autocast_and_a_grad_scaler(device: str, options: Options) -> None:
    layer = make(device, options, dtype=torch.float32)
    x = torch.randn(16, 64, device=device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler(device, init_scale=256.0)
    before = layer.weight.detach().clone()
    with torch.autocast(device, dtype=torch.float16):
        y = layer(x)
    assert y.dtype == torch.float16
    scaler.scale(y.float().sum()).backward()
    scaler.step(optimizer)
    expected = make(device, options, dtype=torch.float32)
    expected.load_state_dict({"weight": before, "bias": torch.zeros_like(layer.bias)})
    expected(x.half()).float().sum().backward()
    assert expected.weight.grad is not None
    assert torch.allclose(before - layer.weight, expected.weight.grad, rtol=0.05, atol=0.1)


def test_frozen(device: str, options: Options) -> None:
    layer = make(device, options)
    x = torch.randn(16, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    _, dx, dw, _ = grads(layer, x, torch.ones(16, 32, dtype=torch.bfloat16, device=device))
    layer.requires_grad_(False)
    layer(x).sum().backward()
    assert x.grad is not None and reference.agree(x.grad, dx) and layer.weight.grad is None
    layer.weight.requires_grad_(True)
    layer(x.detach()).sum().backward()
    assert layer.weight.grad is not None and reference.agree(layer.weight.grad, dw)


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_no_gradient(mode: Callable[[], Any], device: str, options: Options) -> None:
    layer = make(device, options)
    x = torch.randn(16, 64, dtype=torch.bfloat16, device=device)
    with mode():
        y = layer(x)
    assert torch.equal(y, layer(x)) and not y.requires_grad


def test_gradient_accumulation(device: str, options: Options) -> None:
    layer = make(device, options)
    batches = torch.randn(2, 16, 64, dtype=torch.bfloat16, device=device)
    dy = torch.ones(16, 32, dtype=torch.bfloat16, device=device)
    first, second = (grads(layer, x, dy)[2] for x in batches)
    for x in batches:
        layer(x).backward(dy)
    assert layer.weight.grad is not None and torch.equal(layer.weight.grad, first + second)


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise_with_gw_hp"))
@pytest.mark.parametrize("reentrant", (False, True))
def test_activation_checkpoint(
    recipe: str, reentrant: bool, device: str, mlp: Any, config: Any
) -> None:
    model = f8.convert_to_float8_training(mlp(), config=config(recipe))
    x = torch.randn(16, 64, dtype=torch.bfloat16, device=device)
    dy = torch.randn(16, 64, dtype=torch.bfloat16, device=device)

    def checkpointed(leaf: torch.Tensor) -> Any:
        return checkpoint.checkpoint(model, leaf, use_reentrant=reentrant)

    expected = grads(model, x, dy)
    leaf = x.clone().requires_grad_()
    y = checkpointed(leaf)
    y.backward(dy)
    assert leaf.grad is not None
    assert reference.same(
        expected, [y, leaf.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
    )


@pytest.mark.parametrize(("save", "runs"), ((True, 2), (False, 4)))
def test_selective_checkpoint(save: bool, runs: int, device: str, mlp: Any, config: Any) -> None:
    model = f8.convert_to_float8_training(mlp(), config=config())
    x = torch.randn(16, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    op = torch.ops.float8.linear_forward.default

    def contexts() -> Any:
        return checkpoint.create_selective_checkpoint_contexts([op] if save else [])

    with Calls() as calls:
        y = checkpoint.checkpoint(model, x, use_reentrant=False, context_fn=contexts)
        y.sum().backward()
    assert calls.count(op) == runs and x.grad is not None
    expected = grads(model, x, torch.ones_like(y))
    assert torch.equal(x.grad, expected[1])


@pytest.mark.parametrize("save", (False, True))
def test_compiled_checkpoint(save: bool, device: str, mlp: Any, config: Any) -> None:
    """Full and selective checkpoints under torch.compile, in one graph."""
    torch._dynamo.reset()
    model = f8.convert_to_float8_training(mlp(), config=config("rowwise"))
    op = torch.ops.float8.linear_forward.default

    def contexts() -> Any:
        return checkpoint.create_selective_checkpoint_contexts([op])

    extra = {"context_fn": contexts} if save else {}

    def run(x: torch.Tensor) -> Any:
        return checkpoint.checkpoint(model, x, use_reentrant=False, **extra)

    x = torch.randn(16, 64, dtype=torch.bfloat16, device=device)
    dy = torch.randn(16, 64, dtype=torch.bfloat16, device=device)
    expected = grads(model, x, dy)
    leaf = x.clone().requires_grad_()
    y = torch.compile(run, fullgraph=True, backend="aot_eager")(leaf)
    assert reference.same(expected, [y, *torch.autograd.grad(y, (leaf, *model.parameters()), dy)])


def test_state_dict_is_that_of_a_linear(device: str, options: Options) -> None:
    linear = nn.Linear(64, 32, dtype=torch.bfloat16, device=device)
    layer = make(device, options)
    assert list(layer.state_dict()) == list(linear.state_dict())
    layer.load_state_dict(linear.state_dict())
    assert torch.equal(layer.weight, linear.weight)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    linear.load_state_dict(torch.load(buffer, weights_only=True))


@pytest.mark.parametrize("how", COPIES)
def test_copies(how: str, device: str, options: Options) -> None:
    layer = make(device, options, recipe="rowwise", saturate=True)
    x = torch.randn(16, 64, dtype=torch.bfloat16, device=device)
    expected, other = layer(x), COPIES[how](layer)
    assert torch.equal(other(x), expected) and other.recipe == layer.recipe
    assert other.weight is not layer.weight


def test_meta(device: str, options: Options) -> None:
    with torch.device("meta"):
        layer = f8.Float8Linear(64, 32, dtype=torch.bfloat16, **options)
        y = layer(torch.empty(5, 64, dtype=torch.bfloat16))
    assert y.shape == (5, 32) and y.is_meta
    layer.to_empty(device=device)
    layer.reset_parameters()
    assert layer(torch.randn(5, 64, dtype=torch.bfloat16, device=device)).isfinite().all()


def test_training_step(device: str, mlp: Any, config: Any) -> None:
    model = f8.convert_to_float8_training(mlp(torch.float32), config=config("rowwise"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    x = torch.randn(32, 64, device=device)
    target = torch.randn(32, 64, device=device)
    losses = []
    for _ in range(20):
        loss = nn.functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_prepare(device: str, mlp: Any, config: Any) -> None:
    model = f8.convert_to_float8_training(mlp(torch.float32), config=config("rowwise"))
    with torch.autocast(device, dtype=torch.bfloat16):
        f8.prepare(model, 700)
    f8.prepare(model, 700, dtype=torch.float16)


@pytest.mark.parametrize(
    ("tokens", "options", "words"),
    ((0, {}, "tokens is 0"), (700, {"dtype": torch.float64}, "bfloat16")),
    ids=("no tokens", "float64"),
)
def test_prepare_refuses(tokens: int, options: Options, words: str, mlp: Any, config: Any) -> None:
    model = f8.convert_to_float8_training(mlp(torch.float32), config=config("rowwise"))
    with pytest.raises(ValueError, match=words):
        f8.prepare(model, tokens, **options)


def test_prepare_of_a_meta_model(mlp: Any, config: Any) -> None:
    model = f8.convert_to_float8_training(mlp(torch.float32), config=config("rowwise"))
    with pytest.raises(ValueError, match="layer '0' is on the meta device"):
        f8.prepare(model.to("meta"), 700)


def test_threads(device: str, options: Options) -> None:
    layers = [make(device, options, recipe=recipe) for recipe in ("tensorwise", "rowwise")] * 2
    x = torch.randn(96, 64, dtype=torch.bfloat16, device=device)
    dy = torch.randn(96, 32, dtype=torch.bfloat16, device=device)
    expected = [grads(layer, x, dy) for layer in layers]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for one, two in zip(
                pool.map(lambda layer: grads(layer, x, dy), layers), expected, strict=True
            ):
                assert reference.same(one, two)


def test_distributed_checkpoint(tmp_path: Any, device: str, mlp: Any, config: Any) -> None:
    from torch.distributed import checkpoint as dcp

    plain = mlp()
    expected = copy.deepcopy(plain.state_dict())
    dcp.save({"model": plain.state_dict()}, checkpoint_id=tmp_path / "plain", no_dist=True)
    model = f8.convert_to_float8_training(mlp(), config=config())
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "plain", no_dist=True)
    model.load_state_dict(state["model"])
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "converted", no_dist=True)
    other = mlp()
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "converted", no_dist=True)
    assert list(state["model"]) == list(expected)
    assert reference.same(list(state["model"].values()), list(expected.values()))


WRONG_X: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "float64": (torch.Tensor.double, "is neither .* float64; cast it"),
    "short rows": (lambda x: x[:, :48], r"has rows of 48 .*\[\d+, 64\]"),
    "no dimension": (lambda x: x[0, 0], "has no dimension"),
}


class TestErrors:
    """One exception that says what to do."""

    def test_sizes(self) -> None:
        with pytest.raises(ValueError, match=r"multiples of 16.*module_filter_fn"):
            f8.Float8Linear(60, 64)

    def test_cpu_without_emulate(self) -> None:
        layer = f8.Float8Linear(64, 64)
        with pytest.raises(ValueError, match="emulate=True"):
            layer(torch.randn(2, 64))

    @pytest.mark.parametrize("dtype", (torch.int32, torch.float64, torch.float8_e4m3fn), ids=str)
    def test_dtype(self, dtype: torch.dtype, device: str, options: Options) -> None:
        with pytest.raises(ValueError, match=r"x is .*bfloat16, float16 nor float32"):
            make(device, options)(torch.ones(2, 64, device=device).to(dtype))

    @pytest.mark.parametrize("dtype", (torch.int32, torch.float64, torch.float8_e4m3fn), ids=str)
    def test_dtype_of_the_weight(self, dtype: torch.dtype, device: str, options: Options) -> None:
        layer = make(device, options)
        layer.weight = nn.Parameter(layer.weight.to(dtype), requires_grad=False)
        with pytest.raises(ValueError, match=r"weight is .*bfloat16, float16 nor float32"):
            layer(torch.ones(2, 64, dtype=torch.bfloat16, device=device))

    def test_half_of_a_meta_model(self, device: str, options: Options) -> None:
        layer = make(device, options)
        layer.weight = nn.Parameter(layer.weight.to("meta"))
        with pytest.raises(ValueError, match="weight on meta"):
            layer(torch.ones(2, 64, dtype=torch.bfloat16, device=device))

    def test_no_dimension(self, device: str, options: Options) -> None:
        with pytest.raises(ValueError, match="at least one dimension"):
            make(device, options)(torch.ones((), dtype=torch.bfloat16, device=device))

    def test_row_length(self, device: str, options: Options) -> None:
        layer = make(device, options)
        with pytest.raises(ValueError, match=r"rows of 48 elements.*\[32, 64\]"):
            layer(torch.ones(2, 48, dtype=torch.bfloat16, device=device))

    @pytest.mark.parametrize("of", ("layer '0': ", ""), ids=("model", "function"))
    @pytest.mark.parametrize("wrong", WRONG_X)
    def test_the_layer_of_an_x_is_named(
        self, wrong: str, of: str, device: str, mlp: Any, config: Any
    ) -> None:
        model = f8.convert_to_float8_training(mlp(), config=config("rowwise"))
        make_x, words = WRONG_X[wrong]
        x = make_x(torch.ones(2, 64, dtype=torch.bfloat16, device=device))
        with pytest.raises(ValueError, match=f"^float8: {of}x {words}"):
            if of:
                model(x)
            else:
                f8.functional.linear(x, model[0].weight, emulate=device == "cpu")

    def test_the_layer_of_a_weight_is_named(self, device: str, mlp: Any, config: Any) -> None:
        model = f8.convert_to_float8_training(mlp(), config=config("rowwise")).double()
        with pytest.raises(ValueError, match=r"^float8: layer '0': the weight is .* float64"):
            model(torch.ones(2, 64, dtype=torch.bfloat16, device=device))

    @pytest.mark.parametrize(
        ("rows", "words"), ((16, r"bias .* 32 rows"), (None, "against the config"))
    )
    def test_bias(self, rows: int | None, words: str, device: str, options: Options) -> None:
        layer = make(device, options)
        bias = rows and nn.Parameter(torch.zeros(rows, dtype=torch.bfloat16, device=device))
        layer.bias = bias  # type: ignore[assignment]
        with pytest.raises(ValueError, match=words):
            layer(torch.ones(2, 64, dtype=torch.bfloat16, device=device))

    def test_recipe_name(self) -> None:
        with pytest.raises(ValueError, match="recipe"):
            f8.Float8Linear(64, 64, recipe="rowwisee")

    def test_recipe_that_no_kernel_has(self) -> None:
        block = float8.Cast(granularity=float8.Granularity.BLOCK_128X128)
        recipe = float8.Recipe(output=float8.Gemm(block, block))
        with pytest.raises(ValueError, match="output"):
            f8.Float8Linear(64, 64, recipe=recipe)

    def test_mixed_precision_in_a_gemm(self) -> None:
        high = float8.Cast(float8.Scaling.HIGH_PRECISION)
        with pytest.raises(ValueError, match="grad_input"):
            float8.Recipe(grad_input=float8.Gemm(high, float8.Cast()))


def test_parametrized_weight(device: str, options: Options) -> None:
    class Double(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    layer = make(device, options)
    x = torch.randn(16, 64, dtype=torch.bfloat16, device=device)
    expected = layer(2 * x) - layer.bias
    nn.utils.parametrize.register_parametrization(layer, "weight", Double())
    assert torch.allclose(layer(x) - layer.bias, expected, atol=0.05)


def test_nothing_wants_a_gradient(device: str, options: Options) -> None:
    layer = make(device, options).requires_grad_(False)
    op = torch.ops.float8.linear_forward.default
    saved = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is op:
                saved.append(result[1].numel())
            return result

    x = torch.randn(16, 64, dtype=torch.bfloat16, device=device)
    with Look():
        y = layer(x)
        layer(x.requires_grad_())
    assert not y.requires_grad and saved[0] == 0 < saved[1]
