"""Which linears of a model to convert, decided from its names, its sizes and the tuning table."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import nn

from float8.filter import Layer, Verdict, filter_layers
from float8.recipes import Recipe
from float8.torch.convert import ModuleFilter


def verdicts(
    model: nn.Module,
    recipe: str | Recipe,
    tokens: int,
    *,
    names: Sequence[str] = (),
    policy: str = "measured",
    margin: float = 0.02,
    table: str | os.PathLike[str] | None = None,
    verdicts: str | os.PathLike[str] | None = None,
    device: int | None = None,
    fsdp: int = 1,
    tp: int = 1,
    hosts: int | None = None,
    network_gbit: float | None = None,
) -> list[Verdict]:
    """Returns what float8.filter_layers says about the nn.Linear layers of a model."""
    layers = [
        Layer(name, module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    return filter_layers(
        layers,
        recipe,
        tokens,
        names=names,
        policy=policy,
        margin=margin,
        table=table,
        verdicts=verdicts,
        device=device,
        fsdp=fsdp,
        tp=tp,
        hosts=hosts,
        network_gbit=network_gbit,
    )


def module_filter(found: Sequence[Verdict]) -> ModuleFilter:
    """Returns a module_filter_fn that converts the layers that the verdicts convert.

    found = float8.torch.verdicts(model, "rowwise", tokens=8192, names=["output"])
    convert_to_float8_training(model, module_filter_fn=module_filter(found), config="rowwise")
    """
    wanted = {verdict.layer.name for verdict in found if verdict.convert}
    return lambda _, name: name in wanted
