"""The long sides of landmark attention: tokens against a few landmarks, all of which a program holds at once.

With κ(x, l) = exp(−scale/2 · ‖x − l‖²), L the landmarks (d ≤ 128) and n tokens:

    landmark_sums      U = κ(L, K) V                  partial sums over shares of the keys; it also collects landmarks
    landmark_output    out = κ(Q, L) Y
    landmark_pull      for tokens x with vectors z and the landmarks' vectors s, f = Σ_ij κ(x_i, l_j) z_i · s_j:
                       ∂f/∂x, Σ_j κ(x_i, l_j) s_j or partial sums of Σ_i κ(x_i, l_j) z_i, partial sums of ∂f/∂L

Landmarks are collected once into a dense, padded buffer, with half of their squared norms in units of the exponent:
where there is none that is infinite, and every weight zero. Partial sums are added up later in a fixed order, so that
results repeat to the bit.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gaussian import LOG2E, _columns_of, _counting, _padded, _rows_of
from .launch import launch, layout

__all__ = ["Landmarks", "landmark_output", "landmark_pull", "landmark_sums"]

PROGRAMS = 264  # two for each multiprocessor of a large GPU
MOST_SHARES = 64  # whose sums one program adds up


class Landmarks(NamedTuple):
    """Of b · h matrices, padded to a power of two: side ≥ d landmarks, of width ≥ p."""

    rows: Tensor
    """(b · h, side, width) float32, exact copies of the tokens."""
    halves: Tensor
    """(b · h, side) float32: scale · log₂e · ‖l‖²/2, infinite where there is no landmark."""


@triton.jit
def _token_weights(xt, lt, halves, counts, factor, PRECISION: tl.constexpr):
    """κ(x_i, l_j), (tokens, landmarks), for tokens (rows) that count."""
    wide = xt.to(tl.float32)
    x_half = tl.where(counts, tl.sum(wide * wide, axis=1) * (0.5 * factor), float("inf"))
    exponent = tl.dot(xt, lt.to(xt.dtype), input_precision=PRECISION) * factor
    return tl.exp2(tl.minimum(exponent - x_half[:, None] - halves[None, :], 0.0))


@triton.jit
def _sums_kernel(
    x, y, v, positions, valid, keep, rows_out, halves_out, parts,
    m, heads, d, split, width, values, each, scale,
    xb, xh, xn, yb, yh, yn, vb, vh, vn, pb, ab, ah, kb, kh,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BN: tl.constexpr, GATHER: tl.constexpr,
    HAS_VALID: tl.constexpr, HAS_KEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    share, which = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = which // heads, which % heads
    x += b * xb + h * xh
    y += b * yb + h * yh
    v += b * vb + h * vh
    keep += b * kb + h * kh
    i = tl.arange(0, SIDE)
    there = i < d
    if GATHER:  # landmarks are tokens: the first `split` of x, the others of y
        at = tl.load(positions + b * pb + i, mask=there, other=0)
        rows = _rows_of(x, at, i < split, xn, width, WIDTH)
        rows += _rows_of(y, at, there & (i >= split), yn, width, WIDTH)
    else:
        rows = _rows_of(x, i, there, xn, width, WIDTH)
    if HAS_VALID:
        there = there & (tl.load(valid + b * ab + h * ah + i, mask=there, other=0) != 0)
    wide = rows.to(tl.float32)
    factor = scale * LOG2E
    halves = tl.where(there, tl.sum(wide * wide, axis=1) * (0.5 * factor), float("inf"))
    if share == 0:
        c = tl.arange(0, WIDTH)
        tl.store(rows_out + (which * SIDE + i[:, None]) * WIDTH + c[None, :], wide)
        tl.store(halves_out + which * SIDE + i, halves)
    acc = tl.zeros((SIDE, VALUES), dtype=tl.float32)
    first = share * each
    last = tl.minimum(m, first + each)
    for start in range(first, last, BN):
        cols = start + tl.arange(0, BN)
        counts = _counting(cols, last, keep, HAS_KEEP)
        yt = _columns_of(y, cols, counts, yn, width, WIDTH)
        narrow = yt.to(tl.float32)
        y_half = tl.where(counts, tl.sum(narrow * narrow, axis=0) * (0.5 * factor), float("inf"))
        exponent = tl.dot(rows, yt, input_precision=PRECISION) * factor - halves[:, None] - y_half[None, :]
        weights = tl.exp2(tl.minimum(exponent, 0.0))
        # What is solved with these sums magnifies errors: weights stay in TF32 at least.
        vt = _rows_of(v, cols, counts, vn, values, VALUES).to(tl.float32)
        acc = tl.dot(weights, vt, acc, input_precision=PRECISION)
    c = tl.arange(0, VALUES)
    at = ((share * tl.num_programs(1) + which) * SIDE + i[:, None]) * VALUES + c[None, :]
    tl.store(parts + at, acc)


@triton.jit
def _output_kernel(
    x, rows, halves, solved, out,
    n, heads, width, values, scale, xb, xh, xn,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1).to(tl.int64)
    x += (which // heads) * xb + (which % heads) * xh
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    i, c, o = tl.arange(0, SIDE), tl.arange(0, WIDTH), tl.arange(0, VALUES)
    xt = _rows_of(x, r, r < n, xn, width, WIDTH)
    lt = tl.load(rows + (which * SIDE + i[None, :]) * WIDTH + c[:, None])
    weights = _token_weights(xt, lt, tl.load(halves + which * SIDE + i), r < n, scale * LOG2E, PRECISION)
    y = tl.load(solved + (which * SIDE + i[:, None]) * VALUES + o[None, :])
    found = tl.dot(weights, y, input_precision="tf32x3")  # of large terms that cancel
    at = out + (which * n + r[:, None]) * values + o[None, :]
    tl.store(at, found.to(out.dtype.element_ty), mask=(r < n)[:, None] & (o < values)[None, :])


@triton.jit
def _pull_kernel(
    x, z, keep, rows, halves, s, dx, out, parts_s, parts_l,
    n, heads, width, values, each, scale,
    xb, xh, xn, zb, zh, zn, kb, kh,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BM: tl.constexpr,
    HAS_KEEP: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    share, which = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = which // heads, which % heads
    x += b * xb + h * xh
    z += b * zb + h * zh
    keep += b * kb + h * kh
    i, c, o = tl.arange(0, SIDE), tl.arange(0, WIDTH), tl.arange(0, VALUES)
    factor = scale * LOG2E
    landmarks = tl.load(rows + (which * SIDE + i[:, None]) * WIDTH + c[None, :])
    lt = tl.trans(landmarks)
    half = tl.load(halves + which * SIDE + i)
    sides = tl.load(s + (which * SIDE + i[:, None]) * VALUES + o[None, :])
    st = tl.trans(sides)
    acc_s = tl.zeros((SIDE, VALUES), dtype=tl.float32)
    acc_l = tl.zeros((SIDE, WIDTH), dtype=tl.float32)
    total = tl.zeros((SIDE,), dtype=tl.float32)
    first = share * each
    last = tl.minimum(n, first + each)
    for start in range(first, last, BM):
        r = start + tl.arange(0, BM)
        inside = r < last
        counts = _counting(r, last, keep, HAS_KEEP)
        xt = _rows_of(x, r, counts, xn, width, WIDTH)
        zt = _rows_of(z, r, counts, zn, values, VALUES).to(tl.float32)
        weights = _token_weights(xt, lt, half, counts, factor, PRECISION)
        pulls = weights * tl.dot(zt, st, input_precision="tf32x3")
        wide = xt.to(tl.float32)
        found = scale * (tl.dot(pulls, landmarks, input_precision="tf32x3") - tl.sum(pulls, axis=1)[:, None] * wide)
        mask = inside[:, None] & (c < width)[None, :]
        tl.store(dx + (which * n + r[:, None]) * width + c[None, :], found.to(dx.dtype.element_ty), mask=mask)
        if PRODUCT:
            found = tl.dot(weights, sides, input_precision="tf32x3")
            mask = inside[:, None] & (o < values)[None, :]
            tl.store(out + (which * n + r[:, None]) * values + o[None, :], found.to(out.dtype.element_ty), mask=mask)
        else:
            acc_s = tl.dot(tl.trans(weights), zt, acc_s, input_precision=PRECISION)
        acc_l = tl.dot(tl.trans(pulls), wide, acc_l, input_precision=PRECISION)
        total += tl.sum(pulls, axis=0)
    line = (share * tl.num_programs(1) + which) * SIDE + i[:, None]
    if not PRODUCT:
        tl.store(parts_s + line * VALUES + o[None, :], acc_s)
    tl.store(parts_l + line * WIDTH + c[None, :], scale * (acc_l - total[:, None] * landmarks))


def landmark_sums(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    positions: Tensor | None,
    split: int,
    valid: Tensor | None,
    keep: Tensor | None,
    *,
    scale: float,
) -> tuple[Landmarks, Tensor]:
    """Landmarks, and partial sums of κ(L, y) v: (shares, b · h, side, padded c) float32.

    The landmarks are the rows of x (b, h, d, p), of which `valid` (b, h, d) counts; or, where `positions` (1 or b, d)
    are given, tokens: the first `split` of x, the others of y.
    """
    (b, h, m, p), c = y.shape, v.shape[3]
    d = x.shape[2] if positions is None else positions.shape[1]
    side, width, values = max(32, triton.next_power_of_2(d)), _padded(p), _padded(c)
    block = 64 if max(width, values) <= 64 else 32
    shares, each = _shares(m, b * h, block)
    rows = torch.empty(b * h, side, width, dtype=torch.float32, device=x.device)
    halves = torch.empty(b * h, side, dtype=torch.float32, device=x.device)
    parts = torch.empty(shares, b * h, side, values, dtype=torch.float32, device=x.device)
    launch(
        _sums_kernel,
        (shares, b * h),
        layout(x, y, v, positions, valid, keep),
        (
            x, y, v, y if positions is None else positions, y if valid is None else valid, y if keep is None else keep,
            rows, halves, parts, m, h, d, split, p, c, each, scale,
            *x.stride()[:3], *y.stride()[:3], *v.stride()[:3],
            0 if positions is None or len(positions) == 1 else d, *_strides(valid), *_strides(keep),
        ),
        SIDE=side, WIDTH=width, VALUES=values, BN=block, GATHER=positions is not None, HAS_VALID=valid is not None,
        HAS_KEEP=keep is not None, PRECISION=precision(x), num_warps=4 if side <= 64 else 8,
    )  # fmt: skip
    return Landmarks(rows, halves), parts


def landmark_output(x: Tensor, landmarks: Landmarks, solved: Tensor, values: int, *, scale: float) -> Tensor:
    """κ(x, L) Y: (b, h, n, p) and Y (b · h, side, padded values) → (b, h, n, values), in x's dtype."""
    b, h, n, p = x.shape
    side, width, padded = landmarks.rows.shape[1], landmarks.rows.shape[2], solved.shape[2]
    block = 64 if max(width, padded) <= 64 else 32
    out = torch.empty(b, h, n, values, dtype=x.dtype, device=x.device)
    launch(
        _output_kernel,
        (triton.cdiv(n, block), b * h),
        layout(x, solved),
        (x, landmarks.rows, landmarks.halves, solved, out, n, h, p, values, scale, *x.stride()[:3]),
        SIDE=side, WIDTH=width, VALUES=padded, BM=block, PRECISION=precision(x), num_warps=4,
    )  # fmt: skip
    return out


class Pulled(NamedTuple):
    tokens: Tensor
    """∂f/∂x, (b, h, n, p) in x's dtype."""
    product: Tensor | None
    """Σ_j κ(x_i, l_j) s_j, (b, h, n, c) in z's dtype, where asked for."""
    sums: Tensor
    """Else partial sums of Σ_i κ(x_i, l_j) z_i: (shares, b · h, side, padded c) float32."""
    landmarks: Tensor
    """Partial sums of ∂f/∂L: (shares, b · h, side, padded p) float32."""


def landmark_pull(
    x: Tensor, z: Tensor, landmarks: Landmarks, s: Tensor, keep: Tensor | None = None, *, scale: float, product: bool
) -> Pulled:
    """The derivatives of f = Σ_ij κ(x_i, l_j) z_i · s_j; x (b, h, n, p), z (b, h, n, c), s (b · h, side, padded c)."""
    (b, h, n, p), c = x.shape, z.shape[3]
    side, width, values = landmarks.rows.shape[1], landmarks.rows.shape[2], s.shape[2]
    block = 64 if max(width, values) <= 64 else 32
    shares, each = _shares(n, b * h, block)
    dx = torch.empty(b, h, n, p, dtype=x.dtype, device=x.device)
    out = torch.empty(b, h, n, c, dtype=z.dtype, device=x.device) if product else None
    parts_l = torch.empty(shares, b * h, side, width, dtype=torch.float32, device=x.device)
    parts_s = parts_l if product else torch.empty(shares, b * h, side, values, dtype=torch.float32, device=x.device)
    launch(
        _pull_kernel,
        (shares, b * h),
        layout(x, z, s, keep),
        (
            x, z, x if keep is None else keep, landmarks.rows, landmarks.halves, s, dx, dx if out is None else out,
            parts_s, parts_l, n, h, p, c, each, scale, *x.stride()[:3], *z.stride()[:3], *_strides(keep),
        ),
        SIDE=side, WIDTH=width, VALUES=values, BM=block, HAS_KEEP=keep is not None, PRODUCT=product,
        PRECISION=precision(x), num_warps=8,
    )  # fmt: skip
    return Pulled(dx, out, parts_s, parts_l)


def precision(x: Tensor) -> str:
    """Float32 tokens are multiplied as three TF32 parts; of those in half precision TF32 keeps every bit."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


def _shares(n: int, matrices: int, block: int) -> tuple[int, int]:
    """Into how many shares the tokens go, and how many are in each: a multiple of the block."""
    blocks = triton.cdiv(n, block)
    shares = max(1, min(MOST_SHARES, PROGRAMS // matrices, blocks // 2))
    each = triton.cdiv(blocks, shares) * block
    return triton.cdiv(n, each), each


def _strides(mask: Tensor | None) -> tuple[int, int]:
    return (0, 0) if mask is None else (mask.stride(0), mask.stride(1))
