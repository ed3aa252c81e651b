#!/usr/bin/env python3
"""Peak memory of a training step of Llama-3-8B blocks: bf16, torchao and float8.

    memory.py [--variants LIST] [--blocks 8] [--tokens 8192] [--json FILE] [--emulate]

A step is forward, backward and fused AdamW, all in bf16. Each variant has a process of its own,
which takes three steps; the peak is that of the second and third, as PyTorch's allocator counts it.
It includes float8's workspace, which comes from that allocator. Each block is compiled by itself,
which torch.compile does once for all of them. `beside` is what the peak has beside
parameters and AdamW's states: activations, gradients and workspaces. With --emulate the peak is the
process's own.
"""

from __future__ import annotations

import json
import resource
import sys

import common
import torch

GIB = float(1 << 30)


def measure(variant: common.Variant, blocks: int, tokens: int, emulate: bool) -> dict[str, float]:
    """Returns the peak of a variant's step and what is there between steps, in bytes."""
    device = "cpu" if emulate else "cuda"
    model = variant.convert(common.blocks(blocks, tokens, device, emulate), emulate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    for block in model.blocks:
        block.forward = variant.callable(block.forward, emulate)
    x, dy = (
        torch.randn(1, tokens, common.width(emulate), device=device).bfloat16() for _ in range(2)
    )

    def step() -> None:
        model(x.detach().requires_grad_()).backward(dy)
        variant.end_of_step(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with common.attention():
        step()
        if not emulate:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            step()
    kept = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
    if emulate:
        return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0, "kept": kept}
    return {"peak": torch.cuda.max_memory_allocated(), "kept": kept}


def main() -> int:
    known = common.variants(keep=True, fused=True)
    parser = common.parser(__doc__, known)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=0, help="default 8192")
    parser.add_argument("--one", help="measure this variant in this process, and print JSON")
    options = parser.parse_args()
    tokens = options.tokens or (32 if options.emulate else 8192)
    if options.one:
        found = measure(known[options.one], options.blocks, tokens, options.emulate)
        print(json.dumps(found))
        return 0
    variants = common.chosen(options.variants, known)
    title = f"{options.blocks} Llama-3-8B blocks, 1 x {tokens} tokens, a step with AdamW"
    print(common.headline(title, common.device_of(options)), flush=True)
    arguments = ["--blocks", str(options.blocks), "--tokens", str(tokens)]
    arguments += ["--emulate"] if options.emulate else []
    figures: dict[str, dict[str, float]] = {}
    failures: dict[str, str] = {}
    for variant in variants:
        try:
            figures[variant.name] = common.of_a_process(
                __file__, [*arguments, "--one", variant.name], {}
            )
        except Exception as error:
            failures[variant.name] = common.reason(error)
            continue
        peak = figures[variant.name]["peak"] / GIB
        print(f"  {variant.name}: {peak:.2f} GiB", file=sys.stderr, flush=True)
    base = figures.get(variants[0].name)
    rows = []
    for name, own in figures.items():
        gib = (f"{bytes / GIB:.2f}" for bytes in (own["peak"], own["peak"] - own["kept"]))
        rows.append([name, *gib, f"{own['peak'] / base['peak']:.3f}" if base else ""])
    rows += [[name, text] for name, text in failures.items()]
    common.print_table(["variant", "peak GiB", "beside GiB", "over bf16"], rows)
    common.write_json(options.json, {"bytes": figures, "failures": failures, "title": title})
    return common.status(failures)


if __name__ == "__main__":
    sys.exit(main())
