"""Linear attention: (QKᵀ / divisor) V, without softmax.

    out = linear_attention(query, key, value)                   # (…, heads, n, p) → (…, heads, n, c)
    layer = LinearAttention(192, num_heads=3, divisor=16.0)     # a module with timm's constructor

It is computed as Q (KᵀV), in time linear in n, or from the n × m scores if `is_causal`, dropout or a mask that differs
from query to query needs them. The output grows with the number of keys, as in Always Skip Attention, and with the
norms of queries, keys and values: in float16 it overflows beyond 65,504, e.g. for queries and keys of norm 1e4.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wellcond.attention.checks import check_dropout, check_inputs, check_scale, is_number, refuse_both
from wellcond.attention.layer import AttentionCore, AttentionLayer
from wellcond.attention.linear_fused import can_fuse, fused_linear, plain_linear
from wellcond.attention.masks import check_mask, key_mask, one_row
from wellcond.attention.registry import find_attention, register_attention
from wellcond.numerics.autocast import autocast_like_sdpa, no_autocast

__all__ = ["LinearAttention", "LinearCore", "linear_attention"]


class LinearCore(AttentionCore):
    """`linear_attention` inside a module: it ignores the model's scale, and adds a position bias to its scores."""

    takes_pair_masks = False  # floating-point ones; boolean masks may differ from query to query

    @classmethod
    def check(cls, **settings: Any) -> None:
        _check_divisor(settings["divisor"])

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
        # Models pass 1/√p, which is meant for softmax; linear attention has its divisor.
        return linear_attention(query, key, value, attn_mask, dropout_p, is_causal, **self.settings)

    def with_bias(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        keep: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        factor = 1 / self.settings["divisor"]
        return _from_scores(query, key, value, keep, dropout_p, False, factor, bias)


@register_attention("linear", core=LinearCore)
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    divisor: float = 16.0,
) -> Tensor:
    """Return (QKᵀ / divisor) V, computed in float32 at least, in value's dtype.

    Args:
        attn_mask: boolean, True = keep. A floating-point mask raises: these scores are never exponentiated, so no
            number added to them could mean "masked".
        dropout_p: the probability of dropping a score.
        is_causal: key j counts for query i only if j ≤ i.
        scale: replaces 1/divisor.

    A query whose keys are all masked gets zeros.
    """
    check_inputs(query, key, value)
    query, key, value = autocast_like_sdpa(query, key, value)
    check_scale(scale, negative=True)
    check_dropout(dropout_p)
    refuse_both(attn_mask, is_causal)
    if attn_mask is not None:
        check_mask(attn_mask, query, key)
        if attn_mask.dtype != torch.bool:
            raise ValueError(
                f"linear attention takes boolean masks, True = keep; this one is {attn_mask.dtype}. If it is 0 where "
                "keys count and very negative elsewhere, pass mask > -1"
            )
    _check_divisor(divisor)
    factor = 1 / divisor if scale is None else scale
    if is_causal or dropout_p > 0 or (attn_mask is not None and not one_row(attn_mask)):
        return _from_scores(query, key, value, attn_mask, dropout_p, is_causal, factor)
    mask = key_mask(attn_mask, query, key, method="linear attention")
    if mask is not None:
        value = value.masked_fill(~mask.keep[..., None], 0)
    product = fused_linear if can_fuse(query, key, value) else plain_linear
    return product(query, key, value, factor=factor)


def _from_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    factor: float,
    bias: Tensor | None = None,
) -> Tensor:
    wide = torch.promote_types(value.dtype, torch.float32)
    with no_autocast(query):
        scores = query.to(wide) @ key.to(wide).mT * factor
        if bias is not None:
            scores = scores + bias.to(wide)
        if is_causal:
            scores = scores.tril()
        elif attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, 0)
        return (F.dropout(scores, dropout_p) @ value.to(wide)).to(value.dtype)


def _check_divisor(divisor: float) -> None:
    if not is_number(divisor) or not 0 < divisor < math.inf:
        raise ValueError(f"divisor={divisor!r} must be a positive number; 16 is usual")


LinearAttention: type[AttentionLayer] = find_attention("linear").layer
"""Multi-head linear attention, built like timm's Attention; settings: `divisor`."""
