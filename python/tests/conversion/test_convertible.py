"""Layers that look like an nn.Linear and are none: left out or refused by name, never broken."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import float8.torch as f8
import float8.torchao as torchao
from float8.torch import Float8Linear, convert_to_float8_training

pytestmark = pytest.mark.usefixtures("untold")


def _train(model: nn.Module, x: torch.Tensor, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: layer.weight.detach().clone()
        for name, layer in model.named_modules()
        if isinstance(layer, Float8Linear)
    }


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).T


class WithForward(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


class OfAnother(nn.Linear):
    """A linear whose weight is that of another module."""

    owner: tuple[nn.Linear]

    @property
    def weight(self) -> torch.Tensor:
        return self.owner[0].weight

    @weight.setter
    def weight(self, value: object) -> None:
        pass


class Renaming(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "kernel"] = self.weight


class Called(nn.Linear):
    def __call__(self, *args: Any) -> Any:
        return 2 * super().__call__(*args)


class Quantised(nn.Parameter):
    """As bitsandbytes has them."""


class Wrapper(torch.Tensor):
    """A parameter without memory of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        wrapped: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapped.inner = inner
        return wrapped

    inner: torch.Tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        plain = [each.inner if isinstance(each, Wrapper) else each for each in args]
        found = func(*plain, **(kwargs or {}))
        return Wrapper(found) if func is torch.ops.aten.detach.default else found


def _plain() -> nn.Linear:
    return nn.Linear(64, 64)


def _property() -> nn.Linear:
    linear = OfAnother(64, 64)
    linear.owner = (_plain(),)
    return linear


def _plain_tensor() -> nn.Linear:
    linear = _plain()
    weight = linear.weight.detach()
    del linear.weight
    linear.weight = weight  # type: ignore[assignment]
    return linear


def _buffer() -> nn.Linear:
    linear = _plain()
    weight = linear.weight.detach()
    del linear.weight
    linear.register_buffer("weight", weight)
    return linear


def _with_weight(make: Callable[[torch.Tensor], Any]) -> Callable[[], nn.Linear]:
    def linear() -> nn.Linear:
        made = _plain()
        made.weight = make(made.weight.detach())
        return made

    return linear


def _with_bias(bias: torch.Tensor) -> nn.Linear:
    linear = _plain()
    del linear.bias
    linear.register_buffer("bias", bias)
    return linear


def _hooked() -> nn.Linear:
    """As accelerate's add_hook_to_module leaves it."""
    linear = _plain()
    own = linear.forward
    linear.forward = types.MethodType(lambda self, *args: own(*args), linear)  # type: ignore[method-assign]
    return linear


def _compiled() -> nn.Linear:
    linear = _plain()
    linear.compile(backend="eager")
    return linear


def _old_norm(norm: Any) -> Callable[[], nn.Linear]:
    def make() -> nn.Linear:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            made: nn.Linear = norm(_plain())
        return made

    return make


_UNUSUAL: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "weight norm": (lambda: parametrizations.weight_norm(_plain()), "its weight is parametrised"),
    "parametrised bias": (
        lambda: parametrize.register_parametrization(_plain(), "bias", nn.Tanh()),
        "its bias is parametrised",
    ),
    "symmetric": (
        lambda: parametrize.register_parametrization(_plain(), "weight", Symmetric()),
        "its weight is parametrised",
    ),
    "old weight norm": (_old_norm(nn.utils.weight_norm), "its weight is no parameter"),
    "old spectral norm": (_old_norm(nn.utils.spectral_norm), "its weight is no parameter"),
    "pruned": (
        lambda: prune.l1_unstructured(_plain(), "weight", amount=0.5),
        "its weight is no parameter",
    ),
    "property": (_property, "its weight is an attribute of its class OfAnother"),
    "plain tensor": (_plain_tensor, "its weight is no parameter"),
    "buffer": (_buffer, "its weight is no parameter"),
    "no weight": (_with_weight(lambda _: None), "it has no weight"),
    "bias in a buffer": (lambda: _with_bias(torch.ones(64)), "its bias is no parameter"),
    "class of parameter": (_with_weight(Quantised), "its weight is a Quantised"),
    "subclass of tensor": (
        _with_weight(lambda weight: nn.Parameter(Wrapper(weight))),
        "its weight is a Wrapper",
    ),
    "int8": (
        _with_weight(lambda weight: nn.Parameter(weight.char(), requires_grad=False)),
        r"its weight is of torch\.int8",
    ),
    "float8": (
        _with_weight(lambda weight: nn.Parameter(weight.to(torch.float8_e4m3fn))),
        r"its weight is of torch\.float8_e4m3fn",
    ),
    "forward of the class": (lambda: WithForward(64, 64), "WithForward has a forward of its own"),
    "call": (lambda: Called(64, 64), "Called has a __call__ of its own"),
    "state dict": (lambda: Renaming(64, 64), "Renaming has a _save_to_state_dict of its own"),
    "forward of the module": (_hooked, "its forward was replaced"),
    "compiled module": (_compiled, "it was compiled"),
    "torch.compile": (lambda: torch.compile(_plain(), backend="eager"), "torch.compile was called"),
}


@pytest.mark.parametrize("kind", _UNUSUAL)
def test_unusual_layers_are_left_out_by_name(kind: str, config: Any, device: str) -> None:
    make, why = _UNUSUAL[kind]
    model = nn.ModuleDict({"usual": _plain(), "odd": make()}).to(device)
    before = dict(model.named_modules())
    with pytest.warns(UserWarning, match=rf"layer 'odd.*stays as it is.*{why}"):
        convert_to_float8_training(model, config=config())
    left = dict(model.named_modules())
    assert isinstance(left.pop("usual"), Float8Linear) and before.pop("usual") is not None
    assert left == before


@pytest.mark.filterwarnings("error", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", _UNUSUAL)
def test_nobody_is_told_of_a_layer_that_the_filter_keeps(
    kind: str, config: Any, device: str
) -> None:
    model = nn.ModuleDict({"usual": _plain(), "odd": _UNUSUAL[kind][0]()}).to(device)
    keep = {"module_filter_fn": lambda _, name: "odd" not in name}
    convert_to_float8_training(model, config=config("rowwise"), **keep)


def test_a_float64_layer_stays() -> None:
    model = nn.ModuleDict({"usual": _plain(), "odd": _plain().double()})
    why = r"torch\.float64: cast the model to bfloat16, float16 or float32"
    with pytest.warns(UserWarning, match=rf"layer 'odd'.* {why}"):
        convert_to_float8_training(model)
    assert isinstance(model["usual"], Float8Linear) and not isinstance(model["odd"], Float8Linear)


@pytest.mark.parametrize("kind", ("weight norm", "old weight norm", "pruned", "float8"))
def test_an_unusual_root(kind: str) -> None:
    linear = _UNUSUAL[kind][0]()
    with pytest.warns(UserWarning, match="layer 'root' stays|none of its linears"):
        assert convert_to_float8_training(linear) is linear


def test_a_warning_counts_the_layers_of_blocks() -> None:
    model = nn.Sequential(*(nn.Sequential(_plain(), WithForward(64, 64)) for _ in range(9)))
    with pytest.warns(UserWarning, match=r"each of 9 layers \('\*\.\*'\) stays"):
        convert_to_float8_training(model)


def test_verdicts_are_of_layers_that_can_be_converted(capsys: Any) -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({name: nn.Linear(4096, 14336) for name in ("usual", "odd", "head")})
        for name in ("odd", "head"):
            prune.identity(model[name], "weight")
    with pytest.warns(UserWarning, match="layer 'odd' stays") as told:
        convert_to_float8_training(
            model, config="rowwise", tokens=8192, names=["head"], explain=True
        )
    assert not any("'head'" in str(each.message) for each in told)
    assert "1 of 1 linears" in capsys.readouterr().out
    found = f8.verdicts(model, "rowwise", 8192)
    assert [verdict.layer.name for verdict in found] == ["usual"]


def _lazy(device: str) -> nn.Sequential:
    return nn.Sequential(_plain(), nn.LazyLinear(64)).to(device)


@pytest.mark.parametrize("tokens", (None, 8192))
def test_a_lazy_linear_is_refused(tokens: int | None, config: Any, device: str) -> None:
    model = _lazy(device)
    with pytest.raises(ValueError, match=r"layer '1' is a LazyLinear .*call the model"):
        convert_to_float8_training(model, config=config(), tokens=tokens)
    assert type(model[0]) is nn.Linear


def test_a_lazy_linear_is_refused_under_torchao_s_filter(device: str) -> None:
    auto = torchao._auto_filter_for_recipe("tensorwise", [])
    with pytest.raises(ValueError, match="layer '1' is a LazyLinear"):
        torchao.convert_to_float8_training(_lazy(device), module_filter_fn=auto)


def test_a_lazy_linear_may_be_left_out(config: Any, device: str) -> None:
    kept = convert_to_float8_training(
        _lazy(device), config=config(), module_filter_fn=lambda _, name: name == "0"
    )
    assert isinstance(kept[0], Float8Linear)


def test_a_lazy_linear_that_was_called_trains(config: Any, device: str) -> None:
    model, x = _lazy(device), torch.randn(8, 64, device=device)
    model(x)
    convert_to_float8_training(model, config=config())
    before = _weights(model)
    _train(model, x)
    assert len(before) == 2
    assert not any(torch.equal(before[name], own) for name, own in _weights(model).items())


CHANGES: dict[str, Callable[[nn.Linear], Any]] = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "pruned": lambda linear: prune.l1_unstructured(linear, "weight", amount=0.5),
    "old weight norm": nn.utils.weight_norm,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_after_the_conversion_trains(change: str, config: Any, device: str) -> None:
    """The warnings recommend this order."""
    model = convert_to_float8_training(
        nn.Sequential(_plain(), _plain()).to(device), config=config()
    )
    CHANGES[change](model[1])
    x = torch.randn(16, 64, device=device)
    parameters = {name: each.detach().clone() for name, each in model.named_parameters()}
    _train(model, x)
    for name, own in model.named_parameters():
        assert not torch.equal(parameters[name], own), name
    # Another recipe leaves it as it is, and says so.
    changed = model[1]
    with pytest.warns(UserWarning, match="layer '1' stays as it is"):
        convert_to_float8_training(model, config=config("rowwise"))
    assert model[1] is changed and model[0].recipe.name == "rowwise"


def test_every_converted_weight_is_trained(config: Any, device: str) -> None:
    """A model with every unusual layer trains in those that were converted, and in the others."""
    torch.manual_seed(0)
    kinds = {
        name.replace(".", " "): make
        for name, (make, _) in _UNUSUAL.items()
        if name not in ("no weight", "int8", "float8", "subclass of tensor")
    }
    with torch.device(device):  # .to() does not know of tensors that are no parameters
        blocks = {name: nn.Sequential(_plain(), make(), _plain()) for name, make in kinds.items()}
    model = nn.ModuleDict(blocks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        convert_to_float8_training(model, config=config("rowwise"))
    before = _weights(model)
    assert len(before) == 2 * len(kinds)
    x = torch.randn(16, 64, device=device)
    for block in model.values():
        _train(block, x)
    for name, own in _weights(model).items():
        assert not torch.equal(before[name], own), name


def test_linears_of_the_older_fsdp_are_refused() -> None:
    """FullyShardedDataParallel, which needs a GPU, lists a flat parameter's modules so."""
    wrapper = nn.Sequential(_plain(), _plain())
    infos = [types.SimpleNamespace(module=each, param_name="weight") for each in wrapper]
    flat = types.SimpleNamespace(_param_infos=infos[1:])
    wrapper._handle = types.SimpleNamespace(flat_param=flat)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="layer '1' is sharded by FSDP"):
        convert_to_float8_training(wrapper)
    assert type(wrapper[0]) is nn.Linear
    convert_to_float8_training(wrapper, module_filter_fn=lambda _, name: name == "0")
    assert isinstance(wrapper[0], Float8Linear)
