"""The orthonormal discrete cosine transform (DCT-II) and its inverse (DCT-III), of any length.

Each is one product with a constant basis: at the lengths of token matrices this is faster than an FFT of twice the
length, it is differentiable as it is, and it exports.

    coefficients = dct2(tokens)          # D_n · tokens · D_dᵀ, over the last two dimensions
    tokens = idct2(coefficients)
    bases = dct_bases(keep)              # for padded sequences: one basis each, of its own length
"""

import math
import operator

import torch
from torch import Tensor

from .autocast import no_autocast
from .constants import kept_constants
from .fastpaths import exporting

__all__ = ["coefficient_floor", "dct", "dct2", "dct_bases", "dct_basis", "dct_power", "dct_power_in", "idct", "idct2"]

DOUBLE_BELOW = 0.9  # epsilon below which the power is computed in float64
# Whether a compiled function may have several tensors as constants: this works in torch 2.15 and fails in 2.11.
COMPILES_CONSTANTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)


def dct_basis(length: int, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return the orthonormal DCT-II matrix: row k is the k-th cosine, so `basis @ x` is the transform of x.

    Built in float64 and rounded once; cached per length, dtype and device (treat it as read-only).
    """
    if exporting() or (torch.compiler.is_compiling() and not COMPILES_CONSTANTS):
        return _build_basis(length, dtype, device)  # a few graph nodes; a cache would leak fake tensors
    return _cached_basis(operator.index(length), dtype, str(device))  # index() makes a size a compile-time constant


@torch.compiler.assume_constant_result
def _cached_basis(length: int, dtype: torch.dtype, device: str) -> Tensor:
    if type(torch.empty(0)) is not Tensor:  # traced without a compiler's flag, as a compiled backward pass is
        return _build_basis(length, dtype, device)
    return _kept_basis(int(length), dtype, device)


def _build_basis(length: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    frequency = torch.arange(length, dtype=torch.float64, device=device)[:, None]
    position = torch.arange(length, dtype=torch.float64, device=device)[None, :]
    # Reducing the integer phase modulo the period keeps every angle small, so long bases stay exact to the last bits.
    phase = torch.remainder((2 * position + 1) * frequency, 4 * length)
    basis = torch.cos(phase * (math.pi / (2 * length))) * math.sqrt(2 / length)
    return torch.where(frequency == 0, 1 / math.sqrt(length), basis).to(dtype)


_kept_basis = kept_constants(64)(_build_basis)


def dct_bases(keep: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return, for each row of `keep` (…, n), the DCT-II matrix of the tokens it keeps: (…, n, n), for `bases @ x`.

    Columns of tokens that are not kept, and rows beyond the number of kept ones, are zero: padding takes no part in the
    transform, wherever it is. The transpose is the inverse. Needs memory for n² numbers per row.
    """
    n = keep.shape[-1]
    whole = torch.int32 if n < 2**14 else torch.int64  # holds products of two positions
    length = keep.sum(-1, dtype=whole).clamp_min(1)[..., None, None]
    rank = (keep.cumsum(-1, dtype=whole) - 1)[..., None, :]
    frequency = torch.arange(n, dtype=whole, device=keep.device)[:, None]
    phase = torch.remainder((2 * rank + 1) * frequency, 4 * length)  # every angle stays small
    size = length.to(dtype)
    basis = torch.cos(phase.to(dtype) * (math.pi / (2 * size))) * (2 / size).sqrt()
    basis = torch.where(frequency == 0, size.rsqrt(), basis)
    return basis.masked_fill(~(keep[..., None, :] & (frequency < length)), 0)


def dct(x: Tensor, dim: int = -1) -> Tensor:
    """Compute the orthonormal DCT-II along `dim`, like `scipy.fft.dct(x, norm="ortho")`."""
    return _transform(x, dim, inverse=False)


def idct(x: Tensor, dim: int = -1) -> Tensor:
    """Compute the orthonormal DCT-III along `dim`: the inverse, and the transpose, of `dct`."""
    return _transform(x, dim, inverse=True)


def dct2(x: Tensor) -> Tensor:
    """Compute the DCT-II over the last two dimensions, like `scipy.fft.dctn(x, axes=(-2, -1), norm="ortho")`."""
    return dct(dct(x, -1), -2)


def idct2(x: Tensor) -> Tensor:
    """Compute the inverse of `dct2`."""
    return idct(idct(x, -1), -2)


def _transform(x: Tensor, dim: int, *, inverse: bool) -> Tensor:
    if not x.is_floating_point():
        raise ValueError(f"the DCT needs a real floating-point tensor, got {x.dtype}; convert it first, e.g. x.float()")
    if x.ndim == 0:
        raise ValueError("the DCT needs at least one dimension, got a scalar")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim={dim} is out of range for a tensor of shape {tuple(x.shape)}")
    length = x.shape[dim]
    if length == 0:
        raise ValueError(f"the DCT along dim={dim} of shape {tuple(x.shape)} has no values to transform")
    compute = x.dtype if x.dtype == torch.float64 else torch.float32
    basis = dct_basis(length, dtype=compute, device=x.device)
    with no_autocast(x):
        if dim % x.ndim == x.ndim - 2:
            out = (basis.mT if inverse else basis) @ x.to(compute)
        else:
            out = (x.to(compute).movedim(dim, -1) @ (basis if inverse else basis.mT)).movedim(-1, dim)
    return out.to(x.dtype)


def dct_power(x: Tensor, epsilon: float, *, restore_scale: bool = True, keep: Tensor | None = None) -> Tensor:
    """Map every two-dimensional DCT coefficient c of each (…, n, d) matrix to sign(c) · peak · (|c|/peak)^ε.

    `peak` is the largest |c| of that matrix; without `restore_scale` the factor peak, which the paper's Algorithm 2
    has, is left out. Below floor · peak the map is linear, so that its slope at zero is finite; the floor is the size
    of the input's own rounding (`coefficient_floor`). Computed in float32, or in float64 for float64 input and for
    ε < DOUBLE_BELOW, where the power would amplify the rounding of small coefficients beyond 1e-4.

    `keep`, bool (…, n), says which rows count: the others take no part and come back as zeros.
    """
    double = x.dtype == torch.float64 or epsilon < DOUBLE_BELOW
    compute = torch.float64 if double else torch.float32
    floor = coefficient_floor(x.dtype)
    with no_autocast(x):
        bases = None if keep is None else dct_bases(keep, dtype=compute)
        if keep is None or bases is None:
            coefficients = dct2(x.to(compute))
        else:
            coefficients = bases @ dct(x.to(compute).masked_fill(~keep[..., None], 0), -1)
        peak = coefficients.abs().amax(dim=(-2, -1), keepdim=True)
        peak = torch.where(peak == 0, 1.0, peak)  # NaN stays NaN
        relative = coefficients / peak
        grown = relative * relative.abs().clamp_min(floor) ** (epsilon - 1)
        grown = grown * peak if restore_scale else grown
        out = idct2(grown) if bases is None else bases.mT @ idct(grown, -1)
    return out.to(x.dtype)


def dct_power_in(x: Tensor, epsilon: float, dtype: torch.dtype, *, restore_scale: bool = True) -> Tensor:
    """Compute `dct_power` as printed in the paper, with bases, products and powers all in `dtype`.

    For comparison: this is what a plain implementation computes under autocast.
    """
    left, right = (dct_basis(side, dtype=dtype, device=x.device) for side in x.shape[-2:])
    with no_autocast(x):
        coefficients = left @ x.to(dtype) @ right.mT
        sizes = coefficients.abs()
        peak = sizes.amax(dim=(-2, -1), keepdim=True)
        peak = torch.where(peak == 0, 1.0, peak)
        grown = coefficients.sign() * (sizes / peak) ** epsilon
        return (left.mT @ (grown * peak if restore_scale else grown) @ right).to(x.dtype)


def coefficient_floor(dtype: torch.dtype) -> float:
    """Return the relative size below which a DCT coefficient is rounding noise: float32's eps, or float64's.

    Each coefficient is one sum, in which rounding errors average out; unlike a norm, it does not grow with n and d.
    """
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
