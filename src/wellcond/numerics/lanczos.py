"""Singular values of a linear map that is known by its products alone: Golub–Kahan bidiagonalisation.

    found = largest_singular_values(operator, 6)           # the six largest, each with a bound on its error
    found.values, found.errors, found.converged

An operator has `outputs`, `inputs`, `device`, `dtype`, `jvp` and `vjp`, as `Linearization` has.

The process starts on the short side, so that the s = min(m, n) singular values are all it sees, without the zeros that
a longer side adds: AᵀU = VBᵀ and AV = UB + β·u·eᵀ, with B lower bidiagonal, and κ never squared. A singular value θ
of B with right vector q is within β·|q_last| of one of A. Both U and V are orthogonalised against all of their past, in
float64; where V would be too large, U alone (which is enough unless A is very ill-conditioned).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Bidiagonalization", "LargestValues", "Operator", "largest_singular_values"]

LONG_ENTRIES = 2**27  # of the long side's vectors, 1 GiB; beyond, they are not kept
CHECK_EVERY = 8  # steps between looks at the convergence
MAX_SWEEPS = 16  # for values of that multiplicity
SAME = 1e-6  # of σmax: the difference up to which two singular values count as equal


class Operator(Protocol):
    outputs: int
    inputs: int
    device: torch.device
    dtype: torch.dtype

    def jvp(self, v: Tensor, /) -> Tensor: ...
    def vjp(self, u: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class LargestValues:
    """What `largest_singular_values` found."""

    values: Tensor
    """(k,), descending; NaN where a product was not finite."""
    errors: Tensor
    """(k,): a singular value lies within this of each."""
    converged: bool
    """Whether every error is within the tolerance."""
    smallest: Tensor
    """(k,), descending: upper bounds of the k smallest singular values, good or bad."""
    smallest_errors: Tensor
    """(k,): a singular value lies within this of each, though not necessarily one of the k smallest."""
    complete: bool
    """Whether the process ran to its end, where the smallest are exact too."""
    steps: int
    """Products with A and with Aᵀ, each."""


class Bidiagonalization:
    """The growing U, V and B, from a random start. `locked` singular vectors, one a row, are kept out of U and V."""

    def __init__(
        self,
        operator: Operator,
        generator: torch.Generator,
        max_steps: int,
        locked_left: Tensor | None = None,
        locked_right: Tensor | None = None,
    ):
        wide = operator.outputs <= operator.inputs
        self.down, self.up = (operator.vjp, operator.jvp) if wide else (operator.jvp, operator.vjp)
        self.short, self.long = sorted((operator.outputs, operator.inputs))
        self.device, self.operator_dtype, self.generator = operator.device, operator.dtype, generator
        self.locked = 0 if locked_left is None else len(locked_left)
        self.full = self.short - self.locked
        """The number of steps after which nothing is left to find."""
        self.limit = min(max_steps, self.full)
        self.keeps_long = self.long * (self.limit + self.locked) <= LONG_ENTRIES
        self.alphas: list[float] = []
        self.betas: list[float] = []
        self.finite = True
        self._left = self._room(self.locked + self.limit, self.short)
        self._right = self._room(self.locked + (self.limit if self.keeps_long else 1), self.long)
        if locked_left is not None and locked_right is not None:
            self._left[: self.locked], self._right[: self.locked] = locked_left, locked_right
        self._next = self._random(self.short, self._left[: self.locked]) if self.limit else None

    @property
    def steps(self) -> int:
        return len(self.alphas)

    @property
    def complete(self) -> bool:
        return self.steps == self.full

    def step(self) -> None:
        """One product with Aᵀ and one with A: a row and a column more of B."""
        j, last = self.steps, self._next
        assert last is not None
        self._left[self.locked + j] = last
        kept = j if self.keeps_long else min(j, 1)
        v = self._product(self.down, last)
        if j:
            v = v - self.betas[-1] * self._right[self.locked + kept - 1]
        v, alpha = self._orthonormal(v, self._right[: self.locked + kept])
        self._right[self.locked + (j if self.keeps_long else 0)] = v
        self.alphas.append(alpha)
        if self.complete:  # what is left is rounding
            self.betas.append(0.0)
            return
        u = self._product(self.up, v) - alpha * last
        self._next, beta = self._orthonormal(u, self._left[: self.locked + j + 1])
        self.betas.append(beta)

    def decompose(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(θ, error bounds, P, Q) with B = P·diag(θ)·Qᵀ, descending; on the CPU."""
        alphas = torch.tensor(self.alphas, dtype=torch.float64)
        betas = torch.tensor(self.betas, dtype=torch.float64)
        p, theta, qt = torch.linalg.svd(torch.diag(alphas) + torch.diag(betas[:-1], -1))
        return theta, betas[-1] * qt[:, -1].abs(), p, qt.mT

    def left_vectors(self, p: Tensor) -> Tensor:
        """The left singular vectors that columns of P stand for, as rows."""
        return p.mT.to(self.device) @ self._left[self.locked : self.locked + self.steps]

    def right_vectors(self, left: Tensor) -> Tensor:
        """The right singular vectors that belong to left ones, both as rows."""
        rows = torch.stack([self._product(self.down, u) for u in left])
        return rows / rows.norm(dim=1, keepdim=True)

    def _room(self, rows: int, length: int) -> Tensor:
        return torch.empty(rows, length, dtype=torch.float64, device=self.device)

    def _product(self, product: Callable[[Tensor], Tensor], vector: Tensor) -> Tensor:
        result = product(vector.to(self.operator_dtype)).double()
        if not bool(result.isfinite().all()):
            self.finite = False
            result = torch.zeros_like(result)
        return result

    def _orthonormal(self, vector: Tensor, basis: Tensor) -> tuple[Tensor, float]:
        """The vector made orthogonal to the basis, of length 1, and its length before; a random one where that is 0."""
        for _ in range(2):  # once leaves the rounding of what it took away
            vector = vector - (basis @ vector) @ basis
        length = float(vector.norm())
        largest = max([*self.alphas, *self.betas, length])
        eps = torch.finfo(self.operator_dtype).eps
        if not length > eps * math.sqrt(self.long) * largest:
            return self._random(len(vector), basis), 0.0
        return vector / length, length

    def _random(self, size: int, basis: Tensor) -> Tensor:
        vector = torch.randn(size, generator=self.generator, dtype=torch.float64).to(self.device)
        for _ in range(2):
            vector = vector - (basis @ vector) @ basis
        return vector / vector.norm()


def largest_singular_values(
    operator: Operator, k: int, *, max_steps: int = 300, tolerance: float = 1e-8, seed: int = 0
) -> LargestValues:
    """The k largest singular values, each with a bound on its error, and upper bounds of the k smallest.

    One random start sees every direction of singular vectors once, so values that are equal come out as one. Therefore
    the vectors found are locked, and a new start looks for more beside them, until nothing larger is found.
    """
    generator = torch.Generator().manual_seed(seed)
    process = Bidiagonalization(operator, generator, max_steps)
    theta, errors, p, converged = _run(process, k, tolerance)
    steps, complete, finite = process.steps, process.complete, process.finite
    values, bounds = theta[:k], errors[:k]
    lowest, lowest_bounds = theta[-k:], errors[-k:]
    if finite and converged and not complete and bool(values[0] > 0):
        locked = process.left_vectors(p[:, :k][:, values > SAME * values[0]])  # those of zeros come in no pairs
        for _ in range(MAX_SWEEPS):
            process = Bidiagonalization(operator, generator, max_steps, locked, process.right_vectors(locked))
            if not process.limit:
                break
            theta, errors, p, ready = _run(process, 1, tolerance, floor=float(values[-1]))
            steps, converged = steps + process.steps, converged and ready
            found = int((theta > values[-1] + SAME * values[0]).sum())
            if not found:
                break
            locked = torch.linalg.qr(torch.cat([locked, process.left_vectors(p[:, :found])]).mT).Q.mT
            values, order = torch.cat([values, theta[:found]]).sort(descending=True)
            bounds = torch.cat([bounds, errors[:found]])[order][:k]
            values = values[:k]
        else:
            converged = False  # there may be more
        converged = converged and bool((bounds <= tolerance * values[0]).all())
    if not finite:
        values, bounds, lowest, lowest_bounds = (torch.full((k,), math.nan, dtype=torch.float64) for _ in range(4))
    return LargestValues(
        values=values.to(operator.device),
        errors=bounds.to(operator.device),
        converged=converged and finite,
        smallest=lowest.to(operator.device),
        smallest_errors=lowest_bounds.to(operator.device),
        complete=complete,
        steps=steps,
    )


def _run(
    process: Bidiagonalization, k: int, tolerance: float, floor: float | None = None
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Steps until the k largest have converged, or, with a floor, until the largest is known to lie above or below."""
    while True:
        process.step()
        done = process.complete or process.steps >= process.limit or not process.finite
        if not done and (process.steps < k or process.steps % CHECK_EVERY):
            continue
        theta, errors, p, _ = process.decompose()
        converged = process.steps >= k and bool((errors[:k] <= tolerance * theta[0]).all())
        below = floor is not None and bool(theta[0] + errors[0] < floor)
        if done or converged or below:
            return theta, errors, p, converged or below or process.complete
