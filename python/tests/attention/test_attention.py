"""float8.torch.scaled_dot_product_attention: its accuracy, that backward is of the forward that ran, layouts,
torch.compile, checkpointing, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import same, sqnr
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import float8.torch as f8
from float8.torch import attention

D = 128


def operands(
    device: str,
    tokens: int = 200,
    keys: int | None = None,
    heads: int = 4,
    of_keys: int = 2,
    size: int = D,
) -> list[Tensor]:
    """Returns query, key, value and the gradient of the result."""
    sizes = ((heads, tokens), (of_keys, keys or tokens), (of_keys, keys or tokens), (heads, tokens))
    return [torch.randn(2, h, s, size).bfloat16().to(device) for h, s in sizes]


def step(call: Any, tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """Returns the result and the gradients of query, key and value."""
    *leaves, grad = [x.detach().requires_grad_() for x in tensors]
    o = call(*leaves, enable_gqa=True, **options)
    o.backward(grad.detach().to(o.dtype))
    return [o.detach(), *(x.grad for x in leaves)]  # type: ignore[misc]


def checkpointed(*x: Tensor, **more: Any) -> Any:
    return checkpoint(
        lambda *y: f8.scaled_dot_product_attention(*y, **more), *x, use_reentrant=False
    )


def compiled_anew(backend: str = "aot_eager") -> Any:
    torch._dynamo.reset()
    return torch.compile(
        lambda *x, **more: f8.scaled_dot_product_attention(*x, **more),
        fullgraph=True,
        dynamic=True,
        backend=backend,
    )


def assert_same_but_for_atomics(own: list[Tensor], expected: list[Tensor], device: str) -> None:
    """cuDNN's backward may add in another order in each call."""
    exact = len(own) if device == "cpu" else 1
    assert same(own[:exact], expected[:exact])
    assert all(sqnr(a, e.double()) > 40 for a, e in zip(own, expected, strict=True))


def check_floors(own: list[Tensor], expected: list[Tensor], floors: tuple[int, ...]) -> None:
    """Fails where a result has fewer dB than its floor."""
    reached = [sqnr(a, e) for a, e in zip(own, expected, strict=True)]
    assert all(db >= least for db, least in zip(reached, floors, strict=True)), reached


def exact(tensors: list[Tensor], causal: bool) -> list[Tensor]:
    """The same in fp64. PyTorch's own attention gives causal queries the first keys, as ours does."""
    return step(
        functional.scaled_dot_product_attention, [x.double() for x in tensors], is_causal=causal
    )


def exact_window(tensors: list[Tensor], window: int) -> list[Tensor]:
    """The same in fp64 within a window."""
    mask = attention.window_mask(window, tensors[0], tensors[1])
    return step(
        functional.scaled_dot_product_attention, [x.double() for x in tensors], attn_mask=mask
    )


def with_outliers(x: Tensor) -> Tensor:
    return torch.where(torch.rand(x.shape, device=x.device) < 1e-3, 10 * x, x)


def of_kind(data: str, device: str) -> list[Tensor]:
    """Returns operands of a kind of data."""
    q, k, v, grad = operands(device, 300)
    if data == "outlier":
        q, k, v, grad = (with_outliers(x) for x in (q, k, v, grad))
    if data == "bias":
        k = k + (8 + 7 * torch.rand(1, 2, 1, D, device=device)).bfloat16()
    return [q, k, v, grad]


# dB of O, dQ, dK and dV.
FLOORS = {"normal": (25, 24, 24, 27), "outlier": (21, 19, 21, 22), "bias": (25, 24, 24, 26)}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("data", FLOORS)
def test_accuracy(device: str, options: dict[str, Any], data: str, causal: bool) -> None:
    tensors = of_kind(data, device)
    own = step(f8.scaled_dot_product_attention, tensors, is_causal=causal, **options)
    check_floors(own, exact(tensors, causal), FLOORS[data])


@pytest.mark.parametrize(
    ("tokens", "keys", "causal"),
    [(1, 1, True), (1, 77, False), (130, 300, False), (130, 300, True), (300, 130, True)],
)
def test_other_numbers_of_queries_and_keys(
    device: str, options: dict[str, Any], tokens: int, keys: int, causal: bool
) -> None:
    tensors = operands(device, tokens, keys)
    own = step(f8.scaled_dot_product_attention, tensors, is_causal=causal, **options)
    for actual, expected in zip(own, exact(tensors, causal), strict=True):
        assert expected.norm() < 1e-9 or sqnr(actual, expected) > 20


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [64, 256])
def test_heads_of_other_sizes(
    device: str, options: dict[str, Any], size: int, causal: bool, window: int | None
) -> None:
    if window and not causal:
        pytest.skip("a window is causal")
    tensors = operands(device, 300, size=size)
    own = step(f8.scaled_dot_product_attention, tensors, is_causal=causal, window=window, **options)
    expected = exact_window(tensors, window) if window else exact(tensors, causal)
    check_floors(own, expected, FLOORS["normal"])


@pytest.mark.parametrize("causal", [True, False])
def test_backward_differentiates_the_forward_that_ran(
    device: str, options: dict[str, Any], causal: bool
) -> None:
    tensors = operands(device)
    tensors[1] += 20  # a mean that no softmax sees
    own = step(f8.scaled_dot_product_attention, tensors, is_causal=causal, **options)
    config = 16 if options["emulate"] else 0
    o, lse, saved = attention.attention_forward(*tensors[:3], D**-0.5, causal, 0, config)
    q, k, v = (
        x.transpose(1, 2).double().requires_grad_()
        for x in attention.attention_dequantize(saved, o, 2, 200, D**-0.5, causal, 0, config)
    )
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * D**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    assert (torch.logsumexp(scores, -1) - lse).abs().max() < 2e-3
    expected = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    assert sqnr(own[0], expected) > 30  # P is rounded
    expected.backward(tensors[3].double())
    for actual, leaf in zip(own[1:], (q, k, v), strict=True):
        assert leaf.grad is not None
        assert sqnr(actual, leaf.grad) > 30


def test_any_strides_give_the_same_bits(device: str, options: dict[str, Any]) -> None:
    tensors = operands(device)
    expected = step(f8.scaled_dot_product_attention, tensors, is_causal=True, **options)

    def of(shape: Any) -> list[Tensor]:
        shaped = [*map(shape, tensors[:3]), tensors[3]]
        return step(f8.scaled_dot_product_attention, shaped, is_causal=True, **options)

    assert same(of(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)), expected)
    assert same(of(lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)), expected)
    assert same(of(lambda x: functional.pad(x, (8, 8))[..., 8:-8]), expected)
    assert same(of(lambda x: functional.pad(x, (1, 2))[..., 1:-2]), expected)
    together = torch.cat([x.transpose(1, 2) for x in tensors[:3]], dim=2).transpose(1, 2)
    parts = [*together.split([4, 2, 2], dim=1), tensors[3]]
    assert same(step(f8.scaled_dot_product_attention, parts, is_causal=True, **options), expected)


def test_result_is_the_transpose_of_a_dense_tensor(device: str, options: dict[str, Any]) -> None:
    q, k, v, _ = operands(device)
    o = f8.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    assert o.shape == q.shape
    assert o.transpose(1, 2).is_contiguous()


def test_scale(device: str, options: dict[str, Any]) -> None:
    tensors = operands(device)
    own = step(f8.scaled_dot_product_attention, tensors, scale=D**-0.5, **options)
    assert same(own, step(f8.scaled_dot_product_attention, tensors, **options))
    tensors[0] *= 4
    quarter = step(f8.scaled_dot_product_attention, tensors, scale=D**-0.5 / 4, **options)
    assert same(own[:1], quarter[:1])


@pytest.mark.parametrize(
    ("recipe", "causal", "window", "backend"),
    [
        ("fp8_forward", True, None, "inductor"),
        ("fp8_forward", False, None, "aot_eager"),
        ("fp8_forward", True, 100, "aot_eager"),
        ("bf16", True, 100, "inductor"),
    ],
)
def test_a_compiled_model_has_the_same_bits(
    device: str,
    options: dict[str, Any],
    recipe: str,
    causal: bool,
    window: int | None,
    backend: str,
) -> None:
    options = {**options, "window": window, "recipe": recipe}
    compiled = compiled_anew(backend)
    for tokens in (200, 130):
        tensors = operands(device, tokens)
        expected = step(f8.scaled_dot_product_attention, tensors, is_causal=causal, **options)
        own = step(compiled, tensors, is_causal=causal, **options)
        assert_same_but_for_atomics(own, expected, device)


@pytest.mark.parametrize("places", ((0, 1, 1), (0, 0, 0)))
def test_compiles_where_a_tensor_is_given_twice(
    device: str, options: dict[str, Any], places: tuple[int, ...]
) -> None:
    tensors = [operands(device, 130)[1] for _ in range(2)]

    def call(*x: Tensor) -> Tensor:
        y: Tensor = f8.scaled_dot_product_attention(*(x[i] for i in places), **options)
        return y

    torch._dynamo.reset()
    expected = call(*tensors)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors), expected)


def test_checkpointing_has_the_same_bits(device: str, options: dict[str, Any]) -> None:
    tensors = operands(device)

    expected = step(f8.scaled_dot_product_attention, tensors, is_causal=True, **options)
    assert same(step(checkpointed, tensors, is_causal=True, **options), expected)


def test_ops_have_honest_schemas_and_fakes(device: str, options: dict[str, Any]) -> None:
    q, k, v, _ = operands(device)
    config = 16 if options["emulate"] else 0
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        attention.attention_forward, (q, k, v, 0.1, True, 64, config), test_utils=tests
    )
    o, _, saved = attention.attention_forward(q, k, v, 0.1, True, 64, config)
    torch.library.opcheck(
        attention.attention_dequantize, (saved, o, 2, 200, 0.1, True, 64, config), test_utils=tests
    )


def test_keeps_half_the_bytes(device: str, options: dict[str, Any]) -> None:
    kept: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    q, k, v, _ = (x.requires_grad_() for x in operands(device, 256))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        f8.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    elements = q.numel() + k.numel() + v.numel()
    scales = 4 * elements // (128 * D)
    lse = 4 * q.numel() // D
    assert sum(x.nbytes for x in kept) == elements + scales + lse + 2 * q.numel()


def test_autocast_casts_to_its_type(device: str, options: dict[str, Any]) -> None:
    q, k, v, _ = operands(device)
    expected = f8.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    with torch.autocast(device, torch.bfloat16):
        o = f8.scaled_dot_product_attention(
            q.float(), k.float(), v.float(), enable_gqa=True, **options
        )
    assert torch.equal(o, expected)


def test_bf16_is_pytorchs_own(device: str) -> None:
    tensors = operands(device)
    own = step(f8.scaled_dot_product_attention, tensors, recipe="bf16", is_causal=True)
    assert same(own, step(functional.scaled_dot_product_attention, tensors, is_causal=True))


def test_no_tokens(device: str, options: dict[str, Any]) -> None:
    q, k, v, _ = operands(device)
    o = f8.scaled_dot_product_attention(q[:, :, :0], k, v, enable_gqa=True, **options)
    assert o.shape == (2, 4, 0, D)
    o = f8.scaled_dot_product_attention(q[:0], k[:0], v[:0], enable_gqa=True, **options)
    assert o.shape == (0, 4, 200, D)


def test_a_nan_is_its_heads_alone(device: str, options: dict[str, Any]) -> None:
    q, k, v, _ = operands(device)
    clean = f8.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    k[0, 0, 3, 5] = torch.nan
    o = f8.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    assert o[0, :2].isnan().all()
    assert torch.equal(o[0, 2:], clean[0, 2:])
    assert torch.equal(o[1], clean[1])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"attn_mask": torch.ones(200, 200).bool()}, "attn_mask"),
        ({"dropout_p": 0.1}, "dropout_p"),
        ({"scale": -1.0}, "scale"),
        ({"scale": float("nan")}, "scale"),
        ({"scale": "0.1"}, "scale is '0.1'"),
        ({"enable_gqa": False}, "enable_gqa"),
        ({"recipe": "fp4"}, "recipe"),
        ({"query": torch.zeros(2, 4, 200, 96).bfloat16()}, "96"),
        ({"query": torch.zeros(2, 3, 200, D).bfloat16()}, "3 heads"),
        ({"query": torch.zeros(2, 4, 200, D)}, "torch.float32"),
        ({"query": torch.zeros(4, 200, D).bfloat16()}, "[batch, heads, tokens, head_dim]"),
        ({"value": torch.zeros(2, 2, 199, D).bfloat16()}, "do not match"),
        (
            {
                "key": torch.zeros(2, 2, 0, D).bfloat16(),
                "value": torch.zeros(2, 2, 0, D).bfloat16(),
            },
            "no key",
        ),
    ],
)
def test_refuses(device: str, options: dict[str, Any], change: dict[str, Any], word: str) -> None:
    q, k, v, _ = operands(device)
    moved = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in change.items()}
    with pytest.raises(ValueError, match="float8") as error:
        f8.scaled_dot_product_attention(
            **{"query": q, "key": k, "value": v, "enable_gqa": True, **options, **moved}
        )
    assert word in str(error.value)


def test_refuses_what_is_no_tensor(options: dict[str, Any]) -> None:
    q, k, v, _ = operands("cpu")
    with pytest.raises(TypeError, match="float8: a ndarray"):
        f8.scaled_dot_product_attention(q.float().numpy(), k, v, **options)


def test_second_derivatives_are_refused(device: str, options: dict[str, Any]) -> None:
    q, k, v, _ = (x.requires_grad_() for x in operands(device))
    o = f8.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        dq.sum().backward()


@pytest.mark.gpu
def test_a_cuda_graph_replays_with_other_values() -> None:
    tensors = operands("cuda", 300)
    q, k, v = tensors[:3]
    f8.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # plans
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = f8.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    for x in (q, k, v):
        x.copy_(torch.randn_like(x))
    graph.replay()
    expected = f8.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.equal(o, expected)
