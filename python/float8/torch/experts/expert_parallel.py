"""Expert parallelism: each rank of a group has some of the experts, and rows travel to them and back.

    rows of the rank's tokens, by expert -> all-to-all -> the rank's experts -> all-to-all -> sums of tokens

An expert has the rows of rank 0 first, then those of rank 1, as one rank that has all tokens in this order
would have them: the bits are those of that rank.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.autograd.function import once_differentiable

from float8 import recipes
from float8.recipes import Recipe
from float8.torch import _ops
from float8.torch.experts import ops
from float8.torch.experts.moe import Weights, swiglu_experts
from float8.torch.experts.routing import Routing, combine, route
from float8.torch.ranks import collectives
from float8.torch.ranks.agreement import agree_once
from float8.torch.ranks.collectives import Operation
from float8.torch.shard.copy_layout import layout

_SCALE_BYTES = 4  # the inverse scale, in fp32, behind the elements of a row that travels in fp8
_agreed: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


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
    if group is not None and not isinstance(group, distributed.ProcessGroup):
        raise ValueError(
            f"float8: group is a {type(group).__name__}; it is the process group over whose ranks the experts "
            "are spread, as DeviceMesh.get_group() returns it"
        )


@torch.compiler.disable  # type: ignore[untyped-decorator] # the host waits for the numbers of rows
def moe_over_ranks(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_scores: torch.Tensor,
    w13: Weights,
    w2: torch.Tensor,
    config: int,
    group: Any,
    in_fp8: bool,
) -> torch.Tensor:
    """Computes functional.moe with a group, for operands that fit; the weights are the rank's own experts."""
    own = int(w2.shape[0])
    experts = own * group.size()
    _agree(x, w13, w2, config, in_fp8, group)
    routing = route(topk_ids, topk_scores, experts, config)
    exchange, of_ranks = _plan(routing, own, group)
    places = (routing.tokens, routing.position, routing.offs)
    rows: torch.Tensor = _Dispatch.apply(x, *places, exchange, config, in_fp8)  # type: ignore[no-untyped-call]
    ids = _experts_of(of_ranks, exchange, own)
    ones = torch.ones(ids.shape, dtype=torch.float32, device=x.device)
    y = swiglu_experts(rows, ids, ones, w13, w2, config)
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


def _plan(routing: Routing, own: int, group: Any) -> tuple[_Exchange, torch.Tensor]:
    """Tells all ranks how many rows each expert gets; returns also int32 [ranks, own], those of own experts.

    The host waits for the sums, since all-to-all has its sizes from the host.
    """
    offs = routing.offs
    counts = torch.diff(offs, prepend=offs.new_zeros(1)).view(group.size(), own)
    of_ranks = torch.empty_like(counts)
    ones = [1] * group.size()
    operation = Operation("the numbers of experts' rows")
    collectives.all_to_all(of_ranks, counts, ones, ones, group, operation)
    sent, received = torch.stack((counts.sum(dim=1), of_ranks.sum(dim=1))).tolist()
    return _Exchange(sent, received, routing.tokens.shape[0], group), of_ranks


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
    """Returns uint8 [rows, D + 4]: x in e4m3 with a scale for each row, a power of two, and its inverse."""
    rows, cols = x.shape
    packed = x.new_empty((rows, cols + _SCALE_BYTES), dtype=torch.uint8)
    if rows == 0:
        return packed
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
    packed[:, cols:] = q.scales[:rows, None].view(torch.uint8)
    return packed


def unpacked_rows(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values of packed_rows, which are exact in bfloat16 and float32."""
    cols = packed.shape[1] - _SCALE_BYTES
    elements = packed[:, :cols].contiguous().view(torch.float8_e4m3fn)
    inverse = packed[:, cols:].contiguous().view(torch.float32)
    return (elements.float() * inverse).to(dtype)


def _agree(
    x: torch.Tensor, w13: Weights, w2: torch.Tensor, config: int, in_fp8: bool, group: Any
) -> None:
    """Compares, before a group's first exchange of a kind, what its ranks have to have in common."""
    shapes = [list(each.shape) for each in ([w13] if isinstance(w13, torch.Tensor) else w13)]
    text = (
        f"experts of {shapes} and {list(w2.shape)}, x of {x.dtype}, config {config:#x}"
        f"{', rows in fp8' if in_fp8 else ''}"
    )
    seen = _agreed.setdefault(group, set())
    if text not in seen:
        agree_once(group, {"experts": text}, x.device)
        seen.add(text)
