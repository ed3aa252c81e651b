"""float8: fp8 linear layers for Hopper GPUs.

`import float8` has what needs no PyTorch: recipes, the tuning table and the filter that it implies.
`import float8.torch` has the layers, and `float8.torchao` torchao's names for them.
"""

from __future__ import annotations

from float8._library import library as _load
from float8.filter import (
    AttentionVerdict,
    Layer,
    Verdict,
    Wire,
    attention_verdicts,
    explain,
    filter_layers,
)
from float8.recipes import Cast, Format, Gemm, Granularity, Recipe, Scaling

__all__ = [
    "AttentionVerdict",
    "Cast",
    "Format",
    "Gemm",
    "Granularity",
    "Layer",
    "Recipe",
    "Scaling",
    "Verdict",
    "Wire",
    "attention_verdicts",
    "explain",
    "filter_layers",
    "table_info",
]


def __getattr__(name: str) -> str:
    if name == "__version__":
        return str(_load().float8_version().decode())
    raise AttributeError(f"module 'float8' has no attribute {name!r}")


def table_info(table: str | None = None) -> str:
    """Describes a tuning table's file, or without one the built-in table, in a few lines."""
    from float8._library import Context

    with Context(table) as context:
        return context.table_info()
