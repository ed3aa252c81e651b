"""The contexts of autograd functions: what they keep between forward and backward, and which gradients a backward is for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable as _of_graph

from float8.torch import traced

_is_executed = torch._C._will_engine_execute_node


def keep_parts(ctx: Any, *parts: Tensor | None) -> None:
    """Keeps parts of a scale state for the backward of an autograd.Function, besides its saved tensors.

    Hooks of saved tensors, such as those of activation offload, copy these, and a copy is no part of a state.
    Graphs of torch.compile have the saved ones.
    """
    ctx.parts = None if torch.compiler.is_compiling() else parts


def parts_kept(ctx: Any, *saved: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the parts that keep_parts was given, which were saved as `saved`."""
    return saved if ctx.parts is None else ctx.parts


def release_saved(ctx: Any) -> None:
    """Leaves what was saved to the caller's variables alone, where the graph is not kept."""
    release = getattr(ctx, "maybe_clear_saved_tensors", None)
    if release is not None and not torch.compiler.is_compiling():
        release()


def wanted_grads(ctx: Any) -> tuple[bool, ...]:
    """Returns, in backward, which inputs of an autograd.Function get a gradient, as `ctx.needs_input_grad` has them.

    PyTorch tells which inputs required one in forward, and not which of them this backward is for. The schedules
    of pipelines with zero bubbles ask for x's gradient first and for the weights' later, and `torch.autograd.grad`
    and `backward(inputs=...)` name what they want: the rest is work for nothing.
    """
    needs: tuple[bool, ...] = ctx.needs_input_grad
    if torch.compiler.is_compiling():
        return needs
    wanted = [_is_wanted(node) for node, _ in ctx.next_functions if node is not None]
    if all(wanted):
        return needs
    # The inputs that required a gradient have an edge each, in their order.
    edges = iter(wanted)
    return tuple(need and next(edges) for need in needs)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a backward whose gradients have none themselves: to ask for one is an error.

    PyTorch's own decorator takes the gradients for constants where dy has no gradient, as in the backward of a sum, and
    its error has no place in the graph of `torch.autograd.grad`: a gradient penalty would train nothing, without a word.
    """
    of_graph = _of_graph(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return of_graph(ctx, *grads)
        with torch.no_grad():
            made = backward(ctx, *grads)
        made = made if isinstance(made, tuple) else (made,)
        return _Refused.apply(made, *_leaves(ctx), *grads, *made)  # type: ignore[no-untyped-call]

    return checked


class _Refused(torch.autograd.Function):
    """Gradients as they are, which depend on all other tensors that it is given in a way that nobody computes."""

    @staticmethod
    def forward(ctx: Any, made: tuple[Tensor | None, ...], *_: Tensor | None) -> Any:
        return made

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        raise RuntimeError(
            "float8: what computes in fp8 has no second derivatives: leave the layers that a gradient penalty goes "
            "through in high precision, with module_filter_fn"
        )


def _leaves(node: Any) -> list[Tensor]:
    """Returns the leaves of the graph below a node, of which its gradients may depend."""
    found, seen, nodes = [], {node}, [node]
    while nodes:
        each = nodes.pop()
        if isinstance(variable := getattr(each, "variable", None), Tensor):
            found.append(variable)
        new = {below for below, _ in each.next_functions if below is not None} - seen
        seen |= new
        nodes += new
    return found


def wants_gradient(*operands: Tensor | None) -> bool:
    """Tells whether a call keeps what its backward reads.

    Raises RuntimeError for gradients of forward mode and of torch.func, which ops, or graphs of torch.compile, would
    leave out without a word.
    """
    if _has_forward_gradients():
        for each in operands:
            if each is not None and forward_ad.unpack_dual(each).tangent is not None:  # type: ignore[no-untyped-call]
                _refuse("gradients of forward mode (torch.func.jvp, torch.autograd.forward_ad)")
    enabled = torch.is_grad_enabled()
    wanted = enabled and any(each is not None and each.requires_grad for each in operands)
    # torch.compile does not say of a tensor of torch.func that it requires a gradient, and neither does vmap.
    if (
        enabled
        and _is_of_functions()
        and (wanted or torch.compiler.is_compiling() or any(map(_trains_below, operands)))
    ):
        _refuse("gradients of torch.func (grad, vjp, jacrev; vmap computes under torch.no_grad)")
    return wanted


def is_transformed() -> bool:
    """Tells whether torch.func or a forward-mode gradient transforms what is called."""
    return _is_of_functions() or _has_forward_gradients()


@traced.constant
def _is_of_functions() -> bool:
    return torch._C._are_functorch_transforms_active()


def _trains_below(operand: Tensor | None) -> bool:
    """Tells whether what torch.func wraps requires a gradient, as the parameters of an ensemble do."""
    functions = torch._C._functorch
    while operand is not None and functions.is_functorch_wrapped_tensor(operand):
        operand = functions.get_unwrapped(operand)
    return operand is not None and operand.requires_grad


def _has_forward_gradients() -> bool:
    return forward_ad._current_level >= 0


def _refuse(gradients: str) -> NoReturn:
    raise RuntimeError(
        f"float8: what computes in fp8 has no {gradients}: use backward, or leave such layers out with module_filter_fn"
    )


def _is_wanted(node: Any) -> bool:
    try:
        return _is_executed(node)
    except RuntimeError:  # a leaf whose gradient torch.autograd.grad returns
        return True
