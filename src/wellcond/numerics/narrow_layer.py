"""A narrow pre-norm layer around its attention: one kernel launch before it and one after it, and three backward.

    if can_fuse(x, (*before, *after)):
        q, k, v = enter(x, before, ends, eps=1e-5)                           # (b, n, width) each, in autocast's dtype
        y = leave(attended, x, after, seed, ends, dropout_p=0.1, eps=1e-5)   # float32

    before = norm.weight, norm.bias, qkv.weight, qkv.bias
    after = proj.weight, proj.bias, norm.weight, norm.bias, up.weight, up.bias, down.weight, down.bias

Compiled, such a layer takes three dozen launches that read and write its tokens again and again: in the encoders of the
Long Range Arena, 64 wide, that takes as long as attention itself. Here tokens are read once (triton/narrow_layer.py).
Rows from `ends` on, (b,) int32, are padding at the end of a sequence: they are not computed, and come out as zeros.
Plain twin: the layer's own modules (models/sequence.py).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wellcond.numerics.autocast import autocast_dtype
from wellcond.numerics.fastpaths import exporting, followed, fused_kernels, overheard
from wellcond.numerics.first_order import first_order

__all__ = ["can_fuse", "enter", "leave"]

WIDTHS = (16, 32, 64)
HALVES = (torch.bfloat16, torch.float16)
MOST = 2**31  # size of a tensor whose offsets are computed in 32 bits


def can_fuse(x: Tensor, weights: Sequence[Tensor | None]) -> bool:
    """Whether the kernels take these: float32 tokens (b, n, width) and weights on an NVIDIA GPU under autocast, 16, 32
    or 64 wide, with a hidden layer of twice that and no weight missing; and nothing intercepts single operations."""
    return (
        fused_kernels(x.device)
        and not exporting()
        and x.ndim == 3
        and x.dtype == torch.float32
        and autocast_dtype(x) in HALVES
        and x.shape[-1] in WIDTHS
        and 0 < x.shape.numel() * 2 < MOST
        and _fit(weights, x.shape[-1])
        and not followed(x, *[t for t in weights if t is not None])
        and not overheard()
    )


def _fit(weights: Sequence[Tensor | None], w: int) -> bool:
    """Whether these are all of `before` and `after`, in float32 and w wide."""
    wide = 2 * w
    shapes = [(w,), (w,), (3 * w, w), (3 * w,), (w, w), (w,), (w,), (w,), (wide, w), (wide,), (w, wide), (w,)]
    return all(
        t is not None and t.dtype == torch.float32 and t.shape == shape
        for t, shape in zip(weights, shapes, strict=True)
    )


def enter(x: Tensor, before: Sequence[Tensor], ends: Tensor | None, *, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise x, and return the products of its rows with the three projections."""
    return _enter_op(x, *before, ends, eps, autocast_dtype(x))


def leave(
    attended: Tensor, x: Tensor, after: Sequence[Tensor], seed: Tensor | None, ends: Tensor | None, *,
    dropout_p: float, eps: float,
) -> Tensor:  # fmt: skip
    """Return y + down(gelu(up(norm(y)))) with y = x + proj(attended), and dropout after proj, gelu and down.

    `seed`, one int64 on the device, determines what is dropped; None for no dropout.
    """
    return _leave_op(attended, x, *after, seed, ends, dropout_p, eps)


def _kernels() -> Any:
    """Import the kernels only when needed: Triton may be missing."""
    from wellcond.numerics.triton import narrow_layer

    return narrow_layer


# ---- before attention


@torch.library.custom_op("wellcond::narrow_enter", mutates_args=())
def _enter_op(
    x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, bias: Tensor, ends: Tensor | None, eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    before = [t.contiguous() for t in (gamma, beta, weight, bias)]
    return _kernels().enter(x.contiguous(), before, ends, dtype=dtype, eps=eps)


@_enter_op.register_fake
def _(
    x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, bias: Tensor, ends: Tensor | None, eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = (torch.empty(x.shape, dtype=dtype, device=x.device) for _ in range(3))
    return q, k, v


@torch.library.custom_op("wellcond::narrow_enter_gradient", mutates_args=())
def _enter_back_op(
    dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, ends: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    before = [t.contiguous() for t in (gamma, beta, weight, beta)]  # the last is unused
    return _kernels().enter_back([t.contiguous() for t in (dq, dk, dv)], x.contiguous(), before, ends, eps=eps)


@_enter_back_op.register_fake
def _(
    dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, ends: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape), x.new_empty(_kernels().sums_of(x, 3, "enter_back"))


def _save_entering(ctx: Any, inputs: Any, output: Any) -> None:
    x, gamma, beta, weight, _, ends, ctx.eps, _ = inputs
    ctx.save_for_backward(x, gamma, beta, weight, ends)


@first_order
def _enter_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    x, gamma, beta, weight, ends = ctx.saved_tensors
    dx, sums = _enter_back_op(*grads, x, gamma, beta, weight, ends, ctx.eps)
    sums = sums.sum(0)
    product, bias = sums[:, :-1].reshape(weight.shape), sums[:, -1].reshape(-1)
    return dx, *_of_norm(product, bias, weight, gamma, beta), bias, None, None, None


def _of_norm(
    product: Tensor, bias: Tensor, weight: Tensor, gamma: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a norm's weight and bias, and of the weight of the linear layer after it, from the
    product of that layer's output gradient with the normed rows (without the norm's weight and bias) and its bias
    gradient."""
    return (product * weight).sum(0), (bias[:, None] * weight).sum(0), product * gamma + bias[:, None] * beta


_enter_op.register_autograd(_enter_backward, setup_context=_save_entering)


# ---- after attention


@torch.library.custom_op("wellcond::narrow_leave", mutates_args=())
def _leave_op(
    a: Tensor, x: Tensor, proj: Tensor, proj_bias: Tensor, gamma: Tensor, beta: Tensor, up: Tensor, up_bias: Tensor,
    down: Tensor, down_bias: Tensor, seed: Tensor | None, ends: Tensor | None, dropout_p: float, eps: float,
) -> Tensor:  # fmt: skip
    after = [t.contiguous() for t in (proj, proj_bias, gamma, beta, up, up_bias, down, down_bias)]
    return _kernels().leave(a.contiguous(), x.contiguous(), after, seed, ends, dropout_p=dropout_p, eps=eps)


@_leave_op.register_fake
def _(
    a: Tensor, x: Tensor, proj: Tensor, proj_bias: Tensor, gamma: Tensor, beta: Tensor, up: Tensor, up_bias: Tensor,
    down: Tensor, down_bias: Tensor, seed: Tensor | None, ends: Tensor | None, dropout_p: float, eps: float,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape)


@torch.library.custom_op("wellcond::narrow_leave_gradient", mutates_args=())
def _leave_back_op(
    grad: Tensor, a: Tensor, x: Tensor, proj: Tensor, proj_bias: Tensor, gamma: Tensor, beta: Tensor, up: Tensor,
    up_bias: Tensor, down: Tensor, seed: Tensor | None, ends: Tensor | None, dropout_p: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    after = [t.contiguous() for t in (proj, proj_bias, gamma, beta, up, up_bias, down)]
    given = [t.contiguous() for t in (grad, a, x)]
    return _kernels().leave_back(*given, after, seed, ends, dropout_p=dropout_p, eps=eps)


@_leave_back_op.register_fake
def _(
    grad: Tensor, a: Tensor, x: Tensor, proj: Tensor, proj_bias: Tensor, gamma: Tensor, beta: Tensor, up: Tensor,
    up_bias: Tensor, down: Tensor, seed: Tensor | None, ends: Tensor | None, dropout_p: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return a.new_empty(a.shape), x.new_empty(x.shape), x.new_empty(_kernels().sums_of(x, 5, "weights"))


def _save_leaving(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, _, seed, ends, ctx.dropout_p, ctx.eps = inputs
    ctx.save_for_backward(*tensors, seed, ends)


@first_order
def _leave_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: under a checkpoint a second time fails
    gamma, beta, up = saved[4:7]
    da, dx, sums = _leave_back_op(grad, *saved, ctx.dropout_p, ctx.eps)
    sums = sums.sum(0)
    products, biases = sums[:, :-1], sums[:, -1]
    bias_up = biases[1:3].reshape(-1)
    of_gamma, of_beta, of_up = _of_norm(products[1:3].reshape(up.shape), bias_up, up, gamma, beta)
    of_down = products[3:].transpose(0, 1).reshape(up.shape[::-1])
    return da, dx, products[0], biases[0], of_gamma, of_beta, of_up, bias_up, of_down, biases[3], None, None, None, None


_leave_op.register_autograd(_leave_backward, setup_context=_save_leaving)
