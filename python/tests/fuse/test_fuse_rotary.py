"""float8.torch.fuse: rotary positions in one launch."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused import converted, tiny_model
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import float8.torch as f8
from float8.torch.layer import rotary_layers

Config = Callable[..., f8.LinearConfig]
pytestmark = [
    pytest.mark.usefixtures("untold"),
    pytest.mark.filterwarnings("ignore:float8. fuse left"),
]


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_promoting(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def apply_in_the_type_of_q(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    cos, sin = cos.to(q.dtype), sin.type_as(q)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def apply_interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    def turned(x: Tensor) -> Tensor:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def apply_in_float32(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    y = apply_promoting(q.float(), k.float(), cos, sin)
    return y[0].to(q.dtype), y[1].to(k.dtype)


def apply_by_size(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    y = apply_promoting(q, k, cos, sin)
    return (y[0] * 2, y[1]) if q.shape[2] > 5 else y


def apply_by_values(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    y = apply_promoting(q, k, cos, sin)
    return (y[0] * 2, y[1]) if bool(q.max() > 100) else y


def apply_in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    y = apply_promoting(q, k, cos, sin)
    cos.zero_()
    return y


def apply_to_q_alone(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return apply_promoting(q, k, cos, sin)[0], k


def apply_to_a_part(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    cos, sin = cos[..., :64], sin[..., :64]
    y = apply_promoting(q[..., :64], k[..., :64], cos, sin)
    return torch.cat((y[0], q[..., 64:]), -1), torch.cat((y[1], k[..., 64:]), -1)


def apply_to_some_tokens(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return apply_promoting(q[:, :, :200], k[:, :, :200], cos, sin)


def apply_without_gradient(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    with torch.no_grad():
        return apply_promoting(q, k, cos, sin)


def apply_to_data(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return apply_promoting(q, k.detach(), cos, sin)


FLAG = False


def apply_by_a_flag(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    y = apply_promoting(q, k, cos, sin)
    return (y[0] * 2, y[1]) if FLAG else y


def apply_by_autocast(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    y = apply_promoting(q, k, cos, sin)
    return (y[0] * 2, y[1]) if torch.is_autocast_enabled() else y


def apply_by_a_closure(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    def own(x: Tensor) -> Tensor:
        return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)

    return own(q), own(k)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, n, bias=False) for n in (64, 32, 32))
        self.o = nn.Linear(64, 64, bias=False)

    def positions(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.outer(
            torch.arange(x.shape[1], device=x.device), 0.5 ** torch.arange(8, device=x.device)
        )
        angles = angles.repeat(1, 2)[None]
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def project(self, x: Tensor) -> list[Tensor]:
        return [
            each(x).unflatten(-1, (-1, 16)).transpose(1, 2) for each in (self.q, self.k, self.v)
        ]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Promoting(Attention):
    def forward(self, x: Tensor) -> Any:
        q, k, v = self.project(x)
        q, k = apply_promoting(q, k, *self.positions(x))
        return self.attend(q, k, v)


class OfFloat32(Attention):
    def forward(self, x: Tensor) -> Any:
        q, k, v = self.project(x)
        cos, sin = (each.float() for each in self.positions(x))
        q, k = apply_promoting(q, k, cos, sin)
        return (
            self.attend(q, k, v.to(q.dtype))
            if q.dtype == self.o.weight.dtype
            else self.attend(*(e.to(x.dtype) for e in (q, k, v)))
        )


class InTheTypeOfQ(Attention):
    def forward(self, x: Tensor) -> Any:
        q, k, v = self.project(x)
        q, k = apply_in_the_type_of_q(q, k, *(each[0].float() for each in self.positions(x)))
        return self.attend(q, k, v)


def pair(config: Config, kind: type[nn.Module], recipe: str = "rowwise") -> tuple[Any, Any]:
    """Returns a fused module and one with the same weights that is not."""
    torch.manual_seed(1)
    plain = converted(kind(), config(recipe))
    fused = copy.deepcopy(plain)
    assert f8.fuse(fused) == [("", True, "", "rotary")]
    return fused, plain


def step(model: Any, call: Any = None) -> list[Tensor]:
    weight = model.q.weight
    x = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(2))
    x = x.to(weight.device, weight.dtype).requires_grad_()
    model.zero_grad()
    y = (model if call is None else call)(x)
    y.float().square().sum().backward()
    f8.sync_float8_amax_and_scale_history(model)
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def expect_equal(fused: Any, plain: Any, call: Any = None) -> None:
    for _ in range(2):
        assert all(map(torch.equal, step(fused, call), step(plain)))


@pytest.mark.parametrize(
    "recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise"]
)
def test_has_the_bits_of_the_function(config: Config, recipe: str, rotary_calls: list[int]) -> None:
    fused, plain = pair(config, Promoting, recipe)
    expect_equal(fused, plain)
    assert len(rotary_calls) == 2 and isinstance(fused, Promoting)
    assert fused.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("kind", [OfFloat32, InTheTypeOfQ])
def test_positions_in_float32(config: Config, kind: Any, rotary_calls: list[int]) -> None:
    expect_equal(*pair(config, kind))
    assert len(rotary_calls) == 2


def test_checkpoints_and_copies(config: Config, rotary_calls: list[int]) -> None:
    fused, plain = pair(config, Promoting)
    expect_equal(fused, plain, functools.partial(checkpoint, fused, use_reentrant=False))
    assert len(rotary_calls) == 4
    expect_equal(copy.deepcopy(fused), plain)
    buffer = io.BytesIO()
    torch.save(fused, buffer)
    buffer.seek(0)
    expect_equal(torch.load(buffer, weights_only=False), plain)
    assert len(rotary_calls) == 8


def test_compiled_graphs_have_the_operations(config: Config, rotary_calls: list[int]) -> None:
    fused, plain = pair(config, Promoting)
    expect_equal(fused, plain, torch.compile(fused, backend="aot_eager", fullgraph=True))
    assert not rotary_calls


def forward_of(function: Any) -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        q, k, v = self.project(x)
        q, k = apply_other(q, k, *self.positions(x))  # noqa: F821 (it is in `own`)
        return self.attend(q, k, v)

    own = {**globals(), "apply_other": function}
    return type(forward)(forward.__code__, own, "forward")


@pytest.mark.parametrize(
    "function",
    [
        apply_interleaved,
        apply_in_float32,
        apply_by_size,
        apply_by_values,
        apply_in_place,
        apply_to_a_part,
        apply_to_some_tokens,
        apply_without_gradient,
        apply_to_data,
        apply_by_a_flag,
        apply_by_autocast,
        apply_by_a_closure,
        apply_to_q_alone,
    ],
)
def test_other_functions_stay(config: Config, function: Any, rotary_calls: list[int]) -> None:
    kind: Any = type("Other", (Attention,), {"forward": forward_of(function)})
    model = converted(kind(), config("rowwise"))
    (left,) = f8.fuse(model)
    assert (
        not left.fused and "apply_other computes other than x cos + rotate_half(x) sin" in left.why
    )
    with torch.no_grad():
        model(torch.randn(2, 24, 64).to(model.q.weight))
    assert type(model) is kind and not rotary_calls


def test_what_is_no_attention_in_fp8_stays(config: Config) -> None:
    class Decorated(Attention):
        @functools.wraps(Promoting.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return Promoting.forward(self, *args, **kwargs)  # type: ignore[arg-type]

    assert f8.fuse(converted(Decorated(), config("rowwise"))) == [
        ("", False, "its forward has a decorator", "rotary")
    ]
    replaced = converted(Promoting(), config("rowwise"))
    replaced.forward = lambda x: x
    assert f8.fuse(replaced) == [("", False, "its forward was replaced", "rotary")]
    assert f8.fuse(converted(Promoting(), config("rowwise")), rotary=False) == []
    keeps = f8.convert_to_float8_training(
        nn.Sequential(Promoting(), nn.Linear(64, 64)),
        config=config("rowwise"),
        module_filter_fn=lambda _, name: name == "1",
    )
    assert f8.fuse(keeps) == [] and type(keeps[0]) is Promoting


def test_what_changes_later_is_seen(
    config: Config, monkeypatch: pytest.MonkeyPatch, rotary_calls: list[int]
) -> None:
    fused, plain = pair(config, Promoting)
    assert f8.fuse(fused) == [("", True, "", "rotary")]  # once more

    def doubled(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return q * 2, k * 2

    monkeypatch.setitem(globals(), "apply_promoting", doubled)
    with pytest.warns(
        UserWarning, match="Promoting no longer has its rotary positions in one launch"
    ):
        own = step(fused)
    assert all(map(torch.equal, own, step(plain))) and not rotary_calls


def test_what_the_function_calls_is_seen(
    config: Config, monkeypatch: pytest.MonkeyPatch, rotary_calls: list[int]
) -> None:
    fused, plain = pair(config, Promoting)
    step(fused)
    monkeypatch.setitem(globals(), "rotate_half", lambda x: x.flip(-1))
    with pytest.warns(UserWarning, match="apply_promoting or what that calls was replaced"):
        own = step(fused)
    assert all(map(torch.equal, own, step(plain))) and len(rotary_calls) == 1


def test_models_on_meta_are_fused(config: Config) -> None:
    with torch.device("meta"):
        model = f8.convert_to_float8_training(Promoting(), config=config("rowwise"))
        assert f8.fuse(model) == [("", True, "", "rotary")]


def test_arguments_of_other_calls_go_to_the_function(
    config: Config, rotary_calls: list[int]
) -> None:
    class Explicit(Attention):
        def forward(self, x: Tensor) -> Any:
            q, k, v = self.project(x)
            turned = apply_promoting(
                q.transpose(1, 2), k.transpose(1, 2), *self.positions(x), unsqueeze_dim=2
            )
            return self.attend(*(each.transpose(1, 2) for each in turned), v)

    expect_equal(*pair(config, Explicit))
    assert not rotary_calls


def expect_changed(model: nn.Module, before: dict[str, Tensor]) -> None:
    assert [n for n, p in model.named_parameters() if torch.equal(p, before[n])] == []


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "autocast"])
def test_models_of_transformers(
    config: Config, device: str, kind: str, dtype: torch.dtype, rotary_calls: list[int]
) -> None:
    """In bf16, and in float32 under autocast, where positions are in float32 and queries are not."""
    torch.manual_seed(0)
    plain: Any = f8.convert_to_float8_training(
        tiny_model(kind).to(device, dtype),
        config=config("rowwise"),
        module_filter_fn=lambda _, n: "head" not in n,
    )
    fused = copy.deepcopy(plain)
    f8.fuse(plain, rotary=False)
    names = [each.name for each in f8.fuse(fused) if each.fused and "mlp" not in each.name]
    assert names == [f"model.layers.{i}.self_attn" for i in range(2)]
    before = {name: p.detach().clone() for name, p in fused.named_parameters()}
    losses: list[list[float]] = [[], []]
    ids = torch.randint(3, 64, (2, 12), device=device)
    for model, own in zip((fused, plain), losses, strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.float32):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            own.append(loss.item())
    assert losses[0] == losses[1] and len(rotary_calls) == 2 * 3
    expect_changed(fused, before)


def test_a_model_that_rounds_once_stays(config: Config) -> None:
    """OLMo 2 has positions in float32, and rounds the sum of the products alone."""
    from transformers.models.olmo2 import modeling_olmo2

    form = rotary_layers.found_in(modeling_olmo2.Olmo2Attention)
    assert form is not None and form.form is None
