"""Operands of a linear that ranks share: casts with the whole tensor's scales, and gathers in fp8.

Every rank casts what it has. The maxima that span ranks are reduced first, so that bytes and scales
are those of the whole tensor's cast.

ranks share    rows have maxima   columns have maxima   a tensor has its maximum
rows           of their own       over ranks            over ranks
columns        over ranks         of their own          over ranks
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from float8 import recipes
from float8.recipes import Cast, Granularity, Recipe, Scaling
from float8.torch import _ops
from float8.torch.amaxes import record_amax
from float8.torch.parallel import async_tensor_parallel
from float8.torch.shard.copy_layout import BLOCK as BLOCK
from float8.torch.shard.copy_layout import Copies as Copies
from float8.torch.shard.copy_layout import Copy as Copy
from float8.torch.shard.copy_layout import blocks as _blocks
from float8.torch.shard.copy_layout import in_4s as _in_4s
from float8.torch.shard.copy_layout import layout

HIGH_PRECISION = -1  # in the place of a Granularity
OUTPUT, GRAD_INPUT, GRAD_WEIGHT = range(3)  # float8_gemm_kind of float8.h


@dataclasses.dataclass(frozen=True)
class Rules:
    """How a recipe casts the operands of a linear."""

    config: int  # of dynamic scaling, without a bias
    delayed: int  # the config of delayed scaling, 0 where scaling is dynamic
    high_precision: int  # the config of GEMMs that are not in fp8
    granularities: tuple[tuple[int, int], ...]  # of q and qt, for each operand
    one_copy: tuple[bool, ...]  # of each operand: qt is q transposed
    mixed: bool  # some casts are delayed and others are not
    # Those of a linear with a frozen weight, which has no operands of grad_weight in fp8; none of a custom recipe with
    # delayed scaling, as recipes.of_frozen_weight says.
    of_frozen: Rules | None = None

    def is_fp8(self, gemm: int) -> bool:
        """Tells whether a GEMM is in fp8."""
        q, qt = self.granularities[_ops.INPUT if gemm == OUTPUT else _ops.GRAD_OUTPUT]
        return (qt if gemm == GRAD_WEIGHT else q) != HIGH_PRECISION

    @property
    def has_blocks(self) -> bool:
        return any(each > Granularity.AXIS for pair in self.granularities for each in pair)


@functools.cache
def rules_of(recipe: Recipe, emulate: bool, saturate: bool) -> Rules:
    rules = _rules(recipe, emulate, saturate)
    if recipe.delayed and recipe.name is None:
        return rules
    frozen = dataclasses.replace(recipe, grad_weight=Recipe.named("bf16").grad_weight)
    # Delayed scales are those of the recipe, whose casts leave qt out.
    of_frozen = dataclasses.replace(
        _rules(frozen, emulate, saturate), delayed=rules.delayed, mixed=rules.mixed
    )
    return dataclasses.replace(rules, of_frozen=of_frozen)


def _rules(recipe: Recipe, emulate: bool, saturate: bool) -> Rules:
    operands = (
        (recipe.output.a, recipe.grad_weight.b),
        (recipe.output.b, recipe.grad_input.b),
        (recipe.grad_input.a, recipe.grad_weight.a),
    )
    casts = [cast for pair in operands for cast in pair]

    def pack(recipe: Recipe) -> int:
        return recipes.pack(recipe, emulate=emulate, saturate=saturate)

    return Rules(
        config=pack(_with_dynamic_scaling(recipe)),
        delayed=pack(recipe) if recipe.delayed else 0,
        high_precision=pack(Recipe.named("bf16")),
        granularities=tuple((_granularity(q), _granularity(qt)) for q, qt in operands),
        one_copy=tuple(
            q == qt and q.fp8 and q.granularity is Granularity.TENSOR for q, qt in operands
        ),
        mixed=recipe.delayed and any(cast.scaling != Scaling.DELAYED for cast in casts),
    )


@dataclasses.dataclass(frozen=True)
class Sharing:
    """The ranks that share a linear's operands, and how they cast them."""

    rules: Rules
    group: str
    ranks: int
    rank: int
    trained: Sharing | None = None  # where the weight is frozen: what it is while it trains

    @property
    def is_frozen(self) -> bool:
        return self.trained is not None


def _granularity(cast: Cast) -> int:
    return int(cast.granularity) if cast.fp8 else HIGH_PRECISION


def _with_dynamic_scaling(recipe: Recipe) -> Recipe:
    def dynamic(cast: Cast) -> Cast:
        return dataclasses.replace(cast, scaling=Scaling.DYNAMIC) if cast.fp8 else cast

    gemms = {
        name: dataclasses.replace(gemm, a=dynamic(gemm.a), b=dynamic(gemm.b))
        for name, gemm in recipe.gemms()
    }
    return Recipe(**gemms)


# Casts


class Share(NamedTuple):
    """What this rank has of an operand."""

    tensor: Tensor  # [rows][cols]
    operand: int
    dim: int | None  # the dimension that ranks share; None: every rank has the whole tensor


class Slot(NamedTuple):
    """A linear's part of a scale state, with delayed scaling."""

    scales: Tensor
    layout: int
    first: bool  # the first step, which scales dynamically


def cast(shares: Sequence[Share], to: Sharing, save: bool, slot: Slot | None) -> list[Copies]:
    """Casts operands with the scales of the whole tensors; one all-reduce at most.

    save: there is a backward, which needs qt; delayed scaling records the amaxes.
    """
    first = slot is not None and slot.first
    unknown = [share for share in shares if first or spans_ranks(share, to)]
    found = iter(find_words(unknown, to) if slot is None or first else ())
    copies: list[Copies] = []
    for share in shares:
        needed = to.rules.granularities[share.operand][: 2 if save else 1]
        if all(granularity == HIGH_PRECISION for granularity in needed):
            copies.append((None, None))
        elif slot is not None and not first:
            config, both = to.rules.delayed, save and needed[1] != HIGH_PRECISION
            buffers = _ops.quantize(
                share.tensor, config, share.operand, both, slot.scales, slot.layout, not save
            )
            copies.append(copies_in(buffers, share, config, both, False))
        elif not first and not spans_ranks(share, to):
            buffers = _ops.quantize(share.tensor, to.rules.config, share.operand, save)
            copies.append(copies_in(buffers, share, to.rules.config, save, False))
        else:
            copies.append(_cast_with(next(found), share, to, slot if save else None))
    return copies


def spans_ranks(share: Share, to: Sharing) -> bool:
    """Tells whether a scale of the share depends on what other ranks have."""
    q, qt = to.rules.granularities[share.operand]
    if share.dim is None:
        return False
    return Granularity.TENSOR in (q, qt) or (qt if share.dim == 0 else q) == Granularity.AXIS


def find_words(shares: Sequence[Share], to: Sharing) -> list[tuple[Tensor, Tensor]]:
    """Returns the maxima of the whole tensors, in one all-reduce: amax and row_amax of each."""
    found = [
        _ops.quantize_amax(share.tensor, to.rules.config, share.operand, share.tensor.shape[0])
        for share in shares
    ]
    return whole_words(found, shares, to)


def whole_words(
    found: Sequence[tuple[Tensor, Tensor]], shares: Sequence[Share], to: Sharing
) -> list[tuple[Tensor, Tensor]]:
    """Returns the words of the whole tensors, from those that were found of each share."""
    own, parts = [], []
    for share, (amax, row_amax) in zip(shares, found, strict=True):
        q, qt = to.rules.granularities[share.operand]
        # The words of amax are the columns', then the tensor's.
        columns = amax.numel() - (Granularity.TENSOR in (q, qt))
        own.append((amax[:columns], amax[columns:], row_amax))
        if share.dim is not None:
            parts.append(amax[columns:])
            parts.append(amax[:columns] if share.dim == 0 else row_amax[: _rows_in_use(share, q)])
    result, whole = [], iter(max_over_ranks(parts, to.group))
    for share, (columns_amax, tensor_amax, row_amax) in zip(shares, own, strict=True):
        if share.dim is not None:
            tensor_amax = next(whole)
            if share.dim == 0:
                columns_amax = next(whole)
            else:
                row_amax = torch.cat((over_ranks := next(whole), row_amax[over_ranks.numel() :]))
        result.append((torch.cat((columns_amax, tensor_amax)), row_amax))
    return result


def max_over_ranks(words: Sequence[Tensor], group: str) -> list[Tensor]:
    """Returns the maxima over ranks of int32 words, in one all-reduce."""
    sizes = [each.numel() for each in words]
    if sum(sizes) == 0:
        return list(words)
    # A NaN is the largest word, so it wins on every rank.
    reduced = wait(_c10d.all_reduce(torch.cat(list(words)), "max", group))
    return list(torch.split(reduced, sizes))


def _rows_in_use(share: Share, q: int) -> int:
    """Returns how many words of row_amax a scale comes from: of a tensor alone they are scratch."""
    return share.tensor.shape[0] if q == Granularity.AXIS else 0


def _cast_with(
    words: tuple[Tensor, Tensor], share: Share, to: Sharing, slot: Slot | None
) -> Copies:
    amax, row_amax = recorded(words, share.operand, slot)
    buffers = _ops.quantize_shard(
        share.tensor, amax, row_amax, to.rules.config, share.operand, share.tensor.shape[0]
    )
    return copies_in(buffers, share, to.rules.config, True, True)


def recorded(
    words: tuple[Tensor, Tensor], operand: int, slot: Slot | None
) -> tuple[Tensor, Tensor]:
    """Records the amax of a first step with delayed scaling; returns the words."""
    amax, row_amax = words
    if slot is not None:  # the result is the argument, so that the call stays in a compiled graph
        amax = record_amax(amax, slot.scales, operand)
    return amax, row_amax


def copies_in(
    buffers: tuple[Tensor, Tensor], share: Share, config: int, transposed: bool, over_ranks: bool
) -> Copies:
    """Returns the parts of the buffers that a cast filled."""
    rows, cols = map(int, share.tensor.shape)
    most = rows if over_ranks or share.operand == _ops.WEIGHT else -(-rows // _ops.ROWS) * _ops.ROWS
    at = layout(most, rows, cols, config, share.operand, _ops.copies_of(transposed), over_ranks)
    return at.copies(*buffers, rows, cols)


# Gathers of what ranks have by rows

_c10d = torch.ops._c10d_functional


def wait(tensor: Tensor) -> Tensor:
    """Returns the result of a collective."""
    return _c10d.wait_tensor(tensor)  # type: ignore[no-any-return]


def start_gather(own: Tensor, to: Sharing) -> Tensor:
    """Starts to gather what lies in memory of all ranks, one after the other."""
    return _c10d.all_gather_into_tensor(own.contiguous().flatten(), to.ranks, to.group)  # type: ignore[no-any-return]


def start_gathers(own: Sequence[Tensor], to: Sharing) -> list[Tensor]:
    return [start_gather(each, to) for each in own]


def wait_all(started: Sequence[Tensor]) -> list[Tensor]:
    return [wait(each) for each in started]


class Shard(NamedTuple):
    """The rows of an operand that a rank has.

    outer: they are so many runs, and the other ranks' lie between two of them. Those of x [B, S, K]
        whose S is shared are B runs.
    """

    operand: int
    rows: int
    cols: int
    outer: int


def parts_of_q(q: Copy, shard: Shard, to: Sharing) -> list[Tensor]:
    """Returns what to gather of q: 1 byte an element, and the scales that other ranks lack."""
    granularity = to.rules.granularities[shard.operand][0]
    if granularity == Granularity.TENSOR:
        return [q.data]
    count = shard.rows
    if granularity == Granularity.BLOCK_1X128:
        count = _blocks(shard.cols) * _in_4s(shard.rows)
    return [q.data, q.scales[:count]]


def whole_q(gathered: Sequence[Tensor], own: Copy, shard: Shard, to: Sharing) -> Copy:
    """Returns q of the whole operand, from its parts of all ranks."""
    data = whole_rows(gathered[0].view(-1, own.data.shape[1]), shard.outer, to)
    scales = own.scales
    if len(gathered) > 1:
        scales = gathered[1]
        if to.rules.granularities[shard.operand][0] == Granularity.AXIS:
            scales = whole_rows(scales.view(-1, 1), shard.outer, to).flatten()
        else:
            parts = scales.view(to.ranks, _blocks(shard.cols), -1)[:, :, : shard.rows]
            scales = _whole_lines(parts, shard.outer, 4).flatten()
    return Copy(data, scales)


def parts_of_qt(qt: Copy, shard: Shard, to: Sharing) -> list[Tensor]:
    """Returns what to gather of qt; a scale of a line is that of the whole operand already."""
    data = qt.data[:, : shard.rows].contiguous()
    if to.rules.granularities[shard.operand][1] in (Granularity.TENSOR, Granularity.AXIS):
        return [data]
    return [data, qt.scales[: _blocks(shard.rows) * _in_4s(shard.cols)]]


def whole_qt(gathered: Sequence[Tensor], own: Copy, shard: Shard, to: Sharing) -> Copy:
    """Returns qt of the whole operand, from its parts of all ranks."""
    parts = gathered[0].view(to.ranks, shard.cols, shard.rows)
    scales = own.scales
    if len(gathered) > 1:
        scales = gathered[1].view(-1, _in_4s(shard.cols))
        scales = whole_rows(scales, shard.outer, to).flatten()
    return Copy(_whole_lines(parts, shard.outer, BLOCK), scales)


def transposed(q: Copy, shard: Shard) -> Copy:
    """Returns qt of an operand whose q has the same bytes."""
    return Copy(_padded(q.data[:, : shard.cols].t().contiguous(), BLOCK), q.scales)


def gather_both(q: Copy, qt: Copy | None, shard: Shard, to: Sharing) -> tuple[Copy, Copy | None]:
    """Returns q and qt of the whole operand; qt is made of q where it has the same bytes, and None where there is none."""
    started = start_gathers(parts_of_q(q, shard, to), to)
    if qt is None:
        return whole_q(wait_all(started), q, shard, to), None
    if to.rules.one_copy[shard.operand]:
        whole = whole_q(wait_all(started), q, shard, to)
        return whole, transposed(whole, shard)
    started_qt = start_gathers(parts_of_qt(qt, shard, to), to)
    return (
        whole_q(wait_all(started), q, shard, to),
        whole_qt(wait_all(started_qt), qt, shard, to),
    )


def whole_rows(gathered: Tensor, outer: int, to: Sharing) -> Tensor:
    """Returns the rows of all ranks in the whole tensor's order; `outer` as in Shard."""
    runs = gathered.view(to.ranks, outer, -1, gathered.shape[1])
    return runs.transpose(0, 1).reshape(gathered.shape)


def shared_rows(whole: Tensor, outer: int, to: Sharing) -> Tensor:
    """Returns rows with each rank's own next to each other: the inverse of whole_rows."""
    runs = whole.view(outer, to.ranks, -1, whole.shape[1])
    return runs.transpose(0, 1).reshape(whole.shape)


def _whole_lines(parts: Tensor, outer: int, multiple: int) -> Tensor:
    """Returns the lines of [ranks][lines][rows] side by side, padded, in the whole tensor's order."""
    ranks, lines, rows = parts.shape
    runs = parts.reshape(ranks, lines, outer, rows // outer)
    whole = runs.permute(1, 2, 0, 3).reshape(lines, ranks * rows)
    return _padded(whole, multiple)


def check_runs(run: int, operand: int, to: Sharing) -> None:
    """Raises where the run of rows that a rank has cuts blocks of rows that have one scale."""
    qt = to.rules.granularities[operand][1]
    if qt == Granularity.BLOCK_128X128 or (qt == Granularity.BLOCK_1X128 and run % BLOCK != 0):
        raise ValueError(
            f"float8: {to.ranks} ranks have {run} tokens of a sequence each, which cuts the blocks "
            f"of {BLOCK} rows that have one scale; share whole blocks, or leave sequence "
            "parallelism out"
        )


def _padded(lines: Tensor, multiple: int) -> Tensor:
    """Returns lines that are filled up with zeros; those that are full are not copied, as pad does."""
    missing = -lines.shape[1] % multiple
    return lines if missing == 0 else pad(lines, (0, missing))


# GEMMs


class Gemm(NamedTuple):
    """One of a linear's GEMMs with what its b is: a b^T + bias."""

    kind: int
    b: Copy
    bias: Tensor | None
    contracted: int
    dtype: torch.dtype
    to: Sharing

    def of(self, a: Copy, like: Tensor) -> Tensor:
        return gemm(self.kind, a, self.b, self.contracted, like, self.to, self.bias)

    def _rest(self, outer: int) -> tuple[Any, ...]:
        operand = _ops.INPUT if self.kind == OUTPUT else _ops.GRAD_OUTPUT
        rules = self.to.rules
        granularity = int(rules.granularities[operand][0])
        how = (outer, self.dtype, granularity, self.contracted, rules.config, self.kind)
        return *how, self.to.group, self.to.ranks

    def of_gathered(
        self, a: Copy, shard: Shard, beside: Sequence[Tensor] = (), keep: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns the result for the a of all ranks, whose rows arrive by chunks, and what it gathered.

        beside: what else to gather. keep: the parts of a are wanted too.
        """
        own = parts_of_q(a, shard, self.to)
        return async_tensor_parallel.gather_gemm(  # type: ignore[no-any-return]
            [*own, *beside],
            a.scales,
            *self.b,
            self.bias,
            len(own),
            keep,
            *self._rest(shard.outer),
        )

    def beside(self, a: Copy, own: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Returns the result, and what was gathered meanwhile."""
        to = self.to
        return async_tensor_parallel.gemm_beside(  # type: ignore[no-any-return]
            *a,
            *self.b,
            list(own),
            self.dtype,
            self.contracted,
            to.rules.config,
            self.kind,
            to.group,
            to.ranks,
        )

    def scattered(
        self, a: Copy, outer: int, sums: Tensor | None = None, beside: Sequence[Tensor] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns this rank's rows of the sum over ranks, and what it gathered.

        sums: partial sums to add. beside: what to gather.
        """
        sums = None if sums is None else sums.reshape(a.data.shape[0], -1)
        return async_tensor_parallel.gemm_scatter(  # type: ignore[no-any-return]
            *a, *self.b, self.bias, sums, list(beside), *self._rest(outer)
        )


def gemm(
    kind: int, a: Copy, b: Copy, contracted: int, like: Tensor, to: Sharing, bias: Tensor | None
) -> Tensor:
    """Returns a b^T + bias in the type of `like`."""
    d = like.new_empty((a.data.shape[0], b.data.shape[0]))
    _ops.gemm_into(*a, *b, d, bias, contracted, to.rules.config, kind, False)
    return d
