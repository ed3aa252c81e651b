"""torchtitan's own converters over float8.torchao.install(): releases 0.2.2 and 0.3.0.

scripts/python-test puts each release into a folder of its own, without what loads data. Of 0.2.2 the
model, its FSDP2 and tensor parallelism, the converter and the optimizers run, in ranks, as its Trainer
calls them; of 0.3.0 the converter and the linears that it makes. torchtitan's Trainer needs a GPU.
"""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys
import textwrap
import types
from typing import Any

import pytest
import ranks
import real_training as training
import repository
import torch
from torch import nn

import float8.torchao
from float8.torch import Float8Linear
from float8.torch.layer.mlps.mlp import FusedMLP

STEPS = 6


class OnCpu(float8.torchao.Float8LinearConfig):
    @staticmethod
    def from_recipe_name(recipe_name: Any) -> Any:
        return training.config(recipe_name, "cpu")


@dataclasses.dataclass
class Case:
    """gathers, recipe: of its config, with neither for bf16."""

    gathers: bool = False
    recipe: str | None = None
    fp8: bool = True
    tensor_parallel: bool = False
    checkpointing: bool = False  # selective, by its list of ops
    implementation: str = "fused"
    precompute: bool = True
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of float8.torchao.install()


_LOADERS: dict[str, tuple[str, ...]] = {
    "torch.utils.tensorboard": ("SummaryWriter",),
    "torchdata": (),
    "torchdata.stateful_dataloader": ("StatefulDataLoader",),
    "datasets": ("Dataset", "load_dataset"),
    "datasets.distributed": ("split_dataset_by_node",),
}


def _import_torchtitan(folder: str) -> None:
    """Makes torchtitan importable, with empty classes for what loads data or writes curves."""
    sys.path.insert(0, folder)
    for name, contents in _LOADERS.items():
        module = types.ModuleType(name)
        module.__dict__.update({own: type(own, (), {}) for own in contents}, __path__=[])
        sys.modules[name] = module


def _job(case: Case, device: str) -> Any:
    from torchtitan.config import JobConfig

    job = JobConfig()
    job.model.converters = ["quantize.linear.float8"] if case.fp8 else []
    float8 = job.quantize.linear.float8
    float8.emulate = device == "cpu"
    float8.filter_fqns = ["output"]
    float8.enable_fsdp_float8_all_gather = case.gathers
    float8.precompute_float8_dynamic_scale_for_fsdp = case.precompute
    float8.recipe_name = case.recipe
    job.optimizer.implementation = case.implementation
    job.optimizer.lr = training.LEARNING_RATE
    return job


def mlps_of(model: Any) -> list[Any]:
    return [layer.feed_forward for layer in model.layers.values()]


def _train(case: Case, mesh: Any, rank: int, world: int) -> list[float]:
    """Trains as torchtitan's Trainer does, checks all weights, and returns the losses."""
    from torchtitan.components.optimizer import build_optimizers
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.activation_checkpoint import apply_ac
    from torchtitan.models.llama3.infra import parallelize
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer
    from torchtitan.protocols.model_converter import build_model_converters

    job = _job(case, ranks.device)
    shards, parts = (1, world) if case.tensor_parallel else (world, 1)
    dims = ParallelDims(1, shards, 1, parts, 1, 1, 1, world)
    sizes = TransformerModelArgs(
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        vocab_size=training.VOCABULARY,
        multiple_of=32,
        max_seq_len=training.TOKENS,
    )
    with torch.device("meta"):
        model = Transformer(sizes)
    converters = build_model_converters(job, dims)
    converters.convert(model)
    fused = "fuse" in case.options and case.fp8
    assert fused == all(isinstance(each, FusedMLP) for each in mlps_of(model))
    converted = 7 * sizes.n_layers if case.fp8 else 0
    if case.checkpointing:
        ops = parallelize._op_sac_save_list
        assert (torch.ops.float8.gathered_forward.default in ops) or not case.fp8
        job.activation_checkpoint.mode = "selective"
        job.activation_checkpoint.selective_ac_option = "op"
        apply_ac(
            model, job.activation_checkpoint, op_sac_save_list=ops, model_compile_enabled=False
        )
    if case.tensor_parallel:
        parallelize.apply_tp(model, mesh, False, case.fp8 and case.recipe is None)
    else:
        parallelize.apply_fsdp(model, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
        for module in model.modules():
            if isinstance(module, torch.distributed.fsdp.FSDPModule):
                module.set_gradient_divide_factor(float(world))
    torch.manual_seed(0)
    model.to_empty(device=ranks.device)
    with torch.no_grad():
        model.init_weights()
    optimizers = build_optimizers([model], job.optimizer, dims)
    optimizers.register_step_post_hook(lambda *_, **__: converters.post_optimizer_hook([model]))
    weights = training.Weights(model)
    losses = []
    for x in training.batches(STEPS, ranks.device, seed=0 if case.tensor_parallel else rank):
        logits = model(x)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), x[:, 1:].flatten())
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()
        losses.append(float(loss.detach()))
    weights.check(model, converted)
    if case.fp8 and (recipe := case.options.get("recipe")):
        layers = [each for each in model.modules() if isinstance(each, Float8Linear)]
        assert {str(each.recipe) for each in layers} == {recipe}
        assert not any(each._first_step for each in layers if recipe == "delayed")
    return losses


CASES = {
    "gathers": Case(gathers=True),
    "gathers without precompute": Case(gathers=True, precompute=False, implementation="foreach"),
    "checkpointing": Case(gathers=True, checkpointing=True),
    "rowwise": Case(recipe="rowwise"),
    "tensor parallel": Case(tensor_parallel=True),
    "fused": Case(gathers=True, checkpointing=True, options={"fuse": True}),
    "rowwise, fused, with gathers": Case(
        recipe="rowwise", options={"fuse": True, "enable_fsdp_float8_all_gather": True}
    ),
    "delayed, fused, with gathers": Case(gathers=True, options={"recipe": "delayed", "fuse": True}),
    "blockwise": Case(recipe="rowwise", options={"recipe": "blockwise"}),
    "tensor parallel, fused": Case(tensor_parallel=True, options={"fuse": True}),
}


def _train_all(mesh: Any, rank: int, world: int, folder: str) -> dict[str, Any]:
    training.environment_of(rank, world)
    _import_torchtitan(folder)
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        with training.installed(ranks.device, **case.options):
            if ranks.device == "cpu":  # its recipes have no emulation
                facade: Any = sys.modules["torchao.float8"]
                facade.Float8LinearConfig = OnCpu
            bf16 = dataclasses.replace(case, fp8=False, gathers=False, recipe=None)
            try:
                found[name] = (_train(case, mesh, rank, world), _train(bf16, mesh, rank, world))
            except AssertionError as error:
                found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def of_ranks(two_devices: str, tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("torchtitan")
    return ranks.spawn(
        _train_all, 2, folder, repository.torchtitan_folder("0.2.2"), device=two_devices
    )


@pytest.mark.parametrize("case", CASES)
def test_022(case: str, of_ranks: Any) -> None:
    for found in of_ranks:
        assert not isinstance(found[case], str), found[case]
        training.check_losses(*found[case])


# Release 0.3.0 exchanges configs of linears for configs of its Float8Linear, which is a torchao's.
RELEASE_030 = """
import sys
sys.path.insert(0, {folder!r})
sys.path.insert(0, {tests!r})
import float8.torchao
float8.torchao.install()  # before torchtitan, whose class is made at its import

import dataclasses
import torch
import real_training as training
from torch import nn
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module

device = {device!r}
options = {{"emulate": True}} if device == "cpu" else {{"recipe_name": "rowwise"}}

class Model(Module):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        up: Linear.Config
        down: Linear.Config

    def __init__(self, config):
        super().__init__()
        self.up, self.down = config.up.build(), config.down.build()

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

def train(fp8):
    init = {{"weight": lambda w: nn.init.normal_(w, std=0.1)}}
    up = Linear.Config(in_features=64, out_features=128, param_init=init)
    down = Linear.Config(in_features=128, out_features=64, param_init=init)
    config = Model.Config(up=up, down=down)
    if fp8:
        config = Float8LinearConverter.Config(**options).build().convert(config)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device=device)
    model.init_states()
    weights = training.Weights(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    x = torch.randn(32, 64, device=device)
    losses = []
    for _ in range(6):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    weights.check(model, 2 if fp8 else 0)
    return losses

training.check_losses(train(True), train(False))
"""


def test_030(device: str) -> None:
    pytest.importorskip("spmd_types")
    code = RELEASE_030.format(
        folder=repository.torchtitan_folder("0.3.0"),
        tests=str(pathlib.Path(__file__).parent),
        device=device,
    )
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=300)
