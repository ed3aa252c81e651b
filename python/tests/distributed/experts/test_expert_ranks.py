"""fp8 experts under FSDP2: their weights are gathered in their own type, experts whole or in parts."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import ranks
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import float8.torch as f8

pytest.importorskip("transformers")


def _model(experts: int, recipe: str) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "intermediate_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    moe = {"moe_intermediate_size": 48, "num_experts": experts, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **moe)).to(ranks.device)
    return f8.convert_to_float8_training(
        model, config=f8.LinearConfig(recipe, emulate=ranks.device == "cpu"), experts=True
    )


def _loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def _rank(
    mesh: Any, rank: int, world: int, unit: str, experts: int, recipe: str, mixed: bool
) -> None:
    single = _model(experts, recipe)
    model = copy.deepcopy(single)
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    )
    for layer in model.model.layers:
        own: nn.Module = layer.mlp.experts
        fully_shard(own if unit == "experts" else layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, single)]
    before = {name: p.detach().clone() for name, p in single.named_parameters()}
    batch = torch.randint(0, 64, (world, 2, 16), device=ranks.device)
    for _ in range(3):
        _loss(model, batch[rank]).backward()
        for part in batch:
            (_loss(single, part) / world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, sharded), whole in zip(model.named_parameters(), single.parameters(), strict=True):
        own = sharded.full_tensor()
        if not mixed:
            assert torch.equal(own, whole), name
        if "experts" in name:
            assert all(not torch.equal(a, b) for a, b in zip(own, before[name], strict=True)), name
    state = get_model_state_dict(model)
    assert list(state) == list(single.state_dict())


@pytest.mark.parametrize("unit", ["layer", "experts"])
@pytest.mark.parametrize(("experts", "recipe"), [(4, "rowwise"), (3, "blockwise")])
def test_has_the_bits_of_one_rank(unit: str, experts: int, recipe: str, tmp_path: Any) -> None:
    """Also where ranks have other numbers of experts."""
    ranks.spawn(_rank, 2, tmp_path, unit, experts, recipe, False)


def test_trains_with_mixed_precision(tmp_path: Any) -> None:
    ranks.spawn(_rank, 2, tmp_path, "layer", 4, "rowwise", True)


def _late(mesh: Any, rank: int, world: int) -> None:
    """Experts that are a unit already are left and named; those below a unit are converted."""
    model = _model(4, "rowwise")
    first, second = (layer.mlp.experts for layer in model.model.layers)
    fully_shard(first, mesh=mesh)
    fully_shard(model.model.layers[1], mesh=mesh)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = f8.LinearConfig("blockwise", emulate=ranks.device == "cpu")
        f8.convert_to_float8_training(
            model, config=config, module_filter_fn=lambda *_: False, experts=True
        )
    assert "fully_shard was called on it" in " ".join(str(each.message) for each in caught)
    assert (first.experts_recipe, second.experts_recipe) == ("rowwise", "blockwise")


def test_leaves_units_of_fsdp(tmp_path: Any) -> None:
    ranks.spawn(_late, 2, tmp_path)
