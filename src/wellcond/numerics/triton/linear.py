"""Linear attention as Triton kernels: sums over the keys, a small matrix for each head, and products with it.

    plan = plan_for(query, key, value)              # (b, h, n, p), (b, h, m, p), (b, h, m, c)
    out, small = plan.forward(query, key, value, factor)
    dq, dk, dv = plan.backward(grad, query, key, value, factor, small)

    out = attend_short(query, key, value, factor)   # short sequences: one program per head, one launch each way
    dq, dk, dv = pull_short(grad, query, key, value, factor)

In a plan, everything that follows from shapes and strides is computed once. Four launches then do the work:

    sums_kernel      S = f KᵀV, partial sums over shares of the keys, added up by the last program of each head
    output_kernel    out = Q S
    queries_kernel   with g the gradient of out: dQ = g Sᵀ, and dS = f Qᵀg, summed like S
    keys_kernel      dK = V dSᵀ, dV = K dS

Half-precision tokens are multiplied as they are, which is exact in float32; S and dS keep at least 16 bits when
multiplied by them: two bfloat16 parts for tokens in bfloat16, otherwise three TF32 products.

`small` is S, (b · h, width, width) in float32, padded. The shares of a sum are in a temporary buffer. For short
sequences S stays in the program, which recomputes it in the backward pass: nothing but tokens and their gradients is
read or written.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fastpaths import tokens_like
from .landmark_sides import two_parts
from .landmark_solve import added_shares, is_last
from .launch import Launch, dense, launch, layout, placed
from .plans import LARGE_BLOCK, Counters, Kept, on_device, padded_alike, shares_of
from .tiles import ceil_div, packed, rows_of, store_rows

__all__ = ["Plan", "attend_short", "plan_for", "pull_short"]

# Of short sequences, tokens at a time; the best tried on an H200, with 1,536 heads of 64 and 65 tokens.
SHORT_BLOCK, SHORT_WARPS = 32, 4

_plans: Kept["Plan"] = Kept(1024)


def plan_for(query: Tensor, key: Tensor, value: Tensor) -> "Plan":
    """Return the plan for tokens (b, h, n, p), (b, h, m, p) and (b, h, m, c), dense along the last dimension."""
    given = layout(query, key, value)
    plan = _plans.get(given)
    return plan or _plans.add(given, Plan(query, key, value))


class Plan:
    """The plan for tensors of one layout."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor):
        (b, h, n, p), (m, c) = query.shape, value.shape[2:]
        self.matrices: int = b * h
        self.device: torch.device = query.device
        self.placed: tuple[Any, ...] = placed(query, key, value)
        self.out_shape: tuple[int, int, int, int] = (b, h, n, c)
        self.dtype: torch.dtype = value.dtype
        wider = padded_alike(p, c)
        self.shape: dict[str, int] = {"WIDTH": wider, "VALUES": wider}
        # tokens at a time; more would spill registers
        self.block = LARGE_BLOCK if wider == 32 and query.dtype == torch.bfloat16 else LARGE_BLOCK // 2
        self.parts: dict[str, Any] = {"BLOCK": self.block, "PARTS": query.dtype == torch.bfloat16}
        self.query_shares: int
        self.query_shares, query_each = shares_of(n)
        self.key_shares: int
        self.key_shares, key_each = shares_of(m)
        self.small: tuple[int, int, int] = (self.matrices, wider, wider)
        self.query_strides: tuple[int, ...] = query.stride()[:3]
        self.key_strides: tuple[int, ...] = key.stride()[:3]
        self.value_strides: tuple[int, ...] = value.stride()[:3]
        self.sums_numbers: tuple[int, ...] = (m, h, p, c, key_each)
        self.output_numbers: tuple[int, int, int, int] = (n, h, p, c)
        self.query_numbers: tuple[int, ...] = (n, h, p, c, query_each)
        self.key_numbers: tuple[int, int, int, int] = (m, h, p, c)
        self.counters: Counters = Counters(self.matrices, query.device)
        self.sums: Launch = self._launch(sums_kernel, self.key_shares)
        self.output: Launch = self._launch(output_kernel, ceil_div(n, self.block))
        self.pull_of_keys: Launch = self._launch(keys_kernel, ceil_div(m, self.block))
        self.pulls_of_queries: dict[Any, Launch] = {}

    def _launch(self, kernel: Any, programs: int) -> Launch:
        return Launch(kernel, (programs, self.matrices), num_warps=4, num_stages=2, **self.shape, **self.parts)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """Return (out, small)."""
        small = torch.empty(self.small, dtype=torch.float32, device=self.device)
        parts = self._parts(self.key_shares, small)
        out = torch.empty(self.out_shape, dtype=self.dtype, device=self.device)
        with on_device(self.device):
            y, v, to_small, to_parts, counters = self.sums.addresses(key, value, small, parts, self.counters())
            self.sums(
                y, v, to_small, to_parts, counters, *self.sums_numbers, factor, *self.key_strides, *self.value_strides
            )
            x, to_small, to_out = self.output.addresses(query, small, out)
            self.output(x, to_small, to_out, *self.output_numbers, *self.query_strides)
        return out, small

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, factor: float, small: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv); grad (b, h, n, c) has value's dtype and is dense along the last dimension."""
        if self.placed != placed(query, key, value):
            query, key, value = packed(query), packed(key), packed(value)
            return plan_for(query, key, value).backward(grad, query, key, value, factor, small)
        small = dense(small)
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=self.device) for t in (query, key, value))
        pulls = torch.empty(self.small, dtype=torch.float32, device=self.device)
        parts = self._parts(self.query_shares, pulls)
        of_grad = placed(grad)
        pull = self.pulls_of_queries.get(of_grad)
        if pull is None:
            pull = self.pulls_of_queries[of_grad] = self._launch(queries_kernel, self.query_shares)
        with on_device(self.device):
            x, g, to_small, to_pulls, to_parts, counters, d_x = pull.addresses(
                query, grad, small, pulls, parts, self.counters(), dq
            )
            pull(
                x, g, to_small, to_pulls, to_parts, counters, d_x, *self.query_numbers, factor,
                *self.query_strides, *grad.stride()[:3],
            )  # fmt: skip
            y, v, to_pulls, d_y, d_v = self.pull_of_keys.addresses(key, value, pulls, dk, dv)
            self.pull_of_keys(y, v, to_pulls, d_y, d_v, *self.key_numbers, *self.key_strides, *self.value_strides)
        return dq, dk, dv

    def _parts(self, shares: int, instead: Tensor) -> Tensor:
        """Allocate the shares of a sum, if there are several."""
        if shares == 1:
            return instead
        return torch.empty(shares, *self.small, dtype=torch.float32, device=self.device)


# ---- the kernels


@triton.jit
def _of_head(base, which, WIDTH: tl.constexpr, VALUES: tl.constexpr):
    """Load the matrix of a head, (WIDTH, VALUES)."""
    i, o = tl.arange(0, WIDTH), tl.arange(0, VALUES)
    return tl.load(base + (which * WIDTH + i[:, None]) * VALUES + o[None, :])


@triton.jit
def _times(tokens, small, PARTS: tl.constexpr):
    """Return tokens · small, with small in float32."""
    if PARTS:
        high, low = two_parts(small)
        found = tl.dot(tokens, low)
        found = tl.dot(tokens, high, found)
    else:
        found = tl.dot(tokens.to(tl.float32), small, input_precision="tf32x3")
    return found


@triton.jit
def _plus_products(x, z, acc, PARTS: tl.constexpr):
    """Return acc + xᵀ z over a block of tokens."""
    if PARTS:
        acc = tl.dot(tl.trans(x), z, acc)
    else:
        acc = tl.dot(tl.trans(x.to(tl.float32)), z.to(tl.float32), acc, input_precision="tf32x3")
    return acc


@triton.jit
def _add_up(acc, small, parts, counters, which, factor, WIDTH: tl.constexpr, VALUES: tl.constexpr):
    """Finish a program that has a share of a head's sum: the last of these programs adds up the shares."""
    share, shares, matrices = tl.program_id(0), tl.num_programs(0), tl.num_programs(1)
    i, o = tl.arange(0, WIDTH), tl.arange(0, VALUES)
    at = (which * WIDTH + i[:, None]) * VALUES + o[None, :]
    if shares == 1:
        tl.store(small + at, factor * acc)
    else:
        part = ((share * matrices + which) * WIDTH + i[:, None]) * VALUES + o[None, :]
        tl.store(parts + part, acc)
        if is_last(counters + which, shares):
            total = added_shares(parts, which, matrices, i, shares, WIDTH, VALUES)
            tl.store(small + at, factor * total)
            tl.store(counters + which, 0)


@triton.jit
def sums_kernel(
    y, v, small, parts, counters,
    m, heads, width, values, each, factor, yb, yh, yn, vb, vh, vn,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    share, which = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = which // heads, which % heads
    y += b * yb + h * yh
    v += b * vb + h * vh
    acc = tl.zeros((WIDTH, VALUES), dtype=tl.float32)
    first = share * each
    last = tl.minimum(m, first + each)
    for start in range(first, last, BLOCK):
        r = start + tl.arange(0, BLOCK)
        yt = rows_of(y, r, r < last, yn, width, WIDTH)
        vt = rows_of(v, r, r < last, vn, values, VALUES)
        acc = _plus_products(yt, vt, acc, PARTS)
    _add_up(acc, small, parts, counters, which, factor, WIDTH, VALUES)


@triton.jit
def output_kernel(
    x, small, out,
    n, heads, width, values, xb, xh, xn,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1).to(tl.int64)
    b, h = which // heads, which % heads
    r, o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, VALUES)
    xt = rows_of(x + b * xb + h * xh, r, r < n, xn, width, WIDTH)
    found = _times(xt, _of_head(small, which, WIDTH, VALUES), PARTS)
    at = out + (which * n + r[:, None]) * values + o[None, :]
    tl.store(at, found.to(out.dtype.element_ty), mask=(r < n)[:, None] & (o < values)[None, :])


@triton.jit
def queries_kernel(
    x, g, small, pulls, parts, counters, dx,
    n, heads, width, values, each, factor, xb, xh, xn, gb, gh, gn,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    share, which = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = which // heads, which % heads
    x += b * xb + h * xh
    g += b * gb + h * gh
    c = tl.arange(0, WIDTH)
    transposed = tl.trans(_of_head(small, which, WIDTH, VALUES))
    acc = tl.zeros((WIDTH, VALUES), dtype=tl.float32)
    first = share * each
    last = tl.minimum(n, first + each)
    for start in range(first, last, BLOCK):
        r = start + tl.arange(0, BLOCK)
        xt = rows_of(x, r, r < last, xn, width, WIDTH)
        gt = rows_of(g, r, r < last, gn, values, VALUES)
        found = _times(gt, transposed, PARTS)
        at = dx + (which * n + r[:, None]) * width + c[None, :]
        tl.store(at, found.to(dx.dtype.element_ty), mask=(r < last)[:, None] & (c < width)[None, :])
        acc = _plus_products(xt, gt, acc, PARTS)
    _add_up(acc, pulls, parts, counters, which, factor, WIDTH, VALUES)


@triton.jit
def keys_kernel(
    y, v, pulls, dy, dv,
    m, heads, width, values, yb, yh, yn, vb, vh, vn,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1).to(tl.int64)
    b, h = which // heads, which % heads
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c, o = tl.arange(0, WIDTH), tl.arange(0, VALUES)
    yt = rows_of(y + b * yb + h * yh, r, r < m, yn, width, WIDTH)
    vt = rows_of(v + b * vb + h * vh, r, r < m, vn, values, VALUES)
    pull = _of_head(pulls, which, WIDTH, VALUES)
    of_keys = _times(vt, tl.trans(pull), PARTS)
    at = dy + (which * m + r[:, None]) * width + c[None, :]
    tl.store(at, of_keys.to(dy.dtype.element_ty), mask=(r < m)[:, None] & (c < width)[None, :])
    of_values = _times(yt, pull, PARTS)
    at = dv + (which * m + r[:, None]) * values + o[None, :]
    tl.store(at, of_values.to(dv.dtype.element_ty), mask=(r < m)[:, None] & (o < values)[None, :])


# ---- short sequences


@triton.jit
def _small(y, v, m, yn, vn, width, values, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Return YᵀV of a head."""
    acc = tl.zeros((WIDTH, WIDTH), dtype=tl.float32)
    for start in range(0, m, BLOCK):
        r = start + tl.arange(0, BLOCK)
        yt = rows_of(y, r, r < m, yn, width, WIDTH)
        vt = rows_of(v, r, r < m, vn, values, WIDTH)
        acc = _plus_products(yt, vt, acc, PARTS)
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
        store_rows(out, r, r < n, on, values, _times(xt, small, PARTS), WIDTH)


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
        store_rows(dx, r, r < n, dxn, width, _times(gt, small, PARTS), WIDTH)
    pull = factor * _small(x, g, n, xn, gn, width, values, WIDTH, BLOCK, PARTS)
    turned = tl.trans(pull)
    for start in range(0, m, BLOCK):
        r = start + tl.arange(0, BLOCK)
        vt = rows_of(v, r, r < m, vn, values, WIDTH)
        store_rows(dy, r, r < m, dyn, width, _times(vt, turned, PARTS), WIDTH)
        yt = rows_of(y, r, r < m, yn, width, WIDTH)
        store_rows(dv, r, r < m, dvn, values, _times(yt, pull, PARTS), WIDTH)


def attend_short(query: Tensor, key: Tensor, value: Tensor, factor: float) -> Tensor:
    query, key, value = packed(query), packed(key), packed(value)
    (b, h, n, p), (m, c) = query.shape, value.shape[2:]
    out = tokens_like(value, n)
    launch(
        short_kernel,
        (b * h,),
        layout(query, key, value, out),
        (query, key, value, out, n, m, h, p, c, float(factor), *_strides_of(query, key, value, out)),
        **_short_constants(value, p),
    )
    return out


def pull_short(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv); grad (b, h, n, c) has value's dtype."""
    grad, query, key, value = packed(grad), packed(query), packed(key), packed(value)
    (b, h, n, p), (m, c) = query.shape, value.shape[2:]
    dq, dk, dv = tokens_like(query, n), tokens_like(key, m), tokens_like(value, m)
    tensors = (query, key, value, grad, dq, dk, dv)
    launch(
        pull_short_kernel,
        (b * h,),
        layout(*tensors),
        (*tensors, n, m, h, p, c, float(factor), *_strides_of(*tensors)),
        **_short_constants(value, p),
    )
    return dq, dk, dv


def _strides_of(*tensors: Tensor) -> list[int]:
    return [stride for t in tensors for stride in t.stride()[:3]]


def _short_constants(value: Tensor, p: int) -> dict[str, int | bool]:
    width = padded_alike(p, value.shape[3])
    return {
        "WIDTH": width, "BLOCK": SHORT_BLOCK, "PARTS": value.dtype == torch.bfloat16,
        "num_warps": SHORT_WARPS, "num_stages": 1,
    }  # fmt: skip
