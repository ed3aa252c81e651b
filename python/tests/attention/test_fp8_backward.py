"""The recipe "fp8" of attention, whose backward multiplies in fp8 too: its accuracy, masks and packed sequences,
torch.compile, checkpointing, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import same, sqnr
from test_attention import (
    check_floors,
    checkpointed,
    compiled_anew,
    exact,
    exact_window,
    of_kind,
    operands,
    step,
)
from torch import Tensor

import float8.torch as f8
from float8.torch import attention

# dB of O, dQ, dK and dV.
FLOORS = {"normal": (25, 23, 23, 24), "outlier": (21, 18, 18, 20), "bias": (25, 22, 22, 24)}


@pytest.fixture
def mode(options: dict[str, Any]) -> dict[str, Any]:
    return {"recipe": "fp8", **options}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("data", FLOORS)
def test_accuracy(device: str, mode: dict[str, Any], data: str, causal: bool) -> None:
    tensors = of_kind(data, device)
    own = step(f8.scaled_dot_product_attention, tensors, is_causal=causal, **mode)
    check_floors(own, exact(tensors, causal), FLOORS[data])


@pytest.mark.parametrize("size", [64, 256])
@pytest.mark.parametrize("window", [None, 70])
def test_other_heads(device: str, mode: dict[str, Any], size: int, window: int | None) -> None:
    tensors = [x[:1] for x in operands(device, 300, heads=2, of_keys=1, size=size)]
    own = step(f8.scaled_dot_product_attention, tensors, is_causal=True, window=window, **mode)
    expected = exact(tensors, True) if window is None else exact_window(tensors, window)
    check_floors(own, expected, FLOORS["normal"])


@pytest.mark.parametrize(
    ("tokens", "keys", "causal"),
    [(1, 77, False), (130, 300, False), (130, 300, True), (300, 130, True)],
)
def test_other_numbers_of_queries_and_keys(
    device: str, mode: dict[str, Any], tokens: int, keys: int, causal: bool
) -> None:
    tensors = operands(device, tokens, keys)
    own = step(f8.scaled_dot_product_attention, tensors, is_causal=causal, **mode)
    for actual, expected in zip(own, exact(tensors, causal), strict=True):
        assert expected.norm() < 1e-9 or sqnr(actual, expected) > 20


def test_a_single_key_has_no_gradient_but_that_of_its_value(
    device: str, mode: dict[str, Any]
) -> None:
    tensors = operands(device, 1)
    _, dq, dk, dv = step(f8.scaled_dot_product_attention, tensors, is_causal=True, **mode)
    assert sqnr(dv, exact(tensors, True)[3]) > 25
    assert max(float(x.norm()) for x in (dq, dk)) < 0.1 * float(dv.norm())


@pytest.mark.parametrize("window", [70, 128, 1000])
def test_window(device: str, mode: dict[str, Any], window: int) -> None:
    tensors = [x[:1] for x in operands(device, 300, heads=2, of_keys=1)]
    own = step(f8.scaled_dot_product_attention, tensors, is_causal=True, window=window, **mode)
    check_floors(own, exact_window(tensors, window), FLOORS["normal"])


@pytest.mark.parametrize("window", [None, 70])
def test_packed_sequences_have_the_bits_that_they_have_alone(
    device: str, mode: dict[str, Any], window: int | None
) -> None:
    lengths = (100, 0, 1, 260, 40)
    q, k, v, grad = (x[0].transpose(0, 1) for x in operands(device, sum(lengths)))
    offsets = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    options = {"is_causal": True, "window": window, **mode}

    def packed(*x: Tensor, **more: Any) -> Tensor:
        return f8.varlen_attention(*x, offsets, offsets, 260, 260, **more)

    whole = step(packed, [q, k, v, grad], **options)
    for first, last in zip(offsets.tolist(), offsets.tolist()[1:], strict=False):
        if first == last:
            continue
        own = [x[first:last].transpose(0, 1)[None] for x in (q, k, v, grad)]
        alone = step(f8.scaled_dot_product_attention, own, **options)
        parts = [x[first:last].transpose(0, 1)[None] for x in whole]
        assert same(parts, alone)
    f8.check_sequences()


def test_keys_without_queries_have_no_gradient(device: str, mode: dict[str, Any]) -> None:
    q, k, v, _ = (x.requires_grad_() for x in operands(device))
    o = f8.scaled_dot_product_attention(q[:, :, :0], k, v, enable_gqa=True, **mode)
    dk, dv = torch.autograd.grad(o.sum(), (k, v))
    assert not dk.any() and not dv.any()


def test_has_the_same_bits_twice(device: str, mode: dict[str, Any]) -> None:
    tensors = operands(device)
    first, second = (
        step(f8.scaled_dot_product_attention, tensors, is_causal=True, **mode) for _ in range(2)
    )
    assert same(first, second)


def test_forward_has_the_bits_of_fp8_forward(device: str, options: dict[str, Any]) -> None:
    q, k, v, _ = operands(device)
    first, second = (
        f8.scaled_dot_product_attention(q, k, v, enable_gqa=True, recipe=recipe, **options)
        for recipe in ("fp8", "fp8_forward")
    )
    assert torch.equal(first, second)


def test_gradients_of_any_strides(device: str, mode: dict[str, Any]) -> None:
    *leaves, grad = operands(device)
    expected = step(f8.scaled_dot_product_attention, [*leaves, grad], is_causal=True, **mode)
    for other in (
        grad.transpose(1, 2).contiguous().transpose(1, 2),
        grad.transpose(2, 3).contiguous().transpose(2, 3),
    ):
        own = step(f8.scaled_dot_product_attention, [*leaves, other], is_causal=True, **mode)
        assert same(own, expected)
    ones = torch.ones_like(grad)
    q, k, v = (x.detach().requires_grad_() for x in leaves)
    f8.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True, **mode
    ).sum().backward()
    expected = step(f8.scaled_dot_product_attention, [*leaves, ones], is_causal=True, **mode)
    assert same([x.grad for x in (q, k, v)], expected[1:])


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_scales_follow_the_gradient(device: str, mode: dict[str, Any], factor: float) -> None:
    tensors = operands(device, 300)
    tensors[3] *= factor
    tensors[3][:, :, :140] = 0  # as of tokens without a loss
    own = step(f8.scaled_dot_product_attention, tensors, is_causal=True, **mode)
    check_floors(own, exact(tensors, True), FLOORS["normal"])


def test_a_gradient_that_is_not_finite_shows(device: str, mode: dict[str, Any]) -> None:
    tensors = operands(device)
    clean = step(f8.scaled_dot_product_attention, tensors, is_causal=True, **mode)
    for value in (torch.inf, torch.nan):
        tensors[3][0, 0, 150, 3] = value
        _, dq, dk, dv = step(f8.scaled_dot_product_attention, tensors, is_causal=True, **mode)
        assert not dq[0, 0].isfinite().all()
        assert not dk[0, 0].isfinite().all()
        assert not dv[0, 0].isfinite().all()
        assert torch.equal(dq[1], clean[1][1]) and torch.equal(dq[0, 1:], clean[1][0, 1:])
        assert torch.equal(dk[0, 1], clean[2][0, 1]) and torch.equal(dv[1], clean[3][1])


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 100)])
def test_a_compiled_model_has_the_same_bits(
    device: str, mode: dict[str, Any], causal: bool, window: int | None
) -> None:
    options = {**mode, "window": window}
    compiled = compiled_anew("inductor" if window else "aot_eager")
    for tokens in (200, 130):
        tensors = operands(device, tokens)
        expected = step(f8.scaled_dot_product_attention, tensors, is_causal=causal, **options)
        assert same(step(compiled, tensors, is_causal=causal, **options), expected)


def test_checkpointing_has_the_same_bits(device: str, mode: dict[str, Any]) -> None:
    tensors = operands(device)

    expected = step(f8.scaled_dot_product_attention, tensors, is_causal=True, **mode)
    assert same(step(checkpointed, tensors, is_causal=True, **mode), expected)


@pytest.mark.parametrize("recipe", range(3), ids=attention.RECIPES)
def test_ops_have_honest_schemas_and_fakes(
    device: str, options: dict[str, Any], recipe: int
) -> None:
    q, k, v, grad = operands(device)
    choice = (0.1, True, 64, 16 if options["emulate"] else 0)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        attention.attention_forward, (q, k, v, *choice), {"recipe": recipe}, test_utils=tests
    )
    kept = attention.attention_forward(q, k, v, *choice, recipe=recipe)
    of_bf16 = (q, k, v) if recipe == attention.BF16 else ()
    torch.library.opcheck(
        attention.attention_backward,
        (grad, *kept, 2, 200, *choice, 0, recipe, *of_bf16),
        test_utils=tests,
    )


def test_keeps_four_bytes_more_of_each_query(device: str, mode: dict[str, Any]) -> None:
    kept: list[int] = []

    def bytes_of(recipe: str) -> int:
        kept.clear()
        q, k, v, _ = (x.requires_grad_() for x in operands(device, 256))
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: kept.append(x.nbytes) or x,  # type: ignore[func-returns-value]
            lambda x: x,
        ):
            f8.scaled_dot_product_attention(q, k, v, enable_gqa=True, **{**mode, "recipe": recipe})
        return sum(kept)

    assert bytes_of("fp8") == bytes_of("fp8_forward") + 4 * 2 * 4 * 256


def test_second_derivatives_are_refused(device: str, mode: dict[str, Any]) -> None:
    q, k, v, _ = (x.requires_grad_() for x in operands(device))
    o = f8.scaled_dot_product_attention(q, k, v, enable_gqa=True, **mode)
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        dq.sum().backward()
