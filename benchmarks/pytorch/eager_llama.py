#!/usr/bin/env python3
"""Training steps of a Llama of transformers in eager mode, which the host may bind: bf16 and float8 in turns.

    eager_llama.py [--variants bf16-eager,rowwise-fused-norms-eager,...] [--layers 24] [--dim 1024] [--hidden 2816]
                   [--heads 16] [--batch 8] [--tokens 1024] [--accumulate 4] [--no-checkpointing] [--rounds 7]
                   [--json FILE] [--emulate]

A step is a few micro-batches, forward and backward with activation checkpointing, and torch's fused AdamW. Steps are
timed on the host's clock until the device is done, in rounds over the variants; a row has the median and the
quartiles, the speedup over bf16 (the median over the rounds), and what the device computes for in a step and in how
many launches. Variants with -fused have fused MLPs and rotary positions, with -norms RMSNorms of one function too.
The default sizes have 300 million parameters, without the embedding and the head.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import common
import torch
from torch.profiler import ProfilerActivity, profile

VOCABULARY = 32000


def variants() -> dict[str, common.Variant]:
    every = [common.Variant("bf16", compiled=False)]
    for fuse, norms in ((False, False), (True, False), (True, True)):
        every += [
            common.Variant("float8", recipe, compiled=False, fuse=fuse, norms=norms)
            for recipe in common.FUSED
        ]
    return {each.name: each for each in every}


def make_model(options: common.Options, device: str) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64 if options.emulate else VOCABULARY,
        hidden_size=options.dim,
        intermediate_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        max_position_embeddings=options.tokens,
        attn_implementation="sdpa",
        use_cache=False,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: torch.nn.Module = LlamaForCausalLM(config).bfloat16()
    if not options.no_checkpointing:
        enable = next(
            getattr(model, f"{kind}_checkpointing_enable")
            for kind in ("activation", "gradient")
            if hasattr(model, f"{kind}_checkpointing_enable")
        )
        enable()
    return model.train()


def make_step(
    variant: common.Variant, options: common.Options, ids: torch.Tensor
) -> Callable[[], None]:
    model = make_model(options, ids.device.type)
    head = model.get_output_embeddings()
    variant.convert(model.model, options.emulate)
    assert model.get_output_embeddings() is head
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        for micro_batch in ids:
            loss = model(input_ids=micro_batch, labels=micro_batch).loss
            (loss / options.accumulate).backward()
        variant.end_of_step(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def device_work(step: Callable[[], None]) -> tuple[float, int]:
    """Returns how many ms the device computes in a step, and in how many launches; 0 on a CPU."""
    if not common.on_gpu():
        return 0.0, 0
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        common.wait()
    events = [each for each in trace.key_averages() if each.self_device_time_total > 0]
    return sum(each.self_device_time_total for each in events) / 1e3, sum(e.count for e in events)


def main() -> int:
    known = variants()
    parser = common.parser(__doc__, known)
    for name, size in (
        ("layers", 24), ("dim", 1024), ("hidden", 2816), ("heads", 16), ("batch", 8), ("tokens", 1024),
        ("accumulate", 4), ("rounds", 7),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--no-checkpointing", action="store_true")
    options = parser.parse_args()
    options.kv_heads = options.heads
    device = common.device_of(options)
    if options.emulate:
        options.layers, options.dim, options.hidden = 1, 64, 128
        options.heads = options.kv_heads = 2
        options.batch, options.tokens, options.accumulate, options.rounds = 1, 16, 1, 1
    shape = (options.accumulate, options.batch, options.tokens)
    ids = torch.randint(0, 64, shape, device=device)
    title = (
        f"{options.layers} eager Llama layers of {options.dim} and {options.hidden}, {options.accumulate} x "
        f"{options.batch} x {options.tokens} tokens"
    )
    print(common.headline(title, device), flush=True)
    steps = {
        each.name: make_step(each, options, ids) for each in common.chosen(options.variants, known)
    }
    for step in steps.values():
        common.seconds(step)
        common.seconds(step)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            times[name].append(common.seconds(step) * 1e3)
    base = next(iter(times.values()))
    rows = []
    for name, samples in times.items():
        spread = common.Spread.of(samples)
        milliseconds = (f"{ms:.1f}" for ms in (spread.median, spread.low, spread.high))
        of_device, launches = device_work(steps[name])
        ratio = f"{common.ratio(base, samples):.3f}"
        rows.append([name, *milliseconds, ratio, f"{of_device:.1f}", str(launches)])
    header = ["variant", "ms", "25 %", "75 %", "over bf16", "device ms", "launches"]
    common.print_table(header, rows)
    common.write_json(options.json, {"ms": times, "title": title})
    return 0


if __name__ == "__main__":
    sys.exit(main())
