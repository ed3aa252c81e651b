"""Mixtures of experts whose weights FSDP shards, and what their tests have in common."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import ranks
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import float8.torch as f8
from float8.torch.experts import modules
from float8.torch.experts.modules import Float8Experts
from float8.torch.shard.gathered_weight import GatheredWeight

HIDDEN = 64


def qwen(experts: int, expert_size: int = 48) -> Any:
    """Returns a model of two layers, whose experts are one MLP each."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "vocab_size": 64,
        "intermediate_size": 96,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    moe = {
        "moe_intermediate_size": expert_size,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **moe)).to(ranks.device)


_SMALL = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 1,
}


def gpt_oss(experts: int) -> Any:
    """Returns a model whose experts have biases, and weights that are stored as [E, K, N]."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    return GptOssForCausalLM(GptOssConfig(**_SMALL, num_local_experts=experts)).to(ranks.device)


def llama4(experts: int) -> Any:
    """Returns a model whose experts are one MLP, of weights that are stored as [E, K, N]."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    torch.manual_seed(0)
    own = {"intermediate_size_mlp": 96, "interleave_moe_layer_step": 1, "pad_token_id": 0}
    config = Llama4TextConfig(**_SMALL, **own, num_local_experts=experts)
    return Llama4ForCausalLM(config).to(ranks.device)


class _Weights(nn.Module):
    def __init__(self, experts: int, n: int = 48, k: int = HIDDEN) -> None:
        super().__init__()
        sizes = {"w1": (n, k), "w2": (k, n), "w3": (n, k)}
        for name, size in sizes.items():
            setattr(self, name, nn.Parameter(torch.randn(experts, *size) / 8))


class GroupedExperts(_Weights):
    """torchtitan's experts, as a conversion knows them: their GEMMs are a method."""

    __module__ = "torchtitan.models.common.moe"

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        offs = torch.cumsum(num_tokens_per_expert, dim=0, dtype=torch.int32)
        w1, w2, w3 = (each.bfloat16().mT for each in (self.w1, self.w2, self.w3))
        h = nn.functional.silu(self._grouped_mm(A=x.bfloat16(), B_t=w1, offs=offs))
        h = h * self._grouped_mm(A=x.bfloat16(), B_t=w3, offs=offs)
        return self._grouped_mm(A=h, B_t=w2, offs=offs).type_as(x)

    def _grouped_mm(
        self, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor
    ) -> torch.Tensor:
        return torch._grouped_mm(A, B_t, offs=offs)


class FirstGroupedExperts(_Weights):
    """Those of the first releases, whose GEMMs are in functions."""

    __module__ = "torchtitan.models.moe"

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


FirstGroupedExperts.__name__ = "GroupedExperts"


class Layer(nn.Module):
    """Experts of tokens that are sorted already, with as many tokens each as the number of its rows."""

    def __init__(self, experts: int, kind: type[nn.Module] = GroupedExperts, n: int = 48) -> None:
        super().__init__()
        self.experts = kind(experts, n)  # type: ignore[call-arg]
        self.count = experts  # those of this rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = self.count
        even = torch.full((count,), x.shape[0] // count, device=x.device)
        y: torch.Tensor = self.experts(x, even)
        return x + y


def layers(experts: int, kind: type[nn.Module] = GroupedExperts, n: int = 48) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(experts, kind, n), Layer(experts, kind, n)).to(ranks.device)


def rows(world: int, count: int = 48) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(world, count, HIDDEN, device=ranks.device)


def keep_pairs_apart() -> None:
    """Has torchtitan's w1 and w3 in linears of their own in this process, as fp8 gathers have them."""
    modules.joins_pairs = lambda _: False


def convert(model: Any, recipe: Any, gather: bool, **options: Any) -> Any:
    config = f8.LinearConfig(
        recipe,
        emulate=ranks.device == "cpu",
        enable_fsdp_float8_all_gather=gather,
        **options,
    )
    return f8.convert_to_float8_training(model, config=config, experts=True)


def own_layers(model: nn.Module) -> list[Any]:
    """Returns the layers of a sequence, without the scale state that delayed scaling adds to it."""
    return [each for name, each in model.named_children() if name != "float8_scales"]


def shard(model: Any, mesh: Any, dim: int = 0, **options: Any) -> Any:
    """Shards the layers of a copy of a model, the experts over that dimension."""

    def placement(weight: nn.Parameter) -> Shard | None:
        return Shard(dim) if weight.dim() == 3 else None

    sharded = copy.deepcopy(model)
    for layer in sharded.model.layers if hasattr(sharded, "model") else own_layers(sharded):
        fully_shard(layer, mesh=mesh, shard_placement_fn=placement, **options)
    return fully_shard(sharded, mesh=mesh, **options)


def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return out


def batches(world: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(0, 64, (world, 2, 16), device=ranks.device)


def gathered_weights(model: nn.Module) -> list[tuple[nn.Module, str]]:
    return [
        (module, name)
        for module in model.modules()
        if isinstance(module, Float8Experts)
        for name in module.expert_weights
    ]


def watch(model: nn.Module) -> list[bool]:
    """Returns a list that the forwards of experts lengthen: whether each weight has copies alone."""
    seen: list[bool] = []

    def look(module: Any, *_: Any) -> None:
        seen.extend(
            isinstance(getattr(weight, "_local_tensor", weight), GatheredWeight)
            for weight in module._parameters.values()
            if weight is not None and weight.dim() == 3
        )

    for module in model.modules():
        if isinstance(module, Float8Experts):
            module.register_forward_pre_hook(look)
    return seen


def expect_changes(before: dict[str, torch.Tensor], model: Any) -> None:
    """Fails where an expert of a weight is as it was."""
    for name, parameter in model.named_parameters():
        own = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        if own.dim() == 3:
            assert all(not torch.equal(a, b) for a, b in zip(own, before[name], strict=True)), name


def copies_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def weights_in_forward(model: nn.Module, x: torch.Tensor) -> list[Any]:
    """Returns the weights of experts that a forward has."""
    seen: list[Any] = []
    hooks = [
        module.register_forward_pre_hook(lambda each, *_: seen.extend(each._parameters.values()))
        for module in model.modules()
        if isinstance(module, Float8Experts)
    ]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return seen


def equal_steps_of(
    plain: Any, mesh: Any, rank: int, world: int, recipe: str, dim: int, fused: bool
) -> None:
    """Trains with fp8 gathers, with gathers in high precision and on one rank."""
    in_f32 = recipe != "rowwise_with_gw_hp"
    if not in_f32:
        plain.bfloat16()
    fp8 = shard(convert(copy.deepcopy(plain), recipe, True), mesh, dim)
    single = convert(plain, recipe, False)
    high = shard(single, mesh, dim)
    seen = watch(fp8)
    kind = {"fused": True} if fused else {"foreach": True}
    # On two CPUs sums of gradients have one order, and one rounding. Delayed scales of x are those of all ranks.
    with_single = world == 2 and in_f32 and recipe != "delayed" and ranks.device == "cpu"
    trained = [fp8, high, single] if with_single else [fp8, high]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, **kind) for m in trained]
    before = copies_of(single)
    batch = batches(world)
    for step in range(3):
        losses = [loss(model, batch[rank]) for model in (fp8, high)]
        losses.append(loss(trained[-1], batch[rank]))
        assert all(torch.equal(each, losses[0]) for each in losses), step
        for each in losses[:2]:
            each.backward()
        if with_single:
            for part in batch:
                (loss(single, part) / world).backward()
        for (name, a), b in zip(fp8.named_parameters(), high.parameters(), strict=True):
            assert torch.equal(a.grad.to_local(), b.grad.to_local()), (step, name)
        if recipe == "delayed":
            expect_equal_scales([fp8, high])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 0:
            f8.precompute_float8_dynamic_scale_for_fsdp(fp8)
        weights = [copies_of(model) for model in trained]
        for name, own in weights[0].items():
            assert all(torch.equal(own, other[name]) for other in weights[1:]), (step, name)
    cut = recipe == "blockwise" and dim == 1
    assert seen == 3 * 2 * [True, not cut]
    expect_changes(before, fp8)


def expect_equal_scales(models: list[Any]) -> None:
    """Ends a step of models with delayed scaling, whose scale states are one."""
    for model in models:
        f8.sync_float8_amax_and_scale_history(model)
    one, *others = (model.float8_scales._live for model in models)
    assert all(torch.equal(one, other) for other in others)


def expect_equal_steps(
    models: list[Any],
    x: torch.Tensor,
    steps: int = 2,
    all_in_fp8: bool = True,
    micro_batches: int = 1,
    of: Callable[[Any, torch.Tensor], torch.Tensor] = lambda model, x: model(x),
) -> list[bool]:
    """Trains models, which have fp8 gathers and none; returns what `watch` found in the first one."""
    seen = watch(models[0])
    # An op on several parameters is for those of one mesh.
    one_mesh = len({each.device_mesh for each in models[0].parameters()}) == 1
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=one_mesh) for m in models]
    before = copies_of(models[0])
    for _ in range(steps):
        for _ in range(micro_batches):
            ys = [of(model, x) for model in models]
            assert all(torch.equal(y, ys[0]) for y in ys)
            for y in ys:
                y.square().mean().backward()
        if hasattr(models[0], "float8_scales"):
            expect_equal_scales(models)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for own, *others in zip(*(model.parameters() for model in models), strict=True):
            assert all(torch.equal(own.to_local(), other.to_local()) for other in others)
    assert seen and all(seen) >= all_in_fp8
    expect_changes(before, models[0])
    return seen


def import_torchtitan(folder: str) -> Any:
    """Returns torchtitan's styles, whose permutation of rows has no kernel for a CPU."""
    sys.path.insert(0, folder)
    from torchtitan.distributed import expert_parallel
    from torchtitan.models.moe import utils

    if ranks.device == "cpu":
        on_cpu = functools.partial(utils.generate_permute_indices, use_cpu=True)
        utils.generate_permute_indices = on_cpu
    return expert_parallel


def _by_checkpoint(model: nn.Module, folder: str) -> None:
    own = get_model_state_dict(model)  # a scale state stays as it is
    state = {name: 2 * p.detach() if p.is_floating_point() else p for name, p in own.items()}
    dcp.save(state, checkpoint_id=folder)
    loaded = get_model_state_dict(model)
    dcp.load(loaded, checkpoint_id=folder)
    set_model_state_dict(model, loaded)


# Each doubles all parameters of a model, with a folder of its own.
WAYS_TO_DOUBLE: dict[str, Callable[[Any, str], object]] = {
    "in place": lambda model, _: [p.mul_(2) for p in model.parameters()],
    "data": lambda model, _: [p.data.mul_(2) for p in model.parameters()],
    "foreach": lambda model, _: torch._foreach_mul_(list(model.parameters()), 2),
    "a checkpoint": _by_checkpoint,
}
