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


def _expanded(like: torch.Tensor) -> torch.Tensor:
    return like[:1].expand(like.numel())


def _behind_the_start(like: torch.Tensor) -> torch.Tensor:
    return like[1:]


_floats = torch.Tensor.float

SIZES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "short": lambda state: state[:8].clone(),
    "long": lambda state: torch.cat((state, state)),
    "shrunk": _shrunk,
}
STATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **SIZES,
    "a view": lambda state: torch.cat((state, state))[: state.numel()],
    "behind the start": lambda state: torch.cat((state, state))[16 : 16 + state.numel()],
    "floats": lambda state: torch.zeros(state.numel() // 4, device=state.device),
    "signed bytes": lambda state: state.view(torch.int8),
    "of two dimensions": lambda state: state.view(2, -1),
    "strided": lambda state: torch.cat((state, state))[::2],
    "one element": _expanded,
    "freed": _freed,
}


@pytest.mark.parametrize("op", ("scales_sync", "scales_init", "scales_find_first"))
@pytest.mark.parametrize("kind", STATES)
def test_ops_of_a_scale_state_take_no_other_memory(
    kind: str, op: str, config: Config, device: str
) -> None:
    scales = _delayed(config, device).float8_scales
    bad = STATES[kind](scales._live)
    with pytest.raises(ValueError, match="scale state"):
        getattr(torch.ops.float8, op)(bad, scales.config, scales.layout)


# Which linears have a first step to come is kept by the state's address: memory of any size does.
@pytest.mark.parametrize("kind", [kind for kind in STATES if kind not in SIZES])
def test_first_steps_are_set_in_a_scale_state_alone(kind: str, config: Config, device: str) -> None:
    scales = _delayed(config, device).float8_scales
    bad = STATES[kind](scales._live)
    with pytest.raises(ValueError, match="scale state"):
        torch.ops.float8.scales_set_first(bad, scales.config, scales.layout, [0])


@pytest.mark.parametrize("kind", STATES)
def test_a_model_works_on_after_its_state_was_replaced(
    kind: str, config: Config, device: str
) -> None:
    model = _delayed(config, device)
    scales = model.float8_scales
    own, bad = scales._live, STATES[kind](scales._live)
    scales._live = bad
    with pytest.raises(ValueError, match="scale state"):
        f8.sync_float8_amax_and_scale_history(model)
    if kind in SIZES:
        for linear in scales._attached:
            linear._scale_view = bad[:16]
        with pytest.raises(ValueError, match="scale state"):
            _step(model, device)
    scales._live = own
    for linear in scales._attached:
        linear._scale_view = scales._view(linear._scale_index)
    _step(model, device)
    f8.sync_float8_amax_and_scale_history(model)


def test_the_layout_of_a_state_is_not_set(config: Config, device: str) -> None:
    with pytest.raises(AttributeError, match="layout"):
        _delayed(config, device).float8_scales.layout = 0


LAYOUTS = pytest.mark.parametrize(
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


@LAYOUTS
@pytest.mark.parametrize("op", ("scales_sync", "scales_find_first"))
def test_ops_take_no_layout_of_another_state(
    op: str, layout: int, config: Config, device: str
) -> None:
    scales = _delayed(config, device).float8_scales
    with pytest.raises((ValueError, RuntimeError), match="float8: "):
        getattr(torch.ops.float8, op)(scales.state, scales.config, layout)


@LAYOUTS
def test_linears_take_no_layout_of_another_state(layout: int, config: Config, device: str) -> None:
    model = _delayed(config, device)
    for linear in model.float8_scales._attached:
        linear._layout = layout
    with pytest.raises((ValueError, RuntimeError), match="float8: "):
        _step(model, device)


@pytest.mark.parametrize(("first", "words"), ((8, "a multiple of 16"), (32, "index is 2")))
def test_a_part_that_is_none(first: int, words: str, config: Config, device: str) -> None:
    model = _delayed(config, device)
    model[0]._scale_view = model.float8_scales.state[first : first + 16]
    with pytest.raises(ValueError, match=words):
        _step(model, device)


def test_a_state_is_resized_while_linears_have_parts_of_it(config: Config, device: str) -> None:
    model = _delayed(config, device)
    model.float8_scales.state.untyped_storage().resize_(256)
    with pytest.raises(ValueError, match="resized"):
        _step(model, device)
    with pytest.raises(ValueError, match="resized"):
        f8.sync_float8_amax_and_scale_history(model)


RECORDS: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, int]]]
RECORDS = {
    "9000 words": lambda amax, state: (amax.expand(9000).contiguous(), state[:16], 0),
    "a float": lambda amax, state: (amax.float(), state[:16], 0),
    "operand 3": lambda amax, state: (amax, state[:16], 3),
    "operand 1000000": lambda amax, state: (amax, state[:16], 10**6),
    "a state of ints": lambda amax, state: (amax, state.view(torch.int32), 0),
    "an empty state": lambda amax, state: (amax, state.new_zeros(0), 0),
}


@pytest.mark.parametrize("wrong", RECORDS)
def test_record_amax_takes_no_other_memory(wrong: str, config: Config, device: str) -> None:
    state = _delayed(config, device).float8_scales.state
    amax = torch.ones(1, dtype=torch.int32, device=device)
    record_amax(amax, state[:16], 2)
    arguments = RECORDS[wrong](amax, state)
    before = arguments[1].untyped_storage().nbytes()
    with pytest.raises(ValueError, match="record_amax"):
        record_amax(*arguments)
    assert arguments[1].untyped_storage().nbytes() == before


def _bits(recipe: str, device: str) -> int:
    return recipes.pack(recipes.Recipe.named(recipe), emulate=device == "cpu")


@pytest.fixture
def x(device: str) -> torch.Tensor:
    return torch.randn(ROWS, K, device=device)


@pytest.fixture
def weight(device: str) -> torch.Tensor:
    return torch.randn(N, K, device=device)


@pytest.mark.parametrize("spoil", (_expanded, _floats, _freed, _shrunk))
@pytest.mark.parametrize("at", range(4), ids=("x q", "x qt", "weight q", "weight qt"))
@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise", "blockwise"))
def test_operands_in_fp8_that_are_none(
    recipe: str, at: int, spoil: Any, x: torch.Tensor, weight: torch.Tensor, device: str
) -> None:
    bits = _bits(recipe, device)
    own = [
        *_ops.quantize(x, bits, _ops.INPUT, True),
        *_ops.quantize(weight, bits, _ops.WEIGHT, True),
    ]

    def forward(q: Any, qt: Any, w_q: Any, w_qt: Any) -> Any:
        return _ops.linear_forward(x, q, qt, weight, w_q, w_qt, None, None, bits, 0, True)

    forward(*own)

    own[at] = spoil(own[at])
    with pytest.raises(ValueError, match="operand in fp8"):
        forward(*own)


def _short(like: torch.Tensor) -> torch.Tensor:
    return like[:16]


@pytest.mark.parametrize("spoil", (_short, _expanded, _floats, _freed))
@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise", "blockwise"))
def test_saved_bytes_that_are_none(
    recipe: str, spoil: Any, x: torch.Tensor, weight: torch.Tensor, device: str
) -> None:
    bits = _bits(recipe, device)
    dy = torch.randn(ROWS, N, device=device)
    _, saved = _ops.linear_forward(x, None, None, weight, None, None, None, None, bits, 0, True)
    with pytest.raises(ValueError, match="saved"):
        _ops.linear_backward(dy, spoil(saved), None, None, weight, None, None, bits, 0, 7)


GONE: dict[str, tuple[Any, Any, Any]] = {
    "x freed": (_freed, None, None),
    "x shrunk": (_shrunk, None, None),
    "weight freed": (None, _freed, None),
    "weight shrunk": (None, _shrunk, None),
    "bias freed": (None, None, _freed),
    "weight freed under bfloat16": (torch.Tensor.bfloat16, _freed, torch.Tensor.bfloat16),
}


@pytest.mark.parametrize("what", GONE)
def test_tensors_whose_memory_is_gone(
    what: str, x: torch.Tensor, weight: torch.Tensor, device: str
) -> None:
    tensors = (x, weight, torch.randn(N, device=device))
    x, weight, bias = (
        change(each) if change else each for each, change in zip(tensors, GONE[what], strict=True)
    )
    bits = _bits("tensorwise", device) | recipes.BIAS
    with pytest.raises(ValueError, match="freed"):
        _ops.linear_forward(x, None, None, weight, None, None, bias, None, bits, 0, True)


def test_a_cast_of_memory_that_is_gone(x: torch.Tensor, device: str) -> None:
    with pytest.raises(ValueError, match="freed"):
        _ops.quantize(_freed(x), _bits("tensorwise", device), _ops.INPUT, True)


@pytest.mark.parametrize("stride", (2, 0))
def test_a_bias_with_strides(
    stride: int, x: torch.Tensor, weight: torch.Tensor, device: str
) -> None:
    bits = _bits("tensorwise", device) | recipes.BIAS
    bias = torch.randn(2 * N, device=device).as_strided((N,), (stride,))
    y, expected = (
        _ops.linear_forward(x, None, None, weight, None, None, b, None, bits, 0, False)[0]
        for b in (bias, bias.contiguous())
    )
    assert torch.equal(y, expected)


GATHERED: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[Any, torch.Tensor]]] = {
    "expanded data": lambda data, scale: (_expanded(data), scale),
    "floats": lambda data, scale: (data.float(), scale),
    "data behind the start": lambda data, scale: (data[1:], scale),
    "freed data": lambda data, scale: (_freed(data), scale),
    "no data": lambda data, scale: (None, scale),
    "empty scales": lambda data, scale: (data, scale[:0]),
    "scales of doubles": lambda data, scale: (data, scale.double()),
    "freed scales": lambda data, scale: (data, _freed(scale)),
}


def _gathered(device: str) -> tuple[torch.Tensor, ...]:
    """Returns x, a weight, and bytes in place of its gathered copy, whose rows are whole 128s."""
    x, weight = (torch.randn(rows, 2 * K, device=device) for rows in (ROWS, N))
    data = torch.zeros(2 * N * K, dtype=torch.uint8, device=device)
    return x, weight, data, torch.ones(1, device=device)


@pytest.mark.parametrize("wrong", GATHERED)
def test_copies_of_a_gathered_weight(wrong: str, device: str) -> None:
    bits = _bits("tensorwise", device)
    x, weight, *own = _gathered(device)

    def forward(data: Any, scales: Any) -> Any:
        return _ops.linear_forward(
            x, None, None, weight, data, None, None, None, bits, 0, False, scales
        )

    forward(*own)
    with pytest.raises(ValueError, match=r"float8: .*(weight|fp8)"):
        forward(*GATHERED[wrong](*own))


@pytest.mark.parametrize("shards", (0, -1, 7))
def test_shards_of_a_gathered_weight(shards: int, device: str) -> None:
    bits = _bits("tensorwise", device)
    x, weight, data, scale = _gathered(device)
    dy = torch.randn(ROWS, N, device=device)
    _, saved = _ops.linear_forward(x, None, None, weight, None, None, None, None, bits, 0, True)
    with pytest.raises(ValueError, match="shards"):
        _ops.linear_backward(dy, saved, None, None, weight, data, None, bits, 0, 7, scale, shards)


def _kept(weight: torch.Tensor, bits: int) -> list[torch.Tensor]:
    state = torch.zeros(_ops.WEIGHT_STATE_BYTES, dtype=torch.uint8, device=weight.device)
    return [*_ops.quantize(weight, bits, _ops.WEIGHT, True), state]


@pytest.mark.parametrize("spoil", (_behind_the_start, _expanded, _floats, _freed))
@pytest.mark.parametrize("at", range(3), ids=("q", "qt", "state"))
def test_kept_copies_of_a_weight(at: int, spoil: Any, weight: torch.Tensor, device: str) -> None:
    bits = _bits("rowwise", device)
    own = _kept(weight, bits)
    _ops.cast_weight(weight, *own, weight, bits)
    own[at] = spoil(own[at])
    with pytest.raises(ValueError, match="kept copy of a weight"):
        _ops.cast_weight(weight, *own, weight, bits)


def test_a_state_without_kept_copies(x: torch.Tensor, weight: torch.Tensor, device: str) -> None:
    bits = _bits("rowwise", device)
    state = _kept(weight, bits)[2]
    with pytest.raises(ValueError, match="without its copies"):
        _ops.linear_forward(
            x, None, None, weight, None, None, None, None, bits, 0, False, None, state
        )


OF_AN_OPERAND: dict[str, Callable[[torch.Tensor, int, int], Any]] = {
    "quantize": lambda x, bits, operand: _ops.quantize(x, bits, operand, True),
    "quantized_bytes": lambda _, *own: torch.ops.float8.quantized_bytes(512, K, *own, True),
    "amax_words": lambda _, *own: torch.ops.float8.amax_words(512, K, *own),
    "copy_layout": lambda _, *own: torch.ops.float8.copy_layout(512, 512, K, *own, 0, False),
}


@pytest.mark.parametrize("operand", (-1, 3, 256, 2**40))
@pytest.mark.parametrize("op", OF_AN_OPERAND)
def test_an_operand_that_is_none(op: str, operand: int, x: torch.Tensor, device: str) -> None:
    with pytest.raises(ValueError, match=r"0 .input., 1 .weight. or 2 .grad_output."):
        OF_AN_OPERAND[op](x, _bits("tensorwise", device), operand)


@pytest.mark.parametrize("rows", (-1, 0, 2**41, 2**63 - 1))
def test_numbers_of_rows_that_cannot_be(rows: int, x: torch.Tensor, device: str) -> None:
    with pytest.raises(ValueError, match=r"from 1 to 2.40 rows"):
        torch.ops.float8.prepare(x, x, [N], [K], rows, _bits("tensorwise", device), False)


PADDINGS = (-16, -4, 0, 3, 4, 16, 1 << 33, 1 << 62)


@pytest.mark.parametrize(
    ("columns", "padding"),
    [(k, padding) for k, own in ((60, 4), (K, 0)) for padding in PADDINGS if padding != own],
)
def test_a_padding_that_was_changed(
    columns: int, padding: int, config: Config, device: str
) -> None:
    layer = nn.Linear(columns, N).to(device)
    model = f8.convert_to_float8_training(layer, config=config(pad_inner_dim=columns != K))
    model._padding = padding
    with pytest.raises(ValueError, match=r"float8: .*(padding|multiple of 16)"):
        model(torch.randn(ROWS, columns, device=device))


CALLS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "forward": lambda layer, x: layer(x),
    "prepare": lambda layer, _: f8.prepare(layer, ROWS),
}


@pytest.mark.parametrize("size", (-5, 0, 64, 76, 1 << 31, 1 << 40))
@pytest.mark.parametrize("call", CALLS)
def test_sizes_that_were_changed(call: str, size: int, config: Config, device: str) -> None:
    layer: Any = nn.Linear(60, N).to(device)
    layer = f8.convert_to_float8_training(layer, config=config(pad_inner_dim=True))
    layer.in_features = size
    with pytest.raises(ValueError, match="belong together"):
        CALLS[call](layer, torch.randn(ROWS, 60, device=device))
