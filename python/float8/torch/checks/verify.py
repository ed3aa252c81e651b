"""The proof that a sharded model computes what one device would, as a report over all ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed, nn

from float8 import _library
from float8.torch.checks.verify_layer import TENSORS, THRESHOLD_DB, ExpertCheck, Layer, LayerCheck
from float8.torch.layer.linear import Float8Linear
from float8.torch.ranks import agreement, collectives
from float8.torch.ranks.collectives import DistributedError, Operation

_REMEDY = {
    "w": "the ranks' weights differ, or a shard lies where it should not; load the checkpoint again "
    "on all ranks",
    "q": "the weight was changed after its cast, through .data, or on some ranks alone; call "
    "float8.torch.precompute_float8_dynamic_scale_for_fsdp(model) after what changes it",
    "y": "a rank cast with another scale, as after a change of its weight through .data; after "
    "float8.torch.precompute_float8_dynamic_scale_for_fsdp(model) it is a defect to report, with the "
    "table of this check",
}
_REMEDY.update(qt=_REMEDY["q"], dx=_REMEDY["y"], dw=_REMEDY["y"], db=_REMEDY["y"])


@dataclasses.dataclass
class Report:
    """What verify_distributed found on this rank, and the differences of all ranks."""

    ranks: int
    table: str
    plans: int
    layers: list[Layer]
    differences: list[str]

    @property
    def ok(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        rows = [["layer", "shape", "weight", *TENSORS]]
        for layer in self.layers:
            cells = [str(layer.tensors.get(name, "-")) for name in TENSORS]
            rows.append([layer.name, layer.shape, layer.weight, *cells])
            if layer.skipped:
                rows[-1][3:] = [f"not compared: {layer.skipped}"]
        widths = [max(len(row[i]) for row in rows if len(row) > i) for i in range(3)]
        widths += [max(len(row[i]) for row in rows if len(row) == 10) for i in range(3, 10)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lines.append(
            f"{self.ranks} ranks, tuning table {self.table}, {self.plans} plans; bits: equal, dB: sums "
            f"in another order, at least {THRESHOLD_DB:.0f}"
        )
        if skipped := sum(bool(layer.skipped) for layer in self.layers):
            lines.append(f"{skipped} layers were not compared")
        return "\n".join(lines + self.differences)


def verify_distributed(
    model: nn.Module,
    *,
    tokens: int = 64,
    dtype: torch.dtype | None = None,
    group: Any = None,
    raise_on_difference: bool = True,
) -> Report:
    """Proves on a model and its mesh that the sharded linears compute what one device would.

    Call it on all ranks, between steps. For each Float8Linear, one after the other, the weight is
    gathered in high precision and cast as one device would; compared are

    w       FSDP's gathered weight, where it is in high precision; over ranks, the whole weight
    q, qt   the fp8 copies that the ranks' casts gave, with their scales, where they are gathered
    y, dx, dw, db   forward and backward on random x and dy, with the gathered weight and the whole one

    bit for bit, and where ranks add up partial sums to 40 dB; and so for each weight of experts that FSDP gathers
    in fp8. Over ranks it compares what `agree`
    compares, and the kernels of all plans that more than one rank has. The memory is that of one
    layer's weight and gradient; the model, its gradients, random numbers and scales stay as they are.

    tokens: rows of x. dtype: x's; None: the weights', or FSDP's param_dtype. Where autocast is on, its
        type comes first, and weights that FSDP gathers in fp8 take the type of their latest forward.
    group: the ranks that have this model, None: all.

    Returns the report, which prints as a table. Raises DistributedError on all ranks, which names
    the first difference: rank, layer and tensor; raise_on_difference=False only reports it.
    """
    collectives.progress.begin(Operation("verify_distributed"))
    first = next(iter(model.parameters()), None)
    emulated = any(isinstance(each, Float8Linear) and each.emulate for each in model.modules())
    on_gpu = first is not None and first.device.type == "cuda" and not emulated
    device = torch.cuda.current_device() if on_gpu else -1
    differences: list[str] = []
    culprits: list[int] = []
    try:
        agreement.agree(model, group=group)
    except DistributedError as error:
        if raise_on_difference:
            raise
        differences.append(str(error))
    layers = []
    digests = {}
    for name, module in model.named_modules():
        if isinstance(module, Float8Linear):
            check = LayerCheck(name, module, tokens, dtype)
            layers.append(check.run())
            digests[name] = check.digest
        for own_name, linear in getattr(module, "expert_weights", {}).items():
            expert_check = ExpertCheck(f"{name}.{own_name}", linear, tokens, dtype)
            if expert_check.is_with_another:
                continue
            layers.append(expert_check.run())
            digests[f"{name}.{own_name}"] = expert_check.digest
    own = [f"layer {each.name!r}: {_words(each)}" for each in layers if _differs(each)]
    plans = _plans(device)
    if _is_shared(group):
        facts = {"own": own, "plans": plans, "weights": digests}
        ranks = collectives.ranks_of(group)
        answers = [json.loads(each) for each in _everyone(json.dumps(facts), group)]
        for rank, answer in zip(ranks, answers, strict=True):
            differences += [f"rank {rank}: {text}" for text in answer["own"]]
            culprits += [rank] if answer["own"] else []
        for topic, words in (("weights", _REMEDY["w"]), ("plans", _PLANS)):
            culprits += _compare_over_ranks(ranks, answers, topic, words, differences)
    else:
        differences += own
    report = Report(
        distributed.get_world_size(group) if _is_shared(group) else 1,
        agreement.table_hash(device),
        len(plans),
        layers,
        differences,
    )
    if differences and raise_on_difference:
        raise DistributedError(
            f"float8: {differences[0]}",
            operation="verify_distributed",
            rank=collectives.own_rank(),
            ranks=sorted(set(culprits)),
        )
    return report


_PLANS = "give all ranks one tuning table with float8.torch.agree(table=...) before the first step"


def _differs(layer: Layer) -> bool:
    return any(not each.allowed for each in layer.tensors.values())


def _words(layer: Layer) -> str:
    name, found = next((n, each) for n, each in layer.tensors.items() if not each.allowed)
    what = f"{name} is not that of one device{found.where}"
    if not found.same_kind:
        return f"{what}; it is a defect to report, with the table of this check"
    return f"{what}, signal to noise ratio {found.db:.0f} dB; {_REMEDY[name]}"


# Over ranks


def _is_shared(group: Any) -> bool:
    return distributed.is_initialized() and distributed.get_world_size(group) > 1


def _everyone(text: str, group: Any) -> list[str]:
    return agreement.gather_texts(text, group, Operation("verify_distributed"))


def _plans(device: int) -> dict[str, str]:
    """Returns the hash of each plan's description by its first line, which says what it is for."""
    plans = {}
    describe = _library.library().float8_linear_info
    for handle in torch.ops.float8.plans(device):
        text = _library.info(describe, handle)
        plans[text.splitlines()[0]] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return plans


def _compare_over_ranks(
    ranks: Sequence[int],
    answers: Sequence[dict[str, Any]],
    topic: str,
    remedy: str,
    differences: list[str],
) -> list[int]:
    """Adds the differences of what every rank has of that topic; returns the ranks that differ."""
    found: list[int] = []
    common = set.intersection(*(set(answer[topic]) for answer in answers))
    for key in sorted(common):
        if len({answer[topic][key] for answer in answers}) == 1:
            continue
        facts: list[agreement.Facts] = [{key: answer[topic][key]} for answer in answers]
        differing, _ = agreement.difference(ranks, facts)
        what = f"layer {key!r}: w" if topic == "weights" else f"the kernels of {key}"
        differences.append(f"rank {differing[0]}: {what} is not that of the others; {remedy}")
        found += differing
    return found
