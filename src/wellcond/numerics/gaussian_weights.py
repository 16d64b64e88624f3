"""Explicit Gaussian weights exp(−scale/2 · ‖x_i − y_j‖²), and which of them count: the basis of the plain twins.

    w = gaussian_weights(q, k, scale=s)                    # (…, n, p), (…, m, p) → (…, n, m), differentiable
    mask = weights_that_count(q, k, keep, True, 0)         # keys that are kept and not later than the query

Exponents are computed in float64 where it is fast, so that weights are right for large norms (see gaussian.py).
"""

import torch
from torch import Tensor

from .autocast import no_autocast
from .fastpaths import fast_double

__all__ = ["exact_dtype", "gaussian_weights", "weights_that_count", "wide_dtype"]


def gaussian_weights(x: Tensor, y: Tensor, *, scale: float, mask: Tensor | None = None) -> Tensor:
    """Return exp(−scale/2 · ‖x_i − y_j‖²), (…, n, m), at most 1, in float32 or better; differentiable.

    `mask` is broadcastable to the weights: either bool, False where a weight is 0 whatever finite numbers x_i and y_j
    hold, or numbers to add to the exponent.
    """
    dtype, exact = wide_dtype(x), exact_dtype(x)
    with no_autocast(x):
        x, y = x.to(exact), y.to(exact)
        exponent = x @ (scale * y).mT
        exponent -= (0.5 * scale) * x.square().sum(-1)[..., :, None]  # in place: this is the largest tensor
        exponent -= (0.5 * scale) * y.square().sum(-1)[..., None, :]
        exponent = exponent.to(dtype).clamp_max(0)
        if mask is not None:  # before exp: gradients are multiples of the weight, and 0 times an overflow is NaN
            shown = mask.dtype == torch.bool
            exponent = exponent.masked_fill(~mask, -torch.inf) if shown else exponent + mask.to(dtype)
        return exponent.exp()


def weights_that_count(x: Tensor, y: Tensor, keep: Tensor | None, is_causal: bool, first: int) -> Tensor | None:
    """Return a mask of the weights that count, None for all of them; `first` is the index of the first row."""
    mask = None if keep is None else keep[..., None, :]
    if is_causal:
        rows = torch.arange(first, first + x.shape[-2], device=x.device)[:, None]
        past = torch.arange(y.shape[-2], device=x.device)[None, :] <= rows
        mask = past if mask is None else mask & past
    return mask


def wide_dtype(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


def exact_dtype(t: Tensor) -> torch.dtype:
    """Return the dtype in which to compute differences of large numbers."""
    return torch.float64 if fast_double(t.device) else wide_dtype(t)
