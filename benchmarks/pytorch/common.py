"""What the benchmarks share: variants of a model, the Llama blocks, timing, tables."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import float8.torch as f8
from float8.torch.ranks import gloo

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "examples/pytorch"))

from llama import LLAMA_3_8B, Attention, Blocks, FeedForward, Shape

TORCHAO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise")
FUSED = ("tensorwise", "rowwise", "delayed", "blockwise")
Options = argparse.Namespace
f8.register_attention(Attention)
f8.register_mlp(FeedForward, gate="gate", up="up", down="down", activation="silu")
_emulated = False  # what device_of was told
TINY = Shape(dim=64, hidden=128, heads=4, kv_heads=2, layers=32)


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a model's linears compute: in bf16, by torchao or by float8."""

    library: str  # bf16, torchao or float8
    recipe: str = ""
    compiled: bool = True
    recompute: bool | None = None  # Float8Linear's
    fuse: bool = False  # with float8.torch.fuse
    norms: bool = False  # norms too
    attention: str = ""  # the recipe of attention; "": it is in bf16

    @property
    def name(self) -> str:
        words = {"bf16": "bf16", "torchao": f"torchao-{self.recipe}", "float8": self.recipe}
        name = words[self.library] + {None: "", False: "-keep", True: "-again"}[self.recompute]
        fused = "-fused" * self.fuse + "-norms" * self.norms
        attention = {"": "", "fp8_forward": "-attention", "fp8": "-attention-fp8"}[self.attention]
        return name + fused + attention + "-eager" * (not self.compiled)

    def convert(self, model: nn.Module, emulate: bool) -> nn.Module:
        """Returns the model with the variant's linears, which share the parameters."""
        if self.library == "float8":
            config = f8.LinearConfig(recipe=self.recipe, emulate=emulate, recompute=self.recompute)
            model = f8.convert_to_float8_training(model, config=config)
            if self.attention:
                f8.convert_attention_to_float8(model, self.attention, emulate=emulate)
            done = f8.fuse(model, norms=self.norms) if self.fuse else []
            if not all(each.fused for each in done):
                raise RuntimeError("an MLP was not fused")
            return model
        if self.library == "torchao":
            import torchao.float8 as torchao

            of_recipe = torchao.Float8LinearConfig.from_recipe_name(self.recipe)
            options = dataclasses.replace(of_recipe, emulate=emulate)
            converted: nn.Module = torchao.convert_to_float8_training(model, config=options)
            return converted
        return model

    def callable(self, call: Callable[..., Tensor], emulate: bool) -> Callable[..., Tensor]:
        """Returns what to call for a model or a function. Emulated, Inductor is left out."""
        if not self.compiled:
            return call
        # Each variant is one more compilation of the same code.
        torch._dynamo.config.recompile_limit = 64
        backend = "aot_eager" if emulate else "inductor"
        return torch.compile(call, fullgraph=True, dynamic=False, backend=backend)

    def end_of_step(self, model: nn.Module) -> None:
        """Does what the recipe wants between backward and the optimizer."""
        if self.recipe == "delayed":
            f8.sync_float8_amax_and_scale_history(model)


def variants(eager: bool = True, keep: bool = False, fused: bool = False) -> dict[str, Variant]:
    """Returns all variants by name, compiled ones and then eager ones, with bf16 first."""
    of_a_kind = [("bf16", ""), *(("torchao", recipe) for recipe in TORCHAO_RECIPES)]
    of_a_kind += [("float8", recipe) for recipe in RECIPES]
    kinds = (True, False) if eager else (True,)
    every = [Variant(*names, compiled=kind) for kind in kinds for names in of_a_kind]
    if keep:
        every += [Variant("float8", recipe, recompute=False) for recipe in RECIPES]
    if fused:
        every += [Variant("float8", name, kind, fuse=True) for kind in kinds for name in FUSED]
        every += [
            Variant("float8", name, kind, fuse=True, attention=recipe)
            for kind in kinds
            for recipe in ("fp8_forward", "fp8")
            for name in FUSED
        ]
        every += [
            Variant("float8", name, fuse=True, norms=True) for name in FUSED if name != "delayed"
        ]
        every += [Variant("float8", name, recompute=False, fuse=True) for name in FUSED]
    if fused and eager:
        every += [
            Variant("float8", name, compiled=False, fuse=True, norms=True, attention=recipe)
            for recipe in ("", "fp8")
            for name in FUSED
        ]
    return {variant.name: variant for variant in every}


def names_of(names: str, known: Collection[str]) -> list[str]:
    """Returns the names of a list, all that are known where it is empty; ends the program for another one."""
    wanted = [name.strip() for name in names.split(",")] if names else list(known)
    for name in wanted:
        if name not in known:
            sys.exit(f"no variant {name!r}; there are {', '.join(known)}")
    return wanted


def chosen(names: str, known: dict[str, Variant], based: bool = True) -> list[Variant]:
    """Returns the variants of a list of names; based: with the first that is known in front."""
    wanted = names_of(names, known)
    if not based:
        return [known[name] for name in wanted]
    base = next(iter(known.values()))
    return [base, *(known[name] for name in wanted if known[name] != base)]


def parser(text: str | None, known: Iterable[str]) -> argparse.ArgumentParser:
    """Returns a parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--variants", default="", metavar="LIST", help=f"default: {','.join(known)}"
    )
    parser.add_argument("--emulate", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to a file")
    return parser


def device_of(options: Options) -> str:
    """Returns the device to run on, or ends the program where there is none."""
    global _emulated
    _emulated = options.emulate
    if options.emulate:
        torch.set_num_threads(1)
        return "cpu"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("this needs a Hopper GPU; --emulate tries the program on a CPU")
    return "cuda"


def start_ranks(options: Options) -> str:
    """Joins the ranks that torchrun started, and returns the device to run on."""
    device = device_of(options)
    if "RANK" not in os.environ:
        sys.exit("start this with torchrun --nproc-per-node N")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    gloo.use_one_thread()
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    return device


def mesh_of_all(device: str) -> Any:
    """The mesh of all ranks. FSDP would take one of GPUs wherever there are some, also with --emulate."""
    return distributed.device_mesh.init_device_mesh(device, (distributed.get_world_size(),))


def headline(what: str, device: str) -> str:
    name = torch.cuda.get_device_name() if device == "cuda" else "emulated on a CPU"
    return f"{what}; {name}, torch {torch.__version__}"


def blocks(count: int, tokens: int, device: str, emulate: bool) -> Blocks:
    """Returns Llama-3-8B blocks in bf16, with the same parameters in every call."""
    torch.manual_seed(0)
    shape = dataclasses.replace(TINY if emulate else LLAMA_3_8B, layers=count)
    with torch.device(device):
        return Blocks(shape, tokens).to(torch.bfloat16)


def width(emulate: bool) -> int:
    return (TINY if emulate else LLAMA_3_8B).dim


def attention() -> contextlib.AbstractContextManager[None]:
    """Takes the fastest attention that there is, for every variant the same."""
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    manager: contextlib.AbstractContextManager[None] = sdpa_kernel(order, set_priority=True)
    return manager


def on_gpu() -> bool:
    """Whether calls run on a GPU, which may be there with --emulate too."""
    return torch.cuda.is_initialized() and not _emulated


def wait() -> None:
    if on_gpu():
        torch.cuda.synchronize()


def seconds(call: Callable[[], object]) -> float:
    """The wall time of one call, until the device is done."""
    wait()
    begin = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - begin


def sample(call: Callable[[], object], calls: int) -> float:
    """The time of one call in ms, on the device's clock.

    A call before the first that is timed fills the queue, so the start of the host is not in it.
    """
    if not on_gpu():
        return seconds(lambda: [call() for _ in range(calls)]) * 1e3 / calls
    wait()
    call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / calls


def interleaved(
    steps: Mapping[str, Callable[[], object]], limit_s: float, sample_ms: float, least: int = 5
) -> dict[str, list[float]]:
    """Samples of each step in ms, in rounds over all steps, until the time is spent or Ctrl-C.

    limit_s: of all rounds; at least so many rounds are made, and one where it is 0.
    sample_ms: about how long a sample takes.
    """
    if limit_s == 0:
        return {name: [sample(step, 1)] for name, step in steps.items()}
    calls = {name: 1 + int(sample_ms / sample(step, 1)) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    begin = time.perf_counter()
    rounds = 0
    while rounds < least or time.perf_counter() - begin < limit_s:
        try:
            of_round = {name: sample(step, calls[name]) for name, step in steps.items()}
        except KeyboardInterrupt:  # the rounds before are measured
            if rounds == 0:
                raise
            break
        for name, ms in of_round.items():
            times[name].append(ms)
        rounds += 1
    return times


@dataclasses.dataclass(frozen=True)
class Spread:
    """The median and the quartiles of samples."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)


def ratio(base: Sequence[float], own: Sequence[float]) -> float:
    """How many times faster than the base, as the median over the rounds."""
    return statistics.median(b / o for b, o in zip(base, own, strict=True))


def of_a_process(script: str, arguments: Sequence[str], environment: dict[str, str]) -> Any:
    """Runs a benchmark's script in a process of its own, and returns the JSON of its last line."""
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RuntimeError(lines[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])


def reason(error: Exception) -> str:
    """Why a variant has no figures, in a line."""
    text = str(error)
    if "No module named 'torchao" in text:
        return "torchao is not installed"
    lines = text.strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def status(failures: dict[str, str]) -> int:
    """The exit status: 1 where a variant failed, though its library is installed."""
    return 0 if all("not installed" in text for text in failures.values()) else 1


def leave_ranks(device: str, status: int) -> int:
    """Ends a rank, which all ranks do at once; returns the status."""
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    if device == "cpu":
        # A thread of gloo that lets go of a tensor while Python ends aborts the process
        # (docs/lab/gloo-ranks.md). FSDP keeps these threads alive, so Python's end is left out.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table whose first column is of words. A short row ends in words."""
    rows = list(rows)
    full = [header, *(row for row in rows if len(row) == len(header))]
    widths = [max(len(row[i]) for row in full) for i in range(len(header))]
    widths[0] = max(len(row[0]) for row in (header, *rows))
    for row in (header, *rows):
        if len(row) < len(header):
            print(f"{row[0]:{widths[0]}}  {'  '.join(row[1:])}")
            continue
        cells = (f"{cell:>{size}}" for cell, size in zip(row[1:], widths[1:], strict=True))
        print("  ".join((f"{row[0]:{widths[0]}}", *cells)), flush=True)


def write_json(path: str | None, figures: dict[str, Any]) -> None:
    if path:
        pathlib.Path(path).write_text(json.dumps(figures, indent=1) + "\n")
