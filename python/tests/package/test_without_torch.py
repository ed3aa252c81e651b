"""`import float8` alone: recipes, the filter and the tuning table, without PyTorch."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from repository import float8_tune

import float8
from float8 import Layer, explain, filter_layers
from float8.recipes import NAMES


def test_import_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import float8\n"
        "assert float8.Recipe.named('rowwise').output.fast\n"
        "assert float8.filter_layers([float8.Layer('a', 4096, 14336)], 'rowwise', 8192)[0].convert\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=1200)


@pytest.mark.parametrize(
    ("version", "old"), [("2.9.1", True), ("2.10.0a0", False), ("2.10.0", False)]
)
def test_an_older_torch_is_an_error(version: str, old: bool) -> None:
    code = (
        "import torch\n"
        f"torch.__version__ = type(torch.__version__)('{version}+cu128')\n"
        "import float8.torch\n"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert bool(result.returncode) == old
    assert not old or "ImportError: float8.torch needs PyTorch 2.10" in result.stderr


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


def test_verdicts_name_the_device_and_whose_rows_they_are_of() -> None:
    layers = [Layer("a", 4096, 14336), Layer("b", 4096, 14330)]
    of = {
        part: filter_layers(layers, "rowwise", 8192, device=part) for part in ("H100", "h200", None)
    }
    names = [(known.device, known.measured_on) for known, _ in of.values()]
    h100, h200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
    assert names == [(h100, h100), (h200, h200), (h100, h100)]
    assert of["H100"] == of[None] and of["h200"][0].speedup != of[None][0].speedup
    for _, unknown in of.values():
        assert unknown.measured_on == "" and unknown.device


def test_a_verdict_by_another_device_s_rows_says_so() -> None:
    """The built-in H100 has no rows of 1024 tokens."""
    layers = [Layer("a", 4096, 4096)]
    (verdict,) = filter_layers(layers, "rowwise", 1024)
    assert verdict.device != verdict.measured_on == "NVIDIA H200"
    assert verdict.evidence == "modelled" and "on another device, NVIDIA H200" in verdict.reason
    (own,) = filter_layers(layers, "rowwise", 1024, device="H100")
    assert own.device == own.measured_on


@pytest.mark.parametrize(
    ("device", "error", "words"),
    [
        ("A100", FileNotFoundError, "no measurements on 'A100'; there are some on .*'NVIDIA H200'"),
        ("NVIDIA", ValueError, "'NVIDIA' may be"),
        (1.5, TypeError, "a part of the name"),
        (True, TypeError, "device is True"),
        ("", ValueError, "device is ''"),
        (-1, ValueError, "device is -1"),
    ],
)
def test_devices_that_cannot_be(device: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        filter_layers([Layer("a", 64, 64)], "rowwise", 8192, device=device)  # type: ignore[arg-type]


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


def test_a_policy_that_is_none() -> None:
    with pytest.raises(ValueError, match="policy"):
        filter_layers([], "rowwise", 8192, policy="fastest")


def test_two_layers_of_one_name() -> None:
    with pytest.raises(ValueError, match=r"\bab\b"):
        filter_layers([Layer("ab", 16, 16), Layer("ab", 16, 16)], "rowwise", 8192)


def test_a_table_that_is_not_there(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="none"):
        float8.table_info(str(tmp_path / "none"))


@pytest.fixture
def gpu(device: str) -> int | None:
    """The device whose measurements the program answers by on this machine."""
    return 0 if device == "cuda" else None


def test_table_of_another_version(tmp_path: pathlib.Path, gpu: int | None) -> None:
    own, other = tmp_path / "table", tmp_path / "newer"
    float8_tune("db", "export", "--format", "table", "-o", str(own))
    layers = [Layer("a", 4096, 14336)]
    (verdict,) = filter_layers(layers, "rowwise", 8192, table=own, device=gpu)
    assert verdict == filter_layers(layers, "rowwise", 8192, device=gpu)[0]
    first, rest = own.read_text().split("\n", 1)
    name, version = first.split()
    other.write_text(f"{name} {int(version) + 1}\n{rest}")
    with pytest.raises(RuntimeError, match=f"newer.*{int(version) + 1}"):
        filter_layers(layers, "rowwise", 8192, table=other)


def test_table_info() -> None:
    info = float8.table_info()
    assert info.startswith("tuning table: ")
    assert "measured on NVIDIA H100" in info
    assert "emulated" not in info
    assert "none is of this device" not in info


# The layers of a Llama-3-8B.
_SIZES = {
    "attention.wq": (4096, 4096),
    "attention.wk": (4096, 1024),
    "attention.wv": (4096, 1024),
    "attention.wo": (4096, 4096),
    "feed_forward.w1": (4096, 14336),
    "feed_forward.w3": (4096, 14336),
    "feed_forward.w2": (14336, 4096),
}
LLAMA = [
    *(Layer(f"layers.{i}.{name}", k, n) for i in range(32) for name, (k, n) in _SIZES.items()),
    Layer("output", 4096, 128256),
]


@pytest.mark.parametrize("policy", ("measured", "torchao"))
@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise", "delayed", "blockwise"))
def test_the_program_says_the_same(recipe: str, policy: str, gpu: int | None) -> None:
    if policy == "torchao" and recipe not in ("tensorwise", "rowwise"):
        pytest.skip("torchao has no rule for it")
    names = ["output", "layers.3.", "auto_filter_small_kn"]
    printed = float8_tune(
        *("filter", "--model", "llama3-8b", "--tokens", "4096", "--recipe", recipe),
        *("--policy", policy, "--filter-fqns", ",".join(names)),
    )
    verdicts = filter_layers(LLAMA, recipe, 4096, names=names, policy=policy, device=gpu)
    table = printed.split("\n\n")[0]
    assert [line.rstrip() for line in table.splitlines()] == explain(verdicts).splitlines()


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise", "delayed", "blockwise"))
def test_the_program_says_the_same_of_ranks(recipe: str, gpu: int | None) -> None:
    printed = float8_tune(
        *("filter", "--model", "llama3-8b", "--tokens", "2048", "--recipe", recipe),
        *("--fsdp", "64", "--hosts", "16", "--network-gbit", "200"),
    )
    ranks = {"fsdp": 64, "hosts": 16, "network_gbit": 200}
    verdicts = filter_layers(LLAMA, recipe, 2048, **ranks, device=gpu)
    table = printed.split("\n\n")[0]
    assert [line.rstrip() for line in table.splitlines()] == explain(verdicts).splitlines()


PAIR = [Layer("layers.0.wq", 4096, 4096), Layer("layers.0.wo", 4096, 4096)]


def test_verdicts_of_one_rank_have_no_wire() -> None:
    for alone in filter_layers(PAIR, "rowwise", 8192):
        assert alone.wire is None and alone.evidence == "measured"


def test_ranks_are_in_the_verdicts() -> None:
    for shared in filter_layers(PAIR, "rowwise", 8192, tp=4):
        assert shared.wire is not None and shared.evidence == "modelled"
        assert shared.wire.bf16_exposed_us == shared.wire.bf16_us > 0
        assert "without the wire" in shared.reason


def test_verdicts_of_many_ranks_are_predictions() -> None:
    (many, _) = filter_layers(PAIR, "rowwise", 8192, fsdp=16384)
    assert many.wire is not None and many.wire.is_prediction
    assert "predicted for fsdp 16384 and tp 1 on 2048 hosts" in many.reason


@pytest.mark.parametrize(
    ("words", "ranks"),
    (
        ("fsdp is 0", {"fsdp": 0}),
        ("tp 3", {"tp": 3}),
        ("tp 512 leaves a rank 8", {"tp": 512}),
        ("hosts is 4.* 1 to 2", {"fsdp": 2, "hosts": 4}),
        ("hosts is 0", {"hosts": 0}),
    ),
)
def test_ranks_that_cannot_be(words: str, ranks: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=words):
        filter_layers([Layer("layers.0.wq", 4096, 4096)], "rowwise", 8192, **ranks)


def test_filter_file(tmp_path: pathlib.Path, gpu: int | None) -> None:
    file = tmp_path / "verdicts"
    float8_tune(
        *("filter", "--model", "llama3-8b", "--tokens", "4096", "--recipe", "rowwise"),
        *("--verdicts", str(file)),
    )
    by_file = filter_layers(LLAMA, "rowwise", 4096, verdicts=file, device=gpu)
    asked = filter_layers(LLAMA, "rowwise", 4096, device=gpu)
    assert [v.convert for v in by_file] == [v.convert for v in asked]
    with pytest.raises(ValueError, match="4096"):
        filter_layers(LLAMA, "rowwise", 8192, verdicts=file)


def test_console_script() -> None:
    program = pathlib.Path(sys.executable).parent / "float8-tune"
    if not program.exists():
        pytest.skip("the wheel is not installed")
    result = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=1200)
    assert float8.__version__ in result.stdout
