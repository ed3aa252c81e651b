#!/usr/bin/env python3
"""Training steps of torchtitan 0.2.2's own Trainer, compiled, FSDP2: bf16, torchao and float8, one after the other.

    torchtitan_step.py [--variants LIST] [--gpus 2] [--layers 8] [--batch 2] [--seq-len 4096] [--steps 30]

A Llama 3 of dimension 4096 with 8 heads of keys. torchtitan, and torchao where it is compared, have to be importable, with what torchtitan needs but
`datasets`: texts are those of this project's docs, by a tokenizer that is trained on them, so that nothing is downloaded. Each
variant is a process for each GPU. A variant of float8 may be delayed or blockwise too, which torchtitan does not offer (install(recipe=...)), and end in -fused (float8.torchao.install(fuse=True)); rowwise-gather gathers weights in fp8, as
tensorwise and torchao do, which torchtitan's own option is not for. Tokens/s are those of a GPU, the mean of what torchtitan prints from step 20 on, each over ten steps.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import random
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator

VARIANTS = (
    "bf16,tensorwise,tensorwise-fused,rowwise,rowwise-fused,rowwise-gather-fused,torchao,bf16"
)
VOCABULARY = 8192
FIRST_STEP = 20  # that is counted
DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"


def words() -> list[str]:
    return " ".join(each.read_text() for each in sorted(DOCS.glob("*.md"))).split()


def make_tokenizer(folder: str) -> None:
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        [" ".join(words())], vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"]
    )
    tokenizer.save(f"{folder}/tokenizer.json")
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    pathlib.Path(folder, "tokenizer_config.json").write_text(json.dumps(special))


class Dataset:
    """That of datasets, which has a length; there is none here."""


class Texts:
    """An endless stream of rows."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        every, choose = words(), random.Random(1)
        while True:
            length = choose.randrange(150, 600)
            first = choose.randrange(0, len(every) - length)
            yield {"text": " ".join(every[first : first + length])}


def use_texts() -> None:
    """Lets torchtitan load these texts, and write no curves where tensorboard is absent."""
    contents: dict[str, dict[str, object]] = {
        "datasets": {"Dataset": Dataset, "load_dataset": lambda *_, **__: Texts()},
        "datasets.distributed": {"split_dataset_by_node": lambda data, rank, world: data},
    }
    if importlib.util.find_spec("tensorboard") is None:
        contents["torch.utils.tensorboard"] = {"SummaryWriter": object}
    for name, own in contents.items():
        module = types.ModuleType(name)
        module.__dict__.update(own, __path__=[])
        sys.modules[name] = module


def train(variant: str, options: list[str], layers: int) -> None:
    """Is one rank of a variant."""
    kind, *parts = variant.split("-")
    arguments = list(options)
    if kind != "bf16":
        float8 = "--quantize.linear.float8"
        arguments += ["--model.converters", "quantize.linear.float8"]
        arguments += [f"{float8}.filter_fqns", "output"]
        if kind == "rowwise":
            arguments += [f"{float8}.recipe_name", kind]
        else:
            arguments.append(f"{float8}.enable_fsdp_float8_all_gather")
            arguments.append(f"{float8}.precompute_float8_dynamic_scale_for_fsdp")
    sys.argv = ["torchtitan.train", *arguments]  # torchtitan reads it when it is imported
    use_texts()
    if kind not in ("bf16", "torchao"):
        import float8.torchao

        float8.torchao.install(
            recipe=kind,
            fuse="fused" in parts,
            enable_fsdp_float8_all_gather="gather" in parts,
        )
    from torchtitan.models import llama3

    llama3.llama3_args["benchmark"] = llama3.TransformerModelArgs(
        dim=4096,
        n_layers=layers,
        n_heads=32,
        n_kv_heads=8,
        ffn_dim_multiplier=1.3,
        multiple_of=1024,
        rope_theta=500000,
        vocab_size=VOCABULARY,
    )
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)


def measure(variant: str, arguments: argparse.Namespace, options: list[str]) -> tuple[float, float]:
    """Runs a variant, and returns its tokens/s of a GPU and its memory in GiB."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(arguments.gpus), __file__, "--variant", variant]
    command += ["--layers", str(arguments.layers), "--", *options]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    found = re.findall(r"step: +(\d+) .*memory: +([\d.]+)GiB.*tps: +([\d,]+)", plain)
    counted = [(m, t) for step, m, t in found if int(step) >= FIRST_STEP]
    if done.returncode != 0 or not counted:
        sys.exit(f"{variant} failed ({done.returncode}):\n{done.stdout[-4000:]}")
    tokens = statistics.mean(float(t.replace(",", "")) for _, t in counted)
    return tokens, max(float(m) for m, _ in counted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", default=VARIANTS)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("options", nargs="*", help="more options of torchtitan's, behind --")
    own = parser.parse_args()
    if own.variant:
        train(own.variant, own.options, own.layers)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(folder)
        options = ["--model.name", "llama3", "--model.flavor", "benchmark"]
        options += ["--model.hf_assets_path", folder, "--job.dump_folder", f"{folder}/out"]
        options += ["--training.dataset", "c4_test", "--training.local_batch_size", str(own.batch)]
        options += ["--training.seq_len", str(own.seq_len), "--training.steps", str(own.steps)]
        options += ["--metrics.log_freq", "10", "--compile.enable", "--optimizer.implementation"]
        options += ["fused", "--activation_checkpoint.mode", "none", *own.options]
        first: float | None = None
        for variant in own.variants.split(","):
            tokens, memory = measure(variant, own, options)
            first = first or tokens
            print(
                f"{variant:24} {tokens:9,.0f} {tokens / first:7.3f} {memory:7.2f} GiB", flush=True
            )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    main()
