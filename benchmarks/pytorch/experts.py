#!/usr/bin/env python3
"""Forward and backward of a layer of SwiGLU experts, compiled, over torch's grouped GEMMs in bf16.

    experts.py [--models qwen3,deepseek,mixtral,scout] [--routing even,zipf] [--variants LIST]
               [--seconds 2] [--profile FOLDER] [--json FILE] [--emulate]

A layer sorts the pairs of a token and an expert, gathers rows, computes w13, silu(gate) up and w2, and
adds each token's results by their scores: in bf16 by torch alone (bf16_experts.py), with its
torch.nn.functional.grouped_mm, in fp8 with float8.torch.functional.moe, which bf16-float8 runs in bf16.
Weights are cast in each step, in forward and again in backward; of the variants with -keep once, with
recompute=False; of those with -reused in no step that is timed, as in the later micro-batches of an
accumulation. Variants with -pair have w1 and w3 in two tensors. Each step has another of a few pairs of x and dy. The variants are timed in rounds; a row has
the median time, the median speedup over bf16 and the peak of memory in a step. DeepSeek-V3 has 8 local
experts, as on one of 32 ranks.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence

import bf16_experts
import common
import kernel_times
import torch

import float8.torch as f8
from float8.torch.experts.moe import mlp
from float8.torch.experts.routing import route
from float8.torch.experts.weight_casts import Kept
from float8.torch.shard.expert_copies import copies_of

RECIPES = ("tensorwise", "rowwise", "blockwise")
VARIANTS = (
    "bf16",
    "bf16-float8",
    *(recipe + how for how in ("", "-keep", "-pair", "-reused") for recipe in RECIPES),
)
POOL = 3


@dataclasses.dataclass(frozen=True)
class Model:
    tokens: int
    top_k: int
    dim: int
    hidden: int
    experts: int


MODELS = {
    "qwen3": Model(8192, 8, 2048, 768, 128),
    "deepseek": Model(4096, 8, 7168, 2048, 8),
    "mixtral": Model(16384, 2, 4096, 14336, 8),
    "scout": Model(16640, 1, 5120, 8192, 16),
}
TINY = Model(16, 2, 32, 48, 4)


def pairs(model: Model, routing: str, device: str) -> torch.Tensor:
    """The experts of each token, all of them unlike: evenly or with odds 1, 1/2, 1/3, ..."""
    if routing == "even":
        ids = torch.arange(model.tokens * model.top_k, device=device) % model.experts
        return ids.view(model.tokens, model.top_k)[torch.randperm(model.tokens, device=device)]
    odds = 1 / torch.arange(1, model.experts + 1, device=device, dtype=torch.float32)
    if model.top_k == model.experts:
        return pairs(model, "even", device)
    return torch.multinomial(odds.expand(model.tokens, -1), model.top_k)


def reusing(recipe: str, emulate: bool, *weights: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Returns functional.moe with copies of the weights that are made now."""
    config = f8.functional.pack_experts(recipe, emulate, False)
    of_weights = [copies_of(each.detach(), config) for each in weights]
    first, second = (
        Kept(each["q"].data, each["q"].scales, each["qt"].data, each["qt"].scales)
        for each in of_weights
    )

    def call(
        x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, *operands: torch.Tensor
    ) -> torch.Tensor:
        routing = route(ids, scores, operands[-1].shape[0], config)
        return mlp(x, *operands, routing, (first, second))

    return call


def make_step(name: str, model: Model, routing: str, emulate: bool) -> Callable[[], None]:
    """Returns forward and backward of a variant, whose operands are those of all variants."""
    device = "cpu" if emulate else "cuda"
    torch.manual_seed(0)
    ids = pairs(model, routing, device)
    scores = torch.rand(ids.shape, device=device).softmax(-1).requires_grad_()
    pool = [
        tuple(torch.randn(model.tokens, model.dim, device=device).bfloat16() for _ in range(2))
        for _ in range(POOL)
    ]

    def weight(rows: int, columns: int) -> torch.Tensor:
        sizes = (model.experts, rows, columns)
        return torch.randn(sizes, device=device).mul_(0.02).bfloat16().requires_grad_()

    w13, w2 = weight(2 * model.hidden, model.dim), weight(model.dim, model.hidden)

    recipe, _, how = name.partition("-")
    halves = [each.detach().contiguous().requires_grad_() for each in w13.chunk(2, dim=1)]
    weights = [*halves, w2] if how == "pair" else [w13, w2]

    def fp8_moe(
        x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, *operands: torch.Tensor
    ) -> torch.Tensor:
        *first, second = operands
        return f8.functional.moe(
            *(x, ids, scores),
            tuple(first) if how == "pair" else first[0],
            second,
            recipe=recipe,
            emulate=emulate,
            recompute=False if how == "keep" else None,
        )

    layer = bf16_experts.moe if name == "bf16" else fp8_moe
    if how == "reused":
        layer = reusing(recipe, emulate, w13, w2)
    torch._dynamo.config.recompile_limit = 64
    call = torch.compile(
        layer,
        fullgraph=True,
        dynamic=False,
        backend="aot_eager" if emulate else "inductor",
    )
    turn = 0

    def step() -> None:
        nonlocal turn
        x, dy = pool[turn % POOL]
        turn += 1
        for each in (*weights, scores):
            each.grad = None
        x = x.detach().requires_grad_()
        call(x, ids, scores, *weights).backward(dy)

    return step


def peak_gib(step: Callable[[], None]) -> float:
    """The most memory that one step has."""
    if not common.on_gpu():
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def words(text: str, what: str, known: Sequence[str]) -> list[str]:
    """The words of a list, or the end of the program where one is not known."""
    found = [word.strip() for word in text.split(",")]
    for word in found:
        if word not in known:
            sys.exit(f"no {what} {word!r}; there are {', '.join(known)}")
    return found


def measure(name: str, model: Model, routing: str, options: common.Options) -> dict[str, object]:
    steps: dict[str, Callable[[], None]] = {}
    failures: dict[str, str] = {}
    for variant in dict.fromkeys(["bf16", *options.variants]):
        try:
            step = make_step(variant, model, routing, options.emulate)
            step()
            step()
            steps[variant] = step
        except Exception as error:  # the other variants are measured still
            failures[variant] = common.reason(error)
    times = common.interleaved(steps, 0 if options.emulate else options.seconds, 60)
    memory = {variant: peak_gib(step) for variant, step in steps.items()}
    rows = [
        [
            f"{name} {routing} {variant}",
            f"{common.Spread.of(samples).median:.3f}",
            f"{common.ratio(times['bf16'], samples):.3f}",
            f"{memory[variant]:.2f}",
        ]
        for variant, samples in times.items()
    ]
    rows += [[f"{name} {routing} {variant}", text] for variant, text in failures.items()]
    common.print_table(["layer", "ms", "over bf16", "GiB of a step"], rows)
    if options.profile:
        traces = kernel_times.trace_all(options.profile, steps, f"{name}-{routing}-")
        kernel_times.print_traces(traces, 24)
    return {"ms": times, "gib": memory, "failures": failures}


def main() -> int:
    parser = common.parser(__doc__, VARIANTS)
    parser.add_argument("--models", default=",".join(MODELS), metavar="LIST")
    parser.add_argument("--routing", default="even,zipf", metavar="LIST")
    parser.add_argument("--seconds", type=float, default=2, help="of each layer's rounds")
    parser.add_argument("--profile", metavar="FOLDER")
    options = parser.parse_args()
    options.variants = words(options.variants or ",".join(VARIANTS), "variant", VARIANTS)
    models = {name: MODELS[name] for name in words(options.models, "model", tuple(MODELS))}
    routings = words(options.routing, "routing", ("even", "zipf"))
    if options.emulate:
        models = {"tiny": TINY}
    print(common.headline("experts, forward and backward", common.device_of(options)), flush=True)
    figures = {
        f"{name} {routing}": measure(name, model, routing, options)
        for name, model in models.items()
        for routing in routings
    }
    common.write_json(options.json, figures)
    failed: dict[str, str] = {}
    for figure in figures.values():
        failed |= figure["failures"]  # type: ignore[operator]
    return common.status(failed)


if __name__ == "__main__":
    sys.exit(main())
