"""The unnormalised Gaussian product Σ_j exp(−scale/2 · ‖x_i − y_j‖²) v_j, without ever storing its n × m weights.

    out = gaussian_product(q, k, v, scale=1 / math.sqrt(q.shape[-1]))      # kernelized attention, exactly
    out = gaussian_product(q, k, v, scale=s, keep=mask)                    # keys where keep is False do not count

With w the weights and g the gradient of the result, the gradients are
    dv_j = Σ_i w_ij g_i
    dx_i = scale Σ_j w_ij (g_i · v_j)(y_j − x_i)
    dy_j = scale Σ_i w_ij (g_i · v_j)(x_i − y_j),
sums of the same form, with rows and columns swapped for dv and dy. So there are two streaming functions, the product
and its pull-back, each a Triton kernel on a GPU (triton/gaussian.py) with a plain twin here.

Exponents are differences of products and squares, scale (x·y − ‖x‖²/2 − ‖y‖²/2), and suffer from cancellation. The
plain twins compute them in float64: weights are right to 1 % up to norms of 1e7. The kernels use float32: an exponent
errs by about scale · ‖x‖² · 2⁻²⁴ (at most five times that, where measured), so that weights are good to 1 % up to a
value of scale · ‖x‖² of 3e4 (norm 400 for tokens of width 32 with the usual scale), and mean little beyond 1e6 (norm
2,400). They never exceed 1, and are finite up to a norm of 1e19. The same holds for the plain twins where float64 is
slow or missing (consumer GPUs, MPS).
"""

from typing import Any

import torch
from torch import Tensor

from .autocast import no_autocast
from .fastpaths import (
    addressable,
    batch_of_gradients,
    exporting,
    followed,
    fused_kernels,
    gradient_wanted,
    other_derivatives,
)
from .first_order import first_order
from .gaussian_weights import exact_dtype, gaussian_weights, weights_that_count, wide_dtype

__all__ = ["gaussian_product"]

DIRECT = 2**22  # number of weights up to which plain autograd may keep them all
CHUNK = 2**23  # weights at a time, in the plain twins
FUSED_WIDTH = 256  # widest token that the kernels hold on chip


def gaussian_product(
    x: Tensor, y: Tensor, v: Tensor, *, scale: float, keep: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """Return Σ_j exp(−scale/2 · ‖x_i − y_j‖²) v_j over the kept j, in v's dtype.

    Shapes are (…, n, p), (…, m, p), (…, m, c) → (…, n, c). Exponents and sums are float32, or float64 for float64
    input. On a GPU, half-precision input is multiplied on tensor cores and weights are rounded to v's dtype, as in
    flash attention. Streams: memory is linear in n and m.

    Args:
        keep: bool, broadcastable to (…, m); False excludes a key.
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
    fused = _fused(x, y, v)
    if keep is not None and not fused:  # excluded keys may hold anything, and 0 · NaN is NaN
        y, v = (t.masked_fill(~keep[..., None], 0) for t in (y, v))
    if not fused and (exporting() or _few(x, y) or other_derivatives(x, y, v)):
        return _directly(x, y, v, keep, scale, is_causal)
    if x.ndim != 4:
        batch, heads = (lead[:-1].numel(), lead[-1]) if lead else (1, 1)
        x, y, v = (t.reshape(batch, heads, *t.shape[-2:]) for t in (x, y, v))
        keep = None if keep is None else keep.reshape(batch, heads, -1)
    if torch.compiler.is_compiling():
        out = product_op(x, y, v, keep, scale, is_causal)
    else:
        plan = None
        if fused and keep is None:
            from .triton.gaussian_plan import plan_for
            from .triton.tiles import packed

            x, y, v = packed(x), packed(y), packed(v)
            plan = plan_for(x, y, v, is_causal)
        if plan is not None and not gradient_wanted(x, y, v):
            out = plan.forward(x, y, v, float(scale))[0]
        else:
            out = _Product.apply(x, y, v, keep, float(scale), is_causal, plan)
    return out if len(lead) == 2 else out.reshape(*lead, *out.shape[-2:])  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]


def _directly(x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, scale: float, is_causal: bool) -> Tensor:
    weights = gaussian_weights(x, y, scale=scale, mask=weights_that_count(x, y, keep, is_causal, 0))
    with no_autocast(x):
        return (weights @ v.to(weights.dtype)).to(v.dtype)


class _Product(torch.autograd.Function):
    """The product for eager calls, where a custom operator would cost some tens of microseconds more."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, scale: float, is_causal: bool, plan: Any
    ) -> Tensor:
        ctx.scale, ctx.is_causal, ctx.plan = scale, is_causal, plan
        if plan is not None:
            out, halves = plan.forward(x, y, v, scale)
            ctx.save_for_backward(x, y, v, None, None, halves)
            return out
        halves = ends = None
        if _fused(x, y, v):  # queries and keys in one launch, and reused in backward
            from .triton.gaussian import ends_of, half_norms

            halves = half_norms(x, y, keep, scale=scale)
            ends = None if keep is None else ends_of(keep)
        ctx.save_for_backward(x, y, v, keep, ends, *(halves or ()))
        return product(x, y, v, keep, scale, is_causal, halves, ends)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, y, v, keep, ends, *halves = ctx.saved_tensors
        grad, needed = grads[0], ctx.needs_input_grad[:3]
        if batch_of_gradients(grad):
            return (*_batched_gradients(grad, x, y, v, keep, ctx.scale, ctx.is_causal), None, None, None, None)
        if ctx.plan is not None:
            if all(needed) and grad.dtype == v.dtype:
                grad = grad if grad.stride(-1) == 1 and addressable(grad) else grad.contiguous()
                return (*ctx.plan.backward(grad, x, y, v, ctx.scale, halves[0]), None, None, None, None)
            halves = ctx.plan.halves_of(halves[0])
        found = gradients(grad, x, y, v, keep, ctx.scale, ctx.is_causal, needed, tuple(halves) or None, ends)
        return (*found, None, None, None, None)


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
    ends: Tensor | None = None,
) -> Tensor:
    """Compute the product of (b, h, n, p), (b, h, m, p), (b, h, m, c) and keep (b, h, m); records no derivative.

    `halves`: the kernels' half norms of x and y, if known; then the kernels run. `ends`: those of `keep`, if known.
    """
    if halves is not None or _fused(x, y, v):
        from .triton.gaussian import stream

        y_half = None if halves is None else halves[1]
        return stream(x, y, v, keep=keep, ends=ends, scale=scale, causal=1 if is_causal else 0, y_half=y_half)
    values = v.to(wide_dtype(x))
    with no_autocast(x):
        parts = [
            gaussian_weights(part, y, scale=scale, mask=weights_that_count(part, y, keep, is_causal, first)) @ values
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
    ends: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (dx, dy, dv); the kernels leave None what is not `needed`. `halves` and `ends` as for `product`."""
    if halves is None and not _fused(x, y, v):
        return _plain_gradients(grad, x, y, v, keep, scale, is_causal)
    from .triton.gaussian import ends_of, half_norms, pull, stream

    grad = grad if addressable(grad) else grad.contiguous()
    x_half, y_half = halves or half_norms(x, y, keep, scale=scale)
    ends = ends_of(keep) if keep is not None and ends is None else ends
    down, up = (1, -1) if is_causal else (0, 0)
    dx = dy = dv = None
    if needed[0]:
        dx, _ = pull(x, y, grad, v, keep=keep, ends=ends, scale=scale, causal=down, y_half=y_half)
    if needed[1]:
        dy, dv = pull(
            y, x, v, grad, keep=keep, ends=ends, of_rows=True, scale=scale, causal=up, product=needed[2], y_half=x_half
        )
    elif needed[2]:
        dv = stream(y, x, grad, keep=keep, ends=ends, of_rows=True, scale=scale, causal=up, y_half=x_half)
    return dx, dy, None if dv is None else dv.to(v.dtype)


def _batched_gradients(
    grad: Tensor, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, scale: float, is_causal: bool
) -> tuple[Tensor, ...]:
    """Return the gradients for a batch of `grad`, by torch's own derivatives, with all weights at once."""
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_() for t in (x, y, v)]
        out = _directly(inputs[0], inputs[1], inputs[2], keep, scale, is_causal)
    return torch.autograd.grad(out, inputs, grad)


def _plain_gradients(
    grad: Tensor, x: Tensor, y: Tensor, v: Tensor, keep: Tensor | None, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    wide, exact = wide_dtype(x), exact_dtype(x)  # the latter for differences of tokens
    y_exact, v_wide = y.to(exact), v.to(wide)
    packed = torch.contiguous_format  # as gradients_op says to compilers
    dy, dv = (torch.zeros_like(t, memory_format=packed) for t in (y_exact, v_wide))
    dx: list[Tensor] = []
    with no_autocast(x):
        for first, part in _row_chunks(x, y):
            rows = slice(first, first + part.shape[-2])
            g, part = grad[..., rows, :].to(wide), part.to(exact)
            mask = weights_that_count(part, y, keep, is_causal, first)
            weights = gaussian_weights(part, y, scale=scale, mask=mask).to(wide)
            dv += weights.mT @ g
            pulls = weights * (g @ v_wide.mT)
            pulls = (pulls if mask is None else pulls.masked_fill(~mask, 0)).to(exact)  # g · v may overflow
            dx.append(scale * (pulls @ y_exact - pulls.sum(-1, keepdim=True) * part))
            dy += scale * (pulls.mT @ part - pulls.sum(-2)[..., None] * y_exact)
    return torch.cat(dx, -2).to(x.dtype) if dx else torch.zeros_like(x), dy.to(y.dtype), dv.to(v.dtype)


def _few(x: Tensor, y: Tensor) -> bool:
    return x.shape[:-1].numel() * y.shape[-2] <= DIRECT


def _row_chunks(x: Tensor, y: Tensor) -> list[tuple[int, Tensor]]:
    rows = max(1, CHUNK // max(1, x.shape[:-2].numel() * y.shape[-2]))
    return [(first, x[..., first : first + rows, :]) for first in range(0, x.shape[-2], rows)]


def _fused(x: Tensor, y: Tensor, v: Tensor) -> bool:
    return (
        fused_kernels(x.device)  # first: any size compared is one that an exported program is specialised to
        and x.dtype != torch.float64
        and v.dtype != torch.float64
        and max(x.shape[-1], v.shape[-1]) <= FUSED_WIDTH
        and min(x.numel(), y.numel(), v.numel()) > 0
        and addressable(x, y, v)
        and not followed(x, y, v)
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
