"""float8.torch.grouped_mm: the bits of dense linears, gradients, compiling, routings and errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import reference
import torch
from reference import agree, error, same
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import float8
import float8.torch as f8
from float8 import recipes

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "bf16")
COUNTS = [5, 0, 130, 17, 128, 1]
K, N = 64, 96


def ends(counts: list[int], device: str) -> Tensor:
    return torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)


def operands(
    device: str,
    counts: list[int] | None = None,
    tail: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    of_weight: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x, the weight [E, N, K] and the ends of rows."""
    counts = COUNTS if counts is None else counts
    x = torch.randn(sum(counts) + tail, K).to(device, dtype)
    weight = torch.randn(len(counts), N, K).to(device, of_weight or dtype)
    return x, weight, ends(counts, device)


def step(x: Tensor, weight: Tensor, offs: Tensor, call: Any = None, **options: Any) -> list[Tensor]:
    """Returns y, dx and dw for a dy of random values."""
    x, weight = (each.detach().requires_grad_() for each in (x, weight))
    y = (call or f8.grouped_mm)(x, weight.transpose(-2, -1), offs, **options)
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape).to(y.device, y.dtype))
    assert x.grad is not None
    assert weight.grad is not None
    return [y.detach(), x.grad, weight.grad]


def dense(x: Tensor, weight: Tensor, counts: list[int], **options: Any) -> list[Tensor]:
    """The same of a linear for each expert."""
    x, weight = (each.detach().requires_grad_() for each in (x, weight))
    parts = [
        f8.functional.linear(rows, weight[e], **options)
        for e, rows in enumerate(x.split([*counts, x.shape[0] - sum(counts)])[:-1])
    ]
    y = torch.cat([*parts, x.new_zeros(x.shape[0] - sum(counts), N)])
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape).to(y.device, y.dtype))
    assert x.grad is not None
    assert weight.grad is not None
    return [y.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_has_the_bits_of_dense_linears(
    device: str, options: dict[str, Any], recipe: str, dtype: torch.dtype
) -> None:
    if recipe in ("rowwise_with_gw_hp", "bf16") and dtype == torch.float32:
        pytest.skip("GEMMs of experts in high precision are of 16-bit operands")
    x, weight, offs = operands(device, tail=9, dtype=dtype)
    own = step(x, weight, offs, recipe=recipe, **options)
    for one, other in zip(own, dense(x, weight, COUNTS, recipe=recipe, **options), strict=True):
        assert one.dtype == other.dtype
        assert agree(one, other)


@pytest.mark.parametrize("recipe", RECIPES)
def test_has_gradients_of_the_type_of_its_weights(
    device: str, options: dict[str, Any], recipe: str
) -> None:
    """Those of float32 weights are not rounded to x's type on the way."""
    x, weight, offs = operands(device, of_weight=torch.float32)
    y, dx, dw = step(x, weight, offs, recipe=recipe, **options)
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert agree(dw, dense(x, weight, COUNTS, recipe=recipe, **options)[2])
    assert not torch.equal(dw, dw.bfloat16().float())


@pytest.mark.parametrize("recipe", RECIPES)
def test_is_close_to_fp64(device: str, options: dict[str, Any], recipe: str) -> None:
    counts = [70, 58]
    x, weight, offs = operands(device, counts)
    own = step(x, weight, offs, recipe=recipe, **options)
    torch.manual_seed(1)
    dy = torch.randn(x.shape[0], N).bfloat16()
    settings = float8.Recipe.named(recipe)
    start = 0
    for e, count in enumerate(counts):
        rows = slice(start, start + count)
        x_e, w_e = x[rows].cpu(), weight[e].cpu()
        dx, dw, _ = reference.backward(dy[rows], x_e, w_e, settings)
        y = reference.forward(x_e, w_e, None, settings)
        for one, other in zip((own[0][rows], own[1][rows], own[2][e]), (y, dx, dw), strict=True):
            assert error(one, other) < 5e-3
        start += count


@pytest.mark.parametrize("counts", [[0, 0, 40, 0], [0, 0, 0, 0], [16, 16, 16, 16], [40]], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_takes_any_groups(
    device: str, options: dict[str, Any], recipe: str, counts: list[int]
) -> None:
    """One with all rows, none with any, and a single expert."""
    x, weight, offs = operands(device, counts, tail=3)
    own = step(x, weight, offs, recipe=recipe, **options)
    for one, other in zip(own, dense(x, weight, counts, recipe=recipe, **options), strict=True):
        assert agree(one, other) if other.any() else not one.any()
    for e, count in enumerate(counts):
        assert count > 0 or not own[2][e].any()


def test_takes_no_rows(device: str, options: dict[str, Any]) -> None:
    x, weight, offs = operands(device, [0, 0])
    y, dx, dw = step(x, weight, offs, **options)
    assert y.shape == (0, N)
    assert dx.shape == (0, K)
    assert dw.shape == weight.shape
    assert not dw.any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_does_not_read_the_rows_of_no_expert(
    device: str, options: dict[str, Any], recipe: str
) -> None:
    x, weight, offs = operands(device, tail=200)
    used = sum(COUNTS)
    expected = step(x[:used], weight, offs, recipe=recipe, **options)
    x[used:] = torch.nan
    y, dx, dw = step(x, weight, offs, recipe=recipe, **options)
    assert same((y[:used], dw), (expected[0], expected[2]))
    assert not y[used:].any()
    assert not dx[used:].any()
    assert dx[:used].isfinite().all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_reads_any_strides(device: str, options: dict[str, Any], recipe: str) -> None:
    """Also weights that are stored as [E, K, N], of which it makes a transposed copy."""
    x, weight, offs = operands(device)
    expected = step(x, weight, offs, recipe=recipe, **options)
    wide = torch.zeros(x.shape[0], 2 * K, device=device, dtype=x.dtype)
    wide[:, :K] = x
    transposed = x.t().contiguous().t()
    stored = weight.transpose(-2, -1).contiguous()
    for rows, weights in ((wide[:, :K], weight), (transposed, stored.transpose(-2, -1))):
        assert same(step(rows, weights, offs, recipe=recipe, **options), expected)
    stored.requires_grad_()
    f8.grouped_mm(x, stored, offs, recipe=recipe, **options).float().sum().backward()
    assert stored.grad is not None
    assert stored.grad.shape == stored.shape


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiles_with_any_number_of_rows(
    device: str, options: dict[str, Any], recipe: str
) -> None:
    def call(x: Tensor, w_t: Tensor, offs: Tensor) -> Tensor:
        return f8.grouped_mm(x, w_t, offs, recipe=recipe, **options)

    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for tail in (0, 7, 300, 3000):
        x, weight, offs = operands(device, tail=tail)
        assert same(step(x, weight, offs, compiled), step(x, weight, offs, call))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    with torch.no_grad():
        assert torch.equal(compiled(x, weight.mT, offs), call(x, weight.mT, offs))


def test_fake_kernels_give_the_real_sizes(device: str, options: dict[str, Any]) -> None:
    for rows in (0, 1, 3072, 3073, 9000):
        x, weight, offs = operands(device, [rows, 0, 0])
        config = f8.functional.pack_experts("blockwise", options["emulate"], False)
        of_layout = (offs, rows, config)
        layout = torch.ops.float8.experts_layout(*of_layout)
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            fake = torch.ops.float8.experts_layout(*of_layout)
            _, fake_saved = torch.ops.float8.experts_forward(x, weight, layout, config, True)
        _, saved = torch.ops.float8.experts_forward(x, weight, layout, config, True)
        assert fake.shape == layout.shape
        assert fake_saved.shape == saved.shape


def test_computes_without_gradients(device: str, options: dict[str, Any]) -> None:
    x, weight, offs = operands(device)
    expected = step(x, weight, offs, **options)
    with torch.no_grad():
        assert torch.equal(f8.grouped_mm(x, weight.mT, offs, **options), expected[0])
    x.requires_grad_()
    f8.grouped_mm(x, weight.mT, offs, **options).float().sum().backward()
    assert x.grad is not None
    weight.requires_grad_()
    f8.grouped_mm(x.detach(), weight.mT, offs, **options).float().sum().backward()
    assert weight.grad is not None


def test_refuses_a_second_derivative(device: str, options: dict[str, Any]) -> None:
    x, weight, offs = operands(device)
    x.requires_grad_()
    y = f8.grouped_mm(x, weight.mT, offs, **options)
    (dx,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        dx.float().sum().backward()


def test_casts_for_autocast(device: str, options: dict[str, Any]) -> None:
    x, weight, offs = operands(device, dtype=torch.float32)
    with torch.autocast(device, torch.bfloat16):
        y = f8.grouped_mm(x, weight.mT, offs, **options)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, f8.grouped_mm(x.bfloat16(), weight.mT, offs, **options))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([-3, 10, 20], "the end of expert 0 is negative"),
        ([10, 5, 20], "the end of expert 1 is below the one before"),
        ([10, 20, 41], "the end of expert 2 is above the rows of x"),
    ],
)
def test_reports_bad_ends_once(
    device: str, options: dict[str, Any], bad: list[int], words: str
) -> None:
    """The call itself clamps them, and leaves no tensor."""
    x, weight, _ = operands(device, [20, 10, 10])
    f8.check_routing()
    offs = torch.tensor(bad, dtype=torch.int32, device=device)
    y = f8.grouped_mm(x, weight.mT, offs, **options)
    clamped = offs.clamp(0, 40).cummax(0).values.int()
    good = f8.grouped_mm(x, weight.mT, clamped, **options)
    assert torch.equal(y, good)
    with pytest.raises(ValueError, match=words):
        f8.check_routing()
    f8.check_routing()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, w, o: (x.double(), w, o), "x is of torch.float64; cast it"),
        (lambda x, w, o: (x, w.double(), o), "a weight is of torch.float64"),
        (lambda x, w, o: (x[None], w, o), "x has 3 dimensions"),
        (lambda x, w, o: (x, w[0], o), "the weight 2"),
        (lambda x, w, o: (x[:, :48], w, o), "x has rows of 48 elements"),
        (lambda x, w, o: (x[:, :50], w[:, :50], o), "multiples of 16"),
        (lambda x, w, o: (x, w, o.long()), "torch.cumsum"),
        (lambda x, w, o: (x, w, o[:-1]), "has 6 experts"),
        (lambda x, w, o: (x, w.to("meta"), o), "the weight on meta"),
        (lambda x, w, o: (x, w, o.to("meta")), "offs on meta"),
    ],
)
def test_refuses_operands_that_cannot_be(
    device: str, options: dict[str, Any], change: Any, words: str
) -> None:
    x, weight, offs = operands(device)
    with pytest.raises(ValueError, match=words):
        f8.grouped_mm(*change(x, weight.mT, offs), **options)


def test_refuses_dtensors(device: str, options: dict[str, Any]) -> None:
    """Torch's own error speaks of operators that mix tensors and DTensors."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = distributed.device_mesh.init_device_mesh(device, (2,))

        def shared(tensor: Tensor) -> Any:
            return DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)

        x, weight, offs = operands(device, [8, 24])
        ids = torch.zeros(32, 1, dtype=torch.int32, device=device)
        moe = (x, ids, torch.ones(32, 1, device=device), weight.repeat(1, 2, 1), weight.mT)
        calls: tuple[tuple[Any, Any, tuple[str, ...]], ...] = (
            (f8.grouped_mm, (x, weight.mT, offs), ("x", "weight", "offs")),
            (f8.functional.moe, moe, ("x", "topk_ids", "topk_scores", "w13", "w2")),
        )
        for call, own, names in calls:
            for i, name in enumerate(names):
                given = [shared(each) if n == i else each for n, each in enumerate(own)]
                with pytest.raises(ValueError, match=f"float8: {name} is a DTensor.*fully_shard"):
                    call(*given, **options)
    finally:
        distributed.destroy_process_group()


def test_refuses_options_that_cannot_be(device: str, options: dict[str, Any]) -> None:
    x, weight, offs = operands(device)
    output_alone = dataclasses.replace(
        float8.Recipe.named("rowwise"), output=float8.Recipe.named("bf16").output
    )
    for recipe in ("delayed", output_alone):
        with pytest.raises(ValueError, match="use one of tensorwise, rowwise"):
            f8.grouped_mm(x, weight.mT, offs, recipe=recipe, **options)
    with pytest.raises(RuntimeError, match="f32 tensors: expert linears multiply tensors of bf16"):
        f8.grouped_mm(x.float(), weight.mT, offs, recipe="bf16", **options)
    tall = float8.Cast(granularity=float8.Granularity.BLOCK_1X128)
    with pytest.raises(ValueError, match="has scales of block_1x128 for b of output"):
        f8.functional.pack_experts(float8.Recipe(output=float8.Gemm(tall, tall)), True, False)
    with pytest.raises(ValueError, match="result has x's type"):
        f8.grouped_mm(x, weight.mT, offs, out_dtype=torch.float32, **options)
    with pytest.raises(TypeError, match="saturate is 3"):
        f8.grouped_mm(x, weight.mT, offs, saturate=3, **options)  # type: ignore[arg-type]


def test_ops_refuse_the_layout_of_another_routing(device: str, options: dict[str, Any]) -> None:
    x, weight, offs = operands(device)
    config = f8.functional.pack_experts("rowwise", options["emulate"], False)
    layout = torch.ops.float8.experts_layout(offs, 9000, config)
    with pytest.raises((ValueError, RuntimeError), match="another number of rows or experts"):
        torch.ops.float8.experts_forward(x, weight, layout, config, True)


@pytest.mark.parametrize(
    ("where", "bit"),
    [
        pytest.param("cpu", recipes.STAGED, id="cpu"),
        pytest.param("cuda", 0, id="cuda", marks=pytest.mark.gpu),
    ],
)
def test_the_emulated_device_reads_staged_tensors(where: str, bit: int) -> None:
    """As of a GPU; a bit of the config stages tensors of the CPU, too."""
    x, weight, offs = operands("cpu", tail=9)
    config = f8.functional.pack_experts("blockwise", True, False)
    results = []
    for place, own in (("cpu", config), (where, config | bit)):
        there = [each.to(place) for each in (x, weight, offs)]
        layout = torch.ops.float8.experts_layout(there[2], x.shape[0], own)
        y, saved = torch.ops.float8.experts_forward(*there[:2], layout, own, True)
        of_backward = (saved, layout, there[1], *weight.shape, 0, own, 3)
        results.append([y, *torch.ops.float8.experts_backward(y, *of_backward)])
        assert all(each.device.type == place for each in results[-1])
    assert same(results[0], [each.cpu() for each in results[1]])
    torch.ops.float8.experts_layout(torch.tensor([3, 1], dtype=torch.int32), 9, config | bit)
    with pytest.raises(ValueError, match="the end of expert 1 is below the one before"):
        f8.check_routing()


@pytest.mark.gpu
def test_a_graph_reads_the_ends_of_each_replay() -> None:
    x, weight, offs = operands("cuda")
    step(x, weight, offs)
    leaf = x.detach().requires_grad_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = f8.grouped_mm(leaf, weight.mT, offs)
        (dx,) = torch.autograd.grad(y.float().sum(), leaf)
    for seed in range(3):
        torch.manual_seed(seed)
        counts = torch.randint(0, 60, (len(COUNTS),)).tolist()
        offs.copy_(ends(counts, "cuda").clamp(max=x.shape[0]))
        graph.replay()
        again = x.detach().requires_grad_()
        expected = f8.grouped_mm(again, weight.mT, offs)
        (dx_again,) = torch.autograd.grad(expected.float().sum(), again)
        assert same((y, dx), (expected, dx_again))
    f8.check_routing()


@pytest.mark.parametrize("recipe", RECIPES)
def test_backward_casts_the_weights_again(
    device: str, options: dict[str, Any], recipe: str
) -> None:
    """The bits are those of kept copies, which take a byte for each element of the weights."""
    x, weight, offs = operands(device)
    results = []
    kept: list[int] = []
    for recompute in (None, True, False):
        own_x, own_w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        sizes: list[int] = []

        def pack(saved: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            if saved.dtype == torch.uint8:
                sizes.append(saved.numel())
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            y = f8.grouped_mm(own_x, own_w.mT, offs, recipe=recipe, recompute=recompute, **options)
        y.backward(torch.ones_like(y))
        results.append([y, own_x.grad, own_w.grad])
        kept.append(sum(sizes))
    assert same(results[0], results[1]) and same(results[0], results[2])
    # In high precision there is no copy.
    assert kept[0] == kept[1] <= kept[2] - (0 if recipe == "bf16" else weight.numel())


def test_a_weight_that_changes_before_backward_is_refused(
    device: str, options: dict[str, Any]
) -> None:
    x, weight, offs = operands(device)
    x.requires_grad_()
    weight.requires_grad_()
    y = f8.grouped_mm(x, weight.mT, offs, **options)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
