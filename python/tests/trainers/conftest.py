"""Real trainers over float8: their newest releases, on small models that the tests make themselves.

Nothing is downloaded. The process is as before after these tests: others look for a torchao.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import real_training as training


@pytest.fixture(autouse=True)
def _torchao(device: str) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are small
    with training.installed(device):
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def two_devices(device: str) -> str:
    """The kind of two devices, which are two GPUs where the tests run on GPUs."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return device
