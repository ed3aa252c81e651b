"""Which linears and experts of a model to convert, decided from its names, its sizes and the tuning table."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from torch import nn

from float8.filter import Verdict, check_tokens, filter_layers, list_of
from float8.torch.layer.convert import Config, ModuleFilter, resolve_config
from float8.torch.layer.convertible import device_of, is_convertible
from float8.torch.layer.experts import Experts, choose_experts
from float8.torch.layer.layers import check_names, expert_layers, layers_of


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
    device: int | str | None = None,
    fsdp: int = 1,
    tp: int = 1,
    hosts: int | None = None,
    network_gbit: float | None = None,
    experts: Experts = False,
    fuse: bool = False,
) -> list[Verdict]:
    """Returns what float8.filter_layers says about the linears that a conversion would exchange.

    config: as for convert_to_float8_training; its recipe counts.
    tokens_of, experts: as there; verdicts on experts come behind those on linears.
    names: each is part of a name of a linear, or of experts (ValueError).
    fuse: float8.torch.fuse will run the model's MLPs, as in float8.filter_layers.
    device: the CUDA device that is asked about, or one that was measured by a part of its name, as in
        float8.filter_layers; None: that of the weights, PyTorch's current one where they are on none, and
        the H100 without a Hopper GPU.
    """
    linears = {
        name or "root": module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and is_convertible(module)
    }
    options = resolve_config(config)
    chosen = choose_experts(
        model, experts, options.recipe, options.emulate, options.saturate, options.recompute
    )
    of_experts = [each.name or "root" for each in chosen]
    check_names(model, list_of(names), more=of_experts)
    layers = layers_of(model, linears, tokens_of, of_experts)
    if chosen:
        check_tokens("tokens", tokens)
        layers += expert_layers(model, chosen, tokens, tokens_of)
    return filter_layers(
        layers,
        options.recipe,
        tokens,
        names=names,
        policy=policy,
        margin=margin,
        table=table,
        verdicts=verdicts,
        device=device_of([*linears.values(), *(each.module for each in chosen)])
        if device is None
        else device,
        fsdp=fsdp,
        tp=tp,
        hosts=hosts,
        network_gbit=network_gbit,
        fuse=fuse,
    )


def module_filter(found: Sequence[Verdict]) -> ModuleFilter:
    """Returns a module_filter_fn, or `experts`, that converts the layers that the verdicts convert.

    found = float8.torch.verdicts(model, "rowwise", tokens=8192, names=["output"])
    convert_to_float8_training(model, module_filter_fn=module_filter(found), config="rowwise")
    """
    wanted = {verdict.layer.name for verdict in found if verdict.convert}
    return lambda _, name: (name or "root") in wanted
