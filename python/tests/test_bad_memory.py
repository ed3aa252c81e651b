"""Tensors that are not what the library expects: each op refuses them before it reads or writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import float8.torch as f8
from float8 import recipes
from float8.torch import _ops
from float8.torch.amaxes import record_amax

N, K, ROWS = 48, 64, 32
Config = Callable[..., f8.LinearConfig]


def _delayed(config: Config, device: str) -> Any:
    model = nn.Sequential(nn.Linear(K, K), nn.Linear(K, K)).to(device)
    f8.convert_to_float8_training(model, config=config("delayed"))
    _step(model, device)
    f8.sync_float8_amax_and_scale_history(model)
    return model


def _step(model: nn.Module, device: str) -> None:
    model(torch.randn(ROWS, K, device=device)).square().mean().backward()


def _freed(like: torch.Tensor) -> torch.Tensor:
    tensor = like.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def _shrunk(like: torch.Tensor) -> torch.Tensor:
    tensor = like.clone()
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() - 256)
    return tensor


STATES: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    ("short", lambda state: state[:8].clone()),
    ("long", lambda state: torch.cat((state, state))),
    ("a view", lambda state: torch.cat((state, state))[: state.numel()]),
    ("behind the start", lambda state: torch.cat((state, state))[16 : 16 + state.numel()]),
    ("floats", lambda state: torch.zeros(state.numel() // 4, device=state.device)),
    ("signed bytes", lambda state: state.view(torch.int8)),
    ("of two dimensions", lambda state: state.view(2, -1)),
    ("strided", lambda state: torch.cat((state, state))[::2]),
    ("one element", lambda state: state[:1].expand(state.numel())),
    ("freed", _freed),
    ("shrunk", _shrunk),
)


@pytest.mark.parametrize(("kind", "change"), STATES, ids=[kind for kind, _ in STATES])
def test_a_state_that_is_replaced(kind: str, change: Any, config: Config, device: str) -> None:
    model = _delayed(config, device)
    scales = model.float8_scales
    own, bad = scales._live, change(scales._live)
    calls = (
        lambda: torch.ops.float8.scales_sync(bad, scales.config, scales.layout),
        lambda: torch.ops.float8.scales_init(bad, scales.config, scales.layout),
        lambda: torch.ops.float8.scales_find_first(bad, scales.config, scales.layout),
        lambda: torch.ops.float8.scales_set_first(bad, scales.config, scales.layout, [0]),
    )
    # Which linears have a first step to come is kept by the state's address: memory of any size does.
    for call in calls[: 3 if kind in ("short", "long", "shrunk") else 4]:
        with pytest.raises(ValueError, match="scale state"):
            call()
    scales._live = bad
    with pytest.raises(ValueError, match="scale state"):
        f8.sync_float8_amax_and_scale_history(model)
    if kind in ("short", "long", "shrunk"):
        for linear in scales._attached:
            linear._scale_view = bad[:16]
        with pytest.raises(ValueError, match="scale state"):
            _step(model, device)
    # Nothing of it stays: the state that was there before works on.
    scales._live = own
    for linear in scales._attached:
        linear._scale_view = scales._view(linear._scale_index)
    _step(model, device)
    f8.sync_float8_amax_and_scale_history(model)


@pytest.mark.parametrize(
    "layout",
    (
        0,
        -1,
        1,
        3,
        2 | 1000 << 32,
        2 | 65535 << 32,
        2**20 + 1,
        2**31,
        2**32 - 1,
        1 << 40,
        2 | 1 << 57,
    ),
)
def test_a_layout_of_another_state(layout: int, config: Config, device: str) -> None:
    model = _delayed(config, device)
    scales = model.float8_scales
    with pytest.raises(AttributeError, match="layout"):
        scales.layout = layout
    for op in (torch.ops.float8.scales_sync, torch.ops.float8.scales_find_first):
        with pytest.raises((ValueError, RuntimeError), match="float8: "):
            op(scales.state, scales.config, layout)
    for linear in scales._attached:
        linear._layout = layout
    with pytest.raises((ValueError, RuntimeError), match="float8: "):
        _step(model, device)


def test_a_part_that_is_none(config: Config, device: str) -> None:
    model = _delayed(config, device)
    scales = model.float8_scales
    for first, words in ((8, "a multiple of 16"), (32, "index is 2")):
        model[0]._scale_view = scales.state[first : first + 16]
        with pytest.raises(ValueError, match=words):
            _step(model, device)


def test_a_state_is_resized_while_linears_have_parts_of_it(config: Config, device: str) -> None:
    model = _delayed(config, device)
    model.float8_scales.state.untyped_storage().resize_(256)
    with pytest.raises(ValueError, match="replaced, resized or freed"):
        _step(model, device)
    with pytest.raises(ValueError, match="replaced, resized or freed"):
        f8.sync_float8_amax_and_scale_history(model)


def test_record_amax_takes_no_other_memory(config: Config, device: str) -> None:
    state = _delayed(config, device).float8_scales.state
    amax = torch.ones(1, dtype=torch.int32, device=device)
    record_amax(amax, state[:16], 2)
    for wrong in (
        (amax.expand(9000).contiguous(), state[:16], 0),
        (amax.float(), state[:16], 0),
        (amax, state[:16], 3),
        (amax, state[:16], 10**6),
        (amax, state.view(torch.int32), 0),
        (amax, torch.zeros(0, dtype=torch.uint8, device=device), 0),
    ):
        before = wrong[1].untyped_storage().nbytes()
        with pytest.raises(ValueError, match="record_amax takes"):
            record_amax(*wrong)
        assert wrong[1].untyped_storage().nbytes() == before


def _bits(recipe: str, device: str) -> int:
    return recipes.pack(recipes.Recipe.named(recipe), emulate=device == "cpu")


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise", "blockwise"))
def test_operands_in_fp8_that_are_none(recipe: str, device: str) -> None:
    bits = _bits(recipe, device)
    x, weight = torch.randn(ROWS, K, device=device), torch.randn(N, K, device=device)
    q, qt = _ops.quantize(x, bits, _ops.INPUT, True)
    w_q, w_qt = _ops.quantize(weight, bits, _ops.WEIGHT, True)

    def forward(q: Any, qt: Any, w_q: Any, w_qt: Any) -> Any:
        return _ops.linear_forward(x, q, qt, weight, w_q, w_qt, None, None, bits, 0, True)

    _, saved = forward(q, qt, w_q, w_qt)
    own = [q, qt, w_q, w_qt]
    for at, copy in enumerate(own):
        if copy.numel() == 0:
            continue
        for wrong in (copy[:1].expand(copy.numel()), copy.float(), _freed(copy), _shrunk(copy)):
            given = [*own[:at], wrong, *own[at + 1 :]]
            with pytest.raises(ValueError, match="float8: an operand in fp8"):
                forward(*given)
    dy = torch.randn(ROWS, N, device=device)
    _, saved = _ops.linear_forward(x, None, None, weight, None, None, None, None, bits, 0, True)
    for wrong in (saved[:16], saved[:1].expand(saved.numel()), saved.float(), _freed(saved)):
        with pytest.raises(ValueError, match="saved"):
            _ops.linear_backward(dy, wrong, None, None, weight, None, None, bits, 0, 7)


def test_tensors_whose_memory_is_gone(device: str) -> None:
    bits = _bits("tensorwise", device)
    x, weight = torch.randn(ROWS, K, device=device), torch.randn(N, K, device=device)
    bias = torch.randn(N, device=device)

    def forward(x: Any, weight: Any, bias: Any) -> Any:
        own = bits | recipes.BIAS
        return _ops.linear_forward(x, None, None, weight, None, None, bias, None, own, 0, True)

    own = (x, weight, bias)
    for at, tensor in enumerate(own):
        for wrong in (_freed(tensor), _shrunk(tensor) if at < 2 else _freed(tensor)):
            with pytest.raises(ValueError, match="was freed or resized"):
                forward(*own[:at], wrong, *own[at + 1 :])
    with pytest.raises(ValueError, match="was freed or resized"):
        _ops.quantize(_freed(x), bits, _ops.INPUT, True)
    with pytest.raises(ValueError, match="was freed or resized"):
        forward(x.bfloat16(), _freed(weight), bias.bfloat16())


def test_a_bias_with_strides(device: str) -> None:
    bits = _bits("tensorwise", device) | recipes.BIAS
    x, weight = torch.randn(ROWS, K, device=device), torch.randn(N, K, device=device)
    for bias in (torch.randn(2 * N, device=device)[::2], torch.randn(1, device=device).expand(N)):
        y, expected = (
            _ops.linear_forward(x, None, None, weight, None, None, b, None, bits, 0, False)[0]
            for b in (bias, bias.contiguous())
        )
        assert torch.equal(y, expected)


def test_copies_of_a_gathered_weight(device: str) -> None:
    k = 2 * K  # rows of such a copy are a multiple of 128
    bits = _bits("tensorwise", device)
    x, weight = torch.randn(ROWS, k, device=device), torch.randn(N, k, device=device)
    data = torch.zeros(N * k, dtype=torch.uint8, device=device)
    scale = torch.ones(1, device=device)

    def forward(data: Any, scales: Any) -> Any:
        return _ops.linear_forward(
            x, None, None, weight, data, None, None, None, bits, 0, False, scales
        )

    forward(data, scale)
    wrong = (
        (data[:1].expand(N * k), scale),
        (data.float(), scale),
        (data[1:], scale),
        (_freed(data), scale),
        (data, scale[:0]),
        (data, scale.double()),
        (data, _freed(scale)),
        (None, scale),
    )
    for given in wrong:
        with pytest.raises(ValueError, match=r"float8: .*(weight|fp8)"):
            forward(*given)
    dy = torch.randn(ROWS, N, device=device)
    _, saved = _ops.linear_forward(x, None, None, weight, None, None, None, None, bits, 0, True)
    for shards in (0, -1, 7):
        with pytest.raises(ValueError, match="shards"):
            _ops.linear_backward(
                dy, saved, None, None, weight, data, None, bits, 0, 7, scale, shards
            )


def test_kept_copies_of_a_weight(device: str) -> None:
    bits = _bits("rowwise", device)
    weight = torch.randn(N, K, device=device)
    q, qt = _ops.quantize(weight, bits, _ops.WEIGHT, True)
    state = torch.zeros(_ops.WEIGHT_STATE_BYTES, dtype=torch.uint8, device=device)
    own = (q, qt, state)
    _ops.cast_weight(weight, *own, weight, bits)
    for at, copy in enumerate(own):
        for wrong in (copy[1:], copy[:1].expand(copy.numel()), copy.float(), _freed(copy)):
            with pytest.raises(ValueError, match="a kept copy of a weight, or its state"):
                _ops.cast_weight(weight, *own[:at], wrong, *own[at + 1 :], weight, bits)
    x = torch.randn(ROWS, K, device=device)
    with pytest.raises(ValueError, match="without its copies"):
        _ops.linear_forward(
            x, None, None, weight, None, None, None, None, bits, 0, False, None, state
        )


def test_numbers_that_name_nothing(device: str) -> None:
    bits = _bits("tensorwise", device)
    x = torch.randn(ROWS, K, device=device)
    for operand in (-1, 3, 256, 2**40):
        for call in (
            lambda operand=operand: _ops.quantize(x, bits, operand, True),
            lambda operand=operand: torch.ops.float8.quantized_bytes(512, K, bits, operand, True),
            lambda operand=operand: torch.ops.float8.amax_words(512, K, bits, operand),
            lambda operand=operand: torch.ops.float8.copy_layout(
                512, 512, K, bits, operand, 0, False
            ),
        ):
            with pytest.raises(
                ValueError, match=r"is not 0 .input., 1 .weight. or 2 .grad_output."
            ):
                call()
    for rows in (-1, 0, 2**41, 2**63 - 1):
        with pytest.raises(ValueError, match=r"from 1 to 2.40 rows"):
            torch.ops.float8.prepare(x, x, [N], [K], rows, bits, False)


@pytest.mark.parametrize("padding", (-16, -4, 0, 3, 16, 1 << 33, 1 << 62))
def test_a_padding_that_was_changed(padding: int, config: Config, device: str) -> None:
    layer = nn.Linear(60, N).to(device)
    for model in (
        f8.convert_to_float8_training(layer, config=config(pad_inner_dim=True)),
        f8.convert_to_float8_training(nn.Linear(K, N).to(device), config=config()),
    ):
        x = torch.randn(ROWS, model.in_features, device=device)
        if model._padding == padding:
            continue
        model._padding = padding
        with pytest.raises(ValueError, match=r"float8: .*(padding|multiple of 16)"):
            model(x)


@pytest.mark.parametrize("size", (-5, 0, 64, 76, 1 << 31, 1 << 40))
def test_sizes_that_were_changed(size: int, config: Config, device: str) -> None:
    layer: Any = nn.Linear(60, N).to(device)
    layer = f8.convert_to_float8_training(layer, config=config(pad_inner_dim=True))
    layer.in_features = size
    x = torch.randn(ROWS, 60, device=device)
    for call in (lambda: layer(x), lambda: f8.prepare(layer, ROWS)):
        with pytest.raises(ValueError, match="do not belong together"):
            call()
