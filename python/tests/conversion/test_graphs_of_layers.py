"""Layers that are compiled one by one share a graph: torch.compile makes eight of a function, and computes in eager mode behind them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fused import tiny_model
from torch import nn

import float8.torch as f8

Config = Callable[..., f8.LinearConfig]
transformers = pytest.importorskip("transformers")


def _graphs_of(model: nn.Module) -> int:
    """Returns how many graphs the layers of a causal model have in a forward, each compiled by itself."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.compile(backend="aot_eager", fullgraph=True)
    ids = torch.arange(24, device=next(model.parameters()).device)[None]
    model(input_ids=ids, use_cache=False)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("kind", "recipe"), (("Llama", "delayed"), ("Phi3", "rowwise"), ("Starcoder2", "rowwise"))
)
def test_fused_mlps(kind: str, recipe: str, device: str, config: Config) -> None:
    """With gate and up, one linear that makes both, and without a gate."""
    model = tiny_model(kind).to(device, torch.bfloat16)
    options = {"module_filter_fn": lambda _, name: name != "lm_head"}
    f8.convert_to_float8_training(model, config=config(recipe), **options)
    f8.fuse(model, norms=True)
    kinds = [type(layer.mlp).__name__ for layer in model.model.layers]
    assert all(kind.startswith("Fused") for kind in kinds)
    assert _graphs_of(model) == 1


def test_experts(device: str, config: Config) -> None:
    model = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=64, hidden_size=64, moe_intermediate_size=48, num_experts=4, head_dim=16,
            num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        )
    ).to(device, torch.bfloat16)  # fmt: skip
    f8.convert_to_float8_training(model, config=config("rowwise"), experts=True)
    assert _graphs_of(model) == 1
