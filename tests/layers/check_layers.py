#!/usr/bin/env python3
"""The walls of the house: which folder may include what, and what no file may name.

    check_layers.py ROOT          every finding as FILE:LINE: what; exit 1 where there is one
    check_layers.py --self-test   plants a violation of each rule in an empty tree and looks for it

    base <- recipes <- codegen <- runtime      recipes <- tuning_db/estimate <- runtime, tuning_db
    all <- tools                               base <- tuning_db/json <- tuning_db, tools
    runtime <- python

Inside runtime/ the rooms have one direction too:

    device <- emulation      device <- gemm, quantize <- linear <- lists <- model
    quantize <- norm
    linear <- experts <- moe
    linear <- optimizer
    all <- c_abi

and so have the rooms of these folders, where `.` stands for the files that lie in the folder itself:

    recipes             . <- scales <- reference      . <- model
    runtime/linear      plan <- tensors <- .
    tools/tuner         . <- model_files      . <- backend <- measure <- worker <- search <- fit, gpus
    tools/tuner/backend . <- gpu
    tools/tuner/search  . <- plan <- sweep, bench
    python/shim         base <- plans <- scales <- casts <- linear <- experts <- .

python_imports.py has those of the Python package.

A path in quotes is the project's, from the root (device templates and tests may also name a file
beside them, and an example names its own files as it finds them); angle brackets are the system's.
"""
import pathlib
import re
import sys
import tempfile

import python_imports

MAY_INCLUDE = {
    "base": {"base"},
    "recipes": {"base", "recipes"},
    "codegen": {"base", "recipes", "codegen"},
    # A trainer has no part of the tuning database but the estimator: plain data, no SQLite.
    "runtime": {"base", "recipes", "codegen", "tuning_db/estimate", "runtime"},
    "tuning_db": {"base", "recipes", "tuning_db"},
    "tuning_db/estimate": {"base", "recipes", "tuning_db/estimate"},
    "tuning_db/json": {"base", "tuning_db/json"},
    "tools": {"base", "recipes", "codegen", "runtime", "tuning_db", "tools"},
    "tools/tuner/model_files": {"base", "recipes", "tuning_db/json", "tools"},
    "tests": {"base", "recipes", "codegen", "runtime", "tuning_db", "tools", "tests", "examples"},
    "benchmarks": {"base", "recipes", "codegen", "runtime", "benchmarks"},
    "python": {"python"},  # the shim: the public header, and PyTorch's stable ABI
    "examples": set(),  # the public headers alone: EXAMPLE, below
}
# The rooms of a folder, from the bottom up: which of its rooms each may include.
ROOMS = {
    "recipes": {"recipes"},
    "recipes/scales": {"recipes", "scales"},
    "recipes/reference": {"recipes", "scales", "reference"},
    "recipes/model": {"recipes", "model"},
    "runtime/device": {"device"},
    "runtime/emulation": {"device", "emulation"},
    "runtime/gemm": {"device", "emulation", "gemm"},  # emulation: what stands for cuBLASLt there
    "runtime/quantize": {"device", "quantize"},
    "runtime/linear": {"device", "gemm", "quantize", "linear", "plan", "tensors"},
    "runtime/linear/plan": {"plan"},
    "runtime/linear/tensors": {"plan", "tensors"},
    "runtime/attention": {"device", "emulation", "attention"},
    "runtime/norm": {"device", "quantize", "norm"},
    "runtime/optimizer": {"device", "gemm", "quantize", "linear", "optimizer"},
    "runtime/lists": {"device", "gemm", "quantize", "linear", "lists"},
    "runtime/experts": {"device", "gemm", "quantize", "linear", "experts"},
    "runtime/moe": {"device", "gemm", "quantize", "linear", "experts", "moe"},
    "runtime/model": {"device", "gemm", "quantize", "linear", "lists", "model"},
    "runtime/distributed": {"device", "emulation", "distributed"},
    "runtime/c_abi": {
        "device", "gemm", "quantize", "linear", "lists", "experts", "moe", "attention", "norm", "optimizer",
        "model", "distributed", "c_abi"
    },
    "tools/tuner": {"tuner"},
    "tools/tuner/model_files": {"tuner", "model_files"},
    "tools/tuner/backend": {"tuner", "backend"},
    "tools/tuner/backend/gpu": {"backend", "gpu"},
    "tools/tuner/measure": {"tuner", "backend", "measure"},
    "tools/tuner/worker": {"tuner", "backend", "measure", "worker"},
    "tools/tuner/search": {"tuner", "backend", "measure", "worker", "search"},
    "tools/tuner/search/plan": {"search", "plan"},
    "tools/tuner/search/sweep": {"search", "plan", "sweep"},
    "tools/tuner/search/bench": {"search", "plan", "bench"},
    "tools/tuner/fit": {"tuner", "backend", "measure", "worker", "search", "fit"},
    "tools/tuner/gpus": {"tuner", "backend", "measure", "worker", "search", "gpus"},
    "python/shim/base": {"base"},
    "python/shim/plans": {"base", "plans"},
    "python/shim/scales": {"base", "plans", "scales"},
    "python/shim/casts": {"base", "plans", "scales", "casts"},
    "python/shim/linear": {"base", "plans", "scales", "casts", "linear"},
    "python/shim/experts": {"base", "plans", "scales", "casts", "linear", "experts"},
    "python/shim": {"base", "plans", "scales", "casts", "linear", "experts", "shim"},
}
HAS_ROOMS = {"recipes", "runtime", "runtime/linear", "tools/tuner", "tools/tuner/backend", "tools/tuner/search",
             "python/shim"}
CUDA = re.compile(r"(cuda|cublas|nvrtc|nccl|nvml|nvtx|driver_types|vector_types|crt/)")
SYSTEM_WALLS = [
    # folders, the headers they may not include, why
    ({"base", "recipes", "tuning_db", "tuning_db/estimate", "tuning_db/json",
      "tools/tuner/model_files"}, CUDA,
     "knows nothing of CUDA"),
    ({"base", "recipes", "codegen", "runtime", "tuning_db/estimate", "tuning_db/json"},
     re.compile(r"sqlite3\.h"),
     "knows nothing of SQLite"),
    ({"base", "recipes", "codegen", "runtime", "tuning_db", "tuning_db/estimate",
      "tuning_db/json"}, re.compile(r"CLI/"), "knows nothing of the command line"),
    ({"base", "recipes", "codegen", "runtime", "tuning_db/estimate"}, re.compile(r"nlohmann/"),
     "a trainer does not link JSON"),
]
# The public headers and the device templates stand on their own.
STANDALONE = [
    (re.compile(r"runtime/include/float8/[^/]+$"),
     re.compile(r"float8/[a-z0-9_]+\.h(pp)?$|[a-z_]+$|std[a-z]+\.h$"),
     "a public header includes the standard library and other public headers alone"),
    (re.compile(r"codegen/kernels/.+$"), re.compile(r"codegen/kernels/([a-z]+/)?[a-z0-9_]+\.cuh$"),
     "a device template includes its neighbours alone; NVRTC sees no header"),
]
PUBLIC = re.compile(r"float8/[a-z0-9_]+\.h(pp)?$")
# A first program reads float8/linear.h and what it includes, so each public header is short.
PUBLIC_LINES = 200
# An example is what the author of a trainer copies: it has no header of the project but the public
# ones, and no library but those that every trainer has.
EXAMPLE = {
    "<": re.compile(r"(float8/[a-z0-9_]+\.h(pp)?|[a-z_]+|(dlfcn|math|stdio|stdlib|string)\.h|(cuda|nvrtc|nccl|mpi)[a-z_]*\.h|CLI/.*)$"),
    '"': re.compile(r"(float8/[a-z0-9_]+\.h(pp)?|(?!float8/)([a-z0-9_]+/){0,2}[a-z0-9_]+\.[a-z]+)$"),
}
SOURCE = {".cpp", ".hpp", ".c", ".h", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')

# Written in pieces, so that this file does not name them either.
NAMED_NOWHERE = [
    (re.compile(r"(?<![\w.~$})*])/(?:wo" + r"rk|ro" + r"ot)(?![\w.-])"),
     "a path of one machine"),
    (re.compile("|".join(a + r"\." + b for a, b in (
        ("py" + "pi", "org"), ("python" + "hosted", "org"), ("deb\\.deb" + "ian", "org"),
        ("archive\\.ubu" + "ntu", "com"), ("developer\\.download\\.nvi" + "dia", "com")))),
     "the host of a registry"),
]
# A direct call compiles all of fmt's formatting into its file, which takes 3 s.
DIRECT_FMT = re.compile(r"\bfmt::(v?format|print|format_to)\(")
# These allocate inside of functions that are noexcept: where memory is short, the process ends.
FOLDER_ITERATOR = re.compile(r"\bdirectory_iterator\b|\brecursive_directory_iterator\b")
FOLDERS = sorted(f for f in MAY_INCLUDE if "/" not in f) + ["cmake", "docs", "scripts", ".ci"]


def folder_of(path):
    """The most special folder of MAY_INCLUDE that the path lies in; None where there is none."""
    return max((f for f in MAY_INCLUDE if path.startswith(f + "/")), key=len, default=None)


def include_findings(path, number, quote, target):
    """Why the file at `path` (from the root) may not include `target`."""
    folder = folder_of(path)
    for files, allowed, why in STANDALONE:
        if files.match(path):
            if not allowed.match(target):
                yield f"{path}:{number}: includes {target}: {why}"
            return
    if folder == "examples":
        if not EXAMPLE[quote].match(target) or target.split("/")[0] in MAY_INCLUDE:
            yield (f"{path}:{number}: includes {target}: an example may include "
                   "the public headers, its own files, the standard library, CUDA, NCCL, MPI and CLI11")
        return
    for folders, headers, why in SYSTEM_WALLS:
        if folder in folders and headers.match(target):
            yield f"{path}:{number}: includes {target}: {folder} {why}"
    if quote == "<" or PUBLIC.match(target):
        return
    if folder == "tests" and "/" not in target:
        return
    there = folder_of(target)
    if there is None:
        yield f"{path}:{number}: includes \"{target}\": name it from the root, as \"{folder}/...\""
    elif not MAY_INCLUDE[folder] & {there, there.split("/")[0]}:
        allowed = ", ".join(sorted(MAY_INCLUDE[folder]))
        yield f"{path}:{number}: includes {target}: {folder} may include {allowed}"
    else:
        yield from room_findings(path, number, target)


def room_findings(path, number, target):
    """Why a file of one room may not include `target` of another room of the same folder."""
    for folder in HAS_ROOMS:
        if not (path.startswith(folder + "/") and target.startswith(folder + "/")):
            continue
        depth = folder.count("/") + 2
        room, there = ("/".join(name.split("/")[:-1][:depth]) for name in (path, target))
        if room not in ROOMS:
            yield f"{path}:{number}: {room} is no room of this folder: {', '.join(sorted(ROOMS))}"
        elif there.split("/")[-1] not in ROOMS[room]:
            allowed = ", ".join(sorted(ROOMS[room]))
            yield f"{path}:{number}: includes {target}: {room} may include {allowed}"


def check(root):
    """All findings under `root`, and how many files were read."""
    findings, count, of_python = [], 0, {}
    files = [p for p in root.iterdir() if p.is_file() and p.name != ".git"]  # a worktree has one
    for folder in FOLDERS:
        files += [p for p in (root / folder).rglob("*") if p.is_file()]
    for file in sorted(files):
        path = file.relative_to(root).as_posix()
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        count += 1
        if path.startswith("python/float8/") and file.suffix == ".py":
            of_python[path] = "\n".join(lines)
        if STANDALONE[0][0].match(path) and len(lines) > PUBLIC_LINES:
            findings.append(f"{path}:1: has {len(lines)} lines: a public header has at most {PUBLIC_LINES}")
        is_source = file.suffix in SOURCE and path.split("/")[0] in MAY_INCLUDE
        is_device_text = path.startswith("tests/golden/")
        for number, line in enumerate(lines, 1):
            include = INCLUDE.match(line) if is_source and not is_device_text else None
            if include:
                findings += include_findings(path, number, *include.groups())
            if (is_source and DIRECT_FMT.search(line)
                    and not path.startswith(("base/format.", "examples/"))):
                findings.append(f"{path}:{number}: calls fmt itself: use f8::format or f8::print")
            if (is_source and FOLDER_ITERATOR.search(line)
                    and not path.startswith(("tests/", "benchmarks/", "examples/"))):
                findings.append(f"{path}:{number}: ends the process without memory: use FolderNames of "
                                "base/folder.hpp, or readdir")
            for pattern, what in NAMED_NOWHERE:
                if found := pattern.search(line):
                    findings.append(f"{path}:{number}: names {what}: {found.group().strip()}")
    return findings + list(python_imports.findings(of_python)), count


def self_test():
    clean = {
        "base/a.cpp": '#include "base/a.hpp"\n#include <fmt/format.h>\n',
        "runtime/gemm/a.cpp": '#include <cuda.h>\n#include "codegen/emit.hpp"\n',
        "recipes/reference/a.cpp": '#include "recipes/scales/scale.hpp"\n#include "recipes/dtype.hpp"\n',
        "runtime/linear/a.cpp": '#include "runtime/gemm/gemm.hpp"\n#include "runtime/linear/plan/a.hpp"\n',
        "runtime/linear/plan/a.cpp": '#include "runtime/gemm/gemm.hpp"\n',
        "runtime/experts/a.cpp": '#include "runtime/linear/plan/a.hpp"\n',
        "python/shim/a.cpp": '#include "python/shim/experts/a.hpp"\n#include "python/shim/a.hpp"\n',
        "runtime/include/float8/float8.hpp": '#include <expected>\n#include "float8/float8.h"\n',
        "codegen/kernels/cast/a.cuh": '#include "codegen/kernels/ptx.cuh"\n',
        "runtime/model/a.cpp": '#include "tuning_db/estimate/filter.hpp"\n',
        "tuning_db/a.cpp": '#include <sqlite3.h>\n#include "tuning_db/estimate/filter.hpp"\n',
        "tuning_db/estimate/a.cpp": '#include "recipes/recipe.hpp"\n',
        "tools/a/b.cpp": '#include <CLI/CLI.hpp>\n#include "tuning_db/database.hpp"\n',
        "tools/tuner/search/a.cpp": '#include "tools/tuner/worker/a.hpp"\n',
        "tools/tuner/search/sweep/a.cpp": '#include "tools/tuner/search/plan/a.hpp"\n'
                                          '#include "tools/tuner/worker/a.hpp"\n',
        "tools/tuner/backend/a.cpp": '#include "tools/tuner/statistics.hpp"\n',
        "tests/unit/a.cpp": '#include "a_sample.hpp"\n#include "tools/a/b.hpp"\n',
        "examples/a/b.cpp": '#include <vector>\n#include <float8/float8.hpp>\n#include "b.hpp"\n'
                            '#include <CLI/CLI.hpp>\n#include <cuda.h>\n#include "kernels/b.cuh"\n'
                            '#include <mpi.h>\n#include <nccl.h>\n',
        "python/float8/recipes.py": "import enum\n",
        "python/float8/torchao/config.py": "from float8.torch.layer.a import a\n",
        "python/float8/torch/__init__.py": "from float8.torch.layer.a import a\n",
        "python/float8/torch/_ops.py": "from float8 import recipes\n",
        "python/float8/torch/shard/a.py": "from float8.torch import _ops\n",
        "python/float8/torch/layer/a.py": "from float8.torch.shard import a\n",
        "python/float8/torch/layer/b.py": "from float8.torch.layer.a import a\n",
        "docs/a.md": "the work/root of $HOME/work and .../work\n",
    }
    planted = [
        ("base/x.hpp", '#include "recipes/dtype.hpp"\n'),
        ("recipes/x.cpp", '#include "codegen/emit.hpp"\n'),
        ("recipes/x.cpp", "#include <cuda_runtime.h>\n"),
        ("recipes/x.cpp", '#include "recipes/scales/scale.hpp"\n'),
        ("recipes/scales/x.cpp", '#include "recipes/reference/reference.hpp"\n'),
        ("recipes/reference/x.cpp", '#include "recipes/model/filter_rule.hpp"\n'),
        ("recipes/model/x.cpp", '#include "recipes/scales/scale.hpp"\n'),
        ("recipes/other/x.cpp", '#include "recipes/dtype.hpp"\n'),
        ("codegen/x.cpp", '#  include "runtime/gemm/gemm.hpp"\n'),
        ("codegen/x.cpp", '#include "tuning_db/filter.hpp"\n'),
        ("codegen/kernels/x.cuh", "#include <cuda_fp8.h>\n"),
        ("runtime/model/x.cpp", "#include <sqlite3.h>\n"),
        ("runtime/model/x.cpp", "#include <nlohmann/json.hpp>\n"),
        ("runtime/x.cpp", '#include "runtime/device/driver.hpp"\n'),
        ("runtime/device/x.hpp", '#include "runtime/gemm/gemm.hpp"\n'),
        ("runtime/quantize/x.cpp", '#include "runtime/gemm/gemm.hpp"\n'),
        ("runtime/linear/x.cpp", '#include "runtime/model/info.hpp"\n'),
        ("runtime/linear/x.cpp", '#include "runtime/lists/quantizer_list.hpp"\n'),
        ("runtime/linear/x.cpp", '#include "runtime/experts/group_layout.hpp"\n'),
        ("runtime/linear/plan/x.cpp", '#include "runtime/linear/tensors/fp8_tensor.hpp"\n'),
        ("runtime/linear/plan/x.cpp", '#include "runtime/linear/linear.hpp"\n'),
        ("runtime/linear/plan/x.cpp", '#include "runtime/lists/quantizer_list.hpp"\n'),
        ("runtime/linear/tensors/x.cpp", '#include "runtime/linear/state.hpp"\n'),
        ("runtime/experts/x.cpp", '#include "runtime/moe/moe.hpp"\n'),
        ("runtime/include/float8/x.h", "#include <cuda.h>\n"),
        ("runtime/include/float8/x.hpp", '#include "base/error.hpp"\n'),
        ("runtime/include/float8/x.h", "\n" * (PUBLIC_LINES + 1)),
        ("runtime/device/x.cpp", '#include "tuning_db/database.hpp"\n'),
        ("codegen/x.cpp", '#include "tuning_db/estimate/tuning_table.hpp"\n'),
        ("tuning_db/x.cpp", "#include <nccl.h>\n"),
        ("tuning_db/estimate/x.cpp", "#include <sqlite3.h>\n"),
        ("tuning_db/estimate/x.cpp", "#include <nlohmann/json.hpp>\n"),
        ("tuning_db/estimate/x.hpp", "#include <cuda.h>\n"),
        ("tuning_db/estimate/x.cpp", '#include "tuning_db/database.hpp"\n'),
        ("tuning_db/estimate/x.cpp", '#include "runtime/linear/linear.hpp"\n'),
        ("tuning_db/x.cpp", '#include "runtime/linear/linear.hpp"\n'),
        ("tools/x.cpp", '#include "detail.hpp"\n'),
        ("tools/tuner/x.cpp", '#include "tools/tuner/backend/x.hpp"\n'),
        ("tools/tuner/other/x.cpp", '#include "tools/tuner/backend/x.hpp"\n'),
        ("tools/tuner/backend/x.cpp", '#include "tools/tuner/measure/x.hpp"\n'),
        ("tools/tuner/measure/x.cpp", '#include "tools/tuner/worker/x.hpp"\n'),
        ("tools/tuner/worker/x.cpp", '#include "tools/tuner/search/x.hpp"\n'),
        ("tools/tuner/search/x.cpp", '#include "tools/tuner/fit/x.hpp"\n'),
        ("tools/tuner/search/x.cpp", '#include "tools/tuner/search/plan/x.hpp"\n'),
        ("tools/tuner/search/plan/x.cpp", '#include "tools/tuner/search/sweep/x.hpp"\n'),
        ("tools/tuner/search/bench/x.cpp", '#include "tools/tuner/search/sweep/x.hpp"\n'),
        ("tools/tuner/model_files/x.cpp", '#include "tools/tuner/backend/x.hpp"\n'),
        ("tools/tuner/model_files/x.cpp", '#include "runtime/gemm/gemm.hpp"\n'),
        ("tools/tuner/model_files/x.cpp", "#include <cuda.h>\n"),
        ("examples/a/x.cpp", '#include "base/file.hpp"\n'),
        ("examples/a/x.cpp", '#include "runtime/driver.hpp"\n'),
        ("examples/a/x.hpp", '#include "tuning_db/database.hpp"\n'),
        ("examples/a/x.cpp", '#include "examples/b/x.hpp"\n'),
        ("examples/a/x.cpp", '#include "../../base/file.hpp"\n'),
        ("examples/a/x.cpp", "#include <float8/detail/x.hpp>\n"),
        ("examples/a/x.cpp", '#include "float8/detail/x.hpp"\n'),
        ("examples/a/x.cpp", "#include <fmt/format.h>\n"),
        ("examples/a/x.cpp", "#include <sqlite3.h>\n"),
        ("examples/a/kernels/x.cuh", '#include "codegen/kernels/ptx.cuh"\n'),
        ("recipes/x.cpp", 'auto text = fmt::format("{}", 1);\n'),
        ("python/shim/x.cpp", "for (const auto& e : std::filesystem::directory_iterator(folder)) {\n"),
        ("python/shim/base/x.cpp", '#include "python/shim/plans/plans.hpp"\n'),
        ("python/shim/plans/x.cpp", '#include "python/shim/scales/scales.hpp"\n'),
        ("python/shim/scales/x.cpp", '#include "python/shim/casts/casts.hpp"\n'),
        ("python/shim/casts/x.cpp", '#include "python/shim/linear/gemm.hpp"\n'),
        ("python/shim/linear/x.cpp", '#include "python/shim/experts/experts.hpp"\n'),
        ("python/shim/experts/x.cpp", '#include "python/shim/optimizer.hpp"\n'),
        ("python/float8/filter.py", "import float8.torch._ops\n"),
        ("python/float8/filter.py", "from float8.torchao import config\n"),
        ("python/float8/torch/notices.py", "from float8.torch.shard.a import a\n"),
        ("python/float8/torch/shard/b.py", "from float8.torch.layer.a import a\n"),
        ("python/float8/torch/checks/x.py", "def f(): from float8.torch import _ops\n"),
        ("python/float8/torch/other/x.py", "from float8.torch import _ops\n"),
        ("python/float8/torch/layer/a.py", "from float8.torch.layer import b\n"),
        ("scripts/x", "cd /" + "work/main\n"),
        ("README.md", "fetched from py" + "pi.org\n"),
    ]
    failures = []

    def findings_of(files):
        with tempfile.TemporaryDirectory() as name:
            for path, text in files.items():
                file = pathlib.Path(name) / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
            return check(pathlib.Path(name))[0]

    if found := findings_of(clean):
        failures.append(f"a clean tree has findings: {found}")
    for path, text in planted:
        found = findings_of({**clean, path: text})
        if len(found) != 1 or not found[0].startswith(path + ":1:"):
            failures.append(f"planted {text.strip()!r} in {path}, found {found}")
    return failures, len(planted)


def main(arguments):
    if arguments == ["--self-test"]:
        findings, count = self_test()
        what = "planted violations"
    elif len(arguments) == 1:
        findings, count = check(pathlib.Path(arguments[0]))
        what = "files"
        if count < 50:
            findings.append(f"only {count} files under {arguments[0]}: is it the root of the tree?")
    else:
        print(__doc__, file=sys.stderr)
        return 2
    for finding in findings:
        print(finding)
    print(f"{count} {what}, {len(findings)} findings")
    return 1 if findings else 0


sys.exit(main(sys.argv[1:]))
