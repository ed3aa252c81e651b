"""A pass of torch.compile: what an RMSNorm makes of x for linears in fp8 is cast as it is computed.

In graphs a norm is (x rstd) weight, rounded to x's type. A cast of it reads x, rstd and weight itself
(torch.ops.float8.quantize_rms_norm), and where nothing else reads the product, it is never in memory: its
row sums are found by what makes x, as before. It is for linears whose config has FUSE_NORMS, which
fuse(norms=True) sets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from float8 import recipes

_CONVERT = torch.ops.prims.convert_element_type.default
_MUL = torch.ops.aten.mul.Tensor
_INPUT = 0  # FLOAT8_INPUT
_TYPES = (torch.bfloat16, torch.float16)


class _Norm(NamedTuple):
    """The factors of a norm's product."""

    x: fx.Node
    weight: fx.Node
    rstd: fx.Node


def cast_norms(graph: fx.Graph) -> None:
    """Lets the casts of norms' products compute these."""
    ops = torch.ops.float8
    for node in graph.find_nodes(op="call_function", target=ops.quantize.default):
        product, config, operand, *rest = node.args
        if operand != _INPUT or not config & recipes.FUSE_NORMS:
            continue
        if (norm := _norm_of(product)) is not None:
            node.target = ops.quantize_rms_norm.default
            node.args = (*norm, config, *rest)
            _read_x_for_shape(product, norm.x)
    for node in graph.find_nodes(op="call_function", target=ops.quantize_again.default):
        product, x_qt, config = node.args
        if config & recipes.FUSE_NORMS and (norm := _norm_of(product)) is not None:
            node.target = ops.quantize_rms_norm_again.default
            node.args = (*norm, x_qt, config)


def _read_x_for_shape(product: fx.Node, x: fx.Node) -> None:
    """Gives x to the linears that were given the product's copies, of which they read the shape alone."""
    for reader in list(product.users):
        if reader.target is torch.ops.float8.linear_forward.default:
            given, q, *rest = reader.args
            if given is product and q is not None:
                reader.args = (x, q, *rest)


def _value(node: Any) -> torch.Tensor | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _below_conversions(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.target is _CONVERT:
        node = node.args[0]
    return node


def _norm_of(product: Any) -> _Norm | None:
    """Returns the factors of (x rstd) weight, None where a tensor is not of this form.

    x and weight are of the product's type, [..., K] and [K], and rstd is [..., 1] in float32. Where the inner
    product is rounded to x's type in between, Inductor does not round it either.
    """
    value = _value(product)
    outer = _below_conversions(product)
    if value is None or value.dtype not in _TYPES or not _is_product(outer):
        return None
    for weight, inner in (outer.args, outer.args[::-1]):
        weight, inner = _below_conversions(weight), _below_conversions(inner)
        of_weight = _value(weight)
        if of_weight is None or of_weight.dim() != 1 or of_weight.dtype != value.dtype:
            continue
        if not _is_product(inner):
            continue
        for x, rstd in (inner.args, inner.args[::-1]):
            of_rows, source = _value(rstd), _below_conversions(x)
            of_x = _value(source)
            if (
                of_x is not None
                and of_rows is not None
                and of_rows.dtype == torch.float32
                and of_rows.shape == (*value.shape[:-1], 1)
                and of_x.dtype == value.dtype
                and of_x.shape == value.shape
                and of_weight.shape[0] == value.shape[-1]
                and _value(inner).dtype == torch.float32  # type: ignore[union-attr]
            ):
                return _Norm(source, weight, rstd)
    return None


def _is_product(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is _MUL
