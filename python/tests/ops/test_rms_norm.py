"""float8.torch.functional.rms_norm: PyTorch's formulas in few launches, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from float8.torch import rms_norm as module
from float8.torch.functional import rms_norm

TYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
    (torch.float32, torch.float32),
]
ROUNDINGS: list[dict[str, Any]] = [
    {"rounding": "once"},
    {"rounding": "once", "weight_offset": 1.0},
    {"rounding": "normalized"},
]
UNITS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-22}


def operands(
    device: str, dtype: torch.dtype, of_weight: torch.dtype, *shape: int
) -> tuple[Tensor, Tensor]:
    x = torch.randn(shape, device=device).to(dtype)
    return x, torch.randn(shape[-1], device=device).to(of_weight)


def step(call: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> list[Tensor]:
    """Returns y, dx and dweight."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = call(x, weight)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    y.backward(dy.to(y.device, y.dtype))
    assert x.grad is not None and weight.grad is not None
    return [y.detach(), x.grad, weight.grad]


def expect_step(device: str, x: Tensor, weight: Tensor, **options: Any) -> None:
    """Expects what PyTorch's operations give in float64, within the roundings."""
    own = step(lambda x, w: rms_norm(x, w, 1e-5, emulate=device == "cpu", **options), x, weight)
    offset = options.get("weight_offset", 0.0)
    exact = step(
        lambda x, w: module.by_operations(x, w, 1e-5, offset, "once"), x.double(), weight.double()
    )
    operations = step(
        lambda x, w: module.by_operations(x, w, 1e-5, offset, options["rounding"]), x, weight
    )
    unit = UNITS[x.dtype]
    for found, expected, like in zip(own, exact, operations, strict=True):
        assert found.dtype == like.dtype and found.shape == like.shape
        error = (found.double() - expected).abs()
        most = 4 * unit * (expected.abs() + expected.abs().mean())
        assert (error <= most).all(), (error / most).max()
    # The forward has PyTorch's roundings, but where rstd is another one by its last bit.
    assert x.dtype == torch.float32 or (own[0] != operations[0]).float().mean() < 0.02


@pytest.mark.parametrize("options", ROUNDINGS, ids=str)
@pytest.mark.parametrize(("dtype", "of_weight"), TYPES, ids=str)
def test_has_the_formula(
    device: str,
    dtype: torch.dtype,
    of_weight: torch.dtype,
    options: dict[str, Any],
    rms_norm_calls: list[int],
) -> None:
    for shape in ((37, 8), (3, 5, 200), (2, 7, 4, 128), (1, 1024), (9, 4096)):
        expect_step(device, *operands(device, dtype, of_weight, *shape), **options)
    assert len(rms_norm_calls) == 5


@pytest.mark.parametrize("options", ROUNDINGS, ids=str)
def test_is_exact_where_sums_are(device: str, options: dict[str, Any]) -> None:
    x = torch.randint(0, 2, (33, 256), device=device).bfloat16() * 2 - 1
    weight = torch.randint(-4, 5, (256,), device=device).bfloat16()
    offset = options.get("weight_offset", 0.0)
    y = rms_norm(x, weight, 3.0, emulate=device == "cpu", **options)
    assert torch.equal(y, (x.float() / 2 * (weight.float() + offset)).bfloat16())


def test_rounding_is_that_of_torch(device: str) -> None:
    x, weight = operands(device, torch.bfloat16, torch.bfloat16, 64, 512)
    own = rms_norm(x, weight, 1e-5, emulate=device == "cpu")
    expected = torch.nn.functional.rms_norm(x, (512,), weight, 1e-5)
    assert (own != expected).float().mean() < 0.001


def test_strides(device: str, rms_norm_calls: list[int]) -> None:
    """Rows that lie apart are read as they are, and heads of both orders; others are copied."""
    whole, weight = operands(device, torch.bfloat16, torch.bfloat16, 2, 7, 6, 64)
    _, long = operands(device, torch.bfloat16, torch.bfloat16, 56)
    views = {
        "part of rows": (whole[..., :56], long),
        "some heads": (whole[:, :, 1:4], weight),
        "heads first": (whole.transpose(1, 2), weight),
        "some heads first": (whole[:, :, 1:4].transpose(1, 2), weight),
        "columns": (whole.transpose(-1, -2).contiguous().transpose(-1, -2), weight),
        "shifted": (whole.flatten()[3:-61].view(-1, 64), weight),
    }
    for name, (x, w) in views.items():
        own = step(lambda x, w: rms_norm(x, w, 1e-5, emulate=device == "cpu"), x, w)
        like = step(lambda x, w: rms_norm(x, w, 1e-5, emulate=device == "cpu"), x.contiguous(), w)
        assert torch.equal(own[0], like[0]) and torch.equal(own[1], like[1]), name
        torch.testing.assert_close(own[2], like[2], rtol=2**-7, atol=2**-7)
        if name == "heads first":
            assert own[0].stride() == x.stride() and own[1].stride() == x.stride()
    assert len(rms_norm_calls) == 2 * len(views)


def test_gradients_of_any_stride(device: str) -> None:
    x, weight = operands(device, torch.bfloat16, torch.bfloat16, 2, 3, 5, 64)
    x = x.transpose(1, 2).requires_grad_()
    y = rms_norm(x, weight, 1e-5, emulate=device == "cpu")
    dy = torch.randn(y.shape, device=device).bfloat16()
    gradients = [
        torch.autograd.grad(y, x, each, retain_graph=True)[0]
        for each in (dy, dy.transpose(1, 2).contiguous().transpose(1, 2), dy.mT.contiguous().mT)
    ]
    assert all(torch.equal(each, gradients[0]) for each in gradients)
    (expanded,) = torch.autograd.grad(y, x, torch.ones((), device=device).bfloat16().expand_as(y))
    assert expanded.shape == x.shape


@pytest.mark.parametrize("frozen", ["x", "weight", "both"])
def test_what_needs_no_gradient_has_none(device: str, frozen: str) -> None:
    x, weight = operands(device, torch.bfloat16, torch.bfloat16, 5, 64)
    x.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "x")
    y = rms_norm(x, weight, 1e-5, emulate=device == "cpu")
    assert y.requires_grad == (frozen != "both")
    if frozen == "both":
        return
    y.sum().backward()
    assert (x.grad is None) == (frozen == "x") and (weight.grad is None) == (frozen == "weight")


def test_the_same_bits_every_time(device: str) -> None:
    x, weight = operands(device, torch.bfloat16, torch.bfloat16, 1500, 64)
    first, *others = (
        step(lambda x, w: rms_norm(x, w, 1e-5, emulate=device == "cpu"), x, weight)
        for _ in range(3)
    )
    assert all(torch.equal(a, b) for each in others for a, b in zip(first, each, strict=True))


def test_checkpointing(device: str) -> None:
    x, weight = operands(device, torch.bfloat16, torch.bfloat16, 5, 64)

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, 1e-5, emulate=device == "cpu")

    def again(x: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = checkpoint(call, x, weight, use_reentrant=False)
        return y

    assert all(map(torch.equal, step(call, x, weight), step(again, x, weight)))


def test_results_can_be_changed_in_place(device: str) -> None:
    for shape in ((5, 64), (2, 3, 5, 64)):
        x, weight = operands(device, torch.bfloat16, torch.bfloat16, *shape)
        x = (x.transpose(1, 2) if x.dim() == 4 else x).requires_grad_()
        y = rms_norm(x, weight, 1e-5, emulate=device == "cpu")
        y *= 2
        y.sum().backward()
        assert x.grad is not None


def test_there_is_no_gradient_of_a_gradient(device: str) -> None:
    x, weight = operands(device, torch.float32, torch.float32, 5, 64)
    x.requires_grad_()
    y = rms_norm(x, weight, 1e-5, emulate=device == "cpu")
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        dx.sum().backward()


def test_what_the_kernel_does_not_know_goes_to_operations(
    device: str, rms_norm_calls: list[int]
) -> None:
    def expect(x: Tensor, weight: Tensor) -> None:
        for options in ROUNDINGS:
            own = rms_norm(x, weight, 1e-5, emulate=device == "cpu", **options)
            offset = options.get("weight_offset", 0.0)
            by_operations = module.by_operations(x, weight, 1e-5, offset, options["rounding"])
            assert torch.equal(own, by_operations) and own.dtype == by_operations.dtype

    x, weight = operands(device, torch.bfloat16, torch.bfloat16, 5, 64)
    expect(x[:, :60], weight[:60])
    expect(x, weight.half())
    expect(x.float(), weight)
    expect(x.double(), weight.double())
    expect(x[:0], weight)
    expect(x, torch.randn(128, device=device).bfloat16()[::2])
    expect(x, torch.randn(65, device=device).bfloat16()[1:])
    expect(*operands(device, torch.bfloat16, torch.bfloat16, 1, 32776))
    assert not rms_norm_calls


def test_a_compiled_graph_has_operations(device: str, rms_norm_calls: list[int]) -> None:
    x, weight = operands(device, torch.bfloat16, torch.bfloat16, 5, 64)
    call = torch.compile(rms_norm, backend="aot_eager", fullgraph=True)
    own = call(x, weight, 1e-5, emulate=device == "cpu")
    assert (
        torch.equal(own, module.by_operations(x, weight, 1e-5, 0.0, "once")) and not rms_norm_calls
    )


def test_says_what_it_refuses(device: str) -> None:
    x, weight = operands(device, torch.bfloat16, torch.bfloat16, 5, 64)
    with pytest.raises(ValueError, match="rounding is 'twice'; it is one of once, normalized"):
        rms_norm(x, weight, 1e-5, rounding="twice")
    with pytest.raises(ValueError, match=r"weight_offset is 1\.0"):
        rms_norm(x, weight, 1e-5, rounding="normalized", weight_offset=1.0)
    config = 16 if device == "cpu" else 0
    forward, backward = torch.ops.float8.rms_norm, torch.ops.float8.rms_norm_backward
    y, rstd = forward(x, weight, 1e-5, 0.0, 0, 0, True, config)
    for words, call in {
        "not a vector of x's last dimension": lambda: forward(
            x, weight[1:], 1e-5, 0.0, 0, 0, True, config
        ),
        "eps is -1": lambda: forward(x, weight, -1.0, 0.0, 0, 0, True, config),
        "rounding is 2": lambda: forward(x, weight, 1e-5, 0.0, 2, 0, True, config),
        "out_dtype is 2": lambda: forward(x, weight, 1e-5, 0.0, 0, 2, True, config),
        "gradient is not of x's shape": lambda: backward(
            y[1:], x, weight, rstd, 0.0, 0, True, True, config
        ),
        "rstd is not what": lambda: backward(
            y, x, weight, rstd[1:].clone(), 0.0, 0, True, True, config
        ),
    }.items():
        with pytest.raises((ValueError, RuntimeError), match=words):
            call()


def test_opcheck(device: str) -> None:
    config = 16 if device == "cpu" else 0
    for x, weight in (
        operands(device, torch.bfloat16, torch.float32, 5, 64),
        operands(device, torch.bfloat16, torch.float32, 2, 3, 5, 64),
    ):
        x = x.transpose(1, 2) if x.dim() == 4 else x
        for save in (True, False):
            arguments = (x, weight, 1e-5, 0.0, 1, 1, save, config)
            torch.library.opcheck(torch.ops.float8.rms_norm.default, arguments)
        y, rstd = torch.ops.float8.rms_norm(x, weight, 1e-5, 0.0, 1, 1, True, config)
        for wanted in ((True, True), (True, False), (False, True)):
            arguments = (y, x, weight, rstd, 0.0, 1, *wanted, config)
            torch.library.opcheck(torch.ops.float8.rms_norm_backward.default, arguments)


@pytest.mark.parametrize("emulate", [True, False])
def test_names_an_argument_that_cannot_be(emulate: bool) -> None:
    x, weight = torch.randn(3, 64), torch.randn(64)
    for error, name, args in (
        (TypeError, "weight", (x, None, 1e-5)),
        (TypeError, "x of rms_norm", ([1.0], weight, 1e-5)),
        (TypeError, "x of rms_norm", (x.int(), weight, 1e-5)),
        (ValueError, "weight", (x, weight[None], 1e-5)),
        (ValueError, "weight", (x, weight[:1], 1e-5)),
        (ValueError, "weight", (x[0, 0], weight, 1e-5)),
        (ValueError, "eps", (x, weight, None)),
        (ValueError, "eps", (x, weight, -1.0)),
        (ValueError, "eps", (x, weight, float("inf"))),
    ):
        with pytest.raises(error, match=name):
            rms_norm(*args, emulate=emulate)  # type: ignore[arg-type]
