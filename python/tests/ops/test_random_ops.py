"""Random tensors and numbers for every op that is given memory: it works, or refuses in one line.

FLOAT8_TEST_ROUNDS=60000 is a long campaign, for libraries that AddressSanitizer watches.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import float8.torch as f8
from float8 import recipes
from float8.torch.scales import ScaleState

OPS: Any = torch.ops.float8
ROUNDS = int(os.environ.get("FLOAT8_TEST_ROUNDS", "1500"))
NAMES = ("tensorwise", "rowwise", "blockwise", "delayed", "rowwise_with_gw_hp", "bf16")
SHAPES = ((16, 64), (48, 64), (64, 48), (48,), (64,), (1,), (0, 64), (128, 128), (), (3, 16, 64))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int32, torch.float64)
EDGES = (0, 1, 2, -1, 16, 64, 128, 513, 2**31, 2**32, 2**40, -(2**63), 2**63 - 1)


class Arguments:
    """What random calls are given: tensors that fit, tensors that do not, and what calls returned."""

    def __init__(self, seed: int, scales: ScaleState) -> None:
        self.random = random.Random(seed)
        self.scales = scales
        self.kept: list[torch.Tensor] = []

    def chance(self, of: float = 0.5) -> bool:
        return self.random.random() < of

    def tensor(self) -> torch.Tensor:
        choose = self.random.choice
        made = torch.full(choose(SHAPES), self.random.randrange(2), dtype=choose(DTYPES))
        kind = self.random.randrange(10)
        if kind == 0:
            return made.expand(choose((2, 16)), *made.shape)
        if kind == 1 and made.dim() > 0:
            return made[..., ::2]
        if kind == 2:
            made.untyped_storage().resize_(choose((0, 16)))
        elif kind == 3:
            first = 16 * self.random.randrange(4)
            return self.scales.state[first : first + choose((8, 16, 1536))]
        elif kind == 4:
            return self.scales.state if self.chance() else self.scales.state.clone()
        elif kind == 5 and self.kept:
            return choose(self.kept)
        return made

    def maybe(self, of: float = 0.3) -> torch.Tensor | None:
        return self.tensor() if self.chance(of) else None

    def some(self, make: Callable[[], Any]) -> list[Any]:
        return [make() for _ in range(self.random.choice((0, 1, 1, 2, 2, 3)))]

    def number(self) -> int:
        return self.random.choice((*EDGES, self.random.randrange(1 << 20)))

    def rows(self) -> int:
        return self.random.choice((1, 16, 48, 64, 512, self.number()))

    def small(self) -> int:
        return self.random.choice((0, 1, 1, 2, 2, 3, -1))

    def config(self) -> int:
        recipe = recipes.Recipe.named(self.random.choice(NAMES))
        config = recipes.pack(recipe, emulate=True, bias=self.chance())
        return config if self.chance(0.9) else config ^ 1 << self.random.choice((0, 1, 2, 5, 6, 9))

    def of_scales(self) -> tuple[int, int]:
        layout = self.scales.layout
        if self.chance(0.3):
            layout = self.random.choice((self.number(), layout ^ 1 << self.random.randrange(62)))
        return self.scales.config if self.chance(0.8) else self.config(), layout


def _calls(a: Arguments) -> list[Callable[[], Any]]:
    x, w, dy = torch.ones(16, 64), torch.ones(48, 64), torch.ones(16, 48)

    def forward(x: torch.Tensor, w: torch.Tensor, of: float) -> Any:
        copies = (a.maybe(of), a.maybe(of), w, a.maybe(of), a.maybe(of))
        rest = (a.maybe(), a.maybe(), *a.of_scales(), a.chance(), a.maybe(of), a.maybe(of))
        return OPS.linear_forward(x, *copies, *rest)

    def backward(dy: torch.Tensor, w: torch.Tensor) -> Any:
        tensors = (a.tensor(), a.maybe(), a.maybe(), w, a.maybe(), a.maybe())
        rest = (*a.of_scales(), a.random.randrange(8), a.maybe(), a.small())
        return OPS.linear_backward(dy, *tensors, *rest)

    def of_shards() -> tuple[Any, ...]:
        return (a.small(), *(a.some(a.rows) for _ in range(3)), a.some(a.small))

    def into() -> list[torch.Tensor] | None:
        return a.some(a.tensor) if a.chance() else None

    def set_first(state: torch.Tensor, config: int, layout: int) -> None:
        OPS.scales_set_first(state, config, layout, a.some(a.number))
        OPS.scales_set_first(state, config, layout, [])  # another tensor may get the memory

    t = a.tensor
    return [
        lambda: OPS.quantize(t(), a.config(), a.small(), a.chance(), a.maybe(), a.number()),
        lambda: OPS.cast_weight(t(), t(), t(), t(), t(), a.config()),
        lambda: OPS.quantize_list(
            [x, *a.some(t)], a.config(), a.small(), a.some(t), a.scales.layout, [], into()
        ),
        lambda: OPS.quantize_amax(t(), a.config(), a.small(), a.rows()),
        lambda: OPS.quantize_shard(t(), t(), t(), a.config(), a.small(), a.rows()),
        lambda: OPS.quantize_amax_list([x, *a.some(t)], a.some(a.config), *of_shards()),
        lambda: OPS.quantize_shard_list(
            a.some(t), a.some(t), a.some(t), a.some(a.config), *of_shards(), into()
        ),
        lambda: forward(t(), t(), 0.2),
        lambda: forward(x, w, 0.1),
        lambda: backward(t(), t()),
        lambda: backward(dy, w),
        lambda: OPS.gemm_into(
            *(t() for _ in range(5)), a.maybe(), a.number(), a.config(), a.small(), a.chance()
        ),
        lambda: OPS.scales_sync(t(), *a.of_scales(), a.maybe()),
        lambda: OPS.scales_init(t(), *a.of_scales()),
        lambda: set_first(t(), *a.of_scales()),
        lambda: OPS.scales_find_first(t(), *a.of_scales()),
        lambda: OPS.reads_shards(t(), t(), a.config()),
        lambda: OPS.record_amax(t(), t(), a.small()),
        lambda: OPS.copy_layout(
            a.rows(), a.rows(), a.rows(), a.config(), a.small(), a.small(), True
        ),
    ]


@pytest.mark.parametrize("seed", (1, 2))
def test_random_arguments(seed: int) -> None:
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 48))
    options = f8.LinearConfig(recipe="delayed", emulate=True)
    f8.convert_to_float8_training(model, config=options)
    model(torch.ones(16, 64)).sum().backward()
    arguments = Arguments(seed, model.float8_scales)
    calls, worked = _calls(arguments), 0
    for _ in range(ROUNDS):
        try:
            results = arguments.random.choice(calls)()
        except (ValueError, RuntimeError) as error:
            # An op of a list without tensors is none of float8's, as PyTorch says.
            assert str(error).startswith("float8: ") or isinstance(error, NotImplementedError), (
                error
            )
            continue
        worked += 1
        for each in results if isinstance(results, (tuple, list)) else ():
            if isinstance(each, torch.Tensor):
                arguments.kept = [*arguments.kept[-100:], each]
    assert worked > ROUNDS // 100
