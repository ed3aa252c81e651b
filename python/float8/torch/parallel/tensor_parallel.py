"""Tensor and sequence parallelism: Float8Linear layers whose weight is a DTensor that ranks share.

The weight is shared by rows (Shard(0), column-wise parallel) or by columns (Shard(1), row-wise
parallel). This is the layers' side: placements and checks. sharded_linear.py computes. Weights are cast in every
forward, and their maxima are reduced with those of x.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from float8.torch.parallel import async_tensor_parallel, sharded_linear, sharded_mlp
from float8.torch.parallel import sharded_grads as grads
from float8.torch.parallel import sharded_operands as operands
from float8.torch.parallel.sharded_grads import Call
from float8.torch.parallel.sharded_mlp import Part
from float8.torch.parallel.sharded_operands import Sharing
from float8.torch.ranks import agreement, collectives
from float8.torch.ranks.collectives import Operation
from float8.torch.shard.gathered_weight import GatheredWeight
from float8.torch.shard.weight_mesh import check_split

if TYPE_CHECKING:
    from float8.torch.layer.linear import Float8Linear


def linear(layer: Float8Linear, input: Any, source: Any) -> Any:
    """Computes a Float8Linear whose weight is a DTensor.

    source: the DTensor that the layer was called with, before any change of type.
    """
    if not torch.compiler.is_compiling():
        if not layer._agreed:
            compare_call(layer, input)
        _begin(layer)
    x, x_dim = _input(layer, input)
    part = _part(layer, input, x_dim)
    y = sharded_linear.linear(source, x, *part)
    return _output(layer, input, y, part.call)


def mlp(layers: Sequence[Float8Linear], inputs: Sequence[Any], activation: int) -> Any:
    """Computes an MLP of Float8Linear whose weights are DTensors, as one function.

    layers: gate, up and down, or up and down: rows of the former are shared, and columns of down.
    inputs: the DTensors that the former read, of the same values.
    """
    *before, down = layers
    if not torch.compiler.is_compiling():
        for layer in layers:
            if not layer._agreed:
                compare_call(layer, None if layer is down else inputs[0], "fused")
        _begin(before[0])
    given = [_of_autocast(each) for each in inputs]
    x, x_dim = _input(before[0], given[0])
    parts = [_part(layer, given[0], x_dim) for layer in layers]
    shared = parts[0].scales is None and all(
        each is inputs[0] and part.call.while_trained() == parts[0].call.while_trained()
        for each, part in zip(inputs, parts[:-1], strict=True)
    )
    x_of_up = None if shared else _input(before[-1], given[-1])[0]
    y = sharded_mlp.mlp(x, x_of_up, shared, parts, activation)
    return _output(down, given[0], y, parts[-1].call)


def _of_autocast(input: Any) -> Any:
    kind = "cuda" if input.is_cuda else input.device.type
    if torch.is_autocast_enabled(kind):
        return input.to(torch.get_autocast_dtype(kind))
    return input


def _input(layer: Float8Linear, input: Any) -> tuple[torch.Tensor, int | None]:
    """Returns this rank's x, and its dimension that ranks share by tokens."""
    weight: Any = layer.weight
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
    at = input.placements[0]
    if dim == 1:
        if not at.is_shard(last):
            input = input.redistribute(mesh, [ShardPlacement(last)])
        return input.to_local(), None
    if isinstance(at, ShardPlacement) and at.dim < last and to.rules.is_fp8(operands.OUTPUT):
        _check_tokens(input.shape[at.dim], to)
        return input.to_local(), at.dim
    if not at.is_replicate():
        input = input.redistribute(mesh, [Replicate()])
    return input.to_local(grad_placements=[Partial()]), None


def _part(layer: Float8Linear, input: Any, x_dim: int | None) -> Part:
    """Returns what this rank has of a linear whose x has the dimensions of `input`, but for the last one."""
    weight: Any = layer.weight
    dim, to = sharing_of(layer, weight)
    y_dim = layer._output_dim if dim == 1 else None
    if y_dim is not None:
        y_dim %= input.dim()
        if y_dim < input.dim() - 1:
            _check_tokens(input.shape[y_dim], to)
        else:
            y_dim = None
    local = weight.to_local()
    overlap = async_tensor_parallel.wanted(layer.async_tensor_parallel)
    call = Call(
        to,
        dim,
        x_dim if dim == 0 else None,
        y_dim,
        layer._layout,
        layer._first_step,
        layer.recompute is True,
        overlap,
        gathered=isinstance(local, GatheredWeight),
    )
    bias: Any = layer.bias
    local_bias = None if bias is None else bias.to_local()
    return Part(local, local_bias, layer.scales_on(local.device), call)


def _output(layer: Float8Linear, input: Any, y: torch.Tensor, call: Call) -> Any:
    """Returns the DTensor of this rank's part of y."""
    placement: Any = ShardPlacement(input.dim() - 1)
    if call.dim == 1:
        placement = Partial() if call.y_dim is None else ShardPlacement(call.y_dim)
    mesh = layer.weight.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(y, mesh, [placement], run_check=False)


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
        words = f"{layer.describe()}, {style}"
        _compare(layer, mesh, {"layers": {layer._layer_name: words}})


def compare_call(layer: Float8Linear, x: Any, way: str = "") -> None:
    """Raises on all ranks in a layer's first forward where the layer, or what it is given, differs.

    x: None is not compared. way: how the layer is called, which ranks have in common.

    It is not for graphs of torch.compile, which have no place for what the host does.
    """
    mesh, placements = layer.weight.device_mesh, layer.weight.placements  # type: ignore[attr-defined]
    if mesh.ndim == 1 and mesh.size() > 1:
        name = layer._layer_name
        layouts = f"{placements[0]}, y by dimension {layer._output_dim}"
        layouts += f", {way}" if way else ""
        layouts += "" if layer.weight.requires_grad else ", frozen"
        at = f", {x.placements}" if isinstance(x, DTensor) else ""
        facts: dict[str, Any] = {"layers": {name: f"{layer.describe()}, {layouts}"}}
        if x is not None:
            facts["inputs"] = {name: f"{list(x.shape)} in {x.dtype}{at}"}
        _compare(layer, mesh, facts)
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
        return known[1], known[2] if weight.requires_grad else known[3]
    if len(placements) != 1 or not (placements[0].is_shard(0) or placements[0].is_shard(1)):
        raise ValueError(
            f"float8: a weight is a DTensor with placements {placements}; a linear in fp8 has "
            "Shard(0) or Shard(1) on one dimension of a mesh"
        )
    dim = placements[0].dim
    check_split(layer, dim, mesh.size())
    ranks = (mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())
    to = of_frozen = Sharing(layer._rules, *ranks)
    if layer._rules.of_frozen is not None:
        of_frozen = Sharing(layer._rules.of_frozen, *ranks, trained=to)
    layer._sharing = ((mesh, placements, layer._config), dim, to, of_frozen)
    return dim, to if weight.requires_grad else of_frozen


def _check_tokens(tokens: int, to: Sharing) -> None:
    if tokens % to.ranks != 0:
        raise ValueError(
            f"float8: {to.ranks} ranks cannot share a sequence of {tokens} evenly; pad it"
        )
