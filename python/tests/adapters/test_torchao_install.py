"""install(), and `python -m float8.torchao`: programs that import torchao, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest

from float8 import torchao


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
    def __init__(self):
        super().__init__()
        self.mlp, self.head = SwiGLU(), nn.Linear(32, 16)

config = Float8LinearConfig(emulate=True)
model = convert_to_float8_training(Model(), config=config)
assert type(model.mlp).__name__ == "FusedSwiGLU"
assert model.mlp.w1.enable_fsdp_float8_all_gather and not config.enable_fsdp_float8_all_gather
single = convert_to_float8_training(nn.Linear(32, 32), config=config)
assert type(single).__name__ == "Float8Linear"
# A hook is left, and that is said.
other = Model()
other.mlp.w1.register_forward_hook(lambda *_: None)
import warnings
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    assert type(convert_to_float8_training(other, config=config).mlp) is SwiGLU
assert "fuse left the MLPs of Model as they were" in str(found[0].message) and "hook" in str(found[0].message)
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
