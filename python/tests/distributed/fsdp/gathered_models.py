"""Models whose weights FSDP gathers, in fp8 or in high precision, and what they have in common."""

from __future__ import annotations

from typing import Any

import ranks
import torch
from parallel_models import shard
from torch import nn
from torch.utils.checkpoint import checkpoint

import float8.torch as f8
from float8 import recipes
from float8.torch.shard.gathered_weight import GatheredWeight

DYNAMIC = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")
RECIPES = (*DYNAMIC, "delayed")


class Checkpointed(nn.Sequential):
    """Layers whose forward is run again in backward."""

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


def mlp(
    recipe: str | recipes.Recipe, rows: int, gather: bool, kind: type[nn.Sequential] = nn.Sequential
) -> Any:
    torch.manual_seed(0)
    model = kind(nn.Linear(64, rows), nn.GELU(), nn.Linear(rows, rows, bias=False))
    emulate = ranks.device == "cpu"
    config = f8.LinearConfig(recipe, emulate=emulate, enable_fsdp_float8_all_gather=gather)
    return f8.convert_to_float8_training(model.to(ranks.device), config=config)


def uneven_rows(world: int) -> int:
    """Returns a number of rows of which ranks have no whole 128s, and that they may not share evenly."""
    # Two ranks and four share any multiple of 16 evenly; of five, the last has no rows.
    return {2: 80, 3: 112, 4: 80, 5: 16}[world]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    y = model(x)
    y.square().mean().backward()
    f8.sync_float8_amax_and_scale_history(model)
    optimizer.step()
    return y.detach()  # type: ignore[no-any-return]


def expect_equal_steps(models: list[Any], x: torch.Tensor) -> None:
    """Trains both models, with scales made after the step, then in the next gather."""
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for step in range(3):
        ys = [train_step(m, o, x) for m, o in zip(models, optimizers, strict=True)]
        assert torch.equal(*ys)
        for own, other in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(own.to_local(), other.to_local())
        if step == 0:
            f8.precompute_float8_dynamic_scale_for_fsdp(models[0])


def expect_equal_under(mesh: Any, rank: int, recipe: str, options: dict[str, Any]) -> None:
    world = mesh.size()
    torch.manual_seed(1)
    x = torch.randn(world, 16, 64)[rank].to(ranks.device)
    # Rows in whole 128s are read as they are gathered.
    rows = uneven_rows(world) if options["reshard_after_forward"] else 128 * world
    models = [shard(mlp(recipe, rows, gather), mesh, **options) for gather in (True, False)]
    if "mp_policy" not in options:
        single = mlp(recipe, rows, False)
        with torch.no_grad():
            expected = single(x)
            assert all(torch.equal(model(x), expected) for model in models)
    expect_equal_steps(models, x)
    seen: list[Any] = []
    hook = models[0][0].register_forward_pre_hook(lambda layer, *_: seen.append(layer.weight))
    models[0](x)
    hook.remove()
    assert isinstance(seen[0], GatheredWeight)
