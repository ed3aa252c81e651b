"""Tensor parallelism of experts: ranks share the hidden dimension F of every expert.

A rank has rows of w13 (gate and up each) and columns of w2. It casts what it has of an operand with the scales of
the whole operand: the maxima that span ranks are reduced before the cast, those of all weights in one all-reduce.

linear   x                w         y              dy               dx
w13      whole            rows      columns        columns          partial sums
w2       columns          columns   partial sums   whole            columns
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, distributed

from float8 import recipes
from float8.recipes import Granularity, Scaling
from float8.torch import _ops, _schemas, traced
from float8.torch.contexts import (
    keep_parts,
    once_differentiable,
    parts_kept,
    wanted_grads,
    wants_gradient,
)
from float8.torch.experts import ops
from float8.torch.experts.weight_casts import kept_in
from float8.torch.parallel.sharded_operands import max_over_ranks
from float8.torch.ranks import collectives
from float8.torch.ranks.agreement import agree_once
from float8.torch.ranks.collectives import Operation
from float8.torch.shard.copy_layout import BLOCK
from float8.torch.shard.gathered_weight import GatheredWeight

if TYPE_CHECKING:
    from float8.torch.experts.delayed import ExpertLinear

ROWS, COLUMNS = 1, 2  # the dimension of a weight [E, N, K] that ranks share
_FORWARD = Operation("the tensor parallel forward of experts")
_BACKWARD = Operation("the tensor parallel backward of experts")
_agreed: weakref.WeakSet[Any] = weakref.WeakSet()

# Ranks know each other by this name, in graphs too; None: no ranks share a hidden dimension.
Group = str | None
State = tuple[Tensor, int]  # a weight's part of a scale state, and the state's layout


class Part(NamedTuple):
    """This rank's part of a weight [E, N, K], and the dimension of it that ranks share."""

    weight: Tensor
    dim: int


def name_of(group: Any) -> Group:
    """Returns what the ranks of a process group are known by; None where there is one rank alone."""
    return group.group_name if group is not None and group.size() > 1 else None


# In graphs of torch.compile they are constants.
@traced.constant
def spans_ranks(config: int) -> bool:
    """Tells whether a scale of the recipe depends on what other ranks have: that of blocks does not."""
    own = {each for pair in recipes.dynamic_granularities(config) for each in pair}
    return Granularity.TENSOR in own or Granularity.AXIS in own


@traced.constant
def _scales_rows(config: int, operand: int) -> bool:
    """Tells whether the rowwise cast of an operand has a scale of each row."""
    return recipes.dynamic_granularities(config)[operand][0] == Granularity.AXIS


@traced.constant
def _scales_groups(config: int, operand: int) -> bool:
    """Tells whether a cast of an operand has one scale of each expert's matrix."""
    return Granularity.TENSOR in recipes.dynamic_granularities(config)[operand]


@traced.constant
def _obstacle(config: int, hidden: int) -> str | None:
    """Returns why no ranks that have so many hidden features share those of experts; None where they do."""
    casts = recipes.dynamic_granularities(config)
    if hidden % BLOCK != 0 and any(
        each is not None and each > 1 for pair in casts for each in pair
    ):
        return (
            f"a rank has {hidden} of the experts' hidden features, which cuts blocks of {BLOCK} that have one "
            "scale; share whole blocks, or take another recipe"
        )
    if casts[_ops.WEIGHT] == (Granularity.TENSOR, Granularity.AXIS):
        return (
            "a recipe with one scale of a weight for output, and one of each row for grad_input, is not for experts "
            "whose hidden features ranks share; take another recipe"
        )
    return None


def group_of(weights: Sequence[Any], dims: Sequence[int]) -> Any:
    """Returns the process group whose ranks share the hidden dimension of weights, None without.

    dims: that dimension of each weight.

    Raises ValueError for DTensors that are shared in another way, but for whole experts.
    """
    groups: list[Any] = []
    for weight, dim in zip(weights, dims, strict=True):
        if not hasattr(weight, "_local_tensor"):
            groups.append(None)
            continue
        mesh, placements = weight.device_mesh, weight.placements
        over = [
            (i, getattr(at, "dim", None))
            for i, at in enumerate(placements)
            if not at.is_replicate() and mesh.size(i) > 1
        ]
        found = [i for i, of in over if of == dim]
        if len(found) > 1 or any(of not in (0, dim) for _, of in over):
            raise ValueError(
                f"float8: a weight of experts is a DTensor with placements {placements}; ranks share whole experts, "
                f"or here dimension {dim}, which is the hidden one, over one dimension of a mesh"
            )
        groups.append(mesh.get_group(found[0]) if found else None)
    if any(each is not groups[0] for each in groups):
        raise ValueError(
            "float8: ranks share the hidden dimension of some weights of these experts, and not that of the others: "
            "shard w1 and w3 by Shard(1), and w2 by Shard(2), over the same ranks"
        )
    return groups[0]


def share_state(owners: Sequence[ExpertLinear], group: Any) -> None:
    """Lets the ends of steps reduce the amaxes of expert linears over the ranks that share their weights.

    Raises ValueError for a recipe that has delayed scales and others.
    """
    for each in owners:
        casts = [cast for _, gemm in each.recipe.gemms() for cast in (gemm.a, gemm.b)]
        if any(cast.scaling != Scaling.DELAYED for cast in casts):
            raise ValueError(
                "float8: experts whose hidden features ranks share have delayed scaling of all operands or of none; "
                "take another recipe"
            )
        if each.tensor_group is not group:
            each.tensor_group = group


def check(x: Tensor, parts: Sequence[Part], config: int, owner: Any, group: Any) -> None:
    """Raises where ranks cannot share the hidden dimension: ValueError, and DistributedError where they differ.

    parts: of w2 the last one.
    owner: the group or a module, whose first call compares what the ranks have in common.
    """
    if (why := _obstacle(config, parts[-1].weight.shape[-1])) is not None:
        raise ValueError(f"float8: {why}")
    if any(isinstance(part.weight, GatheredWeight) for part in parts):
        raise ValueError(
            "float8: FSDP gathers the weights of experts in fp8, by the scales of a rank's part of their hidden "
            "features: leave enable_fsdp_float8_all_gather out where ranks share these"
        )
    if not torch.compiler.is_compiling():
        collectives.progress.begin(_FORWARD)
        _compare(x, parts, config, owner, group)


def _compare(x: Tensor, parts: Sequence[Part], config: int, owner: Any, group: Any) -> None:
    if owner in _agreed:
        return
    number = config & 0xF
    words = [
        f"parts {' and '.join(str(list(part.weight.shape)) for part in parts)}",
        f"recipe {recipes.NAMES[number - 1] if number else 'custom'}",
        f"x {list(x.shape)} of {x.dtype}",
    ]
    flags = {"emulate": recipes.EMULATE, "saturate": recipes.HOLD, "recompute": recipes.RECOMPUTE}
    words += [f"{name}={bool(config & bit)}" for name, bit in flags.items()]
    agree_once(group, {"experts": ", ".join(words)}, x.device)
    _agreed.add(owner)


def linears(
    parts: Sequence[Part],
    like: Tensor,
    offs: Tensor,
    layout: Tensor,
    config: int,
    group: str,
    states: Sequence[State] = (),
) -> list[Callable[[Tensor], Tensor]]:
    """Returns the linears of all experts with these weights, whose maxima it reduces in one all-reduce.

    like: x, whose type the casts have.
    layout: that of the ends `offs` of the experts' rows.
    states: of a first step with delayed scaling, which takes its scales from the whole tensors.
    Of COLUMNS the results are partial sums, and of ROWS the gradients of x.
    """
    if states:
        return _first_linears(parts, like, offs, layout, config, group, states)
    words = _words([(_operand(part.weight, like), part.dim) for part in parts], like, config, group)

    def linear(part: Part, own: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
        of_part, save = _how(config, x, part, False)
        return _apply(x, part.weight, *own, layout, offs, of_part, part.dim, group, save)  # type: ignore[no-any-return]

    return [functools.partial(linear, part, own) for part, own in zip(parts, words, strict=True)]


def _first_linears(
    parts: Sequence[Part],
    like: Tensor,
    offs: Tensor,
    layout: Tensor,
    config: int,
    group: str,
    states: Sequence[State],
) -> list[Callable[[Tensor], Tensor]]:
    own = [part.weight.detach().to(like.dtype) for part in parts]
    amaxes = [torch.linalg.vector_norm(each, torch.inf, dtype=torch.float32) for each in own]
    words = max_over_ranks([each.view(1).view(torch.int32) for each in amaxes], group)

    def linear(part: Part, amax: Tensor, state: State, x: Tensor) -> Tensor:
        of_part, save = _how(config, x, part, True)
        operands = (part.weight, amax, *state, layout, offs)
        return _apply_first(x, *operands, of_part, part.dim, group, save)  # type: ignore[no-any-return]

    each = zip(parts, words, states, strict=True)
    return [functools.partial(linear, *own) for own in each]


def _how(config: int, x: Tensor, part: Part, keeps_state: bool) -> tuple[int, bool]:
    """Returns the config of the linears with a weight, which may be frozen, and whether there is a backward."""
    save = wants_gradient(x, part.weight)
    if save and not part.weight.requires_grad:
        config = recipes.of_frozen_weight(config, keeps_state)
    return config, save


def _operand(weight: Tensor, like: Tensor) -> Tensor:
    """Returns a weight as its cast reads it for rows of that type."""
    rounds = weight.dtype == torch.float32 and like.dtype in (torch.bfloat16, torch.float16)
    return weight.detach() if rounds else weight.detach().to(like.dtype)


def _words(
    operands: Sequence[tuple[Tensor, int]], like: Tensor, config: int, group: str
) -> list[tuple[Tensor, Tensor]]:
    """Returns the maxima of the whole weights: those of experts and their columns, and those of rows."""
    code = _ops.ELEMENT_TYPES[like.dtype]
    own = [(*ops.experts_amax(each, config, code), dim) for each, dim in operands]
    parts = []
    for amax, row_amax, dim in own:
        parts.append(amax if dim == ROWS or _scales_groups(config, _ops.WEIGHT) else amax[:0])
        parts.append(row_amax if dim == COLUMNS else row_amax[:0])
    whole = iter(max_over_ranks(parts, group))
    result = []
    for amax, row_amax, _ in own:
        first, second = next(whole), next(whole)
        result.append((first if first.numel() else amax, second if second.numel() else row_amax))
    return result


def _maxima(
    x: Tensor, operand: int, offs: Tensor, config: int, group: str
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the maxima of the groups and of the rows of a whole matrix of which this rank has columns."""
    words = _row_maxima(x)
    experts = offs.shape[0]
    of_groups = words[:0]
    scales_groups, scales_rows = _scales_groups(config, operand), _scales_rows(config, operand)
    if scales_groups:
        places = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
        group_of = torch.searchsorted(offs, places, right=True)  # behind the last end: experts
        of_groups = words.new_zeros(experts + 1).scatter_reduce(0, group_of, words, "amax")
    of_rows = words if scales_rows else words[:0]
    of_groups, of_rows = max_over_ranks([of_groups[:experts], of_rows], group)
    return of_groups if scales_groups else None, of_rows if scales_rows else None


def _row_maxima(x: Tensor) -> Tensor:
    """Returns the largest |x| of each row, as the bits of its fp32."""
    own: Tensor = torch.linalg.vector_norm(x.detach(), torch.inf, dim=1, dtype=torch.float32)
    return own.view(torch.int32)


def _cast(
    weight: Tensor, amax: Tensor, row_amax: Tensor, config: int, dtype: int
) -> tuple[Tensor, Tensor]:
    """Returns the buffers of both copies of a weight, whose scales come from these maxima."""
    q, qt = _buffers(weight, config)
    torch.ops.float8.experts_cast(weight, q, qt, amax, row_amax, config, dtype)
    return q, qt


def _buffers(weight: Tensor, config: int) -> tuple[Tensor, Tensor]:
    sizes = _sizes(*map(int, weight.shape), config)
    q, qt = (weight.new_empty((size,), dtype=torch.uint8) for size in sizes)
    return q, qt


@functools.cache
def _sizes(experts: int, n: int, k: int, config: int) -> tuple[int, int]:
    q, qt, *_ = torch.ops.float8.experts_copies(experts, n, k, config, True)
    return q, qt


_schemas.LIBRARY.impl("experts_cast_over_ranks", _cast, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


@_ops.fake_kernel("experts_cast_over_ranks")
def _fake_cast(
    weight: Tensor, amax: Tensor, row_amax: Tensor, config: int, dtype: int
) -> tuple[Tensor, Tensor]:
    return _buffers(weight, config)


@functools.cache
def _words_of(experts: int, n: int, k: int, config: int) -> tuple[int, int]:
    """Returns how many maxima experts_amax finds: those that span ranks which share rows, and those of rows."""
    q, qt = recipes.granularities_of_weights(config)
    one_scale = torch.ops.float8.experts_copies(experts, n, k, config, True)[4]
    tensors = [q, qt].count(Granularity.TENSOR) - one_scale
    columns = k if qt == Granularity.AXIS else 0
    return experts * (tensors + columns), experts * n if q == Granularity.AXIS else 0


@_ops.fake_kernel("experts_amax")
def _fake_amax(weight: Tensor, config: int, dtype: int, *_: Any) -> tuple[Tensor, Tensor]:
    sizes = _words_of(*map(int, weight.shape), config)
    amax, row_amax = (weight.new_empty((size,), dtype=torch.int32) for size in sizes)
    return amax, row_amax


class _Linear(torch.autograd.Function):
    """The linears of all experts with this rank's part of a weight, whose maxima are given.

    Between forward and backward it keeps what ops.ExpertsFunction keeps.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        amax: Tensor,
        row_amax: Tensor,
        layout: Tensor,
        offs: Tensor,
        config: int,
        dim: int,
        group: str,
        save: bool,
    ) -> Tensor:
        code = _ops.ELEMENT_TYPES[x.dtype]
        words = (amax, row_amax)
        q, qt = ops.experts_cast_over_ranks(_operand(weight, x), *words, config, code)
        kept = kept_in((q, qt), weight.shape, config)
        maxima = _maxima(x, _ops.INPUT, offs, config, group) if dim == COLUMNS else (None, None)
        y, saved = ops.experts_forward(
            x, weight, layout, config | recipes.RECOMPUTE, save, None, 0, *kept[:2], *maxima
        )
        again = config & recipes.RECOMPUTE
        of_weight = (weight, *words, None) if again else (None, None, None, qt)
        inputs = x if config & recipes.READS_X else None
        ctx.save_for_backward(saved, layout, offs, inputs, *of_weight)
        ctx.place = (config, dim, group)
        ctx.sizes, ctx.code = tuple(weight.shape), code
        ctx.grad_dtype = _ops.ELEMENT_TYPES[weight.dtype]
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        if not torch.compiler.is_compiling():
            collectives.progress.begin(_BACKWARD)
        saved, layout, offs, inputs, weight, amax, row_amax, qt = ctx.saved_tensors
        config, dim, group = ctx.place
        want_x, want_weight, *_ = wanted_grads(ctx)
        if weight is not None and want_x:
            operand = _operand(weight, dy)
            _, qt = ops.experts_cast_over_ranks(operand, amax, row_amax, config, ctx.code)
        of_qt: tuple[Tensor | None, ...] = (None, None)
        if qt is not None:
            of_qt = kept_in((qt[:0], qt), ctx.sizes, config)[2:4]  # q is not there
        maxima: tuple[Tensor | None, ...] = (None, None)
        if dim == ROWS:
            maxima = _maxima(dy, _ops.GRAD_OUTPUT, offs, config, group)
        wanted = want_x | want_weight << 1
        rest = (ctx.grad_dtype, config | recipes.RECOMPUTE, wanted, inputs, None, 0)
        dx, dw = ops.experts_backward(dy, saved, layout, None, *ctx.sizes, *rest, *of_qt, *maxima)
        return dx if want_x else None, dw if want_weight else None, *[None] * 8


_apply: Any = _Linear.apply


def _amax(x: Tensor, offs: Tensor, group: str) -> Tensor:
    """Returns the maximum of the rows of all experts, of a whole matrix of which this rank has columns."""
    places = torch.arange(x.shape[0], device=x.device)
    words = torch.where(places < offs[-1], _row_maxima(x), 0)
    return max_over_ranks([torch.cat((words.new_zeros(1), words)).amax().view(1)], group)[0]


class _FirstLinear(torch.autograd.Function):
    """The linears of all experts with this rank's part of a weight, in a first step with delayed scaling."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        amax: Tensor,
        state: Tensor,
        state_layout: int,
        layout: Tensor,
        offs: Tensor,
        config: int,
        dim: int,
        group: str,
        save: bool,
    ) -> Tensor:
        x_amax = _amax(x, offs, group) if dim == COLUMNS else None
        of_state = (state, state_layout, None, None)
        y, saved = ops.experts_forward(
            x, weight, layout, config, save, *of_state, x_amax, None, amax
        )
        again = weight if config & recipes.READS_WEIGHT else None
        ctx.save_for_backward(saved, layout, offs, again, amax, state)
        keep_parts(ctx, amax, state)
        ctx.place = (config, dim, group, state_layout)
        ctx.sizes = tuple(weight.shape)
        ctx.grad_dtype = _ops.ELEMENT_TYPES[weight.dtype]
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        if not torch.compiler.is_compiling():
            collectives.progress.begin(_BACKWARD)
        saved, layout, offs, weight, amax, state = ctx.saved_tensors
        amax, state = parts_kept(ctx, amax, state)
        config, dim, group, state_layout = ctx.place
        want_x, want_weight, *_ = wanted_grads(ctx)
        dy_amax = _amax(dy, offs, group) if dim == ROWS else None
        rest = (ctx.grad_dtype, config, want_x | want_weight << 1, None)
        of_state = (state, state_layout, None, None)
        dx, dw = ops.experts_backward(
            dy, saved, layout, weight, *ctx.sizes, *rest, *of_state, dy_amax, None, amax
        )
        return dx if want_x else None, dw if want_weight else None, *[None] * 9


_apply_first: Any = _FirstLinear.apply


def check_group(name: str, group: Any, ranks: str) -> None:
    """Raises ValueError for what is no process group of this rank; `ranks` says in words which ranks it has."""
    if isinstance(group, int) and group == distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"float8: this rank is not in the {name} that it was given: a rank calls moe with the group over {ranks}"
        )
    if group is not None and not isinstance(group, distributed.ProcessGroup):
        raise ValueError(
            f"float8: {name} is {group!r}; it is the process group over {ranks}, as DeviceMesh.get_group() "
            "returns it"
        )
