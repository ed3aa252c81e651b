"""Attention of DTensors: a rank computes with the batch and the heads that it has, which needs no other rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

_AXES = {4: ("batch", "heads", "tokens", "elements"), 3: ("tokens", "heads", "elements")}


def refusal(**tensors: torch.Tensor) -> str | None:
    """Returns why ranks cannot compute attention of these tensors each by itself, or None where they can."""
    plain = [name for name, x in tensors.items() if not isinstance(x, DTensor)]
    if plain:
        return f"{plain[0]} is no DTensor, and others are; distribute it too, or call to_local() on those"
    first: Any = tensors["query"]
    for name, x in tensors.items():
        reason = _refusal_of(name, x)
        if reason is not None:
            return reason
        own: Any = x
        if (own.device_mesh, own.placements) != (first.device_mesh, first.placements):
            return (
                f"{name} is a DTensor with {own.placements} on {own.device_mesh}, query with {first.placements} on "
                f"{first.device_mesh}; redistribute it as query is"
            )
    return None


def _refusal_of(name: str, x: Any) -> str | None:
    axes = _AXES[x.dim()]
    shared = [axis for axis in axes if axis in ("batch", "heads")]
    for ranks, at in zip(x.device_mesh.shape, x.placements, strict=True):
        if type(at) is Replicate:
            continue
        axis = axes[at.dim] if type(at) is Shard else None
        if axis not in shared:
            what = f"{at!r}, which shares {axis}" if axis else repr(at)
            return (
                f"{name} is a DTensor with {what}; ranks share {' or '.join(shared)}, or have the whole: "
                "redistribute query, key and value"
            )
        if x.shape[at.dim] % ranks != 0:
            return f"{name} has {x.shape[at.dim]} {axis}, which {ranks} ranks cannot share evenly; redistribute query, key and value"
    return None


def on_local(call: Callable[..., Any], query: Any, key: Any, value: Any) -> Any:
    """Returns what `call` returns for the parts of this rank, a result or that with its LSE, as DTensors with the
    placements of query.

    Raises ValueError for what `refusal` says.
    """
    reason = refusal(query=query, key=key, value=value)
    if reason is not None:
        raise ValueError(f"float8: attention: {reason}")
    own = call(*(x.to_local() for x in (query, key, value)))
    mesh, placements = query.device_mesh, query.placements
    if not isinstance(own, tuple):
        return DTensor.from_local(own, mesh, placements, run_check=False)
    o, lse = own
    if query.dim() == 3:  # [T, H, D] has an LSE [H, T]
        of_lse = [Shard(0) if isinstance(at, Shard) else at for at in placements]
    else:
        of_lse = list(placements)
    return tuple(
        DTensor.from_local(x, mesh, at, run_check=False)
        for x, at in ((o, placements), (lse, of_lse))
    )
