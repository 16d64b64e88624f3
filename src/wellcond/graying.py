"""Token Graying: better-conditioned input tokens (Always Skip Attention, algorithms 1 and 2).

    tokens = gray_tokens(tokens, "svd", epsilon=0.95)          # (…, n, d) → (…, n, d)
    images = TokenGraying("dct", 0.95, patch_size=16)(images)  # images → images of the same shape
    tokens = gray_tokens(tokens, "dct", keep=mask)             # sequences with padding: True marks a token

Both methods raise magnitudes, relative to the largest one, to the power epsilon: singular values (`svd`), or
coefficients of the two-dimensional DCT (`dct`). The small ones grow, so the condition number falls; `svd` gives
exactly κ^epsilon. They compute in float32 or better, even under autocast, and return the input's dtype; only the fused
DCT kernels multiply in half precision (with float32 sums).
"""

import operator
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from wellcond.numerics.autocast import autocast_dtype, no_autocast
from wellcond.numerics.dct import DOUBLE_BELOW, dct_power, dct_power_in
from wellcond.numerics.fastpaths import exporting, fused_kernels, may_look, other_derivatives
from wellcond.numerics.fused import gray_dct, spectral_power_images, tokens_of, untokens
from wellcond.numerics.spectral import check_epsilon, check_matrices, explain_spectral_power, spectral_power
from wellcond.numerics.trust import is_trusted
from wellcond.words import meant

__all__ = ["METHODS", "SequenceGraying", "TokenGraying", "explain_graying", "gray_tokens"]

METHODS = ("svd", "dct")
"""What is raised to the power ε: singular values, or coefficients of the two-dimensional DCT."""
FUSED_DCT_EPSILON = (
    0.9  # half-precision rounding of small coefficients grows as epsilon falls; from here up the error is below 1e-3
)


def gray_tokens(
    x: Tensor, method: str, *, epsilon: float = 0.95, restore_scale: bool = True, keep: Tensor | None = None
) -> Tensor:
    """Gray token matrices (…, n, d), each by itself.

    Args:
        method: `svd`, exact in the condition number, or `dct`, cheaper.
        epsilon: in (0, 1]; 1 changes nothing, smaller values lift small magnitudes more.
        restore_scale: keep the size of the largest singular value (`svd`) or coefficient (`dct`); otherwise it becomes
            1. The paper's printed algorithms differ: the one for the SVD leaves it at 1, the one for the DCT keeps it.
        keep: bool (…, n), False for padding tokens: the matrix of the others is grayed as if they stood alone, and
            padding comes back as zeros. With `dct` this takes memory of n² numbers for each matrix.

    Raises ValueError for an unknown method, an epsilon out of range, integer or empty input, and for a NaN or Inf.
    Under `trusted_input`, and where values cannot be read (`torch.compile`, export, tracing, `torch.func`, fake and
    `meta` tensors), only the matrix that holds one comes back as NaN.
    """
    check_method(method)
    check_epsilon(epsilon)
    check_matrices(x)
    if keep is not None:
        _check_keep(keep, x)
        x = x.masked_fill(~keep[..., None], 0)  # zero rows leave the others' singular values as they are
    _check_finite(x)
    *lead, n, d = x.shape
    if method == "dct" and keep is not None:
        return dct_power(x, epsilon, restore_scale=restore_scale, keep=keep)
    if method == "dct" and _fused_dct(x, epsilon):
        return gray_dct(x.reshape(-1, n, d).contiguous(), 0, 0, epsilon, restore_scale).reshape(*lead, n, d)
    if method == "dct":
        return dct_power(x, epsilon, restore_scale=restore_scale)
    if keep is None:
        return spectral_power(x, epsilon, restore_scale=restore_scale)
    grayed = spectral_power(x, epsilon, restore_scale=restore_scale, rows=keep.sum(-1))
    return grayed.masked_fill(~keep[..., None], 0)  # it is only rounding, but not zero


class _Graying(nn.Module):
    def __init__(self, method: str, epsilon: float, restore_scale: bool):
        super().__init__()
        check_method(method)
        check_epsilon(epsilon)
        self.method: str = method
        # Stored as two integers: torch.compile treats a module's integers as constants, but its floats as variables.
        self._epsilon = float(epsilon).as_integer_ratio()
        self.restore_scale: bool = restore_scale

    @property
    def epsilon(self) -> float:
        """The exponent, as given."""
        return self._epsilon[0] / self._epsilon[1]


class TokenGraying(_Graying):
    """Gray images, whose patches are the tokens; the shape stays the same. There are no parameters and no state.

    `autocast=True` computes the DCT in autocast's dtype, as a plain implementation would. That is less exact, and
    meant for comparisons.

    Examples:
        >>> model = nn.Sequential(TokenGraying("dct", 0.95, patch_size=16), model)  # any model; `gray` knows many
    """

    def __init__(
        self, method: str, epsilon: float = 0.95, patch_size: int | tuple[int, int] = 16, *,
        restore_scale: bool = True, autocast: bool = False,
    ):  # fmt: skip
        super().__init__(method, epsilon, restore_scale)
        if autocast and method != "dct":
            raise ValueError(f"autocast=True is for the DCT: {method} graying is never computed in half precision")
        self.patch_size: tuple[int, int] = _pair(patch_size)
        self.autocast = autocast

    def forward(self, images: Tensor) -> Tensor:
        ph, pw = self.patch_size
        if images.ndim != 4:
            raise ValueError(f"expected images (batch, channels, height, width), got shape {tuple(images.shape)}")
        height, width = images.shape[-2:]
        if height % ph or width % pw or not height or not width:
            raise ValueError(
                f"images of {height} × {width} pixels do not divide into patches of {ph} × {pw}; "
                "resize or pad them, or choose another patch_size"
            )
        if self._takes_images(images):
            _check_finite(images)
            fused = gray_dct if self.method == "dct" else spectral_power_images
            with no_autocast(images):
                return fused(images.contiguous(), ph, pw, self.epsilon, self.restore_scale)
        tokens = tokens_of(images, ph, pw)
        if self.autocast:
            _check_finite(tokens)
            grayed = dct_power_in(tokens, self.epsilon, autocast_dtype(tokens), restore_scale=self.restore_scale)
        else:
            grayed = gray_tokens(tokens, self.method, epsilon=self.epsilon, restore_scale=self.restore_scale)
        return untokens(grayed, images.shape, ph, pw)

    def _takes_images(self, images: Tensor) -> bool:
        """Whether a fused kernel reads the images directly, without a copy of their tokens."""
        if self.autocast or not images.is_floating_point() or images.shape[0] == 0 or other_derivatives(images):
            return False
        return (
            explain_graying(self.method, self.token_shape(images.shape), images.dtype, images.device, self.epsilon)[0]
            == "fused"
        )

    def token_shape(self, shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
        """Return (n, d), the shape of an image's token matrix, from the shape of the images."""
        ph, pw = self.patch_size
        return (shape[-2] // ph) * (shape[-1] // pw), shape[-3] * ph * pw

    def extra_repr(self) -> str:
        scale = "" if self.restore_scale else ", restore_scale=False"
        precision = ", autocast=True" if self.autocast else ""
        return f"{self.method!r}, epsilon={self.epsilon:g}, patch_size={self.patch_size}{scale}{precision}"


class SequenceGraying(_Graying):
    """Gray token matrices (b, n, d). There are no parameters and no state."""

    autocast = False

    def __init__(self, method: str, epsilon: float = 0.95, *, restore_scale: bool = True):
        super().__init__(method, epsilon, restore_scale)

    def forward(self, tokens: Tensor, keep: Tensor | None = None) -> Tensor:
        settings = {"epsilon": self.epsilon, "restore_scale": self.restore_scale}
        return gray_tokens(tokens, self.method, keep=keep, **settings)

    def extra_repr(self) -> str:
        scale = "" if self.restore_scale else ", restore_scale=False"
        return f"{self.method!r}, epsilon={self.epsilon:g}{scale}"


def explain_graying(
    method: str, token_shape: tuple[int, int], dtype: torch.dtype, device: torch.device, epsilon: float
) -> tuple[str, str]:
    """Return the path that graying takes for such tokens (`fused`, `products`, `eigh`, `svd` or `basis`), and why."""
    if method == "dct":
        if dtype == torch.float64:
            return "basis", "float64 products with the DCT basis: float64 input asks for float64 accuracy"
        if exporting():
            return "basis", "products with the DCT basis export everywhere"
        products = f"{'float64' if epsilon < DOUBLE_BELOW else 'float32'} products with the DCT basis"
        if not fused_kernels(device):
            return "basis", f"{products}: no fused kernels here"
        if epsilon < FUSED_DCT_EPSILON:
            return "basis", f"{products}: half precision errs by more than 1e-3 below ε = {FUSED_DCT_EPSILON}"
        return "fused", "Triton kernels in half precision with float32 sums"
    path, why = explain_spectral_power(token_shape, dtype, device, epsilon)
    return ("fused", why) if why.startswith("fused") else (path, why)


def check_method(method: str) -> None:
    if method not in METHODS:
        near = meant(method, METHODS)
        raise ValueError(f"there is no graying method {method!r}{near} (there are 'svd', exact, and 'dct', cheapest)")


def _check_keep(keep: Tensor, x: Tensor) -> None:
    if keep.dtype != torch.bool or keep.shape != x.shape[:-1]:
        raise ValueError(
            f"keep says which tokens count: bool of shape {tuple(x.shape[:-1])}, and not {tuple(keep.shape)} of "
            f"{keep.dtype}"
        )


def _pair(patch_size) -> tuple[int, int]:
    try:
        rows, columns = patch_size if isinstance(patch_size, Iterable) else (patch_size, patch_size)
        size = operator.index(rows), operator.index(columns)  # accepts NumPy's integers, rejects fractions
    except (TypeError, ValueError):
        size = (0, 0)
    if min(size) < 1:
        raise ValueError(f"patch_size={patch_size!r} is neither a positive integer nor a pair of them")
    return size


def _fused_dct(x: Tensor, epsilon: float) -> bool:
    if x.numel() == 0 or other_derivatives(x):
        return False
    return explain_graying("dct", (x.shape[-2], x.shape[-1]), x.dtype, x.device, epsilon)[0] == "fused"


def _check_finite(x: Tensor) -> None:
    if is_trusted() or not x.is_floating_point() or not may_look(x):
        return
    if not bool(x.detach().isfinite().all()):
        bad = ~x.detach().isfinite().flatten(-2).all(-1)
        raise ValueError(
            f"{int(bad.sum())} of {bad.numel()} token matrices (or channels) hold a NaN or Inf; "
            "look for the bad images or the diverged step before graying"
        )
