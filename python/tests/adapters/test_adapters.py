"""Adapters: torchtitan's overrides, modules of other kinds.

Where torchtitan is installed its own code runs; else a small model of its interface does
(docs/adapters.md says what was tried by hand).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchtitan_model
from copies import COPIES
from reference import same
from torch import nn

import float8
import float8.torch as f8
from float8.adapters import modules

if not torchtitan_model.is_there():
    torchtitan_model.install()

from torchtitan.config import (  # type: ignore[import-not-found]
    Configurable,
    OverrideConfig,
    apply_overrides,
)
from torchtitan.models.common.linear import Linear  # type: ignore[import-not-found]
from torchtitan.protocols.module import Module  # type: ignore[import-not-found]

from float8.adapters import torchtitan


class FeedForward(Module):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        w1: Linear.Config
        w2: Linear.Config
        gate: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1, self.w2, self.gate = (own.build() for own in (config.w1, config.w2, config.gate))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.w2(torch.relu(self.w1(x))) * self.gate(x)
        return y


class Block(Module):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        feed_forward: FeedForward.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.feed_forward = config.feed_forward.build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.feed_forward(x)
        return y


class Decoder(Module):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        layers: list[Block.Config]
        output: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer.build() for layer in config.layers)
        self.output = config.output.build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.output(x)
        return y


class Trainer(Configurable):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        model: Decoder.Config


def trainer_config(features: int = 64) -> Any:
    def linear(k: int, n: int) -> Any:
        init = {"weight": torchtitan_model.ones}
        return Linear.Config(in_features=k, out_features=n, param_init=init)

    def block() -> Any:
        ff = FeedForward.Config(
            w1=linear(features, 4 * features),
            w2=linear(4 * features, features),
            gate=linear(features, 1),
        )
        return Block.Config(feed_forward=ff)

    return Trainer.Config(
        model=Decoder.Config(layers=[block(), block()], output=linear(features, 32))
    )


def converted(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, f8.Float8Linear)]


class TestTorchtitan:
    def test_override(self, device: str) -> None:
        config = trainer_config()
        options = {"recipe": "tensorwise", "emulate": device == "cpu"}
        target = "float8.adapters.torchtitan.linears"
        assert apply_overrides(OverrideConfig(imports=[(target, options)]), config)
        with torch.device("meta"):
            model = config.model.build()
        model.to_empty(device=device)
        model.init_states()
        assert converted(model) == [
            f"layers.{i}.feed_forward.{name}" for i in (0, 1) for name in ("w1", "w2")
        ]
        w1 = model.layers[0].feed_forward.w1
        assert isinstance(w1, Module) and w1.recipe.name == "tensorwise"
        assert torch.equal(w1.weight, torch.ones_like(w1.weight))
        assert list(model.state_dict()) == list(trainer_config().model.build().state_dict())
        x = torch.rand(8, 64, device=device, requires_grad=True)
        model(x).sum().backward()
        assert w1.weight.grad is not None and x.grad is not None and x.grad.isfinite().all()

    def test_chosen_layers(self) -> None:
        config = trainer_config()
        target = torchtitan.register(["*.layers.1.*.w2", "*.output"], recipe="blockwise")
        apply_overrides(OverrideConfig(imports=[target]), config)
        model = config.model.build()
        assert converted(model) == ["layers.1.feed_forward.w2", "output"]
        assert model.output.recipe.name == "blockwise"

    def test_entries_change_options(self) -> None:
        config = trainer_config()
        target = torchtitan.register(["*.output"], recipe="blockwise", saturate=True)
        apply_overrides(OverrideConfig(imports=[(target, {"recipe": "rowwise"})]), config)
        output = config.model.build().output
        assert output.recipe.name == "rowwise" and output.saturate

    @pytest.mark.parametrize(("features", "pays"), ((4096, True), (64, False)))
    def test_measured(self, features: int, pays: bool) -> None:
        """4096 x 16384 pays, and 64 x 256 does not."""
        entry = ("float8.adapters.torchtitan.linears", {"tokens": 8192})
        config = trainer_config(features)
        apply_overrides(OverrideConfig(imports=[entry]), config)
        w1 = config.model.layers[0].feed_forward.w1
        assert isinstance(w1, torchtitan.Float8Linear.Config) is pays
        assert w1.in_features == features

    @pytest.mark.parametrize(
        ("options", "message"),
        (({"recipe": "delayed"}, "training loop"), ({"recipe": "row"}, "row")),
    )
    def test_refused_recipes(self, options: Any, message: str) -> None:
        entry = ("float8.adapters.torchtitan.linears", options)
        with pytest.raises(ValueError, match=message):
            apply_overrides(OverrideConfig(imports=[entry]), trainer_config())

    def test_parts_of_weights_without_a_placement_are_refused(self, monkeypatch: Any) -> None:
        def shard(self: Any, dims: Any) -> None:
            self.weight = nn.Parameter(self.weight.detach().chunk(dims)[0])

        layer = torchtitan.Float8Linear.Config(in_features=64, out_features=64).build()
        monkeypatch.setattr(Module, "parallelize", shard)
        layer.parallelize(1)
        with pytest.raises(NotImplementedError, match="spmd_backend"):
            layer.parallelize(2)


# A linear as Fast-LLM has it: no nn.Linear, maybe with a transposed weight, and with a buffer that
# gradients are collected in by a hook.
class LinearBase(nn.Module):
    def __init__(self, weight: torch.Tensor, bias: Any = None, *, transposed_weight: bool = False):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self._transposed_weight = transposed_weight

    @property
    def transposed_weight(self) -> bool:
        return self._transposed_weight


class PlainLinear(LinearBase):
    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        weight = self.weight.t() if self._transposed_weight else self.weight
        return nn.functional.linear(input_, weight, self.bias)


class ParallelLinear(PlainLinear):
    pass


def plain_model(device: str) -> nn.Sequential:
    weights = [torch.randn(128, 64, device=device), torch.randn(128, 64, device=device)]
    return nn.Sequential(
        PlainLinear(weights[0], torch.randn(128, device=device)),
        nn.GELU(),
        PlainLinear(weights[1], transposed_weight=True),
    )


def with_more() -> PlainLinear:
    linear = PlainLinear(torch.randn(16, 64))
    linear.lora = nn.Linear(64, 16)
    return linear


REFUSED: dict[str, tuple[Callable[[], nn.Module], type[Exception], str]] = {
    "rows": (lambda: PlainLinear(torch.randn(10, 64)), ValueError, "multiples of 16"),
    "transposed": (
        lambda: PlainLinear(torch.randn(64, 10), transposed_weight=True),
        ValueError,
        "in_features 64 and out_features 10",
    ),
    "with a submodule": (with_more, TypeError, "more than a linear"),
    "without a weight": (nn.ReLU, TypeError, "two dimensions"),
}


class TestModules:
    def test_same_as_linears(self, device: str, options: Any) -> None:
        model = plain_model(device)
        twin = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64, bias=False))
        twin.to(device)
        with torch.no_grad():
            twin[0].weight.copy_(model[0].weight)
            twin[0].bias.copy_(model[0].bias)
            twin[2].weight.copy_(model[2].weight.t())
        f8.convert_to_float8_training(twin, config=f8.LinearConfig("rowwise", **options))
        parameters = list(model.parameters())
        assert modules.convert(model, [PlainLinear], recipe="rowwise", **options) is model
        assert all(one is two for one, two in zip(parameters, model.parameters(), strict=True))
        assert "float8" in repr(model[0]) and isinstance(model[0], PlainLinear)
        x = torch.randn(3, 8, 64, device=device)
        for own in (model, twin):
            y = own(x)
            y.square().sum().backward()
        assert torch.equal(model(x), twin(x))
        assert torch.equal(model[0].weight.grad, twin[0].weight.grad)
        assert torch.equal(model[2].weight.grad, twin[2].weight.grad.t())

    def test_collected_gradients(self, device: str, options: Any) -> None:
        """Fast-LLM moves gradients into buffers of its own, by hooks behind autograd's sums."""
        model = modules.convert(plain_model(device), [PlainLinear], **options)
        buffers = []
        for parameter in model.parameters():
            buffer = torch.zeros_like(parameter)
            buffers.append(buffer)

            def move(parameter: torch.Tensor, buffer: torch.Tensor = buffer) -> None:
                assert parameter.grad is not None
                buffer.add_(parameter.grad)
                parameter.grad = None

            parameter.register_post_accumulate_grad_hook(move)
        x = torch.randn(8, 64, device=device)
        for _ in range(2):
            model(x).sum().backward()
        assert all(buffer.any() for buffer in buffers)
        assert all(parameter.grad is None for parameter in model.parameters())

    @pytest.mark.parametrize("how", COPIES)
    def test_copies(self, how: str, device: str, options: Any) -> None:
        model = modules.convert(plain_model(device), [PlainLinear], **options)
        other = COPIES[how](model)
        x = torch.randn(8, 64, device=device)
        assert torch.equal(other(x), model(x)) and other[0].weight is not model[0].weight
        assert type(other[0]) is type(model[0])

    def test_exact_classes_and_names(self, device: str, options: Any) -> None:
        model = plain_model(device)
        model.append(ParallelLinear(torch.randn(16, 64, device=device)))
        modules.convert(
            model, [PlainLinear], module_filter_fn=lambda _, name: name == "0", **options
        )
        assert [type(m).__name__ for m in model] == [
            "Float8PlainLinear",
            "GELU",
            "PlainLinear",
            "ParallelLinear",
        ]

    def test_another_recipe(self, device: str, options: Any) -> None:
        model = modules.convert(plain_model(device), [PlainLinear], **options)
        kind, config = type(model[0]), model[0]._float8_config
        modules.convert(model, [PlainLinear], recipe="rowwise", **options)
        assert type(model[0]) is kind and model[0]._float8_config != config

    @pytest.mark.parametrize("kind", REFUSED)
    def test_refused_modules_are_named(self, kind: str) -> None:
        make, error, words = REFUSED[kind]
        model = plain_model("cpu").append(make())
        with pytest.raises(error, match=rf"{words}.*'3'"):
            modules.convert(model, [PlainLinear, nn.ReLU])
        assert type(model[0]) is PlainLinear

    def test_delayed_scaling_is_refused(self) -> None:
        model = plain_model("cpu")
        with pytest.raises(ValueError, match="delayed scaling"):
            modules.convert(model, [PlainLinear], recipe="delayed")
        assert type(model[0]) is PlainLinear


class TestFunctional:
    @pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
    @pytest.mark.parametrize("has_bias", (False, True))
    def test_same_as_a_layer(
        self, has_bias: bool, dtype: torch.dtype, device: str, options: Any
    ) -> None:
        layer = f8.Float8Linear(64, 32, has_bias, device, dtype, recipe="rowwise", **options)
        x = torch.randn(2, 5, 64, dtype=dtype, device=device)
        leaves = [x.requires_grad_(), *layer.parameters()]
        results = [layer(x), f8.functional.linear(*leaves, recipe="rowwise", **options)]
        assert torch.equal(*results)
        grads = [torch.autograd.grad(y.square().sum(), leaves) for y in results]
        assert same(*grads)

    def test_autocast(self, device: str, options: Any) -> None:
        x, weight = torch.randn(8, 64, device=device), torch.randn(32, 64, device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            y = f8.functional.linear(x, weight, **options)
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, f8.functional.linear(x.bfloat16(), weight, **options))

    @pytest.mark.parametrize(
        "recipe", ("rowwise", float8.Recipe.named("rowwise")), ids=("name", "own")
    )
    def test_compile(self, recipe: str | float8.Recipe, device: str, options: Any) -> None:
        torch._dynamo.reset()
        x, weight = torch.randn(8, 64, device=device), torch.randn(32, 64, device=device)

        def double(x: torch.Tensor) -> torch.Tensor:
            return 2 * f8.functional.linear(x, weight, recipe=recipe, **options)

        compiled = torch.compile(double, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), double(x))

    @pytest.mark.parametrize(
        ("weight", "recipe", "words"),
        (
            ((32, 64), "delayed", "delayed scaling"),
            ((10, 64), "tensorwise", "out_features"),
            ((64,), "tensorwise", "two dimensions"),
        ),
    )
    def test_errors(
        self, weight: tuple[int, ...], recipe: str, words: str, device: str, options: Any
    ) -> None:
        x = torch.randn(8, 64, device=device)
        with pytest.raises(ValueError, match=words):
            f8.functional.linear(x, torch.randn(weight, device=device), recipe=recipe, **options)
