"""MLPs without a gate, and those of other activations than SiLU, each as one function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from activations import NAMES, activated, glu
from fused import converted, inputs, reasons, step
from reference import same
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import float8.torch as f8

Config = Callable[..., f8.LinearConfig]
pytestmark = pytest.mark.filterwarnings("ignore:float8. fuse left")
FUSED = ("tensorwise", "rowwise", "delayed", "blockwise")


class MLP(nn.Module):
    """down(activation(up(x))); with a gate the activation is its own."""

    activation = "gelu"

    def __init__(self, bias: bool = True, gated: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 144, bias=False) if gated else None
        self.up = nn.Linear(64, 144, bias=bias)
        self.down = nn.Linear(144, 64, bias=bias)
        for each in (self.up, self.down):
            if bias:
                nn.init.normal_(each.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """It has the rounding of the kernels, and its linears cast what is between them."""
        if self.gate is None:
            y: torch.Tensor = self.down(activated(self.up(x), self.activation))
        else:
            y = self.down(glu(self.gate(x), self.up(x), self.activation))
        return y


def kind_of(name: str, gated: bool) -> type[MLP]:
    kind = type(f"MLP_{name}", (MLP,), {"activation": name, "forward": MLP.forward})
    f8.register_mlp(kind, up="up", down="down", gate="gate" if gated else None, activation=name)
    return kind


KINDS = {(name, gated): kind_of(name, gated) for name in NAMES for gated in (False, True)}


class Block(nn.Module):
    def __init__(self, name: str, gated: bool, bias: bool) -> None:
        super().__init__()
        self.mlp = KINDS[name, gated](bias and not gated, gated)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))  # type: ignore[no-any-return]


def pair(
    config: Config,
    recipe: str,
    name: str = "gelu",
    gated: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = True,
) -> tuple[Any, Any]:
    """Returns a fused model, and one with the same weights whose linears compute one by one."""
    both = []
    for _ in range(2):
        torch.manual_seed(1)
        blocks = nn.Sequential(*(Block(name, gated, bias) for _ in range(2)))
        both.append(converted(blocks, config(recipe), dtype))
    assert f8.fuse(both[0]) == [("0.mlp", True, "", "mlp"), ("1.mlp", True, "", "mlp")]
    return both[0], both[1]


@pytest.mark.parametrize(
    ("name", "gated", "dtype"),
    [
        *((name, False, torch.bfloat16) for name in NAMES),
        ("gelu", True, torch.bfloat16),
        ("gelu_tanh", True, torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("recipe", FUSED)
def test_has_the_bits_of_linears_one_by_one(
    config: Config, recipe: str, name: str, gated: bool, dtype: torch.dtype
) -> None:
    """In the first step, in later ones, with scales of their own, and without backward."""
    fused, plain = pair(config, recipe, name, gated, dtype)
    for seed in range(3):
        x = inputs(fused, seed=seed)
        assert same(step(fused, x), step(plain, x)), f"step {seed}"
        for model in (fused, plain):
            f8.sync_float8_amax_and_scale_history(model)
    with torch.no_grad():
        x = inputs(fused, seed=9)
        assert torch.equal(fused(x), plain(x))
    assert fused.state_dict().keys() == plain.state_dict().keys()
    assert all(map(torch.equal, fused.state_dict().values(), plain.state_dict().values()))


@pytest.mark.parametrize("rows", [1, 67, 130])
def test_takes_any_number_of_rows(config: Config, rows: int) -> None:
    fused, plain = pair(config, "rowwise", bias=False)
    x = inputs(fused, rows)
    assert same(step(fused, x), step(plain, x))


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
@pytest.mark.parametrize(
    "frozen", ["up.weight", "up.bias", "down.weight", "down.bias", "x", "x up.weight", "x up"]
)
def test_leaves_out_gradients_that_nobody_wants(config: Config, frozen: str, recipe: str) -> None:
    fused, plain = pair(config, recipe)
    for model in (fused, plain):
        for name, parameter in model.named_parameters():
            if any(each in name or (each == "x" and "0.norm" in name) for each in frozen.split()):
                parameter.requires_grad_(False)
    x = inputs(fused)
    assert same(step(fused, x), step(plain, x))
    if "x" in frozen.split():
        for model in (fused, plain):
            model.zero_grad()
            model[0].mlp(x).float().sum().backward()
        of_both = [[p.grad for p in model[0].mlp.parameters()] for model in (fused, plain)]
        assert [each is None for each in of_both[0]] == [each is None for each in of_both[1]]
        assert same(*([each for each in of if each is not None] for of in of_both))


@pytest.mark.parametrize("recipe", FUSED)
def test_compiles_and_is_checkpointed(config: Config, recipe: str) -> None:
    torch._dynamo.reset()  # each recipe is one more compilation of the same code
    fused, _ = pair(config, recipe)
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    for rows in (24, 40, 56):
        x = inputs(fused, rows)
        expected = step(fused, x)
        assert same(step(fused, x, compiled), expected)
        again = step(fused, x, lambda x: checkpoint(fused, x, use_reentrant=False))
        assert same(again, expected)
    with torch.no_grad():
        assert torch.equal(compiled(x), fused(x))


def test_casts_for_autocast_and_reads_kept_casts_of_weights(config: Config) -> None:
    fused, plain = pair(config, "blockwise", dtype=torch.float32)
    f8.cache_weight_casts(fused)
    x = inputs(fused)
    for _ in range(2):
        with torch.autocast(x.device.type, torch.bfloat16):
            got, expected = step(fused, x), step(plain, x)
        assert [each.dtype for each in got] == [each.dtype for each in expected]
        assert same(got, expected)
        with torch.no_grad():
            for model in (fused, plain):
                for p in model.parameters():
                    p.mul_(1.25)


def test_keeps_what_the_activation_reads_in_16_bits(config: Config) -> None:
    """Between forward and backward there are x's and h's copies in fp8, and up's result in bf16."""
    fused, _ = pair(config, "blockwise", bias=False)
    x = inputs(fused).requires_grad_()
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    weights = {p.data_ptr() for p in fused.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        fused[0].mlp(x)
    others = [each for each in kept if each.data_ptr() not in weights]
    assert [tuple(each.shape) for each in others if each.dtype != torch.uint8] == [(2, 40, 144)]


def test_refuses_and_names_what_it_cannot_fuse(config: Config) -> None:
    high = converted(Block("gelu", False, True), config("rowwise_with_gw_hp"))
    assert "high precision" in reasons(high)[0]
    hooked = converted(Block("gelu", False, True), config("blockwise"))
    hooked.mlp.up.register_forward_hook(lambda *_: None)
    assert "its up has hooks" in reasons(hooked)[0]


SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def transformer(name: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}Config")(**{**SIZES, "num_attention_heads": 4, **options})
    return getattr(transformers, f"{name}ForCausalLM")(made)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("GPTNeoX", {}),
        ("Phi", {"hidden_act": "gelu_new"}),
        ("Nemotron", HEADS),
        ("Gemma", {**HEADS, "head_dim": 16}),
    ],
)
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_fuses_models_of_transformers(
    config: Config, recipe: str, name: str, options: dict[str, Any]
) -> None:
    """One step changes every weight that was converted, and the results are close to unfused ones."""
    model: Any = converted(transformer(name, **options), config(recipe), torch.float32)
    tokens = torch.arange(1, 49, device=model.device).view(2, 24)  # 0 pads
    with torch.no_grad():
        unfused = model(input_ids=tokens).logits
    keys, names = list(model.state_dict()), [each for each, _ in model.named_parameters()]
    done = f8.fuse(model)
    assert [each.fused for each in done if each.what == "mlp"] == [True, True]
    assert list(model.state_dict()) == keys
    assert [each for each, _ in model.named_parameters()] == names
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    assert functional.cosine_similarity(logits, unfused, -1).min() > 0.99
    layers = {each: m for each, m in model.named_modules() if isinstance(m, f8.Float8Linear)}
    before = {each: [p.detach().clone() for p in m.parameters()] for each, m in layers.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    f8.sync_float8_amax_and_scale_history(model)
    optimizer.step()
    assert model(input_ids=tokens, labels=tokens).loss < loss
    for each, layer in layers.items():
        for old, new in zip(before[each], layer.parameters(), strict=True):
            assert not torch.equal(old, new), each


def test_names_an_activation_that_it_does_not_have(config: Config) -> None:
    model = converted(transformer("Phi", hidden_act="quick_gelu"), config("blockwise"))
    for why in reasons(model):
        assert "its activation_fn is QuickGELUActivation; what is fused is SiLU, GELU" in why
    assert len(reasons(model)) == 2
