"""The casts of activations and of their gradients, fused and one by one, of one MLP's size.

One by one PyTorch's compiled activation writes bf16, and float8 casts that. Delayed scales and those of
blocks need one pass; the others find their maxima first. Variants are measured in turn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import common
import torch
from torch.nn import functional

from float8.torch import _ops
from float8.torch import functional as of_float8

RECIPES = ("tensorwise", "rowwise", "blockwise")
EAGER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu2": lambda x: functional.relu(x).square(),
}


def calls_of(
    name: str, config: int, x: torch.Tensor, grad: torch.Tensor
) -> list[Callable[[], object]]:
    """Returns forward one by one and fused, and backward likewise."""
    code = _ops.ACTIVATIONS[name]
    activate = EAGER[name]

    def pulled_back(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        _, pull = torch.func.vjp(activate, x)  # type: ignore[attr-defined]
        return pull(grad)[0]  # type: ignore[no-any-return]

    forward, backward = activate, pulled_back
    if x.is_cuda:
        forward, backward = torch.compile(activate), torch.compile(pulled_back)
    return [
        lambda: _ops.quantize(forward(x), config, _ops.INPUT, True),
        lambda: _ops.quantize_activation(x, None, code, config, True),
        lambda: _ops.quantize(backward(grad, x), config, _ops.GRAD_OUTPUT, True),
        lambda: _ops.quantize_activation_backward(grad, x, code, config, False),
    ]


def main() -> int:
    known = [f"{name}-{recipe}" for name in EAGER for recipe in RECIPES]
    parser = common.parser(__doc__, known)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    device = common.device_of(options)
    rows, cols = (64, 128) if options.emulate else (8192, 14336)
    x, grad = (torch.randn(rows, cols, device=device).bfloat16() for _ in range(2))
    print(common.headline(f"[{rows}, {cols}] in bf16", device))
    table, figures = [], {}
    for variant in common.names_of(options.variants, known):
        name, _, recipe = variant.partition("-")
        config = of_float8.pack(recipe, options.emulate, False, False)
        calls = calls_of(name, config, x, grad)
        for call in calls:
            call()
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(1 if options.emulate else options.rounds):
            for found, call in zip(times, calls, strict=True):
                found.append(common.sample(call, 1 if options.emulate else 5))
        us = [sorted(found)[len(found) // 2] * 1e3 for found in times]
        figures[variant] = us
        table.append([variant, *(f"{each:.0f}" for each in us)])
    header = ["us", "forward, one by one", "fused", "backward, one by one", "fused"]
    common.print_table(header, table)
    common.write_json(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
