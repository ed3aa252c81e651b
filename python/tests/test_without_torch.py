"""`import float8` alone: recipes, the filter and the tuning table, without PyTorch."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import float8
import pytest
from float8 import Layer, filter_layers
from float8.recipes import NAMES


def test_import_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import float8\n"
        "assert float8.Recipe.named('rowwise').output.fast\n"
        "assert float8.filter_layers([float8.Layer('a', 4096, 14336)], 'rowwise', 8192)[0].convert\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_version_is_the_library_s() -> None:
    assert float8.__version__.count(".") == 2


@pytest.mark.parametrize("name", NAMES)
def test_named_recipes(name: str) -> None:
    recipe = float8.Recipe.named(name)
    assert recipe.name == name and recipe.delayed == (name == "delayed")


def test_unknown_recipe() -> None:
    with pytest.raises(ValueError, match="rowwisee"):
        float8.Recipe.named("rowwisee")


def test_verdicts() -> None:
    layers = [
        Layer("blocks.0.w1", 4096, 14336),
        Layer("blocks.0.small", 1024, 1024),
        Layer("blocks.0.odd", 4096, 14330),
        Layer("output", 4096, 14336),
    ]
    big, small, odd, named = filter_layers(layers, "rowwise", 8192, names=["output"])
    assert big.convert and big.evidence == "measured" and big.speedup_low > 1.02
    assert not small.convert and small.speedup < 1
    assert not odd.convert and "16" in odd.reason
    assert not named.convert and "output" in named.reason


def test_torchao_policy() -> None:
    layers = [Layer("a", 4096, 4096), Layer("b", 2048, 4096)]
    verdicts = filter_layers(
        layers, "rowwise", 8192, names=["auto_filter_small_kn"], policy="torchao"
    )
    assert [verdict.convert for verdict in verdicts] == [True, False]


def test_custom_recipe() -> None:
    recipe = float8.Recipe()
    (verdict,) = filter_layers([Layer("a", 4096, 14336)], recipe, 8192)
    assert verdict.reason


def test_bad_input(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="policy"):
        filter_layers([], "rowwise", 8192, policy="fastest")
    with pytest.raises(ValueError, match="a"):
        filter_layers([Layer("a", 16, 16), Layer("a", 16, 16)], "rowwise", 8192)
    with pytest.raises(FileNotFoundError, match="none"):
        float8.table_info(str(tmp_path / "none"))


def test_table_info() -> None:
    assert "tuning table" in float8.table_info()


def test_console_script() -> None:
    program = pathlib.Path(sys.executable).parent / "float8-tune"
    if not program.exists():
        pytest.skip("the wheel is not installed")
    result = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    assert float8.__version__ in result.stdout
