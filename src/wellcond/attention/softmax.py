"""Softmax attention: torch's scaled_dot_product_attention with the interface of the other attentions.

    out = softmax_attention(query, key, value)                 # (…, heads, n, p) → (…, heads, n, c)
    layer = SoftmaxAttention(192, num_heads=3)                 # like timm's Attention, with the same weights

It is here so that a comparison only has to change one word. On a GPU, dropout of the weights and boolean masks of keys
(padding) use our own kernels (softmax_fused.py). A query whose keys are all masked gets zeros.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellcond.attention.checks import check_dropout, check_inputs, check_scale, refuse_both
from wellcond.attention.layer import AttentionCore, AttentionLayer
from wellcond.attention.masks import check_mask, key_mask, one_row
from wellcond.attention.registry import find_attention, register_attention
from wellcond.attention.softmax_fused import can_fuse, fused_softmax
from wellcond.numerics.autocast import autocast_like_sdpa
from wellcond.numerics.fastpaths import fused_kernels, other_derivatives

__all__ = ["SoftmaxAttention", "SoftmaxCore", "softmax_attention"]


@register_attention("softmax")
def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(QKᵀ · scale) V, as `torch.nn.functional.scaled_dot_product_attention`; scale defaults to 1/√p."""
    check_inputs(query, key, value)
    check_scale(scale, negative=True)
    check_dropout(dropout_p)
    refuse_both(attn_mask, is_causal)
    if (dropout_p > 0 or attn_mask is not None) and not is_causal and _masks_keys(attn_mask):
        tokens = autocast_like_sdpa(query, key, value) if fused_kernels(query.device) else (query, key, value)
        if can_fuse(*tokens, dropout_p=dropout_p, scale=scale):
            mask = key_mask(attn_mask, query, key)
            return fused_softmax(*tokens, None if mask is None else mask.keep, dropout_p, scale)
    biases = [attn_mask] if isinstance(attn_mask, Tensor) else []
    if other_derivatives(query, key, value, *biases):  # forward mode and torch.func, which torch's fused kernels lack
        with sdpa_kernel(SDPBackend.MATH):
            return _attend(query, key, value, attn_mask, dropout_p, is_causal, scale)
    return _attend(query, key, value, attn_mask, dropout_p, is_causal, scale)


def _masks_keys(attn_mask: Tensor | None) -> bool:
    return attn_mask is None or (isinstance(attn_mask, Tensor) and attn_mask.dtype == torch.bool and one_row(attn_mask))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    if attn_mask is None:
        return F.scaled_dot_product_attention(query, key, value, None, dropout_p, is_causal, scale=scale)
    check_mask(attn_mask, query, key)
    attn_mask = attn_mask if attn_mask.ndim > 1 else attn_mask.reshape(1, -1)  # torch needs two dimensions
    # Not every SDPA backend gives zeros for a row without keys: let it attend to all keys, and clear it afterwards.
    if attn_mask.dtype == torch.bool:
        gone = ~attn_mask.any(-1, keepdim=True)
        attn_mask = attn_mask | gone
    else:
        gone = attn_mask.isneginf().all(-1, keepdim=True)
        attn_mask = attn_mask.masked_fill(gone, 0)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    return out.masked_fill(gone, 0)


SoftmaxCore: type[AttentionCore] = find_attention("softmax").core
SoftmaxAttention: type[AttentionLayer] = find_attention("softmax").layer
"""Multi-head softmax attention, built like timm's Attention."""
