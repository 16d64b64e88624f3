"""Linear attention of short sequences: one program per head, and one launch each for forward and backward.

    out = forward(q, k, v, factor)                  # (b, h, n, p), (b, h, m, p), (b, h, m, c) → (b, h, n, c)
    dq, dk, dv = backward(g, q, k, v, factor)

The small matrix S = f KᵀV stays in the program, which recomputes it in the backward pass: nothing but tokens and their
gradients is read or written. linear_sides.py has the kernels for long sequences and says how they round; these do the
same.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, layout
from .linear_sides import plus_products, times
from .plans import padded_alike
from .tiles import packed, rows_of, store_rows, tokens_like

__all__ = ["backward", "forward", "pull_short_kernel", "short_kernel"]

TOKENS, WARPS = 32, 4  # tokens at a time; the best tried on an H200, with 1,536 heads of 64 and 65 tokens


@triton.jit
def _small(y, v, m, yn, vn, width, values, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Return YᵀV of a head."""
    acc = tl.zeros((WIDTH, WIDTH), dtype=tl.float32)
    for start in range(0, m, BLOCK):
        r = start + tl.arange(0, BLOCK)
        yt = rows_of(y, r, r < m, yn, width, WIDTH)
        vt = rows_of(v, r, r < m, vn, values, WIDTH)
        acc = plus_products(yt, vt, acc, PARTS)
    return acc


@triton.jit
def short_kernel(
    x, y, v, out,
    n, m, heads, width, values, factor, xb, xh, xn, yb, yh, yn, vb, vh, vn, ob, oh, on,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(0).to(tl.int64)
    b, h = which // heads, which % heads
    x += b * xb + h * xh
    out += b * ob + h * oh
    small = factor * _small(y + b * yb + h * yh, v + b * vb + h * vh, m, yn, vn, width, values, WIDTH, BLOCK, PARTS)
    for start in range(0, n, BLOCK):
        r = start + tl.arange(0, BLOCK)
        xt = rows_of(x, r, r < n, xn, width, WIDTH)
        store_rows(out, r, r < n, on, values, times(xt, small, PARTS), WIDTH)


@triton.jit
def pull_short_kernel(
    x, y, v, g, dx, dy, dv,
    n, m, heads, width, values, factor,
    xb, xh, xn, yb, yh, yn, vb, vh, vn, gb, gh, gn, dxb, dxh, dxn, dyb, dyh, dyn, dvb, dvh, dvn,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(0).to(tl.int64)
    b, h = which // heads, which % heads
    x += b * xb + h * xh
    y += b * yb + h * yh
    v += b * vb + h * vh
    g += b * gb + h * gh
    dx += b * dxb + h * dxh
    dy += b * dyb + h * dyh
    dv += b * dvb + h * dvh
    small = tl.trans(factor * _small(y, v, m, yn, vn, width, values, WIDTH, BLOCK, PARTS))
    for start in range(0, n, BLOCK):
        r = start + tl.arange(0, BLOCK)
        gt = rows_of(g, r, r < n, gn, values, WIDTH)
        store_rows(dx, r, r < n, dxn, width, times(gt, small, PARTS), WIDTH)
    pull = factor * _small(x, g, n, xn, gn, width, values, WIDTH, BLOCK, PARTS)
    turned = tl.trans(pull)
    for start in range(0, m, BLOCK):
        r = start + tl.arange(0, BLOCK)
        vt = rows_of(v, r, r < m, vn, values, WIDTH)
        store_rows(dy, r, r < m, dyn, width, times(vt, turned, PARTS), WIDTH)
        yt = rows_of(y, r, r < m, yn, width, WIDTH)
        store_rows(dv, r, r < m, dvn, values, times(yt, pull, PARTS), WIDTH)


def forward(query: Tensor, key: Tensor, value: Tensor, factor: float) -> Tensor:
    query, key, value = packed(query), packed(key), packed(value)
    (b, h, n, p), (m, c) = query.shape, value.shape[2:]
    out = tokens_like(value, n)
    launch(
        short_kernel,
        (b * h,),
        layout(query, key, value, out),
        (query, key, value, out, n, m, h, p, c, float(factor), *_strides(query, key, value, out)),
        **_constants(value, p),
    )
    return out


def backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv); grad (b, h, n, c) has value's dtype."""
    grad, query, key, value = packed(grad), packed(query), packed(key), packed(value)
    (b, h, n, p), (m, c) = query.shape, value.shape[2:]
    dq, dk, dv = tokens_like(query, n), tokens_like(key, m), tokens_like(value, m)
    tensors = (query, key, value, grad, dq, dk, dv)
    launch(
        pull_short_kernel,
        (b * h,),
        layout(*tensors),
        (*tensors, n, m, h, p, c, float(factor), *_strides(*tensors)),
        **_constants(value, p),
    )
    return dq, dk, dv


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for t in tensors for stride in t.stride()[:3]]


def _constants(value: Tensor, p: int) -> dict[str, int | bool]:
    width = padded_alike(p, value.shape[3])
    return {
        "WIDTH": width, "BLOCK": TOKENS, "PARTS": value.dtype == torch.bfloat16,
        "num_warps": WARPS, "num_stages": 1,
    }  # fmt: skip
