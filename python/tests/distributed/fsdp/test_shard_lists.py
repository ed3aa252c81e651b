"""The casts of many shards in one call: the bits of the casts one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import words_of_each

from float8 import recipes
from float8.torch import _ops

WEIGHT = 1
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")


def _config(recipe: str) -> int:
    return recipes.pack(recipes.Recipe.named(recipe), emulate=True)


def _parts(copies: tuple[torch.Tensor, ...], rows: int, cols: int, most: int, config: int) -> list:
    """Returns the elements of both copies, and the scales at the beginning of theirs."""
    q, qt = copies
    at = torch.ops.float8.copy_layout(most, rows, cols, config, WEIGHT, _ops.BOTH_COPIES, True)
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
    args = ([config] * 4, WEIGHT, most)
    each = words_of_each((amax, row_amax), shards, *args)
    copies = torch.ops.float8.quantize_shard_list(shards, *each, *args)
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


def test_shards_that_cut_blocks_have_the_bits_of_the_whole() -> None:
    torch.manual_seed(0)
    config = _config("blockwise")
    whole = [torch.randn(n, k).bfloat16() for n, k in ((336, 80), (112, 272))]
    whole[0][127, 3] = float("nan")
    parts = [x.chunk(3) for x in whole]  # 112 rows and 38, 38, 36
    most = [112, 38]
    shards = [list(each) for each in zip(*parts, strict=True)]
    places = [([336, 112], [112 * rank, 38 * rank]) for rank in range(3)]
    find = torch.ops.float8.quantize_amax_list
    cast = torch.ops.float8.quantize_shard_list
    found = [
        find(x, [config] * 2, WEIGHT, most, *place) for x, place in zip(shards, places, strict=True)
    ]
    assert all(row_amax.numel() == 0 for _, row_amax in found)
    assert found[0][0].numel() == 3 * 1 + 1 * 3  # a word a block
    amax = torch.stack([words for words, _ in found]).amax(0)
    for i, x in enumerate(whole):
        n, k = x.shape
        at = torch.ops.float8.copy_layout(n, n, k, config, WEIGHT, _ops.BOTH_COPIES, False)
        q, qt = torch.ops.float8.quantize(x, config, WEIGHT, True)
        expected_q, expected_qt = q[: n * at[0]].view(n, -1), qt[: k * at[3]].view(k, -1)
        for rank in range(3):
            args = ([config] * 2, WEIGHT, most)
            each = words_of_each((amax, found[rank][1]), shards[rank], *args, places[rank][0])
            own = cast(shards[rank], *each, *args, *places[rank])
            rows, first = len(shards[rank][i]), places[rank][1][i]
            key = (most[i], rows, k, config, WEIGHT, _ops.BOTH_COPIES, True, n)
            own_at = torch.ops.float8.copy_layout(*key)
            own_q = own[2 * i][: rows * own_at[0]].view(rows, -1)
            own_qt = own[2 * i + 1][: k * own_at[3]].view(k, -1)
            assert torch.equal(own_q[:, :k], expected_q[first : first + rows, :k])
            assert torch.equal(own_qt[:, :rows], expected_qt[:, first : first + rows])
            blocks = [-(-size // 128) for size in (n, k)]
            for copy, begin, all_of, whole_begin, lines in (
                (own[2 * i], own_at[1], q, at[1], blocks),
                (own[2 * i + 1], own_at[4], qt, at[4], blocks[::-1]),
            ):
                size = 4 * lines[0] * (-(-lines[1] // 4) * 4)
                ours = copy[begin : begin + size]
                assert torch.equal(ours, all_of[whole_begin : whole_begin + size])


@pytest.mark.parametrize(
    ("config", "rest", "words"),
    (
        (["rowwise", "rowwise"], ([16],), "a config"),
        (["rowwise"], ([0],), "at least one row"),
        (["rowwise"], ([16], [32], []), "first row"),
        (["blockwise"], ([16],), "whole_rows"),
    ),
    ids=("configs", "no rows", "no first row", "blocks"),
)
def test_maxima_of_what_does_not_fit(config: list[str], rest: Any, words: str) -> None:
    x = torch.randn(16, 32).bfloat16()
    with pytest.raises((RuntimeError, ValueError), match=words):
        _ops.quantize_amax_list([x], [_config(recipe) for recipe in config], WEIGHT, *rest)


@pytest.mark.parametrize(
    ("parts", "copies", "words"),
    (
        (1, [], "32 words"),
        (0, [], "maxima of each"),
        (1, [4], "FLOAT8_QT_FOR_RECOMPUTE"),
        (1, [5], "copies is 5"),
    ),
    ids=("words", "no words", "copies of another operand", "copies"),
)
def test_casts_of_what_does_not_fit(parts: int, copies: list[int], words: str) -> None:
    config = _config("rowwise")
    x = torch.randn(16, 32).bfloat16()
    amax, row_amax = _ops.quantize_amax_list([x, x], [config, config], WEIGHT, [16, 16])
    assert amax.numel() == 64
    assert row_amax.numel() == 32
    given = ([x], [amax][:parts], [row_amax][:parts], [config], WEIGHT, [16])
    with pytest.raises((RuntimeError, ValueError), match=words):
        torch.ops.float8.quantize_shard_list(*given, copies=copies)


def test_the_fake_kernels_give_the_sizes() -> None:
    config = _config("rowwise")
    with torch._subclasses.FakeTensorMode() as mode:
        x = [mode.from_tensor(torch.empty(16, 32, dtype=torch.bfloat16)) for _ in range(2)]
        args = ([config] * 2, WEIGHT, [16, 32])
        amax, row_amax = torch.ops.float8.quantize_amax_list(x, *args)
        each = words_of_each((amax, row_amax), x, *args)
        copies = torch.ops.float8.quantize_shard_list(x, *each, *args)
    real = [torch.zeros(16, 32, dtype=torch.bfloat16) for _ in range(2)]
    words = torch.ops.float8.quantize_amax_list(real, *args)
    each = words_of_each(words, real, *args)
    expected = torch.ops.float8.quantize_shard_list(real, *each, *args)
    assert (amax.shape, row_amax.shape) == (words[0].shape, words[1].shape)
    assert [copy.shape for copy in copies] == [copy.shape for copy in expected]


def test_the_fake_kernels_give_the_sizes_of_shards_that_cut_blocks() -> None:
    args = ([_config("blockwise")], WEIGHT, [38], [300], [76])
    real = torch.zeros(38, 272, dtype=torch.bfloat16)
    words = torch.ops.float8.quantize_amax_list([real], *args)
    each = ([own] for own in words)
    expected = torch.ops.float8.quantize_shard_list([real], *each, *args)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(real)
        found = torch.ops.float8.quantize_amax_list([fake], *args)
        each = ([own] for own in found)
        copies = torch.ops.float8.quantize_shard_list([fake], *each, *args)
    assert [each.shape for each in (*found, *copies)] == [
        each.shape for each in (*words, *expected)
    ]


def _shards_of(dtypes: list[torch.dtype]) -> tuple[list[torch.Tensor], list[int]]:
    """Returns shards in float32 of any bits, and the most rows of each."""
    torch.manual_seed(0)
    sizes = [(128, 272), (17, 64), (100, 48)]
    bits = [torch.randint(-(2**31), 2**31, size, dtype=torch.int32) for size in sizes]
    shards = [each.view(torch.float32) for each in bits]
    shards[2] = torch.randn(100, 48) * 1e-40
    return shards[: len(dtypes)], [128, 128, 256][: len(dtypes)]


def _same_floats(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compares bits of float32; the payload of a NaN may differ."""
    a, b = (each.contiguous().view(torch.float32).nan_to_num(-1.0) for each in (a, b))
    return torch.equal(a, b)


@pytest.mark.parametrize("recipe", RECIPES)
def test_shards_are_rounded_as_they_are_read(recipe: str) -> None:
    dtypes = [torch.bfloat16, torch.float16, torch.bfloat16]
    shards, most = _shards_of(dtypes)
    codes = [_ops.ELEMENT_TYPES[dtype] for dtype in dtypes]
    rounded = [x.to(dtype) for x, dtype in zip(shards, dtypes, strict=True)]
    args = ([_config(recipe)] * 3, WEIGHT, most)
    words = _ops.quantize_amax_list(shards, *args, [], [], codes)
    expected = _ops.quantize_amax_list(rounded, *args)
    for own, other in zip(words, expected, strict=True):
        assert _same_floats(own, other)
    words, expected = (words_of_each(each, shards, *args) for each in (words, expected))
    copies = _ops.quantize_shard_list(shards, *words, *args, [], [], codes)
    of_rounded = _ops.quantize_shard_list(rounded, *expected, *args)
    for i, (rows, cols) in enumerate(x.shape for x in shards):
        at = slice(2 * i, 2 * i + 2)
        ours = _parts(tuple(copies[at]), rows, cols, most[i], args[0][0])
        theirs = _parts(tuple(of_rounded[at]), rows, cols, most[i], args[0][0])
        assert ours
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b) or (a.shape == (4,) and _same_floats(a, b)), (recipe, i)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_list_casts_into_copies(recipe: str) -> None:
    torch.manual_seed(0)
    shards = [torch.randn(128, 64), torch.randn(40, 272)]
    args = ([_config(recipe)] * 2, WEIGHT, [128, 128])
    rest = ([], [], [0, 0])
    words = words_of_each(_ops.quantize_amax_list(shards, *args, *rest), shards, *args)
    expected = _ops.quantize_shard_list(shards, *words, *args, *rest)
    copies = [torch.empty_like(copy) for copy in expected]
    assert _ops.quantize_shard_list(shards, *words, *args, *rest, copies) == []
    for i, (rows, cols) in enumerate(x.shape for x in shards):
        at = slice(2 * i, 2 * i + 2)
        ours = _parts(tuple(copies[at]), rows, cols, 128, args[0][0])
        theirs = _parts(tuple(expected[at]), rows, cols, 128, args[0][0])
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b), (recipe, i)


BF16, F16 = (_ops.ELEMENT_TYPES[dtype] for dtype in (torch.bfloat16, torch.float16))


@pytest.mark.parametrize(
    ("of_x", "dtypes", "words"),
    (
        (torch.bfloat16, [F16], "float32 alone"),
        (torch.float32, [3], "got the dtype 3"),
        (torch.float32, [BF16, BF16], "a dtype for each tensor"),
    ),
)
def test_what_is_not_rounded(of_x: torch.dtype, dtypes: list[int], words: str) -> None:
    x = torch.randn(128, 64).to(of_x)
    with pytest.raises(ValueError, match=words):
        _ops.quantize_amax_list([x], [_config("tensorwise")], WEIGHT, [128], [], [], dtypes)


@pytest.mark.parametrize(
    ("copies", "short", "words"), ((1, 0, "q and qt of each tensor"), (2, 16, r"fp8 has .* bytes"))
)
def test_what_is_not_cast_into(copies: int, short: int, words: str) -> None:
    x = torch.randn(128, 64)
    args = ([_config("tensorwise")], WEIGHT, [128])
    maxima = [[each] for each in _ops.quantize_amax_list([x], *args)]
    q, qt = _ops.quantize_shard_list([x], *maxima, *args)
    into = [q, qt[: qt.numel() - short]][:copies]
    with pytest.raises(ValueError, match=words):
        _ops.quantize_shard_list([x], *maxima, *args, [], [], [BF16], into)
