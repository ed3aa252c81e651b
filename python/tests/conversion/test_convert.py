"""Converting models: which layers, all or none, and what stays."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from repository import float8_tune
from torch import nn

import float8.torch as f8
from float8.filter import layer_pattern
from float8.torch import Float8Linear, convert_to_float8_training


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(2)])
        self.head = nn.Linear(64, 48)


def names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Float8Linear)]


def test_all_linears_in_place() -> None:
    model = Model()
    parameters = dict(model.named_parameters())
    assert convert_to_float8_training(model) is model
    assert names(model) == ["first", "blocks.0.0", "blocks.1.0", "head"]
    assert all(parameters[name] is own for name, own in model.named_parameters())


def test_another_recipe(device: str, config: Any) -> None:
    model = Model().to(device)
    convert_to_float8_training(model, config=config("rowwise"))
    model.first.register_forward_hook(lambda *_: None)
    before = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    convert_to_float8_training(model, config=config("rowwise"))
    assert dict(model.named_modules()) == before
    convert_to_float8_training(
        model, config=config("tensorwise"), module_filter_fn=lambda _, name: name != "head"
    )
    assert model.head is before["head"] and model.head.recipe.name == "rowwise"
    assert model.first.recipe.name == "tensorwise" and model.first._forward_hooks
    assert before["first"].recipe.name == "rowwise"
    assert all(parameters[name] is own for name, own in model.named_parameters())
    twin = nn.Linear(64, 64).to(device)
    twin.load_state_dict(model.first.state_dict())
    twin = convert_to_float8_training(twin, config=config("tensorwise"))
    x = torch.randn(8, 64, device=device)
    assert torch.equal(model.first(x), twin(x))


@pytest.mark.parametrize("option", ("recompute", "saturate", "pad_inner_dim"))
def test_another_option(option: str) -> None:
    linear = convert_to_float8_training(nn.Linear(64, 64))
    changed = convert_to_float8_training(linear, config=f8.LinearConfig(**{option: True}))
    if option == "pad_inner_dim":  # there is nothing to pad
        assert changed is linear
    else:
        assert changed is not linear and getattr(changed, option)
        assert convert_to_float8_training(changed) is not changed


def test_filter_sees_module_and_name() -> None:
    model = Model()
    seen = []

    def wanted(module: nn.Module, name: str) -> bool:
        seen.append((type(module), name))
        return "blocks" in name

    convert_to_float8_training(model, module_filter_fn=wanted)
    assert names(model) == ["blocks.0.0", "blocks.1.0"]
    assert seen == [(nn.Linear, n) for n in ("first", "blocks.0.0", "blocks.1.0", "head")]


def test_root_linear_is_returned() -> None:
    linear = nn.Linear(64, 64)
    converted = convert_to_float8_training(linear, config="rowwise")
    assert isinstance(converted, Float8Linear) and type(linear) is nn.Linear
    assert converted.weight is linear.weight
    assert convert_to_float8_training(linear, module_filter_fn=lambda *_: False) is linear


def test_a_layer_that_cannot_be_leaves_the_model() -> None:
    model = Model()
    model.blocks.append(nn.Linear(63, 64))
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=r"multiples of 16.*blocks\.2"):
        convert_to_float8_training(model)
    assert dict(model.named_modules()) == before and not names(model)


def test_a_filter_that_fails_leaves_the_model() -> None:
    model = Model()
    before = dict(model.named_modules())

    def fails(module: nn.Module, name: str) -> bool:
        if name == "blocks.1.0":
            raise KeyError(name)
        return True

    with pytest.raises(KeyError):
        convert_to_float8_training(model, module_filter_fn=fails)
    assert dict(model.named_modules()) == before and not names(model)


@pytest.mark.parametrize(
    ("sizes", "words"),
    (
        ((60, 64), r"module_filter_fn.*pad_inner_dim"),
        ((64, 10), r"out_features 10.*module_filter_fn.*'root'"),
    ),
    ids=("in_features", "out_features"),
)
def test_sizes_name_the_remedy(sizes: tuple[int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        convert_to_float8_training(nn.Linear(*sizes))


def test_shared_module_stays_shared() -> None:
    model = Model()
    model.blocks[1] = model.blocks[0]
    model.tied = model.first
    convert_to_float8_training(model)
    assert model.tied is model.first and isinstance(model.tied, Float8Linear)
    assert model.blocks[1][0] is model.blocks[0][0]


def test_tied_parameters_stay_tied() -> None:
    model = nn.Module()
    model.embedding = nn.Embedding(48, 64)
    model.head = nn.Linear(64, 48, bias=False)
    model.head.weight = model.embedding.weight
    convert_to_float8_training(model)
    assert model.head.weight is model.embedding.weight


def test_subclass_with_its_own_forward_is_left() -> None:
    class Lora(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    class Named(nn.Linear):
        pass

    model = nn.Sequential(Lora(64, 64), Named(64, 64), nn.MultiheadAttention(64, 4))
    convert_to_float8_training(model)
    assert names(model) == ["1"]  # MultiheadAttention reads the weight of its out_proj itself


def test_hooks_and_mode_stay(device: str, config: Any) -> None:
    linear = nn.Linear(64, 64, device=device).eval()
    calls = []
    linear.register_forward_hook(lambda *_: calls.append(1))
    linear.note = "kept"
    model = nn.Sequential(linear)
    convert_to_float8_training(model, config=config())
    model(torch.randn(2, 64, device=device))
    assert calls and model[0].note == "kept" and not model[0].training


def test_meta_model() -> None:
    with torch.device("meta"):
        model = Model()
    convert_to_float8_training(model)
    assert model.head.weight.is_meta and isinstance(model.head, Float8Linear)


def test_pad_inner_dim(device: str, config: Any) -> None:
    linear = nn.Linear(60, 64, dtype=torch.bfloat16, device=device)
    model = convert_to_float8_training(nn.Sequential(linear), config=config(pad_inner_dim=True))
    x = torch.randn(8, 60, dtype=torch.bfloat16, device=device, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert torch.allclose(y, linear(x), atol=0.1)
    assert x.grad is not None and x.grad.shape == (8, 60)
    assert linear.weight.grad is not None and linear.weight.grad.shape == (64, 60)


def test_config_of_another_kind() -> None:
    with pytest.raises(TypeError, match="config is 3"):
        convert_to_float8_training(Model(), config=3)  # type: ignore[arg-type]


def test_config_names_the_options() -> None:
    model = convert_to_float8_training(Model(), config=f8.LinearConfig("rowwise", recompute=True))
    assert model.head.recompute and model.head.recipe.name == "rowwise"
    assert "recipe=rowwise" in repr(model)


def test_measured_verdicts() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict(
            {
                "big": nn.Linear(4096, 14336),
                "small": nn.Linear(64, 64),
                "head": nn.Linear(4096, 14336),
            }
        )
    found = f8.verdicts(model, "rowwise", 8192, names=["head"])
    assert [verdict.layer.name for verdict in found] == ["big", "small", "head"]
    convert_to_float8_training(model, module_filter_fn=f8.module_filter(found), config="rowwise")
    assert names(model) == ["big"]


def test_verdicts_of_mlps_that_will_be_fused() -> None:
    with torch.device("meta"):
        linears = {"fc1": nn.Linear(2048, 8192), "fc2": nn.Linear(8192, 2048)}
        model = nn.ModuleDict(
            {"mlp": nn.ModuleDict(linears), "head": nn.ModuleDict({"out": nn.Linear(2048, 8192)})}
        )
    apart = f8.verdicts(model, "delayed", 32768)
    fused = f8.verdicts(model, "delayed", 32768, fuse=True)
    assert [verdict.layer.name for verdict in fused] == ["mlp.fc1", "mlp.fc2", "head.out"]
    first, second, head = fused
    assert first.speedup == second.speedup and first.convert and second.convert
    assert "its MLP as a whole" in first.reason and first.reason == second.reason
    assert not any("its MLP" in verdict.reason for verdict in (*apart, head))
    assert head == apart[-1]
    convert_to_float8_training(model, config="delayed", tokens=32768, fuse=True)
    assert set(names(model)) == {"mlp.fc1", "mlp.fc2", "head.out"}
    with pytest.raises(TypeError, match="number of a CUDA device"):
        f8.verdicts(model, "rowwise", 64, device=0.5)  # type: ignore[arg-type]
    # A device by a part of its name: the rows of MLPs are an H200's, and the H100 has none.
    whose = {
        name: f8.verdicts(model, "delayed", 32768, fuse=True, device=name)[0]
        for name in ("h200", "H100")
    }
    assert [each.measured_on for each in whose.values()] == ["NVIDIA H200", "NVIDIA H100 80GB HBM3"]
    assert ["its MLP" in each.reason for each in whose.values()] == [True, False]


def llama(layers: int = 32) -> nn.Module:
    sizes = {
        "attention": {
            "wq": (4096, 4096),
            "wk": (4096, 1024),
            "wv": (4096, 1024),
            "wo": (4096, 4096),
        },
        "feed_forward": {"w1": (4096, 14336), "w3": (4096, 14336), "w2": (14336, 4096)},
    }
    with torch.device("meta"):
        blocks = (
            nn.ModuleDict(
                {
                    part: nn.ModuleDict({name: nn.Linear(*size) for name, size in own.items()})
                    for part, own in sizes.items()
                }
            )
            for _ in range(layers)
        )
        return nn.ModuleDict({"layers": nn.ModuleList(blocks), "output": nn.Linear(4096, 128256)})


@pytest.mark.parametrize("policy", ("measured", "torchao"))
def test_explain_prints_the_program_s_table(policy: str, capsys: Any) -> None:
    names_kept = ["output", "layers.3.", "auto_filter_small_kn"]
    printed = float8_tune(
        *("filter", "--model", "llama3-8b", "--tokens", "4096", "--recipe", "rowwise"),
        *("--policy", policy, "--filter-fqns", ",".join(names_kept)),
    )
    model = convert_to_float8_training(
        llama(), config="rowwise", tokens=4096, names=names_kept, policy=policy, explain=True
    )
    table = [line.rstrip() for line in printed.split("\n\n")[0].splitlines()]
    found = names(model)
    asked = printed.rpartition(", M 4096, ")[2].partition(")")[0]
    last = f"{len(found)} of 225 linears to float8 (M 4096, {asked})"
    assert capsys.readouterr().out.splitlines() == [*table, "", last]
    rows = [line.split() for line in table if line.startswith("layers.*.")]
    for name, count in ((row[0], int(row[1])) for row in rows if row[4] == "float8"):
        suffix = name.removeprefix("layers.*.")
        assert sum(own.endswith(suffix) for own in found) == count
    assert found and len(found) == sum(int(row[1]) for row in rows if row[4] == "float8")


def mixtral(layers: int = 32) -> nn.Module:
    def block() -> nn.Module:
        attention = {"q_proj": 4096, "k_proj": 1024, "v_proj": 1024, "o_proj": 4096}
        experts = (
            nn.ModuleDict(
                {
                    "w1": nn.Linear(4096, 14336),
                    "w2": nn.Linear(14336, 4096),
                    "w3": nn.Linear(4096, 14336),
                }
            )
            for _ in range(8)
        )
        moe = {"gate": nn.Linear(4096, 8), "experts": nn.ModuleList(experts)}
        return nn.ModuleDict(
            {
                "self_attn": nn.ModuleDict({k: nn.Linear(4096, n) for k, n in attention.items()}),
                "block_sparse_moe": nn.ModuleDict(moe),
            }
        )

    with torch.device("meta"):
        inner = nn.ModuleDict({"layers": nn.ModuleList(block() for _ in range(layers))})
        return nn.ModuleDict({"model": inner, "lm_head": nn.Linear(4096, 32000)})


def test_experts_are_judged_by_their_own_tokens(capsys: Any) -> None:
    program = ("filter", "--model", "mixtral-8x7b", "--tokens", "8192", "--recipe", "rowwise")
    listed = json.loads(float8_tune(*program, "--expert-linears", "--json"))["decisions"]
    kinds = {layer_pattern(line["fqn"]): line for line in listed}
    tokens_of = {"experts": 2048}
    found = f8.verdicts(mixtral(1), "rowwise", 8192, tokens_of=tokens_of)
    assert {verdict.tokens for verdict in found} == {2048, 8192}
    for verdict in found:
        line = kinds[layer_pattern(verdict.layer.name)]
        assert (verdict.tokens, verdict.convert) == (line["tokens"], line["convert"])
        assert verdict.speedup == pytest.approx(line["speedup"], rel=1e-3)
    model = convert_to_float8_training(
        mixtral(1), config="rowwise", tokens=8192, tokens_of=tokens_of, explain=True
    )
    table = capsys.readouterr().out
    assert table.split()[:4] == ["layer", "count", "M", "N"]
    assert re.search(r"experts\.\*\.w2 +8 +2048 ", table)
    assert names(model) == [verdict.layer.name for verdict in found if verdict.convert]


@pytest.mark.parametrize(
    ("tokens_of", "words"),
    (
        ({"expert_mlp": 2048}, "tokens_of: 'expert_mlp'"),
        ({"experts": 0}, r"tokens of model.layers.0.block_sparse_moe.* is 0"),
    ),
    ids=("no layer", "no tokens"),
)
def test_tokens_of_experts_that_cannot_be(tokens_of: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        f8.verdicts(mixtral(1), "rowwise", 8192, tokens_of=tokens_of)


def test_filter_file(tmp_path: Any, capsys: Any) -> None:
    file = tmp_path / "verdicts"
    float8_tune(
        *("filter", "--model", "llama3-8b", "--tokens", "4096", "--recipe", "rowwise"),
        *("--verdicts", str(file)),
    )
    by_file = convert_to_float8_training(llama(), config="rowwise", tokens=4096, verdicts=file)
    assert capsys.readouterr().out == ""
    assert names(by_file) == names(
        convert_to_float8_training(llama(), config="rowwise", tokens=4096)
    )
    assert names(by_file)
    model = llama(1)
    with pytest.raises(ValueError, match="4096"):
        convert_to_float8_training(model, config="rowwise", tokens=8192, verdicts=file)
    assert not names(model)


def test_both_filters_count(capsys: Any) -> None:
    model = convert_to_float8_training(
        llama(1),
        config="rowwise",
        tokens=4096,
        module_filter_fn=lambda _, name: "w2" not in name,
        explain=True,
    )
    (line,) = (line for line in capsys.readouterr().out.splitlines() if ".w2" in line)
    assert line.endswith("kept in bf16: module_filter_fn")
    assert "layers.0.feed_forward.w1" in names(model)
    assert "layers.0.feed_forward.w2" not in names(model)


def test_ranks_are_in_the_verdicts(capsys: Any) -> None:
    model = convert_to_float8_training(
        llama(1), config="rowwise", tokens=4096, fsdp=64, tp=8, hosts=64, explain=True
    )
    lines = capsys.readouterr().out.splitlines()
    assert "wire us" in lines[0] and "exposed us" in lines[0]
    assert all("for fsdp 64 and tp 8 on 64 hosts" in line for line in lines[1:-2])
    found = f8.verdicts(llama(1), "rowwise", 4096, fsdp=64, tp=8, hosts=64)
    assert names(model) == [verdict.layer.name for verdict in found if verdict.convert]
    assert all(verdict.wire is not None and verdict.wire.is_prediction for verdict in found)


def test_measured_head_of_ten_outputs() -> None:
    """What fp8 cannot have is kept, where the measurements decide."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 14336), nn.Linear(14336, 10))
    assert names(convert_to_float8_training(model, config="rowwise", tokens=8192)) == ["0"]


def test_a_measured_root_of_ten_outputs() -> None:
    linear = nn.Linear(4096, 10, device="meta")
    assert convert_to_float8_training(linear, tokens=8192) is linear


@pytest.mark.parametrize(
    "arguments",
    (
        {"explain": True},
        {"names": ["a"]},
        {"policy": "torchao"},
        {"verdicts": "file"},
        {"fsdp": 2},
        {"hosts": 1},
        {"tokens_of": {"a": 8}},
    ),
)
def test_verdicts_need_tokens(arguments: dict[str, Any]) -> None:
    model = Model()
    with pytest.raises(ValueError, match="tokens"):
        convert_to_float8_training(model, **arguments)
    assert not names(model)
