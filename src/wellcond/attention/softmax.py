"""Softmax attention: torch's scaled_dot_product_attention under the name and in the clothes of the other attentions.

    out = softmax_attention(query, key, value)                 # (…, heads, n, p) → (…, heads, n, c)
    layer = SoftmaxAttention(192, num_heads=3)                 # timm's Attention, its weights too

It is here so that a comparison changes one word. A query whose keys are all masked gets zeros.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from wellcond.attention.layer import AttentionCore, AttentionLayer
from wellcond.attention.masks import check_inputs

__all__ = ["SoftmaxAttention", "SoftmaxCore", "softmax_attention"]


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(QKᵀ · scale) V, by `torch.nn.functional.scaled_dot_product_attention`; scale is 1/√p unless given."""
    check_inputs(query, key, value)
    if attn_mask is None:
        return F.scaled_dot_product_attention(query, key, value, None, dropout_p, is_causal, scale=scale)
    # Not every kernel behind it gives zeros for a row without keys: such a row attends to all keys, and is cleared.
    if attn_mask.dtype == torch.bool:
        gone = ~attn_mask.any(-1, keepdim=True)
        attn_mask = attn_mask | gone
    else:
        gone = attn_mask.isneginf().all(-1, keepdim=True)
        attn_mask = attn_mask.masked_fill(gone, 0)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    return out.masked_fill(gone, 0)


class SoftmaxCore(AttentionCore):
    """`softmax_attention` inside a module."""

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
        return softmax_attention(query, key, value, attn_mask, dropout_p, is_causal, scale)


class SoftmaxAttention(AttentionLayer):
    """Multi-head softmax attention."""

    core_class = SoftmaxCore
