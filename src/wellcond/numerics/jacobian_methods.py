"""The four methods for the singular values of one Jacobian; `jacobian.py` says what each is good for, and chooses.

found = measure(Linearization(function, x), "lanczos", k=6)
found.largest, found.largest_error, found.smallest_is_bound
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .density import SpectralDensity, spectral_density
from .lanczos import largest_singular_values
from .linearize import Linearization
from .singular import singular_values

__all__ = ["Found", "measure", "rounding_of"]

LANCZOS_STEPS, DENSITY_STEPS = 300, 64
RESOLVED = 1e3  # multiple of the noise of JJᵀ from which on a value is good to 5e-4


class Found(NamedTuple):
    """The result for one Jacobian: (k,) each; all values, and the density, if the method gives them."""

    largest: Tensor
    largest_error: Tensor
    smallest: Tensor
    smallest_error: Tensor
    values: Tensor | None = None
    density: SpectralDensity | None = None
    smallest_is_bound: bool = False
    converged: bool = True
    residual: Tensor | None = None
    """Some singular value lies within this of each of the largest; None if it equals `largest_error`."""


def rounding_of(jacobian: Linearization) -> float:
    """Return the error of a singular value, relative to σmax, due to rounding inside the block and in the SVD."""
    return jacobian.coarsest_eps() * math.sqrt(max(jacobian.outputs, jacobian.inputs))


def measure(
    jacobian: Linearization,
    method: str,
    k: int,
    *,
    steps: int | None = None,
    tolerance: float = 1e-8,
    probes: int = 8,
    seed: int = 0,
) -> Found:
    """Return the k largest and the k smallest singular values by `exact`, `gram`, `lanczos` or `density`."""
    tolerance = max(tolerance, 32 * jacobian.coarsest_eps())
    density_steps = min(max(k, steps or DENSITY_STEPS), jacobian.outputs, jacobian.inputs)
    if not jacobian.finite:
        return _not_finite(jacobian, method, k, probes, density_steps)
    if method == "exact":
        values = singular_values(jacobian.matrix().double(), method="svd")
        error = rounding_of(jacobian) * values[:1].expand(k)
        return Found(values[:k], error, values[-k:], error, values)
    if method == "gram":
        return _by_gram(jacobian, k)
    if method == "lanczos":
        return _by_lanczos(jacobian, k, max(k, steps or LANCZOS_STEPS), tolerance, seed)
    return _by_density(jacobian, k, density_steps, probes, seed)


def _by_gram(jacobian: Linearization, k: int) -> Found:
    wide = jacobian.outputs <= jacobian.inputs
    short = min(jacobian.outputs, jacobian.inputs)
    down, up = (jacobian.vjp, jacobian.jvp) if wide else (jacobian.jvp, jacobian.vjp)
    gram = torch.empty(short, short, dtype=torch.float64, device=jacobian.device)
    sizes = torch.empty(short, 1, dtype=torch.float64, device=jacobian.device)
    for i in range(short):
        unit = torch.zeros(short, dtype=jacobian.dtype, device=jacobian.device)
        unit[i] = 1
        row = down(unit)
        sizes[i] = size = row.abs().amax()
        # Scaled to 1, so that squares stay within the range of float32.
        gram[i] = up(row / torch.where(size > 0, size, 1)).double()
    top = sizes.max()
    gram *= sizes / top / top if top > 0 else 0
    if not bool(gram.isfinite().all()):
        return _not_finite(jacobian, "gram", k)
    squares = torch.linalg.eigvalsh((gram + gram.mT) / 2).flip(0).clamp_min(0)  # in units of top²
    values = top * squares.sqrt()
    noise = 4 * rounding_of(jacobian) * squares[0]  # in every square
    error = top * torch.where(squares > noise, noise / squares.sqrt(), noise.sqrt())
    if bool(squares[-1] >= RESOLVED * noise):
        return Found(values[:k], error[:k], values[-k:], error[-k:], values)
    # A square that drowns in the noise is only known to be at most its computed value plus the noise.
    bound = top * (squares[-k:] + noise).sqrt()
    return Found(
        values[:k], error[:k], bound, torch.full_like(bound, math.inf), values, smallest_is_bound=bool(values[0] > 0)
    )


def _by_lanczos(jacobian: Linearization, k: int, steps: int, tolerance: float, seed: int) -> Found:
    found = largest_singular_values(jacobian, k, max_steps=steps, tolerance=tolerance, seed=seed)
    noise = rounding_of(jacobian) * found.values[0]
    return Found(
        found.values,
        found.errors + noise,
        found.smallest,
        noise.expand(k) if found.complete else torch.full_like(found.smallest, math.inf),
        smallest_is_bound=not found.complete,
        converged=found.converged,
        residual=found.residuals + noise,
    )


def _by_density(jacobian: Linearization, k: int, steps: int, probes: int, seed: int) -> Found:
    density = spectral_density(jacobian, probes=probes, steps=steps, seed=seed)
    # By interlacing, the i-th largest node of any probe is at most the i-th largest singular value; likewise below.
    largest, smallest = density.nodes[:, :k].amax(0), density.nodes[:, -k:].amin(0)
    complete = steps == min(jacobian.outputs, jacobian.inputs)
    error = rounding_of(jacobian) * largest[:1].expand(k) if complete else torch.full_like(largest, math.inf)
    return Found(largest, error, smallest, error, density=density, smallest_is_bound=not complete, converged=complete)


def _not_finite(jacobian: Linearization, method: str, k: int, probes: int = 1, steps: int = 1) -> Found:
    def nan(*shape: int) -> Tensor:
        return torch.full(shape, math.nan, dtype=torch.float64, device=jacobian.device)

    short = min(jacobian.outputs, jacobian.inputs)
    density = SpectralDensity(nodes=nan(probes, steps), weights=nan(probes, steps), count=short)
    return Found(
        nan(k),
        nan(k),
        nan(k),
        nan(k),
        values=nan(short) if method in ("exact", "gram") else None,
        density=density if method == "density" else None,
        converged=False,
    )
