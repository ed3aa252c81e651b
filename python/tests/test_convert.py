"""Converting models: which layers, all or none, and what stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import float8.torch as f8
from float8.torch import Float8Linear, convert_to_float8_training


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(2)])
        self.head = nn.Linear(64, 48)


def names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Float8Linear)]


def test_all_linears_in_place() -> None:
    model = Model()
    parameters = dict(model.named_parameters())
    assert convert_to_float8_training(model) is model
    assert names(model) == ["first", "blocks.0.0", "blocks.1.0", "head"]
    assert all(parameters[name] is own for name, own in model.named_parameters())
    assert convert_to_float8_training(model, config="rowwise").first.recipe.name == "tensorwise"


def test_filter_sees_module_and_name() -> None:
    model = Model()
    seen = []

    def wanted(module: nn.Module, name: str) -> bool:
        seen.append((type(module), name))
        return "blocks" in name

    convert_to_float8_training(model, module_filter_fn=wanted)
    assert names(model) == ["blocks.0.0", "blocks.1.0"]
    assert seen == [(nn.Linear, n) for n in ("first", "head", "blocks.0.0", "blocks.1.0")]


def test_root_linear_is_returned() -> None:
    linear = nn.Linear(64, 64)
    converted = convert_to_float8_training(linear, config="rowwise")
    assert isinstance(converted, Float8Linear) and type(linear) is nn.Linear
    assert converted.weight is linear.weight
    assert convert_to_float8_training(linear, module_filter_fn=lambda *_: False) is linear


def test_failure_leaves_the_model() -> None:
    model = Model()
    model.blocks.append(nn.Linear(63, 64))
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=r"multiples of 16.*blocks\.2"):
        convert_to_float8_training(model)
    assert dict(model.named_modules()) == before and not names(model)
    del model.blocks[2]
    before = dict(model.named_modules())

    def fails(module: nn.Module, name: str) -> bool:
        if name == "blocks.1.0":
            raise KeyError(name)
        return True

    with pytest.raises(KeyError):
        convert_to_float8_training(model, module_filter_fn=fails)
    assert dict(model.named_modules()) == before and not names(model)


def test_shared_module_stays_shared() -> None:
    model = Model()
    model.blocks[1] = model.blocks[0]
    model.tied = model.first
    convert_to_float8_training(model)
    assert model.tied is model.first and isinstance(model.tied, Float8Linear)
    assert model.blocks[1][0] is model.blocks[0][0]


def test_tied_parameters_stay_tied() -> None:
    model = nn.Module()
    model.embedding = nn.Embedding(48, 64)
    model.head = nn.Linear(64, 48, bias=False)
    model.head.weight = model.embedding.weight
    convert_to_float8_training(model)
    assert model.head.weight is model.embedding.weight


def test_subclass_with_its_own_forward_is_left() -> None:
    class Lora(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    class Named(nn.Linear):
        pass

    model = nn.Sequential(Lora(64, 64), Named(64, 64), nn.MultiheadAttention(64, 4))
    convert_to_float8_training(model)
    assert names(model) == ["1", "2.out_proj"]


def test_hooks_and_mode_stay(device: str, config: Any) -> None:
    linear = nn.Linear(64, 64, device=device).eval()
    calls = []
    linear.register_forward_hook(lambda *_: calls.append(1))
    linear.note = "kept"
    model = nn.Sequential(linear)
    convert_to_float8_training(model, config=config())
    model(torch.randn(2, 64, device=device))
    assert calls and model[0].note == "kept" and not model[0].training


def test_meta_model() -> None:
    with torch.device("meta"):
        model = Model()
    convert_to_float8_training(model)
    assert model.head.weight.is_meta and isinstance(model.head, Float8Linear)


def test_pad_inner_dim(device: str, config: Any) -> None:
    linear = nn.Linear(60, 64, dtype=torch.bfloat16, device=device)
    model = convert_to_float8_training(nn.Sequential(linear), config=config(pad_inner_dim=True))
    x = torch.randn(8, 60, dtype=torch.bfloat16, device=device, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert torch.allclose(y, linear(x), atol=0.1)
    assert x.grad is not None and x.grad.shape == (8, 60)
    assert linear.weight.grad is not None and linear.weight.grad.shape == (64, 60)


def test_config_of_another_kind() -> None:
    with pytest.raises(TypeError, match="config is a int"):
        convert_to_float8_training(Model(), config=3)  # type: ignore[arg-type]


def test_config_names_the_options() -> None:
    model = convert_to_float8_training(Model(), config=f8.LinearConfig("rowwise", recompute=True))
    assert model.head.recompute and model.head.recipe.name == "rowwise"
    assert "recipe=rowwise" in repr(model)


def test_measured_verdicts() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict(
            {
                "big": nn.Linear(4096, 14336),
                "small": nn.Linear(64, 64),
                "head": nn.Linear(4096, 14336),
            }
        )
    found = f8.verdicts(model, "rowwise", 8192, names=["head"])
    assert [verdict.layer.name for verdict in found] == ["big", "small", "head"]
    convert_to_float8_training(model, module_filter_fn=f8.module_filter(found), config="rowwise")
    assert names(model) == ["big"]
