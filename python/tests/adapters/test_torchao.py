"""torchao's names: what they mean here, and install()."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
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


def run_python(code: str) -> None:
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=1200)


def test_install() -> None:
    """Without torch.compile, which takes as long as PyTorch to load."""
    run_python(
        """
        import sys
        import float8.torchao
        float8.torchao.install()
        import torchao.float8
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.config import CastConfig
        from torchao.float8.float8_linear import Float8Linear
        from torchao.float8.float8_linear_utils import convert_to_float8_training as convert
        assert Float8LinearConfig is float8.torchao.Float8LinearConfig
        assert convert is convert_to_float8_training is float8.torchao.convert_to_float8_training
        assert Float8Linear.__module__ == "float8.torchao.float8_linear"
        assert "torch._dynamo" not in sys.modules
        """
    )


LOOK = """
import importlib.metadata, importlib.util

def looks():
    try:
        return importlib.util.find_spec("torchao") is not None, importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError:
        return importlib.util.find_spec("torchao") is not None, None
"""


def test_a_torchao_that_is_not_installed_is_there_for_who_trains_with_it(tmp_path: Any) -> None:
    """Others that look for torchao import parts that are not there, or refuse its version."""
    for package in ("accelerate", "peft"):
        (tmp_path / f"{package}.py").write_text(LOOK)
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
        import importlib.metadata, sys
        assert sys.argv[1:] == ["-m", "x"]
        import float8.torchao
        import accelerate, peft
        assert accelerate.looks() == (True, "0.6.1")
        assert peft.looks() == (False, None)
        assert "torchao" not in {d.metadata["Name"] for d in importlib.metadata.distributions()}
        from torchao.float8.float8_linear import Float8Linear
        assert peft.looks() == (False, None)
        import torchao.float8
        import torchao
        assert torchao.float8.Float8LinearConfig is float8.torchao.Float8LinearConfig
        assert accelerate.looks() == (True, "0.6.1")
        assert peft.looks()[1] is None
        float8.torchao.install()
        assert sum(type(f).__module__.startswith("float8") for f in sys.meta_path) == 1
        try:
            import torchao.quantization
        except ModuleNotFoundError:
            pass
        else:
            raise AssertionError("torchao.quantization is there")
        """
        )
    )
    command = [sys.executable, "-m", "float8.torchao"]
    subprocess.run([*command, str(program), "-m", "x"], check=True, timeout=300)


def test_a_module_that_is_run_by_its_name(tmp_path: Any) -> None:
    command = [sys.executable, "-m", "float8.torchao"]
    assert subprocess.run(command, timeout=300, stderr=subprocess.PIPE).returncode == 2
    (tmp_path / "own.py").write_text("import sys, torchao.float8\nsys.exit(len(sys.argv) + 40)\n")
    done = subprocess.run([*command, "-m", "own", "--option"], cwd=tmp_path, timeout=300)
    assert done.returncode == 42


OPTIONS = """
import sys
assert sys.argv[1:] == ["--fuse"]
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))

class Model(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.mlp, self.head = SwiGLU(), nn.Linear(32, 16)
        if not bias:
            self.mlp.w1.bias = self.mlp.w3.bias = None

config = Float8LinearConfig(emulate=True)
model = convert_to_float8_training(Model(False), config=config)
assert type(model.mlp).__name__ == "FusedSwiGLU"
assert model.mlp.w1.enable_fsdp_float8_all_gather and not config.enable_fsdp_float8_all_gather
single = convert_to_float8_training(nn.Linear(32, 32), config=config)
assert type(single).__name__ == "Float8Linear"
# A bias of gate and up is left, and that is said.
import warnings
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    assert type(convert_to_float8_training(Model(True), config=config).mlp) is SwiGLU
assert "fuse left Model as it was" in str(found[0].message) and "bias" in str(found[0].message)
"""


def test_options_of_install(tmp_path: Any) -> None:
    program = tmp_path / "program.py"
    program.write_text(OPTIONS)
    command = [sys.executable, "-m", "float8.torchao", "--fuse"]
    command += ["--enable-fsdp-float8-all-gather", str(program), "--fuse"]
    subprocess.run(command, check=True, timeout=300)
    with pytest.raises(TypeError, match="fuse"):
        torchao.install(fuse="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="recipe_name is 'row'"):
        torchao.install(recipe="row")


RECIPES = """
import warnings
import torch
from torch import nn
import float8.torchao
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
for recipe in ("delayed", "blockwise", "rowwise"):
    float8.torchao.install(recipe=recipe)
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), config=config)
    assert str(model[0].recipe) == recipe and model[0].enable_fsdp_float8_all_gather, model
    assert model[0].config.emulate and ("dyn_axs" in repr(model)) == (recipe == "rowwise"), repr(model)
    assert config.as_installed().as_installed() == config.as_installed()

# Layers that a program makes itself have the recipe too.
assert str(Float8Linear(32, 32, config=config).recipe) == "rowwise"
float8.torchao.install(fuse=True)
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    assert str(Float8Linear(32, 32, config=config).recipe) == "tensorwise"
assert "call float8.torch.fuse(model) behind that" in str(found[0].message)
float8.torchao.install(recipe="delayed")
try:
    Float8Linear(32, 32, config=config)
except NotImplementedError as error:
    assert "choose another recipe" in str(error)
else:
    raise AssertionError("a single layer with delayed scaling")
"""


def test_a_recipe_in_the_place_of_the_program_s_own(tmp_path: Any) -> None:
    program = tmp_path / "program.py"
    program.write_text(RECIPES)
    command = [sys.executable, "-m", "float8.torchao", "--recipe", "delayed", str(program)]
    subprocess.run(command, check=True, timeout=300)
    wrong = [*command[:3], "--recipe", "row", str(program)]
    done = subprocess.run(wrong, timeout=300, stderr=subprocess.PIPE, text=True)
    assert done.returncode != 0 and "recipe_name is 'row'; it is one of" in done.stderr


def test_fp8_that_was_asked_for_and_not_taken_is_warned_of() -> None:
    """The first step of an optimizer tells, once, whether a model was converted since the asking."""
    run_python(
        """
        import os, warnings
        import float8.torch, float8.torchao
        from float8.torch import notices
        from float8.torchao import Float8LinearConfig, _asked
        float8.torchao.install()
        import torch
        from torch import nn

        def steps(variable=""):
            os.environ["ACCELERATE_MIXED_PRECISION"] = variable
            model = nn.Linear(16, 16)
            model(torch.ones(1, 16)).sum().backward()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.step()
            optimizer.step()

        def convert():
            options = float8.torch.LinearConfig(emulate=True)
            float8.torch.convert_to_float8_training(nn.Linear(16, 16), config=options)

        def made():
            config = Float8LinearConfig(emulate=True)
            float8.torchao.float8_linear.Float8Linear(16, 16, config=config)

        fp8 = lambda: steps("fp8")
        variable, config = "ACCELERATE_MIXED_PRECISION is fp8", "a Float8LinearConfig was made"
        for calls, expected in (
            ([steps], None),
            ([fp8], variable),
            ([steps, fp8], variable),
            ([convert, fp8], None),
            ([steps, convert, fp8], None),
            ([convert, steps, fp8], variable),
            ([Float8LinearConfig, steps], config),
            ([Float8LinearConfig, convert, steps], None),
            ([made, steps], None),
        ):
            steps()
            notices._told.clear()
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                for call in calls:
                    call()
            words = [str(each.message) for each in found]
            assert len(words) == (expected is not None), (calls, words)
            assert all(expected in each and "_reset_state" in each for each in words), words
        """
    )


def test_install_that_comes_late(tmp_path: Any) -> None:
    folder = tmp_path / "torchao" / "float8"
    folder.mkdir(parents=True)
    (tmp_path / "torchao" / "__init__.py").touch()
    (folder / "__init__.py").touch()
    run_python(
        f"""
        import sys, warnings
        sys.path.insert(0, {str(tmp_path)!r})
        import torchao.float8
        import float8.torchao
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            float8.torchao.install()
            float8.torchao.install()
        (warning,) = found
        assert "comes after an import of torchao.float8" in str(warning.message), warning
        import torchao.float8
        assert torchao.float8.install is float8.torchao.install
        """
    )


def test_install_beside_a_torchao(tmp_path: Any) -> None:
    """What this package does not have is found in the torchao that is installed."""
    folder = tmp_path / "torchao" / "float8"
    folder.mkdir(parents=True)
    (tmp_path / "torchao" / "__init__.py").write_text(
        "from torchao.float8.inference import marker\n"
    )
    (folder / "__init__.py").write_text("raise RuntimeError('the other float8')\n")
    (folder / "inference.py").write_text("marker = 7\nclass Float8MMConfig: pass\n")
    metadata = tmp_path / "torchao-0.18.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torchao\nVersion: 0.18.0\n")
    (tmp_path / "accelerate.py").write_text(LOOK)
    run_python(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import float8.torchao
        float8.torchao.install()
        import accelerate, torchao
        assert torchao.marker == 7 and accelerate.looks() == (True, "0.18.0")
        from torchao.float8 import Float8MMConfig
        assert Float8MMConfig.__module__ == "torchao.float8.inference"
        assert not hasattr(torchao.float8, "none")
        assert torchao.float8.Float8LinearConfig is float8.torchao.Float8LinearConfig
        """
    )


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
