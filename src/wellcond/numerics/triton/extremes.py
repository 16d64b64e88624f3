"""The largest and the smallest eigenvalue of WWᵀ for many W at once: a fused twin of `numerics.extremes`.

One inverse of the Gram matrix by block sweeps, refined by Newton's step where that is needed, then power iteration on
both. The iteration stops at 1e-3 of an eigenvalue, mostly far closer, so that a condition number, a ratio's root, is
good to 1e-3 at the worst; on evenly spread spectra 3e-5 was seen.

The Gram matrix is off by about 1e-16·λmax, and so is an eigenvalue of it. Its eigenvector v is not that far off, and
‖Wᵀv‖² has the square of v's error: a small λmin is taken from W itself, and good far below what the Gram matrix can
tell; one that the Gram matrix tells is taken from there, for W is four times as large.
"""

import torch
from torch import Tensor

from .gram import largest_eigenvalue
from .spd_inverse import negative_inverse

__all__ = ["extreme_eigenvalues", "smallest_eigenvalue"]


NEWTON_BELOW = 1e-9  # of λmax: a pivot from which on the sweeps are good enough for an eigenvector
GRAM_TELLS = 1e-7  # of λmax: a λmin from which on the Gram matrix, off by 1e-16·λmax, gives it to 1e-8
RIDGE = 2e-15  # of the trace: with it every Gram matrix is positive definite in float64, and its eigenvectors stay


def extreme_eigenvalues(w: Tensor, gram: Tensor, size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(λmax, λmin, residual) of WWᵀ/size, float64 of trace 1, m ≤ FUSED_SIDE; each (b,).

    `gram` holds it with room for whole blocks, (b, ld, ld) with ld = padded(m); its diagonal is changed, by RIDGE.

    λmin never comes out too small. The residual ‖WWᵀv/size − λmin·v‖ tells how far v is from an eigenvector; λmin errs
    by some residual²/λmin, if that is the smallest one's. It does not prove that. Sixteen starts whose rounding to
    float16 is noise in all directions make it so: a vector orthogonal to all of them was found all the same.
    """
    m = w.shape[1]
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    diagonal[:, :m] += RIDGE
    diagonal[:, m:] = 1.0  # the inverse keeps an identity there, and λmin ≤ 1/m below it
    largest, _ = largest_eigenvalue(gram, m)
    inverse, pivots = negative_inverse(gram, keep=True)
    index = (~(pivots >= NEWTON_BELOW * largest)).nonzero().squeeze(1)
    if len(index):
        # Sweeping errs by more than rounding where λmin/λmax nears 1e-12; a Newton step squares what is left.
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
    """(λmin, residual) of WWᵀ/size by its inverse, up to a sign, (b, ld, ld), which need not be exact."""
    return _quotients(w, size, _smallest_vectors(inverse, w.shape[1]))


def _smallest_vectors(inverse: Tensor, m: int) -> Tensor:
    """(b, m, 16): unit vectors, one of which is close to the eigenvector of the smallest eigenvalue."""
    _, vectors = largest_eigenvalue(inverse, m)
    # In float16 they still hold a share of every large direction. Two turns in float64 take it away.
    vectors, inverse = vectors.double(), inverse[:, :m, :m]
    for _ in range(2):
        vectors = inverse @ vectors
        vectors = vectors / torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    return vectors


def _quotients(w: Tensor, size: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """(λmin, residual) of WWᵀ/size, of those vectors, from W itself."""
    images = w.mT @ vectors
    return _best(images.square().sum(1) / size[:, None], (w @ images).div_(size[:, None, None]), vectors)


def _best(quotients: Tensor, images: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest quotient of each matrix, and how far its vector is from being an eigenvector."""
    smallest, best = quotients.min(1)
    residuals = torch.linalg.vector_norm(images - quotients[:, None] * vectors, dim=1)
    return smallest, residuals.gather(1, best[:, None]).squeeze(1)
