"""Softmax's kernel exp(q·k · scale) from Gaussian weights, for `skyformer_attention(…, kernel="softmax")`.

out = normalized(gaussian(query, key, as_softmax(values, key, mask, scale)))
"""

import math

import torch
from torch import Tensor

from wellcond.attention.masks import KeyMask

__all__ = ["as_softmax", "normalized"]


def as_softmax(values: Tensor, key: Tensor, mask: KeyMask | None, scale: float) -> Tensor:
    """(w v, w) for each key, w = exp(scale · ‖k‖²/2 + mask) up to a factor: what turns Gaussian weights into softmax's.

    exp(scale q·k) = exp(scale ‖q‖²/2) κ(q, k) exp(scale ‖k‖²/2), and the first factor goes with the row sums.
    """
    logs = 0.5 * scale * key.to(values.dtype).square().sum(-1)
    if mask is not None:
        logs = logs if mask.bias is None else logs + mask.bias.to(logs.dtype)
        logs = logs.masked_fill(~mask.keep, -math.inf)
    largest = logs.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(logs.dtype).min)
    w = (logs - largest).exp()[..., None]
    return torch.cat([w * values, w], -1)


def normalized(out: Tensor) -> Tensor:
    """The values divided by the row sums in the last column; where these vanish, so do the values."""
    values, sums = out[..., :-1], out[..., -1:]
    tiny = torch.finfo(out.dtype).tiny ** 0.5
    gone = sums.abs() < tiny
    return (values / sums.masked_fill(gone, 1)).masked_fill(gone, 0)
