"""Attention of packed sequences under a recipe: varlen_attention, its gradient, and the check of its offsets."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.nn import functional

from float8 import recipes
from float8.torch import _ops, attention
from float8.torch.contexts import once_differentiable, wants_gradient

# By float8_sequence_error_code.
_ERRORS = {
    1: "offset {} of cu_seqlens_q falls, is negative, or is not that of the first or last token",
    2: "offset {} of cu_seqlens_k falls, is negative, or is not that of the first or last token",
    3: "sequence {} has more queries than max_seqlen_q",
    4: "sequence {} has more keys than max_seqlen_k",
}


def offsets_of(saved: torch.Tensor, sequences: int) -> torch.Tensor:
    """Returns the offsets [2][sequences + 1] of queries and keys that a forward took."""
    return saved[-8 * (sequences + 1) :].view(torch.int32).view(2, -1)


def sequence_of_tokens(offsets: torch.Tensor, tokens: int) -> torch.Tensor:
    """Returns the sequence of each token."""
    at = torch.arange(tokens, device=offsets.device)
    return torch.searchsorted(offsets, at, right=True) - 1


def mean_of_keys(key: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Returns attention.mean_of_keys of each sequence, [sequences, G, D], of key [T, G, D]. That of an empty one is 0."""
    sums = torch.segment_reduce(key.float(), "sum", offsets=offsets.long(), axis=0, unsafe=True)
    return sums / offsets.diff().clamp(min=1)[:, None, None]


class VarlenAttentionFunction(torch.autograd.Function):
    """AttentionFunction of packed sequences. Backward takes the offsets that forward took, which are those of the tokens
    whatever the caller's are."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor | None,  # None: cu_seqlens_q, which torch.compile takes once
        longest: tuple[int, int],
        scale: float,
        causal: bool,
        window: int,
        config: int,
        recipe: int,
        return_lse: bool,
    ) -> Any:
        options = (scale, causal, window)
        if cu_seqlens_k is None:
            cu_seqlens_k = cu_seqlens_q
        batch = (x.transpose(0, 1)[None] for x in (q, k, v))
        o, lse, saved = attention.attention_forward(
            *batch, *options, config, cu_seqlens_q, cu_seqlens_k, *longest, recipe
        )
        operands = (q, k, v) if recipe == attention.BF16 else ()
        ctx.save_for_backward(o, lse, saved, *operands)
        ctx.key_sizes = (k.shape[1], k.shape[0])
        ctx.options = options
        ctx.longest = longest
        ctx.config = config
        ctx.sequences = cu_seqlens_q.shape[0] - 1
        ctx.recipe = recipe
        if not return_lse:
            return o[0]
        if recipe == attention.BF16:  # whose keys are whole
            # PyTorch 2.11 compiles no view of what is kept that has no gradient.
            whole = lse[0].clone()
        else:
            of_q, of_k = offsets_of(saved, ctx.sequences)
            mean = mean_of_keys(k, of_k)[sequence_of_tokens(of_q, q.shape[0])]
            queries, mean = (x.transpose(0, 1)[None] for x in (q, mean))
            whole = attention.lse_with_mean(lse, queries, mean, scale)[0]
        ctx.mark_non_differentiable(whole)
        return o[0], whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        o, lse, saved, *operands = ctx.saved_tensors
        options = (*ctx.key_sizes, *ctx.options, ctx.config, ctx.sequences)
        nothing = (None,) * 9
        of_library = not grad.is_cuda or attention.has_cudnn(packed_head=o.shape[-1])
        if ctx.recipe == attention.FP8 or of_library:
            if ctx.recipe != attention.FP8:  # a library takes packed tokens that lie side by side
                grad = grad.contiguous()
            dout = grad.transpose(0, 1)[None]
            own_qkv: Any = (None, None, None)
            if operands:
                # The library has dq where q would lie, and an old one dk and dv where k and v would.
                count = 1 if attention.gradients_of_keys_lie_anywhere() else 3
                dense = [x.contiguous() for x in operands[:count]]
                own_qkv = [x.transpose(0, 1)[None] for x in (*dense, *operands[count:])]
            how = (ctx.recipe, *own_qkv, *ctx.longest)
            grads = attention.attention_backward(dout, o, lse, saved, *options, *how)
            return *(x[0] for x in grads), *nothing
        if not operands:
            operands = [x[0] for x in attention.attention_dequantize(saved, o, *options)]
        q, k, v = operands
        of_q, of_k = offsets_of(saved, ctx.sequences)
        own = (grad.contiguous(), q, k, v, o[0], lse[0], (of_q, of_k))
        grads = attention.flash_backward(*own, ctx.longest, *ctx.options)
        return *grads, *nothing


class _AttentionOfNothing(torch.autograd.Function):
    """The result and the LSE where there is no query, or no key: nothing is launched. All gradients are 0."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        ctx.save_for_backward(q, k, v)
        lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float32)
        ctx.mark_non_differentiable(lse)
        return q.new_zeros(q.shape), lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Any) -> Any:
        return tuple(torch.zeros_like(x) for x in ctx.saved_tensors)


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    is_causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    recipe: str = "fp8_forward",
    emulate: bool = False,
    return_lse: bool = False,
) -> Any:
    """Returns softmax(scale query key^T) value of each of several sequences that lie one behind the other:
    torch.nn.attention.varlen.varlen_attn under a recipe, with its arguments in its order.

    query: [T, H, D] in bfloat16, D is 64, 128 or 256; any strides, as in scaled_dot_product_attention.
    key, value: [T', G, D]. H is G, or with enable_gqa a multiple of it.
    cu_seqlens_q, cu_seqlens_k: int32 on the device of query, [sequences + 1]: where each sequence's queries and keys begin,
        from 0 to T and to T'. A sequence may be empty, and one without keys has a result of 0; all may be: then nothing
        is launched and no offset is looked at. The host reads none of
        them, and a CUDA graph may be replayed with others; check_sequences tells of bad ones.
    max_seqlen_q, max_seqlen_k: at least the longest sequence's queries and keys, which backward takes on a GPU, and forward too
        under "bf16"; 0 where T, or T', is 0.
    is_causal: query i of a sequence has its keys up to the i-th one. Each sequence has as many keys as queries then:
        cu_seqlens_k is None, or cu_seqlens_q itself.
    window, scale, recipe, emulate: as in scaled_dot_product_attention.
    return_lse: return (result, lse), lse [H, T] as there. It is -inf where a query has no key.

    In fp8 each sequence has the bits that scaled_dot_product_attention gives it alone, and a NaN stays in its own. "bf16" is
    cuDNN's attention on a GPU, where it is there and algorithms need not be deterministic, and with emulate its emulation;
    else, and for other types and heads, it is PyTorch's varlen_attn, whose offsets nothing checks, or on a CPU PyTorch's
    attention with a mask, which has no LSE. The result is [T, H, D]. query, key and value may be DTensors that ranks share by heads; the
    offsets are plain tensors, the same on all of them.

    Raises ValueError for what is not there, before anything is launched.
    """
    attention.check_recipe(recipe)
    if attention.are_shared(query, key, value):
        from float8.torch import attention_dtensors  # it takes a while to load

        of_rank = functools.partial(
            varlen_attention,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            is_causal=is_causal,
            window=window,
            scale=scale,
            enable_gqa=enable_gqa,
            recipe=recipe,
            emulate=emulate,
            return_lse=return_lse,
        )
        return attention_dtensors.on_local(of_rank, query, key, value)
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    query, key, value = (_ops.of_autocast(x) for x in (query, key, value))
    offsets = (cu_seqlens_q, cu_seqlens_k)
    longest = (max_seqlen_q, max_seqlen_k)
    wrong = refusal_of_pack(query, key, offsets, longest, is_causal)
    reason = None if wrong else refusal(query, key, value, enable_gqa, scale)
    if reason is not None:  # another recipe may have it
        wrong = mismatch(query, key, value, enable_gqa, scale)
    if wrong is not None:
        raise ValueError(f"float8: packed attention: {wrong}")
    if window is not None:
        window = attention.checked_window(
            window, is_causal, query.transpose(0, 1), key.transpose(0, 1)
        )
    if recipe != "bf16" and reason is not None:
        raise ValueError(f'float8: packed attention in fp8: {reason}, or use recipe="bf16"')
    if query.shape[0] == 0 or key.shape[0] == 0:
        of_nothing = _AttentionOfNothing.apply(query, key, value)  # type: ignore[no-untyped-call]
        return of_nothing if return_lse else of_nothing[0]
    if recipe == "bf16":
        by_cudnn = query.is_cuda and attention.has_cudnn(packed_head=query.shape[-1])
        if reason is not None or not (emulate or by_cudnn):
            mode = (is_causal, window, scale, enable_gqa, return_lse)
            return _by_pytorch(query, key, value, offsets, longest, *mode)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    config = recipes.EMULATE if emulate else 0
    of_keys = None if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k
    number = attention.RECIPES.index(recipe)
    options = (factor, is_causal, window or 0, config, number, return_lse)
    wants_gradient(query, key, value)  # refuses what nobody computes
    return VarlenAttentionFunction.apply(  # type: ignore[no-untyped-call]
        query, key, value, cu_seqlens_q, of_keys, longest, *options
    )


def refusal_of_pack(
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    is_causal: bool,
) -> str | None:
    """Returns why these are no packed sequences, or None where they are."""
    for name, x in (("query", query), ("key", key)):
        if x.dim() != 3:
            return f"{name} has shape {tuple(x.shape)}; it is [tokens, heads, head_dim]"
    for name, cu in zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, strict=True):
        if not isinstance(cu, torch.Tensor):
            return f"{name} is a {type(cu).__name__}; it is a tensor"
        if cu.dtype != torch.int32 or cu.dim() != 1 or cu.shape[0] < 2:
            return f"{name} is {cu.dtype} of shape {tuple(cu.shape)}; it is torch.int32 of [sequences + 1], of one sequence at least"
        if cu.device != query.device:
            return f"{name} is on {cu.device}, query on {query.device}; move it there"
        if not cu.is_contiguous():
            return f"{name} is not contiguous; call its contiguous()"
    if offsets[0].shape != offsets[1].shape:
        return f"cu_seqlens_q has {offsets[0].shape[0]} offsets, cu_seqlens_k {offsets[1].shape[0]}"
    of_tokens = (query.shape[0], key.shape[0])
    names = ("max_seqlen_q", "max_seqlen_k")
    for name, most, tokens in zip(names, longest, of_tokens, strict=True):
        if isinstance(most, torch.Tensor) or most < 0 or (most < 1 and tokens > 0):
            return f"{name} is {most!r}; it is an int of at least 1, or 0 where all sequences are empty"
    if is_causal and offsets[1] is not offsets[0]:
        return (
            "is_causal with offsets of keys of their own; under a causal mask sequences have as many keys as queries: "
            "give cu_seqlens_q as cu_seqlens_k too, or None"
        )
    if is_causal and query.shape[0] != key.shape[0]:
        return f"is_causal with {query.shape[0]} queries and {key.shape[0]} keys; they are as many"
    return None


def mismatch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    enable_gqa: bool,
    scale: float | None,
) -> str | None:
    """Returns why no recipe computes these tensors [tokens, heads, head_dim], or None where one may."""
    if value.dim() != 3 or value.shape[:2] != key.shape[:2] or query.shape[2] != key.shape[2]:
        shapes = (f"{n} {tuple(x.shape)}" for n, x in zip("qkv", (query, key, value), strict=True))
        return f"the shapes do not match: {', '.join(shapes)}"
    of_heads = attention.refusal_of_heads(query.shape[1], key.shape[1], enable_gqa)
    return attention.refusal_of_scale(scale) or of_heads


def refusal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    enable_gqa: bool,
    scale: float | None,
) -> str | None:
    """Returns why attention in fp8 cannot compute packed sequences, or None where it can."""
    if value.dim() != 3:
        return f"value has shape {tuple(value.shape)}; it is [tokens, heads, head_dim]"
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    return attention.refusal(q, k, v, None, 0.0, enable_gqa, scale, needs_keys=False)


def mask_of_pack(
    offsets: tuple[torch.Tensor, torch.Tensor],
    tokens: tuple[int, int],
    is_causal: bool,
    window: int | None,
) -> torch.Tensor:
    """Returns packed sequences, of queries and of keys, as a mask of PyTorch's attention. They are the same tokens under a causal
    mask."""
    of_q, of_k = (sequence_of_tokens(*x) for x in zip(offsets, tokens, strict=True))
    mask = of_q[:, None] == of_k
    if is_causal:
        mask = mask.tril()
    return mask.triu(1 - window) if window else mask


def _by_pytorch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    is_causal: bool,
    window: int | None,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
) -> Any:
    if query.is_cuda:
        # varlen_attn's options differ between PyTorch's versions; this is what it calls.
        o, lse, *_ = torch.ops.aten._flash_attention_forward(
            query,
            key,
            value,
            *offsets,
            *longest,
            0.0,
            is_causal and not window,
            False,
            scale=scale,
            **attention.sides(window),
        )
        # A query without a key has inf there.
        return (o, lse.masked_fill(lse.isposinf(), -math.inf)) if return_lse else o
    if return_lse:
        raise ValueError(
            'float8: return_lse of packed sequences with recipe="bf16" on a CPU; set emulate, and give heads of 64, 128 or 256 '
            "in torch.bfloat16"
        )
    mask = mask_of_pack(offsets, (query.shape[0], key.shape[0]), is_causal, window)
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    y = functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
    return y[0].transpose(0, 1)


def check_sequences() -> None:
    """Raises ValueError where offsets of varlen_attention since the last check were bad.

    An offset that falls, is negative, or lies beyond the tokens is replaced by the largest one before it, or by the
    tokens, so that no call leaves its tensors; the results are then those of other sequences. Where a sequence is longer
    than max_seqlen, gradients are wrong on a GPU, and under "bf16" results are too. The device alone sees that, so a trainer asks as often as it likes, as
    after each hundredth step. The host waits for the current device.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    found = torch.ops.float8.sequence_errors()
    words = [
        f"on {'the emulated device' if device < 0 else f'cuda:{device}'} {_ERRORS[code].format(index)}"
        for device, code, index in zip(found[::3], found[1::3], found[2::3], strict=True)
    ]
    if words:
        raise ValueError(
            f"float8: sequences of a varlen_attention since the last check_sequences were bad: {'; '.join(words)}; "
            "offsets are the sums of the sequences' tokens, from 0 to all of them"
        )
