"""The tests run on the emulated device, on a CPU, or on a Hopper GPU: pytest --device=cuda."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import costs
import pytest
import torch
from torch import nn

import float8.torch as f8
from float8.torch import notices, rms_norm, rotary
from float8.torch.layer import convert

_LONG_ROOMS = {"distributed", "programs", "trainers"}

# These are for the processes that tests start, and for Inductor, which would start two more.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default=os.environ.get("FLOAT8_TEST_DEVICE", "auto"),
        help="auto: cuda where there is a Hopper GPU",
    )


def chosen_device(config: pytest.Config) -> str:
    device: str = config.getoption("--device")
    if device != "auto":
        return device
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return "cuda" if hopper else "cpu"


def pytest_report_header(config: pytest.Config) -> str:
    return f"float8 on {chosen_device(config)}, torch {torch.__version__}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # The longest files begin first: cores would wait for one that begins at the end.
    items.sort(key=lambda item: _LONG_ROOMS.isdisjoint(item.path.parts))
    if chosen_device(config) != "cuda":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a Hopper GPU"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a Hopper GPU")
    f8.check_copies()
    torch.set_num_threads(1)  # tensors are small, and other files are tested side by side


def pytest_collection_finish() -> None:
    costs.begin()


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return chosen_device(request.config)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _checks_copies() -> Iterator[None]:
    """Turns the checks of copies on again behind a test that turns them off."""
    yield
    f8.check_copies()


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the warnings that come once come again."""
    monkeypatch.setattr(notices, "_told", set())


@pytest.fixture
def options(device: str) -> dict[str, Any]:
    """What a Float8Linear on the device needs in addition to its recipe."""
    return {"emulate": device == "cpu"}


@pytest.fixture
def config(device: str) -> Callable[..., f8.LinearConfig]:
    def make(recipe: str = "tensorwise", **fields: Any) -> f8.LinearConfig:
        return f8.LinearConfig(recipe=recipe, emulate=device == "cpu", **fields)

    return make


@pytest.fixture
def large_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of converted models cast for backward again, as they do for models with larger weights than a test has."""
    monkeypatch.setattr(convert, "SMALL_WEIGHT", -1)


@pytest.fixture
def mlp(device: str) -> Callable[..., nn.Sequential]:
    def make(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(64, 128, dtype=dtype), nn.GELU(), nn.Linear(128, 64, bias=False, dtype=dtype)
        ).to(device)

    return make


def _counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[int]:
    """Returns a list that gets a 1 with each call of a function of a module."""
    calls: list[int] = []
    function = getattr(module, name)

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return function(*arguments)

    monkeypatch.setattr(module, name, counted)
    return calls


@pytest.fixture
def rotary_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each call of the kernel of rotary positions in forward."""
    return _counted(monkeypatch, rotary, "turn")


@pytest.fixture
def rms_norm_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each call of the kernel of RMSNorms in forward."""
    return _counted(monkeypatch, rms_norm, "by_kernel")
