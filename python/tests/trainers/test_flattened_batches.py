"""Models of transformers with attention in fp8 on batches without padding: their sequences lie one behind the other."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from attention_models import copies, model_of, noted_windows, unchanged
from torch import Tensor

import float8.torch as f8

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("untold")


LENGTHS = (30, 17, 1, 41)


def flattened(device: str, **options: Any) -> dict[str, Any]:
    """A batch of transformers' collator, and its sequences by themselves under "each"."""
    collator = transformers.DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_tensors="pt", **options
    )
    each = [(torch.randint(64, (1,)) + 3 * torch.arange(n)) % 64 for n in LENGTHS]
    batch = collator([{"input_ids": x.tolist()} for x in each])
    moved = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in batch.items()}
    return {**moved, "each": [x[None].to(device) for x in each]}


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize(("kind", "more"), [("Llama", {}), ("Mistral", {"sliding_window": 20})])
def test_flattened_batches_are_packed(
    device: str,
    options: dict[str, Any],
    kind: str,
    more: Any,
    use_cache: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of(kind, device, max_position_embeddings=128, **more)
    f8.convert_attention_to_float8(model, **options)
    batch = flattened(device)
    each = batch.pop("each")
    windows = noted_windows(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        packed = model(**batch, use_cache=use_cache).logits[0]
        expected = torch.cat([model(x).logits[0] for x in each])
    error = (packed.float() - expected.float()).norm() / expected.float().norm()
    assert error < 0.02
    assert windows[:2] == [more.get("sliding_window", 0)] * 2
    f8.check_sequences()


def test_a_model_trains_on_flattened_batches(device: str, options: dict[str, Any]) -> None:
    found = []
    for is_converted in (True, False):
        model = model_of("Llama", device, max_position_embeddings=128)
        if is_converted:
            f8.convert_attention_to_float8(model, **options)
        before = copies(model)
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        torch.manual_seed(1)
        losses = []
        for _ in range(4):
            batch = flattened(device)
            del batch["each"]
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        assert not unchanged(model, before)
        found.append(losses)
    assert found[0] != found[1]
    assert found[0] == pytest.approx(found[1], rel=0.03)


def test_padded_batches_with_offsets_are_pytorchs(device: str, options: dict[str, Any]) -> None:
    model = model_of("Llama", device, max_position_embeddings=128)
    f8.convert_attention_to_float8(model, **options)
    batch = flattened(device)
    del batch["each"], batch["position_ids"]
    mask = torch.ones_like(batch["input_ids"])
    mask[:, -3:] = 0
    with pytest.warns(UserWarning, match="padding"):
        model(**batch, attention_mask=mask)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize(("kind", "more"), [("Llama", {}), ("Mistral", {"sliding_window": 20})])
def test_packed_sequences_on_a_gpu_without_their_kernel_are_pytorchs(
    device: str,
    options: dict[str, Any],
    kind: str,
    more: Any,
    use_cache: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from float8.torch import varlen

    monkeypatch.setattr(varlen, "refusal", lambda *x: "packed sequences have not run")
    model = model_of(kind, device, max_position_embeddings=128, **more)
    batch = flattened(device)
    del batch["each"]
    expected = model(**batch).logits
    f8.convert_attention_to_float8(model, **options)
    with pytest.warns(UserWarning, match="packed sequences have not run"):
        assert torch.equal(model(**batch, use_cache=use_cache).logits, expected)
