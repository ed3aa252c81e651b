"""A linear under a recipe in plain PyTorch: the numerics that the docs specify, in fp64 sums."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from float8 import Cast, Format, Granularity, Recipe

_TYPES = {Format.E4M3: torch.float8_e4m3fn, Format.E5M2: torch.float8_e5m2}


def _scale(amax: Tensor, cast: Cast) -> Tensor:
    largest = torch.finfo(_TYPES[cast.format]).max
    scale = (largest / amax.double().clamp(min=1e-12)).float()
    if cast.pow2:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def _blocks(x: Tensor, rows: int) -> Tensor:
    """The amax of each block of `rows` by 128, as a tensor of x's shape."""
    m, k = x.shape
    padded = torch.zeros(-(-m // rows) * rows, -(-k // 128) * 128)
    padded[:m, :k] = x.abs()
    tiles = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // 128, 128)
    amax = tiles.amax(dim=(1, 3), keepdim=True).expand_as(tiles)
    return amax.reshape(padded.shape)[:m, :k]


def dequantized(x: Tensor, cast: Cast) -> Tensor:
    """x[rows, K] as the GEMM sees it: cast over K by the setting, and multiplied back, in fp64."""
    if not cast.fp8:
        return x.double()
    x = x.float()
    amax = {
        Granularity.TENSOR: lambda: x.abs().max().expand_as(x),
        Granularity.AXIS: lambda: x.abs().amax(dim=1, keepdim=True).expand_as(x),
        Granularity.BLOCK_1X128: lambda: _blocks(x, 1),
        Granularity.BLOCK_128X128: lambda: _blocks(x, 128),
    }[cast.granularity]()
    scale = _scale(amax, cast)
    largest = torch.finfo(_TYPES[cast.format]).max
    q = (x * scale).clamp(-largest, largest).to(_TYPES[cast.format])
    return q.double() / scale.double()


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    """y of x[M, K] and weight[N, K], in fp64."""
    gemm = recipe.output
    y = dequantized(x, gemm.a) @ dequantized(weight, gemm.b).T
    return y if bias is None else y + bias.double()


def backward(dy: Tensor, x: Tensor, weight: Tensor, recipe: Recipe) -> tuple[Tensor, ...]:
    """dx, dw and db, in fp64."""
    gi, gw = recipe.grad_input, recipe.grad_weight
    dx = dequantized(dy, gi.a) @ dequantized(weight.T, gi.b).T
    dw = dequantized(dy.T, gw.a) @ dequantized(x.T, gw.b).T
    return dx, dw, dy.double().sum(dim=0)


def error(actual: Tensor, expected: Tensor) -> float:
    """The relative Frobenius error."""
    expected = expected.cpu().double()
    return float((actual.detach().cpu().double() - expected).norm() / expected.norm())


def same(first: Iterable[Tensor], second: Iterable[Tensor]) -> bool:
    """Whether two lists of tensors are equal, one by one."""
    return all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


def agree(actual: Tensor, expected: Tensor) -> bool:
    """Whether two computations of the same casts agree.

    They do so bit for bit on the emulated device. On a GPU two plans may sum in different orders;
    casts with other scales are twice this far apart.
    """
    if actual.is_cuda:
        return error(actual, expected.detach().cpu()) < 1.5e-2
    return torch.equal(actual, expected)


def sqnr(actual: Tensor, expected: Tensor) -> float:
    """In dB."""
    actual, expected = actual.detach().double(), expected.detach().double()
    ratio = expected.norm() / (actual - expected).norm()
    return float(20 * torch.log10(ratio))


def words_of_each(
    words: tuple[torch.Tensor, torch.Tensor],
    x: list[torch.Tensor],
    config: list[int],
    operand: int,
    most: list[int],
    whole_rows: list[int] | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the words that quantize_amax_list gave for all shards, for each."""
    counts = [
        torch.ops.float8.amax_words(rows, int(each.shape[-1]), bits, operand, whole)
        for each, bits, rows, whole in zip(x, config, most, whole_rows or [0] * len(x), strict=True)
    ]
    amax, row_amax = (
        list(torch.split(own, list(sizes)))
        for own, sizes in zip(words, zip(*counts, strict=True), strict=True)
    )
    return amax, row_amax
