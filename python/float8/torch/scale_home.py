"""Where a model keeps its scale state (scales.py), under the name `float8_scales`.

The state is a submodule of the model. An nn.Sequential, an nn.ModuleList and an nn.ModuleDict, of which programs
make models too, count their submodules, call them one after the other and hand them out by index: there the state
is an attribute that is no submodule, and its buffer is the container's, under the same name in state dicts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from float8.torch import notices

if TYPE_CHECKING:
    from float8.torch.scales import ScaleState

NAME = "float8_scales"
_BUFFER = f"{NAME}.state"
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def keep(module: nn.Module, state: ScaleState) -> None:
    """Gives a module its scale state."""
    if not isinstance(module, _CONTAINERS):
        module.add_module(NAME, state)
        return
    object.__setattr__(module, NAME, state)
    module._buffers[_BUFFER] = state.saved()
    expect_scales(module)
    if _save not in module._state_dict_pre_hooks.values():
        module.register_state_dict_pre_hook(_save)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(_end_load)  # type: ignore[no-untyped-call]


def own_state(module: nn.Module) -> Any:
    """Returns the scale state that a module keeps, None without."""
    return _beside_children(module) or module._modules.get(NAME)


def states_below(module: nn.Module) -> Iterator[ScaleState]:
    """Yields the scale states of a module and of those below it."""
    for each in module.modules():
        if (state := own_state(each)) is not None:
            yield state


def drop(module: nn.Module) -> None:
    """Takes its scale state from a module."""
    delattr(module, NAME)
    module._buffers.pop(_BUFFER, None)


def expect_scales(module: nn.Module) -> None:
    """Lets a module load checkpoints with scales, also when it has none."""
    hooks = module._load_state_dict_pre_hooks.values()
    if all(getattr(each, "hook", each) is not _load for each in hooks):
        module.register_load_state_dict_pre_hook(_load)  # type: ignore[no-untyped-call]


def _beside_children(module: nn.Module) -> Any:
    return module.__dict__.get(NAME)


def _save(module: nn.Module, *_: Any) -> None:
    if (state := _beside_children(module)) is not None:
        module._buffers[_BUFFER] = state.saved()


def _load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    key = prefix + _BUFFER  # load_state_dict has a dictionary of its own
    if (state := _beside_children(module)) is not None:
        own = {key: state_dict.pop(key)} if key in state_dict else {}
        state.loading = own, f"{prefix}{NAME}.", *rest
        module._buffers.pop(_BUFFER, None)  # a key with a dot would be a submodule's
    elif key in state_dict and NAME not in module._modules:
        del state_dict[key]
        notices.warn_once(
            key,
            f"the checkpoint has {key!r}, the scales of delayed scaling, which the model's recipe "
            'does not use: they are left out. Convert with the recipe "delayed" to go on with them',
        )


def _end_load(module: nn.Module, _: Any) -> None:
    """Loads the state behind the weights, whose device it has."""
    state = _beside_children(module)
    if state is not None and state.loading is not None:
        loading, state.loading = state.loading, None
        state._load_from_state_dict(*loading)
        module._buffers[_BUFFER] = state.saved()
