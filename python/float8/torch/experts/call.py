"""The experts of a mixture behind their router, over the ranks that share them: functional.moe."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from float8.torch import _ops
from float8.torch.experts import expert_parallel, ops, rank_sums, tensor_parallel
from float8.torch.experts.moe import NOTHING, Own, Weights, check, parts_of, shaped, swiglu_experts


class Ranks(NamedTuple):
    """The arguments of functional.moe that are about ranks."""

    group: Any = None
    dispatch_dtype: torch.dtype | None = None
    tp_group: Any = None


def moe(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_scores: torch.Tensor,
    w13: Weights,
    w2: torch.Tensor,
    config: int,
    recipe: str,
    ranks: Ranks,
    own: Own = NOTHING,
) -> torch.Tensor:
    """Computes functional.moe of a config.

    recipe: its name, for messages.
    own: what a module has for its weights, of which w13 is one.
    """
    group, dispatch_dtype, tp_group = ranks
    expert_parallel.check_dispatch(group, dispatch_dtype)
    tensor_parallel.check_group("tp_group", tp_group, "whose ranks the hidden features are spread")
    x = _ops.of_autocast(x)
    tokens = x.reshape(-1, x.shape[-1])
    if isinstance(w13, torch.Tensor):
        w13 = w13.flatten(1, 2) if w13.dim() == 4 else w13
    else:
        w13 = tuple(w13)  # type: ignore[assignment] # check says where they are not two
    check(x, topk_ids, topk_scores, w13, w2)
    ops.check_high_precision(x, config, lambda: f"experts, recipe {recipe},")
    ids, scores = (each.reshape(-1, each.shape[-1]) for each in (topk_ids, topk_scores))
    for each in (w13,) if isinstance(w13, torch.Tensor) else w13:
        ops.check_weight(tokens, each)
    shared = tensor_parallel.name_of(tp_group)
    if shared is not None:
        tensor_parallel.check(tokens, parts_of(w13, w2), config, tp_group, tp_group)
        tokens, scores = (rank_sums.enter(each, shared) for each in (tokens, scores))
    operands = (tokens, ids, scores, w13, w2, config)
    if group is None:
        y = swiglu_experts(*operands, shared, own)
    else:
        in_fp8 = dispatch_dtype is not None
        y = expert_parallel.moe_over_ranks(*operands, recipe, group, in_fp8, shared, own)
    return shaped(y if shared is None else rank_sums.leave(y, shared), x.shape)
