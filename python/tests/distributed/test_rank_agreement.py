"""Ranks that agree: what differs on one of them is one error on all, before the first step.

Ranks are processes on the emulated device.
"""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest
import ranks
import torch
from parallel_models import shard
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import float8
import float8.torch as f8
from float8 import _library
from float8.torch.ranks import agreement, collectives

SAMPLE = pathlib.Path(__file__).parents[3] / "tests/unit/tuning_db/data/v1.jsonl"


def _model(recipe: Any = "rowwise", rows: int = 96, gather: bool = False, **options: Any) -> Any:
    model = nn.Sequential(nn.Linear(64, rows), nn.GELU(), nn.Linear(rows, 64))
    config = f8.LinearConfig(recipe, emulate=True, enable_fsdp_float8_all_gather=gather, **options)
    return f8.convert_to_float8_training(model, config=config)


def _tune(*arguments: str) -> None:
    code = "from float8._tune import main; main()"
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=1200)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tuning table that has more than the built-in one."""
    folder = tmp_path_factory.mktemp("table")
    _tune("db", "import", str(SAMPLE), "--db", str(folder / "db"))
    _tune("db", "export", "--db", str(folder / "db"), "--format", "table", "-o", f"{folder}/table")
    return str(folder / "table")


def _expect(words: str, rank: int, call: Any) -> None:
    with pytest.raises(f8.DistributedError) as caught:
        call()
    assert words in str(caught.value), caught.value
    assert caught.value.ranks == (rank,)


def _differing(mesh: Any, rank: int, world: int, table: str, bad: str) -> None:
    last = world - 1
    own = rank == last
    equal = _model()
    builtin = f8.agree(equal)
    recipe = _model("tensorwise" if own else "rowwise")
    _expect(
        f"rank {last} differs in layers: '0': it has [96, 64] tensorwise",
        last,
        lambda: f8.agree(recipe),
    )
    shape = _model(rows=112 if own else 96)
    _expect("it has [112, 64]", last, lambda: f8.agree(shape))
    overlapped = _model(async_tensor_parallel=own)
    _expect("async tensor parallelism", last, lambda: f8.agree(overlapped))
    missing = nn.ModuleList(_model() for _ in range(1 if own else 2))
    _expect("layers: '1.0': it has none", last, lambda: f8.agree(missing))
    for name, topic in (("_version", "version"), ("_build", "build"), ("_device_class", "device")):
        with pytest.MonkeyPatch.context() as patch:
            if own:
                patch.setattr(agreement, name, lambda *_: "another")
            _expect(f"rank {last} differs in {topic}: it has ", last, lambda: f8.agree(equal))
    # The first rank's file counts, whatever the others have, and they load its contents.
    with pytest.raises(f8.DistributedError, match="No such file"):
        f8.agree(equal, table="/nowhere")
    with pytest.raises(f8.DistributedError, match="the given file: not a float8 tuning table"):
        f8.agree(equal, table=bad)
    assert f8.agree(equal) == builtin
    loaded = f8.agree(equal, table=table if rank == 0 else None)
    assert loaded != builtin
    assert agreement.table_hash(-1) == loaded
    assert f8.agree(equal, group=distributed.new_group(list(range(world)))) == loaded
    # A table that is in use already does not change what was planned.
    _model()(torch.randn(4, 64))
    assert f8.agree(equal, table=table) == loaded
    state = _model("delayed", history=8 if own else 16)
    words = f"a scale state of 2 linears of recipe delayed, history {8 if own else 16}, margin 0"
    with pytest.raises(f8.DistributedError) as caught:
        f8.agree(state)
    assert words in str(caught.value), caught.value
    # Options are in words, and those of a recipe of one's own too.
    options = _model("rowwise", saturate=own, recompute=True if own else None)
    _expect(
        "it has [96, 64] rowwise in float32, emulate, saturate, recompute=True",
        last,
        lambda: f8.agree(options),
    )
    off = float8.Cast(pow2=own)
    custom = _model(float8.Recipe(output=float8.Gemm(off, off)))
    _expect(
        "custom (output: dynamic tensor e4m3 pow2 by dynamic tensor e4m3 pow2;",
        last,
        lambda: f8.agree(custom),
    )


def test_what_differs_is_one_error_on_all_ranks(table: str, tmp_path: Any) -> None:
    bad = tmp_path / "bad"
    bad.write_text("junk\n")
    ranks.spawn(_differing, 3, tmp_path, table, str(bad))


def _other_code(mesh: Any, rank: int, world: int, folders: dict[str, str]) -> list[str]:
    """Rank 1 has its package in one folder after the other; returns its hashes."""
    model = _model()
    hashes = []
    for name, folder in folders.items():
        agreement._build.cache_clear()
        if rank == 1:
            _library.__file__ = f"{folder}/_library.py"
        hashes.append(agreement._build())
        if name == "copy":
            f8.agree(model)
        else:
            _expect("rank 1 differs in build: it has ", 1, lambda: f8.agree(model))
    return hashes


def test_a_change_of_any_file_of_the_package_is_told(tmp_path: Any) -> None:
    package = pathlib.Path(_library.__file__).parent
    names = ("copy", "filter.py", "torch/convert.py", "torch/ranks/collectives.py")
    names += ("torchao/config.py", "adapters/modules.py", "torch/ranks/added.py")
    folders = {}
    for i, name in enumerate(names):
        folder = tmp_path / str(i)
        # The libraries, which are large, are links.
        shutil.copytree(package, folder, ignore=shutil.ignore_patterns("*.so*", "bin"))
        for library in package.rglob("*.so*"):
            (folder / library.relative_to(package)).parent.mkdir(exist_ok=True)
            (folder / library.relative_to(package)).symlink_to(library)
        if name != "copy":
            with (folder / name).open("a") as file:
                file.write("# changed\n")
        folders[name] = str(folder)
    own, other = ranks.spawn(_other_code, 2, tmp_path, folders)
    assert len(set(own)) == 1
    assert other[0] == own[0] and len(set(other)) == len(names)


def _planned(mesh: Any, rank: int, world: int, table: str) -> None:
    model = _model()
    if rank == 1:
        model(torch.randn(4, 64))
    _expect(
        "rank 1 differs in plans: it has 2 linears that were planned",
        1,
        lambda: f8.agree(model, table=table),
    )


def test_a_table_comes_before_the_first_step(table: str, tmp_path: Any) -> None:
    ranks.spawn(_planned, 3, tmp_path, table)


def _alone(mesh: Any, rank: int, world: int, table: str) -> None:
    distributed.destroy_process_group()
    equal = _model()
    before = f8.agree(equal)
    assert f8.agree(equal, table=table) != before
    with pytest.raises(ValueError, match=r"table: .*No such file"):
        f8.agree(equal, table="/nowhere")


def test_without_process_groups_it_loads_the_table(table: str, tmp_path: Any) -> None:
    ranks.spawn(_alone, 1, tmp_path, table)


def _first_gather(mesh: Any, rank: int, world: int, what: str) -> None:
    own = rank == 1
    x = torch.randn(8, 64)
    if what == "recipe":
        model = shard(_model("rowwise_with_gw_hp" if own else "rowwise", gather=True), mesh)
        _expect("it has [96, 64] rowwise_with_gw_hp", 1, lambda: model(x))
    elif what == "shape":
        model = shard(_model(rows=128 if own else 96, gather=True), mesh)
        _expect("it has [128, 64] rowwise", 1, lambda: model(x))
        _expect(
            "it has [128, 64] rowwise",
            1,
            lambda: f8.precompute_float8_dynamic_scale_for_fsdp(model),
        )
    elif what == "shard":
        model = shard(_model(gather=True), mesh)
        if own:
            local = model[2].weight._local_tensor
            model[2].weight._local_tensor = local[:8]
        call = lambda: f8.precompute_float8_dynamic_scale_for_fsdp(model)  # noqa: E731
        _expect(f"and a shard of [8, 96] in the place of [{64 // world}, 96]", 1, call)
    else:
        model = shard(_model("delayed", history=4 if own else 8), mesh)
        model(x).sum().backward()
        words = "rank 1 differs in scales: it has 2 linears of recipe delayed, history 4, margin 0"
        _expect(words, 1, lambda: f8.sync_float8_amax_and_scale_history(model))
        stage: Any = nn.Sequential(nn.Identity(), *_model()[:1]) if own else _model()[:1]
        f8.convert_to_float8_training(stage, config=f8.LinearConfig("delayed", emulate=True))
        stage(x).sum().backward()
        words = "the first of them '1', and rank 0 has 1 linears"
        _expect(words, 1, lambda: f8.sync_float8_amax_and_scale_history(stage))


@pytest.mark.parametrize("what", ("recipe", "shape", "shard", "scales"))
def test_the_first_gather_compares(what: str, tmp_path: Any) -> None:
    ranks.spawn(_first_gather, 4 if what == "shard" else 3, tmp_path, what)


def _gathers(mesh: Any, rank: int, world: int) -> None:
    """Counts the comparisons of a training: one a weight, and none after the first step."""
    counted: list[tuple[int, bool]] = []
    original = agreement.compare

    def compare(facts: Any, group: Any) -> None:
        counted.append((len(facts["layers"]), "build" in facts))
        original(facts, group)

    agreement.compare = compare
    for _ in range(2):
        model = fully_shard(_model(gather=True), mesh=mesh)
        for _ in range(2):
            f8.precompute_float8_dynamic_scale_for_fsdp(model)
            model(torch.randn(8, 64)).sum().backward()
    # The first one of a group also compares the package.
    assert counted == [(2, True), (2, False)]
    assert collectives.progress.count > 4


def test_weights_are_compared_once(tmp_path: Any) -> None:
    ranks.spawn(_gathers, 2, tmp_path)


def _tensor_parallel(mesh: Any, rank: int, world: int) -> None:
    """Without a call of `agree`: our styles compare when they are applied, all in the first forward."""
    last = world - 1
    own = rank == last
    x = torch.randn(6, 64)
    ours = {"0": f8.Float8ColwiseParallel(), "2": f8.Float8RowwiseParallel()}
    plain = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    start = f"rank {last} differs in layers: '0': it has "
    models: tuple[tuple[dict[str, Any], str], ...] = (
        ({"recipe": "tensorwise" if own else "rowwise"}, f"{start}[96, 64] tensorwise in float32"),
        ({"rows": 144 if own else 96}, f"{start}[144, 64] rowwise in float32"),
        (
            {"async_tensor_parallel": own},
            "emulate, recompute=False, bias, async tensor parallelism, ",
        ),
    )
    for options, words in models:
        model = _model(**options)
        _expect(words, last, lambda: parallelize_module(model, mesh, ours))  # noqa: B023
        # PyTorch's styles would not get through a scatter of unlike shapes.
        model = parallelize_module(_model(**options), mesh, plain, src_data_rank=None)
        _expect(words, last, lambda: model(x))  # noqa: B023
    layouts = {"0": f8.Float8ColwiseParallel(input_layouts=Shard(0) if own else Replicate())}
    words = "Float8ColwiseParallel of (Shard(dim=0),) to (Shard(dim=-1),)"
    model = _model()
    _expect(words, last, lambda: parallelize_module(model, mesh, layouts))
    # The first forward compares changes made behind the styles, and the x of a layer.
    model = parallelize_module(_model(), mesh, ours)
    model[2].async_tensor_parallel = own
    words = f"rank {last} differs in layers: '2': it has [64, 96] rowwise in float32"
    _expect(words, last, lambda: model(x))
    model = parallelize_module(_model(), mesh, ours)
    model[2].weight.requires_grad_(not own)
    _expect("y by dimension None, frozen", last, lambda: model(x))
    model = parallelize_module(_model(), mesh, ours)
    words = f"rank {last} differs in inputs: '0': it has [3, 64] in torch.float32, (Replicate(),)"
    _expect(words, last, lambda: model(x[:3] if own else x))
    model(x).sum().backward()


def test_tensor_parallelism_compares(tmp_path: Any) -> None:
    ranks.spawn(_tensor_parallel, 3, tmp_path)


def _tensor_parallel_calls(mesh: Any, rank: int, world: int) -> None:
    """Counts the comparisons: one a layer by a style, and one in its first forward."""
    counted: list[tuple[Any, ...]] = []
    original = agreement.compare

    def compare(facts: Any, group: Any) -> None:
        counted.append((*facts["layers"], "inputs" in facts, "build" in facts))
        original(facts, group)

    agreement.compare = compare
    x = torch.randn(6, 64)
    plan = {"0": f8.Float8ColwiseParallel(), "2": f8.Float8RowwiseParallel()}
    styles = [("0", False, True), ("2", False, False)]
    model = parallelize_module(_model(), mesh, plan)
    assert counted == styles  # the first one of a group also compares the package
    for _ in range(2):
        model(x).sum().backward()
    assert counted == [*styles, ("0", True, False), ("2", True, False)]
    counted.clear()
    parallelize_module(_model(), mesh, plan)(x)
    assert len(counted) == 4
    with FakeTensorMode():
        parallelize_module(_model(), mesh, plan, src_data_rank=None)
    assert len(counted) == 4


def test_tensor_parallelism_compares_once(tmp_path: Any) -> None:
    ranks.spawn(_tensor_parallel_calls, 2, tmp_path)


def test_most_ranks_are_right() -> None:
    facts = [{"build": "a"}, {"build": "b"}, {"build": "b"}, {"build": "c"}]
    differing, words = agreement.difference([4, 5, 6, 7], facts)
    assert differing == [4, 7]
    assert re.search(r"rank 4 .*\[7\].* build: it has a, and rank 5 has b", words)
