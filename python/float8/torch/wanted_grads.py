"""Which gradients a backward is asked for.

PyTorch tells an autograd.Function which inputs required a gradient in forward, and not which of them this backward
is for. The schedules of pipelines with zero bubbles ask for x's gradient first and for the weights' later, and
`torch.autograd.grad` and `backward(inputs=...)` name what they want: the rest is work for nothing.
"""

from __future__ import annotations

from typing import Any

import torch

_is_executed = torch._C._will_engine_execute_node


def wanted_grads(ctx: Any) -> tuple[bool, ...]:
    """Returns, in backward, which inputs of an autograd.Function get a gradient, as `ctx.needs_input_grad` has them."""
    needs: tuple[bool, ...] = ctx.needs_input_grad
    if torch.compiler.is_compiling():
        return needs
    wanted = [_is_wanted(node) for node, _ in ctx.next_functions if node is not None]
    if all(wanted):
        return needs
    # The inputs that required a gradient have an edge each, in their order.
    edges = iter(wanted)
    return tuple(need and next(edges) for need in needs)


def _is_wanted(node: Any) -> bool:
    try:
        return _is_executed(node)
    except (
        RuntimeError
    ):  # what the call refuses is a leaf whose gradient torch.autograd.grad returns
        return True
