#!/usr/bin/env python3
"""Training steps of LoRA (peft) over a Llama of transformers whose weights are frozen: bf16, torchao and float8 in turns.

    lora.py [--variants bf16,rowwise,rowwise-fused-norms-eager,...] [--layers 4] [--dim 4096] [--hidden 14336]
            [--heads 32] [--kv-heads 8] [--batch 4] [--tokens 2048] [--rank 16] [--checkpointing] [--rounds 7]
            [--json FILE] [--emulate]

All linears but the head have adapters in bf16, and those of attention and MLP are converted before. A step is forward,
backward and torch's fused AdamW for the adapters; layers are compiled one by one but with -eager. Steps are timed on
the host's clock until the device is done, in rounds over the variants: a row has the median and the quartiles, the
speedup over bf16 of the same mode (the median over the rounds), and the peak of memory in a step, of which the model
is a part. Variants with -fused have fused rotary positions in eager mode, with -norms RMSNorms of one function too.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import common
import eager_llama
import torch

GIB = float(1 << 30)


def variants() -> dict[str, common.Variant]:
    every = [common.Variant("bf16")]
    every += [common.Variant("torchao", recipe) for recipe in common.TORCHAO_RECIPES]
    every += [common.Variant("float8", recipe) for recipe in common.FUSED]
    every += [common.Variant("bf16", compiled=False)]
    for fuse in (False, True):
        every += [
            common.Variant("float8", recipe, compiled=False, fuse=fuse, norms=fuse)
            for recipe in common.FUSED
        ]
    return {each.name: each for each in every}


def make_step(
    variant: common.Variant, options: common.Options, ids: torch.Tensor
) -> Callable[[], None]:
    import peft

    model = eager_llama.make_model(options, ids.device.type)
    variant.convert(model.model, options.emulate)
    lora = peft.LoraConfig(r=options.rank, target_modules="all-linear")
    adapted = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    adapted.enable_input_require_grads()
    for layer in model.model.layers:
        layer.forward = variant.callable(layer.forward, options.emulate)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step() -> None:
        adapted(input_ids=ids, labels=ids).loss.backward()
        variant.end_of_step(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def peak_of(step: Callable[[], None], before: int) -> float:
    """Returns the most memory of a step in GiB, without what was there before its model; 0 on a CPU."""
    step()
    step()
    if not common.on_gpu():
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    step()
    common.wait()
    return (torch.cuda.max_memory_allocated() - before) / GIB


def main() -> int:
    known = variants()
    parser = common.parser(__doc__, known)
    for name, size in (
        ("layers", 4), ("dim", 4096), ("hidden", 14336), ("heads", 32), ("kv-heads", 8), ("batch", 4),
        ("tokens", 2048), ("rank", 16), ("rounds", 7),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--checkpointing", action="store_true")
    options = parser.parse_args()
    options.no_checkpointing = not options.checkpointing
    device = common.device_of(options)
    if options.emulate:
        options.layers, options.dim, options.hidden, options.heads, options.kv_heads = (
            1,
            64,
            128,
            2,
            2,
        )
        options.batch, options.tokens, options.rounds = 1, 16, 1
    ids = torch.randint(0, 64, (options.batch, options.tokens), device=device)
    title = (
        f"LoRA of rank {options.rank} over {options.layers} Llama layers of {options.dim} and {options.hidden}, "
        f"{options.batch} x {options.tokens} tokens"
    )
    print(common.headline(title, device), flush=True)
    steps, peaks, failures = {}, {}, {}
    chosen = [known[name] for name in common.names_of(options.variants, known)]
    for each in chosen:
        gc.collect()
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        try:
            step = make_step(each, options, ids)
            peaks[each.name] = peak_of(step, before)
            steps[each.name] = step
        except (ImportError, RuntimeError, ValueError) as error:
            failures[each.name] = common.reason(error)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            times[name].append(common.seconds(step) * 1e3)
    rows = []
    for name, samples in times.items():
        base = times.get("bf16" if known[name].compiled else "bf16-eager", samples)
        spread = common.Spread.of(samples)
        milliseconds = (f"{ms:.1f}" for ms in (spread.median, spread.low, spread.high))
        rows.append(
            [name, *milliseconds, f"{common.ratio(base, samples):.3f}", f"{peaks[name]:.2f}"]
        )
    rows += [[name, *why.split()] for name, why in failures.items()]
    common.print_table(["variant", "ms", "25 %", "75 %", "over bf16", "GiB"], rows)
    common.write_json(options.json, {"ms": times, "GiB": peaks, "title": title})
    return common.status(failures)


if __name__ == "__main__":
    sys.exit(main())
