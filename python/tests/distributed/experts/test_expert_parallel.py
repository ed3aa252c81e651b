"""Experts over ranks: the results, gradients and steps are those of one rank that has all tokens and experts."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import ranks
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import float8.torch as f8
from float8.torch.experts import expert_parallel

D, F, TOP = 64, 48, 3


def _tokens(rank: int, count: int, experts: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Returns x, ids, scores and dy of a rank; some ids are of no expert."""
    random = torch.Generator().manual_seed(10 + rank)
    x = torch.randn(count, D, generator=random).to(dtype)
    ids = torch.randint(-1, experts + 1, (count, TOP), generator=random)
    scores = torch.rand(count, TOP, generator=random)
    dy = torch.randn(count, D, generator=random).to(dtype)
    return tuple(each.to(ranks.device) for each in (x, ids, scores, dy))


def _weights(experts: int, dtype: torch.dtype) -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    shapes = ((experts, 2 * F, D), (experts, D, F))
    return [(torch.randn(s, generator=random) / 8).to(ranks.device, dtype) for s in shapes]


def _leaves(tensors: Any) -> list[Tensor]:
    return [each.detach().clone().requires_grad_() for each in tensors]


def _step(call: Any, tokens: Any, weights: list[Tensor]) -> list[Tensor]:
    """Returns y and the gradients of x and the scores; the weights take a step of SGD."""
    x, ids, scores, dy = tokens
    x, scores = _leaves((x, scores))
    for each in weights:
        each.grad = None
    y = call(x, ids, scores, *weights)
    y.backward(dy)
    with torch.no_grad():
        for each in weights:
            assert each.grad is not None
            each -= 0.1 * each.grad
    assert x.grad is not None
    assert scores.grad is not None
    return [y.detach(), x.grad, scores.grad]


def _dequantised(x: Tensor, config: int) -> Tensor:
    return expert_parallel.unpacked_rows(expert_parallel.packed_rows(x, config), x.dtype)


def _rank(
    mesh: Any, rank: int, world: int, recipe: str, in_fp8: bool, counts: tuple[int, ...], form: str
) -> None:
    own = 2
    dtype = torch.float16 if form == "float16" else torch.bfloat16
    options: Any = {"recipe": recipe, "emulate": ranks.device == "cpu"}
    config = f8.functional.pack_experts(recipe, options["emulate"], False)
    whole = _leaves(_weights(own * world, dtype))
    mine = _leaves(each[own * rank : own * (rank + 1)] for each in whole)
    before = [each.detach().clone() for each in mine]

    def single(x: Tensor, *rest: Tensor) -> Tensor:
        return f8.functional.moe(x, *rest, **options)

    def over_ranks(x: Tensor, ids: Tensor, scores: Tensor, w13: Any, w2: Tensor) -> Tensor:
        sent = torch.float8_e4m3fn if in_fp8 else None
        w13 = tuple(w13.chunk(2, dim=1)) if form == "pair" else w13
        more = {"group": mesh.get_group(), "dispatch_dtype": sent}
        return f8.functional.moe(x, ids, scores, w13, w2, **more, **options)

    call: Any = over_ranks
    if form == "compiled":
        call = torch.compile(over_ranks, backend="aot_eager")
    if form == "checkpointed":
        call = lambda *args: checkpoint(over_ranks, *args, use_reentrant=False)  # noqa: E731
    for step in range(2):
        every = [_tokens(r + 10 * step, counts[r], own * world, dtype) for r in range(world)]
        together = [torch.cat(each) for each in zip(*every, strict=True)]
        if in_fp8:
            together[0] = _dequantised(together[0], config)
        expected = _step(single if form != "pair" else _as_pair(single), together, whole)
        actual = _step(call, every[rank], mine)
        first = sum(counts[:rank])
        for one, all_tokens in zip(actual, expected, strict=True):
            assert torch.equal(one, all_tokens[first : first + counts[rank]])
        for one, all_experts in zip(mine, whole, strict=True):
            assert torch.equal(one, all_experts[own * rank : own * (rank + 1)])
    if sum(counts):
        assert all(
            not torch.equal(new, old)
            for w, b in zip(mine, before, strict=True)
            for new, old in zip(w, b, strict=True)
        )


def _as_pair(call: Any) -> Any:
    return lambda x, ids, scores, w13, w2: call(x, ids, scores, tuple(w13.chunk(2, dim=1)), w2)


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"])
def test_has_the_bits_of_one_rank(recipe: str, in_fp8: bool, tmp_path: Any) -> None:
    ranks.spawn(_rank, 2, tmp_path, recipe, in_fp8, (40, 33), "")


@ranks.needs_gpus(2)
@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_on_gpus(recipe: str, in_fp8: bool, tmp_path: Any) -> None:
    ranks.spawn(_rank, 2, tmp_path, recipe, in_fp8, (40, 33), "", device="cuda")


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("counts", [(40, 0, 7), (0, 0, 0)])
def test_a_rank_may_have_no_tokens(counts: tuple[int, ...], in_fp8: bool, tmp_path: Any) -> None:
    ranks.spawn(_rank, 3, tmp_path, "rowwise", in_fp8, counts, "")


@pytest.mark.parametrize("form", ["pair", "float16", "compiled", "checkpointed"])
def test_has_the_forms_that_one_rank_has(form: str, tmp_path: Any) -> None:
    ranks.spawn(_rank, 2, tmp_path, "rowwise", False, (40, 33), form)


def test_rows_in_fp8_have_powers_of_two_for_scales() -> None:
    config = f8.functional.pack_experts("rowwise", True, False)
    x = torch.randn(600, 80).bfloat16() * torch.logspace(-9, 20, 600)[:, None].bfloat16()
    x[7] = 0
    y = _dequantised(x, config)
    assert torch.equal(_dequantised(y, config), y)
    largest = x.float().abs().amax(dim=1, keepdim=True)
    assert ((y.float() - x.float()).abs() <= largest / 16).all()
    assert ((y.float() - x.float()).abs() <= x.float().abs() / 16 + largest / 2**17).all()


class _Layer(torch.nn.Module):
    """A linear, and experts that compute on x with its result for scores."""

    def __init__(self, experts: list[Tensor], group: Any) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.linear = torch.nn.Linear(D, D, bias=False).to(ranks.device)
        self.w13, self.w2 = (torch.nn.Parameter(each) for each in experts)
        self.group = group

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        h = self.linear(x)
        emulate = ranks.device == "cpu"
        scores = h[:, :TOP].sigmoid()
        more = {"recipe": "rowwise", "emulate": emulate, "group": self.group}
        return f8.functional.moe(h, ids, scores, self.w13, self.w2, **more)


def _with_fsdp(mesh: Any, rank: int, world: int) -> None:
    own, lr = 2, 0.5
    config = f8.LinearConfig("rowwise", emulate=ranks.device == "cpu")
    weights = _weights(own * world, torch.float32)
    single = _Layer([each.clone() for each in weights], None)
    mine = [each[own * rank : own * (rank + 1)].clone() for each in weights]
    model = _Layer(mine, mesh.get_group())
    for each in (single, model):
        f8.convert_to_float8_training(each, config=config)
    experts = {model.w13, model.w2}
    fully_shard(model, mesh=mesh, ignored_params=experts)
    for step in range(2):
        tokens = [_tokens(r + 10 * step, 32, own * world, torch.float32) for r in range(world)]
        model(*tokens[rank][:2]).square().mean().backward()
        single(
            *(torch.cat(each) for each in list(zip(*tokens, strict=True))[:2])
        ).square().mean().backward()
        for each in experts:
            assert each.grad is not None
            each.grad /= world
        for layer in (model, single):
            torch.optim.SGD(layer.parameters(), lr).step()
            layer.zero_grad()
    for new, whole, old in zip(
        (model.w13, model.w2), (single.w13, single.w2), weights, strict=True
    ):
        part = slice(own * rank, own * (rank + 1))
        assert torch.equal(new, whole[part])
        assert all(not torch.equal(a, b) for a, b in zip(new, old[part], strict=True))
    linear: Any = model.linear.weight
    torch.testing.assert_close(linear.full_tensor(), single.linear.weight)


def test_trains_beside_fsdp(tmp_path: Any) -> None:
    ranks.spawn(_with_fsdp, 2, tmp_path)


# Ranks that do not fit each other


def _unlike(mesh: Any, rank: int, world: int, what: str) -> str:
    x, ids, scores, _ = _tokens(rank, 8, 4, torch.bfloat16)
    w13, w2 = _weights(3 if what == "experts" and rank == 1 else 2, torch.bfloat16)
    recipe = "blockwise" if what == "recipe" and rank == 1 else "rowwise"
    with pytest.raises(f8.DistributedError) as caught:
        f8.functional.moe(
            x, ids, scores, w13, w2, recipe=recipe, emulate=True, group=mesh.get_group()
        )
    assert caught.value.ranks == (1,)
    return str(caught.value)


@pytest.mark.parametrize("what", ["experts", "recipe"])
def test_ranks_agree_before_the_first_rows_travel(what: str, tmp_path: Any) -> None:
    outcomes = ranks.run(_unlike, 2, tmp_path, what)
    assert not any(each.error for each in outcomes), outcomes[0].trace
    assert all("experts" in each.value for each in outcomes)


def _unlike_later(mesh: Any, rank: int, world: int, what: str) -> str:
    x, ids, scores, _ = _tokens(rank, 8, 4, torch.bfloat16)
    weights = _weights(2, torch.bfloat16)

    def call(recipe: str, dispatch_dtype: Any = None) -> None:
        more = {"emulate": True, "group": mesh.get_group(), "dispatch_dtype": dispatch_dtype}
        f8.functional.moe(x, ids, scores, *weights, recipe=recipe, **more)

    call("rowwise")
    call("tensorwise")
    with pytest.raises(f8.DistributedError) as caught:
        if what == "recipe":
            call(("rowwise", "tensorwise")[rank])
        elif what == "dispatch_dtype":
            call("rowwise", (None, torch.float8_e4m3fn)[rank])
        elif what == "gradient":
            x.requires_grad_(rank == 1)
            call("rowwise")
        else:
            weights = _weights(2 + rank, torch.bfloat16)
            call("rowwise")
    assert caught.value.ranks == (1,)
    return str(caught.value)


@pytest.mark.parametrize("what", ["recipe", "dispatch_dtype", "gradient", "weights"])
def test_ranks_that_differ_later_end_at_once(what: str, tmp_path: Any) -> None:
    """They know all of these kinds of calls, and are in unlike ones."""
    outcomes = ranks.run(_unlike_later, 2, tmp_path, what)
    assert not any(each.error for each in outcomes), outcomes[0].trace
    assert all(what in each.value for each in outcomes)


def _outside(mesh: Any, rank: int, world: int) -> None:
    group = torch.distributed.new_group([0])
    x, ids, scores, _ = _tokens(rank, 8, 4, torch.bfloat16)
    weights = _weights(4, torch.bfloat16)
    if rank == 0:
        f8.functional.moe(x, ids, scores, *weights, emulate=True, group=group)
    else:
        with pytest.raises(ValueError, match="this rank is not in the group"):
            f8.functional.moe(x, ids, scores, *weights, emulate=True, group=group)


def test_a_rank_outside_of_the_group_is_told(tmp_path: Any) -> None:
    ranks.spawn(_outside, 2, tmp_path)


def _killed(mesh: Any, rank: int, world: int) -> None:
    x, ids, scores, dy = _tokens(rank, 8, 4, torch.bfloat16)
    w13, w2 = _leaves(_weights(2, torch.bfloat16))
    for step in range(3):
        y = f8.functional.moe(
            x, ids, scores, w13, w2, recipe="rowwise", emulate=True, group=mesh.get_group()
        )
        if rank == 1 and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        y.backward(dy)


def test_a_killed_rank_ends_the_others_in_time(tmp_path: Any) -> None:
    survivor, killed = ranks.run(_killed, 2, tmp_path, timeout=5, limit=120)
    assert killed.killed
    assert survivor.error.startswith("DistributedError")
    assert "gradients of experts' results" in survivor.error
    assert survivor.fields["ranks"] == (1,)


def _bad_groups(mesh: Any, rank: int, world: int) -> None:
    x, ids, scores, _ = _tokens(rank, 8, 4, torch.bfloat16)
    weights = _weights(2, torch.bfloat16)
    with pytest.raises(ValueError, match="as DeviceMesh"):
        f8.functional.moe(x, ids, scores, *weights, emulate=True, group=mesh)
    with pytest.raises(ValueError, match="dispatch_dtype is"):
        f8.functional.moe(
            x,
            ids,
            scores,
            *weights,
            emulate=True,
            group=mesh.get_group(),
            dispatch_dtype=torch.float16,
        )


def test_refuses_what_is_no_group(tmp_path: Any) -> None:
    ranks.spawn(_bad_groups, 1, tmp_path)


def test_refuses_a_type_of_rows_without_a_group() -> None:
    x, ids, scores, _ = _tokens(0, 8, 4, torch.bfloat16)
    with pytest.raises(ValueError, match="give their process group"):
        f8.functional.moe(
            x,
            ids,
            scores,
            *_weights(4, torch.bfloat16),
            emulate=True,
            dispatch_dtype=torch.float8_e4m3fn,
        )


def _delayed(mesh: Any, rank: int, world: int) -> None:
    """Own experts with delayed scaling end a step with all ranks' amaxes."""
    own, counts = 2, (40, 33)
    options: Any = {"recipe": "delayed", "emulate": ranks.device == "cpu", "device": ranks.device}
    whole, mine = (f8.Experts(each, D, F, **options) for each in (own * world, own))
    whole.bfloat16(), mine.bfloat16()
    models = [torch.nn.ModuleList([each]) for each in (whole, mine)]
    for model in models:
        f8.attach_scales(model)
    for p, part in zip(whole.parameters(), mine.parameters(), strict=True):
        p.data.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.dim())) / 8)
        part.data.copy_(p.data[own * rank : own * (rank + 1)])
    for step in range(3):
        every = [
            _tokens(r + 10 * step, counts[r], own * world, torch.bfloat16) for r in range(world)
        ]
        together = [torch.cat(each) for each in zip(*every, strict=True)]
        expected = _step(whole_of(whole), together, list(whole.parameters()))
        call = whole_of(mine, group=mesh.get_group())
        found = _step(call, every[rank], list(mine.parameters()))
        for model in models:
            f8.sync_float8_amax_and_scale_history(model)
        if step == 0:  # each rank took the scales of its own tensors
            models[1].load_state_dict(
                {**models[1].state_dict(), "float8_scales.state": models[0].float8_scales.state}
            )
            for p, part in zip(whole.parameters(), mine.parameters(), strict=True):
                part.data.copy_(p.data[own * rank : own * (rank + 1)])
            continue
        first = sum(counts[:rank])
        for one, all_tokens in zip(found, expected, strict=True):
            assert torch.equal(one, all_tokens[first : first + counts[rank]])
        for one, all_experts in zip(mine.parameters(), whole.parameters(), strict=True):
            assert torch.equal(one, all_experts[own * rank : own * (rank + 1)])


def whole_of(experts: Any, **more: Any) -> Any:
    return lambda x, ids, scores, *_: experts(x, ids, scores, **more)


def test_own_experts_with_delayed_scaling(tmp_path: Any) -> None:
    ranks.spawn(_delayed, 2, tmp_path)
