"""The ops that route tokens to experts and combine their rows, against torch's sort and gather."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_experts
from torch import Tensor

import float8.torch as f8
from float8 import recipes
from float8.torch.experts import ops

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
    scores = torch.rand(tokens, top, device=device)
    *own, row_scores = ops.moe_route(ids, scores, experts, packed)
    *expected, known = torch_experts.route(ids, experts)
    for one, two in zip(own, expected, strict=True):
        assert one.dtype == torch.int32
        assert torch.equal(one, two.int())
    assert torch.equal(own[1] < own[2][-1], known)
    assert torch.equal(row_scores[own[1].long()], torch.where(known, scores, 0.0))
    assert ops.moe_route(ids, None, experts, packed)[3].numel() == 0


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
    position, offsets, _ = ops.moe_route(ids, None, experts, packed)[1:]
    known = torch_experts.route(ids, experts)[3]
    y = torch.randn(tokens * top, 64, device=device).to(dtype)
    scores = torch.rand(tokens, top, device=device)
    bad = y.clone()
    bad[int(offsets[-1]) :] = torch.nan
    y[int(offsets[-1]) :] = 0
    total = torch_experts.weighted_sum(y, scores, position, known)
    assert torch.equal(ops.moe_combine(bad, scores, position, offsets, packed), total)
    total = torch_experts.weighted_sum(y, None, position, known)
    assert torch.equal(ops.moe_combine(bad, None, position, offsets, packed), total)
    dout = torch.randn(tokens, 64, device=device).to(dtype)
    dscores = ops.moe_score_gradient(dout, bad, position, offsets, packed)
    dots = (y[position].double() * dout[:, None].double()).sum(-1)
    torch.testing.assert_close(dscores.double(), dots, rtol=1e-5, atol=1e-4)
    assert not dscores[~known].any()


def test_ops_take_any_strides(device: str, packed: int) -> None:
    """Of ids, scores, rows and gradients, and rows that lie anywhere in a buffer."""
    ids = torch.randint(-1, 6, (3, 40), device=device).T
    scores = torch.rand(40, 6, device=device)[:, ::2]
    index, position, offsets, row_scores = ops.moe_route(ids, scores, 5, packed)
    plain = ops.moe_route(ids.contiguous(), scores.contiguous(), 5, packed)
    for one, two in zip((index, position, offsets, row_scores), plain, strict=True):
        assert torch.equal(one, two)
    y = torch.randn(120, 16, device=device).bfloat16()
    dout = torch.randn(40, 16, device=device).bfloat16()
    places = (position, offsets, packed)
    total = ops.moe_combine(y, scores.contiguous(), *places)
    dots = ops.moe_score_gradient(dout, y, *places)
    moved = torch.empty(120 * 16 + 1, device=device, dtype=y.dtype)[1:].view(120, 16).copy_(y)
    for rows in (y.T.contiguous().T, torch.cat([y, y], 1)[:, :16], moved):
        assert torch.equal(ops.moe_combine(rows, scores, *places), total)
        assert torch.equal(ops.moe_score_gradient(dout.T.contiguous().T, rows, *places), dots)
    one = torch.ones((), device=device, dtype=y.dtype)
    dots = ops.moe_score_gradient(one.expand(40, 16).contiguous(), y, *places)
    assert torch.equal(ops.moe_score_gradient(one.expand(40, 16), y, *places), dots)


def test_ops_compile(device: str, packed: int) -> None:
    def call(ids: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        scores = x[:, : ids.shape[1]]
        index, position, offsets, row_scores = ops.moe_route(ids, scores, 5, packed)
        out = ops.moe_combine(x[index], scores, position, offsets, packed)
        return out, ops.moe_score_gradient(x, x[index], position, offsets, packed), row_scores

    torch.compiler.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for tokens in (40, 77):
        ids = torch.randint(-1, 6, (tokens, 3), device=device)
        x = torch.randn(tokens, 16, device=device)
        for own, other in zip(compiled(ids, x), call(ids, x), strict=True):
            assert torch.equal(own, other)


@pytest.mark.parametrize(
    ("where", "bit"),
    [
        pytest.param("cpu", recipes.STAGED, id="cpu"),
        pytest.param("cuda", 0, id="cuda", marks=pytest.mark.gpu),
    ],
)
def test_the_emulated_device_reads_staged_tensors(where: str, bit: int) -> None:
    """As of a GPU; a bit of the config stages tensors of the CPU, too."""
    ids, scores = torch.randint(-1, 6, (40, 3)), torch.rand(40, 3)
    y, dout = torch.randn(120, 16), torch.randn(40, 16)
    config = f8.functional.pack_experts("rowwise", True, False)
    results = []
    for place, own in (("cpu", config), (where, config | bit)):
        ids_there, scores_there, y_there, dout_there = (
            each.to(place) for each in (ids, scores, y, dout)
        )
        routed = ops.moe_route(ids_there, scores_there, 5, own)
        places = (routed[1], routed[2], own)
        out = ops.moe_combine(y_there, scores_there, *places)
        results.append([*routed, out, ops.moe_score_gradient(dout_there, y_there, *places)])
        assert all(each.device.type == place for each in results[-1])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two.cpu())


def test_ops_refuse_operands(device: str, packed: int) -> None:
    ids = torch.zeros(4, 2, dtype=torch.int64, device=device)
    y = torch.zeros(8, 16, device=device)
    _, position, offsets, _ = ops.moe_route(ids, None, 3, packed)
    with pytest.raises((ValueError, RuntimeError), match="int64 or int32"):
        ops.moe_route(ids.float(), None, 3, packed)
    with pytest.raises((ValueError, RuntimeError), match="0 experts; they are 1 to 1024"):
        ops.moe_route(ids, None, 0, packed)
    with pytest.raises((ValueError, RuntimeError), match=r"scores are not \[4, 2\]"):
        ops.moe_route(ids, torch.zeros(4, 3, device=device), 3, packed)
    with pytest.raises((ValueError, RuntimeError), match="y has a row for each pair"):
        ops.moe_combine(y[:7], None, position, offsets, packed)
    with pytest.raises((ValueError, RuntimeError), match="position is not int32"):
        ops.moe_combine(y, None, position.float(), offsets, packed)
    with pytest.raises((ValueError, RuntimeError), match="scores are float32"):
        ops.moe_combine(y, torch.zeros(4, 2, device=device).bfloat16(), position, offsets, packed)
    with pytest.raises((ValueError, RuntimeError), match=r"dout is not \[4, 16\]"):
        ops.moe_score_gradient(y, y, position, offsets, packed)
