"""Skyformer: kernelized attention through a few landmarks, in time and memory linear in the number of tokens.

    out = skyformer_attention(query, key, value, num_landmarks=128)         # (…, heads, n, p) → (…, heads, n, c)
    layer = SkyformerAttention(192, num_heads=3, num_landmarks=64)          # a module with timm's constructor

With landmarks L among queries and keys, and κ the Gaussian kernel of kernelized attention, the output is
    κ(Q, L) (κ(L, L) + γI)⁻¹ κ(L, K) V,
the Nyström approximation of the positive semi-definite completion of κ(Q, K). It is computed from the right: two
streaming products and a solve with a d × d matrix. With every query and key a landmark and γ = 0 it is exact.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from wellcond.attention.checks import check_dropout, check_inputs, check_scale, is_number
from wellcond.attention.compat import skyformer_compat
from wellcond.attention.kernelized import weighted
from wellcond.attention.landmarks import LANDMARKS, Landmarks, check_counts, choose_landmarks, landmark_positions
from wellcond.attention.layer import AttentionCore, AttentionLayer
from wellcond.attention.masks import KeyMask, broadcasts, key_mask, query_keep
from wellcond.attention.registry import find_attention, register_attention
from wellcond.attention.skyformer_fused import can_fuse, fused_skyformer
from wellcond.numerics.autocast import autocast_like_sdpa, no_autocast
from wellcond.numerics.fastpaths import may_look, packed
from wellcond.numerics.gaussian import gaussian_product
from wellcond.numerics.gaussian_weights import gaussian_weights
from wellcond.numerics.inverse import (
    FLOAT32_CONDITION,
    FLOAT64_CONDITION,
    invert_by_iteration,
    normalize_spd,
    solve_spd,
)

__all__ = ["SkyformerAttention", "SkyformerCore", "skyformer_attention"]

SOLVERS = ("cholesky", "iteration")
KERNELS = ("gaussian", "softmax")
REGULAR = 1e-4  # κ(L, L) counts as singular if a diagonal entry of its Cholesky factor is smaller
FLOAT32_EPS = 2.0**-23  # times d: the rounding error of κ(L, L)'s eigenvalues in float32, as in the fused kernels
LOST = 100  # a row sum below this many times its rounding error has at most one correct digit


class SkyformerCore(AttentionCore):
    """`skyformer_attention` inside a module.

    Landmarks are `random` by default: drawn anew at each call in training, but `spread` in evaluation, so that
    evaluation is reproducible to the bit. With `compat` they are drawn in evaluation too.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"landmarks": "random"}
    drops_weights = takes_bias = takes_pair_masks = False

    @classmethod
    def check(cls, **settings: Any) -> None:
        landmarks, solver, kernel, compat = (settings[name] for name in ("landmarks", "solver", "kernel", "compat"))
        _check_settings(
            settings["gamma"], solver, kernel, settings["num_landmarks"], settings["num_iterations"], compat
        )
        if isinstance(landmarks, Tensor):
            raise TypeError("modules take landmarks by name; a tensor of them is for the function, skyformer_attention")
        if landmarks not in LANDMARKS:
            raise ValueError(f"landmarks={landmarks!r} is unknown; use {', '.join(map(repr, LANDMARKS))}")
        if compat:
            _check_compat(landmarks == "random", solver, kernel)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        settings = self.settings
        if settings["landmarks"] == "random" and not self.training:
            settings["landmarks"] = "spread"
        return skyformer_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, **settings)


@register_attention("skyformer", core=SkyformerCore)
def skyformer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    num_landmarks: int = 128,
    gamma: float = 0.1,
    landmarks: str | Tensor = "spread",
    solver: str = "cholesky",
    num_iterations: int = 6,
    kernel: str = "gaussian",
    generator: torch.Generator | None = None,
    compat: bool = False,
    query_mask: Tensor | None = None,
) -> Tensor:
    """Approximate kernelized attention through landmarks, in value's dtype; float32 at least where precision matters.

    Args:
        attn_mask: a mask of keys, (b, 1, 1, m): True = keep, or floating point: what softmax would add to its logits
            becomes a factor exp(mask) here, which overflows float32 from 88 on. With the softmax kernel only
            differences matter. Padding never changes the result of an unmasked token. A mask that differs from query to
            query raises, and so does `is_causal`: landmarks mix all tokens.
        dropout_p: must be 0; the weights it would drop are never computed.
        scale: the factor of ‖q − k‖²/2; 1/√p by default, as in softmax attention.
        num_landmarks: half from the queries, half from the keys; all tokens, if there are no more than that.
        gamma: γ, added to the diagonal of κ(L, L). At 0 the pseudo-inverse is used.
        landmarks: `spread` (evenly spaced, the same at every call), `random` (new at every call and for each sample),
            `segment` (means of consecutive tokens), or a tensor (…, d, p) of your own.
        solver: `cholesky`, exact; or `iteration`, `num_iterations` steps of matrix products. For similar landmarks and
            centred values six steps may be off by 0.1, nine by 1e-10 (docs/attention.md).
        kernel: `gaussian`; or `softmax`, which approximates softmax attention: the same landmarks for the kernel
            exp(q·k · scale), divided by its row sums. The paper advises against training with it. γ is relative to its
            diagonal. Raises ValueError for tokens so large that a row sum is lost in rounding.
        generator: random generator for `random` landmarks.
        compat: compute what the authors' code does (`skyformer_compat`): one draw of positions for the whole batch at
            every call, and an iteration whose starting point is shared by the batch. It takes num_landmarks,
            num_iterations, gamma, scale, a generator and boolean masks of keys; leave other settings at their defaults.
        query_mask: bool, broadcastable to (…, heads, n), or (b, 1, 1, n): False for queries that are padding, which
            are never landmarks. Defaults to the mask of the keys, if there are as many queries as keys.

    A sample whose keys are all masked gets zeros.
    """
    check_inputs(query, key, value)
    query, key, value = autocast_like_sdpa(query, key, value)
    check_scale(scale)
    _check_settings(gamma, solver, kernel, num_landmarks, num_iterations, compat)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator={generator!r} must be a torch.Generator, e.g. torch.Generator(query.device).manual_seed(3)"
        )
    check_dropout(dropout_p)
    if dropout_p > 0:
        raise ValueError(
            f"Skyformer never computes the attention weights that dropout_p={dropout_p} would drop; set it to 0"
        )
    if is_causal:
        raise ValueError("Skyformer cannot be causal, its landmarks see every token; use kernelized_attention")
    scale = 1 / math.sqrt(max(1, query.shape[-1])) if scale is None else scale
    if compat:
        _check_compat(landmarks in ("spread", "random"), solver, kernel)
        if query_mask is not None:
            raise ValueError(
                "compat=True follows the authors' code, which has no query_mask: the mask of keys is used for queries"
            )
        return skyformer_compat(
            query, key, value, attn_mask, scale=scale,
            num_landmarks=num_landmarks, gamma=gamma, num_iterations=num_iterations, generator=generator,
        )  # fmt: skip
    mask = key_mask(attn_mask, query, key, method="Skyformer", relative=kernel == "softmax")
    query_mask = None if query_mask is None else query_keep(query_mask, query)
    if min(query.numel(), key.numel(), value.numel()) == 0:
        return gaussian_product(query, key, value, scale=1.0)  # zeros, whatever the scale; with their derivatives
    keep = None if mask is None else mask.keep
    fused = solver == "cholesky" and kernel == "gaussian" and (mask is None or mask.weights is None)
    count = _count_rows(landmarks, query) if isinstance(landmarks, Tensor) else num_landmarks
    fused = fused and gamma >= count * FLOAT32_EPS and can_fuse(query, key, value, landmarks=count, gamma=gamma)
    if fused and keep is None and query_mask is None and isinstance(landmarks, str) and landmarks != "segment":
        at, of_queries = landmark_positions(query, key, num_landmarks, landmarks, generator=generator)
        return fused_skyformer(query, key, value, positions=at, of_queries=of_queries, scale=scale, gamma=gamma)
    chosen = _landmarks(query, key, mask, query_mask, num_landmarks, landmarks, generator)
    if fused and chosen.rows.dtype == query.dtype:
        lead = query.shape[:2]
        keep, valid = (None if t is None else packed(t).expand(*lead, t.shape[-1]) for t in (keep, chosen.valid))
        return fused_skyformer(query, key, value, keep, rows=chosen.rows, valid=valid, scale=scale, gamma=gamma)
    with no_autocast(query):
        if kernel == "softmax":
            sums = _softmax_sums(chosen, key, value, mask, scale)
            solved, noise = _solve_graded(chosen, sums, scale, gamma, solver, num_iterations)
            counts = _query_keep(query, key, mask, query_mask)
            if keep is not None:
                any_key = keep.any(-1, keepdim=True)
                counts = any_key if counts is None else counts & any_key
            return _attend_softmax(query, chosen, solved, scale, noise=noise, counts=counts).to(value.dtype)
        values = value.to(torch.promote_types(value.dtype, torch.float32))  # the solve amplifies rounding errors
        if mask is not None and mask.weights is not None:
            values = weighted(values, mask.weights)
        sums = gaussian_product(chosen.rows, key, values, scale=scale, keep=keep)
        solved = _solve(chosen, sums, scale, gamma, solver, num_iterations)
        out = gaussian_product(query, chosen.rows, solved, scale=scale)
    return out.to(value.dtype)


def _landmarks(
    query: Tensor,
    key: Tensor,
    mask: KeyMask | None,
    query_mask: Tensor | None,
    count: int,
    landmarks: str | Tensor,
    generator: torch.Generator | None,
) -> Landmarks:
    if isinstance(landmarks, Tensor):
        return Landmarks(rows=landmarks.expand(*query.shape[:-2], *landmarks.shape[-2:]))
    keep, of_queries = None if mask is None else mask.keep, _query_keep(query, key, mask, query_mask)
    return choose_landmarks(query, key, count, landmarks, query_keep=of_queries, key_keep=keep, generator=generator)


def _query_keep(query: Tensor, key: Tensor, mask: KeyMask | None, query_mask: Tensor | None) -> Tensor | None:
    """Return which queries are not padding: `query_mask`, or else the mask of the keys if there are as many."""
    if query_mask is None and mask is not None and query.shape[-2] == key.shape[-2]:
        return mask.keep
    return query_mask


def _count_rows(landmarks: Tensor, query: Tensor) -> int:
    """Return the number of landmarks in a tensor; raise ValueError if it does not fit the queries."""
    d, p = landmarks.shape[-2] if landmarks.ndim > 1 else 0, query.shape[-1]
    if not landmarks.is_floating_point() or landmarks.device != query.device:
        raise ValueError(
            f"landmarks are tokens like the queries, {query.dtype} on {query.device}, and not {landmarks.dtype} on "
            f"{landmarks.device}; tokens by their positions: landmarks=key[..., positions, :]"
        )
    if d == 0 or landmarks.shape[-1] != p or not broadcasts(landmarks, (*query.shape[:-2], d, p)):
        raise ValueError(
            f"landmarks {tuple(landmarks.shape)} do not fit queries {tuple(query.shape)}: give (…, d, {p}) with d at "
            "least one, broadcastable to their batch and heads"
        )
    return d


def _solve(chosen: Landmarks, sums: Tensor, scale: float, gamma: float, solver: str, num_iterations: int) -> Tensor:
    """Return (κ(L, L) + γI)⁻¹ · sums, zero for invalid landmarks."""
    d = chosen.rows.shape[-2]
    singular = d > FLOAT64_CONDITION * gamma
    if singular and solver == "iteration":  # with a smaller γ it would invert rounding errors
        gamma = d * max(1 / FLOAT64_CONDITION, torch.finfo(sums.dtype).eps)
    # In float32 1 + γ may round to 1, so a float64 solve gets a float64 matrix. A pseudo-inverse does not: it would
    # amplify directions that float32 sums do not resolve.
    rounded = d <= FLOAT32_CONDITION * gamma or (singular and solver == "cholesky")
    matrix = _matrix(chosen, scale, gamma, sums.dtype if rounded else None)
    if chosen.valid is not None:
        sums = sums.masked_fill(~chosen.valid[..., None], 0)
    if solver == "cholesky":
        return solve_spd(matrix, sums, smallest=gamma).to(sums.dtype)
    normal, r = normalize_spd(matrix)
    inverse = invert_by_iteration(normal, num_iterations=num_iterations)
    return (r[..., None] * (inverse @ (r[..., None] * sums.to(inverse.dtype)))).to(sums.dtype)


def _solve_graded(
    chosen: Landmarks, sums: Tensor, scale: float, gamma: float, solver: str, num_iterations: int
) -> tuple[Tensor, Tensor]:
    """`_solve` for sums whose rows differ by many orders of magnitude; also return the last column's rounding error.

    The error of a pseudo-inverse is proportional to the largest row; that of substitution with a Cholesky factor, to
    the rows that a row depends on. So a Cholesky factor is used for any γ, if the matrix has one.
    """
    if chosen.valid is not None:
        sums = sums.masked_fill(~chosen.valid[..., None], 0)
    matrix = _matrix(chosen, scale, gamma, sums.dtype)
    factor, failed = torch.linalg.cholesky_ex(matrix.detach())
    regular = ((failed == 0) & (factor.diagonal(dim1=-2, dim2=-1).amin(-1) > REGULAR))[..., None, None]
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    if solver == "cholesky" and matrix.shape[-1] > FLOAT64_CONDITION * gamma:
        by_factor = solve_spd(torch.where(regular, matrix, eye), sums, smallest=REGULAR**2)
        solved = torch.where(regular, by_factor, solve_spd(matrix, sums, smallest=gamma))
    else:
        solved = _solve(chosen, sums, scale, gamma, solver, num_iterations)
    last, size = sums.detach()[..., -1:].abs(), solved.detach()[..., -1:].abs()
    inverse = torch.cholesky_inverse(torch.where(regular, factor, eye)).abs()
    noise = torch.where(regular, inverse @ (matrix.detach() @ size + last), size.amax(-2, keepdim=True))
    return solved, torch.finfo(sums.dtype).eps * noise


def _matrix(chosen: Landmarks, scale: float, gamma: float, dtype: torch.dtype | None) -> Tensor:
    """Return κ(L, L) + γI, for invalid landmarks (1 + γ)I; in `dtype` or, if None, as exactly as possible."""
    # Distances between tokens of norm 1e4 lose all digits in float32; this matrix is small, so float64 costs nothing.
    rows = chosen.rows.to(_widest_dtype(chosen.rows))
    gram = gaussian_weights(rows, rows, scale=scale)
    gram = gram if dtype is None else gram.to(dtype)
    if chosen.valid is not None:
        gram = gram.masked_fill(~(chosen.valid[..., :, None] & chosen.valid[..., None, :]), 0)
    eye = torch.eye(rows.shape[-2], dtype=torch.bool, device=rows.device)
    return gram.masked_fill(eye, 1 + gamma)


def _check_settings(
    gamma: float, solver: str, kernel: str, num_landmarks: int, num_iterations: int, compat: bool
) -> None:
    check_counts(num_landmarks, num_iterations)
    if not isinstance(compat, bool):
        raise TypeError(f"compat={compat!r} must be True or False")
    if solver not in SOLVERS:
        raise ValueError(f"solver={solver!r} is unknown; use 'cholesky' (exact) or 'iteration' (only matrix products)")
    if kernel not in KERNELS:
        raise ValueError(f"kernel={kernel!r} is unknown; use 'gaussian' or 'softmax'")
    if not is_number(gamma):
        raise TypeError(f"gamma={gamma!r} must be a number; 0.1 is usual")
    if not 0 <= gamma < math.inf:
        raise ValueError(f"gamma={gamma} must be 0 or more; 0.1 is usual")


def _check_compat(default_landmarks: bool, solver: str, kernel: str) -> None:
    if not default_landmarks or solver != "cholesky" or kernel != "gaussian":
        raise ValueError(
            "compat=True follows the authors' code, with its own landmarks, solver and kernel; leave out "
            "landmarks=, solver= and kernel="
        )


# ---- kernel="softmax": exp(q·k · scale) through landmarks
#
# exp(scale q·k) = exp(scale ‖q‖²/2) κ(q, k) exp(scale ‖k‖²/2) with the Gaussian kernel κ: the first factor cancels
# against the row sums, and the last is a weight of the key. For tokens of norm 25 these weights differ by factors of
# 10³⁰ and more, so every row is divided by its largest weight before it is summed, and all of it is in float64.


def _softmax_sums(chosen: Landmarks, key: Tensor, value: Tensor, mask: KeyMask | None, scale: float) -> Tensor:
    """Return κ(L, K)(w v, w) with w = exp(scale · ‖k‖²/2 + mask), (…, d, c + 1), up to a factor, in `_widest_dtype`."""
    rows, dtype = chosen.rows, _widest_dtype(key)
    values = torch.cat([value, torch.ones_like(value[..., :1])], -1).to(dtype)
    if mask is not None:  # masked tokens may hold anything, and 0 · NaN is NaN
        key, values = (t.masked_fill(~mask.keep[..., None], 0) for t in (key, values))
    logits = scale * rows.to(dtype) @ key.to(dtype).mT
    if mask is not None:
        logits = logits if mask.bias is None else logits + mask.bias.to(dtype)[..., None, :]
        logits = logits.masked_fill(~mask.keep[..., None, :], -torch.inf)
    largest = _largest(logits, -1)
    sizes = largest - _half_norms(chosen, scale, dtype)[..., None]
    return (sizes - _largest(sizes, -2)).exp() * ((logits - largest).exp() @ values)


def _attend_softmax(
    query: Tensor, chosen: Landmarks, solved: Tensor, scale: float, *, noise: Tensor, counts: Tensor | None
) -> Tensor:
    """Return κ(Q, L) · solved, divided by the row sums in its last column.

    If the sum of a row that counts is lost in rounding, raise ValueError, or return NaN for the row where values cannot
    be read, as in compiled code; a lost row that does not count is zero. `noise` is the rounding error of that column
    of `solved`, (…, d, 1), and `counts`, broadcastable to (…, n), is True for rows that have keys and are not padding.
    """
    dtype = solved.dtype
    logits = scale * query.to(dtype) @ chosen.rows.to(dtype).mT - _half_norms(chosen, scale, dtype)[..., None, :]
    weights = (logits - _largest(logits, -1)).exp()
    out = weights @ solved
    values, sums = out[..., :-1], out[..., -1:]
    # Terms smaller than `tiny` underflow; they are negligible in a sum above `least`.
    least = torch.finfo(dtype).tiny / torch.finfo(dtype).eps ** 2
    lost = sums.detach().abs() < (LOST * weights.detach() @ noise).clamp_min(least)
    values = (values / sums.masked_fill(lost, 1)).masked_fill(lost, 0)
    lost = lost if counts is None else lost & counts[..., None]
    if may_look(out) and bool(lost.any()):
        raise ValueError(
            f"kernel='softmax': {int(lost.sum())} of {lost.numel()} row sums are lost in rounding: queries and "
            "keys are too far apart. Scale them down or normalise them (qk_norm), raise gamma or num_landmarks, or "
            "use softmax or nystrom attention"
        )
    return values.masked_fill(lost, torch.nan)


def _widest_dtype(like: Tensor) -> torch.dtype:
    """Return float64 if the device supports it, otherwise float32."""
    return torch.float64 if like.device.type in ("cpu", "cuda", "meta") else torch.float32


def _half_norms(chosen: Landmarks, scale: float, dtype: torch.dtype) -> Tensor:
    """Return scale · ‖l‖²/2 of each landmark, (…, d); infinite for invalid ones."""
    halves = 0.5 * scale * chosen.rows.to(dtype).square().sum(-1)
    return halves if chosen.valid is None else halves.masked_fill(~chosen.valid, torch.inf)


def _largest(t: Tensor, dim: int) -> Tensor:
    return t.detach().amax(dim, keepdim=True).clamp_min(torch.finfo(t.dtype).min)


SkyformerAttention: type[AttentionLayer] = find_attention("skyformer").layer
"""Multi-head Skyformer attention, built like timm's Attention; settings: those of `skyformer_attention`."""
