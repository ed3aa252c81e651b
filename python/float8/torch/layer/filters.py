"""Which linears of a model to convert, decided from its names, its sizes and the tuning table."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from torch import nn

from float8.filter import Verdict, filter_layers, list_of
from float8.torch.layer.convert import (
    Config,
    ModuleFilter,
    check_names,
    device_of,
    layers_of,
    resolve_config,
)
from float8.torch.layer.convertible import is_convertible


def verdicts(
    model: nn.Module,
    config: Config,
    tokens: int,
    *,
    tokens_of: Mapping[str, int] | None = None,
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
    """Returns what float8.filter_layers says about the linears that a conversion would exchange.

    config: as for convert_to_float8_training; its recipe counts.
    tokens_of: as there.
    names: each is part of a linear's name (ValueError).
    device: the CUDA device whose table answers; None: that of the weights, and the H100's where they
        are on none.
    """
    linears = {
        name or "root": module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and is_convertible(module)
    }
    check_names(model, list_of(names))
    return filter_layers(
        layers_of(model, linears, tokens_of),
        resolve_config(config).recipe,
        tokens,
        names=names,
        policy=policy,
        margin=margin,
        table=table,
        verdicts=verdicts,
        device=device_of(linears.values()) if device is None else device,
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
    return lambda _, name: (name or "root") in wanted
