"""FSDP2 with torchao's names: fp8 all-gathers of weights."""

from __future__ import annotations

from typing import NoReturn

from torch import nn

from float8.torch import notices
from float8.torch.shard import fsdp

__all__ = [
    "WeightWithDynamicFloat8CastTensor",
    "not_yet",
    "precompute_float8_dynamic_scale_for_fsdp",
]


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Casts the sharded weights, after the optimizer's step. Without Float8Linear it does nothing."""
    if notices.has_linears(module):
        fsdp.precompute_float8_dynamic_scale_for_fsdp(module)


class WeightWithDynamicFloat8CastTensor:
    """torchao's weight that is gathered in fp8. Here it is float8.torch.shard.fsdp.ShardedWeight."""

    def __init__(self, *_: object) -> None:
        not_yet("WeightWithDynamicFloat8CastTensor")


def not_yet(name: str) -> NoReturn:
    raise NotImplementedError(f"float8: {name} is not in this version")
