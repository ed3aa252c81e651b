"""attention_counters: its numbers against fp64, that it changes no result, and what it costs where it is off."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from attention_models import Wrapper, copies, model_of, noted_forwards, unchanged
from torch import Tensor, nn
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

import float8.torch as f8
from float8.torch.layer import attention_statistics

pytestmark = pytest.mark.usefixtures("untold")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of forwards in fp8, in order. A call that counts has two alike."""
    return noted_forwards(monkeypatch, lambda args, more: args)


def wrapper(options: dict[str, Any]) -> nn.Module:
    f8.register_attention(Wrapper)
    module = nn.Sequential(Wrapper())
    f8.convert_attention_to_float8(module, **options)
    return module


def cast(x: Tensor) -> tuple[Tensor, int, int]:
    """Returns x [tokens, D] in e4m3 by blocks of 128 tokens, in fp64, and how many elements it clips and loses."""
    parts, clipped, lost = [], 0, 0
    for block in x.split(128):
        scale = 2.0 ** math.floor(math.log2(448 / float(block.abs().amax())))
        scaled = block * scale
        own = scaled.to(torch.float8_e4m3fn).double()
        clipped += int((scaled.abs() > 464).sum())
        lost += int(((block != 0) & (own == 0)).sum())
        parts.append(own / scale)
    return torch.cat(parts), clipped, lost


def rounded_to_zero(scores: Tensor) -> int:
    """How many P of scores [queries, keys], -inf where there is none, are 0 where the softmax takes 128 keys at a time, the
    last ones first."""
    most, count = torch.full((scores.shape[0],), -math.inf, dtype=torch.float64), 0
    for tile in reversed(scores.cpu().split(128, 1)):
        most = torch.maximum(most, tile.amax(1))
        p = torch.exp(tile - most[:, None]) * 2**8
        count += int(((p.to(torch.float8_e4m3fn).double() == 0) & tile.isfinite()).sum())
    return count


def by_formula(args: Any) -> tuple[dict[str, float], dict[str, float], float]:
    """Returns the shares that are clipped and lost, and the largest score, of a call of attention_forward."""
    q, k, v, scale, causal, window, _, *packed = (
        x.detach() if isinstance(x, Tensor) else x for x in args
    )
    ends = packed[0].tolist() if packed else [0, q.shape[2]]
    totals = dict.fromkeys("qkvp", 0)
    clipped, lost, largest = dict(totals), dict(totals), 0.0
    groups = q.shape[1] // k.shape[1]
    for batch, head, (begin, end) in itertools.product(
        range(q.shape[0]), range(q.shape[1]), itertools.pairwise(ends)
    ):
        if begin == end:
            continue
        rows = slice(begin, end if packed else None)
        own = {"q": q[batch, head, rows].float()}
        for name, x in (("k", k), ("v", v)):
            own[name] = x[batch, head // groups, rows].float()
        own["k"] = own["k"] - own["k"].mean(0)
        for name, x in own.items():
            own[name], *found = cast(x)
            if name == "q" or head % groups == 0:
                totals[name] += x.numel()
                clipped[name] += found[0]
                lost[name] += found[1]
        scores = own["q"] @ own["k"].T * scale
        seen = torch.ones_like(scores, dtype=torch.bool)
        seen = seen.tril() if causal else seen
        seen = seen.triu(1 - window) if window else seen
        largest = max(largest, float(scores[seen].abs().max()))
        totals["p"] += int(seen.sum())
        lost["p"] += rounded_to_zero(scores.masked_fill(~seen, -math.inf))
    shares = ({name: x[name] / totals[name] for name in totals} for x in (clipped, lost))
    return *shares, largest


def check(found: f8.AttentionCounters, args: Any) -> None:
    clipped, lost, largest = by_formula(args)
    del clipped["p"]
    assert found.saturated == clipped == dict.fromkeys("qkv", 0)
    # Some elements lie where rounding of fp32 decides.
    assert found.underflow == pytest.approx(lost, abs=2e-4)
    assert found.largest_score == pytest.approx(largest, rel=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "of_keys", "scores"), [(4, 4, 2**25), (4, 1, 2**16)])
def test_numbers_of_a_call(
    device: str,
    options: dict[str, Any],
    calls: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    causal: bool,
    heads: int,
    of_keys: int,
    scores: int,
) -> None:
    monkeypatch.setattr(attention_statistics, "_SCORES", scores)  # at a time
    module = wrapper(options)
    q = 3 * torch.randn(2, heads, 300, 64, device=device).bfloat16()
    k, v = (torch.randn(2, of_keys, 333 - 33 * causal, 64, device=device).bfloat16() for _ in "kv")
    k, v = k + 5, torch.where(torch.rand_like(v) < 1e-3, 30000 * v, v)
    with f8.attention_counters(module) as counters:
        module[0](q, k, v, is_causal=causal, enable_gqa=True)
    ((name, found),) = counters.read().items()
    assert (name, found.calls) == ("0", 1)
    check(found, calls[0])
    assert found.underflow["v"] > 0.05, "outliers set the scales"
    assert found.underflow["p"] > 0.01 and found.largest_score > 10


def trained(model: Any, device: str, **inputs: Any) -> None:
    batch = torch.arange(200, device=device).remainder(61).reshape(1, -1)
    model(input_ids=batch, labels=batch, **inputs).loss.backward()


SIZES = {"max_position_embeddings": 512, "sliding_window": 70}


def test_windows_and_packed_sequences_of_a_model(
    device: str, options: dict[str, Any], calls: list[Any]
) -> None:
    model = model_of("Mistral", device, **SIZES)
    f8.convert_attention_to_float8(model, "fp8", **options)
    offsets = torch.tensor([0, 130, 130, 200], dtype=torch.int32, device=device)
    pack = {
        "position_ids": torch.cat([torch.arange(130), torch.arange(70)])[None].to(device),
        "max_length_q": 130,
        "max_length_k": 130,
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
    }
    for inputs, is_packed in (({}, False), (pack, True)):
        calls.clear()
        with f8.attention_counters(model) as counters:
            trained(model, device, **inputs)
        found = counters.read()
        assert list(found) == [f"model.layers.{i}.self_attn" for i in range(2)]
        for own, args in zip(found.values(), calls[::2], strict=True):
            assert args[5] == 70 and (len(args) > 7) == is_packed
            assert own.calls == 1
            check(own, args)


def test_training_is_the_same_with_counters(device: str, options: dict[str, Any]) -> None:
    models = [model_of("Llama", device, max_position_embeddings=512) for _ in range(2)]
    before = copies(models[0])
    for model in models:
        f8.convert_attention_to_float8(model, "fp8", **options)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for step in range(3):
            if model is models[1] and step != 1:
                with f8.attention_counters(model) as counters:
                    trained(model, device)
                assert all(each.calls == 1 for each in counters.read().values())
            else:
                trained(model, device)
            optimizer.step()
            optimizer.zero_grad()
    assert not [name for name in unchanged(models[0], before) if "norm" not in name]
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_nothing_is_computed_without_it(
    device: str, options: dict[str, Any], calls: list[Any]
) -> None:
    model = model_of("Llama", device, max_position_embeddings=512)
    f8.convert_attention_to_float8(model, **options)
    with f8.attention_counters(model) as counters:
        pass
    trained(model, device)
    assert len(calls) == 2, "one forward a layer"
    assert all(each.calls == 0 for each in counters.read().values())
    assert all(not hasattr(module, "float8_counters") for module in model.modules())


def test_calls_add_up_and_padding_does_not_count(device: str, options: dict[str, Any]) -> None:
    model = model_of("Llama", device, max_position_embeddings=512)
    f8.convert_attention_to_float8(model, filter_fn=lambda _, name: ".1." in name, **options)
    with f8.attention_counters(model) as counters:
        trained(model, device)
        once = counters.read()["model.layers.1.self_attn"]
        trained(model, device)
        twice = counters.read()
        mask = torch.ones(1, 200, device=device, dtype=torch.long)
        mask[0, :9] = 0
        with pytest.warns(UserWarning, match="padding"):
            trained(model, device, attention_mask=mask)
    assert list(twice) == ["model.layers.1.self_attn"], "the other layer is in bf16"
    assert twice["model.layers.1.self_attn"].calls == 2
    assert twice["model.layers.1.self_attn"].underflow == once.underflow
    assert counters.read() == twice


def test_a_layer_that_is_not_finite_shows(device: str, options: dict[str, Any]) -> None:
    module = wrapper(options)
    q, k, v = (torch.randn(1, 2, 200, 64, device=device).bfloat16() for _ in "qkv")
    q[0, 0, 3, 5] = torch.inf
    v[0, 1, 150, :2] = torch.nan
    with f8.attention_counters(module) as counters:
        module[0](q, k, v)
    found = counters.read()["0"]
    assert found.saturated["q"] >= 1 / q.numel() and found.saturated["v"] >= 2 / v.numel()
    assert found.saturated["k"] == 0
    assert not math.isfinite(found.largest_score)


def keeps_forwards() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.float8.attention_forward.default])


@pytest.mark.parametrize("context_fn", [noop_context_fn, keeps_forwards])
@pytest.mark.parametrize("in_backward", [True, False])
def test_a_checkpointed_layer_counts(
    device: str, options: dict[str, Any], context_fn: Any, in_backward: bool
) -> None:
    module = wrapper(options)
    leaves = [torch.randn(1, 2, 200, 64, device=device).bfloat16() for _ in "qkv"]
    expected = [x.clone().requires_grad_() for x in leaves]
    layer = lambda *x: module[0](*x).square()  # noqa: E731
    layer(*expected).sum().backward()
    own = [x.clone().requires_grad_() for x in leaves]
    with f8.attention_counters(module) as counters:
        y = checkpoint(layer, *own, use_reentrant=False, context_fn=context_fn)
        if in_backward:
            y.sum().backward()
    if not in_backward:
        y.sum().backward()
    assert counters.read()["0"].calls == 1 + in_backward
    for x, other in zip(own, expected, strict=True):
        assert torch.equal(x.grad, other.grad)


def test_a_compiled_model_counts(device: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    module = wrapper(options)
    compiled = torch.compile(module[0], backend="aot_eager", fullgraph=True)
    q, k, v = (torch.randn(1, 2, 130, 64, device=device).bfloat16() for _ in "qkv")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    y = compiled(q, k, v)
    with f8.attention_counters(module) as counters:
        assert torch.equal(compiled(q, k, v), y)
    assert counters.read()["0"].calls == 1
    assert torch.equal(compiled(q, k, v), y)
    assert counters.read()["0"].calls == 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


def test_a_model_whose_attention_has_a_name_counts(device: str, options: dict[str, Any]) -> None:
    from float8.adapters.transformers import install_attention

    install_attention("fp8_forward", **options)
    model = model_of("Llama", device, max_position_embeddings=512)
    model.set_attn_implementation("float8")
    with f8.attention_counters(model) as counters, torch.autocast(device, torch.bfloat16):
        trained(model.float(), device)
    assert [each.calls for each in counters.read().values()] == [1, 1]


def test_what_it_refuses(device: str, options: dict[str, Any]) -> None:
    with (
        pytest.raises(TypeError, match=r"takes an nn\.Module, not a str"),
        f8.attention_counters("m"),
    ):  # type: ignore[arg-type]
        pass
    model = model_of("Llama", device)
    with (
        pytest.raises(ValueError, match="no attention in fp8; call convert_attention_to_float8"),
        f8.attention_counters(model),
    ):
        pass
    f8.convert_attention_to_float8(model, **options)
    with (
        f8.attention_counters(model),
        pytest.raises(ValueError, match="counted already"),
        f8.attention_counters(model.model),
    ):
        pass
    with f8.attention_counters(model):
        pass
