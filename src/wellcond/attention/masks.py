"""What an attention mask of scaled_dot_product_attention says about keys alone, for methods that know nothing else.

    mask = key_mask(attn_mask, query, key)           # None, or KeyMask; ValueError for a mask that differs by query
    mask.keep                                        # bool, broadcastable to (…, m): the keys that count
    mask.weights                                     # exp(bias) of a floating-point mask, or None

Shapes and meaning are SDPA's: broadcastable to (…, heads, n, m), True = keep, or numbers added to the logits. A mask
that hides padding has one row for all queries, `(b, 1, 1, m)`; it may also be such a row, expanded.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["KeyMask", "check_inputs", "key_mask", "one_row"]


@dataclass(frozen=True, kw_only=True)
class KeyMask:
    """Which keys count, and how much; both have as many dimensions as (…, m), and are broadcastable to it."""

    keep: Tensor
    weights: Tensor | None = None
    """What a key's share is multiplied by: exp of a floating-point mask, float32 at least."""
    bias: Tensor | None = None
    """That mask itself."""


def check_inputs(query: Tensor, key: Tensor, value: Tensor) -> None:
    """ValueError for shapes that no attention takes: (…, n, p), (…, m, p) and (…, m, c) are wanted."""
    q, k, v = query.shape, key.shape, value.shape
    floating = query.is_floating_point() and key.is_floating_point() and value.is_floating_point()
    if floating and len(q) == len(k) == len(v) == 4 and q[-1] == k[-1] and q[:2] == k[:2] and k[:3] == v[:3]:
        return  # the usual, and looked at in no more detail: it is every call's
    shapes = [tuple(t.shape) for t in (query, key, value)]
    if not all(t.ndim >= 2 and t.is_floating_point() for t in (query, key, value)):
        raise ValueError(f"query, key and value are floating-point (…, heads, tokens, width); got {shapes}")
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


def one_row(attn_mask: Tensor) -> bool:
    """Whether a mask says the same for every query, as far as its shape and strides tell."""
    return attn_mask.ndim == 1 or attn_mask.shape[-2] == 1 or attn_mask.stride(-2) == 0


def key_mask(attn_mask: Tensor | None, query: Tensor, key: Tensor, *, method: str = "this attention") -> KeyMask | None:
    """The mask as one of keys. Raises ValueError for a mask that differs by query, and for one that does not fit."""
    if attn_mask is None:
        return None
    wanted = (*query.shape[:-1], key.shape[-2])
    if not _fits(attn_mask, wanted):
        hint = ""
        if query.ndim == 4 and tuple(attn_mask.shape) == (query.shape[0], key.shape[-2]):
            hint = "; write a padding mask (b, m) as mask[:, None, None, :]"
        raise ValueError(f"a mask {tuple(attn_mask.shape)} does not broadcast to {wanted}, (…, heads, n, m){hint}")
    if not one_row(attn_mask):
        raise ValueError(
            f"{method} takes masks of keys only, (b, 1, 1, m), since landmarks mix the queries; this one is "
            f"{tuple(attn_mask.shape)}. If it hides padding and nothing else, pass mask[..., :1, :]; for any other "
            "mask use softmax or kernelized attention"
        )
    row = attn_mask if attn_mask.ndim == 1 else attn_mask[..., 0, :]
    row = row.reshape((1,) * (query.ndim - 1 - row.ndim) + tuple(row.shape))
    if row.dtype == torch.bool:
        return KeyMask(keep=row)
    if not row.is_floating_point():
        raise ValueError(f"a mask is boolean (True = keep) or floating point (added to the logits), not {row.dtype}")
    wide = torch.promote_types(torch.promote_types(row.dtype, query.dtype), torch.float32)
    weights = row.to(wide).exp()
    return KeyMask(keep=weights > 0, weights=weights, bias=row)


def _fits(mask: Tensor, wanted: tuple[int, ...]) -> bool:
    return mask.ndim <= len(wanted) and all(
        have in (1, want) for have, want in zip(reversed(mask.shape), reversed(wanted), strict=False)
    )
