"""Windows of float8.torch.scaled_dot_product_attention: their accuracy in fp8 and in bf16, that backward is of the forward
that ran, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import same, sqnr
from test_attention import (
    D,
    assert_same_but_for_atomics,
    checkpointed,
    exact_window,
    operands,
    step,
)
from torch import Tensor

import float8.torch as f8
from float8.torch import attention


@pytest.mark.parametrize("tokens", [257, 640])
@pytest.mark.parametrize("window", [1, 100, 128, 129, 1000])
def test_window(device: str, options: dict[str, Any], tokens: int, window: int) -> None:
    tensors = [x[:1] for x in operands(device, tokens, heads=2, of_keys=1)]
    own = step(f8.scaled_dot_product_attention, tensors, is_causal=True, window=window, **options)
    for actual, expected in zip(own, exact_window(tensors, window), strict=True):
        # A query that has one key has no gradient but that of its value.
        assert expected.norm() < 1e-9 or sqnr(actual, expected) > 24


def test_a_window_of_one_key_is_its_value(device: str, options: dict[str, Any]) -> None:
    tensors = operands(device)
    o, dq, dk, _ = step(
        f8.scaled_dot_product_attention, tensors, is_causal=True, window=1, **options
    )
    assert sqnr(o, tensors[2].repeat_interleave(2, 1).double()) > 28
    assert max(float(x.norm()) for x in (dq, dk)) < 0.1 * float(o.norm())


def test_a_windows_backward_differentiates_the_forward_that_ran(
    device: str, options: dict[str, Any]
) -> None:
    tensors = operands(device, 300)
    tensors[1] += 20  # a mean that no softmax sees
    own = step(f8.scaled_dot_product_attention, tensors, is_causal=True, window=70, **options)
    mode = (D**-0.5, True, 70, 16 if options["emulate"] else 0)
    o, lse, saved = attention.attention_forward(*tensors[:3], *mode)
    read = attention.attention_dequantize(saved, o, 2, 300, *mode)
    q, k, v = (x.transpose(1, 2) for x in read)
    expected = exact_window([q, k, v, tensors[3]], 70)
    scores = q.double() @ k.double().repeat_interleave(2, 1).transpose(-1, -2) * D**-0.5
    scores = scores.masked_fill(~attention.window_mask(70, q, k), -torch.inf)
    assert (torch.logsumexp(scores, -1) - lse).abs().max() < 2e-3
    assert all(sqnr(a, e) > 30 for a, e in zip(own, expected, strict=True))


@pytest.mark.parametrize(
    ("tokens", "keys", "window"), [(200, 200, 200), (200, 300, 1000), (130, 60, 130)]
)
def test_a_window_of_all_keys_is_the_causal_mask(
    device: str, options: dict[str, Any], tokens: int, keys: int, window: int
) -> None:
    tensors = operands(device, tokens, keys)
    expected = step(f8.scaled_dot_product_attention, tensors, is_causal=True, **options)
    own = step(f8.scaled_dot_product_attention, tensors, is_causal=True, window=window, **options)
    assert same(own[:1], expected[:1])
    if device == "cpu":  # a GPU adds gradients atomically
        assert same(own, expected)


def test_a_kernel_whose_window_has_all_keys_is_the_causal_one(
    device: str, options: dict[str, Any]
) -> None:
    q, k, v, _ = operands(device, 300)
    config = 16 if options["emulate"] else 0
    causal, window = (
        attention.attention_forward(q, k, v, D**-0.5, True, w, config) for w in (0, 300)
    )
    assert same(list(causal), list(window))


def test_keys_behind_the_last_query_have_no_gradient(device: str, options: dict[str, Any]) -> None:
    tensors = operands(device, 130, 300)
    own = step(f8.scaled_dot_product_attention, tensors, is_causal=True, window=50, **options)
    expected = exact_window(tensors, 50)
    assert all(sqnr(a, e) > 24 for a, e in zip(own, expected, strict=True))
    assert not own[2][:, :, 130:].any() and not own[3][:, :, 130:].any()


def test_checkpointing_a_window_has_the_same_bits(device: str, options: dict[str, Any]) -> None:
    tensors = operands(device)

    mode = {"is_causal": True, "window": 50, **options}
    expected = step(f8.scaled_dot_product_attention, tensors, **mode)
    assert_same_but_for_atomics(step(checkpointed, tensors, **mode), expected, device)


# cuDNN or its stand-in computes these, or where there is none PyTorch with a mask; heads of other sizes are PyTorch's everywhere.
@pytest.mark.parametrize(("size", "by_cudnn"), [(64, True), (256, True), (96, False)])
@pytest.mark.parametrize("window", [1, 50, 128])
def test_a_window_in_bf16(
    device: str, options: dict[str, Any], size: int, by_cudnn: bool, window: int
) -> None:
    tensors = operands(device, 200, 230, size=size)
    mode = {"recipe": "bf16", "is_causal": True, "window": window}
    expected = exact_window(tensors, window)
    with torch.profiler.profile() as profile:
        own = step(f8.scaled_dot_product_attention, tensors, **mode, **options)
    names = {event.key for event in profile.key_averages()}
    assert ("float8::attention_backward" in names) == by_cudnn
    for each in (own, step(f8.scaled_dot_product_attention, tensors, **mode)):
        for actual, right in zip(each, expected, strict=True):
            assert right.norm() < 1e-9 or sqnr(actual, right) > 40


def test_a_window_in_bf16_takes_what_pytorch_does(device: str, options: dict[str, Any]) -> None:
    q, k, v, _ = operands(device)
    mode = {"recipe": "bf16", "is_causal": True, "window": 50, "enable_gqa": True}
    own = f8.scaled_dot_product_attention(q.float(), k.float(), v.float(), **mode, **options)
    assert own.dtype == torch.float32
    with torch.autocast(device, torch.bfloat16):
        own = f8.scaled_dot_product_attention(q.float(), k.float(), v.float(), **mode, **options)
    assert own.dtype == torch.bfloat16
    assert same([own], [f8.scaled_dot_product_attention(q, k, v, **mode, **options)])


@pytest.mark.parametrize("recipe", attention.RECIPES)
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"window": 0}, "window is 0"),
        ({"window": -3}, "window is -3"),
        ({"window": 2.5}, "window is 2.5"),
        ({"is_causal": False}, "is_causal"),
        ({"attn_mask": torch.ones(200, 200, dtype=torch.bool)}, "attn_mask is a tensor"),
        ({"query": torch.zeros(2, 4, 201, D).bfloat16()}, "201 queries and 200 keys"),
    ],
)
def test_refuses_a_bad_window(
    device: str, options: dict[str, Any], recipe: str, change: dict[str, Any], word: str
) -> None:
    q, k, v, _ = operands(device)
    given = {"query": q, "key": k, "value": v, "is_causal": True, "window": 50, **change}
    moved = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in given.items()}
    with pytest.raises(ValueError, match="float8") as error:
        f8.scaled_dot_product_attention(**moved, enable_gqa=True, recipe=recipe, **options)
    assert word in str(error.value)


def test_a_windows_backward_on_a_gpu_has_the_operands_shapes() -> None:
    """The call of PyTorch's flash attention, with tensors without data, which need no GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, grad, o = (
            torch.empty(2, 4, 200, D, dtype=torch.bfloat16, device="cuda") for _ in range(3)
        )
        k, v = (torch.empty(2, 2, 200, D, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        lse = torch.empty(2, 4, 200, device="cuda")
        grads = attention._backward(grad, q, k, v, o, lse, D**-0.5, True, 50)
        assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]


@pytest.mark.gpu
def test_a_deterministic_backward_of_windows_has_the_same_bits() -> None:
    """cuDNN adds with atomics where sequences are long, so PyTorch has it then."""
    tensors = operands("cuda", 4096)
    mode = {"is_causal": True, "window": 1000}
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (step(f8.scaled_dot_product_attention, tensors, **mode) for _ in range(4))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(same(first, each) for each in others)
    assert all(
        sqnr(a, e.double()) > 25
        for a, e in zip(step(f8.scaled_dot_product_attention, tensors, **mode), first, strict=True)
    )
