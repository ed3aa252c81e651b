"""fp8 linear layers for PyTorch.

import float8.torch

float8.torch.convert_to_float8_training(model, config="rowwise")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from float8.torch import functional
from float8.torch.attention import scaled_dot_product_attention
from float8.torch.checks.rank_watch import Watch, watch
from float8.torch.checks.verify import verify_distributed
from float8.torch.experts.routing import check_routing
from float8.torch.functional import grouped_mm
from float8.torch.layer.attention_counters import AttentionCounters, attention_counters
from float8.torch.layer.attention_layers import convert_attention_to_float8, register_attention
from float8.torch.layer.convert import LinearConfig, convert_to_float8_training
from float8.torch.layer.filters import module_filter, verdicts
from float8.torch.layer.fuse import Fusion, fuse, register_mlp
from float8.torch.layer.linear import Float8Linear, prepare
from float8.torch.layer.norm_layers import register_norm
from float8.torch.layer.own_experts import Experts
from float8.torch.layer.weight_casts import WeightCasts, cache_weight_casts
from float8.torch.optim import AdamW
from float8.torch.ranks.agreement import agree
from float8.torch.ranks.collectives import DistributedError
from float8.torch.scales import attach_scales, sync_float8_amax_and_scale_history
from float8.torch.shard.fsdp import precompute_float8_dynamic_scale_for_fsdp
from float8.torch.shard.weight_changes import check_copies
from float8.torch.step_sync import sync_at_optimizer_steps
from float8.torch.tuning import tune_on_first_use
from float8.torch.varlen import check_sequences, varlen_attention

if TYPE_CHECKING:
    from float8.torch.layer.parallel_styles import (
        Float8ColwiseParallel,
        Float8RowwiseParallel,
        PrepareFloat8ModuleInput,
    )

__all__ = [
    "AdamW",
    "AttentionCounters",
    "DistributedError",
    "Experts",
    "Float8ColwiseParallel",
    "Float8Linear",
    "Float8RowwiseParallel",
    "Fusion",
    "LinearConfig",
    "PrepareFloat8ModuleInput",
    "Watch",
    "WeightCasts",
    "agree",
    "attach_scales",
    "attention_counters",
    "cache_weight_casts",
    "check_copies",
    "check_routing",
    "check_sequences",
    "convert_attention_to_float8",
    "convert_to_float8_training",
    "functional",
    "fuse",
    "grouped_mm",
    "module_filter",
    "precompute_float8_dynamic_scale_for_fsdp",
    "prepare",
    "register_attention",
    "register_mlp",
    "register_norm",
    "scaled_dot_product_attention",
    "sync_at_optimizer_steps",
    "sync_float8_amax_and_scale_history",
    "tune_on_first_use",
    "varlen_attention",
    "verdicts",
    "verify_distributed",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name in ("Float8ColwiseParallel", "Float8RowwiseParallel", "PrepareFloat8ModuleInput"):
        from float8.torch.layer import parallel_styles  # it loads DTensor, which takes a while

        return getattr(parallel_styles, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
