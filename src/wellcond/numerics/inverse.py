"""Solves with symmetric positive definite matrices, and inverses by matrix products alone.

    y = solve_spd(w, u, smallest=0.1)                    # w y = u by Cholesky, (…, d, d), (…, d, c) → (…, d, c)
    n, r = normalize_spd(w)                              # n = diag(r) w diag(r), with its spectrum in (0, 1]
    z = invert_by_iteration(n, num_iterations=6)         # z ≈ n⁻¹, third order
    z = invert_by_iteration(a, start=transposed_start(a))    # ≈ the pseudo-inverse of any a

Everything is computed in float32 at least, under autocast too, and for each matrix by itself: no result depends on the
others of its batch, unless `transposed_start(…, shared=True)` is used.

The iteration is Z ← ¼ Z(13I − NZ(15I − NZ(7I − NZ))). With R = I − NZ it satisfies R ← R³(3I + R)/4 exactly, so that an
eigenvalue x of NZ converges to 1 from anywhere in (0, 2.99), and a small one grows by a factor of 3.25 per step:
stopped after a few steps, the iteration is a filter that inverts large eigenvalues and leaves small ones small.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .autocast import no_autocast
from .fastpaths import other_derivatives
from .first_order import first_order

__all__ = ["invert_by_iteration", "normalize_spd", "solve_spd", "transposed_start"]

FLOAT32_CONDITION = 1e4  # condition number up to which a float32 factor gives three digits or more
FLOAT64_CONDITION = 1e12  # and a float64 one four; beyond it only a pseudo-inverse is meaningful


def solve_spd(matrix: Tensor, rhs: Tensor, *, smallest: float) -> Tensor:
    """Return matrix⁻¹ · rhs for symmetric positive definite matrices of trace about d, such as kernel matrices plus γI.

    Args:
        matrix: (…, d, d), assumed symmetric: possibly only its lower triangle is read.
        rhs: (…, d, c).
        smallest: a lower bound on the eigenvalues that the caller knows, e.g. γ. It decides the arithmetic: Cholesky in
            float32 or in float64 or, if it is close to 0, the pseudo-inverse by eigenvalues in float64.

    The result has the wider of the two dtypes, float32 at least. The gradient is the analytic one, dU = W⁻¹dY and
    dW = −dU Yᵀ, which needs only the factor and the result.
    """
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2] or rhs.ndim < 2 or rhs.shape[-2] != matrix.shape[-1]:
        raise ValueError(f"expected (…, d, d) and (…, d, c), got {tuple(matrix.shape)} and {tuple(rhs.shape)}")
    dtype = torch.promote_types(torch.promote_types(matrix.dtype, rhs.dtype), torch.float32)
    lead = torch.broadcast_shapes(matrix.shape[:-2], rhs.shape[:-2])
    work, method = _arithmetic(matrix.shape[-1], smallest, dtype)
    with no_autocast(matrix):
        w = matrix.to(work).expand(*lead, *matrix.shape[-2:])
        u = rhs.to(work).expand(*lead, *rhs.shape[-2:])
        if other_derivatives(w, u):
            return _solve_natively(w, u, method).to(dtype)
        solution: Any = _Solve.apply(w, u, method)
        return solution.to(dtype)


def normalize_spd(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return (N, r) with N = diag(r) · matrix · diag(r) and r the inverse square roots of the row sums of `matrix`.

    For a symmetric positive definite matrix without negative entries the eigenvalues of N lie in (0, 1], and the
    largest is exactly 1 (its eigenvector is 1/r): the iteration converges from the identity.
    """
    dtype = torch.promote_types(matrix.dtype, torch.float32)
    with no_autocast(matrix):
        r = matrix.to(dtype).sum(-1).rsqrt()
        return matrix.to(dtype) * r[..., :, None] * r[..., None, :], r


def transposed_start(matrix: Tensor, *, shared: bool = False) -> Tensor:
    """Return matrixᵀ/c, a start from which the iteration converges to the (pseudo-)inverse of any matrix.

    c is ‖·‖₁ · ‖·‖∞ of each matrix, which is at least σmax². `shared` follows published code: c is a single number, the
    largest column sum in the whole tensor, so that a result depends on all matrices of the batch.
    """
    magnitudes = matrix.abs()
    if shared:
        return matrix.mT / magnitudes.sum(-2).amax()
    bound = magnitudes.sum(-2).amax(-1) * magnitudes.sum(-1).amax(-1)
    return matrix.mT / bound.clamp_min(torch.finfo(bound.dtype).tiny)[..., None, None]


def invert_by_iteration(matrix: Tensor, *, num_iterations: int = 6, start: Tensor | None = None) -> Tensor:
    """Invert (…, d, d) by products, Z ← ¼ Z(13I − NZ(15I − NZ(7I − NZ))), in float32 at least.

    Args:
        num_iterations: four products each; the first needs only two if it starts from the identity.
        start: None for the identity, which is right for a spectrum in (0, 2); `transposed_start(matrix)` for any
            matrix, even a non-square one: (…, r, d) gives the pseudo-inverse (…, d, r).

    The gradient is that of the steps taken, even if they stop before the inverse is reached.
    """
    if num_iterations < 0:
        raise ValueError(f"num_iterations={num_iterations} cannot be: give 0 or more, 6 is usual")
    if start is None and matrix.shape[-1] != matrix.shape[-2]:
        raise ValueError(f"{tuple(matrix.shape)} is not square: start from transposed_start(matrix)")
    dtype = torch.promote_types(matrix.dtype, torch.float32)
    with no_autocast(matrix):
        n = matrix.to(dtype)
        z = None if start is None else start.to(dtype)
        if num_iterations == 0:
            return torch.eye(n.shape[-2], dtype=dtype, device=n.device).expand_as(n) if z is None else z
        if other_derivatives(n, *([] if z is None else [z])):
            return _iterate_plainly(n, z, num_iterations)
        if n.ndim == 3 and (z is None or z.shape[:-2] == n.shape[:-2]):  # as Nyström attention calls it
            return _apply(_Iterate, n, z, num_iterations)
        lead = n.shape[:-2] if z is None else torch.broadcast_shapes(n.shape[:-2], z.shape[:-2])
        count = math.prod(lead)  # not −1, which nothing tells where there are no rows
        if z is not None:
            z = z.expand(*lead, *z.shape[-2:]).reshape(count, *z.shape[-2:])
        n = n.expand(*lead, *n.shape[-2:]).reshape(count, *n.shape[-2:])
        inverse = _apply(_Iterate, n, z, num_iterations)
        return inverse.view(*lead, *inverse.shape[1:])


def _apply(function: Any, *arguments: Any) -> Tensor:
    return function.apply(*arguments)


def _iterate_plainly(n: Tensor, z: Tensor | None, num_iterations: int) -> Tensor:
    """Run the iteration as written, with torch's own derivatives."""
    eye = torch.eye(n.shape[-2], dtype=n.dtype, device=n.device)
    for _ in range(num_iterations):
        nz = n if z is None else n @ z
        last = 13 * eye - nz @ (15 * eye - nz @ (7 * eye - nz))
        z = 0.25 * (last if z is None else z @ last)
    assert z is not None
    return z


class _Iterate(torch.autograd.Function):
    """The iteration in terms of R = I − NZ, where a step is Z + ZS with S = R + R² + R³/4: four products, nothing else.

    Matrices are (b, r, d) and (b, d, r); z is None for the identity. Each step saves Z, R and S.
    """

    @staticmethod
    def forward(ctx: Any, n: Tensor, z: Tensor | None, num_iterations: int) -> Tensor:
        eye = torch.eye(n.shape[-2], dtype=n.dtype, device=n.device)
        kept: list[Tensor | None] = []
        for _ in range(num_iterations):
            r = eye - n if z is None else torch.baddbmm(eye, n, z, alpha=-1)
            s = torch.baddbmm(r, r, torch.baddbmm(r, r, r, alpha=0.25))
            if any(ctx.needs_input_grad):
                kept += [z, r, s]
            z = eye + s if z is None else torch.baddbmm(z, z, s)
        assert z is not None
        ctx.save_for_backward(n, *kept)
        ctx.num_iterations = num_iterations
        return z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        n, *kept = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # a second derivative is requested
            return *_plain_gradients(n, kept[0], ctx.num_iterations, grads[0]), None
        g, dn, transposed = grads[0], None, n.mT
        with no_autocast(n, backward=True):
            for step in reversed(range(ctx.num_iterations)):
                z, r, s = kept[3 * step : 3 * step + 3]
                z, r = None if z is None else z.mT, r.mT
                ds = g if z is None else torch.bmm(z, g)
                # dR = dS + F + (F Rᵀ + Rᵀ E)/4 with E = Rᵀ dS and F = E + dS Rᵀ
                e = torch.bmm(r, ds)
                f = torch.baddbmm(e, ds, r)
                dr = torch.baddbmm(f, f, r, alpha=0.25).baddbmm_(r, e, alpha=0.25).add_(ds)
                if z is None:
                    dn = -dr if dn is None else dn.sub_(dr)
                    continue
                if ctx.needs_input_grad[0]:
                    dn = torch.bmm(dr, z).neg_() if dn is None else dn.baddbmm_(dr, z, alpha=-1)
                if step > 0 or ctx.needs_input_grad[1]:
                    g = torch.baddbmm(g, g, s.mT).baddbmm_(transposed, dr, alpha=-1)
        return dn, g if ctx.needs_input_grad[1] else None, None


def _plain_gradients(
    n: Tensor, z: Tensor | None, num_iterations: int, grad: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return gradients that are themselves differentiable."""
    n, z = n.view_as(n), None if z is None else z.view_as(z)  # separate nodes, even if z was made from n
    wanted = [t for t in (n, z) if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(_iterate_plainly(n, z, num_iterations), wanted, grad, create_graph=True))
    of_n = next(found) if n.requires_grad else None
    return of_n, next(found) if z is not None and z.requires_grad else None


def _arithmetic(d: int, smallest: float, dtype: torch.dtype) -> tuple[torch.dtype, str]:
    condition = d / smallest if smallest > 0 else float("inf")
    if condition > FLOAT64_CONDITION:
        return torch.float64, "eigenvalues"
    return torch.float64 if condition > FLOAT32_CONDITION else dtype, "cholesky"


def _factor(w: Tensor, method: str) -> Tensor:
    """Return L with w = L Lᵀ; or G with w⁺ = G Gᵀ, from the eigenvalues above rounding."""
    if method == "cholesky":
        factor, failed = torch.linalg.cholesky_ex(w)  # its own check would synchronise with the GPU
        return factor.masked_fill((failed > 0)[..., None, None], torch.nan)
    bad = ~w.isfinite().flatten(-2).all(-1)[..., None, None]  # eigh of a NaN raises, or returns numbers
    values, vectors = torch.linalg.eigh(w.masked_fill(bad, 0))
    kept = values > w.shape[-1] * torch.finfo(w.dtype).eps * values[..., -1:]
    roots = torch.where(kept, torch.where(kept, values, 1).rsqrt(), 0)
    return (vectors * roots[..., None, :]).masked_fill(bad, torch.nan)


def _apply_factor(factor: Tensor, rhs: Tensor, method: str) -> Tensor:
    return torch.cholesky_solve(rhs, factor) if method == "cholesky" else factor @ (factor.mT @ rhs)


class _Solve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, u: Tensor, method: str) -> Tensor:
        factor = _factor(w, method)
        y = _apply_factor(factor, u, method)
        ctx.save_for_backward(factor, y)  # y, the output, has the history of both inputs
        ctx.method = method
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        factor, y = ctx.saved_tensors
        with no_autocast(y, backward=True):
            du = _apply_factor(factor, grads[0], ctx.method)
            return -du @ y.mT if ctx.needs_input_grad[0] else None, du, None


def _solve_natively(w: Tensor, u: Tensor, method: str) -> Tensor:
    """Solve with torch's own derivatives, for forward mode and torch.func, which do not use ours."""
    if method == "cholesky":
        return torch.cholesky_solve(u, _factor(w, method))
    factor = _factor(w.detach(), method)
    y = first = _apply_factor(factor, u, method)
    for _ in range(2):  # w⁻¹ as a series about itself: its terms are 0, but two of them give two derivatives
        y = first - _apply_factor(factor, (w - w.detach()) @ y, method)
    return y
