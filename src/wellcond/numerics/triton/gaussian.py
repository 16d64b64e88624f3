"""The streaming Gaussian product and its pull-back as Triton kernels: fused twins of those in `numerics.gaussian`.

    out = stream(x, y, v, scale=s)                # Σ_j w_ij v_j,  w_ij = exp(−s/2 · ‖x_i − y_j‖²)
    dx, _ = pull(x, y, g, v, scale=s)             # s Σ_j w_ij (g_i · v_j)(y_j − x_i)

Each program has a block of rows and loops over the columns. Nothing is normalised, so there is no maximum to track, and
where there are few rows and many columns (landmarks against all tokens) the columns are divided among programs, whose
sums are added up afterwards: always in the same order, whatever the batch, so that results are reproducible to the bit.
Half the squared norms of the columns, in units of the exponent, are computed once, beforehand: infinite for a column
that does not count.

With a mask of keys, programs stop at the last key that is kept, `ends_of(keep)`: columns beyond it are skipped, and
where rows are keys, rows that are not kept are stored as zeros. What is skipped would have added zeros: no bit changes.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..constants import kept_constants
from .launch import launch, layout
from .tiles import LOG2E, ceil_div, counting, keep_strides, packed, padded, rows_of, tile_of

__all__ = [
    "HALF_NORMS_BLOCK",
    "NO_MASK",
    "ends_of",
    "grid_of",
    "half_norms",
    "half_norms_kernel",
    "is_even",
    "precision_of",
    "pull",
    "pull_kernel",
    "stream",
    "stream_kernel",
    "tiles_for",
]

FEW_ROWS, MANY_COLUMNS = 256, 1024  # landmarks against tokens: columns are then divided among programs
MOST_SHARES = 64
HALF_NORMS_BLOCK = 128  # tokens per program of half_norms_kernel
NO_MASK = (0, 0, 0, 0)  # the strides of a missing mask and of its ends


@triton.jit
def _weights(x, x_half, yt, y_half, rows, cols, factor, CAUSAL: tl.constexpr, PRECISION: tl.constexpr):
    """Return exp(−scale/2 · ‖x_i − y_j‖²); factor = scale · log₂e, and x_half = factor · ‖x_i‖²/2."""
    exponent = tl.dot(x, yt, input_precision=PRECISION) * factor - x_half[:, None] - y_half[None, :]
    # By default the minimum of NaN and 0 is 0: the weight would be 1, and the NaN would go unnoticed.
    w = tl.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL))
    if CAUSAL == 1:
        w = tl.where(cols[None, :] <= rows[:, None], w, 0.0)
    elif CAUSAL == -1:  # rows are keys here
        w = tl.where(cols[None, :] >= rows[:, None], w, 0.0)
    return w


@triton.jit
def _columns_to_visit(
    share, m, columns_each, end, BM: tl.constexpr, BN: tl.constexpr, KEEP: tl.constexpr, CAUSAL: tl.constexpr
):
    """Return the first column for this block of rows, and the one after the last. KEEP: 0 without a mask, 1 if columns
    are masked, 2 if rows are."""
    first = share * columns_each
    last = tl.minimum(m, first + columns_each)
    if CAUSAL == 1:
        last = tl.minimum(last, (tl.program_id(0) + 1) * BM)
    elif CAUSAL == -1:
        first = tl.maximum(first, (tl.program_id(0) * BM // BN) * BN)
    if KEEP == 1:
        last = tl.minimum(last, end)
    elif KEEP == 2:
        last = tl.where(tl.program_id(0) * BM < end, last, first)
    return first, last


@triton.jit
def stream_kernel(
    x, y, v, y_half, keep, ends, out,
    n, m, heads, width, values, columns_each, scale,
    xb, xh, xn, yb, yh, yn, vb, vh, vn, kb, kh, eb, eh,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    KEEP: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    share, which = tl.program_id(1), tl.program_id(2).to(tl.int64)
    b, h = which // heads, which % heads
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    x += b * xb + h * xh
    y += b * yb + h * yh
    v += b * vb + h * vh
    keep += b * kb + h * kh
    y_half += which * m
    inside = counting(rows, n, keep, KEEP == 2)
    xt = rows_of(x, rows, inside, xn, width, WIDTH)
    wide = xt.to(tl.float32)
    factor = scale * LOG2E
    x_half = tl.sum(wide * wide, axis=1) * (0.5 * factor)
    acc = tl.zeros((BM, VALUES), dtype=tl.float32)
    end = tl.load(ends + b * eb + h * eh) if KEEP else 0
    first, last = _columns_to_visit(share, m, columns_each, end, BM, BN, KEEP, CAUSAL)
    for start in range(first, last, BN):
        cols = start + tl.arange(0, BN)
        counts = cols < last if EVEN else counting(cols, last, keep, KEEP == 1)
        yr = tile_of(y, cols, counts, yn, width, WIDTH, EVEN)
        half = tl.load(y_half + cols) if EVEN else tl.load(y_half + cols, mask=cols < last, other=float("inf"))
        w = _weights(xt, x_half, tl.trans(yr), half, rows, cols, factor, CAUSAL, PRECISION)
        vt = tile_of(v, cols, counts, vn, values, VALUES, EVEN)
        acc = tl.dot(w.to(vt.dtype), vt, acc, input_precision=PRECISION)
    if KEEP == 2:
        acc = tl.where(inside[:, None], acc, 0.0)
    c = tl.arange(0, VALUES)
    at = ((share * tl.num_programs(2) + which) * n + rows[:, None]) * values + c[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(rows < n)[:, None] & (c < values)[None, :])


@triton.jit
def pull_kernel(
    x, y, g, v, y_half, keep, ends, dx, out,
    n, m, heads, width, values, columns_each, scale,
    xb, xh, xn, yb, yh, yn, gb, gh, gn, vb, vh, vn, kb, kh, eb, eh,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    KEEP: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    share, which = tl.program_id(1), tl.program_id(2).to(tl.int64)
    b, h = which // heads, which % heads
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    x += b * xb + h * xh
    y += b * yb + h * yh
    g += b * gb + h * gh
    v += b * vb + h * vh
    keep += b * kb + h * kh
    y_half += which * m
    inside = counting(rows, n, keep, KEEP == 2)
    xt = rows_of(x, rows, inside, xn, width, WIDTH)
    gt = rows_of(g, rows, inside, gn, values, VALUES)
    wide = xt.to(tl.float32)
    factor = scale * LOG2E
    x_half = tl.sum(wide * wide, axis=1) * (0.5 * factor)
    acc = tl.zeros((BM, WIDTH), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    acc_out = tl.zeros((BM, VALUES), dtype=tl.float32)
    end = tl.load(ends + b * eb + h * eh) if KEEP else 0
    first, last = _columns_to_visit(share, m, columns_each, end, BM, BN, KEEP, CAUSAL)
    for start in range(first, last, BN):
        cols = start + tl.arange(0, BN)
        counts = cols < last if EVEN else counting(cols, last, keep, KEEP == 1)
        yr = tile_of(y, cols, counts, yn, width, WIDTH, EVEN)
        half = tl.load(y_half + cols) if EVEN else tl.load(y_half + cols, mask=cols < last, other=float("inf"))
        w = _weights(xt, x_half, tl.trans(yr), half, rows, cols, factor, CAUSAL, PRECISION)
        vt = tile_of(v, cols, counts, vn, values, VALUES, EVEN)
        if PRODUCT:
            acc_out = tl.dot(w.to(vt.dtype), vt, acc_out, input_precision=PRECISION)
        pulls = (w * tl.dot(gt, tl.trans(vt).to(gt.dtype), input_precision=PRECISION)).to(yr.dtype)
        # Sum the rounded pulls, so that what all tokens have in common cancels in Σ pulls (y − x).
        total += tl.sum(pulls.to(tl.float32), axis=1)
        acc = tl.dot(pulls, yr, acc, input_precision=PRECISION)
    acc = scale * (acc - total[:, None] * wide)
    if KEEP == 2:
        acc = tl.where(inside[:, None], acc, 0.0)
        acc_out = tl.where(inside[:, None], acc_out, 0.0)
    c = tl.arange(0, WIDTH)
    line = (share * tl.num_programs(2) + which) * n + rows[:, None]
    tl.store(
        dx + line * width + c[None, :], acc.to(dx.dtype.element_ty), mask=(rows < n)[:, None] & (c < width)[None, :]
    )
    if PRODUCT:
        c = tl.arange(0, VALUES)
        mask = (rows < n)[:, None] & (c < values)[None, :]
        tl.store(out + line * values + c[None, :], acc_out.to(out.dtype.element_ty), mask=mask)


@kept_constants(64)
def _numbered(count: int, device: torch.device) -> Tensor:
    """Return 1, …, count, cached to save a launch per call."""
    return torch.arange(1, count + 1, dtype=torch.int32, device=device)


def ends_of(keep: Tensor) -> Tensor:
    """Return one more than the last key that a mask (b, h, m) keeps, or 0: (b, h) int32, expanded where the mask is."""
    b, h, m = keep.shape
    own = keep[: b if keep.stride(0) else 1, : h if keep.stride(1) else 1]
    return (own * _numbered(m, keep.device)).amax(-1).expand(b, h)


def stream(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    *,
    scale: float,
    keep: Tensor | None = None,
    ends: Tensor | None = None,
    of_rows: bool = False,
    causal: int = 0,
    y_half: Tensor | None = None,
) -> Tensor:
    """Return Σ_j w_ij v_j: (b, h, n, p), (b, h, m, p), (b, h, m, c) → (b, h, n, c), in v's dtype.

    Weights are rounded to v's dtype. `keep`: which columns count, (b, h, m); with `of_rows`, which rows do, (b, h, n),
    and the others give zeros. `ends`: those of `keep`, if known. `causal`: 1 for columns up to the row's index, −1 for
    those from it on. `y_half`: as returned by `half_norms`.
    """
    x, y, v = packed(x), packed(y), packed(v)
    (b, h, n, p), m, c = x.shape, y.shape[2], v.shape[3]
    tiles = tiles_for(p, c)
    rows, shares, each = grid_of(n, m, tiles)
    out = _buffer(shares, (b, h, n, c), v.dtype, x.device)
    of_columns = None if of_rows else keep
    y_half = half_norms(y, y, of_columns, scale=scale)[1] if y_half is None else y_half
    masks, strides, kind = _mask_arguments(x, keep, ends, of_rows)
    launch(
        stream_kernel,
        (rows, shares, b * h),
        (layout(x, y, v, *masks), out.dtype),
        (
            x, y, v, y_half, *masks, out, n, m, h, p, c, each, scale,
            *x.stride()[:3], *y.stride()[:3], *v.stride()[:3], *strides,
        ),
        WIDTH=padded(p), VALUES=padded(c), BM=tiles["BM"], BN=tiles["BN"], KEEP=kind, CAUSAL=causal,
        EVEN=is_even(y, v, of_columns, tiles), PRECISION=precision_of(x, v),
        num_warps=tiles["num_warps"], num_stages=tiles["num_stages"],
    )  # fmt: skip
    return added_shares(out, shares, v.dtype)


def pull(
    x: Tensor,
    y: Tensor,
    g: Tensor,
    v: Tensor,
    *,
    scale: float,
    keep: Tensor | None = None,
    ends: Tensor | None = None,
    of_rows: bool = False,
    causal: int = 0,
    product: bool = False,
    y_half: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return scale Σ_j w_ij (g_i · v_j)(y_j − x_i) in x's dtype and, with `product`, Σ_j w_ij v_j in v's.

    g is (b, h, n, c); everything else as for `stream`.
    """
    x, y, g, v = packed(x), packed(y), packed(g), packed(v)
    (b, h, n, p), m, c = x.shape, y.shape[2], v.shape[3]
    tiles = tiles_for(p, c, pulls=True)
    rows, shares, each = grid_of(n, m, tiles)
    dx = _buffer(shares, (b, h, n, p), x.dtype, x.device)
    out = _buffer(shares, (b, h, n, c), v.dtype, x.device) if product else dx
    of_columns = None if of_rows else keep
    y_half = half_norms(y, y, of_columns, scale=scale)[1] if y_half is None else y_half
    masks, strides, kind = _mask_arguments(x, keep, ends, of_rows)
    launch(
        pull_kernel,
        (rows, shares, b * h),
        (layout(x, y, g, v, *masks), dx.dtype, out.dtype),
        (
            x, y, g, v, y_half, *masks, dx, out, n, m, h, p, c, each, scale,
            *x.stride()[:3], *y.stride()[:3], *g.stride()[:3], *v.stride()[:3], *strides,
        ),
        WIDTH=padded(p), VALUES=padded(c), BM=tiles["BM"], BN=tiles["BN"], KEEP=kind, CAUSAL=causal,
        EVEN=is_even(y, v, of_columns, tiles), PRODUCT=product, PRECISION=precision_of(x, v),
        num_warps=tiles["num_warps"], num_stages=tiles["num_stages"],
    )  # fmt: skip
    return added_shares(dx, shares, x.dtype), added_shares(out, shares, v.dtype) if product else None


def _mask_arguments(
    x: Tensor, keep: Tensor | None, ends: Tensor | None, of_rows: bool
) -> tuple[tuple[Tensor, Tensor], tuple[int, ...], int]:
    """Return a kernel's arguments for a mask: the mask and its ends, their strides, and its kind."""
    if keep is None:
        return (x, x), NO_MASK, 0
    ends = ends_of(keep) if ends is None else ends
    return (keep, ends), (*keep_strides(keep), *ends.stride()), 2 if of_rows else 1


def is_even(y: Tensor, v: Tensor, keep: Tensor | None, tiles: dict[str, int]) -> bool:
    """Whether whole tiles cover the columns, so that nothing has to be masked; causal rows may still end early."""
    whole = y.shape[2] % tiles["BN"] == 0 and all(padded(t.shape[3]) == t.shape[3] for t in (y, v))
    return keep is None and whole


def tiles_for(p: int, c: int, *, pulls: bool = False) -> dict[str, int]:
    """Return the best tiles tried on an H200: larger ones spill registers in the pull-back with wide tokens."""
    widest = max(padded(p), padded(c))
    if widest <= 64:
        rows, columns = (128, 64) if not pulls else (64, 128) if widest <= 32 else (64, 64)
        return {"BM": rows, "BN": columns, "num_warps": 4, "num_stages": 3}
    return {"BM": 64, "BN": 32, "num_warps": 4 if widest <= 128 else 8, "num_stages": 2}


def grid_of(n: int, m: int, tiles: dict[str, int]) -> tuple[int, int, int]:
    """Return the numbers of row blocks, of shares of the columns, and of columns per share."""
    rows = ceil_div(n, tiles["BM"])
    blocks = ceil_div(m, tiles["BN"])
    shares = min(MOST_SHARES, blocks // 4) if n <= FEW_ROWS and m >= MANY_COLUMNS else 1
    each = ceil_div(blocks, shares) * tiles["BN"]
    return rows, ceil_div(m, each), each


def _buffer(shares: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate the result itself for a single share, else a sum in float32 for each."""
    if shares == 1:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty(shares, *shape, dtype=torch.float32, device=device)


def added_shares(buffer: Tensor, shares: int, dtype: torch.dtype) -> Tensor:
    return buffer if shares == 1 else buffer.sum(0).to(dtype)


def precision_of(x: Tensor, v: Tensor) -> str:
    """Return the precision of products: three TF32 parts for float32; TF32 keeps every bit of half precision."""
    return "tf32x3" if x.dtype == torch.float32 and v.dtype == torch.float32 else "tf32"


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
        (ceil_div(max(n, m), HALF_NORMS_BLOCK), b * h, 2),
        layout(x, y, keep),
        (
            x, y, x if keep is None else keep, of_x, of_y, n, m, h, p, scale * math.log2(math.e),
            *x.stride()[:3], *y.stride()[:3], *keep_strides(keep),
        ),
        WIDTH=padded(p), BLOCK=HALF_NORMS_BLOCK, HAS_KEEP=keep is not None,
    )  # fmt: skip
    return of_x, of_y
