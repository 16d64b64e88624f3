"""The spectral power U Σ^ε Vᵀ of matrices: by an SVD, by an eigendecomposition, or by matrix products alone.

    y = spectral_power(x, 0.95)                          # σ_i → σmax · (σ_i / σmax)^0.95, singular vectors kept
    y = spectral_power(x, 0.95, restore_scale=False)     # σ_i → (σ_i / σmax)^0.95, the largest becomes 1

Below floor · σmax the power is linear, since its slope at zero would be infinite: 0 stays 0, and gradients are finite
everywhere. Every method computes internally in float64 or the equivalent, and returns the input's dtype.

| method     | what it does                                           | relative error of σ above 1e-5 · σmax     |
|------------|--------------------------------------------------------|-------------------------------------------|
| `svd`      | `torch.linalg.svd` in float64                          | 1e-6 (float32 input), 1e-14 (float64)     |
| `eigh`     | eigenvectors of the float64 Gram matrix                | 1e-5                                      |
| `products` | weighted iterates of the Gram matrix; exports anywhere | `products_bound(epsilon)`: 2e-2 or better |
"""

import math
from typing import Any

import torch
from torch import Tensor

from .autocast import no_autocast
from .fastpaths import FUSED_SIDE, exporting, fused_kernels, other_derivatives
from .first_order import first_order
from .power_fit import direct_fit, folded_fit

__all__ = ["explain_spectral_power", "power_floor", "products_bound", "spectral_power"]

METHODS = ("auto", "svd", "eigh", "products")
SMALLEST_FLOOR = 1e-6  # what a float64 Gram matrix resolves with two digits to spare
FUSED_EPSILON = 0.5  # below it the fused kernels have not been validated
TURNS, STARTS = 64, 8  # of the power iteration for the largest eigenvalue


def power_floor(dtype: torch.dtype, n: int, d: int) -> float:
    """Return the relative singular value below which the power is linear: the norm of an n × d matrix's rounding noise.

    Rounding errors are independent, so their matrix has norm about eps · sqrt(max(n, d)) relative to σmax, and not
    eps · max(n, d).
    """
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    return eps * math.sqrt(max(n, d))


def products_bound(epsilon: float, n: int = 196, d: int = 768) -> float:
    """Return the largest relative error of `method="products"` for singular values above 1e-5 · σmax, as fitted.

    Rounding adds about 1e-4.
    """
    floor = max(power_floor(torch.float32, n, d), SMALLEST_FLOOR)
    return max(direct_fit(epsilon, floor).bound, folded_fit(epsilon, floor).bound if epsilon >= FUSED_EPSILON else 0.0)


def spectral_power(
    x: Tensor, epsilon: float, *, method: str = "auto", restore_scale: bool = True, rows: Tensor | None = None
) -> Tensor:
    """Return U f(Σ) Vᵀ of each (…, n, d) matrix with f(σ) = σmax · (σ/σmax)^ε, or (σ/σmax)^ε without `restore_scale`.

    Args:
        x: real floating point, any leading dimensions.
        epsilon: in (0, 1].
        method: see the table above; `auto` takes the fastest here (`explain_spectral_power` says which and why).
        rows: (…), how many rows of each matrix count where the others are padding, all zero: the floor is that of a
            matrix without them. `products` fits one floor to all, with the padding; that shows below 1e-5 · σmax.

    A zero matrix stays zero. A matrix with a NaN or Inf comes back as NaN, without affecting any other.
    Gradients are those of the matrix function, and finite for repeated and for zero singular values. `products` has
    second derivatives too; `svd` and `eigh` raise when they are requested.
    """
    check_epsilon(epsilon)
    check_matrices(x)
    if method not in METHODS:
        raise ValueError(f"method={method!r} is not one of {', '.join(METHODS)}")
    if method == "auto":
        method = explain_spectral_power(x.shape, x.dtype, x.device, epsilon)[0]
    *lead, n, d = x.shape
    flat = x.reshape(-1, n, d)
    if flat.shape[0] == 0:
        return x.clone()
    with no_autocast(x):
        if method == "products" and _fused(x.shape, x.dtype, x.device, epsilon) and not other_derivatives(x):
            from .fused import spectral_power_images

            out = spectral_power_images(flat.contiguous(), 0, 0, epsilon, restore_scale)
        else:
            floor = floor_of(method, x.dtype, n, d)
            if rows is not None and method != "products":
                floor = _floors(method, x.dtype, rows, d)
            out = _PLAIN[method](flat.double(), epsilon, floor, restore_scale)
    return out.to(x.dtype).reshape(*lead, n, d)


def explain_spectral_power(
    shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, device: torch.device, epsilon: float
) -> tuple[str, str]:
    """Return the method that `auto` takes, and why."""
    if exporting():
        return "products", "matrix products export everywhere; decompositions do not"
    if dtype == torch.float64:
        return "svd", "float64 input asks for float64 accuracy, which a Gram matrix cannot give"
    if _fused(shape, dtype, device, epsilon):
        return "products", "fused Triton kernels"
    if device.type == "cuda":
        return "products", "float64 products on the GPU; batched decompositions loop over the batch there"
    return "eigh", "LAPACK on the float64 Gram matrix is the fastest on a CPU"


def _fused(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, device: torch.device, epsilon: float) -> bool:
    short = min(shape[-2:])
    fits = dtype != torch.float64 and FUSED_EPSILON <= epsilon < 1 and 1 < short <= FUSED_SIDE
    return fits and not exporting() and fused_kernels(device)


def floor_of(method: str, dtype: torch.dtype, n: int, d: int) -> float:
    floor = power_floor(dtype, n, d)
    return floor if method == "svd" else max(floor, SMALLEST_FLOOR)


def _floors(method: str, dtype: torch.dtype, rows: Tensor, d: int) -> Tensor:
    """Return `floor_of` for each matrix, given how many rows it has: (b, 1)."""
    floors = power_floor(dtype, 1, 1) * rows.reshape(-1, 1).double().clamp_min(d).sqrt()
    return floors.clamp_min(floor_of(method, dtype, 1, 1))


def check_epsilon(epsilon: float) -> None:
    if not 0 < epsilon <= 1:
        raise ValueError(f"epsilon={epsilon} is outside (0, 1]; 1 changes nothing, the paper uses 0.5 to 0.97")


def check_matrices(x: Tensor) -> None:
    if not x.is_floating_point():
        raise ValueError(f"expected a real floating-point tensor, got {x.dtype}; convert it first, e.g. x.float()")
    if x.ndim < 2:
        raise ValueError(f"expected matrices (…, n, d), got shape {tuple(x.shape)}")
    if x.shape[-1] == 0 or x.shape[-2] == 0:
        raise ValueError(f"the matrices are empty: shape {tuple(x.shape)}")


def _by_svd(x: Tensor, epsilon: float, floor: float | Tensor, restore_scale: bool) -> Tensor:
    finite = x.isfinite().all(dim=-1).all(dim=-1)[:, None, None]
    floor = torch.as_tensor(floor, dtype=x.dtype, device=x.device)
    # LAPACK raises on a NaN and cuSOLVER invents numbers, so neither sees one.
    out, *_ = _SpectralPower.apply(torch.where(finite, x, 0.0), epsilon, floor, restore_scale)
    return torch.where(finite, out, torch.nan)


class _SpectralPower(torch.autograd.Function):
    """U f(Σ) Vᵀ with the derivative of the matrix function, which has no 1/(σi² − σj²) that could blow up.

    In the bases U, V the derivative acts entrywise: the symmetric part of dX by the divided differences
    (fi − fj)/(σi − σj), the antisymmetric part by (fi + fj)/(σi + σj), and what lies outside the shorter side by fi/σi.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        x: Tensor, epsilon: float, floor: Tensor, restore_scale: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        u, s, vh = torch.linalg.svd(x, full_matrices=False)
        top = s[:, :1]
        grown, _ = _power_and_slope(s / torch.where(top > 0, top, 1.0), epsilon, floor)
        out = (u * (grown * top if restore_scale else torch.where(top > 0, grown, 0.0))[:, None, :]) @ vh
        return out, u, s, vh

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        x, ctx.epsilon, floor, ctx.restore_scale = inputs
        _, u, s, vh = output
        ctx.mark_non_differentiable(u, s, vh)
        ctx.save_for_backward(u, s, vh, floor, x)

    @staticmethod
    @first_order
    def backward(ctx, grad, *_):  # pyright: ignore[reportIncompatibleMethodOverride]
        u, s, vh, floor, _ = ctx.saved_tensors
        top = torch.where(s[:, :1] > 0, s[:, :1], 1.0)
        r = s / top
        f, slope = _power_and_slope(r, ctx.epsilon, floor)
        ratio = torch.where(r > floor, f / r.clamp_min(floor), floor ** (ctx.epsilon - 1))
        ri, rj, fi, fj = r[:, :, None], r[:, None, :], f[:, :, None], f[:, None, :]
        close = (ri - rj).abs() <= 1e-5 * (ri + rj)
        middle = _power_and_slope((ri + rj) / 2, ctx.epsilon, floor[..., None])[1]
        differences = torch.where(close, middle, (fi - fj) / torch.where(close, 1.0, ri - rj))
        both_zero = ri + rj == 0
        sums = torch.where(both_zero, ratio[:, :, None], (fi + fj) / torch.where(both_zero, 1.0, ri + rj))
        p = u.mT @ grad @ vh.mT
        inner = differences * (p + p.mT) / 2 + sums * (p - p.mT) / 2
        # f depends on σmax too: as σmax·h(σ/σmax), or as h(σ/σmax).
        through_top = f - r * slope if ctx.restore_scale else -r * slope
        inner[:, 0, 0] += (_diagonal(p) * through_top).sum(-1)
        outside = (grad @ vh.mT - u @ p) * ratio[:, None, :] @ vh + (u * ratio[:, None, :]) @ (u.mT @ grad - p @ vh)
        result = u @ inner @ vh + outside
        return (result if ctx.restore_scale else result / top[:, :, None]), None, None, None


def _diagonal(p: Tensor) -> Tensor:
    """Return `p.diagonal(dim1=-2, dim2=-1)`, avoiding a warning about future changes when torch 2.15 compiles that."""
    i = torch.arange(p.shape[-1], device=p.device)
    return p[:, i, i]


def _power_and_slope(r: Tensor, epsilon: float, floor: Tensor) -> tuple[Tensor, Tensor]:
    """Return h(r) = r^ε above the floor, linear below, and its derivative; for r in [0, 1]."""
    above = r > floor
    safe = r.clamp_min(floor)
    gain = floor ** (epsilon - 1)
    return torch.where(above, safe**epsilon, r * gain), torch.where(above, epsilon * safe ** (epsilon - 1), gain)


def _by_gram(weights):
    """Make a method out of `weights`: Gram matrix G of the shorter side → (power of G/λmax, to multiply X by; λmax)."""

    def method(x: Tensor, epsilon: float, floor: float | Tensor, restore_scale: bool) -> Tensor:
        n, d = x.shape[-2:]
        size = x.detach().abs().amax(dim=(-2, -1), keepdim=True)
        scale = torch.where(size > 0, size, 1.0)  # so that squares neither overflow nor underflow
        x = x / scale
        w, top = weights(x @ x.mT if n <= d else x.mT @ x, epsilon, floor)
        out = w @ x if n <= d else x @ w
        return out * scale if restore_scale else out / torch.where(top > 0, top, 1.0).sqrt()

    return method


@_by_gram
def _by_eigh(gram: Tensor, epsilon: float, floor: float | Tensor) -> tuple[Tensor, Tensor]:
    finite = gram.isfinite().all(dim=-1).all(dim=-1)[:, None, None]
    floor = torch.as_tensor(floor, dtype=gram.dtype, device=gram.device)
    w, top = _GramPower.apply(torch.where(finite, gram, 0.0), epsilon, floor)[:2]
    return torch.where(finite, w, torch.nan), top[:, None, None]


class _GramPower(torch.autograd.Function):
    """max(G/λmax, floor²)^((ε−1)/2) of symmetric matrices, differentiated by divided differences (Daleckii, Krein)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gram: Tensor, epsilon: float, floor: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        values, vectors = torch.linalg.eigh(gram)
        top = values[:, -1].clamp_min(0)
        g = values / torch.where(top > 0, top, 1.0)[:, None]
        weights = g.clamp_min(floor**2) ** ((epsilon - 1) / 2)
        return (vectors * weights[:, None, :]) @ vectors.mT, top, values, vectors

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, ctx.epsilon, floor = inputs
        power, _, values, vectors = output
        ctx.mark_non_differentiable(values, vectors)
        ctx.save_for_backward(values, vectors, floor, power)

    @staticmethod
    @first_order
    def backward(ctx, grad, grad_top, *_):  # pyright: ignore[reportIncompatibleMethodOverride]
        values, vectors, floor, _ = ctx.saved_tensors
        top = torch.where(values[:, -1:] > 0, values[:, -1:], 1.0)
        g = values / top
        exponent = (ctx.epsilon - 1) / 2
        clamped = g.clamp_min(floor**2)
        w = clamped**exponent
        slope = torch.where(g > floor**2, exponent * w / clamped, 0.0)
        gi, gj = g[:, :, None], g[:, None, :]
        close = (gi - gj).abs() <= 1e-5 * (clamped[:, :, None] + clamped[:, None, :])
        differences = (w[:, :, None] - w[:, None, :]) / torch.where(close, 1.0, gi - gj)
        differences = torch.where(close, (slope[:, :, None] + slope[:, None, :]) / 2, differences)
        p = vectors.mT @ ((grad + grad.mT) / 2) @ vectors
        inner = differences * p
        inner[:, -1, -1] -= (_diagonal(p) * slope * g).sum(-1)
        inner = inner / top[:, :, None]
        inner[:, -1, -1] += grad_top
        return vectors @ inner @ vectors.mT, None, None


@_by_gram
def _by_products(gram: Tensor, epsilon: float, floor: float) -> tuple[Tensor, Tensor]:
    fit = direct_fit(epsilon, floor)
    top = _largest_eigenvalue(gram)
    a = gram / torch.where(top > 0, top, 1.0)
    w = fit.constant * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device) + fit.weights[0] * a
    for alpha, weight in zip(fit.alphas, fit.weights[1:], strict=True):
        a = torch.baddbmm(a, a, a, beta=alpha, alpha=-alpha * alpha / 4)
        w = w + weight * a
    return w, top


def _largest_eigenvalue(gram: Tensor) -> Tensor:
    """Return λmax as (b, 1, 1), with its derivatives, also under torch.func and forward mode."""
    if exporting():
        v = _top_vector(gram)
        return v.mT @ gram @ v
    return _largest_by_series(gram) if other_derivatives(gram) else _apply(_LargestEigenvalue, gram)


def _apply(function: Any, *arguments: Any) -> Tensor:
    return function.apply(*arguments)


class _LargestEigenvalue(torch.autograd.Function):
    """vᵀGv by power iteration. Its gradient is v vᵀ, whose own derivative takes the change of v into account."""

    @staticmethod
    def forward(ctx: Any, gram: Tensor) -> Tensor:
        v = _top_vector(gram)
        ctx.save_for_backward(gram, v)
        return v.mT @ gram @ v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        gram, v = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # a second derivative is requested
            gram = gram.view_as(gram) if gram.requires_grad else gram.detach().requires_grad_()
            return torch.autograd.grad(_largest_by_series(gram), gram, grads[0], create_graph=True)[0]
        return grads[0] * (v @ v.mT)


def _top_vector(gram: Tensor) -> Tensor:
    """Return the eigenvector of λmax by power iteration, (b, m, 1), as a constant.

    Of several starts without symmetry the best result counts: a single start may be all but orthogonal to the
    eigenvector, and TURNS steps would then be too few. The starts depend on the matrix, so that no eigenvector is
    hidden from all.
    """
    side = gram.shape[-1]
    position = torch.arange(side, dtype=gram.dtype, device=gram.device)[:, None]
    start = torch.arange(STARTS, dtype=gram.dtype, device=gram.device)
    with torch.no_grad():
        own = _diagonal(gram)[:, :, None]
        own = 9 * own / own.amax(1, keepdim=True).clamp_min(torch.finfo(gram.dtype).tiny)
        v = 1 + (1 + start) / 2 * torch.cos(12.9898 * position + (0.7 + start) * (1 + position) + own)
        for _ in range(TURNS):
            v = gram @ v
            length = torch.linalg.vector_norm(v, dim=1, keepdim=True)
            v = v / torch.where(length > 0, length, 1.0)
        best = (v * (gram @ v)).sum(1, keepdim=True).argmax(-1, keepdim=True)
        return v.gather(2, best.expand(gram.shape[0], side, 1))


def _largest_by_series(gram: Tensor) -> Tensor:
    """Return λmax, (b, 1, 1), in plain operations that give its first three derivatives, in every mode.

    The eigenvector is a series about itself, v + (λmax − G)⁺ dG v, whose second term is 0 but has a derivative.
    """
    constant = gram.detach()
    finite = constant.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    values, vectors = torch.linalg.eigh(torch.where(finite, constant, 0.0))
    gap = values[:, -1:] - values
    apart = gap > 1e-12 * values[:, -1:]
    inverse = torch.where(apart, 1 / torch.where(apart, gap, 1.0), 0.0)
    v = vectors[:, :, -1:]
    v = v + vectors @ (inverse[:, :, None] * (vectors.mT @ ((gram - constant) @ v)))
    return (v.mT @ gram @ v) / (v.mT @ v)


_PLAIN = {"svd": _by_svd, "eigh": _by_eigh, "products": _by_products}
