"""What the tests of trainers share: a small Llama, its data, and what a right training leaves behind."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import float8.torch as f8
import float8.torchao
from float8.torchao import _options

VOCABULARY, ROWS, TOKENS, LAYERS = 64, 4, 16, 2
LEARNING_RATE = 5e-3


@contextlib.contextmanager
def installed(device: str, **options: Any) -> Iterator[None]:
    """float8.torchao.install(), undone at the end. accelerate's own configs compute on a CPU, too."""
    before = _options.installed
    modules, finders, environment = dict(sys.modules), list(sys.meta_path), dict(os.environ)
    float8.torchao.install(**options)
    facade: Any = sys.modules["torchao.float8"]
    if device == "cpu":
        facade.Float8LinearConfig = functools.partial(
            float8.torchao.Float8LinearConfig, emulate=True
        )
    try:
        yield
    finally:
        _options.set_installed(before)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
            del sys.modules[name]
        sys.modules.update({n: m for n, m in modules.items() if n.partition(".")[0] == "torchao"})
        sys.meta_path[:] = finders
        for name in set(os.environ) - set(environment):
            if name.startswith(("ACCELERATE_", "FSDP_")):
                del os.environ[name]


def config(recipe: str, device: str, **fields: Any) -> Any:
    made = float8.torchao.Float8LinearConfig.from_recipe_name(recipe)
    return dataclasses.replace(made, emulate=device == "cpu", **fields)


def checkpointing_name(of: Any) -> str:
    """Returns what the installed transformers call activation checkpointing, 5.17 gradient_."""
    new = "activation_checkpointing"
    return new if hasattr(of, new) or hasattr(of, f"{new}_enable") else "gradient_checkpointing"


def llama(device: str, seed: int = 0, kind: str = "Llama") -> Any:
    """Returns a small Llama, or one of another kind with its sizes."""
    import transformers

    torch.manual_seed(seed)
    sizes = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TOKENS,
        use_cache=False,
        pad_token_id=None,
    )
    return getattr(transformers, f"{kind}ForCausalLM")(sizes).to(device)


def rows(count: int, seed: int = 0) -> torch.Tensor:
    """Sequences in which a token decides the next one, which few steps learn."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(VOCABULARY, (count, 1), generator=generator)
    return (x + 3 * torch.arange(TOKENS)) % VOCABULARY


def batches(steps: int, device: str, seed: int = 0) -> Iterator[torch.Tensor]:
    for step in range(steps):
        yield rows(ROWS, 100 * seed + step).to(device)


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a parameter, gathered where ranks share it, which all of them do together."""
    own = parameter.detach()
    return (own.full_tensor() if isinstance(own, DTensor) else own).cpu().clone()


class Weights:
    """Parameters as they are now, by name, to tell later which of them a training has changed."""

    def __init__(self, model: nn.Module) -> None:
        self.before = {name: whole(p) for name, p in model.named_parameters()}

    def check(self, model: nn.Module, converted: int) -> None:
        """Asserts that a training changed what it trains, all of it, and nothing else.

        converted: the Float8Linears that the model has.
        """
        found = [m for m in model.modules() if isinstance(m, f8.Float8Linear)]
        assert len(found) == converted
        now = dict(model.named_parameters())
        assert now.keys() == self.before.keys()
        weights = {id(m.weight) for m in found}
        assert weights <= {id(p) for p in now.values()}
        after = {name: whole(p) for name, p in now.items()}
        assert all(after[name].shape == each.shape for name, each in self.before.items())
        for wanted, what in ((True, "unchanged"), (False, "changed though frozen")):
            wrong = [
                name
                for name, p in now.items()
                if p.requires_grad is wanted
                and torch.equal(after[name], self.before[name]) is wanted
            ]
            assert not wrong, f"{what}: {', '.join(wrong)}"


def check_losses(found: Iterable[float], bf16: Iterable[float], tolerance: float = 0.06) -> None:
    """Asserts that a training learns, and as bf16 does."""
    found, bf16 = list(found), list(bf16)
    assert len(found) == len(bf16)
    assert found[-1] < 0.85 * found[0], found
    for step, (one, other) in enumerate(zip(found, bf16, strict=True)):
        assert abs(one - other) < tolerance * other, (step, found, bf16)


def reset_accelerate() -> None:
    """Forgets accelerate's state of the process, which has the precision of its first Accelerator."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_")):
            del os.environ[name]


def fsdp2_plugin(layer: str, checkpointing: bool = False) -> Any:
    """Returns accelerate's FSDP2 with a unit for each layer of that class."""
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[layer],
        activation_checkpointing=checkpointing,
        cpu_ram_efficient_loading=False,
        state_dict_type="FULL_STATE_DICT",
    )


def give_fsdp2(accelerator: Any, plugin: Any) -> None:
    """Gives accelerate FSDP2 on a CPU, where it has none."""
    from accelerate.state import AcceleratorState, DistributedType

    if accelerator.device.type == "cpu":
        plugin.set_mixed_precision(accelerator.mixed_precision)
        AcceleratorState._shared_state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state["fsdp_plugin"] = plugin
    assert accelerator.is_fsdp2


def environment_of(rank: int, world: int) -> None:
    """Sets what torchrun sets, for a rank whose process group is there already."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        OMP_NUM_THREADS="1",
    )


def on_one_device(arguments: Any) -> Any:
    """Keeps the Trainer from DataParallel, which it takes where one process sees several GPUs."""
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1
    return arguments
