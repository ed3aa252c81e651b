"""Weights that are cast once after they change, and not in every forward.

Over the micro-batches of a step the weights stay the same, so their fp8 copies may too. Nothing on the
host tells of every change (`_version` does not of `.data`, of fused optimizers, of what a kernel
writes), so the device compares the weights' bytes with what the copies were made from.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from float8 import recipes
from float8.recipes import Granularity
from float8.torch import _ops, notices
from float8.torch.base_linear import is_float8
from float8.torch.experts.modules import (
    Float8Experts,
    TorchtitanGemms,
    cast_together,
    weights_of,
)
from float8.torch.experts.weight_casts import (
    CachedExperts,
    ExpertCast,
    OwnWeights,
    cached_experts,
)
from float8.torch.shard import weight_changes
from float8.torch.shard.fsdp import gathers_in_fp8, precompute_float8_dynamic_scale_for_fsdp
from float8.torch.shard.weight_mesh import is_sharded_by_fsdp, layers_of, mesh_dims

if TYPE_CHECKING:
    from float8.torch.layer.linear import Float8Linear


# Linears, and modules of experts, that keep copies, by their weights.
_layers = WeakIdKeyDictionary()
_modules_of_experts = WeakIdKeyDictionary()


class WeightCast:
    """The fp8 copies of one linear's weight, which stay where they are.

    Their state has a fingerprint of the bytes that they were made from. Every forward compares it
    with the weight's on the device, and casts where they differ, whoever changed the weight.
    """

    def __init__(self, layer: Float8Linear, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self._latest = dtype  # x's type in the latest forward in eager mode
        self._config = layer._config & ~recipes.BIAS
        self._own = OwnWeights([layer.weight])
        self._make(layer)

    def of(
        self, layer: Float8Linear, weight: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Returns the copies and their state for an x of that type, None where it does without.

        weight: that of the forward.
        """
        if self.dtype is not None and dtype != self.dtype:
            return None
        if torch.compiler.is_compiling():
            fits = weight.device == self._device and self._own.may_be([weight])
            return (*self.copies, self.state) if fits else None
        if not self._own.are([weight]):
            return None
        if weight.device != self._device:  # the model was moved
            self._make(layer)
        self._latest = dtype
        if weight_changes.checks_copies and not weight_changes.is_capturing(self.state):
            self._check(layer)
        return (*self.copies, self.state)

    def _check(self, layer: Float8Linear) -> None:
        """Raises where check_copies is on and the next forward would read copies of another weight."""
        if self.differs(layer):
            raise RuntimeError(
                f"float8: the fp8 copies of {layer._words()} are not those of the weight, though their "
                "fingerprint is; please report it"
            )

    def update(self, layer: Float8Linear) -> None:
        """Casts the weight ahead of the next forward, if it changed."""
        self._cast(layer, self.copies, self.state)

    def differs(self, layer: Float8Linear) -> bool:
        """Tells whether the next forward would read other copies than those of a fresh cast."""
        self.update(layer)
        # Clones, since a cast leaves the bytes between its rows as they are.
        fresh = (self.copies[0].clone(), self.copies[1].clone())
        self._cast(layer, fresh, torch.zeros_like(self.state))
        return not all(map(torch.equal, fresh, self.copies))

    def fresh(self, layer: Float8Linear) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what a cast apart from the copies makes."""
        weight = self._operand(layer).to(self._type(layer))
        return _ops.quantize(weight, self._config, _ops.WEIGHT, True)  # type: ignore[no-any-return]

    def _make(self, layer: Float8Linear) -> None:
        self._device = layer.weight.device
        n, k = layer.weight.shape
        sizes = torch.ops.float8.quantized_bytes(
            n, k + layer._padding, self._config, _ops.WEIGHT, True
        )
        with torch.inference_mode(False):  # or backwards could not save them later
            q, qt = (torch.empty(x, dtype=torch.uint8, device=self._device) for x in sizes)
            self.copies = (q, qt)
            self.state = torch.zeros(
                _ops.WEIGHT_STATE_BYTES, dtype=torch.uint8, device=self._device
            )
        self._words: tuple[int, int] | None = None
        self.is_one_pass = (
            False  # the weight is read once for its casts, which find its maxima then
        )
        self._state_after: torch.Tensor | None = None
        for tensor in (q, qt, self.state):
            torch._dynamo.mark_static_address(tensor, guard=False)

    def _cast(
        self,
        layer: Float8Linear,
        copies: tuple[torch.Tensor, torch.Tensor],
        state: torch.Tensor,
    ) -> None:
        weight = self._operand(layer)
        like = weight.new_empty(0, dtype=self._type(layer))
        _ops.cast_weight(weight, *copies, state, like, self._config)

    def maxima(self, layer: Float8Linear) -> tuple[int, int]:
        """Returns how many words a cast with given maxima reads: those of columns and the weight, and of rows.

        They are none where a cast finds its maxima itself.
        """
        if self._words is None:
            casts = [
                cast for cast in (layer.recipe.output.b, layer.recipe.grad_input.b) if cast.fp8
            ]
            kinds = {cast.granularity for cast in casts}
            self.is_one_pass = not layer._padding and kinds == {Granularity.BLOCK_128X128}
            words = (0, 0)
            if not layer._padding and kinds <= {Granularity.TENSOR, Granularity.AXIS}:
                n, k = layer.weight.shape
                words = torch.ops.float8.amax_words(n, k, self._config, _ops.WEIGHT)
            self._words = words
        return self._words

    def state_after(self) -> torch.Tensor:
        """Returns the memory in which an optimizer leaves the state of copies that are cast next."""
        if self._state_after is None:
            state = torch.zeros(_ops.WEIGHT_STATE_BYTES, dtype=torch.uint8)
            state.view(torch.int32)[_ops.FLAG_OF_WEIGHT_STATE] = 1
            self._state_after = state.to(self._device)
        return self._state_after

    def _type(self, layer: Float8Linear) -> torch.dtype:
        return self._latest or layer.weight.dtype

    def _operand(self, layer: Float8Linear) -> torch.Tensor:
        weight = layer.weight.detach()
        return functional.pad(weight, (0, layer._padding)) if layer._padding else weight


class CachedWeight:
    """A weight with kept copies while an optimizer updates it (optim.py).

    words: how many maxima the update finds, of the columns and the weight, and of the rows.
    copies: those that it casts into; empty ones where a cast needs maxima before.
    """

    rows_max = 0  # it is no shard
    scale_state: Any = None  # delayed scaling keeps no copies
    scales = _ops.NO_BYTES

    def __init__(self, parameter: torch.Tensor, layer: Float8Linear, cast: WeightCast) -> None:
        self.parameter = parameter
        self.memory = parameter.detach()
        self.cast = cast
        self.config = cast._config
        self.dtype = _ops.ELEMENT_TYPES[cast._type(layer)]
        self.state = cast.state_after()
        amax, rows = cast.maxima(layer)
        self._row_words = rows
        self.copies = cast.copies if cast.is_one_pass else (_ops.NO_BYTES, _ops.NO_BYTES)
        q = layer.recipe.output.b
        self.words = amax, rows if q.fp8 and q.granularity is Granularity.AXIS else 0

    def rows_of(self, row_amax: torch.Tensor) -> torch.Tensor:
        """Returns the words of the weight's rows."""
        return row_amax

    def before(self) -> None:
        """Is called before the weight changes."""

    def after(self, amax: torch.Tensor, row_amax: torch.Tensor) -> None:
        """Takes the maxima of the weight as it is now."""
        if row_amax.numel() != self._row_words:
            row_amax = row_amax.new_empty(self._row_words)  # the cast does not read them
        self.maxima = amax, row_amax


def cached(parameter: torch.Tensor) -> CachedWeight | CachedExperts | None:
    """Returns a weight with kept copies whose update may find the maxima for their casts, or None."""
    of_experts = _modules_of_experts.get(parameter)  # type: ignore[no-untyped-call]
    if of_experts is not None:
        return cached_experts(of_experts(), parameter)
    reference = _layers.get(parameter)  # type: ignore[no-untyped-call]
    layer = None if reference is None else reference()
    if layer is None or layer._weight_cast is None or layer.weight is not parameter:
        return None
    cast = layer._weight_cast
    wanted = cast._type(layer)
    fits = wanted in _ops.ELEMENT_TYPES and parameter.dtype in (wanted, torch.float32)
    if (
        not fits
        or parameter.device != cast._device
        or (cast.maxima(layer) == (0, 0) and not cast.is_one_pass)
    ):
        return None
    return CachedWeight(parameter, layer, cast)


def _cast_alike(weights: Sequence[CachedWeight]) -> None:
    if not weights:
        return
    amax, row_amax = map(list, zip(*(weight.maxima for weight in weights), strict=True))
    _ops.quantize_shard_list(
        [weight.memory for weight in weights],
        amax,
        row_amax,
        [weight.config for weight in weights],
        _ops.WEIGHT,
        [weight.memory.shape[0] for weight in weights],
        dtypes=[weight.dtype for weight in weights],
        into=[copy for weight in weights for copy in weight.cast.copies],
    )


def cast_updated(weights: Sequence[CachedWeight | CachedExperts]) -> None:
    """Casts weights that an optimizer has updated and not cast, with the maxima that it found."""
    groups: dict[Any, list[CachedWeight]] = {}
    of_experts: dict[Any, list[CachedExperts]] = {}
    for weight in weights:
        if isinstance(weight, CachedExperts):
            of_experts.setdefault(weight.kept_by, []).append(weight)
            continue
        groups.setdefault((weight.cast._device, weight.config & recipes.EMULATE), []).append(weight)
    for cast, experts in of_experts.items():
        cast.cast_with(experts)
    for own in groups.values():
        _cast_alike([weight for weight in own if not weight.cast.is_one_pass])
        # Where the casts fail, the states are of the copies before, and forwards cast again.
        torch._foreach_copy_(
            [weight.cast.state for weight in own], [weight.state for weight in own]
        )


class WeightCasts:
    """The cached casts of a model's weights; `cache_weight_casts` makes it."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        self._module = module
        layers = [
            layer
            for layer in module.modules()
            if is_float8(layer) and (layer.recipe.output.b.fp8 or layer.recipe.grad_input.b.fp8)
        ]
        kinds = [_kind(layer) for layer in layers]
        # FSDP's gathers in fp8 keep the shards' casts themselves.
        self._gathers = "gathered" in kinds or any(
            gathers_in_fp8(layer) for each in module.modules() for _, layer in layers_of(each)
        )
        self._plain = [x for x, kind in zip(layers, kinds, strict=True) if kind == "plain"]
        self._experts = _of_experts(module)
        for layer in self._plain:
            layer._weight_cast = WeightCast(layer, dtype)
            _layers[layer.weight] = weakref.ref(layer)
        for of_module, experts in self._experts:
            own = weights_of(experts)
            for weight in own.values():
                _modules_of_experts[weight] = weakref.ref(experts)
            experts.weight_casts = {
                names[0]: ExpertCast(
                    f"{of_module}.{' and '.join(names)}",
                    names,
                    [own[name] for name in names],
                    experts.experts_config,
                    dtype,
                )
                for names in cast_together(experts)
            }
        self._hooks: list[Any] = []

    def update(self) -> None:
        """Casts the weights that changed ahead of the next forward, on the current stream.

        Forwards see changes without it. A CUDA graph may capture it. Where FSDP gathers weights in fp8,
        all ranks call it: their maxima take one all-reduce.
        """
        self._update_gathers()
        for layer in self._plain:
            if layer._weight_cast is not None:
                layer._weight_cast.update(layer)
        for _, experts in self._experts:
            for cast in experts.weight_casts.values():
                cast.update([getattr(experts, name) for name in cast.names])

    def _update_gathers(self, *_: Any) -> None:
        if self._gathers:
            precompute_float8_dynamic_scale_for_fsdp(self._module)

    def update_after(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes every step of the optimizer end with a cast of the shards that FSDP gathers in fp8.

        optimizer: one, or what wraps one, as accelerate does. Call it for each where there are several.
        """
        hooked = _with_hooks(optimizer)
        self._hooks.append(hooked.register_step_post_hook(self._update_gathers))

    def remove(self) -> None:
        """Frees the copies; the layers cast their weights in every forward again."""
        for layer in self._plain:
            layer._weight_cast = None
        for _, experts in self._experts:
            experts.weight_casts = {}
        for hook in self._hooks:
            hook.remove()
        self._plain, self._experts, self._hooks = [], [], []
        self._gathers = False


def _of_experts(module: nn.Module) -> list[tuple[str, Float8Experts]]:
    """Returns the modules of experts that can keep copies, by names; a warning has the others."""
    found = []
    left: dict[str, list[str]] = {}
    for name, each in module.named_modules():
        if not isinstance(each, Float8Experts) or each.expert_weights or not each.experts_in_fp8:
            continue
        why = None
        if each.expert_linears:
            why = "delayed scaling records the amaxes of each cast"
        elif issubclass(each.experts_kind, TorchtitanGemms):
            why = "their forward does not say of which weight a GEMM is"
        elif getattr(each, "is_transposed", False):
            why = "they are stored as [experts, in_features, out_features]"
        elif any(type(w.data) is not torch.Tensor or w.is_meta for w in weights_of(each).values()):
            why = "they are no plain tensors with values"
        if why is None:
            found.append((name or "root", each))
        else:
            left.setdefault(why, []).append(name or "root")
    for why, names in left.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        text = f"the weights of {names[0]}{others} are cast in every forward: {why}"
        notices.warn_once(text, text)
    return found


def _kind(layer: Float8Linear) -> str:
    """Returns who has the weight: "plain", "shared" by tensor parallelism or "gathered" by FSDP."""
    weight: Any = layer.weight
    if layer._weight_gather is not None or gathers_in_fp8(layer):
        return "gathered"
    if layer.recipe.delayed:
        raise ValueError(
            "float8: weights with delayed scaling are cast in every forward, which records "
            "their amaxes; cache_weight_casts is for dynamic scaling"
        )
    if is_sharded_by_fsdp(layer):
        raise ValueError(
            f"float8: fully_shard gathers the weight of layer {layer._layer_name!r} in high "
            "precision in every forward, so that no copy stays; with "
            "enable_fsdp_float8_all_gather its shards are cast once a step"
        )
    if layer.is_empty:
        raise ValueError(
            f"float8: the weight of layer {layer._layer_name!r} is empty between its calls, as DeepSpeed's ZeRO-3 and "
            "FSDP1 leave it, so that no copy of it may stay: leave cache_weight_casts out"
        )
    if not weight.is_meta:
        if hasattr(weight, "placements") and mesh_dims(layer).tensor is not None:
            return "shared"
        if type(weight.data) is torch.Tensor:
            return "plain"
    raise ValueError(
        f"float8: a weight is a {type(weight.data).__name__} on {weight.device}; "
        "cache_weight_casts needs plain tensors with values, or what FSDP or tensor parallelism makes "
        "of them"
    )


def _with_hooks(optimizer: Any) -> torch.optim.Optimizer:
    """Returns the optimizer, or the one in it whose steps run hooks: accelerate's wrapper has the class but no hooks."""
    inner = optimizer
    while inner is not None and not hasattr(inner, "_optimizer_step_post_hooks"):
        inner = getattr(inner, "optimizer", None)
    if not isinstance(inner, torch.optim.Optimizer):
        raise TypeError(
            f"float8: optimizer is a {type(optimizer).__name__}; give cache_weight_casts one optimizer of PyTorch's, "
            "and each further one to update_after() of what it returns"
        )
    return inner


def cache_weight_casts(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> WeightCasts:
    """Keeps the fp8 copies of the weights of the linears and experts in fp8 below `module`.

    Forwards then read the copies instead of casting the weights, with the same results; they take 2
    bytes for each element. This is worth it where a step has several micro-batches.

    A copy of an older weight is never read. Every forward, also a compiled one and one in a CUDA
    graph, reads the weight once and compares a fingerprint of its bytes on the device; it casts where
    they changed, whoever changed them: any optimizer, `.data`, load_state_dict, a kernel. The copies
    change in place then, so a backward whose forward came before a change reads the new weight's.

    optimizer: for weights that FSDP gathers in fp8, its steps end with casting the shards; `update_after`
        takes further ones. Plain weights need none.
    dtype: x's; other x do without the copies. None: the copies serve x of any type, and are cast
        again where the type is another one than in the forward before.

    Weights that ranks of tensor parallelism share keep no copies. FSDP's gathers in fp8 keep none beside
    the shards' casts, which a forward makes where none are of this weight: for them `update` is
    precompute_float8_dynamic_scale_for_fsdp, and micro-batches cast nothing without this call too.

    The weights of converted experts keep copies too. A warning names experts that keep none, with the reason.

    Raises ValueError for delayed scaling, for weights that FSDP gathers in high precision, and for
    other weights that are no plain tensors, and TypeError for what is no optimizer; no layer is changed then. Layers that have copies already
    get new ones. It warns where no linear is in fp8.
    """
    notices.warn_without_linears("cache_weight_casts", module, experts=True)
    hooked = None if optimizer is None else _with_hooks(optimizer)
    casts = WeightCasts(module, dtype)
    if hooked is not None:
        casts.update_after(hooked)
    return casts
