"""Experts whose hidden dimension ranks share: the results, gradients and steps are those of one rank."""

from __future__ import annotations

import copy
import functools
import pathlib
from typing import Any

import expert_shards
import pytest
import ranks
import repository
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import float8.adapters.transformers
import float8.torch as f8
from float8.torch.experts import moe, ops, routing, tensor_parallel

EXPERTS, D, TOP = 4, 64, 2
DYNAMIC = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "bf16")


def _tokens(seed: int, count: int, dtype: torch.dtype, experts: int = EXPERTS) -> list[Tensor]:
    """Returns x, ids, scores and dy; some ids are of no expert."""
    random = torch.Generator().manual_seed(10 + seed)
    x = torch.randn(count, D, generator=random).to(dtype)
    ids = torch.randint(-1, experts + 1, (count, TOP), generator=random)
    scores = torch.rand(count, TOP, generator=random)
    dy = torch.randn(count, D, generator=random).to(dtype)
    return [each.to(ranks.device) for each in (x, ids, scores, dy)]


def _weights(world: int, hidden: int, dtype: torch.dtype, experts: int = EXPERTS) -> list[Tensor]:
    """Returns w1, w3 and w2, of which each rank's part is larger than the one before."""
    random = torch.Generator().manual_seed(1)
    grows = torch.logspace(0, 1.2, world).repeat_interleave(hidden // world)
    w1, w3 = (torch.randn(experts, hidden, D, generator=random) for _ in range(2))
    w2 = torch.randn(experts, D, hidden, generator=random)
    grown = (w1 * grows[:, None] / 16, w3 * grows[:, None] / 16, w2 * grows.flip(0) / 64)
    return [each.to(ranks.device, dtype) for each in grown]


def _parts(weights: list[Tensor], rank: int, world: int) -> list[Tensor]:
    w1, w3, w2 = (
        each.chunk(world, dim)[rank] for each, dim in zip(weights, (1, 1, 2), strict=True)
    )
    return [w1, w3, w2]


def _given(weights: list[Tensor], form: str) -> list[Any]:
    """Returns w13 and w2 as functional.moe takes them."""
    if form == "whole":
        return weights
    w1, w3, w2 = weights
    return [(w1, w3) if form == "pair" else torch.cat((w1, w3), 1), w2]


def _in_a_row(config: int) -> Any:
    """Returns functional.moe of one rank as expert linears in a row, none of whose casts computes what it reads."""

    def call(x: Tensor, ids: Tensor, scores: Tensor, w13: Any, w2: Tensor) -> Tensor:
        own = routing.route(ids, scores, EXPERTS, config)
        rows, layout = routing.dispatch(x, own), moe.layout_of(own)
        if isinstance(w13, tuple) and moe.joins_pairs(config):
            w13 = torch.cat(w13, 1)
        firsts = w13 if isinstance(w13, tuple) else (w13,)
        results = [ops.linear(rows, each, layout, config) for each in firsts]
        gate, up = results if len(results) == 2 else results[0].chunk(2, -1)
        return routing.combine(ops.linear(moe.silu_and_mul(gate, up), w2, layout, config), own)

    return call


def _leaves(tensors: Any) -> list[Tensor]:
    return [each.detach().clone().requires_grad_() for each in tensors]


def _step(call: Any, tokens: list[Tensor], weights: list[Tensor], form: str) -> list[Tensor]:
    """Returns y and the gradients of x and the scores; the weights take a step."""
    x, ids, scores, dy = tokens
    x, scores = _leaves((x, scores))
    optimizer = torch.optim.SGD(weights, lr=0.1)
    y = call(x, ids, scores, *_given(weights, form))
    y.backward(dy)
    optimizer.step()
    optimizer.zero_grad()
    assert x.grad is not None
    assert scores.grad is not None
    return [y.detach(), x.grad, scores.grad]


def _assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """The parts of a sum are rounded to x's type, and so is the sum."""
    bits = {torch.float32: 19, torch.bfloat16: 6, torch.float16: 9}[dtype]
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < 2**-bits, error


def _rank(
    mesh: Any, rank: int, world: int, recipe: str, hidden: int, dtype: Any, form: str
) -> None:
    options: Any = {"recipe": recipe, "emulate": ranks.device == "cpu"}
    options["recompute"] = None if form != "kept" else False
    whole = _leaves(_weights(world, hidden, dtype))
    mine = _leaves(_parts(whole, rank, world))
    before = [each.detach().clone() for each in mine]

    def over_ranks(*operands: Any) -> Tensor:
        return f8.functional.moe(*operands, tp_group=mesh.get_group(), **options)

    config = f8.functional.pack_experts(recipe, options["emulate"], False, options["recompute"])
    single = (
        _in_a_row(config)
        if tensor_parallel.spans_ranks(config)
        else lambda *a: f8.functional.moe(*a, **options)
    )
    call: Any = over_ranks
    if form == "compiled":
        call = torch.compile(over_ranks, backend="aot_eager", fullgraph=True)
    if form == "checkpointed":
        call = lambda *args: checkpoint(over_ranks, *args, use_reentrant=False)  # noqa: E731
    for step in range(2):
        tokens = _tokens(step, 40, dtype)
        expected = _step(single, tokens, whole, form)
        found = _step(call, tokens, mine, form)
        for one, other in zip(found, expected, strict=True):
            _assert_close(one, other, dtype)
        for one, other in zip(mine, _parts(whole, rank, world), strict=True):
            if ranks.device == "cuda":  # a part may have another kernel
                _assert_close(one, other, torch.bfloat16)
            else:
                assert torch.equal(one, other), (recipe, (one - other).abs().max())
    assert all((new != old).any() for new, old in zip(mine, before, strict=True))


@pytest.mark.parametrize("form", ["", "pair"])
@pytest.mark.parametrize("recipe", DYNAMIC)
def test_has_the_steps_of_one_rank(recipe: str, form: str, tmp_path: Any) -> None:
    f32 = recipe not in ("bf16", "rowwise_with_gw_hp")
    dtype = torch.float32 if f32 else torch.bfloat16
    ranks.spawn(_rank, 2, tmp_path, recipe, 256 if recipe == "blockwise" else 96, dtype, form)


@ranks.needs_gpus(2)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_on_gpus(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_rank, 2, tmp_path, recipe, 256, torch.bfloat16, "", device="cuda")


@pytest.mark.parametrize("form", ["kept", "compiled", "checkpointed", "float16"])
def test_has_the_forms_that_one_rank_has(form: str, tmp_path: Any) -> None:
    dtype = torch.float16 if form == "float16" else torch.float32
    ranks.spawn(_rank, 2, tmp_path, "rowwise", 96, dtype, form)


def _with_expert_parallelism(_: Any, rank: int, world: int, recipe: str) -> None:
    """Two ranks have the experts, and two share each one's hidden features."""
    mesh = init_device_mesh(ranks.device, (2, 2), mesh_dim_names=("expert", "tensor"))
    expert, tensor = mesh.get_coordinate()
    options: Any = {"recipe": recipe, "emulate": ranks.device == "cpu"}
    groups = {
        "group": mesh["expert"].get_group(),
        "tp_group": mesh["tensor"].get_group(),
    }
    whole = _leaves(_weights(2, 96, torch.float32))
    own = EXPERTS // 2
    mine = _leaves(each[own * expert :][:own] for each in _parts(whole, tensor, 2))
    counts = (40, 24)
    every = [_tokens(i, count, torch.float32) for i, count in enumerate(counts)]
    together = [torch.cat(each) for each in zip(*every, strict=True)]
    config = f8.functional.pack_experts(recipe, options["emulate"], False)
    expected = _step(_in_a_row(config), together, whole, "")
    found = _step(lambda *a: f8.functional.moe(*a, **groups, **options), every[expert], mine, "")
    for one, other in zip(found, expected, strict=True):
        _assert_close(one, other.split(counts)[expert], torch.float32)
    for one, other in zip(mine, _parts(whole, tensor, 2), strict=True):
        assert torch.equal(one, other[own * expert :][:own])


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_with_expert_parallelism(recipe: str, tmp_path: Any) -> None:
    ranks.spawn(_with_expert_parallelism, 4, tmp_path, recipe)


def _refusals(mesh: Any, rank: int, world: int) -> None:
    group = mesh.get_group()
    options: Any = {"emulate": ranks.device == "cpu", "tp_group": group}
    x, ids, scores, _ = _tokens(0, 8, torch.bfloat16)
    w13, w2 = _given(_parts(_weights(world, 96, torch.bfloat16), rank, world), "")
    for recipe, words in (("blockwise", "cuts blocks of 128"), ("delayed", "delayed scaling")):
        with pytest.raises(ValueError, match=words):
            f8.functional.moe(x, ids, scores, w13, w2, recipe=recipe, **options)
    with pytest.raises(ValueError, match="tp_group is 2"):
        f8.functional.moe(x, ids, scores, w13, w2, **{**options, "tp_group": 2})
    gathers = f8.LinearConfig(
        "rowwise", emulate=options["emulate"], enable_fsdp_float8_all_gather=True
    )
    experts = f8.Experts(EXPERTS, D, 48, dtype=torch.bfloat16, device=ranks.device)
    f8.convert_to_float8_training(experts, config=gathers, experts=True)
    fully_shard(experts, mesh=mesh)
    with pytest.raises(ValueError, match="gathers the weights of experts in fp8"):
        experts(x, ids, scores, tp_group=group)
    # Ranks that give other rows would reduce the maxima of other rows.
    count = 8 - rank
    with pytest.raises(f8.DistributedError, match="experts"):
        f8.functional.moe(x[:count], ids[:count], scores[:count], w13, w2, **options)


def test_refuses_what_ranks_cannot_share(tmp_path: Any) -> None:
    ranks.spawn(_refusals, 2, tmp_path)


def _rows(counts: list[int], seed: int) -> list[list[Tensor]]:
    """Returns the rows of each expert, and the gradients of their results."""
    random = torch.Generator().manual_seed(seed)
    both = [[torch.randn(n, D, generator=random).bfloat16() for n in counts] for _ in range(2)]
    return [[each.to(ranks.device) for each in own] for own in both]


def _torchtitan(
    _: Any, rank: int, world: int, folder: str, recipes: tuple[str, ...], experts_over: int
) -> None:
    mesh = init_device_mesh(
        ranks.device, (experts_over, world // experts_over), mesh_dim_names=("ep", "etp")
    )
    styles = expert_shards.import_torchtitan(folder)
    for recipe in recipes:
        hidden = 256 if recipe == "blockwise" else 96
        _check_torchtitan(mesh, styles, recipe, hidden, experts_over)


def _check_torchtitan(mesh: Any, styles: Any, recipe: str, hidden: int, experts_over: int) -> None:
    """GroupedExperts of torchtitan 0.2.2 under its own styles, with AdamW."""
    from torchtitan.models.moe.moe import GroupedExperts

    ep, tp = mesh["ep"], mesh["etp"]
    torch.manual_seed(0)
    single = GroupedExperts(D, hidden, EXPERTS, True).to(ranks.device)
    for p, own in zip(
        (single.w1, single.w3, single.w2), _weights(2, hidden, torch.float32), strict=True
    ):
        p.data.copy_(own)
    model = torch.nn.ModuleList([single])  # a scale state is its
    f8.convert_to_float8_training(
        model, config=f8.LinearConfig(recipe, emulate=ranks.device == "cpu"), experts=True
    )
    twin = copy.deepcopy(model)
    shared: Any = twin[0]
    if experts_over == 1:
        styles.TensorParallel()._apply(shared, tp)
    else:
        styles.ExpertTensorParallel()._apply(shared, mesh)
    before = copy.deepcopy(single)
    every = [_rows([5, 0, 24, 11] if r == 0 else [9, 3, 0, 17], r) for r in range(experts_over)]
    for module in (single, shared):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        own = every if module is single else [every[ep.get_local_rank()]]
        parts = [
            [torch.cat(e) for e in zip(*(each[i] for each in own), strict=True)] for i in (0, 1)
        ]
        counts = torch.tensor([len(e) for e in parts[0]], device=ranks.device)
        x, dy = (torch.cat(each) for each in parts)
        y = module(x.requires_grad_(), counts)
        y.backward(dy)
        grads = [p.grad for p in module.parameters()]
        optimizer.step()
        if module is single:
            expected, expected_grads = (y.detach(), x.grad), grads
    if experts_over == 1:
        whole = y.detach().clone()
        torch.distributed.all_reduce(whole, group=tp.get_group())
        _assert_close(whole, expected[0], torch.bfloat16)
        _assert_close(x.grad, expected[1], torch.bfloat16)
    for name, p in shared.named_parameters():
        one, other = p.full_tensor(), single.get_parameter(name)
        assert (one != before.get_parameter(name)).flatten(1).any(1).all(), name
        if recipe == "rowwise":  # one rank's casts compute SwiGLU themselves
            index = [n for n, _ in shared.named_parameters()].index(name)
            _assert_close(grads[index].full_tensor(), expected_grads[index], torch.bfloat16)
        else:
            assert torch.equal(one, other), (name, (one - other).abs().max())


def test_under_torchtitans_tensor_parallel(tmp_path: Any) -> None:
    folder = repository.torchtitan_folder("0.2.2")
    ranks.spawn(_torchtitan, 2, tmp_path, folder, (*DYNAMIC, "delayed"), 1)


def test_under_torchtitans_expert_tensor_parallel(tmp_path: Any) -> None:
    folder = repository.torchtitan_folder("0.2.2")
    ranks.spawn(_torchtitan, 4, tmp_path, folder, ("tensorwise", "rowwise"), 2)


def _transformers(model: str) -> Any:
    """Returns a small model, whose experts are one MLP each."""
    import transformers

    sizes = {"hidden_size": D, "num_hidden_layers": 1, "vocab_size": 64, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 192}
    torch.manual_seed(0)
    if model != "llama4":
        moe = {"moe_intermediate_size": 96, "num_experts": EXPERTS, "num_experts_per_tok": TOP}
        config = transformers.Qwen3MoeConfig(**sizes, **moe)
        return transformers.Qwen3MoeForCausalLM(config).to(ranks.device)
    more = {"num_local_experts": EXPERTS, "intermediate_size_mlp": 96, "moe_layers": [0]}
    config = transformers.Llama4TextConfig(**{**sizes, **more, "attn_scale": 0.1})
    return transformers.Llama4ForCausalLM(config).to(ranks.device)


def _experts_of(model: Any) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if ".experts." in name}


def _under_transformers(
    mesh: Any, rank: int, world: int, model: str, recipe: str, folder: str
) -> None:
    """A plan of transformers shares experts that were converted before, or are an implementation."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    emulate = ranks.device == "cpu"
    single = _transformers(model)
    shared = copy.deepcopy(single)
    if model == "implementation":
        float8.adapters.transformers.install("tensorwise", emulate=emulate)
        own = pathlib.Path(folder, "model")
        single.save_pretrained(own)  # by the first rank alone
        torch.distributed.barrier()
        load = functools.partial(AutoModelForCausalLM.from_pretrained, own, dtype=torch.float32)
        single = load(experts_implementation="float8")
        shared = load(experts_implementation="float8", distributed_config={"tp_size": world})
    else:
        for each in (single, shared):
            f8.convert_to_float8_training(
                each,
                config=f8.LinearConfig(recipe, emulate=emulate),
                module_filter_fn=lambda *_: False,
                experts=True,
            )
        plan = shared._expand_parallel_plan(shared.tp_plan)
        plan = {name: style for name, style in plan.items() if ".experts" in name}
        apply_tensor_parallelism(shared, mesh, plan)
    before = {name: p.detach().clone() for name, p in _experts_of(single).items()}
    assert len(before) == 2
    tokens = torch.randint(0, 64, (2, 16), device=ranks.device)
    for each in (single, shared):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        each(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    for name, p in _experts_of(shared).items():
        expected = _experts_of(single)[name].grad
        assert expected is not None
        _assert_close(p.grad.full_tensor(), expected, torch.float16)  # type: ignore[union-attr]
        whole = p.full_tensor()  # type: ignore[attr-defined]
        assert (whole != before[name]).flatten(1).any(1).all(), name


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        ("qwen", "tensorwise"),
        ("qwen", "delayed"),
        ("llama4", "tensorwise"),
        ("llama4", "delayed"),
        ("implementation", "tensorwise"),
    ],
)
def test_under_plans_of_transformers(model: str, recipe: str, tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers.PreTrainedModel, "_expand_parallel_plan"):
        pytest.skip("plans of parts of a model need transformers 5.23")
    if torch.__version__ < "2.11.0a0":
        pytest.skip("PyTorch 2.10 redistributes no weights whose gate and up are sharded each")
    ranks.spawn(_under_transformers, 2, tmp_path, model, recipe, str(tmp_path))


def _delayed(_: Any, rank: int, world: int, frozen: bool) -> None:
    """A first step has the scales of the whole tensors, and steps end over the ranks that share them."""
    mesh = init_device_mesh(ranks.device, (1, world), mesh_dim_names=("replica", "tensor"))
    tensor = mesh["tensor"].get_group()
    options: Any = {"recipe": "delayed", "emulate": ranks.device == "cpu"}
    options |= {"device": ranks.device, "dtype": torch.bfloat16}
    models = [
        torch.nn.ModuleList([f8.Experts(EXPERTS, D, hidden, **options)])
        for hidden in (96, 96 // world)
    ]
    whole, mine = (list(model.parameters()) for model in models)
    weights = _weights(world, 96, torch.bfloat16)
    for own, given in ((whole, weights), (mine, _parts(weights, rank, world))):
        for p, each in zip(own, _given(given, ""), strict=True):
            p.data.copy_(each)
    for model in models:
        f8.attach_scales(model)
        model[0].w2.requires_grad_(not frozen)  # type: ignore[union-attr]
    states = [model.float8_scales for model in models]
    one, several = (model[0] for model in models)

    def of_whole(x: Tensor, ids: Tensor, scores: Tensor, *_: Any) -> Any:
        return one(x, ids, scores)

    def of_parts(x: Tensor, ids: Tensor, scores: Tensor, *_: Any) -> Any:
        return several(x, ids, scores, tp_group=tensor)

    for step in range(3):
        tokens = _tokens(step, 40, torch.bfloat16)
        expected = _step(of_whole, tokens, whole, "whole")
        found = _step(of_parts, tokens, mine, "whole")
        for own, other in zip(found, expected, strict=True):
            _assert_close(own, other, torch.bfloat16)
        w1, w3 = whole[0].detach().chunk(2, dim=1)
        parts = _given(_parts([w1, w3, whole[1].detach()], rank, world), "")
        for p, other in zip(mine, parts, strict=True):
            if step == 0:  # casts of one rank compute SwiGLU themselves
                _assert_close(p, other, torch.float16)
                p.data.copy_(other)
            else:
                assert torch.equal(p, other)
        f8.sync_float8_amax_and_scale_history(models[0])
        f8.sync_float8_amax_and_scale_history(models[1], group=mesh["replica"].get_group())
        assert not states[1].first
        if step == 0:
            state = {**models[1].state_dict(), "float8_scales.state": states[0].state}
            models[1].load_state_dict(state)
        assert torch.equal(states[0].state, states[1].state)


@pytest.mark.parametrize("frozen", [False, True])
def test_delayed_scaling(frozen: bool, tmp_path: Any) -> None:
    ranks.spawn(_delayed, 2, tmp_path, frozen)


def _under_fsdp(_: Any, rank: int, world: int, gathers: bool) -> None:
    """FSDP2 shards what a rank of tensor parallelism has."""
    mesh = init_device_mesh(ranks.device, (2, 2), mesh_dim_names=("shard", "tensor"))
    single = expert_shards.GroupedExperts(EXPERTS, 96).to(ranks.device)
    config = f8.LinearConfig(
        "tensorwise", emulate=ranks.device == "cpu", enable_fsdp_float8_all_gather=gathers
    )
    f8.convert_to_float8_training(single, config=config, experts=True)
    shared = copy.deepcopy(single)
    for name, dim in (("w1", 1), ("w2", 2), ("w3", 1)):
        own = distribute_tensor(getattr(shared, name).data, mesh["tensor"], [Shard(dim)])
        shared.register_parameter(name, torch.nn.Parameter(own))
    fully_shard(shared, mesh=mesh["shard"])
    before = [p.detach().clone() for p in single.parameters()]
    counts = [10, 0, 20, 10]
    every = [[torch.cat(each) for each in _rows(counts, r)] for r in range(2)]
    for module, batches in ((single, every), (shared, [every[mesh.get_coordinate()[0]]])):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for x, dy in batches:
            y = module(x, torch.tensor(counts, device=ranks.device))
            y.backward(dy / len(batches))
        optimizer.step()
    for p, one, old in zip(shared.parameters(), single.parameters(), before, strict=True):
        assert torch.equal(p.full_tensor(), one)  # type: ignore[attr-defined]
        assert (one != old).flatten(1).any(1).all()


@pytest.mark.filterwarnings("ignore:.*gathers the weights of")
@pytest.mark.parametrize("gathers", [False, True])
def test_under_fsdp(gathers: bool, tmp_path: Any) -> None:
    """Gathers in fp8 are left to weights that FSDP alone shards."""
    ranks.spawn(_under_fsdp, 4, tmp_path, gathers)


def _bad_placements(mesh: Any, rank: int, world: int) -> None:
    options = f8.LinearConfig("rowwise", emulate=ranks.device == "cpu")
    x, counts = torch.randn(40, D).bfloat16(), torch.tensor([10, 0, 20, 10])
    cases: tuple[tuple[dict[str, int], str], ...] = (
        ({"w1": 1, "w2": 1, "w3": 1}, "here dimension 2, which is the hidden one"),
        ({"w1": 1, "w2": 2}, "of some weights of these experts, and not that of the others"),
    )
    for dims, words in cases:
        module = expert_shards.GroupedExperts(EXPERTS, 96)
        f8.convert_to_float8_training(module, config=options, experts=True)
        for name, dim in dims.items():
            own = distribute_tensor(getattr(module, name).data, mesh, [Shard(dim)])
            module.register_parameter(name, torch.nn.Parameter(own))
        with pytest.raises(ValueError, match=words):
            module(x.to(ranks.device), counts.to(ranks.device))


def test_refuses_placements_of_another_kind(tmp_path: Any) -> None:
    ranks.spawn(_bad_placements, 2, tmp_path)
