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


def _model(number: int, recipe: str, experts: bool = True) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "intermediate_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    moe = {"moe_intermediate_size": 48, "num_experts": number, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **moe)).to(ranks.device)
    return f8.convert_to_float8_training(
        model, config=f8.LinearConfig(recipe, emulate=ranks.device == "cpu"), experts=experts
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


def _convert_again(model: Any, recipe: str, gather: bool) -> str:
    """Converts the experts alone, and returns what it warned of."""
    config = f8.LinearConfig(
        recipe, emulate=ranks.device == "cpu", enable_fsdp_float8_all_gather=gather
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        f8.convert_to_float8_training(
            model, config=config, module_filter_fn=lambda *_: False, experts=True
        )
    return " ".join(str(each.message) for each in caught)


def _late(mesh: Any, rank: int, world: int) -> None:
    """Experts in fp8 get another recipe when FSDP has them, but no other gathers; a unit of other experts is left."""
    model = _model(4, "rowwise")
    first, second = (layer.mlp.experts for layer in model.model.layers)
    fully_shard(first, mesh=mesh)
    fully_shard(model.model.layers[1], mesh=mesh)
    assert _convert_again(model, "blockwise", False) == ""
    assert (first.experts_recipe, second.experts_recipe) == ("blockwise", "blockwise")
    text = _convert_again(model, "rowwise", True)
    assert "each of 2 layers ('model.layers.*.mlp.experts') keeps its recipe, blockwise" in text
    assert "FSDP gathers its weights in their own type" in text and "not in fp8" not in text
    assert (first.experts_recipe, second.experts_recipe) == ("blockwise", "blockwise")
    batch = torch.arange(16, device=ranks.device).view(1, 16)
    _loss(model, batch).backward()
    for each in (first, second):
        assert all(weight.grad is not None for weight in each.parameters())
    plain = _model(4, "rowwise", experts=False)
    first, second = (layer.mlp.experts for layer in plain.model.layers)
    fully_shard(first, mesh=mesh)
    fully_shard(plain.model.layers[1], mesh=mesh)
    text = _convert_again(plain, "rowwise", False)
    assert "stays as it is, and its experts are not in fp8: fully_shard was called on it" in text
    assert not hasattr(first, "experts_recipe") and second.experts_recipe == "rowwise"


class _Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = f8.Experts(4, 64, 48, emulate=ranks.device == "cpu", device=ranks.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(2 * x.shape[0] * x.shape[1], device=x.device).view(*x.shape[:2], 2) % 4
        y: torch.Tensor = self.experts(x, ids, torch.ones_like(ids, dtype=torch.float32))
        y += 1  # in place: it drops the hook of a view
        return y


def _own_experts(mesh: Any, rank: int, world: int, gather: bool) -> None:
    """Experts of a layer of one's own are a unit of FSDP, which warns of no view; a later conversion says what is so."""
    model: Any = _Mixture()
    if gather:
        _convert_again(model, "rowwise", True)
    before = [weight.detach().clone() for weight in model.experts.parameters()]
    x = torch.ones(2, 8, 64, device=ranks.device) + torch.arange(64, device=ranks.device) / 64
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fully_shard(model.experts, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model(x).square().mean().backward()
        optimizer.step()
    assert not any("view" in str(each.message) for each in caught)
    for old, weight in zip(before, model.experts.parameters(), strict=True):
        assert not torch.equal(weight.full_tensor(), old)
    text = _convert_again(model, "tensorwise", not gather)
    assert "keeps its recipe" in text and "its experts stay as they are" in text
    assert "experts=True" not in text and "not in fp8" not in text


@pytest.mark.parametrize("gather", [False, True])
def test_own_experts_are_a_unit(gather: bool, tmp_path: Any) -> None:
    ranks.spawn(_own_experts, 2, tmp_path, gather)


def test_leaves_units_of_fsdp(tmp_path: Any) -> None:
    ranks.spawn(_late, 2, tmp_path)
