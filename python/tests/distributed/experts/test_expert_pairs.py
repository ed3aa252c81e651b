"""torchtitan's experts, whose w1 and w3 are computed as one weight, under FSDP with fp8 gathers."""

from __future__ import annotations

import copy
import ctypes
from typing import Any

import expert_shards
import pytest
import ranks
import torch
from torch.distributed.fsdp import fully_shard

import float8.torch as f8
from float8.torch.experts import moe


def _models(mesh: Any, recipe: str, experts: int, n: int, dim: int, **options: Any) -> list[Any]:
    """Returns the layers of torchtitan with fp8 gathers, with gathers in high precision, and on one rank."""
    plain = expert_shards.layers(experts, n=n)
    fp8, single = (
        expert_shards.convert(copy.deepcopy(plain), recipe, gather) for gather in (True, False)
    )
    high = expert_shards.shard(single, mesh, dim, **options)
    return [expert_shards.shard(fp8, mesh, dim, **options), high, single]


def _watch_mlps() -> list[int]:
    """Returns a list with an element for each MLP that this process computes in one op from now on."""
    calls: list[int] = []
    of_rows = moe._forward

    def watched(*args: Any) -> Any:
        calls.append(1)
        return of_rows(*args)

    moe._forward = watched
    return calls


def _equal_steps(
    mesh: Any, rank: int, world: int, recipe: str, experts: int, n: int, dim: int
) -> None:
    fp8, high, single = models = _models(mesh, recipe, experts, n, dim)
    as_single = ranks.device == "cpu"  # sums of gradients have one order
    x = expert_shards.rows(world)
    seen, mlps = expert_shards.watch(fp8), _watch_mlps()
    options: Any = {"lr": 1e-2, "fused": True}
    kind = torch.optim.AdamW if dim == 0 else f8.AdamW
    optimizers = [kind(each.parameters(), **options) for each in models]
    before = expert_shards.copies_of(fp8)
    for step in range(3):
        for part in x:
            (single(part).square().mean() / world).backward()
        mlps.clear()
        ys = [model(x[rank]) for model in models[:2]]
        assert len(mlps) == 4, "two layers of each model are an MLP in one op"
        assert torch.equal(*ys)
        assert torch.equal(ys[0], single(x[rank])) or not as_single
        for y in ys:
            y.square().mean().backward()
        for (name, own), other, one in zip(
            fp8.named_parameters(), high.parameters(), single.parameters(), strict=True
        ):
            assert torch.equal(own.grad.to_local(), other.grad.to_local()), (step, name)
            assert torch.equal(own.grad.full_tensor(), one.grad) or not as_single, (step, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 0:
            f8.precompute_float8_dynamic_scale_for_fsdp(fp8)
    assert seen[0] and seen[2]  # w1 and w3 have copies alone
    expert_shards.expect_changes(before, fp8)


# Ranks have whole experts, other numbers of them, or parts of each.
@pytest.mark.parametrize(
    ("recipe", "experts", "n", "dim"),
    [
        ("rowwise", 4, 48, 0),
        ("blockwise", 4, 48, 0),
        ("rowwise", 3, 48, 0),
        ("rowwise", 3, 48, 1),
        ("blockwise", 3, 256, 1),
        ("blockwise", 3, 128, 0),
    ],
)
def test_equal_steps(recipe: str, experts: int, n: int, dim: int, tmp_path: Any) -> None:
    """Steps are those of one rank without gathers, also where blocks of 128x128 have rows of w1 and of w3."""
    ranks.spawn(_equal_steps, 2, tmp_path, recipe, experts, n, dim)


@ranks.needs_gpus(2)
@pytest.mark.parametrize(("experts", "dim"), [(4, 0), (3, 0), (3, 1)])
def test_on_gpus(experts: int, dim: int, tmp_path: Any) -> None:
    ranks.spawn(_equal_steps, 2, tmp_path, "rowwise", experts, 48, dim, device="cuda")


def _apart(mesh: Any, rank: int, world: int) -> None:
    """w1 and w3 are two linears where a block of 128x128 would have rows of both, and ranks pad."""
    x = expert_shards.rows(world)[rank]
    mlps = _watch_mlps()
    fp8, _, _ = _models(mesh, "blockwise", 3, 48, 0)
    expert_shards.keep_pairs_apart()
    _, high, _ = _models(mesh, "blockwise", 3, 48, 0)
    expert_shards.expect_equal_steps([fp8, high], x)
    assert not mlps


def test_pairs_that_stay_apart(tmp_path: Any) -> None:
    ranks.spawn(_apart, 2, tmp_path)


def _some(mesh: Any, rank: int, world: int) -> None:
    """FSDP is told to leave some of the weights: what it gathers in fp8 goes with what it does not."""
    x = expert_shards.rows(world)[rank]
    plain = expert_shards.layers(4)
    for left, is_one_mlp in ((("w1", "w3"), True), (("w2",), True), (("w3",), False)):
        models = []
        for gather in (True, False):
            model = expert_shards.convert(copy.deepcopy(plain), "rowwise", gather)
            ignored = {getattr(layer.experts, name) for layer in model for name in left}
            models.append(fully_shard(model, mesh=mesh, ignored_params=ignored))
        mlps, before = _watch_mlps(), expert_shards.copies_of(models[0])
        if not is_one_mlp:
            y = models[0](x)
            assert not mlps and torch.isfinite(y).all()
            continue
        ys = [model(x) for model in models]
        assert torch.equal(*ys) and len(mlps) == 4
        for model, y in zip(models, ys, strict=True):
            y.square().mean().backward()
            torch.optim.SGD(model.parameters(), lr=1.0).step()
        for own, other in zip(*(expert_shards.copies_of(m).values() for m in models), strict=True):
            assert torch.equal(own, other)
        expert_shards.expect_changes(before, models[0])


def test_some_weights_in_fp8(tmp_path: Any) -> None:
    ranks.spawn(_some, 2, tmp_path)


def _changes(mesh: Any, rank: int, world: int) -> None:
    """A change of one of two weights makes both be cast, and copies of one alone are for no other code."""
    x = expert_shards.rows(world)[rank]
    for experts, dim in ((4, 0), (3, 0), (3, 1)):
        fp8, high, _ = _models(mesh, "rowwise", experts, 48, dim)
        with torch.no_grad():
            before = fp8(x)
            for name in ("w3", "w1"):
                for model in (fp8, high):
                    getattr(model[1].experts, name).mul_(3)
                y = fp8(x)
                assert torch.equal(y, high(x)) and not torch.equal(y, before)
                before = y
            assert f8.verify_distributed(fp8).ok
        with pytest.raises(
            NotImplementedError, match=r"0\.experts\.w1 and 0\.experts\.w3 are gathered"
        ):
            _use_alone(fp8, x)
        local: Any = fp8[1].experts.w3._local_tensor
        if local.numel():
            ctypes.c_float.from_address(local.plain().data_ptr()).value += 1
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"1\.experts\.w3.*please"):
            fp8(x)


def _use_alone(model: Any, x: torch.Tensor) -> None:
    def use(experts: Any, args: Any) -> None:
        offs = torch.full((experts.w1.shape[0],), x.shape[0], dtype=torch.int32)
        f8.grouped_mm(x, experts.w1.transpose(-2, -1), offs, recipe="rowwise", emulate=True)

    hook = model[0].experts.register_forward_pre_hook(use)
    try:
        model(x)
    finally:
        hook.remove()


def test_changes_of_one_weight(tmp_path: Any) -> None:
    ranks.spawn(_changes, 2, tmp_path)


def _uneven(mesh: Any, rank: int, world: int) -> None:
    """Of three ranks with four experts, the last has none."""
    fp8, high, _ = _models(mesh, "rowwise", 4, 48, 0)
    mlps = _watch_mlps()
    expert_shards.expect_equal_steps([fp8, high], expert_shards.rows(world)[rank])
    assert len(mlps) == 8


def test_ranks_without_experts(tmp_path: Any) -> None:
    ranks.spawn(_uneven, 3, tmp_path)
