"""Products with long, narrow matrices of tokens, whose sums over the tokens use the whole GPU.

    kv = tall_product(k, v)                    # kᵀ v, (…, n, r), (…, n, c) → (…, r, c)
    out = thin_product(q, kv)                  # q kv, (…, n, r), (…, r, c) → (…, n, c)
    logits = flat_product(means, k)            # means kᵀ, (…, d, p), (…, n, p) → (…, d, n)

Each is computed in float32 at least, under autocast too, and so are the gradients. A library computes a small block of
a result on one multiprocessor, however long its sum is: two matrices of 131,072 tokens keep 2 of 132 busy. Here a long
sum is cut into parts of `ROWS` tokens, computed as one batched product and added up in order. `kᵀ v` is such a sum, and
so are the gradients of `q kv` and `means kᵀ` with respect to their small factor. The parts depend on n alone, not on
the batch.

Where the fused kernels are off, on a CPU, and in forward mode or torch.func, all are plain products.
"""

from typing import Any

import torch
from torch import Tensor

from .autocast import no_autocast
from .fastpaths import fused_kernels, other_derivatives

__all__ = ["flat_product", "tall_product", "thin_product"]

ROWS = 512  # tokens per part; 65,536 tokens of two heads make 256 parts
HALVES = (torch.bfloat16, torch.float16)


def tall_product(a: Tensor, b: Tensor, *, parts: int | None = None) -> Tensor:
    """Return aᵀ b for (…, n, r) and (…, n, c): (…, r, c), float32 at least.

    Args:
        parts: the number of parts to cut the sum into, on any device; None lets the length decide, on a GPU only.

    On a GPU, two matrices of the same half precision are multiplied as they are, with sums in float32: products of
    their entries are exact there, so converting them first would give the same.
    """
    _check(a, b, a.ndim >= 2 and b.ndim >= 2 and a.shape[-2] == b.shape[-2], "(…, n, r) and (…, n, c)")
    parts = _parts(a, b, a.shape[-2], parts)
    wide = _wide(a, b)
    with no_autocast(a):
        if parts < 2:
            return a.to(wide).mT @ b.to(wide)
        a, b = _with_one_lead(a, b)
        return _apply(_Tall, a, b, parts) if torch.is_grad_enabled() else _sum_of_parts(a, b, parts)


def thin_product(x: Tensor, small: Tensor, *, dtype: torch.dtype | None = None, parts: int | None = None) -> Tensor:
    """Return x · small for (…, n, r) and (…, r, c): (…, n, c), in float32 at least, rounded to `dtype` if given."""
    _check(x, small, x.ndim >= 2 and small.ndim >= 2 and x.shape[-1] == small.shape[-2], "(…, n, r) and (…, r, c)")
    parts = _parts(x, small, x.shape[-2], parts)
    wide = _wide(x, small)
    with no_autocast(x):
        if parts < 2:
            return (x.to(wide) @ small.to(wide)).to(dtype or wide)
        x, small = _with_one_lead(x, small)
        dtype = dtype or wide
        return _apply(_Thin, x, small, dtype, parts) if torch.is_grad_enabled() else _batched(x, small).to(dtype)


def flat_product(small: Tensor, x: Tensor, *, parts: int | None = None) -> Tensor:
    """Return small · xᵀ for (…, d, p) and (…, n, p): (…, d, n), float32 at least, with contiguous rows."""
    _check(small, x, x.ndim >= 2 and small.ndim >= 2 and x.shape[-1] == small.shape[-1], "(…, d, p) and (…, n, p)")
    parts = _parts(small, x, x.shape[-2], parts)
    wide = _wide(small, x)
    with no_autocast(x):
        if parts < 2:
            return small.to(wide) @ x.to(wide).mT
        small, x = _with_one_lead(small, x)
        return _apply(_Flat, small, x, parts) if torch.is_grad_enabled() else _batched(small, x.mT)


class _Tall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, parts: int) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.parts = parts
        return _sum_of_parts(a, b, parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        a, b = ctx.saved_tensors
        (g,), da, db = grads, None, None
        if ctx.needs_input_grad[0]:
            if _rows_are_contiguous(a):
                da = thin_product(b, g.mT, dtype=a.dtype, parts=ctx.parts)
            else:  # the gradient of a transposed matrix should be transposed, too
                da = flat_product(g, b, parts=ctx.parts).to(a.dtype).mT
        if ctx.needs_input_grad[1]:
            db = thin_product(a, g, dtype=b.dtype, parts=ctx.parts)
        return da, db, None


class _Thin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, small: Tensor, dtype: torch.dtype, parts: int) -> Tensor:
        ctx.save_for_backward(x, small)
        ctx.parts = parts
        product = _batched(x, small)
        # torch 2.11's compiler returns zero gradients for a function that ends in a conversion to the same dtype
        return product if product.dtype == dtype else product.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, small = ctx.saved_tensors
        (g,), dx, dsmall = grads, None, None
        if g.dtype != x.dtype:  # convert once for both
            g = g.to(_wide(x, small))
        if ctx.needs_input_grad[0]:
            dx = thin_product(g, small.mT, dtype=x.dtype, parts=ctx.parts)
        if ctx.needs_input_grad[1]:
            dsmall = tall_product(x, g, parts=ctx.parts).to(small.dtype)
        return dx, dsmall, None, None


class _Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, small: Tensor, x: Tensor, parts: int) -> Tensor:
        ctx.save_for_backward(small, x)
        ctx.parts = parts
        return _batched(small, x.mT)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        small, x = ctx.saved_tensors
        (g,), dsmall, dx = grads, None, None
        if ctx.needs_input_grad[0]:
            dsmall = tall_product(g.mT, x, parts=ctx.parts).to(small.dtype)
        if ctx.needs_input_grad[1]:
            dx = thin_product(g.mT, small, dtype=x.dtype, parts=ctx.parts)
        return dsmall, dx, None


def _apply(function: Any, *arguments: Any) -> Tensor:
    return function.apply(*arguments)


def _sum_of_parts(a: Tensor, b: Tensor, parts: int) -> Tensor:
    lead, n = a.shape[:-2], a.shape[-2]
    rows = n // parts
    cut = rows * parts
    halves = a.dtype == b.dtype and a.dtype in HALVES and fused_kernels(a.device) and a.is_cuda
    if not halves:
        wide = _wide(a, b)
        a, b = _converted(a, wide), _converted(b, wide)
    front, back = (a, b) if cut == n else (a[..., :cut, :], b[..., :cut, :])
    products = _bmm(_stacked(front, parts).mT, _stacked(back, parts), halves)
    total = products.view(*lead, parts, *products.shape[1:]).sum(-3)
    if cut < n:
        rest = _bmm(_flat(a[..., cut:, :]).mT, _flat(b[..., cut:, :]), halves)
        total = total + rest.view(total.shape)
    return total


def _stacked(x: Tensor, parts: int) -> Tensor:
    """View (…, parts · rows, r) as (… · parts, rows, r), or copy it once along the rows if the strides require it."""
    rows, r = x.shape[-2] // parts, x.shape[-1]
    if _rows_are_contiguous(x):
        return x.reshape(-1, rows, r)
    return x.mT.reshape(*x.shape[:-2], r, parts, rows).transpose(-3, -2).reshape(-1, r, rows).mT


def _batched(x: Tensor, y: Tensor) -> Tensor:
    wide = _wide(x, y)
    product = torch.bmm(_flat(_converted(x, wide)), _flat(_converted(y, wide)))
    return product if x.ndim == 3 else product.view(*x.shape[:-1], y.shape[-1])


def _flat(x: Tensor) -> Tensor:
    return x if x.ndim == 3 else x.reshape(-1, *x.shape[-2:])


def _converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to `dtype`; the same pass separates heads that lie side by side, since a product needs that anyway."""
    if x.dtype == dtype:
        return x
    return x.to(dtype, memory_format=torch.contiguous_format if _rows_are_contiguous(x) else torch.preserve_format)


def _bmm(x: Tensor, y: Tensor, halves: bool) -> Tensor:
    return torch.bmm(x, y, out_dtype=torch.float32) if halves else torch.bmm(x, y)


def _rows_are_contiguous(x: Tensor) -> bool:
    return x.stride(-1) == 1 or x.stride(-2) != 1


def _parts(x: Tensor, y: Tensor, n: int, parts: int | None) -> int:
    """Return the number of parts of a sum over n; 1 means the plain product."""
    if n == 0 or x.numel() == 0 or y.numel() == 0 or other_derivatives(x, y):
        return 1
    if parts is not None:
        if parts < 1:
            raise ValueError(f"parts={parts} cannot be: at least one is needed")
        return min(parts, n)
    return n // ROWS if fused_kernels(x.device) else 1


def _with_one_lead(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape[:-2] == y.shape[:-2]:
        return x, y
    lead = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return x.expand(*lead, *x.shape[-2:]), y.expand(*lead, *y.shape[-2:])


def _wide(x: Tensor, y: Tensor) -> torch.dtype:
    # like promote_types for floating-point dtypes, without a call into torch for each of a dozen products
    return torch.float64 if torch.float64 in (x.dtype, y.dtype) else torch.float32


def _check(x: Tensor, y: Tensor, fits: bool, wanted: str) -> None:
    if not fits:
        raise ValueError(f"expected {wanted}, got {tuple(x.shape)} and {tuple(y.shape)}")
