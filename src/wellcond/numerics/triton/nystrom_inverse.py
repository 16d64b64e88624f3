"""The short side of Nyström attention: what happens between the means of segments, each head by one program.

    head_kernel       B from its parts, A = softmax(s Q̃K̃ᵀ), Y = ZB with Z ≈ A⁺ by iteration
    head_back_kernel  from the parts of dY: dB = ZᵀdY, the rowsums of dB∘B, and through the iteration, its start and the
                      softmax what Q̃ and K̃ are due

The iteration is that of numerics/inverse.py, Z ← ¼ Z(13I − AZ(15I − AZ(7I − AZ))) from Aᵀ/c, with c the largest column
sum of A. Everything in it is Aᵀ/c times a polynomial of AAᵀ, or a polynomial p of W = ZA times it, and Z itself is not
wanted, only Y. So a head needs W, which begins as AᵀA/c and is symmetric, and y, which begins as AᵀB/c and is narrow:

    y ← ¼(13y − W(15y − W(7y − Wy))),    W ← ¼(13W − 15W² + W²(7W − W²))

with two products of large matrices in a step where the iteration as it is written has four. Back through a step, with G
and g the gradients of the new W and y, symmetric parts are all that count:

    t = 7y − Wy,  u = 15y − Wt,  h = −¼Wg,  k = −Wh
    of y:   ¼·13g + 15h + 7k − Wk
    of W:   the symmetric part of −¼guᵀ − htᵀ − kyᵀ + ¼·13G + ¼·7N + 2DW, where P = GW, N = WWG and D is the symmetric
            part of ¼(7P − 15G) − ½N

Small eigenvalues of W grow by 3.25 in each step, and rounding errors beside them: products are of pairs of float16, 22
bits in all of what was first divided by the largest entry, which is as good as float32 and several times as fast as
three TF32 products. In `work` each head has the pairs of A, then of W of each step; `space` has y of each step, and
what A and each W were divided by. Where no gradient is wanted, two places for W are used again and again.

Plain twin: `numerics.inverse.invert_by_iteration`.
"""

import triton
import triton.language as tl

from .landmark_solve import added_shares
from .nystrom_sides import head_matrix, row_softmax
from .tiles import LOG2E

__all__ = ["head_back_kernel", "head_kernel"]

SMALLEST = tl.constexpr(1e-30)  # what is smaller is not worth a scale of its own


@triton.jit
def _unit(x):
    """x divided by a power of two, so that no entry is beyond ±1; and that power."""
    largest = tl.maximum(tl.max(tl.max(tl.abs(x), axis=1), axis=0), SMALLEST)
    power = tl.exp2(tl.ceil(tl.log2(largest)))
    return x / power, power


@triton.jit
def _pair(x):
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _dot(a_high, a_low, b_high, b_low):
    """a · b of pairs, but for the product of what is low in both."""
    found = tl.dot(a_low, b_high)
    found = tl.dot(a_high, b_low, found)
    return tl.dot(a_high, b_high, found)


@triton.jit
def _times(a_high, a_low, b):
    """a · b for a pair a, and b in float32 within float16's range."""
    b_high, b_low = _pair(b)
    return _dot(a_high, a_low, b_high, b_low)


@triton.jit
def _outer(a, b):
    """a · bᵀ in float32, both within float16's range."""
    a_high, a_low = _pair(a)
    b_high, b_low = _pair(b)
    return _dot(a_high, a_low, tl.trans(b_high), tl.trans(b_low))


@triton.jit
def _symmetric(x):
    return 0.5 * (x + tl.trans(x))


@triton.jit
def _load_pair(at, SIDE: tl.constexpr):
    i = tl.arange(0, SIDE)
    places = i[:, None] * SIDE + i[None, :]
    return tl.load(at + places), tl.load(at + SIDE * SIDE + places)


@triton.jit
def _store_pair(at, x, SIDE: tl.constexpr):
    i = tl.arange(0, SIDE)
    places = i[:, None] * SIDE + i[None, :]
    high, low = _pair(x)
    tl.store(at + places, high)
    tl.store(at + SIDE * SIDE + places, low)


@triton.jit
def _of_step(step, which, matrices, SIDE: tl.constexpr, VALUES: tl.constexpr):
    """Where the narrow matrix of a step stands, beside those of the other heads."""
    i, o = tl.arange(0, SIDE), tl.arange(0, VALUES)
    return ((step * matrices + which) * SIDE + i[:, None]) * VALUES + o[None, :]


@triton.jit
def head_kernel(
    space, to_keys, to_right, to_log, to_solved, to_steps, to_powers, to_acc, to_top, to_total, work,
    shares, d, iterations, w_places, scale,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, KEEP: tl.constexpr,
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

    size = 2 * SIDE * SIDE
    a = work + which * ((1 + w_places) * size)
    powers = space + to_powers + which * (1 + w_places)
    of_queries, of_keys = head_matrix(space, which, SIDE, WIDTH), head_matrix(space + to_keys, which, SIDE, WIDTH)
    logits = tl.dot(of_queries, tl.trans(of_keys), input_precision="tf32x3") * (scale * LOG2E)
    middle = tl.where((i < d)[:, None], row_softmax(logits, d, SIDE), 0.0)
    bound = tl.max(tl.sum(middle, axis=0), axis=0)
    middle, of_a = _unit(middle)
    _store_pair(a, middle, SIDE)
    tl.store(powers, of_a)
    tl.debug_barrier()  # what other threads have written is read from here on
    a_high, a_low = _load_pair(a, SIDE)
    y, of_y = _unit(right)
    y = _times(tl.trans(a_high), tl.trans(a_low), y) * (of_y * of_a / bound)
    if iterations > 0:
        w = _dot(tl.trans(a_high), tl.trans(a_low), a_high, a_low) * (of_a * of_a / bound)
        w, of_w = _unit(w)
        _store_pair(a + size, w, SIDE)
        tl.store(powers + 1, of_w)
    if KEEP:
        tl.store(space + to_steps + at, y)
    for step in range(iterations):
        tl.debug_barrier()
        of_w = tl.load(powers + 1 + step % w_places)
        w_high, w_low = _load_pair(a + (1 + step % w_places) * size, SIDE)
        y, of_y = _unit(y)
        t = 7.0 * y - of_w * _times(w_high, w_low, y)
        u = 15.0 * y - of_w * _times(w_high, w_low, t)
        y = (0.25 * of_y) * (13.0 * y - of_w * _times(w_high, w_low, u))
        if step + 1 < iterations:
            # What W was divided by suits W² too: W has no eigenvalue beyond 1, so W² has no larger entries.
            square = of_w * _dot(w_high, w_low, w_high, w_low)
            w = w_high.to(tl.float32) + w_low.to(tl.float32)
            square_high, square_low = _pair(square)
            last = of_w * _times(square_high, square_low, 7.0 * w - square)
            w, grown = _unit(0.25 * (13.0 * w - 15.0 * square + last))
            after = 1 + (step + 1) % w_places
            _store_pair(a + after * size, w, SIDE)
            tl.store(powers + after, of_w * grown)
            if KEEP:
                tl.store(space + to_steps + _of_step(step + 1, which, matrices, SIDE, VALUES), y)
    tl.store(space + to_solved + at, y)


@triton.jit
def head_back_kernel(
    space, to_keys, to_right, to_steps, to_powers, work,
    scratch, to_parts_s, to_parts_l, to_sums, to_inner, to_due_queries, to_due_keys, room,
    shares, d, iterations, w_places, scale,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    which, matrices = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    size = 2 * SIDE * SIDE
    i, c, o = tl.arange(0, SIDE), tl.arange(0, WIDTH), tl.arange(0, VALUES)
    a = work + which * ((1 + w_places) * size)
    powers = space + to_powers + which * (1 + w_places)
    room += which * size
    at = (which * SIDE + i[:, None]) * VALUES + o[None, :]
    g = added_shares(scratch + to_parts_s, which, matrices, i, shares, SIDE, VALUES)
    of_all = 1.0  # what the gradient of W was divided by
    for back in range(iterations):
        step = iterations - 1 - back
        of_w = tl.load(powers + 1 + step)
        w_high, w_low = _load_pair(a + (1 + step) * size, SIDE)
        pulls = tl.zeros((SIDE, SIDE), dtype=tl.float32)
        if back > 0:
            tl.debug_barrier()
            all_high, all_low = _load_pair(room, SIDE)
            p = of_w * _dot(all_high, all_low, w_high, w_low)
            p_high, p_low = _pair(p)
            n = of_w * _dot(w_high, w_low, tl.trans(p_high), tl.trans(p_low))
            everything = all_high.to(tl.float32) + all_low.to(tl.float32)
            due_high, due_low = _pair(_symmetric(1.75 * p - 3.75 * everything - 0.5 * n))
            due = (2.0 * of_w) * _dot(due_high, due_low, w_high, w_low)
            pulls = of_all * (3.25 * everything + 1.75 * n + due)
            tl.debug_barrier()  # all threads have read what is written below
        y, of_y = _unit(tl.load(space + to_steps + _of_step(step, which, matrices, SIDE, VALUES)))
        g, of_g = _unit(g)
        t = 7.0 * y - of_w * _times(w_high, w_low, y)
        u = 15.0 * y - of_w * _times(w_high, w_low, t)
        h = (-0.25 * of_w) * _times(w_high, w_low, g)
        k = -of_w * _times(w_high, w_low, h)
        pulls -= (of_y * of_g) * (_outer(0.25 * g, u) + _outer(h, t) + _outer(k, y))
        g = of_g * (3.25 * g + 15.0 * h + 7.0 * k - of_w * _times(w_high, w_low, k))
        pulls, of_all = _unit(_symmetric(pulls))
        _store_pair(room, pulls, SIDE)

    # From here g is the gradient of y at the start, AᵀB/c, and what `room` holds that of W there, AᵀA/c.
    tl.debug_barrier()
    of_a = tl.load(powers)
    a_high, a_low = _load_pair(a, SIDE)
    middle = of_a * (a_high.to(tl.float32) + a_low.to(tl.float32))
    columns = tl.sum(middle, axis=0)
    bound = tl.max(columns, axis=0)
    right = tl.load(space + to_right + at)
    along = tl.sum(tl.sum(g * tl.load(space + to_steps + at), axis=1), axis=0)
    g, of_g = _unit(g)
    unit_right, of_right = _unit(right)
    sums = (of_a * of_g / bound) * _times(a_high, a_low, g)
    tl.store(scratch + to_sums + at, sums)
    tl.store(scratch + to_inner + which * SIDE + i, tl.sum(sums * right, axis=1))
    pulls = (of_right * of_g / bound) * _outer(unit_right, g)
    if iterations > 0:
        all_high, all_low = _load_pair(room, SIDE)
        pulls += (2.0 * of_a * of_all / bound) * _dot(a_high, a_low, all_high, all_low)
        w_high, w_low = _load_pair(a + size, SIDE)
        shared = (all_high.to(tl.float32) + all_low.to(tl.float32)) * (w_high.to(tl.float32) + w_low.to(tl.float32))
        along += of_all * tl.load(powers + 1) * tl.sum(tl.sum(shared, axis=1), axis=0)
    # Columns that share the largest sum share its gradient.
    largest = tl.where(columns == bound, 1.0, 0.0)
    pulls -= (largest * (along / (bound * tl.sum(largest, axis=0))))[None, :]
    pulls, of_pulls = _unit(middle * (pulls - tl.sum(middle * pulls, axis=1)[:, None]))
    high, low = _pair(pulls)
    at = (which * SIDE + i[:, None]) * WIDTH + c[None, :]
    of_keys, of_k = _unit(head_matrix(space + to_keys, which, SIDE, WIDTH))
    tl.store(scratch + to_due_queries + at, (scale * of_pulls * of_k) * _times(high, low, of_keys))
    of_queries, of_q = _unit(head_matrix(space, which, SIDE, WIDTH))
    due = (scale * of_pulls * of_q) * _times(tl.trans(high), tl.trans(low), of_queries)
    due += added_shares(scratch + to_parts_l, which, matrices, i, shares, SIDE, WIDTH)
    tl.store(scratch + to_due_keys + at, due)
