"""What linears and experts see while FSDP has gathered their weight in fp8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import return_and_correct_aliasing

from float8.torch import _ops
from float8.torch.shard import gathered_experts
from float8.torch.shard.gather import Gather, turned
from float8.torch.shard.gathered_ops import (
    gathered_backward,
    gathered_copy,
    gathered_forward,
    gathered_gemm,
    weight_copy,
    weight_gemm,
)

_Context = tuple[torch.dtype, torch.device, bool, bool]


class GatheredWeight(torch.Tensor):
    """The whole weight, which has no values but its copies in fp8; what linears and autograd see.

    Its only tensor is the key of its gather, so that torch.compile traces it, and one graph
    serves the layers of many blocks.
    """

    key: Tensor
    is_transposed: bool  # its last two dimensions are not in the order in which experts compute
    is_turned: bool  # nor in that in which they are stored

    @staticmethod
    def __new__(
        cls,
        key: Tensor,
        size: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        is_transposed: bool = False,
        is_turned: bool = False,
    ) -> GatheredWeight:
        strides = None
        if is_turned:
            strides = (size[-1] * size[-2],) * (len(size) - 2) + (1, size[-2])
        weight: GatheredWeight = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=strides, dtype=dtype, device=device
        )
        weight.key = key
        weight.is_transposed = is_transposed
        weight.is_turned = is_turned
        return weight

    @classmethod
    def of(cls, gather: Gather, dtype: torch.dtype) -> GatheredWeight:
        """Returns the weight of a gather in that type, as it is stored."""
        size = gather.stored_size
        return cls(gather.key, size, dtype, gather.device, gather.is_transposed)

    def __tensor_flatten__(self) -> tuple[list[str], _Context]:
        return ["key"], (self.dtype, self.device, self.is_transposed, self.is_turned)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor],
        context: _Context,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
    ) -> GatheredWeight:
        return GatheredWeight(inner["key"], outer_size, *context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        weight = next(arg for arg in args if isinstance(arg, GatheredWeight))
        if func in _ALIASES:
            return return_and_correct_aliasing(func, args, kwargs or {}, weight._like())  # type: ignore[no-untyped-call]
        if func is torch.ops.aten.transpose.int and weight._turns(*args[1:]):
            turned = weight._like(turn=True)
            return return_and_correct_aliasing(func, args, kwargs or {}, turned)  # type: ignore[no-untyped-call]
        if func is torch.ops.aten._to_copy.default and set(kwargs or {}) == {"dtype"}:
            return weight._like(dtype=(kwargs or {})["dtype"])
        if func is torch.ops.aten.zeros_like.default:
            return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        handler = _HANDLERS.get(func)
        if handler is not None and not weight.is_transposed:
            return handler(weight, *args, **(kwargs or {}))
        raise NotImplementedError(
            f"float8: {func} was called with a weight that FSDP gathered in fp8, which has no "
            "values in high precision; only the linear, or the experts, it belongs to can use it. Call reshard() of its "
            "fully_shard module before, as where a forward without a backward has left the root's weights gathered"
        )

    def _like(self, dtype: torch.dtype | None = None, turn: bool = False) -> GatheredWeight:
        """Returns the same weight, of another type or with its last two dimensions in the other order."""
        size = turned(self.shape) if turn else self.shape
        turns = (self.is_transposed != turn, self.is_turned != turn)
        return GatheredWeight(self.key, size, dtype or self.dtype, self.device, *turns)

    def _turns(self, one: int, other: int) -> bool:
        """Tells whether these are the last two dimensions of a weight of experts."""
        dims = self.dim()
        return dims == 3 and {one % dims, other % dims} == {1, 2}

    def forward_of_linear(self, x: Tensor, x_q: Any, x_qt: Any, *rest: Any) -> Any:
        """Computes linear_forward; `rest` begins with the bias."""
        return gathered_forward(x, x_q, x_qt, self.key, self.shape[0], self.dtype, *rest)

    def backward_of_linear(self, dy: Tensor, saved: Tensor, x: Any, x_qt: Any, *rest: Any) -> Any:
        """Computes linear_backward; `rest` begins with the scales."""
        shape = list(self.shape)
        return gathered_backward(dy, saved, x, x_qt, self.key, shape, self.dtype, *rest)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype})"


_ALIASES = (
    torch.ops.aten.alias.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.view.default,
)


def _linear_forward(weight: GatheredWeight, *args: Any) -> Any:
    return weight.forward_of_linear(*args[:3], *args[6:11])


def _linear_backward(weight: GatheredWeight, *args: Any) -> Any:
    return weight.backward_of_linear(*args[:4], *args[6:10], *args[12:])


def _gemm(weight: GatheredWeight, *args: Any) -> Any:
    gemm, a, a_scales, _, bias, dtype, config = args
    return gathered_gemm(gemm, a, a_scales, weight.key, list(weight.shape), bias, dtype, config)


def _copy(weight: GatheredWeight, *args: Any) -> Any:
    gemm, like, _, dtype, granularity = args
    shape = list(weight.shape)
    clone = type(weight.key) is not torch.Tensor or is_fake(weight.key)
    return gathered_copy(gemm, like, weight.key, shape, dtype, granularity, clone)


# These functions are called in the place of an op, with the weight before the op's own arguments.
_HANDLERS: dict[Any, Callable[..., Any]] = {
    _ops.linear_forward: _linear_forward,
    _ops.linear_backward: _linear_backward,
    weight_gemm: _gemm,
    weight_copy: _copy,
    **gathered_experts.HANDLERS,
}
