"""Exchanging a model's linears, all of them or none."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn

from float8.filter import (
    AUTO_FILTER,
    Verdict,
    check_tokens,
    explain,
    filter_layers,
    list_of,
)
from float8.recipes import Recipe
from float8.torch import notices
from float8.torch.classes import is_sharded
from float8.torch.layer import stale_optimizers
from float8.torch.layer.convertible import (
    device_of,
    is_convertible,
    is_linear,
    refuse_sharded,
    without_unusual,
)
from float8.torch.layer.experts import (
    Chosen,
    Experts,
    choose_experts,
    convert_experts,
    expert_linears,
    names_of_experts,
)
from float8.torch.layer.layers import check_names, expert_layers, layers_of
from float8.torch.layer.linear import Float8Linear, check_switches, resolve_recipe
from float8.torch.scale_home import expect_scales
from float8.torch.scales import (
    attach_scales,
    drop_unused_states,
    refuse_second_state,
)
from float8.torch.shard import fsdp

ModuleFilter = Callable[[nn.Module, str], bool]
Path = str | os.PathLike[str]

_OF_SCALES = {"history": (1, 1024), "margin": (0, 16)}

# Elements, 2048 x 4096. Graphs of a model that has no larger weight keep copies by default: to cast them again takes some 10 % of
# its steps, which may be all that fp8 gains, as launches take longer there than what they read. With copies it needs no more memory
# than in bf16.
SMALL_WEIGHT = 1 << 23


@dataclasses.dataclass(frozen=True)
class LinearConfig:
    """The options of Float8Linear, which describes them, and of attach_scales.

    history and margin are of delayed scaling, and stay as they are with another recipe. With recompute=None a
    conversion none of whose weights has more than SMALL_WEIGHT elements makes linears with recompute=False.

    Raises ValueError or TypeError for what no linear can have.
    """

    recipe: str | Recipe = "tensorwise"
    emulate: bool = False
    recompute: bool | None = None
    saturate: bool = False
    pad_inner_dim: bool = False
    enable_fsdp_float8_all_gather: bool = False
    async_tensor_parallel: bool | None = None
    history: int = 16
    margin: int = 0

    def __post_init__(self) -> None:
        recipe = resolve_recipe(self.recipe)
        switches = self.linear_fields()
        del switches["recipe"]
        check_switches(**switches)
        for name, (least, most) in _OF_SCALES.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most:
                raise ValueError(f"float8: {name} is {value!r}; it is {least} to {most}")
            if value != getattr(LinearConfig, name) and not recipe.delayed:
                raise ValueError(
                    f"float8: {name} is {value}, and recipe {recipe.name or 'custom'} has no "
                    f"delayed scaling to use it; leave {name} out, or choose the recipe delayed"
                )
        if self.enable_fsdp_float8_all_gather:
            fsdp.check_recipe(recipe, padding=0)

    def linear_fields(self) -> dict[str, Any]:
        """Returns the fields that are Float8Linear's."""
        return {name: value for name, value in vars(self).items() if name not in _OF_SCALES}


@runtime_checkable
class HasLinearConfig(Protocol):
    """A config of another form, such as torchao's."""

    def linear_config(self) -> LinearConfig: ...


Config = LinearConfig | HasLinearConfig | Recipe | str | None


def resolve_config(config: Config) -> LinearConfig:
    """Returns a config's options; a name or a recipe has the default options."""
    if config is None:
        return LinearConfig()
    if isinstance(config, LinearConfig):
        return config
    if isinstance(config, (str, Recipe)):
        return LinearConfig(recipe=config)
    if isinstance(config, HasLinearConfig):
        return config.linear_config()
    raise TypeError(f"float8: {wrong_config(config)}; it is a recipe, its name or a LinearConfig")


def wrong_config(config: object) -> str:
    """Returns the words about a config that is none."""
    kind = type(config)
    words = f"config is {config!r:.60}, of type {kind.__module__}.{kind.__qualname__}"
    if kind.__module__.partition(".")[0] == "torchao":
        words = (
            f"config is torchao's own {kind.__name__} ({kind.__module__}): import it from "
            "float8.torchao, as convert_to_float8_training is"
        )
    return words


def convert_to_float8_training(
    module: nn.Module,
    *,
    module_filter_fn: ModuleFilter | None = None,
    config: Config = None,
    tokens: int | None = None,
    tokens_of: Mapping[str, int] | None = None,
    names: Sequence[str] = (),
    policy: str | None = None,
    verdicts: Path | None = None,
    explain: bool = False,
    fsdp: int = 1,
    tp: int = 1,
    hosts: int | None = None,
    experts: Experts = None,
    fuse: bool = False,
) -> nn.Module:
    """Exchanges the nn.Linear layers of `module` for Float8Linear, in place, and returns it.

    module: a model on any device, also meta. Where it is an nn.Linear itself, the Float8Linear is
        returned and the module is left alone. Parameters are shared, not copied.
    module_filter_fn: called with a linear and its name; the linear is left as it is where it
        returns False. None converts every linear.
    config: a recipe's name, a `Recipe`, a `LinearConfig` or torchao's `Float8LinearConfig`.
    tokens: the rows of x in a call. Where it is given, the layers that pass module_filter_fn, and
        experts, are converted where `float8.filter_layers` says that fp8 pays.
    tokens_of: the rows of the layers whose names have one of these parts, where they differ from
        `tokens`: {"experts": 2048}. A module of experts has those of all its experts, and without an
        entry here tokens times the number of experts that its router sends a token to.
    names, policy, verdicts: arguments of `float8.filter_layers`, which need tokens. Each of the names
        is part of a linear's name. The policy is "measured" unless one is given; "torchao" needs
        "auto_filter_small_kn" among the names, and a filter file is given without a policy.
    explain: print these verdicts, as the table that `float8-tune filter` prints; it needs tokens.
    fsdp, tp, hosts: the ranks that will share the model, whose wire is then in the verdicts; they
        are arguments of `float8.filter_layers` too.
    fuse: float8.torch.fuse will run the MLPs, as in `float8.filter_layers`; it needs tokens.
    experts: True lets the experts of transformers and torchtitan compute in fp8 too (docs/experts.md), or
        a function that is called with a module of experts and its name decides. They have config's
        recipe, and its emulate, saturate and enable_fsdp_float8_all_gather; module_filter_fn does not ask for them. With tokens, the measurements
        decide for each module of them as for a linear. None leaves them, as False does, and warns.

    A Float8Linear is a linear too: it gets the new options, and keeps its parameters. Its scales of
    delayed scaling and its cached weight casts begin anew, unless its options are the same.
    Linears that only look like one are left as they are, and a warning names them: those with a
    forward of their own, with a parametrised, pruned, quantised or computed weight, or compiled
    already (convertible.py). So is the out_proj of nn.MultiheadAttention, which is not called. A
    call that converts nothing warns.

    Raises ValueError that names a layer which fp8 cannot have, an nn.LazyLinear, a layer that
    fully_shard has, or an argument; the model is then as it was.
    """
    options = resolve_config(config)
    chosen = choose_experts(
        module,
        experts,
        options.recipe,
        options.emulate,
        options.saturate,
        options.recompute,
        options.history | options.margin << 16,
        options.enable_fsdp_float8_all_gather,
    )
    return convert_linears(
        module,
        Float8Linear,
        options,
        lambda linear, options: Float8Linear.from_float(linear, **options.linear_fields()),
        measured_filter(
            module,
            module_filter_fn,
            tokens,
            names,
            policy,
            verdicts,
            explain,
            (fsdp, tp, hosts),
            tokens_of,
            chosen,
            fuse,
        ),
        chosen if experts else None,
    )


Make = Callable[[nn.Linear], nn.Linear]
# Decides for all linears of a model at once: their names, and the recipe.
Choose = Callable[[dict[str, nn.Linear], str | Recipe], Collection[str]]


def _check_question(
    tokens: int | None,
    names: Sequence[str],
    policy: str | None,
    verdicts: Path | None,
    asks: bool,
) -> None:
    """Raises where arguments ask the measurements without tokens, or say different things.

    asks: others than these ask them.
    """
    if tokens is not None:
        check_tokens("tokens", tokens)
    elif asks or names or verdicts is not None or policy is not None:
        raise ValueError(
            "float8: names, policy, verdicts, explain, tokens_of, fsdp, tp, hosts and fuse ask what the "
            "measurements say, which depends on the rows of x in a call: give tokens too"
        )
    if policy is not None and verdicts is not None:
        raise ValueError(
            "float8: the filter file of `verdicts` decides already; give it or a policy, not both"
        )
    if policy == "torchao" and AUTO_FILTER not in names:
        raise ValueError(
            f'float8: policy "torchao" has its limits where "{AUTO_FILTER}" is among the names, and '
            "without it decides nothing; add it to names, or leave tokens and policy out"
        )


def _print_decisions(linears: Sequence[Verdict], experts: Sequence[Verdict], tokens: int) -> None:
    decided = [*linears, *experts]
    print(explain(decided))
    counts = [
        f"{sum(verdict.convert for verdict in verdicts)} of {len(verdicts)} {what}"
        for verdicts, what in ((linears, "linears"), (experts, "layers of experts"))
        if verdicts
    ]
    print(f"\n{' and '.join(counts)} to float8 (M {tokens}, {decided[0].device})")


def measured_filter(
    module: nn.Module,
    module_filter_fn: ModuleFilter | None,
    tokens: int | None,
    names: Sequence[str],
    policy: str | None,
    verdicts: Path | None,
    show: bool,
    ranks: tuple[int, int, int | None] = (1, 1, None),
    tokens_of: Mapping[str, int] | None = None,
    experts: list[Chosen] | None = None,
    fuse: bool = False,
) -> Choose:
    """Returns the choice that these arguments of convert_to_float8_training mean.

    experts: the choice leaves out those that the measurements keep.
    """
    if module_filter_fn is not None and not callable(module_filter_fn):
        raise TypeError(
            f"float8: module_filter_fn is {module_filter_fn!r}; it is called with a linear and its name, "
            "and returns whether to convert it"
        )
    experts = [] if experts is None else experts
    names = list_of(names)
    fsdp, tp, hosts = ranks
    asks = show or bool(tokens_of) or fuse or ranks != (1, 1, None)
    _check_question(tokens, names, policy, verdicts, asks)

    def choose(linears: dict[str, nn.Linear], recipe: str | Recipe) -> Collection[str]:
        wanted = [
            name
            for name, linear in linears.items()
            if module_filter_fn is None or module_filter_fn(linear, name)
        ]
        left_out = [
            name
            for name in wanted
            if not is_convertible(linears[name], name) and not any(part in name for part in names)
        ]
        linears = {name: each for name, each in linears.items() if is_convertible(each, name)}
        if tokens is None or not (linears or experts):
            return wanted
        of_experts = [each.name or "root" for each in experts]
        check_names(module, names, more=of_experts)
        layers = layers_of(module, linears, tokens_of, of_experts)
        found = filter_layers(
            layers + expert_layers(module, experts, tokens, tokens_of),
            recipe,
            tokens,
            names=names,
            policy=policy or "measured",
            verdicts=verdicts,
            device=device_of([*linears.values(), *(each.module for each in experts)]),
            fsdp=fsdp,
            tp=tp,
            hosts=hosts,
            fuse=fuse,
        )
        found_of_experts = found[len(linears) :]
        experts[:] = [
            each for each, verdict in zip(experts, found_of_experts, strict=True) if verdict.convert
        ]
        kept = set(linears).difference(wanted)
        decided = {
            name: _kept(verdict) if name in kept else verdict
            for name, verdict in zip(linears, found, strict=False)
        }
        if show:
            _print_decisions(list(decided.values()), found_of_experts, tokens)
        return [name for name, verdict in decided.items() if verdict.convert] + left_out

    return choose


def _kept(verdict: Verdict) -> Verdict:
    if not verdict.convert:
        return verdict
    return dataclasses.replace(
        verdict, convert=False, reason="kept in bf16: module_filter_fn", evidence="rule"
    )


def convert_linears(
    module: nn.Module,
    kind: type[Float8Linear],
    options: LinearConfig,
    make: Callable[[nn.Linear, LinearConfig], nn.Linear],
    choose: Choose,
    experts: list[Chosen] | None = None,
) -> nn.Module:
    """Exchanges linears for those of `kind` that `make` makes, and converts `experts`; None where nobody asked for any."""
    delayed = resolve_recipe(options.recipe).delayed
    _refuse_torchao(module)

    def check(replaced: Collection[nn.Module]) -> None:
        made_anew = [each.module for each in experts or [] if not each.kept]  # once chosen
        if delayed and (replaced or made_anew):
            old = [each for m in made_anew for each in getattr(m, "expert_linears", ())]
            refuse_second_state(module, {*replaced, *old})

    def finish(converted: nn.Module) -> None:
        with expert_linears(experts or []):
            attach_scales(converted, history=options.history, margin=options.margin)
        drop_unused_states(converted)
        expect_scales(converted)
        convert_experts(experts or [])

    def chosen(linears: dict[str, nn.Linear]) -> Collection[str]:
        nonlocal options
        names = choose(linears, options.recipe)
        sizes = [linears[name].in_features * linears[name].out_features for name in names]
        if options.recompute is None and max(sizes, default=0) <= SMALL_WEIGHT:
            options = dataclasses.replace(options, recompute=False)
        return names

    converted = swap_linears(
        module,
        lambda linear: linear if _has(linear, kind, options) else make(linear, options),
        chosen,
        check,
        finish,
    )
    notices.note_conversion()
    if notices.has_linears(converted):
        stale_optimizers.watch(converted)
    elif not experts:
        linears = [each for each in converted.modules() if is_linear(each)]
        why = "it has no nn.Linear"
        if linears:
            why = "no linear passed the filter"
        if linears and not any(map(is_convertible, linears)):
            why = "none of its linears can be in fp8"
        remedy = "with tokens, explain=True prints the verdicts"
        if names_of_experts(converted) and experts is None:
            remedy = "experts=True converts its experts; " + remedy
        elif names_of_experts(converted):
            why += ", and its experts stay as they are"
        notices.warn_once(
            "convert",
            f"convert_to_float8_training converted nothing in {type(module).__name__}: {why}; {remedy}",
        )
    return converted


def _refuse_torchao(module: object) -> None:
    """Raises where torchao has converted the model already."""
    for name, each in module.named_modules() if isinstance(module, nn.Module) else ():
        kind = type(each)
        if kind.__name__ == "Float8Linear" and kind.__module__.partition(".")[0] == "torchao":
            raise ValueError(
                f"float8: layer {name or 'root'!r} is torchao's Float8Linear already: convert the "
                "model with one of the two, before torchao's call where it is this one"
            )


def _has(linear: nn.Linear, kind: type[Float8Linear], options: LinearConfig) -> bool:
    """Tells whether a linear is what a conversion would make of it."""
    of_model = type(linear).__bases__[-1] if is_sharded(linear) else type(linear)
    if of_model is not kind or not isinstance(linear, kind):
        return False
    fields = {**options.linear_fields(), "recipe": resolve_recipe(options.recipe)}
    pads = fields.pop("pad_inner_dim")
    scales = linear._scales
    return (
        all(getattr(linear, name) == value for name, value in fields.items())
        and (pads or linear._padding == 0)
        and (scales is None or linear._layout >> 32 == options.history | options.margin << 16)
    )


def swap_linears(
    module: nn.Module,
    make: Make,
    choose: Callable[[dict[str, nn.Linear]], Collection[str]],
    check: Callable[[Collection[nn.Module]], None] = lambda _: None,
    finish: Callable[[nn.Module], None] = lambda _: None,
) -> nn.Module:
    """Exchanges the linears that are chosen for what `make` makes of them.

    A linear that the model has in several places stays one module. `check` is called with those that
    are replaced, before the first change, and `finish` with the result; where it fails, the changes
    are undone.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"float8: an nn.Module is converted, not a {type(module).__name__}")
    linears = {name: child for name, child in module.named_modules() if is_linear(child)}
    chosen = without_unusual({name: linears[name] for name in choose(linears)})
    made = {linear: _make(make, linear, name) for name, linear in chosen.items()}
    if isinstance(module, nn.Linear) and module in made and len(made) > 1:
        raise ValueError(
            "float8: the model is an nn.Linear that has others below it, of which a conversion "
            "would change one or the other: convert the module around it, or choose with "
            "module_filter_fn"
        )
    replaced = [old for old, new in made.items() if new is not old]
    refuse_sharded(module, replaced)
    check(replaced)
    places = [
        (parent._modules, name, child)
        for parent in module.modules()
        for name, child in parent._modules.items()
        if isinstance(child, nn.Linear) and child in made
    ]
    root = made.get(module, module) if isinstance(module, nn.Linear) else module
    try:
        for children, name, old in places:
            children[name] = made[old]
        finish(root)
    except BaseException:
        for children, name, old in places:
            children[name] = old
        raise
    return root


def _make(make: Make, linear: nn.Linear, name: str) -> nn.Linear:
    try:
        made = make(linear)
        if isinstance(made, Float8Linear):
            made._layer_name = name
        return made
    except ValueError as error:
        raise ValueError(f"{error} (layer {name or 'root'!r})") from None
