"""Small models of transformers whose attention is converted, and what tests see of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

transformers = pytest.importorskip("transformers")


def model_of(kind: str, device: str, **more: Any) -> Any:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "max_position_embeddings": 64,
        "use_cache": False,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **more})
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(device, torch.bfloat16)


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> list[str]:
    return [name for name, p in model.named_parameters() if torch.equal(p, before[name])]


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class Wrapper(nn.Module):
    """PyTorch's attention as a module."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
    ) -> Tensor:
        return functional.scaled_dot_product_attention(
            q, k, v, scale=scale, enable_gqa=enable_gqa, is_causal=is_causal
        )


def noted_windows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the windows of the forwards in fp8 that will have run, in order."""
    return noted_forwards(monkeypatch, lambda args, more: args[5])


def noted_forwards(
    monkeypatch: pytest.MonkeyPatch, note: Callable[[tuple[Any, ...], dict[str, Any]], Any]
) -> list[Any]:
    """Returns what `note` makes of the arguments of the forwards in fp8 that will have run, in order."""
    from float8.torch import attention

    found: list[Any] = []
    forward = attention.attention_forward

    def noted(*args: Any, **more: Any) -> Any:
        found.append(note(args, more))
        return forward(*args, **more)

    monkeypatch.setattr(attention, "attention_forward", noted)
    return found
