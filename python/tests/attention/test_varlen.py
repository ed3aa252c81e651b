"""float8.torch.varlen_attention: that each sequence has what it has alone, its gradients, torch.compile, and what it
refuses or tells of later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import same, sqnr
from torch import Tensor
from torch.nn import functional

import float8.torch as f8
from float8.torch import attention

D = 128
LENGTHS = (100, 0, 1, 260, 40)


def offsets_of(lengths: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().to(device)


def operands(device: str, queries: int, keys: int, size: int = D) -> list[Tensor]:
    """Returns query, key, value and the gradient of the result."""
    sizes = ((queries, 2), (keys, 1), (keys, 1), (queries, 2))
    return [torch.randn(s, h, size).bfloat16().to(device) for s, h in sizes]


def step(call: Any, tensors: list[Tensor], *args: Any, **options: Any) -> list[Tensor]:
    """Returns the result and the gradients of query, key and value."""
    *leaves, grad = [x.detach().requires_grad_() for x in tensors]
    o = call(*leaves, *args, enable_gqa=True, **options)
    o.backward(grad.detach())
    return [o.detach(), *(x.grad for x in leaves)]  # type: ignore[misc]


def alone(
    tensors: list[Tensor],
    of_q: tuple[int, ...],
    of_k: tuple[int, ...],
    dtype: torch.dtype = torch.bfloat16,
    call: Any = f8.scaled_dot_product_attention,
    **options: Any,
) -> list[Tensor]:
    """The same by attention of one sequence after the other."""
    q, k, v, grad = tensors
    parts = []
    for each in zip(
        *(x.split(n) for x, n in ((q, of_q), (k, of_k), (v, of_k), (grad, of_q))), strict=True
    ):
        own = [x.transpose(0, 1)[None].to(dtype) for x in each]
        if own[0].shape[2] == 0 or own[1].shape[2] == 0:
            results = [torch.zeros_like(own[i]) for i in (0, 0, 1, 2)]
        else:
            results = step(call, own, **options)
        parts.append([x[0].transpose(0, 1) for x in results])
    return [torch.cat(x) for x in zip(*parts, strict=True)]


@pytest.mark.parametrize(
    ("causal", "window", "size"),
    [(True, None, D), (False, None, D), (True, 70, D), (True, None, 64), (True, None, 256)],
)
def test_each_sequence_has_what_it_has_alone(
    device: str, options: dict[str, Any], causal: bool, window: int | None, size: int
) -> None:
    tensors = operands(device, sum(LENGTHS), sum(LENGTHS), size)
    cu = offsets_of(LENGTHS, device)
    mode = {"is_causal": causal, "window": window, **options}
    own = step(f8.varlen_attention, tensors, cu, cu, 260, 260, **mode)
    expected = alone(tensors, LENGTHS, LENGTHS, **mode)
    assert same(own[:1], expected[:1])
    if device == "cpu":  # a GPU adds gradients in other orders
        assert same(own, expected)
    assert all(sqnr(a, e.double()) > 40 for a, e in zip(own, expected, strict=True))
    f8.check_sequences()


def test_keys_of_their_own(device: str, options: dict[str, Any]) -> None:
    of_q, of_k = (130, 3, 20, 0), (40, 200, 0, 9)
    tensors = operands(device, sum(of_q), sum(of_k))
    cu = (offsets_of(of_q, device), offsets_of(of_k, device))
    own = step(f8.varlen_attention, tensors, *cu, 130, 200, **options)
    expected = alone(tensors, of_q, of_k, **options)
    assert same(own[:1], expected[:1])
    assert not own[0][133:153].any()  # without keys
    for actual, each in zip(own, expected, strict=True):
        assert actual.isfinite().all()
        assert sqnr(actual, each.double()) > 40


@pytest.mark.parametrize("recipe", ["fp8_forward", "fp8", "bf16"])
def test_only_empty_sequences(device: str, options: dict[str, Any], recipe: str) -> None:
    """There is no query, or no key: results are empty or 0, and so are gradients."""
    mode = {"recipe": recipe, "return_lse": True, **options}
    for queries, keys in ((0, 0), (5, 0), (0, 7)):
        tensors = operands(device, queries, keys)
        of_q, of_k = (offsets_of((0, n), device) for n in (queries, keys))
        for longest in ((queries, keys), (9, 9)):
            *leaves, grad = [x.requires_grad_() for x in tensors]
            o, lse = f8.varlen_attention(*leaves, of_q, of_k, *longest, enable_gqa=True, **mode)
            assert o.shape == leaves[0].shape and o.dtype == torch.bfloat16 and not o.any()
            assert lse.shape == (2, queries) and lse.dtype == torch.float32
            assert lse.isneginf().all() and not lse.requires_grad
            for x, dx in zip(leaves, torch.autograd.grad(o, leaves, grad), strict=True):
                assert dx.shape == x.shape and dx.dtype == x.dtype and not dx.any()
    tensors = operands(device, 0, 0)
    cu = offsets_of((0, 0), device)
    for causal in (True, False):
        result, *grads = step(
            f8.varlen_attention, tensors, cu, None, 0, 0, is_causal=causal, recipe=recipe, **options
        )
        assert result.shape == (0, 2, D) and [x.shape for x in grads] == [
            x.shape for x in tensors[:3]
        ]
    f8.check_sequences()


def test_a_compiled_call_of_empty_sequences(device: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    call = lambda *x, **more: f8.varlen_attention(*x, **more)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    cu = offsets_of((0, 0), device)
    assert same(
        *(step(each, operands(device, 0, 0), cu, cu, 0, 0, **options) for each in (compiled, call))
    )


@pytest.mark.parametrize("causal", [True, False])
def test_gradients(device: str, options: dict[str, Any], causal: bool) -> None:
    tensors = operands(device, sum(LENGTHS), sum(LENGTHS))
    tensors[1] += 20  # a mean that no softmax sees
    cu = offsets_of(LENGTHS, device)
    own = step(f8.varlen_attention, tensors, cu, None, 260, 260, is_causal=causal, **options)
    exact = alone(
        tensors,
        LENGTHS,
        LENGTHS,
        torch.float64,
        functional.scaled_dot_product_attention,
        is_causal=causal,
    )
    reached = [sqnr(a, e) for a, e in zip(own, exact, strict=True)]
    assert all(db > least for db, least in zip(reached, (25, 23, 23, 26), strict=True)), reached


@pytest.mark.parametrize("causal", [True, False])
def test_a_compiled_model_has_the_same_bits(
    device: str, options: dict[str, Any], causal: bool
) -> None:
    torch._dynamo.reset()

    def call(*x: Any, **more: Any) -> Tensor:
        cu = x[3]
        return f8.varlen_attention(*x[:3], cu, cu, *x[4:], **more)

    backend = "inductor" if causal else "aot_eager"
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=backend)
    for lengths in (LENGTHS, (7, 150, 30)):
        tensors = operands(device, sum(lengths), sum(lengths))
        args = (offsets_of(lengths, device), max(lengths), max(lengths))
        expected = step(call, tensors, *args, is_causal=causal, **options)
        assert same(
            step(compiled, tensors, *args, is_causal=causal, **options)[
                : 4 if device == "cpu" else 1
            ],
            expected[: 4 if device == "cpu" else 1],
        )


def test_a_nan_is_its_sequences_alone(device: str, options: dict[str, Any]) -> None:
    tensors = operands(device, sum(LENGTHS), sum(LENGTHS))
    cu = offsets_of(LENGTHS, device)
    clean = step(f8.varlen_attention, tensors, cu, cu, 260, 260, **options)
    tensors[1][50, 0, 5] = torch.nan
    own = step(f8.varlen_attention, tensors, cu, cu, 260, 260, **options)
    assert own[0][:100].isnan().any()
    for actual, expected in zip(own, clean, strict=True):
        if device == "cpu":
            assert torch.equal(actual[100:], expected[100:])
        assert actual[100:].isfinite().all()
    assert torch.equal(own[0][100:], clean[0][100:])


def test_any_strides_give_the_same_bits(device: str, options: dict[str, Any]) -> None:
    tensors = operands(device, sum(LENGTHS), sum(LENGTHS))
    cu = offsets_of(LENGTHS, device)
    expected = step(f8.varlen_attention, tensors, cu, cu, 260, 260, **options)
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors[:3]]
    own = step(f8.varlen_attention, [*heads_first, tensors[3]], cu, cu, 260, 260, **options)
    assert same(own, expected) if device == "cpu" else same(own[:1], expected[:1])


MODES = ({"is_causal": True}, {}, {"is_causal": True, "window": 70})


def names_of(call: Any, *args: Any, **options: Any) -> tuple[Any, set[str]]:
    """Returns the result of a call, and the names of the ops that ran."""
    with torch.profiler.profile() as profile:
        result = call(*args, **options)
    return result, {event.key for event in profile.key_averages()}


# cuDNN or its emulation computes these, and PyTorch where there is none, and for other heads.
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("size", "is_own"), [(64, True), (D, True), (256, True), (96, False)])
def test_bf16_is_near_fp64(
    device: str, options: dict[str, Any], mode: dict[str, Any], size: int, is_own: bool
) -> None:
    tensors = operands(device, sum(LENGTHS), sum(LENGTHS), size)
    cu = offsets_of(LENGTHS, device)
    mode = {"recipe": "bf16", **mode}
    exact = alone(tensors, LENGTHS, LENGTHS, torch.float64, **mode)
    args = (tensors, cu, cu, 260, 260)
    own, names = names_of(step, f8.varlen_attention, *args, **mode, **options)
    if device == "cuda":
        is_own = is_own and attention.has_cudnn(packed_head=size)
    assert ("float8::attention_backward" in names) == is_own
    for each in (own, step(f8.varlen_attention, *args, **mode)):
        assert all(sqnr(a, e) > 40 for a, e in zip(each, exact, strict=True))
    f8.check_sequences()


@pytest.mark.parametrize("compiled", [False, True])
def test_bf16_with_keys_of_their_own(device: str, options: dict[str, Any], compiled: bool) -> None:
    torch._dynamo.reset()
    of_q, of_k = (130, 3, 20, 0), (40, 200, 0, 9)
    tensors = operands(device, sum(of_q), sum(of_k))
    cu = (offsets_of(of_q, device), offsets_of(of_k, device))
    call = f8.varlen_attention
    if compiled:
        call = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    exact = alone(tensors, of_q, of_k, torch.float64, recipe="bf16")
    own = step(call, tensors, *cu, 130, 200, recipe="bf16", **options)
    by_pytorch = step(f8.varlen_attention, tensors, *cu, 130, 200, recipe="bf16")
    for each in (own, by_pytorch):
        assert not each[0][133:153].any()  # without keys
        assert all(sqnr(a, e) > 40 for a, e in zip(each, exact, strict=True))
    no_queries, no_keys = slice(240, 249), slice(133, 153)
    assert not own[1][no_keys].any() and not own[2][no_queries].any()
    assert not own[3][no_queries].any()


def test_bf16_with_a_fused_projection(device: str, options: dict[str, Any]) -> None:
    """Where q, k and v lie beside each other there are gaps between their tokens."""
    torch.manual_seed(0)
    fused = torch.randn(sum(LENGTHS), 8, 128, device=device).bfloat16().requires_grad_()
    cu = offsets_of(LENGTHS, device)
    mode = {"recipe": "bf16", "is_causal": True, "enable_gqa": True, **options}
    grads = []
    for of_part in (Tensor.contiguous, lambda x: x):
        parts = [of_part(x) for x in fused.split((4, 2, 2), 1)]  # type: ignore[no-untyped-call]
        y = f8.varlen_attention(*parts, cu, cu, 260, 260, **mode)
        grads += torch.autograd.grad(y.float().square().sum(), fused)
    assert sqnr(*grads) > 40


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("heads", "mode", "words"),
    [
        ((4, 3, 3), {"enable_gqa": True}, "query has 4 heads, key 3; the first are a multiple"),
        ((4, 2, 2), {}, "query has 4 heads, key 2; set enable_gqa$"),
        ((4, 2, 4), {"enable_gqa": True}, "the shapes do not match: q .*, v"),
        ((2, 2, 2), {"scale": 0.0}, "scale is 0.0; it is a positive number$"),
        ((2, 2, 2), {"scale": "a"}, "scale is 'a'; it is a positive number$"),
    ],
)
def test_refuses_what_no_recipe_has(
    device: str, options: dict[str, Any], heads: Any, mode: Any, words: str, recipe: str
) -> None:
    q, k, v = (torch.randn(20, each, 64, device=device).bfloat16() for each in heads)
    cu = offsets_of((12, 8), device)
    with pytest.raises(ValueError, match=words):
        f8.varlen_attention(q, k, v, cu, cu, 12, 12, recipe=recipe, **mode, **options)


def test_bf16_takes_what_pytorch_does(device: str, options: dict[str, Any]) -> None:
    q, k, v, _ = operands(device, sum(LENGTHS), sum(LENGTHS))
    cu = offsets_of(LENGTHS, device)
    args = (cu, cu, 260, 260)
    mode = {"recipe": "bf16", "is_causal": True, "enable_gqa": True, **options}
    expected = f8.varlen_attention(q, k, v, *args, **mode)
    halves = [x.half() for x in (q, k, v)]
    other, names = names_of(f8.varlen_attention, *halves, *args, **mode)
    assert other.dtype == torch.float16 and "float8::attention_forward" not in names
    assert sqnr(other, expected.double()) > 40
    with torch.autocast(device, torch.bfloat16):
        own = f8.varlen_attention(q.float(), k.float(), v.float(), *args, **mode)
    assert same([own], [expected])


@pytest.mark.gpu
def test_a_deterministic_pack_in_bf16_is_pytorchs() -> None:
    """cuDNN adds with atomics. A forward of it has PyTorch's backward where algorithms become deterministic behind it."""
    tensors = operands("cuda", sum(LENGTHS), sum(LENGTHS))
    cu = offsets_of(LENGTHS, "cuda")
    args = (tensors, cu, cu, 260, 260)
    mode = {"recipe": "bf16", "is_causal": True}
    expected = step(f8.varlen_attention, *args, **mode)
    *leaves, grad = [x.detach().requires_grad_() for x in tensors]
    o = f8.varlen_attention(*leaves, *args[1:], enable_gqa=True, **mode)
    torch.use_deterministic_algorithms(True)
    try:
        o.backward(grad.detach())
        own, names = names_of(step, f8.varlen_attention, *args, **mode)
        again = step(f8.varlen_attention, *args, **mode)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "float8::attention_forward" not in names
    assert same(own, again)
    for each in (own, [o.detach(), *(x.grad for x in leaves)]):
        assert all(sqnr(a, e.double()) > 40 for a, e in zip(each, expected, strict=True))


@pytest.mark.parametrize("recipe", range(3))
def test_ops_have_honest_schemas_and_fakes(
    device: str, options: dict[str, Any], recipe: int
) -> None:
    q, k, v, grad = (x.transpose(0, 1)[None] for x in operands(device, 130, 130))
    cu = offsets_of((100, 30), device)
    mode = (0.1, True, 64, 16 if options["emulate"] else 0)
    tests = ("test_schema", "test_faketensor")
    args = (q, k, v, *mode, cu, cu, 100, 100, recipe)
    torch.library.opcheck(attention.attention_forward, args, test_utils=tests)
    o, lse, saved = attention.attention_forward(*args)
    own = (q, k, v) if recipe == attention.BF16 else (None, None, None)
    backward = (grad, o, lse, saved, 1, 130, *mode, 2, recipe, *own, 100, 100)
    torch.library.opcheck(attention.attention_backward, backward, test_utils=tests)
    if recipe == attention.FP8_FORWARD:
        torch.library.opcheck(
            attention.attention_dequantize, (saved, o, 1, 130, *mode, 2), test_utils=tests
        )


@pytest.mark.parametrize("recipe", ["fp8_forward", "bf16"])
@pytest.mark.parametrize(
    ("offsets", "longest", "words"),
    [
        ([0, 90, 50, 130], 130, "offset 2 of cu_seqlens_q"),
        ([0, 90, 400, 130], 130, "offset 2 of cu_seqlens_q"),
        ([0, -4, 50, 130], 130, "offset 1 of cu_seqlens_q"),
        ([1, 10, 50, 130], 130, "offset 0 of cu_seqlens_q"),
        ([0, 10, 50, 120], 130, "offset 3 of cu_seqlens_q"),
        ([0, 10, 50, 130], 79, "sequence 2 has more queries than max_seqlen_q"),
    ],
)
def test_bad_offsets_are_told_of_later(
    device: str,
    options: dict[str, Any],
    recipe: str,
    offsets: list[int],
    longest: int,
    words: str,
) -> None:
    if recipe == "bf16" and device == "cuda" and not attention.has_cudnn(packed_head=D):
        pytest.skip("PyTorch's attention checks no offsets")
    options = {"recipe": recipe, **options}
    tensors = operands(device, 130, 130)
    bad = torch.tensor(offsets, dtype=torch.int32, device=device)
    longest = longest if device == "cpu" else 130
    own = step(f8.varlen_attention, tensors, bad, bad, longest, longest, **options)
    assert all(x.isfinite().all() for x in own)
    if "max_seqlen" in words and device != "cpu":
        return
    with pytest.raises(ValueError, match="check_sequences") as error:
        f8.check_sequences()
    assert words in str(error.value)
    f8.check_sequences()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"cu_seqlens_q": [0, 130]}, "list"),
        ({"cu_seqlens_q": torch.tensor([0, 130])}, "torch.int64"),
        ({"cu_seqlens_q": torch.zeros(1, dtype=torch.int32)}, "[sequences + 1]"),
        ({"cu_seqlens_q": torch.zeros(2, 2, dtype=torch.int32)}, "[sequences + 1]"),
        ({}, "contiguous"),
        ({"cu_seqlens_q": torch.tensor([0, 130], dtype=torch.int32)}, "2 offsets"),
        ({"is_causal": True}, "is_causal"),
        ({"max_seqlen_q": 0}, "max_seqlen_q is 0"),
        ({"max_seqlen_k": -1}, "max_seqlen_k is -1"),
        ({"max_seqlen_k": torch.tensor(3)}, "max_seqlen_k is tensor"),
        ({"window": 4}, "is_causal"),
        ({"enable_gqa": False}, "enable_gqa"),
        ({"scale": -1.0}, "scale"),
        ({"recipe": "fp4"}, "recipe"),
        ({"query": torch.zeros(130, 2, 96).bfloat16()}, "96"),
        ({"query": torch.zeros(130, 2, D)}, "torch.float32"),
        ({"query": torch.zeros(1, 2, 130, D).bfloat16()}, "[tokens, heads, head_dim]"),
        ({"value": torch.zeros(129, 1, D).bfloat16()}, "do not match"),
    ],
)
def test_refuses(device: str, options: dict[str, Any], change: dict[str, Any], word: str) -> None:
    q, k, v, _ = operands(device, 130, 130)
    cu = (offsets_of((100, 30), device), offsets_of((90, 40), device))
    good = {"query": q, "key": k, "value": v, "cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1]}
    moved = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in change.items()}
    if word == "contiguous":
        moved["cu_seqlens_q"] = torch.zeros(6, dtype=torch.int32, device=device)[::2]
    with pytest.raises(ValueError, match="float8") as error:
        f8.varlen_attention(
            **{**good, "max_seqlen_q": 130, "max_seqlen_k": 130, "enable_gqa": True}
            | options
            | moved
        )
    assert word in str(error.value)


def test_offsets_on_the_host_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (torch.empty(130, 2, D, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        host = torch.empty(3, dtype=torch.int32)
        with pytest.raises(ValueError, match="cu_seqlens_q is on cpu"):
            f8.varlen_attention(q, k, v, host, host, 130, 130)
        own = host.to("cuda")
        assert f8.varlen_attention(q, k, v, own, own, 130, 130).shape == q.shape
        for mode in ({"is_causal": True}, {}, {"is_causal": True, "window": 50}):
            y = f8.varlen_attention(q, k, v, own, own, 130, 130, recipe="bf16", **mode)
            assert y.shape == q.shape


def test_backward_on_a_gpu_has_the_operands_shapes() -> None:
    """The call of PyTorch's flash attention, with tensors without data, which need no GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v, o, grad = (
            torch.empty(130, h, D, dtype=torch.bfloat16, device="cuda") for h in (4, 2, 2, 4, 4)
        )
        offsets = torch.empty(2, 3, dtype=torch.int32, device="cuda")
        lse = torch.empty(4, 130, device="cuda")
        for causal, window in ((True, 0), (False, 0), (True, 70)):
            own = (grad, q, k, v, o, lse, (offsets[0], offsets[1]), (100, 100))
            grads = attention.flash_backward(*own, D**-0.5, causal, window)
            assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]
