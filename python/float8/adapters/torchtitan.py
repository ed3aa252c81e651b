"""torchtitan: overrides that put fp8 linears in the place of Linear.Config, and fp8 experts too.

On the command line, for the linears of attention and feed-forward in all layers:

  --override.imports float8.adapters.torchtitan.linears
  --override.imports 'float8.adapters.torchtitan.linears={"recipe": "tensorwise", "tokens": 8192}'

For the experts of all layers:

  --override.imports float8.adapters.torchtitan.experts
  --override.imports 'float8.adapters.torchtitan.experts={"recipe": "blockwise"}'

In Python, for the layers that globs of names choose:

  config.override.imports.append(
      float8.adapters.torchtitan.register(["*.feed_forward.*"], recipe="blockwise"))
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.module import Module

from float8.adapters import selective
from float8.filter import Layer, filter_layers
from float8.torch import functional
from float8.torch.experts.modules import of_torchtitan
from float8.torch.layer.linear import Float8Linear as _Float8Linear
from float8.torch.layer.linear import resolve_recipe
from float8.torch.parallel import tensor_parallel

LAYERS = ("*.layers.*.attention.*", "*.layers.*.feed_forward.*", "*.layers.*.shared_experts.*")


class Float8Linear(_Float8Linear, Module):  # type: ignore[misc]
    """float8.torch's Float8Linear as a module of torchtitan's, which its Config builds.

    x is [..., in_features] in bfloat16, float16 or float32; the result is [..., out_features] in
    x's type. Parameters, their names and their initialisation are those of torchtitan's Linear.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc]
        recipe: str = "rowwise"
        emulate: bool = False
        recompute: bool | None = None
        saturate: bool = False

    def __init__(self, config: Config) -> None:
        super().__init__(
            config.in_features,
            config.out_features,
            bias=config.bias,
            recipe=config.recipe,
            emulate=config.emulate,
            recompute=config.recompute,
            saturate=config.saturate,
        )

    def parallelize(self, parallel_dims: Any) -> None:
        """Distributes the parameters as torchtitan's sharding config says.

        A weight that tensor parallelism shares by rows or columns of one dimension of a mesh, as a
        DTensor, is cast with the whole weight's scale (docs/tensor-parallel.md); others are an error.
        """
        super().parallelize(parallel_dims)
        if isinstance(self.weight, DTensor):
            tensor_parallel.sharing_of(self, self.weight)
        elif self.weight.shape != (self.out_features, self.in_features):
            raise NotImplementedError(
                "float8: a rank has its part of a weight as a plain tensor, whose scale would not be "
                "that of the whole weight; set parallelism.spmd_backend to partial_dtensor, train "
                "with a tensor parallel degree of 1, or leave these layers out by their names"
            )


def _linears(
    config: Any,
    *,
    recipe: str = "rowwise",
    tokens: int | None = None,
    emulate: bool = False,
    recompute: bool | None = None,
    saturate: bool = False,
) -> Any:
    """Returns the Config of a Float8Linear in the place of one of torchtitan's Linear.

    recipe: a name of float8.recipes.NAMES, but "delayed" (ValueError), whose scales need a call in
        the training loop.
    tokens: the rows of x in a call. Where it is given, a linear stays as it is unless
        float8.filter_layers says that fp8 pays.
    emulate, recompute, saturate: as for float8.torch.Float8Linear.

    A linear whose sizes are no multiples of 16 stays as it is, as torchtitan's own converter has it.
    """
    if resolve_recipe(recipe).delayed:
        raise ValueError(
            "float8: delayed scaling needs sync_float8_amax_and_scale_history in the training loop, "
            "which torchtitan has not; choose a recipe with dynamic scaling"
        )
    selective.save_linears()
    n, k = config.out_features, config.in_features
    if n % 16 != 0 or k % 16 != 0 or (tokens is not None and not _pays(n, k, recipe, tokens)):
        return config
    return derive(
        config,
        Float8Linear.Config,
        recipe=recipe,
        emulate=emulate,
        recompute=recompute,
        saturate=saturate,
    )


@functools.cache
def _pays(n: int, k: int, recipe: str, tokens: int) -> bool:
    return filter_layers([Layer("linear", k, n)], recipe, tokens)[0].convert


_number = itertools.count(1)


def register(fqns: Sequence[str], *, name: str | None = None, **options: Any) -> str:
    """Registers an override for the linears whose names match, and returns its target.

    fqns: globs of names from the trainer's config on, such as "*.layers.*.feed_forward.*". Linears of
        another class than torchtitan's Linear are left as they are.
    name: the override's name in this module; None gives it a number.
    options: the keywords of an entry of `override.imports`, which may change them: recipe, tokens,
        emulate, recompute, saturate.

    The target, "float8.adapters.torchtitan.NAME", goes into `override.imports`.
    """

    def factory(config: Any, **more: Any) -> Any:
        return _linears(config, **{**options, **more})

    factory.__name__ = name or f"linears_{next(_number)}"
    factory.__qualname__ = factory.__name__
    factory.__module__ = __name__
    register_override = override(
        target=Linear.Config, fqns=list(fqns), exact=True, description="float8's fp8 linear"
    )
    register_override(factory)
    return f"{__name__}.{factory.__name__}"


register(LAYERS, name="linears")


class Float8GroupedExperts(GroupedExperts):  # type: ignore[misc]
    """torchtitan's experts with fp8 grouped GEMMs, whose groups need no padding.

    Parameters, their names and their initialisation are those of torchtitan's GroupedExperts.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):  # type: ignore[misc]
        recipe: str = "rowwise"
        emulate: bool = False
        saturate: bool = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._experts_config = functional.pack_experts(
            config.recipe, config.emulate, config.saturate
        )

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        return of_torchtitan(self, x_RD, num_tokens_per_expert_E, self._experts_config)


@override(target=GroupedExperts.Config, exact=True, description="float8's fp8 experts")  # type: ignore[untyped-decorator]
def experts(
    config: Any, *, recipe: str = "rowwise", emulate: bool = False, saturate: bool = False
) -> Any:
    """Returns the Config of fp8 experts in the place of one of torchtitan's GroupedExperts.

    recipe: "tensorwise", "rowwise" or "blockwise" (ValueError for others).

    Experts whose sizes are no multiples of 16 stay as they are.
    """
    functional.pack_experts(recipe, emulate, saturate)
    if config.dim % 16 != 0 or config.hidden_dim % 16 != 0:
        return config
    return derive(
        config, Float8GroupedExperts.Config, recipe=recipe, emulate=emulate, saturate=saturate
    )
