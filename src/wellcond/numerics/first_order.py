"""Hand-written backward passes whose results are not differentiable, and raise however a derivative is requested.

    class Product(torch.autograd.Function):
        @staticmethod
        @first_order
        def backward(ctx, *grads): ...

torch's own `once_differentiable` raises only if the incoming gradient has a history, and only in `.backward()`:
a gradient penalty by `torch.autograd.grad(…, create_graph=True)` is silently wrong.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["first_order"]

Backward = Callable[..., tuple[Tensor | None, ...]]


def first_order(backward: Backward) -> Backward:
    """Run `backward` without a graph.

    If a graph is requested (`create_graph=True`), the results are tied to the saved tensors and to the incoming
    gradients by a node that raises RuntimeError. So the saved tensors must carry the history of all inputs: save the
    inputs themselves, or the output.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():  # the usual case in training
            return backward(ctx, *grads)
        if torch.compiler.is_compiling():  # a compiled backward pass raises by itself
            with torch.no_grad():
                return backward(ctx, *grads)
        saved = ctx.saved_tensors
        with torch.no_grad():
            found = backward(_Once(ctx, saved), *grads)
        tied = [t for t in (*grads, *saved) if t is not None and t.requires_grad]
        there = [t for t in found if t is not None]
        linked = iter(_Refusing.apply(len(there), *there, *tied) if tied else there)  # pyright: ignore[reportArgumentType]
        return tuple(None if t is None else next(linked) for t in found)

    return once


class _Once:
    """A context with its saved tensors already unpacked: under a checkpoint they can be unpacked only once."""

    def __init__(self, ctx: Any, saved_tensors: tuple[Tensor | None, ...]):
        self._ctx, self.saved_tensors = ctx, saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Refusing(torch.autograd.Function):
    """Return the first `count` of the tensors as functions of all of them; backward raises."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, *tensors: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(t.clone() for t in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "a second derivative was asked for of a gradient that wellcond computes by hand, and that has none. "
            "Attention has it in torch.func (torch.func.grad of torch.func.grad, torch.func.hessian), which takes "
            "plain operations there"
        )
