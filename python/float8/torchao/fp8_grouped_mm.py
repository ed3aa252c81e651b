"""The module of this name in torchao.prototype.moe_training, for float8.torchao.install()."""

from __future__ import annotations

import torch

from float8.torch import functional


def _to_fp8_rowwise_then_scaled_grouped_mm(
    A: torch.Tensor,
    B_t: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype | None = torch.bfloat16,
    float8_dtype: torch.dtype = torch.float8_e4m3fn,
    pad_token_groups_for_grouped_mm: bool = True,
) -> torch.Tensor:
    """Computes float8.torch.grouped_mm under the recipe rowwise, with torchao's arguments.

    A is cast to out_dtype, which the result has. Groups need no padding, so the option for it changes
    nothing. On a CPU it computes on the emulated device, for which torchao has no option here.

    Raises ValueError for another float8_dtype than torch.float8_e4m3fn, and as grouped_mm does.
    """
    if float8_dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"float8: float8_dtype is {float8_dtype}; experts have torch.float8_e4m3fn"
        )
    x = A if out_dtype is None else A.to(out_dtype)
    return functional.grouped_mm(x, B_t, offs, recipe="rowwise", emulate=not x.is_cuda)
