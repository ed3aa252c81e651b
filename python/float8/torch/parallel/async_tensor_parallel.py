"""Async tensor parallelism: GEMMs in fp8 by chunks, overlapped with the gathers or sends of the chunks.

gather_gemm    d = a b^T + bias, whose rows of a are shared by ranks: the GEMM of a rank's rows runs when
               they have arrived, that of the own rows at once
gemm_scatter   this rank's rows of the sum over ranks of a b^T + bias: the GEMM of its own rows runs last,
               while the others' leave. Partial sums are added in fp32, in one order on all ranks,
               and rounded once
gemm_beside    one GEMM, a b^T, that is not cut

All gather further tensors on the side, for a later GEMM. The results of gather_gemm are those of one
GEMM over all rows.

Ranks share the rows of a matrix in `outer` runs each: those of x [B, S, K] whose S is shared are B runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.recipes import Granularity
from float8.torch import _ops, traced
from float8.torch.parallel import chunk_exchange

BLOCK = 128
_LEAST_ROWS = 512  # of a GEMM on a GPU: with fewer, more launches cost what the overlap saves
_WHOLE_ROWS = 16  # scales of fewer rows do not lie at addresses that kernels read


def wanted(option: bool | None) -> bool:
    """Tells whether a linear overlaps communication; None asks torch.compile's setting.

    That is `torch._inductor.config._micro_pipeline_tp`, by which torchtitan and others switch on async
    tensor parallelism for linears in bf16.
    """
    return _micro_pipeline_tp() if option is None else option


@traced.constant
def _micro_pipeline_tp() -> bool:
    config = sys.modules.get("torch._inductor.config")
    return bool(getattr(config, "_micro_pipeline_tp", False))


def pays(run: int, like: Tensor) -> bool:
    """Tells whether a rank's runs of so many rows make GEMMs of their own."""
    return run % _WHOLE_ROWS == 0 and run >= (_LEAST_ROWS if like.is_cuda else _WHOLE_ROWS)


class _Gemm(NamedTuple):
    """What the GEMMs of all chunks have in common."""

    b: Tensor
    b_scales: Tensor
    bias: Tensor | None
    granularity: int  # of a
    contracted: int
    config: int
    kind: int

    def run(
        self, data: Tensor, scales: Tensor, d: Tensor, accumulate: bool = False, sm_limit: int = 0
    ) -> None:
        _ops.gemm_into(
            data,
            scales,
            self.b,
            self.b_scales,
            d,
            self.bias,
            self.contracted,
            self.config,
            self.kind,
            accumulate,
            sm_limit,
        )

    def scales_of(self, scales: Tensor, rows: int, begin: int, end: int) -> Tensor:
        """Returns the inverse scales of some of so many rows."""
        if (begin, end) == (0, rows) or self.granularity == Granularity.TENSOR:
            return scales
        if self.granularity == Granularity.AXIS:
            return scales[begin:end]
        blocks = -(-self.contracted // BLOCK)
        pitch = -(-rows // 4) * 4
        return scales[: blocks * pitch].view(blocks, pitch)[:, begin:end].flatten()


def _sm_limit(exchange: chunk_exchange.Messages | chunk_exchange.PeerMemory, like: Tensor) -> int:
    """Returns the most SMs of a GEMM that overlaps with the exchange's sends; 0: all."""
    if exchange.sms == 0 or not like.is_cuda:
        return 0
    sms: int = torch.cuda.get_device_properties(like.device).multi_processor_count
    return sms - exchange.sms


def _runs(rank: int, ranks: int, rows: int, outer: int) -> Iterator[tuple[slice, slice]]:
    """Yields the runs of a rank: where they lie in its own rows, and where in all ranks' rows."""
    run = rows // outer
    for i in range(outer):
        whole = (i * ranks + rank) * run
        yield slice(i * run, (i + 1) * run), slice(whole, whole + run)


torch.library.define(
    "float8::gather_gemm",
    "(Tensor[] own, Tensor scales, Tensor b, Tensor b_scales, Tensor? bias, int consumed, bool keep, "
    "SymInt outer, ScalarType dtype, int granularity, SymInt contracted, int config, int kind, "
    "str group, int ranks) -> (Tensor, Tensor[])",
)
torch.library.define(
    "float8::gemm_scatter",
    "(Tensor a, Tensor scales, Tensor b, Tensor b_scales, Tensor? bias, Tensor? sums, Tensor[] own, "
    "SymInt outer, ScalarType dtype, int granularity, SymInt contracted, int config, int kind, "
    "str group, int ranks) -> (Tensor, Tensor[])",
)
torch.library.define(
    "float8::gemm_beside",
    "(Tensor a, Tensor scales, Tensor b, Tensor b_scales, Tensor[] own, ScalarType dtype, "
    "SymInt contracted, int config, int kind, str group, int ranks) -> (Tensor, Tensor[])",
)


def _gather_gemm(
    own: Sequence[Tensor],
    scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    bias: Tensor | None,
    consumed: int,
    keep: bool,
    outer: int,
    dtype: torch.dtype,
    granularity: int,
    contracted: int,
    config: int,
    kind: int,
    group: str,
    ranks: int,
) -> tuple[Tensor, list[Tensor]]:
    """Computes d [all rows][rows of b]; returns also what was gathered, [ranks][elements] each.

    own: this rank's rows of a; with `consumed` 2 their scales, which are the tensor's otherwise; what
        else to gather. keep: what is gathered of a is wanted too.
    """
    a = own[0]
    rows = a.shape[0]
    exchange = chunk_exchange.exchange_of(group, ranks, a.device)
    started = exchange.start(chunk_exchange.Call(own, consumed, None, a.device))
    d = a.new_empty((ranks * rows, b.shape[0]), dtype=dtype)
    gemm = _Gemm(b, b_scales, bias, granularity, contracted, config, kind)
    limit = _sm_limit(exchange, a)
    for step in range(ranks):
        rank = started.peer(step)
        data = a
        if step > 0:
            started.wait_for(step)
            if step == ranks - 1 and len(own) == consumed:
                limit = 0  # everything has arrived
            data = started.gathered[0][rank].view(a.shape)
            if consumed == 2:
                scales = started.gathered[1][rank]
        for run, whole in _runs(rank, ranks, rows, outer):
            of_run = gemm.scales_of(scales, rows, run.start, run.stop)
            gemm.run(data[run], of_run, d[whole], sm_limit=limit)
        if step == 0:
            started.keep_own(own, range(0 if keep else consumed, len(own)))
    started.finish()
    return d, started.gathered if keep else started.gathered[consumed:]


def _gemm_scatter(
    a: Tensor,
    scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    bias: Tensor | None,
    sums: Tensor | None,
    own: Sequence[Tensor],
    outer: int,
    dtype: torch.dtype,
    granularity: int,
    contracted: int,
    config: int,
    kind: int,
    group: str,
    ranks: int,
) -> tuple[Tensor, list[Tensor]]:
    """Returns this rank's rows of the sum over ranks of a b^T + bias + sums, and what was gathered.

    own: what to gather on the side.
    """
    all_rows, columns = a.shape[0], b.shape[0]
    rows = all_rows // ranks
    exchange = chunk_exchange.exchange_of(group, ranks, a.device)
    size = (rows * columns, dtype)
    started = exchange.start(chunk_exchange.Call(own, 0, size, a.device))
    gemm = _Gemm(b, b_scales, bias, granularity, contracted, config, kind)
    limit = _sm_limit(exchange, a) if own else 0  # nothing has been sent
    for step in [*range(1, ranks), 0]:
        rank = started.peer(step)
        if step == 0:
            chunk = started.slots[rank].view(rows, columns)
        else:
            chunk = a.new_empty((rows, columns), dtype=dtype)
        for run, whole in _runs(rank, ranks, rows, outer):
            of_run = gemm.scales_of(scales, all_rows, whole.start, whole.stop)
            if sums is not None:
                chunk[run].copy_(sums[whole])
            gemm.run(a[whole], of_run, chunk[run], sums is not None, limit)
        if step > 0:
            started.send(step, chunk)
            limit = _sm_limit(exchange, a)
    started.keep_own(own, range(len(own)))
    started.finish()
    # PyTorch adds up in fp32 and rounds once; its kernel for two tensors is the faster one.
    slots = started.slots
    total = slots[0] + slots[1] if ranks == 2 else slots.sum(0)
    return total.view(rows, columns), started.gathered


def _gemm_beside(
    a: Tensor,
    scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    own: Sequence[Tensor],
    dtype: torch.dtype,
    contracted: int,
    config: int,
    kind: int,
    group: str,
    ranks: int,
) -> tuple[Tensor, list[Tensor]]:
    """Returns a b^T, and what was gathered meanwhile."""
    exchange = chunk_exchange.exchange_of(group, ranks, a.device)
    started = exchange.start(chunk_exchange.Call(own, 0, None, a.device))
    d = a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)
    gemm = _Gemm(b, b_scales, None, Granularity.TENSOR, contracted, config, kind)
    gemm.run(a, scales, d, sm_limit=_sm_limit(exchange, a))
    started.keep_own(own, range(len(own)))
    started.finish()
    return d, started.gathered


def _fake_gathered(own: Sequence[Tensor], ranks: int) -> list[Tensor]:
    return [each.new_empty((ranks, each.numel())) for each in own]


def _fake_gather_gemm(
    own: Sequence[Tensor],
    scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    bias: Tensor | None,
    consumed: int,
    keep: bool,
    outer: int,
    dtype: torch.dtype,
    *others: Any,
) -> tuple[Tensor, list[Tensor]]:
    ranks = others[-1]
    d = own[0].new_empty((ranks * own[0].shape[0], b.shape[0]), dtype=dtype)
    return d, _fake_gathered(own[0 if keep else consumed :], ranks)


def _fake_gemm_scatter(
    a: Tensor,
    scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    bias: Tensor | None,
    sums: Tensor | None,
    own: Sequence[Tensor],
    outer: int,
    dtype: torch.dtype,
    *others: Any,
) -> tuple[Tensor, list[Tensor]]:
    ranks = others[-1]
    total = a.new_empty((a.shape[0] // ranks, b.shape[0]), dtype=dtype)
    return total, _fake_gathered(own, ranks)


def _fake_gemm_beside(
    a: Tensor,
    scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    own: Sequence[Tensor],
    dtype: torch.dtype,
    *others: Any,
) -> tuple[Tensor, list[Tensor]]:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype), _fake_gathered(own, others[-1])


for name, call, fake in (
    ("gather_gemm", _gather_gemm, _fake_gather_gemm),
    ("gemm_scatter", _gemm_scatter, _fake_gemm_scatter),
    ("gemm_beside", _gemm_beside, _fake_gemm_beside),
):
    torch.library.impl(f"float8::{name}", ("cpu", "cuda"), call)
    torch.library.register_fake(f"float8::{name}", fake)
gather_gemm = torch.ops.float8.gather_gemm.default
gemm_scatter = torch.ops.float8.gemm_scatter.default
gemm_beside = torch.ops.float8.gemm_beside.default
