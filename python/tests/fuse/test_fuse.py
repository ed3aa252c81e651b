"""float8.torch.fuse: MLPs as one function, with the bits of their linears one by one."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from activations import glu
from fused import converted, expect_equal_steps, expect_trains, inputs, reasons, step
from reference import same
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import float8.torch as f8

Config = Callable[..., f8.LinearConfig]
pytestmark = pytest.mark.filterwarnings("ignore:float8. fuse left")
FUSED = ("tensorwise", "rowwise", "delayed", "blockwise")


class MLP(nn.Module):
    def __init__(self, bias: bool = False, width: int = 144) -> None:
        super().__init__()
        self.gate = nn.Linear(64, width, bias=bias)
        self.up = nn.Linear(64, width, bias=bias)
        self.down = nn.Linear(width, 64, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return y


class OneByOne(MLP):
    """The MLP with the rounding of the kernels, whose linears cast h and its gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(glu(self.gate(x), self.up(x)))
        return y


class Block(nn.Module):
    def __init__(self, kind: type[MLP] = MLP, bias: bool = False) -> None:
        super().__init__()
        self.mlp = kind(bias)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


f8.register_mlp(MLP, gate="gate", up="up", down="down", activation="silu")


def pair(
    config: Config,
    recipe: str,
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    """Returns a fused model, and one with the same weights whose linears compute one by one."""
    models = []
    for kind in (MLP, OneByOne):
        torch.manual_seed(1)
        blocks = nn.Sequential(Block(kind, bias), Block(kind, bias))
        models.append(converted(blocks, config(recipe, **options), dtype))
    fused, plain = models
    assert f8.fuse(fused) == [("0.mlp", True, "", "mlp"), ("1.mlp", True, "", "mlp")]
    return fused, plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", FUSED)
def test_has_the_bits_of_linears_one_by_one(
    config: Config, recipe: str, dtype: torch.dtype
) -> None:
    expect_equal_steps(*pair(config, recipe, dtype, bias=dtype == torch.float16))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("frozen", ["gate", "up", "down", "x", "gate up down"])
def test_leaves_out_gradients_that_nobody_wants(config: Config, frozen: str, recipe: str) -> None:
    fused, plain = pair(config, recipe, bias=recipe != "blockwise")
    for model in (fused, plain):
        for name in frozen.split():
            for block in model:
                getattr(block.mlp, name, nn.Identity()).requires_grad_(False)
        if frozen == "x":
            model[0].norm.requires_grad_(False)
    x = inputs(fused)
    assert same(step(fused, x), step(plain, x))
    if frozen == "x":
        for model in (fused, plain):
            model.zero_grad()
            model[0].mlp(x).float().sum().backward()
        assert same([p.grad for p in fused[0].mlp.parameters()], [p.grad for p in plain[0].mlp.parameters()])  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize("recipe", FUSED)
def test_gradients_are_close_to_fp64(config: Config, recipe: str) -> None:
    torch.manual_seed(0)
    model = converted(Block(), config(recipe))
    exact = Block().double()
    exact.load_state_dict({k: v.double() for k, v in model.state_dict().items() if "float8" not in k})  # fmt: skip
    f8.fuse(model)
    x = inputs(model)
    expected = step(exact, x.double().cpu())
    for one, other in zip(step(model, x), expected, strict=True):
        cosine = functional.cosine_similarity(one.double().cpu().flatten(), other.flatten(), 0)
        assert cosine > 0.99


@pytest.mark.parametrize("recipe", FUSED)
def test_trains(config: Config, recipe: str) -> None:
    torch.manual_seed(0)
    model = converted(nn.Sequential(Block(), Block()), config(recipe), torch.float32)
    f8.fuse(model)
    expect_trains(model)


def test_keeps_the_state_dict_copies_and_pickles(config: Config) -> None:
    torch.manual_seed(0)
    model = converted(nn.Sequential(Block(), Block()), config("blockwise"))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    parameters = list(model.parameters())
    f8.fuse(model)
    assert list(model.state_dict()) == list(before)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert isinstance(model[0].mlp, MLP)
    model.load_state_dict(before)
    x = inputs(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert type(other[0].mlp) is type(model[0].mlp)
        assert same(step(other, x), step(model, x))
    assert all(each.fused for each in f8.fuse(model))  # again


@pytest.mark.parametrize("recipe", FUSED)
def test_compiles(config: Config, recipe: str) -> None:
    torch._dynamo.reset()  # each recipe is one more compilation of the same code
    fused, _ = pair(config, recipe)
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    for rows in (24, 40, 56):
        x = inputs(fused, rows)
        assert same(step(fused, x, compiled), step(fused, x))
    with torch.no_grad():
        assert torch.equal(compiled(x), fused(x))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", FUSED)
def test_is_checkpointed(config: Config, recipe: str, reentrant: bool) -> None:
    fused, _ = pair(config, recipe)
    x = inputs(fused)
    expected = step(fused, x)
    assert same(step(fused, x, lambda x: checkpoint(fused, x, use_reentrant=reentrant)), expected)


def test_reads_kept_casts_of_weights(config: Config) -> None:
    fused, plain = pair(config, "blockwise")
    f8.cache_weight_casts(fused)
    x = inputs(fused)
    for _ in range(2):
        assert same(step(fused, x), step(plain, x))
        with torch.no_grad():
            for model in (fused, plain):
                for p in model.parameters():
                    p.mul_(1.25)


def test_casts_for_autocast(config: Config) -> None:
    fused, plain = pair(config, "blockwise", torch.float32)
    x = inputs(fused)
    with torch.autocast(x.device.type, torch.bfloat16):
        assert same(step(fused, x), step(plain, x))


def test_leaves_a_recipe_that_reads_high_precision(config: Config) -> None:
    (why,) = reasons(converted(Block(), config("rowwise_with_gw_hp")))
    assert "recipe rowwise_with_gw_hp" in why
    assert "high precision" in why


class Wrapped(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x)
        return y


def test_leaves_and_names_what_it_cannot_fuse(config: Config) -> None:
    def model(change: Callable[[Any], object], mlp: nn.Module | None = None) -> str:
        block = Block()
        block.mlp = mlp or MLP()  # type: ignore[assignment]
        made = converted(block, config("blockwise"))
        change(made.mlp)
        (why,) = reasons(made)
        assert isinstance(made.mlp, type(block.mlp))
        return why

    assert "its gate has hooks" in model(lambda m: m.gate.register_forward_hook(lambda *_: None))
    assert "its down has hooks" in model(lambda m: m.down.register_full_backward_hook(lambda *_: None))  # fmt: skip
    assert "its up is a" in model(lambda m: setattr(m, "up", Wrapped(m.up)))
    assert "its forward was replaced" in model(lambda m: setattr(m, "forward", m.forward))
    assert "one linear is two" in model(lambda m: setattr(m, "up", m.gate))
    other = f8.Float8Linear(64, 144, False, recipe="blockwise", emulate=True, saturate=True)
    assert "differ in recipe, emulate or saturate" in model(lambda m: setattr(m, "up", other))
    again = f8.Float8Linear(64, 144, False, recipe="blockwise", emulate=True, recompute=True)
    assert "differ in" in model(lambda m: setattr(m, "up", again))

    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w3, self.w2 = (nn.Linear(64, 64, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> Any:
            return functional.dropout(self.w2(functional.silu(self.w1(x)) * self.w3(x)), 0.5)

    assert "register_mlp" in model(lambda m: None, Unknown())

    class Misnamed(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    f8.register_mlp(Misnamed, gate="gate", up="upp", down="down", activation="silu")
    assert "no 'upp'" in model(lambda m: None, Misnamed())


@pytest.mark.filterwarnings("ignore:float8. a MLP is no longer fused")
def test_calls_hooks_that_come_later(config: Config) -> None:
    fused, _ = pair(config, "blockwise")
    calls = []
    handle = fused[0].mlp.gate.register_forward_hook(lambda *_: calls.append(1))
    x = inputs(fused)
    step(fused, x)
    assert calls == [1]
    handle.remove()
    fused[0].mlp.register_forward_hook(lambda *_: calls.append(2))  # the MLP's own is no obstacle
    step(fused, x)
    assert calls == [1, 2]


@pytest.mark.filterwarnings("ignore:float8. a MLP is no longer fused")
def test_follows_another_conversion(config: Config) -> None:
    fused, plain = pair(config, "blockwise")
    for model in (fused, plain):
        converted(model, config("delayed"))
    x = inputs(fused)
    assert same(step(fused, x), step(plain, x))
    for model in (fused, plain):
        converted(model, config("rowwise"))
    assert same(step(fused, x), step(plain, x))
    assert len(reasons(fused)) == 0
    high = converted(fused, config("rowwise_with_gw_hp"))
    step(high, x)
    assert len(reasons(high)) == 2


def test_refuses_what_is_no_model() -> None:
    with pytest.raises(TypeError, match=r"fuse takes an nn\.Module"):
        f8.fuse(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a class of nn\.Module"):
        f8.register_mlp(MLP(), up="b", down="c", activation="gelu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="names of different children"):
        f8.register_mlp(MLP, gate="gate", up="gate", down="down", activation="silu")
    with pytest.raises(ValueError, match="activation is 'tanh'; it is one of silu, gelu"):
        f8.register_mlp(MLP, up="up", down="down", activation="tanh")


def test_names_the_layer_of_a_wrong_x(config: Config) -> None:
    fused, _ = pair(config, "blockwise")
    with pytest.raises(ValueError, match=r"layer '0.mlp.gate': x has rows of 32"):
        fused[0].mlp(inputs(fused)[..., :32])


def test_fuses_a_llama_of_transformers(config: Config) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    llama = converted(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)),
        config("delayed"),
    )
    keys = list(llama.state_dict())
    done = f8.fuse(llama)
    assert [each.what for each in done if each.fused] == ["mlp"] * 2 + ["rotary"] * 2
    assert list(llama.state_dict()) == keys
    tokens = torch.arange(48, device=llama.device).view(2, 24) % 64
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-2)
    before = {name: p.detach().clone() for name, p in llama.named_parameters()}
    losses = []
    for _ in range(5):
        loss = llama(input_ids=tokens, labels=tokens).loss
        loss.backward()
        f8.sync_float8_amax_and_scale_history(llama)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert not [name for name, p in llama.named_parameters() if torch.equal(p, before[name]) and "proj" in name]  # fmt: skip
