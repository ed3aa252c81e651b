"""Delayed scaling: the scale state of a model's linears, one tensor for all of them.

A step is forward and backward of the model, any number of times, then
`sync_float8_amax_and_scale_history`, then the optimizer. A linear that has no scales yet scales
dynamically, as all do in the first step. A step that meets NaN or infinity leaves the state as it was.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import distributed, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from float8 import recipes
from float8.torch import _ops, notices, pipelines, traced
from float8.torch.amaxes import PART_BYTES, take_back
from float8.torch.base_linear import is_float8
from float8.torch.ranks import agreement, collectives
from float8.torch.ranks.collectives import Operation
from float8.torch.scale_home import NAME, drop, keep, own_state, states_below

if TYPE_CHECKING:
    from float8.torch.experts.delayed import ExpertLinear
    from float8.torch.layer.linear import Float8Linear

    Owner: TypeAlias = "Float8Linear | ExpertLinear"  # of a part of a state

EXPORTED_FIRST = 1 << 56  # of a layout: kExportedFirst of python/shim/scales/scales.cpp
_LOOKS = 16  # syncs after which the host looks for linears without scales; then every 16th


@functools.cache
def _initial(config: int, layout: int) -> torch.Tensor:
    """The contents of a state before its first step, on the CPU."""
    emulated = config | recipes.EMULATE
    size = torch.ops.float8.scales_bytes(emulated, layout)
    state = torch.empty(size, dtype=torch.uint8, device="cpu")  # whatever the default device is
    torch.ops.float8.scales_init(state, emulated, layout)
    return state


def _aligned(size: int) -> int:
    return -(-size // 256) * 256


class ScaleState(nn.Module):
    """The scales, amaxes and histories of linears with one recipe.

    The buffer `state` is for checkpoints alone: it is filled where a state dict is taken. What casts
    read and raise is apart from it, so that nobody who copies buffers between ranks in the middle of a
    step, as DistributedDataParallel does before each forward, loses the amaxes of a rank. It lies where
    the weights are.

    A checkpoint without the buffer, such as that of plain linears, is loaded as before the first
    step. One whose buffer is another model's is refused by load_state_dict (RuntimeError).
    """

    def __init__(self, linears: list[Owner], history: int, margin: int) -> None:
        super().__init__()
        first = linears[0]
        self.config = first._config & ~recipes.BIAS
        self._layout = len(linears) | history << 32 | margin << 48
        casts = [cast for _, gemm in first.recipe.gemms() for cast in (gemm.a, gemm.b)]
        # x, w and dy have a slot each, if a cast of theirs is delayed; a word is 4 bytes.
        tensors = (casts[0:1] + casts[5:6], casts[1:2] + casts[3:4], casts[2:3] + casts[4:5])
        delayed = recipes.Scaling.DELAYED
        self.slots = sum(any(cast.scaling == delayed for cast in own) for own in tensors)
        self.linears = len(linears)
        self.recipe = str(first.recipe)
        self.history = history
        self._live = _initial(self.config, self.layout).to(first.weight.device, copy=True)
        self._buffers["state"] = self._live.clone()
        self._attached: weakref.WeakSet[Owner] = weakref.WeakSet()
        self._first = frozenset(range(len(linears)))  # linears of which an operand has no scale yet
        self._syncs_with_first = 0
        self.generation = 0  # of the scales; what was cast with others is to be cast again
        self.epoch = 0  # grows where the amaxes begin anew
        self._forget: weakref.finalize[..., ScaleState] | None = None  # what the shim knows
        self.in_graph = False  # a captured CUDA graph synchronises it, unseen
        self._pipelines_forget = False  # what they compute ahead (pipelines.py)
        self._agreed = False  # the ranks have compared it
        self._is_synced = False
        self.loading: Any = None  # arguments of _load_from_state_dict, until the weights are loaded
        self._told: set[int] = set()  # which warnings about it were given
        self._backward = -1  # at the latest step of an optimizer
        # This says of an optimizer whether it has weights of these linears, and how often it stepped in an epoch.
        self._steps: weakref.WeakKeyDictionary[Any, tuple[bool, int, int]] = (
            weakref.WeakKeyDictionary()
        )
        _watch(self)
        for index, linear in enumerate(linears):
            self.attach(linear, index)
        self._refresh()

    @property
    def state(self) -> torch.Tensor:
        """What casts read and raise; the layout is that of runtime/quantize/delayed_scales.hpp."""
        return self._live

    @property
    def layout(self) -> int:
        """How the state lies in memory, for the ops; nobody may change it, as the state has this size."""
        return self._layout

    @property
    def first(self) -> list[int]:
        """The linears that scale dynamically, since an operand of theirs has no scale yet."""
        return sorted(self._first)

    def words(self) -> str:
        """Returns what the state has in common on all ranks."""
        return (
            f"{self.linears} linears of recipe {self.recipe}, history {self.history}, margin "
            f"{self.layout >> 48}{', saturate' * bool(self.config & recipes.HOLD)}"
        )

    def attach(self, linear: Owner, index: int) -> None:
        """Gives a linear its part of the state, and keeps it there when the state moves."""
        self._attached.add(linear)
        object.__setattr__(linear, "_scales", self)  # not a child of the linear
        linear._scale_index = index
        linear._layout = self.layout
        linear._scale_view = self._view(index)

    # The offset of a linear's part in the state names the linear: an integer would be one compilation
    # a layer. A part is aligned, for a compiled graph copies inputs that are not, and a copy would
    # lose the amaxes. Every linear has more than a part of the state, so all parts lie in it.
    def _view(self, index: int) -> torch.Tensor:
        view = self.part(index)
        torch._dynamo.mark_static_address(view, guard=False)
        return view

    def part(self, index: int) -> torch.Tensor:
        """Returns a linear's part of the state; an exported program keeps the state that it is cut from."""
        return self._live.detach()[PART_BYTES * index : PART_BYTES * (index + 1)]

    def _refresh(self) -> None:
        """Tells linears and the shim where the state is now; it may be another one."""
        self.generation += 1
        self.epoch += 1
        for linear in self._attached:
            linear._scale_view = self._view(linear._scale_index)
        self._tell_first()

    def _tell_first(self) -> None:
        for linear in self._attached:
            linear._first_step = linear._scale_index in self._first
        # A model that is made on the CPU, to be moved, has no device yet.
        if self._live.is_cuda or (self._live.is_cpu and self.config & recipes.EMULATE):
            torch.ops.float8.scales_set_first(self._live, self.config, self.layout, self.first)
            if self._forget is None:
                self._forget = weakref.finalize(self, _ops.forget_state, self._live.data_ptr())
                self._forget.atexit = False

    def _find_first(self) -> None:
        """Looks on the host for the linears without scales."""
        emulated = self.config | recipes.EMULATE
        own = self._live.cpu()
        self._first = frozenset(torch.ops.float8.scales_find_first(own, emulated, self.layout))

    def follow(self, device: torch.device) -> None:
        """Moves the state to where the weights are now; one on the meta device begins anew there."""
        if self._live.device == device:
            return
        if self._forget is not None:
            self._forget()  # another tensor may get the memory, as when the state dies
            self._forget = None
        if self._live.is_meta:
            self._live = _initial(self.config, self.layout).to(device, copy=True)
        else:
            self._live = self._live.to(device)
        if device.type == "meta":
            self._first = frozenset(range(self.linears))
        self._buffers["state"] = self._live.clone()
        self._refresh()

    def forward(self, input: Any) -> Any:
        """Returns its input, for a model that runs all of its children."""
        return input

    def sync(self, group: Any = None, found_inf: torch.Tensor | None = None) -> None:
        """Ends a step: one all-reduce of all amaxes, then the scales of the next step."""
        self.in_graph |= self._live.is_cuda and torch.cuda.is_current_stream_capturing()
        if not (self._pipelines_forget or self.in_graph) and pipelines.watch(_states_of_layers):
            self._pipelines_forget = True
            self.discard_step()  # nobody knows what pipelines that were loaded since computed ahead
        own = [linear for linear in self._attached if linear._scales is self]
        take_back([each._weight_gather for each in own if each._weight_gather is not None])
        # Process groups that are gone after a step with them would give each rank scales of its own.
        if distributed.is_available() and (distributed.is_initialized() or self._agreed):
            self._reduce(group)
        if self._first:
            self._plan_shared_linear()
        torch.ops.float8.scales_sync(self._live, self.config, self.layout, found_inf)
        self.generation += 1
        self.epoch += 1
        self._is_synced = True
        if self._first and self._looks():
            self._find_first()
            self._tell_first()

    def _looks(self) -> bool:
        """Tells whether the host waits for the device, to see which linears have scales now.

        In most trainings it does so once, after the first step.
        """
        if self._live.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        self._syncs_with_first += 1
        return self._syncs_with_first <= _LOOKS or self._syncs_with_first % _LOOKS == 0

    def _reduce(self, group: Any) -> None:
        """Reduces the amaxes over the ranks of the group, and over those that share weights."""
        groups = [group or distributed.group.WORLD]
        if not self._agreed:
            # Stages of a pipeline may have as many linears each, and no amaxes in common.
            first = min(self._attached, key=lambda linear: linear._scale_index, default=None)
            words = f"{self.words()}, the first of them {getattr(first, '_layer_name', '')!r}"
            agreement.agree_once(groups[0], {"scales": words}, self._live.device)
            self._agreed = True
            # A rank may have loaded a checkpoint for the others.
            operation = Operation("the first comparison of the histories of delayed scaling")
            collectives.all_reduce_max(self._histories(), groups[0], operation)
        if group is not None:
            # Where ranks share the weights, a scale is that of all of their parts.
            groups += self._tensor_groups()
        operation = Operation("the amax all-reduce of delayed scaling")
        try:
            # Bits of |x| order like the numbers, and NaN comes last.
            for each in groups:
                collectives.all_reduce_max(self.amaxes(), each, operation)
        except collectives.DistributedError:
            self.discard_step()
            raise

    def amaxes(self) -> torch.Tensor:
        """Returns the amaxes since the latest sync, which lie in front."""
        return self._live[: 4 * self.slots * self.linears].view(torch.int32)

    def amax_of_weight(self, index: int) -> torch.Tensor:
        """Returns the amax of a linear's weight, where all operands have delayed scaling.

        Backward takes the state for changed by what writes to a view of it, but for one of `.data`.
        """
        return self.amaxes().data[3 * index + 1]

    def _histories(self) -> torch.Tensor:
        first, end = self._history_bytes()
        return self._live[first:end].view(torch.int32)

    def _history_bytes(self) -> tuple[int, int]:
        count = self.slots * self.linears
        first = _aligned(4 * count) + _aligned(32 * count)
        return first, first + 4 * self.history * count

    def discard_step(self) -> None:
        """Forgets a step that failed: the state is that after the latest sync."""
        self.amaxes().zero_()
        self.epoch += 1
        self.generation += 1  # the casts of sharded weights have recorded amaxes

    def _tensor_groups(self) -> list[Any]:
        """Returns the groups whose ranks share weights, in the same order on all ranks."""
        groups: list[Any] = []
        for linear in sorted(self._attached, key=lambda linear: linear._scale_index):
            group = getattr(linear, "tensor_group", None)
            if linear._sharing is not None:
                group = linear._sharing[0][0].get_group()
            if group is not None and group not in groups:
                groups.append(group)
        return groups

    def _plan_shared_linear(self) -> None:
        """Makes a plan for the shim, which ends no step of a recipe without any.

        A tensor parallel linear has casts and GEMMs apart, and no plan. Its shape is a rank's part of
        the weight, of which FSDP may shard the rows again, into any number.
        """
        for linear in self._attached:
            if linear._sharing is not None:
                _, dim, to, _ = linear._sharing
                size = [linear.out_features, linear.in_features]
                size[dim] //= to.ranks
                weight: Any = linear.weight
                like = weight._local_tensor[:0]
                torch.ops.float8.prepare(
                    like, like, *([each] for each in size), 1, self.config, False
                )
                return

    def count_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Warns where an optimizer updates the weights again and again, and no sync comes between."""
        before, self._backward = self._backward, torch._C._current_graph_task_id()
        if before == self._backward != -1:
            return  # gradient release steps once for each parameter
        has_weights, epoch, steps = self._steps.get(optimizer) or (self._is_for(optimizer), 0, 0)
        steps = steps + 1 if epoch == self.epoch else 1
        self._steps[optimizer] = has_weights, self.epoch, steps
        most = 4 if self._is_synced else 2
        if not has_weights or steps != most or self.in_graph or most in self._told:
            return
        self._told.add(most)
        since = "no more scales" if self._is_synced else "no scales"
        warnings.warn(
            f"float8: the optimizer has stepped {'twice' if most == 2 else f'{most} times'}, and {since} of delayed scaling "
            "were updated: call float8.torch.sync_float8_amax_and_scale_history(model) after backward, before "
            "optimizer.step(), or float8.torch.sync_at_optimizer_steps(model) once. Until then "
            f"{'the scales stay as they are' if self._is_synced else 'all steps scale dynamically'}",
            stacklevel=4,
        )

    def _is_for(self, optimizer: torch.optim.Optimizer) -> bool:
        weights = {id(linear._parameters.get("weight")) for linear in self._attached}
        return any(id(p) in weights for group in optimizer.param_groups for p in group["params"])

    def _apply(self, fn: Any, recurse: bool = True) -> ScaleState:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # The device of the result alone counts: to_empty leaves anything in it.
        self.follow(fn(self._live).device)
        return self

    def saved(self) -> torch.Tensor:
        """Returns the buffer, filled."""
        saved = self._buffers["state"]
        if saved is None or saved.device != self._live.device:
            saved = self._buffers["state"] = self._live.clone()
        else:
            saved.copy_(self._live)
        return saved

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.saved()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        key = prefix + "state"
        loaded = state_dict.get(key)
        if loaded is None:
            loaded = _initial(self.config, self.layout)
        elif complaint := self._complaint(loaded):
            error_messages: list[str] = args[-1]
            error_messages.append(f"float8: {key} {complaint}")
            return
        # The weights of a model on the meta device may have been assigned, and are real now.
        if self._live.is_meta:
            self.follow(
                next((linear.weight.device for linear in self._attached), torch.device("meta"))
            )
        if not loaded.is_meta and not self._live.is_meta:
            self._live.copy_(loaded)
            self._find_first()
        self._buffers["state"] = self._live.clone()
        self._refresh()

    def _complaint(self, loaded: torch.Tensor) -> str | None:
        """Says why a buffer is no state of these linears, None where it may be one.

        The amaxes and histories are bits of |x|, and the formats are the recipe's. The layout is
        that of runtime/quantize/delayed_scales.hpp.
        """
        initial = _initial(self.config, self.layout)
        if loaded.dtype != torch.uint8 or loaded.shape != initial.shape:
            return (
                f"is {loaded.dtype} of {list(loaded.shape)}, and {self.linears} linears with a "
                f"history of {self.history} have {initial.dtype} of {list(initial.shape)}: it "
                "was saved with other layers in delayed scaling, or another history"
            )
        if loaded.is_meta:
            return None
        count = self.slots * self.linears
        first, end = self._history_bytes()
        formats = first + _aligned(end - first)
        words = loaded.detach().cpu().contiguous()
        own = slice(formats, formats + 4 * count)
        negative = any(
            bool((part.view(torch.int32) < 0).any())
            for part in (words[: 4 * count], words[first:end])
        )
        if negative or not torch.equal(words[own], initial[own]):
            return "has contents that no scale state of this recipe has: it was saved by another recipe, or is damaged"
        return None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_attached": None, "_forget": None, "_steps": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._attached = weakref.WeakSet()
        self._steps = weakref.WeakKeyDictionary()
        _watch(self)
        self._refresh()


_watched: weakref.WeakSet[ScaleState] = weakref.WeakSet()


@functools.cache
def _hook() -> None:
    register_optimizer_step_post_hook(_after_optimizer_step)


def _watch(state: ScaleState) -> None:
    """Looks at the optimizers' steps, and at what pipelines compute ahead."""
    _hook()
    state._pipelines_forget = pipelines.watch(_states_of_layers)
    _watched.add(state)


def _after_optimizer_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        for state in list(_watched):
            state.count_step(optimizer)


def owners(module: nn.Module) -> Iterator[Owner]:
    """Yields what may have a part of a scale state below a module: linears, and those of experts."""
    for each in module.modules():
        if is_float8(each):
            yield each
        yield from getattr(each, "expert_linears", ())


def _states_of_layers(module: nn.Module) -> dict[ScaleState, None]:
    """Returns the scale states of the layers below a module, in their order, which may be a part of the one that keeps them."""
    return dict.fromkeys(each._scales for each in owners(module) if each._scales is not None)


def states_of(module: nn.Module) -> dict[ScaleState, None]:
    """Returns what a sync of the module is of: a part of a converted model, as peft takes out of its wrapper, keeps no state."""
    return dict.fromkeys((*states_below(module), *_states_of_layers(module)))


def refuse_second_state(module: nn.Module, replaced: Collection[Any] = ()) -> None:
    """Raises where the module has a scale state that a linear keeps which is not `replaced`."""
    state = own_state(module)
    if state is not None and any(
        each._scales is state and each not in replaced for each in owners(module)
    ):
        raise ValueError(
            f"float8: the module has {NAME} already; convert all layers with delayed scaling in one "
            "call"
        )


def drop_unused_states(module: nn.Module) -> None:
    """Removes the scale states below `module` that no linear has any more."""
    used = {id(each._scales) for each in owners(module)}
    for parent in list(module.modules()):
        state = own_state(parent)
        if isinstance(state, ScaleState) and id(state) not in used:
            drop(parent)


def attach_scales(module: nn.Module, *, history: int = 16, margin: int = 0) -> None:
    """Gives the Float8Linear layers, and the experts, with delayed scaling below `module` one scale state.

    It becomes the submodule `float8_scales`, with one buffer; of an nn.Sequential, an nn.ModuleList and an
    nn.ModuleDict it is an attribute (scale_home.py). Layers that have a state keep it; convert_to_float8_training
    has done this already.

    history: amaxes kept of each operand, 1 to 1024. margin: scales are divided by 2^margin.
    """
    linears = [each for each in owners(module) if each.recipe.delayed and each._scales is None]
    if not linears:
        return
    refuse_second_state(module)
    if len({(m.recipe, m._config & ~recipes.BIAS) for m in linears}) > 1:
        raise ValueError("float8: the layers with delayed scaling have different recipes")
    keep(module, ScaleState(linears, history, margin))


@traced.untraced  # a graph would leave out what the shim is told of linears that have scales now
def sync_float8_amax_and_scale_history(
    module: nn.Module, *, group: Any = None, found_inf: torch.Tensor | None = None
) -> None:
    """Ends a step of delayed scaling, between backward and the optimizer's step.

    The amaxes of all layers below `module` are reduced over the ranks of `group` (None: all) in one
    all-reduce, and give the scales of the next step. A step in which one of them is NaN or infinity
    changes no scales, and one with a `found_inf` that is not 0 neither: one float32 element on the
    weights' device, the same on all ranks, for what a trainer skips for reasons of its own. With
    `saturate` only operands that are not finite keep their scales.

    It may be captured in a CUDA graph from the second step on. The host waits for the device at the end
    of the first step, and later only while some linear has no scales yet, as one whose weight is 0.
    Without delayed scaling it does nothing, and warns where no linear is in fp8.
    """
    states = states_of(module) if isinstance(module, nn.Module) else {}
    if not states:
        notices.warn_without_linears("sync_float8_amax_and_scale_history", module)
    for state in states:
        state.sync(group, found_inf)
