"""Kernels of `numerics.split_linear`: split rows into two float16 parts, and add up partial products."""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["combine", "split_rows"]

TOP = tl.constexpr(13)  # the largest entry of a row has this exponent: float16 ends at 15, and normal numbers at −14


@triton.jit
def _split_kernel(x, out, inverse, k, stride, WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """Split one row: high and low parts side by side (low first if WEIGHT), and the inverse of its scale."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + col, mask=col < k, other=0.0)
    largest = tl.max(tl.abs(values), axis=0)
    exponent = ((largest.to(tl.int32, bitcast=True) >> 23) & 255) - 127
    exponent = tl.minimum(tl.maximum(exponent, -100), 127)
    scaled = values * ((127 + TOP - exponent) << 23).to(tl.float32, bitcast=True)
    high = scaled.to(tl.float16)
    low = ((scaled - high.to(tl.float32)) * 2048.0).to(tl.float16)
    out += row * 2 * k + col
    tl.store(out + (k if WEIGHT else 0), high, mask=col < k)
    tl.store(out + (0 if WEIGHT else k), low, mask=col < k)
    tl.store(inverse + row, ((127 - TOP + exponent) << 23).to(tl.float32, bitcast=True))


@triton.jit
def _combine_kernel(parts, low, x_inverse, w_inverse, bias, out, n, m, PARTS: tl.constexpr, BIAS: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < m
    total = tl.load(low + row * m + col, mask=inside, other=0.0) * (1.0 / 2048.0)
    for part in range(PARTS):
        total += tl.load(parts + (part * n + row) * m + col, mask=inside, other=0.0)
    total *= tl.load(x_inverse + row) * tl.load(w_inverse + col, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + col, mask=inside, other=0.0)
    tl.store(out + row * m + col, total, mask=inside)


def split_rows(x: Tensor, *, weight: bool) -> tuple[Tensor, Tensor]:
    """Return (n, k) float32 as (n, 2k) float16, [high, low] or, for a weight, [low, high]; and (n,) inverse scales."""
    n, k = x.shape
    out = torch.empty(n, 2 * k, dtype=torch.float16, device=x.device)
    inverse = torch.empty(n, dtype=torch.float32, device=x.device)
    _split_kernel[(n,)](
        x, out, inverse, k, x.stride(0), WEIGHT=weight, BLOCK=triton.next_power_of_2(k), num_warps=4 if k <= 2048 else 8
    )
    return out, inverse


def combine(parts: Tensor, low: Tensor, x_inverse: Tensor, w_inverse: Tensor, bias: Tensor | None) -> Tensor:
    """Return (Σ parts + low/2048), scaled back, plus the bias: (n, m) float32."""
    count, n, m = parts.shape
    out = torch.empty(n, m, dtype=torch.float32, device=parts.device)
    block = min(1024, triton.next_power_of_2(m))
    _combine_kernel[(n, triton.cdiv(m, block))](
        parts, low, x_inverse, w_inverse, bias if bias is not None else low, out, n, m,
        PARTS=count, BIAS=bias is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out
