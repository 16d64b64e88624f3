"""The long sides of Nyström attention: tokens against the means of segments, all of which a program holds at once.

With Q̃ and K̃ the means (d ≤ 128 of each), s the scale, and Y and dB what the short side found (nystrom_inverse.py):

    right_kernel     B = softmax(s Q̃Kᵀ) V in parts: for each share of the keys, maximum, sum and weighted values
    output_kernel    out = softmax(s QK̃ᵀ) Y
    queries_kernel   with P that softmax, g the gradient of out and dS = P∘(gYᵀ − rowsums(P∘gYᵀ)):
                     dQ = s dS K̃, without the gradient of the means; parts of dY = Pᵀ g and dK̃ = s dSᵀ Q
    keys_kernel      with W the softmax of the right side and dT = Wᵀ∘(V dBᵀ − rowsums(dB∘B)):
                     dV = Wᵀ dB, dK = s dT Q̃ + the gradient of the means, parts of dQ̃ = s dTᵀ K

With a mask, the same for queries and keys (nystrom_means.py), programs stop at the last key that is kept; and if no
more of these are kept than there are landmarks, each is a landmark: W is then the identity by definition.

Exponentials are powers of two: logits are in units of log 2. The result of the pseudo-inverse consists of large terms
that cancel, and the means are not tokens; so all products keep at least 16 bits: two bfloat16 parts for tokens in
bfloat16, otherwise three TF32 products.
"""

import triton
import triton.language as tl

from .landmark_sides import dot_tokens, dot_wide, two_parts
from .nystrom_means import RANKS_AT, kept_segment, ranks_of, segment_of
from .tiles import LOG2E, rows_of

__all__ = ["head_matrix", "keys_kernel", "output_kernel", "queries_kernel", "right_kernel", "row_softmax"]


@triton.jit
def row_softmax(logits, d, SIDE: tl.constexpr):
    """Compute the softmax over the first d of SIDE columns."""
    logits = tl.where((tl.arange(0, SIDE) < d)[None, :], logits, float("-inf"))
    weights = tl.exp2(logits - tl.max(logits, axis=1)[:, None])
    return weights / tl.sum(weights, axis=1)[:, None]


@triton.jit
def _against(tokens, rows, PARTS: tl.constexpr):
    """Return tokens · rowsᵀ, with rows in float32."""
    if PARTS:
        high, low = two_parts(rows)
        found = tl.dot(tokens, tl.trans(low))
        found = tl.dot(tokens, tl.trans(high), found)
    else:
        found = tl.dot(tokens.to(tl.float32), tl.trans(rows), input_precision="tf32x3")
    return found


@triton.jit
def head_matrix(base, which, SIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Load the matrix of a head, (SIDE, WIDTH), from a dense, padded buffer."""
    i, c = tl.arange(0, SIDE), tl.arange(0, WIDTH)
    return tl.load(base + (which * SIDE + i[:, None]) * WIDTH + c[None, :])


@triton.jit
def right_kernel(
    y, v, ranks, to_ranks, space, parts, to_top, to_total,
    m, heads, d, width, values, each, scale, yb, yh, yn, vb, vh, vn, rb, rh,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    HAS_KEEP: tl.constexpr,
):  # fmt: skip
    share, which = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = which // heads, which % heads
    y += b * yb + h * yh
    v += b * vb + h * vh
    i, o = tl.arange(0, SIDE), tl.arange(0, VALUES)
    means = head_matrix(space, which, SIDE, WIDTH)
    acc = tl.zeros((SIDE, VALUES), dtype=tl.float32)
    top = tl.full((SIDE,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((SIDE,), dtype=tl.float32)
    first = share * each
    last = tl.minimum(m, first + each)
    if HAS_KEEP:
        row, kept, places = ranks_of(ranks + to_ranks, which, heads, d, rb, rh)
        last = tl.minimum(last, tl.load(row + 1))
    for start in range(first, last, BLOCK):
        r = start + tl.arange(0, BLOCK)
        counts = r < last
        if HAS_KEEP:
            rank = tl.load(row + RANKS_AT + r, mask=counts, other=0)
            counts = rank > 0
        yt = rows_of(y, r, counts, yn, width, WIDTH)
        vt = rows_of(v, r, counts, vn, values, VALUES)
        logits = dot_tokens(means, tl.trans(yt), tl.zeros((SIDE, BLOCK), dtype=tl.float32), PARTS) * (scale * LOG2E)
        if HAS_KEEP:
            own = kept_segment(rank, kept, places)[0][None, :] == i[:, None]
            logits = tl.where(kept <= d, tl.where(own, 0.0, float("-inf")), logits)
        logits = tl.where(counts[None, :], logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, axis=1))
        less = higher
        if HAS_KEEP:
            less = tl.where(higher == float("-inf"), 0.0, higher)  # no key has counted so far
        shrink = tl.exp2(top - less)
        weights = tl.exp2(logits - less[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        acc = dot_tokens(weights, vt, acc * shrink[:, None], PARTS)
        top = higher
    line = (share * tl.num_programs(1) + which) * SIDE + i
    tl.store(parts + line[:, None] * VALUES + o[None, :], acc)
    tl.store(parts + to_top + line, top)
    tl.store(parts + to_total + line, total)


@triton.jit
def output_kernel(
    x, ranks, to_ranks, space, to_keys, to_solved, out, n, heads, d, width, values, scale, xb, xh, xn, rb, rh,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    HAS_KEEP: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1).to(tl.int64)
    x += (which // heads) * xb + (which % heads) * xh
    if HAS_KEEP:
        d = ranks_of(ranks + to_ranks, which, heads, d, rb, rh)[2]
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o = tl.arange(0, VALUES)
    xt = rows_of(x, r, r < n, xn, width, WIDTH)
    logits = _against(xt, head_matrix(space + to_keys, which, SIDE, WIDTH), PARTS) * (scale * LOG2E)
    found = dot_wide(row_softmax(logits, d, SIDE), head_matrix(space + to_solved, which, SIDE, VALUES), PARTS)
    at = out + (which * n + r[:, None]) * values + o[None, :]
    tl.store(at, found.to(out.dtype.element_ty), mask=(r < n)[:, None] & (o < values)[None, :])


@triton.jit
def queries_kernel(
    x, g, ranks, to_ranks, space, to_keys, to_solved, scratch, to_parts_s, to_parts_l, dx,
    n, heads, d, width, values, each, scale, xb, xh, xn, gb, gh, gn, rb, rh,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    HAS_KEEP: tl.constexpr,
):  # fmt: skip
    share, which = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = which // heads, which % heads
    x += b * xb + h * xh
    g += b * gb + h * gh
    if HAS_KEEP:
        d = ranks_of(ranks + to_ranks, which, heads, d, rb, rh)[2]
    i, c, o = tl.arange(0, SIDE), tl.arange(0, WIDTH), tl.arange(0, VALUES)
    means = head_matrix(space + to_keys, which, SIDE, WIDTH)
    solved = head_matrix(space + to_solved, which, SIDE, VALUES)
    acc_s = tl.zeros((SIDE, VALUES), dtype=tl.float32)
    acc_l = tl.zeros((SIDE, WIDTH), dtype=tl.float32)
    first = share * each
    last = tl.minimum(n, first + each)
    for start in range(first, last, BLOCK):
        r = start + tl.arange(0, BLOCK)
        xt = rows_of(x, r, r < last, xn, width, WIDTH)
        gt = rows_of(g, r, r < last, gn, values, VALUES)
        weights = row_softmax(_against(xt, means, PARTS) * (scale * LOG2E), d, SIDE)
        acc_s = dot_tokens(tl.trans(weights), gt, acc_s, PARTS)
        along = _against(gt, solved, PARTS)
        pulls = weights * (along - tl.sum(weights * along, axis=1)[:, None])
        acc_l = dot_tokens(tl.trans(pulls), xt, acc_l, PARTS)
        found = scale * dot_wide(pulls, means, PARTS)
        mask = (r < last)[:, None] & (c < width)[None, :]
        tl.store(dx + (which * n + r[:, None]) * width + c[None, :], found.to(dx.dtype.element_ty), mask=mask)
    line = (share * tl.num_programs(1) + which) * SIDE + i[:, None]
    tl.store(scratch + to_parts_s + line * VALUES + o[None, :], acc_s)
    tl.store(scratch + to_parts_l + line * WIDTH + c[None, :], scale * acc_l)


@triton.jit
def keys_kernel(
    y, v, ranks, to_ranks, space, to_log, scratch, to_sums, to_inner, to_due, to_parts, dy, dv,
    m, heads, d, width, values, each, scale, yb, yh, yn, vb, vh, vn, rb, rh,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    HAS_KEEP: tl.constexpr,
):  # fmt: skip
    share, which = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = which // heads, which % heads
    y += b * yb + h * yh
    v += b * vb + h * vh
    i, c, o = tl.arange(0, SIDE), tl.arange(0, WIDTH), tl.arange(0, VALUES)
    means = head_matrix(space, which, SIDE, WIDTH)
    sums = head_matrix(scratch + to_sums, which, SIDE, VALUES)
    top = tl.load(space + to_log + 2 * which * SIDE + i)
    log = tl.load(space + to_log + (2 * which + 1) * SIDE + i)
    inner = tl.load(scratch + to_inner + which * SIDE + i)
    acc = tl.zeros((SIDE, WIDTH), dtype=tl.float32)
    first = share * each
    last = tl.minimum(m, first + each)
    stop = last
    if HAS_KEEP:
        row, kept, places = ranks_of(ranks + to_ranks, which, heads, d, rb, rh)
        stop = tl.maximum(first, tl.minimum(last, tl.load(row + 1)))
    for start in range(first, stop, BLOCK):
        r = start + tl.arange(0, BLOCK)
        counts = r < last
        if HAS_KEEP:
            rank = tl.load(row + RANKS_AT + r, mask=counts, other=0)
            counts = rank > 0
            segment, length = kept_segment(rank, kept, places)
        else:
            segment = segment_of(r, m, d)
            length = (segment + 1) * m // d - segment * m // d
        yt = rows_of(y, r, counts, yn, width, WIDTH)
        vt = rows_of(v, r, counts, vn, values, VALUES)
        exponent = _against(yt, means, PARTS) * (scale * LOG2E) - top[None, :] - log[None, :]
        weights = tl.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL))
        if HAS_KEEP:
            weights = tl.where(kept <= d, tl.where(segment[:, None] == i[None, :], 1.0, 0.0), weights)
        weights = tl.where(counts[:, None], weights, 0.0)
        found = dot_wide(weights, sums, PARTS)
        mask = (r < last)[:, None] & (o < values)[None, :]
        tl.store(dv + (which * m + r[:, None]) * values + o[None, :], found.to(dv.dtype.element_ty), mask=mask)
        pulls = weights * (_against(vt, sums, PARTS) - inner[None, :])
        if HAS_KEEP:
            pulls = tl.where(kept <= d, 0.0, pulls)
        acc = dot_tokens(tl.trans(pulls), yt, acc, PARTS)
        mask = counts[:, None] & (c < width)[None, :]
        at = scratch + to_due + (which * SIDE + segment[:, None]) * WIDTH + c[None, :]
        due = tl.load(at, mask=mask, other=0.0) / tl.maximum(length, 1).to(tl.float32)[:, None]
        found = scale * dot_wide(pulls, means, PARTS) + due
        mask = (r < last)[:, None] & (c < width)[None, :]
        tl.store(dy + (which * m + r[:, None]) * width + c[None, :], found.to(dy.dtype.element_ty), mask=mask)
    line = (share * tl.num_programs(1) + which) * SIDE + i[:, None]
    tl.store(scratch + to_parts + line * WIDTH + c[None, :], scale * acc)
    if HAS_KEEP:  # zeros for all that is masked at the end
        for start in range(first + (stop - first + BLOCK - 1) // BLOCK * BLOCK, last, BLOCK):
            r = start + tl.arange(0, BLOCK)
            mask = (r < last)[:, None] & (c < width)[None, :]
            none = tl.zeros((BLOCK, WIDTH), dtype=dy.dtype.element_ty)
            tl.store(dy + (which * m + r[:, None]) * width + c[None, :], none, mask=mask)
            mask = (r < last)[:, None] & (o < values)[None, :]
            none = tl.zeros((BLOCK, VALUES), dtype=dv.dtype.element_ty)
            tl.store(dv + (which * m + r[:, None]) * values + o[None, :], none, mask=mask)
