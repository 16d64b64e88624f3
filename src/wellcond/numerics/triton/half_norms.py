"""Half the squared norms of queries and keys, in units of the exponent, computed once for both sides and both passes.

x_half, y_half = half_norms(x, y, keep, scale=s)
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, layout
from .tiles import ceil_div, counting, keep_strides, packed, padded, rows_of

__all__ = ["BLOCK", "half_norms", "half_norms_kernel"]

BLOCK = 128  # tokens per program


@triton.jit
def half_norms_kernel(
    x, y, keep, x_out, y_out, n, m, heads, width, factor, xb, xh, xn, yb, yh, yn, kb, kh,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_KEEP: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1).to(tl.int64)
    b, h = which // heads, which % heads
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(2) == 0:
        counts = counting(r, m, keep + b * kb + h * kh, HAS_KEEP)
        wide = rows_of(y + b * yb + h * yh, r, counts, yn, width, WIDTH).to(tl.float32)
        half = tl.where(counts, tl.sum(wide * wide, axis=1) * (0.5 * factor), float("inf"))
        tl.store(y_out + which * m + r, half, mask=r < m)
    else:
        wide = rows_of(x + b * xb + h * xh, r, r < n, xn, width, WIDTH).to(tl.float32)
        tl.store(x_out + which * n + r, tl.sum(wide * wide, axis=1) * (0.5 * factor), mask=r < n)


def half_norms(x: Tensor, y: Tensor, keep: Tensor | None = None, *, scale: float) -> tuple[Tensor, Tensor]:
    """Return scale · log₂e · ‖·‖²/2 of x (b, h, n, p) and y (b, h, m, p): (b, h, n) and (b, h, m) float32.

    Infinite for a token of y that `keep` (b, h, m) leaves out.
    """
    x, y = packed(x), packed(y)
    (b, h, n, p), m = x.shape, y.shape[2]
    of_x = torch.empty(b, h, n, dtype=torch.float32, device=x.device)
    of_y = torch.empty(b, h, m, dtype=torch.float32, device=x.device)
    launch(
        half_norms_kernel,
        (ceil_div(max(n, m), BLOCK), b * h, 2),
        layout(x, y, keep),
        (
            x, y, x if keep is None else keep, of_x, of_y, n, m, h, p, scale * math.log2(math.e),
            *x.stride()[:3], *y.stride()[:3], *keep_strides(keep),
        ),
        WIDTH=padded(p), BLOCK=BLOCK, HAS_KEEP=keep is not None,
    )  # fmt: skip
    return of_x, of_y
