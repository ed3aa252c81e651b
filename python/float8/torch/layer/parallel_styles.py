"""torchao's styles of tensor parallelism, for `parallelize_module`.

They say layouts alone: the linears do the rest (tensor_parallel.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
)
from torch.distributed.tensor.placement_types import Placement

from float8.torch.layer.linear import Float8Linear
from float8.torch.parallel import tensor_parallel
from float8.torch.parallel.sharded_linear import LEFT
from float8.torch.shard.weight_mesh import check_split


class Float8ColwiseParallel(ColwiseParallel):
    """ColwiseParallel for a Float8Linear; x that ranks share by tokens is gathered in fp8."""

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: Any, inputs: Any, device_mesh: Any
    ) -> Any:
        return _as_dtensor(inputs[0], device_mesh, input_layouts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = _check(self, module, 0, device_mesh)
        applied = super()._apply(module, device_mesh)
        tensor_parallel.sharing_of(linear, linear.weight)
        return applied


class Float8RowwiseParallel(RowwiseParallel):
    """RowwiseParallel for a Float8Linear; where ranks share y by tokens, dy is gathered in fp8."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = _check(self, module, 1, device_mesh)
        (layout,) = self.output_layouts
        linear._output_dim = layout.dim if isinstance(layout, ShardPlacement) else None
        applied = super()._apply(module, device_mesh)
        tensor_parallel.sharing_of(linear, linear.weight)
        return applied


class PrepareFloat8ModuleInput(PrepareModuleInput):
    """PrepareModuleInput for a module whose Float8Linear layers read one x.

    An x that ranks share by tokens and that is to be replicated stays a DTensor as it is: the first
    linear that reads it gathers it in fp8, for all of them. With use_local_output it is gathered
    here, in high precision.

    fwd_config_submodule_fqn: torchao's name for the Float8Linear whose recipe counts. Here each
        linear has its own, so it is only looked for.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        desired_input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
        float8_dtype: torch.dtype = torch.float8_e4m3fn,
        fwd_config_submodule_fqn: str | None = None,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_output,
        )
        if float8_dtype != torch.float8_e4m3fn:
            raise ValueError(f"float8: float8_dtype is {float8_dtype}; the recipe has the types")
        self.fwd_config_submodule_fqn = fwd_config_submodule_fqn

    def _prepare_input_arg(
        self,
        input: Any,
        mesh: DeviceMesh,
        input_layout: Placement | None,
        desired_layout: Placement | None,
    ) -> Any:
        if input_layout is None or self.use_local_output or desired_layout != Replicate():
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        x = _as_dtensor(input, mesh, (input_layout,))
        (at,) = x.placements
        if isinstance(at, ShardPlacement) and at.dim < x.dim() - 1:
            if torch.compiler.is_compiling():
                setattr(x, LEFT, [])
            return x
        return x.redistribute(placements=(desired_layout,))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name = self.fwd_config_submodule_fqn
        found = module.modules() if name is None else (module.get_submodule(name),)
        if not any(isinstance(each, Float8Linear) for each in found):
            kind = type(module).__name__
            fault = f"{kind} has no submodule that is one" if name is None else f"{name!r} is none"
            raise ValueError(
                f"float8: PrepareFloat8ModuleInput is for a module with a Float8Linear; {fault}"
            )
        return super()._apply(module, device_mesh)


def _as_dtensor(x: Any, mesh: DeviceMesh, layouts: Any) -> Any:
    if isinstance(x, DTensor):
        return x
    return DTensor.from_local(x, mesh, layouts, run_check=False)


def _check(style: Any, module: nn.Module, dim: int, mesh: DeviceMesh) -> Float8Linear:
    if not isinstance(module, Float8Linear):
        raise ValueError(
            f"float8: {type(style).__name__} is for a Float8Linear, not a {type(module).__name__}"
        )
    layouts = f"{style.input_layouts} to {style.output_layouts}"
    tensor_parallel.compare_layer(module, mesh, f"{type(style).__name__} of {layouts}")
    check_split(module, dim, mesh.size())
    return module
