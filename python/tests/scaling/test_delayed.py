"""Delayed scaling: one scale state for a model's linears."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import reference
import torch
from copies import COPIES
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import checkpoint

import float8
import float8.torch as f8
from float8 import torchao


def convert(model: nn.Module, config: Any, **fields: Any) -> Any:
    return f8.convert_to_float8_training(model, config=config("delayed", **fields))


def step(model: nn.Module, x: torch.Tensor, sync: bool = True) -> list[torch.Tensor]:
    leaf = x.detach().clone().requires_grad_()
    y = model(leaf)
    results = [y, *torch.autograd.grad(y.float().square().sum(), (leaf, *model.parameters()))]
    if sync:
        f8.sync_float8_amax_and_scale_history(model)
    return results


def agree(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(reference.agree(one, two) for one, two in zip(first, second, strict=True))


def inputs(device: str) -> torch.Tensor:
    return torch.randn(32, 64, dtype=torch.bfloat16, device=device)


def test_equal_data_scales_as_tensorwise(device: str, mlp: Any, config: Any) -> None:
    """The first step is dynamic, and the scales of the second one come from equal amaxes."""
    model = mlp()
    tensorwise = f8.convert_to_float8_training(copy.deepcopy(model), config=config("tensorwise"))
    delayed, x = convert(model, config), inputs(device)
    expected = step(tensorwise, x)
    assert agree(step(delayed, x), expected)
    assert agree(step(delayed, x), expected)


def one_layer(device: str, config: Any, recipe: str, **fields: Any) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 32, dtype=torch.bfloat16, device=device))
    return f8.convert_to_float8_training(model, config=config(recipe, **fields))


def test_scales_are_the_previous_step_s(device: str, config: Any) -> None:
    tensorwise = one_layer(device, config, "tensorwise")
    delayed = one_layer(device, config, "delayed", history=2)
    x = inputs(device)

    def y_of(model: Any, scale: int) -> torch.Tensor:
        y: torch.Tensor = model(scale * x)
        y.sum().backward()
        f8.sync_float8_amax_and_scale_history(model)
        return y

    small, large = y_of(tensorwise, 1), y_of(tensorwise, 17)
    assert reference.agree(y_of(delayed, 1), small)
    assert not reference.agree(y_of(delayed, 17), large)  # it saturates
    assert reference.agree(y_of(delayed, 17), large)
    assert not reference.agree(y_of(delayed, 1), small)  # the history of 2 has the large amax
    assert not reference.agree(y_of(delayed, 1), small)
    assert reference.agree(y_of(delayed, 1), small)


@pytest.mark.parametrize("margin", (0, 3))
def test_margin(margin: int, device: str, config: Any) -> None:
    x = inputs(device)
    expected = one_layer(device, config, "tensorwise")(8 * x)
    delayed = one_layer(device, config, "delayed", margin=margin)
    step(delayed, x)
    assert (reference.sqnr(delayed(8 * x), expected) > 25) is (margin == 3)


def test_micro_batches_count_together(device: str, mlp: Any, config: Any) -> None:
    model = mlp()
    delayed, x = convert(model, config, history=1), inputs(device)
    other = copy.deepcopy(delayed)
    step(delayed, x, sync=False)
    step(delayed, x / 16)
    step(other, x)
    assert torch.equal(delayed.float8_scales.state, other.float8_scales.state)


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_evaluation_records_nothing(mode: Any, device: str, mlp: Any, config: Any) -> None:
    delayed, x = convert(mlp(), config), inputs(device)
    for _ in range(2):
        before = delayed.float8_scales.state.clone()
        with mode():
            delayed(x)
        assert torch.equal(delayed.float8_scales.state, before)
        step(delayed, x)
    assert not torch.equal(delayed.float8_scales.state, before)


@pytest.mark.parametrize("reentrant", (False, True))
def test_activation_checkpoint(reentrant: bool, device: str, mlp: Any, config: Any) -> None:
    """A second forward in backward sees the same scales, and records the same amaxes."""
    model, x = convert(mlp(), config), inputs(device)
    other = copy.deepcopy(model)
    for scale in (1, 3, 2):
        leaf = (scale * x).requires_grad_()
        y = checkpoint.checkpoint(other, leaf, use_reentrant=reentrant)
        y.float().square().sum().backward()
        f8.sync_float8_amax_and_scale_history(other)
        grads = [leaf.grad, *(p.grad for p in other.parameters())]
        assert reference.same(step(model, scale * x), [y, *grads])
        other.zero_grad()
    assert torch.equal(model.float8_scales.state, other.float8_scales.state)


def test_no_rows(device: str, mlp: Any, config: Any) -> None:
    model, x = convert(mlp(), config), inputs(device)
    other = copy.deepcopy(model)
    for _ in range(2):
        step(other, x[:0], sync=False)
        assert reference.same(step(model, x), step(other, x))
    assert torch.equal(model.float8_scales.state, other.float8_scales.state)


def test_partly_delayed_recipe(device: str, mlp: Any, config: Any) -> None:
    delayed = float8.Recipe.named("delayed")
    high = float8.Gemm(*[float8.Cast(float8.Scaling.HIGH_PRECISION)] * 2)
    recipe = float8.Recipe(output=delayed.output, grad_input=high, grad_weight=high)
    dynamic = float8.Recipe(
        output=float8.Recipe.named("tensorwise").output, grad_input=high, grad_weight=high
    )
    model, x = mlp(), inputs(device)
    expected = step(f8.convert_to_float8_training(copy.deepcopy(model), config=config(dynamic)), x)
    f8.convert_to_float8_training(model, config=config(recipe))
    for _ in range(2):
        assert agree(step(model, x), expected)


@pytest.mark.parametrize("how", ("state_dict", "assign", *COPIES))
def test_resume(how: str, device: str, mlp: Any, config: Any) -> None:
    plain = mlp()
    model, x = convert(copy.deepcopy(plain), config, history=3), inputs(device)
    step(model, x)
    step(model, 2 * x)
    if how in COPIES:
        other = COPIES[how](model)
    else:
        other = convert(plain, config, history=3)
        other.load_state_dict(copy.deepcopy(model.state_dict()), assign=how == "assign")
    for scale in (1, 4, 1):
        assert reference.same(step(model, scale * x), step(other, scale * x))
    assert torch.equal(model.float8_scales.state, other.float8_scales.state)
    assert model.float8_scales.state.data_ptr() != other.float8_scales.state.data_ptr()


def test_distributed_checkpoint(tmp_path: Any, device: str, mlp: Any, config: Any) -> None:
    from torch.distributed import checkpoint as dcp

    model, x = convert(mlp(), config), inputs(device)
    step(model, x)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    other, plain = convert(mlp(), config), mlp()
    for loading in (other, plain):  # plain linears leave the scales out
        state = {"model": loading.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
        loading.load_state_dict(state["model"])
    assert reference.same(list(plain.parameters()), list(model.parameters()))
    assert reference.same(step(model, 2 * x), step(other, 2 * x))


def test_fresh_state_is_loaded_as_a_first_step(device: str, mlp: Any, config: Any) -> None:
    model, x = convert(mlp(), config), inputs(device)
    fresh = copy.deepcopy(model.state_dict())
    expected = step(model, x)
    model.load_state_dict(fresh)
    assert reference.same(step(model, x), expected)


def test_state_of_plain_linears(mlp: Any, config: Any) -> None:
    plain = mlp()
    keys = set(plain.state_dict())
    model = convert(plain, config)
    assert set(model.state_dict()) - keys == {"float8_scales.state"}
    step(model, torch.randn(8, 64, dtype=torch.bfloat16, device=model[0].weight.device))
    model.load_state_dict(
        plain.state_dict() | {k: model.state_dict()[k] for k in keys}, strict=False
    )


def test_plain_checkpoint_begins_anew(device: str, mlp: Any, config: Any) -> None:
    """The weights of plain linears need no strict=False, and the next step is a first one."""
    plain, x = mlp(), inputs(device)
    weights = copy.deepcopy(plain.state_dict())
    model = convert(copy.deepcopy(plain), config)
    expected = [step(model, x), step(model, x)]
    step(model, 100 * x)
    assert not model.load_state_dict(weights).missing_keys
    for results in expected:
        assert reference.same(step(model, x), results)


@pytest.mark.parametrize("damage", ("size", "dtype", "amax", "recipe"))
def test_damaged_state_is_refused(damage: str, device: str, mlp: Any, config: Any) -> None:
    model = convert(mlp(), config)
    step(model, inputs(device))
    state = copy.deepcopy(model.state_dict())
    key = "float8_scales.state"
    if damage == "size":
        other = convert(mlp(), config, history=100)
        message = r"history of 100"
    else:
        other = convert(mlp(), config)
        message = "float8_scales.state" if damage == "dtype" else "no scale state"
    if damage == "dtype":
        state[key] = state[key].float()
    elif damage == "amax":
        state[key][3] |= 0x80
    elif damage == "recipe":
        state[key][-256:] = 0
        state[key][-512:-256] = 7
    before = other.float8_scales.state.clone()
    with pytest.raises(RuntimeError, match=message):
        other.load_state_dict(state)
    assert torch.equal(other.float8_scales.state, before)


def train(model: nn.Module, x: torch.Tensor, steps: int, sync: bool) -> list[str]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            for _ in range(3):  # micro-batches
                model(x).sum().backward()
            if sync:
                f8.sync_float8_amax_and_scale_history(model)
            optimizer.step()
            optimizer.zero_grad()
    return [str(w.message) for w in caught if "delayed scaling" in str(w.message)]


def test_training_without_a_sync_is_told(device: str, mlp: Any, config: Any) -> None:
    model, x = convert(mlp(), config), inputs(device)
    copied = copy.deepcopy(model)
    (message,) = train(model, x, 5, sync=False)
    assert "call float8.torch.sync_float8_amax_and_scale_history(model)" in message
    assert not train(model, x, 3, sync=False)  # once
    assert len(train(copied, x, 2, sync=False)) == 1


def test_training_that_synchronised_once_is_told_nothing(
    device: str, mlp: Any, config: Any
) -> None:
    model, x = convert(mlp(), config), inputs(device)
    assert not train(model, x, 5, sync=True)
    assert not train(model, x, 3, sync=False)


def test_training_of_plain_linears_is_told_nothing(device: str, mlp: Any) -> None:
    assert not train(mlp(), inputs(device), 5, sync=False)


class TestAnotherRecipe:
    """Converting a model with delayed scaling again."""

    def test_to_a_dynamic_one(self, device: str, mlp: Any, config: Any) -> None:
        plain, x = mlp(), inputs(device)
        expected = step(
            f8.convert_to_float8_training(copy.deepcopy(plain), config=config("rowwise")), x
        )
        model = convert(plain, config)
        step(model, x)
        keys = set(plain.state_dict()) - {"float8_scales.state"}
        f8.convert_to_float8_training(model, config=config("rowwise"))
        assert set(model.state_dict()) == keys and not hasattr(model, "float8_scales")
        assert agree(step(model, x), expected)

    def test_from_a_dynamic_one(self, device: str, mlp: Any, config: Any) -> None:
        plain, x = mlp(), inputs(device)
        expected = convert(copy.deepcopy(plain), config)
        model = f8.convert_to_float8_training(plain, config=config("rowwise"))
        convert(model, config)
        for scale in (1, 2):
            assert reference.same(step(model, scale * x), step(expected, scale * x))

    def test_equal_options_keep_the_scales(self, device: str, mlp: Any, config: Any) -> None:
        model, x = convert(mlp(), config), inputs(device)
        step(model, x)
        before = list(model)
        assert list(convert(model, config)) == before

    def test_another_history_begins_anew(self, device: str, mlp: Any, config: Any) -> None:
        plain, x = mlp(), inputs(device)
        expected = step(convert(copy.deepcopy(plain), config), x)
        model = convert(plain, config)
        step(model, 100 * x)
        convert(model, config, history=2)
        assert model.float8_scales.history == 2
        assert reference.same(step(model, x), expected)

    def test_some_layers(self, device: str, mlp: Any, config: Any) -> None:
        """The layers that keep delayed scaling keep their scales."""
        model, x = convert(mlp(), config), inputs(device)
        step(model, x)
        state = model.float8_scales
        f8.convert_to_float8_training(
            model, config=config("rowwise"), module_filter_fn=lambda _, name: name == "0"
        )
        assert model.float8_scales is state and model[2]._scales is state
        step(model, x)
        with pytest.raises(ValueError, match="one call"):
            convert(model, config)
        assert model[0].recipe.name == "rowwise" and model.float8_scales is state

    def test_failure_leaves_the_model(
        self, device: str, mlp: Any, config: Any, monkeypatch: Any
    ) -> None:
        model, x = convert(mlp(), config), inputs(device)
        step(model, x)
        before = list(model)

        def fails(*_: Any) -> Any:
            raise RuntimeError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(f8.scales, "ScaleState", fails)
            with pytest.raises(RuntimeError, match="no memory"):
                convert(model, config, history=2)
        assert list(model) == before
        step(model, x)

    def test_root(self, device: str, config: Any) -> None:
        linear = convert(nn.Linear(64, 64, device=device), config)
        assert hasattr(linear, "float8_scales")
        rowwise = f8.convert_to_float8_training(linear, config=config("rowwise"))
        assert hasattr(linear, "float8_scales") and not hasattr(rowwise, "float8_scales")
        rowwise(torch.randn(2, 64, device=device)).sum().backward()


def test_meta(device: str, config: Any) -> None:
    with torch.device("meta"):
        model = convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), config)
    model.to_empty(device=device)
    for layer in model:
        layer.reset_parameters()
    x = inputs(device)
    assert reference.same(step(model, x), step(model, x))


def test_made_on_the_cpu_and_moved(device: str, config: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    convert(model, lambda recipe: f8.LinearConfig(recipe))  # without emulate
    state = copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
    if device == "cuda":
        model.to(device)
        x = inputs(device)
        assert reference.same(step(model, x), step(model, x))


def test_compile(device: str, mlp: Any, config: Any) -> None:
    torch._dynamo.reset()
    eager = convert(mlp(), config)
    model = copy.deepcopy(eager)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for m in (32, 48, 640, 16):
        x = torch.randn(m, 64, dtype=torch.bfloat16, device=device)
        leaf = x.clone().requires_grad_()
        y = compiled(leaf)
        grads = torch.autograd.grad(y.float().square().sum(), (leaf, *model.parameters()))
        f8.sync_float8_amax_and_scale_history(model)
        assert reference.same(step(eager, x), [y, *grads])
    assert counter.frame_count <= 2
    assert torch.equal(eager.float8_scales.state, model.float8_scales.state)


def test_blocks_share_a_compilation(device: str, config: Any) -> None:
    torch._dynamo.reset()
    blocks = [nn.Sequential(nn.Linear(64, 64, device=device), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*blocks)
    convert(model, config)
    counter = CompileCounterWithBackend("aot_eager")
    for block in blocks:
        block.compile(fullgraph=True, backend=counter)
    x = torch.randn(16, 64, device=device)
    for _ in range(2):
        step(model, x)
    assert counter.frame_count == 1


def test_torchao_names(device: str, mlp: Any) -> None:
    delayed = torchao.CastConfig(scaling_type=torchao.ScalingType.DELAYED)
    config = torchao.Float8LinearConfig(
        cast_config_input=delayed,
        cast_config_weight=delayed,
        cast_config_grad_output=delayed,
        delayed_scaling_config=torchao.DelayedScalingConfig(history_len=4),
        emulate=device == "cpu",
    )
    assert config.recipe().name == "delayed"
    model, x = torchao.convert_to_float8_training(mlp(), config=config), inputs(device)
    assert reference.same(step(model, x, sync=False), step(model, x, sync=False))
    torchao.sync_float8_amax_and_scale_history(model)
    step(model, x)
    assert torchao.Float8LinearConfig.from_recipe_name("delayed").recipe().name == "delayed"


def test_layer_without_a_state(device: str, options: Any) -> None:
    layer = f8.Float8Linear(64, 64, device=device, recipe="delayed", **options)
    with pytest.raises(ValueError, match="scales"):
        layer(torch.randn(2, 64, device=device))
    f8.attach_scales(layer)
    layer(torch.randn(2, 64, device=device)).sum().backward()


def test_second_conversion_is_refused(device: str, config: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(device)
    f8.convert_to_float8_training(
        model, config=config("delayed"), module_filter_fn=lambda _, name: name == "0"
    )
    with pytest.raises(ValueError, match="one call"):
        convert(model, config)
    assert type(model[1]) is nn.Linear


def test_history_length() -> None:
    with pytest.raises(ValueError, match="history is 0"):
        f8.LinearConfig("delayed", history=0)


@pytest.mark.parametrize("fused", (False, True))
def test_evaluation_scales_weights_and_data_as_they_are(
    fused: bool, device: str, mlp: Any, config: Any
) -> None:
    """As those of an average or of a merged adapter, which no step has recorded."""
    model, x = mlp(), inputs(device)
    dynamic = f8.convert_to_float8_training(copy.deepcopy(model), config=config("tensorwise"))
    delayed = convert(model, config)
    if fused:
        assert all(each.fused for each in f8.fuse(delayed))
    step(delayed, x)
    with torch.no_grad():
        scaled_in_training = delayed(16 * x)
        for each in (delayed, dynamic):
            each.eval()[0].weight.data *= 4
        before = delayed.float8_scales.state.clone()
        y, expected = delayed(16 * x), dynamic(16 * x)
    assert reference.agree(y, expected)
    assert torch.equal(before, delayed.float8_scales.state)
    assert not reference.agree(scaled_in_training, dynamic(16 * x))


def test_sync_of_a_part(device: str, mlp: Any, config: Any) -> None:
    """A part of the converted model, as peft takes it out of its wrapper, has the state that the whole model keeps."""
    inner, x = mlp(), inputs(device)
    wrapper = convert(nn.ModuleDict({"inner": inner}), config)
    before = wrapper.float8_scales.state.clone()
    step(inner, x)
    assert not torch.equal(before, wrapper.float8_scales.state)
