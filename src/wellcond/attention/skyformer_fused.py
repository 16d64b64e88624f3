"""Skyformer in seven launches: both long products, the solve between them, and all of its gradient.

    out = fused_skyformer(query, key, value, keep, positions=positions, of_queries=64, scale=s, gamma=0.1)

The same as in skyformer.py, out = κ(Q, L) Z κ(L, K) V with Z = (κ(L, L) + γI)⁻¹, but with tokens left in half
precision, landmarks never copied out of them, and a gradient written by hand. With U = κ(L, K)V, Y = ZU and g the
gradient of the result, the landmarks' side is

    dY = κ(L, Q) g,    dU = Z dY,    dκ(L, L) = −dU Yᵀ,

and everything else is a derivative of the Gaussian weights (numerics/triton/landmark_sides.py, landmark_solve.py).
Plain twin: the rest of skyformer.py.
"""

from typing import Any

import torch
from torch import Tensor

from wellcond.numerics.fastpaths import fused_kernels

__all__ = ["can_fuse", "fused_skyformer"]

MOST_LANDMARKS = 128
WIDEST = 128


def can_fuse(query: Tensor, key: Tensor, value: Tensor, *, landmarks: int, gamma: float) -> bool:
    """Whether the kernels take these: on a GPU, no float64, at most 128 landmarks of at most 128 values, γ > 0."""
    return (
        query.ndim == 4
        and gamma > 0
        and landmarks <= MOST_LANDMARKS
        and max(query.shape[-1], value.shape[-1]) <= WIDEST
        and query.dtype == key.dtype == value.dtype
        and query.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
        and fused_kernels(query.device)
        and not _other_derivatives(query, key, value)
    )


def _other_derivatives(*tensors: Tensor) -> bool:
    """Whether torch.func or forward-mode derivatives are at work, which know nothing of our backward pass."""
    if torch.compiler.is_compiling():
        return False
    if any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors):  # pyright: ignore[reportAttributeAccessIssue]
        return True
    return any(torch.autograd.forward_ad.unpack_dual(t).tangent is not None for t in tensors)


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
    """(b, h, n, p), (b, h, m, p), (b, h, m, c), and which keys to keep, (b, h, m) → (b, h, n, c).

    The landmarks are tokens, at `positions` (1 or b, d), the first `of_queries` of them among the queries and the
    others among the keys; or any `rows` (b, h, d, p), of which `valid` (b, h, d) says which there are.
    """
    query, key, value = _packed(query), _packed(key), _packed(value)
    rows = None if rows is None else _packed(rows)
    arguments = (query, key, value, rows, positions, of_queries, valid, keep, scale, gamma)
    if torch.compiler.is_compiling():
        return _forward_op(*arguments)[0]
    out = _Skyformer.apply(*arguments)
    assert isinstance(out, Tensor)
    return out


def _packed(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _forward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out, then what the gradient needs: landmarks, their halves, the inverse, what was solved)."""
    from wellcond.numerics.triton.landmark_sides import landmark_output, landmark_sums
    from wellcond.numerics.triton.landmark_solve import landmark_solve

    source = query if rows is None else rows
    landmarks, parts = landmark_sums(source, key, value, positions, split, valid, keep, scale=scale)
    work, solved = landmark_solve(landmarks, parts, scale=scale, gamma=gamma)
    out = landmark_output(query, landmarks, solved, value.shape[-1], scale=scale)
    return out, landmarks.rows, landmarks.halves, work, solved


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor | None,
    positions: Tensor | None,
    split: int,
    keep: Tensor | None,
    scale: float,
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of query, key, value, and of rows where they are given."""
    from wellcond.numerics.triton.landmark_sides import Landmarks as Padded
    from wellcond.numerics.triton.landmark_sides import landmark_pull
    from wellcond.numerics.triton.landmark_solve import landmark_finish, landmark_solve_back

    landmarks, (work, solved) = Padded(*saved[:2]), saved[2:]
    of_query = landmark_pull(query, _packed(grad), landmarks, solved, scale=scale, product=False)
    d_sums, d_landmarks = landmark_solve_back(landmarks, work, solved, of_query.sums, of_query.landmarks, scale=scale)
    of_key = landmark_pull(key, value, landmarks, d_sums, keep, scale=scale, product=True)
    assert of_key.product is not None
    d_rows = None if rows is None else torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    first = of_query.tokens if d_rows is None else d_rows
    landmark_finish(d_landmarks, of_key.landmarks, positions, split, first, of_key.tokens)
    return of_query.tokens, of_key.tokens, of_key.product, d_rows


class _Skyformer(torch.autograd.Function):
    """For eager calls: a custom operator costs some tens of microseconds more."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        out, *saved = _forward(*given)
        query, key, value, rows, positions, ctx.split, _, keep, ctx.scale, _ = given
        ctx.save_for_backward(query, key, value, rows, positions, keep, *saved)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, rows, positions, keep, *saved = ctx.saved_tensors
        found = _backward(grads[0], query, key, value, rows, positions, ctx.split, keep, ctx.scale, saved)  # pyright: ignore[reportArgumentType]
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _forward(query, key, value, rows, positions, split, valid, keep, scale, gamma)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    chosen = rows.shape[2] if rows is not None else _there(positions).shape[1]
    matrices, side = query.shape[0] * query.shape[1], _power_of_two(chosen, 32)
    width, values = _power_of_two(query.shape[3], 16), _power_of_two(value.shape[3], 16)
    return (
        query.new_empty(*query.shape[:3], value.shape[3]),
        query.new_empty(matrices, side, width, dtype=torch.float32),
        query.new_empty(matrices, side, dtype=torch.float32),
        query.new_empty(matrices, side, side, dtype=torch.float64),
        query.new_empty(matrices, side, values, dtype=torch.float32),
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
    keep: Tensor | None,
    scale: float,
    landmarks: Tensor,
    halves: Tensor,
    work: Tensor,
    solved: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    saved = (landmarks, halves, work, solved)
    *tokens, d_rows = _backward(grad, query, key, value, rows, positions, split, keep, scale, saved)
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
    keep: Tensor | None,
    scale: float,
    landmarks: Tensor,
    halves: Tensor,
    work: Tensor,
    solved: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = tuple(t.new_empty(t.shape) for t in (query, key, value))
    return (*tokens, query.new_empty(0) if rows is None else rows.new_empty(rows.shape))  # pyright: ignore[reportReturnType]


def _save(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    query, key, value, rows, positions, ctx.split, _, keep, ctx.scale, _ = inputs
    ctx.has_rows = rows is not None
    ctx.save_for_backward(query, key, value, rows, positions, keep, *output[1:])


def _op_backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, rows, positions, keep, *saved = ctx.saved_tensors
    *tokens, d_rows = _backward_op(grad, query, key, value, rows, positions, ctx.split, keep, ctx.scale, *saved)
    return (*tokens, d_rows if ctx.has_rows else None, None, None, None, None, None, None)


_forward_op.register_autograd(_op_backward, setup_context=_save)


def _power_of_two(number: int, least: int) -> int:
    return max(least, 1 << (number - 1).bit_length())


def _there(positions: Tensor | None) -> Tensor:
    assert positions is not None
    return positions
