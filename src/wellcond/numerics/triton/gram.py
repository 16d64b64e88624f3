"""Gram matrices of token matrices in float64, and the largest eigenvalue of many symmetric matrices at once.

    g = gram(images, n, d, geometry)           # (b, m, m) on the shorter side, padded to a multiple of 32
    largest, _ = largest_eigenvalue(g, m)      # by power iteration, each matrix held on chip by one program

Plain twins: `torch.bmm` on float64 copies, and the eigenvalue solvers of `wellcond.numerics.singular`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .geometry import Geometry, token_offset, value_offset

__all__ = ["gram", "largest_eigenvalue", "padded"]

TOLERANCE, MOST_STEPS = 1e-3, 1024  # of the power iteration


def padded(side: int) -> int:
    """Return the leading dimension of Gram buffers: whole blocks of 32, as the inverse sweeps them."""
    return -(-side // 32) * 32


@triton.jit
def _gram_tile(
    x, out, i, j, off_diagonal, m, k, ld,
    COLS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    TALL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    if TALL:  # more tokens than values: XᵀX
        at_i = value_offset(i, HEIGHT, WIDTH, PH, PW)
        at_j = value_offset(j, HEIGHT, WIDTH, PH, PW)
    else:
        at_i = token_offset(i, COLS, WIDTH, PH, PW)
        at_j = token_offset(j, COLS, WIDTH, PH, PW)
    acc = tl.zeros((BM, BN), dtype=tl.float64)
    for start in range(0, k, BLOCK_K):
        r = start + tl.arange(0, BLOCK_K)
        at_r = token_offset(r, COLS, WIDTH, PH, PW) if TALL else value_offset(r, HEIGHT, WIDTH, PH, PW)
        a = tl.load(x + at_i[:, None] + at_r[None, :], mask=(i < m)[:, None] & (r < k)[None, :], other=0.0)
        b = tl.load(x + at_r[:, None] + at_j[None, :], mask=(r < k)[:, None] & (j < m)[None, :], other=0.0)
        acc = tl.dot(a.to(tl.float64), b.to(tl.float64), acc, input_precision="ieee", out_dtype=tl.float64)
    tl.store(out + i[:, None] * ld + j[None, :], acc)
    if off_diagonal:
        tl.store(out + j[:, None] * ld + i[None, :], tl.trans(acc))


@triton.jit
def _gram_kernel(
    x, out, m, k, stride_b, ld,
    COLS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    TALL: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_i, tile_j, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if tile_j > tile_i:
        return
    last = tl.num_programs(0) - 1
    x += batch * stride_b
    out += batch * ld * ld
    full = tl.arange(0, BLOCK)
    i = tile_i * BLOCK + full
    j = tile_j * BLOCK + full
    if (LAST == BLOCK) or (tile_i < last):  # tiles cover the padding too, with zeros
        _gram_tile(x, out, i, j, tile_i != tile_j, m, k, ld,
                   COLS, HEIGHT, WIDTH, PH, PW, TALL, BLOCK, BLOCK, BLOCK_K)  # fmt: skip
    else:
        _gram_tile(x, out, last * BLOCK + tl.arange(0, LAST), j, tile_i != tile_j, m, k, ld,
                   COLS, HEIGHT, WIDTH, PH, PW, TALL, LAST, BLOCK, BLOCK_K)  # fmt: skip
        nothing = tl.zeros((BLOCK, BLOCK), dtype=tl.float64)
        below = (full >= LAST)[:, None]
        tl.store(out + i[:, None] * ld + j[None, :], nothing, mask=below)
        tl.store(out + j[:, None] * ld + i[None, :], nothing, mask=tl.trans(below))


def gram(x: Tensor, n: int, d: int, geometry: Geometry) -> Tensor:
    """Return X Xᵀ (n ≤ d) or XᵀX of contiguous images or (b, n, d) matrices: (b, ld, ld) float64, zero-padded."""
    batch, m, k = x.shape[0], min(n, d), max(n, d)
    ld = padded(m)
    out = torch.empty(batch, ld, ld, dtype=torch.float64, device=x.device)
    tiles = triton.cdiv(m, 32)
    last = 16 if 0 < m % 32 <= 16 else 32  # a short last tile takes half the work
    _gram_kernel[(tiles, tiles, batch)](
        x, out, m, k, x.stride(0), ld, *geometry, TALL=n > d, BLOCK=32, LAST=last, BLOCK_K=32, num_warps=4, num_stages=3
    )
    return out


@triton.jit
def _panel(g, index: tl.constexpr, m, ld, scale, col, WIDTH: tl.constexpr):
    row = index * (WIDTH // 4) + tl.arange(0, WIDTH // 4)
    inside = (row < m)[:, None] & (col < m)[None, :]
    return (tl.load(g + row[:, None] * ld + col[None, :], mask=inside, other=0.0) * scale).to(tl.float16)


@triton.jit
def _largest_eigenvalue_kernel(
    g, largest, scratch, m, ld, shift, tolerance, most,
    WIDTH: tl.constexpr, SHIFT: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Run power iteration until the estimate of the remaining error is below `tolerance`.

    Matrix and vectors are float16, whose rounding averages out in a norm; tensor cores process sixteen vectors as fast
    as one.
    """
    batch = tl.program_id(0).to(tl.int64)
    g += batch * ld * ld
    col = tl.arange(0, WIDTH)
    diagonal = tl.load(g + col * ld + col, mask=col < m, other=0.0)
    size = tl.max(tl.abs(diagonal), axis=0)  # the largest entry of a semidefinite matrix is on its diagonal
    scale = tl.where(size > 0, 1.0 / size, 1.0)
    # Four panels, each rounded as it is loaded: the whole matrix at once would not fit into registers.
    p0 = _panel(g, 0, m, ld, scale, col, WIDTH)
    p1 = _panel(g, 1, m, ld, scale, col, WIDTH)
    p2 = _panel(g, 2, m, ld, scale, col, WIDTH)
    p3 = _panel(g, 3, m, ld, scale, col, WIDTH)
    # Sixteen fixed starts without symmetry, so that no eigenvector of a regular matrix is orthogonal to all of them.
    start = tl.arange(0, 16)[None, :]
    v = tl.where(
        (col < m)[:, None], 0.1 + 0.05 * tl.cos((col[:, None] * 16 + start).to(tl.float32) * 12.9898 + 0.7), 0.0
    )
    v = v.to(tl.float16)
    quarter = tl.arange(0, WIDTH // 4)
    scratch += batch * WIDTH * 16
    value = 0.0
    turns = 0
    left = 1.0
    while (left > tolerance) & (turns < most):
        previous = value
        for _ in range(TURN):
            previous = value
            u0 = tl.dot(p0, v)
            u1 = tl.dot(p1, v)
            u2 = tl.dot(p2, v)
            u3 = tl.dot(p3, v)
            length = tl.sqrt(tl.sum(u0 * u0 + u1 * u1 + u2 * u2 + u3 * u3, axis=0))
            wide = v.to(tl.float32)
            value = tl.max(length / tl.maximum(tl.sqrt(tl.sum(wide * wide, axis=0)), 1e-30))  # ‖G v‖/‖v‖ rises to λmax
            shrink = (1.0 / tl.maximum(length, 1e-30))[None, :]
            tl.debug_barrier()  # the panels of the product are joined in memory, to give the next vectors
            tl.store(scratch + (quarter * 16)[:, None] + start, (u0 * shrink).to(tl.float16))
            tl.store(scratch + ((quarter + WIDTH // 4) * 16)[:, None] + start, (u1 * shrink).to(tl.float16))
            tl.store(scratch + ((quarter + WIDTH // 2) * 16)[:, None] + start, (u2 * shrink).to(tl.float16))
            tl.store(scratch + ((quarter + 3 * WIDTH // 4) * 16)[:, None] + start, (u3 * shrink).to(tl.float16))
            tl.debug_barrier()
            v = tl.load(scratch + (col * 16)[:, None] + start)
        turns += TURN
        # Late, the error falls no slower than 1/turns, so turns · gain bounds it. Early, in a cluster of eigenvalues
        # that are not yet separated, it is about the cluster's width, and gains are about that width squared.
        gain = tl.maximum(value - previous, 0.0) / tl.maximum(value, 1e-30)
        left = tl.maximum(gain * turns, tl.sqrt(3.0 * gain))
    result = value.to(tl.float64) * size
    tl.store(largest + batch, result)
    if SHIFT:
        added = tl.where(result == 0, 1.0, shift * result)
        tl.store(g + col * ld + col, tl.where(col < m, diagonal + added, 1.0), mask=col < ld)


def largest_eigenvalue(g: Tensor, m: int, *, shift: float | None = None) -> tuple[Tensor, Tensor]:
    """Return λmax of each semidefinite leading (m, m) part of `g`, (b, ld, ld) float64, m ≤ FUSED_SIDE; and 16 vectors.

    The vectors, (b, m, 16) float16, are the last of the iteration: among them is the eigenvector, to float16 accuracy.
    With `shift`, `g` becomes g + shift·λmax·I (g + I for a zero matrix) and its padding the identity.
    """
    batch, ld = g.shape[:2]
    width = max(64, triton.next_power_of_2(ld))
    out = torch.empty(batch, dtype=torch.float64, device=g.device)
    scratch = torch.empty(batch, width, 16, dtype=torch.float16, device=g.device)
    _largest_eigenvalue_kernel[(batch,)](
        g, out, scratch, m, ld, shift or 0.0, TOLERANCE, MOST_STEPS,
        WIDTH=width, SHIFT=shift is not None, TURN=2, num_warps=4,
    )  # fmt: skip
    return out, scratch[:, :m]
