"""Float8Linear: nn.Linear with fp8 GEMMs."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from float8 import recipes
from float8.filter import check_tokens
from float8.recipes import Recipe
from float8.torch import _linear, notices, traced
from float8.torch.base_linear import BaseLinear
from float8.torch.layer.weight_casts import WeightCast
from float8.torch.parallel import async_tensor_parallel
from float8.torch.parallel.sharded_operands import Sharing, rules_of
from float8.torch.scales import EXPORTED_FIRST, ScaleState
from float8.torch.shard import fsdp
from float8.torch.shard.weight_gather import WeightGather
from float8.torch.shard.weight_mesh import dtype_of_rank, size_of_rank

_OWN_DICTIONARIES = ("_parameters", "_buffers", "_modules")


class Float8Linear(BaseLinear):
    """A linear whose GEMMs run in fp8, in the place of nn.Linear.

    Its parameters, their names and its state dict are nn.Linear's. x is [..., in_features], in
    bfloat16, float16 or float32, on a Hopper GPU; under autocast it is cast to autocast's type
    first. The result is [..., out_features] in x's type. The weight may have another type than x:
    float32 weights get float32 gradients, without a rounding to x's type on the way.

    in_features, out_features: multiples of 16 (ValueError).
    recipe: a name of `float8.recipes.NAMES` or a `float8.Recipe`. With delayed scaling, give the
        model's layers their scale state by `attach_scales`; a conversion does it.
    emulate: compute on the CPU, for tests; tensors are there or on any GPU. It is slow.
    recompute: keep nothing in fp8 between forward and backward, but x, and cast again. None: in
        graphs of torch.compile, which keep nothing that is cheaply computed again.
    saturate: dynamic scales of an amax that is not finite are 1, and infinities become the format's
        largest value; else results are NaN.
    pad_inner_dim: in_features may be any number; x and the weight are padded with zeros.
    enable_fsdp_float8_all_gather: `fully_shard` gathers the weight in fp8 (fsdp.py). It changes nothing
        where a weight is not sharded by it.
    async_tensor_parallel: with tensor and sequence parallelism, GEMMs run by chunks, overlapped with the
        communication of the others (async_tensor_parallel.py). None: where torch.compile would do
        so, as `torch._inductor.config._micro_pipeline_tp` says.

    The weight may be a DTensor that ranks share by rows or by columns (tensor_parallel.py); x and y are
    DTensors then.

    The first call with a shape compiles its kernels and keeps them in a cache on disk.
    """

    recipe: Recipe
    shares_input: bool  # other linears read the same x, which was seen in an earlier step
    _weight_cast: WeightCast | None
    _weight_gather: WeightGather | None
    _scales: ScaleState | None
    _scale_view: torch.Tensor | None  # the linear's part of its scale state
    _is_called = False  # in eager mode, also by an earlier recipe (stale_optimizers.py)
    _first_step: bool  # it scales dynamically, since an operand of it has no scale yet
    # With tensor parallelism (tensor_parallel.py):
    _sharing: tuple[Any, int, Sharing, Sharing] | None  # while the weight trains, and frozen
    _output_dim: int | None  # of y, which ranks share by tokens
    _agreed: bool  # the ranks have compared the layer and its x
    _operations: tuple[Any, Any] | None  # forward and backward, in words
    _layer_name: str  # in the model that was converted

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: str | Recipe = "tensorwise",
        emulate: bool = False,
        recompute: bool | None = None,
        saturate: bool = False,
        pad_inner_dim: bool = False,
        enable_fsdp_float8_all_gather: bool = False,
        async_tensor_parallel: bool | None = None,
    ) -> None:
        check_sizes("Float8Linear", in_features, out_features, pad_inner_dim)
        super().__init__(in_features, out_features, bias, device, dtype)
        self._set_options(recipe, emulate, recompute, saturate, enable_fsdp_float8_all_gather)
        self.async_tensor_parallel = async_tensor_parallel

    def _set_options(
        self,
        recipe: str | Recipe,
        emulate: bool,
        recompute: bool | None,
        saturate: bool,
        enable_fsdp_float8_all_gather: bool,
    ) -> None:
        self._padding = -self.in_features % 16
        self._scales = None
        self._scale_view = None
        self._first_step = False
        self._scale_index = 0
        self._layout = 0
        self.shares_input = False
        self._fuses_norms = False
        self._weight_cast = None
        self._weight_gather = None
        self._sharing = None
        self._agreed = False
        self._operations = None
        check_switches(
            recompute=recompute,
            emulate=emulate,
            saturate=saturate,
            enable_fsdp_float8_all_gather=enable_fsdp_float8_all_gather,
        )
        # Another recipe leaves the place in a model, and in a parallelize plan, as it was.
        self._output_dim = self.__dict__.get("_output_dim")
        self._layer_name = self.__dict__.get("_layer_name", "")
        self.recipe = resolve_recipe(recipe)
        self.emulate = emulate
        self.recompute = recompute
        self.saturate = saturate
        self.enable_fsdp_float8_all_gather = enable_fsdp_float8_all_gather
        if enable_fsdp_float8_all_gather:
            fsdp.check_recipe(self.recipe, self._padding)
        self._pack()

    def __setattr__(self, name: str, value: Any) -> None:
        # FSDP gives and takes the weight four times a step, so the common way is short.
        if name == "weight" and isinstance(value, nn.Parameter) and name in self._parameters:
            if self.enable_fsdp_float8_all_gather and hasattr(value, "_local_tensor"):
                fsdp.shard_in_place(self, value)
            self._parameters[name] = value
        else:
            super().__setattr__(name, value)

    def _pack(self) -> None:
        self._rules = rules_of(self.recipe, self.emulate, self.saturate)
        self._config, self._compiled_config = (
            recipes.pack(
                self.recipe,
                emulate=self.emulate,
                recompute=recompute,
                saturate=self.saturate,
                bias=self.bias is not None,
            )
            for recompute in (self.recompute is True, self.recompute is not False)
        )
        if self._fuses_norms:
            self._compiled_config |= recipes.FUSE_NORMS
        self._all_fp8 = recipes.is_fp8_throughout(self.recipe)
        self._may_share = self.recipe.output.a.fp8 and not self.recipe.delayed

    def fuse_norms(self) -> None:
        """Lets graphs of torch.compile cast what a norm makes of x as they compute it (norm_casts.py)."""
        self._fuses_norms = True
        self._pack()

    @classmethod
    def from_float(
        cls,
        linear: nn.Linear,
        *,
        recipe: str | Recipe = "tensorwise",
        emulate: bool = False,
        recompute: bool | None = None,
        saturate: bool = False,
        pad_inner_dim: bool = False,
        enable_fsdp_float8_all_gather: bool = False,
        async_tensor_parallel: bool | None = None,
    ) -> Float8Linear:
        """Returns a Float8Linear that has the linear's own parameters, hooks and attributes.

        Dictionaries of hooks are shared, so that handles of the linear's hooks remove them here too.
        """
        check_sizes(type(linear).__name__, linear.in_features, linear.out_features, pad_inner_dim)
        converted = cls.__new__(cls)
        converted.__dict__ = {
            name: copy.copy(value) if name in _OWN_DICTIONARIES else value
            for name, value in linear.__dict__.items()
        }
        converted._set_options(recipe, emulate, recompute, saturate, enable_fsdp_float8_all_gather)
        converted.async_tensor_parallel = async_tensor_parallel
        return converted

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not isinstance(input, torch.Tensor):
            raise TypeError(f"float8: x is a {type(input).__name__}; it is a torch.Tensor")
        source = input
        device = "cuda" if input.is_cuda else input.device.type
        if not input.is_meta and torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        # nn.Module finds a parameter as an attribute in half a microsecond.
        weight: torch.Tensor | None = self._parameters.get("weight")
        if weight is None:
            weight = self.weight
        if type(weight) is not nn.Parameter and hasattr(weight, "_local_tensor"):
            from float8.torch.parallel import tensor_parallel  # it takes a while to load

            self.note_call()
            return tensor_parallel.linear(self, input, source)  # type: ignore[no-any-return]
        bias = self.bias if self._config & recipes.BIAS else None
        cast = self._weight_cast
        copies = None if cast is None else cast.of(self, weight, input.dtype)
        if self._padding:
            self._check_sizes()
            pad = (0, self._padding)
            input, weight = functional.pad(input, pad), functional.pad(weight, pad)
        scales, layout = self._scale_view, self.layout_of_call()
        if scales is not None:
            scales = self.scales_on(weight.device)
            if is_exporting() and self._scales is not None:
                scales = self._scales.part(self._scale_index)
                if self._first_step:
                    layout |= EXPORTED_FIRST
        owner = self if self._may_share else None
        rest = (scales, layout, owner, source, copies)
        if torch.compiler.is_compiling():
            _note_graph()
            return _linear.linear(input, weight, bias, self._compiled_config, *rest)
        if not self._is_called:
            self._is_called = True
        try:
            return _linear.linear(input, weight, bias, self._config, *rest)
        except (RuntimeError, ValueError):
            _linear.refuse(input, weight, f"{self._words()}: ")
            raise

    def note_call(self) -> None:
        """Remembers that the linear computes, and not another module that reads its weight."""
        if torch.compiler.is_compiling():
            _note_graph()
        elif not self._is_called:
            self._is_called = True

    def layout_of_call(self) -> int:
        """Returns the layout of the scale state, for a call that scales by it, or dynamically.

        Nobody keeps the scales of a model that is evaluated: its weights may be averages or have an adapter merged, and
        its data may be others. Activation checkpointing runs forward without gradients too, of a module that trains.
        """
        evaluates = not (self.training or torch.is_grad_enabled())
        if evaluates and self._scale_view is not None and self._weight_gather is None:
            return self._layout | EXPORTED_FIRST
        return self._layout

    @property
    def is_empty(self) -> bool:
        """Tells whether the weight has no values now: between calls DeepSpeed's ZeRO-3 and FSDP1 have them in shards."""
        return self.weight.numel() == 0

    def describe(self) -> str:
        """Returns what a layer has in common on all ranks, in words."""
        n, k = (self.out_features, self.in_features) if self.is_empty else self.weight.shape
        dtype = str(self.weight.dtype).removeprefix("torch.")
        words = [f"[{n}, {k}] {self.recipe} in {dtype}"]
        words += [name for name in ("emulate", "saturate") if getattr(self, name)]
        if self.recompute is not None:
            words.append(f"recompute={self.recompute}")
        if self.bias is not None:
            words.append("bias")
        if self.enable_fsdp_float8_all_gather:
            words.append("fp8 gathers")
        if async_tensor_parallel.wanted(self.async_tensor_parallel):
            words.append("async tensor parallelism")
        if self._scales is not None:
            words.append(f"a scale state of {self._scales.words()}")
        return ", ".join(words)

    def scales_on(self, device: torch.device) -> torch.Tensor | None:
        """Returns the linear's part of its scale state, which follows the weights."""
        view = self._scale_view
        if view is not None and view.device != device and self._scales is not None:
            self._scales.follow(device)
            view = self._scale_view
        return view

    def _apply(self, fn: Any, recurse: bool = True) -> Float8Linear:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # A state that is no submodule would move in the next forward, which may be compiled.
        if self.weight is not None and not self.weight.is_meta:
            self.scales_on(self.weight.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A copy has weights of its own, and a mesh cannot be copied.
        of_weight = ("_weight_cast", "_weight_gather", "_sharing", "_operations")
        return {**self.__dict__, **dict.fromkeys(of_weight), "_agreed": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self._scales is not None:
            self._scales.attach(self, self._scale_index)

    def _check_sizes(self) -> None:
        """Raises where somebody changed what the layer was made with: its sizes or its padding."""
        made = (self.out_features, self.in_features)
        size = tuple(self.weight.shape)
        if (len(size) == 2 and size != made) or self._padding != -self.in_features % 16:
            raise ValueError(
                f"float8: {self._words()} has a weight of {list(size)}, out_features {made[0]}, in_features "
                f"{made[1]} and a padding of {self._padding}, which do not belong together: make "
                "another layer where its sizes change"
            )

    def _words(self) -> str:
        return f"layer {self._layer_name!r}" if self._layer_name else "a Float8Linear"

    def extra_repr(self) -> str:
        text = f"{super().extra_repr()}, recipe={self.recipe.name or 'custom'}"
        return text + (", emulate=True" if self.emulate else "")


@traced.constant
def _note_graph() -> bool:
    notices.in_graphs = True
    return True


@traced.constant
def is_exporting() -> bool:
    """Tells whether torch.export traces, and not torch.compile, of which PyTorch 2.11 says so too."""
    return torch.compiler.is_exporting()


def prepare(module: nn.Module, tokens: int, *, dtype: torch.dtype | None = None) -> None:
    """Makes the plans of the Float8Linear layers below `module` ahead of their first calls.

    Their kernels are compiled side by side, so a first step that takes seconds for each shape takes
    as long as the slowest kernel. A CUDA graph may be captured without a step before it then, but
    for delayed scaling.

    Weights that FSDP and tensor parallelism share have the plans of the part that a rank computes
    with. Left to the first calls are, with tensor parallelism, casts and plans of single GEMMs, whose
    kernels are these, and, with fp8 gathers, grad_input of a weight in shards.

    tokens: the rows of x in a call (batch size times sequence length), of all ranks that share a
        sequence.
    dtype: x's; None: the weights' (FSDP's param_dtype), or autocast's where it is on.

    Raises ValueError for weights on the meta device, and where a layer's sizes are not its weight's.
    """
    notices.warn_without_linears("prepare", module)
    check_tokens("tokens", tokens)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"float8: dtype is {dtype!r}; it is a torch.dtype, or None")
    groups: dict[tuple[Any, ...], dict[tuple[int, int], Float8Linear]] = {}
    for layer in module.modules():
        if isinstance(layer, Float8Linear):
            if layer.weight.is_meta:
                raise ValueError(
                    f"float8: the weight of {layer._words()} is on the meta device, and plans are "
                    "for a GPU: call prepare after the weights are made there"
                )
            layer._check_sizes()
            device = layer.weight.device.type
            type_of_weight = dtype_of_rank(layer)
            type_of_x = dtype or (
                torch.get_autocast_dtype(device)
                if torch.is_autocast_enabled(device)
                else type_of_weight
            )
            configs = {layer._config, layer._compiled_config}
            if not layer.weight.requires_grad:
                configs = {
                    recipes.of_frozen_weight(each, layer._scale_view is not None)
                    for each in configs
                }
            for config in configs:
                key = (config, type_of_x, type_of_weight, layer.weight.device, layer._may_share)
                groups.setdefault(key, {})[size_of_rank(layer)] = layer
    for (config, type_of_x, type_of_weight, device, apart), sizes in groups.items():
        x = torch.empty(0, dtype=type_of_x, device=device)
        weight = torch.empty(0, dtype=type_of_weight, device=device)
        n, k = map(list, zip(*sizes, strict=True))
        torch.ops.float8.prepare(x, weight, n, k, tokens, config, apart)


def check_sizes(name: str, in_features: int, out_features: int, pad_inner_dim: bool) -> None:
    """Raises where the tensor cores cannot have a weight of this size."""
    if out_features % 16 != 0 or (in_features % 16 != 0 and not pad_inner_dim):
        raise ValueError(
            f"float8: {name} has in_features {in_features} and out_features {out_features}; fp8 "
            "needs multiples of 16, so leave this layer out with module_filter_fn"
            + (", or pad in_features with pad_inner_dim=True" if out_features % 16 == 0 else "")
        )


_MAY_BE_NONE = {
    "recompute": "for True in graphs of torch.compile alone",
    "async_tensor_parallel": "for what torch._inductor.config._micro_pipeline_tp says",
}


def check_switches(**switches: object) -> None:
    """Raises TypeError where an option that is on or off is something else."""
    for name, value in switches.items():
        may_be_none = _MAY_BE_NONE.get(name)
        if isinstance(value, bool) or (value is None and may_be_none):
            continue
        or_none = f", False, or None {may_be_none}" if may_be_none else " or False"
        raise TypeError(f"float8: {name} is {value!r}; it is True{or_none}")


def resolve_recipe(recipe: str | Recipe) -> Recipe:
    """Returns a recipe that a Float8Linear can have, by name or as it is."""
    if isinstance(recipe, str):
        recipe = Recipe.named(recipe)
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"float8: recipe is a {type(recipe).__name__}; it is a float8.Recipe or one of "
            f"{', '.join(recipes.NAMES)}"
        )
    recipes.validate(recipe)
    return recipe
