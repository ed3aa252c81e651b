"""convert_to_float8_training(experts=True): models of transformers and torchtitan's GroupedExperts."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from activations import glu
from reference import agree, error, same
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import float8
import float8.torch as f8

Config = Callable[..., f8.LinearConfig]
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("untold")

_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def qwen(**more: Any) -> Any:
    own = {"intermediate_size": 96, "moe_intermediate_size": 48, "num_experts": 4, "head_dim": 16}
    options = {**_SIZES, **_HEADS, **own, "num_experts_per_tok": 2, **more}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**options))


def mixtral(**more: Any) -> Any:
    own = {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**{**_SIZES, **_HEADS, **own, **more})
    )


def gpt_oss() -> Any:
    """Its weights are stored as [E, K, N], with gate and up interleaved, and have biases."""
    own = {
        "intermediate_size": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
    }
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**{**_SIZES, **_HEADS, **own}))


def deepseek() -> Any:
    own = {
        "intermediate_size": 96, "moe_intermediate_size": 48, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "n_shared_experts": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 4,
    }  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**{**_SIZES, **own}))


def llama4(**more: Any) -> Any:
    """Every expert has a row of every token, and weights are stored as [E, K, N]."""
    own = {
        "intermediate_size": 48, "intermediate_size_mlp": 96, "num_local_experts": 4,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "head_dim": 16,
    }  # fmt: skip
    options = {**_SIZES, **_HEADS, **own, "pad_token_id": 0, **more}
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**options))


MODELS = {
    "qwen": qwen,
    "mixtral": mixtral,
    "gpt_oss": gpt_oss,
    "deepseek": deepseek,
    "llama4": llama4,
}


def made(make: Any, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    return make().to(device, dtype)


def converted(model: Any, options: f8.LinearConfig, **more: Any) -> Any:
    return f8.convert_to_float8_training(model, config=options, **{"experts": True, **more})


def experts_of(model: nn.Module) -> dict[str, Any]:
    return {n: m for n, m in model.named_modules() if type(m).__name__.startswith("Float8") and "Experts" in type(m).__name__}  # fmt: skip


def tokens(model: Any) -> Tensor:
    return torch.randint(0, 64, (2, 24), device=model.device)


def gradients(model: Any, batch: Tensor, call: Any = None) -> list[Tensor]:
    """Returns the loss and all gradients."""
    model.zero_grad()
    loss = (call or model)(input_ids=batch, labels=batch).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


_RUNS = [
    *((name, "rowwise") for name in MODELS),
    *(("qwen", recipe) for recipe in ("tensorwise", "blockwise", "bf16")),
]


@pytest.mark.parametrize(("name", "recipe"), _RUNS)
def test_trains_models_of_transformers(device: str, config: Config, name: str, recipe: str) -> None:
    """The loss is that of bf16 within fp8's error, becomes less, and every expert's weight changes."""
    model = made(MODELS[name], device, torch.float32)
    batch = tokens(model)
    with torch.autocast(device, torch.bfloat16):
        exact = gradients(model, batch)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        parameters = list(model.parameters())
        converted(model, config(recipe), module_filter_fn=lambda *_: False)
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        names = experts_of(model)
        assert len(names) == (1 if name == "deepseek" else 2)
        own = gradients(model, batch)
        assert abs(own[0] - exact[0]) < 0.02 * exact[0]
        for n, (one, two) in enumerate(zip(own, exact, strict=True)):
            if two.dim() == 3:
                cosine = functional.cosine_similarity(one.flatten(), two.flatten(), 0)
                assert cosine > 0.98, (n, cosine)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for _ in range(6):
            optimizer.zero_grad()
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
    for module in names:
        for n, p in model.get_submodule(module).named_parameters():
            for e in range(4):
                assert not torch.equal(p[e], before[f"{module}.{n}"][e]), (module, n, e)
    f8.check_routing()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"])
def test_equal_groups_are_dense_experts(device: str, config: Config, recipe: str) -> None:
    """In Llama 4 the rows of an expert are an equal part, whose number may change from call to call."""
    experts = made(llama4, device).model.layers[0].feed_forward.experts
    weights = dict(experts.named_parameters())
    assert list(weights) == ["gate_up_proj", "down_proj"]
    emulate = config(recipe).emulate
    converted(nn.Sequential(experts), config(recipe))
    assert dict(experts.named_parameters()).keys() == weights.keys()
    assert all(p is weights[name] for name, p in experts.named_parameters())

    def dense(x: Tensor) -> Tensor:
        parts = []
        for rows, w13, w2 in zip(x.chunk(4), *weights.values(), strict=True):
            gate, up = f8.functional.linear(rows, w13.t(), recipe=recipe, emulate=emulate).chunk(2, -1)  # fmt: skip
            h = up * functional.silu(gate) if recipe == "rowwise_with_gw_hp" else glu(gate, up)
            parts.append(f8.functional.linear(h, w2.t(), recipe=recipe, emulate=emulate))
        return torch.cat(parts)

    for tokens_of_each in (24, 5):
        x = torch.randn(4 * tokens_of_each, 64, device=device, dtype=torch.bfloat16, requires_grad=True)  # fmt: skip
        dy = torch.randn_like(x)
        leaves = [x, *weights.values()]
        own, other = ([y.detach(), *torch.autograd.grad(y, leaves, dy)] for y in (experts(x), dense(x)))  # fmt: skip
        assert own[0].any() and all(each.any() for each in own[2][:, 0])
        assert all(map(agree, own, other))


def test_converts_linears_and_experts_at_once(device: str, config: Config) -> None:
    model = converted(made(qwen, device), config("rowwise"))
    assert len(experts_of(model)) == 2
    assert isinstance(model.model.layers[0].self_attn.q_proj, f8.Float8Linear)
    assert "recipe=rowwise" in repr(model.model.layers[0].mlp.experts)
    own = gradients(model, tokens(model))
    assert all(each.isfinite().all() for each in own)


def test_converts_no_experts_unless_it_is_asked(device: str, config: Config) -> None:
    model = f8.convert_to_float8_training(made(qwen, device), config=config("rowwise"))
    assert not experts_of(model)
    model = converted(made(qwen, device), config("rowwise"), experts=lambda _, name: ".1." in name)
    assert list(experts_of(model)) == ["model.layers.1.mlp.experts"]


def test_a_conversion_that_was_not_asked_about_experts_says_so_once(config: Config) -> None:
    told = []
    for experts in (False, None, None):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            f8.convert_to_float8_training(qwen(), config=config("rowwise"), experts=experts)
        told.append([str(each.message) for each in caught if "experts=True" in str(each.message)])
    assert [len(each) for each in told] == [0, 1, 0]
    with pytest.warns(
        UserWarning, match="converted nothing in .*experts=True.* converts its experts"
    ):
        f8.convert_to_float8_training(
            qwen(), config=config("rowwise"), module_filter_fn=lambda *_: False
        )
    assert "mlp.experts" in told[1][0]


def test_gives_linears_and_experts_recipes_of_their_own(device: str, config: Config) -> None:
    model = made(qwen, device)
    high = float8.Recipe.named("bf16").output
    with pytest.raises(ValueError, match="use one of tensorwise, rowwise"):
        converted(model, config(float8.Recipe(output=high)))
    assert not any(isinstance(each, f8.Float8Linear) for each in model.modules())
    f8.convert_to_float8_training(model, config=config("delayed"))
    converted(model, config("rowwise"), module_filter_fn=lambda *_: False)
    assert model.model.layers[0].self_attn.q_proj.recipe.name == "delayed"
    gradients(model, tokens(model))
    f8.sync_float8_amax_and_scale_history(model)
    converted(model, config("blockwise"), module_filter_fn=lambda *_: False)
    assert [each.experts_recipe for each in experts_of(model).values()] == ["blockwise"] * 2


def test_experts_in_bf16_cast_nothing(device: str, config: Config) -> None:
    """Their gradients are those of the experts that they were, and no fp8 copy is kept."""
    model = made(qwen, device)
    batch = tokens(model)
    exact = gradients(model, batch)
    converted(model, config("bf16"), module_filter_fn=lambda *_: False)
    for one, two in zip(gradients(model, batch), exact, strict=True):
        assert error(one, two) < 0.02
    f8.cache_weight_casts(model)
    assert not any(each.weight_casts for each in experts_of(model).values())
    assert error(gradients(model, batch)[0], exact[0]) < 0.01


def test_keeps_the_state_dict_copies_and_pickles(device: str, config: Config) -> None:
    model = made(qwen, device)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    converted(model, config("blockwise"), module_filter_fn=lambda *_: False)
    assert list(model.state_dict()) == list(before)
    assert same(model.state_dict().values(), before.values())
    batch = tokens(model)
    expected = gradients(model, batch)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    fresh = made(qwen, device)
    fresh.load_state_dict(model.state_dict())
    converted(fresh, config("blockwise"), module_filter_fn=lambda *_: False)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False), fresh):
        kinds = [type(each) for each in experts_of(other).values()]
        assert kinds == [type(each) for each in experts_of(model).values()]
        assert same(gradients(other, batch), expected)


def test_loads_and_saves_checkpoints_of_bf16(device: str, config: Config, tmp_path: Any) -> None:
    model = converted(made(qwen, device), config("rowwise"))
    model.save_pretrained(tmp_path)
    other = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert same(other.to(device).state_dict().values(), model.state_dict().values())


def test_equal_groups_compile(device: str, config: Config) -> None:
    model = converted(made(llama4, device), config("rowwise"), module_filter_fn=lambda *_: False)
    experts = model.model.layers[0].feed_forward.experts
    torch.compiler.reset()
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    for rows in (8, 20, 24):
        x = torch.randn(rows, 64, device=device, dtype=torch.bfloat16)
        assert torch.equal(compiled(x), experts(x))


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_experts_compile(device: str, config: Config, recipe: str) -> None:
    model = converted(made(qwen, device), config(recipe), module_filter_fn=lambda *_: False)
    experts = model.model.layers[0].mlp.experts
    torch.compiler.reset()
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    for rows in (24, 31, 40):
        x = torch.randn(rows, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        ids = torch.randint(0, 4, (rows, 2), device=device)
        scores = torch.rand(rows, 2, device=device)
        results = []
        for call in (compiled, experts):
            y = call(x, ids, scores)
            results.append([y, *torch.autograd.grad(y.float().square().sum(), [x, *experts.parameters()])])  # fmt: skip
        assert same(*results)


@pytest.mark.parametrize("reentrant", [False, True])
def test_experts_are_checkpointed(device: str, config: Config, reentrant: bool) -> None:
    model = converted(made(qwen, device), config("rowwise"), module_filter_fn=lambda *_: False)
    experts = model.model.layers[0].mlp.experts
    x = torch.randn(24, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.randint(0, 4, (24, 2), device=device)
    scores = torch.rand(24, 2, device=device)
    plain = experts(x, ids, scores)
    again = checkpoint(experts, x, ids, scores, use_reentrant=reentrant)
    leaves = [x, *experts.parameters()]
    results = []
    for y in (plain, again):
        for leaf in leaves:
            leaf.grad = None
        y.float().sum().backward()
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    assert same(*results)


class OtherExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_names_experts_that_it_leaves(device: str, config: Config) -> None:
    def words(model: nn.Module) -> str:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            converted(model, config("rowwise"), module_filter_fn=lambda *_: False)
        assert not experts_of(model)
        return " ".join(str(each.message) for each in caught)

    text = words(nn.Sequential(OtherExperts().to(device)))
    assert (
        "layer '0' stays as it is, and its experts are not in fp8: the forward of OtherExperts"
        in text
    )
    assert "float8.torch.grouped_mm" in text
    odd = words(made(lambda: qwen(moe_intermediate_size=40), device))
    assert "each of 2 layers" in odd
    assert "64 by 40 for each expert, and fp8 needs multiples of 16" in odd
    assert "of torch.float64" in words(made(qwen, device, torch.float64))
    replaced = made(qwen, device)
    for layer in replaced.model.layers:
        layer.mlp.experts.forward = layer.mlp.experts.forward
    assert "its forward was replaced" in words(replaced)


def test_refuses_experts_that_are_no_choice(device: str, config: Config) -> None:
    with pytest.raises(TypeError, match="experts is 'all'; it is True, False, or a function"):
        converted(made(qwen, device), config("rowwise"), experts="all")


def test_drops_pairs_of_other_ranks(device: str, config: Config) -> None:
    """Expert parallelism of transformers gives them ids beyond the rank's experts."""
    model = converted(made(qwen, device), config("rowwise"), module_filter_fn=lambda *_: False)
    experts = model.model.layers[0].mlp.experts
    x = torch.randn(24, 64, device=device, dtype=torch.bfloat16)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(24)]).to(device)
    scores = torch.rand(24, 2, device=device)
    ids[5, 1] = 4
    y = experts(x, ids, scores)
    scores[5, 1] = 0
    x[5:6] = x[5:6]
    alone = experts(x[5:6], ids[5:6, :1], scores[5:6, :1])
    assert torch.equal(y[5:6], alone)


@pytest.mark.parametrize(
    ("model", "name", "config_of", "sizes"),
    [
        ("nemotron_h", "NemotronHExperts", "NemotronHConfig", {"n_routed_experts": 4}),
        ("aria", "AriaExperts", "AriaTextConfig", {"moe_num_experts": 4, "intermediate_size": 48}),
    ],
)
def test_experts_have_other_forms(
    device: str, config: Config, model: str, name: str, config_of: str, sizes: dict[str, int]
) -> None:
    """Without gates, and with weights [E, K, N] without biases."""
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    if not hasattr(module, name):
        pytest.skip(f"this transformers has no {name}")
    if len(inspect.signature(getattr(module, name).forward).parameters) < 4:
        pytest.skip(f"the {name} of this transformers take no ids and scores")
    own = getattr(transformers, config_of)(hidden_size=64, moe_intermediate_size=48, **sizes)
    experts = getattr(module, name)(own)
    for p in experts.parameters():
        nn.init.normal_(p, std=0.1)
    experts.config._experts_implementation = "eager"
    experts.to(device, torch.bfloat16)
    x = torch.randn(48, 64).to(device, torch.bfloat16)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(48)]).to(device)
    scores = torch.rand(48, 2).to(device, torch.bfloat16)
    exact = experts(x, ids, scores)
    converted(nn.Sequential(experts), config("rowwise"))
    y = experts(x, ids, scores)
    assert type(experts).__name__ == f"Float8{name}"
    assert functional.cosine_similarity(y.float().flatten(), exact.float().flatten(), 0) > 0.99
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in experts.parameters())
