"""The largest and the smallest singular values of many matrices at once, without a singular value decomposition.

    largest, smallest = extreme_singular_values(w, ceiling=2**23)      # (b, m, d) float64, m ≤ d → (b,), (b,)

Everything runs in float64, in three stages; a matrix moves on only if a stage cannot resolve it:

1. G = WWᵀ: λmax from G, 1/λmin from its inverse via Cholesky (small matrices on a CPU: both from `eigvalsh`). Squaring
   W squares κ, and rounding hides a λmin below RESOLVABLE·λmax: such a matrix stays unresolved.
2. A triangular L with LLᵀ = WWᵀ, found without squaring κ, and 1/λmin from (LLᵀ)⁻¹: good to a few 1e-16·κ. On a CPU L
   comes from Householder QR. For batches on other devices, where that is slow, it comes from Cholesky factors: with
   L₁L₁ᵀ = G + SHIFT·λmax·I, Y = L₁⁻¹W is far better conditioned than W, so that YYᵀ = L₂L₂ᵀ loses nothing, and L = L₁L₂
   (Fukaya et al. 2020). Beyond κ = FACTOR_LIMIT there is one more such step: L₂ is shifted too, and followed by an L₃.
3. `torch.linalg.svdvals`: for tiny matrices, iterations that did not converge and, on a CPU, float64 input beyond
   κ = FACTOR_LIMIT. There any method gives σmin to a few 1e-16·σmax at best.

An eigenvalue found by iteration counts as converged only if it provably is one, within TOLERANCE. Squaring also proves
that it is the largest. Lanczos steps do not: they never see a vector orthogonal to their start. So the start is derived
from the matrix itself, and no matrix is known for which this fails.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .fastpaths import FUSED_SIDE, fused_kernels

__all__ = ["extreme_singular_values", "largest_singular_value", "prefers_eigvalsh", "scaled_gram"]

RESOLVABLE = 8e-13  # λmin/λmax down to which G is trusted: at κ = 1e6 its rounding moves κ by 5e-5; by 2e-3 at worst
TOLERANCE = 1e-5  # relative, of an eigenvalue; half of it for a singular value. The error is mostly far smaller
SHIFT = 1e-11  # far above the rounding of any Gram matrix, so that the shifted one has a Cholesky factor
FACTOR_LIMIT = 1e10  # κ up to which stage 2 stays within the tolerance
MAX_STEPS = 128  # Lanczos steps; spectra without a gap at their edge have been seen to take 90
EIGVALSH_BELOW = 128  # size from which, on a CPU, iteration beats LAPACK's eigvalsh for a batch
QR_BELOW = 8  # long side over short side, from which products beat QR on a CPU too
FACTOR_FROM = 16  # size from which stage 2 beats an SVD on a CPU
FUSED_RESOLVABLE = 1e-14  # λmin/λmax down to which the fused kernels are trusted: κ = 1e7, beyond float32's ceiling
FUSED_RESIDUAL = 0.1  # relative to λmin: largest residual at which the fused kernels' eigenvector is trusted
SEED_ENTRIES = 2**13  # about how many entries of a matrix seed the start of its iteration
GROUP_BYTES = 2**22  # of matrices that a CPU iterates on together, so that they stay in its cache between steps


def extreme_singular_values(w: Tensor, *, ceiling: float) -> tuple[Tensor, Tensor]:
    """Return (σmax, σmin) of finite, non-zero matrices (b, m, d) with m ≤ d; each (b,), float64, not differentiable.

    Squares of the entries must neither overflow nor underflow in float64. Where κ exceeds `ceiling`, σmin is only an
    upper bound, low enough to show that: a value beyond the ceiling is not worth a decomposition.
    """
    if w.shape[1] == 1:
        norm = torch.linalg.vector_norm(w, dim=(-2, -1), dtype=torch.float64)
        return norm, norm.clone()
    m = w.shape[1]
    fused = m <= FUSED_SIDE and fused_kernels(w.device)
    if not (fused and w.dtype == torch.float32):  # there, only the few hard matrices become float64
        w = w.double()
    room, size = _gram_with_room(w) if fused else scaled_gram(w)
    gram = room[:, :m, :m]
    largest, smallest, resolved = _extreme_eigenvalues(w, room, size, ceiling)
    if not bool(resolved.all()):
        index = (~resolved).nonzero().squeeze(1)
        if len(index) == len(w):  # all of them: avoid the copies
            largest, smallest = _extremes_unsquared(w.double(), gram, size, largest, ceiling)
        else:
            some = _extremes_unsquared(w[index].double(), gram[index], size[index], largest[index], ceiling)
            largest[index], smallest[index] = some
    smallest = torch.minimum(smallest, largest)  # equal ones may differ in their last bits
    return (largest * size).sqrt(), (smallest * size).sqrt()


def largest_singular_value(w: Tensor) -> Tensor:
    """Return σmax alone, (b,); `w` as for `extreme_singular_values`."""
    gram, size = scaled_gram(w)
    return (_largest_eigenvalue(gram, w) * size).sqrt()


def scaled_gram(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return (WWᵀ/t, t) with t the trace of WWᵀ: (b, m, m) of trace 1, and (b,)."""
    gram = w @ w.mT
    size = _trace(gram)
    return gram.div_(size[:, None, None]), size


def _gram_with_room(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return `scaled_gram` padded to whole blocks of the fused kernels: (b, ld, ld), zero beyond (m, m).

    For float64 it is computed in four parts, one the transpose of another, since libraries do not exploit the symmetry
    of the product.
    """
    from .triton.geometry import Geometry
    from .triton.gram import gram, padded

    b, m, _ = w.shape
    if w.dtype == torch.float32:
        x = w.mT.contiguous() if w.stride(1) == 1 else w.contiguous()  # undo the transpose of tall matrices
        n, d = x.shape[1:]
        room = gram(x, n, d, Geometry.of_matrices(n, d))
        size = _trace(room)
        return room.div_(size[:, None, None]), size
    room = w.new_empty(b, padded(m), padded(m))
    room[:, m:], room[:, :m, m:] = 0, 0
    half = min(m, -(-m // 128) * 64)
    upper, lower = w[:, :half], w[:, half:]
    torch.bmm(upper, upper.mT, out=room[:, :half, :half])
    if half < m:
        torch.bmm(lower, upper.mT, out=room[:, half:m, :half])
        torch.bmm(lower, lower.mT, out=room[:, half:m, half:m])
        room[:, :half, half:m] = room[:, half:m, :half].mT
    size = _trace(room)
    return room.div_(size[:, None, None]), size


def prefers_eigvalsh(m: int, d: int) -> bool:
    """Whether, on a CPU, stage 1 is a single call of LAPACK's `eigvalsh` rather than Cholesky and Lanczos steps.

    The steps are cheaper for batches of larger matrices, but dearer for a single one, where the overhead of the calls
    dominates. Neither should be slower than `torch.linalg.cond`, which is slow on wide matrices: so there the single
    matrix sets the threshold.
    """
    return m < EIGVALSH_BELOW * (2 if d >= 2 * m else 1)


def _extreme_eigenvalues(w: Tensor, gram: Tensor, size: Tensor, ceiling: float) -> tuple[Tensor, Tensor, Tensor]:
    """Stage 1: return (λmax, λmin, resolved), each (b,), of gram = WWᵀ/size, (b, m, m) of trace 1, padded or not.

    λmax is always valid, λmin only where `resolved`: there λmin ≥ RESOLVABLE·λmax (FUSED_RESOLVABLE for the fused
    kernels), or the fused kernels show that κ is beyond the ceiling.
    """
    if w.shape[1] <= FUSED_SIDE and fused_kernels(gram.device):
        from .triton.extremes import extreme_eigenvalues

        largest, smallest, residual = extreme_eigenvalues(w, gram, size)
        found = (smallest >= FUSED_RESOLVABLE * largest) & (residual <= FUSED_RESIDUAL * smallest)
        # The kernels never underestimate λmin, so κ is at least what they find: enough to see it exceed the ceiling.
        return largest, smallest, found | (largest > ceiling**2 * smallest)
    if not _by_products(gram) and prefers_eigvalsh(*w.shape[1:]):
        values = torch.linalg.eigvalsh(gram)
        largest, smallest = values[:, -1], values[:, 0]
        return largest, smallest, smallest >= RESOLVABLE * largest
    largest = _largest_eigenvalue(gram, w)
    factor, info = torch.linalg.cholesky_ex(gram)
    # Every squared pivot is an upper bound on λmin, so some matrices are known to be hopeless before any iteration.
    pivot = factor.diagonal(dim1=-2, dim2=-1).square().amin(-1)
    hopeful = (info == 0) & (pivot >= RESOLVABLE * largest)
    if not bool(hopeful.all()):
        factor = torch.where(hopeful[:, None, None], factor, _eye(factor))
    enough = 1 / (RESOLVABLE * largest)
    inverse, converged = _largest_of_inverse(factor, enough, w)
    return largest, 1 / inverse, hopeful & converged & (inverse <= enough)


def _extremes_unsquared(
    w: Tensor, gram: Tensor, size: Tensor, largest: Tensor, ceiling: float
) -> tuple[Tensor, Tensor]:
    """Stages 2 and 3: return (λmax, λmin) of WWᵀ/size, given λmax."""
    known, smallest = torch.zeros_like(largest, dtype=torch.bool), torch.zeros_like(largest)
    if _by_products(w) or w.shape[1] >= FACTOR_FROM:
        # A largest eigenvalue is estimated from below, so κ can be seen to exceed the ceiling before convergence.
        enough = (2 * ceiling) ** 2 / largest if 2 * ceiling < FACTOR_LIMIT else torch.full_like(largest, torch.inf)
        factor = _triangular_factor(w, gram, size, largest)
        if gram.shape[-1] <= FUSED_SIDE and fused_kernels(gram.device):
            smallest, known = _smallest_by_factor(w, size, factor, largest, ceiling)
        index = (~known).nonzero().squeeze(1)
        if len(index):
            inverse, converged = _largest_of_inverse(factor[index], enough[index], w[index])
            seen = (inverse > enough[index]) | (converged & (largest[index] * inverse <= FACTOR_LIMIT**2))
            known[index], smallest[index] = seen, 1 / inverse
        if _by_products(w) and not bool(known.all()):
            index = (~known).nonzero().squeeze(1)
            factor = _triangular_factor(w[index], gram[index], size[index], largest[index], twice=True)
            inverse, converged = _largest_of_inverse(factor, enough[index], w[index])
            known[index], smallest[index] = converged, 1 / inverse
    if not bool(known.all()):
        values = torch.linalg.svdvals(w[~known].mT)  # LAPACK is twice as fast on a tall matrix as on a wide one
        squares = values[:, [0, -1]].square() / size[~known, None]
        largest[~known], smallest[~known] = squares.unbind(-1)
    return largest, smallest


def _smallest_by_factor(
    w: Tensor, size: Tensor, factor: Tensor, largest: Tensor, ceiling: float
) -> tuple[Tensor, Tensor]:
    """Return λmin of WWᵀ/size = LLᵀ by the fused kernels, and whether it is known: within their error bound, or so
    small that κ is beyond the ceiling."""
    from .triton.extremes import smallest_eigenvalue
    from .triton.gram import padded

    m = factor.shape[-1]
    inverse = torch.linalg.solve_triangular(factor, _eye(factor).expand_as(factor), upper=False)
    room = w.new_zeros(len(w), padded(m), padded(m))
    room[:, :m, :m] = inverse.mT @ inverse
    smallest, residual = smallest_eigenvalue(w, size, room)
    found = (residual <= FUSED_RESIDUAL * smallest) & (largest <= FACTOR_LIMIT**2 * smallest)
    return smallest, found | (largest > ceiling**2 * smallest)


def _triangular_factor(w: Tensor, gram: Tensor, size: Tensor, largest: Tensor, *, twice: bool = False) -> Tensor:
    """Return lower triangular L with LLᵀ = WWᵀ/size, to about 1e-16·σmax in L, and no zero on its diagonal.

    Ignore whatever is above the diagonal. `twice`: use two shifted factors before the last, for κ beyond 1e10.
    """
    eps = torch.finfo(torch.float64).eps
    if _by_products(w) or w.shape[2] >= QR_BELOW * w.shape[1]:
        first, rows = _shifted_factor(w, gram, largest)
        again = (rows @ rows.mT).div_(size[:, None, None])
        if twice:  # the eigenvalues of `again` are at most 1
            second, rows = _shifted_factor(rows, again, torch.ones_like(largest))
            first, again = first @ second, (rows @ rows.mT).div_(size[:, None, None])
        last, info = torch.linalg.cholesky_ex(again)
        # This fails only for λmin of about 1e-16·SHIFT·λmax or less; any small factor conveys that.
        last = torch.where((info == 0)[:, None, None], last, eps**0.5 * _eye(last))
        return first @ last
    factor = torch.geqrf(w.mT)[0][:, : w.shape[1]].mT / size.sqrt()[:, None, None]
    diagonal, floor = factor.diagonal(dim1=-2, dim2=-1), (eps * largest.sqrt())[:, None]
    diagonal.copy_(torch.where(diagonal.abs() < floor, floor, diagonal))  # no more than QR's own rounding
    return factor


def _shifted_factor(w: Tensor, gram: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return L with LLᵀ = gram + SHIFT·largest·I, and L⁻¹W."""
    factor = torch.linalg.cholesky_ex(gram + (SHIFT * largest)[:, None, None] * _eye(gram))[0]
    # Multiplying by the inverse errs by factors of 1 + O(1e-16·κ), as solving does, and is faster.
    return factor, torch.linalg.solve_triangular(factor, _eye(factor).expand_as(factor), upper=False) @ w


def _largest_eigenvalue(a: Tensor, w: Tensor) -> Tensor:
    """Return λmax of symmetric positive semi-definite float64 (b, m, m), within TOLERANCE; w seeds the start."""
    if _by_products(a):
        largest, converged = _largest_by_squaring(a)
    elif a.shape[-1] < EIGVALSH_BELOW:
        return torch.linalg.eigvalsh(a)[:, -1]
    else:
        largest, converged = _largest_by_lanczos(_multiply, a, w)
    if not bool(converged.all()):
        largest[~converged] = torch.linalg.eigvalsh(a[~converged])[:, -1]
    return largest


def _largest_of_inverse(factor: Tensor, enough: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return λmax of (LLᵀ)⁻¹, from below, and whether it is within TOLERANCE; beyond `enough` it need not be."""
    if not _by_products(factor):
        return _largest_by_lanczos(_solve, factor, w, enough)
    # L⁻¹ errs by a few 1e-16·κ(L), as solves do, and here many right-hand sides cost no more than one.
    inverse = torch.linalg.solve_triangular(factor, _eye(factor).expand_as(factor), upper=False)
    return _largest_by_squaring(inverse.mT @ inverse)


def _by_products(a: Tensor) -> bool:
    """Whether the device is best at whole-matrix products; a CPU prefers vectors, and matrices that stay in cache."""
    return a.device.type != "cpu"


def _multiply(a: Tensor, v: Tensor) -> Tensor:
    return (v[:, None, :] @ a).squeeze(1)  # row times matrix: several times faster on a CPU than matrix times column


def _solve(factor: Tensor, v: Tensor) -> Tensor:
    half = torch.linalg.solve_triangular(factor, v[:, :, None], upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True).squeeze(-1)


def _largest_by_lanczos(
    apply: Callable[[Tensor, Tensor], Tensor], matrices: Tensor, w: Tensor, enough: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return λmax of v ↦ apply(matrix, v), symmetric positive definite, from below, and whether it is within TOLERANCE.

    Lanczos: for a Ritz pair (θ, y) with residual r = ‖Ay − θy‖, some eigenvalue lies within r of θ ≤ λmax. Each matrix
    stops on its own, once r is small or θ > enough. (Small is a fifth of TOLERANCE, since that eigenvalue may be the
    second of two very close ones. There is no reorthogonalisation: losing orthogonality repeats values, but adds none.)
    """
    batch, size = matrices.shape[:2]
    if enough is None:
        enough = matrices.new_full((batch,), torch.inf)
    per_group = max(1, GROUP_BYTES // (8 * size * size))
    groups = [
        _lanczos_group(apply, group, start, limit)
        for group, start, limit in zip(
            matrices.split(per_group), _starts(w).split(per_group), enough.split(per_group), strict=True
        )
    ]
    values, converged = zip(*groups, strict=True)
    return torch.cat(values), torch.cat(converged)


def _starts(w: Tensor) -> Tensor:
    """Return a random unit vector for each matrix, (b, m), seeded by the bits of the matrix.

    The seed comes from W and not from its Gram matrix, whose last bits may depend on the batch; exponents are left out,
    so that scaling by a power of two changes nothing. Every row contributes some of its entries.
    """
    size, length = w.shape[1:]
    some = w[:, :, :: -(-size * length // SEED_ENTRIES)].contiguous().view(torch.int64) & ~(0x7FF << 52)
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, some.shape[1:], generator=generator) * 2 + 1
    starts = torch.empty(len(w), 2, size, dtype=torch.float64)
    for start, seed in zip(starts, (some * factors).sum((1, 2)).tolist(), strict=True):
        start.uniform_(-0.5, 0.5, generator=generator.manual_seed(seed))
    # No entry of a start is small, since the eigenvector may well be a single token.
    starts = starts[:, 0].sign() * (starts[:, 1] + 1)
    return starts / starts.norm(dim=-1, keepdim=True)


def _lanczos_group(
    apply: Callable[[Tensor, Tensor], Tensor], matrices: Tensor, start: Tensor, enough: Tensor
) -> tuple[Tensor, Tensor]:
    vector, previous = start, torch.zeros_like(start)
    diagonal, beside = [], []
    norm = value = torch.zeros_like(enough)
    done = converged = torch.zeros_like(enough, dtype=torch.bool)
    check = 6
    for step in range(1, MAX_STEPS + 1):
        image = apply(matrices, vector)
        along = torch.linalg.vecdot(image, vector)
        image = torch.addcmul(image, vector, along[:, None], value=-1).addcmul_(previous, norm[:, None], value=-1)
        norm = torch.linalg.vector_norm(image, dim=-1)
        diagonal.append(along)
        if step in (check, MAX_STEPS):
            check = max(step + 6, step * 3 // 2)
            tridiagonal = torch.diag_embed(torch.stack(diagonal, -1))
            if beside:
                off = torch.diag_embed(torch.stack(beside, -1), 1)
                tridiagonal = tridiagonal + off + off.mT
            values, vectors = torch.linalg.eigh(tridiagonal)
            value = torch.where(done, value, values[:, -1])
            converged = converged | (~done & (norm * vectors[:, -1, -1].abs() <= 0.2 * TOLERANCE * value))
            done = converged | (value > enough)
            if bool(done.all()):
                break
        beside.append(norm)
        # A norm of zero means that nothing is left to find; the zero vector then adds nothing.
        vector, previous = image / norm.clamp_min(1e-300)[:, None], vector
    return value, converged


def _largest_by_squaring(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return λmax of symmetric positive semi-definite (b, m, m), from below, and whether it is within TOLERANCE.

    Uses products alone. With q = 2²⁰ reached by squaring, and v a column of A^q: vᵀAv/vᵀv ≤ λmax ≤ tr(A^q)^(1/q). The
    upper bound is too high by a factor of at most m^(1/q) ≈ 1 + ln(m)/q, however close the eigenvalues; there is no
    start to choose, and no convergence test for the host to wait for.
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
    lower = (vector.mT @ (a @ vector) / (vector.mT @ vector)).flatten()
    return lower, upper - lower <= TOLERANCE * upper


def _trace(a: Tensor) -> Tensor:
    return a.diagonal(dim1=-2, dim2=-1).sum(-1)


def _eye(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
