"""return_lse of scaled_dot_product_attention and varlen_attention: its numbers, and the merging of parts of the keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from reference import same, sqnr
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import float8.torch as f8
from float8.torch import attention

D = 128
HALVES = (200, 131)  # keys


def operands(
    device: str, queries: int, keys: int, bias: float = 0.0, size: int = D
) -> list[Tensor]:
    """Returns query, key and value. `bias`: the size of the mean of the channels of keys."""
    shapes = ((4, queries), (2, keys), (2, keys))
    q, k, v = (torch.randn(2, h, s, size, device=device) for h, s in shapes)
    return [x.bfloat16() for x in (q, k + bias * torch.randn(size, device=device), v)]


def scores(q: Tensor, k: Tensor, causal: bool, window: int | None, scale: float) -> Tensor:
    """The scores in fp64, -inf where a query has no key."""
    s = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    seen = torch.ones_like(s, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    return s.masked_fill(~(seen.triu(1 - window) if window else seen), -math.inf)


@pytest.mark.parametrize("recipe", ["fp8_forward", "fp8"])
@pytest.mark.parametrize(
    ("causal", "window", "size", "bias"),
    [(True, None, D, 0), (False, None, D, 10), (True, 70, 64, 10), (True, None, 256, 10)],
)
def test_lse_is_that_of_whole_keys(
    device: str,
    options: dict[str, Any],
    recipe: str,
    causal: bool,
    window: int | None,
    size: int,
    bias: float,
) -> None:
    q, k, v = operands(device, 300, 333, bias, size)
    mode = {"is_causal": causal, "window": window, "enable_gqa": True, "scale": 0.1, **options}
    o, lse = f8.scaled_dot_product_attention(q, k, v, recipe=recipe, return_lse=True, **mode)
    assert torch.equal(o, f8.scaled_dot_product_attention(q, k, v, recipe=recipe, **mode))
    assert lse.dtype == torch.float32 and lse.shape == (2, 4, 300) and not lse.requires_grad
    expected = scores(q, k, causal, window, 0.1).logsumexp(-1)
    assert (lse - expected).abs().max() < 0.15  # scores of e4m3; with bias they are some 100
    # It is that of the values that were multiplied, and of the mean that was not.
    if window:
        k, v = k[:, :, :300], v[:, :, :300]
    config = 16 if options["emulate"] else 0
    own_o, _, saved = attention.attention_forward(q, k, v, 0.1, causal, window or 0, config)
    more = (2, k.shape[2], 0.1, causal, window or 0, config)
    q8, k8, _ = (x.transpose(1, 2) for x in attention.attention_dequantize(saved, own_o, *more))
    mean = k.double().mean(2, keepdim=True).repeat_interleave(2, 1)
    shift = (q.double() * mean).sum(-1) * 0.1
    exact = scores(q8, k8, causal, window, 0.1).logsumexp(-1) + shift
    assert (lse - exact).abs().max() < (2e-3 if device == "cpu" else 3e-3)


@pytest.mark.parametrize(("causal", "most", "rms"), [(False, 0.05, 0.01), (True, 0.15, 0.015)])
@pytest.mark.parametrize("bias", [0, 4])
def test_lse_beside_the_caller_s_own_keys(
    device: str, options: dict[str, Any], causal: bool, most: float, rms: float, bias: float
) -> None:
    """The numbers of docs/attention.md, whose q and k are not rounded."""
    q, k, v = operands(device, 512, 512, bias)
    mode = {"is_causal": causal, "enable_gqa": True, "return_lse": True, **options}
    _, lse = f8.scaled_dot_product_attention(q, k, v, **mode)
    off = lse - scores(q, k, causal, None, 1 / math.sqrt(D)).logsumexp(-1)
    assert off.abs().max() < most and off.square().mean().sqrt() < rms


def merged(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns the attention of all keys, of which each part has some."""
    whole = torch.stack([lse for _, lse in parts]).logsumexp(0)
    return sum((o.double() * (lse - whole).exp()[..., None]) for o, lse in parts)  # type: ignore[return-value]


def test_parts_of_the_keys_are_merged(device: str, options: dict[str, Any]) -> None:
    q, k, v = operands(device, 150, sum(HALVES))
    k[:, :, HALVES[0] :] += torch.randn(D, device=device).bfloat16() / 2  # their means differ
    halves = list(zip(k.split(HALVES, 2), v.split(HALVES, 2), strict=True))
    mode = {"enable_gqa": True, **options}
    parts = [f8.scaled_dot_product_attention(q, *x, return_lse=True, **mode) for x in halves]
    expected = scores(q, k, False, None, D**-0.5).softmax(-1) @ v.double().repeat_interleave(2, 1)
    whole = sqnr(f8.scaled_dot_product_attention(q, k, v, **mode), expected)
    assert sqnr(merged(parts), expected) > max(20, whole - 2)
    # The kernel's own LSE is of keys without their mean, and merges to something else.
    config = 16 if options["emulate"] else 0
    own = [attention.attention_forward(q, *x, D**-0.5, False, 0, config)[:2] for x in halves]
    assert sqnr(merged([(o.transpose(1, 2), lse) for o, lse in own]), expected) < 15


@pytest.mark.parametrize("kind", ["plain", "checkpointed", "compiled"])
def test_gradients_are_those_without_it(device: str, options: dict[str, Any], kind: str) -> None:
    def call(*x: Tensor, return_lse: bool = True) -> Any:
        return f8.scaled_dot_product_attention(
            *x, is_causal=True, enable_gqa=True, recipe="fp8", return_lse=return_lse, **options
        )

    tensors = operands(device, 130, 130, 3)
    expected = [x.clone().requires_grad_() for x in tensors]
    y = call(*expected, return_lse=False)
    y.sum().backward()
    torch._dynamo.reset()
    own_call: Any = {
        "plain": call,
        "checkpointed": lambda *x: checkpoint(call, *x, use_reentrant=False),
        "compiled": torch.compile(call, fullgraph=True, backend="aot_eager"),
    }[kind]
    own = [x.clone().requires_grad_() for x in tensors]
    o, lse = own_call(*own)
    assert torch.equal(o, y) and o.requires_grad and not lse.requires_grad
    assert (lse - call(*own)[1]).abs().max() < 1e-4
    with pytest.raises(RuntimeError, match="does not require grad"):
        lse.sum().backward()
    (o.sum() + lse.sum()).backward()
    assert same([x.grad for x in own], [x.grad for x in expected])


LENGTHS = (100, 0, 1, 30)
OF_KEYS = (70, 40, 5, 0)


def offsets(lengths: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().to(device)


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_sequences(device: str, options: dict[str, Any], compiled: bool) -> None:
    torch._dynamo.reset()
    q = torch.randn(sum(LENGTHS), 4, D, device=device).bfloat16()
    k, v = (torch.randn(sum(OF_KEYS), 2, D, device=device).bfloat16() for _ in "kv")
    k[70:] += 4
    v[0, 0, 0] = k[0, 0, 0] = torch.nan  # it stays with the first sequence, in two heads of queries
    call = f8.varlen_attention
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    cu = (offsets(LENGTHS, device), offsets(OF_KEYS, device))
    mode = {"enable_gqa": True, **options}
    o, lse = call(q, k, v, *cu, 100, 70, return_lse=True, **mode)
    assert o.shape == q.shape and lse.shape == (4, sum(LENGTHS)) and lse.dtype == torch.float32
    assert lse[:2, :100].isnan().all() and not lse[2:].isnan().any()
    assert not lse[:, 100:].isnan().any()
    assert (lse[:, 101:] == -torch.inf).all(), "the last sequence has no key"
    for queries, keys in ((slice(0, 100), slice(0, 70)), (slice(100, 101), slice(110, 115))):
        own = [x[i].transpose(0, 1)[None] for x, i in ((q, queries), (k, keys), (v, keys))]
        alone = f8.scaled_dot_product_attention(*own, return_lse=True, **mode)[1]
        assert torch.allclose(lse[:, queries], alone[0], atol=1e-4, equal_nan=True)


def test_packed_gradients_are_those_without_it(device: str, options: dict[str, Any]) -> None:
    tensors = [torch.randn(131, h, D, device=device).bfloat16() for h in (4, 2, 2)]
    cu = offsets((100, 0, 31), device)
    grads = []
    for return_lse in (False, True):
        own = [x.clone().requires_grad_() for x in tensors]
        found = f8.varlen_attention(
            *(*own, cu, None, 100, 100),
            is_causal=True,
            window=40,
            enable_gqa=True,
            recipe="fp8",
            return_lse=return_lse,
            **options,
        )
        o = found[0] if return_lse else found
        o.sum().backward()
        grads.append([o.detach(), *(x.grad for x in own)])
    assert same(*grads)
    assert not found[1].requires_grad


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("window", [None, 20])
def test_packed_sequences_in_bf16(
    device: str, options: dict[str, Any], compiled: bool, window: int | None
) -> None:
    torch._dynamo.reset()
    call = f8.varlen_attention
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    of_keys = OF_KEYS if window is None else LENGTHS
    q = torch.randn(sum(LENGTHS), 4, D, device=device).bfloat16().requires_grad_()
    k, v = (torch.randn(sum(of_keys), 2, D, device=device).bfloat16() for _ in "kv")
    k += 3
    cu = offsets(LENGTHS, device)
    of_k = offsets(of_keys, device) if window is None else None
    causal = window is not None
    mode = {"recipe": "bf16", "is_causal": causal, "window": window, "enable_gqa": True, **options}
    o, lse = call(q, k, v, cu, of_k, 100, 100, return_lse=True, **mode)
    assert torch.equal(o, call(q, k, v, cu, of_k, 100, 100, **mode))
    assert lse.shape == (4, sum(LENGTHS)) and lse.dtype == torch.float32
    assert o.requires_grad and not lse.requires_grad
    (grad,) = torch.autograd.grad(o.float().square().sum(), q)
    assert grad.isfinite().all()
    parts = [x.detach().split(n) for x, n in ((q, LENGTHS), (k, of_keys))]
    for own, (q_of, k_of) in zip(lse.split(LENGTHS, 1), zip(*parts, strict=True), strict=True):
        pair = (q_of.transpose(0, 1)[None], k_of.transpose(0, 1)[None])
        expected = scores(*pair, causal, window, D**-0.5).logsumexp(-1)[0]
        assert torch.allclose(own.double(), expected, atol=1e-3)


def test_bf16_has_none(device: str) -> None:
    q, k, v = operands(device, 8, 8)
    with pytest.raises(ValueError, match='return_lse with recipe="bf16"'):
        f8.scaled_dot_product_attention(q, k, v, recipe="bf16", return_lse=True)
    if device == "cuda":
        return
    pack = [x[0].transpose(0, 1) for x in (q, k, v)]
    cu = offsets((8,), device)
    with pytest.raises(ValueError, match='recipe="bf16" on a CPU; set emulate'):
        mode = {"recipe": "bf16", "enable_gqa": True, "return_lse": True}
        f8.varlen_attention(*pack, cu, None, 8, 8, **mode)
