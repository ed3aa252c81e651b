"""float8.torch.fuse of MLPs whose activation is a module that holds their first linear, as in diffusers and x-transformers."""

from __future__ import annotations

import copy
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from activations import activated, glu
from fused import converted, expect_equal_steps, expect_trains, inputs, reasons, step
from reference import same
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import float8.torch as f8
from float8.torch import notices

Config = Callable[..., f8.LinearConfig]
pytestmark = pytest.mark.filterwarnings("ignore:float8. fuse left")
HAS_NPU = False
SEEN: list[Any] = []


def has_npu() -> bool:
    return HAS_NPU


def is_old(version: str) -> bool:
    return torch.__version__ < version


def exists(value: Any) -> bool:
    return value is not None


def deprecate(*args: Any) -> None:
    SEEN.append(args)


class GEGLU(nn.Module):
    """As diffusers'."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 256)

    def gelu(self, gate: Any) -> Any:
        if gate.device.type == "mps" and is_old("2.0.0"):
            return F.gelu(gate.to(dtype=torch.float32)).to(dtype=gate.dtype)
        return F.gelu(gate)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > 0 or kwargs.get("scale") is not None:
            deprecate("scale", "1.0.0")
        x = self.proj(x)
        if has_npu():
            return torch.ops.npu.geglu(x)
        else:
            x, gate = x.chunk(2, dim=-1)
            return x * self.gelu(gate)


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 256, bias=False)
        self.activation = nn.SiLU()

    def forward(self, x: Any) -> Any:
        up, gate = self.proj(x).chunk(2, dim=-1)
        return up * self.activation(gate)


class GELU(nn.Module):
    def __init__(self, approximate: str = "tanh") -> None:
        super().__init__()
        self.proj = nn.Linear(64, 128)
        self.approximate = approximate

    def gelu(self, x: Any) -> Any:
        return F.gelu(x, approximate=self.approximate)

    def forward(self, x: Any) -> Any:
        return self.gelu(self.proj(x))


class GLU(nn.Module):
    """As x-transformers'."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.GELU()
        self.limit = None
        self.proj = nn.Linear(64, 256)
        self.mult_bias: Any = 1.0

    def forward(self, x: Any) -> Any:
        up, gate = self.proj(x).chunk(2, dim=-1)
        if exists(self.limit):
            up = up.clamp(-self.limit, self.limit)
        return up * self.act(gate) * self.mult_bias


class Gate(nn.Module):
    """As Flux 2's, which joins what the linear before it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_fn = nn.SiLU()

    def forward(self, x: Any) -> Any:
        gate, up = x.chunk(2, dim=-1)
        return self.gate_fn(gate) * up


class FeedForward(nn.Module):
    """As diffusers'."""

    def __init__(self, first: Callable[[], nn.Module], dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.ModuleList(
            [first(), nn.Dropout(dropout), nn.Linear(128, 64), nn.Dropout(0.0)]
        )

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > 0 or kwargs.get("scale") is not None:
            deprecate("scale", "1.0.0")
        for module in self.net:
            x = module(x)
        return x


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.join, self.last = nn.Linear(64, 256), Gate(), nn.Linear(128, 64)

    def forward(self, x: Any) -> Any:
        return self.last(self.join(self.first(x)))


def sequential() -> nn.Module:
    return nn.Sequential(GLU(), nn.Dropout(0.0), nn.Linear(128, 64))


def nested() -> nn.Module:
    first = nn.Sequential(nn.Linear(64, 128), nn.SiLU())
    return nn.Sequential(first, nn.Dropout(0.0), nn.Linear(128, 64))


# MLPs, their linears and activation, and what down reads of what the first linear makes.
def of_halves(name: str, up_first: bool = True) -> Callable[[torch.Tensor], torch.Tensor]:
    def h_of(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return glu(up, gate, name) if up_first else glu(gate, up, name)

    return h_of


KNOWN: dict[str, tuple[Callable[[], nn.Module], str, str, str, Callable[[torch.Tensor], Any]]] = {
    "GEGLU": (lambda: FeedForward(GEGLU), "net.0.proj", "net.2", "gelu", of_halves("gelu")),
    "SwiGLU": (lambda: FeedForward(SwiGLU), "net.0.proj", "net.2", "silu", of_halves("silu")),
    "GELU": (
        lambda: FeedForward(GELU), "net.0.proj", "net.2", "gelu_tanh",
        lambda x: activated(x, "gelu_tanh"),
    ),
    "GLU": (sequential, "0.proj", "2", "gelu", of_halves("gelu")),
    "nested": (nested, "0.0", "2", "silu", lambda x: activated(x, "silu")),
    "joined": (Joined, "first", "last", "silu", of_halves("silu", up_first=False)),
}  # fmt: skip


def pair(make: Callable[[], nn.Module], options: f8.LinearConfig, name: str = "") -> list[Any]:
    """Returns a model that is fused, and one with the same weights whose linears compute one by one."""

    class OneByOne(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(64), make()

        def forward(self, x: torch.Tensor) -> Any:
            _, first, down, _, h_of = KNOWN[name]
            mlp = self.mlp
            h = h_of(mlp.get_submodule(first)(self.norm(x)))
            return x + mlp.get_submodule(down)(h)

    class Own(OneByOne):
        def forward(self, x: torch.Tensor) -> Any:
            return x + self.mlp(self.norm(x))

    models = []
    for kind in (Own, OneByOne):
        torch.manual_seed(1)
        models.append(converted(nn.Sequential(kind(), kind()), options))
    return models


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed", "blockwise"])
@pytest.mark.parametrize("name", KNOWN)
def test_has_the_bits_of_linears_one_by_one(config: Config, name: str, recipe: str) -> None:
    make, first, down, activation, _ = KNOWN[name]
    fused, plain = pair(make, config(recipe), name)
    assert f8.fuse(fused) == [("0.mlp", True, "", "mlp"), ("1.mlp", True, "", "mlp")]
    assert f8.fuse(fused) == [("0.mlp", True, "", "mlp"), ("1.mlp", True, "", "mlp")]
    of = fused[0].mlp
    assert (*of.float8_names[:3], of.float8_activation) == (None, first, down, activation)
    expect_equal_steps(fused, plain)
    assert not SEEN


@pytest.mark.parametrize("name", ["GEGLU", "GLU"])
def test_compiles_trains_and_is_copied(config: Config, name: str) -> None:
    fused, plain = pair(KNOWN[name][0], config("rowwise"), name)
    f8.fuse(fused)
    graph = torch.compile(fused[1], fullgraph=True, backend="aot_eager")
    x = inputs(fused)
    call = lambda x: graph(checkpoint(fused[0], x, use_reentrant=False))  # noqa: E731
    expected = step(plain, x)
    assert same(step(fused, x, call), expected)
    assert same(step(copy.deepcopy(fused), x), expected)
    mlp = pickle.loads(pickle.dumps(fused[0].mlp))
    assert type(mlp) is type(fused[0].mlp)
    assert torch.equal(mlp(x), fused[0].mlp(x))
    expect_trains(fused)


class OnCondition(nn.Module):
    """Its branches and its loop depend on attributes that are seen; its arguments have defaults."""

    def __init__(self, swap: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(64, 128, bias=False) for _ in range(2)])
        self.down, self.swap = nn.Linear(128, 64), swap
        self.norm: nn.Module | None = None

    def forward(self, x: Any, scale: Any = None, times: int = 1) -> Any:
        if self.norm is not None:
            x = self.norm(x)
        first, second = self.parts
        made = (second, first) if self.swap else (first, second)
        if scale is None and times == 1:
            return self.down(F.silu(made[0](x)) * self.parts[0 if self.swap else 1](x))
        return x


@pytest.mark.parametrize("swap", [False, True])
def test_follows_branches_that_are_known(config: Config, swap: bool) -> None:
    model = converted(nn.Sequential(OnCondition(swap)), config("rowwise"))
    names = ["parts.0", "parts.1"]
    expected = ("parts.1", "parts.0") if swap else ("parts.0", "parts.1")
    assert [each.fused for each in f8.fuse(model)] == [True]
    assert model[0].float8_names[:2] == expected and sorted(expected) == names
    x = inputs(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model[0](x, None), model(x))
        assert torch.equal(model[0](x, scale=None), model(x))
    for more in ({"scale": 1.0}, {"times": 1}):
        notices._told.clear()
        with pytest.warns(UserWarning, match="called with other than an x"):
            model[0](x, **more)


@pytest.mark.parametrize("given", [False, True])
def test_sees_that_a_branch_would_be_another_one(config: Config, given: bool) -> None:
    notices._told.clear()
    mlp, norm = OnCondition(False), nn.LayerNorm(64)
    mlp.norm = norm if given else None
    model = converted(nn.Sequential(mlp), config("rowwise"))
    plain = copy.deepcopy(model)
    assert [each.fused for each in f8.fuse(model)] == [True]
    x = inputs(model)
    torch.testing.assert_close(model(x), plain(x), rtol=0.1, atol=0.1)
    mlp.norm = plain[0].norm = None if given else norm.to(x.device, x.dtype)
    with pytest.warns(UserWarning, match="is no longer fused: its norm is"):
        y = model(x)
    assert torch.equal(y, plain(x))


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "its class": (lambda of: setattr(of.mlp[0], "act", nn.ReLU()), "its 0.act is ReLU"),
    "a setting": (lambda of: setattr(of.mlp[0], "limit", 0.5), "its 0.limit is 0.5 now"),
    "a factor": (lambda of: setattr(of.mlp[0], "mult_bias", 2.0), "its 0.mult_bias is 2.0 now"),
    "a parameter": (
        lambda of: setattr(of.mlp[0], "mult_bias", nn.Parameter(torch.full((128,), 2.0, dtype=torch.bfloat16, device=of.mlp[2].weight.device))),
        "its 0.mult_bias is Parameter",
    ),
    "a hook": (lambda of: of.mlp[0].register_forward_hook(lambda m, x, y: 2 * y), "its 0 has hooks"),
    "a forward": (lambda of: setattr(of.mlp[0], "forward", lambda x: x.repeat(1, 1, 2)), "its 0 has a forward"),
    "a child": (lambda of: of.mlp.append(nn.Sigmoid()), "it has other children than it had"),
    "another": (lambda of: of.mlp.__setitem__(0, nn.Sequential(of.mlp[0])), "its 0 is no GLU now"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_sees_what_changes_later(config: Config, name: str) -> None:
    notices._told.clear()
    change, why = CHANGES[name]
    model, other = (pair(sequential, config("rowwise"))[0] for _ in range(2))
    f8.fuse(model)
    change(model[0])
    change(other[0])
    x = inputs(model)
    with pytest.warns(UserWarning, match=f"is no longer fused: {why}"):
        y = model(x)
    torch.testing.assert_close(y, other(x), rtol=0.1, atol=0.1)
    assert [each.fused for each in f8.fuse(model)] == [False, True]


@pytest.mark.parametrize(
    ("owner", "name"), [(GEGLU, "forward"), (GEGLU, "gelu"), (None, "has_npu"), (None, "HAS_NPU")]
)
def test_sees_code_that_is_replaced_later(
    config: Config, monkeypatch: Any, owner: Any, name: str
) -> None:
    notices._told.clear()
    model = converted(nn.Sequential(FeedForward(GEGLU)), config("rowwise"))
    assert [each.fused for each in f8.fuse(model)] == [True]
    monkeypatch.setattr(owner or sys.modules[__name__], name, lambda *_: 1 / 0)
    with (
        pytest.warns(UserWarning, match=f"the {name} that its forward calls was replaced"),
        pytest.raises((ZeroDivisionError, AttributeError)),
    ):
        model(inputs(model))


class Kept(GELU):
    def forward(self, x: Any) -> Any:
        self.latest = self.gelu(self.proj(x))
        return self.latest


class Counting(GELU):
    def forward(self, x: Any) -> Any:
        SEEN.append(1)
        return self.gelu(self.proj(x))


class InTraining(GELU):
    def forward(self, x: Any) -> Any:
        return self.gelu(self.proj(x)) if self.training else self.proj(x)


class Scaled(SwiGLU):
    def forward(self, x: Any) -> Any:
        up, gate = self.proj(x).chunk(2, dim=-1)
        return up * self.activation(gate) * 0.5


class Computed(GELU):
    @property
    def approximate(self) -> Any:
        return "none"

    @approximate.setter
    def approximate(self, value: Any) -> None:
        pass


class Backwards(nn.ModuleList):
    def __iter__(self) -> Any:
        return reversed(list(self._modules.values()))


@pytest.mark.parametrize("kind", [Kept, Counting, InTraining, Scaled, Computed])
def test_leaves_modules_that_compute_more(config: Config, kind: type[nn.Module]) -> None:
    model = converted(nn.Sequential(FeedForward(kind)), config("rowwise"))
    assert not any(each.fused for each in f8.fuse(model))
    assert type(model[0]) is FeedForward and not SEEN


def test_leaves_a_list_that_is_its_own(config: Config) -> None:
    mlp = FeedForward(SwiGLU)
    mlp.net = Backwards(mlp.net)
    assert f8.fuse(converted(nn.Sequential(mlp), config("rowwise"))) == []


def test_names_what_is_between(config: Config) -> None:
    model = nn.Sequential(FeedForward(GEGLU, dropout=0.1), sequential(), sequential())
    model[1].insert(1, nn.LayerNorm(128))
    model[2][0].register_forward_hook(lambda *_: None)
    assert [
        each.split("(p")[0].strip() for each in reasons(converted(model, config("rowwise")))
    ] == [
        "its net.1 drops what is between its linears",
        "its 1, a LayerNorm, is between its linears",
        "its 0 has hooks, which would not be called",
    ]


def test_a_call_with_more_computes_as_its_own_class(config: Config) -> None:
    notices._told.clear()
    model = converted(nn.Sequential(FeedForward(SwiGLU)), config("rowwise"))
    f8.fuse(model)
    x = inputs(model)
    with pytest.warns(UserWarning, match="called with other than an x"):
        y = model[0](x, scale=2.0)
    assert SEEN.pop() == ("scale", "1.0.0")
    torch.testing.assert_close(y, model(x), rtol=0.1, atol=0.1)
