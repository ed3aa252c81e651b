"""Options that cannot be, or that nothing would read, are errors when they are given."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import float8
import float8.torch as f8
from float8 import torchao
from float8.adapters import modules
from float8.torch import Float8Linear


@pytest.mark.parametrize(
    ("fields", "message"),
    (
        ({"recipe": "rowwisee"}, r"'rowwisee'.* tensorwise, rowwise"),
        ({"recipe": 3}, r"recipe is a int.* tensorwise, rowwise"),
        ({"recompute": "yes"}, "recompute is 'yes'"),
        ({"emulate": 1}, "emulate is 1"),
        ({"saturate": None}, "saturate is None"),
        ({"pad_inner_dim": "no"}, "pad_inner_dim is 'no'"),
        ({"enable_fsdp_float8_all_gather": 1}, "enable_fsdp_float8_all_gather is 1"),
        ({"recipe": "rowwise", "history": 8}, "history is 8, and recipe rowwise"),
        ({"margin": 1}, "margin is 1, and recipe tensorwise"),
        ({"recipe": "delayed", "history": 0}, r"history is 0; .*1 to 1024"),
        ({"recipe": "delayed", "history": "8"}, r"history is '8'; .*1 to 1024"),
        (
            {"recipe": "bf16", "enable_fsdp_float8_all_gather": True},
            "enable_fsdp_float8_all_gather",
        ),
    ),
)
def test_a_config_is_checked_when_it_is_made(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        f8.LinearConfig(**fields)


def test_a_recipe_is_checked_when_a_config_is_made() -> None:
    blocks = float8.Cast(granularity=float8.Granularity.BLOCK_1X128)
    with pytest.raises(ValueError, match="blocks go with blocks"):
        f8.LinearConfig(float8.Recipe(output=float8.Gemm(blocks)))


def test_a_history_is_for_any_recipe_with_delayed_scaling() -> None:
    assert f8.LinearConfig("delayed", history=8, margin=1).history == 8
    delayed = float8.Cast(float8.Scaling.DELAYED)
    mixed = float8.Recipe(output=float8.Gemm(delayed, delayed))
    assert f8.LinearConfig(mixed, history=8).history == 8


def test_flags_of_a_config() -> None:
    assert f8.LinearConfig("rowwise", recompute=False, pad_inner_dim=True).recompute is False


@pytest.mark.parametrize("value", ("yes", 1))
@pytest.mark.parametrize("option", ("recompute", "saturate"))
@pytest.mark.parametrize(
    "make",
    (
        functools.partial(Float8Linear, 64, 64),
        functools.partial(f8.functional.linear, torch.ones(1, 16), torch.ones(16, 16)),
        functools.partial(modules.convert, nn.Linear(64, 64), [nn.Linear]),
    ),
    ids=("layer", "function", "modules"),
)
def test_layers_are_checked_as_configs_are(make: Any, option: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{option} is {value!r}"):
        make(**{option: value})


def test_torchao_s_flags_may_be_numbers() -> None:
    config = torchao.Float8LinearConfig(
        delayed_scaling_config=torchao.DelayedScalingConfig(history_len=4),
        force_recompute_fp8_weight_in_bwd=1,  # type: ignore[arg-type]
        pad_inner_dim=0,  # type: ignore[arg-type]
    )
    layer = torchao.convert_to_float8_training(nn.Linear(64, 64), config=config)
    assert isinstance(layer, Float8Linear) and layer.recompute is True


def test_torchao_s_history_is_read_by_delayed_scaling() -> None:
    history = torchao.DelayedScalingConfig(history_len=4)
    delayed = torchao.CastConfig(torchao.ScalingType.DELAYED)
    config = torchao.Float8LinearConfig(
        cast_config_input=delayed,
        cast_config_weight=delayed,
        cast_config_grad_output=delayed,
        delayed_scaling_config=history,
    )
    assert config.linear_config().history == 4


def model() -> nn.Module:
    with torch.device("meta"):
        blocks = [
            nn.ModuleDict({"wq": nn.Linear(4096, 4096), "w1": nn.Linear(4096, 14336)})
            for _ in range(2)
        ]
        return nn.ModuleDict({"layers": nn.ModuleList(blocks), "output": nn.Linear(4096, 32000)})


def converted(own: nn.Module) -> list[str]:
    return [name for name, each in own.named_modules() if isinstance(each, Float8Linear)]


@pytest.mark.parametrize("convert", (f8.convert_to_float8_training, f8.verdicts))
def test_names_that_match_no_linear(convert: Any) -> None:
    own = model()
    words = r"'outptu'.* 'layers\.\*\.wq', 'layers\.\*\.w1', 'output'"
    with pytest.raises(ValueError, match=words):
        convert(own, config="rowwise", tokens=8192, names=["layers.1", "outptu"])
    assert not converted(own)


@pytest.mark.parametrize("convert", (f8.convert_to_float8_training, f8.verdicts))
def test_names_that_are_no_list(convert: Any) -> None:
    own = model()
    with pytest.raises(TypeError, match=r"names is 'output'.*\['output'\]"):
        convert(own, config="rowwise", tokens=8192, names="output")
    assert not converted(own)


def test_names_of_torchao() -> None:
    config = torchao.Float8LinearConfig.from_recipe_name("rowwise")
    with pytest.raises(ValueError, match="'outptu'"):
        torchao.convert_to_float8_training(model(), config=config, tokens=8192, names=["outptu"])
    # torchao's own filter says nothing of names that match nothing, as torchao's.
    keep = torchao._auto_filter_for_recipe("rowwise", ["outptu"])
    own = torchao.convert_to_float8_training(model(), config=config, module_filter_fn=keep)
    assert "output" in converted(own)


def test_names_may_match_linears_that_stay() -> None:
    class Lora(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    own = model()
    own["adapter"] = Lora(4096, 14336, device="meta")
    names = ["output", "adapter", "auto_filter_small_kn"]
    f8.convert_to_float8_training(own, config="rowwise", tokens=8192, names=names)
    assert converted(own) == [f"layers.{i}.{name}" for i in range(2) for name in ("wq", "w1")]


@pytest.mark.parametrize(
    ("options", "words"),
    (
        ({"tokens": 8192, "policy": "torchao"}, "auto_filter_small_kn"),
        ({"policy": "measured"}, "tokens"),
        ({"tokens": 8, "policy": "torchao", "verdicts": "file"}, "not both"),
    ),
    ids=("no rule", "no tokens", "verdicts too"),
)
def test_a_policy_without_what_it_needs(options: dict[str, Any], words: str) -> None:
    own = model()
    with pytest.raises(ValueError, match=words):
        f8.convert_to_float8_training(own, config="rowwise", **options)
    assert not converted(own)


def test_verdicts_take_a_config(device: str) -> None:
    """They are the verdicts of a conversion with the same config."""
    configs: tuple[Any, ...] = (
        "rowwise",
        float8.Recipe.named("rowwise"),
        f8.LinearConfig("rowwise"),
        torchao.Float8LinearConfig.from_recipe_name("rowwise"),
    )
    first, *others = (f8.verdicts(model(), config, 2048, names=["output"]) for config in configs)
    assert all(first == other for other in others)
    own = model()
    f8.convert_to_float8_training(own, config="rowwise", tokens=2048, names=["output"])
    assert converted(own) == [verdict.layer.name for verdict in first if verdict.convert]


def test_verdicts_of_a_root_linear() -> None:
    linear = nn.Linear(4096, 14336, device="meta")
    found = f8.verdicts(linear, "rowwise", 8192)
    keep = f8.module_filter(found)
    assert found[0].layer.name == "root" and found[0].convert
    layer = f8.convert_to_float8_training(linear, config="rowwise", module_filter_fn=keep)
    assert isinstance(layer, Float8Linear)


def test_tuning_at_first_use_takes_seconds(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="seconds, got -1"):
        f8.tune_on_first_use(-1, database=tmp_path / "t.f8db")


def test_tuning_at_first_use_needs_a_database(monkeypatch: Any) -> None:
    monkeypatch.delenv("FLOAT8_DB", raising=False)
    with pytest.raises(ValueError, match="database"):
        f8.tune_on_first_use(10)


def test_an_emulated_device_is_not_tuned(device: str, tmp_path: Any) -> None:
    if device == "cuda":
        pytest.skip("tests before this one planned linears on the GPU")
    f8.tune_on_first_use(10, database=tmp_path / "t.f8db")
    layer = f8.Float8Linear(64, 80, recipe="rowwise", emulate=True)
    layer(torch.randn(16, 64)).sum().backward()
    assert not list(tmp_path.iterdir())
    f8.tune_on_first_use(0)


@pytest.mark.parametrize(
    ("options", "words"),
    (
        ({"tokens": "8k"}, r"tokens is '8k'.*rows"),
        ({"config": 3}, "config is 3"),
        ({"module_filter_fn": "head"}, "module_filter_fn is 'head'"),
    ),
    ids=("tokens", "config", "filter"),
)
def test_options_of_other_types(options: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        f8.convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)), **options)


def test_an_x_of_another_type() -> None:
    with pytest.raises(TypeError, match="x is a NoneType"):
        f8.Float8Linear(64, 64, emulate=True)(None)


@pytest.mark.parametrize(
    ("layers", "tokens", "words"),
    (
        ("rowwise", 1, "float8.Layer"),
        ([("a", 64, 64)], 1, "float8.Layer"),
        ([float8.Layer("a", 64, 64)], "1", "number of rows"),
    ),
    ids=("no list", "no layer", "no number"),
)
def test_layers_of_other_types(layers: Any, tokens: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        float8.filter_layers(layers, "rowwise", tokens)


def test_names_of_a_model_that_is_a_sequence() -> None:
    with pytest.raises(ValueError, match="the model has '0'"):
        f8.convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)), tokens=64, names=["outptu"])
