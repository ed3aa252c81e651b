"""torchao's names, and what they mean here."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import float8
import float8.torch
from float8 import torchao
from float8.torchao import (
    CastConfig,
    Float8GemmConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingGranularity,
    ScalingType,
)


@pytest.mark.parametrize("kind", (str, Float8LinearRecipeName))
@pytest.mark.parametrize("name", [each.value for each in Float8LinearRecipeName])
def test_recipe_names(name: str, kind: Any) -> None:
    assert Float8LinearConfig.from_recipe_name(kind(name)).recipe() == float8.Recipe.named(name)


@pytest.mark.parametrize("name", ("delayed", "blockwise"))
def test_recipe_names_that_torchao_lacks(name: str) -> None:
    config = Float8LinearConfig.from_recipe_name(name)
    assert config.recipe().name == config.linear_config().recipe.name == name


def test_fields_and_defaults() -> None:
    config = Float8LinearConfig()
    assert config.cast_config_input.target_dtype is torch.float8_e4m3fn
    assert config.cast_config_grad_output_for_grad_weight.target_dtype is torch.float8_e5m2
    assert config.cast_config_weight_for_grad_input == config.cast_config_weight
    assert config.gemm_config_output.use_fast_accum
    assert not config.gemm_config_grad_weight.use_fast_accum
    assert CastConfig().target_dtype is None  # a default of one field is not another's
    assert config.cast_config_input.short_str() == "dyn_ten_e4m3"


def test_fields_reach_the_recipe() -> None:
    config = Float8LinearConfig(
        gemm_config_output=Float8GemmConfig(False),
        gemm_config_grad_input=Float8GemmConfig(True),
        round_scales_to_power_of_2=True,
        cast_config_grad_output=CastConfig(target_dtype=torch.float8_e4m3fn),
        force_recompute_fp8_weight_in_bwd=True,
        pad_inner_dim=True,
    )
    recipe = config.recipe()
    assert (recipe.output.fast, recipe.grad_input.fast) == (False, True)
    assert recipe.grad_input.a == float8.Cast(pow2=True)
    options = config.linear_config()
    assert options.recompute and options.pad_inner_dim and not options.emulate


def test_every_legal_cast_constructs() -> None:
    granularities = (ScalingGranularity.TENSORWISE, ScalingGranularity.AXISWISE)
    dynamic = [
        CastConfig(scaling_granularity=granularity, target_dtype=dtype)
        for granularity in granularities
        for dtype in (torch.float8_e4m3fn, None)
    ]
    for x, w, dy in itertools.product(dynamic, repeat=3):
        Float8LinearConfig(cast_config_input=x, cast_config_weight=w, cast_config_grad_output=dy)


def test_disabled_casts_are_bf16() -> None:
    off = CastConfig(ScalingType.DISABLED)
    config = Float8LinearConfig(
        cast_config_input=off, cast_config_weight=off, cast_config_grad_output=off
    )
    assert config.recipe().name == "bf16"


@pytest.mark.parametrize(
    ("fields", "message"),
    (
        ({"cast_config_input": CastConfig(ScalingType.DISABLED)}, "output"),
        ({"cast_config_weight_for_grad_input": CastConfig(ScalingType.DISABLED)}, "grad_input"),
        (
            {"cast_config_input_for_grad_weight": CastConfig(target_dtype=torch.float8_e5m2)},
            "target_dtype",
        ),
        (
            {
                "cast_config_weight": CastConfig(scaling_granularity=ScalingGranularity.AXISWISE),
                "enable_fsdp_float8_all_gather": True,
            },
            "enable_fsdp_float8_all_gather",
        ),
        (
            {"cast_config_weight": CastConfig(scaling_granularity=ScalingGranularity.BLOCK_1X128)},
            "blocks",
        ),
    ),
)
@pytest.mark.parametrize("error", (AssertionError, ValueError))
def test_contradictions(fields: dict[str, Any], message: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=message):
        Float8LinearConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    (
        ((ScalingType.DISABLED, ScalingGranularity.AXISWISE), "axiswise"),
        ((ScalingType.DELAYED, ScalingGranularity.BLOCK_1X128), "block_1x128"),
        ((ScalingType.DYNAMIC, ScalingGranularity.TENSORWISE, torch.bfloat16), "target_dtype"),
    ),
)
def test_contradictions_of_a_cast(fields: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        CastConfig(*fields)


def test_a_recipe_name_that_is_none() -> None:
    with pytest.raises(AssertionError, match=r"rowwisee.*tensorwise"):
        Float8LinearConfig.from_recipe_name("rowwisee")


def test_fp8_all_gathers_are_the_linears() -> None:
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    model = torchao.convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)), config=config)
    assert model[0].enable_fsdp_float8_all_gather


def test_convert(device: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64, device=device), nn.Linear(64, 60, device=device))
    config = Float8LinearConfig(emulate=device == "cpu", round_scales_to_power_of_2=True)
    torchao.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name == "0"
    )
    from float8.torchao.float8_linear import Float8Linear

    assert type(model[0]) is Float8Linear and model[0].config is config
    assert type(model[1]) is nn.Linear
    model(torch.randn(4, 64, device=device)).sum().backward()
    torchao.precompute_float8_dynamic_scale_for_fsdp(model)
    with pytest.raises(ValueError, match="layer '1'"):
        torchao.convert_to_float8_training(model, config=config)


def test_another_config(device: str) -> None:
    """A second conversion gives the layers its own config."""
    model = nn.Sequential(nn.Linear(64, 64, device=device), nn.Linear(64, 64, device=device))
    first, second = (
        Float8LinearConfig(emulate=device == "cpu", round_scales_to_power_of_2=pow2)
        for pow2 in (False, True)
    )
    for config in (first, second):
        torchao.convert_to_float8_training(model, config=config)
        assert model[0].config is config and model[0].recipe == config.recipe()
    layer = model[0]
    torchao.convert_to_float8_training(model, config=second)
    assert model[0] is layer
    model(torch.randn(4, 64, device=device)).sum().backward()


def test_measured_conversion(capsys: Any) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 14336), nn.Linear(64, 64))
    config = Float8LinearConfig.from_recipe_name("rowwise")
    torchao.convert_to_float8_training(model, config=config, tokens=8192, explain=True)
    assert type(model[1]) is nn.Linear and model[0].recipe.name == "rowwise"
    assert "14336" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "casts"),
    (
        (Float8LinearConfig(), "i:dyn_ten_e4m3,w:dyn_ten_e4m3,go:dyn_ten_e5m2"),
        (
            Float8LinearConfig.from_recipe_name("rowwise"),
            "i:dyn_axs_e4m3,w:dyn_axs_e4m3,go:dyn_axs_e4m3",
        ),
        (
            Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"),
            "i:dyn_axs_e4m3,w:dyn_axs_e4m3,go:dyn_axs_e4m3,i_gw:dis_ten_e4m3,w_gi:dyn_ten_e4m3,"
            "go_gw:dis_ten_e4m3",
        ),
    ),
)
def test_repr_names_the_casts_as_torchao_does(config: Float8LinearConfig, casts: str) -> None:
    layer = torchao.convert_to_float8_training(nn.Linear(32, 16), config=config)
    assert repr(layer).endswith(f", cast_configs={casts})")


@pytest.fixture
def root() -> Any:
    """A linear with another one below it."""
    linear = nn.Linear(16, 16)
    linear.child = nn.Sequential(nn.Linear(16, 16))
    return linear


@pytest.mark.parametrize(
    ("package", "error", "words"),
    ((torchao, AssertionError, "root"), (float8.torch, ValueError, "module_filter_fn")),
    ids=("torchao", "float8"),
)
def test_a_root_linear_with_children_is_refused(
    package: Any, error: type[Exception], words: str, root: Any
) -> None:
    with pytest.raises(error, match=words):
        package.convert_to_float8_training(root)
    assert type(root.child[0]) is nn.Linear


def test_children_of_a_root_linear_are_converted(root: Any) -> None:
    float8.torch.convert_to_float8_training(root, module_filter_fn=lambda _, name: bool(name))
    assert isinstance(root.child[0], float8.torch.Float8Linear)


def test_layer_from_a_config() -> None:
    from float8.torchao.float8_linear import Float8Linear

    config = Float8LinearConfig.from_recipe_name("rowwise")
    layer = Float8Linear(64, 32, bias=False, config=config)
    assert layer.recipe.name == "rowwise" and layer.config is config
    assert Float8Linear(64, 32).recipe.name == "tensorwise"


@pytest.mark.parametrize(
    ("recipe", "k", "n", "expected"),
    (
        ("tensorwise", 4096, 1024, False),
        ("tensorwise", 4112, 1024, True),
        ("tensorwise", 4096, 1040, True),
        ("rowwise", 8192, 2048, False),
        ("rowwise", 1024, 8192, False),
        ("rowwise", 2048, 4096, False),
        ("rowwise", 2064, 4096, True),
        ("rowwise", 2048, 4112, True),
        ("rowwise", 4100, 8192, False),
    ),
)
def test_auto_filter(recipe: str, k: int, n: int, expected: bool) -> None:
    linear = nn.Linear(k, n, device="meta")
    keep = torchao._auto_filter_for_recipe(recipe, ["output"])
    assert keep(linear, "layers.0.w1") is expected
    assert keep(linear, "output") is False
    assert keep(nn.ReLU(), "layers.0.w1") is False


@pytest.mark.parametrize(
    ("recipe", "error", "words"),
    (
        ("rowwise_with_gw_hp", NotImplementedError, "filter_layers"),
        ("rowwisee", ValueError, "rowwisee"),
    ),
)
def test_auto_filter_without_a_rule(recipe: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        torchao._auto_filter_for_recipe(recipe, [])


@pytest.mark.parametrize(
    ("module", "options", "words"),
    (
        (nn.Linear(64, 64), {"config": "rowwise"}, "float8.torchao.Float8LinearConfig"),
        (3, {}, "not a int"),
    ),
    ids=("config", "module"),
)
def test_what_is_no_module_or_config_is_named(module: Any, options: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        torchao.convert_to_float8_training(module, **options)


def _of_torchao(name: str, base: type) -> Any:
    """Returns a class as torchao's own package has it."""
    return type(name, (base,), {"__module__": "torchao.float8.module"})


@pytest.mark.parametrize("package", (torchao, float8.torch), ids=("torchao", "float8"))
def test_a_config_of_the_other_package(package: Any) -> None:
    config = _of_torchao("Float8LinearConfig", object)()
    with pytest.raises(TypeError, match=r"torchao's own Float8LinearConfig .*float8.torchao"):
        package.convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)), config=config)


def test_a_layer_of_the_other_package() -> None:
    model = nn.Sequential(_of_torchao("Float8Linear", nn.Linear)(64, 64), nn.Linear(64, 64))
    with pytest.raises(ValueError, match="layer '0' is torchao's Float8Linear"):
        torchao.convert_to_float8_training(model)
    assert type(model[1]) is nn.Linear


def test_torchao_s_rules_by_their_names() -> None:
    from float8.torchao import float8_linear_utils as utils

    layer = nn.Linear(4096, 2048, device="meta")
    assert not utils._auto_filter_for_rowwise(layer, "a", [])
    assert utils._auto_filter_for_tensorwise(layer, "a", [])
    assert not utils._auto_filter_for_tensorwise(layer, "a.b", ["b"])
    assert not utils._auto_filter_for_tensorwise(nn.GELU(), "a", [])
