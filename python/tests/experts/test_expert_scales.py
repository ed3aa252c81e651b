"""Delayed scaling of experts: one scale for the rows and one for the weights of all, in the model's state."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from activations import glu
from reference import same
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import float8
import float8.torch as f8
from float8.torch import scale_home
from float8.torch.scales import ScaleState

Config = Callable[..., f8.LinearConfig]
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("untold")


def made(device: str, **more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_experts": 4,
        "head_dim": 16,
        "num_experts_per_tok": 2,
        **more,
    }
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))
    return model.to(device, torch.bfloat16).train()


def converted(model: Any, config: f8.LinearConfig, alone: bool = False) -> Any:
    keep = (lambda *_: False) if alone else (lambda _, name: "gate" not in name.split(".")[-1:])
    return f8.convert_to_float8_training(model, config=config, experts=True, module_filter_fn=keep)


def tokens(model: nn.Module, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    return torch.randint(0, 64, (2, 16), generator=generator).to(device)


def step(model: Any, seed: int = 1) -> list[Tensor]:
    """Returns the loss and the gradients, and ends the step of delayed scaling."""
    batch = tokens(model, seed)
    model.zero_grad()
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    f8.sync_float8_amax_and_scale_history(model)
    return [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]


def state_of(model: nn.Module) -> ScaleState:
    (state,) = scale_home.states_below(model)
    return state


def words(state: ScaleState) -> Tensor:
    return state.state.cpu().clone()


def test_experts_have_parts_of_the_models_state(device: str, config: Config) -> None:
    model = converted(made(device), config("delayed"))
    linears = sum(isinstance(each, f8.Float8Linear) for each in model.modules())
    state = state_of(model)
    assert state.linears == linears + 4
    assert state.first == list(range(state.linears))
    for seed in range(3):
        found = step(model, seed)
        assert all(each.isfinite().all() for each in found)
        assert not state.first
    assert state.amaxes().count_nonzero() == 0
    model.eval()
    before = words(state)
    with torch.no_grad():
        model(input_ids=tokens(model))
    assert torch.equal(words(state), before)


def test_rows_of_all_experts_have_one_scale(device: str, config: Config) -> None:
    """The results of a step are those of linears with the same scales."""
    model = converted(made(device, num_hidden_layers=1), config("delayed"), alone=True)
    step(model)
    experts = model.model.layers[0].mlp.experts
    seen: list[Tensor] = []
    hook = experts.register_forward_hook(
        lambda _, given, out: seen.extend([*(each.detach() for each in given), out.detach()])
    )
    scales = [each.clone() for each in _scales(experts)]
    step(model, 2)
    hook.remove()
    x, ids, scores, out = seen
    twin = f8.Float8Linear(64, 96, bias=False, device=device, dtype=torch.bfloat16, **_of(config))
    last = f8.Float8Linear(48, 64, bias=False, device=device, dtype=torch.bfloat16, **_of(config))
    y = torch.zeros(x.shape[0], 2, 64, dtype=torch.bfloat16, device=device)
    for e in range(4):
        rows = (ids == e).nonzero()
        if not len(rows):
            continue
        up = _with(twin, experts.gate_up_proj[e], scales[0], x[rows[:, 0]])
        gate, up = up.chunk(2, dim=-1)
        h = glu(gate, up)
        y[rows[:, 0], rows[:, 1]] = _with(last, experts.down_proj[e], scales[1], h)
    expected = (y.float() * scores.float().unsqueeze(-1)).sum(1).bfloat16()
    if device == "cpu":
        assert torch.equal(out, expected)
    # The exponential function of PyTorch has other last bits.
    assert (out.float() - expected.float()).norm() < 0.01 * expected.float().norm()


class _Ops(TorchDispatchMode):
    """The ops of float8 that a step calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "float8":
            self.names.append(func.name().removeprefix("float8::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recompute", [True, False])
def test_casts_gather_and_compute_what_they_read(
    device: str, config: Config, recompute: bool
) -> None:
    """Swiglu experts are one op, whose bits are those of two linears and a rounding between them."""
    model = made(device, num_hidden_layers=1)
    own = converted(copy.deepcopy(model), config("delayed", recompute=recompute), alone=True)
    plain = converted(model, config("delayed", recompute=recompute), alone=True)
    for each, linears in ((own, False), (plain, True)):
        experts = each.model.layers[0].mlp.experts
        if linears:
            experts._apply_gate = lambda both: glu(*both.chunk(2, -1))
            experts.is_concatenated = False
        ops = _Ops()
        with ops:
            step(each)
        assert ("moe_backward" in ops.names) != linears
        assert ("experts_backward" in ops.names) == linears
    for seed in (2, 3):
        found, expected = step(own, seed), step(plain, seed)
        for one, two in zip(found, expected, strict=True):
            # Gradients of the activation are rounded in another place.
            assert (one.float() - two.float()).norm() < 0.02 * two.float().norm()
        assert torch.equal(found[0], expected[0]) or device != "cpu"


@pytest.mark.parametrize("recompute", [True, False])
def test_trains_every_weight(device: str, config: Config, recompute: bool) -> None:
    """Also where one of the weights is frozen, which the others' gradients do not see."""
    model = converted(made(device), config("delayed", recompute=recompute))
    twin = copy.deepcopy(model)
    for each in twin.modules():
        if hasattr(each, "expert_linears"):
            each.down_proj.requires_grad_(False)
    models = (model, twin)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in models]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for seed in range(2):
        batch = tokens(model, seed)
        for each, optimizer in zip(models, optimizers, strict=True):
            each(input_ids=batch, labels=batch).loss.backward()
            f8.sync_float8_amax_and_scale_history(each)
            if seed == 0:
                continue
            optimizer.step()
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            if seed == 0 and q.grad is not None:
                assert p.grad is not None and torch.equal(p.grad, q.grad), name
    for name, p in model.named_parameters():
        assert not torch.equal(p, before[name]), name
    for name, q in twin.named_parameters():
        assert torch.equal(q, before[name]) == ("down_proj" in name and "experts" in name), name


def _of(config: Config) -> dict[str, Any]:
    return {"recipe": "delayed", "emulate": config("delayed").emulate}


# The scales that the step before left.
def _scales(experts: Any) -> list[Tensor]:
    state = experts.expert_linears[0]._scales
    begin = -(-4 * state.slots * state.linears // 256) * 256
    all_scales = state.state[begin : begin + 32 * state.slots * state.linears].view(torch.float32)
    all_scales = all_scales.view(state.linears, state.slots, 8)
    return [all_scales[each._scale_index] for each in experts.expert_linears]


def _with(linear: Any, weight: Tensor, scales: Tensor, x: Tensor) -> Tensor:
    holder = nn.Sequential(linear)
    f8.attach_scales(holder)
    state = state_of(holder)
    with torch.no_grad():
        linear.weight.copy_(weight)
        linear(x)
        state._find_first()
        own = state.state[256 : 256 + 96].view(torch.float32).view(3, 8)
        own.copy_(scales)
        state._first = frozenset()
        state._tell_first()
        y = linear(x)
    del holder.float8_scales
    linear._scales = linear._scale_view = None
    return y  # type: ignore[no-any-return]


def test_a_checkpoint_goes_on_to_the_same_bits(device: str, config: Config) -> None:
    model = converted(made(device), config("delayed"))
    for seed in range(2):
        step(model, seed)
    saved = copy.deepcopy(model.state_dict())
    expected = step(model, 5)
    again = converted(made(device), config("delayed"))
    again.load_state_dict(saved)
    assert not state_of(again).first
    assert same(step(again, 5), expected)


def test_copies_and_pickles_have_states_of_their_own(device: str, config: Config) -> None:
    model = converted(made(device), config("delayed"))
    step(model)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    before = words(state_of(model))
    expected = step(twin, 3)
    assert torch.equal(words(state_of(model)), before)
    assert same(step(loaded, 3), expected)
    assert same(step(model, 3), expected)


def test_a_second_conversion_keeps_or_drops_the_state(device: str, config: Config) -> None:
    model = converted(made(device), config("delayed"))
    step(model)
    state = state_of(model)
    converted(model, config("delayed"))
    assert state_of(model) is state
    assert not state.first
    converted(model, config("delayed", enable_fsdp_float8_all_gather=True))
    experts = [each for each in model.modules() if getattr(each, "expert_linears", ())]
    assert state_of(model) is not state and len(experts) == 2
    for each in experts:
        assert list(each.expert_weights.values()) == each.expert_linears
    step(model)
    converted(model, config("rowwise"))
    assert not list(scale_home.states_below(model))
    assert all(not getattr(each, "expert_linears", ()) for each in model.modules())
    step_of_rowwise = model(input_ids=tokens(model)).logits
    assert step_of_rowwise.isfinite().all()


def test_refuses_experts_after_linears_have_a_state(device: str, config: Config) -> None:
    model = f8.convert_to_float8_training(made(device), config=config("delayed"))
    with pytest.raises(ValueError, match="convert all layers with delayed scaling in one call"):
        converted(model, config("delayed"), alone=True)
    assert not any(getattr(each, "expert_linears", ()) for each in model.modules())


def test_functions_have_no_state() -> None:
    with pytest.raises(ValueError, match="whose state converted experts and"):
        f8.functional.pack_experts(float8.Recipe.named("delayed"), True, False)


def test_compiles(device: str, config: Config) -> None:
    model = converted(made(device, num_hidden_layers=1), config("delayed", recompute=True), True)
    step(model)
    experts = model.model.layers[0].mlp.experts
    x = torch.randn(32, 64).to(device, torch.bfloat16).requires_grad_()
    ids = torch.randint(0, 4, (32, 2)).to(device)
    scores = torch.rand(32, 2).to(device)
    expected = experts(x, ids, scores)
    found = torch.compile(experts, backend="aot_eager")(x, ids, scores)
    assert torch.equal(found, expected)
    (own,) = torch.autograd.grad(expected.float().sum(), x)
    (other,) = torch.autograd.grad(found.float().sum(), x)
    assert torch.equal(own, other)
