"""fuse(norms=True) of whole models with LayerNorms, from transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import float8.torch as f8

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("untold", "graphs_anew", "large_weights")
COMMON = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}


def bert() -> nn.Module:
    config = transformers.BertConfig(
        **COMMON,
        intermediate_size=96,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        max_position_embeddings=32,
    )
    made: nn.Module = transformers.BertModel(config, add_pooling_layer=False)
    return made


def starcoder2() -> nn.Module:
    config = transformers.Starcoder2Config(
        **COMMON,
        intermediate_size=96,
        num_key_value_heads=1,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    made: nn.Module = transformers.Starcoder2Model(config)
    return made


def train(make: Callable[[], nn.Module], device: str, options: dict[str, Any], norms: bool) -> Any:
    """Returns a model after two steps, its first output and gradients, and the weights it began with."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    model = make().to(device, torch.bfloat16).train()
    f8.convert_to_float8_training(model, config=f8.LinearConfig("rowwise", **options))
    f8.fuse(model, norms=norms)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    compiled = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = torch.arange(48, device=device).reshape(3, 16)
    target = torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(1)).to(device)
    first: list[Tensor] = []
    for _ in range(2):
        y = compiled(tokens)[0]
        (y.float() - target).square().mean().backward()
        given = [each.grad for each in model.parameters() if each.grad is not None]
        first = first or [y.detach(), *(each.clone() for each in given)]
        optimizer.step()
        optimizer.zero_grad()
    return model, first, before


# A norm of BERT is also an operand of the residual sum behind it, so forward has it in memory; backward
# casts what it computes again.
@pytest.mark.parametrize(("make", "expected"), [(bert, [0, 2]), (starcoder2, [2, 2])])
def test_models_have_the_bits_of_norms_apart(
    make: Callable[[], nn.Module],
    expected: list[int],
    device: str,
    options: dict[str, Any],
    casts: list[int],
) -> None:
    _, apart, _ = train(make, device, options, norms=False)
    assert not any(casts)
    casts.clear()
    model, together, before = train(make, device, options, norms=True)
    assert casts == expected
    if device == "cpu":
        assert all(map(torch.equal, together, apart))
    for name, each in model.named_modules():
        if isinstance(each, f8.Float8Linear):
            assert not torch.equal(each.weight, before[f"{name}.weight"]), name
