"""The hooks that styles of `parallelize_module` give a linear, which a fused MLP calls, or does without.

They are known by their functions: those of ColwiseParallel and RowwiseParallel, and of float8's own styles.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

_STYLES = (
    ("torch.distributed.tensor.parallel.style", ""),
    ("float8.torch.layer.parallel_styles", "Float8"),
)


def obstacle_of_hooks(name: str, linear: nn.Module, is_down: bool) -> str | None:
    """Returns why an MLP cannot do without what a linear's hooks do between its linears, None where it can."""
    style = "RowwiseParallel" if is_down else "ColwiseParallel"
    hooks = []
    for kind, function in (("_forward_pre_hooks", "input"), ("_forward_hooks", "output")):
        found = [
            _layouts(each, f"{style}._prepare_{function}_fn")
            for each in getattr(linear, kind).values()
        ]
        if len(found) != 1 or found[0] is None:
            return f"its {name} has hooks other than those of one {style}"
        hooks.append(found[0])
    layouts = hooks[0 if is_down else 1]
    if len(layouts) != 1 or not layouts[0].is_shard(-1):
        end = "takes" if is_down else "gives"
        return f"the {style} of its {name} {end} {layouts[0]}, and a rank has columns of what is between its linears"
    return None


def _layouts(hook: Any, function: str) -> Any:
    """Returns the first layouts of a hook that calls that function of a style, None for another one."""
    for cell in getattr(hook, "__closure__", None) or ():
        call = cell.cell_contents
        if isinstance(call, functools.partial):
            own = (call.func.__module__, call.func.__qualname__)
            if own in [(module, prefix + function) for module, prefix in _STYLES]:
                return call.args[0]
    return None


def before(linear: nn.Module, x: Any) -> Any:
    """Returns what the hooks of a style make of a linear's x."""
    for hook in linear._forward_pre_hooks.values():
        x = hook(linear, (x,))
    return x


def after(linear: nn.Module, y: Any) -> Any:
    """Returns what the hooks of a style make of a linear's y."""
    for hook in linear._forward_hooks.values():
        y = hook(linear, (), y)
    return y
