"""Casts of experts' weights apart from their calls: by an op, and kept over the micro-batches of a step."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from calls import Calls
from reference import same
from torch import nn

import float8.torch as f8
from float8 import recipes
from float8.torch import _ops
from float8.torch.layer.linear import resolve_recipe
from float8.torch.shard import weight_changes
from float8.torch.shard.copy_layout import layout
from float8.torch.shard.expert_copies import copies_of

DYNAMIC = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")
EXPERTS, N, K = 3, 144, 80


def _config(recipe: str) -> int:
    return recipes.pack(resolve_recipe(recipe), emulate=True, saturate=False, recompute=True)


def _parts(weight: torch.Tensor, config: int, *words: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Casts weights, or the rows of each expert that a rank has; returns q and qt."""
    experts, n, k = weight.shape
    sizes = torch.ops.float8.experts_copies(experts, n, k, config, bool(words))
    q, qt = (torch.zeros(size, dtype=torch.uint8) for size in sizes[:2])
    given = words or (None, None)
    torch.ops.float8.experts_cast(weight, q, qt, *given, config, _ops.ELEMENT_TYPES[torch.bfloat16])
    q_pitch, qt_pitch = sizes[2], sizes[5]
    q = q[: experts * n * q_pitch].view(experts, n, q_pitch)[..., :k]
    return q, qt[: experts * k * qt_pitch].view(experts, k, qt_pitch)[..., :n]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", DYNAMIC)
def test_each_expert_is_a_linear(recipe: str, dtype: torch.dtype) -> None:
    """float32 weights are rounded as they are read."""
    torch.manual_seed(0)
    config = _config(recipe)
    weight = torch.randn(EXPERTS, N, K, dtype=dtype)
    q, qt = _parts(weight, config)
    for e in range(EXPERTS):
        copies = _ops.quantize(weight[e].bfloat16(), config, _ops.WEIGHT, True)
        at = layout(N, N, K, config, _ops.WEIGHT, _ops.BOTH_COPIES, False)
        own_q, own_qt = at.copies(*copies, N, K)
        assert own_q is not None and torch.equal(own_q.data[:, :K], q[e])
        assert own_qt is not None and torch.equal(own_qt.data[:, :N], qt[e])


@pytest.mark.parametrize("recipe", DYNAMIC[:3])
def test_parts_of_each_expert(recipe: str) -> None:
    config = _config(recipe)
    weight = torch.randn(EXPERTS, N, K)
    q, qt = _parts(weight, config)
    parts = [each.contiguous() for each in weight.chunk(3, 1)]
    code = _ops.ELEMENT_TYPES[torch.bfloat16]
    words = [torch.ops.float8.experts_amax(part, config, code) for part in parts]
    amax = torch.stack([each for each, _ in words]).amax(0)
    for rank, (part, (_, row_amax)) in enumerate(zip(parts, words, strict=True)):
        rows = slice(rank * N // 3, (rank + 1) * N // 3)
        own_q, own_qt = _parts(part, config, amax, row_amax)
        assert torch.equal(own_q, q[:, rows]) and torch.equal(own_qt, qt[..., rows])


@pytest.mark.parametrize("recipe", DYNAMIC)
def test_rows_of_two_weights(recipe: str) -> None:
    """A cast of two weights, float32 that is rounded, is that of their rows in one tensor."""
    config, code = _config(recipe), _ops.ELEMENT_TYPES[torch.bfloat16]
    first, second = torch.randn(EXPERTS, N, K), 3 * torch.randn(EXPERTS, N, K)
    sizes = torch.ops.float8.experts_copies(EXPERTS, 2 * N, K, config, False)[:2]
    one, two = ([torch.zeros(size, dtype=torch.uint8) for size in sizes] for _ in range(2))
    cast = torch.ops.float8.experts_cast
    cast(torch.cat((first, second), 1), *one, None, None, config, code)
    cast(first, *two, None, None, config, code, second)
    assert all(torch.equal(a, b) and a.any() for a, b in zip(one, two, strict=True))
    with pytest.raises(ValueError, match="cast together have one size, type and device"):
        cast(first, *two, None, None, config, code, second[:2])


def test_refuses_what_it_cannot_cast() -> None:
    config = _config("rowwise")
    weight = torch.randn(EXPERTS, N, K)
    q, qt = (torch.zeros(8, dtype=torch.uint8) for _ in range(2))
    cast = torch.ops.float8.experts_cast
    with pytest.raises(ValueError, match="q of experts' weights has 8 elements"):
        cast(weight, q, qt, None, None, config, 0)
    with pytest.raises(ValueError, match="three dimensions"):
        cast(weight[0], q, qt, None, None, config, 0)
    with pytest.raises(ValueError, match="float32 alone are rounded"):
        cast(weight.half(), q, qt, None, None, config, 0)
    with pytest.raises(RuntimeError, match="have scales of a matrix, of its rows"):
        torch.ops.float8.experts_copies(EXPERTS, N, K, _config("bf16"), False)
    with pytest.raises(ValueError, match="scales is empty; recipe delayed"):
        copies_of(weight, _config("delayed"))
    copies = copies_of(weight.bfloat16(), config)["q"]
    x, offs = torch.randn(8, K, dtype=torch.bfloat16), torch.tensor([2, 4, 8], dtype=torch.int32)
    at = torch.ops.float8.experts_layout(offs, 8, config)
    forward = torch.ops.float8.experts_forward
    with pytest.raises(ValueError, match="without its scales"):
        forward(x, weight, at, config, False, None, 0, copies.data, None)
    with pytest.raises(ValueError, match="have not their scales"):
        forward(x, weight, at, config, False, None, 0, copies.data, copies.scales[:4])
    with pytest.raises(ValueError, match="recompute_weight"):
        forward(x, weight, at, config & ~recipes.RECOMPUTE, True, None, 0, *copies[:2])


def _qwen(recipe: str, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "intermediate_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    moe = {"moe_intermediate_size": 48, "num_experts": 3, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**sizes, **heads, **moe)
    model = transformers.Qwen3MoeForCausalLM(config)
    if recipe == "rowwise_with_gw_hp":
        model.bfloat16()
    return f8.convert_to_float8_training(
        model, config=f8.LinearConfig(recipe, emulate=True, **options), experts=True
    )


def _loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


@pytest.mark.parametrize("recompute", [None, False])
@pytest.mark.parametrize("recipe", DYNAMIC)
def test_kept_copies_have_the_bits_of_casts(recipe: str, recompute: bool | None) -> None:
    """Also after every change of the weights between micro-batches, whoever makes it."""
    plain = _qwen(recipe, recompute=recompute)
    kept = copy.deepcopy(plain)
    casts = f8.cache_weight_casts(kept)
    batches = torch.randint(0, 64, (3, 2, 16))
    experts = kept.model.layers[0].mlp.experts
    state = experts.weight_casts["down_proj"]._state
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, kept)]
    before = [each.detach().clone() for each in experts.parameters()]
    for batch in batches:
        for part in (batch, batch.flip(1)):
            losses = [_loss(model, part) for model in (plain, kept)]
            assert torch.equal(*losses)
            for loss in losses:
                loss.backward()
        for a, b in zip(plain.parameters(), kept.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or torch.equal(a.grad, b.grad)
        seen = state.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        casts.update()
        assert not torch.equal(state, seen)
        for model in (plain, kept):
            model.model.layers[0].mlp.experts.down_proj.data.mul_(1.5)
    assert all(not torch.equal(a, b) for a, b in zip(before, experts.parameters(), strict=True))
    casts.remove()
    assert not experts.weight_casts
    with torch.no_grad():
        assert torch.equal(_loss(kept, batches[0]), _loss(plain, batches[0]))


def test_a_weight_is_cast_once(monkeypatch: Any) -> None:
    """The state's flag says that no cast was needed."""
    monkeypatch.setattr(weight_changes, "checks_copies", False)
    model = _qwen("rowwise")
    f8.cache_weight_casts(model)
    batch = torch.randint(0, 64, (2, 16))
    cast = model.model.layers[1].mlp.experts.weight_casts["gate_up_proj"]
    with torch.no_grad():
        first = _loss(model, batch)
        cast._kept.q.zero_()  # nobody casts it again
        assert not torch.equal(_loss(model, batch), first)
        monkeypatch.setattr(weight_changes, "checks_copies", True)
        with pytest.raises(RuntimeError, match=r"layers\.1\.mlp\.experts\.gate_up_proj.*please"):
            _loss(model, batch)
        model.model.layers[1].mlp.experts.gate_up_proj.add_(0.5)
        changed = _loss(model, batch)
        model.model.layers[1].mlp.experts.gate_up_proj.sub_(0.5)
    assert cast._kept.q.any() and not torch.equal(changed, first)


def test_copies_and_conversions() -> None:
    """A copy of the model keeps none, and another recipe ends them; they are no part of a state dict."""
    model = _qwen("rowwise")
    keys = list(model.state_dict())
    f8.cache_weight_casts(model)
    assert list(model.state_dict()) == keys
    experts = model.model.layers[0].mlp.experts
    assert set(experts.weight_casts) == {"gate_up_proj", "down_proj"}
    assert not copy.deepcopy(experts).weight_casts
    assert not pickle.loads(pickle.dumps(experts)).weight_casts
    f8.convert_to_float8_training(
        model, config=f8.LinearConfig("blockwise", emulate=True), experts=True
    )
    assert not experts.weight_casts


def _experts(recipe: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Returns the experts of a layer, and a call of them with a random x that returns y with its gradients."""
    model = _qwen(recipe)
    experts = model.model.layers[0].mlp.experts.to(dtype)
    ids = torch.stack([torch.randperm(3)[:2] for _ in range(16)])
    scores = torch.rand(16, 2)

    def backward(module: Any, step: int) -> torch.Tensor:
        module.zero_grad()
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 64, generator=generator).bfloat16()
        y = module(x, ids, scores)
        y.float().square().mean().backward()
        return y.detach()  # type: ignore[no-any-return]

    return experts, backward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", DYNAMIC)
def test_adamw_leaves_the_casts_of_experts(recipe: str, dtype: torch.dtype) -> None:
    """Each expert has the update of a matrix of its own, and the next forward casts nothing."""
    experts, backward = _experts(recipe, dtype)
    f8.cache_weight_casts(experts, dtype=torch.bfloat16)
    optimizer = f8.AdamW(experts.parameters(), lr=1e-2)
    alone = [p.detach().clone() for p in experts.parameters()]
    states = [(torch.zeros_like(p), torch.zeros_like(p)) for p in alone]
    reference = torch.optim.AdamW([p.clone() for p in alone], lr=1e-2, fused=True)
    f8.check_copies()
    for step in range(2):
        backward(experts, step)
        others = reference.param_groups[0]["params"]
        for own, other, (mean, square), of_torch in zip(
            experts.parameters(), alone, states, others, strict=True
        ):
            of_torch.grad = own.grad.clone()
            _adamw_alone(other, own.grad.clone(), mean, square, step + 1)
        before = [p.detach().clone() for p in experts.parameters()]
        with Calls() as calls:
            optimizer.step()
        reference.step()
        assert calls.count(_ops.adamw) == 2
        for own, other, of_torch, old in zip(
            experts.parameters(), alone, others, before, strict=True
        ):
            assert torch.equal(own, other)
            torch.testing.assert_close(own.detach(), of_torch, rtol=0.02, atol=1e-4)
            assert all((own[e] != old[e]).any() for e in range(3))
        assert torch.equal(backward(experts, step + 5), backward(copy.deepcopy(experts), step + 5))
        backward(experts, step)
    f8.check_copies(False)  # which would find the garbage
    optimizer.step()
    expected = backward(copy.deepcopy(experts), 9)
    for cast in experts.weight_casts.values():
        cast._kept.q.bitwise_xor_(0x11)
    assert not torch.equal(backward(experts, 9), expected)
    with torch.no_grad():  # a change behind the step is seen
        for p in experts.parameters():
            p.mul_(1.5)
    assert torch.equal(backward(experts, 9), backward(copy.deepcopy(experts), 9))
    f8.check_copies()


class _GroupedExperts(nn.Module):
    """Those of torchtitan's first releases, whose w1 and w3 have one copy."""

    __module__ = "torchtitan.models.moe"

    def __init__(self) -> None:
        super().__init__()
        for name, size in {"w1": (48, 64), "w2": (64, 48), "w3": (48, 64)}.items():
            setattr(self, name, nn.Parameter(torch.randn(3, *size) / 8))

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


_GroupedExperts.__name__ = "GroupedExperts"


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_adamw_leaves_the_cast_of_two_weights(recipe: str) -> None:
    """One cast reads w1 and w3 behind a step that updated both, and the next forward casts nothing."""
    torch.manual_seed(0)
    options = f8.LinearConfig(recipe, emulate=True)
    model = nn.Sequential(_GroupedExperts())
    experts: Any = f8.convert_to_float8_training(model, config=options, experts=True)[0]
    f8.cache_weight_casts(model, dtype=torch.bfloat16)
    assert list(experts.weight_casts) == ["w1", "w2"]
    optimizer = f8.AdamW(experts.parameters(), lr=1e-2)
    of_w3 = f8.AdamW([experts.w3], lr=1e-2)
    before = [p.detach().clone() for p in experts.parameters()]

    def backward(module: Any, step: int) -> torch.Tensor:
        module.zero_grad()
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
        y = module(x, torch.tensor([4, 5, 7]))
        y.float().square().mean().backward()
        return y.detach()  # type: ignore[no-any-return]

    f8.check_copies()
    for step in range(2):
        backward(experts, step)
        with Calls() as calls:
            optimizer.step()
        assert calls.count(_ops.adamw) == 3
        assert calls.count(torch.ops.float8.experts_cast.default) == 2
        assert torch.equal(backward(experts, step), backward(copy.deepcopy(experts), step))
    of_w3.step()  # it leaves both to the next forward
    assert torch.equal(backward(experts, 5), backward(copy.deepcopy(experts), 5))
    for old, p in zip(before, experts.parameters(), strict=True):
        assert (p != old).flatten(1).any(1).all()
    f8.check_copies(False)  # which would find the garbage
    optimizer.step()
    expected = backward(copy.deepcopy(experts), 9)
    experts.weight_casts["w1"]._kept.q.bitwise_xor_(0x11)
    assert not torch.equal(backward(experts, 9), expected)
    with torch.no_grad():  # a change of one of them is seen
        experts.w3.mul_(1.5)
    assert torch.equal(backward(experts, 9), backward(copy.deepcopy(experts), 9))
    f8.check_copies()


def _adamw_alone(weight: Any, grad: Any, mean: Any, square: Any, step: int) -> None:
    """Updates each expert's matrix by the kernel, which finds nothing for casts."""
    for w, *rest in zip(weight, grad, mean, square, strict=True):
        none = _ops.NO_BYTES.view(torch.int32)
        _ops.adamw(
            [w], *([each] for each in rest), [], [torch.tensor(float(step))], [none], [none],
            [_ops.NO_BYTES], [_ops.NO_BYTES] * 2, [_config("rowwise")], [_ops.ELEMENT_TYPES[w.dtype]],
            [0], [], 0, [1e-2, 0.9, 0.999, 1e-8, 1e-2], False,
        )  # fmt: skip


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp", "blockwise"])
def test_compiled_forwards_read_the_copies(recipe: str) -> None:
    """They have the bits of casts, and a weight that changed is cast again in them, also by `.data`."""
    experts, _ = _experts(recipe, torch.bfloat16)
    plain = copy.deepcopy(experts)
    x = torch.randn(16, 64).bfloat16().requires_grad_()
    ids, scores = torch.randint(0, 3, (16, 2)), torch.rand(16, 2)

    def step(call: Any, module: Any) -> list[torch.Tensor]:
        y = call(x, ids, scores)
        leaves = [x, *module.parameters()]
        return [y.detach(), *torch.autograd.grad(y.float().square().mean(), leaves)]

    torch.compiler.reset()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    assert same(step(compiled, experts), step(plain, plain))
    casts = f8.cache_weight_casts(experts)  # behind the first graph
    f8.check_copies(False)  # which would find the garbage
    for change in (1.0, 1.5, 0.25):
        for module in (experts, plain):
            for p in module.parameters():
                p.data.mul_(change)
        expected = step(plain, plain)
        for _ in range(2):
            assert same(step(compiled, experts), expected)
    with torch.no_grad():
        assert torch.equal(compiled(x, ids, scores), expected[0])
    for cast in experts.weight_casts.values():
        cast._kept.q.bitwise_xor_(0x11)
    assert not torch.equal(step(compiled, experts)[0], expected[0])
    casts.remove()
    assert same(step(compiled, experts), expected)
    f8.check_copies()


def test_names_experts_that_keep_none() -> None:
    model = _qwen("delayed")
    for layer in model.model.layers:
        layer.self_attn = nn.Identity()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        f8.cache_weight_casts(model.model.layers[0].mlp.experts)
    words = " ".join(str(each.message) for each in caught)
    assert "root are cast in every forward: delayed scaling" in words
