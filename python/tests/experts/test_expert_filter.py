"""convert_to_float8_training(experts=True, tokens=): experts are in fp8 where the measurements say so."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from repository import float8_tune
from torch import nn

import float8
import float8.torch as f8

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("untold")

_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}


def mixtral() -> Any:
    """One layer of Mixtral 8x7B, without memory: its few large experts gain."""
    own = {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8}
    more = {"num_experts_per_tok": 2, "num_hidden_layers": 1, "vocab_size": 32000}
    with torch.device("meta"):
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**own, **more, **_HEADS))


def qwen() -> Any:
    """One layer of Qwen3-30B-A3B, whose many small experts gain nothing that is certain."""
    own = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128}
    more = {"num_experts_per_tok": 8, "num_hidden_layers": 1, "vocab_size": 32000}
    with torch.device("meta"):
        return transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(**own, **more, **{**_HEADS, "num_key_value_heads": 4})
        )


def experts_in_fp8(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if hasattr(m, "experts_config")]


def convert(model: Any, **more: Any) -> Any:
    options: dict[str, Any] = {"config": "rowwise", "tokens": 16384, "experts": True}
    return f8.convert_to_float8_training(model, **{**options, **more})


def test_experts_that_gain_are_converted_as_the_program_says(capsys: Any, tmp_path: Any) -> None:
    name = "model.layers.0.mlp.experts"
    assert experts_in_fp8(convert(mixtral(), explain=True)) == [name]
    printed = capsys.readouterr().out
    assert "1 of 1 layers of experts to float8 (M 16384, NVIDIA H" in printed
    line = next(line for line in printed.splitlines() if "mlp.experts " in line).split()
    assert line[1:6] == ["1", "32768", "14336", "4096", "float8"]
    file = tmp_path / "experts.json"
    entry = {"fqn": name, "num_experts": 8, "top_k": 2, "dim": 4096, "hidden_dim": 14336}
    file.write_text(json.dumps([entry]))
    program = ("filter", "--model", str(file), "--tokens", "16384", "--recipe", "rowwise")
    own = json.loads(float8_tune(*program, "--json"))["decisions"][0]
    measured = "(M 16384, NVIDIA H200)" in printed  # an H200 has rows of these experts
    assert own["convert"] and own["evidence"] == ("measured" if measured else "modelled")
    assert float(line[6]) == pytest.approx(own["speedup"], abs=1e-3)
    assert own["reason"] in printed


def test_experts_that_may_lose_stay(capsys: Any) -> None:
    model = convert(qwen(), tokens=8192, explain=True)
    assert experts_in_fp8(model) == []
    printed = capsys.readouterr().out
    assert "0 of 1 layers of experts" in printed
    # An H200 has measured these; elsewhere the table says how to.
    assert "the experts' MLP as a whole" in printed or "--experts 128 --skew 0" in printed
    # Without tokens nothing is asked.
    assert len(experts_in_fp8(f8.convert_to_float8_training(qwen(), config="rowwise", experts=True))) == 1  # fmt: skip


def test_names_and_torchao_s_rule_keep_experts() -> None:
    assert experts_in_fp8(convert(mixtral(), names=["mlp.experts"])) == []
    with pytest.raises(ValueError, match=r"'moe.experts' is part of no linear's name.*experts"):
        convert(mixtral(), names=["moe.experts"])
    by_torchao = {"policy": "torchao", "names": ["auto_filter_small_kn"]}
    assert experts_in_fp8(convert(mixtral(), **by_torchao)) == []


def test_experts_alone_are_decided_without_linears() -> None:
    model = convert(mixtral(), module_filter_fn=lambda module, name: False)
    assert len(experts_in_fp8(model)) == 1
    assert not any(isinstance(each, f8.Float8Linear) for each in model.modules())


def test_verdicts_as_values() -> None:
    for make, gains in ((mixtral, True), (qwen, False)):
        found = f8.verdicts(make(), "rowwise", 16384, experts=True)
        assert (found[-1].layer.experts is not None, found[-1].convert) == (True, gains)
        keep = f8.module_filter(found)
        model = f8.convert_to_float8_training(make(), config="rowwise", experts=keep)
        assert experts_in_fp8(model) == [found[-1].layer.name] * gains
    assert all(each.layer.experts is None for each in f8.verdicts(qwen(), "rowwise", 16384))


def test_rows_of_experts(capsys: Any) -> None:
    convert(mixtral(), tokens_of={"experts": 4096}, explain=True)
    assert "  4096  14336 " in capsys.readouterr().out
    model = mixtral()
    block = model.model.layers[0].mlp
    alone = nn.ModuleDict({"layer": nn.ModuleDict({"experts": block.experts})})
    del block.experts.config
    with pytest.raises(ValueError, match=r'tokens_of={"layer.experts": '):
        convert(alone)
    assert experts_in_fp8(alone) == []
    assert experts_in_fp8(convert(alone, tokens_of={"experts": 32768})) == ["layer.experts"]


def test_a_filter_file_decides_for_experts(tmp_path: Any) -> None:
    entry = {"num_experts": 128, "top_k": 8, "dim": 2048, "hidden_dim": 768}
    (tmp_path / "experts.json").write_text(
        json.dumps([{"fqn": "model.layers.0.mlp.experts", **entry}])
    )
    file = tmp_path / "verdicts"
    program = ("filter", "--model", str(tmp_path / "experts.json"), "--tokens", "8192")
    float8_tune(*program, "--recipe", "rowwise", "--policy", "torchao", "--verdicts", str(file))
    own, other = qwen().model, mixtral().model
    for each in (own, other):
        del each.layers[0].self_attn  # which the file does not have
    more = {"verdicts": file, "tokens": 8192}
    assert len(experts_in_fp8(convert(nn.ModuleDict({"model": own}), **more))) == 1
    with pytest.raises(ValueError, match=r"mlp.experts' has N 14336 .* the filter file says N 768"):
        convert(nn.ModuleDict({"model": other}), **more)


def test_layers_of_experts_without_torch() -> None:
    layers = [
        float8.Layer("few", k=4096, n=14336, tokens=32768, experts=8),
        float8.Layer("many", k=2048, n=768, tokens=65536, experts=128),
        float8.Layer("odd", k=2048, n=1000, tokens=65536, experts=8),
        float8.Layer("linear", k=4096, n=14336),
    ]
    few, many, odd, linear = float8.filter_layers(layers, "rowwise", 16384, fsdp=8)
    assert (few.convert, many.convert, odd.convert, linear.convert) == (True, False, False, True)
    assert few.wire is None and linear.wire is not None
    assert few.tokens == 32768 and "hidden_dim 1000" in odd.reason
    for wrong, error in ((0, ValueError), (2000, ValueError), (True, TypeError), ("8", TypeError)):
        with pytest.raises(error, match="experts"):
            float8.filter_layers([float8.Layer("a", 64, 64, experts=wrong)], "rowwise", 64)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the skew of a is 'zipf'"):
        float8.filter_layers([float8.Layer("a", 64, 64, experts=8, skew="zipf")], "rowwise", 64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="skew"):
        float8.filter_layers([float8.Layer("a", 64, 64, experts=8, skew=101)], "rowwise", 64)
