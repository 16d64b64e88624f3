"""What kernels that loop over tokens have in common: reading a block of rows, which of them count, sizes.

All tensors are (b, h, n, p), dense along the last dimension, with any other strides; masks are (b, h, n).
"""

import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "LOG2E",
    "ceil_div",
    "counting",
    "keep_strides",
    "packed",
    "padded",
    "rows_of",
    "store_rows",
    "tile_of",
]

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def rows_of(base, rows, inside, stride, width, WIDTH: tl.constexpr):
    """Load (rows, WIDTH) of a matrix whose rows are `stride` apart, with zeros for rows that are not inside."""
    c = tl.arange(0, WIDTH)
    return tl.load(base + rows[:, None] * stride + c[None, :], mask=inside[:, None] & (c < width)[None, :], other=0.0)


@triton.jit
def tile_of(base, rows, counts, stride, width, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Load `rows_of`, zero for rows that do not count; EVEN: all count, nothing is padded, and whole tiles are read."""
    if EVEN:
        c = tl.arange(0, WIDTH)
        tile = tl.load(base + rows[:, None] * stride + c[None, :])
    else:
        tile = rows_of(base, rows, counts, stride, width, WIDTH)
    return tile


@triton.jit
def store_rows(base, rows, inside, stride, width, tile, WIDTH: tl.constexpr):
    """Store a tile where `rows_of` would read it, in the dtype of `base`."""
    c = tl.arange(0, WIDTH)
    at = base + rows[:, None] * stride + c[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=inside[:, None] & (c < width)[None, :])


@triton.jit
def counting(cols, last, keep, HAS_KEEP: tl.constexpr):
    counts = cols < last
    if HAS_KEEP:
        counts = counts & (tl.load(keep + cols, mask=counts, other=0) != 0)
    return counts


def packed(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def padded(width: int) -> int:
    """Round up to a power of two, at least 16; Triton's own function for this takes longer than a launch."""
    return max(16, 1 << (width - 1).bit_length())


def ceil_div(number: int, by: int) -> int:
    return -(-number // by)


def keep_strides(keep: Tensor | None) -> tuple[int, int]:
    if keep is None:
        return 0, 0
    assert keep.stride(-1) == 1 or keep.shape[-1] == 1
    return keep.stride(0), keep.stride(1)
