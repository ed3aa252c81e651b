"""sync_at_optimizer_steps: a loop without a sync trains as one with it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import float8.torch as f8
from float8.torch import notices, step_sync

Config = Callable[..., f8.LinearConfig]
STEPS = 4


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    step_sync._active.clear()


def model_of(config: Config) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    options = config("delayed")
    device = "cpu" if options.emulate else "cuda"
    return f8.convert_to_float8_training(made.to(device, torch.bfloat16), config=options)


def batches(model: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    like = next(model.parameters())
    return [torch.randn(16, 32, device=like.device).to(like.dtype) * (i + 1) for i in range(STEPS)]


def losses(
    model: Any, optimizers: list[Any], sync: bool, closure: bool = False, micro: int = 1
) -> list[float]:
    """Trains, with a sync of the loop's own or without one."""
    found = []
    for x in batches(model):

        def backward(x: torch.Tensor = x) -> torch.Tensor:
            for part in x.chunk(micro):
                loss = model(part).float().square().mean()
                loss.backward()
            return loss

        if closure:
            (optimizer,) = optimizers
            found.append(float(optimizer.step(backward)))
        else:
            found.append(float(backward().detach()))
            if sync:
                f8.sync_float8_amax_and_scale_history(model)
            for each in optimizers:
                each.step()
        if closure and sync:
            f8.sync_float8_amax_and_scale_history(model)
        model.zero_grad()
    return found


def halves(model: nn.Module) -> list[Any]:
    return [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (2, 0)]  # type: ignore[index]


class Outer(torch.optim.Optimizer):
    """Holds the parameters of others, whose steps are its own, as torchtitan's container does."""

    def __init__(self, inner: list[Any]) -> None:
        self.inner = inner
        every = [p for each in inner for group in each.param_groups for p in group["params"]]
        super().__init__(every, {})

    def step(self, closure: Any = None) -> Any:
        for each in self.inner:
            each.step()


KINDS: dict[str, Callable[[nn.Module], list[Any]]] = {
    "fused": lambda model: [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)],
    "two": halves,
    "container": lambda model: [Outer(halves(model))],
    "float8's": lambda model: [f8.AdamW(model.parameters(), lr=1e-2)],
}


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has an item for each sync at an optimizer's step."""
    calls: list[int] = []
    real = step_sync.sync_float8_amax_and_scale_history

    def counted(*args: Any, **options: Any) -> None:
        calls.append(1)
        real(*args, **options)

    monkeypatch.setattr(step_sync, "sync_float8_amax_and_scale_history", counted)
    return calls


@pytest.mark.parametrize("micro", (1, 2))
@pytest.mark.parametrize("kind", KINDS)
def test_is_a_sync_in_the_loop(config: Config, kind: str, micro: int, syncs: list[int]) -> None:
    own, plain = model_of(config), model_of(config)
    handle = f8.sync_at_optimizer_steps(own)
    found = losses(own, KINDS[kind](own), False, micro=micro)
    assert found == losses(plain, KINDS[kind](plain), True, micro=micro)
    assert torch.equal(own.float8_scales.state, plain.float8_scales.state)  # type: ignore[union-attr, arg-type]
    assert len(syncs) == STEPS
    assert all(torch.equal(a, b) for a, b in zip(own.parameters(), plain.parameters(), strict=True))
    assert not any(each._first_step for each in own.modules() if isinstance(each, f8.Float8Linear))
    handle.remove()
    losses(own, KINDS[kind](own), False)
    assert len(syncs) == STEPS


def test_a_closure_has_the_sync_of_the_step_before(config: Config) -> None:
    own, plain = model_of(config), model_of(config)
    f8.sync_at_optimizer_steps(own)
    found, expected = (
        losses(each, [torch.optim.SGD(each.parameters(), lr=0.1)], each is plain, closure=True)
        for each in (own, plain)
    )
    assert found == expected


def test_a_frozen_base(config: Config) -> None:
    """The optimizer has other parameters than those of the linears in fp8."""
    model = model_of(config).requires_grad_(False)
    whole = nn.Sequential(nn.Linear(32, 32).to(next(model.parameters())), model)
    f8.sync_at_optimizer_steps(whole)
    losses(whole, [torch.optim.SGD(whole[0].parameters(), lr=0.1)], False)
    assert not any(each._first_step for each in (model[0], model[2]))  # type: ignore[index]


class Named(nn.Module):
    """Its first parameter is a norm's."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layers = model_of(config)
        weight = self.layers[0].weight  # type: ignore[index]
        self._modules["norm"], self._modules["layers"] = (
            nn.LayerNorm(32).to(weight),
            self._modules.pop("layers"),
        )

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(self.norm(x))


@pytest.mark.parametrize("parts", [1, 2])
def test_a_first_parameter_that_no_optimizer_has(config: Config, parts: int) -> None:
    """Muon has the matrices; who has the first of them is known in the second step, whose sync has the amaxes of both."""
    own, plain = Named(config), Named(config)
    f8.sync_at_optimizer_steps(own)
    before = [each.detach().clone() for each in own.parameters()]

    def optimizers(model: Any) -> list[Any]:
        matrices = [each for each in model.parameters() if each.ndim == 2]
        groups = [matrices] if parts == 1 else [[each] for each in reversed(matrices)]
        return [torch.optim.Muon(each, lr=0.1) for each in groups]

    made, expected = optimizers(own), optimizers(plain)
    for step, x in enumerate(batches(own)):
        losses = [model(x).float().square().mean() for model in (own, plain)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        if step > 0:
            f8.sync_float8_amax_and_scale_history(plain)
        for each in made + expected:
            each.step()
            each.zero_grad()
    assert torch.equal(*(each.layers.float8_scales.state for each in (own, plain)))
    assert not own.layers.float8_scales.first  # type: ignore[union-attr]
    for old, new in zip(before, own.parameters(), strict=True):
        assert torch.equal(old, new) == (old.ndim == 1)


def test_gradient_release_has_one_sync_a_backward(
    config: Config, syncs: list[int], recwarn: Any
) -> None:
    """Its hooks step once for each parameter, in the middle of backward."""
    own, plain = model_of(config), model_of(config)
    f8.sync_at_optimizer_steps(own)
    before = [each.detach().clone() for each in own.parameters()]
    optimizer, expected = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (own, plain))

    def release(parameter: torch.Tensor) -> None:
        optimizer.step()
        parameter.grad = None

    for parameter in own.parameters():
        parameter.register_post_accumulate_grad_hook(release)
    for x in batches(own):
        own(x).float().square().mean().backward()
    losses(plain, [expected], True)
    assert len(syncs) == STEPS
    assert torch.equal(own.float8_scales.state, plain.float8_scales.state)  # type: ignore[union-attr, arg-type]
    assert all(torch.equal(a, b) for a, b in zip(own.parameters(), plain.parameters(), strict=True))
    assert not any(map(torch.equal, before, own.parameters()))
    assert not [each for each in recwarn if "of delayed scaling were updated" in str(each.message)]


def test_a_step_that_failed_ends(config: Config) -> None:
    """A closure runs out of memory, or is interrupted, and training goes on with another optimizer."""
    own, plain = model_of(config), model_of(config)
    f8.sync_at_optimizer_steps(own)
    failed = torch.optim.SGD(own.parameters(), lr=0.1)

    def closure() -> float:
        raise MemoryError

    with pytest.raises(MemoryError):
        failed.step(closure)
    found, expected = (
        losses(each, [torch.optim.SGD(each.parameters(), lr=0.1)], each is plain)
        for each in (own, plain)
    )
    assert found == expected
    assert torch.equal(own.float8_scales.state, plain.float8_scales.state)  # type: ignore[union-attr, arg-type]


def test_an_optimizer_of_copies_is_warned_of(config: Config) -> None:
    """As of masters in float32, of which the optimizer alone knows."""
    notices._told.discard("optimizers of copies")
    model = model_of(config)
    f8.sync_at_optimizer_steps(model)
    copies = [each.detach().float() for each in model.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.1)
    with pytest.warns(UserWarning, match="none has a parameter of the module"):
        losses(model, [optimizer], False)


def test_found_inf_of_a_fused_optimizer_drops_the_step(config: Config) -> None:
    """As GradScaler gives it to optimizers that leave out a step by themselves."""
    model = model_of(config)
    f8.sync_at_optimizer_steps(model)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses(model, [optimizer], False)
    before = copy.deepcopy(model.float8_scales.state_dict())
    device = next(model.parameters()).device
    optimizer.found_inf = torch.ones((), device=device)
    losses(model, [optimizer], False)
    after = model.float8_scales.state_dict()
    assert torch.equal(before["state"], after["state"])
    del optimizer.found_inf
    losses(model, [optimizer], False)
    assert not torch.equal(before["state"], model.float8_scales.state_dict()["state"])


@pytest.mark.parametrize("kind", KINDS)
def test_syncs_that_end_are_warned_of(config: Config, kind: str, recwarn: Any) -> None:
    model = model_of(config)
    handle = f8.sync_at_optimizer_steps(model)
    optimizers = KINDS[kind](model)
    losses(model, optimizers, False)
    losses(model, optimizers, False)
    assert not [each for each in recwarn if "of delayed scaling were updated" in str(each.message)]
    handle.remove()
    losses(model, optimizers, False)
    (found,) = [each for each in recwarn if "of delayed scaling were updated" in str(each.message)]
    assert "stepped 4 times, and no more scales" in str(found.message)


def test_a_compiled_step_is_warned_of(config: Config) -> None:
    notices._told.discard("a compiled step")
    model = model_of(config)
    f8.sync_at_optimizer_steps(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses(model, [], False)
    model(batches(model)[0]).float().sum().backward()
    with pytest.warns(UserWarning, match="in the loop, before the step"):
        torch.compile(optimizer.step, backend="eager")()


def test_a_sync_in_a_compiled_step_counts(config: Config) -> None:
    """The linears scale as in an eager loop, and not dynamically as in a first step."""
    models: list[Any] = [model_of(config) for _ in range(2)]

    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).float().square().sum()
        loss.backward()
        f8.sync_float8_amax_and_scale_history(model)
        return loss  # type: ignore[no-any-return]

    compiled = torch.compile(step, backend="aot_eager")
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in models]
    for x in batches(models[0]):
        assert torch.equal(step(models[0], x), compiled(models[1], x))
        for each in optimizers:  # in a graph of some releases of PyTorch it rounds otherwise
            each.step()
            each.zero_grad()
    assert torch.equal(*(each.float8_scales.state for each in models))


def test_what_has_nothing_to_do(config: Config) -> None:
    notices._told.clear()
    with pytest.warns(UserWarning, match="sync_at_optimizer_steps did nothing"):
        f8.sync_at_optimizer_steps(nn.Linear(16, 16))
    with pytest.raises(TypeError, match=r"takes an nn\.Module"):
        f8.sync_at_optimizer_steps(3)  # type: ignore[arg-type]
    model = model_of(config)
    f8.sync_at_optimizer_steps(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    del model
    other = nn.Linear(16, 16)
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    del optimizer
