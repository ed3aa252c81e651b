"""Experts with frozen weights, as below LoRA of attention alone: what their gradients alone read is neither made nor kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import same
from saved import kept
from test_moe import step as step_of_moe
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import float8.torch as f8

E, D, F, T, TOP = 4, 64, 48, 40, 2
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise")
FROZEN = (("w13",), ("w2",), ("w13", "w2"))


class Layer(nn.Module):
    """A router and experts behind it."""

    def __init__(self, device: str, recipe: str, recompute: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        where: Any = {"device": device, "dtype": torch.bfloat16}
        how: Any = {"recipe": recipe, "emulate": device == "cpu", "recompute": recompute}
        self.router = nn.Linear(D, E, bias=False, **where)
        self.experts = f8.Experts(E, D, F, **how, **where)
        if recipe == "delayed":
            f8.attach_scales(self)

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.router(x).softmax(-1).topk(TOP)
        y: Tensor = self.experts(x, ids, scores)
        return y

    def freeze(self, *names: str) -> Layer:
        for name in names:
            getattr(self.experts, name).requires_grad_(False)
        return self


def tokens(device: str, seed: int = 0) -> Tensor:
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(seed))
    return x.to(device, torch.bfloat16)


def step(model: Layer, x: Tensor, call: Any = None) -> dict[str, Tensor]:
    """Returns y and the gradients by their names, and ends the step."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = (call or model)(x)
    y.float().square().sum().backward()
    if model.experts.expert_linears:
        f8.sync_float8_amax_and_scale_history(model)
    grads = {name: each.grad for name, each in [("x", x), *model.named_parameters()]}
    return {"y": y.detach(), **{name: grad for name, grad in grads.items() if grad is not None}}


def expect_same(own: dict[str, Tensor], all_of: dict[str, Tensor], *frozen: str) -> None:
    assert own.keys() == all_of.keys() - {f"experts.{name}" for name in frozen}
    assert same(own.values(), [all_of[name] for name in own])


@pytest.mark.parametrize("recompute", [None, False])
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("recipe", RECIPES)
def test_other_gradients_have_the_same_bits(
    device: str, recipe: str, frozen: tuple[str, ...], recompute: bool | None
) -> None:
    """Also in a checkpoint, with scales of its own, and once the weights train again."""
    trained, model = (Layer(device, recipe, recompute) for _ in range(2))
    model.freeze(*frozen)
    for seed in range(2):
        x = tokens(device, seed)
        expect_same(step(model, x), step(trained, x), *frozen)
    own = step(model, x, lambda x: checkpoint(model, x, use_reentrant=False))
    expect_same(own, step(trained, x), *frozen)
    model.requires_grad_()
    expect_same(step(model, x), step(trained, x))


@pytest.mark.parametrize(
    ("recipe", "compiled"), [*((each, False) for each in RECIPES), ("rowwise", True)]
)
def test_keeps_neither_x_nor_h(device: str, recipe: str, compiled: bool) -> None:
    """Of a row gate and up are left, which dx reads, and y, which the scores' gradient reads."""
    torch._dynamo.reset()
    x = tokens(device)
    ids, scores = torch.randint(E, (T, TOP), device=device), torch.rand(T, TOP, device=device)
    sizes: list[int] = []
    grads: list[Any] = []
    for frozen in ((), *FROZEN):
        model = Layer(device, recipe).freeze(*frozen)
        call: Any = torch.compile(model.experts, backend="aot_eager") if compiled else model.experts
        leaves = [each.clone().requires_grad_() for each in (x, scores)]
        found = kept(model, leaves[0], lambda x: call(x, ids, leaves[1]))  # noqa: B023
        sizes.append(sum(size for _, size in found))
        grads.append([each.grad for each in leaves])
    assert all(same(grads[0], each) for each in grads)
    rows = T * TOP
    in_fp8 = recipe != "rowwise_with_gw_hp"  # else the GEMMs of gradients read what they multiply
    of_x, of_h = (2 * T * D, rows * F) if in_fp8 else (2 * rows * D, 2 * rows * F)
    assert sizes[0] - sizes[1] >= of_x and sizes[0] - sizes[2] >= of_h
    assert sizes[0] - sizes[3] >= of_x + of_h
    assert not in_fp8 or sizes[3] < 2 * rows * (2 * F + D) + 8192


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_a_pair_of_which_one_trains(device: str, options: dict[str, Any], recipe: str) -> None:
    torch.manual_seed(1)
    x, scores, ids = torch.randn(T, D), torch.rand(T, TOP), torch.randint(E, (T, TOP))
    sizes = ((E, F, D), (E, F, D), (E, D, F))
    weights = [(torch.randn(size) / 8).to(device, torch.bfloat16) for size in sizes]
    results = {}
    for trained in (3, 1, 0):  # of the pair and w2

        def call(
            x: Tensor, ids: Tensor, scores: Tensor, *each: Tensor, trained: int = trained
        ) -> Tensor:
            w1, w3, w2 = [w if i < trained else w.detach() for i, w in enumerate(each)]
            return f8.functional.moe(x, ids, scores, (w1, w3), w2, recipe=recipe, **options)

        given = (x.to(device, torch.bfloat16), ids.to(device), scores.to(device), *weights)
        results[trained] = step_of_moe(call, given)
    for trained, own in results.items():
        assert same(own[: 3 + trained], results[3][: 3 + trained])
        assert all(grad is None for grad in own[3 + trained :])
