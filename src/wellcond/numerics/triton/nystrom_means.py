"""Segments of tokens for Nyström attention: their means, and the way back.

    means_kernel     Q̃ and K̃: of all tokens of a segment the mean, dense, padded and float32
    finish_kernel    what the means of the queries are due, from all shares, goes to the tokens of their segments

Segment i of n tokens is [i·n//d, (i+1)·n//d): lengths differ by one at most. A program has a few short segments or one
long one, some tokens of each at a time.

Plain twin: `attention.landmarks.segment_means`.
"""

import triton
import triton.language as tl

from .landmark_solve import added_shares

__all__ = ["finish_kernel", "means_kernel", "segment_of"]


@triton.jit
def segment_of(r, n, d):
    """Which segment token r is in: i·n//d ≤ r just where i·n < (r + 1)·d."""
    return ((r + 1) * d - 1) // n


@triton.jit
def _bounds(i, n, d):
    """Where segment i begins and how long it is; nothing beyond the last."""
    begin = i * n // d
    return begin, tl.where(i < d, (i + 1) * n // d - begin, 0)


@triton.jit
def _store_means(
    x, out, which, n, heads, d, width, xb, xh, xn,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    x += (which // heads) * xb + (which % heads) * xh
    i, c = tl.program_id(0) * GROUP + tl.arange(0, GROUP), tl.arange(0, WIDTH)
    begin, length = _bounds(i, n, d)
    acc = tl.zeros((GROUP, WIDTH), dtype=tl.float32)
    for start in range(0, (n + d - 1) // d, TOGETHER):
        t = start + tl.arange(0, TOGETHER)
        inside = (t[None, :] < length[:, None])[:, :, None] & (c < width)[None, None, :]
        at = x + (begin[:, None] + t[None, :])[:, :, None] * xn + c[None, None, :]
        acc += tl.sum(tl.load(at, mask=inside, other=0.0).to(tl.float32), axis=1)
    mean = acc / tl.maximum(length, 1).to(tl.float32)[:, None]
    tl.store(out + (which * SIDE + i[:, None]) * WIDTH + c[None, :], mean)


@triton.jit
def means_kernel(
    query, key, space, to_keys, n, m, heads, d, width, qb, qh, qn, kb, kh, kn,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1).to(tl.int64)
    if tl.program_id(2) == 0:
        _store_means(query, space, which, n, heads, d, width, qb, qh, qn, SIDE, WIDTH, GROUP, TOGETHER)
    else:
        _store_means(key, space + to_keys, which, m, heads, d, width, kb, kh, kn, SIDE, WIDTH, GROUP, TOGETHER)


@triton.jit
def finish_kernel(
    scratch, to_due, to_parts, dx, shares, n, d, width,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """dx is dense."""
    which, matrices = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    i, c = tl.program_id(0) * GROUP + tl.arange(0, GROUP), tl.arange(0, WIDTH)
    begin, length = _bounds(i, n, d)
    due = tl.load(scratch + to_due + (which * SIDE + i[:, None]) * WIDTH + c[None, :])
    due += added_shares(scratch + to_parts, which, matrices, i, shares, SIDE, WIDTH)
    due = due / tl.maximum(length, 1).to(tl.float32)[:, None]
    for start in range(0, (n + d - 1) // d, TOGETHER):
        t = start + tl.arange(0, TOGETHER)
        inside = (t[None, :] < length[:, None])[:, :, None] & (c < width)[None, None, :]
        at = dx + (which * n + begin[:, None] + t[None, :])[:, :, None] * width + c[None, None, :]
        found = tl.load(at, mask=inside, other=0.0).to(tl.float32) + due[:, None, :]
        tl.store(at, found.to(dx.dtype.element_ty), mask=inside)
