"""The long sides of Nyström attention: tokens against the means of segments, all of which a program holds at once.

With Q̃ and K̃ the means (d ≤ 128 of each), s the scale, and Y and dB what the short side found (nystrom_inverse.py):

    right_kernel     B = softmax(s Q̃Kᵀ) V in parts: for each share of the keys maximum, sum, and weighted values
    output_kernel    out = softmax(s QK̃ᵀ) Y
    queries_kernel   with P that softmax, g the gradient of out and dS = P∘(gYᵀ − rowsums(P∘gYᵀ)):
                     dQ = s dS K̃, except for what the means are due; parts of dY = Pᵀ g and dK̃ = s dSᵀ Q
    keys_kernel      with W the softmax of the right side and dT = Wᵀ∘(V dBᵀ − rowsums(dB∘B)):
                     dV = Wᵀ dB, dK = s dT Q̃ + what the means are due, parts of dQ̃ = s dTᵀ K

Exponents are powers of two: a logit is in units of log 2. What comes out of the pseudo-inverse is made of large terms
that cancel, and the means are no tokens; so all products have 16 bits at least: two bfloat16 parts for tokens in
bfloat16, three TF32 products else.
"""

import triton
import triton.language as tl

from .landmark_sides import dot_tokens, dot_wide, two_parts
from .nystrom_means import segment_of
from .tiles import LOG2E, rows_of

__all__ = ["head_matrix", "keys_kernel", "output_kernel", "queries_kernel", "right_kernel", "row_softmax"]


@triton.jit
def row_softmax(logits, d, SIDE: tl.constexpr):
    """Over the first d of SIDE columns."""
    logits = tl.where((tl.arange(0, SIDE) < d)[None, :], logits, float("-inf"))
    weights = tl.exp2(logits - tl.max(logits, axis=1)[:, None])
    return weights / tl.sum(weights, axis=1)[:, None]


@triton.jit
def _against(tokens, rows, PARTS: tl.constexpr):
    """tokens · rowsᵀ, rows in float32."""
    if PARTS:
        high, low = two_parts(rows)
        found = tl.dot(tokens, tl.trans(low))
        found = tl.dot(tokens, tl.trans(high), found)
    else:
        found = tl.dot(tokens.to(tl.float32), tl.trans(rows), input_precision="tf32x3")
    return found


@triton.jit
def head_matrix(base, which, SIDE: tl.constexpr, WIDTH: tl.constexpr):
    """(SIDE, WIDTH) of a dense, padded buffer."""
    i, c = tl.arange(0, SIDE), tl.arange(0, WIDTH)
    return tl.load(base + (which * SIDE + i[:, None]) * WIDTH + c[None, :])


@triton.jit
def right_kernel(
    y, v, space, parts, to_top, to_total,
    m, heads, width, values, each, scale, yb, yh, yn, vb, vh, vn,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
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
    for start in range(first, last, BLOCK):
        r = start + tl.arange(0, BLOCK)
        yt = rows_of(y, r, r < last, yn, width, WIDTH)
        vt = rows_of(v, r, r < last, vn, values, VALUES)
        logits = dot_tokens(means, tl.trans(yt), tl.zeros((SIDE, BLOCK), dtype=tl.float32), PARTS) * (scale * LOG2E)
        logits = tl.where((r < last)[None, :], logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, axis=1))
        shrink = tl.exp2(top - higher)
        weights = tl.exp2(logits - higher[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        acc = dot_tokens(weights, vt, acc * shrink[:, None], PARTS)
        top = higher
    line = (share * tl.num_programs(1) + which) * SIDE + i
    tl.store(parts + line[:, None] * VALUES + o[None, :], acc)
    tl.store(parts + to_top + line, top)
    tl.store(parts + to_total + line, total)


@triton.jit
def output_kernel(
    x, space, to_keys, to_solved, out, n, heads, d, width, values, scale, xb, xh, xn,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1).to(tl.int64)
    x += (which // heads) * xb + (which % heads) * xh
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o = tl.arange(0, VALUES)
    xt = rows_of(x, r, r < n, xn, width, WIDTH)
    logits = _against(xt, head_matrix(space + to_keys, which, SIDE, WIDTH), PARTS) * (scale * LOG2E)
    found = dot_wide(row_softmax(logits, d, SIDE), head_matrix(space + to_solved, which, SIDE, VALUES), PARTS)
    at = out + (which * n + r[:, None]) * values + o[None, :]
    tl.store(at, found.to(out.dtype.element_ty), mask=(r < n)[:, None] & (o < values)[None, :])


@triton.jit
def queries_kernel(
    x, g, space, to_keys, to_solved, scratch, to_parts_s, to_parts_l, dx,
    n, heads, d, width, values, each, scale, xb, xh, xn, gb, gh, gn,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    share, which = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = which // heads, which % heads
    x += b * xb + h * xh
    g += b * gb + h * gh
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
    y, v, space, to_log, scratch, to_sums, to_inner, to_due, to_parts, dy, dv,
    m, heads, d, width, values, each, scale, yb, yh, yn, vb, vh, vn,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
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
    for start in range(first, last, BLOCK):
        r = start + tl.arange(0, BLOCK)
        yt = rows_of(y, r, r < last, yn, width, WIDTH)
        vt = rows_of(v, r, r < last, vn, values, VALUES)
        exponent = _against(yt, means, PARTS) * (scale * LOG2E) - top[None, :] - log[None, :]
        weights = tl.where(
            (r < last)[:, None], tl.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL)), 0.0
        )
        found = dot_wide(weights, sums, PARTS)
        mask = (r < last)[:, None] & (o < values)[None, :]
        tl.store(dv + (which * m + r[:, None]) * values + o[None, :], found.to(dv.dtype.element_ty), mask=mask)
        pulls = weights * (_against(vt, sums, PARTS) - inner[None, :])
        acc = dot_tokens(tl.trans(pulls), yt, acc, PARTS)
        segment = segment_of(r, m, d)
        length = (segment + 1) * m // d - segment * m // d
        mask = (r < last)[:, None] & (c < width)[None, :]
        at = scratch + to_due + (which * SIDE + segment[:, None]) * WIDTH + c[None, :]
        due = tl.load(at, mask=mask, other=0.0) / tl.maximum(length, 1).to(tl.float32)[:, None]
        found = scale * dot_wide(pulls, means, PARTS) + due
        tl.store(dy + (which * m + r[:, None]) * width + c[None, :], found.to(dy.dtype.element_ty), mask=mask)
    line = (share * tl.num_programs(1) + which) * SIDE + i[:, None]
    tl.store(scratch + to_parts + line * WIDTH + c[None, :], scale * acc)
