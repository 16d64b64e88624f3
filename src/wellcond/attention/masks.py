"""Masks of keys, for methods that cannot mask single pairs of tokens.

    mask = key_mask(attn_mask, query, key)           # None, or KeyMask; ValueError for a mask that differs by query
    mask.keep                                        # bool, broadcastable to (…, m): the keys to attend to
    mask.weights                                     # exp(bias) of a floating-point mask, or None
    keep = query_keep(query_mask, query)             # the same for queries, from a query_mask

Shapes and meaning are SDPA's: broadcastable to (…, heads, n, m), True = keep, or numbers added to the logits. A padding
mask has one row for all queries, `(b, 1, 1, m)`, which may also be expanded.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["KeyMask", "broadcasts", "check_mask", "key_mask", "one_row", "query_keep"]


@dataclass(frozen=True, kw_only=True)
class KeyMask:
    """Which keys are kept, and their weights: broadcastable to (…, m), with as many dimensions, the last of size m."""

    keep: Tensor
    """bool; contiguous along its last dimension, as the kernels require."""
    weights: Tensor | None = None
    """The factor of each key, exp(bias). A key of weight 0 is masked."""
    bias: Tensor | None = None
    """The mask itself if it is floating point, in float32 at least."""


def broadcasts(t: Tensor, wanted: tuple[int, ...]) -> bool:
    """Whether `t` can be expanded to the shape `wanted`."""
    return t.ndim <= len(wanted) and all(
        have in (1, want) for have, want in zip(reversed(t.shape), reversed(wanted), strict=False)
    )


def one_row(attn_mask: Tensor) -> bool:
    """Whether a mask is the same for every query, judged by its shape and strides."""
    return attn_mask.ndim < 2 or attn_mask.shape[-2] == 1 or attn_mask.stride(-2) == 0


def check_mask(attn_mask: Tensor, query: Tensor, key: Tensor) -> None:
    """Raise ValueError unless the mask is boolean or floating point, and broadcasts to (…, heads, n, m)."""
    _check_tensor(attn_mask, "attn_mask")
    wanted = (*query.shape[:-1], key.shape[-2])
    if not broadcasts(attn_mask, wanted):
        hint = ""
        if query.ndim == 4 and tuple(attn_mask.shape) == (query.shape[0], key.shape[-2]):
            hint = "; write a padding mask (b, m) as mask[:, None, None, :]"
        raise ValueError(f"a mask {tuple(attn_mask.shape)} does not broadcast to {wanted}, (…, heads, n, m){hint}")
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise ValueError(
            f"a mask is boolean (True = keep) or floating point (added to the logits), not {attn_mask.dtype}; if it is "
            "1 for what to keep and 0 else, pass mask.bool()"
        )


def key_mask(
    attn_mask: Tensor | None, query: Tensor, key: Tensor, *, method: str = "this attention", relative: bool = False
) -> KeyMask | None:
    """Return the mask as a mask of keys. Raises ValueError if it differs from query to query, or does not fit.

    Args:
        relative: as in softmax, only differences within a floating-point mask matter: each row's maximum is subtracted.
    """
    if attn_mask is None:
        return None
    check_mask(attn_mask, query, key)
    if not one_row(attn_mask):
        if attn_mask.shape[-1] == 1 != key.shape[-2]:
            raise ValueError(
                f"{method} takes masks of keys, (b, 1, 1, m); this one, {tuple(attn_mask.shape)}, says which queries "
                "count: pass query_mask=mask.mT instead, boolean"
            )
        reduced = f"mask.{'any' if attn_mask.dtype == torch.bool else 'amax'}(-2, keepdim=True)"
        raise ValueError(
            f"{method} takes masks of keys only, (b, 1, 1, m), because landmarks mix the queries; this one is "
            f"{tuple(attn_mask.shape)}. If it only hides padding, pass {reduced}; "
            "for any other mask use softmax or kernelized attention"
        )
    row = _full_row(attn_mask if attn_mask.ndim < 2 else attn_mask[..., 0, :], query.ndim - 1, key.shape[-2])
    if row.dtype == torch.bool:
        return KeyMask(keep=_dense(row))
    bias = row.to(torch.promote_types(torch.promote_types(row.dtype, query.dtype), torch.float32))
    if relative and bias.shape[-1] > 0:
        bias = bias - bias.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(bias.dtype).min)
    weights = bias.exp()
    return KeyMask(keep=_dense(weights != 0), weights=weights, bias=bias)  # a NaN is kept, and shows in the result


def query_keep(query_mask: Tensor, query: Tensor) -> Tensor:
    """Return the queries to keep, like `KeyMask.keep` for keys, from a mask that broadcasts to (…, heads, n).

    The shape of an attn_mask, (b, 1, 1, n), works too.
    """
    _check_tensor(query_mask, "query_mask")
    n, wanted = query.shape[-2], tuple(query.shape[:-1])
    if query_mask.dtype != torch.bool:
        raise ValueError(
            f"query_mask must be boolean, True for queries that are not padding; this one is {query_mask.dtype}"
        )
    row = query_mask.squeeze(-2) if query_mask.ndim == query.ndim and query_mask.shape[-2] == 1 else query_mask
    if not broadcasts(row, wanted):
        hint = "; write (b, n) as mask[:, None, :]" if query_mask.shape == (query.shape[0], n) else ""
        raise ValueError(f"query_mask {tuple(query_mask.shape)} does not broadcast to {wanted}, (…, heads, n){hint}")
    return _dense(_full_row(row, len(wanted), n))


def _check_tensor(mask: Tensor, name: str) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} is a tensor, not {type(mask).__name__}: torch.as_tensor(mask)")


def _full_row(row: Tensor, ndim: int, length: int) -> Tensor:
    """Reshape to `ndim` dimensions and expand the last one to `length`, so that tokens can be counted."""
    row = row.reshape((1,) * (ndim - row.ndim) + tuple(row.shape))
    return row if row.shape[-1] == length else row.expand(*row.shape[:-1], length)


def _dense(row: Tensor) -> Tensor:
    return row if row.stride(-1) == 1 else row.contiguous()
