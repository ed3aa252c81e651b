"""Converting a model, with torchao's signatures."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from float8.adapters import selective
from float8.torch import notices, scales
from float8.torch.layer.convert import (
    ModuleFilter,
    Path,
    convert_linears,
    measured_filter,
    swap_linears,
    wrong_config,
)
from float8.torch.layer.convertible import refuse_lazy
from float8.torchao import _options
from float8.torchao.config import ConfigError, Float8LinearConfig, Float8LinearRecipeName
from float8.torchao.float8_linear import Float8Linear

_log = logging.getLogger(__name__)


def convert_to_float8_training(
    module: nn.Module,
    *,
    module_filter_fn: ModuleFilter | None = None,
    config: Float8LinearConfig | None = None,
    tokens: int | None = None,
    tokens_of: Mapping[str, int] | None = None,
    names: Sequence[str] = (),
    policy: str | None = None,
    verdicts: Path | None = None,
    explain: bool = False,
) -> nn.Module:
    """Exchanges the nn.Linear layers of `module` for Float8Linear, in place, and returns it.

    Where `module` is an nn.Linear itself, the Float8Linear is returned. A failure leaves the model
    as it was. float8.torch.convert_to_float8_training has the details, also of the arguments that
    torchao lacks: tokens, tokens_of, names, policy, verdicts and explain.
    """
    own_config = config or Float8LinearConfig()
    if not isinstance(own_config, Float8LinearConfig):
        raise TypeError(
            f"float8: {wrong_config(own_config)}; it is a float8.torchao.Float8LinearConfig: "
            'Float8LinearConfig.from_recipe_name("rowwise") makes one, and '
            "float8.torch.convert_to_float8_training takes names and LinearConfigs"
        )
    own_config = own_config.as_installed()
    if isinstance(module, nn.Linear) and any(True for _ in module.children()):
        raise ConfigError(f"float8: Does not support a root nn.Linear with children: {module}")
    if "torchtitan" in sys.modules:
        selective.save_linears()
    converted = convert_linears(
        module,
        Float8Linear,
        own_config.linear_config(),
        lambda linear, options: Float8Linear.of_model(linear, own_config, options),
        measured_filter(
            module,
            module_filter_fn,
            tokens,
            names,
            policy,
            verdicts,
            explain,
            tokens_of=tokens_of,
        ),
    )
    return _options.after_conversion(converted)


def swap_linear_layers(
    module: nn.Module,
    from_float_func: Callable[[nn.Linear], nn.Linear],
    *,
    module_filter_fn: ModuleFilter | None = None,
) -> nn.Module:
    """Exchanges linears for what from_float_func makes of them."""

    def choose(linears: dict[str, nn.Linear]) -> list[str]:
        return [
            name
            for name, linear in linears.items()
            if module_filter_fn is None or module_filter_fn(linear, name)
        ]

    return swap_linears(module, from_float_func, choose)


def sync_float8_amax_and_scale_history(model: nn.Module, fp8_layers: object = None) -> None:
    """Ends a step of delayed scaling, between backward and the optimizer's step.

    fp8_layers is not needed, and not read. Where no linear is in fp8 it only logs so, as torchao's.
    """
    if notices.has_linears(model):
        scales.sync_float8_amax_and_scale_history(model)
    else:
        _log.warning("float8: sync_float8_amax_and_scale_history %s", notices.nothing_done(model))


def _auto_filter_for_recipe(
    recipe: str | Float8LinearRecipeName, filter_fqns: Sequence[str]
) -> ModuleFilter:
    """Returns torchao's filter: names, multiples of 16, and the recipe's limits on K and N.

    Raises NotImplementedError for rowwise_with_gw_hp, for which torchao has no limits;
    float8.filter_layers decides for every recipe, by measurements.
    """
    name = Float8LinearRecipeName(recipe) if isinstance(recipe, str) else recipe
    if name is Float8LinearRecipeName.ROWWISE_WITH_GW_HP:
        raise NotImplementedError(
            f"float8: torchao has no rule for {name.value}; float8.filter_layers has a measured one"
        )
    tensorwise = name is Float8LinearRecipeName.TENSORWISE
    rule = _auto_filter_for_tensorwise if tensorwise else _auto_filter_for_rowwise
    return functools.partial(rule, filter_fqns=tuple(filter_fqns))


def _auto_filter_for_rowwise(mod: nn.Module, fqn: str, filter_fqns: Sequence[str]) -> bool:
    """torchao's rule for rowwise scaling: tells whether a linear is converted."""
    sizes = _sizes(mod, fqn, filter_fqns)
    if sizes is None:
        return False
    n, k = sizes
    return not (n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048))


def _auto_filter_for_tensorwise(mod: nn.Module, fqn: str, filter_fqns: Sequence[str]) -> bool:
    """torchao's rule for tensorwise scaling: tells whether a linear is converted."""
    sizes = _sizes(mod, fqn, filter_fqns)
    if sizes is None:
        return False
    n, k = sizes
    return not (k <= 4096 and n <= 1024)


def _sizes(module: nn.Module, fqn: str, filter_fqns: Sequence[str]) -> tuple[int, int] | None:
    """Returns N and K of a linear that fp8 can have and no name keeps, else None."""
    if not isinstance(module, nn.Linear) or any(part in fqn for part in filter_fqns):
        return None
    refuse_lazy(module, fqn)
    n, k = module.weight.shape
    return (n, k) if n % 16 == 0 and k % 16 == 0 else None
