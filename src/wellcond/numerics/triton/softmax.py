"""Softmax attention with dropout of its weights and a mask of keys, and its gradient, as Triton kernels.

    out, lse = forward(q, k, v, keep, ends, seed, dropout_p=0.1, scale=s)     # softmax(s QKᵀ) V, log₂ of the row sums
    dq, dk, dv = backward(g, q, k, v, keep, ends, seed, out, lse, dropout_p=0.1, scale=s)

Each program has a block of rows and loops over the columns, tracking the largest logit so far in the forward pass.
`ends` is one more than the last kept key: what comes after it is never read. The backward pass has a kernel whose rows
are queries, which also stores Σ out · g of each row, and one whose rows are keys; both recompute the weights from
`lse`. Each program does its sums alone and in a fixed order, so that results are reproducible to the bit and do not
depend on the rest of the batch.

Whether a weight is dropped is decided by a hash of (seed, batch · heads, row, column), so that all three kernels agree,
with any tiles. The weights that stay are divided by 1 − p, once, at the end.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fastpaths import tokens_like
from .gaussian import precision_of
from .launch import dense, launch, layout
from .plans import padded_alike
from .tiles import LOG2E, ceil_div, counting, packed, rows_of, store_rows, tile_of

__all__ = [
    "attend_kernel",
    "backward",
    "bits_of_columns",
    "bits_of_rows",
    "drop_keys",
    "drop_threshold",
    "forward",
    "pull_keys_kernel",
    "pull_queries_kernel",
    "tiles_for",
]

Tiles = dict[str, int]


@triton.jit
def _mixed(x):
    """Return a 32-bit number, every bit of which depends on every bit of x: the last step of MurmurHash3."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def drop_keys(seed, which):
    """Return where the counters of a matrix's rows and columns begin."""
    number = tl.load(seed)
    low, high = number.to(tl.uint32), (number >> 32).to(tl.uint32)
    of_rows = _mixed(low ^ _mixed(high ^ _mixed(which.to(tl.uint32) + 1)))
    return of_rows, _mixed(of_rows + 0x165667B1)


@triton.jit
def bits_of_rows(rows, begin):
    return rows.to(tl.uint32) * 0x9E3779B9 + begin


@triton.jit
def bits_of_columns(cols, begin):
    return cols.to(tl.uint32) * 0x85157AF5 + begin


@triton.jit
def stays_at(one, other, threshold):
    """Return which weights stay: those whose hash, 32 bits with the upper ones well mixed, is below the threshold."""
    x = (one[:, None] ^ other[None, :]) * 0x85EBCA6B
    x = (x ^ (x >> 15)) * 0xC2B2AE35
    return x.to(tl.int32, bitcast=True) < threshold


@triton.jit
def _unknown_zero(number):
    """Return a zero unknown to the compiler, which would otherwise select among rounded numbers, a slower way."""
    return number * 0.0


@triton.jit
def attend_kernel(
    q, k, v, keep, ends, seed, out, lse,
    n, m, heads, width, values, threshold, scale, enlarge,
    qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on, mb, mh, eb, eh,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_KEEP: tl.constexpr, DROPS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1).to(tl.int64)
    b, h = which // heads, which % heads
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    k += b * kb + h * kh
    v += b * vb + h * vh
    keep += b * mb + h * mh
    qt = rows_of(q + b * qb + h * qh, rows, rows < n, qn, width, WIDTH)
    factor = scale * LOG2E
    last = m
    if HAS_KEEP:
        last = tl.load(ends + b * eb + h * eh)
    if DROPS:
        begin, begin_keys = drop_keys(seed, which)
        row_bits = bits_of_rows(rows, begin)
        nothing = _unknown_zero(scale)
    most = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    acc = tl.zeros((BM, VALUES), dtype=tl.float32)
    for start in range(0, last, BN):
        cols = start + tl.arange(0, BN)
        counts = cols < last if EVEN else counting(cols, last, keep, HAS_KEEP)
        kt = tile_of(k, cols, counts, kn, width, WIDTH, EVEN)
        logits = tl.dot(qt, tl.trans(kt), input_precision=PRECISION)  # not yet times the factor, which is positive
        if not EVEN:
            logits += tl.where(counts, 0.0, float("-inf"))[None, :]
        top = tl.maximum(most, tl.max(logits, axis=1))
        # Possibly no key of the tiles so far counts; minus infinity less itself would be NaN.
        base = (tl.where(top == float("-inf"), 0.0, top) if HAS_KEEP else top) * factor
        w = tl.exp2(logits * factor - base[:, None])
        shrink = tl.exp2(most * factor - base)
        total = total * shrink + tl.sum(w, axis=1)
        if DROPS:
            w = tl.where(stays_at(row_bits, bits_of_columns(cols, begin_keys), threshold), w, nothing)
        vt = tile_of(v, cols, counts, vn, values, VALUES, EVEN)
        acc = tl.dot(w.to(vt.dtype), vt, acc * shrink[:, None], input_precision=PRECISION)
        most = top
    if HAS_KEEP:  # zeros without any key; otherwise a total of zero gives NaN, as when all logits are −inf
        total = tl.where(last > 0, total, 1.0)
    acc = acc * (enlarge / total)[:, None]
    store_rows(out + b * ob + h * oh, rows, rows < n, on, values, acc, VALUES)
    tl.store(lse + which * n + rows, most * factor + tl.log2(total), mask=rows < n)


@triton.jit
def pull_queries_kernel(
    q, k, v, g, out, keep, ends, seed, lse, dq, delta,
    n, m, heads, width, values, threshold, scale, enlarge,
    qb, qh, qn, kb, kh, kn, vb, vh, vn, gb, gh, gn, ob, oh, on, db, dh, dn, mb, mh, eb, eh,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_KEEP: tl.constexpr, DROPS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1).to(tl.int64)
    b, h = which // heads, which % heads
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = rows < n
    k += b * kb + h * kh
    v += b * vb + h * vh
    keep += b * mb + h * mh
    qt = rows_of(q + b * qb + h * qh, rows, inside, qn, width, WIDTH)
    gt = rows_of(g + b * gb + h * gh, rows, inside, gn, values, VALUES)
    ot = rows_of(out + b * ob + h * oh, rows, inside, on, values, VALUES)
    # Weights are divided by 1 − p at the very end, so this is multiplied by it.
    row_delta = tl.sum(ot.to(tl.float32) * gt.to(tl.float32), axis=1) / enlarge
    tl.store(delta + which * n + rows, row_delta, mask=inside)
    row_lse = tl.load(lse + which * n + rows, mask=inside, other=0.0)
    factor = scale * LOG2E
    last = m
    if HAS_KEEP:
        last = tl.load(ends + b * eb + h * eh)
    if DROPS:
        begin, begin_keys = drop_keys(seed, which)
        row_bits = bits_of_rows(rows, begin)
    acc = tl.zeros((BM, WIDTH), dtype=tl.float32)
    for start in range(0, last, BN):
        cols = start + tl.arange(0, BN)
        counts = cols < last if EVEN else counting(cols, last, keep, HAS_KEEP)
        kt = tile_of(k, cols, counts, kn, width, WIDTH, EVEN)
        logits = tl.dot(qt, tl.trans(kt), input_precision=PRECISION) * factor - row_lse[:, None]
        if not EVEN:
            logits += tl.where(counts, 0.0, float("-inf"))[None, :]
        w = tl.exp2(logits)
        vt = tile_of(v, cols, counts, vn, values, VALUES, EVEN)
        d = tl.dot(gt, tl.trans(vt), input_precision=PRECISION)
        if DROPS:
            d = tl.where(stays_at(row_bits, bits_of_columns(cols, begin_keys), threshold), d, 0.0)
        pulls = w * (d - row_delta[:, None])
        acc = tl.dot(pulls.to(kt.dtype), kt, acc, input_precision=PRECISION)
    store_rows(dq + b * db + h * dh, rows, inside, dn, width, acc * (scale * enlarge), WIDTH)


@triton.jit
def pull_keys_kernel(
    q, k, v, g, keep, ends, seed, lse, delta, dk, dv,
    n, m, heads, width, values, threshold, scale, enlarge,
    qb, qh, qn, kb, kh, kn, vb, vh, vn, gb, gh, gn, db, dh, dn, wb, wh, wn, mb, mh, eb, eh,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_KEEP: tl.constexpr, DROPS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1).to(tl.int64)
    b, h = which // heads, which % heads
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    q += b * qb + h * qh
    g += b * gb + h * gh
    lse += which * n
    delta += which * n
    last = n
    inside = rows < m
    if HAS_KEEP:
        end = tl.load(ends + b * eb + h * eh)
        inside = counting(rows, end, keep + b * mb + h * mh, HAS_KEEP)
        last = tl.where(tl.program_id(0) * BM < end, n, 0)
    kt = rows_of(k + b * kb + h * kh, rows, inside, kn, width, WIDTH)
    vt = rows_of(v + b * vb + h * vh, rows, inside, vn, values, VALUES)
    factor = scale * LOG2E
    if DROPS:
        begin, begin_keys = drop_keys(seed, which)
        key_bits = bits_of_columns(rows, begin_keys)
        nothing = _unknown_zero(scale)
    acc_k = tl.zeros((BM, WIDTH), dtype=tl.float32)
    acc_v = tl.zeros((BM, VALUES), dtype=tl.float32)
    for start in range(0, last, BN):
        cols = start + tl.arange(0, BN)
        counts = cols < n
        qt = tile_of(q, cols, counts, qn, width, WIDTH, EVEN)
        col_lse = tl.load(lse + cols) if EVEN else tl.load(lse + cols, mask=counts, other=float("inf"))
        w = tl.exp2(tl.dot(kt, tl.trans(qt), input_precision=PRECISION) * factor - col_lse[None, :])
        gt = tile_of(g, cols, counts, gn, values, VALUES, EVEN)
        d = tl.dot(vt, tl.trans(gt), input_precision=PRECISION)
        kept = w
        if DROPS:
            stays = stays_at(key_bits, bits_of_rows(cols, begin), threshold)
            kept = tl.where(stays, w, nothing)
            d = tl.where(stays, d, 0.0)
        acc_v = tl.dot(kept.to(gt.dtype), gt, acc_v, input_precision=PRECISION)
        col_delta = tl.load(delta + cols) if EVEN else tl.load(delta + cols, mask=counts, other=0.0)
        pulls = w * (d - col_delta[None, :])
        acc_k = tl.dot(pulls.to(qt.dtype), qt, acc_k, input_precision=PRECISION)
    if HAS_KEEP:
        acc_k = tl.where(inside[:, None], acc_k, 0.0)
        acc_v = tl.where(inside[:, None], acc_v, 0.0)
    store_rows(dk + b * db + h * dh, rows, rows < m, dn, width, acc_k * (scale * enlarge), WIDTH)
    store_rows(dv + b * wb + h * wh, rows, rows < m, wn, values, acc_v * enlarge, VALUES)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    ends: Tensor | None,
    seed: Tensor | None,
    *,
    dropout_p: float,
    scale: float,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """Return attention and log₂ of its sums of exponentials.

    Shapes are (b, h, n, p), (b, h, m, p), (b, h, m, c) → (b, h, n, c) and (b, h, n).

    Args:
        keep: bool, (b or 1, h or 1, m), dense along the last dimension; needs its `ends`, int32, (b or 1, h or 1).
        seed: one int64, if dropout_p > 0.
        scale: positive.
        tiles: BM, BN, num_warps, num_stages, in place of `tiles_for`.
    """
    query, key, value = packed(query), packed(key), packed(value)
    (b, h, n, p), (m, c) = query.shape, value.shape[2:]
    out = tokens_like(value, n)
    lse = torch.empty(b, h, n, dtype=torch.float32, device=query.device)
    tiles = tiles or tiles_for("forward", p, c, value.dtype)
    launch(
        attend_kernel,
        (ceil_div(n, tiles["BM"]), b * h),
        layout(query, key, value, keep, ends, seed, out, lse),
        (
            query, key, value, *_given(query, keep, ends, seed), out, lse, n, m, h, p, c, *_numbers(dropout_p, scale),
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3],
            *_strides(keep), *_strides(ends),
        ),
        **_constants(p, c, keep, seed, tiles, columns=m, precision=precision_of(query, value)),
    )  # fmt: skip
    return out, lse


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    ends: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    dropout_p: float,
    scale: float,
    tiles: tuple[Tiles | None, Tiles | None] = (None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) from the gradient of `out`, (b, h, n, c); `tiles` for queries as rows, then for keys."""
    query, key, value, grad, out = packed(query), packed(key), packed(value), packed(grad), packed(out)
    lse = dense(lse)  # hooks may have moved saved tensors
    (b, h, n, p), (m, c) = query.shape, value.shape[2:]
    dq, dk, dv = tokens_like(query, n), tokens_like(key, m), tokens_like(value, m)
    delta = torch.empty_like(lse)
    given = _given(query, keep, ends, seed)
    numbers = (n, m, h, p, c, *_numbers(dropout_p, scale))
    of_tokens = [stride for t in (query, key, value, grad) for stride in t.stride()[:3]]
    of_masks = (*_strides(keep), *_strides(ends))
    of_layout = layout(query, key, value, grad, keep, ends, seed, out, lse)
    precision = precision_of(query, value)
    by_query = tiles[0] or tiles_for("queries", p, c, value.dtype)
    by_key = tiles[1] or tiles_for("keys", p, c, value.dtype)
    launch(
        pull_queries_kernel,
        (ceil_div(n, by_query["BM"]), b * h),
        of_layout,
        (
            query, key, value, grad, out, *given, lse, dq, delta, *numbers,
            *of_tokens, *out.stride()[:3], *dq.stride()[:3], *of_masks,
        ),
        **_constants(p, c, keep, seed, by_query, columns=m, precision=precision),
    )  # fmt: skip
    launch(
        pull_keys_kernel,
        (ceil_div(m, by_key["BM"]), b * h),
        of_layout,
        (
            query, key, value, grad, *given, lse, delta, dk, dv, *numbers,
            *of_tokens, *dk.stride()[:3], *dv.stride()[:3], *of_masks,
        ),
        **_constants(p, c, keep, seed, by_key, columns=n, precision=precision, masked_columns=False),
    )  # fmt: skip
    return dq, dk, dv


def tiles_for(kind: str, p: int, c: int, dtype: torch.dtype) -> Tiles:
    """Return, for the kernel "forward", "queries" or "keys", the best tiles tried on an H200, with heads of 32."""
    narrow = padded_alike(p, c) * dtype.itemsize <= 64
    columns = {"forward": 64, "queries": 128, "keys": 32}[kind] if narrow else 64
    return {"BM": 64, "BN": columns, "num_warps": 4, "num_stages": 3}


def _constants(
    p: int,
    c: int,
    keep: Tensor | None,
    seed: Tensor | None,
    tiles: Tiles,
    *,
    columns: int,
    precision: str,
    masked_columns: bool = True,
) -> dict[str, int | str]:
    width = padded_alike(p, c)
    whole = columns % tiles["BN"] == 0 and p == c == width
    return {
        "WIDTH": width, "VALUES": width, "BM": tiles["BM"], "BN": tiles["BN"],
        "HAS_KEEP": keep is not None, "DROPS": seed is not None,
        "EVEN": whole and not (masked_columns and keep is not None), "PRECISION": precision,
        "num_warps": tiles["num_warps"], "num_stages": tiles["num_stages"],
    }  # fmt: skip


def _given(stand_in: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    return [stand_in if t is None else t for t in tensors]


def _strides(mask: Tensor | None) -> tuple[int, int]:
    """Return a mask's strides over samples and heads; zero where one serves all."""
    if mask is None:
        return 0, 0
    return mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(1) if mask.shape[1] > 1 else 0


def _numbers(dropout_p: float, scale: float) -> tuple[int, float, float]:
    """Return the threshold of `drop_threshold`, the scale, and 1 / (1 − p)."""
    return drop_threshold(dropout_p), float(scale), 1 / (1 - dropout_p)


def drop_threshold(dropout_p: float) -> int:
    """Return the threshold below which a hash, as a signed number, lets its weight stay.

    It is odd and never 1: Triton compiles separate kernels for 1 and for multiples of 16.
    """
    return min(2**31 - 1, round((1 - dropout_p) * 2**32) - 2**31) | 3
