"""Many matrices made safe for linear algebra, and processed as many at a time as fit into memory.

    def largest(part: MatrixPart) -> tuple[Tensor]:
        return (part.restore(largest_singular_value(part.w)),)

    (sigma,) = in_chunks(largest, x)             # (b, n, d) → (b,)

Backends raise on a NaN or return made-up numbers, and squares overflow: so they are given no such input, and each
matrix gets its own answer.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from wellcond.numerics.device_memory import free_memory

__all__ = ["CHUNK_BYTES", "MatrixPart", "in_chunks"]

# Float64 workspace for the matrices taken at a time. On a CPU little is faster than much: it stays in the cache.
CHUNK_BYTES = {"cpu": 2**25, "cuda": 2**30}


class MatrixPart:
    """A chunk of matrices, made safe for linear algebra: in float64, short side first, finite, not zero, not huge."""

    def __init__(self, x: Tensor):
        x = x.float() if x.dtype.itemsize == 1 else x  # float8 has no arithmetic
        peak = torch.linalg.vector_norm(x.detach(), math.inf, (-2, -1)).double()  # propagates NaN and Inf
        usable = (peak > 0) & (peak < math.inf)
        self.usable: bool = bool(usable.all())
        if not self.usable:
            self.finite: Tensor = peak.isfinite()
            self.zero: Tensor = peak == 0
            # Backends get an identity in place of these matrices, and `clean` writes their answers.
            x = torch.where(usable[:, None, None], x, torch.eye(*x.shape[1:], dtype=x.dtype, device=x.device))
            peak = torch.where(usable, peak, 1.0)
        self.unit: Tensor | None = None
        if x.dtype == torch.float64:  # its squares may overflow; those of any other dtype fit into float64
            exponent = torch.frexp(peak).exponent.long().clamp(-1021, 1021)
            self.unit = (exponent + 1023).bitwise_left_shift(52).view(torch.float64)  # exactly 2^exponent
            x = x / self.unit[:, None, None]
        self.short_side_first: Tensor = x if x.shape[1] <= x.shape[2] else x.mT
        """The matrices in their own dtype."""

    @functools.cached_property
    def w(self) -> Tensor:
        return self.short_side_first.double()

    def restore(self, sigma: Tensor) -> Tensor:
        """Turn singular values of w, (b,) or (b, k), into those of the original matrices."""
        if self.unit is not None:
            sigma = sigma * _like(self.unit, sigma)
        return self.clean(sigma, zero=0.0)

    def clean(self, value: Tensor, *, zero: float = math.nan) -> Tensor:
        """Return `value`, (b,) or (b, k), with NaN for matrices that are not finite and `zero` for zero matrices."""
        if self.usable:
            return value
        return torch.where(_like(self.zero, value), zero, torch.where(_like(self.finite, value), value, math.nan))


def _like(per_matrix: Tensor, value: Tensor) -> Tensor:
    return per_matrix.reshape(-1, *[1] * (value.ndim - 1))


def in_chunks(function: Callable[[MatrixPart], tuple[Tensor, ...]], x: Tensor) -> list[Tensor]:
    """Return the results of `function` for (b, n, d), each of length b, for as many matrices at a time as fit."""
    short, long = sorted(x.shape[1:])
    matrix_bytes = 8 * (3 * short * long + 8 * short * short)
    budget = CHUNK_BYTES["cpu" if x.device.type == "cpu" else "cuda"]
    if x.is_cuda and x.shape[0] * matrix_bytes > budget:
        budget = max(budget, free_memory(x.device) // 8)
    parts = [function(MatrixPart(part)) for part in x.split(max(1, budget // matrix_bytes))]
    return list(parts[0]) if len(parts) == 1 else [torch.cat(results) for results in zip(*parts, strict=True)]
