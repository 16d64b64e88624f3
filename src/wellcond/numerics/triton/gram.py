"""Gram matrices of token matrices in float64, and the largest eigenvalue of many symmetric matrices at once.

    g = gram(images, n, d, geometry)           # (b, m, m) on the shorter side, padded to a leading dimension of 32's
    largest = largest_eigenvalue(g, m)         # by power iteration, each matrix held on chip by one program

Plain twins: `torch.bmm` on float64 copies, and the eigenvalue solvers of `wellcond.numerics.singular`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .geometry import Geometry, token_offset, value_offset

__all__ = ["MAX_SIDE", "gram", "largest_eigenvalue", "padded"]

MAX_SIDE = 256  # one program holds a whole (side, side) float32 matrix in its registers


def padded(side: int) -> int:
    """The leading dimension of Gram buffers: whole blocks of 32, as the inverse sweeps them."""
    return -(-side // 32) * 32


@triton.jit
def _gram_kernel(
    x, out, m, k, stride_b, ld,
    COLS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    TALL: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_i, tile_j, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if tile_j > tile_i:
        return
    i = tile_i * BLOCK + tl.arange(0, BLOCK)
    j = tile_j * BLOCK + tl.arange(0, BLOCK)
    if TALL:  # more tokens than values: XᵀX
        at_i = value_offset(i, HEIGHT, WIDTH, PH, PW)
        at_j = value_offset(j, HEIGHT, WIDTH, PH, PW)
    else:
        at_i = token_offset(i, COLS, WIDTH, PH, PW)
        at_j = token_offset(j, COLS, WIDTH, PH, PW)
    x += batch * stride_b
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float64)
    for start in range(0, k, BLOCK_K):
        r = start + tl.arange(0, BLOCK_K)
        at_r = token_offset(r, COLS, WIDTH, PH, PW) if TALL else value_offset(r, HEIGHT, WIDTH, PH, PW)
        a = tl.load(x + at_i[:, None] + at_r[None, :], mask=(i < m)[:, None] & (r < k)[None, :], other=0.0)
        b = tl.load(x + at_r[:, None] + at_j[None, :], mask=(r < k)[:, None] & (j < m)[None, :], other=0.0)
        acc = tl.dot(a.to(tl.float64), b.to(tl.float64), acc, input_precision="ieee", out_dtype=tl.float64)
    out += batch * ld * ld
    inside = (i < m)[:, None] & (j < m)[None, :]
    tl.store(out + i[:, None] * ld + j[None, :], acc, mask=inside)
    if tile_i != tile_j:
        tl.store(out + j[:, None] * ld + i[None, :], tl.trans(acc), mask=tl.trans(inside))


def gram(x: Tensor, n: int, d: int, geometry: Geometry) -> Tensor:
    """X Xᵀ (n ≤ d) or XᵀX of contiguous images, or (b, n, d) matrices, as (b, ld, ld) float64; padding is left unset."""
    batch, m, k = x.shape[0], min(n, d), max(n, d)
    ld = padded(m)
    out = torch.empty(batch, ld, ld, dtype=torch.float64, device=x.device)
    tiles = triton.cdiv(m, 32)
    _gram_kernel[(tiles, tiles, batch)](
        x, out, m, k, x.stride(0), ld, *geometry, TALL=n > d, BLOCK=32, BLOCK_K=32, num_warps=4, num_stages=3
    )
    return out


@triton.jit
def _largest_eigenvalue_kernel(
    g, largest, m, ld, shift, tolerance, most,
    WIDTH: tl.constexpr, PAD_IDENTITY: tl.constexpr,
):  # fmt: skip
    """Power iteration until the estimate of what is left is below `tolerance`; two products a turn, so that the vector
    changes sides (rows, columns) instead of layouts. Then adds shift · λmax to the diagonal."""
    batch = tl.program_id(0).to(tl.int64)
    g += batch * ld * ld
    row = tl.arange(0, WIDTH)
    col = tl.arange(0, WIDTH)
    inside = (row < m)[:, None] & (col < m)[None, :]
    at = g + row[:, None] * ld + col[None, :]
    wide = tl.load(at, mask=inside, other=0.0)
    size = tl.max(tl.max(tl.abs(wide), axis=1), axis=0)
    matrix = (wide / tl.where(size > 0, size, 1.0)).to(tl.float32)
    # A fixed start without symmetry, so that no eigenvector of a regular matrix is orthogonal to it.
    v = tl.where(col < m, 1.0 + 0.5 * tl.cos(col.to(tl.float32) * 12.9898 + 0.7), 0.0)
    v = v / tl.sqrt(tl.sum(v * v, axis=0))
    value = 0.0
    previous = -1.0
    turn = 0
    left = 1.0
    while (left > tolerance) & (turn < most):
        previous = value
        for _ in range(8):
            u = tl.sum(matrix * v[None, :], axis=1)
            u = u / tl.maximum(tl.sqrt(tl.sum(u * u, axis=0)), 1e-30)
            v = tl.sum(matrix * u[:, None], axis=0)
            value = tl.sqrt(tl.sum(v * v, axis=0))
            v = v / tl.maximum(value, 1e-30)
        turn += 1
        # The error falls no slower than 1/turn, so (what the last turn gained) · turn bounds what is left.
        left = tl.where(value > 0, (value - previous) * turn / tl.maximum(value, 1e-30), 0.0)
    result = value.to(tl.float64) * size
    tl.store(largest + batch, result)
    if PAD_IDENTITY:
        added = tl.where(result > 0, shift * result, 1.0)
        diagonal = row[:, None] == col[None, :]
        tl.store(at, tl.where(diagonal, wide + added, wide), mask=inside & diagonal)
        pad = (row < ld)[:, None] & (col < ld)[None, :] & ((row >= m)[:, None] | (col >= m)[None, :])
        tl.store(at, tl.where(diagonal, 1.0, 0.0).to(tl.float64), mask=pad)


def largest_eigenvalue(
    g: Tensor, m: int, *, shift: float | None = None, tolerance: float = 1e-5, most: int = 128
) -> Tensor:
    """λmax (in absolute value) of each (m, m) leading part of `g`; with `shift`, `g` becomes g + shift·λmax·I, padded by I."""
    out = torch.empty(g.shape[0], dtype=torch.float64, device=g.device)
    width = max(16, triton.next_power_of_2(m))
    _largest_eigenvalue_kernel[(g.shape[0],)](
        g, out, m, g.shape[-1], shift or 0.0, tolerance, most,
        WIDTH=width if shift is None else max(width, triton.next_power_of_2(g.shape[-1])),
        PAD_IDENTITY=shift is not None, num_warps=16 if width > 128 else 8 if width > 64 else 4,
    )  # fmt: skip
    return out
