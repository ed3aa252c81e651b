"""Delayed scaling of linears that have no scales yet: they scale dynamically until they have."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
from reference import same
from torch import nn

import float8.torch as f8


def low_rank(device: str, config: Any, recipe: str) -> Any:
    """LoRA's A and B: B begins with zeros, so A gets no gradient in the first step."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(64, 16, bias=False), nn.Linear(16, 64, bias=False)).to(device)
    nn.init.zeros_(model[1].weight)
    return f8.convert_to_float8_training(model, config=config(recipe))


def test_weights_that_begin_with_zeros(device: str, config: Any) -> None:
    model, plain = low_rank(device, config, "delayed"), low_rank(device, config, "tensorwise")
    x = torch.randn(32, 64, device=device)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, plain)]
    without = []
    for _ in range(8):
        results = []
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            leaf = x.clone().requires_grad_()
            y = each(leaf)
            (y - x).square().sum().backward()
            f8.sync_float8_amax_and_scale_history(each)
            optimizer.step()
            results.append([y, leaf.grad, *(p.grad for p in each.parameters())])
            optimizer.zero_grad()
        without.append(model.float8_scales.first)
        assert same(*results)
        plain.load_state_dict({k: v for k, v in model.state_dict().items() if "scales" not in k})
    # B's weight is 0 in step 0, and then grows, as the gradient that comes through it does.
    assert without == [[0, 1]] * 8
    for _ in range(16):
        model(x).sum().backward()
        f8.sync_float8_amax_and_scale_history(model)
    assert model.float8_scales.first == []


def test_a_weight_that_stays_zero(device: str, config: Any) -> None:
    model = low_rank(device, config, "delayed")
    x = torch.randn(32, 64, device=device)
    for _ in range(40):
        model(x).sum().backward()
        f8.sync_float8_amax_and_scale_history(model)
        assert model.float8_scales.first == [0, 1]
    with torch.no_grad():
        model[1].weight.fill_(1e-3)
    for _ in range(16):  # the host looks at every 16th step by now
        model(x).sum().backward()
        f8.sync_float8_amax_and_scale_history(model)
    assert model.float8_scales.first == []


def test_a_layer_that_is_called_later(device: str, config: Any) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(device)
    f8.convert_to_float8_training(model, config=config("delayed"))
    tensorwise = f8.convert_to_float8_training(
        nn.Sequential(*copy.deepcopy(list(model[:2]))), config=config("tensorwise")
    )
    x = 1e-4 * torch.randn(32, 64, device=device)
    for _ in range(3):
        model[0](x).sum().backward()
        f8.sync_float8_amax_and_scale_history(model)
        assert model.float8_scales.first == [1]
    assert torch.equal(model[1](x), tensorwise[1](x))


@pytest.mark.parametrize("steps", (0, 1))
@pytest.mark.parametrize("saved", (False, True))
def test_export(saved: bool, steps: int, device: str, mlp: Any, config: Any) -> None:
    """An exported model gives the y that the eager one gave, also before its first sync."""
    model = f8.convert_to_float8_training(mlp(torch.float32), config=config("delayed")).eval()
    x = 100 * torch.randn(32, 64, device=device)
    for _ in range(steps):
        model(x).sum().backward()
        f8.sync_float8_amax_and_scale_history(model)
    with torch.no_grad():
        expected = model(2 * x)
        program = torch.export.export(model, (x,))
        if saved:
            buffer = io.BytesIO()
            torch.export.save(program, buffer)
            buffer.seek(0)
            program = torch.export.load(buffer)
        assert torch.equal(program.module()(2 * x), expected)


@pytest.mark.parametrize("moved", (False, True))
def test_memory_of_a_state_that_is_gone(moved: bool, device: str, mlp: Any, config: Any) -> None:
    """What lies in the memory of a state without scales, once that is gone, is not without scales."""
    trained, untrained = (
        f8.convert_to_float8_training(mlp(torch.float32), config=config("delayed"))
        for _ in range(2)
    )
    x = 100 * torch.randn(32, 64, device=device)
    trained(x).sum().backward()
    f8.sync_float8_amax_and_scale_history(trained)
    expected = trained(2 * x)
    memory = untrained.float8_scales.state
    memory.copy_(trained.float8_scales.state)
    for layer in (trained[0], trained[2]):
        layer._scale_view = memory[16 * layer._scale_index :][:16]
    assert not torch.equal(trained(2 * x), expected)
    if moved:
        untrained.to("meta")
    del untrained
    gc.collect()
    assert torch.equal(trained(2 * x), expected)


class TestMetaModels:
    """Weights of a model on the meta device, assigned by load_state_dict; the state follows."""

    @staticmethod
    def meta(config: Any) -> Any:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        return f8.convert_to_float8_training(model, config=config("delayed"))

    @staticmethod
    def real(device: str) -> nn.Sequential:
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(device)

    @staticmethod
    def steps(model: Any, device: str) -> list[torch.Tensor]:
        torch.manual_seed(5)
        results = []
        for scale in (1, 3, 2):
            y = model(scale * torch.randn(32, 64, device=device))
            y.sum().backward()
            f8.sync_float8_amax_and_scale_history(model)
            results.append(y.detach())
        return results

    @pytest.mark.parametrize("how", ("assign", "parameters"))
    def test_plain_checkpoint(self, how: str, device: str, config: Any) -> None:
        plain, model = self.real(device), self.meta(config)
        if how == "assign":
            result = model.load_state_dict(copy.deepcopy(plain.state_dict()), assign=True)
            assert not result.missing_keys and not result.unexpected_keys
            assert model.float8_scales.state.device.type == device
        else:  # as low_cpu_mem_usage does, one parameter after the other
            for layer, source in zip(model[:2], copy.deepcopy(plain), strict=True):
                layer.weight, layer.bias = source.weight, source.bias
        eager = f8.convert_to_float8_training(plain, config=config("delayed"))
        assert same(self.steps(model, device), self.steps(eager, device))
        assert torch.equal(model.float8_scales.state, eager.float8_scales.state)
        saved = model.state_dict()["float8_scales.state"]
        assert torch.equal(saved, model.float8_scales.state)

    def test_checkpoint_with_scales(self, device: str, config: Any) -> None:
        trained = f8.convert_to_float8_training(self.real(device), config=config("delayed"))
        self.steps(trained, device)
        model = self.meta(config)
        model.load_state_dict(copy.deepcopy(trained.state_dict()), assign=True)
        assert model.float8_scales.first == []
        assert same(self.steps(model, device), self.steps(trained, device))

    def test_after_a_step(self, device: str, config: Any) -> None:
        """Weights that are assigned again leave a state that is there."""
        trained = f8.convert_to_float8_training(self.real(device), config=config("delayed"))
        model = self.meta(config)
        model.load_state_dict(copy.deepcopy(trained.state_dict()), assign=True)
        self.steps(model, device)
        model.load_state_dict(copy.deepcopy(trained.state_dict()), assign=True)
        assert model.float8_scales.first == [0, 1]
        assert same(self.steps(model, device), self.steps(trained, device))
