"""peft's LoRA, before and after the conversion, by hand and by the Trainer."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import real_training as training
import torch

import float8.torch as f8
import float8.torchao

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PrinterCallback, Trainer, TrainingArguments

STEPS = 8
BASE = 7 * training.LAYERS  # the linears of the layers
TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]
ADAPTERS = 2 * len(TARGETS) * training.LAYERS


def _batches(device: str) -> list[torch.Tensor]:
    """One batch over and over, since adapters of a base that knows nothing learn little else."""
    return list(training.batches(1, device)) * STEPS


def base_model(device: str) -> Any:
    """A base in bf16, as the weights of language models are."""
    return training.llama(device).to(torch.bfloat16)


def convert(model: Any, device: str, recipe: str, adapters: bool = False) -> None:
    float8.torchao.convert_to_float8_training(
        model,
        config=training.config(recipe, device),
        module_filter_fn=lambda _, name: (
            "lm_head" not in name and (adapters or "lora_" not in name)
        ),
    )


def with_lora(model: Any) -> Any:
    torch.manual_seed(1)
    options = LoraConfig(r=16, lora_alpha=64, target_modules=TARGETS, task_type="CAUSAL_LM")
    wrapped = get_peft_model(model, options)
    assert all(
        p.requires_grad == ("lora_" in name) and (not p.requires_grad or p.dtype == torch.float32)
        for name, p in wrapped.named_parameters()
    )
    return wrapped


def train(model: Any, device: str, converted: int) -> list[float]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=4 * training.LEARNING_RATE)
    weights = training.Weights(model)
    losses = []
    for x in _batches(device):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    weights.check(model, converted)
    return losses


def logits(model: Any, device: str) -> torch.Tensor:
    model.eval()
    with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
        found: torch.Tensor = model(input_ids=training.rows(2, 9).to(device)).logits.float()
    return found


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"))
@pytest.mark.parametrize("order", ("converted first", "adapted first", "adapters too"))
def test_lora(order: str, recipe: str, device: str) -> None:
    model = base_model(device)
    if order == "converted first":
        convert(model, device, recipe)
    model = with_lora(model)
    if order != "converted first":
        convert(model, device, recipe, adapters=order == "adapters too")
    converted = BASE + (ADAPTERS if order == "adapters too" else 0)
    losses = train(model, device, converted)
    bf16 = train(with_lora(base_model(device)), device, 0)
    training.check_losses(losses, bf16)


def test_merged_saved_and_reloaded(tmp_path: Any, device: str) -> None:
    model = base_model(device)
    base = copy.deepcopy(model)
    convert(model, device, "rowwise")
    model = with_lora(model)
    train(model, device, BASE)
    expected = logits(model, device)
    model.save_pretrained(tmp_path)
    convert(base, device, "rowwise")
    reloaded = PeftModel.from_pretrained(base, tmp_path)
    assert torch.equal(logits(reloaded, device), expected)
    merged = reloaded.merge_and_unload()
    assert sum(isinstance(m, f8.Float8Linear) for m in merged.modules()) == BASE
    # The merged weights are rounded to bf16 and then cast to fp8, which is as coarse as e4m3 is.
    assert difference(logits(merged, device), expected) < 0.2


def test_trainer(tmp_path: Any, device: str) -> None:
    """The Trainer converts the adapters too, but the first linear and the last one."""

    def run(fp8: bool) -> list[float]:
        training.reset_accelerate()
        if fp8:
            os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"
        model = with_lora(base_model(device))
        rows = [row for batch in _batches("cpu") for row in batch]
        trainer = Trainer(
            model=model,
            args=training.on_one_device(
                TrainingArguments(
                    output_dir=str(tmp_path),
                    max_steps=STEPS,
                    per_device_train_batch_size=training.ROWS,
                    learning_rate=4 * training.LEARNING_RATE,
                    lr_scheduler_type="constant",
                    logging_steps=1,
                    save_strategy="no",
                    report_to=[],
                    disable_tqdm=True,
                    use_cpu=device == "cpu",
                    bf16=not fp8,
                    train_sampling_strategy="sequential",
                )
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        )
        trainer.remove_callback(PrinterCallback)
        weights = training.Weights(model)
        trainer.train()
        weights.check(model, BASE + ADAPTERS - 1 if fp8 else 0)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    training.check_losses(run(True), run(False))
