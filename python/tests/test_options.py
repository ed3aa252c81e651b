"""Options that cannot be, or that nothing would read, are errors when they are given."""

from __future__ import annotations

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
        ({"recipe": "rowwisee"}, "unknown recipe 'rowwisee'; one of tensorwise, rowwise"),
        ({"recipe": 3}, "recipe is a int; it is a float8.Recipe or one of tensorwise, rowwise"),
        ({"recompute": "yes"}, "recompute is 'yes'; it is True, False, or None"),
        ({"emulate": 1}, "emulate is 1; it is True or False"),
        ({"saturate": None}, "saturate is None"),
        ({"pad_inner_dim": "no"}, "pad_inner_dim is 'no'"),
        ({"enable_fsdp_float8_all_gather": 1}, "enable_fsdp_float8_all_gather is 1"),
        ({"recipe": "rowwise", "history": 8}, "history is 8, and recipe rowwise has no delayed"),
        ({"margin": 1}, "margin is 1, and recipe tensorwise has no delayed scaling"),
        ({"recipe": "delayed", "history": 0}, "history is 0; it is 1 to 1024"),
        ({"recipe": "delayed", "history": "8"}, "history is '8'; it is 1 to 1024"),
        (
            {"recipe": "bf16", "enable_fsdp_float8_all_gather": True},
            "enable_fsdp_float8_all_gather is for recipes with the weight in fp8",
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


def test_configs_that_can_be() -> None:
    assert f8.LinearConfig("delayed", history=8, margin=1).history == 8
    delayed = float8.Cast(float8.Scaling.DELAYED)
    mixed = float8.Recipe(output=float8.Gemm(delayed, delayed))
    assert f8.LinearConfig(mixed, history=8).history == 8
    assert f8.LinearConfig("rowwise", recompute=False, pad_inner_dim=True).recompute is False


def test_layers_are_checked_as_configs_are() -> None:
    with pytest.raises(TypeError, match="recompute is 'yes'"):
        Float8Linear(64, 64, recompute="yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="recompute is 1"):
        f8.functional.linear(torch.ones(1, 16), torch.ones(16, 16), recompute=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="saturate is 'yes'"):
        modules.convert(nn.Linear(64, 64), [nn.Linear], saturate="yes")  # type: ignore[arg-type]


def test_torchao_allows_what_torchao_allows() -> None:
    history = torchao.DelayedScalingConfig(history_len=4)
    config = torchao.Float8LinearConfig(
        delayed_scaling_config=history,
        force_recompute_fp8_weight_in_bwd=1,  # type: ignore[arg-type]
        pad_inner_dim=0,  # type: ignore[arg-type]
    )
    layer = torchao.convert_to_float8_training(nn.Linear(64, 64), config=config)
    assert isinstance(layer, Float8Linear) and layer.recompute is True
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
    words = r"'outptu' is part of no linear's name.* the model has 'layers\.\*\.wq', 'layers\.\*\.w1', 'output'"
    with pytest.raises(ValueError, match=words):
        convert(own, config="rowwise", tokens=8192, names=["layers.1", "outptu"])
    with pytest.raises(TypeError, match=r"names is 'output'; it is a list.*\['output'\]"):
        convert(own, config="rowwise", tokens=8192, names="output")
    assert not converted(own)


def test_names_of_torchao() -> None:
    config = torchao.Float8LinearConfig.from_recipe_name("rowwise")
    with pytest.raises(ValueError, match="'outptu' is part of no linear's name"):
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


def test_a_policy_without_its_rule() -> None:
    own = model()
    with pytest.raises(ValueError, match=r'"auto_filter_small_kn" is among the names.*add it'):
        f8.convert_to_float8_training(own, config="rowwise", tokens=8192, policy="torchao")
    with pytest.raises(ValueError, match="give tokens too"):
        f8.convert_to_float8_training(own, config="rowwise", policy="measured")
    with pytest.raises(ValueError, match="not both"):
        f8.convert_to_float8_training(own, tokens=8, policy="torchao", verdicts="file")
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
    linear = nn.Linear(4096, 14336, device="meta")
    found = f8.verdicts(linear, "rowwise", 8192)
    keep = f8.module_filter(found)
    assert found[0].layer.name == "root" and found[0].convert
    layer = f8.convert_to_float8_training(linear, config="rowwise", module_filter_fn=keep)
    assert isinstance(layer, Float8Linear)


def test_tuning_at_first_use_is_checked(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv("FLOAT8_DB", raising=False)
    with pytest.raises(ValueError, match="takes seconds, got -1"):
        f8.tune_on_first_use(-1, database=tmp_path / "t.f8db")
    with pytest.raises(ValueError, match="needs a database"):
        f8.tune_on_first_use(10)
    f8.tune_on_first_use(10, database=tmp_path / "t.f8db")
    # An emulated device is not measured.
    layer = f8.Float8Linear(64, 80, recipe="rowwise", emulate=True)
    layer(torch.randn(16, 64)).sum().backward()
    assert not list(tmp_path.iterdir())
    f8.tune_on_first_use(0)


def test_arguments_of_other_types() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(TypeError, match="tokens is '8k'; it is the number of rows"):
        f8.convert_to_float8_training(model, tokens="8k")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="config is 3, of type"):
        f8.convert_to_float8_training(model, config=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="x is a NoneType"):
        f8.Float8Linear(64, 64, emulate=True)(None)
    layer = float8.Layer("a", 64, 64)
    for layers, tokens in (("rowwise", 1), ([("a", 64, 64)], 1), ([layer], "1")):
        with pytest.raises(TypeError, match=r"float8.Layer|number of rows"):
            float8.filter_layers(layers, "rowwise", tokens)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the model has '0'"):
        f8.convert_to_float8_training(model, tokens=64, names=["outptu"])
