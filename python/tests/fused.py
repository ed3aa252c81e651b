"""An MLP, a converted model, its steps, and what `fuse` leaves of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from reference import same
from torch import nn

import float8.torch as f8


class FeedForward(nn.Module):
    """As torchtitan's."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(64, 144, bias=False) for _ in range(2))
        self.w2 = nn.Linear(144, 64, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def converted(
    model: nn.Module, options: f8.LinearConfig, dtype: torch.dtype = torch.bfloat16
) -> Any:
    device = "cpu" if options.emulate else "cuda"

    def fits(linear: Any, _: str) -> bool:
        return linear.out_features % 16 == 0  # type: ignore[no-any-return]

    return f8.convert_to_float8_training(
        model.to(device, dtype), config=options, module_filter_fn=fits
    )


def tiny_model(kind: str) -> Any:
    """Returns a causal model of transformers of this kind, with two layers of 64 features."""
    import transformers

    name = f"{kind}{'Text' if kind == 'Gemma3' else ''}Config"
    config = getattr(transformers, name)(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def inputs(model: nn.Module, rows: int = 40, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    weight = next(model.parameters())
    return torch.randn(2, rows, 64).to(weight.device, weight.dtype)


def step(model: nn.Module, x: torch.Tensor, call: Any = None) -> list[torch.Tensor]:
    """Returns y and all gradients."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = (call or model)(x)
    y.float().square().sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert x.grad is not None
    return [y.detach(), x.grad, *grads]


def reasons(model: nn.Module) -> list[str]:
    return [each.why for each in f8.fuse(model) if not each.fused]


def expect_equal_steps(fused: Any, plain: Any) -> None:
    """Steps of two models have the same bits: the first one, later ones with scales of their own, and a call without backward."""
    for seed in range(3):
        x = inputs(fused, seed=seed)
        assert same(step(fused, x), step(plain, x)), f"step {seed}"
        for model in (fused, plain):
            f8.sync_float8_amax_and_scale_history(model)
    with torch.no_grad():
        x = inputs(fused, seed=9)
        assert torch.equal(fused(x), plain(x))
    states = [dict(model.named_buffers()) for model in (fused, plain)]
    assert states[0].keys() == states[1].keys()
    assert fused.state_dict().keys() == plain.state_dict().keys()
    assert all(map(torch.equal, fused.state_dict().values(), plain.state_dict().values()))


def expect_trains(model: nn.Module) -> None:
    """Every weight changes, and the loss becomes less."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    x, target = inputs(model, 24), inputs(model, 24, seed=7)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        f8.sync_float8_amax_and_scale_history(model)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert [name for name, p in model.named_parameters() if torch.equal(p, before[name])] == []
