"""Lightning: a module that converts in configure_model, on one device and under FSDP2."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import ranks
import real_training as training
import torch

import float8.torch as f8
import float8.torchao

pytest.importorskip("transformers")
pytest.importorskip("lightning")

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy

STEPS = 6
LINEARS = 7 * training.LAYERS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")


class Llama(lightning.LightningModule):
    """A Llama in fp8, or in bf16 with recipe None."""

    def __init__(self, device: str, recipe: str | None, fields: Any, optimizer: Any) -> None:
        super().__init__()
        self.device_kind, self.recipe, self.fields, self.options = device, recipe, fields, optimizer
        self.precomputes = False
        self.model: Any = None
        self.losses: list[float] = []
        self.weights: Any = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        self.model = training.llama(self.device_kind)
        if self.recipe is not None:
            float8.torchao.convert_to_float8_training(
                self.model,
                config=training.config(self.recipe, self.device_kind, **self.fields),
                module_filter_fn=lambda _, name: name != "lm_head",
            )
        if self.device_mesh is not None:
            from torch.distributed.fsdp import fully_shard

            mesh = self.device_mesh["data_parallel"]
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def configure_optimizers(self) -> Any:
        options = {"lr": training.LEARNING_RATE, **self.options}
        optimizer = torch.optim.AdamW(self.parameters(), **options)
        if self.precomputes:
            optimizer.register_step_post_hook(
                lambda *_: f8.precompute_float8_dynamic_scale_for_fsdp(self)
            )
        return optimizer

    def on_train_start(self) -> None:
        self.weights = training.Weights(self)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def on_train_end(self) -> None:
        self.weights.check(self, LINEARS if self.recipe else 0)


def trainer(device: str, **options: Any) -> lightning.Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return lightning.Trainer(
        **{
            "accelerator": "cpu" if device == "cpu" else "gpu",
            "devices": 1,
            "max_steps": STEPS,
            "precision": "bf16-mixed",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )


def loader(batch_size: int = training.ROWS, rank: int = 0) -> Any:
    rows = torch.cat(list(training.batches(STEPS, "cpu", seed=rank)))
    return torch.utils.data.DataLoader(rows, batch_size=batch_size)


def train(
    device: str,
    recipe: str | None,
    *,
    fields: Any = None,
    optimizer: Any = None,
    accumulate: int = 1,
    rank: int = 0,
    precomputes: bool = False,
    **options: Any,
) -> list[float]:
    """Trains, which checks all weights at its end, and returns the losses."""
    model = Llama(device, recipe, fields or {}, optimizer or {})
    model.precomputes = precomputes
    own = trainer(device, accumulate_grad_batches=accumulate, **options)
    own.fit(model, loader(training.ROWS // accumulate, rank))
    assert len(model.losses) == accumulate * STEPS
    return model.losses


@pytest.mark.parametrize(
    ("recipe", "options"),
    (
        ("tensorwise", {"optimizer": {"fused": True}}),
        ("rowwise", {"optimizer": {"foreach": True}, "gradient_clip_val": 1.0}),
        ("blockwise", {"accumulate": 2}),
    ),
)
def test_training(recipe: str, options: Any, device: str) -> None:
    training.check_losses(train(device, recipe, **options), train(device, None, **options))


def test_resume(tmp_path: Any, device: str) -> None:
    """The steps after a checkpoint are those of a training that was not interrupted.

    All batches are the same, since Lightning begins an epoch anew.
    """
    same = torch.utils.data.DataLoader(training.rows(training.ROWS).repeat(STEPS, 1), training.ROWS)
    whole = Llama(device, "rowwise", {}, {})
    callback = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    trainer(device, enable_checkpointing=True, callbacks=[callback]).fit(whole, same)
    resumed = Llama(device, "rowwise", {}, {})
    trainer(device).fit(resumed, same, ckpt_path=str(tmp_path / "step=3.ckpt"))
    assert resumed.losses == pytest.approx(whole.losses[3:], rel=1e-2)


# Trainings of two ranks.

GATHERS = {"enable_fsdp_float8_all_gather": True}
CASES: tuple[dict[str, Any], ...] = (
    {"recipe": "rowwise"},
    {"recipe": "tensorwise", "fields": GATHERS},
    {"recipe": "tensorwise", "fields": GATHERS, "precomputes": True},
    {
        "recipe": "tensorwise",
        "fields": GATHERS,
        "optimizer": {"fused": True},
        "accumulate": 2,
    },
)


def train_ranks(mesh: Any, rank: int, world: int) -> list[list[float]]:
    """Runs the cases by FSDP2, each in fp8 and in bf16. Lightning itself calls no precompute."""
    training.environment_of(rank, world)
    found = []
    with training.installed(ranks.device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in CASES:
            for own in (case, {**case, "recipe": None, "fields": {}, "precomputes": False}):
                strategy = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
                losses = train(
                    ranks.device,
                    rank=rank,
                    devices=world,
                    strategy=strategy,
                    use_distributed_sampler=False,
                    **own,
                )
                found.append(losses)
    return found


def test_fsdp2(tmp_path: Any, two_devices: str) -> None:
    for found in ranks.spawn(train_ranks, 2, tmp_path, device=two_devices):
        for fp8, bf16 in zip(found[::2], found[1::2], strict=True):
            training.check_losses(fp8, bf16)
