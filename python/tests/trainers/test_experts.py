"""Mixtures of experts in fp8 with float8.torch.AdamW: accelerate, the Trainer and Lightning; and peft over experts."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import ranks
import real_training as training
import torch
from torch import nn

import float8.torch as f8
from float8.torch import _ops

pytest.importorskip("transformers")

STEPS, EXPERTS = 4, 4
LINEARS = 4 * training.LAYERS  # of attention
WEIGHTS = 2 * training.LAYERS  # of experts


def mixture(device: str) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = MixtralConfig(
        vocab_size=training.VOCABULARY,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=training.LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=training.TOKENS,
        use_cache=False,
    )
    return MixtralForCausalLM(sizes).to(device)


def convert(model: Any, device: str, recipe: str = "rowwise", gather: bool = False) -> Any:
    return f8.convert_to_float8_training(
        model,
        config=f8.LinearConfig(
            recipe, emulate=device == "cpu", enable_fsdp_float8_all_gather=gather
        ),
        module_filter_fn=lambda _, name: "lm_head" not in name and "lora_" not in name,
        experts=True,
    )


class Run:
    """A model in fp8 whose copies are kept, its optimizer, and what is right behind a training."""

    def __init__(self, device: str, monkeypatch: Any) -> None:
        self.model = convert(mixture(device), device)
        f8.cache_weight_casts(self.model, dtype=torch.bfloat16)
        self.optimizer = f8.AdamW(self.model.parameters(), lr=training.LEARNING_RATE)
        self._weights = training.Weights(self.model)
        self._updated: list[torch.Tensor] = []
        adamw = _ops.adamw

        def noted(params: list[torch.Tensor], *rest: Any) -> None:
            self._updated += params
            adamw(params, *rest)

        monkeypatch.setattr(_ops, "adamw", noted)

    def check(self, losses: list[float]) -> None:
        """Every weight has changed, those of all experts too, by the kernel that leaves what casts need."""
        self._weights.check(self.model, LINEARS)
        of_experts = [(n, p) for n, p in self.model.named_parameters() if p.dim() == 3]
        assert len(of_experts) == WEIGHTS
        for name, p in of_experts:
            before = self._weights.before[name]
            changed = (p.detach().cpu() != before).flatten(1).any(1)
            assert changed.all(), (name, changed)
        assert len(self._updated) == STEPS * (LINEARS + WEIGHTS)
        assert len(losses) == STEPS and losses[-1] < losses[0], losses


def test_accelerate(device: str, monkeypatch: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    training.reset_accelerate()
    run = Run(device, monkeypatch)
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=device == "cpu")
    model, optimizer = accelerator.prepare(run.model, run.optimizer)
    losses = []
    for x in training.batches(STEPS, device):
        loss = model(input_ids=x, labels=x).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    run.check(losses)


@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_trainer(device: str, monkeypatch: Any, tmp_path: Any) -> None:
    pytest.importorskip("accelerate")
    from transformers import PrinterCallback, Trainer, TrainingArguments

    training.reset_accelerate()
    run = Run(device, monkeypatch)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=training.ROWS,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=device == "cpu",
        bf16=True,
    )
    rows = [row for batch in training.batches(STEPS, "cpu") for row in batch]
    trainer = Trainer(
        model=run.model,
        args=training.on_one_device(arguments),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        optimizers=(run.optimizer, None),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    run.check([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
def test_lightning(device: str, monkeypatch: Any) -> None:
    lightning = pytest.importorskip("lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    run = Run(device, monkeypatch)
    losses: list[float] = []

    class Mixture(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model: nn.Module = run.model

        def configure_optimizers(self) -> Any:
            return run.optimizer

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
            losses.append(float(loss.detach()))
            return loss

    trainer = lightning.Trainer(
        accelerator="cpu" if device == "cpu" else "gpu",
        devices=1,
        max_steps=STEPS,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.cat(list(training.batches(STEPS, "cpu")))
    trainer.fit(Mixture(), torch.utils.data.DataLoader(rows, batch_size=training.ROWS))
    run.check(losses)


def _sharded(mesh: Any, rank: int, world: int) -> None:
    """accelerate's loop with FSDP2: fp8 gathers of linears and experts have the bits of others."""
    import accelerate

    training.environment_of(rank, world)
    found, after = [], []
    for gather in (True, False):
        training.reset_accelerate()
        plugin = training.fsdp2_plugin("MixtralDecoderLayer")
        on_cpu = ranks.device == "cpu"
        accelerator = accelerate.Accelerator(mixed_precision="bf16", fsdp_plugin=plugin, cpu=on_cpu)
        training.give_fsdp2(accelerator, plugin)
        model = convert(mixture(ranks.device), ranks.device, "delayed", gather)
        f8.sync_at_optimizer_steps(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=training.LEARNING_RATE)
        model, optimizer = accelerator.prepare(model, optimizer)
        weights = training.Weights(model)
        losses = []
        for x in training.batches(STEPS, ranks.device, seed=rank):
            loss = model(input_ids=x, labels=x).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        weights.check(model, LINEARS)
        own = dict(model.named_parameters())
        experts = {name: training.whole(p) for name, p in own.items() if p.dim() == 3}
        assert len(experts) == WEIGHTS
        for name, p in experts.items():
            assert (p != weights.before[name]).flatten(1).any(1).all(), name
        of_experts = [m for m in model.modules() if getattr(m, "expert_linears", ())]
        gathers = [each._weight_gather for m in of_experts for each in m.expert_linears]
        assert len(gathers) == WEIGHTS and all((each is not None) == gather for each in gathers)
        found.append(losses)
        after.append({name: training.whole(p) for name, p in own.items()})
    assert found[0] == found[1] and found[0][-1] < found[0][0], found
    assert all(torch.equal(p, after[1][name]) for name, p in after[0].items())


def test_accelerate_with_fsdp2(two_devices: str, tmp_path: Any) -> None:
    pytest.importorskip("accelerate")
    ranks.spawn(_sharded, 2, tmp_path, device=two_devices)


@pytest.mark.parametrize("order", ("converted first", "adapted first"))
def test_lora_of_experts(order: str, device: str) -> None:
    """peft's target_parameters adds to the weights of experts in each forward; these are cast in it."""
    peft = pytest.importorskip("peft")
    model = mixture(device)
    names = [name for name, p in model.named_parameters() if p.dim() == 3]
    options = peft.LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules=[],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    if order == "converted first":
        convert(model, device)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, options)
    if order != "converted first":
        convert(model, device)
    in_fp8 = [m for m in model.modules() if type(m).__name__ == "Float8MixtralExperts"]
    assert len(names) == WEIGHTS and len(in_fp8) == training.LAYERS
    adapters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    assert len(adapters) == 2 * WEIGHTS and all("lora_" in n for n, _ in adapters)
    optimizer = torch.optim.AdamW([p for _, p in adapters], lr=4 * training.LEARNING_RATE)
    weights = training.Weights(model)
    losses = []
    for x in list(training.batches(1, device)) * STEPS:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    weights.check(model, LINEARS)
    assert losses[-1] < losses[0], losses
