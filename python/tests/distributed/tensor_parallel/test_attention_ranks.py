"""Attention in fp8 on ranks: DTensors that share batch or heads."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import ranks
import torch
import transformers
from parallel_models import expect_trains_as
from reference import same
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import float8.torch as f8

RECIPES = ("fp8_forward", "fp8")
OFFSETS = (0, 17, 17, 40)


def _operands(shape: tuple[int, ...], heads: int = 4, of_keys: int = 2) -> list[Tensor]:
    """Returns query, key, value and the gradient of the result, the same on all ranks."""
    torch.manual_seed(1)
    counts = (heads, of_keys, of_keys, heads)
    return [torch.randn(*shape[:-2], n, *shape[-2:]).bfloat16() for n in counts]


def _attention(*tensors: Tensor, **options: Any) -> Tensor:
    y: Tensor = f8.scaled_dot_product_attention(
        *tensors, is_causal=True, enable_gqa=True, emulate=True, **options
    )
    return y


def _packed(*tensors: Tensor, **options: Any) -> Tensor:
    """Takes [H, T, D], as the others do."""
    query, key, value = (x.transpose(0, 1) for x in tensors)
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    y: Tensor = f8.varlen_attention(
        *(query, key, value, offsets, None, 23, 23),
        is_causal=True,
        enable_gqa=True,
        emulate=True,
        **options,
    )
    return y.transpose(0, 1)


def _step(call: Any, tensors: list[Tensor], **options: Any) -> list[Any]:
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    y = call(*leaves, **options)
    y.backward(tensors[3])
    return [y.detach(), *(x.grad for x in leaves)]


def _expect_as_one_rank(
    call: Any, mesh: Any, placements: tuple[Any, ...], tensors: list[Tensor], **options: Any
) -> None:
    expected = _step(call, tensors, **options)
    shared = [distribute_tensor(x, mesh, placements) for x in tensors]
    own = _step(call, shared, **options)
    assert all(x.placements == placements for x in own)
    assert [x.shape for x in own] == [x.shape for x in expected]
    assert same([x.full_tensor() for x in own], expected)


def _expect_lse_of_one_rank(mesh: Any, at: Any, tensors: list[Tensor], recipe: str) -> None:
    """The tensors are [B, H, S, D], or [T, H, D] of packed sequences."""
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)

    def call(*own: Tensor) -> Any:
        options: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "emulate": True}
        options["recipe"] = recipe
        if own[0].dim() == 3:
            return f8.varlen_attention(*own, offsets, None, 23, 23, return_lse=True, **options)
        return f8.scaled_dot_product_attention(*own, return_lse=True, **options)

    shared = [distribute_tensor(x, mesh, (at,)) for x in tensors[:3]]
    assert same([x.full_tensor() for x in call(*shared)], list(call(*tensors[:3])))


def _two_ranks(mesh: Any, rank: int, world: int, recipe: str) -> None:
    batch, pack = _operands((2, 40, 64)), _operands((40, 64))
    placements = (Shard(0), Shard(1), Replicate())
    for at in placements if recipe in RECIPES else ():  # PyTorch's own has none of a CPU
        _expect_as_one_rank(_attention, mesh, (at,), batch, recipe=recipe)
    for at in (Shard(0), Replicate()):
        _expect_as_one_rank(_packed, mesh, (at,), pack, recipe=recipe)
    _expect_as_one_rank(_attention, mesh, (Shard(1),), batch, recipe=recipe, window=9)
    for at in placements if recipe in RECIPES else ():
        _expect_lse_of_one_rank(mesh, at, batch, recipe)
    for at in (Shard(1), Replicate()):
        _expect_lse_of_one_rank(mesh, at, [x.transpose(0, 1) for x in pack], recipe)


@pytest.mark.parametrize("recipe", [*RECIPES, "bf16"])
def test_dtensors_have_the_bits_of_one_rank(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_two_ranks, 2, tmp_path, recipe)


def _four_ranks(mesh: Any, rank: int, world: int, recipe: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    batch = _operands((2, 40, 64), 8, 4)
    for at in ((Shard(0), Shard(1)), (Replicate(), Shard(1)), (Shard(1), Shard(1))):
        _expect_as_one_rank(_attention, mesh, at, batch, recipe=recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_dtensors_of_two_dimensions_of_ranks(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_four_ranks, 4, tmp_path, recipe)


def _refused(mesh: Any, rank: int, world: int) -> None:
    q, k, v, _ = _operands((2, 40, 64))

    def shared(*placements: Any, tensors: Any = (q, k, v)) -> list[Any]:
        return [
            DTensor.from_local(x, mesh, [at])
            if at.is_partial()
            else distribute_tensor(x, mesh, [at])
            for x, at in zip(tensors, placements, strict=True)
        ]

    def says(words: str, tensors: list[Any], call: Any = _attention) -> None:
        with pytest.raises(ValueError, match=words):
            call(*tensors)

    says(
        "query is a DTensor with Shard.*tokens; .*batch or heads.*redistribute",
        shared(*[Shard(2)] * 3),
    )
    says("query is a DTensor with Partial.*redistribute", shared(*[Partial()] * 3))
    says("value is a DTensor with Shard.*elements", shared(Shard(1), Shard(1), Shard(3)))
    says(
        "key is a DTensor with .*, query with .*redistribute",
        shared(Shard(1), Replicate(), Replicate()),
    )
    says("key is no DTensor", [*shared(Shard(1), tensors=(q,)), k, v])
    one_head = (q, k[:, :1], v[:, :1])
    says("key has 1 heads, which 2 ranks", shared(*[Shard(1)] * 3, tensors=one_head))
    says("query has 1 batch", shared(*[Shard(0)] * 3, tensors=[x[:1] for x in (q, k, v)]))
    pack = [x[0] for x in (q, k, v)]
    says(
        "query is a DTensor with Shard.*tokens; ranks share heads,",
        shared(*[Shard(1)] * 3, tensors=pack),
        _packed,
    )
    reason = f8.attention.refusal(*shared(*[Shard(2)] * 3))
    assert (
        reason is not None and "tokens" in reason
    )  # a converted model goes to PyTorch's attention


def test_other_placements_are_refused(tmp_path: Any) -> None:
    ranks.spawn(_refused, 2, tmp_path)


class _Wrapper(nn.Module):
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
        raise AssertionError("this is PyTorch's")


def _counting_rank(mesh: Any, rank: int, world: int) -> None:
    f8.register_attention(_Wrapper)
    model = nn.Sequential(_Wrapper())
    f8.convert_attention_to_float8(model, emulate=True)
    shared = [distribute_tensor(x, mesh, (Shard(1),)) for x in _operands((2, 140, 64))[:3]]
    found = []
    for tensors in (shared, [x.to_local() for x in shared]):
        with f8.attention_counters(model) as counters:
            model[0](*tensors, enable_gqa=True)
        found.append(counters.read())
    assert found[0] == found[1] and found[0]["0"].calls == 1


def test_dtensors_count_with_the_heads_of_their_rank(tmp_path: Any) -> None:
    ranks.spawn(_counting_rank, 2, tmp_path)


class _Llama(nn.Module):
    """The layers of a small Llama of transformers, whose bf16 attention is fp8's where it runs."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=1,
            num_key_value_heads=1,
            attn_implementation="sdpa",
        )
        self.model = transformers.LlamaModel(config).bfloat16()
        self.model.embed_tokens = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.model(inputs_embeds=x[None].bfloat16(), use_cache=False).last_hidden_state
        return y[0]


def _fsdp_rank(mesh: Any, rank: int, world: int, recipe: str, gather: bool) -> None:
    torch.manual_seed(0)
    model = _Llama()
    converted = f8.convert_attention_to_float8(model.model, recipe, emulate=True)
    assert len(converted) == 2
    config = f8.LinearConfig("rowwise", emulate=True, enable_fsdp_float8_all_gather=gather)
    f8.convert_to_float8_training(model, config=config)
    single = copy.deepcopy(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    before = [p.detach().clone() for p in single.parameters()]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="float8: attention")
        expect_trains_as(model, single, rank)
    assert not any(map(torch.equal, before, single.parameters()))


@pytest.mark.parametrize(("recipe", "gather"), [("fp8_forward", True), ("fp8", False)])
def test_fsdp2_shards_a_model_with_fp8_attention(recipe: str, gather: bool, tmp_path: Any) -> None:
    ranks.spawn(_fsdp_rank, 2, tmp_path, recipe, gather)
