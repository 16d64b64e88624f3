"""The short side of landmark attention: what happens between landmarks, each head by one program.

    inverse, solved = landmark_solve(landmarks, parts, scale=s, gamma=0.1)        # −(κ(L, L) + γI)⁻¹, and Y
    d_sums, d_rows = landmark_solve_back(landmarks, inverse, solved, parts_s, parts_l, scale=s)
    landmark_finish(d_rows, parts_l, …)                                           # what landmarks are due, to tokens

With U the sum of the parts and Z = (κ(L, L) + γI)⁻¹, Y = ZU; backwards, dU = Z dY and dκ(L, L) = −dU Yᵀ.

With γ on the diagonal the matrix is positive definite, and nothing has to be pivoted: blocks of 32 are swept in turn
(spd_inverse.py says how), the matrix lying in memory that its own program alone reads and writes. In float64: the
condition number is (d + γ)/γ at most, but what is solved for lies along the large eigenvalues, where an inverse in
float32 would err by its square.

Plain twin: `torch.linalg.solve` with `gaussian_weights`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .landmark_sides import Landmarks
from .launch import launch, layout
from .spd_inverse import BLOCK, _negative_block_inverse

__all__ = ["landmark_finish", "landmark_solve", "landmark_solve_back"]


@triton.jit
def _added(parts, which, matrices, i, shares, SIDE: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr):
    """Rows i of the sum over shares of (shares, matrices, SIDE, WIDTH), always in the same order."""
    c = tl.arange(0, WIDTH)
    share = tl.arange(0, AT_ONCE)
    at = parts + which * SIDE * WIDTH + i[None, :, None] * WIDTH + c[None, None, :]
    acc = tl.sum(_some_shares(at, share, shares, matrices, SIDE * WIDTH), axis=0)
    for start in range(AT_ONCE, shares, AT_ONCE):
        acc += tl.sum(_some_shares(at, start + share, shares, matrices, SIDE * WIDTH), axis=0)
    return acc


@triton.jit
def _some_shares(at, share, shares, matrices, SIZE: tl.constexpr):
    far = (share.to(tl.int64) * matrices * SIZE)[:, None, None]
    return tl.load(at + far, mask=(share < shares)[:, None, None], other=0.0)


@triton.jit
def _weights(rows, halves, which, scale, SIDE: tl.constexpr, WIDTH: tl.constexpr):
    """The landmarks, and κ(L, L) with zeros where there is none, and on the diagonal."""
    i, c = tl.arange(0, SIDE), tl.arange(0, WIDTH)
    landmarks = tl.load(rows + (which * SIDE + i[:, None]) * WIDTH + c[None, :])
    half = tl.load(halves + which * SIDE + i)
    product = tl.dot(landmarks, tl.trans(landmarks), input_precision="tf32x3") * (scale * 1.4426950408889634)
    kernel = tl.exp2(tl.minimum(product - half[:, None] - half[None, :], 0.0))
    kernel = 0.5 * (kernel + tl.trans(kernel))  # symmetric to the bit, as sweeping takes it to be
    return landmarks, tl.where(i[:, None] == i[None, :], 0.0, kernel), half < float("inf")


@triton.jit
def _solve_kernel(
    rows, halves, parts, work, solved, shares, scale, gamma,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    which, matrices = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    work += which * SIDE * SIDE
    i, b = tl.arange(0, SIDE), tl.arange(0, BLOCK)
    _, kernel, there = _weights(rows, halves, which, scale, SIDE, WIDTH)
    diagonal = tl.where(there, 1.0 + gamma, 1.0).to(tl.float64)  # where there is none, an identity
    shifted = kernel.to(tl.float64) + tl.where(i[:, None] == i[None, :], diagonal[:, None], 0.0)
    tl.store(work + i[:, None] * SIDE + i[None, :], shifted)
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
    tl.debug_barrier()
    found = _solved(work, parts, which, matrices, shares, SIDE, VALUES)
    o = tl.arange(0, VALUES)
    tl.store(solved + (which * SIDE + i[:, None]) * VALUES + o[None, :], found)


@triton.jit
def _solved(work, parts, which, matrices, shares, SIDE: tl.constexpr, VALUES: tl.constexpr):
    """Z · (the sum of the parts), in float32; `work` holds −Z."""
    i, b = tl.arange(0, SIDE), tl.arange(0, BLOCK)
    found = tl.zeros((SIDE, VALUES), dtype=tl.float64)
    for start in range(0, SIDE, BLOCK):
        columns = tl.load(work + i[:, None] * SIDE + (start + b)[None, :])
        sums = _added(parts, which, matrices, start + b, shares, SIDE, VALUES, 4).to(tl.float64)
        found -= tl.dot(columns, sums, input_precision="ieee", out_dtype=tl.float64)
    return found.to(tl.float32)


@triton.jit
def _back_kernel(
    rows, halves, work, solved, parts_s, parts_l, d_sums, d_rows, shares, scale,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    which, matrices = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    i, c, o = tl.arange(0, SIDE), tl.arange(0, WIDTH), tl.arange(0, VALUES)
    found = _solved(work + which * SIDE * SIDE, parts_s, which, matrices, shares, SIDE, VALUES)
    at = (which * SIDE + i[:, None]) * VALUES + o[None, :]
    tl.store(d_sums + at, found)
    landmarks, kernel, _ = _weights(rows, halves, which, scale, SIDE, WIDTH)
    product = tl.dot(found, tl.trans(tl.load(solved + at)), input_precision="tf32x3")
    # ∂κ_ij/∂l_i = scale · κ_ij (l_j − l_i), for both places of l_i; dκ = −dU Yᵀ.
    pulls = -(product + tl.trans(product)) * kernel
    due = tl.dot(pulls, landmarks, input_precision="tf32x3") - tl.sum(pulls, axis=1)[:, None] * landmarks
    due = scale * due + _added(parts_l, which, matrices, i, shares, SIDE, WIDTH, 2)
    tl.store(d_rows + (which * SIDE + i[:, None]) * WIDTH + c[None, :], due)


@triton.jit
def _finish_kernel(
    d_rows, parts, positions, dx, dy, shares, n, m, heads, d, split, width, pb,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    which, matrices = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    i, c = tl.arange(0, SIDE), tl.arange(0, WIDTH)
    due = tl.load(d_rows + (which * SIDE + i[:, None]) * WIDTH + c[None, :])
    due += _added(parts, which, matrices, i, shares, SIDE, WIDTH, 2)
    inside = (i < d)[:, None] & (c < width)[None, :]
    if GATHER:
        token = tl.load(positions + (which // heads) * pb + i, mask=i < d, other=0)
        of_x = inside & (i < split)[:, None]
        at = dx + (which * n + token[:, None]) * width + c[None, :]
        tl.store(at, (tl.load(at, mask=of_x, other=0.0).to(tl.float32) + due).to(dx.dtype.element_ty), mask=of_x)
        of_y = inside & (i >= split)[:, None]
        at = dy + (which * m + token[:, None]) * width + c[None, :]
        tl.store(at, (tl.load(at, mask=of_y, other=0.0).to(tl.float32) + due).to(dy.dtype.element_ty), mask=of_y)
    else:
        at = dx + (which * d + i[:, None]) * width + c[None, :]
        tl.store(at, due.to(dx.dtype.element_ty), mask=inside)


def landmark_solve(landmarks: Landmarks, parts: Tensor, *, scale: float, gamma: float) -> tuple[Tensor, Tensor]:
    """(−(κ(L, L) + γI)⁻¹ (b · h, side, side) in float64, (κ(L, L) + γI)⁻¹ Σ parts (b · h, side, values) in float32).

    γ > 0. Where there is no landmark the matrix is that of the identity.
    """
    shares, matrices, side, values = parts.shape
    work = torch.empty(matrices, side, side, dtype=torch.float64, device=parts.device)
    solved = torch.empty(matrices, side, values, dtype=torch.float32, device=parts.device)
    launch(
        _solve_kernel,
        (matrices,),
        layout(parts, landmarks.rows),
        (landmarks.rows, landmarks.halves, parts, work, solved, shares, scale, gamma),
        SIDE=side, WIDTH=landmarks.rows.shape[2], VALUES=values, num_warps=8 if side > 64 else 4,
    )  # fmt: skip
    return work, solved


def landmark_solve_back(
    landmarks: Landmarks, work: Tensor, solved: Tensor, parts_s: Tensor, parts_l: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """(dU, what the landmarks are due so far) from the partial sums of dY and of the landmarks' gradient."""
    shares, matrices, side, values = parts_s.shape
    d_sums, d_rows = torch.empty_like(solved), torch.empty_like(landmarks.rows)
    launch(
        _back_kernel,
        (matrices,),
        layout(parts_s, parts_l),
        (landmarks.rows, landmarks.halves, work, solved, parts_s, parts_l, d_sums, d_rows, shares, scale),
        SIDE=side, WIDTH=landmarks.rows.shape[2], VALUES=values, num_warps=8,
    )  # fmt: skip
    return d_sums, d_rows


def landmark_finish(
    d_rows: Tensor, parts: Tensor, positions: Tensor | None, split: int, dx: Tensor, dy: Tensor
) -> None:
    """Adds the gradient of landmarks, `d_rows` and the parts, to that of the tokens they are; or writes it to dx.

    dx (b, h, n, p) and dy (b, h, m, p), contiguous; without `positions` dx (b, h, d, p) is that of the landmarks.
    """
    shares, matrices, side, width = parts.shape
    _, h, n, p = dx.shape
    d = n if positions is None else positions.shape[1]
    launch(
        _finish_kernel,
        (matrices,),
        layout(dx, dy, parts, positions),
        (
            d_rows, parts, d_rows if positions is None else positions, dx, dy, shares, n, dy.shape[2], h, d, split, p,
            0 if positions is None or len(positions) == 1 else d,
        ),
        SIDE=side, WIDTH=width, GATHER=positions is not None, num_warps=4,
    )  # fmt: skip
