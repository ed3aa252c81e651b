"""Loss parallelism: a head that ranks share by vocabulary, under `loss_parallel()`, as on one device.

Logits are never whole on a rank. Ranks are processes on the emulated device.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import ranks
import torch
from parallel_models import Mlp, mlp_plan
from reference import agree, sqnr
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional

import float8.torch as f8

DIM, HIDDEN, VOCABULARY = 64, 96, 192


class Model(nn.ModuleDict):
    def __init__(self, sizes: tuple[int, int, int]) -> None:
        dim, hidden, vocabulary = sizes
        super().__init__({"mlp": Mlp(dim, hidden), "head": nn.Linear(dim, vocabulary, bias=False)})

    def forward(self, x: torch.Tensor) -> Any:
        return self["head"](self["mlp"](x))


def _model(recipe: str, fp8_head: bool, sizes: tuple[int, int, int]) -> Any:
    torch.manual_seed(0)
    model = Model(sizes).to(ranks.device)
    config = f8.LinearConfig(recipe, emulate=ranks.device == "cpu")
    chosen = lambda _, name: fp8_head or name != "head"  # noqa: E731
    f8.convert_to_float8_training(model, config=config, module_filter_fn=chosen)
    assert isinstance(model["head"], f8.Float8Linear) == fp8_head
    return model


def _step(model: Any, x: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
    """Returns loss and gradients, and the head's logits."""
    x = x.clone().requires_grad_()
    logits = model(x)
    loss = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    f8.sync_float8_amax_and_scale_history(model)
    return {**found, "x": x.grad, "loss": loss.detach(), "logits": logits.detach()}


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _compare(mesh: Any, rank: int, recipe: str, fp8_head: bool) -> None:
    world = mesh.size()
    blocks = recipe == "blockwise"  # ranks have whole ones
    sizes = (128 * world,) * 3 if blocks else (DIM, HIDDEN, VOCABULARY)
    tokens = (128 if blocks else 16) * world
    single = _model(recipe, fp8_head, sizes)
    model = copy.deepcopy(single)
    style = f8.Float8ColwiseParallel if fp8_head else ColwiseParallel
    head = style(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {**mlp_plan(True), "head": head})
    torch.manual_seed(1)
    for _ in range(2):
        x = torch.randn(2, tokens, sizes[0]).to(ranks.device)
        targets = torch.randint(sizes[2], (2, tokens)).to(ranks.device)
        with loss_parallel():
            own = _step(model, x.chunk(world, 1)[rank], targets)
        whole = _step(single, x, targets)
        assert own["logits"].to_local().shape[-1] == sizes[2] // world
        own["x"] = DTensor.from_local(own["x"], mesh, [Shard(1)])
        for name, expected in whole.items():
            found = _whole(own[name])
            assert sqnr(found, expected) > 60, (recipe, fp8_head, name, sqnr(found, expected))


def _both_heads(mesh: Any, rank: int, world: int, recipe: str) -> None:
    for fp8_head in (False, True):
        _compare(mesh, rank, recipe, fp8_head)


RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed")


@pytest.mark.parametrize(
    ("world", "recipe"),
    [*((2, recipe) for recipe in (*RECIPES, "blockwise")), (3, "rowwise"), (3, "delayed")],
)
def test_a_head_in_parts_has_the_loss_of_a_whole_one(
    world: int, recipe: str, tmp_path: Any
) -> None:
    ranks.spawn(_both_heads, world, tmp_path, recipe)


def _heads_in_bf16(mesh: Any, rank: int, world: int, recipe: str) -> None:
    """Nothing is summed over ranks before the logits; those in fp8 have the bits of one device's."""
    whole = _model(recipe, True, (DIM, HIDDEN, VOCABULARY))["head"].bfloat16()
    kind = ColwiseParallel if recipe == "bf16" else f8.Float8ColwiseParallel
    head = parallelize_module(copy.deepcopy(whole), mesh, kind(use_local_output=False))
    x = torch.randn(2, 16, DIM).bfloat16()
    targets = torch.randint(VOCABULARY, (2, 16))
    for given in (x, targets):
        distributed.broadcast(given, 0)
    with loss_parallel():
        own = _step(head, x, targets)
    expected = _step(whole, x, targets)
    assert own["logits"].placements == (Shard(2),)
    if recipe != "bf16":
        part = expected["logits"].chunk(world, -1)[rank]
        assert agree(own["logits"].to_local(), part)
    for name, each in expected.items():
        assert sqnr(_whole(own[name]), each) > 40, (recipe, name, sqnr(_whole(own[name]), each))


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise", "delayed", "bf16"))
def test_heads_in_bf16(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_heads_in_bf16, 2, tmp_path, recipe)
