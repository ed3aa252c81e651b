"""fp8 experts in torchtitan, releases 0.2.2 and 0.3.0, and as an implementation of transformers."""

from __future__ import annotations

import copy
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import repository
import torch
from reference import same

import float8.torch as f8

# What the scripts of both releases have: steps of experts whose groups need no padding.
_COMMON = """
import sys
sys.path[:0] = [{folder!r}, {tests!r}]
import types
import torch
from torch import nn
import float8.torch as f8
from float8.torch.experts import ops
from float8.torch.experts.moe import mlp_of_rows
from torch.utils._python_dispatch import TorchDispatchMode

device = {device!r}
options = {{"emulate": device == "cpu"}}
counts = torch.tensor([5, 0, 130, 17], device=device)

def inputs():
    torch.manual_seed(1)
    return torch.randn(160, 64, device=device)

class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name().removeprefix("float8::"))
        return func(*args, **(kwargs or {{}}))

def step(call, experts):
    experts.zero_grad()
    x = inputs().requires_grad_()
    y = call(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in experts.parameters())]

def check_same(own, other):
    assert all(map(torch.equal, own, other)), [torch.equal(a, b) for a, b in zip(own, other)]

def check_joined(experts, recipe):
    # Rows are gathered and SwiGLU is computed in casts, whose bits are those of one weight w13.
    with Ops() as seen:
        own = step(lambda x: experts(x, counts), experts)
    joined = recipe != "tensorwise"
    assert ("moe_backward" in seen.names) == joined and ("experts_backward" in seen.names) != joined
    w1, w2, w3 = (p for _, p in sorted(experts.named_parameters()))
    config = f8.functional.pack_experts(recipe, device == "cpu", False)
    if joined:
        layout = ops.experts_layout(counts.cumsum(0, dtype=torch.int32), 160, config)
        def one_weight(x):
            w13 = torch.cat([w1, w3], 1)
            return mlp_of_rows(x.bfloat16(), w13, w2, layout, config).type_as(x)
        check_same(own, step(one_weight, experts))
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    check_same(own, step(lambda x: compiled(x, counts), experts))
    # A frozen weight leaves the others' gradients.
    w3.requires_grad_(False)
    experts.zero_grad()
    experts(inputs(), counts).square().sum().backward()
    assert w3.grad is None and torch.equal(w1.grad, dict(zip(experts.parameters(), own[2:]))[w1])
    w3.requires_grad_(True)
    if not hasattr(experts, "weight_casts"):  # the adapter's, which no conversion made
        return
    f8.check_copies()
    casts = f8.cache_weight_casts(experts)
    for _ in range(2):
        check_same(own, step(lambda x: experts(x, counts), experts))
    with torch.no_grad():
        w3.mul_(0.5)
    changed = step(lambda x: experts(x, counts), experts)
    assert not torch.equal(changed[0], own[0])
    casts.remove()
    check_same(changed, step(lambda x: experts(x, counts), experts))
    f8.check_copies(False)

def train(experts):
    names = dict(experts.named_parameters())
    before = {{name: p.detach().clone() for name, p in names.items()}}
    optimizer = torch.optim.AdamW(experts.parameters(), lr=1e-2)
    x, losses = inputs(), []
    for _ in range(5):
        y = experts(x, counts)
        assert y.dtype == x.dtype and not y[152:].any()
        loss = (y - x)[:152].square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0], losses
    for name, p in names.items():
        for e in (0, 2, 3):
            assert not torch.equal(p[e], before[name][e]), (name, e)
        # The expert without rows has a gradient of 0, and changes by the decay alone.
        assert (p[1] - before[name][1]).abs().max() < 1e-2 * before[name][1].abs().max()
    return losses

def filled(experts):
    torch.manual_seed(0)
    for p in experts.parameters():
        nn.init.normal_(p, std=0.1)
    return experts.to(device)

def check_delayed(model):
    f8.convert_to_float8_training(model, config=f8.LinearConfig("delayed", **options), experts=True)
    assert type(model[0]).__name__ == "Float8GroupedExperts"
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        y = model[0](inputs(), counts)
        y.square().mean().backward()
        f8.sync_float8_amax_and_scale_history(model)
        optimizer.step()
        optimizer.zero_grad()
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before))

def check_close(own, exact):
    assert all(abs(a - b) < 0.03 * b for a, b in zip(own, exact)), (own, exact)
"""

_022 = """
for name in ("torch.utils.tensorboard", "torchdata", "torchdata.stateful_dataloader", "datasets", "datasets.distributed"):
    module = types.ModuleType(name)
    module.__path__ = []
    for own in ("SummaryWriter", "StatefulDataLoader", "Dataset", "load_dataset", "split_dataset_by_node"):
        setattr(module, own, type(own, (), {{}}))
    sys.modules[name] = module
from torchtitan.models.moe.moe import GroupedExperts

def made():
    return filled(GroupedExperts(64, 96, 4, use_grouped_mm=False))
exact = train(made())
for recipe in ("tensorwise", "rowwise", "blockwise"):
    model = nn.Sequential(made())
    keys = list(model.state_dict())
    f8.convert_to_float8_training(model, config=f8.LinearConfig(recipe=recipe, **options), experts=True)
    assert type(model[0]).__name__ == "Float8GroupedExperts" and list(model.state_dict()) == keys
    check_close(train(model[0]), exact)
    check_joined(model[0], recipe)
check_delayed(nn.Sequential(made()))
"""

_030 = """
import dataclasses
from torchtitan.config import OverrideConfig, apply_overrides
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.module import Module

class Model(Module):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        experts: GroupedExperts.Config

    def __init__(self, config):
        super().__init__()
        self.experts = config.experts.build()

def built(*imports, hidden=96):
    config = Model.Config(experts=GroupedExperts.Config(dim=64, hidden_dim=hidden, num_experts=4))
    if imports:
        apply_overrides(OverrideConfig(imports=list(imports)), config)
    return filled(config.build())

if device == "cpu":  # where its grouped GEMM has no kernel in some releases
    GroupedExperts._grouped_mm = lambda self, *, A, B_t, offs: torch.cat(
        [rows @ w for rows, w in zip(A.tensor_split(offs.cpu()[:-1]), B_t)])
    exact = None
else:
    exact = train(built().experts)
target = "float8.adapters.torchtitan.experts"
for recipe in ("tensorwise", "rowwise", "blockwise"):
    own = built((target, {{"recipe": recipe, **options}}))
    assert type(own.experts).__name__ == "Float8GroupedExperts"
    assert list(own.state_dict()) == list(built().state_dict())
    losses = train(own.experts)
    converted = built()
    f8.convert_to_float8_training(converted, config=f8.LinearConfig(recipe=recipe, **options), experts=True)
    assert train(converted.experts) == losses
    check_joined(own.experts, recipe)
    check_joined(converted.experts, recipe)
    if exact is not None:
        check_close(losses, exact)
check_delayed(nn.Sequential(built().experts))
assert type(built((target, options), hidden=40).experts) is GroupedExperts
try:
    built((target, {{"recipe": "delayed"}}))
except ValueError as error:
    assert "use one of tensorwise, rowwise" in str(error)
else:
    raise AssertionError("delayed was taken")
"""


@pytest.mark.parametrize(("release", "script"), [("0.2.2", _022), ("0.3.0", _030)])
def test_trains_experts_of_torchtitan(device: str, release: str, script: str) -> None:
    if release == "0.3.0":
        pytest.importorskip("spmd_types")
    tests = str(pathlib.Path(__file__).parent)
    code = (_COMMON + script).format(
        folder=repository.torchtitan_folder(release), tests=tests, device=device
    )
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=300)


def _losses(model: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    batch = torch.randint(0, 64, (2, 24), device=model.device)
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def test_is_an_implementation_of_transformers(device: str, options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    from float8.adapters import transformers as adapter

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "intermediate_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**sizes, **heads, **experts)

    def made(**more: Any) -> Any:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.bfloat16, **more
        )
        return model.to(device)

    adapter.install("blockwise", **options)
    own = made(experts_implementation="float8")
    converted = f8.convert_to_float8_training(
        made(experts_implementation="eager"),
        config=f8.LinearConfig(recipe="blockwise", **options),
        module_filter_fn=lambda *_: False,
        experts=True,
    )
    assert same(_losses(own), _losses(converted))
    # Not rowwise: scales that are powers of two give other bits to few elements alone.
    adapter.install("tensorwise", name="float8_tensorwise", **options)
    own.set_experts_implementation("float8_tensorwise")
    assert own.model.layers[0].mlp.experts.config._experts_implementation == "float8_tensorwise"
    assert not same(_losses(own)[1:], _losses(converted)[1:])
    with pytest.raises(ValueError, match="use one of tensorwise, rowwise"):
        adapter.install("delayed")


_TORCHAO = """
import sys
sys.path.insert(0, {folder!r})
import warnings
import torch
import float8.torch as f8
import float8.torchao

if {late}:
    import torchao.prototype.moe_training
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    float8.torchao.install()
from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm as grouped_mm

if {late}:
    assert grouped_mm() == "torchao's" and "call it first" in str(caught[0].message)
    raise SystemExit
assert not caught
emulate = {device!r} == "cpu"
x = torch.randn(40, 64, device={device!r}, requires_grad=True)
weight = torch.randn(2, 96, 64, device={device!r}, dtype=torch.bfloat16)
offs = torch.tensor([7, 40], dtype=torch.int32, device={device!r})
y = grouped_mm(x, weight.mT, offs)
expected = f8.grouped_mm(x.bfloat16(), weight.mT, offs, recipe="rowwise", emulate=emulate)
assert torch.equal(y, expected) and y.dtype == torch.bfloat16
y.sum().backward()
assert x.grad.dtype == torch.float32
try:
    grouped_mm(x, weight.mT, offs, float8_dtype=torch.float8_e5m2)
except ValueError as error:
    assert "float8_e4m3fn" in str(error)
else:
    raise AssertionError("float8_e5m2 was taken")
"""


@pytest.mark.parametrize("late", [False, True])
def test_is_the_grouped_gemm_of_torchao(device: str, late: bool, tmp_path: pathlib.Path) -> None:
    """Of one that is installed: here it is a package with its names alone."""
    name = "_to_fp8_rowwise_then_scaled_grouped_mm"
    folder = tmp_path / "torchao" / "prototype" / "moe_training"
    folder.mkdir(parents=True)
    for each in (folder.parent.parent, folder.parent):
        (each / "__init__.py").touch()
    module = "torchao.prototype.moe_training.fp8_grouped_mm"
    (folder / "__init__.py").write_text(f"from {module} import {name}\n")
    (folder / "fp8_grouped_mm.py").write_text(f'def {name}(): return "torchao\'s"\n')
    code = _TORCHAO.format(folder=str(tmp_path), late=late, device=device)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
