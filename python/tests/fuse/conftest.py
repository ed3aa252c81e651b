"""Fixtures of tests of graphs that torch.compile makes of norms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from float8.torch import _ops, norm_casts, shared_casts

_NORM_CASTS = (
    _ops.quantize_rms_norm,
    _ops.quantize_rms_norm_again,
    _ops.quantize_layer_norm,
    _ops.quantize_layer_norm_again,
)


@pytest.fixture
def graphs_anew() -> Iterator[None]:
    """Graphs are compiled anew, with fused multiply-adds where GPUs have them: the bias of a LayerNorm.

    C++ without vectors is compiled in three quarters of the time.
    """
    torch._dynamo.reset()
    options = {
        "fx_graph_cache": False,
        "cpp.enable_floating_point_contract_flag": "fast",
        "cpp.simdlen": 1,
    }
    with torch._inductor.config.patch(options):
        yield
    torch._dynamo.reset()


@pytest.fixture
def casts(graphs_anew: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the casts of norms in each graph that is compiled."""
    found: list[int] = []
    apply = norm_casts.cast_norms

    def counting(graph: Any) -> None:
        apply(graph)
        found.append(sum(node.target in _NORM_CASTS for node in graph.nodes))

    monkeypatch.setattr(shared_casts.norm_casts, "cast_norms", counting)
    return found
