"""The casts of many shards in one call: the bits of the casts one by one."""

from __future__ import annotations

import pytest
import torch

import float8.torch  # noqa: F401  (it loads the ops)
from float8 import recipes

WEIGHT = 1
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")


def _config(recipe: str) -> int:
    return recipes.pack(recipes.Recipe.named(recipe), emulate=True)


def _parts(copies: tuple[torch.Tensor, ...], rows: int, cols: int, most: int, config: int) -> list:
    """Returns the elements of both copies, and the scales at the beginning of theirs."""
    q, qt = copies
    at = torch.ops.float8.copy_layout(most, rows, cols, config, WEIGHT, True, True)
    q_pitch, q_scales, in_qt, qt_pitch, qt_scales = at
    parts = []
    if q_pitch:
        parts.append(q[: rows * q_pitch].view(rows, q_pitch)[:, :cols])
        parts.append((qt if in_qt else q)[q_scales : q_scales + 4])
    if qt_pitch:
        parts.append(qt[: cols * qt_pitch].view(cols, qt_pitch)[:, :rows])
        parts.append(qt[qt_scales : qt_scales + 4])
    return parts


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_list_has_the_bits_of_its_shards_one_by_one(recipe: str) -> None:
    torch.manual_seed(0)
    config = _config(recipe)
    most = [128, 256, 128, 384]
    rows = [128, 17, 1, 300]
    cols = [128, 64, 272, 32]
    shards = [torch.randn(n, k).bfloat16() for n, k in zip(rows, cols, strict=True)]
    shards[3][5, 7] = float("nan")
    amax, row_amax = torch.ops.float8.quantize_amax_list(shards, [config] * 4, WEIGHT, most)
    found = [
        torch.ops.float8.quantize_amax(x, config, WEIGHT, n)
        for x, n in zip(shards, most, strict=True)
    ]
    assert torch.equal(amax, torch.cat([words for words, _ in found]))
    # Another rank has a larger weight in the second shard's place.
    counts = [words.numel() for words, _ in found]
    if sum(counts):
        begin = counts[0]
        amax[begin : begin + counts[1]] = torch.full((counts[1],), 4.0).view(torch.int32)
    copies = torch.ops.float8.quantize_shard_list(
        shards, amax, row_amax, [config] * 4, WEIGHT, most
    )
    assert len(copies) == 8
    for i, (x, words) in enumerate(zip(shards, torch.split(amax, counts), strict=True)):
        one = torch.ops.float8.quantize_shard(
            x, words.clone(), found[i][1], config, WEIGHT, most[i]
        )
        ours = _parts((copies[2 * i], copies[2 * i + 1]), rows[i], cols[i], most[i], config)
        expected = _parts(one, rows[i], cols[i], most[i], config)
        assert expected
        for a, b in zip(ours, expected, strict=True):
            assert torch.equal(a, b), i


def test_what_does_not_fit_is_an_error() -> None:
    config = _config("rowwise")
    x = torch.randn(16, 32).bfloat16()
    find = torch.ops.float8.quantize_amax_list
    cast = torch.ops.float8.quantize_shard_list
    amax, row_amax = find([x, x], [config, config], WEIGHT, [16, 16])
    assert amax.numel() == 64
    assert row_amax.numel() == 32
    for call, words in (
        (lambda: find([x], [config, config], WEIGHT, [16]), "each with a config"),
        (lambda: find([x], [config], WEIGHT, [0]), "at least one row"),
        (lambda: cast([x], amax, row_amax, [config], WEIGHT, [16]), "are not the 32 words"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=words):
            call()


def test_the_fake_kernels_give_the_sizes() -> None:
    config = _config("rowwise")
    with torch._subclasses.FakeTensorMode() as mode:
        x = [mode.from_tensor(torch.empty(16, 32, dtype=torch.bfloat16)) for _ in range(2)]
        amax, row_amax = torch.ops.float8.quantize_amax_list(x, [config] * 2, WEIGHT, [16, 32])
        copies = torch.ops.float8.quantize_shard_list(
            x, amax, row_amax, [config] * 2, WEIGHT, [16, 32]
        )
    real = [torch.zeros(16, 32, dtype=torch.bfloat16) for _ in range(2)]
    words = torch.ops.float8.quantize_amax_list(real, [config] * 2, WEIGHT, [16, 32])
    expected = torch.ops.float8.quantize_shard_list(real, *words, [config] * 2, WEIGHT, [16, 32])
    assert (amax.shape, row_amax.shape) == (words[0].shape, words[1].shape)
    assert [copy.shape for copy in copies] == [copy.shape for copy in expected]
