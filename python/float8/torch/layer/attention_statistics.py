"""What a call of attention in fp8 loses: elements that its casts clip or make 0, its largest score, and the P that it
rounds to 0. attention_counters.py switches it on."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.utils import _python_dispatch

from float8 import recipes
from float8.torch import attention, varlen

_TILE = 128  # tokens of a head that share a scale, and keys that a softmax takes at a time
_CLIPPED = 464.0  # up to here e4m3 rounds to its largest value, 448
_LOST = 18 * math.log(2)  # 2^8 P is rounded to 0 in e4m3 from 2^-10 on
_SCORES = 2**25  # so many are in memory at a time


class Layer:
    """Sums over the calls of a layer, on its device: the host waits for none of them."""

    def __init__(self) -> None:
        self.calls = 0
        self.counts: torch.Tensor | None = None  # [4][3]: elements, clipped, lost of q, k, v and P
        self.largest: torch.Tensor | None = None

    def add(self, counts: torch.Tensor, largest: torch.Tensor) -> None:
        self.calls += 1
        self.counts = counts if self.counts is None else self.counts + counts
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)


def count(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool,
    window: int | None,
    scale: float | None,
    emulate: bool,
    offsets: torch.Tensor | None = None,
) -> None:
    """Adds a call, which was computed in fp8, to what its layer counts, if that does.

    query, key, value: [B, H, S, D] and [B, G, T, D]; with the offsets of packed sequences a batch of 1.
    """
    layer: Layer | None = getattr(module, "float8_counters", None)
    if layer is None:
        return
    if attention.are_shared(query, key, value):
        query, key, value = (x.to_local() for x in (query, key, value))  # type: ignore[attr-defined]
    window = attention.checked_window(window, is_causal, query, key)
    if window is not None:
        key, value = (x[:, :, : query.shape[2]] for x in (key, value))
    call = _Call(
        *(query, key, value),
        1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        is_causal,
        window or 0,
        recipes.EMULATE if emulate else 0,
    )
    # Selective checkpointing compares the ops of a forward with those of its repetition.
    modes = _python_dispatch._disable_current_modes()
    with modes, torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        layer.add(*_statistics(call, offsets))


class _Call(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    causal: bool
    window: int
    config: int


class _Tokens(NamedTuple):
    """Where the tokens of an operand lie, each [tokens]."""

    sequence: torch.Tensor
    number: torch.Tensor  # in its sequence
    place: torch.Tensor  # in blocks of 128 that begin with each sequence
    blocks: int


def _tokens(offsets: torch.Tensor, tokens: int, blocks: int) -> _Tokens:
    sequence = varlen.sequence_of_tokens(offsets, tokens)
    first = offsets[sequence]
    number = torch.arange(tokens, device=offsets.device) - first
    return _Tokens(sequence, number, (first // _TILE + sequence) * _TILE + number, blocks)


def _statistics(call: _Call, offsets: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the counts of a Layer, and the largest score."""
    q, k, v, *options = call
    tokens = (q.shape[2], k.shape[2])
    sequences = 0 if offsets is None else offsets.shape[0] - 1
    more: Any = () if offsets is None else (offsets, offsets, *tokens)
    o, _, saved = attention.attention_forward(q, k, v, *options, *more)
    copies = attention.attention_dequantize(saved, o, k.shape[1], tokens[1], *options, sequences)
    if offsets is None:
        starts = torch.zeros((2, 1), dtype=torch.int64, device=q.device)
        blocks = [-(-each // _TILE) for each in tokens]
    else:
        starts = varlen.offsets_of(saved, sequences).long()
        blocks = [each // _TILE + sequences for each in tokens]
    of_q, of_k = (_tokens(*each) for each in zip(starts, tokens, blocks, strict=True))
    mean = attention.mean_of_keys(k)
    if offsets is not None:
        of_sequences = varlen.mean_of_keys(k[0].transpose(0, 1), starts[1])
        mean = of_sequences[of_k.sequence].transpose(0, 1)[None]
    casts = []
    begin = _scales_begin(call, of_q.blocks, of_k.blocks, offsets is not None)
    operands = ((q, of_q, None), (k, of_k, mean), (v, of_k, None))
    for (x, where, of_x), copy in zip(operands, copies, strict=True):
        end = begin + 4 * x.shape[0] * x.shape[1] * where.blocks
        inverse = saved[begin:end].view(torch.float32).view(x.shape[0], x.shape[1], -1)
        limit = _CLIPPED * inverse[..., where.place // _TILE]
        casts.append(_lost_by_cast(x, copy.transpose(1, 2), limit, of_x))
        begin = end
    p, largest = _lost_by_softmax(call, copies[0], copies[1], of_q, of_k, offsets is not None)
    return torch.stack([*casts, p]), largest


def _scales_begin(call: _Call, of_q: int, of_k: int, is_packed: bool) -> int:
    """Returns the byte of what forward saved where the inverse scales of q, k and v begin: behind copies of these, and where
    sequences are packed behind 32 bytes for each block of a head."""
    (batch, heads, _, size), of_keys = call.q.shape, call.k.shape[1]
    copies = batch * (heads * of_q + 2 * of_keys * of_k) * _TILE * size
    return copies + (32 * (of_q + of_k) if is_packed else 0)


def _lost_by_cast(
    x: torch.Tensor, copy: torch.Tensor, limit: torch.Tensor, mean: torch.Tensor | None
) -> torch.Tensor:
    """Returns the elements, those beyond `limit` [B, heads, tokens] or not finite, and those that are 0 in the copy alone."""
    clipped = lost = torch.zeros((), dtype=torch.int64, device=x.device)
    for head in range(x.shape[1]):  # one at a time has less memory
        own = x[:, head].float()
        if mean is not None:
            own = own - mean[:, head]
        is_held = own.isfinite() & (own.abs() <= limit[:, head, :, None])
        clipped = clipped + (~is_held).sum()
        lost = lost + ((own != 0) & (copy[:, head] == 0)).sum()
    return torch.stack([torch.full_like(lost, x.numel()), clipped, lost])


def _lost_by_softmax(
    call: _Call, q: torch.Tensor, k: torch.Tensor, of_q: _Tokens, of_k: _Tokens, is_packed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the P, a 0, and those that are rounded to 0; and the largest score. q and k are [B, tokens, heads, D] as they
    were multiplied. The kernel takes tiles of 128 keys of a sequence, the last one first, and rounds P of a tile by the
    largest score so far."""
    keys = of_k.blocks * _TILE
    sequence = torch.full((keys,), -1, device=k.device).index_copy(0, of_k.place, of_k.sequence)
    number = torch.zeros_like(sequence).index_copy(0, of_k.place, of_k.number)
    everything = lost = torch.zeros((), dtype=torch.int64, device=q.device)
    largest = torch.zeros((), device=q.device)
    heads, of_keys = q.shape[2], k.shape[2]
    rows = max(1, _SCORES // (heads * keys))
    for queries, own_keys in zip(q.transpose(1, 2), k.transpose(1, 2), strict=True):
        padded = own_keys.new_zeros((of_keys, keys, k.shape[3]), dtype=torch.float32)
        padded = padded.index_copy(1, of_k.place, own_keys.float()).transpose(1, 2)
        for begin in range(0, q.shape[1], rows):
            at = slice(begin, begin + rows)
            # A causal batch has no key behind these.
            last = -(-(begin + rows) // _TILE) if call.causal and not is_packed else of_k.blocks
            to = slice(0, min(last, of_k.blocks) * _TILE)
            seen = of_q.sequence[at, None] == sequence[to]
            if call.causal:
                seen &= number[to] <= of_q.number[at, None]
            if call.window:
                seen &= number[to] > of_q.number[at, None] - call.window
            grouped = queries[:, at].float().reshape(of_keys, -1, q.shape[3])
            scores = (grouped @ padded[..., to]).mul_(call.scale).view(heads, *seen.shape)
            largest = torch.maximum(largest, scores.abs().masked_fill_(~seen, 0).amax())
            tiles = scores.masked_fill_(~seen, -math.inf).view(heads, seen.shape[0], -1, _TILE)
            most = tiles.amax(3).flip(2).cummax(2).values.flip(2)
            is_lost = (tiles <= most[..., None] - _LOST) & seen.view(seen.shape[0], -1, _TILE)
            everything = everything + heads * seen.sum()
            lost = lost + is_lost.sum()
    return torch.stack([everything, torch.zeros_like(lost), lost]), largest
