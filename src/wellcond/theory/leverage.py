"""How many landmarks does Skyformer need for this input? Leverage scores and the statistical dimension.

    statistical_dimension(q, k, epsilon=0.1)         # (…): about how many landmarks keep the error below ε‖C‖
    leverage_scores(q, k, epsilon=0.1)               # (…, n + m): how much each query and key matters, in (0, 1)
    sufficient_landmarks(q, k, epsilon=0.1, delta=0.1)   # the number that Theorem 2 proves sufficient; far more

C_ij = exp(−‖q_i − k_j‖²·scale/2) is the matrix of kernelized attention, C̄ the (n + m)-square matrix of the same kernel
over queries and keys together, λ = ε‖C‖. Then ℓ_i = [C̄(C̄ + λ)⁻¹]_ii and d_stat = Σℓ_i (Musco & Musco 2017). If the
spectrum decays smoothly, about twice d_stat random landmarks sufficed in our draws; if tokens lie in separate clusters,
it takes several times more, since each cluster must be hit (docs/theory.md). If d_stat is close to n + m, no small
number of landmarks suffices: the spectrum of the input does not decay, and Skyformer is the wrong tool for it.

Cost: (n + m)³ operations and (n + m)² numbers in float64 per head, one head at a time; no gradients.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from wellcond.numerics.autocast import no_autocast

__all__ = ["Leverage", "completion", "leverage", "leverage_scores", "statistical_dimension", "sufficient_landmarks"]


RESOLVED = 1e3  # with λ, or all eigenvalues of C̄, this many rounding errors large, scores are good to three digits


class Leverage(NamedTuple):
    """Scores (…, n + m) of one or many inputs, their sum (…), and λ (…)."""

    scores: Tensor
    dimension: Tensor
    lam: Tensor


def statistical_dimension(q: Tensor, k: Tensor, epsilon: float, *, scale: float | None = None) -> Tensor:
    """Return d_stat of each input, (…), from q (…, n, p) and k (…, m, p): between 0 and n + m.

    Args:
        epsilon: the allowed error as a fraction of ‖C‖, in (0, 1).
        scale: as for attention, by default 1/√p.

    Raises ValueError for shapes that do not fit, an epsilon outside (0, 1), non-finite values, and if ε‖C‖ is lost in
    rounding.

    Examples:
        >>> q = torch.zeros(8, 4)            # eight equal tokens: one landmark is enough
        >>> statistical_dimension(q, q, epsilon=0.1)
        tensor(0.9524)
    """
    return leverage(q, k, epsilon, scale=scale).dimension


def leverage_scores(q: Tensor, k: Tensor, epsilon: float, *, scale: float | None = None) -> Tensor:
    """Return ℓ_i of each query, then each key, (…, n + m), in (0, 1). Arguments as for `statistical_dimension`."""
    return leverage(q, k, epsilon, scale=scale).scores


def sufficient_landmarks(q: Tensor, k: Tensor, epsilon: float, delta: float, *, scale: float | None = None) -> Tensor:
    """Return Theorem 2's number of uniform landmarks for ‖C̃ − C‖ ≤ ε‖C‖ with probability 1 − δ.

    (56/3)(d_stat/β)·ln(2(n + m)/δ) with β = d_stat/((n + m)·max ℓ). From n + m on it says nothing: that many landmarks
    could be all tokens. It assumes random sampling with replacement, and an exact pseudo-inverse.
    """
    if not 0 < delta < 0.5:
        raise ValueError(f"delta is a probability below 1/2, not {delta}")
    found = leverage(q, k, epsilon, scale=scale)
    count = found.scores.shape[-1]
    over_beta = count * found.scores.amax(-1)  # d_stat/β
    return torch.ceil(56 / 3 * over_beta * math.log(2 * count / delta))


def leverage(q: Tensor, k: Tensor, epsilon: float, *, scale: float | None = None) -> Leverage:
    """Return scores, dimension and λ together."""
    _check(q, k, epsilon)
    batch, dtype = q.shape[:-2], torch.float64 if q.dtype == torch.float64 else torch.float32
    count = q.shape[-2] + k.shape[-2]
    heads_q, heads_k = q.detach().reshape(-1, *q.shape[-2:]), k.detach().reshape(-1, *k.shape[-2:])
    with torch.no_grad(), no_autocast(q):
        parts = [_one(a, b, epsilon, scale) for a, b in zip(heads_q, heads_k, strict=True)]
    scores = torch.stack([part.scores for part in parts]) if parts else q.new_zeros(0, count)
    lam = torch.stack([part.lam for part in parts]) if parts else q.new_zeros(0)
    return Leverage(
        scores.to(dtype).reshape(*batch, count), scores.sum(-1).to(dtype).reshape(batch), lam.to(dtype).reshape(batch)
    )


def _one(q: Tensor, k: Tensor, epsilon: float, scale: float | None) -> Leverage:
    whole = completion(q, k, scale=scale)
    lam = epsilon * torch.linalg.matrix_norm(whole[: len(q), len(q) :], ord=2)
    if not bool(lam > 0):
        raise ValueError(
            "queries and keys are so far apart that every weight of the attention is zero; scale them down, or raise "
            "epsilon"
        )
    noise = torch.finfo(whole.dtype).eps * len(whole)  # rounding error of C̄'s eigenvalues, which sum to n + m
    if bool(lam >= RESOLVED * noise):
        whole.diagonal().add_(lam)
        # C̄(C̄ + λ)⁻¹ = 1 − λ(C̄ + λ)⁻¹: one Cholesky factor instead of an eigendecomposition.
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(whole))
        scores = (1 - lam * inverse.diagonal()).clamp(0, 1)
        return Leverage(scores, scores.sum(), lam)
    values, vectors = torch.linalg.eigh(whole)
    if bool(values[0] < RESOLVED * noise):
        raise ValueError(
            f"λ = ε‖C‖ = {float(lam):.1e} is less than float64 tells from zero beside the other eigenvalues, of which "
            "some are as small: rounding would decide the scores. Queries and keys are too far apart for so small an "
            "error; scale them down, or raise epsilon"
        )
    scores = vectors.square() @ (values / (values + lam))
    return Leverage(scores, scores.sum(), lam)


def completion(q: Tensor, k: Tensor, *, scale: float | None = None) -> Tensor:
    """Return C̄, (…, n + m, n + m) in float64: the Gaussian kernel over queries, then keys; its diagonal is 1."""
    x = torch.cat([q, k], dim=-2).double()
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    x = x - x.mean(-2, keepdim=True)  # keeps the distances, reduces cancellation
    squares = x.square().sum(-1)
    distances = (squares[..., :, None] + squares[..., None, :] - 2 * x @ x.mT).clamp_min(0)
    kernel = torch.exp(-0.5 * scale * distances)
    kernel.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    return kernel


def _check(q: Tensor, k: Tensor, epsilon: float) -> None:
    if q.ndim < 2 or q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1] or 0 in (*q.shape[-2:], k.shape[-2]):
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} do not fit; pass (…, n, p) and (…, m, p) with the same … and p"
        )
    if not q.is_floating_point() or not k.is_floating_point():
        raise ValueError(f"q and k are {q.dtype} and {k.dtype}; pass real floating-point tensors, e.g. q.float()")
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon is a part of ‖C‖, in (0, 1), not {epsilon}")
    if not bool(q.isfinite().all() & k.isfinite().all()):
        raise ValueError("q or k holds a NaN or an infinity, and has no leverage scores")
