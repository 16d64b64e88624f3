"""Inverses of many small symmetric positive definite matrices at once, in float64, by sweeping blocks of 32.

Sweeping block p replaces a matrix by
    A_pp → −A_pp⁻¹,   A_ip → A_ip A_pp⁻¹,   A_ij → A_ij − A_ip A_pp⁻¹ A_pj,
which keeps it symmetric; once every block has been swept, −A⁻¹ is in its place. SPD input needs no pivoting. Until the
end only the lower tiles are kept up to date. Each tile is updated independently, from one buffer to the other; the
program with the next diagonal block goes on to invert it, a chain of 32 dependent steps that is hidden behind the other
tiles.

Plain twin: `torch.linalg.inv` in float64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["negative_inverse"]

BLOCK = tl.constexpr(32)


@triton.jit
def _negative_block_inverse(block):
    """Return −(an SPD block)⁻¹ by sweeping its 32 pivots in turn, and the smallest pivot."""
    r = tl.arange(0, BLOCK)
    row = r[:, None]
    col = r[None, :]
    smallest = tl.full((), float("inf"), tl.float64)
    for k in range(BLOCK):
        line = tl.sum(tl.where(row == k, block, 0.0), axis=0)
        pivot = tl.sum(tl.where(r == k, line, 0.0), axis=0)
        smallest = tl.minimum(smallest, pivot)
        reciprocal = 1.0 / pivot
        scaled = line * reciprocal
        swept = block - line[:, None] * scaled[None, :]
        swept = tl.where(row == k, scaled[None, :], swept)
        swept = tl.where(col == k, scaled[:, None], swept)
        block = tl.where((row == k) & (col == k), -reciprocal, swept)
    return block, smallest


@triton.jit
def _first_kernel(a, inverse, pivots, ld):
    batch = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, BLOCK)
    negative, smallest = _negative_block_inverse(tl.load(a + batch * ld * ld + r[:, None] * ld + r[None, :]))
    tl.store(inverse + batch * BLOCK * BLOCK + r[:, None] * BLOCK + r[None, :], -negative)
    tl.store(pivots + batch, smallest)


@triton.jit
def _load_block(a, i, j, ld):
    """Load block (i, j) of a symmetric matrix of which only the lower blocks are valid."""
    r = tl.arange(0, BLOCK)
    if i >= j:
        block = tl.load(a + (i * BLOCK + r)[:, None] * ld + (j * BLOCK + r)[None, :])
    else:
        block = tl.trans(tl.load(a + (j * BLOCK + r)[:, None] * ld + (i * BLOCK + r)[None, :]))
    return block


@triton.jit
def _update_kernel(a, out, inverse, next_inverse, pivots, p, ld, LAST: tl.constexpr):
    """Sweep block p for one tile. The first program of each matrix has the next diagonal block, and inverts it too."""
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    next_diagonal = (p + 1) * (p + 2) // 2 + p + 1
    if not LAST:  # long chains start first: tile 0 is swapped with the next diagonal block
        tile = tl.where(tile == 0, next_diagonal, tl.where(tile == next_diagonal, 0, tile))
    i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)  # tiles are numbered row by row up to the diagonal
    j = tile - i * (i + 1) // 2
    a += batch * ld * ld
    out += batch * ld * ld
    r = tl.arange(0, BLOCK)
    inv = tl.load(inverse + batch * BLOCK * BLOCK + r[:, None] * BLOCK + r[None, :])
    if i == p and j == p:
        new = -inv
    else:
        if j == p:
            left = tl.load(a + (i * BLOCK + r)[:, None] * ld + (p * BLOCK + r)[None, :])
            new = tl.dot(left, inv, input_precision="ieee", out_dtype=tl.float64)
        else:
            new = tl.dot(inv, _load_block(a, p, j, ld), input_precision="ieee", out_dtype=tl.float64)
            if i != p:
                old = tl.load(a + (i * BLOCK + r)[:, None] * ld + (j * BLOCK + r)[None, :])
                new = old - tl.dot(_load_block(a, i, p, ld), new, input_precision="ieee", out_dtype=tl.float64)
    tl.store(out + (i * BLOCK + r)[:, None] * ld + (j * BLOCK + r)[None, :], new)
    if LAST:
        tl.store(out + (j * BLOCK + r)[:, None] * ld + (i * BLOCK + r)[None, :], tl.trans(new))
    else:
        if i == p + 1 and j == p + 1:
            negative, smallest = _negative_block_inverse(new)
            tl.store(next_inverse + batch * BLOCK * BLOCK + r[:, None] * BLOCK + r[None, :], -negative)
            tl.store(pivots + batch, tl.minimum(smallest, tl.load(pivots + batch)))


def negative_inverse(a: Tensor, *, keep: bool = False) -> tuple[Tensor, Tensor]:
    """Return (−A⁻¹, smallest pivot) of each matrix, (b, ld, ld) float64; `a` is overwritten, unless `keep`.

    ld must be a multiple of 32. If the smallest pivot is not positive, the matrix is not positive definite in float64,
    and the result is not an inverse.
    """
    batch, ld, _ = a.shape
    rooms = torch.empty_like(a), torch.empty_like(a) if keep else a
    inverse, next_inverse = (torch.empty(batch, 32, 32, dtype=torch.float64, device=a.device) for _ in range(2))
    pivots = torch.empty(batch, dtype=torch.float64, device=a.device)
    blocks = ld // 32
    _first_kernel[(batch,)](a, inverse, pivots, ld, num_warps=1)
    for p in range(blocks):
        _update_kernel[(blocks * (blocks + 1) // 2, batch)](
            a, rooms[p % 2], inverse, next_inverse, pivots, p, ld, LAST=p == blocks - 1, num_warps=2
        )
        a, inverse, next_inverse = rooms[p % 2], next_inverse, inverse
    return a, pivots
