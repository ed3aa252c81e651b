"""Tensor and sequence parallelism: Float8Linear layers whose weight is a DTensor that ranks share.

The weight is shared by rows (Shard(0), column-wise parallel) or by columns (Shard(1), row-wise
parallel). This is the layers' side: placements, checks, and maxima of weights that are found once a
step. sharded_linear.py computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from float8.torch import _ops, async_tensor_parallel, sharded_linear
from float8.torch import sharded_grads as grads
from float8.torch import sharded_operands as operands
from float8.torch.fsdp import GatheredWeight
from float8.torch.ranks import agreement, collectives
from float8.torch.ranks.collectives import Operation
from float8.torch.sharded_grads import CAST, GATHERED, KEPT, Call
from float8.torch.sharded_operands import Share, Sharing

if TYPE_CHECKING:
    from float8.torch.linear import Float8Linear


def linear(layer: Float8Linear, input: Any, source: Any) -> Any:
    """Computes a Float8Linear whose weight is a DTensor.

    source: the DTensor that the layer was called with, before any change of type.
    """
    weight: Any = layer.weight
    if not torch.compiler.is_compiling():
        if not layer._agreed:
            compare_call(layer, input)
        _begin(layer)
    dim, to = sharing_of(layer, weight)
    if not isinstance(input, DTensor):
        raise ValueError(
            "float8: the weight is a DTensor and x is not; parallelize the layer with a style that "
            "makes x a DTensor, such as ColwiseParallel"
        )
    mesh = weight.device_mesh
    if input.device_mesh != mesh:
        raise ValueError(f"float8: x is on {input.device_mesh}, and the weight on {mesh}")
    last = input.dim() - 1
    x_dim = None
    at = input.placements[0]
    if dim == 1:
        if not at.is_shard(last):
            input = input.redistribute(mesh, [ShardPlacement(last)])
        x = input.to_local()
    elif isinstance(at, ShardPlacement) and at.dim < last and to.rules.is_fp8(operands.OUTPUT):
        x, x_dim = input.to_local(), at.dim
        _check_tokens(input.shape[x_dim], to)
    else:
        if not at.is_replicate():
            input = input.redistribute(mesh, [Replicate()])
        x = input.to_local(grad_placements=[Partial()])
    y_dim = layer._output_dim if dim == 1 else None
    if y_dim is not None:
        y_dim %= input.dim()
        if y_dim < last:
            _check_tokens(input.shape[y_dim], to)
        else:
            y_dim = None
    scales = layer._scale_view
    first = layer._scales is not None and layer._scales.is_first
    local = weight.to_local()
    cast: Any = layer._weight_cast
    copies = None if cast is None else cast.of(layer, x.dtype)
    origin = GATHERED if isinstance(local, GatheredWeight) else CAST if copies is None else KEPT
    overlap = async_tensor_parallel.wanted(layer.async_tensor_parallel)
    recompute = layer.recompute is True
    call = Call(to, dim, x_dim, y_dim, layer._layout, first, recompute, overlap, weight=origin)
    bias: Any = layer.bias
    local_bias = None if bias is None else bias.to_local()
    words = _weight_words(layer, x.dtype)
    y = sharded_linear.linear(source, x, local, local_bias, scales, words, call, copies)
    if dim == 0:
        return DTensor.from_local(y, mesh, [ShardPlacement(last)], run_check=False)
    out = Partial() if y_dim is None else ShardPlacement(y_dim)
    return DTensor.from_local(y, mesh, [out], run_check=False)


def _begin(layer: Float8Linear) -> None:
    """Says what this rank is doing, in forward, and later in backward."""
    if layer._operations is None:
        names = [layer._layer_name] if layer._layer_name else []
        layer._operations = (
            Operation("the tensor parallel forward", lambda: names),
            Operation("the tensor parallel backward", lambda: names),
        )
    forward, grads.Latest.backward = layer._operations
    collectives.progress.begin(forward)


def compare_layer(layer: Float8Linear, mesh: Any, style: str) -> None:
    """Raises on all ranks of the mesh where they are about to share unlike layers.

    It comes before the weight is distributed, which ranks with unlike shapes would not get through.
    """
    if mesh.ndim == 1 and mesh.size() > 1:
        words = f"{agreement.describe(layer)}, {style}"
        _compare(layer, mesh, {"layers": {layer._layer_name: words}})


def compare_call(layer: Float8Linear, x: Any) -> None:
    """Raises on all ranks in a layer's first forward where the layer, or what it is given, differs.

    It is not for graphs of torch.compile, which have no place for what the host does.
    """
    mesh, placements = layer.weight.device_mesh, layer.weight.placements  # type: ignore[attr-defined]
    if mesh.ndim == 1 and mesh.size() > 1:
        name = layer._layer_name
        layouts = f"{placements[0]}, y by dimension {layer._output_dim}"
        at = f", {x.placements}" if isinstance(x, DTensor) else ""
        _compare(
            layer,
            mesh,
            {
                "layers": {name: f"{agreement.describe(layer)}, {layouts}"},
                "inputs": {name: f"{list(x.shape)} in {x.dtype}{at}"},
            },
        )
    layer._agreed = True


def _compare(layer: Float8Linear, mesh: Any, facts: agreement.Facts) -> None:
    if is_fake(layer.weight):
        return  # a program that plans or counts memory runs no ranks
    # The weight may be on the meta device still.
    on_gpu = mesh.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    agreement.agree_once(mesh.get_group(), facts, device)


def sharing_of(layer: Float8Linear, weight: Any) -> tuple[int, Sharing]:
    """Returns the weight's dimension that ranks share, and how (ValueError)."""
    mesh, placements = weight.device_mesh, weight.placements
    known = layer._sharing
    if known is not None and known[0] == (mesh, placements, layer._config):
        return known[1], known[2]
    if len(placements) != 1 or not (placements[0].is_shard(0) or placements[0].is_shard(1)):
        raise ValueError(
            f"float8: a weight is a DTensor with placements {placements}; a linear in fp8 has "
            "Shard(0) or Shard(1) on one dimension of a mesh"
        )
    dim = placements[0].dim
    check(layer, dim, mesh.size())
    to = Sharing(layer._rules, mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())
    layer._sharing = ((mesh, placements, layer._config), dim, to)
    return dim, to


def check(layer: Float8Linear, dim: int, ranks: int) -> None:
    """Raises ValueError, with the layer's name, where ranks cannot share its weight."""
    name = f"layer {layer._layer_name!r}" if layer._layer_name else "a Float8Linear"
    extent, what = (
        (layer.out_features, "out_features") if dim == 0 else (layer.in_features, "in_features")
    )
    blocks = layer._rules.has_blocks
    multiple = operands.BLOCK if blocks else 16
    if extent % (ranks * multiple) != 0 or layer._padding:
        why = "whole blocks of 128" if blocks else "multiples of 16"
        raise ValueError(
            f"float8: {name} has {what} {extent}, which {ranks} ranks cannot share in {why}; leave "
            "it out of the parallelize plan, or out of the conversion"
        )
    if layer._rules.mixed:
        raise ValueError(
            f"float8: {name} has a custom recipe with delayed and other casts; tensor parallelism is "
            "for delayed scaling of all operands, or of none"
        )


def _check_tokens(tokens: int, to: Sharing) -> None:
    if tokens % to.ranks != 0:
        raise ValueError(
            f"float8: {to.ranks} ranks cannot share a sequence of {tokens} evenly; pad it"
        )


def _version(weight: Any, dtype: torch.dtype) -> tuple[Any, ...]:
    local = weight._local_tensor
    return id(weight), weight._version, id(local), local._version, dtype


def _weight_words(layer: Float8Linear, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Returns the maxima that `find_weight_words` left, None where the weight has changed since."""
    known = layer._weight_words
    if known is None or torch.compiler.is_compiling():
        return None
    return known[1] if known[0] == _version(layer.weight, dtype) else None


@torch.no_grad()
def find_weight_words(layers: Sequence[Float8Linear], dtype: torch.dtype | None = None) -> None:
    """Finds the maxima of the layers' weights over ranks, in one all-reduce for each group.

    A weight that FSDP shards too is left out: its maxima are found with its casts, or its forwards
    find them with those of x.

    dtype: x's; None: the weights'.
    """
    groups: dict[Sharing, list[tuple[Float8Linear, Share]]] = {}
    for layer in layers:
        weight: Any = layer.weight
        if len(weight.placements) != 1 or isinstance(weight._local_tensor, GatheredWeight):
            continue
        to, share = _share_of(layer, dtype)
        if not to.rules.delayed and operands.spans_ranks(share, to):
            groups.setdefault(to, []).append((layer, share))
    for to, own in groups.items():
        found = operands.find_words([share for _, share in own], to)
        for (layer, share), words in zip(own, found, strict=True):
            layer._weight_words = (_version(layer.weight, share.tensor.dtype), words)


def _share_of(layer: Float8Linear, dtype: torch.dtype | None) -> tuple[Sharing, Share]:
    weight: Any = layer.weight
    dim, to = sharing_of(layer, weight)
    local = weight._local_tensor.detach()
    return to, Share(local.to(dtype or local.dtype), _ops.WEIGHT, dim)


class SharedWeightCast:
    """The fp8 copies of what this rank has of a weight, which stay where they are."""

    def __init__(self, layer: Float8Linear, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.copies = self._cast(layer)
        for part in self._parts(self.copies):
            torch._dynamo.mark_static_address(part, guard=False)

    def of(self, layer: Float8Linear, dtype: torch.dtype) -> operands.Copies | None:
        """Returns the copies for an x of that type, None where they are of another one."""
        if dtype != self.dtype:
            return None
        if not torch.compiler.is_compiling() and self._seen != _version(layer.weight, dtype):
            self.update(layer)
        return self.copies

    @torch.no_grad()
    def update(self, layer: Float8Linear) -> None:
        """Casts the weight again."""
        torch._foreach_copy_(self._parts(self.copies), self._parts(self._cast(layer)))

    @torch.no_grad()
    def _cast(self, layer: Float8Linear) -> operands.Copies:
        to, share = _share_of(layer, self.dtype)
        share = share._replace(words=_weight_words(layer, self.dtype))
        (copies,) = operands.cast([share], to, True, None)
        # The reference keeps the ids of _version from being used again.
        self._seen, self._weight = _version(layer.weight, self.dtype), layer.weight
        return copies

    @staticmethod
    def _parts(copies: operands.Copies) -> list[Tensor]:
        return [part for copy in copies if copy is not None for part in copy]
