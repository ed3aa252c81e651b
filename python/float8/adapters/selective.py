"""Selective activation checkpointing by a trainer's own list of ops whose results are saved.

torchtitan's lists have PyTorch's matrix products, so that a linear in fp8 runs again in backward. The
conversions for torchtitan add the fp8 linears to the lists that are loaded. A linear then keeps its y,
2 bytes an element, and in eager mode what its own backward reads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from float8.torch import _ops as _ops

LINEARS = (
    torch.ops.float8.linear_forward.default,
    torch.ops.float8.gathered_forward.default,  # of a weight that FSDP gathers in fp8
)


def save_linears() -> int:
    """Adds the fp8 linears to the lists of torchtitan that are loaded; returns how many there are.

    Releases 0.2 have a set for each model, which its parallelization reads later, and 0.3 a function
    that returns a new set.
    """
    lists = 0
    for name, module in list(sys.modules.items()):
        if not name.startswith("torchtitan."):
            continue
        saved = getattr(module, "_op_sac_save_list", None)
        if isinstance(saved, set):
            saved.update(LINEARS)
            lists += 1
        default = getattr(module, "_get_default_save_ops", None)
        if callable(default):
            if not hasattr(default, "with_float8"):
                module._get_default_save_ops = _with_linears(default)  # type: ignore[attr-defined]
            lists += 1
    return lists


def _with_linears(default: Callable[[], set[Any]]) -> Callable[[], set[Any]]:
    def save_ops() -> set[Any]:
        return {*default(), *LINEARS}

    save_ops.with_float8 = True  # type: ignore[attr-defined]
    return save_ops
