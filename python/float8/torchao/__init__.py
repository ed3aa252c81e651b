"""torchao.float8's names, over float8's layers. The one line that a user of torchao changes:

from float8.torchao import convert_to_float8_training, Float8LinearConfig
"""

from __future__ import annotations

from float8.torchao._install import install
from float8.torchao.config import (
    CastConfig,
    ConfigError,
    DelayedScalingConfig,
    Float8GemmConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingGranularity,
    ScalingType,
)
from float8.torchao.float8_linear_utils import (
    _auto_filter_for_recipe,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from float8.torchao.fsdp_utils import precompute_float8_dynamic_scale_for_fsdp

__all__ = [
    "CastConfig",
    "ConfigError",
    "DelayedScalingConfig",
    "Float8GemmConfig",
    "Float8LinearConfig",
    "Float8LinearRecipeName",
    "ScalingGranularity",
    "ScalingType",
    "_auto_filter_for_recipe",
    "convert_to_float8_training",
    "install",
    "precompute_float8_dynamic_scale_for_fsdp",
    "sync_float8_amax_and_scale_history",
]
