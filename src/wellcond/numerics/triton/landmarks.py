"""(κ(L, L) + γI)⁻¹ of many sets of landmarks at once, each by one program: Skyformer's solve as one launch.

    inverse, weights = landmark_inverse(rows, scale=s, gamma=0.1)      # (b, h, d, p) → (b, h, d, d) float64 and float32

The Gaussian weights of the landmarks among themselves are one product. With γ on their diagonal the matrix is positive
definite, and nothing has to be pivoted: blocks of 32 are swept in turn (spd_inverse.py says how), the matrix lying in
memory that its own program alone reads and writes. In float64: the condition number is (d + γ)/γ at most, but what is
solved for lies along the large eigenvalues, where an inverse in float32 would err by its square.

Plain twin: `torch.cholesky_inverse` of `gaussian_weights`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gaussian import LOG2E, _columns_of, _packed, _padded, _rows_of
from .spd_inverse import BLOCK, _negative_block_inverse

__all__ = ["MOST_LANDMARKS", "landmark_inverse"]

MOST_LANDMARKS = 128


@triton.jit
def _inverse_kernel(
    x, work, weights, d, heads, width, scale, gamma, xb, xh, xn,
    WIDTH: tl.constexpr, SIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(0).to(tl.int64)
    x += (which // heads) * xb + (which % heads) * xh
    work += which * SIDE * SIDE
    weights += which * d * d
    i = tl.arange(0, SIDE)
    inside = i < d
    factor = scale * LOG2E
    rows = _rows_of(x, i, inside, xn, width, WIDTH)
    columns = _columns_of(x, i, inside, xn, width, WIDTH)
    wide = rows.to(tl.float32)
    half = tl.sum(wide * wide, axis=1) * (0.5 * factor)
    wide = columns.to(tl.float32)
    other = tl.sum(wide * wide, axis=0) * (0.5 * factor)
    exponent = tl.dot(rows, columns, input_precision=PRECISION) * factor - half[:, None] - other[None, :]
    both = inside[:, None] & inside[None, :]
    kernel = tl.where(both, tl.exp2(tl.minimum(exponent, 0.0)), 0.0)
    kernel = 0.5 * (kernel + tl.trans(kernel))  # to the bit, as sweeping takes it to be
    tl.store(weights + i[:, None] * d + i[None, :], kernel, mask=both)
    diagonal = tl.where(inside, gamma, 1.0).to(tl.float64)  # the padding is an identity
    shifted = kernel.to(tl.float64) + tl.where(i[:, None] == i[None, :], diagonal[:, None], 0.0)
    tl.store(work + i[:, None] * SIDE + i[None, :], shifted)
    b = tl.arange(0, BLOCK)
    for start in range(0, SIDE, BLOCK):
        p = start + b
        beside = ((i < start) | (i >= start + BLOCK))[None, :]
        tl.debug_barrier()  # all threads have swept the block before
        negative, _smallest = _negative_block_inverse(tl.load(work + p[:, None] * SIDE + p[None, :]))
        line = tl.load(work + p[:, None] * SIDE + i[None, :])
        tl.debug_barrier()  # all threads have read it
        for top in range(0, SIDE, BLOCK):
            r = top + b
            at = work + r[:, None] * SIDE + i[None, :]
            if top == start:
                swept = -tl.dot(negative, line, input_precision="ieee", out_dtype=tl.float64)
                tl.store(at, swept, mask=beside)
                tl.store(work + r[:, None] * SIDE + p[None, :], negative)
            else:
                column = tl.load(work + r[:, None] * SIDE + p[None, :])
                scaled = -tl.dot(column, negative, input_precision="ieee", out_dtype=tl.float64)
                update = tl.dot(scaled, line, input_precision="ieee", out_dtype=tl.float64)
                swept = tl.load(at) - update
                tl.debug_barrier()  # all threads have read this strip
                tl.store(at, swept, mask=beside)
                tl.store(work + r[:, None] * SIDE + p[None, :], scaled)


def landmark_inverse(rows: Tensor, *, scale: float, gamma: float) -> tuple[Tensor, Tensor]:
    """((κ(L, L) + γI)⁻¹, κ(L, L)) of rows (b, h, d, p), d ≤ MOST_LANDMARKS, γ > 0; (b, h, d, d) float64 and float32."""
    rows = _packed(rows)
    b, h, d, p = rows.shape
    side = max(32, triton.next_power_of_2(d))
    work = torch.empty(b, h, side, side, dtype=torch.float64, device=rows.device)
    weights = torch.empty(b, h, d, d, dtype=torch.float32, device=rows.device)
    _inverse_kernel[(b * h,)](
        rows, work, weights, d, h, p, scale, gamma, *rows.stride()[:3],
        WIDTH=_padded(p), SIDE=side, PRECISION="tf32x3" if rows.dtype == torch.float32 else "tf32",
        num_warps=8 if side > 64 else 4,
    )  # fmt: skip
    return work[..., :d, :d].neg(), weights
