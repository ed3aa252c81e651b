"""accelerate: Accelerator(mixed_precision="fp8") over float8.torchao.install()."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import ranks
import real_training as training
import torch

import float8.torch as f8
from float8.torch import notices

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate import Accelerator
from accelerate.utils import AORecipeKwargs

STEPS = 6
LINEARS = 7 * training.LAYERS - 1  # accelerate leaves the first linear and the head as they are


@dataclasses.dataclass
class Case:
    """How a training runs. fp8: a recipe, "default" for accelerate's own config, or None for bf16."""

    fp8: str | None = None
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the config
    accumulate: int = 1
    checkpointing: bool = False
    cache: bool = False
    optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)  # arguments of AdamW
    plugin: Any = None

    def bf16(self) -> Case:
        return dataclasses.replace(self, fp8=None, fields={}, cache=False)


def accelerator_of(case: Case, device: str) -> Accelerator:
    training.reset_accelerate()
    handlers = []
    if case.fp8 == "default":
        handlers = [AORecipeKwargs()]
    elif case.fp8 is not None:
        handlers = [AORecipeKwargs(config=training.config(case.fp8, device, **case.fields))]
    return Accelerator(
        mixed_precision="bf16" if case.fp8 is None else "fp8",
        kwargs_handlers=handlers,
        gradient_accumulation_steps=case.accumulate,
        fsdp_plugin=case.plugin,
        cpu=device == "cpu",
    )


def prepared(accelerator: Accelerator, case: Case, device: str) -> tuple[Any, Any]:
    model = training.llama(device)
    if case.checkpointing:
        getattr(model, f"{training.checkpointing_name(model)}_enable")()
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.LEARNING_RATE, **case.optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    if case.cache:
        f8.cache_weight_casts(accelerator.unwrap_model(model), optimizer.optimizer)
    return model, optimizer


def steps(
    accelerator: Accelerator, model: Any, optimizer: Any, batches: Any, accumulate: int = 1
) -> list[float]:
    """accelerate's loop, as its documentation has it. Returns the losses."""
    losses = []
    for batch in batches:
        loss = 0.0
        for x in batch.chunk(accumulate):
            with accelerator.accumulate(model):
                own = model(input_ids=x, labels=x).loss
                accelerator.backward(own)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            loss += float(accelerator.reduce(own.detach(), "mean")) / accumulate
        losses.append(loss)
    return losses


def train(case: Case, device: str, seed: int = 0) -> list[float]:
    """Trains, checks all weights, and returns the losses."""
    accelerator = accelerator_of(case, device)
    model, optimizer = prepared(accelerator, case, device)
    weights = training.Weights(model)
    batches = training.batches(STEPS, device, seed)
    losses = steps(accelerator, model, optimizer, batches, case.accumulate)
    weights.check(model, LINEARS if case.fp8 else 0)
    return losses


def check(case: Case, device: str) -> None:
    training.check_losses(train(case, device), train(case.bf16(), device))


@pytest.mark.parametrize(
    "case",
    (
        Case("default"),
        Case("rowwise", optimizer={"foreach": True}),
        Case("tensorwise", {"pad_inner_dim": True}, optimizer={"fused": True}),
        Case("blockwise", accumulate=2, checkpointing=True),
        Case("rowwise", accumulate=2, checkpointing=True, cache=True),
    ),
    ids=("default", "rowwise", "tensorwise", "accumulation", "cached casts"),
)
def test_training(case: Case, device: str) -> None:
    check(case, device)


def test_delayed_scaling_is_synchronised_by_the_program(device: str) -> None:
    """accelerate calls no sync: a program adds it as a hook of the optimizer."""
    case = Case("delayed")
    accelerator = accelerator_of(case, device)
    model, optimizer = prepared(accelerator, case, device)
    optimizer.optimizer.register_step_pre_hook(
        lambda *_: f8.sync_float8_amax_and_scale_history(model)
    )
    weights = training.Weights(model)
    losses = steps(accelerator, model, optimizer, training.batches(STEPS, device))
    weights.check(model, LINEARS)
    training.check_losses(losses, train(case.bf16(), device))


def test_resume(tmp_path: Any, device: str) -> None:
    """save_state and load_state: the steps after it are those of a training that was not interrupted."""
    case = Case("rowwise")
    batches = list(training.batches(STEPS, device))
    accelerator = accelerator_of(case, device)
    model, optimizer = prepared(accelerator, case, device)
    steps(accelerator, model, optimizer, batches[:3])
    accelerator.save_state(str(tmp_path))
    expected = steps(accelerator, model, optimizer, batches[3:])
    accelerator = accelerator_of(case, device)
    model, optimizer = prepared(accelerator, case, device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(str(tmp_path))
    weights = training.Weights(model)
    found = steps(accelerator, model, optimizer, batches[3:])
    weights.check(model, LINEARS)
    assert found == pytest.approx(expected, rel=1e-2)


def test_saved_reloaded_and_generated(tmp_path: Any, device: str) -> None:
    """The files are a plain model's. A reloaded model that is converted again writes the same tokens."""
    from transformers import AutoModelForCausalLM

    import float8.torchao

    case = Case("rowwise")
    accelerator = accelerator_of(case, device)
    model, optimizer = prepared(accelerator, case, device)
    steps(accelerator, model, optimizer, training.batches(12, device))
    own = accelerator.unwrap_model(model, keep_fp32_wrapper=False).eval()
    own.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).to(device).eval()
    assert not any(isinstance(m, f8.Float8Linear) for m in plain.modules())
    saved, loaded = own.state_dict(), plain.state_dict()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)

    def write(model: Any) -> torch.Tensor:
        tokens: torch.Tensor = model.generate(
            training.rows(2, 7)[:, :8].to(device), max_new_tokens=8, do_sample=False, pad_token_id=0
        )
        return tokens

    bf16 = write(plain)
    names = {name for name, m in own.named_modules() if isinstance(m, f8.Float8Linear)}
    float8.torchao.convert_to_float8_training(
        plain,
        config=training.config("rowwise", device),
        module_filter_fn=lambda _, name: name in names,
    )
    assert torch.equal(write(own), write(plain))
    assert (write(own) == bf16).float().mean() > 0.7


def test_a_second_accelerator_that_takes_the_first_one_s_precision_is_warned_of(
    device: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(notices, "_told", set())
    train(Case(), device)
    os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"
    accelerator = Accelerator(cpu=device == "cpu")
    assert accelerator.mixed_precision == "bf16"
    model, optimizer = prepared(accelerator, Case(), device)
    with pytest.warns(UserWarning, match=r"PRECISION is fp8, but .*AcceleratorState._reset_state"):
        steps(accelerator, model, optimizer, training.batches(1, device))


# Trainings of two ranks, which run one after another in the same processes: to start these takes longer.

GATHERS = {"enable_fsdp_float8_all_gather": True}
DDP = (Case("default"),)
FSDP2 = (
    Case("rowwise"),
    Case("default"),
    Case("default", optimizer={"fused": True}),
    Case("tensorwise", GATHERS, optimizer={"foreach": True}, accumulate=2, checkpointing=True),
)


@dataclasses.dataclass
class Result:
    losses: list[float]
    bf16: list[float]
    state: dict[str, list[str]]  # the types in the full state dict, of fp8 and bf16
    wrong: str  # what Weights.check has to say


def train_rank(case: Case, rank: int) -> tuple[list[float], list[str], str]:
    accelerator = accelerator_of(case, ranks.device)
    if case.plugin is not None:
        training.give_fsdp2(accelerator, case.plugin)
    model, optimizer = prepared(accelerator, case, ranks.device)
    weights = training.Weights(model)
    batches = training.batches(STEPS, ranks.device, seed=rank)
    losses = steps(accelerator, model, optimizer, batches, case.accumulate)
    kinds = sorted({type(each).__name__ for each in accelerator.get_state_dict(model).values()})
    try:
        weights.check(model, LINEARS if case.fp8 else 0)
    except AssertionError as error:
        return losses, kinds, f"{case.fp8}: {error}"
    return losses, kinds, ""


def train_ranks(mesh: Any, rank: int, world: int, cases: list[Case]) -> list[Result]:
    training.environment_of(rank, world)
    results = []
    with training.installed(ranks.device):
        for case in cases:
            losses, kinds, wrong = train_rank(case, rank)
            bf16, plain, also = train_rank(case.bf16(), rank)
            results.append(Result(losses, bf16, {"fp8": kinds, "bf16": plain}, wrong + also))
    return results


@pytest.fixture(scope="module")
def rank_results(two_devices: str, tmp_path_factory: Any) -> Any:
    sharded = [
        dataclasses.replace(
            case,
            plugin=training.fsdp2_plugin("LlamaDecoderLayer", case.checkpointing),
            checkpointing=False,
        )
        for case in FSDP2
    ]
    folder = tmp_path_factory.mktemp("accelerate")
    return ranks.spawn(train_ranks, 2, folder, [*DDP, *sharded], device=two_devices)


@pytest.mark.parametrize(
    "case",
    range(len(DDP) + len(FSDP2)),
    ids=("ddp", "fsdp2", "fsdp2 default", "fsdp2 fused", "fsdp2 accumulation"),
)
def test_two_ranks(case: int, rank_results: Any) -> None:
    for each in (own[case] for own in rank_results):
        assert not each.wrong
        assert each.state["fp8"] == each.state["bf16"]
        training.check_losses(each.losses, each.bf16)
