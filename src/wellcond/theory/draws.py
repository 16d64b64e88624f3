"""Random weights and tokens, and attention as in the papers' formulas, for many draws at a time, in float64.

    g = generator(0, "asa-prop41", "n = 64")                 # its own stream, whatever else is drawn, in any order
    x, w = tokens(400, 64, 32, g), weights("gaussian", 400, 32, 32, g)
    linear_attention(x, w, w, w, heads=4).shape              # (400, 64, 32): no softmax, heads side by side

Shapes: b draws, n tokens, width d, h heads of width p = d/h.
"""

import hashlib

import torch
from torch import Tensor

from wellcond.numerics import condition_number

__all__ = [
    "INDEPENDENT",
    "WEIGHTS",
    "generator",
    "kappa",
    "kappa_at_rank",
    "linear_attention",
    "scores",
    "softmax_attention",
    "split_heads",
    "tokens",
    "weights",
]

INDEPENDENT = ("gaussian", "uniform")  # independent entries, as Propositions 4.1 and 4.2 assume
WEIGHTS = (*INDEPENDENT, "orthogonal")


def generator(seed: int, *names: object) -> torch.Generator:
    """Return a random stream that depends only on the seed and on the names of what it is for."""
    digest = hashlib.sha256("/".join(map(str, (seed, *names))).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def tokens(draws: int, n: int, d: int, source: torch.Generator) -> Tensor:
    """Return tokens (b, n, d) with independent standard normal entries."""
    return torch.randn(draws, n, d, dtype=torch.float64, generator=source)


def weights(kind: str, draws: int, rows: int, columns: int, source: torch.Generator) -> Tensor:
    """Return weights (b, rows, columns) of zero mean and variance 1/rows.

    `orthogonal` weights have orthonormal columns, or rows if wide. Raises ValueError for an unknown kind.
    """
    shape = (draws, rows, columns)
    if kind == "gaussian":
        return torch.randn(shape, dtype=torch.float64, generator=source) * rows**-0.5
    if kind == "uniform":
        return (torch.rand(shape, dtype=torch.float64, generator=source) * 2 - 1) * (3 / rows) ** 0.5
    if kind == "orthogonal":
        tall = torch.randn(draws, max(rows, columns), min(rows, columns), dtype=torch.float64, generator=source)
        q, r = torch.linalg.qr(tall)
        q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]  # makes q uniform on the orthogonal group
        return q if rows >= columns else q.mT
    raise ValueError(f"unknown weights {kind!r}; there are {', '.join(WEIGHTS)}")


def split_heads(w: Tensor, heads: int) -> Tensor:
    """Split packed weights (b, d, d) into heads, (b, h, d, p), as transformers do."""
    return w.unflatten(-1, (heads, -1)).movedim(-2, -3)


def scores(x: Tensor, wq: Tensor, wk: Tensor, heads: int = 1) -> Tensor:
    """X W_Q W_Kᵀ Xᵀ for each head: (b, h, n, n), unscaled."""
    x = x[:, None]
    return (x @ split_heads(wq, heads)) @ (x @ split_heads(wk, heads)).mT


def linear_attention(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, *, heads: int = 1) -> Tensor:
    """X W_Q W_Kᵀ Xᵀ X W_V, heads side by side: (b, n, d)."""
    x_ = x[:, None]
    q, k, v = (x_ @ split_heads(w, heads) for w in (wq, wk, wv))
    return (q @ (k.mT @ v)).movedim(-3, -2).flatten(-2)


def softmax_attention(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, *, heads: int = 1) -> Tensor:
    """softmax(X W_Q W_Kᵀ Xᵀ / √p) X W_V, heads side by side: (b, n, d)."""
    a = (scores(x, wq, wk, heads) * (wq.shape[-1] // heads) ** -0.5).softmax(-1)
    return (a @ (x[:, None] @ split_heads(wv, heads))).movedim(-3, -2).flatten(-2)


def kappa(x: Tensor) -> Tensor:
    """Return κ over min(n, d) singular values, by SVD: where a bound is attained, an error of 1e-4 is too large."""
    return condition_number(x.double(), method="svd")


def kappa_at_rank(x: Tensor, rank: int) -> Tensor:
    """Return σ₁/σ_rank, which is κ = ‖A‖‖A⁺‖ for a matrix known to have this rank."""
    s = torch.linalg.svdvals(x.double())
    return s[..., 0] / s[..., rank - 1]
