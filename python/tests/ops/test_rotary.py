"""float8.torch.functional.apply_rotary_pos_emb: the bits of PyTorch's operations, in one launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from float8.torch import rotary
from float8.torch.functional import apply_rotary_pos_emb


def heads(
    device: str,
    dtype: torch.dtype,
    count: int,
    dim: int = 32,
    *,
    batch: int = 2,
    tokens_first: bool = True,
) -> Tensor:
    shape = (batch, 7, count, dim) if tokens_first else (batch, count, 7, dim)
    x = torch.randn(shape, device=device).to(dtype)
    return x.transpose(1, 2) if tokens_first else x


def positions(
    device: str, dtype: torch.dtype, dim: int = 32, batch: int = 1
) -> tuple[Tensor, Tensor]:
    angles = torch.randn(batch, 7, dim, device=device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def step(call: Any, q: Tensor, k: Tensor, *rest: Any, **options: Any) -> list[Tensor]:
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    results = call(q, k, *rest, **options)
    torch.manual_seed(9)
    grads = [torch.randn_like(y) for y in results]
    grads[0][0, 0, 0], grads[0][0, 1] = 0, -0.0
    torch.autograd.backward(results, grads)
    assert q.grad is not None and k.grad is not None
    return [*(y.detach() for y in results), q.grad, k.grad]


def expect_equal(device: str, q: Tensor, k: Tensor, *rest: Any) -> None:
    own = step(apply_rotary_pos_emb, q, k, *rest, emulate=device == "cpu")
    for a, b in zip(own, step(rotary.by_operations, q, k, *rest), strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("of_float32", [False, True], ids=["same", "float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_has_the_bits_of_operations(
    device: str, dtype: torch.dtype, of_float32: bool, rotary_calls: list[int]
) -> None:
    of_positions = torch.float32 if of_float32 else dtype
    for batch in (1, 2):
        cos, sin = positions(device, of_positions, batch=batch)
        for tokens_first in (True, False):
            q, k = (heads(device, dtype, n, tokens_first=tokens_first) for n in (5, 2))
            expect_equal(device, q, k, cos, sin)
    assert len(rotary_calls) == 4


def test_heads_of_a_fused_projection(device: str, rotary_calls: list[int]) -> None:
    both = torch.randn(2, 7, 6 * 32 + 8, device=device).bfloat16()
    q, k = (x.unflatten(-1, (-1, 32)).transpose(1, 2) for x in both[..., :192].split((128, 64), -1))
    expect_equal(device, q, k, *positions(device, torch.bfloat16))
    # Those of bytes that are not aligned are copied.
    shifted = torch.randn(2, 7, 6 * 32 + 3, device=device).bfloat16()[..., 3:]
    q, k = (x.unflatten(-1, (-1, 32)).transpose(1, 2) for x in shifted.split((128, 64), -1))
    own = apply_rotary_pos_emb(q, k, *positions(device, torch.bfloat16), emulate=device == "cpu")
    assert [y.shape for y in own] == [q.shape, k.shape] and len(rotary_calls) == 2


def test_tokens_before_heads(device: str, rotary_calls: list[int]) -> None:
    q, k = (heads(device, torch.bfloat16, n).transpose(1, 2) for n in (4, 2))
    expect_equal(device, q, k, *positions(device, torch.bfloat16), 2)
    assert len(rotary_calls) == 1


def test_gradients_lie_as_the_tensors_do(device: str) -> None:
    """Linears behind the gradient of a transposed projection need no copy, nor do norms of contiguous heads."""
    cos, sin = positions(device, torch.bfloat16)
    for tokens_first in (True, False):
        q, k = (heads(device, torch.bfloat16, n, tokens_first=tokens_first) for n in (4, 2))
        own = [each.detach().requires_grad_() for each in (q, k)]
        y = apply_rotary_pos_emb(*own, cos, sin, emulate=device == "cpu")
        for like in (y[0], y[0].transpose(1, 2).contiguous().transpose(1, 2)):
            (dq,) = torch.autograd.grad(y[0], own[0], torch.ones_like(like), retain_graph=True)
            assert dq.stride() == q.stride()


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_results_can_be_changed_in_place(device: str, unsqueeze_dim: int) -> None:
    q, k = (heads(device, torch.bfloat16, n) for n in (4, 2))
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    cos, sin = positions(device, torch.bfloat16)
    ends = []
    for call, options in (
        (apply_rotary_pos_emb, {"emulate": device == "cpu"}),
        (rotary.by_operations, {}),
    ):
        x = q.detach().requires_grad_()
        y, z = call(x, k, cos, sin, unsqueeze_dim, **options)
        assert y.requires_grad and not z.requires_grad
        y *= 0.5
        y.sum().backward()
        ends.append((y.detach(), x.grad))
    assert all(map(torch.equal, *ends))


def test_second_derivatives(device: str) -> None:
    q, k = (heads(device, torch.float32, n, 16, batch=1) for n in (2, 1))
    cos, sin = positions(device, torch.float32, 16)
    gradients = []
    for call, options in (
        (apply_rotary_pos_emb, {"emulate": device == "cpu"}),
        (rotary.by_operations, {}),
    ):
        x = q.clone().requires_grad_()
        y = call(x, k, cos, sin, **options)[0]
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        gradients.append(torch.autograd.grad(dx.pow(3).sum(), x)[0])
    torch.testing.assert_close(*gradients)


def test_what_the_kernel_does_not_know_goes_to_operations(
    device: str, rotary_calls: list[int]
) -> None:
    def expect(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: int) -> None:
        own = apply_rotary_pos_emb(q, k, cos, sin, *rest, emulate=device == "cpu")
        assert all(map(torch.equal, own, rotary.by_operations(q, k, cos, sin, *rest)))

    q, k = (heads(device, torch.bfloat16, n) for n in (4, 2))
    cos, sin = positions(device, torch.bfloat16)
    expect(
        heads(device, torch.bfloat16, 4, 24),
        heads(device, torch.bfloat16, 2, 24),
        *positions(device, torch.bfloat16, 24),
    )
    expect(q, k.float(), cos, sin)
    expect(q, k, cos, sin.float())
    expect(q, k, cos.half(), sin.half())
    expect(q, k, cos.clone().requires_grad_(), sin)
    expect(q, q, cos, sin)
    shifted = torch.randn(7 * 32 + 1, device=device).bfloat16()[1:].view(1, 7, 32)
    expect(q, k, shifted, shifted)
    expect(q[:, :, :0], k[:, :, :0], cos[:, :0], sin[:, :0])
    expect(q[0], k[0], cos, sin, 0)
    assert not rotary_calls


def test_a_compiled_graph_has_operations(device: str, rotary_calls: list[int]) -> None:
    q, k = (heads(device, torch.bfloat16, n) for n in (4, 2))
    cos, sin = positions(device, torch.bfloat16)
    call = torch.compile(apply_rotary_pos_emb, backend="aot_eager", fullgraph=True)
    own = call(q, k, cos, sin, emulate=device == "cpu")
    assert all(map(torch.equal, own, rotary.by_operations(q, k, cos, sin))) and not rotary_calls


def test_the_op_refuses_what_it_cannot_read(device: str) -> None:
    q, k = (heads(device, torch.bfloat16, n) for n in (4, 2))
    cos, sin = positions(device, torch.bfloat16)
    config = 16 if device == "cpu" else 0
    op = torch.ops.float8.rotary
    for words, arguments in {
        r"q is not \[batch": (q[0], k, cos, sin),
        "differ in other things than the number of heads": (q, k[:, :, 1:], cos, sin),
        r"cos is not \[batch or 1": (q, k, cos[:, 1:], sin),
        "unlike types or strides": (q, k, cos, sin.float()),
        "head_dim is 24": (q[..., :24], k[..., :24], cos[..., :24], sin[..., :24]),
    }.items():
        with pytest.raises((ValueError, RuntimeError), match=words):
            op(*arguments, 0, False, False, True, True, config)


def test_opcheck(device: str) -> None:
    q, k = (heads(device, torch.bfloat16, n) for n in (4, 2))
    config = 16 if device == "cpu" else 0
    for tokens_first, q_in_memory, k_in_memory in ((False, True, False), (True, False, True)):
        if tokens_first:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        order = (tokens_first, q_in_memory, k_in_memory)
        arguments = (q, k, *positions(device, torch.float32), 1, False, *order, config)
        torch.library.opcheck(torch.ops.float8.rotary.default, arguments)
