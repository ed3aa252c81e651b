"""AdamW that finds, while a weight's new values are in registers, what their casts need first.

It is torch's fused AdamW. Of weights whose fp8 copies are kept, by `cache_weight_casts` or by FSDP's gathers
in fp8, it also leaves the maxima that dynamic scales come from, so that the casts behind a step read
each weight once and not twice; copies with scales of whole blocks, or delayed ones, it makes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam

from float8 import recipes
from float8.torch import _ops, traced
from float8.torch.experts.weight_casts import CachedExperts
from float8.torch.layer import weight_casts
from float8.torch.layer.weight_casts import CachedWeight
from float8.torch.shard import weight_changes
from float8.torch.shard.shard_update import ShardUpdate, shard_update

_FUSED = {"fused": True, "foreach": None, "differentiable": False}


class _Lists(NamedTuple):
    """What torch's functional AdamW takes of the parameters of a group that have gradients."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor]
    steps: list[Tensor]

    def some(self, indices: Sequence[int]) -> _Lists:
        return _Lists(*([each[i] for i in indices] if each else [] for each in self))


class _Update(NamedTuple):
    """A weight that the kernel of float8 updates, with its place in the lists."""

    place: int
    weight: CachedWeight | CachedExperts | ShardUpdate
    tensors: list[Tensor]  # the local ones of each list but the steps


_CAPTURE_CHECK = "_accelerator_graph_capture_health_check"
if not hasattr(torch.optim.Optimizer, _CAPTURE_CHECK):  # PyTorch 2.10 has another name
    _CAPTURE_CHECK = "_cuda_graph_capture_health_check"


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True), with the first half of the casts that follow a step.

    Weights whose fp8 copies are kept with dynamic scales of tensors, rows and columns have their maxima
    found in the pass that updates them: those of a model that `cache_weight_casts` was called with,
    whose steps then end with the casts of all such weights, and the shards that FSDP gathers in fp8,
    whose next cast takes them. Where scales are of 128x128 blocks, or delayed, that pass makes the
    copies. The weight of all experts is one of each: copies that are kept are cast behind the update, also
    where their scales are of blocks, and the next cast of a shard that FSDP gathers takes the maxima. Shards
    of experts with scales of blocks, or delayed ones, and all other parameters are torch's. Updates have the bits of torch's fused CUDA kernel: in
    float32, or in bfloat16 or float16 with states of the same type.

    Options, states and state dicts are those of torch.optim.AdamW(fused=True), in both directions;
    state dicts of the other implementations are taken too. grad_scale and found_inf of a GradScaler stay
    on the device, and so does an lr that is a tensor there.

    Raises what torch's does for bad options and parameters.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        capturable: bool = False,
        fused: bool | None = True,
    ) -> None:
        if fused is False:
            raise ValueError(
                "float8: this AdamW is fused; torch.optim.AdamW has the other implementations"
            )
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            capturable=capturable,
            fused=True,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this optimizer or of any torch.optim.AdamW."""
        groups = [{**group, **_FUSED} for group in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})

    @traced.untraced
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters that have gradients; returns what `closure` does."""
        getattr(self, _CAPTURE_CHECK)()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # All groups are looked at before anything is launched.
        found = [self._lists_of(group) for group in self.param_groups]
        for group, (lists, updates, has_complex) in zip(self.param_groups, found, strict=True):
            own = {update.place for update in updates}
            rest: dict[Any, list[int]] = {}  # by their meshes, since an op takes DTensors of one
            for i, parameter in enumerate(lists.params):
                if i not in own:
                    rest.setdefault(getattr(parameter, "device_mesh", None), []).append(i)
            for indices in rest.values():
                self._update_by_torch(group, lists.some(indices), has_complex)
            for alike in _alike(updates):
                self._update(group, lists.some([update.place for update in alike]).steps, alike)
        updated = [update.weight for _, updates, _ in found for update in updates]
        cached = [each for each in updated if not isinstance(each, ShardUpdate)]
        weight_casts.cast_updated(cached)
        return loss

    def _lists_of(self, group: dict[str, Any]) -> tuple[_Lists, list[_Update], bool]:
        lists = _Lists([], [], [], [], [], [])
        has_complex = self._init_group(group, *lists)  # type: ignore[no-untyped-call]
        updates = [
            update for i in range(len(lists.params)) if (update := _update_of(i, lists)) is not None
        ]
        return lists, updates, has_complex

    def _update_by_torch(self, group: dict[str, Any], lists: _Lists, has_complex: bool) -> None:
        beta1, beta2 = group["betas"]
        adam(
            *lists,
            amsgrad=group["amsgrad"],
            has_complex=has_complex,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            capturable=group["capturable"],
            fused=True,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            decoupled_weight_decay=True,
        )

    def _update(
        self, group: dict[str, Any], steps: list[Tensor], updates: Sequence[_Update]
    ) -> None:
        """Updates weights of one device by the kernel of float8."""
        device = updates[0].tensors[0].device
        beta1, beta2 = group["betas"]
        lr = group["lr"]
        on_device = isinstance(lr, Tensor) and (lr.device == device or lr.device.type != "cpu")
        scaler = [_on(getattr(self, name, None), device) for name in ("grad_scale", "found_inf")]
        state = updates[0].weight.scale_state
        words = _zero_words([update.weight for update in updates])
        torch._foreach_add_(steps, 1)
        for update in updates:
            update.weight.before()
        _ops.adamw(
            *map(list, zip(*(update.tensors for update in updates), strict=True)),
            *([] if group["amsgrad"] else [[]]),
            steps,
            [amax for amax, _ in words],
            [u.weight.rows_of(row_amax) for u, (_, row_amax) in zip(updates, words, strict=True)],
            [update.weight.state for update in updates],
            [copy for update in updates for copy in update.weight.copies],
            [update.weight.config for update in updates],
            [update.weight.dtype for update in updates],
            [update.weight.rows_max for update in updates],
            [] if state is None else [update.weight.scales for update in updates],
            0 if state is None else state.layout,
            [0.0 if on_device else float(lr), beta1, beta2, group["eps"], group["weight_decay"]],
            group["maximize"],
            _on(lr, device) if on_device else None,
            *scaler,
        )
        torch.autograd.graph.increment_version([update.weight.parameter for update in updates])
        if scaler[1] is not None:
            torch._foreach_sub_(steps, [scaler[1]] * len(steps))
        for update, maxima in zip(updates, words, strict=True):
            update.weight.after(*maxima)


weight_changes.all_writes_are_seen(AdamW)


def _zero_words(
    weights: Sequence[CachedWeight | CachedExperts | ShardUpdate],
) -> list[tuple[Tensor, Tensor]]:
    """Returns the words for the maxima of weights, of which one launch makes zeros."""
    sizes = [size for weight in weights for size in weight.words]
    zeros = weights[0].memory.new_zeros(sum(sizes), dtype=torch.int32)
    parts = torch.split(zeros, sizes)
    return list(zip(parts[::2], parts[1::2], strict=True))


def _on(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device, torch.float32, non_blocking=True)


def _update_of(index: int, lists: _Lists) -> _Update | None:
    """Returns what the kernel updates of a parameter; None for torch's."""
    parameter = lists.params[index]
    weight = weight_casts.cached(parameter) or shard_update(parameter)
    if weight is None:
        return None
    tensors = [_local(each[index]) for each in lists[:5] if each]
    own = tensors[0] = weight.memory
    fits = all(
        type(each) is Tensor
        and each.dtype == own.dtype
        and each.shape == own.shape
        and each.device == own.device
        and each.is_contiguous()
        for each in tensors
    )
    return _Update(index, weight, tensors) if fits else None


def _local(tensor: Any) -> Tensor:
    """Returns the memory of a tensor, which may be a DTensor or a shard, as a plain tensor."""
    local = getattr(tensor, "_local_tensor", tensor)
    plain: Tensor = local.plain() if hasattr(local, "plain") else local.detach()
    return plain


def _alike(updates: Sequence[_Update]) -> Iterable[list[_Update]]:
    """Returns the weights that one call updates: of one device, emulated or not, and one scale state.

    The weight of all experts, which are many, has a call of its own.
    """
    groups: dict[Any, list[_Update]] = {}
    for update in updates:
        emulated = update.weight.config & recipes.EMULATE
        own = update.place if update.tensors[0].dim() == 3 else None
        key = (update.tensors[0].device, emulated, id(update.weight.scale_state), own)
        groups.setdefault(key, []).append(update)
    return groups.values()
