"""Inverses of many small symmetric positive definite matrices at once, in float64: one program sweeps one matrix.

The sweep operator, in blocks: sweeping block p replaces the matrix by
    A_pp → −A_pp⁻¹,   A_ip → A_ip A_pp⁻¹,   A_ij → A_ij − A_ip A_pp⁻¹ A_pj,
and after every block has been swept, −A⁻¹ stands in its place. SPD input needs no pivoting. A pivot that is not positive
says that the matrix is not positive definite in float64.

Plain twin: `torch.linalg.inv` in float64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["sweep"]


@triton.jit
def _invert_block(a, BLOCK: tl.constexpr):
    """Gauss-Jordan on one SPD tile held in registers; returns its inverse and its smallest pivot."""
    row = tl.arange(0, BLOCK)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    smallest = tl.full((), float("inf"), tl.float64)
    for k in range(BLOCK):
        column = tl.sum(tl.where(col == k, a, 0.0), axis=1)[:, None]
        line = tl.sum(tl.where(row == k, a, 0.0), axis=0)[None, :]
        pivot = tl.sum(tl.sum(tl.where((row == k) & (col == k), a, 0.0), axis=1), axis=0)
        smallest = tl.minimum(smallest, pivot)
        line = line / pivot
        swept = a - column * line
        swept = tl.where(row == k, line, swept)
        swept = tl.where(col == k, -column / pivot, swept)
        a = tl.where((row == k) & (col == k), 1.0 / pivot, swept)
    return a, smallest


@triton.jit
def _sweep_kernel(a, pivots, ld, BLOCK: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr):
    batch = tl.program_id(0).to(tl.int64)
    a += batch * ld * ld
    r = tl.arange(0, BLOCK)
    w = tl.arange(0, WIDTH)
    smallest = tl.full((), float("inf"), tl.float64)
    for p in range(BLOCKS):
        at_p = p * BLOCK + r
        outside_p = (w < ld) & ((w < p * BLOCK) | (w >= p * BLOCK + BLOCK))
        panel = tl.load(a + at_p[:, None] * ld + w[None, :], mask=outside_p[None, :], other=0.0)
        inverse, pivot = _invert_block(tl.load(a + at_p[:, None] * ld + at_p[None, :]), BLOCK)
        smallest = tl.minimum(smallest, pivot)
        solved = tl.dot(inverse, panel, input_precision="ieee", out_dtype=tl.float64)
        for i in range(BLOCKS):
            if i != p:
                at_i = i * BLOCK + r
                left = tl.load(a + at_i[:, None] * ld + at_p[None, :])
                here = a + at_i[:, None] * ld + w[None, :]
                line = tl.load(here, mask=outside_p[None, :], other=0.0)
                line -= tl.dot(left, solved, input_precision="ieee", out_dtype=tl.float64)
                edge = tl.dot(left, inverse, input_precision="ieee", out_dtype=tl.float64)
                tl.debug_barrier()  # every thread has read A_ip before it is overwritten
                tl.store(here, line, mask=outside_p[None, :])
                tl.store(a + at_i[:, None] * ld + at_p[None, :], edge)
        tl.debug_barrier()
        tl.store(a + at_p[:, None] * ld + w[None, :], solved, mask=outside_p[None, :])
        tl.store(a + at_p[:, None] * ld + at_p[None, :], -inverse)
        tl.debug_barrier()
    tl.store(pivots + batch, smallest)


def sweep(a: Tensor, *, num_warps: int = 8) -> Tensor:
    """Replaces each matrix of `a`, (b, ld, ld) float64 with ld a multiple of 32, by −A⁻¹; returns the smallest pivot of each."""
    batch, ld, _ = a.shape
    pivots = torch.empty(batch, dtype=torch.float64, device=a.device)
    _sweep_kernel[(batch,)](
        a, pivots, ld, BLOCK=32, WIDTH=triton.next_power_of_2(ld), BLOCKS=ld // 32, num_warps=num_warps
    )
    return pivots
