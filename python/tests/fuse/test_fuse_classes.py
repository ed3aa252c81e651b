"""Which MLPs fuse knows: those whose forward has the code of one, in transformers and elsewhere."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from activations import activated, glu
from fused import FeedForward, converted, inputs, reasons, step
from reference import same
from torch import nn

import float8.torch as f8
from float8.torch import notices
from float8.torch.layer.mlps import mlp_function

Config = Callable[..., f8.LinearConfig]
pytestmark = pytest.mark.filterwarnings("ignore:float8. fuse left")
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
}  # fmt: skip
MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    **MOE, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "num_key_value_heads": 4,
}  # fmt: skip
# The model, its options, and the classes of its MLPs.
MODELS: list[tuple[str, dict[str, Any], set[str]]] = [
    ("Mistral", {}, {"MistralMLP"}),
    ("Qwen3Moe", {**MOE, "mlp_only_layers": [0]}, {"Qwen3MoeMLP"}),
    ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 48}, {"Qwen2MoeMLP"}),
    ("DeepseekV3", DEEPSEEK, {"DeepseekV3MLP"}),
    ("Olmo2", {}, {"Olmo2MLP"}),
    ("SmolLM3", {}, {"SmolLM3MLP"}),
    ("Granite", {}, {"GraniteMLP"}),
    ("Gemma3", {"sliding_window": 16}, {"Gemma3MLP"}),
    ("Llama4", {**MOE, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2}, {"Llama4TextMLP"}),
    ("Lfm2", {"layer_types": ["full_attention", "conv"], "block_multiple_of": 16}, {"Lfm2MLP"}),
    ("Nemotron", {}, {"NemotronMLP"}),
    ("GPTNeoX", {}, {"GPTNeoXMLP"}),
    ("Phi3", {}, {"Phi3MLP"}),
    ("Glm", {}, {"GlmMLP"}),
    ("Glm4", {}, {"Glm4MLP"}),
    ("SeedOss", {"residual_dropout": 0.0, "attention_dropout": 0.0}, {"SeedOssMLP"}),
]  # fmt: skip


def transformer(name: str, options: dict[str, Any]) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    suffix = "TextConfig" if name in ("Llama4", "Gemma3") else "Config"
    made = getattr(transformers, name + suffix)(**{**SIZES, **options})
    return getattr(transformers, f"{name}ForCausalLM")(made)  # type: ignore[no-any-return]


def describe(plain: nn.Module, fused: nn.Module) -> None:
    """Gives an MLP that is not fused what one_by_one reads of one that is."""
    for name in ("float8_names", "float8_activation", "float8_beside"):
        setattr(plain, name, getattr(fused, name))


def one_by_one(mlp: Any, x: torch.Tensor) -> Any:
    """Computes a fused MLP by its linears, with the rounding of the kernels between them."""
    for each in mlp.float8_beside.before:
        x = mlp.get_submodule(each)(x)
    *read, down = (mlp.get_submodule(each) for each in mlp.float8_names.given())
    made = [each(x) for each in read]
    if mlp.float8_names.halves != mlp_function.APART:
        made = list(made[0].chunk(2, dim=-1))
    if mlp.float8_names.halves == mlp_function.UP_FIRST:
        made.reverse()
    y = down((glu if len(made) == 2 else activated)(*made, mlp.float8_activation))
    for each in mlp.float8_beside.behind:
        y = mlp.get_submodule(each)(y)
    return (
        y
        if mlp.float8_beside.dropout is None
        else F.dropout(y, getattr(mlp, mlp.float8_beside.dropout), mlp.training)
    )


@pytest.mark.parametrize(
    ("name", "options", "kinds"), MODELS, ids=lambda of: of if isinstance(of, str) else ""
)
def test_knows_the_mlps_of_transformers(
    config: Config, name: str, options: dict[str, Any], kinds: set[str]
) -> None:
    """One step has the bits of the linears one by one, and changes each weight that was converted."""
    model: Any = converted(transformer(name, options), config("rowwise"))
    done = f8.fuse(model, rotary=False)
    assert all(each.fused for each in done)
    mlps = [model.get_submodule(each.name) for each in done]
    assert {type(each).float8_original.__name__ for each in mlps} == kinds
    covered = sum(len(mlp.float8_names.given()) for mlp in mlps)
    plain = copy.deepcopy(model)
    for each in done:
        mlp = plain.get_submodule(each.name)
        mlp.forward = functools.partial(one_by_one, mlp)
    tokens = torch.arange(1, 49, device=model.device).view(2, 24)

    def grads(of: Any) -> list[torch.Tensor]:
        result = of(input_ids=tokens, labels=tokens)
        result.loss.backward()
        return [result.logits, *(p.grad for p in of.parameters() if p.grad is not None)]

    own, expected = grads(model), grads(plain)
    if name in ("Olmo2", "Qwen2Moe"):  # the gradient of an x that others read too is another sum
        own, expected = own[:1], expected[:1]
    assert same(own, expected)
    linears = {each: m for each, m in model.named_modules() if isinstance(m, f8.Float8Linear)}
    assert 0 < covered < len(linears)
    before = {each: m.weight.detach().clone() for each, m in linears.items()}
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    assert [each for each, m in linears.items() if torch.equal(m.weight, before[each])] == []


class Renamed(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.wide, self.narrow, self.silu = nn.Linear(64, 144), nn.Linear(144, 64), act

    def forward(self, hidden: torch.Tensor) -> Any:
        hidden = self.wide(hidden)
        hidden = self.silu(hidden)
        hidden = self.narrow(hidden)
        return hidden


class Swapped(FeedForward):
    """Its children have other parts than their names say."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.w2(F.gelu(self.w3(x)) * self.w1(x))


def test_knows_children_by_their_parts(config: Config) -> None:
    made = (FeedForward(), Swapped(), Renamed(nn.GELU("tanh")))
    model = converted(nn.Sequential(*made), config("blockwise"))
    plain = copy.deepcopy(model)
    assert all(each.fused for each in f8.fuse(model))
    assert [(*each.float8_names[:3], each.float8_activation) for each in model] == [
        ("w1", "w3", "w2", "silu"),
        ("w3", "w1", "w2", "gelu"),
        (None, "wide", "narrow", "gelu_tanh"),
    ]
    for own, fused in zip(plain, model, strict=True):
        own.forward = functools.partial(one_by_one, own)
        describe(own, fused)
    x = inputs(model)
    assert same(step(model, x), step(plain, x))


class UpFirst(FeedForward):
    def forward(self, x: torch.Tensor) -> Any:
        gate, up = self.w1(x), self.w3(x)
        h = up * torch.nn.functional.gelu(gate, approximate="tanh")
        return self.w2(h)


class Residual(nn.Module):
    """As nanoGPT's, with a dropout behind; and as timm's, with one between that drops nothing, and norms."""

    def __init__(self, between: float = 0.0, behind: float = 0.0) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 144), nn.Linear(144, 64)
        self.drop1, self.drop2 = nn.Dropout(between), nn.Dropout(behind)
        self.act, self.norm, self.ln = nn.GELU(), nn.Identity(), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.act(self.fc1(self.ln(x)))
        x = self.norm(self.drop1(x))
        return self.drop2(self.fc2(x))


class WithFunction(FeedForward):
    """As Starcoder2's and Seed-OSS's."""

    p = 0.3

    def forward(self, x: torch.Tensor) -> Any:
        x = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return nn.functional.dropout(x, p=self.p, training=self.training)


class WithBias(FeedForward):
    def __init__(self) -> None:
        super().__init__()
        self.w2, self.w3 = nn.Linear(144, 64), nn.Linear(64, 144)


class Squared(Renamed):
    def forward(self, x: torch.Tensor) -> Any:
        return self.narrow(F.relu(self.wide(x)) ** 2)


class SquaredByMethod(Renamed):
    def forward(self, x: torch.Tensor) -> Any:
        return self.narrow(F.relu(self.wide(x)).square())


class SquaredByPow(Renamed):
    def forward(self, x: torch.Tensor) -> Any:
        return self.narrow(torch.pow(F.relu(self.wide(x)), 2))


class SquaredByFunction(Renamed):
    def forward(self, x: torch.Tensor) -> Any:
        h = torch.relu(self.wide(x))
        return self.narrow(torch.square(h))


def sequential(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 144), nn.SiLU(), *more, nn.Linear(144, 64))


KNOWN: list[tuple[nn.Module, tuple[Any, ...]]] = [
    (WithFunction(), ("w1", "w3", "w2", "silu")),
    (WithBias(), ("w1", "w3", "w2", "silu")),
    (UpFirst(), ("w1", "w3", "w2", "gelu_tanh")),
    (Residual(behind=0.3), (None, "fc1", "fc2", "gelu")),
    (Squared(nn.Identity()), (None, "wide", "narrow", "relu2")),
    (SquaredByMethod(nn.Identity()), (None, "wide", "narrow", "relu2")),
    (SquaredByPow(nn.Identity()), (None, "wide", "narrow", "relu2")),
    (SquaredByFunction(nn.Identity()), (None, "wide", "narrow", "relu2")),
    (sequential(), (None, "1", "3", "silu")),
    (sequential(nn.Dropout(0.0)), (None, "1", "4", "silu")),
]


@pytest.mark.parametrize(
    ("module", "expected"), KNOWN, ids=[type(module).__name__ for module, _ in KNOWN]
)
def test_knows_other_ways_to_write_it(config: Config, module: Any, expected: Any) -> None:
    """What x and y go through is called, also a dropout of y."""
    model = converted(nn.Sequential(copy.deepcopy(module)), config("rowwise"))
    plain = copy.deepcopy(model)
    assert [each.fused for each in f8.fuse(model)] == [True]
    assert (*model[0].float8_names[:3], model[0].float8_activation) == expected
    plain[0].forward = functools.partial(one_by_one, plain[0])
    of = model[0]
    describe(plain[0], of)
    x = inputs(model)
    torch.manual_seed(1)
    own = step(model, x)
    torch.manual_seed(1)
    assert same(own, step(plain, x))
    assert type(copy.deepcopy(model)[0]) is type(of)


class Tripled(nn.Identity):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * x


class QuickGELU(nn.GELU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)


class Chosen2(Residual):
    @property
    def act(self) -> Any:  # type: ignore[override]
        return nn.GELU()

    @act.setter
    def act(self, value: Any) -> None:
        pass


class Backwards(nn.Sequential):
    def __iter__(self) -> Any:
        return reversed(list(self._modules.values()))


def test_leaves_children_that_are_more_than_they_seem(config: Config) -> None:
    """Subclasses with a forward of their own, and one that is a property."""
    quick, own_forward = Residual(), Residual()
    quick.act = QuickGELU()
    own_forward.act.forward = torch.tanh  # type: ignore[method-assign]
    made = (sequential(Tripled()), quick, own_forward, Chosen2(), Backwards(*sequential()[1:]))
    model = converted(nn.Sequential(*made), config("blockwise"))
    assert [(each.name, each.why.split(";")[0], each.fused) for each in f8.fuse(model)][:4] == [
        ("0", "its 3, a Tripled, is between its linears", False),
        ("1", "its act is QuickGELU", False),
        ("2", "its act has a forward of its own", False),
        ("3", "its act is a property, which may be another one in each call", False),
    ]
    assert not any(type(each).__name__.startswith("Fused") for each in model)


def test_a_forward_of_the_class_that_is_replaced_later(config: Config, monkeypatch: Any) -> None:
    notices._told.clear()
    model: Any = converted(nn.Sequential(Residual()), config("blockwise"))
    assert [each.fused for each in f8.fuse(model)] == [True]
    monkeypatch.setattr(Residual, "forward", lambda self, x: self.fc2(self.fc1(x)))
    x = inputs(model)
    with pytest.warns(
        UserWarning, match=r"0 \(Residual\) is no longer fused: the forward of its class"
    ):
        y = model(x)
    assert torch.equal(y, model[0].fc2(model[0].fc1(x)))


def test_leaves_what_is_between(config: Config) -> None:
    """A dropout and a norm of h, and hooks of what would not be called; a dropout that comes later is seen."""
    hooked = Residual()
    hooked.act.register_forward_hook(lambda *_: None)
    made = (Residual(between=0.1), sequential(nn.LayerNorm(144)), hooked)
    model = converted(nn.Sequential(*made), config("blockwise"))
    assert [each.split(",")[0].split(" (")[0] for each in reasons(model)] == [
        "its drop1 drops what is between its linears",
        "its 3",
        "its act has hooks",
    ]


CHANGES: list[tuple[str, int, Callable[[Any], Any]]] = [
    ("its drop1 drops", 0, lambda of: setattr(of.drop1, "p", 0.5)),
    ("its act is ReLU", 0, lambda of: setattr(of, "act", nn.ReLU())),
    ("its act is gelu_tanh now", 0, lambda of: setattr(of, "act", nn.GELU("tanh"))),
    ("its act has a forward", 0, lambda of: setattr(of.act, "forward", torch.tanh)),
    ("other children", 1, lambda of: of.append(nn.Sigmoid())),
    ("its 2 is Tanh", 1, lambda of: of.__setitem__(2, nn.Tanh())),
]


@pytest.mark.parametrize(("why", "index", "change"), CHANGES, ids=[why for why, *_ in CHANGES])
def test_sees_what_changes_later(config: Config, why: str, index: int, change: Any) -> None:
    """Such an MLP computes as its own class does."""
    notices._told.clear()
    model: Any = converted(nn.Sequential(Residual(), sequential()), config("blockwise"))
    assert [each.fused for each in f8.fuse(model)] == [True, True]
    changed = model[index]
    change(changed)
    x = inputs(model)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match=why):
        own = changed(x)
    torch.manual_seed(1)
    assert torch.equal(own, type(changed).float8_original.forward(changed, x))
    assert [why in each.why for each in f8.fuse(model)] == [index == 0, index == 1]


class SiLU(nn.Module):
    """It has the name of an activation."""


def test_leaves_activations_of_others(config: Config) -> None:
    model = converted(nn.Sequential(Renamed(SiLU()), Renamed(nn.Identity())), config("blockwise"))
    assert [each.split(";")[0] for each in reasons(model)] == [
        "its silu is SiLU",
        "its silu is Identity",
    ]


def test_a_keyword_is_not_an_x(config: Config) -> None:
    """Its own forward takes it, and a warning says that it is not fused."""
    model = converted(nn.Sequential(Renamed(nn.GELU())), config("blockwise"))
    expected = model[0](hidden=inputs(model))
    assert [each.fused for each in f8.fuse(model)] == [True]
    with pytest.warns(UserWarning, match="called with other than an x"):
        assert torch.equal(model[0](hidden=inputs(model)), expected)


def test_names_no_other_modules(config: Config) -> None:
    """A prediction head, with a norm in the place of down, and attention are no MLPs."""
    bert = pytest.importorskip("transformers").models.bert.modeling_bert
    made = pytest.importorskip("transformers").BertConfig(**SIZES)
    heads = [bert.BertPredictionHeadTransform(made), bert.BertSelfAttention(made)]
    assert f8.fuse(converted(nn.Sequential(*heads), config("blockwise"))) == []
