"""The distribution of a linear map's singular values, from products alone, by stochastic Lanczos quadrature.

    density = spectral_density(operator, probes=8, steps=64)
    density.cumulative(torch.tensor([0.1, 1.0]))           # the share up to 0.1 and up to 1, and standard errors
    density.frobenius_squared(), density.quantile(torch.tensor([0.5]))

For a random unit vector z, the mean of zᵀf(AAᵀ)z is the mean of f(σ²) over the singular values. The bidiagonal matrix
that grows from z (lanczos.py) gives the Gauss rule for it: its singular values are the nodes, and the squared first
entries of its left vectors are the weights. What a single z misses shows in the spread over several.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .lanczos import Bidiagonalization, Operator

__all__ = ["SpectralDensity", "spectral_density"]


@dataclass(frozen=True, kw_only=True)
class SpectralDensity:
    """The distribution of the min(m, n) singular values, from random probes: (…, probes, steps) nodes with weights.

    Each probe's weights sum to 1. All methods but `quantile` return a mean over the probes and its standard error. The
    Lanczos steps resolve σ² on a linear scale. So below about σmax/steps the share of the values is right, but their
    distribution there is coarse: take more steps to look at smaller ones.
    """

    nodes: Tensor
    """(…, probes, steps): singular values of the probe's small matrix."""
    weights: Tensor
    """(…, probes, steps): the share of the spectrum that each node represents."""
    count: int
    """min(m, n), the number of singular values."""

    def expectation(self, function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the mean of function(σ) over the singular values, (…), and its standard error over the probes."""
        return _mean_and_error((self.weights * function(self.nodes)).sum(-1), -1)

    def frobenius_squared(self) -> tuple[Tensor, Tensor]:
        """Return ‖J‖_F² = tr(JᵀJ) and its standard error. Each probe gives it exactly for its own direction."""
        mean, error = self.expectation(torch.square)
        return self.count * mean, self.count * error

    def cumulative(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Return the share of singular values up to each of `sigma` (g,): (…, g), and its standard error.

        A node represents values on both sides of it, so half its weight counts where sigma equals the node.
        """
        sigma = sigma.to(self.nodes)
        side = (torch.sign(sigma - self.nodes[..., None]) + 1) / 2
        return _mean_and_error((self.weights[..., None] * side).sum(-2), -2)

    def quantile(self, share: Tensor) -> Tensor:
        """Return the singular value below which a share of them lies, for each of `share` (g,) in [0, 1]: (…, g)."""
        nodes, order = self.nodes.flatten(-2).sort(dim=-1)
        weights = self.weights.flatten(-2).gather(-1, order) / self.nodes.shape[-2]
        # Each node sits at the middle of its weight; interpolate linearly between nodes.
        middle = (weights.cumsum(-1) - weights / 2).contiguous()
        share = share.to(nodes).expand(*nodes.shape[:-1], -1).contiguous()
        above = torch.searchsorted(middle, share).clamp_max(nodes.shape[-1] - 1)
        below = (above - 1).clamp_min(0)  # the same node beyond the first, and where there is only one
        x0, x1 = middle.gather(-1, below), middle.gather(-1, above)
        y0, y1 = nodes.gather(-1, below), nodes.gather(-1, above)
        along = ((share - x0) / (x1 - x0).clamp_min(1e-300)).clamp(0, 1)
        return y0 + along * (y1 - y0)


def _mean_and_error(per_probe: Tensor, probes: int) -> tuple[Tensor, Tensor]:
    """Return mean and standard error over the dimension `probes`; a single probe has no standard error (NaN)."""
    count = per_probe.shape[probes]
    error = per_probe.std(probes) if count > 1 else torch.full_like(per_probe.mean(probes), math.nan)
    return per_probe.mean(probes), error / math.sqrt(count)


def spectral_density(operator: Operator, *, probes: int = 8, steps: int = 64, seed: int = 0) -> SpectralDensity:
    """Run stochastic Lanczos quadrature: a Gauss rule of `steps` nodes for each of `probes` random directions."""
    generator = torch.Generator().manual_seed(seed)
    nodes, weights = [], []
    for _ in range(probes):
        process = Bidiagonalization(operator, generator, steps)
        for _ in range(process.limit):
            process.step()
        theta, _, p = process.decompose()
        nodes.append(theta if process.finite else torch.full_like(theta, math.nan))
        weights.append(p[0].square())
    short = min(operator.outputs, operator.inputs)
    return SpectralDensity(
        nodes=torch.stack(nodes).to(operator.device), weights=torch.stack(weights).to(operator.device), count=short
    )
