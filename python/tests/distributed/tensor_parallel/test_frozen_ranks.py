"""Tensor parallel linears with frozen weights: the other results have the bits of linears that train, x and dy have one copy
each, and nothing of x is kept, or gathered in backward."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import ranks
import torch
from parallel_models import Mlp, mlp_plan
from saved import kept
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import float8.torch as f8

ALL = ("gate", "up", "down")


class Sent(TorchDispatchMode):
    """Adds up the bytes that this rank gives to collectives and GEMMs by chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and "wait" not in func._opname:
            self.bytes_sent += args[0].nbytes
        if func._opname == "gather_gemm":
            self.bytes_sent += sum(each.nbytes for each in args[0])
        if func._opname in ("gemm_scatter", "gemm_beside"):
            own = args[6] if func._opname == "gemm_scatter" else args[4]
            self.bytes_sent += sum(each.nbytes for each in own)
        return func(*args, **(kwargs or {}))


def _step(model: Any, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Returns y and the gradients by their names, and ends the step."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = model["mlp"](x)
    y.backward(dy)
    f8.sync_float8_amax_and_scale_history(model)
    grads = {name: each.grad for name, each in [("x", x), *model.named_parameters()]}
    local = {name: getattr(each, "_local_tensor", each) for name, each in grads.items()}
    trained = {name: each.clone() for name, each in local.items() if each is not None}
    return {"y": y.detach(), **trained}


def _expect_same(
    own: dict[str, Tensor], trained: dict[str, Tensor], names: tuple[str, ...]
) -> None:
    assert own.keys() == trained.keys() - {f"mlp.{name}.weight" for name in names}
    for name, value in own.items():
        assert torch.equal(value, trained[name]), (name, names)


def _compare(
    mesh: Any,
    rank: int,
    recipe: str,
    by_tokens: bool,
    sets: Sequence[tuple[str, ...]] = (ALL,),
    fused: bool = False,
    **options: Any,
) -> None:
    world = mesh.size()
    dim = hidden = 128 * world if recipe == "blockwise" else 64
    torch.manual_seed(0)
    own = Mlp(dim, hidden).to(ranks.device, torch.bfloat16)
    if fused:
        own.gate.bias = own.down.bias = None
    config = f8.LinearConfig(recipe, emulate=ranks.device == "cpu", **options)
    single: Any = f8.convert_to_float8_training(nn.ModuleDict({"mlp": own}), config=config)
    torch.manual_seed(1 + rank * by_tokens)
    shape = (1, 128 if recipe == "blockwise" else 16 * (1 if by_tokens else world), dim)
    x, dy = (torch.randn(shape).to(ranks.device, torch.bfloat16) for _ in range(2))

    def made(names: tuple[str, ...] = ()) -> Any:
        model = parallelize_module(copy.deepcopy(single), mesh, mlp_plan(by_tokens))
        if fused:
            (found,) = f8.fuse(model)
            assert found.fused, found.why
        for name in names:
            model["mlp"].get_submodule(name).weight.requires_grad_(False)
        return model

    trained = made()
    with Sent() as whole:
        expected = [_step(trained, x, dy) for _ in range(2 if recipe == "delayed" else 1)]
    for names in sets:
        model: Any = made(names)
        with Sent() as sent:
            for each in expected:
                _expect_same(_step(model, x, dy), each, names)
        # Maxima of x are reduced again where another linear needs a copy that the first one had no use for.
        assert sent.bytes_sent <= whole.bytes_sent + 64 * (names != ALL), names
        if names == ALL:
            less, size = (
                sum(size for _, size in kept(each, x.requires_grad_(), each["mlp"]))
                for each in (model, trained)
            )
            assert less < size
            assert sent.bytes_sent < whole.bytes_sent or not by_tokens
            model.requires_grad_()
            _expect_same(_step(model, x, dy), _step(trained, x, dy), ())


def _rank(mesh: Any, rank: int, world: int, recipe: str) -> None:
    _compare(mesh, rank, recipe, False, (ALL, ("down",)))
    _compare(mesh, rank, recipe, True, (ALL, ("gate",)))
    _compare(mesh, rank, recipe, True, (ALL, ("down",)), async_tensor_parallel=True)
    if recipe in ("rowwise", "rowwise_with_gw_hp"):
        _compare(mesh, rank, recipe, True, recompute=True)
    if recipe != "rowwise_with_gw_hp":
        _compare(mesh, rank, recipe, True, (ALL, ("gate",)), fused=True)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"])
def test_other_gradients_have_the_same_bits(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_rank, 2, tmp_path, recipe)
