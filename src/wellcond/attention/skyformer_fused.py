"""Skyformer in four kernel launches: both long products, the solve between them, and the whole gradient.

    out = fused_skyformer(query, key, value, keep, positions=positions, of_queries=64, scale=s, gamma=0.1)

It computes the same as skyformer.py, out = κ(Q, L) Z κ(L, K) V with Z = (κ(L, L) + γI)⁻¹, but tokens stay in half
precision, landmarks are not copied, and the gradient is written by hand. With U = κ(L, K)V, Y = ZU and g the
gradient of the output, the gradients of the small matrices are

    dY = κ(L, Q) g,    dU = Z dY,    dκ(L, L) = −dU Yᵀ,

and everything else is the derivative of the Gaussian weights (numerics/triton/landmark_plan.py and what it names).
Plain twin: the rest of skyformer.py.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wellcond.numerics.fastpaths import (
    addressable,
    followed,
    fused_kernels,
    gradient_wanted,
    large_programs,
    packed,
    refuse_batch,
)
from wellcond.numerics.first_order import first_order

__all__ = ["can_fuse", "fused_skyformer"]

MOST_LANDMARKS = 128
WIDEST = {torch.bfloat16: 64, torch.float16: 32, torch.float32: 32}


def can_fuse(query: Tensor, key: Tensor, value: Tensor, *, landmarks: int, gamma: float) -> bool:
    """Whether the kernels support these tensors: on a large GPU, at most 128 landmarks, heads at most 64 wide in
    bfloat16 and 32 in other dtypes (which need more room), not float64, γ > 0, batch · heads and strides that a kernel
    can index."""
    return (
        query.ndim == 4
        and gamma > 0
        and landmarks <= MOST_LANDMARKS
        and query.dtype == key.dtype == value.dtype
        and max(query.shape[-1], value.shape[-1]) <= WIDEST.get(query.dtype, 0)
        and fused_kernels(query.device)
        and large_programs(query.device)
        and addressable(query, key, value)
        and not followed(query, key, value)
    )


def fused_skyformer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None = None,
    *,
    positions: Tensor | None = None,
    of_queries: int = 0,
    rows: Tensor | None = None,
    valid: Tensor | None = None,
    scale: float,
    gamma: float,
) -> Tensor:
    """Attend: (b, h, n, p), (b, h, m, p), (b, h, m, c), and which keys to keep, (b, h, m) → (b, h, n, c).

    The landmarks are the tokens at `positions`, (d), (1, d) or (b, d), the first `of_queries` of them queries and the
    others keys; or any `rows` (b, h, d, p), where `valid` (b, h, d) says which of them count.
    """
    query, key, value = packed(query), packed(key), packed(value)
    rows = None if rows is None else packed(rows)
    keep, valid = None if keep is None else packed(keep), None if valid is None else packed(valid)
    tokens = (query, key, value, rows, positions, int(of_queries), valid, keep)
    if torch.compiler.is_compiling():
        return _forward_op(*tokens, scale, gamma)[0]
    scale, gamma = float(scale), float(gamma)  # an integer would become a constant of the kernels
    if not gradient_wanted(query, key, value, rows):
        return _plans()(*tokens).forward(query, key, value, rows, positions, valid, keep, scale, gamma)[0]
    out = _Skyformer.apply(*tokens, scale, gamma)
    assert isinstance(out, Tensor)
    return out


@functools.cache
def _plans() -> Callable[..., Any]:
    """Return `plan_for`; imported only when needed, as Triton may be missing."""
    from wellcond.numerics.triton.landmark_plan import plan_for

    return plan_for


class _Skyformer(torch.autograd.Function):
    """For eager calls, where a custom operator would cost tens of microseconds more."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        *tensors, scale, gamma = given
        query, key, value, rows, positions, _, valid, keep = tensors
        ctx.plan, ctx.scale = _plans()(*tensors), scale
        out, space, work = ctx.plan.forward(query, key, value, rows, positions, valid, keep, scale, gamma)
        ctx.save_for_backward(query, key, value, rows, positions, keep, space, work)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_batch(grads[0])
        *tensors, space, work = ctx.saved_tensors
        found = ctx.plan.backward(packed(grads[0]), *tensors, ctx.scale, space, work)
        return (*found, None, None, None, None, None, None)


@torch.library.custom_op("wellcond::skyformer", mutates_args=())
def _forward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor | None,
    positions: Tensor | None,
    split: int,
    valid: Tensor | None,
    keep: Tensor | None,
    scale: float,
    gamma: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out, then what is saved for backward)."""
    query, key, value, rows = (t if t is None else packed(t) for t in (query, key, value, rows))  # pyright: ignore[reportAssignmentType]
    plan = _plans()(query, key, value, rows, positions, split, valid, keep)
    return plan.forward(query, key, value, rows, positions, valid, keep, scale, gamma, plan.counters.fresh())


@_forward_op.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor | None,
    positions: Tensor | None,
    split: int,
    valid: Tensor | None,
    keep: Tensor | None,
    scale: float,
    gamma: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from wellcond.numerics.triton.landmark_plan import space_size

    size, side = space_size(query, value, rows, positions)
    return (
        query.new_empty(*query.shape[:3], value.shape[3]),
        query.new_empty(size, dtype=torch.float32),
        query.new_empty(query.shape[0] * query.shape[1], side, side, dtype=torch.float64),
    )


@torch.library.custom_op("wellcond::skyformer_gradient", mutates_args=())
def _backward_op(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor | None,
    positions: Tensor | None,
    split: int,
    valid: Tensor | None,
    keep: Tensor | None,
    scale: float,
    space: Tensor,
    work: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad, query, key, value, rows = (t if t is None else packed(t) for t in (grad, query, key, value, rows))  # pyright: ignore[reportAssignmentType]
    plan = _plans()(query, key, value, rows, positions, split, valid, keep)
    counters = plan.counters.fresh()
    *tokens, d_rows = plan.backward(grad, query, key, value, rows, positions, keep, scale, space, work, counters)
    return (*tokens, query.new_empty(0) if d_rows is None else d_rows)  # pyright: ignore[reportReturnType]


@_backward_op.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor | None,
    positions: Tensor | None,
    split: int,
    valid: Tensor | None,
    keep: Tensor | None,
    scale: float,
    space: Tensor,
    work: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = tuple(t.new_empty(t.shape) for t in (query, key, value))
    return (*tokens, query.new_empty(0) if rows is None else rows.new_empty(rows.shape))  # pyright: ignore[reportReturnType]


def _save(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    query, key, value, rows, positions, ctx.split, valid, keep, ctx.scale, _ = inputs
    ctx.save_for_backward(query, key, value, rows, positions, valid, keep, *output[1:])


def _op_backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, rows, positions, valid, keep, space, work = ctx.saved_tensors
    *tokens, d_rows = _backward_op(
        grad, query, key, value, rows, positions, ctx.split, valid, keep, ctx.scale, space, work
    )
    return (*tokens, None if rows is None else d_rows, None, None, None, None, None, None)


_forward_op.register_autograd(_op_backward, setup_context=_save)
