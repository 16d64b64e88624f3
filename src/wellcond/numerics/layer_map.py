"""A block's effect on its tokens as one linear map: the share of its eigenvalues that lie near the unit circle.

    near_unit_share(x, y)                 # x, y (b, n, d): a block's input and output → a number from 0 to 1
    near_unit_shares([(x, y), …])         # for many blocks, in parallel

Fit Y ≈ X A over all tokens of all samples, both centred and whitened by the covariance of X, and count the eigenvalues
of A with 0.90 ≤ |λ| ≤ 1.05 (residual Koopman spectral profiling, arXiv 2602.22988, where a large share in an untrained
model was associated with runs that diverge). A block that does nothing has all of them there, one without its skip few
or none.

Whitening divides by √(variance + ε). The paper gives no ε: here it is EPSILON times the mean variance. Directions with
less variance than that are left out, and of the others the RANK with the largest variance are used, since the
eigendecomposition of a general matrix runs on the CPU and takes a second for d = 1024.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from wellcond.numerics.cores import on_cores

__all__ = ["NEAR_UNIT", "near_unit_share", "near_unit_shares"]

NEAR_UNIT = (0.90, 1.05)
EPSILON = 1e-5
RANK = 256


def near_unit_shares(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """Return `near_unit_share` of each pair, in parallel, one core each."""
    return on_cores(_share, [_layer_map(x, y, RANK) for x, y in pairs])


def near_unit_share(x: Tensor, y: Tensor, *, near: tuple[float, float] = NEAR_UNIT, rank: int = RANK) -> float:
    """Return the share of eigenvalues with near[0] ≤ |λ| ≤ near[1] of the whitened map from x to y, (…, d) each.

    NaN if there is no such map: a NaN or an Inf among the tokens, tokens whose products overflow float64 (from about
    1e154), fewer than two tokens, or all tokens alike. Computed in float64. Raises ValueError if the shapes differ.
    """
    return _share(_layer_map(x, y, rank), near)


@torch.no_grad()
def _layer_map(x: Tensor, y: Tensor, rank: int) -> Tensor | None:
    """Return the whitened map, (r, r) on the CPU, not finite if y is not; or None if there is none."""
    if x.shape != y.shape or x.ndim < 2:
        raise ValueError(f"a block's input and output have one shape (…, n, d), got {tuple(x.shape)}, {tuple(y.shape)}")
    x, y = (t.reshape(-1, t.shape[-1]).double() for t in (x, y))
    x, y = x - x.mean(0), y - y.mean(0)
    covariance = x.mT @ x / len(x)
    if len(x) < 2 or not bool(covariance.isfinite().all()):
        return None
    variance, directions = torch.linalg.eigh(covariance)
    ridge = EPSILON * variance.clamp_min(0).mean()
    kept = torch.nonzero(variance > ridge).flatten()[-rank:]
    if not len(kept):
        return None
    variance, directions = variance[kept], directions[:, kept]
    # With X̃ = X V D and D = (variance + ε)^(−½) the fit (X̃ᵀX̃)⁻¹ X̃ᵀỸ is D⁻¹ variance⁻¹ (Vᵀ XᵀY/n V) D.
    scale = (variance + ridge).rsqrt()
    across = directions.mT @ (x.mT @ y / len(x)) @ directions
    return (across * scale / (scale * variance)[:, None]).cpu()


def _share(a: Tensor | None, near: tuple[float, float] = NEAR_UNIT) -> float:
    if a is None or not bool(a.isfinite().all()):
        return math.nan
    size = torch.linalg.eigvals(a).abs()
    return float(((size >= near[0]) & (size <= near[1])).double().mean())
