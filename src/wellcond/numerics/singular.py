"""Singular values of token matrices and what follows from them: the condition number κ, and two kinds of rank.

    condition_number(tokens)                     # (…, n, d) → (…): σmax/σmin; inf beyond what the dtype can resolve
    found = measure_conditioning(tokens)         # the same with log κ, σmax, σmin, and a status for each matrix
    found.log_kappa, found.status_names()        # tensor([6.7, …]), ["ok", …]
    explain_method(tokens.shape, tokens.device)  # ("gram", "…"): what `method="auto"` does there, and why

Everything is computed in float64, under autocast too, and each matrix by itself: one that holds a NaN, is zero or is
ill-conditioned does not affect the others of its batch. Results are float64 for float64 input, float32 for any other.

`svd`   LAPACK's or cuSOLVER's decomposition: the reference, and used for every derivative.
`gram`  from XXᵀ on the short side, or from triangular factors or the SVD where that loses too much (extremes.py).
`auto`  `gram`, or `svd` if a derivative is requested.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from wellcond.numerics.cores import on_cores
from wellcond.numerics.device_memory import free_memory
from wellcond.numerics.extremes import (
    RESOLVABLE,
    extreme_singular_values,
    largest_singular_value,
    prefers_eigvalsh,
    scaled_gram,
)
from wellcond.numerics.fastpaths import may_look
from wellcond.numerics.spectral_sums import effective_rank_by_products
from wellcond.words import STATUSES

__all__ = [
    "singular_values",
    "condition_number",
    "measure_conditioning",
    "Conditioning",
    "STATUSES",
    "stable_rank",
    "effective_rank",
    "explain_method",
    "MethodChoice",
]

METHODS = ("auto", "svd", "gram")
OK, CEILING, LOW_PRECISION, NON_FINITE, ZERO, SINGLE = range(6)
# Float64 workspace for the matrices taken at a time. On a CPU little is faster than much: it stays in the cache.
CHUNK_BYTES = {"cpu": 2**25, "cuda": 2**30}
LEAST_FOR_CORES = 2**22  # of such workspace in all, from which a CPU's cores take a chunk each


def singular_values(x: Tensor, *, method: str = "auto") -> Tensor:
    """Return the min(n, d) singular values of each matrix of (…, n, d), in descending order: (…, min(n, d)).

    `gram` takes them from the eigenvalues of XXᵀ, each within 1e-4, or 5e-4 as κ nears 1e6 (2e-3 if all others are
    equal), and leaves matrices beyond that to `svd`. A matrix with a NaN or an Inf gives NaN. Differentiable, even
    where singular values are equal.

    Raises ValueError for anything but a real floating-point (…, n, d) with n, d ≥ 1, and for an unknown method.

    Examples:
        >>> singular_values(torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]]))
        tensor([4., 3.])
    """
    batch = _as_batch(x, method)
    chosen = _choose(x, method, extremes=False)

    def values(part: _MatrixPart) -> tuple[Tensor]:
        return (part.restore(_all_by_svd(part.w) if chosen == "svd" else _all_by_gram(part.w)),)

    (s,) = _in_chunks(values, batch)
    return s.to(_result_dtype(x)).reshape(*x.shape[:-2], s.shape[-1])


def condition_number(x: Tensor, *, method: str = "auto") -> Tensor:
    """Return κ = σmax/σmin over the min(n, d) singular values of each matrix of (…, n, d): (…).

    `inf` beyond the ceiling, which is 1/eps of x's dtype (8.4e6 for float32, 1024 for float16, 128 for bfloat16): there
    σmin is no larger than the rounding of x or, for float64 from 1/(eps·√max(n, d)) on, of the computation.
    Rank-deficient matrices and zero matrices are `inf` as well. To look past the ceiling of a half-precision tensor
    whose values are exact, pass `x.float()`. NaN for a matrix with a NaN or an Inf. A single token has κ = 1, which
    means nothing: `measure_conditioning` and the probe leave it out of averages.
    `gram` is within 1e-4 of `svd`, or 5e-4 as κ nears 1e6 (2e-3 if all but the smallest value are equal): in float32
    up to the ceiling, in float64 over the whole range. Differentiable; where κ is not finite the gradient is zero.

    Raises ValueError like `singular_values`.

    Examples:
        >>> condition_number(torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]]))
        tensor(1.3333)
    """
    found = measure_conditioning(x, method=method)
    infinite = (found.status == CEILING) | (found.status == ZERO)
    return found.kappa.masked_fill(infinite, math.inf).masked_fill(found.status == SINGLE, 1.0)


@dataclass(frozen=True)
class Conditioning:
    """The result of `measure_conditioning`, one value per matrix: every tensor has the batch's shape (…)."""

    kappa: Tensor
    """σmax/σmin, at most the ceiling; NaN where the status is `non_finite`, `zero` or `single`."""
    log_kappa: Tensor
    """The natural logarithm of κ."""
    sigma_max: Tensor
    """NaN where `non_finite`, 0 where `zero`; so is `sigma_min`."""
    sigma_min: Tensor
    """Where the status is `ceiling`, this is rounding or an upper bound: all that is known is that it is small."""
    status: Tensor
    """uint8: indices into STATUSES."""
    ceiling: float
    """1/eps of the measured dtype."""
    method: str
    """The method used, `svd` or `gram`."""

    def status_names(self) -> list[str]:
        """Return the status of each matrix in words, in the order of `status.flatten()`."""
        return [STATUSES[code] for code in self.status.flatten().tolist()]


def measure_conditioning(x: Tensor, *, method: str = "auto") -> Conditioning:
    """Measure κ of each matrix of (…, n, d), with a status that says how far to trust it: the first that applies of

    `non_finite`     a NaN or an Inf in the matrix: every value is NaN
    `zero`           only zeros: κ does not exist and is NaN
    `single`         one token, or one value per token: only one singular value, so κ says nothing and is NaN
    `ceiling`        κ above 1/eps of the dtype, where it is down to rounding: κ is reported as the ceiling
    `low_precision`  a dtype below float32: κ is right for this tensor, but rounding to it has moved the small σ
    `ok`

    Differentiable like `condition_number`, and raises the same errors.
    """
    batch = _as_batch(x, method)
    chosen = _choose(x, method, extremes=True)
    ceiling, single = 1 / torch.finfo(x.dtype).eps, min(x.shape[-2:]) == 1
    # The edge is as sharp as the measurement: κ is known to 1e-4; for float64, σmin to about eps·√max(n, d)·σmax.
    edge = ceiling / math.sqrt(max(x.shape[-2:])) if x.dtype == torch.float64 else ceiling * (1 + 1e-4)

    def measure(part: _MatrixPart) -> tuple[Tensor, ...]:
        if chosen == "svd":
            s = _all_by_svd(part.w)
            largest, smallest = s[:, 0], s[:, -1]
        else:
            largest, smallest = extreme_singular_values(part.short_side_first, ceiling=edge)
        beyond = ~(smallest * edge >= largest)
        # The division runs everywhere, so it gets a harmless divisor there: otherwise its gradient would be NaN.
        kappa = torch.where(beyond, ceiling, (largest / torch.where(beyond, largest, smallest)).clamp_max(ceiling))
        good = SINGLE if single else LOW_PRECISION if x.dtype.itemsize < 4 else OK
        status = torch.where(beyond, CEILING, good).to(torch.uint8)
        if not part.usable:
            status = status.masked_fill(~part.finite, NON_FINITE).masked_fill(part.zero, ZERO)
        if single:
            kappa = kappa.masked_fill(torch.ones_like(beyond), math.nan)
        return part.clean(kappa), part.clean(kappa.log()), part.restore(largest), part.restore(smallest), status

    *values, status = (value.reshape(x.shape[:-2]) for value in _in_chunks(measure, batch))
    kappa, log_kappa, sigma_max, sigma_min = (value.to(_result_dtype(x)) for value in values)
    return Conditioning(kappa, log_kappa, sigma_max, sigma_min, status, ceiling, chosen)


def stable_rank(x: Tensor) -> Tensor:
    """Return the stable rank ‖X‖_F²/σmax² of each matrix of (…, n, d): (…), from 1 to the rank.

    0 for a zero matrix, NaN for a non-finite one. Accurate to 1e-4; differentiable. Raises ValueError like
    `singular_values`.
    """
    batch = _as_batch(x, "auto")
    chosen = _choose(x, "auto", extremes=True)

    def rank(part: _MatrixPart) -> tuple[Tensor]:
        if chosen == "svd":
            s = _all_by_svd(part.w)
            value = (s / s[:, :1]).square().sum(-1)
        else:
            value = (torch.linalg.vector_norm(part.w, dim=(-2, -1)) / largest_singular_value(part.w)).square()
        return (part.clean(value, zero=0.0),)

    (value,) = _in_chunks(rank, batch)
    return value.to(_result_dtype(x)).reshape(x.shape[:-2])


def effective_rank(x: Tensor) -> Tensor:
    """Return the effective rank exp(−Σ pᵢ log pᵢ), pᵢ = σᵢ/Σσ, of each matrix of (…, n, d): (…), from 1 to the rank.

    Defined by Roy & Vetterli 2007. 0 for a zero matrix, NaN for a non-finite one. Accurate to 1e-4; on a GPU, where it
    is computed from products alone, to 1e-2 and mostly 1e-3. Differentiable; at σᵢ = 0, where the slope is infinite,
    that value's share of the gradient is taken to be 0. Raises ValueError like `singular_values`.
    """
    batch = _as_batch(x, "auto")
    chosen = _choose(x, "auto", extremes=False)

    def rank(part: _MatrixPart) -> tuple[Tensor]:
        if chosen == "gram" and x.is_cuda:
            gram = scaled_gram(part.w)[0]
            room = -gram.shape[-1] % 8  # products with unaligned rows take half as long again
            gram = torch.nn.functional.pad(gram, (0, room, 0, room)) if room else gram
            return (part.clean(effective_rank_by_products(gram).clamp_max(min(x.shape[-2:])), zero=0.0),)
        s = _all_by_svd(part.w) if chosen == "svd" else _all_by_gram(part.w)
        p = s / s.sum(-1, keepdim=True)
        entropy = -(p * torch.where(p > 0, p, 1.0).log()).sum(-1)
        return (part.clean(entropy.exp(), zero=0.0),)

    (value,) = _in_chunks(rank, batch)
    return value.to(_result_dtype(x)).reshape(x.shape[:-2])


class MethodChoice(NamedTuple):
    method: str
    why: str


def explain_method(
    shape: Sequence[int], device: torch.device | str = "cpu", *, extremes: bool = True, derivative: bool = False
) -> MethodChoice:
    """Return what `method="auto"` does for a tensor of this shape on this device, and why.

    `extremes`: for the condition number or the stable rank; else for all singular values or the effective rank.
    `derivative`: x requires a gradient. Neither the batch nor its size plays a part, so that no result depends on them.
    """
    on_cpu = torch.device(device).type == "cpu"
    if derivative:
        return MethodChoice("svd", "a derivative is asked for, and that of the decomposition is exact")
    if not extremes:
        return MethodChoice("gram", "the eigenvalues of XXᵀ in float64 cost less than an SVD")
    if not on_cpu:
        return MethodChoice(
            "gram", "products and Cholesky factors of many matrices at once are far faster than SVDs here"
        )
    if prefers_eigvalsh(*sorted(shape[-2:])):
        return MethodChoice("gram", "on a CPU all eigenvalues of XXᵀ in float64 cost less than an SVD in float32")
    return MethodChoice(
        "gram", "on a CPU a Cholesky factor of XXᵀ and some Lanczos steps cost less than an SVD in float32"
    )


def _choose(x: Tensor, method: str, *, extremes: bool) -> str:
    derivative = _derivative(x)
    if method == "auto":
        return explain_method(x.shape, x.device, extremes=extremes, derivative=derivative).method
    return "svd" if derivative else method


def _derivative(x: Tensor) -> bool:
    return (x.requires_grad and torch.is_grad_enabled()) or forward_ad.unpack_dual(x).tangent is not None


def _as_batch(x: Tensor, method: str) -> Tensor:
    """Return the input as (b, n, d), or raise a ValueError that says what is wrong with it."""
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; the methods are {', '.join(map(repr, METHODS))}")
    if not isinstance(x, Tensor):
        kind, way = type(x).__name__, "convert it first, e.g. torch.as_tensor(x).float()"
    elif x.is_complex():  # x.float() would drop the imaginary part
        kind, way = x.dtype, "complex matrices are not supported"
    elif not x.is_floating_point():
        kind, way = x.dtype, "convert it first, e.g. x.float()"
    elif x.layout != torch.strided:
        kind, way = x.layout, "convert it first, e.g. x.to_dense()"
    else:
        kind = way = ""
    if way:
        raise ValueError(f"singular values need a real floating-point tensor, got {kind}; {way}")
    if x.ndim < 2:
        raise ValueError(f"expected matrices of shape (…, n, d), got shape {tuple(x.shape)}; one token is x[None, :]")
    if 0 in x.shape[-2:]:
        raise ValueError(
            f"an empty matrix has no singular values, got shape {tuple(x.shape)}; n and d must be at least 1"
        )
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def _result_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _all_by_svd(w: Tensor) -> Tensor:
    return torch.linalg.svdvals(w.mT)  # LAPACK is up to twice as fast on a tall matrix as on a wide one


def _all_by_gram(w: Tensor) -> Tensor:
    gram, size = scaled_gram(w)
    eigenvalues = torch.linalg.eigvalsh(gram).flip(-1)
    values = (eigenvalues.clamp_min(0) * size[:, None]).sqrt()
    unresolved = ~(eigenvalues[:, -1] >= RESOLVABLE * eigenvalues[:, 0])
    if bool(unresolved.any()):
        values[unresolved] = _all_by_svd(w[unresolved])
    return values


# ---- Backends raise on a NaN or return made-up numbers, and squares overflow: they are given no such matrix.


class _MatrixPart:
    """A chunk of matrices, made safe for linear algebra: in float64, short side first, finite, not zero, not huge."""

    def __init__(self, x: Tensor):
        x = x.float() if x.dtype.itemsize == 1 else x  # float8 has no arithmetic
        peak = torch.linalg.vector_norm(x.detach(), math.inf, (-2, -1)).double()  # propagates NaN and Inf
        usable = (peak > 0) & (peak < math.inf)
        self.usable: bool = bool(usable.all())
        if not self.usable:
            self.finite: Tensor = peak.isfinite()
            self.zero: Tensor = peak == 0
            # Backends get an identity in place of these matrices, and `clean` writes their answers.
            x = torch.where(usable[:, None, None], x, torch.eye(*x.shape[1:], dtype=x.dtype, device=x.device))
            peak = torch.where(usable, peak, 1.0)
        self.unit: Tensor | None = None
        if x.dtype == torch.float64:  # its squares may overflow; those of any other dtype fit into float64
            exponent = torch.frexp(peak).exponent.long().clamp(-1021, 1021)
            self.unit = (exponent + 1023).bitwise_left_shift(52).view(torch.float64)  # exactly 2^exponent
            x = x / self.unit[:, None, None]
        self.short_side_first: Tensor = x if x.shape[1] <= x.shape[2] else x.mT
        """The matrices in their own dtype."""

    @functools.cached_property
    def w(self) -> Tensor:
        return self.short_side_first.double()

    def restore(self, sigma: Tensor) -> Tensor:
        """Turn singular values of w, (b,) or (b, k), into those of the original matrices."""
        if self.unit is not None:
            sigma = sigma * _like(self.unit, sigma)
        return self.clean(sigma, zero=0.0)

    def clean(self, value: Tensor, *, zero: float = math.nan) -> Tensor:
        """Return `value`, (b,) or (b, k), with NaN for matrices that are not finite and `zero` for zero matrices."""
        if self.usable:
            return value
        return torch.where(_like(self.zero, value), zero, torch.where(_like(self.finite, value), value, math.nan))


def _like(per_matrix: Tensor, value: Tensor) -> Tensor:
    return per_matrix.reshape(-1, *[1] * (value.ndim - 1))


def _in_chunks(function: Callable[[_MatrixPart], tuple[Tensor, ...]], x: Tensor) -> list[Tensor]:
    """Return the results of `function` for (b, n, d), each of length b, for as many matrices at a time as fit; on a CPU
    side by side, if no derivative is asked for."""
    short, long = sorted(x.shape[1:])
    matrix_bytes = 8 * (3 * short * long + 8 * short * short)
    on_cpu = x.device.type == "cpu"
    budget = CHUNK_BYTES["cpu" if on_cpu else "cuda"]
    if x.is_cuda and x.shape[0] * matrix_bytes > budget:
        budget = max(budget, free_memory(x.device) // 8)
    chunk = max(1, budget // matrix_bytes)
    side_by_side = on_cpu and x.shape[0] * matrix_bytes > LEAST_FOR_CORES and may_look(x) and not _derivative(x)
    if side_by_side:
        chunk = min(chunk, -(-x.shape[0] // torch.get_num_threads()))
    split = x.split(chunk)
    parts = (on_cores if side_by_side else _one_by_one)(lambda part: function(_MatrixPart(part)), split)
    return list(parts[0]) if len(parts) == 1 else [torch.cat(results) for results in zip(*parts, strict=True)]


def _one_by_one(function: Callable[[Tensor], tuple[Tensor, ...]], parts: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    return [function(part) for part in parts]
