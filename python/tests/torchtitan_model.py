"""A small model of torchtitan's interface, for the tests where torchtitan is not installed.

It has what float8.adapters.torchtitan uses of torchtitan 0.3.0: Configurable.Config with traverse
and build, Module with its initialisation, Linear, GroupedExperts, and the overrides.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn


class Configurable:
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[Any] = None

        def traverse(self, kind: type, prefix: str = "") -> Iterator[tuple[str, Any, Any, Any]]:
            """Yields name, config, parent and key of the configs of a kind."""
            for field in dataclasses.fields(self):
                value = getattr(self, field.name)
                children = (
                    [(f"{field.name}.{i}", value, i, own) for i, own in enumerate(value)]
                    if isinstance(value, list)
                    else [(field.name, self, field.name, value)]
                )
                for name, parent, key, own in children:
                    full = f"{prefix}.{name}" if prefix else name
                    if isinstance(own, kind):
                        yield full, own, parent, key
                    elif isinstance(own, Configurable.Config):
                        yield from own.traverse(kind, full)

        def build(self) -> Any:
            return self._owner(config=dataclasses.replace(self))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Config" in cls.__dict__:
            cls.Config._owner = cls


class Module(nn.Module, Configurable):
    _param_init: dict[str, Callable[[Any], Any]] | None = None

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        param_init: dict[str, Callable[[Any], Any]] | None = None

        def build(self) -> Any:
            module = Configurable.Config.build(self)
            module._param_init = self.param_init
            return module

    def init_states(self) -> None:
        for module in self.modules():
            if isinstance(module, Module) and module._param_init is not None:
                for name, parameter in module.named_parameters(recurse=False):
                    module._param_init[name](parameter)

    def parallelize(self, parallel_dims: Any) -> None:
        parallel_dims(self)


class Linear(nn.Linear, Module):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        in_features: int
        out_features: int
        bias: bool = False

    def __init__(self, config: Config) -> None:
        super().__init__(config.in_features, config.out_features, bias=config.bias)


class GroupedExperts(Module):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        hidden_dim: int
        num_experts: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        up = (config.num_experts, config.hidden_dim, config.dim)
        self.w1_EFD, self.w3_EFD = (nn.Parameter(torch.empty(up)) for _ in range(2))
        self.w2_EDF = nn.Parameter(torch.empty(up).transpose(1, 2).contiguous())

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        offs = torch.cumsum(num_tokens_per_expert, dim=0, dtype=torch.int32)
        w1, w2, w3 = (each.bfloat16().mT for each in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        h = nn.functional.silu(self._grouped_mm(A=x.bfloat16(), B_t=w1, offs=offs))
        h = h * self._grouped_mm(A=x.bfloat16(), B_t=w3, offs=offs)
        return self._grouped_mm(A=h, B_t=w2, offs=offs).type_as(x)

    def _grouped_mm(
        self, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor
    ) -> torch.Tensor:
        return torch._grouped_mm(A, B_t, offs=offs)


@dataclasses.dataclass(kw_only=True, slots=True)
class OverrideConfig:
    imports: list[Any] = dataclasses.field(default_factory=list)


_overrides: dict[str, tuple[type, list[str] | None, bool, Callable[..., Any]]] = {}


def override(
    *, target: type, fqns: list[str] | None = None, description: str = "", exact: bool = False
) -> Callable[[Any], Any]:
    def register(factory: Any) -> Any:
        name = f"{factory.__module__}.{factory.__name__}"
        if name in _overrides:
            raise ValueError(f"{name} is registered")
        _overrides[name] = (target, fqns, exact, factory)
        return factory

    return register


def derive(source: Any, target: type, **changes: Any) -> Any:
    shared = {f.name for f in dataclasses.fields(source)}
    wanted = {f.name for f in dataclasses.fields(target)}
    return target(**{**{name: getattr(source, name) for name in shared & wanted}, **changes})


def apply_overrides(config: OverrideConfig, root: Any) -> list[str]:
    claims = []
    for entry in config.imports:
        name, options = (entry, {}) if isinstance(entry, str) else entry
        importlib.import_module(name.rpartition(".")[0])
        target, fqns, exact, factory = _overrides[name]
        for fqn, own, parent, key in root.traverse(target):
            fits = fqns is None or any(fnmatch.fnmatch(fqn, glob) for glob in fqns)
            if fits and not (exact and type(own) is not target):
                claims.append((fqn, own, parent, key, factory, options))
    for _, own, parent, key, factory, options in claims:
        made = factory(own, **options)
        if isinstance(parent, list):
            parent[key] = made
        else:
            setattr(parent, key, made)
    return [fqn for fqn, *_ in claims]


def is_there() -> bool:
    """Tells whether `import torchtitan` finds the project's own code, or this module's."""
    return "torchtitan" in sys.modules or importlib.util.find_spec("torchtitan") is not None


def install() -> None:
    """Lets `import torchtitan` mean this module's names, in this process."""
    contents: dict[str, tuple[Any, ...]] = {
        "torchtitan": (),
        "torchtitan.config": (Configurable, OverrideConfig, apply_overrides, derive, override),
        "torchtitan.models": (),
        "torchtitan.models.common": (),
        "torchtitan.models.common.linear": (Linear,),
        "torchtitan.models.common.moe": (GroupedExperts,),
        "torchtitan.protocols": (),
        "torchtitan.protocols.module": (Module,),
    }
    for name, names in contents.items():
        module = types.ModuleType(name)
        module.__path__ = []
        module.__dict__.update({own.__name__: own for own in names})
        sys.modules[name] = module


def ones(parameter: torch.Tensor) -> None:
    nn.init.ones_(parameter)
