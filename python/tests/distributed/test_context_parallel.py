"""PyTorch's context_parallel, under which a rank's tensors are its part of the tokens."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch

import float8.torch as f8


def _rank(mesh: Any, rank: int, world: int) -> None:
    from torch.distributed.tensor.experimental import context_parallel

    x = torch.randn(1, 2, 32, 64, dtype=torch.bfloat16)

    def attend(**options: Any) -> torch.Tensor:
        y = f8.scaled_dot_product_attention(x, x, x, is_causal=True, emulate=True, **options)
        return y  # type: ignore[no-any-return]

    with context_parallel(mesh, buffers=[x.clone()], buffer_seq_dims=[2]):
        for options in ({}, {"recipe": "fp8"}):
            with pytest.raises(ValueError, match=r"share its tokens.*PyTorch.*bf16"):
                attend(**options)
    assert attend().shape == x.shape


def test_attention_in_fp8_refuses_parts_of_the_tokens(tmp_path: Any) -> None:
    ranks.spawn(_rank, 1, tmp_path)
