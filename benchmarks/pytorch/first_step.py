#!/usr/bin/env python3
"""The first step after a conversion, with a cold and a warm cache, for Llama-3-8B's shapes.

    first_step.py [--variants tensorwise-eager,torchao-tensorwise,...] [--blocks 1] [--tokens 8192]
                  [--prepare] [--json FILE] [--emulate]

Each variant runs in two processes with caches (FLOAT8_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR,
TRITON_CACHE_DIR) that are empty for the first of them. A process runs one step in bf16, which starts CUDA,
cuBLAS and the attention, then converts the model and runs forward and backward; a block has all of
the model's shapes. `convert` and `first` are wall times of the conversion and of the first step, to
the device's end; `second` is that of the step behind it. With --prepare, float8's variants prepare
their plans side by side after the conversion; `convert` includes that.
"""

from __future__ import annotations

import json
import sys
import tempfile

import common
import torch

import float8.torch as f8

CACHES = ("FLOAT8_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def measure(
    variant: common.Variant, blocks: int, tokens: int, prepare: bool, emulate: bool
) -> dict[str, float]:
    """Returns the times in seconds."""
    device = "cpu" if emulate else "cuda"
    model: torch.nn.Module = common.blocks(blocks, tokens, device, emulate)
    x, dy = (
        torch.randn(1, tokens, common.width(emulate), device=device).bfloat16() for _ in range(2)
    )
    call = model

    def convert() -> None:
        nonlocal model, call
        model = variant.convert(model, emulate)
        call = variant.callable(model, emulate)
        if prepare and variant.library == "float8":
            f8.prepare(model, tokens)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        call(x.detach().requires_grad_()).backward(dy)
        variant.end_of_step(model)

    with common.attention():
        call(x.detach().requires_grad_()).backward(dy)
        return {
            "convert": common.seconds(convert),
            "first": common.seconds(step),
            "second": common.seconds(step),
        }


def main() -> int:
    known = common.variants()
    parser = common.parser(__doc__, known)
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=0, help="default 8192")
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--one", help="measure this variant in this process, and print JSON")
    options = parser.parse_args()
    tokens = options.tokens or (32 if options.emulate else 8192)
    if options.one:
        variant = known[options.one]
        found = measure(variant, options.blocks, tokens, options.prepare, options.emulate)
        print(json.dumps(found))
        return 0
    variants = common.chosen(options.variants, known, based=False)
    title = f"{options.blocks} Llama-3-8B blocks, 1 x {tokens} tokens, first step after convert"
    print(common.headline(title, common.device_of(options)), flush=True)
    arguments = ["--blocks", str(options.blocks), "--tokens", str(tokens)]
    arguments += [f"--{name}" for name in ("emulate", "prepare") if getattr(options, name)]
    figures: dict[str, dict[str, dict[str, float]]] = {}
    failures: dict[str, str] = {}
    rows = []
    for variant in variants:
        figures[variant.name] = {}
        with tempfile.TemporaryDirectory() as folder:
            environment = {name: f"{folder}/{name}" for name in CACHES}
            for cache in ("cold", "warm"):
                try:
                    own = common.of_a_process(
                        __file__, [*arguments, "--one", variant.name], environment
                    )
                except Exception as error:
                    failures[variant.name] = common.reason(error)
                    break
                figures[variant.name][cache] = own
                times = (f"{own[name]:.2f}" for name in ("convert", "first", "second"))
                rows.append([variant.name, cache, *times])
        print(f"  {variant.name}: measured", file=sys.stderr, flush=True)
    rows += [[name, text] for name, text in failures.items()]
    common.print_table(["variant", "cache", "convert s", "first s", "second s"], rows)
    common.write_json(options.json, {"seconds": figures, "failures": failures, "title": title})
    return common.status(failures)


if __name__ == "__main__":
    sys.exit(main())
