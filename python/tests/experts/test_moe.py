"""float8.torch.functional.moe: the order of pairs, dropped ones, gradients and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_experts
from activations import glu
from reference import same
from torch import Tensor

import float8.torch as f8
from float8.torch.experts import ops
from float8.torch.experts.moe import mlp_of_rows
from float8.torch.experts.routing import combine, dispatch, experts_of_rows, route

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
        y = f8.functional.linear(glu(gate, up), w2[e], **options)
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


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "bf16"])
def test_is_a_sum_of_dense_experts(device: str, options: dict[str, Any], recipe: str) -> None:
    tensors = operands(device)
    own = step(f8.functional.moe, tensors, recipe=recipe, **options)
    other = step(one_by_one, tensors, recipe=recipe, **options)
    # In bf16 the activation is PyTorch's, whose exponential function has other last bits.
    if device == "cpu" and recipe != "bf16":
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
    pair = w13.chunk(2, dim=1)
    y = f8.functional.moe(x, ids, scores, pair, w2, recipe="rowwise", **options)
    assert torch.equal(y, expected)
    shaped = [each.view(2, T // 2, -1) for each in (x, ids, scores)]
    y = f8.functional.moe(*shaped, w13, w2, recipe="rowwise", **options)
    assert torch.equal(y.view(T, D), expected)


def of_pair(
    x: Tensor, ids: Tensor, scores: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, **options: Any
) -> Tensor:
    return f8.functional.moe(x, ids, scores, (w1, w3), w2, **options)


def halves(w13: Tensor) -> list[Tensor]:
    return [each.contiguous() for each in w13.chunk(2, dim=1)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_a_pair_is_one_weight_with_the_rows_of_both(
    device: str, options: dict[str, Any], recipe: str, recompute: bool, dtype: torch.dtype
) -> None:
    """Blocks of 128 rows have rows of both; an expert has no rows, and some pairs are dropped."""
    x, ids, scores, w13, w2 = operands(device)
    ids[ids == 2] = 1
    ids[3, 1], ids[5] = -1, E
    w13, w2 = w13.to(dtype), w2.to(dtype)
    more = {"recipe": recipe, "recompute": recompute, **options}
    expected = step(f8.functional.moe, (x, ids, scores, w13, w2), **more)
    own = step(of_pair, (x, ids, scores, *halves(w13), w2), **more)
    joined = [*own[:3], torch.cat(own[3:5], 1), own[5]]
    assert same(joined, expected)
    assert not expected[3][2].any()
    with torch.no_grad():
        y = of_pair(x, ids, scores, *halves(w13), w2, **more)
    assert torch.equal(y, expected[0])


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp", "bf16"])
def test_other_recipes_have_a_pair_as_two_linears(
    device: str, options: dict[str, Any], recipe: str
) -> None:
    """Each of them has the scale of its own matrix: gate's are small here."""
    x, ids, scores, w13, w2 = operands(device)
    w1, w3 = halves(w13)
    w1 = w1 / 256
    more = {"recipe": recipe, **options}
    own = step(of_pair, (x, ids, scores, w1, w3, w2), **more)

    def alone(x: Tensor, ids: Tensor, scores: Tensor, *weights: Tensor, **_: Any) -> Tensor:
        config = f8.functional.pack_experts(recipe, options["emulate"], False)
        routing = route(ids, scores, E, config)
        rows = dispatch(x, routing)
        gate, up = (
            f8.grouped_mm(rows, each.transpose(-2, -1), routing.offs, **more)
            for each in weights[:2]
        )
        h = (torch.nn.functional.silu(gate.float()) * up.float()).to(x.dtype)
        return combine(
            f8.grouped_mm(h, weights[2].transpose(-2, -1), routing.offs, **more), routing
        )

    assert same(own, step(alone, (x, ids, scores, w1, w3, w2)))


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("frozen", [(2,), (3,), (2, 3), (0, 1, 4), (0, 1, 2, 4)])
def test_weights_of_a_pair_may_be_frozen(
    device: str, options: dict[str, Any], frozen: tuple[int, ...], recompute: bool
) -> None:
    """Of x, scores, w1, w3 and w2; the others' gradients have the same bits."""
    x, ids, scores, w13, w2 = operands(device)
    more = {"recipe": "blockwise", "recompute": recompute, **options}
    tensors = (x, scores, *halves(w13), w2)
    expected = step(of_pair, (x, ids, scores, *halves(w13), w2), **more)
    leaves = [each.detach().requires_grad_(i not in frozen) for i, each in enumerate(tensors)]
    y = of_pair(leaves[0], ids, *leaves[1:], **more)
    torch.manual_seed(2)
    y.backward(torch.randn(y.shape).to(y.device, y.dtype))
    for i, leaf in enumerate(leaves):
        assert (leaf.grad is None) == (i in frozen)
        assert leaf.grad is None or torch.equal(leaf.grad, expected[1 + i])


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_rows_that_a_dispatcher_put_in_place(
    device: str, options: dict[str, Any], recipe: str
) -> None:
    """They are those of tokens with one expert each, whose scores are 1."""
    x, _, _, w13, w2 = operands(device)
    ids = torch.tensor([0] * 20 + [1] * 3 + [3] * 17 + [E] * 10, device=device)[:, None]
    ones = torch.ones(T, 1, device=device)
    more = {"recipe": recipe, **options}
    expected = step(f8.functional.moe, (x, ids, ones, w13, w2), **more)
    config = f8.functional.pack_experts(recipe, options["emulate"], False)
    ends = torch.tensor([20, 23, 23, 40], dtype=torch.int32, device=device)

    def in_place(
        x: Tensor, _: Tensor, __: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, **___: Any
    ) -> Tensor:
        layout = ops.experts_layout(ends, T, config)
        return mlp_of_rows(x, (w1, w3), w2, layout, config)

    leaves = [each.requires_grad_() for each in (x.clone(), *halves(w13), w2.clone())]
    y = in_place(leaves[0], ids, ones, *leaves[1:])
    torch.manual_seed(2)
    y.backward(torch.randn(y.shape).to(y.device, y.dtype))
    found = [y.detach(), *(each.grad for each in leaves)]
    joined = [*found[:2], torch.cat(found[2:4], 1), found[4]]  # type: ignore[arg-type]
    assert same(joined, [expected[0], expected[1], *expected[3:]])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sorts_pairs_by_expert_and_keeps_their_order(
    device: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    config = f8.functional.pack_experts("rowwise", options["emulate"], False)
    ids = torch.tensor([[2, 0], [0, 7], [2, 1], [-1, 0]], device=device, dtype=dtype)
    scores = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]], device=device).bfloat16()
    routing = route(ids, scores, 3, config)
    assert routing.offs.tolist() == [3, 4, 6]
    assert routing.tokens.tolist() == [0, 1, 3, 2, 0, 2, 1, 3]
    assert routing.position.tolist() == [[4, 0], [1, 6], [5, 3], [7, 2]]
    assert routing.row_scores.tolist() == [2, 3, 8, 6, 1, 5, 0, 0]
    assert experts_of_rows(routing).tolist() == [0, 0, 0, 1, 2, 2, 2, 2]


@pytest.mark.parametrize("of_scores", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_the_permutations_are_those_of_indexing(
    device: str, options: dict[str, Any], dtype: torch.dtype, of_scores: torch.dtype
) -> None:
    config = f8.functional.pack_experts("rowwise", options["emulate"], False)
    ids = torch.randint(-1, E + 1, (T, TOP), device=device)
    x = torch.randn(T, D).to(device, dtype).requires_grad_()
    scores = torch.rand(T, TOP).to(device, of_scores).requires_grad_()
    routing = route(ids, scores, E, config)
    rows = dispatch(x, routing)
    y = combine(rows, routing)
    index, position, _, known = torch_experts.route(ids, E)
    of_rows = x[index]
    expected = torch_experts.weighted_sum(of_rows, scores.float(), position, known)
    assert torch.equal(y, expected)
    dy = torch.randn(y.shape).to(y.device, dtype)
    own = torch.autograd.grad(y, (rows, x, scores), dy)
    other = torch.autograd.grad(expected, (of_rows, x, scores), dy)
    assert torch.equal(own[0], other[0])
    ordered = torch_experts.weighted_sum(own[0], None, position, known)
    assert torch.equal(own[1], ordered)  # autograd adds in another order
    rounding = max(1e-5, torch.finfo(of_scores).eps)
    torch.testing.assert_close(own[2], other[2], rtol=rounding, atol=1e-4)
    assert not own[2][~known].any()


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


@pytest.mark.parametrize("pair", [False, True])
def test_compiles(device: str, options: dict[str, Any], pair: bool) -> None:
    """Also with weights of two linears, which has other calls."""

    def call(x: Tensor, ids: Tensor, scores: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        first: Any = w13.chunk(2, dim=1) if pair else w13
        return f8.functional.moe(x, ids, scores, first, w2, recipe="blockwise", **options)

    torch.compiler.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for dtype in (torch.float32, torch.bfloat16):
        x, ids, scores, *weights = operands(device)
        ids[3, 1], ids[5] = -1, E
        tensors = (x, ids, scores.to(dtype), *weights)
        assert same(step(compiled, tensors), step(call, tensors))


@pytest.mark.parametrize("pair", [False, True])
def test_has_ids_and_scores_of_any_type_and_strides(
    device: str, options: dict[str, Any], pair: bool
) -> None:
    """The bits are those of int64 and fp32; the gradient of scores is rounded to their type."""
    x, ids, scores, w13, w2 = operands(device)
    first: Any = w13.chunk(2, dim=1) if pair else w13
    for dtype in (torch.bfloat16, torch.float16):
        low = scores.to(dtype)
        results = []
        for own_ids, own in (
            (ids, low.float()),
            (ids.int(), low),
            (ids.T.contiguous().T, low.T.contiguous().T),
        ):
            leaves = (x.clone().requires_grad_(), own.detach().requires_grad_())
            y = f8.functional.moe(leaves[0], own_ids, leaves[1], first, w2, **options)
            y.sum().backward()  # its gradient is one number for all elements
            assert leaves[1].grad is not None and leaves[1].grad.dtype == own.dtype
            results.append((y, leaves[0].grad, leaves[1].grad.to(dtype)))
        assert same(results[0], results[1]) and same(results[0], results[2])


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_has_no_tokens_and_none_with_an_expert(
    device: str, options: dict[str, Any], pair: bool, compiled: bool
) -> None:
    """An empty batch has empty results; where all ids are dropped they are 0, as the weights' gradients."""
    x, ids, scores, w13, w2 = operands(device)

    def call(x: Tensor, ids: Tensor, scores: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        first: Any = w13.chunk(2, dim=1) if pair else w13
        return f8.functional.moe(x, ids, scores, first, w2, **options)

    torch.compiler.reset()
    function = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    for own in ((x[:0], ids[:0], scores[:0]), (x, ids + E, scores)):
        results = step(function, (*own, w13, w2))
        for one, two in zip(results, (own[0], own[0], own[2], w13, w2), strict=True):
            assert one.shape == two.shape
            assert not one.any()


@pytest.mark.gpu
@pytest.mark.parametrize("pair", [False, True])
def test_a_graph_reads_the_ids_of_each_replay(pair: bool) -> None:
    x, ids, scores, w13, w2 = operands("cuda")
    first: Any = w13.chunk(2, dim=1) if pair else w13

    def run() -> tuple[Tensor, ...]:
        leaves = [each.detach().requires_grad_() for each in (x, scores)]
        y = f8.functional.moe(leaves[0], ids, leaves[1], first, w2, recipe="rowwise")
        return (y.detach(), *torch.autograd.grad(y.float().sum(), leaves))

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in range(3):
        torch.manual_seed(seed)
        ids.copy_(torch.randint(-1, E + 1, (T, TOP)))
        scores.copy_(torch.rand(T, TOP))
        graph.replay()
        assert same(captured, run())
    f8.check_routing()


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


def test_backward_refuses_an_x_of_other_dimensions(device: str) -> None:
    one = torch.ones(4, device=device)
    rest = (None, None, None, None, None, [one] * 3, one, 1, 16, 0, 1, 0, 1)
    with pytest.raises(ValueError, match="x has 1 dimensions; rows of experts have 2"):
        torch.ops.float8.moe_backward(one, *rest)
