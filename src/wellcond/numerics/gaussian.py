"""The un-normalised Gaussian product Σ_j exp(−scale/2 · ‖x_i − y_j‖²) v_j, without ever storing its n × m weights.

    out = gaussian_product(q, k, v, scale=1 / math.sqrt(q.shape[-1]))      # kernelized attention, exactly
    out = gaussian_product(q, k, v, scale=s, keep=mask)                    # keys where keep is False do not count

With w the weights and g the gradient of the result, the gradients are
    dv_j = Σ_i w_ij g_i
    dx_i = scale Σ_j w_ij (g_i · v_j)(y_j − x_i)
    dy_j = scale Σ_i w_ij (g_i · v_j)(x_i − y_j),
sums of the same form, with rows and columns changing places for the last. So there are two streaming functions, the
product and its pull-back, each a Triton kernel on a GPU (triton/gaussian.py) with a plain twin here.
"""

from typing import Any

import torch
from torch import Tensor

from .fastpaths import fused_kernels, other_derivatives

__all__ = ["gaussian_product", "gaussian_weights"]

DIRECT = 2**22  # weights up to which plain autograd may keep them all
CHUNK = 2**24  # weights at a time, in the plain twins
FUSED_WIDTH = 256  # widest token that the kernels hold on chip


def gaussian_product(
    x: Tensor, y: Tensor, v: Tensor, *, scale: float, keep: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """Σ_j exp(−scale/2 · ‖x_i − y_j‖²) v_j over the kept j: (…, n, p), (…, m, p), (…, m, c) → (…, n, c), in v's dtype.

    Exponents and sums are float32, or float64 for float64 input. On a GPU half-precision input is multiplied on tensor
    cores and weights are rounded to v's dtype, as flash attention does it. Streams: memory is linear in n and m.

    Args:
        keep: bool, broadcastable to (…, m); False takes a key out.
        is_causal: key j counts for row i only if j ≤ i.
    """
    _check(x, y, v)
    lead = x.shape[:-2]
    if not lead == y.shape[:-2] == v.shape[:-2]:
        lead = torch.broadcast_shapes(lead, y.shape[:-2], v.shape[:-2])
        x, y, v = (t.expand(*lead, *t.shape[-2:]) for t in (x, y, v))
    if keep is not None:
        if keep.dtype != torch.bool:
            raise ValueError(f"keep must be boolean, True where a key counts; got {keep.dtype}")
        keep = keep.expand(*lead, y.shape[-2])
    weights = lead.numel() * x.shape[-2] * y.shape[-2]
    fused = _fused(x, y, v)
    if keep is not None and not fused:  # what does not count may hold anything, and 0 · NaN is NaN
        y, v = (t.masked_fill(~keep[..., None], 0) for t in (y, v))
    if not fused and (weights <= DIRECT or other_derivatives(x, y, v) or torch.compiler.is_compiling()):
        return _directly(x, y, v, keep, scale, is_causal)
    if x.ndim != 4:
        batch, heads = (lead[:-1].numel(), lead[-1]) if lead else (1, 1)
        x, y, v = (t.reshape(batch, heads, *t.shape[-2:]) for t in (x, y, v))
        keep = None if keep is None else keep.reshape(batch, heads, -1)
    if torch.compiler.is_compiling():
        out = product_op(x, y, v, keep, scale, is_causal)
    else:
        out = _Product.apply(x, y, v, keep, scale, is_causal)
    return out if len(lead) == 2 else out.reshape(*lead, *out.shape[-2:])  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]


def gaussian_weights(x: Tensor, y: Tensor, *, scale: float) -> Tensor:
    """exp(−scale/2 · ‖x_i − y_j‖²), (…, n, m), at most 1, in float32 or better; differentiable."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, y = x.to(dtype), y.to(dtype)
    with torch.autocast(x.device.type, enabled=False):
        # Distances do not change with the origin, but the rounding of this difference does: the nearer, the smaller.
        origin = y.detach().mean(-2, keepdim=True)
        x, y = x - origin, y - origin
        halves = [0.5 * t.square().sum(-1) for t in (x, y)]
        exponent = (x @ y.mT - halves[0][..., :, None] - halves[1][..., None, :]).clamp_max(0)
        return (scale * exponent).exp()


def _directly(x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, scale: float, is_causal: bool) -> Tensor:
    weights = _masked(gaussian_weights(x, y, scale=scale), keep, is_causal, 0)
    with torch.autocast(x.device.type, enabled=False):
        return (weights @ v.to(weights.dtype)).to(v.dtype)


def _masked(weights: Tensor, keep: Tensor | None, is_causal: bool, first: int) -> Tensor:
    """`first` is the number of the first row."""
    if keep is not None:
        weights = weights.masked_fill(~keep[..., None, :], 0)
    if is_causal:
        n, m = weights.shape[-2:]
        rows = torch.arange(first, first + n, device=weights.device)[:, None]
        weights = weights.masked_fill(torch.arange(m, device=weights.device)[None, :] > rows, 0)
    return weights


class _Product(torch.autograd.Function):
    """For calls that are not compiled: a custom operator costs some tens of microseconds more."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, scale: float, is_causal: bool
    ) -> Tensor:
        halves = None
        if _fused(x, y, v):  # of queries and keys at once, and for the backward pass too
            from .triton.half_norms import half_norms

            halves = half_norms(x, y, keep, scale=scale)
        ctx.save_for_backward(x, y, v, keep, *(halves or ()))
        ctx.scale, ctx.is_causal = scale, is_causal
        return product(x, y, v, keep, scale, is_causal, halves)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, y, v, keep, *halves = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        found = gradients(grads[0], x, y, v, keep, ctx.scale, ctx.is_causal, needed, tuple(halves) or None)
        return (*found, None, None, None)


@torch.library.custom_op("wellcond::gaussian_product", mutates_args=())
def product_op(x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, scale: float, is_causal: bool) -> Tensor:
    return product(x, y, v, keep, scale, is_causal)


@product_op.register_fake
def _(x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, scale: float, is_causal: bool) -> Tensor:
    return v.new_empty(*x.shape[:-1], v.shape[-1])


@torch.library.custom_op("wellcond::gaussian_gradients", mutates_args=())
def gradients_op(
    grad: Tensor, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dy, dv = gradients(grad, x, y, v, keep, scale, is_causal, (True, True, True))
    assert dx is not None
    assert dy is not None
    assert dv is not None
    return dx, dy, dv


@gradients_op.register_fake
def _(
    grad: Tensor, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(t.new_empty(t.shape) for t in (x, y, v))  # pyright: ignore[reportReturnType]


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, y, v, keep, ctx.scale, ctx.is_causal = inputs
    ctx.save_for_backward(x, y, v, keep)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, y, v, keep = ctx.saved_tensors
    return (*gradients_op(grad, x, y, v, keep, ctx.scale, ctx.is_causal), None, None, None)


product_op.register_autograd(_backward, setup_context=_save)


def product(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    keep: Tensor | None,
    scale: float,
    is_causal: bool,
    halves: tuple[Tensor, ...] | None = None,
) -> Tensor:
    """The product itself, (b, h, n, p), (b, h, m, p), (b, h, m, c) and keep (b, h, m); no derivative is recorded.

    `halves` are the kernels' half norms of x and y, where they are known.
    """
    if _fused(x, y, v):
        from .triton.gaussian import stream

        y_half = None if halves is None else halves[1]
        return stream(x, y, v, keep=keep, scale=scale, causal=1 if is_causal else 0, y_half=y_half)
    parts = [
        _masked(gaussian_weights(part, y, scale=scale), keep, is_causal, first) @ v.to(_wide(v))
        for first, part in _row_chunks(x, y)
    ]
    return torch.cat(parts, -2).to(v.dtype) if parts else v.new_zeros(*x.shape[:-1], v.shape[-1])


def gradients(
    grad: Tensor,
    x: Tensor,
    y: Tensor,
    v: Tensor,
    keep: Tensor | None,
    scale: float,
    is_causal: bool,
    needed: tuple[bool, bool, bool],
    halves: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dy, dv), None where not needed."""
    if not _fused(x, y, v):
        return _plain_gradients(grad, x, y, v, keep, scale, is_causal)
    from .triton.gaussian import pull, stream
    from .triton.half_norms import half_norms

    x_half, y_half = halves or half_norms(x, y, keep, scale=scale)
    down, up = (1, -1) if is_causal else (0, 0)
    dx = dy = dv = None
    if needed[0]:
        dx, _ = pull(x, y, grad, v, keep=keep, scale=scale, causal=down, y_half=y_half)
    if needed[1]:
        dy, dv = pull(y, x, v, grad, scale=scale, causal=up, product=needed[2], y_half=x_half)
    elif needed[2]:
        dv = stream(y, x, grad, scale=scale, causal=up, y_half=x_half)
    if keep is not None:  # their rows are keys here: one that does not count has no gradient
        gone = ~keep[..., None]
        dy = dy.masked_fill_(gone, 0) if dy is not None else None
        dv = dv.masked_fill_(gone, 0) if dv is not None else None
    return dx, dy, None if dv is None else dv.to(v.dtype)


def _plain_gradients(
    grad: Tensor, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    wide = _wide(x)
    y_wide, v_wide = y.to(wide), v.to(wide)
    dy, dv, dx = torch.zeros_like(y_wide), torch.zeros_like(v_wide), []
    with torch.autocast(x.device.type, enabled=False):
        for first, part in _row_chunks(x, y):
            rows = slice(first, first + part.shape[-2])
            g, part = grad[..., rows, :].to(wide), part.to(wide)
            weights = _masked(gaussian_weights(part, y, scale=scale), keep, is_causal, first)
            dv += weights.mT @ g
            pulls = weights * (g @ v_wide.mT)
            dx.append(scale * (pulls @ y_wide - pulls.sum(-1, keepdim=True) * part))
            dy += scale * (pulls.mT @ part - pulls.sum(-2)[..., None] * y_wide)
    return torch.cat(dx, -2).to(x.dtype) if dx else torch.zeros_like(x), dy.to(y.dtype), dv.to(v.dtype)


def _row_chunks(x: Tensor, y: Tensor) -> list[tuple[int, Tensor]]:
    rows = max(1, CHUNK // max(1, x.shape[:-2].numel() * y.shape[-2]))
    return [(first, x[..., first : first + rows, :]) for first in range(0, x.shape[-2], rows)]


def _wide(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


def _fused(x: Tensor, y: Tensor, v: Tensor) -> bool:
    return (
        x.dtype != torch.float64
        and v.dtype != torch.float64
        and max(x.shape[-1], v.shape[-1]) <= FUSED_WIDTH
        and min(x.numel(), y.numel(), v.numel()) > 0
        and fused_kernels(x.device)
        and not other_derivatives(x, y, v)
    )


def _check(x: Tensor, y: Tensor, v: Tensor) -> None:
    if not all(t.is_floating_point() and t.ndim >= 2 for t in (x, y, v)):
        raise ValueError(
            f"expected floating-point tensors (…, tokens, width), got {[(tuple(t.shape), t.dtype) for t in (x, y, v)]}"
        )
    if x.shape[-1] != y.shape[-1] or y.shape[-2] != v.shape[-2]:
        raise ValueError(
            f"rows {tuple(x.shape)}, columns {tuple(y.shape)} and values {tuple(v.shape)} do not fit: the first two "
            "need the same width, the last two the same number of tokens"
        )
