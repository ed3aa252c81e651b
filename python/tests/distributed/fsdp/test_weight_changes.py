"""Weights that FSDP gathers in fp8, changed in every way that there is: no forward has an old copy.

Each model is compared with one whose gathers are in high precision, which has no copies to keep. Ranks are
processes on the emulated device; check_copies is on in all of them.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from parallel_models import shard
from torch import distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import float8.torch as f8
from float8.torch.shard import fsdp, weight_changes
from float8.torch.shard.fsdp import ShardedWeight
from float8.torch.shard.gathered_weight import GatheredWeight

SIZE, WIDE = 64, 96


def _model(gather: bool, recipe: str = "rowwise", device: str = "cpu") -> Any:
    """Returns three linears, in two units and a root, not sharded yet."""
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(nn.Linear(SIZE, WIDE), nn.GELU(), nn.Linear(WIDE, SIZE, bias=False))
        model.append(nn.Linear(SIZE, SIZE))
    config = f8.LinearConfig(recipe, emulate=True, enable_fsdp_float8_all_gather=gather)
    return f8.convert_to_float8_training(model, config=config)


def _linears(model: Any) -> list[Any]:
    return [model[0], model[2], model[3]]


class _ThroughPointers(torch.optim.Optimizer):
    """An optimizer whose kernels PyTorch does not see, as those of apex."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                plain = parameter._local_tensor
                plain = plain.plain() if isinstance(plain, ShardedWeight) else plain
                _write(plain.data_ptr(), plain.numel())


def _write(address: int, count: int) -> None:
    values = (ctypes.c_float * count).from_address(address)
    for i in range(0, count, 3):
        values[i] *= 1.5


class _Sam(torch.optim.Optimizer):
    """Ascends, computes the gradient there, and goes back: a closure runs between two changes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            for p in params:
                p.data.add_(p.grad, alpha=0.1)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for p in params:
                p.data.add_(p.grad, alpha=-0.2)


Change = Callable[[Any], None]


def _stepping(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Any], Change]:
    """Returns what makes the change of an optimizer's step, whose gradients are there."""

    def prepare(model: Any) -> Change:
        optimizer = make(model.parameters())
        return lambda _: optimizer.step()

    return prepare


def _in_hooks(model: Any) -> Change:
    """Optimizers that step in backward, each for a parameter, when its gradient is there."""
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.5, foreach=True)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    return lambda _: None


def _with_closure(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Any], Change]:
    def prepare(model: Any) -> Change:
        optimizer = make(model.parameters())
        x = torch.randn(8, SIZE, generator=torch.Generator().manual_seed(5))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()
            return loss

        return lambda _: optimizer.step(closure)  # type: ignore[arg-type]

    return prepare


def _once(change: Change) -> Callable[[Any], Change]:
    return lambda model: change


@torch.no_grad()
def _data_add(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.add_(0.25)


def _data_of_view(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.to_local().view(-1)[::2].mul_(-1)


def _ema_swap(model: Any) -> None:
    """Evaluates with averaged weights, and takes the others back."""
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 0.5)
    with torch.no_grad():
        model(torch.ones(8, SIZE))
    model.reshard()
    for parameter, own in zip(model.parameters(), kept, strict=True):
        parameter.data.copy_(own)


@torch.no_grad()
def _transposed(model: Any) -> None:
    for layer in _linears(model):
        layer.weight.to_local().t().select(0, 3).fill_(2)


@torch.no_grad()
def _foreach(model: Any) -> None:
    torch._foreach_mul_([p.data for p in model.parameters()], 0.5)


def _pointer(model: Any) -> None:
    for layer in _linears(model):
        local = layer.weight.to_local()
        _write(local.data_ptr(), local.numel())


def _broadcast(model: Any) -> None:
    for layer in _linears(model):
        local = layer.weight.detach().to_local()
        if distributed.get_rank() == 1:
            with torch.no_grad():
                layer.weight._local_tensor.mul_(3)
        distributed.broadcast(local, src=0)


def _load(model: Any, **options: Any) -> None:
    state = {
        name: 0.5 * value.detach() if value.is_floating_point() else value
        for name, value in model.state_dict().items()
    }
    model.load_state_dict(state, **options)


def _scaled_state(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: 0.5 * value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }


def _set_state(model: Any) -> None:
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, _scaled_state(model), options=options)


def _fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1, fused=True)


WAYS: dict[str, Callable[[Any], Change]] = {
    "AdamW": _stepping(lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False)),
    "AdamW foreach": _stepping(lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True)),
    "AdamW fused": _stepping(_fused),
    "SGD foreach": _stepping(lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, foreach=True)),
    "an optimizer's own kernels": _stepping(_ThroughPointers),
    "optimizers in backward": _in_hooks,
    "LBFGS": _with_closure(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3)),
    "an ascent in a closure": _with_closure(_Sam),
    ".data": _once(_data_add),
    "a view of .data": _once(_data_of_view),
    "an EMA swap": _once(_ema_swap),
    "a transposed view": _once(_transposed),
    "foreach on .data": _once(_foreach),
    "a pointer": _once(_pointer),
    "a broadcast": _once(_broadcast),
    "load_state_dict": _once(_load),
    "load_state_dict(assign=True)": _once(lambda model: _load(model, assign=True)),
    "set_model_state_dict": _once(_set_state),
}


def _is_gathered(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Returns y; the weights must have been gathered in fp8."""
    seen: list[Any] = []
    hooks = [
        layer.register_forward_pre_hook(lambda own, *_: seen.append(own.weight))
        for layer in _linears(model)
    ]
    y: torch.Tensor = model(x)
    for hook in hooks:
        hook.remove()
    assert all(isinstance(weight, GatheredWeight) for weight in seen)
    return y


def _changes(mesh: Any, rank: int, world: int, recipe: str, names: list[str]) -> None:
    x = torch.randn(16, SIZE, generator=torch.Generator().manual_seed(rank))
    for name in names:
        models = [shard(_model(gather, recipe), mesh) for gather in (True, False)]
        changes = [WAYS[name](model) for model in models]
        before = [p.full_tensor().detach().clone() for p in models[0].parameters()]
        for step in range(3):
            for micro in range(2):
                ys = []
                for model in models:
                    y = _is_gathered(model, x) if model is models[0] else model(x)
                    ys.append(y.detach())
                    y.square().mean().backward()
                assert torch.equal(*ys), f"{name}, step {step}, micro-batch {micro}"
            f8.sync_float8_amax_and_scale_history(models[0])
            f8.sync_float8_amax_and_scale_history(models[1])
            for model, change in zip(models, changes, strict=True):
                change(model)
                if name != "an EMA swap":
                    model.zero_grad()
            if step == 1:
                f8.precompute_float8_dynamic_scale_for_fsdp(models[0])
            for own, other in zip(*(model.parameters() for model in models), strict=True):
                assert torch.equal(own.to_local(), other.to_local()), name
        after = [p.full_tensor().detach() for p in models[0].parameters()]
        changed = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        weights = [p.ndim == 2 for p in models[0].parameters()]
        expected = [weight and name != "an EMA swap" for weight in weights]
        assert all(was or not must for was, must in zip(changed, expected, strict=True)), name


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise", "blockwise", "delayed"))
def test_every_change_is_seen(recipe: str, tmp_path: Any) -> None:
    names = list(WAYS)
    if recipe != "rowwise":  # a change is seen before a recipe casts: the others share the ways
        names = names[("tensorwise", "blockwise", "delayed").index(recipe) :: 3]
    if (
        recipe == "delayed"
    ):  # a closure's forward records amaxes, in the other model of other copies
        names = [name for name in names if name not in ("LBFGS", "an ascent in a closure")]
    ranks.spawn(_changes, 2, tmp_path, recipe, names)


def _casts(mesh: Any, rank: int, world: int) -> None:
    """All weights that changed are cast at once, and only they: micro-batches cast nothing."""
    cast: list[int] = []
    original = fsdp.cast_shards

    def counting(weights: Any) -> None:
        cast.append(len(weights))
        original(weights)

    fsdp.cast_shards = counting
    model = shard(_model(True), mesh)
    optimizer = _fused(model.parameters())
    x = torch.randn(8, SIZE)

    def step(*micro_batches: int) -> list[int]:
        cast.clear()
        for _ in micro_batches:
            model(x).sum().backward()
        optimizer.step()
        return list(cast)

    assert step(0, 1, 2) == [3]
    assert step(0, 1, 2) == [3]
    with torch.no_grad():
        model[2].weight.data.mul_(2)
        f8.precompute_float8_dynamic_scale_for_fsdp(model)
        model[2].weight.data.mul_(2)
    assert step(0, 1) == [1]
    for layer in _linears(model):  # reads count as no change
        layer.weight.full_tensor(), layer.weight.to_local().sum(), copy.deepcopy(layer.weight)
        layer.weight.data.norm(), layer.weight.detach().cpu().numpy
    f8.precompute_float8_dynamic_scale_for_fsdp(model)
    assert step(0, 1) == []
    # Nobody knows what is done with an address: the weight is cast in every forward, with its unit.
    model[0].weight.to_local().data_ptr()
    assert step(0, 1, 2) == [2, 1, 1, 1]  # the root's unit comes first, and takes the others along
    # So are all weights once a graph of torch.compile steps, each unit's at once.
    weight_changes._note_compiled_step()
    assert step(0, 1) == [1, 1, 1] * 2
    weight_changes._steps.unknowable = False


def test_weights_that_did_not_change_are_not_cast(tmp_path: Any) -> None:
    ranks.spawn(_casts, 2, tmp_path)


def _order(mesh: Any, rank: int, world: int) -> None:
    """A cast in a hook behind a step, which is accelerate's, is the only one of the step."""
    cast: list[int] = []
    original = fsdp.cast_shards
    fsdp.cast_shards = lambda weights: (cast.append(len(weights)), original(weights))[1]
    model = shard(_model(True), mesh)
    optimizer = _fused(model.parameters())
    optimizer.register_step_post_hook(lambda *_: f8.precompute_float8_dynamic_scale_for_fsdp(model))
    x = torch.randn(8, SIZE)
    for _ in range(3):
        cast.clear()
        model(x).sum().backward()
        before = [layer.weight.full_tensor().clone() for layer in _linears(model)]
        optimizer.step()
        after = [layer.weight.full_tensor() for layer in _linears(model)]
        assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert cast == [3]


def test_casts_in_a_hook_of_the_optimizer_are_enough(tmp_path: Any) -> None:
    ranks.spawn(_order, 2, tmp_path)


def _checked(mesh: Any, rank: int, world: int) -> None:
    model = shard(_model(True), mesh)
    model(torch.ones(8, SIZE))
    local = model[2].weight._local_tensor
    _write(fsdp.ShardedWeight.plain(local).data_ptr(), local.numel())  # by nothing that is watched
    with pytest.raises(RuntimeError, match="fp8 copies of 2 "):
        model(torch.ones(8, SIZE))
    f8.check_copies(False)
    model(torch.ones(8, SIZE))
    f8.precompute_float8_dynamic_scale_for_fsdp(model)
    f8.check_copies()
    model(torch.ones(8, SIZE))


def test_check_copies_names_a_layer_whose_copies_are_old(tmp_path: Any) -> None:
    ranks.spawn(_checked, 2, tmp_path)


def _meta(mesh: Any, rank: int, world: int, folder: str) -> None:
    """The ways to give values to a sharded model on the meta device, before and after a first step."""
    x = torch.randn(16, SIZE, generator=torch.Generator().manual_seed(rank))
    full = {name: 2 * value for name, value in _model(False).state_dict().items()}
    dcp.save(full, checkpoint_id=folder)
    reference = shard(_model(False), mesh)
    everything = StateDictOptions(full_state_dict=True)
    set_model_state_dict(reference, copy.deepcopy(full), options=everything)
    expected = reference(x)

    def shards(model: Any) -> dict[str, torch.Tensor]:
        own = model.state_dict()
        return {
            name: distribute_tensor(value.clone(), own[name].device_mesh, own[name].placements)
            for name, value in full.items()
        }

    def from_dcp(model: Any) -> None:
        model.to_empty(device="cpu")
        state = model.state_dict()
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state)

    def in_place(model: Any) -> None:
        model.to_empty(device="cpu")
        model.load_state_dict(shards(model))

    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    ways: list[Change] = [
        in_place,
        from_dcp,
        lambda model: model.load_state_dict(shards(model), assign=True),
        lambda model: set_model_state_dict(model, copy.deepcopy(full), options=everything),
        lambda model: set_model_state_dict(
            model, copy.deepcopy(full) if rank == 0 else {}, options=broadcast
        ),
    ]
    for way in ways:
        model = shard(_model(True, device="meta"), mesh)
        way(model)
        assert torch.equal(_is_gathered(model, x), expected)
        optimizer = _fused(model.parameters())
        model(x).sum().backward()
        optimizer.step()
        assert not torch.equal(_is_gathered(model, x), expected)
        model.reshard()  # the root stays gathered after a forward
        way(model)
        assert torch.equal(_is_gathered(model, x), expected), ways.index(way)


def test_models_on_the_meta_device_get_values(tmp_path: Any) -> None:
    ranks.spawn(_meta, 2, tmp_path, str(tmp_path / "checkpoint"))


def _tensor_parallel(_: Any, rank: int, world: int) -> None:
    """Tensor parallelism alone, and with FSDP: fused and foreach optimizers, and .data."""
    names = ("shard", "tensor")
    mesh = distributed.device_mesh.init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=names)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    for name in ("AdamW fused", "AdamW foreach", "AdamW", ".data", "an optimizer's own kernels"):
        models = []
        for gather in (True, False):
            model = parallelize_module(_model(gather)[:3], mesh["tensor"], plan)
            for layer in (model[0], model[2]) if world > 2 else ():
                fully_shard(layer, mesh=mesh["shard"])
            models.append(model)
        changes = [WAYS[name](model) for model in models]
        x = torch.randn(16, SIZE, generator=torch.Generator().manual_seed(rank // 2))
        seen = []
        for _ in range(3):
            ys = [model(x) for model in models]
            assert torch.equal(*ys), name
            seen.append(ys[0].detach())
            for y, model, change in zip(ys, models, changes, strict=True):
                y.square().mean().backward()
                change(model)
                model.zero_grad()
        whole = nn.Sequential(nn.Linear(SIZE, WIDE), nn.GELU(), nn.Linear(WIDE, SIZE, bias=False))
        for own, of in zip(whole.parameters(), models[0].parameters(), strict=True):
            own.data = of.full_tensor().detach()
        f8.convert_to_float8_training(whole, config=f8.LinearConfig("rowwise", emulate=True))
        close = (models[0](x) - whole(x)).norm() / whole(x).norm()
        assert close < 1e-3, (name, close)
        assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2]), name


@pytest.mark.parametrize("world", (2, 4))
def test_weights_that_tensor_parallelism_shares(world: int, tmp_path: Any) -> None:
    ranks.spawn(_tensor_parallel, world, tmp_path)
