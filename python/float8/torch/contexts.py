"""The contexts of autograd functions: what they keep between forward and backward, and which gradients a backward is for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_is_executed = torch._C._will_engine_execute_node


def keep_parts(ctx: Any, *parts: Tensor | None) -> None:
    """Keeps parts of a scale state for the backward of an autograd.Function, besides its saved tensors.

    Hooks of saved tensors, such as those of activation offload, copy these, and a copy is no part of a state.
    Graphs of torch.compile have the saved ones.
    """
    ctx.parts = None if torch.compiler.is_compiling() else parts


def parts_kept(ctx: Any, *saved: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the parts that keep_parts was given, which were saved as `saved`."""
    return saved if ctx.parts is None else ctx.parts


def release_saved(ctx: Any) -> None:
    """Leaves what was saved to the caller's variables alone, where the graph is not kept."""
    release = getattr(ctx, "maybe_clear_saved_tensors", None)
    if release is not None and not torch.compiler.is_compiling():
        release()


def wanted_grads(ctx: Any) -> tuple[bool, ...]:
    """Returns, in backward, which inputs of an autograd.Function get a gradient, as `ctx.needs_input_grad` has them.

    PyTorch tells which inputs required one in forward, and not which of them this backward is for. The schedules
    of pipelines with zero bubbles ask for x's gradient first and for the weights' later, and `torch.autograd.grad`
    and `backward(inputs=...)` name what they want: the rest is work for nothing.
    """
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
    except RuntimeError:  # a leaf whose gradient torch.autograd.grad returns
        return True
