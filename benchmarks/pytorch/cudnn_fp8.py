"""cuDNN's attention in fp8, forward and backward, by the Python of its frontend (nvidia-cudnn-frontend), for comparison.

Every tensor has one scale. Those of q, k, v and dO follow from the first call's operands, and those of dP and of the
gradients from what a first backward measures, as delayed scaling would have them; casts to e4m3 and back to bf16 are torch's,
compiled.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
GRADIENTS = ("dQ", "dK", "dV")


@torch.compile
def cast(x: Tensor, scale: Tensor) -> Tensor:
    return (x * scale).clamp(-LARGEST, LARGEST).to(E4M3)


@torch.compile
def dequantize(x: Tensor, descale: Tensor) -> Tensor:
    return (x.float() * descale).bfloat16()


@dataclasses.dataclass
class Scale:
    scale: Tensor  # [1, 1, 1, 1] in fp32, as cuDNN takes it
    descale: Tensor

    @classmethod
    def of(cls, largest: float, device: torch.device) -> Scale:
        scale = torch.full((1, 1, 1, 1), LARGEST / max(largest, 1e-12), device=device)
        return cls(scale, 1 / scale)


class Graph:
    """A graph of cuDNN with one operation, whose tensors have names."""

    def __init__(self) -> None:
        import cudnn

        self.own = cudnn.pygraph(
            io_data_type=cudnn.data_type.FP8_E4M3,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
        )
        self.tensors: dict[str, Any] = {}
        self.types = {E4M3: cudnn.data_type.FP8_E4M3, torch.float32: cudnn.data_type.FLOAT}

    def read(self, name: str, like: Tensor) -> Any:
        self.tensors[name] = self.own.tensor(
            name=name,
            dim=list(like.shape),
            stride=list(like.stride()),
            data_type=self.types[like.dtype],
        )
        return self.tensors[name]

    def write(self, name: str, tensor: Any, like: Tensor) -> None:
        tensor.set_output(True).set_dim(list(like.shape)).set_stride(list(like.stride()))
        tensor.set_data_type(self.types[like.dtype])
        self.tensors[name] = tensor

    def build(self, device: torch.device) -> None:
        import cudnn

        self.own.build([cudnn.heur_mode.A])
        size = max(self.own.get_workspace_size(), 16)
        self.workspace = torch.empty(size, dtype=torch.uint8, device=device)

    def run(self, values: dict[str, Tensor]) -> None:
        self.own.execute({self.tensors[n]: x for n, x in values.items()}, self.workspace)


def dense(batch: int, tokens: int, heads: int, d: int, device: torch.device) -> Tensor:
    """Returns [batch, heads, tokens, d] in e4m3, tokens before heads in memory."""
    return torch.empty(batch, tokens, heads, d, dtype=E4M3, device=device).transpose(1, 2)


class Attention:
    """Of one shape and mask."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
        self.scale, self.causal = 1 / math.sqrt(q.shape[-1]), causal
        self.scales = {n: self.scale_of(x) for n, x in (("q", q), ("k", k), ("v", v))}
        self.scales["o"] = self.scales["v"]  # no weighted mean is larger
        self.scales["s"] = Scale.of(1, q.device)
        self.forward_graph: Graph | None = None
        self.backward_graph: Graph | None = None
        self.amax = {
            n: torch.zeros(1, 1, 1, 1, device=q.device) for n in ("s", "o", "dP", *GRADIENTS)
        }

    @staticmethod
    def scale_of(x: Tensor) -> Scale:
        return Scale.of(float(x.abs().max()), x.device)

    def cast(self, name: str, x: Tensor) -> Tensor:
        return cast(x, self.scales[name].scale)

    def factors(self, scales: tuple[str, ...], descales: tuple[str, ...]) -> dict[str, Tensor]:
        values = {f"scale_{n}": self.scales[n].scale for n in scales}
        return values | {f"descale_{n}": self.scales[n].descale for n in descales}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns O in e4m3 and the LSE."""
        b, h, s, d = q.shape
        o = dense(b, s, h, d, q.device)
        stats = torch.empty(b, h, s, 1, device=q.device)
        values = {"q": q, "k": k, "v": v, **self.factors(("s", "o"), ("q", "k", "v", "s"))}
        results = {"o": o, "stats": stats, "amax_s": self.amax["s"], "amax_o": self.amax["o"]}
        if self.forward_graph is None:
            graph = self.forward_graph = Graph()
            made = graph.own.sdpa_fp8(
                **{n: graph.read(n, x) for n, x in values.items()},
                attn_scale=self.scale,
                use_causal_mask=self.causal,
                generate_stats=True,
            )
            for (name, like), tensor in zip(results.items(), made, strict=True):
                graph.write(name, tensor, like)
            graph.build(q.device)
        self.forward_graph.run({**values, **results})
        return o, stats

    def backward(self, kept: dict[str, Tensor], do: Tensor) -> list[Tensor]:
        """Returns the gradients in bf16, of operands in e4m3."""
        if "dO" not in self.scales:
            self.scales["dO"] = self.scale_of(do)
        first = self.backward_graph is None
        for _ in range(2 if first else 1):
            if "dP" not in self.scales:
                self.scales.update({n: Scale.of(LARGEST, do.device) for n in ("dP", *GRADIENTS)})
            grads = self.differentiate({**kept, "dO": self.cast("dO", do)})
            if first:
                self.scales.update(
                    {n: Scale.of(float(self.amax[n]), do.device) for n in ("dP", *GRADIENTS)}
                )
        pairs = zip(GRADIENTS, grads, strict=True)
        return [dequantize(x, self.scales[n].descale) for n, x in pairs]

    def differentiate(self, read: dict[str, Tensor]) -> list[Tensor]:
        device = read["q"].device
        grads = [
            dense(x.shape[0], x.shape[2], x.shape[1], x.shape[3], device)
            for x in (read["q"], read["k"], read["v"])
        ]
        scaled = ("s", *GRADIENTS, "dP")
        values = read | self.factors(scaled, ("q", "k", "v", "o", "dO", "s", "dP"))
        results = dict(zip(GRADIENTS, grads, strict=True))
        results |= {f"amax_{n}": self.amax[n] for n in (*GRADIENTS, "dP")}
        if self.backward_graph is None:
            graph = self.backward_graph = Graph()
            made = graph.own.sdpa_fp8_backward(
                **{n: graph.read(n, x) for n, x in values.items()},
                attn_scale=self.scale,
                use_causal_mask=self.causal,
            )
            for (name, like), tensor in zip(results.items(), made, strict=False):
                graph.write(name, tensor, like)
            graph.build(device)
        self.backward_graph.run({**values, **results})
        return grads


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, own: Attention) -> Tensor:
        kept = {n: own.cast(n, x) for n, x in (("q", q), ("k", k), ("v", v))}
        o, stats = own.forward(**kept)
        ctx.save_for_backward(*kept.values(), o, stats)
        ctx.own = own
        return dequantize(o, own.scales["o"].descale)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:  # type: ignore[override]
        kept = dict(zip(("q", "k", "v", "o", "stats"), ctx.saved_tensors, strict=True))
        return (*ctx.own.backward(kept, do), None)


def call(causal: bool) -> Any:
    """Returns the attention of one shape, which its first call decides."""
    import cudnn  # noqa: F401

    made: dict[str, Attention] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not made:
            made["own"] = Attention(q.detach(), k.detach(), v.detach(), causal)
        return Function.apply(q, k, v, made["own"])  # type: ignore[no-untyped-call,no-any-return]

    return attend
