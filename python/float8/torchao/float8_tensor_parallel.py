"""torchao's styles of tensor parallelism."""

from __future__ import annotations

from float8.torch.layer.parallel_styles import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)

__all__ = ["Float8ColwiseParallel", "Float8RowwiseParallel", "PrepareFloat8ModuleInput"]
