"""The largest and the smallest singular value of many matrices at once, without a singular value decomposition.

    largest, smallest = extreme_singular_values(w, ceiling=2**23)     # (b, m, d) float64, m ≤ d → (b,), (b,)

All of it runs in float64 on the short side, in three stages; a matrix moves on only when a stage cannot answer for it:

1. G = WWᵀ and its extreme eigenvalues: λmax from G, 1/λmin from the inverse, by way of Cholesky. Squaring W squares κ, and
   rounding (about 1e-16·λmax) hides a λmin below RESOLVABLE·λmax; such a matrix is unresolved, as one without a Cholesky is.
2. A triangular L with LLᵀ = WWᵀ, found without squaring κ, and 1/λmin from (LLᵀ)⁻¹: good to a few 1e-16·κ. On a CPU L
   comes from Householder QR. Elsewhere batched QR is slow, and two Cholesky factors do: with L₁L₁ᵀ = G + SHIFT·λmax·I,
   Y = L₁⁻¹W is well-conditioned, YYᵀ = L₂L₂ᵀ exists whatever G has lost, and L = L₁L₂ (Fukaya et al. 2020).
3. `torch.linalg.svdvals`: for float64 input beyond κ = FACTOR_LIMIT, or where an iteration did not converge.

An eigenvalue found by iteration carries a bound on its error; without a proof of TOLERANCE it counts as not converged.
"""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["RESOLVABLE", "TOLERANCE", "extreme_singular_values", "largest_singular_value", "scaled_gram"]

RESOLVABLE = 1e-11  # of λmin/λmax: beyond it, at κ = 3e5, the rounding of a Gram matrix moves κ by more than about 1e-5
TOLERANCE = (
    1e-5  # bound on the relative error of an extreme eigenvalue: half of it for σ; mostly the error is far smaller
)
SHIFT = 1e-11  # far above the rounding of any Gram matrix, so the shifted Cholesky succeeds
FACTOR_LIMIT = 1e10  # the κ up to which stage 2 stays within the tolerance
MAX_STEPS = 128  # of Lanczos; spectra with no gap at their edge were seen to take 90
SMALL = 48  # up to this size LAPACK's eigvalsh beats an iteration on a CPU


def extreme_singular_values(w: Tensor, *, ceiling: float) -> tuple[Tensor, Tensor]:
    """(σmax, σmin) of finite, non-zero float64 matrices (b, m, d) with m ≤ d; each (b,), float64, not differentiable.

    Squares of entries must neither overflow nor vanish. Where κ exceeds `ceiling`, σmin is only an upper bound that still
    shows it: what lies beyond the ceiling is not worth a decomposition.
    """
    if w.shape[1] == 1:
        norm = w.square().sum((-2, -1)).sqrt()
        return norm, norm.clone()
    gram, size = scaled_gram(w)
    largest, smallest, resolved = _extreme_eigenvalues(gram)
    if not bool(resolved.all()):
        index = (~resolved).nonzero().squeeze(1)
        some = w[index] / size[index].sqrt()[:, None, None]
        factor = _triangular_factor(some, gram[index], largest[index])
        # An estimate of the largest eigenvalue is a lower bound: it can pass the ceiling before the iteration converges.
        bounded = 2 * ceiling < FACTOR_LIMIT
        enough = (2 * ceiling if bounded else float("inf")) ** 2 / largest[index]
        inverse, converged = _largest_of_inverse(factor, enough)
        smallest[index] = 1 / inverse
        known = (inverse > enough) | (converged & (largest[index] * inverse <= FACTOR_LIMIT**2))
        if not bool(known.all()):
            rest = (~known).nonzero().squeeze(1)
            values = torch.linalg.svdvals(some[rest]).square()
            largest[index[rest]], smallest[index[rest]] = values[:, 0], values[:, -1]
    smallest = torch.minimum(smallest, largest)  # equal ones may differ in their last bits
    return (largest * size).sqrt(), (smallest * size).sqrt()


def largest_singular_value(w: Tensor) -> Tensor:
    """σmax alone, (b,); arguments as for `extreme_singular_values`."""
    gram, size = scaled_gram(w)
    return (_largest_eigenvalue(gram) * size).sqrt()


def scaled_gram(w: Tensor) -> tuple[Tensor, Tensor]:
    """(WWᵀ/t, t) with t the trace of WWᵀ: (b, m, m) of trace 1, and (b,)."""
    gram = w @ w.mT
    size = _trace(gram)
    return gram / size[:, None, None], size


def _extreme_eigenvalues(gram: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(λmax, λmin, resolved) of float64 Gram matrices (b, m, m) of trace 1; each (b,).

    λmax always holds, λmin only where `resolved`: there both are within TOLERANCE, and λmin ≥ RESOLVABLE·λmax.
    """
    if gram.device.type == "cpu" and gram.shape[-1] <= SMALL:
        values = torch.linalg.eigvalsh(gram)
        return values[:, -1].clone(), values[:, 0].clone(), values[:, 0] >= RESOLVABLE * values[:, -1]
    largest = _largest_eigenvalue(gram)
    factor, info = torch.linalg.cholesky_ex(gram)
    # Squared pivots are upper bounds on λmin: a tiny one shows before any iteration that the Gram matrix is not enough.
    pivot = factor.diagonal(dim1=-2, dim2=-1).square().amin(-1)
    hopeful = (info == 0) & (pivot >= RESOLVABLE * largest)
    factor = torch.where(hopeful[:, None, None], factor, _eye(factor))
    enough = 1 / (RESOLVABLE * largest)
    inverse, converged = _largest_of_inverse(factor, enough)
    return largest, 1 / inverse, hopeful & converged & (inverse <= enough)


def _triangular_factor(w: Tensor, gram: Tensor, largest: Tensor) -> Tensor:
    """Lower triangular L with LLᵀ = WWᵀ up to about 1e-16·σmax in L: no diagonal entry is zero."""
    eps = torch.finfo(torch.float64).eps
    if w.device.type == "cpu":
        factor = torch.geqrf(w.mT)[0][:, : w.shape[1]].triu().mT
        diagonal = factor.diagonal(dim1=-2, dim2=-1)
        floor = (eps * largest.sqrt())[:, None]
        return factor + torch.diag_embed(torch.where(diagonal.abs() < floor, floor, 0))  # within QR's own rounding
    first = torch.linalg.cholesky_ex(gram + (SHIFT * largest)[:, None, None] * _eye(gram))[0]
    rows = torch.linalg.solve_triangular(first, w, upper=False)
    second, info = torch.linalg.cholesky_ex(rows @ rows.mT)
    # The second fails only where WWᵀ is below 1e-15·SHIFT·λmax: anything small shows that.
    second = torch.where((info == 0)[:, None, None], second, eps**0.5 * _eye(second))
    return first @ second


def _largest_eigenvalue(a: Tensor) -> Tensor:
    """λmax of symmetric positive semi-definite float64 matrices (b, m, m), within TOLERANCE."""
    if a.device.type != "cpu":
        largest, converged = _largest_by_squaring(a)
    elif a.shape[-1] <= SMALL:
        return torch.linalg.eigvalsh(a)[:, -1].clone()
    else:
        largest, converged = _largest_by_lanczos(lambda v: a @ v, a)
    if not bool(converged.all()):
        index = (~converged).nonzero().squeeze(1)
        largest[index] = torch.linalg.eigvalsh(a[index])[:, -1]
    return largest


def _largest_of_inverse(factor: Tensor, enough: Tensor) -> tuple[Tensor, Tensor]:
    """λmax of (LLᵀ)⁻¹, from below, and whether it is within TOLERANCE; it may stop where it is found to exceed `enough`."""
    solve = torch.linalg.solve_triangular
    if factor.device.type == "cpu":
        return _largest_by_lanczos(
            lambda v: solve(factor.mT, solve(factor, v, upper=False), upper=True), factor, enough
        )
    # Many right-hand sides at once are as cheap as one there; the error of L⁻¹ is a few 1e-16·κ(L), as for the solves.
    inverse = solve(factor, _eye(factor).expand_as(factor), upper=False)
    return _largest_by_squaring(inverse.mT @ inverse)


def _largest_by_lanczos(
    apply: Callable[[Tensor], Tensor], like: Tensor, enough: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """λmax of the operators `apply`: (b, m, 1) → (b, m, 1), symmetric positive definite, and whether it converged.

    Lanczos from a fixed start, orthogonalised in full. With Ritz pair (θ, y) and residual r = ‖Ay − θy‖ there is an
    eigenvalue within r of θ ≤ λmax, so r ≤ TOLERANCE·θ ends it: for each matrix by itself, at the same step whatever its
    batch. (That this eigenvalue is the largest fails only for a start that happens to be orthogonal to its vector.)
    """
    batch, size = like.shape[0], like.shape[-1]
    steps = min(size, MAX_STEPS)
    start = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    basis = like.new_zeros(batch, steps + 1, size)
    basis[:, 0] = start / start.norm()
    tridiagonal = like.new_zeros(batch, steps + 1, steps + 1)
    value, done = like.new_zeros(batch), torch.zeros(batch, dtype=torch.bool)
    stop = torch.zeros_like(done)
    for step in range(steps):
        so_far = basis[:, : step + 1]
        vector = apply(basis[:, step, :, None])
        for _ in range(2):  # twice is enough
            overlap = so_far @ vector
            vector = vector - so_far.mT @ overlap
            tridiagonal[:, step, step] += overlap[:, step, 0]
        norm = vector.squeeze(-1).norm(dim=-1)
        if step % 6 == 5 or step == steps - 1:
            values, vectors = torch.linalg.eigh(tridiagonal[:, : step + 1, : step + 1])
            new, residual = values[:, -1], norm * vectors[:, -1, -1].abs()
            value = torch.where(stop, value, new)
            done = done | (~stop & (residual <= TOLERANCE * new))
            stop = stop | done if enough is None else stop | done | (value > enough)
            if bool(stop.all()):
                break
        # After an invariant subspace is exhausted the norm is rounding; a zero vector leaves the found values as they are.
        alive = norm > 1e-14 * tridiagonal[:, 0, 0]
        norm = torch.where(alive, norm, 0.0)
        basis[:, step + 1] = vector.squeeze(-1) / torch.where(alive, norm, 1.0)[:, None] * alive[:, None]
        tridiagonal[:, step, step + 1] = tridiagonal[:, step + 1, step] = norm
    return value, done


def _largest_by_squaring(a: Tensor) -> tuple[Tensor, Tensor]:
    """λmax of symmetric positive semi-definite matrices (b, m, m) by products alone, and whether it is within TOLERANCE.

    With q = 2²⁰ reached by squaring, v a column of A^q:  vᵀAv/vᵀv ≤ λmax ≤ tr(A^q)^(1/q), and the upper bound is at most
    m^(1/q) = 1 + ln(m)/q too high. No start to choose, no test of convergence on the way, however close the eigenvalues.
    """
    power, log_scale, exponent = a, a.new_zeros(a.shape[0]), 1
    for _ in range(5):
        trace = _trace(power)
        power = power / trace[:, None, None]
        for _ in range(4):
            power = power @ power
        log_scale, exponent = 16 * (log_scale + trace.log()), 16 * exponent
    upper = ((log_scale + _trace(power).log()) / exponent).exp()
    column = power.diagonal(dim1=-2, dim2=-1).argmax(-1)
    vector = power[torch.arange(a.shape[0], device=a.device), :, column, None]
    vector = vector / vector.abs().amax(-2, keepdim=True)
    lower = (vector.mT @ a @ vector / (vector.mT @ vector)).flatten()
    return lower, upper - lower <= TOLERANCE * upper


def _trace(a: Tensor) -> Tensor:
    return a.diagonal(dim1=-2, dim2=-1).sum(-1)


def _eye(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
