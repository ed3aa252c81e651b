"""A Llama in plain PyTorch: RMSNorm, grouped-query attention with rotary positions, SwiGLU.

With experts, its MLPs are mixtures of them, as in Mixtral.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a Llama. `dim` is heads times the size of a head."""

    dim: int
    hidden: int
    heads: int
    kv_heads: int
    layers: int
    experts: int = 0  # of a mixture in the place of each MLP; 0: none
    top_k: int = 0  # experts of a token
    qk_norm: bool = False  # RMSNorms of each head of queries and keys, as in Qwen3

    def __post_init__(self) -> None:
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise ValueError(f"a token has {self.top_k} experts of {self.experts}")
        if self.dim % self.heads or self.dim // self.heads % 2 or self.heads % self.kv_heads:
            raise ValueError(
                f"{self.dim} features are not {self.heads} heads of an even size, or "
                f"{self.kv_heads} key heads do not divide {self.heads}"
            )


LLAMA_3_8B = Shape(dim=4096, hidden=14336, heads=32, kv_heads=8, layers=32)


def rotary(tokens: int, head: int, base: float = 500000.0) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines of each position, [tokens, head]."""
    frequencies = base ** (-torch.arange(0, head, 2).double() / head)
    angles = torch.outer(torch.arange(tokens).double(), frequencies).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys [batch, heads, tokens, head] with their positions. float8.torch.fuse knows it by its code."""
    return rotated(q, cos, sin), rotated(k, cos, sin)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return y


class Experts(nn.Module):
    """What float8.torch.Experts computes in fp8, in bfloat16."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(shape.experts, 2 * shape.hidden, shape.dim))
        self.w2 = nn.Parameter(torch.empty(shape.experts, shape.dim, shape.hidden))

    def forward(self, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        top_k = ids.shape[1]
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=self.w2.shape[0])
        offs = counts.cumsum(0, dtype=torch.int32)
        w13, w2 = (each.bfloat16().transpose(-2, -1) for each in (self.w13, self.w2))
        rows = x.bfloat16()[order // top_k]
        gate, up = functional.grouped_mm(rows, w13, offs=offs).chunk(2, dim=-1)
        y = functional.grouped_mm(functional.silu(gate) * up, w2, offs=offs)
        weighted = y * scores.flatten()[order, None]
        sums = torch.zeros_like(x, dtype=torch.float32)
        return sums.index_add(0, order // top_k, weighted).to(y.dtype)


class Mixture(nn.Module):
    """SwiGLU experts: a token has the sum of top_k of them, weighted by the router's scores.

    A forward leaves `balance`, the loss that keeps the experts equally busy (1 where they are), and
    `load`, the busiest expert's tokens in relation to the mean.
    """

    balance: Tensor
    load: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.top_k = shape.top_k
        self.router = nn.Parameter(torch.empty(shape.experts, shape.dim))
        self.experts: nn.Module = Experts(shape)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        with torch.autocast(x.device.type, enabled=False):
            shares = (tokens.float() @ self.router.t()).softmax(dim=-1)
        scores, ids = shares.topk(self.top_k, dim=-1)
        chosen = functional.one_hot(ids, shares.shape[1]).sum(dim=1).float().mean(dim=0)
        self.balance = shares.shape[1] * (chosen / self.top_k * shares.mean(dim=0)).sum()
        self.load = chosen.detach().max() * shares.shape[1] / self.top_k
        scores = scores / scores.sum(dim=-1, keepdim=True)
        y: Tensor = self.experts(tokens, ids, scores)
        return y.view(x.shape)


class Attention(nn.Module):
    """PyTorch's attention as a module, which float8.torch.convert_attention_to_float8 can convert."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
    ) -> Tensor:
        return functional.scaled_dot_product_attention(
            q, k, v, scale=scale, enable_gqa=enable_gqa, is_causal=is_causal
        )


class Block(nn.Module):
    """x[batch, tokens, dim] to the same shape."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.dim // shape.heads
        kv = shape.kv_heads * self.head
        self.attention_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.q = nn.Linear(shape.dim, shape.dim, bias=False)
        self.k = nn.Linear(shape.dim, kv, bias=False)
        self.v = nn.Linear(shape.dim, kv, bias=False)
        self.o = nn.Linear(shape.dim, shape.dim, bias=False)
        self.q_norm = nn.RMSNorm(self.head, eps=1e-5) if shape.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head, eps=1e-5) if shape.qk_norm else nn.Identity()
        self.attend = Attention()
        self.mlp_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.mlp = Mixture(shape) if shape.experts else FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (
            projection(h).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        q, k = apply_rotary(self.q_norm(q), self.k_norm(k), cos, sin)
        y = self.attend(q, k, v, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Blocks(nn.Module):
    """The layers of a Llama, for sequences of at most `tokens`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, tokens: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        for name, value in zip(
            ("cos", "sin"), rotary(tokens, shape.dim // shape.heads), strict=True
        ):
            self.register_buffer(name, value, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return x


class Llama(nn.Module):
    """Tokens [batch, tokens] to logits. The head has the weight of the embedding."""

    def __init__(self, shape: Shape, vocabulary: int, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, shape.dim)
        self.blocks = Blocks(shape, tokens)
        self.norm = nn.RMSNorm(shape.dim, eps=1e-5)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                ends_branch = name.endswith(("o.weight", "down.weight", "w2"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** (0.5 * ends_branch))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.blocks(self.embedding(tokens)))
        return functional.linear(x, self.embedding.weight)
