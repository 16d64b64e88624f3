"""Products of matrices held as pairs of float16: 22 bits in all, as good as float32 and several times as fast as three
TF32 products.

    x, power = unit(x)                    # divided by a power of two, so that all entries are within ±1; and that power
    store_pair(at, x, SIDE)               # a large matrix in memory, which only its own program reads and writes
    y = product(at, other, SIDE, False, False)

Entries must be within float16's range, and small ones lose digits next to large ones: so each matrix is first scaled by
its largest entry, a narrow one column by column. Products are loops over a few columns: written out in full, they would
need more matrix descriptors than the GPU has registers for.
"""

import triton
import triton.language as tl

__all__ = [
    "load_pair",
    "load_sum",
    "plus_outer",
    "product",
    "store_pair",
    "symmetric",
    "times",
    "unit",
    "unit_columns",
]

STEP = tl.constexpr(32)  # terms of a product's sum at a time
SMALLEST = tl.constexpr(1e-36)  # anything smaller does not get a scale of its own
HIGHEST = tl.constexpr(126.0)  # exponent: the reciprocal is not subnormal


@triton.jit
def _power(largest):
    return tl.exp2(tl.minimum(tl.ceil(tl.log2(tl.maximum(largest, SMALLEST))), HIGHEST))


@triton.jit
def unit(x):
    """Return x divided by a power of two, so that all entries are within ±1; and that power."""
    power = _power(tl.max(tl.max(tl.abs(x), axis=1), axis=0))
    return x / power, power


@triton.jit
def unit_columns(x):
    """Return the same for each column by itself, so that none loses digits to a larger one."""
    power = _power(tl.max(tl.abs(x), axis=0))
    return x / power[None, :], power


@triton.jit
def _pair(x):
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _dot(a_high, a_low, b_high, b_low, acc):
    """Return acc + a · b for pairs, without the product of the two low parts."""
    acc = tl.dot(a_low, b_high, acc)
    acc = tl.dot(a_high, b_low, acc)
    return tl.dot(a_high, b_high, acc)


@triton.jit
def times(a_high, a_low, b, SIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Return a · b for a pair a, and b in float32 within float16's range."""
    b_high, b_low = _pair(b)
    return _dot(a_high, a_low, b_high, b_low, tl.zeros((SIDE, WIDTH), dtype=tl.float32))


@triton.jit
def plus_outer(a, b, acc):
    """Return acc + a · bᵀ, both in float32 within float16's range."""
    a_high, a_low = _pair(a)
    b_high, b_low = _pair(b)
    return _dot(a_high, a_low, tl.trans(b_high), tl.trans(b_low), acc)


@triton.jit
def product(a, b, SIDE: tl.constexpr, A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr):
    """Return a · b for pairs in memory, or for their transposes, a few columns and rows at a time."""
    tl.debug_barrier()  # all threads must have written what is read here
    i, k = tl.arange(0, SIDE), tl.arange(0, STEP)
    acc = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for start in range(0, SIDE, STEP):
        along, across = i[:, None] * SIDE + (start + k)[None, :], (start + k)[:, None] * SIDE + i[None, :]
        if A_TRANSPOSED:
            a_high, a_low = tl.trans(tl.load(a + across)), tl.trans(tl.load(a + SIDE * SIDE + across))
        else:
            a_high, a_low = tl.load(a + along), tl.load(a + SIDE * SIDE + along)
        if B_TRANSPOSED:
            b_high, b_low = tl.trans(tl.load(b + along)), tl.trans(tl.load(b + SIDE * SIDE + along))
        else:
            b_high, b_low = tl.load(b + across), tl.load(b + SIDE * SIDE + across)
        acc = _dot(a_high, a_low, b_high, b_low, acc)
    return acc


@triton.jit
def symmetric(x):
    return 0.5 * (x + tl.trans(x))


@triton.jit
def load_pair(at, SIDE: tl.constexpr):
    i = tl.arange(0, SIDE)
    places = i[:, None] * SIDE + i[None, :]
    return tl.load(at + places), tl.load(at + SIDE * SIDE + places)


@triton.jit
def load_sum(at, SIDE: tl.constexpr):
    """Return the sum of a pair in memory, in float32."""
    high, low = load_pair(at, SIDE)
    return high.to(tl.float32) + low.to(tl.float32)


@triton.jit
def store_pair(at, x, SIDE: tl.constexpr):
    tl.debug_barrier()  # all threads must have read what is overwritten here
    i = tl.arange(0, SIDE)
    places = i[:, None] * SIDE + i[None, :]
    high, low = _pair(x)
    tl.store(at + places, high)
    tl.store(at + SIDE * SIDE + places, low)
