#!/usr/bin/env python3
"""Attention of other libraries: speed of forward and backward, and accuracy against fp64.

    attention.py [--shapes 's8192b1h32g8d128;s16384b1h16g16d256'] [--masks causal,full,window1024,packed8] [--variants LIST]
                 [--seconds 2] [--length 2048] [--profile FOLDER] [--json FILE] [--jsonl FILE] [--emulate]

A shape has a sequence of s tokens, b of them, h heads of queries, g of keys and values, of d elements. The
variants are float8's attention with its casts, whose backward is in bf16 (float8) or in fp8 (float8-fp8), the backends of torch's scaled_dot_product_attention,
FlexAttention, and FlashAttention 3 where flash_attn_interface is installed, in bf16 and in fp8 (forward alone,
with a scale for each head of a sequence, and casts by torch in its time), and cuDNN's own in fp8 where nvidia-cudnn-frontend is
installed (cudnn-fp8: a scale for each tensor, and casts by torch in its time). They are timed in rounds. TFLOP/s count two products in forward
and five in backward, of the queries and keys that a mask leaves: half of them under a causal one, and in a sliding window
of 1,024 keys (window1024) those of the window, which some variants have not: cuDNN has them through float8 (float8-bf16) and not through
torch. packed8 is the sequence cut into 8 of unequal
lengths, 1 to 8 parts of 36, causal each: float8's varlen_attention, float8-bf16 by cuDNN, and PyTorch's varlen_attn as sdpa-flash.

The second table has the signal to noise ratio in dB of O, dQ, dK and dV against fp64, at --length tokens of 4
heads: of normal data, of data with outliers (0.1 % of the elements are 10 times as large), of keys whose
channels have means of 8 to 15, and of queries that match keys. --profile prints the kernels of each variant.

--jsonl writes float8's rows of causal and full masks under both recipes, with their accuracy at --length tokens of heads of
their size, and those of the attentions in bf16, for `float8-tune db import` (attention_rows.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import attention_rows
import common
import cudnn_fp8
import kernel_times
import torch
import torch._functorch.config
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import float8.torch as f8

SHAPES = "s8192b1h32g8d128;s16384b1h16g16d256;s8192b1h32g32d64"
TINY = "s128b1h4g2d128"
BACKENDS = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}
RECIPES = {"float8": "fp8_forward", "float8-fp8": "fp8"}
BY_CUDNN = "float8-bf16"  # windows and packs
TIMED = (*RECIPES, BY_CUDNN, "sdpa-cudnn", "sdpa-flash", "flex", "fa3", "fa3-fp8", "cudnn-fp8")
ACCURATE = (*RECIPES, "sdpa-cudnn", "sdpa-flash", "fa3", "fa3-fp8", "cudnn-fp8")
FORWARD_ALONE = ("fa3-fp8",)
BF16 = (*BACKENDS, "flex", "fa3")
WITHOUT_WINDOWS = {*BACKENDS, "cudnn-fp8"} - {"sdpa-flash"}
PACKED = {**RECIPES, BY_CUDNN: "bf16", "sdpa-flash": "bf16"}  # recipes of varlen_attention
DATA = ("normal", "outlier", "bias", "sharp")
E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max


@dataclasses.dataclass(frozen=True)
class Shape:
    """q is [b, h, s, d], k and v are [b, g, s, d]."""

    s: int
    b: int
    h: int
    g: int
    d: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        found = re.fullmatch(r"s(\d+)b(\d+)h(\d+)g(\d+)d(\d+)", text.strip())
        if found is None:
            sys.exit(f"{text!r} is no shape; it is written as s8192b1h32g8d128")
        shape = cls(*map(int, found.groups()))
        if 0 in dataclasses.astuple(shape) or shape.h % shape.g:
            sys.exit(f"{text!r}: sizes are positive, and the heads of q a multiple of those of k")
        return shape

    def __str__(self) -> str:
        return f"s{self.s}b{self.b}h{self.h}g{self.g}d{self.d}"

    def tflop(self, mask: Mask, products: int) -> float:
        return products * 2 * self.b * self.h * mask.pairs(self.s) * self.d / 1e12


@dataclasses.dataclass(frozen=True)
class Mask:
    causal: bool
    window: int | None = None  # keys of a query under a causal mask
    packed: int | None = None  # sequences that a sequence is cut into

    @classmethod
    def parse(cls, text: str) -> Mask:
        found = re.fullmatch(r"full|causal|window([1-9]\d*)|packed([1-9]\d*)", text.strip())
        if found is None:
            sys.exit(
                f"{text!r} is no mask; there are causal, full, a window such as window1024, and a pack such as packed8"
            )
        return cls(text.strip() != "full", *(int(x) if x else None for x in found.groups()))

    def __str__(self) -> str:
        if self.packed:
            return f"packed{self.packed}"
        return f"window{self.window}" if self.window else "causal" if self.causal else "full"

    def lengths(self, s: int) -> list[int]:
        """Returns the tokens of the sequences that one of s tokens is cut into."""
        count = self.packed or 1
        ends = [s * i * (i + 1) // (count * (count + 1)) for i in range(count + 1)]
        return [end - begin for begin, end in itertools.pairwise(ends)]

    def pairs(self, s: int) -> float:
        """Returns how many queries and keys meet, in a sequence of s tokens."""
        if self.packed:
            return sum(n**2 for n in self.lengths(s)) / 2
        if self.window is not None and self.window < s:
            return self.window * (s - (self.window - 1) / 2)
        return s**2 / (2 if self.causal else 1)


Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def backend(name: str, mask: Mask) -> Call:
    if mask.window is not None:
        return flash_2(mask.window)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(BACKENDS[name]):
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=mask.causal, enable_gqa=q.shape[1] != k.shape[1]
            )

    return call


def flash_2(window: int) -> Call:
    """PyTorch's flash attention, whose window no function of it takes. It has tokens before heads."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        operands = [each.transpose(1, 2) for each in (q, k, v)]
        sizes = (None, None, q.shape[2], k.shape[2])
        y: Tensor = torch.ops.aten._flash_attention_forward(
            *operands, *sizes, 0.0, True, False, window_size_left=window - 1, window_size_right=0
        )[0]
        return y.transpose(1, 2)

    return call


def packed(name: str, mask: Mask, emulate: bool) -> Call:
    offsets: dict[Any, Tensor] = {}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[0] != 1:
            raise ValueError(f"a pack is a batch of 1, not of {q.shape[0]}")
        lengths = mask.lengths(q.shape[2])
        cu = offsets.get(q.device)
        if cu is None:
            sums = torch.tensor([0, *lengths]).cumsum(0)
            cu = offsets[q.device] = sums.to(q.device, torch.int32)
        args = (*(x[0].transpose(0, 1) for x in (q, k, v)), cu, cu, max(lengths), max(lengths))
        of_torch = name == "sdpa-flash"
        if of_torch and not emulate:
            y = torch.ops.aten._flash_attention_forward(*args, 0.0, True, False)[0]
        else:
            mode = {"recipe": PACKED[name], "emulate": emulate and not of_torch}
            y = f8.varlen_attention(*args, is_causal=True, enable_gqa=True, **mode)
        return y.transpose(0, 1)[None]

    return call


def flex(own: Mask, emulate: bool) -> Call:
    from torch.nn.attention import flex_attention as module

    attend = module.flex_attention if emulate else torch.compile(module.flex_attention)
    masks: dict[Any, Any] = {}

    def kept(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (i - j < own.window) if own.window is not None else i >= j

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = None
        if own.causal:
            key = (q.shape[2], q.device)
            if key not in masks:
                masks[key] = module.create_block_mask(
                    kept, None, None, q.shape[2], k.shape[2], device=q.device
                )
            mask = masks[key]
        y: Tensor = attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])  # type: ignore[assignment]
        return y

    return call


def flash_3(mask: Mask, in_fp8: bool) -> Call:
    """FlashAttention 3 has tokens before heads; its fp8 takes scales for each sequence and head of keys."""
    import flash_attn_interface as module

    def cast(x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        grouped = x.unflatten(1, (heads, -1))
        inverse = grouped.abs().amax(dim=(2, 3, 4)).float().clamp_min(1e-12) / LARGEST
        q = (grouped / inverse[:, :, None, None, None]).flatten(1, 2).to(E4M3)
        return q.transpose(1, 2), inverse

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scales = {}
        operands = [each.transpose(1, 2) for each in (q, k, v)]
        if in_fp8:
            cast_operands = [cast(each, k.shape[1]) for each in (q, k, v)]
            operands = [each for each, _ in cast_operands]
            names = ("q_descale", "k_descale", "v_descale")
            scales = {n: s for n, (_, s) in zip(names, cast_operands, strict=True)}
        window = (-1, -1) if mask.window is None else (mask.window - 1, 0)
        y = module.flash_attn_func(*operands, causal=mask.causal, window_size=window, **scales)
        y = y[0] if isinstance(y, tuple) else y
        return y.transpose(1, 2).to(q.dtype)  # type: ignore[no-any-return]

    return call


def call_of(name: str, mask: Mask, emulate: bool) -> Call:
    if mask.packed is not None:
        return packed(name, mask, emulate)
    if name in BACKENDS:
        return backend(name, mask)
    if name == "flex":
        return flex(mask, emulate)
    if name in RECIPES or name == BY_CUDNN:
        return lambda q, k, v: f8.scaled_dot_product_attention(
            q,
            k,
            v,
            is_causal=mask.causal,
            enable_gqa=True,
            window=mask.window,
            recipe=RECIPES.get(name, "bf16"),
            emulate=emulate,
        )
    library = "nvidia-cudnn-frontend" if name == "cudnn-fp8" else "FlashAttention 3"
    try:
        return (
            cudnn_fp8.call(mask.causal) if name == "cudnn-fp8" else flash_3(mask, name == "fa3-fp8")
        )
    except ModuleNotFoundError:
        raise RuntimeError(f"{library} is not installed") from None


# Accuracy


def probabilities(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(above, -torch.inf)
    return scores.softmax(dim=-1)


def data_of(kind: str, length: int, device: str, d: int = 128) -> list[Tensor]:
    """Returns q, k, v and dO of 4 heads of d elements."""
    random = torch.Generator().manual_seed(7)
    q, k, v, do = (torch.randn(1, 4, length, d, generator=random) for _ in range(4))
    if kind == "outlier":
        for each in (q, k, v, do):
            each[torch.rand(each.shape, generator=random) < 1e-3] *= 10
    elif kind == "bias":
        k = k + 8 + 7 * torch.rand(1, 4, 1, d, generator=random)
    elif kind == "sharp":
        q = q + 0.75 * k
    return [each.to(device, torch.bfloat16) for each in (q, k, v, do)]


def results_of(call: Call, operands: Sequence[Tensor], do: Tensor) -> list[Tensor]:
    leaves = [each.detach().requires_grad_() for each in operands]
    o = call(*leaves)
    if not o.requires_grad:
        return [o]
    o.backward(do.to(o.dtype))
    return [o.detach(), *(each.grad for each in leaves)]  # type: ignore[misc]


def decibels(actual: Tensor, exact: Tensor) -> float:
    noise = (actual.double() - exact).square().sum().clamp_min(1e-300)
    return float(10 * torch.log10(exact.square().sum() / noise))


def exact_results(
    kind: str, length: int, device: str, d: int = 128, causal: bool = True
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Returns the operands of a kind of data, dO, and the results in fp64."""
    *operands, do = data_of(kind, length, device, d)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return probabilities(q, k, causal) @ v

    return operands, do, results_of(exact, [each.double() for each in operands], do)


def float8_accuracy(
    variant: str, d: int, causal: bool, options: Any, device: str
) -> list[attention_rows.Accuracy]:
    """Returns what the rows of heads of d elements have of a variant that is float8's."""
    found = []
    for kind in DATA:
        operands, do, expected = exact_results(kind, options.length, device, d, causal)
        own = results_of(call_of(variant, Mask(causal), options.emulate), operands, do)
        for name, a, e in zip(("O", "dQ", "dK", "dV"), own, expected, strict=True):
            x = a.double()
            cosine = float((x * e).sum() / (x.norm() * e.norm()).clamp_min(1e-300))
            rmse = float((x - e).square().mean().sqrt())
            found.append(attention_rows.Accuracy(kind, name, decibels(a, e), cosine, rmse))
    return found


def write_rows(
    rows: attention_rows.Rows, found: dict[tuple[Shape, Mask], Any], options: Any, device: str
) -> None:
    """Writes the rows of --jsonl, for each shape and mask those that a key can name."""
    known: dict[tuple[str, int, bool], list[attention_rows.Accuracy]] = {}
    for (shape, mask), measured in found.items():
        if mask.window is not None or mask.packed is not None:
            continue
        for name, recipe in RECIPES.items():
            own = attention_rows.whole(measured["ms"], name)
            if own is None:
                continue
            key = (name, shape.d, mask.causal)
            if key not in known:
                known[key] = float8_accuracy(*key, options, device)
            rows.add(recipe, str(shape), mask.causal, measured["ms"], own, BF16, known[key])
    rows.write(options.jsonl)


def accuracy(names: Sequence[str], options: Any, device: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in DATA:
        operands, do, expected = exact_results(kind, options.length, device)
        for name in names:
            try:
                own = results_of(call_of(name, Mask(True), options.emulate), operands, do)
            except Exception as error:  # the others are compared still
                found[f"{kind} {name}"] = common.reason(error)
                continue
            pairs = zip(own, expected, strict=False)
            found[f"{kind} {name}"] = [round(decibels(a, e), 1) for a, e in pairs]
    rows = [
        [key.replace(" ", "-"), *([value] if isinstance(value, str) else cells_of(value))]
        for key, value in found.items()
    ]
    common.print_table(["SQNR in dB", "O", "dQ", "dK", "dV"], rows)
    return found


def cells_of(values: list[float]) -> list[str]:
    return [f"{each:.1f}" for each in values] + ["-"] * (4 - len(values))


# Speed


def measure(shape: Shape, mask: Mask, names: Sequence[str], options: Any, device: str) -> Any:
    torch.manual_seed(0)
    torch._dynamo.reset()  # a compiled FlexAttention is of this shape alone
    sizes = [(shape.b, heads, shape.s, shape.d) for heads in (shape.h, shape.g, shape.g, shape.h)]
    q, k, v, do = (torch.randn(size, device=device).bfloat16() for size in sizes)
    leaves = [each.requires_grad_() for each in (q, k, v)]
    steps: dict[str, Callable[[], object]] = {}
    failures: dict[str, str] = {}
    for name in names:
        if mask.window is not None and name in WITHOUT_WINDOWS:
            continue
        if mask.window is None and mask.packed is None and name == BY_CUDNN:
            continue
        if mask.packed is not None and name not in PACKED:
            continue
        try:
            call = call_of(name, mask, options.emulate)
            add_steps(name, call, leaves, do, steps)
        except Exception as error:  # the other variants are measured still
            failures[name] = common.reason(error)
    times = common.interleaved(steps, 0 if options.emulate else options.seconds, 20)
    rows = []
    for key, samples in times.items():
        ms = common.Spread.of(samples).median
        products = 2 if key.endswith("forward") else 5
        rows.append([key, f"{ms:.3f}", f"{shape.tflop(mask, products) / ms * 1e3:.0f}"])
    rows += [[name, text] for name, text in failures.items()]
    name = f"{shape} {mask}"
    print(name)
    common.print_table(["attention", "ms", "TFLOP/s"], rows)
    if options.profile:
        folder = pathlib.Path(options.profile)
        folder.mkdir(parents=True, exist_ok=True)
        for key, step in steps.items():
            trace = kernel_times.trace(step, folder / f"{name.replace(' ', '-')}-{key}.json")
            kernel_times.print_longest(key, trace, 8)
    return {"ms": times, "failures": failures}


def add_steps(
    name: str, call: Call, leaves: list[Tensor], do: Tensor, steps: dict[str, Callable[[], object]]
) -> None:
    """Adds forward, and backward of a graph that is kept."""

    def forward() -> Tensor:
        with torch.no_grad():
            return call(*leaves)

    forward()
    steps[f"{name}-forward"] = forward
    if name not in FORWARD_ALONE:
        o = call(*leaves)

        def backward() -> object:
            return torch.autograd.grad(o, leaves, do, retain_graph=True)

        backward()
        steps[f"{name}-backward"] = backward


def main() -> int:
    known = dict.fromkeys((*TIMED, *ACCURATE, *BACKENDS))
    parser = common.parser(__doc__, known)
    parser.add_argument("--shapes", default="", help=f"default {SHAPES}")
    parser.add_argument("--masks", default="causal,full")
    parser.add_argument("--seconds", type=float, default=2, help="of a shape")
    parser.add_argument("--profile", metavar="FOLDER")
    parser.add_argument("--jsonl", metavar="FILE", help="also write rows for float8-tune db import")
    parser.add_argument("--length", type=int, default=2048, help="of the accuracy's data")
    options = parser.parse_args()
    device = common.device_of(options)
    wanted = [each.strip() for each in options.variants.split(",") if each.strip()]
    for name in wanted:
        if name not in known:
            sys.exit(f"no variant {name!r}; there are {', '.join(known)}")
    masks = [Mask.parse(each) for each in options.masks.split(",")]
    shapes = options.shapes or (TINY if options.emulate else SHAPES)
    print(common.headline("attention", device))
    torch._functorch.config.donated_buffer = False  # backward runs again and again over one graph
    timed = wanted or list(TIMED)
    rows = None
    if options.jsonl:  # before anything is measured, since it may end the program
        rows = attention_rows.Rows(options.emulate, options.seconds, options.length)
    measured = {
        (shape, mask): measure(shape, mask, timed, options, device)
        for shape in map(Shape.parse, shapes.split(";"))
        for mask in masks
    }
    found = {f"{shape} {mask}": each for (shape, mask), each in measured.items()}
    if rows is not None:
        write_rows(rows, measured, options, device)
    compared = [name for name in wanted or ACCURATE if name not in ("flex", BY_CUDNN)]
    figures = {"speed": found, "accuracy": accuracy(compared, options, device)}
    common.write_json(options.json, figures)
    failures = {key: text for each in found.values() for key, text in each["failures"].items()}
    return common.status(failures)


if __name__ == "__main__":
    sys.exit(main())
