"""float8.torch.functional.moe: the order of pairs, dropped ones, gradients and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import same
from swiglu import swiglu
from torch import Tensor

import float8.torch as f8
from float8.torch.experts.routing import combine, dispatch, route

E, D, F, T, TOP = 4, 64, 48, 50, 3


def operands(device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns x, ids, scores, w13 and w2."""
    x = torch.randn(T, D).to(device, torch.bfloat16)
    ids = torch.stack([torch.randperm(E)[:TOP] for _ in range(T)]).to(device)
    scores = torch.rand(T, TOP).to(device)
    w13 = (torch.randn(E, 2 * F, D) / 8).to(device, torch.bfloat16)
    w2 = (torch.randn(E, D, F) / 8).to(device, torch.bfloat16)
    return x, ids, scores, w13, w2


def one_by_one(
    x: Tensor, ids: Tensor, scores: Tensor, w13: Tensor, w2: Tensor, **options: Any
) -> Tensor:
    """The same by dense linears for each expert, added in the order of the pairs."""
    pairs = []
    flat = ids.flatten()
    rows = torch.zeros(T * TOP, D, device=x.device, dtype=x.dtype)
    for e in range(E):
        at = (flat == e).nonzero().flatten()
        if at.numel() == 0:
            continue
        gate, up = f8.functional.linear(x[at // TOP], w13[e], **options).chunk(2, -1)
        y = f8.functional.linear(swiglu(gate, up), w2[e], **options)
        rows = rows.index_copy(0, at, y)
    total = torch.zeros(T, D, device=x.device)
    for k in range(TOP):
        pairs.append(rows.view(T, TOP, D)[:, k] * scores[:, k, None].float())
    for each in pairs:
        total = total + each
    return total.to(x.dtype)


def step(call: Any, tensors: Any, **options: Any) -> list[Tensor]:
    """Returns the result and the gradients of x, scores, w13 and w2."""
    x, ids, scores, *weights = tensors
    leaves = [each.detach().requires_grad_() for each in (x, scores, *weights)]
    y = call(leaves[0], ids, leaves[1], *leaves[2:], **options)
    torch.manual_seed(2)
    y.backward(torch.randn(y.shape).to(y.device, y.dtype))
    return [y.detach(), *(each.grad for each in leaves)]  # type: ignore[misc]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_is_a_sum_of_dense_experts(device: str, options: dict[str, Any], recipe: str) -> None:
    tensors = operands(device)
    own = step(f8.functional.moe, tensors, recipe=recipe, **options)
    other = step(one_by_one, tensors, recipe=recipe, **options)
    if device == "cpu":
        assert torch.equal(own[0], other[0])
    # Autograd adds the gradients of x in another order, and rounds between.
    for one, two in zip(own, other, strict=True):
        assert one.dtype == two.dtype
        assert (one.float() - two.float()).norm() < 0.02 * two.float().norm()


def test_has_weights_of_three_forms(device: str, options: dict[str, Any]) -> None:
    x, ids, scores, w13, w2 = operands(device)
    expected = f8.functional.moe(x, ids, scores, w13, w2, recipe="rowwise", **options)
    y = f8.functional.moe(x, ids, scores, w13.view(E, 2, F, D), w2, recipe="rowwise", **options)
    assert torch.equal(y, expected)
    gate, up = w13.chunk(2, dim=1)
    y = f8.functional.moe(x, ids, scores, (gate, up), w2, recipe="rowwise", **options)
    # The exponential function of PyTorch has other last bits.
    assert (y.float() - expected.float()).norm() < 0.01 * expected.float().norm()
    shaped = [each.view(2, T // 2, -1) for each in (x, ids, scores)]
    y = f8.functional.moe(*shaped, w13, w2, recipe="rowwise", **options)
    assert torch.equal(y.view(T, D), expected)


def test_sorts_pairs_by_expert_and_keeps_their_order() -> None:
    ids = torch.tensor([[2, 0], [0, 7], [2, 1], [-1, 0]])
    routing = route(ids, 3)
    assert routing.offs.tolist() == [3, 4, 6]
    assert routing.offs.dtype == torch.int32
    assert routing.tokens.tolist() == [0, 1, 3, 2, 0, 2, 1, 3]
    assert routing.rows.tolist() == [[4, 0], [1, 6], [5, 3], [7, 2]]
    assert routing.known.tolist() == [[True, True], [True, False], [True, True], [False, True]]
    assert routing.experts.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]


def test_gradients_of_the_permutations_are_those_of_indexing() -> None:
    ids = torch.tensor([[2, 0], [0, 7], [2, 1], [-1, 0]])
    routing = route(ids, 3)
    x = torch.randn(4, 8, dtype=torch.float64).float().requires_grad_()
    scores = torch.rand(4, 2, requires_grad=True)
    y = combine(dispatch(x, routing) * 2, scores, routing)
    known = routing.known.float()
    expected = (2 * x * (scores * known).sum(1, keepdim=True)).float()
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    own = torch.autograd.grad(y, (x, scores), dy)
    torch.testing.assert_close(own, torch.autograd.grad(expected, (x, scores), dy))


def test_drops_pairs_without_an_expert(device: str, options: dict[str, Any]) -> None:
    """Their scores have the gradient 0, whatever they are; a token without any expert is 0."""
    x, ids, scores, w13, w2 = operands(device)
    ids[3, 1], ids[5, 0] = -1, E + 3
    ids[7] = E
    scores[3, 1] = torch.nan
    y, dx, dscores, *_ = step(f8.functional.moe, (x, ids, scores, w13, w2), **options)
    assert not y[7].any()
    assert not dx[7].any()
    assert not dscores[7].any()
    assert (dscores[3, 1], dscores[5, 0]) == (0, 0)
    assert y.isfinite().all()
    assert dscores.isfinite().all()
    scores[3, 1] = 0
    ids[3, 1] = ids[3, 0]
    again = f8.functional.moe(x, ids, scores, w13, w2, recipe="rowwise", **options)
    ids[3, 1] = -1
    assert torch.equal(
        again, f8.functional.moe(x, ids, scores, w13, w2, recipe="rowwise", **options)
    )


def test_copies_of_weights_that_are_kept_change_nothing(
    device: str, options: dict[str, Any]
) -> None:
    tensors = operands(device)
    expected = step(f8.functional.moe, tensors, recipe="rowwise", **options)
    own = step(f8.functional.moe, tensors, recipe="rowwise", recompute=False, **options)
    assert same(own, expected)
    with torch.no_grad():
        y = f8.functional.moe(*tensors, recipe="rowwise", **options)
    assert torch.equal(y, expected[0])


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (2, 3)])
def test_gradients_that_are_not_wanted_are_left_out(
    device: str, options: dict[str, Any], wanted: tuple[int, ...]
) -> None:
    """The others have the same bits: of x, scores, w13 and w2."""
    x, ids, scores, w13, w2 = operands(device)
    expected = step(f8.functional.moe, (x, ids, scores, w13, w2), **options)
    leaves = [
        each.detach().requires_grad_(i in wanted) for i, each in enumerate((x, scores, w13, w2))
    ]
    y = f8.functional.moe(leaves[0], ids, leaves[1], *leaves[2:], **options)
    torch.manual_seed(2)
    y.backward(torch.randn(y.shape).to(y.device, y.dtype))
    for i, leaf in enumerate(leaves):
        assert (leaf.grad is not None) == (i in wanted)
        if leaf.grad is not None:
            assert torch.equal(leaf.grad, expected[1 + i])


def test_compiles(device: str, options: dict[str, Any]) -> None:
    def call(*tensors: Any) -> Tensor:
        return f8.functional.moe(*tensors, recipe="blockwise", **options)

    torch.compiler.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        tensors = operands(device)
        assert same(step(compiled, tensors), step(call, tensors))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, i, s, a, b: (x, i[1:], s, a, b), "both are \\[tokens, top_k\\]"),
        (lambda x, i, s, a, b: (x, i, s[:, 1:], a, b), "both are \\[tokens, top_k\\]"),
        (lambda x, i, s, a, b: (x, i.float(), s, a, b), "int64 or int32"),
        (lambda x, i, s, a, b: (x, i, s.long(), a, b), "floating point"),
        (lambda x, i, s, a, b: (x, i.to("meta"), s, a, b), "topk_ids on meta"),
        (lambda x, i, s, a, b: (x, i, s, a[:, :-16], b), "with the gates first"),
        (lambda x, i, s, a, b: (x, i, s, (a, a, a), b), "or the two of"),
        (lambda x, i, s, a, b: (x, i, s, a[:-1], b), "with the gates first"),
        (lambda x, i, s, a, b: (x[:, :48], i, s, a, b), "rows of 48 elements"),
        (lambda x, i, s, a, b: (x, i, s, a.double(), b.double()), "of torch.float64"),
    ],
)
def test_refuses_operands_that_cannot_be(
    device: str, options: dict[str, Any], change: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        f8.functional.moe(*change(*operands(device)), **options)
