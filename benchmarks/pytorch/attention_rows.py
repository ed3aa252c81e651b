"""Rows of attention for a tuning database, as `float8-tune db import` takes them.

A row is of a shape's forward and backward together: float8's under a recipe, with all casts, and that of each attention in
bf16 that was timed in the same rounds. float8's row has its speedup over the fastest of these, with the interval of its
median over the rounds, and its accuracy. These rows decide for attention, as those of `float8-tune sweep --attention` do, which
have cuDNN's attention in bf16 alone beside float8's.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import float8

FORMAT = 3  # of an export
NS = 1e6  # of a millisecond
RESAMPLES = 1000
EMULATED = {
    "device": {
        "device": "@device",
        "name": "emulated on a CPU",
        "cc": 90,
        "sm_count": 0,
        "l2_bytes": 0,
        "mem_bytes": 0,
        "mem_clock_mhz": 0,
        "sm_clock_max_mhz": 0,
        "power_limit_w": 0,
        "mig": False,
    },
    "toolchain": {
        "toolchain": "@toolchain",
        "driver": "none",
        "cuda_runtime": "none",
        "nvrtc": "none",
        "cublaslt": "none",
        "nccl": "none",
        "tool_version": "none",
        "git_sha": "unknown",
        "git_dirty": False,
        "codegen_abi": 0,
    },
}


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """How near a tensor comes to fp64 on data of one kind."""

    data: str
    tensor: str
    sqnr_db: float
    cosine: float
    rmse: float


def records_of_machine(emulate: bool) -> dict[str, Any]:
    """Returns the records of the device and the toolchain, or ends the program where there are none."""
    if emulate:
        return EMULATED
    own = pathlib.Path(float8.__file__).parent / "bin" / "float8-tune"
    tool = str(own) if own.exists() else shutil.which("float8-tune")
    if tool is None:
        sys.exit("--jsonl asks float8-tune what this machine is; put it on the PATH")
    done = subprocess.run([tool, "doctor", "--json"], capture_output=True, text=True)
    records = json.loads(done.stdout).get("records") if done.returncode == 0 else None
    if not records or not records["device"]:
        sys.exit(f"--jsonl: {tool} doctor --json has no record of a GPU; run it by itself")
    return dict(records)


def bootstrap(samples: Sequence[float]) -> tuple[float, float]:
    """Returns the ends of the 95 % interval of the median."""
    own = random.Random(0)
    medians = sorted(
        statistics.median(own.choices(samples, k=len(samples))) for _ in range(RESAMPLES)
    )
    median = statistics.median(samples)
    low, high = medians[RESAMPLES * 25 // 1000], medians[RESAMPLES * 975 // 1000]
    return min(low, median), max(high, median)


def timing(ms: Sequence[float]) -> dict[str, float]:
    ns = sorted(each * NS for each in ms)
    median = statistics.median(ns)
    low, high = bootstrap(ns)
    return {
        "samples": len(ns),
        "samples_dropped": 0,
        "median_ns": median,
        "mad_ns": statistics.median(abs(each - median) for each in ns),
        "p05_ns": ns[len(ns) * 5 // 100],
        "p95_ns": ns[min(len(ns) * 95 // 100, len(ns) - 1)],
        "ci_lo_ns": low,
        "ci_hi_ns": high,
    }


def whole(times: Mapping[str, Sequence[float]], name: str) -> list[float] | None:
    """Returns the times of forward and backward together, round by round; None where one was not timed."""
    parts = [times.get(f"{name}-{part}") for part in ("forward", "backward")]
    if not all(parts):
        return None
    return [f + b for f, b in zip(*parts, strict=True)]  # type: ignore[arg-type]


def now() -> str:
    stamp = datetime.datetime.now(datetime.timezone.utc)
    return stamp.strftime("%Y-%m-%dT%H:%M:%S.") + f"{stamp.microsecond // 1000:03d}Z"


class Rows:
    """The rows of one run, in the order in which they are measured."""

    def __init__(self, emulate: bool, seconds: float, length: int) -> None:
        records = records_of_machine(emulate)
        self.run = str(uuid.uuid4())
        method = {
            "method": "@method",
            # Emulated times say nothing, so they are kept and decide nothing.
            "fidelity": "screen" if emulate else "final",
            "spec": {
                "name": "attention-pytorch-v1",
                "fill": "normal numbers",
                "interleave": "rounds over all variants",
                "interval": "95 %, bootstrap over rounds",
                "seconds": seconds,
                "accuracy_tokens": length,
                "torch": torch.__version__,
                "cudnn": torch.backends.cudnn.version() or 0,
            },
        }
        run = {
            "run": self.run,
            "device": records["device"]["device"],
            "toolchain": records["toolchain"]["toolchain"],
            "method": "@method",
            "unit": "",
            "argv": [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]],
            "seed": 0,
            "started_at": now(),
        }
        header = {"float8_tuning_db": FORMAT}
        self.lines: list[dict[str, Any]] = [
            header,
            records["device"],
            records["toolchain"],
            method,
            run,
        ]

    def add(
        self,
        recipe: str,
        shape: str,
        causal: bool,
        times: Mapping[str, Sequence[float]],
        own: Sequence[float],
        bf16: Sequence[str],
        accuracy: Sequence[Accuracy],
    ) -> None:
        """Adds the rows of a shape under a recipe. `own` has float8's times, and bf16 names the variants that are no fp8."""
        problem = f"attention/{recipe}/e4m3.e4m3.bf16/{shape}causal{int(causal)}"
        baselines: list[tuple[float, str, list[float]]] = []
        for name in bf16:
            samples = whole(times, name)
            if samples is None:
                continue
            trial = self._trial(problem, "bf16", {"backend": name}, samples)
            baselines.append((statistics.median(samples), trial["trial"], samples))
        trial = self._trial(problem, "float8", {"kernels": "tuned"}, own)
        if accuracy:
            trial["accuracy"] = [dataclasses.asdict(each) for each in accuracy]
        if baselines:
            _, trial["pair_uuid"], samples = min(baselines)
            ratios = [b / o for b, o in zip(samples, own, strict=True)]
            trial["pair_ratio"] = statistics.median(ratios)
            trial["pair_lo"], trial["pair_hi"] = bootstrap(ratios)

    def _trial(
        self, problem: str, impl: str, config: dict[str, str], ms: Sequence[float]
    ) -> dict[str, Any]:
        trial = {
            "trial": str(uuid.uuid4()),
            "run": self.run,
            "problem": problem,
            "impl": impl,
            "config": config,
            "attempt": 0,
            "state": "ok",
            "at": now(),
            **timing(ms),
        }
        self.lines.append(trial)
        return trial

    def write(self, path: str) -> None:
        text = "".join(json.dumps(line) + "\n" for line in self.lines)
        pathlib.Path(path).write_text(text)
        trials = sum("trial" in line for line in self.lines)
        print(f"{path}: {trials} rows; float8-tune db import {path} --db FILE adds them")
