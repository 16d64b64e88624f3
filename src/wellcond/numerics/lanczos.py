"""Singular values of a linear map that is known only by its products, by Golub–Kahan bidiagonalisation.

    found = largest_singular_values(operator, 6)           # lower bounds of the six largest
    found.values, found.residuals, found.converged

An operator has `outputs`, `inputs`, `device`, `dtype`, `jvp` and `vjp`, as `Linearization` does.

The process starts on the short side, so that it sees only the s = min(m, n) singular values, without the zeros that the
longer side adds: AᵀU = VBᵀ and AV = UB + β·u·eᵀ, with B lower bidiagonal, and κ is never squared. A singular value θ of
B with right vector q is within β·|q_last| of one of A. Both U and V are fully reorthogonalised in float64; where V
would be too large to keep, only U is (which is enough unless A is very ill-conditioned).

What this proves, and what it does not: for orthonormal rows L, the j-th singular value of LA is at most the j-th of A.
And if ‖(1 − LᵀL)A‖ is at most `rest`, the difference is at most ‖E‖ + max(0, rest − σⱼ(LA)), where E is the part
outside the span of L of what A maps the right singular vectors of LA to. Products give ‖E‖. They never prove `rest`: a
direction that no start contains is not seen. But starts are random, and missing something is improbable.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Bidiagonalization", "LargestValues", "Operator", "largest_singular_values"]

LONG_ENTRIES = 2**27  # of the long side's vectors, 1 GiB; beyond that they are not kept
CHECK_EVERY = 8  # steps between convergence checks
MISSED = 1e-9  # accepted probability that a start fails to reveal a value larger than those found
SAFETY = 10  # residuals by which the largest Ritz value may be below the value it stands for, in a close cluster


class Operator(Protocol):
    outputs: int
    inputs: int
    device: torch.device
    dtype: torch.dtype

    def jvp(self, v: Tensor, /) -> Tensor: ...
    def vjp(self, u: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class LargestValues:
    """The result of `largest_singular_values`."""

    values: Tensor
    """(k,), descending: none exceeds the true one, up to rounding. NaN if a product was not finite."""
    residuals: Tensor
    """(k,): some singular value lies within this of each, not necessarily the one of the same rank."""
    errors: Tensor
    """(k,): bounds on their errors, valid if no start missed a direction; infinite if not converged."""
    converged: bool
    """Whether every error is within the tolerance."""
    smallest: Tensor
    """(k,), descending: upper bounds on the k smallest singular values, tight or not."""
    complete: bool
    """Whether the first start ran to its end, which makes the smallest exact too."""
    steps: int
    """The number of products with A, and of those with Aᵀ."""


class Bidiagonalization:
    """U, V and B, grown from a random start. With `locked`, orthonormal rows L, they are those of (1 − LᵀL)A."""

    def __init__(self, operator: Operator, generator: torch.Generator, max_steps: int, locked: Tensor | None = None):
        wide = operator.outputs <= operator.inputs
        self.down: Callable[[Tensor], Tensor]
        self.up: Callable[[Tensor], Tensor]
        self.down, self.up = (operator.vjp, operator.jvp) if wide else (operator.jvp, operator.vjp)
        self.short: int
        self.long: int
        self.short, self.long = sorted((operator.outputs, operator.inputs))
        self.device: torch.device = operator.device
        self.operator_dtype: torch.dtype = operator.dtype
        self.generator: torch.Generator = generator
        self.locked: int = 0 if locked is None else len(locked)
        self.full: int = self.short - self.locked
        """The number of steps after which nothing is left to find."""
        self.limit: int = min(max_steps, self.full)
        self.keeps_long: bool = self.long * self.limit <= LONG_ENTRIES
        self.alphas: list[float] = []
        self.betas: list[float] = []
        self.finite: bool = True
        self._left = self._room(self.locked + self.limit, self.short)
        self._right = self._room(self.limit if self.keeps_long else 1, self.long)
        if locked is not None:
            self._left[: self.locked] = locked
        self._next = self._random(self.short, self._left[: self.locked]) if self.limit else None

    @property
    def steps(self) -> int:
        return len(self.alphas)

    @property
    def complete(self) -> bool:
        return self.steps == self.full

    def step(self) -> None:
        """Multiply once by Aᵀ and once by A, to add a row and a column to B."""
        j, last = self.steps, self._next
        assert last is not None
        self._left[self.locked + j] = last
        kept = j if self.keeps_long else min(j, 1)
        v = self.product(self.down, last)
        if j:
            v = v - self.betas[-1] * self._right[kept - 1]
        v, alpha = self._orthonormal(v, self._right[:kept])
        self._right[j if self.keeps_long else 0] = v
        self.alphas.append(alpha)
        if self.complete:  # what is left is rounding
            self.betas.append(0.0)
            return
        u = self.product(self.up, v) - alpha * last
        self._next, beta = self._orthonormal(u, self._left[: self.locked + j + 1])
        self.betas.append(beta)

    def decompose(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (θ, residuals, P) with B = P·diag(θ)·Qᵀ, descending, on the CPU."""
        alphas = torch.tensor(self.alphas, dtype=torch.float64)
        betas = torch.tensor(self.betas, dtype=torch.float64)
        p, theta, qt = torch.linalg.svd(torch.diag(alphas) + torch.diag(betas[:-1], -1))
        return theta, betas[-1] * qt[:, -1].abs(), p

    def left_vectors(self, p: Tensor) -> Tensor:
        """Return the left singular vectors that the columns of P stand for, as rows."""
        return p.mT.to(self.device) @ self._left[self.locked : self.locked + self.steps]

    def product(self, product: Callable[[Tensor], Tensor], vector: Tensor) -> Tensor:
        """Apply `down` or `up`, in float64; if the result is not finite, return zeros and set `finite` to False."""
        result = product(vector.to(self.operator_dtype)).double()
        if not bool(result.isfinite().all()):
            self.finite = False
            result = torch.zeros_like(result)
        return result

    def _room(self, rows: int, length: int) -> Tensor:
        return torch.empty(rows, length, dtype=torch.float64, device=self.device)

    def _orthonormal(self, vector: Tensor, basis: Tensor) -> tuple[Tensor, float]:
        """Return the vector orthonormalised against the basis, and its length before that; if 0, a random vector."""
        vector = _without(vector, basis)
        length = float(vector.norm())
        largest = max([*self.alphas, *self.betas, length])
        if length > torch.finfo(self.operator_dtype).eps * math.sqrt(self.long) * largest:
            unit = _without(vector / length, basis)  # again: a short vector may be mostly rounding of what was removed
            left = float(unit.norm())
            if left > 0.5:
                return unit / left, length
        return self._random(len(vector), basis), 0.0

    def _random(self, size: int, basis: Tensor) -> Tensor:
        vector = torch.randn(size, generator=self.generator, dtype=torch.float64).to(self.device)
        for _ in range(2):
            vector = _without(vector, basis)
            vector = vector / vector.norm()
        return vector


def _without(vector: Tensor, basis: Tensor) -> Tensor:
    for _ in range(2):  # twice: once leaves the rounding of what it removes
        vector = vector - (basis @ vector) @ basis
    return vector


def largest_singular_values(
    operator: Operator, k: int, *, max_steps: int = 300, tolerance: float = 1e-8, seed: int = 0
) -> LargestValues:
    """Return the k largest singular values, from below, and upper bounds on the k smallest.

    A single random start sees each distinct singular value only once, so equal values come out as one. Therefore the
    vectors that have converged are locked, and a new start, at most `max_steps` long like the first, looks for larger
    values beside them, until one finds none. Each start but the last pushes one of the k out: at most k + 2 in all.
    """
    generator = torch.Generator().manual_seed(seed)
    process = first = Bidiagonalization(operator, generator, max_steps)
    locked, values = process.left_vectors(torch.empty(0, 0, dtype=torch.float64)), torch.empty(0, dtype=torch.float64)
    lowest, steps, rest = values, 0, None
    for _ in range(k + 2):
        floor = float(values[k - 1]) if len(values) >= k else None
        theta, p, rest = _look(process, k, floor, tolerance, size=float(values[0]) if len(values) else 0.0)
        steps += process.steps
        lowest = theta[-k:] if process is first else lowest
        locked = torch.cat([locked, process.left_vectors(p)])
        values = torch.cat([values, theta[: p.shape[1]]]).sort(descending=True).values
        if rest is not None or not process.finite:
            break
        process = Bidiagonalization(operator, generator, max_steps, locked)
        if not process.limit:
            rest = 0.0
            break
    values, residuals, whole = _rayleigh_ritz(process, locked)
    errors = whole + (-values + (math.inf if rest is None else rest)).clamp_min(0)[:k]
    values, residuals, finite = values[:k], residuals[:k], process.finite
    converged = finite and bool((errors <= tolerance * values[0]).all())
    if not converged:
        errors = torch.full_like(errors, math.inf)
    if not finite:
        values, residuals, errors, lowest = (torch.full((k,), math.nan, dtype=torch.float64) for _ in range(4))
    return LargestValues(
        values=values.to(operator.device),
        residuals=residuals.to(operator.device),
        errors=errors.to(operator.device),
        converged=converged,
        smallest=lowest.to(operator.device),
        complete=first.complete,
        steps=steps + len(locked),
    )


def _look(
    process: Bidiagonalization, k: int, floor: float | None, tolerance: float, size: float
) -> tuple[Tensor, Tensor, float | None]:
    """Return (θ, P, rest): the columns of P are to be locked, the k largest or those above the floor. `rest` bounds
    what is left: infinite if the steps ran out first, None if another start has to tell."""
    while True:
        process.step()
        done = process.steps == process.limit or not process.finite
        if not done and (process.steps < k or process.steps % CHECK_EVERY):
            continue
        theta, residuals, p = process.decompose()
        scale = max(size, float(theta[0]))
        found = k if floor is None else int((theta > floor + tolerance / 2 * scale).sum())
        if process.complete:
            return theta, p[:, :found], float(theta[found]) if found < len(theta) else 0.0
        if not found and floor is not None and _beyond_doubt(process, float(theta[0]), floor):
            return theta, p[:, :0], floor
        if bool((residuals[: max(found, 1)] <= tolerance / (2 * SAFETY) * scale).all()):
            return theta, p[:, :found], None if found else float(theta[0] + SAFETY * residuals[0])
        if done:
            return theta, p[:, :found], math.inf


def _beyond_doubt(process: Bidiagonalization, theta: float, floor: float) -> bool:
    """Whether a random start would have shown more than θ by now if there were a value above the floor.

    After j steps θ² is below (1 − ε)σmax² with a probability of at most 1.648·√n·exp(−√ε(2j − 1)), whatever the
    spectrum (Kuczyński & Woźniakowski 1992).
    """
    if not theta < floor:
        return False
    needed = math.log(1.648 * math.sqrt(process.full) / MISSED)
    return math.sqrt(1 - (theta / floor) ** 2) * (2 * process.steps - 1) >= needed


def _rayleigh_ritz(process: Bidiagonalization, left: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the singular values of LA for orthonormal rows L, the residual of each, and that of all, on the CPU."""
    rows = torch.stack([process.product(process.down, u) for u in left])
    p, values, right = torch.linalg.svd(rows, full_matrices=False)
    images = torch.stack([process.product(process.up, v) for v in right])
    residuals = (images - values[:, None] * (p.mT @ left)).norm(dim=1)
    return values.cpu(), residuals.cpu(), residuals.norm().cpu()
