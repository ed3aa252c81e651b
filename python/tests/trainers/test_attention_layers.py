"""convert_attention_to_float8 in other people's models: transformers', trained by hand and by its Trainer,
torchtitan's wrappers of both releases, and modules of one's own."""

from __future__ import annotations

import copy
import pathlib
import pickle
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import real_training as training
import repository
import torch
from attention_models import Wrapper, copies, model_of, noted_windows, unchanged
from torch import Tensor, nn
from torch.nn import functional

import float8.torch as f8

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("untold")


TOKENS = 48


def tokens(device: str, count: int = TOKENS) -> Tensor:
    first = torch.randint(64, (2, 1))
    return ((first + 3 * torch.arange(count)) % 64).to(device)


def losses(model: Any, steps: int, device: str, count: int = TOKENS, **inputs: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    found = []
    torch.manual_seed(1)
    for _ in range(steps):
        batch = tokens(device, count)
        loss = model(input_ids=batch, labels=batch, **inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize(
    ("kind", "size"),
    [("Llama", 128), ("Llama", 64), ("Qwen3", 128), ("Mistral", 128), ("Gemma", 256)],
)
def test_a_model_of_transformers_trains(
    device: str, options: dict[str, Any], kind: str, size: int
) -> None:
    expected = losses(model_of(kind, device, head_dim=size), 6, device)
    model = model_of(kind, device, head_dim=size)
    assert f8.convert_attention_to_float8(model, **options) == [
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    ]
    before = copies(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = losses(model, 6, device)
    # A norm's weight in bfloat16 may come back to 1 by rounding.
    assert not [name for name in unchanged(model, before) if "norm" not in name]
    assert own != expected
    assert own == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("kind", "size"), [("Llama", 128), ("Mistral", 128), ("Llama", 64)])
def test_a_model_with_a_backward_in_fp8_trains(
    device: str, options: dict[str, Any], kind: str, size: int
) -> None:
    expected = losses(model_of(kind, device, head_dim=size), 6, device)
    model = model_of(kind, device, head_dim=size)
    f8.convert_attention_to_float8(model, "fp8", **options)
    before = copies(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = losses(model, 6, device)
    assert not [name for name in unchanged(model, before) if "norm" not in name]
    forward = model_of(kind, device, head_dim=size)
    f8.convert_attention_to_float8(forward, "fp8_forward", **options)
    assert losses(forward, 6, device) != own
    assert own == pytest.approx(expected, rel=0.03)


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return noted_windows(monkeypatch)


EXPERTS = {
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


# Qwen2MoE's layers have a window that they do not tell of; only its mask does.
@pytest.mark.parametrize(
    ("kind", "more", "expected"),
    [
        ("Mistral", {}, [64, 64]),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1}, [0, 64]),
        ("Qwen3", {"use_sliding_window": True, "max_window_layers": 1}, [0, 64]),
        ("Qwen2Moe", {"use_sliding_window": True, "max_window_layers": 1, **EXPERTS}, [64, 0]),
    ],
)
def test_layers_with_a_window_train(
    device: str,
    options: dict[str, Any],
    windows: list[int],
    kind: str,
    more: dict[str, Any],
    expected: list[int],
) -> None:
    def model() -> Any:
        sizes = {"sliding_window": 64, "max_position_embeddings": 128}
        return model_of(kind, device, **sizes, **more).float()  # in bf16 some steps round to none

    with torch.autocast(device, torch.bfloat16):
        plain = losses(model(), 4, device, 96)
    own_model = model()
    f8.convert_attention_to_float8(own_model, **options)
    before = copies(own_model)
    with warnings.catch_warnings(), torch.autocast(device, torch.bfloat16):
        warnings.simplefilter("error")
        own = losses(own_model, 4, device, 96)
    assert windows == 4 * expected
    assert not unchanged(own_model, before)
    assert own == pytest.approx(plain, rel=0.03)


def test_a_layer_with_a_window_computes_it(
    device: str, options: dict[str, Any], windows: list[int]
) -> None:
    sizes = {"sliding_window": 16, "max_position_embeddings": 128}
    batch = tokens(device, 96)
    model, plain = (model_of("Mistral", device, **sizes).eval() for _ in range(2))
    f8.convert_attention_to_float8(model, **options)
    causal = model_of("Mistral", device, sliding_window=None, max_position_embeddings=128).eval()
    y, expected, other = (m(batch).logits.double() for m in (model, plain, causal))
    assert windows == [16, 16]
    assert (y - expected).norm() < 0.1 * (other - expected).norm()
    # A window of all tokens is none, and a sequence in a batch with padding is PyTorch's.
    model.config.sliding_window = 96
    model(batch)
    assert windows[2:] == [0, 0]


def test_layers_with_a_window_and_checkpointing(
    device: str, options: dict[str, Any], windows: list[int]
) -> None:
    model = model_of("Mistral", device, sliding_window=16)
    f8.convert_attention_to_float8(model, **options)
    expected = losses(copy.deepcopy(model), 3, device)
    getattr(model, f"{training.checkpointing_name(model)}_enable")()
    assert losses(model.train(), 3, device) == pytest.approx(expected, rel=1e-3)
    assert windows == 3 * 2 * [16] + 3 * 4 * [16]


def test_with_fp8_linears_and_checkpointing(
    device: str, options: dict[str, Any], config: Any
) -> None:
    expected = losses(model_of("Llama", device), 6, device)
    model = model_of("Llama", device)
    f8.convert_to_float8_training(model, config=config("rowwise"))
    f8.convert_attention_to_float8(model, **options)
    getattr(model, f"{training.checkpointing_name(model)}_enable")()
    before = copies(model)
    own = losses(model.train(), 6, device)
    assert not unchanged(model, before)
    assert own == pytest.approx(expected, rel=0.05)


def test_a_second_model_of_one_config_stays(device: str, options: dict[str, Any]) -> None:
    model = model_of("Llama", device)
    config = model.config
    f8.convert_attention_to_float8(model, **options)
    other = type(model)(config).to(device)
    assert model.config._attn_implementation == "float8"
    assert all(each.config is model.config for each in model.modules() if hasattr(each, "config"))
    assert config._attn_implementation == other.config._attn_implementation == "sdpa"
    with f8.attention_counters(model) as counters:
        model(tokens(device))
    assert len(counters.read()) == 2


def test_the_name_of_an_implementation(device: str, options: dict[str, Any]) -> None:
    from float8.adapters import transformers as adapter

    adapter.install_attention(**options)
    model = model_of("Llama", device, attn_implementation="float8")
    own = losses(model, 2, device)
    other = model_of("Llama", device)
    f8.convert_attention_to_float8(other, **options)
    assert own == losses(other, 2, device)


def test_a_filter_chooses_layers(device: str, options: dict[str, Any]) -> None:
    model = model_of("Llama", device)
    taken = f8.convert_attention_to_float8(model, filter_fn=lambda _, name: "1" in name, **options)
    assert taken == ["model.layers.1.self_attn"]
    batch = tokens(device)
    plain = model_of("Llama", device)
    of_first = [
        (each.model.layers[0].self_attn, each.model.layers[1].self_attn) for each in (model, plain)
    ]
    outs: list[list[Tensor]] = [[], []]
    for found, pair in zip(outs, of_first, strict=True):
        for layer in pair:
            layer.register_forward_hook(lambda m, i, o, found=found: found.append(o[0]))
    model(batch), plain(batch)
    assert torch.equal(outs[0][0], outs[1][0])
    assert not torch.equal(outs[0][1], outs[1][1])


@pytest.mark.parametrize(("kind", "more"), [("Llama", {}), ("Mistral", {"sliding_window": 16})])
def test_what_fp8_cannot_compute_is_told_and_goes_to_pytorch(
    device: str,
    options: dict[str, Any],
    kind: str,
    more: dict[str, Any],
) -> None:
    batch = tokens(device)
    mask = torch.ones_like(batch)
    mask[0, :7] = 0
    inputs = {"attention_mask": mask}
    model, plain = (
        model_of(kind, device, attn_implementation="sdpa", **more).eval() for _ in range(2)
    )
    f8.convert_attention_to_float8(model, **options)
    with pytest.warns(UserWarning, match="padding"):
        y = model(batch, **inputs).logits
    assert torch.equal(y, plain(batch, **inputs).logits)


@pytest.mark.parametrize(("kind", "more"), [("Llama", {}), ("Mistral", {"sliding_window": 16})])
def test_heads_that_fp8_has_not_stay_pytorchs(
    device: str, options: dict[str, Any], kind: str, more: dict[str, Any]
) -> None:
    """A conversion leaves them, and by name they go to PyTorch's attention; a warning says so."""
    from float8.adapters import transformers as adapter

    adapter.install_attention(**options)
    model, plain, named = (
        model_of(kind, device, head_dim=32, attn_implementation=name, **more).eval()
        for name in ("sdpa", "sdpa", "float8")
    )
    with pytest.warns(UserWarning) as told:
        assert f8.convert_attention_to_float8(model, **options) == []
    words = [str(each.message) for each in told]
    assert any("layers.0.self_attn" in each and "32 elements" in each for each in words)
    batch = tokens(device)
    expected = plain(batch).logits
    assert torch.equal(model(batch).logits, expected)
    with pytest.warns(UserWarning, match="32 elements"):
        assert torch.equal(named(batch).logits, expected)


def test_generates(device: str, options: dict[str, Any]) -> None:
    model = model_of("Llama", device, use_cache=True).eval()
    expected = model.generate(tokens(device)[:, :9], max_new_tokens=5, do_sample=False)
    f8.convert_attention_to_float8(model, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        own = model.generate(tokens(device)[:, :9], max_new_tokens=5, do_sample=False)
    assert own.shape == expected.shape


@pytest.mark.parametrize("recipe", ["fp8_forward", "fp8"])
def test_the_trainer_of_transformers(
    device: str, options: dict[str, Any], tmp_path: pathlib.Path, recipe: str
) -> None:
    pytest.importorskip("accelerate")
    model = model_of("Llama", device).float()
    f8.convert_attention_to_float8(model, recipe, **options)
    before = copies(model)
    data = [{"input_ids": row, "labels": row} for _ in range(4) for row in tokens("cpu")]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, bf16=True,
        report_to=[], save_strategy="no", use_cpu=device == "cpu", learning_rate=1e-3,
        disable_tqdm=True,
    )  # fmt: skip
    if device == "cuda":
        arguments._n_gpu = 1
    transformers.Trainer(model=model, args=arguments, train_dataset=data).train()
    assert not unchanged(model, before)


class TokensFirst(Wrapper):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
        return super().forward(*(x.transpose(1, 2) for x in (q, k, v)), **more).transpose(1, 2)


def check_wrapper(module: nn.Module, tokens_first: bool, device: str, options: Any) -> None:
    q, k, v = (torch.randn(2, h, 40, 128).bfloat16().to(device) for h in (4, 2, 2))
    expected = f8.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, **options)
    operands = [x.transpose(1, 2) if tokens_first else x for x in (q, k, v)]
    model = nn.ModuleDict({"inner": module})
    assert f8.convert_attention_to_float8(model, **options) == ["inner"]
    y = module(*operands, enable_gqa=True)
    assert torch.equal(y.transpose(1, 2) if tokens_first else y, expected)
    with pytest.warns(UserWarning, match=r"float32"):
        module(*(x.float() for x in operands), enable_gqa=True)
    assert f8.convert_attention_to_float8(model, **options) == ["inner"]
    assert torch.equal(module(*operands, enable_gqa=True), y)
    again = copy.deepcopy(module)
    assert type(again) is type(module)
    assert torch.equal(again(*operands, enable_gqa=True), y)


@pytest.mark.parametrize("cls", [Wrapper, TokensFirst])
def test_a_wrapper_of_ones_own(
    device: str, options: dict[str, Any], cls: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    from float8.torch.layer import attention_layers

    monkeypatch.setattr(attention_layers, "_registered", {})
    f8.register_attention(cls, tokens_first=cls is TokensFirst)
    module = cls()
    check_wrapper(module, cls is TokensFirst, device, options)
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(again) is type(module)
        assert again.float8_emulate == module.float8_emulate


@pytest.fixture
def titan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """torchtitan of a release, which the process has for one test."""
    release: str = request.param
    monkeypatch.syspath_prepend(repository.torchtitan_folder(release))
    others = take_torchtitan()
    yield release
    take_torchtitan()
    sys.modules.update(others)


def take_torchtitan() -> dict[str, Any]:
    """Takes the modules of torchtitan, or of its stand-in, out of the process, and returns them."""
    names = [name for name in sys.modules if name.partition(".")[0] == "torchtitan"]
    return {name: sys.modules.pop(name) for name in names}


@pytest.mark.parametrize("titan", ["0.2.2", "0.3.0"], indirect=True)
def test_torchtitans_wrapper(titan: str, device: str, options: dict[str, Any]) -> None:
    if titan == "0.2.2":
        from torchtitan.models.attention import ScaledDotProductAttentionWrapper

        check_wrapper(ScaledDotProductAttentionWrapper(), False, device, options)
    else:
        from torchtitan.models.common.attention import ScaledDotProductAttention

        own = ScaledDotProductAttention(ScaledDotProductAttention.Config())
        check_wrapper(own, True, device, options)


def test_refuses(device: str, options: dict[str, Any]) -> None:
    model = model_of("Llama", device)
    with pytest.raises(ValueError, match="recipe"):
        f8.convert_attention_to_float8(model, "bf16")
    with pytest.raises(TypeError, match=r"nn\.Module"):
        f8.convert_attention_to_float8("model")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="register_attention"):
        f8.register_attention(print)  # type: ignore[arg-type]
    gemma = model_of("Gemma2", device)  # its scores are capped
    if not gemma._supports_sdpa:
        with pytest.warns(UserWarning, match="knows no attention"):
            assert f8.convert_attention_to_float8(gemma, **options) == []
        assert gemma.config._attn_implementation == "eager"


def test_warns_where_it_knows_no_attention(options: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="knows no attention"):
        assert f8.convert_attention_to_float8(nn.Linear(16, 16), **options) == []


@pytest.mark.parametrize(
    ("kind", "more", "word"),
    [
        ("GptOss", {"num_local_experts": 2, "num_experts_per_tok": 2}, "s_aux"),
        ("Gemma2", {"attn_logit_softcapping": 20.0}, "softcap"),
    ],
)
def test_refuses_models_by_name_that_pytorchs_attention_cannot_compute(
    device: str, options: dict[str, Any], kind: str, more: dict[str, Any], word: str
) -> None:
    from float8.adapters import transformers as adapter

    adapter.install_attention(**options)
    model = model_of(kind, device, attn_implementation="float8", **more)
    with pytest.raises(ValueError, match=word) as error:
        model(tokens(device))
    assert "eager" in str(error.value)


def test_a_converted_model_keeps_its_device(device: str, options: dict[str, Any]) -> None:
    first, second = model_of("Llama", device), model_of("Llama", device)
    f8.convert_attention_to_float8(first, **options)
    f8.convert_attention_to_float8(second)
    first(tokens(device))
    if device == "cpu":
        with pytest.raises(ValueError, match="emulate"):
            second(tokens(device))


def test_registers_no_module_whose_forward_takes_other_tensors() -> None:
    class Whole(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(x, x, x)

    with pytest.raises(TypeError, match="q, k, v") as error:
        f8.register_attention(Whole)
    assert "Whole" in str(error.value)
