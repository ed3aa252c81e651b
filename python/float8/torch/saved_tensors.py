"""What an autograd.Function keeps between forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
