"""Nyström attention in eight kernel launches: means, both long products, the pseudo-inverse, and the whole gradient.

    out = fused_nystrom(query, key, value, num_landmarks=64, num_iterations=6, scale=s)

It computes the same as nystrom.py, out = P Z B with P = softmax(s QK̃ᵀ), Z ≈ softmax(s Q̃K̃ᵀ)⁺ and
B = softmax(s Q̃Kᵀ)V, but tokens stay in half precision, no n × d matrix is stored, and the gradient is written by hand.
With Y = ZB and g the gradient of the output, the gradients of the small matrices are

    dY = Pᵀ g,    dB = Zᵀ dY,    dZ = dY Bᵀ,

followed by the backward pass of the iteration; everything else is the derivative of a softmax
(numerics/triton/nystrom_plan.py and the modules it names). A boolean mask, the same for keys and queries, leaves masked
tokens out everywhere, and takes one launch more. A sample with no more tokens than landmarks gets Z = I and its tokens
in place of the means, which is exact softmax attention. Plain twin: the rest of nystrom.py.
"""

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

__all__ = ["can_fuse", "fused_nystrom"]

MOST_LANDMARKS = 128
MOST_STEPS = 8
"""In the kernels' form of the iteration, errors grow by a factor of 3.25 per step; after eight steps they are still
below half precision's own. For float32 they would not be, so it uses plain operations."""
DTYPES = (torch.bfloat16, torch.float16)


def can_fuse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None = None,
    *,
    num_landmarks: int,
    num_iterations: int,
) -> bool:
    """Whether the kernels support these tensors: on a large GPU, in half precision, at most 128 landmarks and no fewer
    tokens, few steps, heads at most 64 wide (in float16, which needs more room, 32 beyond 64 landmarks)."""
    return (
        query.ndim == 4
        and num_landmarks <= min(MOST_LANDMARKS, query.shape[2], key.shape[2])
        and query.dtype == key.dtype == value.dtype
        and query.dtype in DTYPES
        and num_iterations <= MOST_STEPS
        and max(query.shape[3], value.shape[3]) <= (64 if query.dtype == torch.bfloat16 or num_landmarks <= 64 else 32)
        and min(query.numel(), value.numel()) > 0
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
        and fused_kernels(query.device)
        and large_programs(query.device)
        and addressable(query, key, value)
        and max(query.shape[2], key.shape[2]) * num_landmarks < 2**31
        and not followed(query, key, value, *(() if keep is None else (keep,)))
    )


def fused_nystrom(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None = None,
    *,
    num_landmarks: int,
    num_iterations: int,
    scale: float,
) -> Tensor:
    """Attend: (b, h, n, p), (b, h, m, p), (b, h, m, c) → (b, h, n, c), with at most min(n, m) landmarks.

    `keep`, bool (b, h, m), is the mask of both queries and keys, so that n = m; its b and h may be 1.
    """
    if num_iterations < 0:
        raise ValueError(f"num_iterations={num_iterations} must be 0 or more; 6 is usual")
    query, key, value = packed(query), packed(key), packed(value)
    keep = None if keep is None else packed(keep)
    counts = (int(num_landmarks), int(num_iterations))  # kernels take no NumPy integers
    wanted = gradient_wanted(query, key, value)
    if torch.compiler.is_compiling():
        return _forward_op(query, key, value, keep, *counts, scale, wanted)[0]
    scale = float(scale)  # an integer would become a constant of the kernels
    if not wanted:
        plan = _plan(query, key, value, keep, *counts)
        return plan.forward(query, key, value, keep, scale, differentiable=False)[0]
    out = _Nystrom.apply(query, key, value, keep, *counts, scale)
    assert isinstance(out, Tensor)
    return out


def _plan(*given: Any) -> Any:
    """Return the plan; imported only when needed, as Triton may be missing."""
    from wellcond.numerics.triton.nystrom_plan import plan_for

    return plan_for(*given)


class _Nystrom(torch.autograd.Function):
    """For eager calls, where a custom operator would cost tens of microseconds more."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        *settings, scale = given
        ctx.plan, ctx.scale = _plan(*settings), scale
        out, space, work = ctx.plan.forward(*settings[:4], scale, differentiable=True)
        ctx.save_for_backward(*settings[:4], space, work)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_batch(grads[0])
        *tokens, space, work = ctx.saved_tensors
        found = ctx.plan.backward(packed(grads[0]), *tokens, ctx.scale, space, work)
        return (*found, None, None, None, None)


@torch.library.custom_op("wellcond::nystrom", mutates_args=())
def _forward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    num_landmarks: int,
    num_iterations: int,
    scale: float,
    wanted: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out, then what is saved for backward, empty if no gradient is wanted)."""
    query, key, value = packed(query), packed(key), packed(value)
    keep = None if keep is None else packed(keep)
    plan = _plan(query, key, value, keep, num_landmarks, num_iterations)
    out, space, work = plan.forward(query, key, value, keep, scale, differentiable=wanted)
    return (out, space, work) if wanted else (out, *_nothing(query))


def _nothing(query: Tensor) -> tuple[Tensor, Tensor]:
    return query.new_empty(0, dtype=torch.float32), query.new_empty((0, 0, 0, 0), dtype=torch.float16)


@_forward_op.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    num_landmarks: int,
    num_iterations: int,
    scale: float,
    wanted: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from wellcond.numerics.triton.nystrom_plan import space_sizes

    out = query.new_empty(*query.shape[:3], value.shape[3])
    if not wanted:
        return (out, *_nothing(query))
    size, of_work = space_sizes(query, value, keep, num_landmarks, num_iterations)
    return out, query.new_empty(size, dtype=torch.float32), query.new_empty(of_work, dtype=torch.float16)


@torch.library.custom_op("wellcond::nystrom_gradient", mutates_args=())
def _backward_op(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    num_landmarks: int,
    num_iterations: int,
    scale: float,
    space: Tensor,
    work: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, query, key, value = packed(grad), packed(query), packed(key), packed(value)
    keep = None if keep is None else packed(keep)
    plan = _plan(query, key, value, keep, num_landmarks, num_iterations)
    return plan.backward(grad, query, key, value, keep, scale, space, work)


@_backward_op.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    num_landmarks: int,
    num_iterations: int,
    scale: float,
    space: Tensor,
    work: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    *tokens, ctx.num_landmarks, ctx.num_iterations, ctx.scale, _ = inputs
    ctx.save_for_backward(*tokens, *output[1:])


def _op_backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    *tokens, space, work = ctx.saved_tensors
    settings = (ctx.num_landmarks, ctx.num_iterations, ctx.scale)
    if space.numel() == 0:  # compiled without a gradient, called where one is wanted
        _, space, work = _forward_op(*tokens, *settings, True)
    found = _backward_op(grad, *tokens, *settings, space, work)
    return (*found, None, None, None, None, None)


_forward_op.register_autograd(_op_backward, setup_context=_save)
