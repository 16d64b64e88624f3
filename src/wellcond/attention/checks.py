"""Argument checks that the attentions share.

check_inputs(query, key, value)          # floating-point tensors whose shapes and devices match
check_scale(scale)                       # a number, or None for the default
check_dropout(dropout_p)
refuse_both(attn_mask, is_causal)
"""

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

__all__ = ["check_dropout", "check_inputs", "check_scale", "is_number", "refuse_both"]


def check_inputs(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise unless all are floating-point tensors on one device, of shapes (…, n, p), (…, m, p) and (…, m, c)."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        kinds = ", ".join(type(t).__name__ for t in (query, key, value))
        raise TypeError(
            f"query, key and value must be tensors; got {kinds}. For a numpy array: torch.from_numpy(array)"
        )
    q, k, v = query.shape, key.shape, value.shape
    floating = query.is_floating_point() and key.is_floating_point() and value.is_floating_point()
    together = query.device == key.device == value.device
    fits = len(q) == len(k) == len(v) == 4 and q[-1] == k[-1] and q[:2] == k[:2] and k[:3] == v[:3]
    if floating and together and fits:
        return  # fast path for the common case: this check runs at every call
    if not together:
        devices = ", ".join(str(t.device) for t in (query, key, value))
        raise ValueError(
            f"query, key and value must be on one device; got {devices}. Move them first, e.g. key.to(query.device)"
        )
    if not floating:
        kinds = ", ".join(str(t.dtype) for t in (query, key, value))
        raise ValueError(
            f"query, key and value must be floating-point; got {kinds}. Convert them first, e.g. query.float()"
        )
    shapes = [tuple(t.shape) for t in (query, key, value)]
    if not all(t.ndim >= 2 for t in (query, key, value)):
        raise ValueError(f"query, key and value must be (…, heads, tokens, width); got {shapes}")
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"query {shapes[0]}, key {shapes[1]} and value {shapes[2]} do not fit: query and key need the same width, "
            "key and value the same number of tokens"
        )
    if not query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        raise ValueError(
            f"query {shapes[0]}, key {shapes[1]} and value {shapes[2]} differ in batch or heads; expand them first "
            "(grouped-query attention: key.repeat_interleave(groups, dim=-3))"
        )


def is_number(value: object) -> bool:
    """Whether `value` is a real number: NumPy's and torch.compile's symbols count, tensors and booleans do not."""
    return isinstance(value, int | float | Real | torch.SymFloat | torch.SymInt) and not isinstance(value, bool)


def check_scale(scale: Any, *, negative: bool = False) -> None:
    """Raise TypeError unless it is a number or None, ValueError if it is not finite, or negative without `negative`."""
    if scale is None:
        return
    if isinstance(scale, Tensor):
        raise TypeError(
            "scale must be a number, and gets no gradient; for a learned one multiply query and key by its square root"
        )
    if not is_number(scale):
        raise TypeError(f"scale={scale!r} must be a number, or None for 1/√p")
    number: Any = scale
    if not -math.inf < number < math.inf or (number < 0 and not negative):
        wanted = "finite" if negative else "finite and not negative: it multiplies squared distances"
        raise ValueError(f"scale={scale} must be {wanted}")


def check_dropout(dropout_p: float) -> None:
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p={dropout_p} must be a probability, from 0 to 1")


def refuse_both(attn_mask: Tensor | None, is_causal: bool) -> None:
    """Raise ValueError if a mask and `is_causal` are both given."""
    if attn_mask is not None and is_causal:
        raise ValueError(
            "give attn_mask or is_causal, not both. To combine them, with causal = torch.ones(n, m, dtype=torch.bool)"
            ".tril(), mask & causal; of numbers to be added, mask.masked_fill(~causal, -torch.inf)"
        )
