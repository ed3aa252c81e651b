"""What a step of functional.moe has in memory between its ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_moe import operands, step
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import float8.torch as f8
from float8.torch.experts import ops

PARTS = {
    ops.GRAD_HIDDEN: "grad_hidden",
    ops.GRAD_GATE_UP: "grad_gate_up",
    ops.GRAD_INPUT: "grad_input",
    ops.GRAD_WEIGHT: "grad_weight",
}
RESULTS = {
    "moe_forward": ("y", "gate_up", "of_w13", "of_w2"),
    "grad_hidden": ("hidden_grad", "dw2"),
    "grad_gate_up": ("q", "qt"),
    "grad_input": ("dx", ""),
    "grad_weight": ("dw13", "dw3"),
}


class Live(TorchDispatchMode):
    """Notes which results of earlier ops of an MLP are in memory when one of them begins."""

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[str, StorageWeakRef] = {}
        self.at: dict[str, set[str]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().removeprefix("float8::")
        if name == "moe_backward":
            name = PARTS[args[12]]
        if name.startswith(("moe", "grad")):
            self.at[name] = {key for key, ref in self.results.items() if not ref.expired()}
        results = func(*args, **(kwargs or {}))
        for key, each in zip(RESULTS.get(name, ()), results, strict=name in RESULTS):
            if each.numel() > 0:
                self.results[key] = StorageWeakRef(each.untyped_storage())
        return results


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_nothing_stays_behind_the_part_that_reads_it_last(
    device: str, options: dict[str, Any], recipe: str, recompute: bool
) -> None:
    tensors = operands(device)
    with Live() as live:
        step(f8.functional.moe, tensors, recipe=recipe, recompute=recompute, **options)
    of_w13 = set() if recompute else {"of_w13"}
    assert live.at["moe_score_gradient"] == {"y", "gate_up", "of_w2"} | of_w13
    assert live.at["grad_hidden"] == {"gate_up", "of_w2"} | of_w13
    assert live.at["grad_gate_up"] == {"gate_up", "hidden_grad", "dw2"} | of_w13
    assert live.at["grad_input"] == {"q", "qt", "dw2"} | of_w13
    assert live.at["moe_combine"] == {"dx", "qt", "dw2"}
    assert live.at["grad_weight"] == {"qt", "dw2"}


def test_a_graph_that_is_kept_has_the_same_gradients_again(
    device: str, options: dict[str, Any]
) -> None:
    x, ids, scores, *weights = operands(device)
    leaves = [each.requires_grad_() for each in (x, scores, *weights)]

    def forward() -> Tensor:
        return f8.functional.moe(leaves[0], ids, leaves[1], *leaves[2:], **options)

    y = forward()
    grad = torch.randn_like(y)
    first = torch.autograd.grad(y, leaves, grad, retain_graph=True)
    again = torch.autograd.grad(y, leaves, grad)
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one, two)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, leaves, grad)


def test_saves_no_more_than_bf16(device: str, options: dict[str, Any]) -> None:
    """Of a large layer: x of each row, gate and up, and silu(gate) up."""
    rows, dim, hidden, experts = 32768, 4096, 14336, 8
    config = f8.functional.pack_experts("rowwise", options["emulate"], False)
    of_w13, of_w2, *_ = torch.ops.float8.moe_bytes(rows, experts, hidden, dim, 0, config)
    gate_up = 4 * rows * hidden
    assert of_w13 == 0
    assert gate_up + of_w2 < 2 * rows * dim + gate_up + 2 * rows * hidden
