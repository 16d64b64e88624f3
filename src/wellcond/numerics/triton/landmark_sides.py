"""The long sides of landmark attention: tokens against a few landmarks, all of which a program holds at once.

With κ(x, l) = exp(−scale/2 · ‖x − l‖²), L the landmarks (d ≤ 128) and n tokens:

    sums_kernel      U = κ(L, K) V, partial sums over shares of the keys; it also gathers the landmarks, and solves
    output_kernel    out = κ(Q, L) Y
    pull_kernel      for tokens x with vectors z and landmarks with vectors s, f = Σ_ij κ(x_i, l_j) z_i · s_j:
                     ∂f/∂x, Σ_j κ(x_i, l_j) s_j or partial sums of Σ_i κ(x_i, l_j) z_i, partial sums of ∂f/∂L;
                     for the queries it ends with the step between landmarks, for the keys with the landmarks' gradient

Landmarks are gathered once into a dense, padded buffer, with half their squared norms in units of the exponent: for
padding these are infinite, which makes every weight zero. Partial sums are added up by the last program of each head
(landmark_solve.py), in a fixed order, so that results are reproducible to the bit. With a mask of keys, a share ends at
the last key that is kept: what follows would add zeros, and has a gradient of zero.

The result of the solve between the two sides consists of large terms that cancel. So wherever it is multiplied, both
factors keep at least 16 bits: two bfloat16 parts for tokens in bfloat16, otherwise three TF32 products.
"""

import triton
import triton.language as tl

from .landmark_solve import back_head, finish_head, is_last, solve_head
from .tiles import LOG2E, counting, rows_of

__all__ = ["dot_tokens", "dot_wide", "output_kernel", "pull_kernel", "sums_kernel", "two_parts"]


@triton.jit
def two_parts(a):
    high = a.to(tl.bfloat16)
    return high, (a - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def dot_tokens(a, b, acc, PARTS: tl.constexpr):
    """Return acc + a b, where b holds tokens and a is float32."""
    if PARTS:
        high, low = two_parts(a)
        acc = tl.dot(low, b, acc)
        acc = tl.dot(high, b, acc)
    else:
        acc = tl.dot(a, b.to(tl.float32), acc, input_precision="tf32x3")
    return acc


@triton.jit
def dot_wide(a, b, PARTS: tl.constexpr):
    """Return a b, both float32."""
    if PARTS:
        a_high, a_low = two_parts(a)
        b_high, b_low = two_parts(b)
        found = tl.dot(a_low, b_high)
        found = tl.dot(a_high, b_low, found)
        found = tl.dot(a_high, b_high, found)
    else:
        found = tl.dot(a, b, input_precision="tf32x3")
    return found


@triton.jit
def _weights(xt, x_half, lt, halves, factor, PRECISION: tl.constexpr):
    """Return κ(x_i, l_j), (tokens, landmarks); products of half-precision tokens are exact."""
    exponent = tl.dot(xt, lt, input_precision=PRECISION) * factor - x_half[:, None] - halves[None, :]
    return tl.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _half_norms(x, counts, factor):
    wide = x.to(tl.float32)
    return tl.where(counts, tl.sum(wide * wide, axis=1) * (0.5 * factor), float("inf"))


@triton.jit
def sums_kernel(
    x, y, v, positions, valid, keep, ends, space, to_halves, to_solved, to_ends, parts, work, counters,
    m, heads, d, split, width, values, each, scale, gamma,
    xb, xh, xn, yb, yh, yn, vb, vh, vn, pb, ab, ah, kb, kh, eb, eh,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, GATHER: tl.constexpr,
    HAS_VALID: tl.constexpr, HAS_KEEP: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    share, which = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = which // heads, which % heads
    x += b * xb + h * xh
    y += b * yb + h * yh
    v += b * vb + h * vh
    keep += b * kb + h * kh
    i, c, o = tl.arange(0, SIDE), tl.arange(0, WIDTH), tl.arange(0, VALUES)
    there = i < d
    if GATHER:  # landmarks are tokens: the first `split` of x, the others of y
        at = tl.load(positions + b * pb + i, mask=there, other=0)
        rows = rows_of(x, at, i < split, xn, width, WIDTH)
        rows += rows_of(y, at, there & (i >= split), yn, width, WIDTH)
    else:
        rows = rows_of(x, i, there, xn, width, WIDTH)
    if HAS_VALID:
        there = there & (tl.load(valid + b * ab + h * ah + i, mask=there, other=0) != 0)
    factor = scale * LOG2E
    halves = _half_norms(rows, there, factor)
    if share == 0:
        tl.store(space + (which * SIDE + i[:, None]) * WIDTH + c[None, :], rows.to(tl.float32))
        tl.store(space + to_halves + which * SIDE + i, halves)
    acc = tl.zeros((SIDE, VALUES), dtype=tl.float32)
    first = share * each
    last = tl.minimum(m, first + each)
    if HAS_KEEP:
        end = tl.load(ends + b * eb + h * eh)
        last = tl.minimum(last, end)
        if share == 0:  # for the pull-back: the bits of an integer, stored as a float
            tl.store(space + to_ends + which, end.to(tl.float32, bitcast=True))
    for start in range(first, last, BLOCK):
        r = start + tl.arange(0, BLOCK)
        counts = counting(r, last, keep, HAS_KEEP)
        yt = rows_of(y, r, counts, yn, width, WIDTH)
        vt = rows_of(v, r, counts, vn, values, VALUES)
        weights = _weights(rows, halves, tl.trans(yt), _half_norms(yt, counts, factor), factor, PRECISION)
        acc = dot_tokens(weights, vt, acc, PARTS)
    shares, matrices = tl.num_programs(0), tl.num_programs(1)
    tl.store(parts + ((share * matrices + which) * SIDE + i[:, None]) * VALUES + o[None, :], acc)
    if is_last(counters + which, shares):
        solve_head(space, to_halves, to_solved, parts, work, which, matrices, shares, scale, gamma, SIDE, WIDTH, VALUES)
        tl.store(counters + which, 0)


@triton.jit
def output_kernel(
    x, space, to_halves, to_solved, out,
    n, heads, width, values, scale, xb, xh, xn,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1).to(tl.int64)
    x += (which // heads) * xb + (which % heads) * xh
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i, c, o = tl.arange(0, SIDE), tl.arange(0, WIDTH), tl.arange(0, VALUES)
    factor = scale * LOG2E
    xt = rows_of(x, r, r < n, xn, width, WIDTH)
    landmarks = tl.load(space + (which * SIDE + i[:, None]) * WIDTH + c[None, :]).to(xt.dtype)
    halves = tl.load(space + to_halves + which * SIDE + i)
    solved = tl.load(space + to_solved + (which * SIDE + i[:, None]) * VALUES + o[None, :])
    weights = _weights(xt, _half_norms(xt, r < n, factor), tl.trans(landmarks), halves, factor, PRECISION)
    found = dot_wide(weights, solved, PARTS)
    at = out + (which * n + r[:, None]) * values + o[None, :]
    tl.store(at, found.to(out.dtype.element_ty), mask=(r < n)[:, None] & (o < values)[None, :])


@triton.jit
def pull_kernel(
    x, z, keep, positions, space, to_halves, to_solved, to_ends, work, counters,
    scratch, to_sums, to_rows, to_parts_s, to_parts_l, dx, out, d_first,
    n, first_n, heads, d, split, width, values, each, scale,
    xb, xh, xn, zb, zh, zn, kb, kh, pb,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, HAS_KEEP: tl.constexpr,
    GATHER: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For queries, s is the solution. For keys, s is dU, and `d_first` the gradient of the queries or the landmarks."""
    share, which = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = which // heads, which % heads
    x += b * xb + h * xh
    z += b * zb + h * zh
    keep += b * kb + h * kh
    i, c, o = tl.arange(0, SIDE), tl.arange(0, WIDTH), tl.arange(0, VALUES)
    factor = scale * LOG2E
    wide_landmarks = tl.load(space + (which * SIDE + i[:, None]) * WIDTH + c[None, :])
    landmarks = wide_landmarks.to(x.dtype.element_ty)
    halves = tl.load(space + to_halves + which * SIDE + i)
    at = (which * SIDE + i[:, None]) * VALUES + o[None, :]
    sides = tl.load(scratch + to_sums + at) if KEYS else tl.load(space + to_solved + at)
    acc_s = tl.zeros((SIDE, VALUES), dtype=tl.float32)
    acc_l = tl.zeros((SIDE, WIDTH), dtype=tl.float32)
    total = tl.zeros((SIDE,), dtype=tl.float32)
    first = share * each
    last = tl.minimum(n, first + each)
    stop = last
    if HAS_KEEP:
        end = tl.load(space + to_ends + which).to(tl.int32, bitcast=True)
        stop = first + tl.cdiv(tl.maximum(tl.minimum(last, end) - first, 0), BLOCK) * BLOCK
        none = tl.zeros((BLOCK, 1), dtype=tl.float32)
        for start in range(stop, last, BLOCK):
            r = start + tl.arange(0, BLOCK)
            line = which * n + r[:, None]
            mask = (r < last)[:, None] & (c < width)[None, :]
            tl.store(dx + line * width + c[None, :], none.to(dx.dtype.element_ty), mask=mask)
            if KEYS:
                mask = (r < last)[:, None] & (o < values)[None, :]
                tl.store(out + line * values + o[None, :], none.to(out.dtype.element_ty), mask=mask)
        stop = tl.minimum(stop, last)
    for start in range(first, stop, BLOCK):
        r = start + tl.arange(0, BLOCK)
        counts = counting(r, last, keep, HAS_KEEP)
        xt = rows_of(x, r, counts, xn, width, WIDTH)
        zt = rows_of(z, r, counts, zn, values, VALUES)
        weights = _weights(xt, _half_norms(xt, counts, factor), tl.trans(landmarks), halves, factor, PRECISION)
        if PARTS:
            high, low = two_parts(sides)
            along = tl.dot(zt, tl.trans(low))
            along = tl.dot(zt, tl.trans(high), along)
        else:
            along = tl.dot(zt.to(tl.float32), tl.trans(sides), input_precision="tf32x3")
        pulls = weights * along
        found = dot_tokens(pulls, landmarks, tl.zeros((BLOCK, WIDTH), dtype=tl.float32), PARTS)
        found = scale * (found - tl.sum(pulls, axis=1)[:, None] * xt.to(tl.float32))
        mask = (r < last)[:, None] & (c < width)[None, :]
        tl.store(dx + (which * n + r[:, None]) * width + c[None, :], found.to(dx.dtype.element_ty), mask=mask)
        if KEYS:
            found = dot_wide(weights, sides, PARTS)
            mask = (r < last)[:, None] & (o < values)[None, :]
            tl.store(out + (which * n + r[:, None]) * values + o[None, :], found.to(out.dtype.element_ty), mask=mask)
        else:
            acc_s = dot_tokens(tl.trans(weights), zt, acc_s, PARTS)
        acc_l = dot_tokens(tl.trans(pulls), xt, acc_l, PARTS)
        total += tl.sum(pulls, axis=0)
    shares, matrices = tl.num_programs(0), tl.num_programs(1)
    line = (share * matrices + which) * SIDE + i[:, None]
    if not KEYS:
        tl.store(scratch + to_parts_s + line * VALUES + o[None, :], acc_s)
    tl.store(scratch + to_parts_l + line * WIDTH + c[None, :], scale * (acc_l - total[:, None] * wide_landmarks))
    if is_last(counters + which, shares):
        if KEYS:
            finish_head(
                scratch, to_rows, to_parts_l, positions, d_first, dx, which, matrices, shares, first_n, n, heads, d,
                split, width, pb, SIDE, WIDTH, GATHER,
            )  # fmt: skip
        else:
            back_head(
                space, to_halves, to_solved, work, scratch, to_parts_s, to_parts_l, to_sums, to_rows, which, matrices,
                shares, scale, SIDE, WIDTH, VALUES,
            )  # fmt: skip
        tl.store(counters + which, 0)
