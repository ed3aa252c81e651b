"""A pass of torch.compile over backward: an x that several linears read is cast once.

Linears of one x, such as query, key and value, share its cast in forward. In backward each of them casts
x again by itself (Float8Linear's `recompute`), since a cast that depends on no gradient would be moved
into forward, and its result kept. Once forward and backward are apart, the pass takes these casts out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor
from torch._inductor.custom_graph_pass import CustomGraphPass

from float8 import recipes
from float8.torch import norm_casts

# These are arguments of linear_backward, by their place in its schema (_schemas.py).
_X, _X_QT, _CONFIG, _WANTED = 2, 3, 7, 9
_WANTS_WEIGHT = 2


def share_casts(graph: fx.Graph) -> None:
    """Casts an x once that several linears of the graph cast again, and gives them the copy.

    What a norm makes for one linear is cast apart too, where cast_norms will have the cast compute it.
    """
    readers: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in graph.find_nodes(
        op="call_function", target=torch.ops.float8.linear_backward.default
    ):
        x, x_qt, config, wanted = (node.args[i] for i in (_X, _X_QT, _CONFIG, _WANTED))
        if None not in (x, x_qt) and config & recipes.RECOMPUTE and wanted & _WANTS_WEIGHT:
            readers.setdefault((x, x_qt, config & ~recipes.BIAS), []).append(node)
    for (x, x_qt, config), nodes in readers.items():
        computes = config & recipes.FUSE_NORMS and norm_casts.norm_of(x) is not None
        if len(nodes) > 1 or computes:
            _share(graph, x, x_qt, config, nodes)


def _share(graph: fx.Graph, x: fx.Node, x_qt: fx.Node, config: int, nodes: list[fx.Node]) -> None:
    cast = torch.ops.float8.quantize_again.default
    values = [node.meta["val"] for node in (x, x_qt)]
    with values[0].fake_mode:
        value = cast(*values, config)
    if value.numel() == 0:  # the recipe multiplies x as it is
        return
    with graph.inserting_before(nodes[0]):
        copy = graph.call_function(cast, (x, x_qt, config))
    copy.meta["val"] = value
    for node in nodes:
        args = list(node.args)
        args[_X], args[_X_QT] = None, copy
        node.args = tuple(args)


class _Pass(CustomGraphPass):
    """share_casts and cast_norms, after the passes that were there before."""

    def __init__(self, before: tuple[Callable[[fx.Graph], None], ...]) -> None:
        self.before = before

    def __call__(self, graph: fx.Graph) -> None:
        for each in self.before:
            each(graph)
        share_casts(graph)
        norm_casts.cast_norms(graph)

    def uuid(self) -> Any:
        # Graphs that a pass without an identity changes are not cached.
        own = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.before]
        return None if None in own else ("float8.share_casts", 3, *own)


def install() -> None:
    """Has torch.compile run the pass, after one of the user's that is set by then."""
    before: Any = inductor.post_grad_custom_pre_pass  # a list of them, from PyTorch 2.12 on
    if not isinstance(before, _Pass):
        several = before if isinstance(before, (list, tuple)) else [before]
        inductor.post_grad_custom_pre_pass = _Pass(tuple(each for each in several if each))
