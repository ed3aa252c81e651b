"""The Hugging Face Trainer, whose fp8 is accelerate's, chosen by the environment."""

from __future__ import annotations

import os
import pathlib
import warnings
from typing import Any

import pytest
import ranks
import real_training as training
import torch

import float8.torch as f8
from float8.torch import notices

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from transformers import PrinterCallback, Trainer, TrainingArguments

STEPS = 6
LINEARS = 7 * training.LAYERS - 1  # accelerate leaves the first linear and the head as they are
ENVIRONMENT = {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "AO"}
WITHOUT_GATHERS = {**ENVIRONMENT, "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "0"}

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory")


def dataset(steps: int = STEPS) -> list[dict[str, torch.Tensor]]:
    rows = [row for batch in training.batches(steps, "cpu") for row in batch]
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(model: Any, folder: Any, device: str, **arguments: Any) -> Trainer:
    """Returns a Trainer in the precision that the environment asks for, else in bf16."""
    fields: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": training.ROWS,
        "learning_rate": training.LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": device == "cpu",
        "bf16": "ACCELERATE_MIXED_PRECISION" not in os.environ,
        "train_sampling_strategy": "sequential",
        **arguments,
    }
    own = training.on_one_device(TrainingArguments(**fields))
    made = Trainer(model=model, args=own, train_dataset=dataset())
    made.remove_callback(PrinterCallback)
    return made


def losses(of: Trainer) -> list[float]:
    return [entry["loss"] for entry in of.state.log_history if "loss" in entry]


def train(
    environment: dict[str, str],
    folder: Any,
    device: str,
    converted: int = LINEARS,
    kind: str = "Llama",
    **arguments: Any,
) -> list[float]:
    """Trains, checks all weights, and returns the losses."""
    training.reset_accelerate()
    os.environ.update(environment)
    model = training.llama(device, kind=kind)
    own = trainer(model, folder, device, **arguments)
    weights = training.Weights(model)
    own.train()
    weights.check(model, converted if environment else 0)
    return losses(own)


@pytest.mark.parametrize(
    ("environment", "arguments"),
    (
        (ENVIRONMENT, {}),
        (WITHOUT_GATHERS, {"optim": "adamw_torch"}),
        (
            ENVIRONMENT,
            {
                "gradient_accumulation_steps": 2,
                "per_device_train_batch_size": training.ROWS // 2,
                training.checkpointing_name(TrainingArguments): True,
            },
        ),
    ),
    ids=("default", "without fp8 gathers", "accumulation"),
)
def test_training(environment: Any, arguments: Any, tmp_path: Any, device: str) -> None:
    found = train(environment, tmp_path, device, **arguments)
    training.check_losses(found, train({}, tmp_path, device, **arguments))


@pytest.mark.parametrize("recipe", (None, "delayed"))
def test_fused_mlps(recipe: str | None, tmp_path: Any, device: str, caplog: Any) -> None:
    """Also of delayed scaling, whose sync the Trainer knows nothing of."""
    caplog.set_level("INFO", logger="float8.torchao")
    with training.installed(device, recipe=recipe, fuse=True):
        found = train(ENVIRONMENT, tmp_path, device)
    assert f"fused {training.LAYERS} MLPs of LlamaForCausalLM" in caplog.text
    training.check_losses(found, train({}, tmp_path, device))


def test_fused_mlps_in_which_one_linear_makes_gate_and_up(
    tmp_path: Any, device: str, caplog: Any
) -> None:
    caplog.set_level("INFO", logger="float8.torchao")
    with training.installed(device, recipe="rowwise", fuse=True):
        found = train(ENVIRONMENT, tmp_path, device, 4 * training.LAYERS - 1, "Phi3", max_steps=9)
    assert f"fused {training.LAYERS} MLPs of Phi3ForCausalLM" in caplog.text
    training.check_losses(found, train({}, tmp_path, device, kind="Phi3", max_steps=9))


def test_a_model_that_the_program_converts(tmp_path: Any, device: str) -> None:
    """For another recipe than accelerate's default; the Trainer itself trains in bf16."""
    training.reset_accelerate()
    model = training.llama(device)
    f8.convert_to_float8_training(
        model,
        config=training.config("rowwise", device),
        module_filter_fn=lambda _, name: name != "lm_head",
    )
    own = trainer(model, tmp_path, device)
    weights = training.Weights(model)
    own.train()
    weights.check(model, LINEARS + 1)
    training.check_losses(losses(own), train({}, tmp_path, device))


def test_resume(tmp_path: Any, device: str) -> None:
    """The steps after a checkpoint are those of a training that was not interrupted."""
    saving = {"save_strategy": "steps", "save_steps": 3}
    expected = train(ENVIRONMENT, tmp_path, device, **saving)
    training.reset_accelerate()
    os.environ.update(ENVIRONMENT)
    model = training.llama(device, seed=1)
    own = trainer(model, tmp_path / "resumed", device)
    weights = training.Weights(model)
    own.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    weights.check(model, LINEARS)
    assert losses(own)[-3:] == pytest.approx(expected[3:], rel=1e-2)


def test_saved_and_reloaded(tmp_path: Any, device: str) -> None:
    from transformers import AutoModelForCausalLM

    training.reset_accelerate()
    os.environ.update(ENVIRONMENT)
    own = trainer(training.llama(device), tmp_path, device)
    own.train()
    own.save_model()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).to(device)
    assert not any(isinstance(m, f8.Float8Linear) for m in plain.modules())
    saved, loaded = own.model.state_dict(), plain.state_dict()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


def test_fp8_that_is_asked_for_and_not_taken_is_warned_of(
    tmp_path: Any, device: str, monkeypatch: Any
) -> None:
    """The Trainer reads the environment when its TrainingArguments are made, and not later."""
    monkeypatch.setattr(notices, "_told", set())
    train({}, tmp_path, device, max_steps=1)
    own = trainer(training.llama(device), tmp_path, device, max_steps=2, bf16=False)
    os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"
    with pytest.warns(UserWarning, match="PRECISION is fp8, but no model was converted") as found:
        own.train()
    assert len([each for each in found if "PRECISION is fp8" in str(each.message)]) == 1


# Trainings of two ranks.


def train_ranks(mesh: Any, rank: int, world: int, folder: Any) -> list[list[float]]:
    """Trains by DDP, which the Trainer takes, and by FSDP2 on GPUs: fp8 and then bf16."""
    training.environment_of(rank, world)
    found = []
    ways: list[dict[str, Any]] = [{}]
    if ranks.device == "cuda":
        sharding = {
            "version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "cpu_ram_efficient_loading": False,
        }
        ways.append({"fsdp": True, "fsdp_config": sharding})
    with training.installed(ranks.device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for way in ways:
            for environment in (ENVIRONMENT, {}):
                found.append(train(environment, folder, ranks.device, **way))
    return found


def test_two_ranks(tmp_path: pathlib.Path, two_devices: str) -> None:
    found = ranks.spawn(train_ranks, 2, tmp_path, tmp_path, device=two_devices)[0]
    for fp8, bf16 in zip(found[::2], found[1::2], strict=True):
        training.check_losses(fp8, bf16)


def test_trains_experts(device: str, tmp_path: pathlib.Path) -> None:
    """Of a mixture whose linears and experts were converted before, in autocast's type."""
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": training.VOCABULARY}
    found = []
    for fp8 in (False, True):
        training.reset_accelerate()
        torch.manual_seed(0)
        config = transformers.MixtralConfig(**sizes, **heads, **experts)
        model: Any = transformers.MixtralForCausalLM(config).to(device)
        if fp8:
            own = f8.LinearConfig("rowwise", emulate=device == "cpu")
            f8.convert_to_float8_training(model, config=own, experts=True)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        of_model = trainer(model, tmp_path, device, gradient_accumulation_steps=1, bf16=True)
        of_model.train()
        for name, p in model.named_parameters():
            assert not torch.equal(p, before[name]), name
        found.append(losses(of_model))
    training.check_losses(found[1], found[0])
    of_model.save_model(str(tmp_path / "saved"))
    again = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "saved")
    for name, p in again.state_dict().items():
        assert torch.equal(p.to(device), model.state_dict()[name]), name
