"""fuse(norms=True) in eager mode: RMSNorms of PyTorch, and those that are written as several operations."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused import converted, tiny_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import float8.torch as f8

Config = Callable[..., f8.LinearConfig]
pytestmark = [
    pytest.mark.usefixtures("untold"),
    pytest.mark.filterwarnings("ignore:float8. fuse left"),
]


class Norm(nn.Module):
    def __init__(self, features: int = 64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features))
        self.eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class NormOfGemma(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class NormOfMethods(Norm):
    def normalized(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return (self.normalized(x.float()) * (1.0 + self.weight.float())).type_as(x)


class NormOfRoundedProduct(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide).to(x.dtype)


class NormOfTwo(NormOfGemma):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (2.0 + self.weight.float())).type_as(x)


class NormOfRoundedWeights(NormOfGemma):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.type_as(x) * (1.0 + self.weight)


class NormOfAnotherMethod(NormOfMethods):
    def normalized(self, x: Tensor) -> Tensor:
        return x if bool(x.max() < 2) else super().normalized(x)


class NormOfAPart(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide[..., :64].pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class NormOfADimension(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(2, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class NormWithoutGradient(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        with torch.no_grad():
            inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * inverse).to(x.dtype)


class NormOfData(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.data * wide.to(x.dtype)


class NormOfAProperty(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return found * 2 if name == "weight" else found


class NormByValues(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if bool(x.max() < 100) else x


KNOWN: list[Any] = [Norm, NormOfGemma, NormOfMethods, NormOfRoundedProduct, nn.RMSNorm]
BOUNDS = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}


def normed(
    config: Config, kind: type[nn.Module], dtype: torch.dtype = torch.bfloat16
) -> tuple[Any, Any]:
    torch.manual_seed(2)
    norm: Any = kind(64, 1e-5) if kind is nn.RMSNorm else kind()  # type: ignore[call-arg]
    nn.init.normal_(norm.weight)
    plain = converted(nn.Sequential(norm, nn.Linear(64, 64)), config("rowwise"), dtype)
    return copy.deepcopy(plain), plain


def step(model: Any, dtype: torch.dtype, *, transposed: bool = False) -> list[Tensor]:
    """Returns y, dx and dweight of heads [B, S, H, D]."""
    x = torch.randn(2, 9, 3, 64, generator=torch.Generator().manual_seed(3))
    x = x.to(model.weight.device, dtype)
    x = (x.transpose(1, 2) if transposed else x).requires_grad_()
    y = model(x)
    (y.float().sin().sum() / 8).backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *([] if model.weight.grad is None else [model.weight.grad])]


def expect_close(own: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    for a, b in zip(own, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("kind", KNOWN)
def test_norms(
    config: Config, kind: type[nn.Module], dtype: torch.dtype, rms_norm_calls: list[int]
) -> None:
    """The sums over features may be in another order, and all that forward rounds is rounded where it was."""
    fused, plain = normed(config, kind, dtype)
    for _ in range(2):
        assert f8.fuse(fused, norms=True)[0] == ("0", True, "", "norm")
        assert isinstance(fused[0], kind)
    own, expected = step(fused[0], dtype), step(plain[0], dtype)
    expect_close(own, expected, dtype)
    if dtype != torch.float32:
        assert (own[0] != expected[0]).float().mean() < 0.01
    expect_close(
        step(fused[0], dtype, transposed=True)[:2],
        step(plain[0], dtype, transposed=True)[:2],
        dtype,
    )
    assert len(rms_norm_calls) == 2 and fused.state_dict().keys() == plain.state_dict().keys()
    fused[0].eps = plain[0].eps = 4.0  # it is read in each call
    expect_close(step(fused[0], dtype)[:2], step(plain[0], dtype)[:2], dtype)


@pytest.mark.parametrize("kind", KNOWN)
def test_norms_without_the_kernel(
    config: Config, kind: type[nn.Module], rms_norm_calls: list[int]
) -> None:
    """Features that it does not have, tensors of another type, and a weight of another one."""
    fused, plain = normed(config, kind)
    f8.fuse(fused, norms=True)
    for model in (fused, plain):
        model[0].weight = nn.Parameter(model[0].weight.detach()[:60])
        if kind is nn.RMSNorm:
            model[0].normalized_shape = (60,)
    x = torch.randn(5, 60).to(fused[0].weight)
    expect_close([fused[0](x)], [plain[0](x)], torch.bfloat16)
    expect_close([fused[0](x.double()).float()], [plain[0](x.double()).float()], torch.bfloat16)
    assert not rms_norm_calls


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", KNOWN)
def test_checkpoints_copies_and_frozen_weights(
    config: Config, kind: type[nn.Module], frozen: bool, rms_norm_calls: list[int]
) -> None:
    fused, _ = normed(config, kind)
    f8.fuse(fused, norms=True)
    fused[0].weight.requires_grad_(not frozen)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(fused)))
    assert type(copied[0]) is type(fused[0])
    expected = step(fused[0], torch.bfloat16)
    assert len(expected) == (2 if frozen else 3)

    class Again(nn.Module):
        weight = copied[0].weight

        def forward(self, x: Tensor) -> Any:
            return checkpoint(copied[0], x, use_reentrant=False)

    assert all(map(torch.equal, step(Again(), torch.bfloat16), expected))
    assert len(rms_norm_calls) == 3


@pytest.mark.parametrize("kind", KNOWN)
def test_a_weight_that_is_an_attribute_of_backward_alone(
    config: Config, kind: type[nn.Module], rms_norm_calls: list[int]
) -> None:
    """FSDP1 leaves gathered weights so, and activation checkpointing has to compute there what forward did."""
    fused, _ = normed(config, kind)
    f8.fuse(fused, norms=True)
    expected = step(fused[0], torch.bfloat16)
    model, weight = fused[0], fused[0].weight
    x = torch.randn(2, 9, 3, 64, generator=torch.Generator().manual_seed(3))
    x = x.to(weight.device, torch.bfloat16).requires_grad_()
    weight.grad = None
    y = checkpoint(model, x, use_reentrant=False)
    del model._parameters["weight"]
    object.__setattr__(model, "weight", weight)
    (y.float().sin().sum() / 8).backward()
    assert all(map(torch.equal, (y, x.grad, weight.grad), expected))
    assert len(rms_norm_calls) == 3


def test_an_epsilon_of_none_is_that_of_torch(config: Config, rms_norm_calls: list[int]) -> None:
    model = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64))
    for dtype in BOUNDS:
        fused = converted(copy.deepcopy(model), config("rowwise"), dtype)
        plain = copy.deepcopy(fused)
        f8.fuse(fused, norms=True)
        x = (torch.randn(5, 64) * 2**-12).to(fused[0].weight)
        expect_close([fused[0](x)], [plain[0](x)], dtype)
    assert len(rms_norm_calls) == len(BOUNDS)


@pytest.mark.parametrize("kind", KNOWN)
def test_autocast(
    config: Config, device: str, kind: type[nn.Module], rms_norm_calls: list[int]
) -> None:
    fused, plain = normed(config, kind, torch.float32)
    f8.fuse(fused, norms=True)
    for x in (torch.randn(5, 64).to(fused[0].weight), torch.randn(5, 64, device=device).bfloat16()):
        with torch.autocast(device, torch.bfloat16):
            expect_close([fused[0](x)], [plain[0](x)], torch.bfloat16)
    assert len(rms_norm_calls) == (0 if kind is nn.RMSNorm else 2)


@pytest.mark.parametrize(
    "kind",
    [
        NormOfTwo,
        NormOfRoundedWeights,
        NormOfAnotherMethod,
        NormByValues,
        NormOfAPart,
        NormOfADimension,
        NormWithoutGradient,
        NormOfData,
        NormOfAProperty,
    ],
)
def test_other_norms_stay(config: Config, kind: type[nn.Module]) -> None:
    fused, _ = normed(config, kind)
    done = {each.name: each.fused for each in f8.fuse(fused, norms=True)}
    assert not done.get("0", False) and type(fused[0]) is kind


def test_names_a_norm_that_stays(config: Config) -> None:
    kind = type("OtherRMSNorm", (NormOfTwo,), {})
    fused, _ = normed(config, kind)
    (left,) = (each for each in f8.fuse(fused, norms=True) if each.name == "0")
    assert not left.fused and left.what == "norm" and "eager mode computes it" in left.why


@pytest.mark.parametrize("kind", KNOWN)
def test_norms_stay_without_the_option_and_in_compiled_graphs(
    config: Config, kind: type[nn.Module], rms_norm_calls: list[int]
) -> None:
    fused, plain = normed(config, kind)
    f8.fuse(fused)
    assert type(fused[0]) is kind
    f8.fuse(fused, norms=True)
    x = torch.randn(2, 9, 64).to(fused[0].weight)
    torch.compile(fused, backend="aot_eager", fullgraph=True)(x)
    program = torch.export.export(fused[0], (x,))
    assert torch.equal(program.module()(x), plain[0](x)) and not rms_norm_calls
    fused(x)
    assert len(rms_norm_calls) == 1


@pytest.mark.parametrize("kind", KNOWN[:-1])
def test_a_norm_whose_forward_is_replaced_later(
    config: Config,
    kind: type[nn.Module],
    monkeypatch: pytest.MonkeyPatch,
    rms_norm_calls: list[int],
) -> None:
    fused, _ = normed(config, kind)
    f8.fuse(fused, norms=True)
    monkeypatch.setattr(kind, "forward", lambda _, x: x * 2)
    x = torch.randn(2, 9, 64).to(fused[0].weight)
    with pytest.warns(UserWarning, match=f"{kind.__name__} is no longer fused"):
        assert torch.equal(fused[0](x), x * 2) and not rms_norm_calls


def test_norms_of_torch_that_stay(config: Config) -> None:
    class DoubledNorm(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    made = [
        nn.RMSNorm(64, elementwise_affine=False),
        nn.RMSNorm((2, 64)),
        DoubledNorm(64),
        nn.RMSNorm(64),
    ]
    fused = converted(nn.Sequential(*made, nn.Linear(64, 64)), config("delayed"), torch.bfloat16)
    done = {each.name: each for each in f8.fuse(fused, norms=True) if each.what == "norm"}
    assert [done[name].fused for name in "0123"] == [False, False, False, True] and len(done) == 4
    assert "no weight" in done["0"].why and "normalized_shape" in done["1"].why


def test_tensors_of_ranks_stay(config: Config, rms_norm_calls: list[int]) -> None:
    """A DTensor, for which a class of tensors stands here."""

    class Other(Tensor):
        pass

    fused, plain = normed(config, NormOfGemma)
    f8.fuse(fused, norms=True)
    x = torch.randn(5, 64).to(fused[0].weight)
    y = fused[0](x.as_subclass(Other))
    assert type(y) is Other and torch.equal(y.as_subclass(Tensor), plain[0](x))
    assert not rms_norm_calls


def test_norms_on_meta(config: Config) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Norm(), nn.Linear(64, 64))
        f8.convert_to_float8_training(model, config=config("rowwise"))
        assert ("0", True, "", "norm") in f8.fuse(model, norms=True)


MODELS = {
    "Llama": 2 * 2 + 1,
    "Qwen3": 4 * 2 + 1,
    "Gemma": 2 * 2 + 1,
    "Gemma2": 4 * 2 + 1,
    "Gemma3": 6 * 2 + 1,
}


@pytest.mark.parametrize(("kind", "count"), MODELS.items())
def test_models_of_transformers(
    config: Config, device: str, kind: str, count: int, rms_norm_calls: list[int]
) -> None:
    plain: Any = f8.convert_to_float8_training(
        tiny_model(kind).to(device, torch.bfloat16),
        config=config("rowwise"),
        module_filter_fn=lambda _, n: "head" not in n,
    )
    fused = copy.deepcopy(plain)
    f8.fuse(plain)
    norms = [each for each in f8.fuse(fused, norms=True) if each.what == "norm"]
    assert all(each.fused for each in norms) and len(norms) == count
    ids = torch.randint(3, 64, (2, 12), device=device)
    ends = []
    for model in (fused, plain):
        result = model(input_ids=ids, labels=ids)
        result.loss.backward()
        ends.append((result, {n: p.grad for n, p in model.named_parameters() if "norm" in n}))
    (own, gradients), (expected, others) = ends
    assert len(rms_norm_calls) == count
    torch.testing.assert_close(own.loss, expected.loss, rtol=1e-2, atol=0)
    torch.testing.assert_close(own.logits, expected.logits, rtol=0, atol=0.1)
    for parameter, gradient in gradients.items():
        difference = (gradient - others[parameter]).float().norm()
        assert difference < 0.15 * others[parameter].float().norm() + 1e-3, parameter
