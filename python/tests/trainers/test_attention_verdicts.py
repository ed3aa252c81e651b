"""Filter files of `float8-tune filter --attention`: what they say of attention, and convert_attention_to_float8 by them."""

from __future__ import annotations

import pathlib
import warnings
from typing import Any

import pytest
import torch
from attention_models import Wrapper, copies, model_of, noted_forwards, unchanged
from repository import ROOT, float8_tune
from torch import nn

import float8
import float8.torch as f8
from float8.torch import attention

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("untold")

# Heads whose rows the built-in database has. The tests' models have fewer of these.
CONFIG = {
    "hidden_size": 4096,
    "intermediate_size": 1024,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "vocab_size": 32000,
}
# Its layers have fp8, bf16 and fp8_forward.
MIXED = ROOT / "tests" / "fixtures" / "filter_v3.txt"
LAYERS = [f"model.layers.{i}.self_attn" for i in range(3)]


def written(file: pathlib.Path, model: str, *words: str) -> pathlib.Path:
    float8_tune(
        *("filter", "--model", model, "--recipe", "rowwise", "--tokens", "8192"),
        *("--device", "H200", "--verdicts", str(file), *words),
    )
    return file


ATTENTION = ("--attention", "--sequence", "8192")


def filter_file(folder: pathlib.Path, *words: str, **more: Any) -> pathlib.Path:
    """Returns the filter file of a config.json, with attention unless other words are given."""
    config = folder / "config.json"
    transformers.LlamaConfig(**{**CONFIG, **more}).to_json_file(config, use_diff=False)
    return written(folder / "verdicts", str(config), *(words or ATTENTION))


def test_a_filter_file_has_attention(tmp_path: pathlib.Path) -> None:
    first, second = float8.attention_verdicts(filter_file(tmp_path))
    assert [first.name, second.name] == LAYERS[:2]
    assert first.recipe in ("fp8", "fp8_forward") and first.convert
    assert first.evidence == "measured" and first.reason.startswith("converted")
    assert 1.02 < first.speedup_low <= first.speedup <= first.speedup_high
    assert (first.heads_q, first.heads_kv, first.head_dim) == (32, 8, 128)
    assert (first.tokens, first.sequence) == (8192, 8192)
    kept, _ = float8.attention_verdicts(filter_file(tmp_path, sliding_window=512))
    assert kept.recipe == "bf16" and not kept.convert
    assert "windows of 512" in kept.reason and kept.speedup == 1
    table = float8.explain([first, kept, second])
    for words in (f"float8 {first.recipe}", "keep bf16", "32/8 of 128", "model.layers.*.self_attn"):
        assert words in table
    assert [line.split()[1] for line in table.splitlines()] == ["count", "2", "1"]


def test_linears_are_decided_by_the_same_file(tmp_path: pathlib.Path) -> None:
    layers = [float8.Layer("model.layers.0.self_attn.q_proj", 4096, 4096)]
    (own,) = float8.filter_layers(layers, "rowwise", 8192, verdicts=filter_file(tmp_path))
    assert own.reason.startswith("by the filter file")


def step(model: Any, device: str) -> None:
    """Trains every weight a step."""
    batch = torch.arange(48, device=device).reshape(1, -1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()


def test_a_model_is_converted_by_a_file(
    device: str,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = model_of("Llama", device, num_hidden_layers=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = f8.convert_attention_to_float8(model, verdicts=MIXED, explain=True, **options)
    assert names == [LAYERS[0], LAYERS[2]]
    told = capsys.readouterr().out
    assert "windows of 512" in told and "2 of 3 attentions to float8" in told
    recipes = noted_forwards(monkeypatch, lambda args, more: attention.RECIPES[more["recipe"]])
    before = copies(model)
    step(model, device)
    assert recipes == ["fp8", "fp8_forward"], "each layer has its recipe"
    assert not [name for name in unchanged(model, before) if "norm" not in name]


class Titan(nn.Module):
    """torchtitan's names: the attention of a layer has a module that wraps PyTorch's."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {
                str(i): nn.ModuleDict({"attention": nn.ModuleDict({"inner_attention": Wrapper()})})
                for i in range(layers)
            }
        )


def test_the_modules_within_an_attention_are_found(tmp_path: pathlib.Path) -> None:
    f8.register_attention(Wrapper)
    file = written(tmp_path / "titan", "llama3-8b", *ATTENTION)
    model = Titan(2)
    with pytest.warns(UserWarning, match=r"lacks 30 of the attentions .* 'layers\.10\.attention'"):
        names = f8.convert_attention_to_float8(model, verdicts=file)
    assert names == [f"layers.{i}.attention.inner_attention" for i in range(2)]
    recipe = float8.attention_verdicts(file)[0].recipe
    assert all(model.get_submodule(name).float8_recipe == recipe for name in names)
    one = Titan(2)
    with warnings.catch_warnings():  # the filter leaves out what the file has
        warnings.simplefilter("error")
        names = f8.convert_attention_to_float8(
            one, verdicts=file, filter_fn=lambda _, name: name.startswith("layers.1.")
        )
    assert names == ["layers.1.attention.inner_attention"]


def test_bad_files_change_nothing(tmp_path: pathlib.Path, device: str) -> None:
    model = model_of("Llama", device, num_hidden_layers=3)

    def refused(words: str, file: pathlib.Path, own: Any = model, **more: Any) -> None:
        before = own.config._attn_implementation
        with pytest.raises(ValueError, match=words):
            f8.convert_attention_to_float8(own, verdicts=file, **more)
        assert own.config._attn_implementation == before == "sdpa"

    file = filter_file(tmp_path)
    refused("has no attention 'model.layers.2.self_attn', and has .*; write it again", file)
    refused(
        "'model.layers.0.self_attn' has heads of 64, the filter file says 128",
        file,
        model_of("Llama", device, head_dim=64),
    )
    refused("has the recipe of each layer; give it or recipe", file, recipe="fp8")
    refused(
        "linears alone; write it with `float8-tune filter --attention",
        filter_file(tmp_path, "--tp=1"),
    )
    with pytest.raises(ValueError, match="linears alone"):
        float8.attention_verdicts(file)
    file.write_text("{}")
    with pytest.raises(RuntimeError, match="not a float8 filter file"):
        f8.convert_attention_to_float8(model, verdicts=file)
    with pytest.raises(FileNotFoundError, match="none"):
        f8.convert_attention_to_float8(model, verdicts=tmp_path / "none")
    with pytest.raises(ValueError, match="explain prints the verdicts of a filter file"):
        f8.convert_attention_to_float8(model, explain=True)


def test_a_file_that_keeps_all_converts_nothing(tmp_path: pathlib.Path, device: str) -> None:
    model = model_of("Llama", device)
    file = filter_file(tmp_path, head_dim=96)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="has heads of 128, the filter file says 96"):
            f8.convert_attention_to_float8(model, verdicts=file)
    own = model_of("Llama", device, head_dim=96)
    with pytest.warns(UserWarning, match="attention stays in bf16: .* keeps all of it"):
        assert f8.convert_attention_to_float8(own, verdicts=file) == []
    assert own.config._attn_implementation == "sdpa"
