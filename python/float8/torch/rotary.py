"""Rotary positions of queries and keys, in one launch for both.

A call by PyTorch's operations takes some ten launches, and backward twice as many, each of which reads and writes
whole tensors: a tenth of an eager Llama block in fp8 (docs/lab/rotary.md).
"""

from __future__ import annotations

from typing import Any

import torch

from float8 import recipes
from float8.torch import _ops
from float8.torch.contexts import is_transformed

MAX_HEAD_DIM = 1024


@_ops.fake_kernel("rotary")
def _fake_rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    dtype: int,
    inverse: bool,
    tokens_first: bool,
    q_in_memory: bool,
    k_in_memory: bool,
    config: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    own = _ops.element_type(dtype)
    return (
        _ops.empty_heads(q, own, q_in_memory != tokens_first),
        _ops.empty_heads(k, own, k_in_memory != tokens_first),
    )


class _Rotary(torch.autograd.Function):
    """Turns queries and keys, or their gradients back: each is the gradient of the other.

    tokens_first: of the dimensions. in_memory: whether tokens come first in the memory of q and of k, whose gradients
        lie as they do.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        dtype: torch.dtype,
        inverse: bool,
        tokens_first: bool,
        in_memory: tuple[bool, bool],
        config: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        given = _in_memory(q, tokens_first), _in_memory(k, tokens_first)
        ctx.options = (q.dtype, not inverse, tokens_first, given, config)
        of_result = _ops.ELEMENT_TYPES[dtype]
        turned = _ops.rotary(q, k, cos, sin, of_result, inverse, tokens_first, *in_memory, config)
        fixed = [y for y, needs in zip(turned, ctx.needs_input_grad[:2], strict=True) if not needs]
        ctx.mark_non_differentiable(*fixed)
        return turned  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[Any, ...]:
        turned = _Rotary.apply(dq, dk, *ctx.saved_tensors, *ctx.options)  # type: ignore[no-untyped-call]
        return (*turned, *(None,) * 7)


def _in_memory(x: torch.Tensor, tokens_first: bool) -> bool:
    """Tells whether tokens come before heads in the memory of a tensor."""
    heads, tokens = (2, 1) if tokens_first else (1, 2)
    return x.stride(heads) < x.stride(tokens)


def apply_rotary_pos_emb(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int = 1,
    *,
    emulate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns q cos + rotate_half(q) sin and the same of k: the function of this name in transformers.

    q: [B, H, S, D] in bfloat16, float16 or float32; any strides, without a copy where a head's elements lie side by side,
        as in the transpose of [B, S, H, D]. With unsqueeze_dim=2 it is [B, S, H, D].
    k: [B, G, S, D] in q's type.
    cos, sin: [B or 1, S, D] in q's type or in float32.
    emulate: as for Float8Linear.

    The bits, forward and backward, are those of PyTorch's operations: both products and their sum are rounded, each for
    itself, to q's type, or to float32 where that is cos's. Gradients lie in memory as q and k do, where those of
    PyTorch's operations are contiguous. On a Hopper GPU it is one launch each, in eager mode; what
    that cannot compute, as with another D than a multiple of 16, one tensor as q and k, positions that have a gradient, or elsewhere,
    PyTorch's operations do, also under torch.compile, whose own kernels read and write as little.
    """
    tokens_first = unsqueeze_dim == 2
    if unsqueeze_dim in (1, 2) and fits(q, k, cos, sin, emulate, tokens_first):
        return turn(q, k, cos, sin, emulate, tokens_first)
    return by_operations(q, k, cos, sin, unsqueeze_dim)


def by_operations(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes it by PyTorch's operations."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def fits(q: Any, k: Any, cos: Any, sin: Any, emulate: bool, tokens_first: bool = False) -> bool:
    """Tells whether the kernel can compute it here, of heads [B, H, S, D] or [B, S, H, D]."""
    if (
        torch.compiler.is_compiling()
        or any(type(x) is not torch.Tensor for x in (q, k, cos, sin))
        or is_transformed()
    ):
        return False
    tokens = 1 if tokens_first else 2
    return (
        q is not k  # whose gradients PyTorch adds up in another order
        and q.dim() == 4
        and k.dim() == 4
        and cos.dim() == 3
        and q.shape[0] == k.shape[0]
        and q.shape[3] == k.shape[3] == cos.shape[2]
        and q.shape[tokens] == k.shape[tokens] == cos.shape[1]
        and cos.shape == sin.shape
        and cos.shape[0] in (1, q.shape[0])
        and q.shape[3] % 16 == 0
        and 0 < q.shape[3] <= MAX_HEAD_DIM
        and q.dtype == k.dtype
        and q.dtype in _ops.ELEMENT_TYPES
        and cos.dtype == sin.dtype
        and cos.dtype in (q.dtype, torch.float32)
        and cos.stride() == sin.stride()
        and cos.stride(2) == 1
        and all(x % 8 == 0 for x in cos.stride()[:2])
        and q.numel() > 0
        and k.numel() > 0
        and not (cos.requires_grad or sin.requires_grad)
        and cos.data_ptr() % 16 == sin.data_ptr() % 16 == 0
        and q.device == k.device == cos.device == sin.device
        and (emulate or (q.is_cuda and _ops.is_hopper(q.get_device())))
    )


def turn(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    emulate: bool,
    tokens_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes it by the kernel, of tensors that fit."""
    config = recipes.EMULATE if emulate else 0
    in_memory = _in_memory(q, tokens_first), _in_memory(k, tokens_first)
    return _Rotary.apply(q, k, cos, sin, cos.dtype, False, tokens_first, in_memory, config)  # type: ignore[no-any-return, no-untyped-call]
