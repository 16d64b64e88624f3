"""Skyformer as its published code computes it, quirks included, to compare numbers with it.

    out = skyformer_compat(query, key, value)                        # the same as skyformer_attention(…, compat=True)
    out = skyformer_compat(query, key, value, order="published")     # in its order of operations, too
    with published_order(): model(batch)                             # the same for a whole model, to time it

Deliberate differences from `skyformer_attention`: landmark positions are drawn at every call, with replacement, once
for all samples and heads, among the first tokens of each sample, up to its number of unmasked tokens; masked tokens are
set to zero; six iterations start from Nᵀ/c with one c for the whole batch. Unlike in the published code, heads may have
any width.

There are two orders of operations, whose results agree up to float32 rounding. `published` stores all 2n × d kernel
values and has an n × d × d product; benchmarks list it as "as published". `fast` multiplies from the right: two
streaming products with d × d matrices between them. With its gradient it takes 66 products of d³ and no n × d × d
product. (The form R ← R³(3I + R)/4 would need half as many, but its rounding errors grow by a factor of 3.25 per step:
too much for float32.)
"""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from wellcond.attention.checks import check_inputs
from wellcond.attention.landmarks import check_counts, prefix_positions
from wellcond.attention.masks import key_mask
from wellcond.numerics.autocast import no_autocast
from wellcond.numerics.fastpaths import fused_kernels
from wellcond.numerics.gaussian import gaussian_product
from wellcond.numerics.gaussian_weights import gaussian_weights
from wellcond.numerics.inverse import invert_by_iteration, normalize_spd, transposed_start

__all__ = ["ORDERS", "published_order", "skyformer_compat"]

ORDERS = ("fast", "published")

_forced_published = False


@contextlib.contextmanager
def published_order() -> Iterator[None]:
    """Make `published` the default order of operations of `compat` inside the context. Functions that were compiled
    before keep their order."""
    global _forced_published
    before, _forced_published = _forced_published, True
    try:
        yield
    finally:
        _forced_published = before


def skyformer_compat(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    num_landmarks: int = 128,
    gamma: float = 0.1,
    num_iterations: int = 6,
    generator: torch.Generator | None = None,
    draws: Tensor | None = None,
    order: str | None = None,
) -> Tensor:
    """Return κ(Q, L) · (N-iteration of κ(L, L) + γI) · κ(L, K) V, computed in float32 at least, in value's dtype.

    Args:
        attn_mask: a boolean mask of keys, (b, 1, 1, m); unmasked tokens should come first, as the published code
            assumes. A floating-point mask raises.
        draws: (d,) numbers in [0, 1) that choose the landmarks, the first half among the queries; random by default.
        order: the order of operations, `fast` or `published`. By default `fast` where its products are fused (float32
            on a GPU), and `published` elsewhere and inside `published_order()`.
    """
    check_inputs(query, key, value)
    check_counts(num_landmarks, num_iterations)
    if order is not None and order not in ORDERS:
        raise ValueError(f"order={order!r} is unknown; use {' or '.join(map(repr, ORDERS))}")
    n, p = query.shape[-2:]
    if key.shape[-2] != n:
        raise ValueError(
            f"compat=True needs as many queries as keys, as the published code does; got {n} and {key.shape[-2]}"
        )
    scale = 1 / math.sqrt(p) if scale is None else scale
    wide = torch.promote_types(value.dtype, torch.float32)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        raise ValueError(
            f"compat=True follows the authors' code, which takes boolean masks, True = keep; this one is "
            f"{attn_mask.dtype}. If it is 0 where keys count and very negative elsewhere, pass mask > -1"
        )
    mask = key_mask(attn_mask, query, key, method="Skyformer")
    if min(query.numel(), value.numel()) == 0:
        return gaussian_product(query, key, value, scale=1.0)  # zeros, whatever the scale; with their derivatives
    with no_autocast(query):
        q, k, v = query.to(wide), key.to(wide), value.to(wide)
        lengths = torch.full((1,) * (query.ndim - 2), n, device=query.device)
        keep = None
        if mask is not None:
            keep = mask.keep[..., None]
            q, k, v = q * keep, k * keep, v * keep
            lengths = mask.keep.sum(-1)
        if draws is None:
            draws = torch.rand(num_landmarks, generator=generator, device=query.device)
        positions = prefix_positions(draws, lengths)
        if (order or _usual_order(query.device, wide)) == "fast":
            return _fast(q, k, v, positions, scale, gamma, num_iterations).to(value.dtype)
        return _published(q, k, v, keep, positions, scale, gamma, num_iterations).to(value.dtype)


@torch.compiler.assume_constant_result
def _usual_order(device: torch.device, dtype: torch.dtype) -> str:
    fast = not _forced_published and dtype == torch.float32 and fused_kernels(device)
    return "fast" if fast else "published"


def _published(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, positions: Tensor, scale: float, gamma: float, steps: int
) -> Tensor:
    n, p = q.shape[-2:]
    q, k = q * math.sqrt(scale), k * math.sqrt(scale)
    second = torch.arange(positions.shape[-1], device=q.device) >= positions.shape[-1] // 2
    x = torch.cat([q, k], -2)
    index = (positions + n * second).expand(*x.shape[:-2], -1)[..., None]
    rows = x.gather(-2, index.expand(*index.shape[:-1], p))
    kernel = _kernel(x, rows)
    gram = kernel.gather(-2, index.expand(*index.shape[:-1], kernel.shape[-1]))
    normal, r = normalize_spd(gram + gamma * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device))
    start = transposed_start(normal, shared=True)
    inverse = invert_by_iteration(normal, num_iterations=steps, start=start)
    keys = kernel[..., n:, :] @ (r[..., :, None] * inverse * r[..., None, :])
    if keep is not None:
        keys = keys * keep
    return kernel[..., :n, :] @ (keys.mT @ v)


def _kernel(x: Tensor, rows: Tensor) -> Tensor:
    """Compute exp(−‖x − l‖²/2) by expanding the square, without clamping it."""
    return (x @ rows.mT - 0.5 * x.square().sum(-1)[..., :, None] - 0.5 * rows.square().sum(-1)[..., None, :]).exp()


def _fast(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float, gamma: float, steps: int) -> Tensor:
    """Compute the `fast` order. Masked tokens are zero vectors, and add nothing because their values are zero too.

    Tokens that came in half precision stay float32: with float32 values the kernels would round the weights of bfloat16
    tokens to TF32, and the solution has large terms that cancel.
    """
    half = positions.shape[-1] // 2
    rows = torch.cat([_tokens(q, positions[..., :half]), _tokens(k, positions[..., half:])], -2)
    sums = gaussian_product(rows, k, v, scale=scale)
    gram = gaussian_weights(rows, rows, scale=scale)
    normal, r = normalize_spd(gram + gamma * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device))
    solved = r[..., None] * _apply_iteration(normal, r[..., None] * sums, steps)
    return gaussian_product(q, rows, solved, scale=scale)


def _tokens(x: Tensor, positions: Tensor) -> Tensor:
    return x.gather(-2, positions.expand(*x.shape[:-2], -1)[..., None].expand(*x.shape[:-2], -1, x.shape[-1]))


def _apply_iteration(normal: Tensor, rhs: Tensor, steps: int) -> Tensor:
    """Compute invert_by_iteration(normal, num_iterations=steps, …) @ rhs.

    A step is Z + Z(R + R² + R³/4) with R = I − NZ. The last one is applied to `rhs` directly, which has fewer columns
    than Z.
    """
    start = transposed_start(normal, shared=True)
    if steps == 0:
        return start @ rhs
    z = invert_by_iteration(normal, num_iterations=steps - 1, start=start)
    r = torch.eye(normal.shape[-1], dtype=normal.dtype, device=normal.device) - normal @ z
    return z @ (rhs + r @ (rhs + r @ (rhs + 0.25 * (r @ rhs))))
