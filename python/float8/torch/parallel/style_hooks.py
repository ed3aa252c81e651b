"""The hooks that styles of `parallelize_module` give a linear, which a fused MLP calls, or does without.

They are known by their functions: those of ColwiseParallel and RowwiseParallel, and of float8's own styles.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from float8.torch import traced

_STYLES = (
    ("torch.distributed.tensor.parallel.style", ""),
    ("float8.torch.layer.parallel_styles", "Float8"),
)


_COLUMNS = "Shard(-1)"


def obstacle_of_hooks(name: str, linear: nn.Module, is_down: bool) -> str | None:
    """Returns why an MLP cannot do without what a linear's hooks do between its linears, None where it can."""
    style = "RowwiseParallel" if is_down else "ColwiseParallel"
    layouts = []
    for kind, function in (("_forward_pre_hooks", "input"), ("_forward_hooks", "output")):
        hooks = list(getattr(linear, kind).values())
        layout = _layout(hooks[0], f"{style}._prepare_{function}_fn") if len(hooks) == 1 else None
        if layout is None:
            return f"its {name}, whose weight ranks share, has not the hooks of one {style} alone"
        layouts.append(layout)
    between = layouts[0 if is_down else 1]
    if between != _COLUMNS:
        end = "takes" if is_down else "gives"
        return f"the {style} of its {name} {end} {between}; between linears that are fused it is {_COLUMNS}"
    return None


@traced.constant
def _layout(hook: Any, function: str) -> str | None:
    """Returns the first layout of a hook that calls that function of a style, None for another one."""
    for cell in getattr(hook, "__closure__", None) or ():
        call = cell.cell_contents
        if isinstance(call, functools.partial):
            own = (call.func.__module__, call.func.__qualname__)
            if own in [(module, prefix + function) for module, prefix in _STYLES]:
                layouts = call.args[0]
                return _COLUMNS if len(layouts) == 1 and layouts[0].is_shard(-1) else str(layouts)
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
