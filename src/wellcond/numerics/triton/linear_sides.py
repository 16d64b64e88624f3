"""Linear attention as Triton kernels: sums over the keys, a small matrix for each head, and products with it.

    sums_kernel      S = f KᵀV, partial sums over shares of the keys, added up by the last program of each head
    output_kernel    out = Q S
    queries_kernel   with g the gradient of out: dQ = g Sᵀ, and dS = f Qᵀg, summed like S
    keys_kernel      dK = V dSᵀ, dV = K dS

Half-precision tokens are multiplied as they are, which is exact in float32; S and dS keep at least 16 bits when
multiplied by them: two bfloat16 parts for tokens in bfloat16, otherwise three TF32 products.
"""

import triton
import triton.language as tl

from .landmark_sides import two_parts
from .landmark_solve import added_shares, is_last
from .tiles import rows_of

__all__ = ["keys_kernel", "output_kernel", "plus_products", "queries_kernel", "sums_kernel", "times"]


@triton.jit
def _of_head(base, which, WIDTH: tl.constexpr, VALUES: tl.constexpr):
    """Load the matrix of a head, (WIDTH, VALUES)."""
    i, o = tl.arange(0, WIDTH), tl.arange(0, VALUES)
    return tl.load(base + (which * WIDTH + i[:, None]) * VALUES + o[None, :])


@triton.jit
def times(tokens, small, PARTS: tl.constexpr):
    """Return tokens · small, with small in float32."""
    if PARTS:
        high, low = two_parts(small)
        found = tl.dot(tokens, low)
        found = tl.dot(tokens, high, found)
    else:
        found = tl.dot(tokens.to(tl.float32), small, input_precision="tf32x3")
    return found


@triton.jit
def plus_products(x, z, acc, PARTS: tl.constexpr):
    """Return acc + xᵀ z over a block of tokens."""
    if PARTS:
        acc = tl.dot(tl.trans(x), z, acc)
    else:
        acc = tl.dot(tl.trans(x.to(tl.float32)), z.to(tl.float32), acc, input_precision="tf32x3")
    return acc


@triton.jit
def _add_up(acc, small, parts, counters, which, factor, WIDTH: tl.constexpr, VALUES: tl.constexpr):
    """Finish a program that has a share of a head's sum: the last of these programs adds up the shares."""
    share, shares, matrices = tl.program_id(0), tl.num_programs(0), tl.num_programs(1)
    i, o = tl.arange(0, WIDTH), tl.arange(0, VALUES)
    at = (which * WIDTH + i[:, None]) * VALUES + o[None, :]
    if shares == 1:
        tl.store(small + at, factor * acc)
    else:
        part = ((share * matrices + which) * WIDTH + i[:, None]) * VALUES + o[None, :]
        tl.store(parts + part, acc)
        if is_last(counters + which, shares):
            total = added_shares(parts, which, matrices, i, shares, WIDTH, VALUES)
            tl.store(small + at, factor * total)
            tl.store(counters + which, 0)


@triton.jit
def sums_kernel(
    y, v, small, parts, counters,
    m, heads, width, values, each, factor, yb, yh, yn, vb, vh, vn,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    share, which = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = which // heads, which % heads
    y += b * yb + h * yh
    v += b * vb + h * vh
    acc = tl.zeros((WIDTH, VALUES), dtype=tl.float32)
    first = share * each
    last = tl.minimum(m, first + each)
    for start in range(first, last, BLOCK):
        r = start + tl.arange(0, BLOCK)
        yt = rows_of(y, r, r < last, yn, width, WIDTH)
        vt = rows_of(v, r, r < last, vn, values, VALUES)
        acc = plus_products(yt, vt, acc, PARTS)
    _add_up(acc, small, parts, counters, which, factor, WIDTH, VALUES)


@triton.jit
def output_kernel(
    x, small, out,
    n, heads, width, values, xb, xh, xn,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1).to(tl.int64)
    b, h = which // heads, which % heads
    r, o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, VALUES)
    xt = rows_of(x + b * xb + h * xh, r, r < n, xn, width, WIDTH)
    found = times(xt, _of_head(small, which, WIDTH, VALUES), PARTS)
    at = out + (which * n + r[:, None]) * values + o[None, :]
    tl.store(at, found.to(out.dtype.element_ty), mask=(r < n)[:, None] & (o < values)[None, :])


@triton.jit
def queries_kernel(
    x, g, small, pulls, parts, counters, dx,
    n, heads, width, values, each, factor, xb, xh, xn, gb, gh, gn,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    share, which = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = which // heads, which % heads
    x += b * xb + h * xh
    g += b * gb + h * gh
    c = tl.arange(0, WIDTH)
    transposed = tl.trans(_of_head(small, which, WIDTH, VALUES))
    acc = tl.zeros((WIDTH, VALUES), dtype=tl.float32)
    first = share * each
    last = tl.minimum(n, first + each)
    for start in range(first, last, BLOCK):
        r = start + tl.arange(0, BLOCK)
        xt = rows_of(x, r, r < last, xn, width, WIDTH)
        gt = rows_of(g, r, r < last, gn, values, VALUES)
        found = times(gt, transposed, PARTS)
        at = dx + (which * n + r[:, None]) * width + c[None, :]
        tl.store(at, found.to(dx.dtype.element_ty), mask=(r < last)[:, None] & (c < width)[None, :])
        acc = plus_products(xt, gt, acc, PARTS)
    _add_up(acc, pulls, parts, counters, which, factor, WIDTH, VALUES)


@triton.jit
def keys_kernel(
    y, v, pulls, dy, dv,
    m, heads, width, values, yb, yh, yn, vb, vh, vn,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1).to(tl.int64)
    b, h = which // heads, which % heads
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c, o = tl.arange(0, WIDTH), tl.arange(0, VALUES)
    yt = rows_of(y + b * yb + h * yh, r, r < m, yn, width, WIDTH)
    vt = rows_of(v + b * vb + h * vh, r, r < m, vn, values, VALUES)
    pull = _of_head(pulls, which, WIDTH, VALUES)
    of_keys = times(vt, tl.trans(pull), PARTS)
    at = dy + (which * m + r[:, None]) * width + c[None, :]
    tl.store(at, of_keys.to(dy.dtype.element_ty), mask=(r < m)[:, None] & (c < width)[None, :])
    of_values = times(yt, pull, PARTS)
    at = dv + (which * m + r[:, None]) * values + o[None, :]
    tl.store(at, of_values.to(dv.dtype.element_ty), mask=(r < m)[:, None] & (o < values)[None, :])
