"""Tensor parallelism without ranks: what it refuses, its casts, and one GEMM of operands in fp8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from parallel_models import Mlp, mlp_plan
from reference import agree
from torch import distributed, nn
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import float8
import float8.torch as f8
from float8.torch import _ops
from float8.torch.parallel import sharded_operands as operands
from float8.torch.parallel.sharded_operands import Copy, Sharing, rules_of

GEMM = float8.recipes.Gemm
ROWS = float8.Cast(granularity=float8.Granularity.AXIS)


@pytest.fixture
def mesh() -> Any:
    """A mesh of two ranks, of which this process is one; nothing is sent."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield distributed.device_mesh.init_device_mesh("cpu", (2,))
    distributed.destroy_process_group()


def _converted(recipe: Any = "rowwise", dim: int = 64, hidden: int = 128, **options: Any) -> Any:
    config = f8.LinearConfig(recipe, emulate=True, **options)
    return f8.convert_to_float8_training(nn.ModuleDict({"mlp": Mlp(dim, hidden)}), config=config)


def _padded() -> nn.Module:
    return f8.Float8Linear(40, 64, emulate=True, pad_inner_dim=True)


DELAYED = float8.Cast(float8.Scaling.DELAYED)
MIXED = float8.Recipe(GEMM(DELAYED, DELAYED), GEMM(ROWS, ROWS), GEMM(ROWS, ROWS))
IMPOSSIBLE: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], str]] = {
    "columns": (
        lambda: _converted(hidden=48),
        lambda: mlp_plan(True),
        r"layer 'mlp.gate' has out_features 48",
    ),
    "rows": (
        lambda: _converted(hidden=48),
        lambda: {"mlp.down": f8.Float8RowwiseParallel()},
        r"layer 'mlp.down' has in_features 48",
    ),
    "blocks": (
        lambda: _converted("blockwise", hidden=128),
        lambda: mlp_plan(True),
        r"out_features 128, which 2 ranks .* blocks of 128",
    ),
    "padded": (_padded, f8.Float8RowwiseParallel, "a Float8Linear has in_features 40"),
    "partly delayed": (
        lambda: _converted(MIXED),
        lambda: mlp_plan(True),
        "delayed and other casts",
    ),
    "plain linears": (
        lambda: nn.ModuleDict({"mlp": Mlp(64, 128)}),
        lambda: mlp_plan(True),
        "a Float8Linear, not a Linear",
    ),
    "input of no linear": (
        lambda: Mlp(64, 64),
        f8.PrepareFloat8ModuleInput,
        "Mlp has no submodule",
    ),
    "input of none": (
        _converted,
        lambda: f8.PrepareFloat8ModuleInput(fwd_config_submodule_fqn="mlp"),
        "'mlp'",
    ),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_what_cannot_be_is_an_error_that_names_the_layer(what: str, mesh: Any) -> None:
    make, plan, words = IMPOSSIBLE[what]
    with pytest.raises(ValueError, match=words):
        parallelize_module(make(), mesh, plan())


def test_another_dtype_of_inputs_is_refused() -> None:
    with pytest.raises(ValueError, match="float8_dtype"):
        f8.PrepareFloat8ModuleInput(float8_dtype=torch.float8_e5m2)


@pytest.fixture
def shared(mesh: Any) -> Any:
    return parallelize_module(_converted(), mesh, mlp_plan(True))


def test_a_sequence_that_ranks_cannot_share(shared: Any, mesh: Any) -> None:
    x = distribute_tensor(torch.randn(2, 15, 64), mesh, [Shard(1)])
    with pytest.raises(ValueError, match="sequence of 15"):
        shared["mlp"](x)


def test_a_size_that_only_pytorch_s_styles_take(mesh: Any) -> None:
    plain = _converted(hidden=48)
    parallelize_module(plain, mesh, mlp_plan(False, plain=True))
    with pytest.raises(ValueError, match=r"layer 'mlp.gate' has out_features 48"):
        plain["mlp"](torch.randn(2, 16, 64))


def test_placements_that_no_style_has(mesh: Any) -> None:
    linear = nn.Sequential(_converted()["mlp"].up)
    distribute_module(linear, mesh)
    with pytest.raises(ValueError, match="placements"):
        linear(distribute_tensor(torch.randn(2, 16, 64), mesh, [Replicate()]))


def test_an_x_that_is_no_dtensor(mesh: Any) -> None:
    linear = parallelize_module(_converted()["mlp"].up, mesh, f8.Float8ColwiseParallel())
    with pytest.raises(ValueError, match="weight is a DTensor and x is not"):
        linear.forward(torch.randn(2, 16, 64))


def test_an_x_of_another_mesh(shared: Any) -> None:
    other = distributed.device_mesh.init_device_mesh("cpu", (1, 2))
    x = distribute_tensor(torch.randn(2, 16, 64), other, [Replicate()] * 2)
    with pytest.raises(ValueError, match=r"x is on .* and the weight on"):
        shared["mlp"].up(x)


def test_a_sequence_that_cuts_blocks(mesh: Any) -> None:
    blocks = parallelize_module(_converted("blockwise", 256, 256), mesh, mlp_plan(True))
    with pytest.raises(ValueError, match=r"16 tokens .* cuts the blocks"):
        blocks["mlp"](torch.randn(2, 16, 256))


def test_no_tokens(shared: Any) -> None:
    assert shared["mlp"](torch.randn(2, 0, 64)).shape == (2, 0, 64)


def test_another_recipe_keeps_themlp_plan(mesh: Any) -> None:
    model = parallelize_module(_converted(), mesh, mlp_plan(True))
    f8.convert_to_float8_training(model, config=f8.LinearConfig("tensorwise", emulate=True))
    with ranks.Collectives() as seen:
        y = model["mlp"](torch.randn(2, 16, 64))
    assert y.shape == (2, 16, 64)
    assert [dtype for name, dtype, _ in seen.calls if "gather" in name] == [torch.uint8]


def _config(recipe: Any, device: str) -> int:
    return float8.recipes.pack(float8.Recipe.named(recipe), emulate=device == "cpu")


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise", "blockwise", "delayed"))
def test_one_gemm_of_operands_in_fp8(recipe: str, device: str) -> None:
    """The GEMMs of operands that were cast apart are those of a linear."""
    torch.manual_seed(0)
    to = Sharing(rules_of(float8.Recipe.named(recipe), device == "cpu", False), "", 1, 0)
    x, w, dy = (torch.randn(size).to(device) for size in ((48, 64), (80, 64), (48, 80)))
    shares = [operands.Share(each, i, None) for i, each in enumerate((x, w, dy))]
    (xq, xqt), (wq, wqt), (dyq, dyqt) = operands.cast(shares, to, True, None)
    bias = torch.randn(80).to(device)
    y = operands.gemm(operands.OUTPUT, xq, wq, 64, x, to, bias)
    dx = operands.gemm(operands.GRAD_INPUT, dyq, wqt, 80, x, to, None)
    dw = operands.gemm(operands.GRAD_WEIGHT, dyqt, xqt, 48, x, to, None)
    for each in (x, w):
        each.requires_grad_()
    dynamic = "tensorwise" if recipe == "delayed" else recipe
    expected = f8.functional.linear(x, w, bias, recipe=dynamic, emulate=device == "cpu")
    expected.backward(dy)
    assert agree(y, expected.detach())
    assert agree(dx, x.grad)
    assert agree(dw, w.grad)
    torch.ops.float8.gemm_into(*dyqt, *xqt, dw, None, 48, _config(dynamic, device), 2, True)
    assert agree(dw, 2 * w.grad)
    few = torch.zeros_like(dw)
    torch.ops.float8.gemm_into(*dyqt, *xqt, few, None, 48, _config(dynamic, device), 2, False, 16)
    assert agree(few, w.grad)
    arguments = (*dyqt, *xqt, dw, None, 48, _config(dynamic, device), 2, False)
    torch.library.opcheck(torch.ops.float8.gemm_into.default, arguments)
    with pytest.raises(ValueError, match="48 rows of 128 bytes"):
        operands.gemm(operands.OUTPUT, Copy(xq.data[:, :64], xq.scales), wq, 64, x, to, None)


@pytest.mark.parametrize("operand", range(3), ids=("input", "weight", "grad_output"))
@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise", "rowwise_with_gw_hp"))
def test_shards_by_columns_have_the_whole_tensors_scales(
    recipe: str, operand: int, device: str
) -> None:
    """Maxima of rows and of the tensor are reduced between two calls, as for shards by rows."""
    torch.manual_seed(0)
    whole = torch.randn(48, 128).bfloat16().to(device)
    shards = [each.contiguous() for each in whole.chunk(2, 1)]
    config = _config(recipe, device)
    q, qt = torch.ops.float8.quantize(whole, config, operand, True)
    found = [torch.ops.float8.quantize_amax(each, config, operand, 48) for each in shards]
    columns = 64 if found[0][0].numel() >= 64 else 0
    tensor = torch.maximum(*(amax[columns:] for amax, _ in found))
    rows = torch.maximum(*(row_amax for _, row_amax in found))
    rows_max = 48 if operand == 1 else 512
    at = torch.ops.float8.copy_layout(rows_max, 48, 128, config, operand, _ops.BOTH_COPIES, False)
    own = torch.ops.float8.copy_layout(48, 48, 64, config, operand, _ops.BOTH_COPIES, True)
    for i, (shard, (amax, _)) in enumerate(zip(shards, found, strict=True)):
        words = torch.cat((amax[:columns], tensor))
        sq, sqt = torch.ops.float8.quantize_shard(shard, words, rows, config, operand, 48)
        if at[0]:
            expected = q[: 48 * at[0]].view(48, at[0])[:, 64 * i : 64 * (i + 1)]
            assert torch.equal(sq[: 48 * own[0]].view(48, own[0])[:, :64], expected)
        if at[3]:
            expected = qt[: 128 * at[3]].view(128, at[3])[64 * i : 64 * (i + 1), :48]
            assert torch.equal(sqt[: 64 * own[3]].view(64, own[3])[:, :48], expected)
