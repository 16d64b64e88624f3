"""Linear attention in four kernel launches, forward and backward; in two for short sequences in compiled code.

    out = fused_linear(query, key, value, factor=1 / 16)        # (b, h, n, p), (b, h, m, p), (b, h, m, c)

Forward and backward of Q (KᵀV) take about forty of torch's operations, and launching these takes longer than running
them. Once compiled, torch's operations are as fast as the four kernels, except for short sequences. Plain twin:
`tall_product` and `thin_product`, which also give second derivatives.
"""

from typing import Any

import torch
from torch import Tensor

from wellcond.numerics.fastpaths import (
    addressable,
    batch_of_gradients,
    exporting,
    followed,
    fused_kernels,
    gradient_wanted,
    packed,
    tokens_like,
)
from wellcond.numerics.tall import tall_product, thin_product

__all__ = ["can_fuse", "fused_linear", "plain_linear"]

WIDEST = 64
SHORT = 256  # tokens, of queries and of keys
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def can_fuse(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernels support these tensors: on an NVIDIA GPU, heads at most 64 wide, one dtype other than float64;
    in compiled code, only short sequences and no export."""
    return (
        fused_kernels(query.device)  # first: reading a size would bind an exported program to it
        and query.ndim == 4
        and (not torch.compiler.is_compiling() or (not exporting() and max(query.shape[2], key.shape[2]) <= SHORT))
        and query.dtype == key.dtype == value.dtype
        and query.dtype in DTYPES
        and max(query.shape[3], value.shape[3]) <= WIDEST
        and min(query.numel(), key.numel(), value.numel()) > 0
        and addressable(query, key, value)
        and not followed(query, key, value)
    )


def fused_linear(query: Tensor, key: Tensor, value: Tensor, *, factor: float) -> Tensor:
    query, key, value = packed(query), packed(key), packed(value)
    if torch.compiler.is_compiling():
        return _forward_op(query, key, value, factor)
    if not gradient_wanted(query, key, value):
        return _plan(query, key, value).forward(query, key, value, float(factor))[0]
    out = _Linear.apply(query, key, value, float(factor))
    assert isinstance(out, Tensor)
    return out


def _plan(*given: Tensor) -> Any:
    """Return the plan; imported only when needed, as Triton may be missing."""
    from wellcond.numerics.triton.linear import plan_for

    return plan_for(*given)


def plain_linear(query: Tensor, key: Tensor, value: Tensor, *, factor: float) -> Tensor:
    """`fused_linear` by torch's operations."""
    return thin_product(query, tall_product(key, value) * factor, dtype=value.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, factor: float) -> Tensor:
        ctx.plan, ctx.factor = _plan(query, key, value), factor
        out, small = ctx.plan.forward(query, key, value, factor)
        ctx.save_for_backward(query, key, value, small)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, small = ctx.saved_tensors
        grad = grads[0]
        # a second derivative is wanted, or gradients are batched
        if torch.is_grad_enabled() or grad.dtype != value.dtype or batch_of_gradients(grad):
            return (*_plain_gradients(grad, query, key, value, ctx.factor), None)
        return (*ctx.plan.backward(packed(grad), query, key, value, ctx.factor, small), None)


def _plain_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, factor: float
) -> tuple[Tensor | None, ...]:
    """Compute the gradients by plain operations, which can be differentiated again."""
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = [t.view_as(t) if further else t.detach().requires_grad_() for t in (query, key, value)]
        wanted = [t for t in inputs if t.requires_grad]
        out = plain_linear(*inputs, factor=factor)
    found = iter(torch.autograd.grad(out, wanted, grad.to(out.dtype), create_graph=further))
    return tuple(next(found) if t.requires_grad else None for t in inputs)


# ---- compiled code, short sequences


@torch.library.custom_op("wellcond::short_linear", mutates_args=())
def _forward_op(query: Tensor, key: Tensor, value: Tensor, factor: float) -> Tensor:
    from wellcond.numerics.triton.linear import attend_short

    return attend_short(query, key, value, factor)


@_forward_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, factor: float) -> Tensor:
    return tokens_like(value, query.shape[2])


@torch.library.custom_op("wellcond::short_linear_gradient", mutates_args=())
def _backward_op(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    from wellcond.numerics.triton.linear import pull_short

    return pull_short(grad, query, key, value, factor)


@_backward_op.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(tokens_like(t, t.shape[2]) for t in (query, key, value))  # pyright: ignore[reportReturnType]


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    *tensors, ctx.factor = inputs
    ctx.save_for_backward(*tensors)


def _op_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward_op(grad.to(ctx.saved_tensors[2].dtype), *ctx.saved_tensors, ctx.factor), None)


_forward_op.register_autograd(_op_backward, setup_context=_save)
