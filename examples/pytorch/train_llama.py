#!/usr/bin/env python3
"""Trains a small Llama on text files, byte by byte, with its linears in fp8.

    train_llama.py [FILES] [--recipe rowwise | --torchao rowwise] [--compile] [--steps 2000]
                   [--experts 8 --top-k 2 [--expert-recipe rowwise]]
                   [--attention fp8_forward|fp8] [--qk-norm] [--seed 0] [--out FOLDER]
                   [--resume FOLDER/step-1000.pt | --weights FOLDER/step-2000.pt]
    train_llama.py --compare RUN/steps.csv ... [--out FOLDER]

Without files it trains on the sources of Python's standard library. Weights and AdamW's states are
float32, and autocast runs the rest in bfloat16; the recipe bf16 leaves the linears as they are. The
default model has 103 million parameters. FOLDER gets steps.csv (step, loss, tokens/s), steps.png,
where matplotlib is installed, and checkpoints, from which --resume goes on as if nothing had
happened: bit for bit on a CPU, on a GPU with --deterministic. --weights starts a run of its own from the
weights of another one, whose recipe and attention may be others. --compare draws several runs in one
plot, and prints a table of their final losses, means of the last 5 % of the steps, to the first's.
Runs in folders NAME-seed1, NAME-seed2, ... are one row, with their mean and standard deviation.
--experts N makes a mixture of N experts of each MLP, which compute in fp8 too, by the recipe or by
--expert-recipe. `load` is the busiest expert's tokens in relation to the mean, over all layers. --attention fp8_forward has attention with
a forward in fp8, for heads of 64, 128 and 256 (--dim 1024 --heads 8 has 128), and fp8 with a backward in fp8 too.
--emulate trains on a CPU: give it small sizes.
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import sys
import sysconfig
import time
from typing import Any

import runs
import torch
from llama import Attention, Llama, Mixture, Shape
from torch import Tensor, nn
from torch.nn import functional

import float8.torch as f8
from float8 import recipes
from float8.torch.attention import HEAD_DIMS
from float8.torch.attention import RECIPES as ATTENTION

VOCABULARY = 256
BALANCE = 0.01  # the weight of the loss that keeps experts equally busy
f8.register_attention(Attention)


class Corpus:
    """The bytes of text files, of which batches are random windows."""

    def __init__(self, paths: list[str], seq: int, batch: int, seed: int) -> None:
        if not paths:
            root = pathlib.Path(sysconfig.get_path("stdlib"))
            found = (path for path in root.rglob("*.py") if "site-packages" not in path.parts)
            paths = [str(path) for path in sorted(found)]
        text = bytearray(b"\0".join(pathlib.Path(path).read_bytes() for path in paths))
        if len(text) <= seq:
            raise ValueError(f"the files have {len(text)} bytes, a sequence has {seq}")
        self.bytes = torch.frombuffer(text, dtype=torch.uint8)
        self.windows = torch.arange(seq + 1)
        self.batch = batch
        self.random = torch.Generator().manual_seed(seed)

    def next(self, device: str) -> tuple[Tensor, Tensor]:
        """Returns the next batch: tokens and the tokens that follow them, [batch, seq]."""
        starts = torch.randint(
            len(self.bytes) - len(self.windows) + 1, (self.batch, 1), generator=self.random
        )
        tokens = self.bytes[starts + self.windows].to(device, non_blocking=True).long()
        return tokens[:, :-1], tokens[:, 1:]


class Trainer:
    """A model, its optimizer and its data: everything that a checkpoint has."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = device_of(options)
        torch.manual_seed(options.seed)
        if options.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        shape = shape_of(options)
        self.corpus = Corpus(options.files, options.seq, options.batch, options.seed)
        model = Llama(shape, VOCABULARY, options.seq).to(self.device)
        self.model = convert(model, options)
        self.loss_of = torch.compile(self.loss, fullgraph=True) if options.compile else self.loss
        self.mixtures = [each for each in model.modules() if isinstance(each, Mixture)]
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim == 1]
        groups: list[dict[str, Any]] = [
            {"params": decayed},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        named = ("recipe", "expert_recipe", "torchao", "attention", "seq", "batch")
        self.settings = {
            **vars(shape),
            **{name: getattr(options, name) for name in named},
            "bytes of text": len(self.corpus.bytes),
        }
        self.rows: list[runs.Row] = []

    @property
    def step_count(self) -> int:
        return len(self.rows)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            logits = self.model(tokens)
        loss = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        return loss + BALANCE * sum(each.balance - 1 for each in self.mixtures)

    def load(self) -> float:
        """The busiest expert's tokens in relation to the mean, in the latest step."""
        return max(float(each.load) for each in self.mixtures)

    def learning_rate(self, step: int) -> float:
        """A linear warm-up over 5 % of the steps, then a cosine down to a tenth."""
        warm_up = max(1, self.options.steps // 20)
        if step < warm_up:
            return float(self.options.lr * (step + 1) / warm_up)
        done = (step - warm_up) / max(1, self.options.steps - warm_up)
        return float(self.options.lr * (0.55 + 0.45 * math.cos(math.pi * done)))

    def step(self, index: int) -> Tensor:
        """Takes a step, and returns its loss, which nobody has waited for."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(index)
        loss = self.loss_of(*self.corpus.next(self.device))
        loss.backward()
        if "delayed" in (self.options.recipe, self.options.expert_recipe):
            f8.sync_float8_amax_and_scale_history(self.model)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def steps(self, end: int) -> None:
        """Takes the steps before `end`, and keeps their losses and speed."""
        begin = time.perf_counter()
        first = self.step_count
        losses = torch.stack([self.step(index) for index in range(first, end)]).tolist()
        tokens = (end - first) * self.options.batch * self.options.seq
        speed = round(tokens / (time.perf_counter() - begin), 1)
        self.rows += [(first + index, loss, speed) for index, loss in enumerate(losses, 1)]

    def save(self, path: pathlib.Path) -> None:
        """Writes a checkpoint, whole or not at all."""
        state = {
            "settings": self.settings,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "windows": self.corpus.random.get_state(),
            "random": torch.get_rng_state(),
            "device random": torch.cuda.get_rng_state() if self.device == "cuda" else None,
            "rows": self.rows,
        }
        unfinished = path.with_suffix(".unfinished")
        torch.save(state, unfinished)
        os.replace(unfinished, path)

    def resume(self, path: str) -> None:
        """Goes on from a checkpoint."""
        state = read_checkpoint(path)
        for name, own in self.settings.items():
            if state["settings"].get(name) != own:
                there = state["settings"].get(name)
                raise ValueError(f"{path} is of another run: its {name} is {there}, not {own}")
        if len(state["rows"]) > self.options.steps:
            raise ValueError(f"{path} is of step {len(state['rows'])}; give more --steps")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.corpus.random.set_state(state["windows"])
        torch.set_rng_state(state["random"])
        if self.device == "cuda":
            torch.cuda.set_rng_state(state["device random"])
        self.rows = [tuple(row) for row in state["rows"]]

    def take_weights(self, path: str) -> None:
        """Starts from the weights of a run of the same sizes."""
        state = read_checkpoint(path)
        for name in vars(shape_of(self.options)):
            if state["settings"].get(name) != self.settings[name]:
                there = state["settings"].get(name)
                raise ValueError(f"{path} has {name} {there}, not {self.settings[name]}")
        own = self.model.state_dict()
        weights = {name: value for name, value in state["model"].items() if name in own}
        self.model.load_state_dict({**own, **weights})


def read_checkpoint(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
            return {name: state[name] for name in ("settings", "rows", *state)}
        except Exception:  # unpickling bytes of any kind raises anything
            raise ValueError(f"{path} is no checkpoint of this program") from None


def device_of(options: argparse.Namespace) -> str:
    if options.emulate:
        return "cpu"
    if not torch.cuda.is_available():
        raise ValueError("there is no GPU; --emulate trains on a CPU")
    return "cuda"


def shape_of(options: argparse.Namespace) -> Shape:
    """Returns the model's sizes; the MLP's is 3.5 times the model's, as in Llama 3."""
    hidden = options.hidden or -(-7 * options.dim // 2 // 16) * 16
    kv_heads = options.kv_heads or options.heads
    top_k = min(options.top_k, options.experts)
    return Shape(
        options.dim,
        hidden,
        options.heads,
        kv_heads,
        options.layers,
        options.experts,
        top_k,
        options.qk_norm,
    )


def convert(model: nn.Module, options: argparse.Namespace) -> nn.Module:
    """Returns the model with the linears, and the experts, of the recipe."""
    if options.experts and options.torchao:
        raise ValueError("torchao's linears are compared without --experts")
    if options.expert_recipe and not options.experts:
        raise ValueError("--expert-recipe is the recipe of --experts N, which is not given")
    if options.attention != "bf16":
        if options.dim // options.heads not in HEAD_DIMS:
            sizes = ", ".join(map(str, HEAD_DIMS))
            raise ValueError(
                f"heads of {options.dim // options.heads}, and attention in fp8 has heads of {sizes}: set --dim to one of "
                "these times --heads"
            )
        f8.convert_attention_to_float8(model, options.attention, emulate=options.emulate)
    recipe = options.expert_recipe or options.recipe
    if options.experts and recipe != "bf16":
        for each in [each for each in model.modules() if isinstance(each, Mixture)]:
            old = each.experts
            experts, dim, hidden = old.w2.shape
            own = f8.Experts(
                experts, dim, hidden, recipe=recipe, emulate=options.emulate, device="meta"
            )
            own.w13, own.w2 = old.w13, old.w2
            each.experts = own
    if options.torchao:
        import torchao.float8 as torchao

        config = torchao.Float8LinearConfig.from_recipe_name(options.torchao)
        object.__setattr__(config, "emulate", options.emulate)
        converted: nn.Module = torchao.convert_to_float8_training(model, config=config)
        return converted
    if options.recipe == "bf16":
        if recipe == "delayed":
            f8.attach_scales(model)
        return model
    config = f8.LinearConfig(recipe=options.recipe, emulate=options.emulate)
    return f8.convert_to_float8_training(model, config=config)


def train(trainer: Trainer, out: pathlib.Path) -> None:
    """Trains to the last step, and writes what the run leaves."""
    options = trainer.options
    while trainer.step_count < options.steps:
        done = trainer.step_count
        ends = [options.steps]
        ends += [done - done % n + n for n in (options.log_every, options.save_every) if n]
        trainer.steps(min(ends))
        step, loss, speed = trainer.rows[-1]
        load = f"  load {trainer.load():4.2f}" if trainer.mixtures else ""
        print(f"step {step:6}  loss {loss:7.4f}  {speed:9.0f} tokens/s{load}", flush=True)
        runs.write_csv(out / "steps.csv", trainer.rows)
        done = trainer.step_count
        if done == options.steps or (options.save_every and done % options.save_every == 0):
            trainer.save(out / f"step-{done}.pt")
    runs.plot(runs.grouped([runs.Run(out.resolve().name, trainer.rows)]), out / "steps.png")


def compare(paths: list[str], out: pathlib.Path) -> None:
    found = runs.grouped([runs.read_csv(pathlib.Path(path)) for path in paths])
    runs.print_comparison(found)
    runs.plot(found, out / "compare.png")


def positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", help="text, of any kind")
    linears = parser.add_mutually_exclusive_group()
    linears.add_argument("--recipe", choices=recipes.NAMES, default="rowwise")
    linears.add_argument("--torchao", choices=recipes.NAMES[:3], help="torchao's linears")
    sizes = {"dim": 768, "layers": 12, "heads": 12, "seq": 1024, "batch": 8, "steps": 2000}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=positive, default=value, help=f"default {value}")
    parser.add_argument("--kv-heads", type=positive, help="default: as many as --heads")
    parser.add_argument("--hidden", type=positive, help="of the MLP, default 3.5 times --dim")
    parser.add_argument("--experts", type=positive, default=0, help="of each MLP, default none")
    parser.add_argument("--top-k", type=positive, default=2, help="experts of a token, default 2")
    parser.add_argument("--expert-recipe", choices=recipes.NAMES, help="default: that of --recipe")
    parser.add_argument("--attention", choices=ATTENTION, default="bf16", help="default bf16")
    parser.add_argument("--qk-norm", action="store_true", help="norms of queries and keys")
    parser.add_argument("--lr", type=float, default=6e-4, help="the largest, default 6e-4")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and batches, default 0")
    parser.add_argument("--compile", action="store_true", help="torch.compile")
    parser.add_argument("--deterministic", action="store_true", help="of PyTorch's own kernels")
    parser.add_argument("--emulate", action="store_true", help="on a CPU")
    parser.add_argument("--log-every", type=positive, default=10, metavar="STEPS")
    parser.add_argument("--save-every", type=positive, metavar="STEPS", help="default: at the end")
    first = parser.add_mutually_exclusive_group()
    first.add_argument("--resume", metavar="CHECKPOINT")
    first.add_argument("--weights", metavar="CHECKPOINT", help="to start from")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("run"))
    parser.add_argument("--compare", nargs="+", metavar="CSV")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    try:
        if options.compare:
            options.out.mkdir(parents=True, exist_ok=True)
            compare(options.compare, options.out)
            return
        trainer = Trainer(options)
        if options.resume:
            trainer.resume(options.resume)
        if options.weights:
            trainer.take_weights(options.weights)
        options.out.mkdir(parents=True, exist_ok=True)
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"train_llama: {error}")
    millions = sum(p.numel() for p in trainer.model.parameters()) / 1e6
    linears = f"torchao {options.torchao}" if options.torchao else options.recipe
    print(
        f"{millions:.1f} million parameters, {linears}, {len(trainer.corpus.bytes)} bytes of text"
    )
    train(trainer, options.out)


if __name__ == "__main__":
    main()
