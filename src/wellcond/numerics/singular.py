"""Singular values of token matrices and what is read from them: the condition number κ, and two ranks.

    condition_number(tokens)                     # (…, n, d) → (…): σmax/σmin; inf beyond what the dtype can see
    found = measure_conditioning(tokens)         # the same with log κ, σmax, σmin, and a status for each matrix
    found.log_kappa, found.status_names()        # tensor([6.7, …]), ["ok", …]
    explain_method(tokens.shape, tokens.device)  # ("gram", "…"): what `method="auto"` does there, and why

All of it computes in float64, under autocast too, one matrix at a time as far as the result can tell: a NaN, a zero matrix or an
ill-conditioned one leaves the others of its batch alone. Methods: `svd` is LAPACK's or cuSOLVER's decomposition, the truth;
`gram` works on XXᵀ (the short side) and falls back where that cannot answer (extremes.py); `auto` chooses.
Results are float64 for float64 input and float32 for every other dtype.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from wellcond.numerics.extremes import RESOLVABLE, extreme_singular_values, largest_singular_value, scaled_gram

__all__ = [
    "singular_values",
    "condition_number",
    "measure_conditioning",
    "stable_rank",
    "effective_rank",
    "explain_method",
    "Conditioning",
    "STATUSES",
]

METHODS = ("auto", "svd", "gram")
STATUSES = ("ok", "ceiling", "low_precision", "non_finite", "zero")
OK, CEILING, LOW_PRECISION, NON_FINITE, ZERO = range(5)

CHUNK_BYTES = {"cpu": 2**25, "cuda": 2**30}
SMALL_WORK = (
    3e4  # min(n, d)²·max(n, d) for a batch, below which one LAPACK call is sooner done than the steps of "gram"
)


def singular_values(x: Tensor, *, method: str = "auto") -> Tensor:
    """The min(n, d) singular values of each matrix of (…, n, d), in descending order: (…, min(n, d)).

    `gram` takes them from the eigenvalues of XXᵀ, to about 1e-6 each, and repeats with `svd` the matrices whose κ lies beyond
    3e5. Differentiable (by `svd`), with finite gradients for repeated values too. A matrix with a NaN or an Inf gives NaN.

    Raises ValueError for input that is no real floating-point (…, n, d), for an empty matrix, or an unknown method.

    >>> singular_values(torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]]))
    tensor([4., 3.])
    """
    batch = _batch(x, method)
    chosen = _choose(x, method, extremes=False)

    def values(part: "_Part") -> tuple[Tensor]:
        s = torch.linalg.svdvals(part.w.mT) if chosen == "svd" else _values_by_gram(part.w)
        return (part.restore(s),)

    (s,) = _in_chunks(values, batch)
    return s.to(_result_dtype(x)).reshape(*x.shape[:-2], -1)


def condition_number(x: Tensor, *, method: str = "auto") -> Tensor:
    """κ = σmax/σmin over the min(n, d) singular values of each matrix of (…, n, d): (…).

    `inf` beyond the ceiling 1/eps of x's dtype (8.4e6 for float32, 1024 for float16, 128 for bfloat16): there rounding decides
    σmin. So for rank-deficient matrices, a zero matrix included. NaN for a matrix with a NaN or an Inf. A single token has κ = 1.
    `gram` is within 1e-5 of `svd`, up to the ceiling of float32 and beyond. Differentiable (by `svd`); the gradient is zero where
    κ is not finite. To see past the ceiling of a half-precision tensor whose values are exact, pass `x.float()`.

    Raises ValueError as `singular_values` does.

    >>> condition_number(torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]]))
    tensor(1.3333)
    """
    found = measure_conditioning(x, method=method)
    infinite = (found.status == CEILING) | (found.status == ZERO)
    return found.kappa.masked_fill(infinite, math.inf)


@dataclass(frozen=True)
class Conditioning:
    """What `measure_conditioning` found, one value per matrix: every tensor has the batch shape (…)."""

    kappa: Tensor
    """σmax/σmin, at most the ceiling; NaN where the status is `non_finite` or `zero`."""
    log_kappa: Tensor
    """Its natural logarithm."""
    sigma_max: Tensor
    sigma_min: Tensor
    """Beyond the ceiling some value below σmax/ceiling, no more."""
    status: Tensor
    """uint8 indices into STATUSES."""
    ceiling: float
    """1/eps of the measured dtype."""
    method: str
    """`svd` or `gram`: the one taken."""

    def status_names(self) -> list[str]:
        """The status of each matrix in words, in the order of `status.flatten()`."""
        return [STATUSES[code] for code in self.status.flatten().tolist()]


def measure_conditioning(x: Tensor, *, method: str = "auto") -> Conditioning:
    """κ of each matrix of (…, n, d) with a status that says what the number is worth.

    The first of these that applies:
    `non_finite`     a NaN or an Inf in the matrix: all values are NaN
    `zero`           nothing but zeros: κ is NaN, both σ are 0
    `ceiling`        κ above 1/eps of the dtype, where rounding decides it: κ is reported as the ceiling itself
    `low_precision`  a dtype below float32: κ is right for this tensor, but rounding to it has moved the small singular values
    `ok`

    Differentiable and raising as `condition_number`.
    """
    batch = _batch(x, method)
    chosen = _choose(x, method, extremes=True)
    ceiling = 1 / torch.finfo(x.dtype).eps

    def measure(part: "_Part") -> tuple[Tensor, ...]:
        if chosen == "svd":
            s = torch.linalg.svdvals(part.w.mT)
            largest, smallest = s[:, 0], s[:, -1]
        else:
            largest, smallest = extreme_singular_values(part.w, ceiling=ceiling)
        beyond = ~(smallest * ceiling >= largest)
        # Dividing by a stand-in there keeps the unused branch's gradient finite.
        kappa = torch.where(beyond, ceiling, largest / torch.where(beyond, largest, smallest))
        status = torch.where(beyond, CEILING, LOW_PRECISION if x.dtype.itemsize < 4 else OK).to(torch.uint8)
        if not part.usable:
            status = status.masked_fill(~part.finite, NON_FINITE).masked_fill(part.zero, ZERO)
        return part.clean(kappa), part.clean(kappa.log()), part.restore(largest), part.restore(smallest), status

    *values, status = (value.reshape(x.shape[:-2]) for value in _in_chunks(measure, batch))
    kappa, log_kappa, sigma_max, sigma_min = (value.to(_result_dtype(x)) for value in values)
    return Conditioning(kappa, log_kappa, sigma_max, sigma_min, status, ceiling, chosen)


def stable_rank(x: Tensor) -> Tensor:
    """‖X‖_F²/σmax² of each matrix of (…, n, d): (…), from 1 to the rank; 0 for a zero matrix, NaN for a non-finite one.

    Within 1e-5; differentiable. Raises ValueError as `singular_values` does.
    """
    batch = _batch(x, "auto")
    chosen = _choose(x, "auto", extremes=True)

    def rank(part: "_Part") -> tuple[Tensor]:
        if chosen == "svd":
            s = torch.linalg.svdvals(part.w.mT)
            value = (s / s[:, :1]).square().sum(-1)
        else:
            value = (torch.linalg.vector_norm(part.w, dim=(-2, -1)) / largest_singular_value(part.w)).square()
        return (part.clean(value, zero=0.0),)

    (value,) = _in_chunks(rank, batch)
    return value.to(_result_dtype(x)).reshape(x.shape[:-2])


def effective_rank(x: Tensor) -> Tensor:
    """exp(−Σ pᵢ log pᵢ) with pᵢ = σᵢ/Σσ (Roy & Vetterli 2007), of each matrix of (…, n, d): (…), from 1 to the rank.

    0 for a zero matrix, NaN for a non-finite one. Differentiable; at σᵢ = 0, where the slope is infinite, that value's share of
    the gradient is taken as 0. Raises ValueError as `singular_values` does.
    """
    s = singular_values(x).double()
    total = s.sum(-1, keepdim=True)
    p = s / torch.where(total == 0, 1.0, total)
    entropy = -(p * torch.where(p > 0, p, 1.0).log()).sum(-1)
    return torch.where(total.squeeze(-1) == 0, 0.0, entropy.exp()).to(_result_dtype(x))


class MethodChoice(NamedTuple):
    method: str
    why: str


def explain_method(
    shape: Sequence[int], device: torch.device | str = "cpu", *, extremes: bool = True, derivative: bool = False
) -> MethodChoice:
    """What `method="auto"` takes for a tensor of this shape on this device, and why.

    `extremes`: for the condition number or the stable rank; False: for all singular values. `derivative`: x requires grad.
    """
    *batch, n, d = shape
    if derivative:
        return MethodChoice("svd", "a derivative is asked for, and the decomposition has an exact one")
    if torch.device(device).type != "cpu":
        return MethodChoice("gram", "batched products and Cholesky are far faster on this device than its SVD")
    if math.prod(batch) * min(n, d) ** 2 * max(n, d) < SMALL_WORK:
        return MethodChoice("svd", "the matrices are few and small: one LAPACK call is done sooner than anything else")
    how = "its extreme eigenvalues" if extremes else "all eigenvalues"
    return MethodChoice("gram", f"on a CPU {how} of XXᵀ in float64 cost less than an SVD in float32")


def _choose(x: Tensor, method: str, *, extremes: bool) -> str:
    derivative = (x.requires_grad and torch.is_grad_enabled()) or forward_ad.unpack_dual(x).tangent is not None
    if method == "auto":
        return explain_method(x.shape, x.device, extremes=extremes, derivative=derivative).method
    return "svd" if derivative else method


def _batch(x: Tensor, method: str) -> Tensor:
    """The input as (b, n, d), or a ValueError that says what is wrong with it."""
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; the methods are {', '.join(map(repr, METHODS))}")
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"singular values are taken of a real floating-point tensor, got {kind}; convert it, e.g. x.float()"
        )
    if x.ndim < 2:
        raise ValueError(f"expected matrices of shape (…, n, d), got shape {tuple(x.shape)}; one token is x[None, :]")
    if x.shape[-2] == 0 or x.shape[-1] == 0:
        raise ValueError(f"a matrix of shape {tuple(x.shape[-2:])} has no singular values; n and d must be at least 1")
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def _result_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _Part:
    """Some of the matrices, made safe for linear algebra: float64, short side first, finite, not zero, not too large."""

    def __init__(self, x: Tensor):
        x = x.float() if x.dtype.itemsize == 1 else x  # float8 has no arithmetic
        peak = x.detach().abs().amax((-2, -1)).double()  # NaN and Inf come through it
        usable = (peak > 0) & (peak < math.inf)
        self.usable = bool(usable.all())
        if not self.usable:
            self.finite, self.zero = peak.isfinite(), peak == 0
            # Backends raise for those matrices or invent numbers; they get an identity, and `clean` writes the answer.
            x = torch.where(usable[:, None, None], x, torch.eye(*x.shape[1:], dtype=x.dtype, device=x.device))
            peak = torch.where(usable, peak, 1.0)
        self.unit = None
        if x.dtype == torch.float64:  # whose squares may overflow; those of any other dtype fit into float64
            exponent = torch.frexp(peak).exponent.long().clamp(-1021, 1021)
            self.unit = (exponent + 1023).bitwise_left_shift(52).view(torch.float64)  # 2^exponent, to the bit
            x = x / self.unit[:, None, None]
        w = x.double()
        self.w = w if w.shape[1] <= w.shape[2] else w.mT

    def restore(self, sigma: Tensor) -> Tensor:
        """Singular values of w, (b,) or (b, k), as those of the matrices themselves."""
        if self.unit is not None:
            sigma = sigma * self.unit.reshape(-1, *[1] * (sigma.ndim - 1))
        return self.clean(sigma, zero=0.0)

    def clean(self, value: Tensor, *, zero: float = math.nan) -> Tensor:
        """`value`, (b,) or (b, k), with NaN for the matrices that are not finite and `zero` for those of zeros."""
        if self.usable:
            return value
        finite, is_zero = (mask.reshape(-1, *[1] * (value.ndim - 1)) for mask in (self.finite, self.zero))
        return torch.where(is_zero, zero, torch.where(finite, value, math.nan))


def _in_chunks(function: Callable[[_Part], tuple[Tensor, ...]], x: Tensor) -> list[Tensor]:
    """`function` over (b, n, d), as many matrices at a time as fit, and its results put together again."""
    short, long = sorted(x.shape[1:])
    matrix_bytes = 8 * (3 * short * long + 8 * short * short)
    budget = CHUNK_BYTES["cpu" if x.device.type == "cpu" else "cuda"]
    if x.is_cuda and x.shape[0] * matrix_bytes > budget:
        reserved = torch.cuda.memory_reserved(x.device) - torch.cuda.memory_allocated(x.device)
        budget = max(budget, (torch.cuda.mem_get_info(x.device)[0] + reserved) // 8)
    parts = [function(_Part(part)) for part in x.split(max(1, budget // matrix_bytes))]
    return list(parts[0]) if len(parts) == 1 else [torch.cat(results) for results in zip(*parts, strict=True)]


def _values_by_gram(w: Tensor) -> Tensor:
    gram, size = scaled_gram(w)
    eigenvalues = torch.linalg.eigvalsh(gram).flip(-1)
    values = (eigenvalues.clamp_min(0) * size[:, None]).sqrt()
    unresolved = ~(eigenvalues[:, -1] >= RESOLVABLE * eigenvalues[:, 0])
    if bool(unresolved.any()):
        index = unresolved.nonzero().squeeze(1)
        values[index] = torch.linalg.svdvals(w[index].mT)
    return values
