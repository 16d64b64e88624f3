"""Powers as fitted sums of iterates: g^(−s) on (0, 1] from repeated products of one matrix with itself.

The iterates of a ← a (α − ¼α² a), from a = g, rise one after another: the k-th one reaches its plateau near g = α^(−k).
A weighted sum of them follows g^(−s) over any number of decades, one product per step, and stays flat below the last
step, which is the floor below which the power continues linearly. The weights are a minimax fit in relative error,
computed once per (epsilon, floor) on the host in float64.

    fit = direct_fit(epsilon=0.95, floor=3e-6)      # iterates of G itself; needs float64 products
    fit = folded_fit(epsilon=0.95, floor=3e-6)      # of 4K(1−K), K = t/(g+t): half the decades
"""

import functools
import math
from typing import NamedTuple

import numpy as np
import torch

__all__ = ["ALPHA", "DirectFit", "FoldedFit", "direct_fit", "folded_fit", "iterates_of", "minimax"]

RESOLVED = 1e-5  # the fit's bound holds for singular values above this share of the largest
ROUNDS = 40  # of reweighted least squares
ALPHA = 2.5  # growth per product; near 3 the plateau oscillates, below it more products are needed
FOLDED_STEPS = {
    10: 2.8,
    11: 2.7,
    12: 2.6,
    13: 2.5,
    14: 2.4,
}  # number of products: the growth per product that fits best


class DirectFit(NamedTuple):
    """power ≈ constant + Σ weights[k] · (k-th iterate of G), the 0-th being G itself."""

    alphas: tuple[float, ...]
    constant: float
    weights: tuple[float, ...]
    bound: float  # largest relative error for singular values in [RESOLVED, 1]


class FoldedFit(NamedTuple):
    """power ≈ D + F·K, with D and F = constant + Σ weight[k] · (k-th iterate of R); R = 4K(1 − K), K = t/(g + t).

    R falls off alike towards both ends of the range; K tells them apart. D has small weights and is the whole answer
    where g is large (K ≈ 0), so that large singular values are not a difference of two much larger numbers.
    """

    shift: float
    alphas: tuple[float, ...]
    careful: int  # how many of the first products must round, not truncate: it matters more the steeper the power
    near_constant: float
    near: tuple[float, ...]
    far_constant: float
    far: tuple[float, ...]
    bound: float


@torch.compiler.assume_constant_result
def direct_fit(epsilon: float, floor: float) -> DirectFit:
    return _direct_fit(float(epsilon), float(floor))


@torch.compiler.assume_constant_result
def folded_fit(epsilon: float, floor: float) -> FoldedFit:
    return _folded_fit(float(epsilon), float(floor))


@functools.lru_cache(maxsize=256)
def _direct_fit(epsilon: float, floor: float) -> DirectFit:
    g, target, tolerance = _problem(epsilon, floor, points=600)
    steps = math.ceil(math.log(1 / floor**2) / math.log(ALPHA)) + 1
    alphas = (ALPHA,) * steps
    weights, error = _minimax(_iterates(g, alphas), target, tolerance)
    return DirectFit(alphas, float(weights[0]), tuple(map(float, weights[1:])), _bound(g, error))


@functools.lru_cache(maxsize=256)
def _folded_fit(epsilon: float, floor: float) -> FoldedFit:
    g, target, tolerance = _problem(epsilon, floor, points=600)
    shift = RESOLVED  # the middle of the decades [RESOLVED², 1], so both ends fold onto the same range
    k = shift / (g + shift)
    careful = 0 if epsilon >= 0.85 else 4  # each step grows the smallest R by α, away from the rounding
    fit = None
    for steps, alpha in FOLDED_STEPS.items():
        alphas = (alpha,) * steps
        iterates = _iterates(4 * k * (1 - k), alphas)
        basis = np.concatenate([iterates, k[:, None] * iterates], axis=1)
        weights, error = _minimax(basis, target, tolerance)
        near, far = (tuple(map(float, half)) for half in np.split(weights, 2))
        fit = FoldedFit(shift, alphas, careful, near[0], near[1:], far[0], far[1:], _bound(g, error))
        if (error / tolerance)[g > RESOLVED**2].max() <= 6e-4:
            break
    assert fit is not None
    return fit


def _problem(epsilon: float, floor: float, points: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the grid of g = (σ/σmax)², the power there, and each point's error tolerance relative to the top ones."""
    exponent = (1 - epsilon) / 2
    g = np.logspace(2 * math.log10(floor) - 1.5, 0, points)
    target = np.maximum(g, floor**2) ** -exponent
    # Large singular values dominate the Frobenius norm (target 1e-3); the smallest may be ten times worse (target 2 %).
    tolerance = np.clip((g / 1e-3) ** -0.2, 1, 10)
    tolerance[g < 0.8 * RESOLVED**2] = 100
    return g, target, tolerance


def iterates_of(start: np.ndarray, alphas: tuple[float, ...]) -> np.ndarray:
    """Return `start` and every iterate after it, (points, len(alphas) + 1)."""
    columns = [start]
    for alpha in alphas:
        a = columns[-1]
        columns.append(a * (alpha - alpha * alpha / 4 * a))
    return np.stack(columns, axis=1)


def _iterates(start: np.ndarray, alphas: tuple[float, ...]) -> np.ndarray:
    return np.concatenate([np.ones_like(start)[:, None], iterates_of(start, alphas)], axis=1)


def _minimax(basis: np.ndarray, target: np.ndarray, tolerance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return weights whose largest |relative error| / tolerance is small, and the relative errors."""
    weights, error = minimax(basis, target, target * tolerance)
    return weights, error * tolerance


def minimax(basis: np.ndarray, target: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return weights whose largest |error| / scale is small, by Lawson's reweighted least squares, and those ratios."""
    matrix = basis / scale[:, None]
    aim = target / scale
    importance = np.full_like(aim, 1 / len(aim))
    best, best_error = None, None
    for _ in range(ROUNDS):
        root = np.sqrt(importance)
        weights = np.linalg.lstsq(matrix * root[:, None], aim * root, rcond=1e-13)[0]
        error = np.abs(matrix @ weights - aim)
        if best_error is None or error.max() < best_error.max():
            best, best_error = weights, error
        importance = importance * (error / error.max() + 1e-3)
        importance /= importance.sum()
    assert best is not None
    assert best_error is not None
    return best, best_error


def _bound(g: np.ndarray, error: np.ndarray) -> float:
    return float(error[g >= RESOLVED**2].max())
