"""The benchmarks run on the CPU, with tiny sizes: their tables are whole, and errors are words."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

import pytest
import ranks
import repository

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None


def run(name: str, *arguments: str) -> str | int | None:
    return repository.run(f"benchmarks/pytorch/{name}.py", "--emulate", *arguments)


def table(text: str, first: str) -> dict[str, list[str]]:
    """The rows below the header that begins with `first`, by their first column."""
    lines = text.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.split()[:1] == [first])
    cells = [line.split() for line in lines[begin + 1 :]]
    return {row[0]: row[1:] for row in cells if row}


def positive(cells: list[str]) -> bool:
    return all(float(cell) > 0 for cell in cells)


def test_llama_blocks(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    names = ["rowwise-eager", "delayed", "delayed-fused", "torchao-rowwise-eager"]
    figures = tmp_path / "figures.json"
    traces = ("--profile", str(tmp_path / "traces"))
    assert not run("llama_blocks", "--variants", ",".join(names), "--json", str(figures), *traces)
    rows = table(capsys.readouterr().out, "variant")
    written = json.loads(figures.read_text())
    assert float(rows["bf16"][3]) == 1
    for name in ["bf16", *names]:
        if name.startswith("torchao") and not HAS_TORCHAO:
            assert rows[name] == ["torchao", "is", "not", "installed"]
            assert written["failures"] == {name: "torchao is not installed"}
        else:
            median, low, high, ratio, _first = map(float, rows[name])
            assert low <= median <= high and ratio > 0
            trace = json.loads((tmp_path / "traces" / f"{name}.json").read_text())
            assert any("float8" in event.get("name", "") for event in trace["traceEvents"]) == (
                name != "bf16"
            )
            assert len(written["ms"][name]) > 0 and written["first_step_s"][name] > 0


def test_llama_mlps(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["rowwise-keep-fused", "tensorwise-fused-norms-eager"]
    assert not run("llama_blocks", "--mlps", "--variants", ",".join(names))
    out = capsys.readouterr().out
    assert "MLPs of Llama-3-8B with norm and residual" in out
    rows = table(out, "variant")
    assert all(positive(rows[name][:4]) for name in names)


def test_eager_llama(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["rowwise-eager", "delayed-fused-norms-eager"]
    assert not run("eager_llama", "--variants", ",".join(names))
    rows = table(capsys.readouterr().out, "variant")
    assert list(rows) == ["bf16-eager", *names]
    assert all(positive(row[:4]) for row in rows.values()) and float(rows["bf16-eager"][3]) == 1


def test_lora(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["rowwise", "bf16-eager", "delayed-fused-norms-eager"]
    with pytest.warns(UserWarning, match="is no longer fused"):  # adapters are made behind
        assert not run("lora", "--variants", ",".join(["bf16", *names]))
    rows = table(capsys.readouterr().out, "variant")
    assert list(rows) == ["bf16", *names]
    assert all(positive(row[:4]) for row in rows.values())
    assert [float(rows[name][3]) for name in ("bf16", "bf16-eager")] == [1, 1]


def test_activation_casts(capsys: pytest.CaptureFixture[str]) -> None:
    assert not run("activation_casts", "--variants", "gelu-rowwise,relu2-blockwise")
    rows = table(capsys.readouterr().out, "us")
    assert list(rows) == ["gelu-rowwise", "relu2-blockwise"]
    assert all(len(cells) == 4 and positive(cells) for cells in rows.values())


def test_adamw(capsys: pytest.CaptureFixture[str]) -> None:
    assert not run("adamw", "--variants", "rowwise-f32,blockwise-bf16", "--blocks", "1")
    rows = table(capsys.readouterr().out, "ms")
    assert positive(rows["rowwise-f32"][:3]) and positive(rows["blockwise-bf16"][:3])


def test_small_mlp(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("rowwise", "rowwise-fused-norms")
    assert not run("small_mlp", "--variants", ",".join(names), "--norm", "rms")
    rows = table(capsys.readouterr().out, "128x128,")
    assert all(positive(rows[name]) for name in ("bf16", *names))


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))


@pytest.mark.usefixtures("one_rank")
def test_fsdp_step(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("rowwise-gather", "rowwise-gather-adamw")
    options = ("--variants", ",".join(names), "--blocks", "1", "--rounds", "2", "--steps", "1")
    assert not repository.run("benchmarks/distributed/fsdp_step.py", "--emulate", *options)
    rows = table(capsys.readouterr().out, "variant")
    assert all(positive(rows[name]) for name in ("bf16", *names))


@pytest.mark.usefixtures("one_rank")
def test_gather(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    options = ("--variants", "rowwise-gather", "--rounds", "1", "--profile", str(tmp_path))
    assert not repository.run("benchmarks/distributed/gather.py", "--emulate", *options)
    rows = table(capsys.readouterr().out, "weight")
    assert len(rows) == 1
    for name in ("bf16-q", "bf16-qt", "rowwise-gather-q", "rowwise-gather-qt"):
        assert json.loads((tmp_path / f"256x128-{name}.json").read_text())["traceEvents"]


def _run_on_ranks(program: str, *options: object) -> None:
    ranks.run_program(repository.ROOT / "benchmarks/distributed" / program, "--emulate", *options)


def test_gather_bytes(tmp_path: pathlib.Path) -> None:
    """Ours gather a byte an element, as torchao does under one recipe; its others gather two."""
    file = tmp_path / "bytes.json"
    _run_on_ranks("gather_bytes.py", "--json", file)
    found = json.loads(file.read_text())
    hp = {"forward": 2.0, "backward": 2.0, "scales": 0.0}
    q = {"forward": 1.0, "backward": 1.0, "scales": 0.0}
    rows = {**q, "scales": 4 / 256}  # a scale for a row of 256 elements
    blocks = {**q, "scales": (4 * 4 + 2 * 4) / (128 * 256)}  # of q, whose rows are of 4s, and of qt
    ours = {"tensorwise": q, "delayed": q, "rowwise": rows, "rowwise_with_gw_hp": rows}
    expected = {f"{name}-gather": each for name, each in {**ours, "blockwise": blocks}.items()}
    theirs = {f"torchao-{name}": hp for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp")}
    theirs["torchao-tensorwise-gather"] = q
    if HAS_TORCHAO:
        expected.update(theirs)
    else:
        assert found["failures"] == dict.fromkeys(theirs, "torchao is not installed")
    assert found["figures"] == {"bf16": hp, **expected}


LEAVING = """
import sys, torch, common
from torch import distributed
distributed.init_process_group("gloo")
busy = [distributed.all_reduce(torch.ones(2000), async_op=True) for _ in range(400)]
groups = list(distributed.distributed_c10d._world.pg_map)  # which FSDP keeps too
busy.clear()
common.leave_ranks("cpu", 0)
"""


def test_ranks_leave_while_gloo_holds_tensors(tmp_path: pathlib.Path) -> None:
    """A rank that ended as Python ends would be aborted by a thread of gloo."""
    script = tmp_path / "leaving.py"
    script.write_text(LEAVING)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    path = os.pathsep.join((str(repository.ROOT / "benchmarks/pytorch"), *filter(None, sys.path)))
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr


def test_wire(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "wire.csv"
    _run_on_ranks("wire.py", "--rounds", "1", "--largest", "8192", "--csv", file)
    rows = list(csv.DictReader(file.open()))
    kinds = {(row["collective"], row["dtype"]) for row in rows}
    assert kinds == {
        ("all_gather", "bfloat16"),
        ("all_gather", "uint8"),
        ("reduce_scatter", "bfloat16"),
        ("all_reduce", "float32"),
    }
    assert {(row["ranks"], row["hosts"]) for row in rows} == {("2", "1")}
    gathers = [row for row in rows if row["collective"] == "all_gather"]
    assert [int(row["bytes"]) for row in gathers] == [4096, 4096, 8192, 8192]
    assert all(float(row[time]) > 0 for row in rows for time in ("us", "low", "high"))


@pytest.mark.usefixtures("one_rank")
def test_tp_pair(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--variants", "rowwise,rowwise-async", "--rounds", "2", "--steps", "1")
    assert not repository.run("benchmarks/distributed/tp_pair.py", "--emulate", *options)
    rows = table(capsys.readouterr().out, "variant")
    assert all(positive(rows[name][:2]) for name in ("bf16", "rowwise", "rowwise-async"))


@pytest.mark.usefixtures("one_rank")
def test_expert_parallel(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--variants", "rowwise,rowwise-fp8", "--models", "qwen3", "--rounds", "1")
    program = "benchmarks/distributed/expert_parallel.py"
    assert not repository.run(program, "--emulate", *options, "--steps", "1", "--routing", "even")
    rows = table(capsys.readouterr().out, "layer")
    names = [f"qwen3-even-{name}" for name in ("bf16", "rowwise", "rowwise-fp8")]
    assert all(positive(rows[name]) for name in names)


def test_attention(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("sdpa-math", "float8", "fa3")
    options = ("--variants", ",".join(names), "--length", "256", "--masks", "causal,window50")
    assert not run("attention", *options)
    text = capsys.readouterr().out
    at, window = text.index("SQNR"), text.index("d128 window50")
    for times in (table(text[:window], "attention"), table(text[window:at], "attention")):
        assert positive(times["float8-forward"][:1] + times["float8-backward"][:1])
        assert times["fa3"][-2:] == ["not", "installed"]
    times = table(text[:window], "attention")
    assert positive(times["sdpa-math-forward"][:1] + times["sdpa-math-backward"][:1])
    assert "sdpa-math-forward" not in table(text[window:at], "attention")
    rows = table(text[text.index("SQNR") :], "SQNR")
    for data in ("normal", "outlier", "bias", "sharp"):
        assert all(float(cell) > 35 for cell in rows[f"{data}-sdpa-math"])
        assert all(15 < float(cell) < 45 for cell in rows[f"{data}-float8"])


def test_rows_of_attention_are_those_that_an_import_takes(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "rows.jsonl"
    variants = ("--variants", "float8,float8-fp8,sdpa-math")
    options = (*variants, "--length", "128", "--masks", "causal,window50")
    assert not run("attention", *options, "--jsonl", str(path))
    assert "float8-tune db import" in capsys.readouterr().out
    header, *records = [json.loads(line) for line in path.read_text().splitlines()]
    assert header == {"float8_tuning_db": 3}
    trials = [each for each in records if "trial" in each]
    assert [each["impl"] for each in trials] == ["bf16", "float8"] * 2, "windows have no key"
    for recipe, bf16, float8 in zip(("fp8_forward", "fp8"), trials[::2], trials[1::2], strict=True):
        assert float8["problem"] == bf16["problem"]
        assert float8["problem"] == f"attention/{recipe}/e4m3.e4m3.bf16/s128b1h4g2d128causal1"
        assert float8["pair_uuid"] == bf16["trial"]
        assert 0 < float8["pair_lo"] <= float8["pair_ratio"] <= float8["pair_hi"]
        of = {(each["data"], each["tensor"]): each["sqnr_db"] for each in float8["accuracy"]}
        assert len(of) == 16 and min(of.values()) > 15
    accuracies = [json.dumps(each["accuracy"]) for each in trials[1::2]]
    assert accuracies[0] != accuracies[1], "each has its recipe's"
    database = tmp_path / "rows.f8db"
    repository.float8_tune("db", "import", str(path), "--db", str(database))
    again = repository.float8_tune("db", "import", str(path), "--db", str(database))
    assert "0" in again
    repository.float8_tune("db", "check", "--db", str(database))


def test_attention_of_packed_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    variants = "float8,float8-bf16,sdpa-flash,sdpa-math"
    options = ("--variants", variants, "--length", "64", "--masks", "packed8")
    assert not run("attention", *options)
    times = table(capsys.readouterr().out, "attention")
    for name in ("float8", "float8-bf16", "sdpa-flash"):
        assert positive(times[f"{name}-forward"][:1] + times[f"{name}-backward"][:1])
    assert "sdpa-math-forward" not in times


def test_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert not run("memory", "--blocks", "1", "--variants", "rowwise-eager")
    rows = table(capsys.readouterr().out, "variant")
    assert positive(rows["bf16"]) and positive(rows["rowwise-eager"])


def test_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert not run("first_step", "--prepare", "--variants", "tensorwise-eager")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["tensorwise-eager", cache] for cache in ("cold", "warm")]
    assert all(float(cell) >= 0 for row in rows for cell in row[2:])


def test_linears(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    shapes, tuner = tmp_path / "shapes.csv", tmp_path / "tuner.csv"
    assert not run("linears", "--write-shapes", str(shapes))
    cells = shapes.read_text().split()[1:]
    tuner.write_text(f"m,n,k,recipe,speedup\n{cells[0]},rowwise,2\n{cells[1]},rowwise,\n")
    files = ("--shapes", str(shapes), "--tuner", str(tuner))
    assert not run("linears", "--variants", "rowwise,delayed", *files)
    text = capsys.readouterr().out
    rows = table(text, "M,N,K")
    for cell in cells:
        assert positive([c for c in rows[cell] if not c.startswith("(")])
    speedup, quotient = rows[cells[0]][1:3]
    assert float(quotient.strip("()")) == pytest.approx(float(speedup) / 2, abs=1e-3)
    summary = table(text, "variant")
    assert positive(summary["rowwise"][:1]) and summary["delayed"][-2:] == ["-", "-"]


def test_numerics(capsys: pytest.CaptureFixture[str]) -> None:
    assert not run("numerics", "--variants", "rowwise")
    text = capsys.readouterr().out
    if not HAS_TORCHAO:
        assert text == "torchao is not installed\n"
        return
    assert text.count(" same\n") == 12 and text.count(" no lower\n") == 6


def test_numerics_sees_another_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    import float8.torch as f8

    convert = f8.convert_to_float8_training

    def other(model: Any, *, config: f8.LinearConfig) -> Any:
        return convert(model, config=f8.LinearConfig(recipe="blockwise", emulate=config.emulate))

    monkeypatch.setattr(f8, "convert_to_float8_training", other)
    assert run("numerics", "--variants", "rowwise") == 1


def test_experts(capsys: pytest.CaptureFixture[str]) -> None:
    assert not run("experts", "--variants", "rowwise,blockwise")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {" ".join(line[:3]): line[3:] for line in lines if line[0] == "tiny"}
    assert list(rows) == [
        f"tiny {routing} {variant}"
        for routing in ("even", "zipf")
        for variant in ("bf16", "rowwise", "blockwise")
    ]
    assert all(len(row) == 3 and float(row[0]) > 0 for row in rows.values())


def test_host_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert not run("host_time", "--n", "64", "--k", "64")
    printed = capsys.readouterr().out
    assert printed.count("times nn.Linear") == printed.count("times bf16 experts") == 6


@pytest.mark.parametrize(
    "name", ("llama_blocks", "memory", "first_step", "linears", "numerics", "experts")
)
def test_unknown_variant(name: str) -> None:
    message = run(name, "--variants", "rowise")
    assert isinstance(message, str) and message.startswith("no variant 'rowise'; there are")


def test_a_variant_that_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import float8.torch as f8

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("not today\nor so")

    monkeypatch.setattr(f8, "convert_to_float8_training", fail)
    assert run("llama_blocks", "--variants", "rowwise") == 1
    rows = table(capsys.readouterr().out, "variant")
    assert rows["rowwise"] == ["ValueError:", "not", "today"] and len(rows["bf16"]) == 5
