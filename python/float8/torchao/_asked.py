"""A warning where a program asks for fp8 and trains without it.

accelerate keeps the precision of a process's first Accelerator, so a later one may drop what it is asked
for without a word. After float8.torchao.install() the first step of an optimizer tells: fp8 was asked
for, by the environment or by a config, and no conversion was called since.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from float8.torch import notices

_VARIABLE = "ACCELERATE_MIXED_PRECISION"


class _Watch:
    """Conversions are counted: what was asked for is met where there are more than at the asking."""

    def __init__(self) -> None:
        self.installed = False
        self.without_variable = 0  # conversions when an optimizer last stepped and nothing asked
        self.with_config: int | None = None  # conversions when a config was made that none has met

    def config_made(self) -> None:
        if self.installed:
            self.with_config = notices.conversions

    def step(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self.with_config is not None and notices.conversions == self.with_config:
            _warn("a Float8LinearConfig was made")
        self.with_config = None
        if os.environ.get(_VARIABLE, "").lower() != "fp8":
            self.without_variable = notices.conversions
        elif notices.conversions == self.without_variable:
            _warn(f"{_VARIABLE} is fp8")


def _warn(how: str) -> None:
    notices.warn_once(
        "asked",
        f"{how}, but no model was converted before this step of an optimizer, which trains without "
        "fp8. accelerate keeps the precision of the first Accelerator of a process, and the Trainer "
        f"that of its TrainingArguments: set {_VARIABLE} before they are made, and leave bf16=True "
        "out; after another training use a fresh process, or call "
        "accelerate.state.AcceleratorState._reset_state(True) before",
    )


_watch = _Watch()
config_made = _watch.config_made


def install() -> None:
    """Watches the optimizers of the process."""
    if not _watch.installed:
        _watch.installed = True
        register_optimizer_step_pre_hook(_watch.step)
