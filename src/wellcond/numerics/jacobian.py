"""Singular values of the Jacobian of a block, with respect to its input or to its parameters.

    found = jacobian_spectrum(block, tokens)                  # one spectrum per sample: output tokens by input tokens
    found.largest, found.kappa, found.status_names(), found.why
    jacobian_spectrum(block, tokens, wrt="params")            # one for the batch: the square root of the empirical NTK
    jacobian_spectrum(block, tokens, method="density").density.quantile(torch.tensor([0.5]))

`exact`    the SVD of the matrix, built row by row: gives everything, if it fits.
`gram`     JJᵀ or JᵀJ on the short side, if only that fits: gives everything, but small values only down to about
           1e-6·σmax, since it squares the condition number.
`lanczos`  products with J and Jᵀ alone: the k largest, from below. That none is missed is not proven but very probable:
           further random starts saw no larger one. For the k smallest there are only upper bounds, so κ is a lower
           bound, unless the process ran to its end.
`density`  products alone: the distribution of all singular values, from random probes.
`auto`     the first of `exact`, `gram` and `lanczos` that fits into `max_entries`.

The block runs in float64 and in eval mode unless told otherwise, and is left as it was found (linearize.py).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .density import SpectralDensity, spectral_density
from .jacobian_arguments import BatchArguments, check_arguments
from .lanczos import largest_singular_values
from .linearize import EvaluatedFunction, Linearization, evaluation
from .singular import CEILING, NON_FINITE, OK, STATUSES, ZERO, MethodChoice, singular_values

__all__ = ["JacobianSpectrum", "jacobian_spectrum"]

METHODS = ("auto", "exact", "gram", "lanczos", "density")
MAX_ENTRIES = {"cpu": 2**24, "cuda": 2**28}  # of J, or of JJᵀ: 4096 and 16384 squared, 128 MiB and 2 GiB in float64
LANCZOS_STEPS, DENSITY_STEPS = 300, 64
RESOLVED = 1e3  # multiple of the noise of JJᵀ from which on a value is good to 5e-4


@dataclass(frozen=True, kw_only=True)
class JacobianSpectrum:
    """The result of `jacobian_spectrum`. Tensors are (b, …) for `wrt="input"`, else they have no batch dimension."""

    largest: Tensor
    """(…, k): the k largest singular values, descending; only lower bounds where `converged` is false."""
    largest_error: Tensor
    """(…, k): bounds on their errors. For `lanczos` these are estimates, which hold if no random start missed a
    direction; infinite where `converged` is false, and only a lower bound is known."""
    largest_residual: Tensor
    """(…, k): some singular value lies within this of each, not necessarily the one of the same rank."""
    smallest: Tensor
    """(…, k): the k smallest, descending; upper bounds where `kappa_is_lower_bound`."""
    smallest_error: Tensor
    """(…, k): bounds on their errors; infinite where only an upper bound is known."""
    values: Tensor | None
    """(…, min(m, n)): all singular values, if the method gives them."""
    density: SpectralDensity | None
    """The distribution of the singular values, for the method `density`."""
    kappa: Tensor
    """(…): σmax/σmin over the min(m, n) singular values, at most the ceiling; NaN where `non_finite` or `zero`."""
    log_kappa: Tensor
    """(…): the natural logarithm of κ."""
    kappa_is_lower_bound: Tensor
    """(…), bool: σmin was not reached, so κ is at least `kappa`."""
    converged: Tensor
    """(…), bool: the k largest are within the tolerance, according to `largest_error`."""
    status: Tensor
    """(…), uint8: indices into STATUSES of numerics/singular.py."""
    ceiling: float
    """1/eps of the coarsest dtype that the block computes in."""
    outputs: int
    """m, the rows of J."""
    inputs: int
    """n, the columns of J."""
    wrt: str
    method: str
    """The method used."""
    why: str
    """Why this method, and what that means for the numbers."""

    def status_names(self) -> list[str]:
        """Return the status of each Jacobian in words."""
        return [STATUSES[code] for code in self.status.flatten().tolist()]

    def rank(self) -> Tensor:
        """Return how many singular values are above rounding, (…). Raises ValueError if not all of them are known."""
        if self.values is None:
            raise ValueError(f"method {self.method!r} does not give all singular values; take 'exact' or 'gram'")
        edge = self.ceiling / math.sqrt(max(self.outputs, self.inputs))
        return (self.values * edge >= self.values[..., :1]).logical_and(self.values > 0).sum(-1)


def jacobian_spectrum(
    block: Callable[..., Any],
    x: Tensor,
    wrt: str = "input",
    k: int | None = None,
    *,
    method: str = "auto",
    dtype: torch.dtype = torch.float64,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    eval_mode: bool = True,
    max_entries: int | None = None,
    steps: int | None = None,
    tolerance: float = 1e-8,
    probes: int = 8,
    seed: int = 0,
) -> JacobianSpectrum:
    """Compute singular values of the Jacobian of `block` at x, whose first dimension is the batch.

    `block`: a module, a method of one (`model.forward_features`) or a function of a tensor; if it returns a tuple or
    dict, the first tensor counts. What a function closes over is not seen: a module in it keeps its dtype and its
    training flags.
    `args` and `kwargs` are passed on after x. With several samples and `wrt="input"`, tensors in them (also in tuples,
    lists and dicts) whose first dimension is the batch are split with the samples, and anything else is passed to each
    as it is. The block must then give each sample alone the same output as in the whole batch, or a ValueError says
    what was split and what was not; `why` names what was. A single sample gets everything as it is.
    `wrt="input"`: one Jacobian per sample, all of its outputs by all of its inputs. The block is called with batches of
    one, so no sample sees the others.
    `wrt="params"`: the outputs of the whole batch by all parameters that require a gradient, shared ones once.
    `k`: how many of the largest and of the smallest, by default 6, or all if there are fewer.
    `dtype`: float64, or float32 where float64 is slow or missing (turn TF32 off then, it is coarser than it seems).
    `eval_mode=False` leaves the training flags as they are; dropout then draws the same mask in every evaluation.
    `max_entries`: the size of the largest matrix for `exact` and `gram`; by default 2²⁴ on a CPU and 2²⁸ elsewhere.
    `steps`: at most this many from each start of `lanczos` (300), and exactly this many per probe of `density` (64).
    `tolerance`: for the k largest, relative to σmax. `probes`: random directions for `density`. `seed`: for both.

    Statuses are those of `measure_conditioning`. Raises ValueError for input that has no Jacobian, and says why.
    """
    _check(x, wrt, method, dtype)
    _check_numbers(k=k, max_entries=max_entries, steps=steps, probes=probes, tolerance=tolerance)
    limit = MAX_ENTRIES["cpu" if x.device.type == "cpu" else "cuda"] if max_entries is None else max_entries
    x = x.detach().to(dtype)
    arguments = BatchArguments(args, kwargs, samples=len(x) if wrt == "input" else 1)
    note = check_arguments(block, x, arguments, dtype)
    parts: list[_Found] = []
    last: tuple[Linearization, MethodChoice] | None = None
    with evaluation(block, device=x.device, dtype=dtype, eval_mode=eval_mode) as function:
        for jacobian in _linearizations(function, x, wrt, arguments):
            count = _check_k(k, steps, jacobian)
            chosen = _choose(method, jacobian, limit)
            part = _measure(jacobian, chosen.method, count, steps=steps, tolerance=tolerance, probes=probes, seed=seed)
            parts.append(part)
            last = jacobian, chosen
    assert last is not None  # x is not empty
    jacobian, chosen = last
    return _assemble(parts, wrt, jacobian, chosen.method, "; ".join(filter(None, (chosen.why, note))))


def _check(x: Tensor, wrt: str, method: str, dtype: torch.dtype) -> None:
    if wrt not in ("input", "params"):
        raise ValueError(f"wrt must be 'input' or 'params', got {wrt!r}")
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; the methods are {', '.join(map(repr, METHODS))}")
    if dtype not in (torch.float64, torch.float32):
        raise ValueError(
            f"dtype must be torch.float64 or torch.float32, got {dtype}; the rest is too coarse for spectra"
        )
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"a Jacobian needs a real floating-point x, got {kind}; for token ids, take the block after the embedding "
            "and pass it what the embedding gives"
        )
    if x.ndim < 2 or x.numel() == 0:
        raise ValueError(
            f"x must be a batch of samples, (b, …) with nothing empty, got shape {tuple(x.shape)}; one sample is "
            "x[None]"
        )


def _check_numbers(*, tolerance: float, **counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and (not isinstance(value, Integral) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name} must be a whole number from 1 on, got {value!r}")
    if not isinstance(tolerance, Real) or not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance must be a number from 0 on, relative to the largest value, got {tolerance!r}")


def _check_k(k: int | None, steps: int | None, jacobian: Linearization) -> int:
    m, n = jacobian.outputs, jacobian.inputs
    if k is None:
        return min(6, m, n)
    if not 1 <= k <= min(m, n):
        raise ValueError(f"k must be from 1 to {min(m, n)}, for this Jacobian is {m} × {n} (outputs × inputs), got {k}")
    if steps is not None and steps < k:
        raise ValueError(f"{steps} steps cannot give k = {k} singular values; steps must be at least k")
    return k


def _linearizations(
    function: EvaluatedFunction, x: Tensor, wrt: str, arguments: BatchArguments
) -> Iterator[Linearization]:
    """Yield the Jacobians one at a time, since each holds its graph."""
    if wrt == "input":
        for index, sample in enumerate(x.split(1)):
            given = arguments.of_sample(index)
            # A copy, since a block may work in place, and autograd forbids that on a leaf that requires a gradient.
            yield _linearize(lambda point, given=given: function(point.clone(), None, *given), sample)
        return
    if function.module is None:
        raise ValueError("a function has no parameters of its own; for wrt='params' pass the module, or a method of it")
    if not function.parameters:
        raise ValueError("no parameter of this block requires a gradient; unfreeze some, or take wrt='input'")
    names = list(function.parameters)

    def at(*tensors: Tensor) -> Tensor:
        return function(x.clone(), dict(zip(names, tensors, strict=True)), *arguments.whole)

    yield _linearize(at, *function.parameters.values())


def _linearize(function: Callable[..., Tensor], *points: Tensor) -> Linearization:
    try:
        return Linearization(function, *points)
    except RuntimeError as error:
        if "dtype" not in str(error) and "scalar type" not in str(error):
            raise
        raise ValueError(
            f"the block does not run in {points[0].dtype}: {error}. Parameters and buffers of a module are cast, "
            "but not tensors that a function or a module holds otherwise; cast those, or try dtype=torch.float32"
        ) from error


def _choose(method: str, jacobian: Linearization, limit: int) -> MethodChoice:
    m, n = jacobian.outputs, jacobian.inputs
    short = min(m, n)
    if method in ("exact", "gram") and (m * n if method == "exact" else short * short) > limit:
        raise ValueError(
            f"the Jacobian is {m} × {n}, and method {method!r} would hold more than max_entries = {limit} numbers; "
            "raise that, or take method='lanczos' or 'density'"
        )
    if method != "auto":
        return MethodChoice(method, "as asked")
    if m * n <= limit:
        return MethodChoice("exact", f"{m} × {n} fits into {limit} entries")
    if short * short <= limit:
        return MethodChoice("gram", f"{m} × {n} does not fit into {limit} entries, but its short side squared does")
    return MethodChoice("lanczos", f"neither {m} × {n} nor its short side squared fits into {limit} entries")


# ---- the four methods, for one Jacobian


class _Found(NamedTuple):
    """The result for one Jacobian: (k,) each; all values, and the density, if the method gives them."""

    largest: Tensor
    largest_error: Tensor
    smallest: Tensor
    smallest_error: Tensor
    values: Tensor | None = None
    density: SpectralDensity | None = None
    smallest_is_bound: bool = False
    converged: bool = True
    residual: Tensor | None = None
    """Some singular value lies within this of each of the largest; None if it equals `largest_error`."""


def _rounding_of(jacobian: Linearization) -> float:
    """Return the error of a singular value, relative to σmax, due to rounding inside the block and in the SVD."""
    return jacobian.coarsest_eps() * math.sqrt(max(jacobian.outputs, jacobian.inputs))


def _measure(
    jacobian: Linearization,
    method: str,
    k: int,
    *,
    steps: int | None = None,
    tolerance: float = 1e-8,
    probes: int = 8,
    seed: int = 0,
) -> _Found:
    """Return the k largest and the k smallest singular values by `exact`, `gram`, `lanczos` or `density`."""
    tolerance = max(tolerance, 32 * jacobian.coarsest_eps())
    density_steps = min(max(k, steps or DENSITY_STEPS), jacobian.outputs, jacobian.inputs)
    if not jacobian.finite:
        return _not_finite(jacobian, method, k, probes, density_steps)
    if method == "exact":
        values = singular_values(jacobian.matrix().double(), method="svd")
        error = _rounding_of(jacobian) * values[:1].expand(k)
        return _Found(values[:k], error, values[-k:], error, values)
    if method == "gram":
        return _by_gram(jacobian, k)
    if method == "lanczos":
        return _by_lanczos(jacobian, k, max(k, steps or LANCZOS_STEPS), tolerance, seed)
    return _by_density(jacobian, k, density_steps, probes, seed)


def _by_gram(jacobian: Linearization, k: int) -> _Found:
    wide = jacobian.outputs <= jacobian.inputs
    short = min(jacobian.outputs, jacobian.inputs)
    down, up = (jacobian.vjp, jacobian.jvp) if wide else (jacobian.jvp, jacobian.vjp)
    gram = torch.empty(short, short, dtype=torch.float64, device=jacobian.device)
    sizes = torch.empty(short, 1, dtype=torch.float64, device=jacobian.device)
    for i in range(short):
        unit = torch.zeros(short, dtype=jacobian.dtype, device=jacobian.device)
        unit[i] = 1
        row = down(unit)
        sizes[i] = size = row.abs().amax()
        # Scaled to 1, so that squares stay within the range of float32.
        gram[i] = up(row / torch.where(size > 0, size, 1)).double()
    top = sizes.max()
    gram *= sizes / top / top if top > 0 else 0
    if not bool(gram.isfinite().all()):
        return _not_finite(jacobian, "gram", k)
    squares = torch.linalg.eigvalsh((gram + gram.mT) / 2).flip(0).clamp_min(0)  # in units of top²
    values = top * squares.sqrt()
    noise = 4 * _rounding_of(jacobian) * squares[0]  # in every square
    error = top * torch.where(squares > noise, noise / squares.sqrt(), noise.sqrt())
    if bool(squares[-1] >= RESOLVED * noise):
        return _Found(values[:k], error[:k], values[-k:], error[-k:], values)
    # A square that drowns in the noise is only known to be at most its computed value plus the noise.
    bound = top * (squares[-k:] + noise).sqrt()
    return _Found(
        values[:k], error[:k], bound, torch.full_like(bound, math.inf), values, smallest_is_bound=bool(values[0] > 0)
    )


def _by_lanczos(jacobian: Linearization, k: int, steps: int, tolerance: float, seed: int) -> _Found:
    found = largest_singular_values(jacobian, k, max_steps=steps, tolerance=tolerance, seed=seed)
    noise = _rounding_of(jacobian) * found.values[0]
    return _Found(
        found.values,
        found.errors + noise,
        found.smallest,
        noise.expand(k) if found.complete else torch.full_like(found.smallest, math.inf),
        smallest_is_bound=not found.complete,
        converged=found.converged,
        residual=found.residuals + noise,
    )


def _by_density(jacobian: Linearization, k: int, steps: int, probes: int, seed: int) -> _Found:
    density = spectral_density(jacobian, probes=probes, steps=steps, seed=seed)
    # By interlacing, the i-th largest node of any probe is at most the i-th largest singular value; likewise below.
    largest, smallest = density.nodes[:, :k].amax(0), density.nodes[:, -k:].amin(0)
    complete = steps == min(jacobian.outputs, jacobian.inputs)
    error = _rounding_of(jacobian) * largest[:1].expand(k) if complete else torch.full_like(largest, math.inf)
    return _Found(largest, error, smallest, error, density=density, smallest_is_bound=not complete, converged=complete)


def _not_finite(jacobian: Linearization, method: str, k: int, probes: int = 1, steps: int = 1) -> _Found:
    def nan(*shape: int) -> Tensor:
        return torch.full(shape, math.nan, dtype=torch.float64, device=jacobian.device)

    short = min(jacobian.outputs, jacobian.inputs)
    density = SpectralDensity(nodes=nan(probes, steps), weights=nan(probes, steps), count=short)
    return _Found(
        nan(k),
        nan(k),
        nan(k),
        nan(k),
        values=nan(short) if method in ("exact", "gram") else None,
        density=density if method == "density" else None,
        converged=False,
    )


# ---- all of them together


def _assemble(parts: list[_Found], wrt: str, jacobian: Linearization, method: str, why: str) -> JacobianSpectrum:
    eps = jacobian.coarsest_eps()
    if eps > torch.finfo(jacobian.dtype).eps:
        why += f"; the block computes in a coarser dtype inside, with eps {eps:.1e}"
    if jacobian.jvp_mode is not None:
        why += f"; Jacobian-vector products by {jacobian.jvp_mode} mode"
    ceiling, edge = 1 / eps, 1 / _rounding_of(jacobian)

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack([tensor.double() for tensor in tensors]) if wrt == "input" else tensors[0].double()

    largest, smallest = joined([p.largest for p in parts]), joined([p.smallest for p in parts])
    high, low = largest[..., 0], smallest[..., -1]
    finite, zero = high.isfinite() & low.isfinite(), high == 0
    shape = high.shape
    bound = torch.tensor([p.smallest_is_bound for p in parts], device=high.device).reshape(shape)
    beyond = ~(low * edge >= high) & finite & ~zero
    kappa = torch.where(beyond, ceiling, (high / torch.where(beyond, high, low)).clamp_max(ceiling))
    kappa = kappa.masked_fill(~finite | zero, math.nan)
    status = torch.full(shape, OK, dtype=torch.uint8, device=high.device)
    status = status.masked_fill(beyond, CEILING).masked_fill(zero, ZERO).masked_fill(~finite, NON_FINITE)
    densities = [p.density for p in parts if p.density is not None]
    values = [p.values for p in parts if p.values is not None]
    return JacobianSpectrum(
        largest=largest,
        largest_error=joined([p.largest_error for p in parts]),
        largest_residual=joined([p.largest_error if p.residual is None else p.residual for p in parts]),
        smallest=smallest,
        smallest_error=joined([p.smallest_error for p in parts]),
        values=joined(values) if values else None,
        density=SpectralDensity(
            nodes=joined([d.nodes for d in densities]),
            weights=joined([d.weights for d in densities]),
            count=densities[0].count,
        )
        if densities
        else None,
        kappa=kappa,
        log_kappa=kappa.log(),
        kappa_is_lower_bound=bound & finite & ~zero & ~beyond,
        converged=torch.tensor([p.converged for p in parts], device=high.device).reshape(shape) & finite,
        status=status,
        ceiling=ceiling,
        outputs=jacobian.outputs,
        inputs=jacobian.inputs,
        wrt=wrt,
        method=method,
        why=why,
    )
