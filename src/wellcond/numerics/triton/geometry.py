"""Where a token's values are in memory: kernels read tokens from images and write them back without copying them out.

Value c of token t of an image (channels, height, width) cut into ph × pw patches is at `token_offset(t) +
value_offset(c)`. A plain (n, d) matrix is an image of one channel whose patches are whole rows: `(cols, height,
width, ph, pw) = (1, n, d, 1, d)`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

__all__ = ["Geometry", "token_offset", "value_offset"]


class Geometry(NamedTuple):
    """The layout of tokens in images, all compile-time constants of a kernel."""

    cols: int
    height: int
    width: int
    ph: int
    pw: int

    @classmethod
    def of_images(cls, height: int, width: int, patch: tuple[int, int]) -> "Geometry":
        return cls(width // patch[1], height, width, *patch)

    @classmethod
    def of_matrices(cls, n: int, d: int) -> "Geometry":
        return cls(1, n, d, 1, d)


@triton.jit
def token_offset(token, COLS: tl.constexpr, WIDTH: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr):
    return (token // COLS) * (PH * WIDTH) + (token % COLS) * PW


@triton.jit
def value_offset(value, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr):
    channel = value // (PH * PW)
    inner = value % (PH * PW)
    return channel * (HEIGHT * WIDTH) + (inner // PW) * WIDTH + inner % PW
