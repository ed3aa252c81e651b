"""The ops that route tokens to experts and combine their rows, against torch's sort and gather."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import float8.torch as f8
from float8.torch.experts import ops
from float8.torch.experts.routing import Combine, Dispatch, route

CASES = [
    pytest.param(tokens, top, experts, low, high, id=f"{tokens}-{top}-{experts}-{low}-{high}")
    for tokens, top, experts, low, high in (
        (0, 2, 5, 0, 4),
        (1, 1, 1, 0, 0),
        (33, 3, 7, -1, 8),
        (127, 8, 128, 0, 127),
        (500, 2, 1024, -9, 1100),
        (400, 4, 9, 5, 5),
        (400, 4, 9, 9, 9),
        (4097, 2, 16, 0, 15),
    )
]


@pytest.fixture
def packed(options: dict[str, Any]) -> int:
    return f8.functional.pack_experts("rowwise", options["emulate"], False)


@pytest.mark.parametrize(("tokens", "top", "experts", "low", "high"), CASES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_are_those_of_a_sort(
    device: str,
    packed: int,
    dtype: torch.dtype,
    tokens: int,
    top: int,
    experts: int,
    low: int,
    high: int,
) -> None:
    ids = torch.randint(low, high + 1, (tokens, top), dtype=dtype, device=device)
    index, position, offsets = ops.moe_route(ids, experts, packed)
    expected = route(ids, experts)
    assert torch.equal(index, expected.tokens.int())
    assert torch.equal(position, expected.rows.int())
    assert torch.equal(offsets, expected.offs)
    assert torch.equal(position < offsets[-1], expected.known)


@pytest.mark.parametrize(("tokens", "top", "experts", "low", "high"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_those_of_gathered_rows(
    device: str,
    packed: int,
    dtype: torch.dtype,
    tokens: int,
    top: int,
    experts: int,
    low: int,
    high: int,
) -> None:
    """The rows of dropped pairs are NaN for the ops, and 0 for torch."""
    ids = torch.randint(low, high + 1, (tokens, top), device=device)
    routing = route(ids, experts)
    position, offsets = ops.moe_route(ids, experts, packed)[1:]
    y = torch.randn(tokens * top, 64, device=device).to(dtype)
    scores = torch.rand(tokens, top, device=device)
    bad = y.clone()
    bad[int(offsets[-1]) :] = torch.nan
    y[int(offsets[-1]) :] = 0
    known = scores.masked_fill(~routing.known, 0.0)
    total = Combine.apply(y, known, routing.tokens, routing.rows)  # type: ignore[no-untyped-call]
    assert torch.equal(ops.moe_combine(bad, scores, position, offsets, packed), total)
    x = torch.zeros(tokens, 64, device=device, dtype=dtype, requires_grad=True)
    rows = Dispatch.apply(x, routing.tokens, routing.rows)  # type: ignore[no-untyped-call]
    dx = torch.autograd.grad(rows, x, y)[0]
    assert torch.equal(ops.moe_combine(bad, None, position, offsets, packed), dx)
    dout = torch.randn(tokens, 64, device=device).to(dtype)
    dscores = ops.moe_score_gradient(dout, bad, position, offsets, packed)
    dots = (y[routing.rows].double() * dout[:, None].double()).sum(-1)
    torch.testing.assert_close(dscores.double(), dots, rtol=1e-5, atol=1e-4)
    assert not dscores[~routing.known].any()


def test_ops_compile(device: str, packed: int) -> None:
    def call(ids: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        index, position, offsets = ops.moe_route(ids, 5, packed)
        out = ops.moe_combine(x[index], None, position, offsets, packed)
        return out, ops.moe_score_gradient(x, x[index], position, offsets, packed)

    torch.compiler.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for tokens in (40, 77):
        ids = torch.randint(-1, 6, (tokens, 3), device=device)
        x = torch.randn(tokens, 16, device=device)
        for own, other in zip(compiled(ids, x), call(ids, x), strict=True):
            assert torch.equal(own, other)


def test_ops_refuse_operands(device: str, packed: int) -> None:
    ids = torch.zeros(4, 2, dtype=torch.int64, device=device)
    y = torch.zeros(8, 16, device=device)
    _, position, offsets = ops.moe_route(ids, 3, packed)
    with pytest.raises((ValueError, RuntimeError), match="int64 or int32"):
        ops.moe_route(ids.float(), 3, packed)
    with pytest.raises((ValueError, RuntimeError), match="0 experts; they are 1 to 1024"):
        ops.moe_route(ids, 0, packed)
    with pytest.raises((ValueError, RuntimeError), match="y has a row for each pair"):
        ops.moe_combine(y[:7], None, position, offsets, packed)
    with pytest.raises((ValueError, RuntimeError), match="position is not int32"):
        ops.moe_combine(y, None, position.float(), offsets, packed)
    with pytest.raises((ValueError, RuntimeError), match="scores are float32"):
        ops.moe_combine(y, torch.zeros(4, 2, device=device).bfloat16(), position, offsets, packed)
