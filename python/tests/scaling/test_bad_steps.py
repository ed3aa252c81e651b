"""Steps that are not finite under delayed scaling: each costs itself alone, in any training loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import float8.torch as f8

STEPS = 12
BAD = 3


def model_of(depth: int, device: str, dtype: torch.dtype) -> nn.Sequential:
    """Layers without a bias: the gradient of one does not show what a cast hides."""
    torch.manual_seed(depth)
    layers: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(32, 32, bias=False)
        nn.init.orthogonal_(linear.weight, gain=1.2)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(device, dtype)


class Training:
    """A model, its optimizer, and what became of each step."""

    def __init__(self, recipe: str, depth: int, device: str, config: Any, **fields: Any) -> None:
        dtype = fields.pop("dtype", torch.bfloat16)
        self.model = model_of(depth, device, dtype)
        f8.convert_to_float8_training(self.model, config=config(recipe, **fields))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.losses: list[float] = []
        self.skipped: list[int] = []
        self.device = device

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def run(self, step: Callable[[Training, int, torch.Tensor], None], bad: str) -> None:
        torch.manual_seed(7)
        before = self.weights()
        for i in range(STEPS):
            x = torch.randn(16, 32, device=self.device)
            if bad == "x" and i == BAD:
                x[0, 0] = float("nan")
            step(self, i, x)
            self.optimizer.zero_grad()
            if i == BAD + 1:
                before = self.weights()
        for weight, old in zip(self.weights(), before, strict=True):
            assert torch.isfinite(weight).all() and not torch.equal(weight, old)

    def loss(self, i: int, x: torch.Tensor, bad: str) -> torch.Tensor:
        y = self.model(x.to(next(self.model.parameters()).dtype))
        loss = (y.float() - x.roll(1, 1)).square().mean()
        if bad == "loss" and i == BAD:
            loss = loss * float("inf")
        self.losses.append(loss.item())
        return loss


def clipping(bad: str) -> Callable[[Training, int, torch.Tensor], None]:
    """A step is skipped where the norm of all gradients is not finite."""

    def step(t: Training, i: int, x: torch.Tensor) -> None:
        t.loss(i, x, bad).backward()
        f8.sync_float8_amax_and_scale_history(t.model)
        norm = torch.nn.utils.clip_grad_norm_(t.model.parameters(), 1.0)
        if torch.isfinite(norm):
            t.optimizer.step()
        else:
            t.skipped.append(i)

    return step


def looking_at_the_loss(bad: str) -> Callable[[Training, int, torch.Tensor], None]:
    """A step ends without backward and without a sync where the loss is not finite."""

    def step(t: Training, i: int, x: torch.Tensor) -> None:
        loss = t.loss(i, x, bad)
        if not torch.isfinite(loss):
            t.skipped.append(i)
            return
        loss.backward()
        f8.sync_float8_amax_and_scale_history(t.model)
        t.optimizer.step()

    return step


@pytest.mark.parametrize("factor", (1e12, 1e30))
def test_an_absurd_finite_step(factor: float, device: str, config: Any) -> None:
    """Its amaxes do not turn the gradients of later steps to 0."""
    zeros = []

    def step(t: Training, i: int, x: torch.Tensor) -> None:
        loss = t.loss(i, x, "") * (factor if i == BAD else 1)
        loss.backward()
        f8.sync_float8_amax_and_scale_history(t.model)
        norm = torch.nn.utils.clip_grad_norm_(t.model.parameters(), 1.0)
        if i > BAD:
            zeros.extend(i for p in t.model.parameters() if not p.grad.any())
        if torch.isfinite(norm):
            t.optimizer.step()

    losses = []
    for recipe in ("delayed", "rowwise"):
        training = Training(recipe, 4, device, config)
        training.run(step, "")
        losses.append(training.losses)
    assert not zeros
    for one, two in zip(*losses, strict=True):
        assert abs(one - two) < 0.05 * two


LOOPS = {"clipping": clipping, "loss": looking_at_the_loss}


@pytest.mark.parametrize("depth", (1, 4, 32))
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("bad", ("loss", "x"))
def test_a_bad_step_costs_itself(bad: str, loop: str, depth: int, device: str, config: Any) -> None:
    delayed = Training("delayed", depth, device, config)
    rowwise = Training("rowwise", depth, device, config)
    for training in (delayed, rowwise):
        training.run(LOOPS[loop](bad), bad)
        assert training.skipped == [BAD]
    for i, (one, two) in enumerate(zip(delayed.losses, rowwise.losses, strict=True)):
        assert i == BAD or abs(one - two) < 0.05 * two


@pytest.mark.parametrize("depth", (1, 4, 32))
def test_grad_scaler(depth: int, device: str, config: Any) -> None:
    """GradScaler begins with a scale that overflows by design, in the first step too."""
    skipped, losses = {}, {}
    for recipe in ("delayed", "rowwise"):
        t = Training(recipe, depth, device, config, dtype=torch.float32)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**24)

        def step(
            t: Training, i: int, x: torch.Tensor, scaler: torch.amp.GradScaler = scaler
        ) -> None:
            before = scaler.get_scale()
            with torch.autocast(t.device, torch.float16):
                y = t.model(x)
            loss = (y.float() - x.roll(1, 1)).square().mean()
            t.losses.append(loss.item())
            scaler.scale(loss * (1e30 if i == STEPS - 3 else 1)).backward()
            f8.sync_float8_amax_and_scale_history(t.model)
            scaler.step(t.optimizer)
            scaler.update()
            if scaler.get_scale() < before:
                t.skipped.append(i)

        t.run(step, "")
        skipped[recipe], losses[recipe] = t.skipped, t.losses
    assert 0 in skipped["delayed"] and STEPS - 3 in skipped["delayed"]
    assert skipped["delayed"] == skipped["rowwise"]
    for one, two in zip(losses["delayed"], losses["rowwise"], strict=True):
        assert abs(one - two) < 0.05 * two


def state_and_counts(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the state, apart from the counts of steps that were not finite, and these."""
    words = model.float8_scales.state.view(torch.int32).clone()
    return words[:-64], words[-64:]


@pytest.mark.parametrize("where", ("x", "dy"))
def test_a_bad_step_leaves_the_state(where: str, device: str, mlp: Any, config: Any) -> None:
    """One operand alone is infinite, another one absurd: the scales of none change."""
    model = f8.convert_to_float8_training(mlp(), config=config("delayed"))
    x = torch.randn(32, 64, dtype=torch.bfloat16, device=device)

    def step(x: torch.Tensor, dy: float = 1) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        grad = torch.ones_like(y)
        grad[3, 5] = dy
        (dx,) = torch.autograd.grad(y, leaf, grad)
        f8.sync_float8_amax_and_scale_history(model)
        return y, dx

    step(x)
    step(x)
    before, counts = state_and_counts(model)
    expected = copy.deepcopy(model)(x)
    bad = x.clone()
    if where == "x":
        bad[0, 0] = float("inf")
        bad[1] = 1e37
    y, dx = step(bad, float("-inf") if where == "dy" else 1)
    assert torch.isnan(y).any() == (where == "x")
    assert torch.isnan(dx[3]).all() == (where == "dy")
    after, counted = state_and_counts(model)
    assert torch.equal(after, before) and not torch.equal(counted, counts)
    assert torch.equal(model(x), expected)


def test_a_bad_first_step_is_followed_by_a_first_step(device: str, mlp: Any, config: Any) -> None:
    model = f8.convert_to_float8_training(mlp(), config=config("delayed"))
    x = torch.randn(32, 64, dtype=torch.bfloat16, device=device)
    other = copy.deepcopy(model)
    for bad in (float("nan"), float("inf")):
        wrong = x.clone()
        wrong[0, 0] = bad
        assert torch.isnan(model(wrong)).any()
        model(wrong).sum().backward()
        f8.sync_float8_amax_and_scale_history(model)
    assert model.float8_scales.first == [0, 1]
    for scale in (1, 3):
        assert torch.equal(model(scale * x), other(scale * x))
        for each in (model, other):
            each(scale * x).sum().backward()
            f8.sync_float8_amax_and_scale_history(each)
        assert model.float8_scales.first == []


def test_saturating_operands_freeze_alone(device: str, mlp: Any, config: Any) -> None:
    model = f8.convert_to_float8_training(mlp(), config=config("delayed", saturate=True, history=1))
    x = torch.randn(32, 64, dtype=torch.bfloat16, device=device)
    model(x).sum().backward()
    f8.sync_float8_amax_and_scale_history(model)
    before, _ = state_and_counts(model)
    bad = 2 * x
    bad[0, 0] = float("inf")
    y = model(bad)
    assert torch.isfinite(y).all()
    y.sum().backward()
    f8.sync_float8_amax_and_scale_history(model)
    after, _ = state_and_counts(model)
    scales = slice(64, 64 + 6 * 8, 8)  # behind 6 amaxes, which are padded to 256 bytes
    changed = after[scales] != before[scales]
    assert not changed[0], "x of the first layer was infinite"
    assert changed[3], "x of the second one is larger"


@pytest.mark.parametrize("bad", (0x7FC00000, 0x7F800000))
def test_a_history_of_an_older_version_heals(bad: int, device: str, mlp: Any, config: Any) -> None:
    """A checkpoint may have recorded what is not finite."""
    model = f8.convert_to_float8_training(mlp(), config=config("delayed"))
    x = torch.randn(32, 64, dtype=torch.bfloat16, device=device)
    for _ in range(3):
        model(x).sum().backward()
        f8.sync_float8_amax_and_scale_history(model)
    state = copy.deepcopy(model.state_dict())
    words = state["float8_scales.state"].view(torch.int32)
    words[64], words[68] = 0, 0x7F800000  # scale and inverse of x of the first layer
    words[128 + 6] = bad  # the second amax of its history
    expected = model(x)
    model.load_state_dict(state)
    assert model.float8_scales.first == [0]
    for _ in range(17):
        y = model(x)
        assert torch.equal(y, expected)
        y.sum().backward()
        f8.sync_float8_amax_and_scale_history(model)
    scale, history = (state_and_counts(model)[0][at] for at in (slice(64, 65), slice(128, 224)))
    assert scale.view(torch.float32) > 0 and torch.isfinite(history.view(torch.float32)).all()


def test_found_inf_drops_a_step(device: str, mlp: Any, config: Any) -> None:
    """A trainer may skip a finite step for reasons of its own, without a wait."""
    model = f8.convert_to_float8_training(mlp(), config=config("delayed"))
    x = torch.randn(32, 64, dtype=torch.bfloat16, device=device)
    flags = torch.zeros(2, device=device)
    flags[1] = 1
    model(x).sum().backward()
    f8.sync_float8_amax_and_scale_history(model, found_inf=flags[0])
    before = model.float8_scales.state.clone()
    model(1e30 * x).sum().backward()
    f8.sync_float8_amax_and_scale_history(model, found_inf=flags[1])
    assert torch.equal(model.float8_scales.state, before)
    model(x).sum().backward()
    with pytest.raises(ValueError, match="found_inf"):
        f8.sync_float8_amax_and_scale_history(model, found_inf=flags)
