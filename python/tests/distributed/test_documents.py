"""The Python blocks of the documents run as they are, on two ranks of the emulated device.

A block sees `model`, a small transformer, `optimizer`, `batches` and `loss`; what a GPU has is exchanged for what
the emulated device has.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import textwrap
from typing import Any

import pytest
import ranks
import repository
import torch
from test_rank_agreement import _tune
from torch import distributed
from torch.optim.optimizer import register_optimizer_step_pre_hook

import float8
import float8.torch as f8

BLOCKS = {
    "README.md": 1,
    "docs/pytorch.md": 9,
    "docs/fsdp.md": 2,
    "docs/ranks.md": 3,
    "docs/tensor-parallel.md": 3,
}
_EXCHANGED = {
    'config="rowwise"': 'config=float8.torch.LinearConfig("rowwise", emulate=True)',
    'LinearConfig("rowwise", enable': 'LinearConfig("rowwise", emulate=True, enable',
    'LinearConfig("delayed"': 'LinearConfig("delayed", emulate=True',
    'init_device_mesh("cuda"': 'init_device_mesh("cpu"',
    "compile(fullgraph=True": 'compile(backend="aot_eager", fullgraph=True',
}


def _blocks(document: str) -> list[str]:
    text = (repository.ROOT / document).read_text()
    found = re.findall(r"^ *```python\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for block in found]


def _whole(parameter: Any) -> torch.Tensor:
    """Returns the values that all ranks have of a parameter."""
    whole = getattr(parameter, "full_tensor", parameter.detach)()
    return whole.detach().clone()  # type: ignore[no-any-return]


def _keep_first(before: list[tuple[Any, torch.Tensor]], optimizer: Any, *_: Any) -> None:
    """Keeps what an optimizer has before its first step."""
    if not before:
        before += [(p, _whole(p)) for group in optimizer.param_groups for p in group["params"]]


def _run_blocks(mesh: Any, rank: int, world: int, document: str, folder: str) -> int:
    os.chdir(folder)
    sys.path.append(str(repository.ROOT / "examples/pytorch"))
    from tensor_parallel import Transformer

    distributed.init_process_group = lambda *_, **__: None  # the ranks have them
    batch = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1))
    steps = 0
    names: dict[str, Any] = {"float8": float8}
    for block in _blocks(document):
        torch.manual_seed(0)
        model = names["model"] = Transformer(64, 16, 1)
        names.update(batches=[batch] * 2, loss=lambda y: y.float().square().mean())
        names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
        before: list[tuple[Any, torch.Tensor]] = []
        hook = register_optimizer_step_pre_hook(functools.partial(_keep_first, before))
        for old, new in _EXCHANGED.items():
            block = block.replace(old, new)
        exec(compile(block, document, "exec"), names)
        hook.remove()
        converted = [m for m in model.modules() if isinstance(m, f8.Float8Linear)]
        if converted and all(layer.emulate for layer in converted):
            model(batch).float().square().mean().backward()
            steps += 1
        if "optimizer.step" in block:
            assert before and not any(torch.equal(_whole(p), old) for p, old in before)
    return steps


@pytest.mark.parametrize("document", BLOCKS)
def test_blocks_run(document: str, tmp_path: Any) -> None:
    _tune("db", "export", "--format", "table", "-o", str(tmp_path / "tuned.table"))
    steps = ranks.spawn(_run_blocks, 2, tmp_path, document, str(tmp_path))
    assert len(_blocks(document)) == BLOCKS[document] and steps[0] == steps[1] > 0
