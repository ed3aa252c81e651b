"""One layer of a sharded model against the same layer of one device, in the memory of one layer."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from float8.torch import _linear, _ops
from float8.torch.amaxes import PART_BYTES
from float8.torch.experts import ops
from float8.torch.layer.linear import Float8Linear
from float8.torch.ranks import collectives
from float8.torch.ranks.collectives import Operation
from float8.torch.shard import fsdp
from float8.torch.shard.expert_copies import copies_of
from float8.torch.shard.gather import COPIES, Gather
from float8.torch.shard.gathered_weight import GatheredWeight
from float8.torch.shard.weight_gather import plain_parts
from float8.torch.shard.weight_mesh import dims_of_others, is_sharded_by_fsdp

# Sums in another order differ by rounding, 50 dB and more in bfloat16. One operand that was cast
# with another scale costs more: two such casts agree to about 30 dB.
THRESHOLD_DB = 40.0
TENSORS = ("w", "q", "qt", "y", "dx", "dw", "db")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A tensor of the sharded model against that of the whole one."""

    bits: bool
    db: float = math.inf  # the signal to noise ratio
    where: str = ""  # the first element that differs
    allowed: bool = True
    same_kind: bool = True  # the shapes and types are equal

    def __str__(self) -> str:
        if self.bits:
            return "bits"
        if not self.same_kind:
            return "DIFFERS in type or shape"
        return f"{self.db:.0f} dB" if self.allowed else f"DIFFERS, {self.db:.0f} dB"


@dataclasses.dataclass
class Layer:
    """A layer of a report."""

    name: str
    shape: str
    weight: str  # how ranks hold it
    tensors: dict[str, Comparison]
    skipped: str = ""  # why it was not compared


class LayerCheck:
    """The comparisons of one layer."""

    def __init__(self, name: str, layer: Float8Linear, tokens: int, dtype: Any) -> None:
        self._name = name
        self._layer = layer
        self._tokens = tokens
        self._dtype = dtype
        self._found: dict[str, Comparison] = {}
        self.digest = ""

    def run(self) -> Layer:
        layer = self._layer
        weight: Any = layer.weight
        placements = getattr(weight, "placements", None)
        how, skipped = "replicated", ""
        with torch.enable_grad():
            if layer.is_empty:
                skipped = (
                    "its weight is empty between calls, as DeepSpeed's ZeRO-3 and FSDP1 leave it"
                )
            elif placements is None:
                self._plain(weight.detach(), weight.detach())
            elif isinstance(weight._local_tensor, fsdp.ShardedWeight):
                how = "fp8 gathers"
                self._gathered(weight)
            elif is_sharded_by_fsdp(layer):
                how = "gathers"
                with fsdp.unsharded(layer) as unsharded:
                    if unsharded is None and sum(not at.is_replicate() for at in placements) > 1:
                        skipped = "FSDP has not gathered it yet; run a step before"
                    elif unsharded is None:
                        self._plain(weight.full_tensor().detach(), _whole(weight))
                    elif hasattr(unsharded, "placements"):
                        how = f"gathers, {unsharded.placements[0]}"
                        self._parallel(unsharded, _whole(unsharded))
                    else:
                        whole = _whole(weight).to(unsharded.dtype)
                        self._plain(unsharded.detach(), whole)
            elif weight.device_mesh.ndim == 1 and not placements[0].is_replicate():
                how = str(placements[0])
                self._parallel(weight, _whole(weight))
            else:
                skipped = f"placements {placements}"
        shape = f"[{layer.out_features}, {layer.in_features}]"
        return Layer(self._name, shape, how, self._found, skipped)

    def _compare(self, name: str, own: Tensor, expected: Tensor, exact: bool = True) -> None:
        found = _comparison(own, expected, exact)
        before = self._found.get(name)
        if before is None or before.allowed:
            self._found[name] = found if before is None or not found.bits else before

    def _compare_parts(self, name: str, own: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
        for a, b in zip(own, expected, strict=True):
            self._compare(name, a, b)

    def _plain(self, weight: Tensor, whole: Tensor) -> None:
        """Compares a weight in high precision, and the linear with it."""
        self.digest = _digest(whole)
        self._compare("w", weight, whole)
        layer = self._layer
        cast = layer._weight_cast
        if cast is not None:
            cast.update(layer)
            expected = plain_parts(cast.fresh(layer), layer.out_features, layer)
            for name, parts in plain_parts(cast.copies, layer.out_features, layer).items():
                self._compare_parts(name, parts, expected[name])
        self._run_both(weight, whole, self._type_of_x(whole))

    def _gathered(self, weight: Any) -> None:
        """Compares the copies that ranks gather in fp8, and the linear with them."""
        layer = self._layer
        gather = fsdp.gather_of(layer)
        with _cast(gather, weight), fsdp.unsharded(layer) as gathered:
            dtype = gather.dtype
            whole = _whole(weight).to(gather.param_dtype or weight.dtype)
            self.digest = _digest(whole)
            with _cloned_scales(layer) as scales:
                source = whole.to(dtype)
                copies = _ops.quantize(
                    source, gather.config, _ops.WEIGHT, True, scales, layer._layout, True
                )
            for name, expected in plain_parts(copies, layer.out_features, layer).items():
                self._compare_parts(name, gather.parts(name), gather.own_parts(name, expected))
            if gather.tensor_dim is not None:
                if gathered is not None:  # before FSDP's first forward no linear can have it
                    self._parallel(gathered, whole, dtype)
                return
            if gathered is None:
                gathered = GatheredWeight.of(gather, whole.dtype)
            self._run_both(gathered.detach().requires_grad_(), whole, dtype)

    def _type_of_x(self, whole: Tensor) -> torch.dtype:
        """Returns x's type: autocast's, as in a forward, else the given one or the weight's."""
        device = whole.device.type
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return self._dtype or whole.dtype

    def _run_both(self, weight: Tensor, whole: Tensor, dtype: torch.dtype) -> None:
        """Compares forward and backward with the weight of the ranks, and with the whole one."""
        results = []
        for each in (weight, whole):
            x, dy, bias = self._operands(whole, dtype, own_batch=True)
            each = each.detach().requires_grad_()
            with _cloned_scales(self._layer) as scales:
                y = self._linear(x, each, bias, scales)
                wanted = [x, each] + ([] if bias is None else [bias])
                grads = torch.autograd.grad(y, wanted, dy)
            results.append((y.detach(), *grads))
        for name, own, expected in zip(TENSORS[3:], *results, strict=False):
            self._compare(name, own, expected)

    def _linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None
    ) -> Tensor:
        layer = self._layer
        if layer._padding:
            pad = (0, layer._padding)
            x, weight = functional.pad(x, pad), functional.pad(weight, pad)
        return _linear.linear(x, weight, bias, layer._config, scales, layer._layout)

    def _operands(
        self, whole: Tensor, dtype: torch.dtype, own_batch: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns x, dy and the bias; x and dy are of this rank alone, or the same on all."""
        layer = self._layer
        device = layer.weight.device
        rank = max(0, collectives.own_rank()) if own_batch else 0
        random = torch.Generator(device).manual_seed(0xF8 + rank)

        def normal(columns: int) -> Tensor:
            size = (self._tokens, columns)
            return torch.randn(size, generator=random, device=device).to(dtype)

        rows, columns = whole.shape[-2:]
        x = normal(columns).requires_grad_()
        bias: Any = getattr(layer, "bias", None)
        if bias is not None:
            bias = _whole(bias).detach().clone().requires_grad_()
        return x, normal(rows), bias

    def _parallel(self, weight: Any, whole: Tensor, dtype: torch.dtype | None = None) -> None:
        """Compares a linear that tensor parallelism shares, whose forward takes DTensors."""
        from torch.distributed.tensor import DTensor, Replicate

        layer = self._layer
        self.digest = _digest(whole)
        x, dy, bias = self._operands(whole, dtype or self._type_of_x(whole), own_batch=False)
        with _cloned_scales(layer) as scales:
            y = self._linear(x, whole.requires_grad_(), bias, scales)
            wanted = [x, whole] + ([] if bias is None else [bias])
            expected = (y.detach(), *torch.autograd.grad(y, wanted, dy))
        mesh = weight.device_mesh
        shared = DTensor.from_local(x.detach(), mesh, [Replicate()], run_check=False)
        shared.requires_grad_()
        with _cloned_scales(layer, attach=True):
            result: Any = layer.forward(shared)
            local = result.redistribute(mesh, [Replicate()]).to_local()
            parameters: list[Any] = [shared, weight] + ([] if bias is None else [layer.bias])
            grads: Any = torch.autograd.grad(local, parameters, dy)
        own = [local.detach(), *(each.full_tensor() for each in grads)]
        for name, a, b in zip(TENSORS[3:], own, expected, strict=False):
            self._compare(name, a, b, exact=False)


class ExpertCheck(LayerCheck):
    """The comparisons of one weight of all experts, which FSDP gathers in fp8, or of two that are computed as one."""

    _layer: Any  # an ExpertLinear

    @property
    def is_with_another(self) -> bool:
        """Tells whether the check of another weight is that of this one too."""
        if not fsdp.gathers_in_fp8(self._layer):
            return False
        gather = fsdp.gather_of(self._layer)
        return gather is not gather.pair[0]

    def run(self) -> Layer:
        shape = str(list(self._layer.weight.shape))
        if not fsdp.gathers_in_fp8(self._layer):
            return Layer(self._name, shape, "gathers", {}, "experts in high precision")
        with torch.enable_grad():
            self._gathered(self._layer.weight)
        if len(fsdp.gather_of(self._layer).pair) > 1:
            self._name += f" and {self._layer.pair[1].name}"
        return Layer(self._name, shape, "fp8 gathers", self._found)

    def _gathered(self, weight: Any) -> None:
        layer = self._layer
        gather = fsdp.gather_of(layer)
        with contextlib.ExitStack() as stack:
            for each in gather.pair:
                stack.enter_context(_cast(each, each.latest()))
            stack.enter_context(fsdp.unsharded(layer))
            dtype = gather.dtype
            # Other ranks of expert parallelism have other experts, of which the digests are enough.
            mesh, others = weight.device_mesh, dims_of_others(weight, gather.fsdp_dim)
            whole = torch.cat([_whole(each.latest(), others) for each in gather.pair], 1)
            self.digest = _digest(whole, [mesh.get_group(i) for i in others])
            whole = whole.to(gather.param_dtype or weight.dtype)
            if gather.is_transposed:
                whole = whole.transpose(1, 2).contiguous()
            with _cloned_scales(layer) as scales:
                state = (scales, layer._layout, layer.in_first_step)
                copies = copies_of(whole.to(dtype), gather.config, *state)
            for name in COPIES:
                own = getattr(gather, name)(dtype)
                self._compare_parts(name, gather.parts(name, own), gather.parts(name, copies[name]))
            # In the shape of the copies, whether FSDP has gathered the weight before or not.
            gathered = GatheredWeight(gather.key, gather.whole_size, whole.dtype, gather.device)
            self._run_both(gathered.requires_grad_(), whole, dtype)

    def _linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None
    ) -> Tensor:
        experts = torch.arange(1, weight.shape[0] + 1, device=x.device)
        offs = (experts * x.shape[0] // weight.shape[0]).int()
        config = self._layer.module.experts_config
        layout = ops.experts_layout(offs, x.shape[0], config)
        return ops.linear(x, weight, layout, config, scales, self._layer._layout)


def _whole(tensor: Any, without: Sequence[int] = ()) -> Tensor:
    """Gathers a parameter in high precision, without the code that is under test.

    without: dimensions of its mesh whose ranks keep their parts.
    """
    local = getattr(tensor, "_local_tensor", None)
    if local is None:
        return tensor.detach()  # type: ignore[no-any-return]
    plain = local.plain() if isinstance(local, fsdp.ShardedWeight) else local.detach()
    # FSDP's dimensions come first, and it shards what a rank of tensor parallelism has.
    for dim, at in enumerate(tensor.placements):
        if not at.is_replicate() and dim not in without:
            plain = _concatenated(plain, at.dim, tensor.device_mesh.get_group(dim))
    return plain.clone() if plain is local else plain


def _concatenated(shard: Tensor, dim: int, group: Any) -> Tensor:
    """Gathers shards that need not be equally large."""
    operation = Operation("the gather of a whole weight")
    ranks = group.size()
    size = torch.tensor([shard.shape[dim]], device=shard.device)
    sizes = size.new_empty(ranks)
    collectives.all_gather(sizes, size, group, operation)
    extents = sizes.tolist()
    lines = shard.movedim(dim, 0)
    padded = lines.new_zeros((max(extents), *lines.shape[1:]))
    padded[: lines.shape[0]] = lines
    everyone = padded.new_empty((ranks * padded.shape[0], *padded.shape[1:]))
    collectives.all_gather(everyone, padded, group, operation)
    parts = [p[:n] for p, n in zip(everyone.chunk(ranks), extents, strict=True)]
    return torch.cat(parts).movedim(0, dim).contiguous()


@contextlib.contextmanager
def _cast(gather: Gather, weight: Any) -> Iterator[None]:
    """Casts a weight where no step has. Delayed scaling forgets it, with the amax of the cast."""
    of_weight = gather.amax
    if gather.is_current(weight):
        try:
            yield
        finally:
            gather.amax = of_weight
        return
    amaxes = None if gather.scales is None else gather.scales.amaxes()
    before = None if amaxes is None else amaxes.clone()
    gather.cast(weight)
    try:
        yield
    finally:
        gather.amax = of_weight
        if gather.scales is not None and amaxes is not None and before is not None:
            amaxes.copy_(before)
            gather.scales.generation += 1  # other weights may have been cast with this one


@contextlib.contextmanager
def _cloned_scales(layer: Float8Linear, attach: bool = False) -> Iterator[Tensor | None]:
    """Gives a layer's part of a copy of its scale state, which a call may change."""
    state = layer._scales
    if state is None:
        yield None
        return
    clone = state.state.clone()
    config, layout = state.config, state.layout
    first = {*state.first, *[layer._scale_index] * getattr(layer, "in_first_step", False)}
    torch.ops.float8.scales_set_first(clone, config, layout, sorted(first))
    begin = layer._scale_index * PART_BYTES
    own = clone[begin : begin + PART_BYTES]
    before = layer._scale_view
    if attach:
        layer._scale_view = own
    try:
        yield own
    finally:
        layer._scale_view = before
        # Another tensor may get the memory.
        torch.ops.float8.scales_set_first(clone, config, layout, [])


def _comparison(own: Tensor, expected: Tensor, exact: bool) -> Comparison:
    own, expected = own.detach().contiguous(), expected.detach().contiguous()
    if own.shape != expected.shape or own.dtype != expected.dtype:
        where = f": it is {own.dtype} of {list(own.shape)}, not {expected.dtype} of {list(expected.shape)}"
        return Comparison(False, -math.inf, where, False, False)
    unequal = own.view(torch.uint8) != expected.view(torch.uint8)
    if not bool(unequal.any()):
        return Comparison(True)
    at = int(unequal.flatten().nonzero()[0]) // own.element_size()
    index = [int(i) for i in torch.unravel_index(torch.tensor(at), own.shape)]
    if own.dtype == torch.uint8:
        own, expected = own.view(torch.float8_e4m3fn), expected.view(torch.float8_e4m3fn)
    signal = expected.float().square().sum()
    noise = (own.float() - expected.float()).square().sum()
    db = float(10 * torch.log10(signal / noise))
    return Comparison(False, db, f" at {index}", not exact and db >= THRESHOLD_DB)


def _digest(tensor: Tensor, groups: Sequence[Any] = ()) -> str:
    """Returns a hash of a tensor's bits, which is computed where it is, or of all of that ranks of the groups have."""
    words = tensor.detach().contiguous().view(torch.uint8).view(-1)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for index, part in enumerate(torch.split(words, 1 << 22)):
        weights = torch.arange(part.numel(), device=part.device) * 0x9E3779B1 + 2 * index + 1
        total += ((part.long() + 1) * (weights ^ (weights >> 15))).sum() * (2 * index + 1)
    totals = total.view(1)
    for group in groups:
        own, totals = totals, totals.new_empty(group.size() * totals.numel())
        collectives.all_gather(totals, own, group, Operation("the gather of hashes"))
    return " ".join(f"{each & (1 << 64) - 1:016x}" for each in totals.tolist())
