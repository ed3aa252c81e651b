"""examples/pytorch: train_llama.py learns, it resumes bit for bit, its errors are words."""

from __future__ import annotations

import pathlib

import pytest
import ranks
import repository
import torch

TEXT = "The quick brown fox jumps over the lazy dog. " * 40
SIZES = {"dim": 32, "layers": 2, "heads": 4, "kv-heads": 2, "seq": 32, "batch": 4, "lr": 0.01}
TINY = ("--emulate", *(f"--{name}={value}" for name, value in SIZES.items()))


@pytest.fixture
def text(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def train(*arguments: object) -> str | int | None:
    return repository.run("examples/pytorch/train_llama.py", *map(str, arguments))


def losses(folder: pathlib.Path) -> list[float]:
    lines = (folder / "steps.csv").read_text().split()
    assert lines[0] == "step,loss,tokens_per_s"
    rows = [line.split(",") for line in lines[1:]]
    assert [int(row[0]) for row in rows] == list(range(1, len(rows) + 1))
    assert all(float(row[2]) > 0 for row in rows)
    return [float(row[1]) for row in rows]


@pytest.mark.parametrize("recipe", ("bf16", "tensorwise", "rowwise"))
def test_loss_goes_down(recipe: str, text: str, tmp_path: pathlib.Path) -> None:
    assert train(text, *TINY, "--recipe", recipe, "--steps", 30, "--out", tmp_path) is None
    own = losses(tmp_path)
    assert len(own) == 30 and own[-1] < own[0] / 2


@pytest.mark.parametrize(
    "recipe", (("bf16",), ("rowwise",), ("delayed",), ("bf16", "--expert-recipe=delayed"))
)
def test_a_mixture_learns(
    recipe: tuple[str, ...],
    text: str,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = (text, *TINY, "--experts", 4, "--top-k", 2, "--steps", 30, "--recipe", *recipe)
    assert train(*options, "--out", tmp_path) is None
    own = losses(tmp_path)
    assert len(own) == 30 and own[-1] < own[0] / 2
    loads = [
        line.split("load ")[1] for line in capsys.readouterr().out.splitlines() if "load" in line
    ]
    assert len(loads) == 3 and all(1 <= float(each) <= 2 for each in loads)


@pytest.mark.parametrize(
    ("attention", "norms"),
    (("fp8_forward", ()), ("fp8_forward", ("--qk-norm",)), ("fp8", ("--qk-norm",))),
)
def test_attention_in_fp8_learns(
    attention: str, norms: tuple[str, ...], text: str, tmp_path: pathlib.Path
) -> None:
    sizes = ("--dim", 128, "--heads", 1, "--kv-heads", 1, "--lr", 3e-3)
    options = (*TINY, *sizes, "--recipe", "bf16", "--attention", attention)
    assert train(text, *options, *norms, "--steps", 30, "--out", tmp_path) is None
    own = losses(tmp_path)
    assert len(own) == 30 and own[-1] < own[0] / 2


@pytest.mark.parametrize("recipe", ("rowwise", "delayed", "delayed --experts=4"))
def test_resume_gives_the_same_bits(recipe: str, text: str, tmp_path: pathlib.Path) -> None:
    options = (text, *TINY, "--recipe", *recipe.split(), "--steps", 8, "--log-every", 3)
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    assert train(*options, "--save-every", 4, "--out", whole) is None
    assert train(*options, "--resume", whole / "step-4.pt", "--out", rest) is None
    assert losses(whole) == losses(rest)
    first, second = (torch.load(folder / "step-8.pt") for folder in (whole, rest))
    assert first["model"].keys() == second["model"].keys()
    for name, value in first["model"].items():
        assert torch.equal(value, second["model"][name]), name
    moments = [state["optimizer"]["state"] for state in (first, second)]
    assert len(moments[0]) > 0
    for index, own in moments[0].items():
        assert all(torch.equal(own[name], moments[1][index][name]) for name in own)
    assert torch.equal(first["windows"], second["windows"])


@pytest.mark.parametrize("recipes", (("delayed", "bf16"), ("bf16", "delayed")))
def test_weights_of_a_run_of_another_recipe(
    recipes: tuple[str, str], text: str, tmp_path: pathlib.Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert train(text, *TINY, "--recipe", recipes[0], "--steps", 30, "--out", first) is None
    begin = ("--weights", first / "step-30.pt", "--steps", 2)
    assert train(text, *TINY, "--recipe", recipes[1], *begin, "--out", second) is None
    assert losses(second)[0] == pytest.approx(losses(first)[-1], rel=0.3)
    assert losses(second)[0] < losses(first)[0] / 2


def test_compare(text: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, values in (("one", (4.0, 2.0)), ("two", (4.0, 2.01))):
        (tmp_path / name).mkdir()
        rows = "".join(f"{i},{loss},100\n" for i, loss in enumerate(values, 1))
        (tmp_path / name / "steps.csv").write_text("step,loss,tokens_per_s\n" + rows)
    files = [tmp_path / name / "steps.csv" for name in ("one", "two")]
    assert train("--compare", *files, "--out", tmp_path) is None
    output = capsys.readouterr().out
    rows = [line.split() for line in output.splitlines()]
    assert rows[1] == ["one", "1", "2", "2.0000", "-", "+0.00%", "100", "1.000"]
    assert rows[2] == ["two", "1", "2", "2.0100", "-", "+0.50%", "100", "1.000"]
    assert (tmp_path / "compare.png").exists() or "matplotlib is not installed" in output


def test_seeds(text: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    finals: dict[str, list[float]] = {}
    folders = [(name, seed) for name in ("bf16", "rowwise") for seed in (1, 2)]
    for name, seed in folders:
        out = tmp_path / f"{name}-seed{seed}"
        options = ("--recipe", name, "--seed", seed, "--steps", 3, "--out", out)
        assert train(text, *TINY, *options) is None
        finals.setdefault(name, []).append(losses(out)[-1])
    files = [tmp_path / f"{name}-seed{seed}" / "steps.csv" for name, seed in folders]
    capsys.readouterr()
    assert train("--compare", *files, "--out", tmp_path) is None
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()[:3]}
    for name, (one, other) in finals.items():
        assert one != other
        assert rows[name][1:3] == ["2", "3"]
        assert float(rows[name][3]) == pytest.approx((one + other) / 2, abs=1e-4)
        assert float(rows[name][4]) == pytest.approx(abs(one - other) / 2**0.5, abs=1e-4)
    longer = tmp_path / "rowwise-seed3"
    assert train(text, *TINY, "--steps", 4, "--out", longer) is None
    message = train("--compare", *files, longer / "steps.csv", "--out", tmp_path)
    assert message == "train_llama: the runs of rowwise have unlike steps"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with the text, the checkpoint and the CSV of a run of one step."""
    folder = tmp_path_factory.mktemp("ended")
    (folder / "text.txt").write_text(TEXT)
    assert train(folder / "text.txt", *TINY, "--out", folder, "--steps", 1) is None
    return folder


def _paths(arguments: tuple[str, ...], folder: pathlib.Path) -> list[str]:
    return [str(folder / each) if "." in each else each for each in arguments]


@pytest.mark.parametrize(
    ("arguments", "words"),
    (
        (("none.txt",), "none.txt"),
        (("text.txt", "--seq=100000"), "a sequence has 100000"),
        (("text.txt", "--heads=5"), "32 features are not 5 heads"),
        (("text.txt", "--dim=8"), "multiples of 16"),
        (("text.txt", "--expert-recipe=rowwise"), "--experts N"),
        (("text.txt", "--attention=fp8_forward"), "--dim to one of these times --heads"),
        (("text.txt", "--resume", "none.pt"), "none.pt"),
        (("text.txt", "--resume", "steps.csv"), "steps.csv is no checkpoint"),
        (("text.txt", "--resume", "step-1.pt", "--layers=1"), "its layers is 2, not 1"),
        (("text.txt", "--resume", "step-1.pt", "--recipe=bf16"), "its recipe is rowwise"),
        (("text.txt", "--weights", "step-1.pt", "--layers=1"), "has layers 2, not 1"),
        (("--compare", "steps.csv", "text.txt"), "text.txt is no CSV"),
    ),
)
def test_bad_input(
    arguments: tuple[str, ...], words: str, ended: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    options = ("--out", str(tmp_path), "--steps", "1")
    message = train(*TINY, *_paths(arguments, ended), *options)
    assert isinstance(message, str) and message.startswith("train_llama: ")
    assert words in message and "\n" not in message


def test_a_recipe_that_is_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(text, *TINY, "--recipe", "rowise") == 2
    assert "'rowise'" in capsys.readouterr().err


def _losses_of_ranks(*arguments: object) -> list[float]:
    """Returns the losses that examples/pytorch/tensor_parallel.py prints on two ranks."""
    text = ranks.run_program(repository.ROOT / "examples/pytorch/tensor_parallel.py", *arguments)
    return [float(line.split()[-1]) for line in text.splitlines() if line[:4] == "step"]


def test_tensor_parallel() -> None:
    """Two ranks learn, and learn the same without whole logits; their sums have another order."""
    sizes = {"dim": 64, "head": 16, "layers": 1, "seq": 32, "batch": 4, "steps": 6, "lr": 0.01}
    options = ("--emulate", "--backend=eager", *(f"--{n}={v}" for n, v in sizes.items()))
    two = _losses_of_ranks(*options)
    assert len(two) == 6 and two[-1] < two[0] - 0.5
    parts = _losses_of_ranks(*options, "--loss-parallel", "--steps=2")
    assert parts == pytest.approx(two[:2], abs=0.01)
