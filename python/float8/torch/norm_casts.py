"""A pass of torch.compile: what a norm makes of x for linears in fp8 is cast as it is computed.

In graphs an RMSNorm is (x rstd) weight, rounded to x's type, and a LayerNorm ((x - mean) rstd) weight + bias.
Where casts alone read what a norm makes, they read x and these factors themselves
(torch.ops.float8.quantize_rms_norm, quantize_layer_norm), and it is never in memory: the factors of rows are
found by what makes x, as before. What something else reads too, such as a residual sum behind the norm, is in
memory anyway, and stays as it is. It is for linears whose config has FUSE_NORMS, which fuse(norms=True) sets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from float8 import recipes
from float8.torch import _schemas as _schemas

_CONVERT = torch.ops.prims.convert_element_type.default
_MUL = torch.ops.aten.mul.Tensor
_ADD = torch.ops.aten.add.Tensor
_SUB = torch.ops.aten.sub.Tensor
_INPUT = 0  # FLOAT8_INPUT
_QUANTIZE = torch.ops.float8.quantize.default
# The casts of an input, and the place of their config among their arguments.
_CASTS = {_QUANTIZE: 1, torch.ops.float8.quantize_again.default: 2}
_ARGUMENTS_AGAIN = 3  # of quantize_again, before those of delayed scaling
_TYPES = (torch.bfloat16, torch.float16)


class _RmsNorm(NamedTuple):
    """The factors of (x rstd) weight."""

    x: fx.Node
    weight: fx.Node
    rstd: fx.Node


class _LayerNorm(NamedTuple):
    """Those of ((x - mean) rstd) weight + bias."""

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    mean: fx.Node
    rstd: fx.Node


def cast_norms(graph: fx.Graph) -> None:
    """Lets the casts of what norms make compute it."""
    for target in _CASTS:
        for node in graph.find_nodes(op="call_function", target=target):
            made = node.args[0]
            # The casts of one norm change together, the first of them with all that read it.
            if made.users and all(map(_may_read_x, made.users)) and (norm := norm_of(made)):
                _read_x(made, norm)


def _is_cast(node: fx.Node) -> bool:
    """Tells whether a node is a cast that may compute what it casts."""
    target: Any = node.target
    if target not in _CASTS:
        return False
    config: Any = node.args[_CASTS[target]]
    if target is _QUANTIZE:
        is_dynamic = node.args[2] == _INPUT
    else:
        is_dynamic = len(node.args) == _ARGUMENTS_AGAIN or node.args[_ARGUMENTS_AGAIN] is None
    return bool(is_dynamic) and bool(config & recipes.FUSE_NORMS)


def _may_read_x(node: fx.Node) -> bool:
    """Tells whether x will do for a reader of what a norm makes.

    Linears that are given copies of it read its shape alone.
    """
    is_linear = node.target is torch.ops.float8.linear_forward.default
    return (is_linear and node.args[1] is not None) or _is_cast(node)


def _read_x(made: fx.Node, norm: _RmsNorm | _LayerNorm) -> None:
    ops = torch.ops.float8
    is_rms = isinstance(norm, _RmsNorm)
    for reader in list(made.users):
        _, *rest = reader.args
        if not _is_cast(reader):
            reader.args = (norm.x, *rest)
            continue
        if reader.target is _QUANTIZE:
            rest.pop(1)  # the operand, which is an input
            cast = ops.quantize_rms_norm if is_rms else ops.quantize_layer_norm
        else:
            rest = rest[: _ARGUMENTS_AGAIN - 1]
            cast = ops.quantize_rms_norm_again if is_rms else ops.quantize_layer_norm_again
        reader.target = cast.default
        reader.args = (*norm, *rest)


def _value(node: Any) -> torch.Tensor | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _below_conversions(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.target is _CONVERT:
        node = node.args[0]
    return node


def norm_of(made: Any) -> _RmsNorm | _LayerNorm | None:
    """Returns the factors of what a norm makes, None where a tensor is not of this form.

    x, weight and bias are of its type, [..., K] and [K], and mean and rstd are [..., 1] in float32. Where an
    RMSNorm's inner product is rounded to x's type in between, Inductor does not round it either.
    """
    of_made = _value(made)
    outer = _below_conversions(made)
    if of_made is None or of_made.dtype not in _TYPES:
        return None
    for product, other in _operands(outer, _ADD):
        bias = _factor_of_columns(other, of_made)
        if bias is not None and _is_f32(product):
            norm = _scaled(product, of_made)
            return norm._replace(bias=bias) if isinstance(norm, _LayerNorm) else None
    return _scaled(outer, of_made)


def _scaled(product: Any, of_made: torch.Tensor) -> _RmsNorm | _LayerNorm | None:
    """Returns the factors of a norm without a bias."""
    for of_columns, inner in _operands(product, _MUL):
        weight, inner = _factor_of_columns(of_columns, of_made), _below_conversions(inner)
        if weight is None or not _is_f32(inner):
            continue
        for source, rstd in _operands(inner, _MUL):
            if not _is_of_rows(rstd, of_made):
                continue
            if (x := _source(source, of_made)) is not None:
                return _RmsNorm(x, weight, rstd)
            # An operand of a difference is no other's, so it is not looked for in either order.
            for of_x, mean in _operands(source, _SUB)[:1]:
                x = _source(of_x, of_made)
                if x is not None and _is_of_rows(mean, of_made) and _is_f32(product):
                    return _LayerNorm(x, weight, None, mean, rstd)
    return None


def _operands(node: Any, target: Any) -> list[tuple[Any, Any]]:
    """Returns the operands of such a node in either order, none of another node."""
    if not isinstance(node, fx.Node) or node.target is not target or node.kwargs:
        return []
    one, other = node.args
    return [(one, other), (other, one)]


def _is_f32(node: Any) -> bool:
    of_node = _value(node)
    return of_node is not None and of_node.dtype == torch.float32


def _source(node: Any, of_made: torch.Tensor) -> fx.Node | None:
    """Returns the x of a norm that makes such a tensor, which an operand converts."""
    x: Any = _below_conversions(node)
    of_x = _value(x)
    fits = of_x is not None and of_x.dtype == of_made.dtype and of_x.shape == of_made.shape
    return x if fits else None


def _factor_of_columns(node: Any, of_made: torch.Tensor) -> fx.Node | None:
    """Returns a weight or bias likewise."""
    factor: Any = _below_conversions(node)
    of_factor = _value(factor)
    fits = (
        of_factor is not None
        and of_factor.dtype == of_made.dtype
        and of_factor.shape == of_made.shape[-1:]
    )
    return factor if fits else None


def _is_of_rows(node: Any, of_made: torch.Tensor) -> bool:
    of_rows = _value(node)
    return (
        of_rows is not None
        and of_rows.dtype == torch.float32
        and of_rows.shape == (*of_made.shape[:-1], 1)
    )
