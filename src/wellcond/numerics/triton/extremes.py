"""The largest and the smallest eigenvalues of WWᵀ for many W at once: a fused twin of `numerics.extremes`.

One inverse of the Gram matrix by block sweeps, refined by a Newton step where needed, then power iteration on both. The
iteration stops within 1e-3 of an eigenvalue, mostly far closer, so that a condition number, the root of a ratio, is
good to 1e-3 at worst; on evenly spread spectra 3e-5 was seen.

The Gram matrix is off by about 1e-16·λmax, and so are its eigenvalues. Its eigenvector v is less far off, and ‖Wᵀv‖²
errs by the square of v's error: so a small λmin is computed from W itself, and is good far below what the Gram matrix
resolves. A λmin that the Gram matrix resolves is computed from there, since W is four times as large.
"""

import torch
from torch import Tensor

from .gram import largest_eigenvalue
from .spd_inverse import negative_inverse

__all__ = ["extreme_eigenvalues", "smallest_eigenvalue"]


NEWTON_BELOW = 1e-9  # of λmax: pivot from which on the sweeps are accurate enough for an eigenvector
GRAM_TELLS = 1e-7  # of λmax: λmin from which on the Gram matrix, off by 1e-16·λmax, gives it to 1e-8
RIDGE = 2e-15  # of the trace: makes every Gram matrix positive definite in float64, and keeps its eigenvectors


def extreme_eigenvalues(w: Tensor, gram: Tensor, size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (λmax, λmin, residual) of WWᵀ/size, float64 of trace 1, m ≤ FUSED_SIDE; each (b,).

    `gram` holds WWᵀ/size padded to whole blocks, (b, ld, ld) with ld = padded(m); RIDGE is added to its diagonal in
    place.

    λmin is never too small. The residual ‖WWᵀv/size − λmin·v‖ tells how far v is from an eigenvector; λmin errs by
    about residual²/λmin, if v is the one of the smallest eigenvalue. The residual does not prove that. In practice
    sixteen starts ensure it, whose rounding to float16 is noise in all directions: even a vector orthogonal to all of
    them was found.
    """
    m = w.shape[1]
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    diagonal[:, :m] += RIDGE
    diagonal[:, m:] = 1.0  # an identity there and in the inverse, while λmin ≤ 1/m
    largest, _ = largest_eigenvalue(gram, m)
    inverse, pivots = negative_inverse(gram, keep=True)
    index = (~(pivots >= NEWTON_BELOW * largest)).nonzero().squeeze(1)
    if len(index):
        # Sweeping errs by more than rounding as λmin/λmax nears 1e-12; a Newton step squares that error.
        some = inverse[index]
        inverse[index] = torch.baddbmm(some, some, gram[index] @ some, beta=2)
    vectors = _smallest_vectors(inverse, m)
    images = gram[:, :m, :m] @ vectors
    smallest, residual = _best((vectors * images).sum(1), images, vectors)
    smallest -= RIDGE
    index = (~(smallest >= GRAM_TELLS * largest)).nonzero().squeeze(1)
    if len(index):
        smallest[index], residual[index] = _quotients(w[index].double(), size[index], vectors[index])
    return largest, smallest, residual


def smallest_eigenvalue(w: Tensor, size: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Return (λmin, residual) of WWᵀ/size from its inverse up to sign, (b, ld, ld), which need not be exact."""
    return _quotients(w, size, _smallest_vectors(inverse, w.shape[1]))


def _smallest_vectors(inverse: Tensor, m: int) -> Tensor:
    """Return unit vectors, (b, m, 16), one of which is close to the eigenvector of the smallest eigenvalue."""
    _, vectors = largest_eigenvalue(inverse, m)
    # In float16 they still contain a little of every large eigenvalue's direction. Two steps in float64 remove that.
    vectors, inverse = vectors.double(), inverse[:, :m, :m]
    for _ in range(2):
        vectors = inverse @ vectors
        vectors = vectors / torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    return vectors


def _quotients(w: Tensor, size: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return (λmin, residual) of WWᵀ/size for these vectors, from W itself."""
    images = w.mT @ vectors
    return _best(images.square().sum(1) / size[:, None], (w @ images).div_(size[:, None, None]), vectors)


def _best(quotients: Tensor, images: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest quotient of each matrix, and how far its vector is from being an eigenvector."""
    smallest, best = quotients.min(1)
    residuals = torch.linalg.vector_norm(images - quotients[:, None] * vectors, dim=1)
    return smallest, residuals.gather(1, best[:, None]).squeeze(1)
