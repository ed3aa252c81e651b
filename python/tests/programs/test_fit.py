"""benchmarks/fit: constants of models, fitted again to what they are known to come from."""

from __future__ import annotations

import csv
import dataclasses
import json
import pathlib
import re
import sys
import tarfile

import numpy as np
import pytest
import repository
from repository import float8_tune
from scipy import optimize

sys.path.append(str(repository.ROOT / "benchmarks/fit"))

import constants
import cost_model
import predicted
import suggestions

DATA = repository.ROOT / "tuning_db/data"
TILES = [
    (128, 256, 2, ""),
    (256, 128, 2, ""),
    (128, 128, 2, "p"),
    (64, 128, 1, ""),
    (64, 64, 1, ""),
]


def squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


def unpacked(archive: str, folder: pathlib.Path) -> pathlib.Path:
    with tarfile.open(DATA / archive) as tar:
        tar.extractall(folder, filter="data")
    return folder


def made_rows(truth: constants.Constants) -> list[dict[str, str]]:
    """Kernels whose times are what the model predicts, in clocks."""
    rows = []
    for number, (m, n, k) in enumerate(
        (m, n, k) for m in (256, 2048, 8192) for n in (1024, 4096, 14336) for k in (2048, 8192)
    ):
        for tile_m, tile_n, groups, pingpong in TILES:
            for rest in ("s4c1x1", "s4c2x1", "s2c1x2", "s4c1x1k2"):
                shape, mode = f"m{m}n{n}k{k}", ("fast", "precise")[number % 2]
                config = f"{tile_m}x{tile_n}{rest}w{groups}{pingpong}g8"
                problem = (
                    f"output/tensorwise{'+fast' if mode == 'fast' else ''}/e4m3.e4m3.bf16/{shape}"
                )
                gemm = f"e4m3.e4m3.bf16/tensor/{mode}/{shape}"
                values = ("train", str(number), "a GPU", "132", problem, gemm, "generated")
                rows.append(dict(zip(cost_model.COLUMNS, (*values, config, "1"), strict=True)))
    kernels = predicted.Kernels.of(rows)
    clocks = cost_model.voted(kernels, truth, None)
    for row, ns in zip(rows, clocks, strict=True):
        row["ns"] = str(ns)
    for number in sorted({row["number"] for row in rows}, key=int):
        first = next(row for row in rows if row["number"] == number)
        rows.append({**first, "impl": "cublaslt", "config": "h0"})
    return rows


def write(path: pathlib.Path, columns: tuple[str, ...], rows: list[dict[str, str]]) -> str:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, columns)
        table.writeheader()
        table.writerows(rows)
    return str(path)


def test_the_source_is_the_committed_file() -> None:
    built_in = constants.Constants.read()
    assert len(built_in.tiles) >= 20 and len(built_in.library) == 19
    assert squeezed(built_in.source()) == squeezed(constants.PATH.read_text())


def test_the_committed_coefficients_of_suggestions_are_fitted_again(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, output = unpacked("suggestions.tar.xz", tmp_path), tmp_path / "fitted.cpp"
    tables = [str(folder / name) for name in ("h100.csv", "h200.csv")]
    left_out = str(folder / "left_out.csv")
    program = "benchmarks/fit/suggestions.py"
    assert not repository.run(program, *tables, "--test", left_out, "-o", str(output))
    assert squeezed(output.read_text()) == squeezed(constants.PATH.read_text())
    rows = re.findall(
        r"^(\D.*?)  +(\d+) +([\d.]+) % +[\d.]+ % +([\d.]+) %$", capsys.readouterr().out, re.M
    )
    printed = {name: (int(gemms), float(mean), float(p95)) for name, gemms, mean, p95 in rows}
    assert printed == {  # as docs/method.md has them
        "cuBLASLt's first": (2886, 5.9, 22.6),
        "ranked first, before": (2886, 2.2, 8.9),
        "ranked first, fitted": (2886, 2.2, 8.9),
        "ranked first, 5 folds": (2886, 2.1, 8.8),
        "held out: cuBLASLt's first": (96, 5.6, 20.0),
        "held out: ranked first": (96, 2.6, 7.9),
    }


def test_the_model_is_that_of_the_library(tmp_path: pathlib.Path) -> None:
    """Predictions, votes and the choice of cuBLASLt give the regrets that the C++ gives."""
    train = unpacked("exhaustive.tar.xz", tmp_path) / "fitted_to.jsonl"
    options = ("--train", str(train), "--test", str(tmp_path / "held_out.jsonl"))
    table = str(tmp_path / "kernels.csv")
    told = json.loads(float8_tune("cost-model", "score", *options, "--csv", table, "--json"))
    sets, built_in = cost_model.read(table), constants.Constants.read()
    for known, names in (
        (None, ("fitted to", "held out")),
        (sets["train"], ("and rows of other layers", "held out, and rows of the others")),
    ):
        for kernels, name in zip((sets["train"], sets["test"]), names, strict=True):
            generated, either = cost_model.regrets(kernels, built_in, known)
            expected = told["regret"][name]
            assert len(generated) == expected["products"]
            for regrets, suffix in ((generated, ""), (either, "_to_any")):
                assert np.median(regrets) == pytest.approx(expected["median" + suffix], abs=1e-4)
                p95 = np.percentile(regrets, 95)
                assert p95 == pytest.approx(expected["p95" + suffix], abs=1e-4), name
            assert generated.max() == pytest.approx(expected["worst"], abs=1e-4)


def test_the_slopes_are_those_of_the_objective() -> None:
    truth = constants.Constants.read()
    rows = made_rows(truth)
    for i, row in enumerate(rows):
        row["ns"] = str(float(row["ns"]) * (1 + 0.1 * np.sin(i)))
    kernels = predicted.Kernels.of(rows)
    model = predicted.Model(list(truth.tiles))
    start = model.logs(truth.scalars, truth.tiles)
    logs = start + 0.03 * np.cos(np.arange(len(start)))
    _, slope = cost_model.objective(logs, model, kernels, start)
    near = optimize.approx_fprime(
        logs, lambda x: cost_model.objective(x, model, kernels, start)[0], 1e-7
    )
    np.testing.assert_allclose(slope, near, atol=2e-5)
    assert np.abs(slope).max() > 1e-2


@pytest.mark.parametrize(
    ("spoiled", "factor"),
    [("l2_bytes_per_clock", 1 / 3), ("tile_overhead", 5), ("latency", 5), ("tiles", 0)],
)
def test_spoiled_constants_are_mended(spoiled: str, factor: float) -> None:
    truth = constants.Constants.read()
    kernels = predicted.Kernels.of(made_rows(truth))
    assert cost_model.regrets(kernels, truth)[0].max() == 0
    start = dataclasses.replace(truth, scalars=dict(truth.scalars), tiles=dict(truth.tiles))
    if spoiled == "tiles":
        start.tiles |= {tile: (0.3, 0.3, 0.3) for tile in truth.tiles if tile[3]}
    else:
        start.scalars[spoiled] *= factor
    before = cost_model.regrets(kernels, start)[0]
    mended = cost_model.fitted(kernels, start)
    after = cost_model.regrets(kernels, mended)[0]
    assert before.mean() > 0.01 and after.mean() < before.mean() / 2
    for fast, precise, block in mended.tiles.values():
        assert 1 + 1e-9 >= fast >= precise - 1e-9 and precise >= block - 1e-9
    assert mended.scalars["pingpong_epilogue"] <= 1


def test_a_program_run_fits_tiles_that_it_has_not_heard_of(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = constants.Constants.read()
    table = write(tmp_path / "kernels.csv", cost_model.COLUMNS, made_rows(truth))
    forgetful = dataclasses.replace(truth, tiles=dict(list(truth.tiles.items())[1:]))
    start, output = tmp_path / "start.cpp", tmp_path / "fitted.cpp"
    start.write_text(forgetful.source())
    arguments = ("--start", str(start), "--folds", "2", "-o", str(output))
    assert not repository.run("benchmarks/fit/cost_model.py", table, *arguments)
    fitted = constants.Constants.read(output)
    assert set(fitted.tiles) == set(truth.tiles)
    assert list(fitted.suggestions) == list(truth.suggestions)
    printed = capsys.readouterr().out
    assert re.findall(r"^(\w[\w ]*?)  +18 ", printed, re.M) == [
        *("before", "fitted", "with rows of other layers", "2 folds")
    ]


SUGGESTION = dict(
    zip(
        suggestions.COLUMNS,
        ["x", "132", "bf16", *["16"] * 3, "0", "66", "64", "64", "1", "1", "1", "2"],
        strict=True,
    )
)


@pytest.mark.parametrize(
    ("program", "change", "words"),
    [
        ("suggestions", {"us": "0"}, ["line 2", "column us is '0'"]),
        ("suggestions", {"us": "nan"}, ["line 2", "column us is 'nan'"]),
        ("suggestions", {"k": "-16"}, ["line 2", "column k is '-16'"]),
        ("suggestions", {"tile_m": "2x"}, ["line 2", "column tile_m is '2x'"]),
        ("suggestions", {}, ["1 ranked suggestions of 1 GEMMs", "bench suggestions"]),
        ("suggestions", {"m": None}, ["no column m", "bench suggestions --csv"]),
        ("cost_model", {"ns": "0"}, ["column ns is '0'"]),
        ("cost_model", {"sms": "many"}, ["column sms is 'many'"]),
        ("cost_model", {"config": "128"}, ["column config is '128'"]),
        ("cost_model", {"gemm": "x"}, ["column gemm is 'x'"]),
        ("cost_model", {"impl": "cublaslt"}, ["no generated kernel"]),
        ("cost_model", {"set": "test"}, ["no row of the set train", "cost-model score"]),
        ("cost_model", {"problem": None}, ["no column problem", "cost-model score --csv"]),
    ],
)
def test_bad_tables_are_refused(
    tmp_path: pathlib.Path, program: str, change: dict[str, str | None], words: list[str]
) -> None:
    row = SUGGESTION if program == "suggestions" else made_rows(constants.Constants.read())[0]
    columns = tuple(name for name in row if change.get(name, "") is not None)
    changed = {name: change.get(name) or row[name] for name in columns}
    table = write(tmp_path / "table.csv", columns, [changed])
    error = repository.run(f"benchmarks/fit/{program}.py", table, "-o", str(tmp_path / "out.cpp"))
    assert isinstance(error, str) and error.startswith(f"{program}.py: ")
    assert all(part in error for part in [*words, *(["table.csv"] if change else [])]), error
    assert not (tmp_path / "out.cpp").exists()


@pytest.mark.parametrize("program", ("suggestions", "cost_model"))
def test_a_table_that_is_not_there(program: str, tmp_path: pathlib.Path) -> None:
    missing = repository.run(f"benchmarks/fit/{program}.py", str(tmp_path / "none.csv"))
    assert isinstance(missing, str) and "none.csv" in missing
