"""The short side of Nyström attention: the step between the means of segments, one program per head.

    head_kernel       B from its parts, A = softmax(s Q̃K̃ᵀ), Y = ZB with Z ≈ A⁺ by iteration
    head_back_kernel  from the parts of dY: dB = ZᵀdY, the rowsums of dB∘B, and through the iteration, its start and the
                      softmax the gradients of Q̃ and K̃

The iteration is that of numerics/inverse.py, Z ← ¼ Z(13I − AZ(15I − AZ(7I − AZ))) from Aᵀ/c, with c the largest column
sum of A. Z itself is not needed, only Y, and W = ZA follows an iteration of its own. So a head needs W, which starts as
AᵀA/c and is symmetric, and y, which starts as AᵀB/c, ends as Y and is narrow:

    t = 7y − Wy,  u = 15y − Wt,  y ← ¼(13y − Wu),    W ← ¼(13W − 15W² + W²(7W − W²))

with two products of large matrices per step where the iteration as written has four. Back through a step, with G and g
the gradients of the new W and y, only symmetric parts count:

    h = −¼Wg,  k = −Wh
    of y:   ¼·13g + 15h + 7k − Wk
    of W:   the symmetric part of −¼guᵀ − htᵀ − kyᵀ + ¼·13G + ¼·7N + 2DW, where P = GW, N = WPᵀ and D is the symmetric
            part of ¼(7P − 15G) − ½N

Small eigenvalues of W grow by a factor of 3.25 per step, and rounding errors next to them do too: products are of pairs
of float16 (float16_pairs.py), which is as good as float32. Narrow products are in loops, for the same reason as large
ones.

For each head, `work` holds the pairs of A and of the W of each step, and `room` temporary ones; `space` holds the y of
each step and what matrices were divided by. The backward pass recomputes t and u, which would be most of what a model
saves for it. If no gradient is needed, two places for W are used in turn, and that of A for W²: there is no other room.

With a mask that keeps no more tokens than there are landmarks, A is the identity by definition, so that Y = B, and the
means of the queries get no gradient: there is no step to take.

Plain twin: `numerics.inverse.invert_by_iteration`.
"""

import triton
import triton.language as tl

from .float16_pairs import load_pair, load_sum, plus_outer, product, store_pair, symmetric, times, unit, unit_columns
from .landmark_solve import added_shares
from .nystrom_means import ranks_of
from .nystrom_sides import head_matrix, row_softmax
from .tiles import LOG2E

__all__ = ["ROOM_BACK", "head_back_kernel", "head_kernel"]

LEAST = tl.constexpr(1e-37)  # lower limit of products of two scales, to divide by
ROOM_BACK = tl.constexpr(3)  # temporary matrices of the backward pass: the gradient of W, P and D


@triton.jit
def _narrow(place, which, matrices, SIDE: tl.constexpr, VALUES: tl.constexpr):
    """Return the offsets of narrow matrix number `place`, next to those of the other heads."""
    i, o = tl.arange(0, SIDE), tl.arange(0, VALUES)
    return ((place * matrices + which) * SIDE + i[:, None]) * VALUES + o[None, :]


@triton.jit
def head_kernel(
    space, to_keys, to_right, to_log, to_solved, to_steps, to_powers, parts, to_top, to_total, work, room,
    ranks, to_ranks, shares, heads, d, iterations, w_places, scale, rb, rh,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, KEEP: tl.constexpr, HAS_KEEP: tl.constexpr,
):  # fmt: skip
    which, matrices = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    if HAS_KEEP:
        _, kept, places = ranks_of(ranks + to_ranks, which, heads, d, rb, rh)
        few, d = kept <= d, places
        iterations = tl.where(few, 0, iterations)
    i, o = tl.arange(0, SIDE), tl.arange(0, VALUES)
    top = tl.full((SIDE,), float("-inf"), dtype=tl.float32)
    for share in range(shares):
        top = tl.maximum(top, tl.load(parts + to_top + (share * matrices + which) * SIDE + i))
    if HAS_KEEP:
        top = tl.where(i < kept, top, 0.0)  # with so few keys, rows beyond them have none
    total = tl.zeros((SIDE,), dtype=tl.float32)
    acc = tl.zeros((SIDE, VALUES), dtype=tl.float32)
    for share in range(shares):
        line = (share * matrices + which) * SIDE + i
        weight = tl.exp2(tl.load(parts + to_top + line) - top)
        total += weight * tl.load(parts + to_total + line)
        acc += weight[:, None] * tl.load(parts + line[:, None] * VALUES + o[None, :])
    if HAS_KEEP:
        total = tl.where(i < kept, total, 1.0)
    right = tl.where((i < d)[:, None], acc / total[:, None], 0.0)
    at = (which * SIDE + i[:, None]) * VALUES + o[None, :]
    if KEEP:
        tl.store(space + to_right + at, right)
        tl.store(space + to_log + 2 * which * SIDE + i, top)
        tl.store(space + to_log + (2 * which + 1) * SIDE + i, tl.log2(total))

    size = 2 * SIDE * SIDE
    a = work + which * ((1 + w_places) * size)
    w = a + size
    squared = room + which * size if KEEP else a
    powers = space + to_powers + which * (1 + w_places * (1 + VALUES))
    of_queries, of_keys = head_matrix(space, which, SIDE, WIDTH), head_matrix(space + to_keys, which, SIDE, WIDTH)
    logits = tl.dot(of_queries, tl.trans(of_keys), input_precision="tf32x3") * (scale * LOG2E)
    middle = row_softmax(logits, d, SIDE)
    if HAS_KEEP:
        middle = tl.where(few, tl.where(i[:, None] == i[None, :], 1.0, 0.0), middle)
    middle = tl.where((i < d)[:, None], middle, 0.0)
    bound = tl.max(tl.sum(middle, axis=0), axis=0)
    middle, of_a = unit(middle)
    store_pair(a, middle, SIDE)
    start = product(a, a, SIDE, True, False) * (of_a * of_a / bound)
    a_high, a_low = load_pair(a, SIDE)
    y, of_y = unit_columns(right)
    y = times(tl.trans(a_high), tl.trans(a_low), y, SIDE, VALUES) * (of_y * (of_a / bound))[None, :]
    if KEEP:
        unit_y, of_y = unit_columns(y)
        tl.store(powers, of_a)
        tl.store(powers + 1 + w_places + o, of_y)
        tl.store(space + to_steps + _narrow(0, which, matrices, SIDE, VALUES), unit_y)
    start, of_w = unit(start)
    store_pair(w, start, SIDE)
    for step in range(iterations):
        now, after = w + (step % w_places) * size, w + ((step + 1) % w_places) * size
        tl.debug_barrier()
        w_high, w_low = load_pair(now, SIDE)
        y, of_y = unit_columns(y)
        x = y
        if KEEP:
            tl.store(space + to_steps + _narrow(step, which, matrices, SIDE, VALUES), y)
        for j in range(3):  # t, u and the next y
            share_of_y = tl.where(j == 0, 7.0, tl.where(j == 1, 15.0, 13.0))
            x = share_of_y * y - of_w * times(w_high, w_low, x, SIDE, VALUES)
        if KEEP:
            tl.store(powers + 1 + step, of_w)
            tl.store(powers + 1 + w_places + step * VALUES + o, of_y)
        y = (0.25 * of_y)[None, :] * x
        if step + 1 < iterations:
            # What W was divided by suits W² too: W has no eigenvalue above 1, so W² has no larger entries.
            square = of_w * product(now, now, SIDE, False, False)
            store_pair(squared, square, SIDE)
            store_pair(after, 7.0 * load_sum(now, SIDE) - square, SIDE)  # temporarily
            grown = 13.0 * load_sum(now, SIDE) - 15.0 * square + of_w * product(squared, after, SIDE, False, False)
            grown, power = unit(0.25 * grown)
            store_pair(after, grown, SIDE)
            of_w = of_w * power
    tl.store(space + to_solved + at, y)


@triton.jit
def head_back_kernel(
    space, to_keys, to_right, to_steps, to_powers, work,
    scratch, to_parts_s, to_parts_l, to_again, to_sums, to_inner, to_due_queries, to_due_keys, room,
    ranks, to_ranks, shares, heads, d, iterations, w_places, scale, rb, rh,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, HAS_KEEP: tl.constexpr,
):  # fmt: skip
    which, matrices = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    if HAS_KEEP:
        iterations = tl.where(ranks_of(ranks + to_ranks, which, heads, d, rb, rh)[1] <= d, 0, iterations)
    size = 2 * SIDE * SIDE
    i, c, o = tl.arange(0, SIDE), tl.arange(0, WIDTH), tl.arange(0, VALUES)
    a = work + which * ((1 + w_places) * size)
    powers = space + to_powers + which * (1 + w_places * (1 + VALUES))
    everything = room + which * (ROOM_BACK * size)
    p_pair, due_pair = everything + size, everything + 2 * size
    at = (which * SIDE + i[:, None]) * VALUES + o[None, :]
    g = added_shares(scratch + to_parts_s, which, matrices, i, shares, SIDE, VALUES)
    of_all = 1.0  # what the gradient of W was divided by
    for back in range(iterations):
        step = iterations - 1 - back
        w = a + (1 + step) * size
        of_w, of_y = tl.load(powers + 1 + step), tl.load(powers + 1 + w_places + step * VALUES + o)
        pulls = tl.zeros((SIDE, SIDE), dtype=tl.float32)
        if back > 0:
            p = of_w * product(everything, w, SIDE, False, False)
            store_pair(p_pair, p, SIDE)
            n = of_w * product(w, p_pair, SIDE, False, True)
            due = symmetric(1.75 * p - 3.75 * load_sum(everything, SIDE) - 0.5 * n)
            store_pair(due_pair, due, SIDE)
            pulls = (2.0 * of_w) * product(due_pair, w, SIDE, False, False)
            pulls = of_all * (3.25 * load_sum(everything, SIDE) + 1.75 * n + pulls)
        w_high, w_low = load_pair(w, SIDE)
        y = tl.load(space + to_steps + _narrow(step, which, matrices, SIDE, VALUES))
        x = y
        tl.debug_barrier()  # all threads must have read what the step before left there
        tl.store(scratch + to_again + _narrow(0, which, matrices, SIDE, VALUES), y)
        for j in range(2):  # t and u
            x = tl.where(j == 0, 7.0, 15.0) * y - of_w * times(w_high, w_low, x, SIDE, VALUES)
            tl.store(scratch + to_again + _narrow(1 + j, which, matrices, SIDE, VALUES), x)
        tl.debug_barrier()
        g, of_g = unit_columns(g)
        both = tl.maximum(tl.max(of_y * of_g, axis=0), LEAST)
        part = of_y * of_g / both
        x = g
        found = tl.zeros((SIDE, VALUES), dtype=tl.float32)
        outer = tl.zeros((SIDE, SIDE), dtype=tl.float32)
        for j in range(3):  # g with u, h with t, k with y
            y = tl.load(scratch + to_again + _narrow(2 - j, which, matrices, SIDE, VALUES))
            found += tl.where(j == 0, 3.25, tl.where(j == 1, 15.0, 7.0)) * x
            share = tl.where(j == 0, 0.25, 1.0)
            outer = plus_outer((share * part)[None, :] * x, y, outer)
            x = (-share * of_w) * times(w_high, w_low, x, SIDE, VALUES)
        g = of_g[None, :] * (found + x)
        pulls, of_all = unit(symmetric(pulls - both * outer))
        store_pair(everything, pulls, SIDE)

    # From here on g is the gradient of the initial y, AᵀB/c, and `everything` that of the initial W, AᵀA/c.
    of_a = tl.load(powers)
    middle = of_a * load_sum(a, SIDE)
    columns = tl.sum(middle, axis=0)
    bound = tl.max(columns, axis=0)
    right = tl.load(space + to_right + at)
    first = tl.load(space + to_steps + _narrow(0, which, matrices, SIDE, VALUES))
    first *= tl.load(powers + 1 + w_places + o)[None, :]
    along = tl.sum(tl.sum(g * first, axis=1), axis=0)
    pulls = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    if iterations > 0:
        pulls = (2.0 * of_a * of_all / bound) * product(a, everything, SIDE, False, False)
        shared = load_sum(everything, SIDE) * load_sum(a + size, SIDE)
        along += of_all * tl.load(powers + 1) * tl.sum(tl.sum(shared, axis=1), axis=0)
    a_high, a_low = load_pair(a, SIDE)
    g, of_g = unit_columns(g)
    unit_right, of_right = unit_columns(right)
    both = tl.maximum(tl.max(of_right * of_g, axis=0), LEAST)
    sums = (of_g * (of_a / bound))[None, :] * times(a_high, a_low, g, SIDE, VALUES)
    tl.store(scratch + to_sums + at, sums)
    tl.store(scratch + to_inner + which * SIDE + i, tl.sum(sums * right, axis=1))
    outer = plus_outer((of_right * of_g / both)[None, :] * unit_right, g, tl.zeros((SIDE, SIDE), dtype=tl.float32))
    pulls += (both / bound) * outer
    # Columns that share the largest sum share its gradient.
    largest = tl.where(columns == bound, 1.0, 0.0)
    pulls -= (largest * (along / (bound * tl.sum(largest, axis=0))))[None, :]
    pulls, of_pulls = unit(middle * (pulls - tl.sum(middle * pulls, axis=1)[:, None]))
    store_pair(p_pair, pulls, SIDE)
    tl.debug_barrier()
    high, low = load_pair(p_pair, SIDE)
    at = (which * SIDE + i[:, None]) * WIDTH + c[None, :]
    of_keys, of_k = unit_columns(head_matrix(space + to_keys, which, SIDE, WIDTH))
    due = times(high, low, of_keys, SIDE, WIDTH)
    tl.store(scratch + to_due_queries + at, (scale * of_pulls * of_k)[None, :] * due)
    of_queries, of_q = unit_columns(head_matrix(space, which, SIDE, WIDTH))
    due = (scale * of_pulls * of_q)[None, :] * times(tl.trans(high), tl.trans(low), of_queries, SIDE, WIDTH)
    due += added_shares(scratch + to_parts_l, which, matrices, i, shares, SIDE, WIDTH)
    tl.store(scratch + to_due_keys + at, due)
