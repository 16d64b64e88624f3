"""Segments of tokens for Nyström attention: their means, and the gradients of these.

    ranks_kernel     the rank of each token among those that a mask keeps, and the position of each of these
    means_kernel     Q̃ and K̃: the mean of all tokens of a segment, dense, padded and float32
    finish_kernel    adds the gradient of the means of the queries, from all shares, to the tokens of their segments

Segment i of n tokens is [i·n//d, (i+1)·n//d): lengths differ by one at most. A program has a few short segments or one
long one, and takes some tokens of each at a time.

With a mask, the same for queries and keys, n is the number of tokens kept, and d is at most that; positions become
ranks among them. If no token is kept there is one segment, an empty one.

Plain twin: `attention.landmarks.segment_means`.
"""

import triton
import triton.language as tl

from .landmark_solve import added_shares

__all__ = ["RANKS_AT", "finish_kernel", "kept_segment", "means_kernel", "ranks_kernel", "ranks_of", "segment_of"]

RANKS_AT = tl.constexpr(2)  # where ranks begin in a row, after the number of tokens kept and the end of the last one


@triton.jit
def segment_of(r, n, d):
    """Return the segment of token r: i·n//d ≤ r exactly where i·n < (r + 1)·d."""
    return ((r + 1) * d - 1) // n


@triton.jit
def _bounds(i, n, d):
    """Return where segment i begins and its length, which is 0 beyond the last."""
    begin = i * n // d
    return begin, tl.where(i < d, (i + 1) * n // d - begin, 0)


@triton.jit
def ranks_kernel(keep, ranks, to_ranks, m, heads, kb, kh, BLOCK: tl.constexpr):
    """Store for each row of a mask: how many tokens are kept, the end of the last one, ranks from 1 with 0 for masked
    tokens, and the positions of those kept."""
    which = tl.program_id(0).to(tl.int64)
    keep += (which // heads) * kb + (which % heads) * kh
    row = ranks + to_ranks + which * (RANKS_AT + 2 * m)
    total, end = 0, 0
    for start in range(0, m, BLOCK):
        r = start + tl.arange(0, BLOCK)
        kept = (tl.load(keep + r, mask=r < m, other=0) != 0).to(tl.int32)
        rank = total + tl.cumsum(kept, axis=0)
        tl.store(row + RANKS_AT + r, rank * kept, mask=r < m)
        tl.store(row + RANKS_AT + m + rank - 1, r, mask=kept != 0)
        total += tl.sum(kept, axis=0)
        end = tl.maximum(end, tl.max((r + 1) * kept, axis=0))
    tl.store(row, total)
    tl.store(row + 1, end)


@triton.jit
def ranks_of(ranks, which, heads, d, rb, rh):
    """Return a head's row of ranks, how many of its tokens are kept, and in how many segments."""
    row = ranks + (which // heads) * rb + (which % heads) * rh
    total = tl.load(row)
    return row, total, tl.maximum(tl.minimum(total, d), 1)


@triton.jit
def kept_segment(rank, total, d):
    """Return `segment_of` by rank, and the length of that segment; arbitrary for a masked token."""
    segment = (tl.maximum(rank, 1) * d - 1) // tl.maximum(total, 1)
    return segment, (segment + 1) * total // d - segment * total // d


@triton.jit
def _positions(row, begin, t, inside, length, HAS_KEEP: tl.constexpr):
    """Return the positions, among `length` tokens, of tokens t of the segments that start at `begin`."""
    found = begin[:, None] + t[None, :]
    if HAS_KEEP:
        found = tl.load(row + RANKS_AT + length + found, mask=inside, other=0)
    return found


@triton.jit
def _store_means(
    x, ranks, out, which, n, heads, d, width, xb, xh, xn, rb, rh,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr, HAS_KEEP: tl.constexpr,
):  # fmt: skip
    x += (which // heads) * xb + (which % heads) * xh
    row, tokens = ranks, n
    if HAS_KEEP:
        row, n, d = ranks_of(ranks, which, heads, d, rb, rh)
    i, c = tl.program_id(0) * GROUP + tl.arange(0, GROUP), tl.arange(0, WIDTH)
    begin, length = _bounds(i, n, d)
    acc = tl.zeros((GROUP, WIDTH), dtype=tl.float32)
    for start in range(0, (n + d - 1) // d, TOGETHER):
        t = start + tl.arange(0, TOGETHER)
        inside = t[None, :] < length[:, None]
        at = _positions(row, begin, t, inside, tokens, HAS_KEEP)
        at = x + at[:, :, None] * xn + c[None, None, :]
        inside = inside[:, :, None] & (c < width)[None, None, :]
        acc += tl.sum(tl.load(at, mask=inside, other=0.0).to(tl.float32), axis=1)
    mean = acc / tl.maximum(length, 1).to(tl.float32)[:, None]
    tl.store(out + (which * SIDE + i[:, None]) * WIDTH + c[None, :], mean)


@triton.jit
def means_kernel(
    query, key, ranks, to_ranks, space, to_keys, n, m, heads, d, width, qb, qh, qn, kb, kh, kn, rb, rh,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr, HAS_KEEP: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1).to(tl.int64)
    ranks += to_ranks
    if tl.program_id(2) == 0:
        _store_means(
            query, ranks, space, which, n, heads, d, width, qb, qh, qn, rb, rh, SIDE, WIDTH, GROUP, TOGETHER, HAS_KEEP
        )
    else:
        _store_means(
            key, ranks, space + to_keys, which, m, heads, d, width, kb, kh, kn, rb, rh, SIDE, WIDTH, GROUP, TOGETHER,
            HAS_KEEP,
        )  # fmt: skip


@triton.jit
def finish_kernel(
    scratch, to_due, to_parts, dx, ranks, to_ranks, shares, n, heads, d, width, rb, rh,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr, HAS_KEEP: tl.constexpr,
):  # fmt: skip
    """dx is dense."""
    which, matrices = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    row, tokens = ranks + to_ranks, n
    if HAS_KEEP:
        row, n, d = ranks_of(row, which, heads, d, rb, rh)
    i, c = tl.program_id(0) * GROUP + tl.arange(0, GROUP), tl.arange(0, WIDTH)
    begin, length = _bounds(i, n, d)
    due = tl.load(scratch + to_due + (which * SIDE + i[:, None]) * WIDTH + c[None, :])
    due += added_shares(scratch + to_parts, which, matrices, i, shares, SIDE, WIDTH)
    due = due / tl.maximum(length, 1).to(tl.float32)[:, None]
    for start in range(0, (n + d - 1) // d, TOGETHER):
        t = start + tl.arange(0, TOGETHER)
        inside = t[None, :] < length[:, None]
        at = _positions(row, begin, t, inside, tokens, HAS_KEEP)
        at = dx + (which * tokens + at)[:, :, None] * width + c[None, None, :]
        inside = inside[:, :, None] & (c < width)[None, None, :]
        found = tl.load(at, mask=inside, other=0.0).to(tl.float32) + due[:, None, :]
        tl.store(at, found.to(dx.dtype.element_ty), mask=inside)
