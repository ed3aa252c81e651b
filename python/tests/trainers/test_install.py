"""What float8.torchao.install() shows of a torchao that is not installed, to those who look for one."""

from __future__ import annotations

import importlib.util

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import accelerate.utils
import peft.import_utils
import transformers.utils


@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao is installed")
@pytest.mark.parametrize("imported", (False, True), ids=("", "imported"))
def test_accelerate_alone_finds_a_torchao(imported: bool) -> None:
    """Also where a program has imported the empty torchao itself."""
    others = (transformers.utils.is_torchao_available, peft.import_utils.is_torchao_available)
    if imported:
        import torchao.float8  # type: ignore[import-not-found]  # noqa: F401
    for look in others:
        look.cache_clear()
        assert not look()
        look.cache_clear()
    assert accelerate.utils.is_torchao_available()
    assert accelerate.utils.imports.is_fp8_available()
