"""Small models of transformers whose attention is converted, and what tests see of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


def noted_windows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the windows of the forwards in fp8 that will have run, in order."""
    from float8.torch import attention

    found: list[int] = []
    forward = attention.attention_forward

    def noted(*args: Any, **more: Any) -> Any:
        found.append(args[5])
        return forward(*args, **more)

    monkeypatch.setattr(attention, "attention_forward", noted)
    return found
