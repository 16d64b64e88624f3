"""Skyformer in a handful of launches: both long products, the solve between them, and all of its gradient.

    out = fused_skyformer(query, key, value, rows, keep, scale=s, gamma=0.1)

The same as in skyformer.py, out = κ(Q, L) Z κ(L, K) V with Z = (κ(L, L) + γI)⁻¹, but with the inverse of each head made
by one program, tokens left in half precision, and a gradient written by hand. With U = κ(L, K)V, Y = ZU and g the
gradient of the result, the landmarks' side is

    dY = κ(L, Q) g,    dU = Z dY,    dκ(L, L) = −dU Yᵀ,

and everything else is a pull-back of the Gaussian product (numerics.gaussian).
"""

from typing import Any

import torch
from torch import Tensor

from wellcond.numerics.fastpaths import fused_kernels

__all__ = ["can_fuse", "fused_skyformer"]

MOST_LANDMARKS = 128
WIDEST = 128


def can_fuse(query: Tensor, value: Tensor, rows: Tensor, *, gamma: float) -> bool:
    """Whether the kernels take these: on a GPU, no float64, at most 128 landmarks of at most 128 values, γ > 0."""
    return (
        query.ndim == 4
        and gamma > 0
        and rows.shape[-2] <= MOST_LANDMARKS
        and max(query.shape[-1], value.shape[-1]) <= WIDEST
        and query.dtype == rows.dtype
        and query.dtype != torch.float64
        and fused_kernels(query.device)
        and not torch.compiler.is_compiling()
        and not any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in (query, value, rows))  # pyright: ignore[reportAttributeAccessIssue]
    )


def fused_skyformer(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, keep: Tensor | None, *, scale: float, gamma: float
) -> Tensor:
    """(b, h, n, p), (b, h, m, p), (b, h, m, c), landmarks (b, h, d, p), keep (b, h, m) or None → (b, h, n, c)."""
    out = _Skyformer.apply(query, key, value, rows, keep, scale, gamma)
    assert isinstance(out, Tensor)
    return out


class _Skyformer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: Tensor,
        keep: Tensor | None,
        scale: float,
        gamma: float,
    ) -> Tensor:
        from wellcond.numerics.triton.gaussian import stream
        from wellcond.numerics.triton.landmarks import landmark_inverse

        sums = stream(rows, key, value, scale=scale, keep=keep, dtype=torch.float32)
        inverse, weights = landmark_inverse(rows, scale=scale, gamma=gamma)
        solved = (inverse @ sums.double()).float()
        ctx.save_for_backward(query, key, value, rows, keep, inverse, weights, solved)
        ctx.scale = scale
        return stream(query, rows, solved, scale=scale, dtype=value.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        from wellcond.numerics.triton.gaussian import pull

        query, key, value, rows, keep, inverse, weights, solved = ctx.saved_tensors
        scale, grad = ctx.scale, grads[0]
        d_query, _ = pull(query, rows, grad, solved, scale=scale)
        d_rows, d_solved = pull(rows, query, solved, grad, scale=scale, product=True, dtype=torch.float32)
        assert d_solved is not None
        d_sums = (inverse @ d_solved.double()).float()
        d_key, d_value = pull(key, rows, value, d_sums, scale=scale, product=True)
        d_rows = d_rows + pull(rows, key, d_sums, value, scale=scale, keep=keep, dtype=torch.float32)[0]
        pulls = d_sums @ solved.mT
        pulls = (pulls + pulls.mT) * weights
        wide = rows.float()
        # dκ(L, L) = −dU Yᵀ, and ∂κ_ij/∂l_i = scale · κ_ij (l_j − l_i), for both places of l_i.
        d_rows = d_rows - scale * (pulls @ wide - pulls.sum(-1, keepdim=True) * wide)
        if keep is not None:
            gone = ~keep[..., None]
            d_key = d_key.masked_fill_(gone, 0)
            d_value = d_value.masked_fill_(gone, 0) if d_value is not None else None
        return (
            d_query.to(query.dtype),
            d_key.to(key.dtype),
            None if d_value is None else d_value.to(value.dtype),
            d_rows.to(rows.dtype),
            None,
            None,
            None,
        )
