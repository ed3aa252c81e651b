"""SwiGLU experts with weights of their own, for layers that are in no library."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from float8 import recipes
from float8.recipes import Recipe
from float8.torch import _ops
from float8.torch.experts import tensor_parallel
from float8.torch.experts.call import Ranks, moe
from float8.torch.experts.delayed import ExpertLinear
from float8.torch.experts.modules import Float8Experts, check_x, own_of, weights_of
from float8.torch.experts.ops import MOST_EXPERTS
from float8.torch.experts.recipe import config_of
from float8.torch.layer.linear import check_switches, resolve_recipe


class Experts(Float8Experts):
    """SwiGLU experts behind a router: `functional.moe` with weights of its own.

    w13: [num_experts, 2 hidden_dim, dim], the gates first; w2: [num_experts, dim, hidden_dim]. They begin like
        the weights of num_experts nn.Linear.

    num_experts: 1 to 1024; with a `group` in forward those of this rank, or those of all ranks where the weights
        are made DTensors with Shard(0) over that group.
    dim, hidden_dim: multiples of 16; with a `tp_group` in forward hidden_dim is this rank's part.
    recipe: as for functional.moe, and "delayed". With delayed scaling, give the model's layers their scale state by
        `attach_scales`; a conversion of the model does it. The recipe, emulate, saturate and recompute are then those of all
        layers with delayed scaling.
    emulate, recompute, saturate: as for functional.moe.

    convert_to_float8_training(experts=True) gives it another recipe, as it does converted experts, and
    cache_weight_casts keeps fp8 copies of its weights.

    Raises ValueError for sizes, or a recipe, that experts cannot have.
    """

    def __init__(
        self,
        num_experts: int,
        dim: int,
        hidden_dim: int,
        *,
        recipe: str | Recipe = "tensorwise",
        emulate: bool = False,
        recompute: bool | None = None,
        saturate: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dim % 16 != 0 or hidden_dim % 16 != 0 or min(dim, hidden_dim) < 16:
            raise ValueError(
                f"float8: Experts has dim {dim} and hidden_dim {hidden_dim}; fp8 needs multiples of 16"
            )
        if not 1 <= num_experts <= MOST_EXPERTS:
            raise ValueError(
                f"float8: Experts has {num_experts} experts; they are 1 to {MOST_EXPERTS}"
            )
        check_switches(emulate=emulate, saturate=saturate, recompute=recompute)
        where = {"device": device, "dtype": dtype}
        self.w13 = nn.Parameter(torch.empty(num_experts, 2 * hidden_dim, dim, **where))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim, **where))
        self.reset_parameters()
        resolved = resolve_recipe(recipe)
        self.experts_config = config_of(resolved, emulate, saturate, recompute, True)
        self.experts_recipe = resolved.name or "custom"
        self.experts_in_fp8 = resolved.output.b.fp8
        if resolved.delayed:
            config = recipes.pack(
                resolved, emulate=emulate, saturate=saturate, recompute=recompute is True
            )
            self.expert_linears = [
                ExpertLinear(self, name, resolved, config) for name in weights_of(self)
            ]

    def extra_repr(self) -> str:
        experts, dim, hidden_dim = self.w2.shape
        sizes = f"num_experts={experts}, dim={dim}, hidden_dim={hidden_dim}"
        return f"{sizes}, {super().extra_repr()}"

    def reset_parameters(self) -> None:
        """Draws the weights anew."""
        for weight in (self.w13, self.w2):
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_scores: torch.Tensor,
        *,
        group: Any = None,
        dispatch_dtype: torch.dtype | None = None,
        tp_group: Any = None,
    ) -> torch.Tensor:
        """Returns functional.moe of these arguments.

        Raises ValueError for weights that are DTensors, but with Shard(0) over `group`.
        """
        x = _ops.of_autocast(x)
        check_x(self, x, self.experts_config)
        w13, w2 = (_of_rank(name, getattr(self, name), group) for name in ("w13", "w2"))
        own = own_of(self, {"w13": w13, "w2": w2}, x.dtype)
        if self.expert_linears and own.scales.w13 is None:
            raise ValueError(
                "float8: Experts has delayed scaling, and its model no scale state: call float8.torch.attach_scales with "
                "the model"
            )
        if tensor_parallel.name_of(tp_group) is not None:
            tensor_parallel.share_state(self.expert_linears, tp_group)
        operands = (x, topk_ids, topk_scores, w13, w2)
        ranks = Ranks(group, dispatch_dtype, tp_group)
        return moe(*operands, self.experts_config, self.experts_recipe, ranks, own)


Experts.experts_kind = Experts


def _of_rank(name: str, weight: Any, group: Any) -> torch.Tensor:
    """Returns a rank's own experts of a weight that ranks of the group share."""
    if not hasattr(weight, "_local_tensor"):
        return weight  # type: ignore[no-any-return]
    mesh, placements = weight.device_mesh, weight.placements
    for i, at in enumerate(placements):
        whole = at.is_replicate() or mesh.size(i) == 1
        if not whole and (getattr(at, "dim", None) != 0 or mesh.get_group(i) is not group):
            raise ValueError(
                f"float8: {name} of Experts is a DTensor with placements {placements}; share whole experts (Shard(0)) over "
                "one dimension of a mesh, and give forward its process group as group. Parts of the hidden features are "
                "plain tensors, with tp_group"
            )
    return weight.to_local()  # type: ignore[no-any-return]
