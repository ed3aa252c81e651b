"""Attention under a recipe: scaled_dot_product_attention, its ops, their fake kernels and its gradients."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.nn import functional

from float8 import recipes
from float8.torch import _ops, notices, traced
from float8.torch.contexts import once_differentiable, wants_gradient

attention_forward = torch.ops.float8.attention_forward.default
attention_dequantize = torch.ops.float8.attention_dequantize.default
attention_backward = torch.ops.float8.attention_backward.default
RECIPES = ("fp8_forward", "fp8", "bf16")  # by the numbers that the ops have for them
FP8_FORWARD, FP8, BF16 = range(3)
HEAD_DIMS = (64, 128, 256)
_BLOCK = 128  # tokens of a head that share a scale


def _blocks(tokens: Any) -> Any:
    return (tokens + _BLOCK - 1) // _BLOCK


@_ops.fake_kernel("attention_forward")
def _fake_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool,
    window: int,
    config: int,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    recipe: int = FP8_FORWARD,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    b, h, s, d = q.shape
    of_q, of_k = _blocks(s), _blocks(k.shape[2])
    kept: Any = 0
    if cu_seqlens_q is not None:
        offsets = cu_seqlens_q.shape[0]
        of_q, of_k = (x // _BLOCK + offsets - 1 for x in (s, k.shape[2]))
        kept = 8 * offsets + (0 if recipe == BF16 else 32 * (of_q + of_k))
    if recipe == FP8:
        kept += 4 * b * h * s
    if recipe != BF16:
        kept += b * (h * of_q + 2 * k.shape[1] * of_k) * (_BLOCK * d + 4)
    return (
        q.new_empty((b, s, h, d)),
        q.new_empty((b, h, s), dtype=torch.float32),
        q.new_empty((kept,), dtype=torch.uint8),
    )


@_ops.fake_kernel("attention_dequantize")
def _fake_dequantize(
    saved: torch.Tensor,
    o: torch.Tensor,
    heads_kv: int,
    tokens_kv: int,
    scale: float,
    causal: bool,
    window: int,
    config: int,
    sequences: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    b, _, _, d = o.shape
    return (
        torch.empty_like(o),
        o.new_empty((b, tokens_kv, heads_kv, d)),
        o.new_empty((b, tokens_kv, heads_kv, d)),
    )


@_ops.fake_kernel("attention_backward")
def _fake_backward(
    dout: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    saved: torch.Tensor,
    heads_kv: int,
    tokens_kv: int,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _fake_dequantize(saved, o, heads_kv, tokens_kv, 0, False, 0, 0)


def no_seed(grad: torch.Tensor) -> torch.Tensor:
    """Returns what PyTorch's backwards take for the seed of a dropout that there is not."""
    return torch.empty((), dtype=torch.int64, device=grad.device)


def sides(window: int | None) -> dict[str, int]:
    """Returns a window as PyTorch's flash attention takes it, which is causal by itself."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    offsets: tuple[torch.Tensor | None, torch.Tensor | None],
    longest: tuple[int, int],
    scale: float,
    causal: bool,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of PyTorch's flash attention, whose tensors are [B, T, H, D], or [T, H, D] with offsets."""
    seed = no_seed(grad)
    return torch.ops.aten._flash_attention_backward(  # type: ignore[no-any-return]
        *(grad, q, k, v, o, lse),
        *offsets,
        *longest,
        0.0,
        causal and not window,
        seed,
        seed,
        scale=scale,
        **sides(window),
    )


def _backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    causal: bool,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients in bf16 on a GPU, of PyTorch: its cuDNN's where it has it and there is no window, else those of its flash
    attention."""
    sizes = (q.shape[2], k.shape[2])
    if window:
        grad, q, k, v, o = (x.transpose(1, 2) for x in (grad, q, k, v, o))
        grads = flash_backward(grad, q, k, v, o, lse, (None, None), sizes, scale, causal, window)
        return tuple(x.transpose(1, 2) for x in grads)  # type: ignore[return-value]
    unused = no_seed(grad)
    # cuDNN gives NaN for a single query, and flash attention aligns another mask where sizes differ.
    if q.shape[3] <= _largest_head_of_cudnn() and q.shape[2] > 1:
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
            grad,
            q,
            k,
            v,
            o,
            lse[..., None],
            unused,
            unused,
            None,
            None,
            None,
            *sizes,
            0.0,
            causal,
            scale=scale,
        )
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
        grad, q, k, v, o, lse, None, None, *sizes, 0.0, causal, unused, unused, scale=scale
    )


# In graphs of torch.compile it is a constant.
@traced.constant
def _largest_head_of_cudnn() -> int:
    """Returns 0 where PyTorch has no cuDNN."""
    backends: Any = torch.backends
    if not (backends.cudnn.is_available() and backends.cuda.cudnn_sdp_enabled()):
        return 0
    return 256 if backends.cudnn.version() >= 90501 else 128


# The first cuDNN that is right about packed heads of 256, and has dk and dv of packs with strides of their own.
_GOOD_PACKS = 91900


@traced.constant
def _cudnn_version() -> int:
    """Returns the version of the cuDNN that float8 has by itself, which takes windows and packs, or 0. It may add with
    atomics, so that a deterministic program has none."""
    version: int = torch.ops.float8.cudnn_version()
    return 0 if torch.are_deterministic_algorithms_enabled() else version


def has_cudnn(packed_head: int = 0) -> bool:
    """Tells whether it can compute windows, or packs of heads of this size."""
    least = {0: 1, 256: _GOOD_PACKS}.get(packed_head, 90600)
    return _cudnn_version() >= least


def gradients_of_keys_lie_anywhere() -> bool:
    """Tells whether it has dk and dv of packs with strides of their own, as 9.14 has not."""
    return _cudnn_version() >= _GOOD_PACKS


def mean_of_keys(key: torch.Tensor) -> torch.Tensor:
    """Returns what the cast takes from the keys of each head, [B, G, 1, D] in fp32, but for the order of its sums."""
    return key.float().mean(2, keepdim=True)


# Without a matrix product, whose fp32 may be TF32. One head of keys at a time has less memory.
def lse_with_mean(
    lse: torch.Tensor, query: torch.Tensor, mean: torch.Tensor, scale: float
) -> torch.Tensor:
    """Returns the LSE [B, H, S] of scores with whole keys, where `lse` is that of keys without `mean`, [B, G, 1 or S, D]."""
    heads = query.chunk(mean.shape[1], 1)
    more = [(q.float() * mean[:, i, None]).sum(-1) for i, q in enumerate(heads)]
    return lse + scale * torch.cat(more, 1)


class AttentionFunction(torch.autograd.Function):
    """Between forward and backward it keeps q, k and v, in fp8 but for recipe bf16, o and lse. Backward differentiates the
    forward that ran: it takes the values that were multiplied, and the o and lse that they gave."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        causal: bool,
        window: int,
        config: int,
        recipe: int,
        return_lse: bool,
    ) -> Any:
        options = (scale, causal, window)
        o, lse, saved = attention_forward(q, k, v, *options, config, recipe=recipe)
        operands = (q, k, v) if recipe == BF16 else ()
        ctx.save_for_backward(o, lse, saved, *operands)
        ctx.key_sizes = (k.shape[1], k.shape[2])
        ctx.options = options
        ctx.config = config
        ctx.recipe = recipe
        if not return_lse:
            return o.transpose(1, 2)
        whole = lse_with_mean(lse, q, mean_of_keys(k), scale)
        ctx.mark_non_differentiable(whole)
        return o.transpose(1, 2), whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        o, lse, saved, *operands = ctx.saved_tensors
        options = (*ctx.key_sizes, *ctx.options, ctx.config)
        nothing = (None,) * 6
        window = ctx.options[2]
        of_torch = grad.is_cuda and not (window and has_cudnn())
        if ctx.recipe != FP8_FORWARD or not of_torch:
            own = (ctx.recipe, *operands)
            grads = attention_backward(grad, o, lse, saved, *options, 0, *own)
            return *(x.transpose(1, 2) for x in grads), *nothing
        q, k, v = (x.transpose(1, 2) for x in attention_dequantize(saved, o, *options))
        grads = _backward(grad, q, k, v, o.transpose(1, 2), lse, *ctx.options)
        return *grads, *nothing


# A tuple with return_lse, which overloads would repeat all arguments for.
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: int | None = None,
    recipe: str = "fp8_forward",
    emulate: bool = False,
    return_lse: bool = False,
) -> Any:
    """Returns softmax(scale query key^T) value: torch.nn.functional.scaled_dot_product_attention under a recipe.

    query: [B, H, S, D] in bfloat16, D is 64, 128 or 256; any strides, without a copy where a head's elements lie side by side, as in
        the transpose of [B, S, H, D].
    key, value: [B, G, T, D]. H is G, or with enable_gqa a multiple of it.
    attn_mask, dropout_p: None and 0. is_causal gives query i the keys up to the i-th one, as there.
    window: with is_causal, query i has the last `window` of its keys alone: its own and window - 1 before it. It takes no
        more queries than keys.
    recipe: "fp8_forward" multiplies in fp8 in forward, and in bfloat16 in backward; "fp8" multiplies in fp8 in both; "bf16"
        is PyTorch's own attention, but for windows on a GPU, which cuDNN computes, where it is there, and PyTorch by a mask.
    emulate: for tests, also without a GPU; slow.
    return_lse: return (result, lse), lse [B, H, S] in float32: the natural logarithm of each softmax's sum. It merges the
        results of parts of the keys, and has no gradient. "bf16" has none.

    Forward casts query, key and value to e4m3 with a scale for each 128 tokens of a head, and key without its mean
    over the tokens, which changes no softmax. It keeps these copies for backward, half of the bytes of the operands.
    Under autocast the tensors are cast to autocast's type. The result is in bfloat16, [B, H, S, D], as the
    transpose of a dense [B, S, H, D]. query, key and value may be DTensors that ranks share by batch or by heads, the
    same way; the result is then one too.

    Raises ValueError for what is not there: a mask, dropout, other heads, other types, other placements.
    """
    check_recipe(recipe, return_lse)
    # PyTorch has its own rules for DTensors, but no windows.
    if are_shared(query, key, value) and (recipe != "bf16" or window is not None):
        from float8.torch import attention_dtensors  # it takes a while to load

        of_rank = functools.partial(
            scaled_dot_product_attention,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            window=window,
            recipe=recipe,
            emulate=emulate,
            return_lse=return_lse,
        )
        return attention_dtensors.on_local(of_rank, query, key, value)
    if recipe == "bf16":
        if window is not None and attn_mask is not None:
            raise ValueError(
                f"float8: attn_mask is a tensor and window is {window!r}; a window is a mask: give one of both"
            )
        window = checked_window(window, is_causal, query, key)
        if window is not None and (emulate or (query.is_cuda and has_cudnn())):
            q, k, v = (_ops.of_autocast(x) for x in (query, key, value))
            if refusal(q, k, v, attn_mask, dropout_p, enable_gqa, scale) is None:
                return _apply(q, k, v, is_causal, window, scale, recipe, emulate, False)
        mask = attn_mask if window is None else window_mask(window, query, key)
        is_causal = is_causal and window is None
        return functional.scaled_dot_product_attention(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    query, key, value = (_ops.of_autocast(x) for x in (query, key, value))
    reason = refusal(query, key, value, attn_mask, dropout_p, enable_gqa, scale)
    if reason is not None:
        raise ValueError(f'float8: attention in fp8: {reason}, or use recipe="bf16"')
    window = checked_window(window, is_causal, query, key)
    return _apply(query, key, value, is_causal, window, scale, recipe, emulate, return_lse)


def _apply(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    window: int | None,
    scale: float | None,
    recipe: str,
    emulate: bool,
    return_lse: bool,
) -> Any:
    """Runs float8's own attention, of tensors that are checked."""
    if window is not None:  # the keys behind the last query's own are nobody's
        key, value = (x[:, :, : query.shape[2]] for x in (key, value))
    # torch.compile takes no tensor twice.
    key = key.view_as(key) if key is query else key
    value = value.view_as(value) if value is key or value is query else value
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    config = recipes.EMULATE if emulate else 0
    options = (factor, is_causal, window or 0, config, RECIPES.index(recipe))
    wants_gradient(query, key, value)  # refuses what nobody computes
    return AttentionFunction.apply(query, key, value, *options, return_lse)  # type: ignore[no-untyped-call]


def are_shared(*tensors: torch.Tensor) -> bool:
    """Tells whether one of the tensors is a DTensor."""
    return any(type(x) is not torch.Tensor and hasattr(x, "_local_tensor") for x in tensors)


def check_recipe(recipe: str, return_lse: bool = False) -> None:
    """Raises ValueError for a recipe that there is not, or that has no LSE."""
    if recipe not in RECIPES:
        raise ValueError(f"float8: recipe is {recipe!r}; it is one of {', '.join(RECIPES)}")
    if return_lse and recipe == "bf16":
        raise ValueError(
            'float8: return_lse with recipe="bf16", which is PyTorch\'s attention; the recipes in fp8 have it'
        )


def check_fp8_recipe(recipe: str) -> None:
    """Raises ValueError for a recipe that multiplies nothing in fp8."""
    if recipe not in RECIPES or recipe == "bf16":
        raise ValueError(
            f"float8: recipe is {recipe!r}; attention in fp8 has 'fp8_forward' and 'fp8'"
        )


def checked_window(
    window: int | None, is_causal: bool, query: torch.Tensor, key: torch.Tensor
) -> int | None:
    """Returns the window, or None where each query has all of its keys in it. Raises ValueError for a bad one."""
    if window is None:
        return None
    if not isinstance(window, int) or window < 1:
        raise ValueError(
            f"float8: window is {window!r}; it is a number of keys, at least 1, or None"
        )
    if not is_causal:
        raise ValueError(
            f"float8: window is {window} without is_causal; a window is causal: set is_causal=True"
        )
    queries, keys = query.shape[-2], key.shape[-2]
    if window >= queries:
        return None
    if queries > keys:
        raise ValueError(
            f"float8: window is {window}, of {queries} queries and {keys} keys; a window takes no more queries than keys"
        )
    return window


def window_mask(window: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Returns a window as a mask of PyTorch's attention."""
    sizes = (query.shape[-2], key.shape[-2])
    return torch.ones(sizes, dtype=torch.bool, device=query.device).tril().triu(1 - window)


def refusal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    enable_gqa: bool = True,
    scale: float | None = None,
    needs_keys: bool = True,
) -> str | None:
    """Returns why attention in fp8 cannot compute a call, or None where it can."""
    if attn_mask is not None:
        return "attn_mask is a tensor; leave it out, and set is_causal"
    if dropout_p != 0:
        return f"dropout_p is {dropout_p}; set it to 0"
    if (reason := refusal_of_scale(scale)) is not None:
        return reason
    if _is_context_parallel():
        return "ranks share its tokens (context_parallel); leave it to PyTorch"
    tensors = {"query": query, "key": key, "value": value}
    for name, x in tensors.items():
        if x.dim() != 4:
            return f"{name} has shape {tuple(x.shape)}; it is [batch, heads, tokens, head_dim]"
        if x.dtype != torch.bfloat16:
            return f"{name} is in {x.dtype}; cast it to torch.bfloat16"
        if x.device != query.device:
            return f"{name} is on {x.device}, query on {query.device}"
    if query.shape[-1] not in HEAD_DIMS:
        return f"heads have {query.shape[-1]} elements; in fp8 they have {', '.join(map(str, HEAD_DIMS))}"
    if key.shape != value.shape or (query.shape[0], query.shape[3]) != (key.shape[0], key.shape[3]):
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
        return f"the shapes do not match: {shapes}"
    if needs_keys and key.shape[2] < 1:
        return "there is no key"
    if (reason := refusal_of_heads(query.shape[1], key.shape[1], enable_gqa)) is not None:
        return reason
    if are_shared(query, key, value):
        from float8.torch import attention_dtensors  # it takes a while to load

        return attention_dtensors.refusal(**tensors)
    return None


@traced.constant
def _is_context_parallel() -> bool:
    """Tells whether PyTorch's context_parallel has replaced its attention: tensors are a rank's part of the tokens."""
    of_function = getattr(functional.scaled_dot_product_attention, "__globals__", {})
    return str(of_function.get("__name__")).startswith("torch.distributed.tensor.experimental")


def refusal_of_scale(scale: Any) -> str | None:
    """Returns why this is no scale, or None where it is one, or PyTorch's."""
    if scale is None or (isinstance(scale, (int, float)) and 0 < scale < math.inf):
        return None
    return f"scale is {scale!r}; it is a positive number"


def refusal_of_heads(heads: int, of_keys: int, enable_gqa: bool) -> str | None:
    """Returns why heads of queries cannot read so many of keys, or None where they can."""
    if of_keys < 1 or heads % of_keys != 0:
        return f"query has {heads} heads, key {of_keys}; the first are a multiple of the second"
    if heads != of_keys and not enable_gqa:
        return f"query has {heads} heads, key {of_keys}; set enable_gqa"
    return None


def warn_of(reason: str) -> None:
    """Warns once that calls go to PyTorch's attention. A compiled graph does not warn."""
    if not torch.compiler.is_compiling():
        notices.warn_once(
            f"attention {reason}", f"attention goes to PyTorch's, without fp8: {reason}"
        )
