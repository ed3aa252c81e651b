"""Expert parallelism: each rank of a group has some of the experts, and rows travel to them and back.

    rows of the rank's tokens, by expert -> all-to-all -> the rank's experts -> all-to-all -> sums of tokens

An expert has the rows of rank 0 first, then those of rank 1, as one rank that has all tokens in this order
would have them: the bits are those of that rank.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from typing import Any, NamedTuple

import torch

from float8 import recipes
from float8.recipes import Recipe
from float8.torch import _ops, traced
from float8.torch.contexts import once_differentiable
from float8.torch.experts import ops
from float8.torch.experts.moe import Own, Weights, swiglu_experts
from float8.torch.experts.routing import Routing, combine, route
from float8.torch.experts.tensor_parallel import Group, check_group
from float8.torch.ranks import collectives
from float8.torch.ranks.agreement import Facts, agree_once, compare
from float8.torch.ranks.collectives import Operation
from float8.torch.shard.copy_layout import layout

# The inverse scale, in fp32, is behind the elements of a row that travels in fp8, and fills the row up to
# whole vectors, by which rows are gathered.
_SCALE_BYTES = 16
# A rank tells each other one a hash of two words, and the rows of its experts.
_WORDS = 2 + ops.MOST_EXPERTS
_agreed: weakref.WeakSet[Any] = weakref.WeakSet()


def check_dispatch(group: Any, dispatch_dtype: torch.dtype | None) -> None:
    """Raises ValueError for a group and a type of rows that cannot be."""
    if dispatch_dtype not in (None, torch.float8_e4m3fn):
        raise ValueError(
            f"float8: dispatch_dtype is {dispatch_dtype}; rows travel in x's type (None) or in "
            "torch.float8_e4m3fn"
        )
    if group is None and dispatch_dtype is not None:
        raise ValueError(
            "float8: dispatch_dtype is the type in which rows travel to the experts of other ranks; give "
            "their process group as group"
        )
    check_group("group", group, "whose ranks its own experts are spread")


@traced.untraced  # the host waits for the numbers of rows
def moe_over_ranks(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_scores: torch.Tensor,
    w13: Weights,
    w2: torch.Tensor,
    config: int,
    recipe: str,
    group: Any,
    in_fp8: bool,
    shared: Group,
    of_module: Own,
) -> torch.Tensor:
    """Computes functional.moe with a group, for operands that fit; the weights are the rank's own experts.

    recipe: its name, for messages.
    shared, of_module: as in swiglu_experts.
    """
    own = int(w2.shape[0])
    experts = own * group.size()
    facts: Facts = {"experts": _facts(x, w13, w2, config, recipe, in_fp8)}
    if group not in _agreed:
        agree_once(group, facts, x.device)
        _agreed.add(group)
    routing = route(topk_ids, topk_scores, experts, config)
    exchange, of_ranks = _plan(routing, own, facts, group)
    places = (routing.tokens, routing.position, routing.offs)
    rows: torch.Tensor = _Dispatch.apply(x, *places, exchange, config, in_fp8)  # type: ignore[no-untyped-call]
    ids = _experts_of(of_ranks, exchange, own)
    ones = torch.ones(ids.shape, dtype=torch.float32, device=x.device)
    y = swiglu_experts(rows, ids, ones, w13, w2, config, shared, of_module)
    back: torch.Tensor = _Return.apply(y, exchange)  # type: ignore[no-untyped-call]
    return combine(back, routing)


class _Exchange(NamedTuple):
    """Which rows go where: the first sum(sent) of `pairs` rows, by rank, and what comes from each rank."""

    sent: list[int]
    received: list[int]
    pairs: int
    group: Any

    def there(self, rows: torch.Tensor, operation: Operation) -> torch.Tensor:
        """Returns the rows that all ranks sent to this one, in the order of ranks."""
        out = rows.new_empty((sum(self.received), *rows.shape[1:]))
        rows = rows[: sum(self.sent)].contiguous()
        collectives.all_to_all(out, rows, self.received, self.sent, self.group, operation)
        return out

    def back(self, rows: torch.Tensor, operation: Operation) -> torch.Tensor:
        """Returns what `there` sent, as the other ranks give it back; rows of dropped pairs are 0."""
        out = rows.new_empty((self.pairs, *rows.shape[1:]))
        count = sum(self.sent)
        out[count:].zero_()
        rows = rows.contiguous()
        collectives.all_to_all(out[:count], rows, self.sent, self.received, self.group, operation)
        return out


def _plan(routing: Routing, own: int, facts: Facts, group: Any) -> tuple[_Exchange, torch.Tensor]:
    """Tells all ranks how many rows each expert gets; returns also int32 [ranks, own], those of own experts.

    Ranks whose facts differ have other hashes beside the numbers, whose size does not depend on the facts.
    The host waits for the sums, since all-to-all has its sizes from the host.
    """
    offs, ranks = routing.offs, group.size()
    words = offs.new_zeros((ranks, _WORDS))
    words[:, :2] = _digest(repr(facts), offs.device)
    words[:, 2 : 2 + own] = torch.diff(offs, prepend=offs.new_zeros(1)).view(ranks, own)
    of_ranks = torch.empty_like(words)
    ones = [1] * ranks
    operation = Operation("the numbers of experts' rows")
    collectives.all_to_all(of_ranks, words, ones, ones, group, operation)
    differs = (of_ranks[:, :2] != words[:, :2]).any(dim=1)
    sums = (differs, words[:, 2:].sum(dim=1), of_ranks[:, 2:].sum(dim=1))
    differing, sent, received = torch.stack(sums).tolist()
    if any(differing):
        compare(facts, group)
    exchange = _Exchange(sent, received, routing.tokens.shape[0], group)
    return exchange, of_ranks[:, 2 : 2 + own].contiguous()


@functools.cache
def _digest(text: str, device: torch.device) -> torch.Tensor:
    """Returns int32 [2], the begin of a text's hash."""
    digest = hashlib.sha256(text.encode()).digest()
    return torch.frombuffer(bytearray(digest[:8]), dtype=torch.int32).to(device)


def _experts_of(of_ranks: torch.Tensor, exchange: _Exchange, own: int) -> torch.Tensor:
    """Returns int32 [rows, 1]: which of its own experts each row that a rank received is for."""
    experts = torch.arange(own, dtype=torch.int32, device=of_ranks.device)
    each = experts.repeat(of_ranks.shape[0])
    ids = each.repeat_interleave(of_ranks.flatten(), output_size=sum(exchange.received))
    return ids[:, None]


class _Dispatch(torch.autograd.Function):
    """The rows of all ranks' tokens for a rank's own experts; a gradient travels in its own type."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        tokens: torch.Tensor,
        position: torch.Tensor,
        offs: torch.Tensor,
        exchange: _Exchange,
        config: int,
        in_fp8: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(position, offs)
        ctx.exchange = exchange
        ctx.config = config
        operation = Operation("the dispatch of experts' rows")
        if not in_fp8:
            return exchange.there(x.index_select(0, tokens), operation)
        packed = packed_rows(x, config).index_select(0, tokens)
        return unpacked_rows(exchange.there(packed, operation), x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows = ctx.exchange.back(grad, Operation("the gradients of experts' rows"))
        dx = ops.moe_combine(rows, None, *ctx.saved_tensors, ctx.config)
        return dx, *[None] * 6


class _Return(torch.autograd.Function):
    """The results of a rank's own pairs, from the ranks that have their experts."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.back(y, Operation("the return of experts' rows"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        operation = Operation("the gradients of experts' results")
        return ctx.exchange.there(grad, operation), None


def packed_rows(x: torch.Tensor, config: int) -> torch.Tensor:
    """Returns int32 [rows, D / 4 + 4]: x in e4m3 with a scale for each row, a power of two, and its inverse."""
    rows, cols = x.shape
    packed = x.new_empty((rows, cols + _SCALE_BYTES), dtype=torch.uint8)
    if rows == 0:
        return packed.view(torch.int32)
    casts = recipes.pack(
        Recipe.named("rowwise"),
        emulate=bool(config & recipes.EMULATE),
        recompute=False,
        saturate=bool(config & recipes.HOLD),
    )
    buffers = _ops.quantize(x.detach(), casts, _ops.INPUT, False)
    most = -(-rows // _ops.ROWS) * _ops.ROWS
    at = layout(most, rows, cols, casts, _ops.INPUT, _ops.Q_ALONE, False)
    q, _ = at.copies(buffers[0], buffers[1], rows, cols)
    assert q is not None  # Q_ALONE
    packed[:, :cols] = q.data[:, :cols]
    packed.view(torch.float32)[:, cols // 4 :] = q.scales[:rows, None]
    return packed.view(torch.int32)


def unpacked_rows(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values of packed_rows, which are exact in bfloat16 and float32."""
    bytes_ = packed.view(torch.uint8)
    elements = bytes_[:, :-_SCALE_BYTES].view(torch.float8_e4m3fn)
    inverse = packed.view(torch.float32)[:, -1:]
    wide = torch.float32 if dtype == torch.float16 else dtype  # float16 has not all of the scales
    return elements.to(wide).mul_(inverse.to(wide)).to(dtype)


def _facts(
    x: torch.Tensor, w13: Weights, w2: torch.Tensor, config: int, recipe: str, in_fp8: bool
) -> str:
    """Returns what the ranks of a group have in common in a call, in words."""
    weights = [w13] if isinstance(w13, torch.Tensor) else list(w13)
    shapes = " and ".join(str(list(each.shape)) for each in weights)
    grads = torch.is_grad_enabled()
    of_x = grads and x.requires_grad
    of_rows = of_x or (grads and any(each.requires_grad for each in (*weights, w2)))
    words = [
        f"weights {shapes} and {list(w2.shape)}",
        f"recipe {recipe}",
        f"x of {x.dtype}",
        f"dispatch_dtype {torch.float8_e4m3fn if in_fp8 else None}",
        "a gradient of x" if of_x else "a gradient of weights alone" if of_rows else "no gradient",
    ]
    flags = {"emulate": recipes.EMULATE, "saturate": recipes.HOLD, "recompute": recipes.RECOMPUTE}
    words += [f"{name}={bool(config & bit)}" for name, bit in flags.items()]
    return ", ".join(words)
