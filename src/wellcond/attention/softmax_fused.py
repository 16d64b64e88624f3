"""Softmax attention with dropout of its weights or a mask of keys: one kernel launch forward, two backward.

    out = fused_softmax(query, key, value, keep, dropout_p=0.1, scale=s)        # keep: bool, (b or 1, h or 1, m)

It is for the cases where torch's scaled_dot_product_attention is slow on a GPU: that has no fast backend for dropout
with narrow heads, and computes masked keys too, while these kernels stop at the last key that is kept
(numerics/triton/softmax.py). Plain twin: torch's function.
"""

import math
from typing import Any

import torch
from torch import Tensor

from wellcond.numerics.fastpaths import (
    addressable,
    exporting,
    followed,
    fused_kernels,
    gradient_wanted,
    overheard,
    packed,
    refuse_batch,
    tokens_like,
)
from wellcond.numerics.first_order import first_order

__all__ = ["can_fuse", "draw_seed", "ends_of", "fused_softmax"]

WIDEST = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 32}


def can_fuse(query: Tensor, key: Tensor, value: Tensor, *, dropout_p: float = 0.0, scale: float | None = None) -> bool:
    """Whether the kernels support these tensors: on an NVIDIA GPU, heads at most 64 wide (32 in float32), one dtype
    other than float64, dropout below 1, a positive scale, batch · heads and strides that a kernel can index; no export,
    and no torch function mode that listens to torch's function, as the probe's does."""
    return (
        fused_kernels(query.device)  # first: reading a size would bind an exported program to it
        and not exporting()
        and query.ndim == 4
        and dropout_p < 1
        and (scale is None or scale > 0)
        and query.dtype == key.dtype == value.dtype
        and max(query.shape[-1], value.shape[-1]) <= WIDEST.get(query.dtype, 0)
        and min(query.numel(), key.numel(), value.numel()) > 0
        and addressable(query, key, value)
        and not followed(query, key, value)
        and not overheard()
    )


def fused_softmax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    *,
    seed: Tensor | None = None,
) -> Tensor:
    """Attend: (b, h, n, p), (b, h, m, p), (b, h, m, c), and which keys to keep, (b or 1, h or 1, m) → (b, h, n, c).

    `seed`, one int64 on the device, decides which weights are dropped; by default it is drawn from torch's generator.
    """
    query, key, value = packed(query), packed(key), packed(value)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if dropout_p == 0:
        seed = None
    elif seed is None:
        seed = draw_seed(query.device)
    ends = None
    if keep is not None:
        keep = keep if keep.stride(-1) == 1 else keep.contiguous()
        ends = ends_of(keep)
    if torch.compiler.is_compiling():
        return _forward_op(query, key, value, keep, ends, seed, dropout_p, scale)[0]
    settings = {"dropout_p": float(dropout_p), "scale": float(scale)}
    if not gradient_wanted(query, key, value):
        return _kernels().forward(query, key, value, keep, ends, seed, **settings)[0]
    out = _Softmax.apply(query, key, value, keep, ends, seed, settings)
    assert isinstance(out, Tensor)
    return out


def draw_seed(device: torch.device) -> Tensor:
    """Draw one number that stays on the device, so that a CUDA graph draws a new one at every replay."""
    return torch.randint(2**62, (1,), device=device)


def ends_of(keep: Tensor) -> Tensor:
    """Return one more than the index of the last kept key; 0 if none is kept."""
    numbers = torch.arange(1, keep.shape[-1] + 1, dtype=torch.int32, device=keep.device)
    return (keep * numbers).amax(-1)


def _kernels() -> Any:
    """Return the kernels; imported only when needed, as Triton may be missing."""
    from wellcond.numerics.triton import softmax

    return softmax


class _Softmax(torch.autograd.Function):
    """For eager calls, where a custom operator would cost tens of microseconds more."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        *tensors, ctx.settings = given
        out, lse = _kernels().forward(*tensors, **ctx.settings)
        ctx.save_for_backward(*tensors, out, lse)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_batch(grads[0])
        found = _kernels().backward(packed(grads[0]), *ctx.saved_tensors, **ctx.settings)
        return (*found, None, None, None, None)


@torch.library.custom_op("wellcond::softmax", mutates_args=())
def _forward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    ends: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return (out, what is saved for backward)."""
    query, key, value = packed(query), packed(key), packed(value)
    keep = None if keep is None else packed(keep)
    return _kernels().forward(query, key, value, keep, ends, seed, dropout_p=dropout_p, scale=scale)


@_forward_op.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    ends: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return tokens_like(value, query.shape[2]), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op("wellcond::softmax_gradient", mutates_args=())
def _backward_op(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    ends: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dropout_p: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, query, key, value, out = packed(grad), packed(query), packed(key), packed(value), packed(out)
    keep = None if keep is None else packed(keep)
    return _kernels().backward(
        grad, query, key, value, keep, ends, seed, out, lse, dropout_p=dropout_p, scale=scale
    )  # fmt: skip


@_backward_op.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    ends: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dropout_p: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(tokens_like(t, t.shape[2]) for t in (query, key, value))  # pyright: ignore[reportReturnType]


def _save(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.dropout_p, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _op_backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    found = _backward_op(grad, *ctx.saved_tensors, ctx.dropout_p, ctx.scale)
    return (*found, None, None, None, None, None)


_forward_op.register_autograd(_op_backward, setup_context=_save)
