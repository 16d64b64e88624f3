"""The softmax kernel exp(q·k · scale) through landmarks, for `skyformer_attention(…, kernel="softmax")`.

sums = landmark_sums(chosen, key, value, mask, scale)       # each landmark's sum over the keys
out = attend(query, chosen, solve(sums), scale)             # divided by the row sums

exp(scale q·k) = exp(scale ‖q‖²/2) κ(q, k) exp(scale ‖k‖²/2) with the Gaussian kernel κ: the first factor cancels
against the row sums, and the last is a weight of the key. For tokens of norm 25 these weights differ by factors of 10³⁰
and more, so every row is divided by its largest weight before it is summed, and everything is computed in float64.
"""

import torch
from torch import Tensor

from wellcond.attention.landmarks import Landmarks
from wellcond.attention.masks import KeyMask
from wellcond.numerics.fastpaths import may_look

LOST = 100  # a row sum below this many times its rounding error has at most one correct digit
__all__ = ["attend", "landmark_sums", "widest_dtype"]


def landmark_sums(chosen: Landmarks, key: Tensor, value: Tensor, mask: KeyMask | None, scale: float) -> Tensor:
    """Return κ(L, K)(w v, w) with w = exp(scale · ‖k‖²/2 + mask), (…, d, c + 1), up to a factor, in `widest_dtype`."""
    rows, dtype = chosen.rows, widest_dtype(key)
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


def attend(
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


def widest_dtype(like: Tensor) -> torch.dtype:
    """Return float64 if the device supports it, otherwise float32."""
    return torch.float64 if like.device.type in ("cpu", "cuda", "meta") else torch.float32


def _half_norms(chosen: Landmarks, scale: float, dtype: torch.dtype) -> Tensor:
    """Return scale · ‖l‖²/2 of each landmark, (…, d); infinite for invalid ones."""
    halves = 0.5 * scale * chosen.rows.to(dtype).square().sum(-1)
    return halves if chosen.valid is None else halves.masked_fill(~chosen.valid, torch.inf)


def _largest(t: Tensor, dim: int) -> Tensor:
    return t.detach().amax(dim, keepdim=True).clamp_min(torch.finfo(t.dtype).min)
