"""Exchanging a model's linears, all of them or none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import nn

from float8.recipes import Recipe
from float8.torch.linear import Float8Linear, resolve_recipe
from float8.torch.scales import attach_scales, refuse_second_state

ModuleFilter = Callable[[nn.Module, str], bool]


_OF_SCALES = ("history", "margin")


@dataclasses.dataclass(frozen=True)
class LinearConfig:
    """The options of Float8Linear, which describes them, and of attach_scales."""

    recipe: str | Recipe = "tensorwise"
    emulate: bool = False
    recompute: bool = False
    saturate: bool = False
    pad_inner_dim: bool = False
    history: int = 16
    margin: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.history <= 1024 or not 0 <= self.margin <= 16:
            raise ValueError(
                f"float8: history is {self.history}, 1 to 1024, and margin {self.margin}, 0 to 16"
            )

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
    raise TypeError(
        f"float8: config is a {type(config).__name__}; it is a recipe, its name or a config"
    )


def convert_to_float8_training(
    module: nn.Module,
    *,
    module_filter_fn: ModuleFilter | None = None,
    config: Config = None,
) -> nn.Module:
    """Exchanges the nn.Linear layers of `module` for Float8Linear, in place, and returns it.

    module: a model on any device, also meta. Where it is an nn.Linear itself, the Float8Linear is
        returned and the module is left alone. Parameters are shared, not copied.
    module_filter_fn: called with a linear and its name; the linear is left as it is where it
        returns False. None converts every linear.
    config: a recipe's name, a `Recipe`, a `LinearConfig` or torchao's `Float8LinearConfig`.

    Subclasses of nn.Linear with a forward of their own, and layers that are Float8Linear already,
    are left as they are. Raises ValueError that names a layer which fp8 cannot have; the model is
    then as it was.
    """
    options = resolve_config(config)
    if resolve_recipe(options.recipe).delayed:
        refuse_second_state(module)
    converted = swap_linears(
        module,
        lambda linear: Float8Linear.from_float(linear, **options.linear_fields()),
        module_filter_fn,
    )
    attach_scales(converted, history=options.history, margin=options.margin)
    return converted


def swap_linears(
    module: nn.Module,
    make: Callable[[nn.Linear], nn.Linear],
    module_filter_fn: ModuleFilter | None,
) -> nn.Module:
    """Exchanges the plain linears that pass the filter for what `make` makes of them.

    A linear that the model has in several places stays one module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"float8: an nn.Module is converted, not a {type(module).__name__}")
    if _is_plain(module) and (module_filter_fn is None or module_filter_fn(module, "")):
        return _make(make, module, "")
    # Everything that can fail comes before the first change.
    made: dict[nn.Module, nn.Linear | None] = {}
    places: list[tuple[nn.Module, str, nn.Linear]] = []
    for name, parent in module.named_modules():
        for child_name, child in parent._modules.items():
            if child is None or not _is_plain(child):
                continue
            if child not in made:
                full_name = f"{name}.{child_name}" if name else child_name
                wanted = module_filter_fn is None or module_filter_fn(child, full_name)
                made[child] = _make(make, child, full_name) if wanted else None
            linear = made[child]
            if linear is not None:
                places.append((parent, child_name, linear))
    for parent, child_name, linear in places:
        parent._modules[child_name] = linear
    return module


def _is_plain(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Linear)
        and not isinstance(module, Float8Linear)
        and type(module).forward is nn.Linear.forward
    )


def _make(make: Callable[[nn.Linear], nn.Linear], module: nn.Module, name: str) -> nn.Linear:
    assert isinstance(module, nn.Linear)
    try:
        return make(module)
    except ValueError as error:
        raise ValueError(f"{error} (layer {name or 'root'!r})") from None
