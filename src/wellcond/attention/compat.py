"""Skyformer in the order of operations of its published code, quirks included, to compare numbers with it.

    out = skyformer_compat(query, key, value)                    # the same as skyformer_attention(…, compat=True)

Deliberate differences from `skyformer_attention`: landmark positions are drawn once for all samples and heads, at every
call, with replacement, among the unmasked tokens, which are assumed to come first; six iterations start from Nᵀ/c with
one c for the whole batch; all 2n × d kernel values are stored, and there is an n × d × d product. Benchmarks time it as
"as published". Unlike in the published code, heads may have any width.
"""

import math

import torch
from torch import Tensor

from wellcond.attention.checks import check_inputs
from wellcond.attention.landmarks import check_counts, prefix_positions
from wellcond.attention.masks import key_mask
from wellcond.numerics.autocast import no_autocast
from wellcond.numerics.inverse import invert_by_iteration, normalize_spd, transposed_start

__all__ = ["skyformer_compat"]


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
) -> Tensor:
    """κ(Q, L) · (N-iteration of κ(L, L) + γI) · κ(L, K) V, in float32 at least; in value's dtype.

    Args:
        attn_mask: a boolean mask of keys, (b, 1, 1, m); unmasked tokens should come first, as the published code
            assumes. A floating-point mask raises.
        draws: (d,) numbers in [0, 1) that choose the landmarks, the first half among the queries; drawn if not given.
    """
    check_inputs(query, key, value)
    check_counts(num_landmarks, num_iterations)
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
        return value.new_zeros(*query.shape[:-1], value.shape[-1])
    with no_autocast(query):
        q, k, v = query.to(wide) * math.sqrt(scale), key.to(wide) * math.sqrt(scale), value.to(wide)
        lengths = torch.full((1,) * (query.ndim - 2), n, device=query.device)
        if mask is not None:
            real = mask.keep[..., None]
            q, k, v = q * real, k * real, v * real
            lengths = mask.keep.sum(-1)
        if draws is None:
            draws = torch.rand(num_landmarks, generator=generator, device=query.device)
        positions = prefix_positions(draws, lengths)
        second = torch.arange(draws.shape[0], device=query.device) >= draws.shape[0] // 2
        x = torch.cat([q, k], -2)
        index = (positions + n * second).expand(*x.shape[:-2], -1)[..., None]
        rows = x.gather(-2, index.expand(*index.shape[:-1], p))
        kernel = _kernel(x, rows)
        gram = kernel.gather(-2, index.expand(*index.shape[:-1], kernel.shape[-1]))
        normal, r = normalize_spd(gram + gamma * torch.eye(gram.shape[-1], dtype=wide, device=gram.device))
        start = transposed_start(normal, shared=True)
        inverse = invert_by_iteration(normal, num_iterations=num_iterations, start=start)
        keys = kernel[..., n:, :] @ (r[..., :, None] * inverse * r[..., None, :])
        if mask is not None:
            keys = keys * mask.keep[..., None]
        return (kernel[..., :n, :] @ (keys.mT @ v)).to(value.dtype)


def _kernel(x: Tensor, rows: Tensor) -> Tensor:
    """exp(−‖x − l‖²/2), by the expansion of the square, not clamped."""
    return (x @ rows.mT - 0.5 * x.square().sum(-1)[..., :, None] - 0.5 * rows.square().sum(-1)[..., None, :]).exp()
