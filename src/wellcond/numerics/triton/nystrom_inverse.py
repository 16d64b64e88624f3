"""The short side of Nyström attention: what happens between the means of segments, each head by one program.

    head_kernel       B from its parts, A = softmax(s Q̃K̃ᵀ), Z ≈ A⁺ by iteration, Y = ZB
    head_back_kernel  from the parts of dY: dB = ZᵀdY, the rowsums of dB∘B, and through the iteration, its start and the
                      softmax what Q̃ and K̃ are due

The iteration is that of numerics/inverse.py in terms of R = I − AZ: a step is Z + ZS with S = R + R² + R³/4. It starts
from Aᵀ/c, with c the largest column sum of A, so that Z is Aᵀ times a polynomial of AAᵀ, and R and S are symmetric. The
matrices lie in memory that their own program alone reads and writes, a block at a time. Beyond the first d rows and
columns A and Z are zero, and R is the identity.

In `work` each head has A, R, then Z of each step and of the end, then S of each step. A, Z and S the gradient needs; R
is found again with one product, where S would take two. Where no gradient is wanted, two places for Z and one for S are
used again and again.

Plain twin: `numerics.inverse.invert_by_iteration`.
"""

import triton
import triton.language as tl

from .landmark_solve import added_shares
from .nystrom_sides import head_matrix, row_softmax
from .tiles import LOG2E

__all__ = ["BACK_MATRICES", "head_back_kernel", "head_kernel"]

STEP = tl.constexpr(32)  # of the sum in a product
BACK_MATRICES = tl.constexpr(6)  # that a head needs in the backward pass


@triton.jit
def _tile(a, rows, columns, SIDE: tl.constexpr, TRANSPOSED: tl.constexpr):
    """A block of a matrix, or of its transpose."""
    if TRANSPOSED:
        found = tl.trans(tl.load(a + columns[:, None] * SIDE + rows[None, :]))
    else:
        found = tl.load(a + rows[:, None] * SIDE + columns[None, :])
    return found


@triton.jit
def _product(
    out, a, b, factor, add, more,
    SIDE: tl.constexpr, BLOCK: tl.constexpr, A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr,
    TERMS: tl.constexpr,
):  # fmt: skip
    """out = factor · a b, and with TERMS 1 + add, with 2 + add + more, with −1 + I; `out` may be one of those added."""
    tl.debug_barrier()  # all threads have written what is read here, and have read what is written
    i, k = tl.arange(0, BLOCK), tl.arange(0, STEP)
    for top in range(0, SIDE, BLOCK):
        for left in range(0, SIDE, BLOCK):
            acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
            for start in range(0, SIDE, STEP):
                one = _tile(a, top + i, start + k, SIDE, A_TRANSPOSED)
                other = _tile(b, start + k, left + i, SIDE, B_TRANSPOSED)
                acc = tl.dot(one, other, acc, input_precision="tf32x3")
            acc = acc * factor
            at = (top + i)[:, None] * SIDE + (left + i)[None, :]
            if TERMS == -1:
                acc += tl.where((top + i)[:, None] == (left + i)[None, :], 1.0, 0.0)
            if TERMS >= 1:
                acc += tl.load(add + at)
            if TERMS == 2:
                acc += tl.load(more + at)
            tl.store(out + at, acc)


@triton.jit
def _narrow_product(a, rows, SIDE: tl.constexpr, WIDTH: tl.constexpr, TRANSPOSED: tl.constexpr):
    """a · rows, or aᵀ · rows, for rows (SIDE, WIDTH) in memory."""
    tl.debug_barrier()
    i, k, c = tl.arange(0, SIDE), tl.arange(0, STEP), tl.arange(0, WIDTH)
    acc = tl.zeros((SIDE, WIDTH), dtype=tl.float32)
    for start in range(0, SIDE, STEP):
        one = _tile(a, i, start + k, SIDE, TRANSPOSED)
        other = tl.load(rows + (start + k)[:, None] * WIDTH + c[None, :])
        acc = tl.dot(one, other, acc, input_precision="tf32x3")
    return acc


@triton.jit
def head_kernel(
    space, to_keys, to_right, to_log, to_solved, to_acc, to_top, to_total, work,
    shares, d, iterations, z_places, s_places, scale,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    which, matrices = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    i, o = tl.arange(0, SIDE), tl.arange(0, VALUES)
    top = tl.full((SIDE,), float("-inf"), dtype=tl.float32)
    for share in range(shares):
        top = tl.maximum(top, tl.load(space + to_top + (share * matrices + which) * SIDE + i))
    total = tl.zeros((SIDE,), dtype=tl.float32)
    acc = tl.zeros((SIDE, VALUES), dtype=tl.float32)
    for share in range(shares):
        line = (share * matrices + which) * SIDE + i
        weight = tl.exp2(tl.load(space + to_top + line) - top)
        total += weight * tl.load(space + to_total + line)
        acc += weight[:, None] * tl.load(space + to_acc + line[:, None] * VALUES + o[None, :])
    right = tl.where((i < d)[:, None], acc / total[:, None], 0.0)
    at = (which * SIDE + i[:, None]) * VALUES + o[None, :]
    tl.store(space + to_right + at, right)
    tl.store(space + to_log + which * SIDE + i, top + tl.log2(total))

    size = SIDE * SIDE
    a = work + which * ((2 + z_places + s_places) * size)
    of_queries, of_keys = head_matrix(space, which, SIDE, WIDTH), head_matrix(space + to_keys, which, SIDE, WIDTH)
    logits = tl.dot(of_queries, tl.trans(of_keys), input_precision="tf32x3") * (scale * LOG2E)
    middle = tl.where((i < d)[:, None], row_softmax(logits, d, SIDE), 0.0)
    bound = tl.max(tl.sum(middle, axis=0), axis=0)
    places = i[:, None] * SIDE + i[None, :]
    tl.store(a + places, middle)
    rest, z, s = a + size, a + 2 * size, a + (2 + z_places) * size
    tl.store(z + places, tl.trans(middle) / bound)
    for step in range(iterations):
        now, then = z + (step % z_places) * size, z + ((step + 1) % z_places) * size
        of_step = s + (step % s_places) * size
        _product(rest, a, now, -1.0, a, a, SIDE, BLOCK, False, False, -1)
        _product(then, rest, rest, 0.25, rest, a, SIDE, BLOCK, False, False, 1)
        _product(of_step, rest, then, 1.0, rest, a, SIDE, BLOCK, False, False, 1)
        _product(then, now, of_step, 1.0, now, a, SIDE, BLOCK, False, False, 1)
    found = _narrow_product(
        z + (iterations % z_places) * size, space + to_right + which * SIDE * VALUES, SIDE, VALUES, False
    )
    tl.store(space + to_solved + at, found)


@triton.jit
def head_back_kernel(
    space, to_keys, to_right, work, scratch, to_parts_s, to_parts_l, to_d_solved, to_sums, to_inner, to_due_queries,
    to_due_keys, room, shares, d, iterations, scale,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    which, matrices = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    size = SIDE * SIDE
    i, c, o = tl.arange(0, SIDE), tl.arange(0, WIDTH), tl.arange(0, VALUES)
    a = work + which * ((3 + 2 * iterations) * size)
    z, s = a + 2 * size, a + (3 + iterations) * size
    room += which * BACK_MATRICES * size
    one, two, rest, da, g = room, room + size, room + 2 * size, room + 3 * size, room + 4 * size
    places = i[:, None] * SIDE + i[None, :]
    at = (which * SIDE + i[:, None]) * VALUES + o[None, :]

    d_solved = added_shares(scratch + to_parts_s, which, matrices, i, shares, SIDE, VALUES)
    tl.store(scratch + to_d_solved + at, d_solved)
    right = tl.load(space + to_right + at)
    tl.store(g + (iterations % 2) * size + places, tl.dot(d_solved, tl.trans(right), input_precision="tf32x3"))
    tl.store(da + places, tl.zeros((SIDE, SIDE), dtype=tl.float32))
    sums = _narrow_product(
        z + iterations * size, scratch + to_d_solved + which * SIDE * VALUES, SIDE, VALUES, True
    )  # fmt: skip
    tl.store(scratch + to_sums + at, sums)
    tl.store(scratch + to_inner + which * SIDE + i, tl.sum(sums * right, axis=1))

    for back in range(iterations):
        step = iterations - 1 - back
        now = z + step * size
        old, new = g + ((step + 1) % 2) * size, g + (step % 2) * size
        _product(rest, a, now, -1.0, a, a, SIDE, BLOCK, False, False, -1)  # R
        _product(new, old, s + step * size, 1.0, old, a, SIDE, BLOCK, False, False, 1)
        # With H = dS = Zᵀ dZ, E = RH and F = E + HR: dR = H + F + (FR + RE)/4
        _product(one, now, old, 1.0, a, a, SIDE, BLOCK, True, False, 0)  # H
        _product(two, rest, one, 1.0, a, a, SIDE, BLOCK, False, False, 0)  # E
        _product(old, one, rest, 1.0, two, a, SIDE, BLOCK, False, False, 1)  # F
        _product(one, rest, two, 0.25, one, a, SIDE, BLOCK, False, False, 1)
        _product(two, old, rest, 0.25, one, old, SIDE, BLOCK, False, False, 2)  # dR
        _product(da, two, now, -1.0, da, a, SIDE, BLOCK, False, True, 1)
        _product(new, a, two, -1.0, new, a, SIDE, BLOCK, True, False, 1)

    # The start is Aᵀ/c; columns that share the largest sum share its gradient.
    tl.debug_barrier()
    line = tl.arange(0, BLOCK)
    columns = tl.zeros((SIDE,), dtype=tl.float32)
    along = tl.zeros((SIDE,), dtype=tl.float32)
    for start in range(0, SIDE, BLOCK):
        middle = _tile(a, start + line, i, SIDE, False)
        columns += tl.sum(middle, axis=0)
        along += tl.sum(middle * _tile(g, start + line, i, SIDE, True), axis=0)
    bound = tl.max(columns, axis=0)
    largest = tl.where(columns == bound, 1.0, 0.0)
    d_bound = -tl.sum(along, axis=0) / (bound * bound * tl.sum(largest, axis=0))
    for start in range(0, SIDE, BLOCK):
        middle = _tile(a, start + line, i, SIDE, False)
        pulls = _tile(da, start + line, i, SIDE, False) + _tile(g, start + line, i, SIDE, True) / bound
        pulls = pulls + (largest * d_bound)[None, :]
        pulls = middle * (pulls - tl.sum(middle * pulls, axis=1)[:, None])
        tl.store(one + (start + line)[:, None] * SIDE + i[None, :], scale * pulls)
    at = (which * SIDE + i[:, None]) * WIDTH + c[None, :]
    due = _narrow_product(one, space + to_keys + which * SIDE * WIDTH, SIDE, WIDTH, False)
    tl.store(scratch + to_due_queries + at, due)
    due = _narrow_product(one, space + which * SIDE * WIDTH, SIDE, WIDTH, True)
    due += added_shares(scratch + to_parts_l, which, matrices, i, shares, SIDE, WIDTH)
    tl.store(scratch + to_due_keys + at, due)
