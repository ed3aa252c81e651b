"""Linears that read one x cast it once, and give the bits of linears that cast it each."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from calls import Calls
from functorch.compile import make_boxed_compiler, min_cut_rematerialization_partition
from reference import same
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config as inductor
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import float8.torch as f8
from float8.torch import _linear, _ops, shared_casts

Config = Callable[..., f8.LinearConfig]
pytestmark = pytest.mark.usefixtures("large_weights")
DYNAMIC = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")


def casts(calls: Calls) -> tuple[int, int]:
    """Returns how many casts were calls of their own, and how many forwards were given one."""
    return calls.count(_ops.quantize), calls.count(_ops.linear_forward, given=1)


class Attention(nn.Module):
    """Three linears of one x, and one that reads what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, n, bias=n == 32) for n in (64, 32, 32))
        self.o = nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.o(torch.cat((self.q(x), self.k(x), self.v(x)), -1))
        return y


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    _linear.SharedInput.latest = None


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Returns y and all gradients."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


@pytest.fixture
def model(device: str) -> nn.Module:
    return Attention().to(device, torch.bfloat16)


@pytest.fixture
def x(device: str) -> torch.Tensor:
    return torch.randn(3, 40, 64, device=device, dtype=torch.bfloat16)


@pytest.mark.parametrize("recipe", DYNAMIC)
def test_x_is_cast_once(recipe: str, model: nn.Module, x: torch.Tensor, config: Config) -> None:
    f8.convert_to_float8_training(model, config=config(recipe))
    first = step(model, x)  # every linear casts x itself
    assert [layer.shares_input for layer in (model.q, model.k, model.v, model.o)] == [
        True,
        False,
        False,
        False,
    ]
    with Calls() as calls:
        second = step(model, x)
    assert casts(calls) == (1, 3)
    assert same(first, second)


class Adapted(nn.Module):
    """Frozen linears with adapters, one behind the other, as LoRA's over query and key."""

    def __init__(self) -> None:
        super().__init__()
        self.bases = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.adapters = nn.ModuleList(nn.Linear(64, 16, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [
            base(x).unflatten(-1, (4, 16)) * adapter(x).unsqueeze(-2)
            for base, adapter in zip(self.bases, self.adapters, strict=True)
        ]
        y: torch.Tensor = made[0] + made[1]
        return y


@pytest.mark.parametrize("recipe", DYNAMIC)
def test_frozen_linears_and_adapters_share_x(
    recipe: str, device: str, x: torch.Tensor, config: Config
) -> None:
    model = Adapted().to(device, torch.bfloat16)
    f8.convert_to_float8_training(model, config=config(recipe))
    model.bases.requires_grad_(False)

    def trained() -> list[torch.Tensor]:
        y, dx, *grads = step(model, x)
        return [y, dx, *(each for each in grads if each is not None)]

    first = trained()  # every linear casts x itself
    with Calls() as calls:
        second = trained()
    assert casts(calls) == (2, 4)  # q for the first one, and both copies for the others
    assert same(first, second)


@pytest.mark.parametrize("recompute", (False, True))
@pytest.mark.parametrize("recipe", DYNAMIC)
def test_compiled_casts_are_merged(
    recipe: str, recompute: bool, model: nn.Module, x: torch.Tensor, config: Config
) -> None:
    f8.convert_to_float8_training(model, config=config(recipe, recompute=recompute))
    eager = step(model, x)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    backend = aot_autograd(
        fw_compiler=make_boxed_compiler(keep),
        bw_compiler=make_boxed_compiler(keep),
        partition_fn=min_cut_rematerialization_partition,  # inductor's
    )
    compiled = torch.compile(copy.deepcopy(model), backend=backend)
    assert same(eager, step(compiled, x))
    casts = [[node.target for node in graph.graph.nodes].count(_ops.quantize) for graph in graphs]
    assert casts == [2, 0]  # x, and what the last linear reads


@pytest.mark.parametrize("recipe", DYNAMIC)
def test_inductor_casts_x_again_once(
    recipe: str,
    model: nn.Module,
    x: torch.Tensor,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bits are those of linears that cast x again each, and a pass of the user's runs as well."""
    f8.convert_to_float8_training(model, config=config(recipe))
    users: list[torch.fx.Graph] = []
    found: list[int] = []

    def count(graph: torch.fx.Graph) -> None:
        found.append([node.target for node in graph.nodes].count(_ops.quantize_again))

    def compiled() -> list[torch.Tensor]:
        torch._dynamo.reset()
        with inductor.patch(
            post_grad_custom_pre_pass=users.append,
            post_grad_custom_post_pass=count,
            fx_graph_cache=False,
        ):
            return step(torch.compile(copy.deepcopy(model)), x)

    once = compiled()
    shares = recipe != "rowwise_with_gw_hp"  # its grad_weight multiplies x as it is
    assert found == [0, int(shares)]  # of q, k and v; o reads another x
    assert len(users) == 2
    monkeypatch.setattr(shared_casts, "share_casts", lambda graph: None)
    assert same(once, compiled())
    assert found[2:] == [0, 0]


@pytest.mark.parametrize("selective", (False, True))
@pytest.mark.parametrize("recipe", DYNAMIC)
def test_checkpointing_in_the_first_step(
    recipe: str, selective: bool, model: nn.Module, x: torch.Tensor, config: Config
) -> None:
    """A forward that runs again saves what the first one did, though linears learn in between."""
    f8.convert_to_float8_training(model, config=config(recipe))
    expected = step(copy.deepcopy(model), x)
    saved = [_ops.linear_forward, _ops.quantize]
    context = functools.partial(create_selective_checkpoint_contexts, saved)
    options = {"context_fn": context} if selective else {}

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.model, x, use_reentrant=False, **options)  # type: ignore[no-any-return]

    for _ in range(2):
        assert same(expected, step(Checkpointed(), x))


def test_a_compiled_recompute_keeps_less(device: str, config: Config) -> None:
    """What pointwise ops compute is not kept between forward and backward, nor are fp8 copies."""

    def kept(recompute: bool) -> int:
        torch._dynamo.reset()
        model = nn.ModuleList(nn.Linear(64, 256, bias=False) for _ in range(2))
        model.append(nn.Linear(256, 64, bias=False))
        model.to(device, torch.bfloat16)
        f8.convert_to_float8_training(model, config=config("rowwise", recompute=recompute))
        graphs: list[torch.fx.GraphModule] = []

        def mlp(x: torch.Tensor) -> torch.Tensor:
            return model[2](nn.functional.silu(model[0](x)) * model[1](x))  # type: ignore[no-any-return]

        def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs.append(graph)
            return graph

        def partition(graph: torch.fx.GraphModule, *arguments: Any, **options: Any) -> Any:
            joint_graph_passes(graph)  # as Inductor does
            return min_cut_rematerialization_partition(graph, *arguments, **options)

        backend = aot_autograd(
            fw_compiler=make_boxed_compiler(keep),
            bw_compiler=make_boxed_compiler(keep),
            partition_fn=partition,
        )
        x = torch.randn(512, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
        call = torch.compile(
            lambda x: mlp(nn.functional.rms_norm(x, (64,))), backend=backend, fullgraph=True
        )
        call(x).sum().backward()
        (output,) = (node for node in graphs[0].graph.nodes if node.op == "output")
        values = [node.meta["val"] for node in output.args[0] if node.op != "placeholder"]
        if recompute:
            assert not any(value.dtype == torch.uint8 and value.numel() for value in values)
            assert [value.shape for value in values].count((512, 256)) == 2  # for silu and *
        return sum(value.numel() * value.element_size() for value in values)

    # Without: qt of x and of silu * up; with: neither.
    assert kept(False) - kept(True) >= 512 * (64 + 256)


def test_delayed_scaling_has_an_amax_for_each_linear(
    model: nn.Module, x: torch.Tensor, config: Config
) -> None:
    f8.convert_to_float8_training(model, config=config("delayed"))
    step(model, x)
    f8.sync_float8_amax_and_scale_history(model)
    with Calls() as calls:
        step(model, x)
    assert casts(calls) == (0, 0)


def test_what_changed_is_cast_again(model: nn.Module, x: torch.Tensor, config: Config) -> None:
    f8.convert_to_float8_training(model, config=config("rowwise"))
    step(model, x)
    with torch.no_grad():
        before = model.q(x)
        x.mul_(3)
        after = model.k(x)
        fresh = model.k(x.clone())
    assert torch.equal(after, fresh)
    assert not torch.equal(before[..., :32], after)


@pytest.mark.parametrize("recipe", DYNAMIC)
def test_a_buffer_that_is_filled_between_forwards(
    model: nn.Module, x: torch.Tensor, recipe: str, config: Config
) -> None:
    """No version tells of what a collective, or numpy, writes into it, and in evaluation no backward comes between."""
    f8.convert_to_float8_training(model, config=config(recipe))
    step(model, x)

    def heads(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model.q(x)[..., :32] + model.k(x)
        return y

    with torch.no_grad():
        before = heads(x)
        x.data.copy_(torch.randn_like(x))
        after = heads(x)
        assert torch.equal(after, heads(x.clone()))
        assert not torch.equal(before, after)


def test_other_settings_are_cast_apart(x: torch.Tensor, options: dict[str, Any]) -> None:
    layers = [
        f8.Float8Linear(64, 32, device=x.device, dtype=x.dtype, recipe=recipe, **options)
        for recipe in ("tensorwise", "rowwise")
    ]
    for layer in layers:
        layer.shares_input = True
    with torch.no_grad(), Calls() as calls:
        shared = [layer(x) for layer in layers]
    assert calls.count(_ops.quantize) == 2
    for layer, y in zip(layers, shared, strict=True):
        layer.shares_input = False
        with torch.no_grad():
            assert torch.equal(y, layer(x.clone()))


def test_autocast_shares_too(model: nn.Module, device: str, config: Config) -> None:
    model = model.float()
    f8.convert_to_float8_training(model, config=config("rowwise"))
    x = torch.randn(40, 64, device=device)
    with torch.autocast(device, torch.bfloat16):
        first = step(model, x)
        with Calls() as calls:
            second = step(model, x)
    assert casts(calls) == (1, 3)
    assert same(first, second)


def test_no_rows(model: nn.Module, x: torch.Tensor, config: Config) -> None:
    f8.convert_to_float8_training(model, config=config("tensorwise"))
    step(model, x)
    y, dx, *_ = step(model, x[:0])
    assert y.shape == (0, 40, 64)
    assert dx.shape == (0, 40, 64)


def test_evaluation_keeps_no_transposed_copy(
    model: nn.Module, x: torch.Tensor, config: Config
) -> None:
    f8.convert_to_float8_training(model, config=config("tensorwise"))
    trained = step(model, x)[0]
    with torch.no_grad():
        evaluated = model(x)
    assert torch.equal(trained, evaluated)
    latest = _linear.SharedInput.latest
    assert latest is None or latest.qt is None
    with torch.inference_mode():
        assert torch.equal(trained, model(x))


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"))
@pytest.mark.parametrize("recompute", (None, True))
def test_saved_tensors_may_move(
    recompute: bool | None, recipe: str, model: nn.Module, x: torch.Tensor, config: Config
) -> None:
    """Activation offload copies what is saved; other calls' buffers may have had its place."""
    f8.convert_to_float8_training(model, config=config(recipe, recompute=recompute))
    step(model, x)
    f8.sync_float8_amax_and_scale_history(model)
    plain = step(model, x)
    step(model, x[:1])
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        step(model, x[:2])
        moved = step(model, x)
    assert same(plain, moved)
