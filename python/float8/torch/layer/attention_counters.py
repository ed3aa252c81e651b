"""attention_counters: what attention in fp8 loses in each layer, while a model is trained."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
from torch import nn

from float8.torch.layer.attention_layers import counted_layers
from float8.torch.layer.attention_statistics import Layer

_OPERANDS = ("q", "k", "v", "p")


@dataclasses.dataclass(frozen=True)
class AttentionCounters:
    """What the calls of a layer's attention had together. Without a call in fp8 all but `calls` is NaN.

    largest_score: the largest |scale q k| of values as they were multiplied, k without its mean; NaN where one is.
    saturated: of "q", "k" and "v" the share of elements that are beyond e4m3's largest under the scale of their 128
        tokens, or are not finite. A scale follows the largest element, so of finite ones it is 0.
    underflow: of these, and of "p", the share that is not 0 and is rounded to 0. P is rounded as 2^8 P, where the largest
        of a query so far is 1.
    """

    calls: int
    largest_score: float
    saturated: dict[str, float]
    underflow: dict[str, float]


class Counting:
    """The counters of a model's layers, since attention_counters began."""

    def __init__(self, layers: dict[str, Layer]) -> None:
        self._layers = layers

    def read(self) -> dict[str, AttentionCounters]:
        """Returns the counters of each layer by its name. The host waits for the device."""
        return {name: _read(layer) for name, layer in self._layers.items()}


def _read(layer: Layer) -> AttentionCounters:
    if layer.counts is None or layer.largest is None:
        nan = float("nan")
        return AttentionCounters(0, nan, dict.fromkeys("qkv", nan), dict.fromkeys(_OPERANDS, nan))
    shares = {
        name: (clipped / max(count, 1), lost / max(count, 1))
        for name, (count, clipped, lost) in zip(_OPERANDS, layer.counts.tolist(), strict=True)
    }
    return AttentionCounters(
        calls=layer.calls,
        largest_score=layer.largest.item(),
        saturated={name: shares[name][0] for name in "qkv"},
        underflow={name: shares[name][1] for name in _OPERANDS},
    )


@contextlib.contextmanager
def attention_counters(model: nn.Module) -> Iterator[Counting]:
    """Counts what attention in fp8 loses in each layer that convert_attention_to_float8 or install_attention gave to it,
    in the forwards within `with`:

    with float8.torch.attention_counters(model) as counters:
        model(batch).loss.backward()
    print(counters.read())

    No result changes. Each call costs a forward more, Q K^T in float32 and some passes over its scores, 2^25 at a time,
    which the host does not wait for. What torch.compile made runs eagerly meanwhile. Calls that go to PyTorch's attention
    do not count, and calls that a checkpoint repeats within `with` count again. A rank counts the heads that it has.
    Outside of `with` nothing is computed.

    Raises TypeError where `model` is no module, ValueError where it has no such layer, or is counted already.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"float8: attention_counters takes an nn.Module, not a {type(model).__name__}"
        )
    modules = counted_layers(model)
    if not modules:
        raise ValueError(
            "float8: attention_counters: the model has no attention in fp8; call convert_attention_to_float8 before"
        )
    if any(hasattr(module, "float8_counters") for module in modules.values()):
        raise ValueError(
            "float8: attention_counters: the model is counted already; leave that first"
        )
    layers = {name: Layer() for name in modules}
    for name, module in modules.items():
        setattr(module, "float8_counters", layers[name])  # noqa: B010
    try:
        with torch.compiler.set_stance("force_eager"):
            yield Counting(layers)
    finally:
        for module in modules.values():
            delattr(module, "float8_counters")
