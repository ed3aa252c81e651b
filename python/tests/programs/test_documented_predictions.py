"""The predictions of docs/communication-model.md are those that the program makes."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

import pytest
import repository
from repository import float8_tune

DOCUMENT = (repository.ROOT / "docs/communication-model.md").read_text()
# GPUs, FSDP x TP, layers that are converted, speedup, exposed in bf16 and in fp8.
RANKS = re.findall(
    r"^\| [\d,]+ \| (\d+) x (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+), ([\d.]+) (ms|s) \| (\w+) \|$",
    DOCUMENT,
    re.MULTILINE,
)
# GPUs, hosts, gathers in bf16 and fp8, amaxes, saved.
GATHERS = re.findall(
    r"^\| ([\d,]+) \| (\d+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| (\w+) \|$",
    DOCUMENT,
    re.MULTILINE,
)


def says(text: str, value: float) -> bool:
    """Tells whether a number is rounded to what a text says; zeros at the end of an integer are rounded."""
    number = Decimal(text.replace(",", ""))
    digits = number.as_tuple()
    assert isinstance(digits.exponent, int)
    zeros = len(text) - len(text.rstrip("0")) if digits.exponent == 0 and number else 0
    return abs(float(number) - value) <= 0.5 * 10.0 ** (digits.exponent + zeros) + 1e-9


def test_rounding() -> None:
    assert says("1.31", 1.3124) and not says("1.31", 1.3151)
    assert says("970", 969.6) and says("970", 966) and not says("970", 964)
    assert says("0", 0.4) and not says("0", 0.6) and says("19,880", 19884) and not says("8", 8.6)


@pytest.fixture
def without_gpu(device: str) -> None:
    """Skips where the program answers by the machine's GPU: the document has predictions without one."""
    if device == "cuda":
        pytest.skip("the program answers by this machine's GPU")


def _filtered(fsdp: int, tp: int) -> dict[str, Any]:
    options = ("--model", "llama3-70b", "--recipe", "rowwise", "--tokens", "8192", "--json")
    found: dict[str, Any] = json.loads(
        float8_tune("filter", *options, "--fsdp", str(fsdp), "--tp", str(tp))
    )
    return found


def _converted(found: dict[str, Any]) -> int:
    return sum(layer["count"] for layer in found["decisions"] if layer["convert"])


@pytest.mark.usefixtures("without_gpu")
def test_a_model_on_one_gpu() -> None:
    (text,) = re.findall(r"on one GPU (\d+) of 561 are converted, for ([\d.]+):", DOCUMENT)
    found = _filtered(1, 1)
    assert int(text[0]) == _converted(found)
    assert says(text[1], found["estimated_model_speedup"])


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("row", RANKS, ids=lambda row: f"{row[0]}x{row[1]}")
def test_a_model_on_ranks(row: tuple[str, ...]) -> None:
    fsdp, tp, converted, speedup, bf16, fp8, unit, measured = row
    found = _filtered(int(fsdp), int(tp))
    assert int(converted) == _converted(found)
    assert says(speedup, found["estimated_model_speedup"])
    assert found["ranks"]["is_prediction"] == (measured == "predicted")
    scale = {"ms": 1e3, "s": 1e6}[unit]
    for text, dtype in ((bf16, "bf16"), (fp8, "fp8")):
        # A layer that stays in bf16 sends what it sends there.
        exposed = sum(
            layer["count"] * layer["wire"][f"{dtype if layer['convert'] else 'bf16'}_exposed_us"]
            for layer in found["decisions"]
        )
        assert says(text, exposed / scale), (text, exposed)


def test_gathers_of_a_weight() -> None:
    ranks = ",".join(row[0].replace(",", "") for row in GATHERS)
    found = json.loads(
        float8_tune("wire", "predict", "--weight", "14336,4096", "--ranks", ranks, "--json")
    )
    names = ("hosts", "bf16_gather_us", "fp8_gather_us", "amax_all_reduce_us", "saved_us_a_step")
    for row, prediction in zip(GATHERS, found["predictions"], strict=True):
        assert int(row[0].replace(",", "")) == prediction["ranks"]
        for text, name in zip(row[1:-1], names, strict=True):
            # The program writes four digits.
            number = int(text.replace(",", ""))
            assert abs(number - prediction[name]) <= max(0.5, 5e-4 * number), (name, prediction)
        assert prediction["is_prediction"] == (row[-1] == "predicted")


def test_all_rows_are_found() -> None:
    assert len(RANKS) == 9 and len(GATHERS) == 5
