"""The short side of landmark attention: the step between landmarks, run by the last program of each head to finish.

    is_last          whether all other programs of a head have stored their results
    solve_head       Z = (κ(L, L) + γI)⁻¹, and Y = ZU from the parts of U
    back_head        dU = Z dY from the parts of dY, and the gradient of the landmarks so far: dκ(L, L) = −dU Yᵀ
    finish_head      adds the gradient of the landmarks to those of the tokens they are

These run at the end of the kernels in landmark_sides.py: separate launches would take the CPU as long as all of their
work. With γ on the diagonal the matrix is positive definite and needs no pivoting: blocks of 32 are swept in turn (see
spd_inverse.py), with the matrix in memory that only its own program reads and writes. All in float64: the condition
number is at most (d + γ)/γ, but the right-hand sides lie along the large eigenvalues, where an inverse in float32 would
err by its square.

Plain twin: `torch.linalg.solve` with `gaussian_weights`.
"""

import triton
import triton.language as tl

from .spd_inverse import BLOCK
from .tiles import LOG2E

__all__ = ["added_shares", "back_head", "finish_head", "is_last", "solve_head"]


@triton.jit
def is_last(counter, programs):
    """Whether this program is the last of `programs` to arrive here; it then sees what the others stored before.

    The counter starts at zero, and the last program must reset it.
    """
    tl.debug_barrier()  # all threads must have stored their results
    return tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1


@triton.jit
def _swept_block(block):
    """Return −(an SPD block)⁻¹ by sweeping its 32 pivots in turn; sums run along rows, each within one warp."""
    r = tl.arange(0, BLOCK)
    row = r[:, None]
    col = r[None, :]
    for k in range(BLOCK):
        column = tl.sum(tl.where(col == k, block, 0.0), axis=1)
        line = tl.trans(column[:, None])  # the block is symmetric
        reciprocal = 1.0 / tl.sum(tl.where(col == k, line, 0.0), axis=1)[:, None]
        scaled = line * reciprocal
        swept = block - column[:, None] * scaled
        swept = tl.where(row == k, scaled, swept)
        swept = tl.where(col == k, column[:, None] * reciprocal, swept)
        block = tl.where((row == k) & (col == k), -reciprocal, swept)
    return block


@triton.jit
def added_shares(parts, which, matrices, i, shares, SIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Return rows i of the sum over shares of (shares, matrices, SIDE, WIDTH), always added in the same order."""
    at = parts + which * SIDE * WIDTH + i[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    stride = (which * 0 + matrices) * SIDE * WIDTH
    none = i[:, None] * 0
    acc = tl.load(at)
    for share in range(1, shares, 4):  # four loads in flight at a time
        one, two = tl.load(at + share * stride), _share(at, share + 1, shares, stride, none)
        three, four = _share(at, share + 2, shares, stride, none), _share(at, share + 3, shares, stride, none)
        acc += (one + two) + (three + four)
    return acc


@triton.jit
def _share(at, share, shares, stride, none):
    return tl.load(at + share * stride, mask=none + share < shares, other=0.0)


@triton.jit
def _weights(space, to_halves, which, scale, SIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Return the landmarks, κ(L, L) with zeros for padding and on the diagonal, and which landmarks there are."""
    i, c = tl.arange(0, SIDE), tl.arange(0, WIDTH)
    landmarks = tl.load(space + (which * SIDE + i[:, None]) * WIDTH + c[None, :])
    half = tl.load(space + to_halves + which * SIDE + i)
    product = tl.dot(landmarks, tl.trans(landmarks), input_precision="tf32x3") * (scale * LOG2E)
    exponent = product - half[:, None] - half[None, :]
    kernel = tl.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL))
    kernel = 0.5 * (kernel + tl.trans(kernel))  # symmetric to the bit, as sweeping assumes
    return landmarks, tl.where(i[:, None] == i[None, :], 0.0, kernel), half < float("inf")


@triton.jit
def solve_head(
    space, to_halves, to_solved, parts, work, which, matrices, shares, scale, gamma,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    work += which * SIDE * SIDE
    i, b = tl.arange(0, SIDE), tl.arange(0, BLOCK)
    _, kernel, there = _weights(space, to_halves, which, scale, SIDE, WIDTH)
    diagonal = tl.where(there, 1.0 + gamma, 1.0).to(tl.float64)  # an identity for padding
    shifted = kernel.to(tl.float64) + tl.where(i[:, None] == i[None, :], diagonal[:, None], 0.0)
    tl.store(work + i[:, None] * SIDE + i[None, :], shifted)
    for start in range(0, SIDE, BLOCK):
        p = start + b
        beside = ((i < start) | (i >= start + BLOCK))[None, :]
        tl.debug_barrier()  # all threads must have swept the previous block
        negative = _swept_block(tl.load(work + p[:, None] * SIDE + p[None, :]))
        line = tl.load(work + p[:, None] * SIDE + i[None, :])
        tl.debug_barrier()  # all threads must have read it
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
                tl.debug_barrier()  # all threads must have read this strip
                tl.store(at, swept, mask=beside)
                tl.store(work + r[:, None] * SIDE + p[None, :], scaled)
    tl.debug_barrier()
    found = _solved(work, parts, which, matrices, shares, SIDE, VALUES)
    o = tl.arange(0, VALUES)
    tl.store(space + to_solved + (which * SIDE + i[:, None]) * VALUES + o[None, :], found)


@triton.jit
def _solved(work, parts, which, matrices, shares, SIDE: tl.constexpr, VALUES: tl.constexpr):
    """Return Z · (the sum of the parts), in float32; `work` holds −Z."""
    i, b = tl.arange(0, SIDE), tl.arange(0, BLOCK)
    found = tl.zeros((SIDE, VALUES), dtype=tl.float64)
    for start in range(0, SIDE, BLOCK):
        columns = tl.load(work + i[:, None] * SIDE + (start + b)[None, :])
        sums = added_shares(parts, which, matrices, start + b, shares, SIDE, VALUES).to(tl.float64)
        found -= tl.dot(columns, sums, input_precision="ieee", out_dtype=tl.float64)
    return found.to(tl.float32)


@triton.jit
def back_head(
    space, to_halves, to_solved, work, scratch, to_parts_s, to_parts_l, to_sums, to_rows, which, matrices, shares,
    scale, SIDE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    i, c, o = tl.arange(0, SIDE), tl.arange(0, WIDTH), tl.arange(0, VALUES)
    found = _solved(work + which * SIDE * SIDE, scratch + to_parts_s, which, matrices, shares, SIDE, VALUES)
    at = (which * SIDE + i[:, None]) * VALUES + o[None, :]
    tl.store(scratch + to_sums + at, found)
    landmarks, kernel, _ = _weights(space, to_halves, which, scale, SIDE, WIDTH)
    product = tl.dot(found, tl.trans(tl.load(space + to_solved + at)), input_precision="tf32x3")
    # ∂κ_ij/∂l_i = scale · κ_ij (l_j − l_i), for both positions of l_i; dκ = −dU Yᵀ.
    pulls = -(product + tl.trans(product)) * kernel
    due = tl.dot(pulls, landmarks, input_precision="tf32x3") - tl.sum(pulls, axis=1)[:, None] * landmarks
    due = scale * due + added_shares(scratch + to_parts_l, which, matrices, i, shares, SIDE, WIDTH)
    tl.store(scratch + to_rows + (which * SIDE + i[:, None]) * WIDTH + c[None, :], due)


@triton.jit
def finish_head(
    scratch, to_rows, to_parts, positions, dx, dy, which, matrices, shares, n, m, heads, d, split, width, pb,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """dx and dy are dense; if the landmarks are not tokens, their own gradient is written to dx."""
    i, c = tl.arange(0, SIDE), tl.arange(0, WIDTH)
    due = tl.load(scratch + to_rows + (which * SIDE + i[:, None]) * WIDTH + c[None, :])
    due += added_shares(scratch + to_parts, which, matrices, i, shares, SIDE, WIDTH)
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
