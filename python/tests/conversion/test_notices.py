"""Calls and options that do nothing say so, once, where torchao's say nothing but in its log."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import float8.torch as f8
from float8 import torchao

CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "prepare": lambda model: f8.prepare(model, 64),
    "cache_weight_casts": f8.cache_weight_casts,
    "sync_float8_amax_and_scale_history": f8.sync_float8_amax_and_scale_history,
    "precompute_float8_dynamic_scale_for_fsdp": f8.precompute_float8_dynamic_scale_for_fsdp,
}


pytestmark = pytest.mark.usefixtures("untold")


def told(call: Callable[[], Any]) -> list[Any]:
    """Returns the warnings of float8 while a call runs twice, each of which Python would show."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
        call()
    return [each for each in found if str(each.message).startswith("float8: ")]


@pytest.mark.parametrize("name", CALLS)
def test_a_model_that_was_not_converted(name: str, mlp: Any, config: Any) -> None:
    model = mlp()
    (warning,) = told(lambda: CALLS[name](model))
    assert str(warning.message).startswith(f"float8: {name} did nothing")
    assert "convert_to_float8_training" in str(warning.message)
    assert warning.filename == __file__
    f8.convert_to_float8_training(model, config=config("rowwise"))
    assert told(lambda: CALLS[name](model)) == []


def test_torchao_says_so_in_its_log_alone(mlp: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert told(lambda: torchao.sync_float8_amax_and_scale_history(mlp())) == []
        assert len(caplog.records) == 2
        assert "did nothing" in caplog.text and "Sequential" in caplog.text


def test_torchao_s_precompute_says_nothing(mlp: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert told(lambda: torchao.precompute_float8_dynamic_scale_for_fsdp(mlp())) == []
        assert caplog.records == []


def test_a_conversion_of_nothing() -> None:
    def converts_nothing() -> None:
        f8.convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)), module_filter_fn=_no)

    (warning,) = told(converts_nothing)
    assert "no linear passed the filter" in str(warning.message)
    assert warning.filename == __file__


def test_torchao_s_conversion_of_nothing() -> None:
    (warning,) = told(lambda: torchao.convert_to_float8_training(nn.GELU()))
    assert "GELU" in str(warning.message) and "nn.Linear" in str(warning.message)


def _no(*_: object) -> bool:
    return False
