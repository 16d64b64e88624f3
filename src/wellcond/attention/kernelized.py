"""Kernelized attention: C V with C_ij = exp(−‖q_i − k_j‖² / (2√p)), a Gaussian kernel in place of softmax (Skyformer).

    out = kernelized_attention(query, key, value)               # (…, heads, n, p) → (…, heads, n, c)
    layer = KernelizedAttention(192, num_heads=3)               # a module with timm's constructor

It is exact and streams: the n × m weights are never stored, unless dropout or a general mask needs them. They are
softmax's exp(q·k/√p), divided by exp(‖q‖²/(2√p)) exp(‖k‖²/(2√p)) instead of by the row sums: all lie in (0, 1], and are
not normalised. The output therefore grows with the number of keys; in float16 it overflows beyond 65,504. Weights are
accurate up to norms of queries and keys of about 1e7 on a CPU, and of about 400 in the float32 kernels
(numerics/gaussian.py).
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from wellcond.attention.checks import check_dropout, check_inputs, check_scale, refuse_both
from wellcond.attention.layer import AttentionCore, AttentionLayer
from wellcond.attention.masks import check_mask, key_mask, one_row
from wellcond.attention.registry import find_attention, register_attention
from wellcond.numerics.autocast import autocast_like_sdpa, no_autocast
from wellcond.numerics.gaussian import gaussian_product
from wellcond.numerics.gaussian_weights import gaussian_weights

__all__ = ["KernelizedAttention", "KernelizedCore", "kernelized_attention", "weighted"]


@register_attention("kernelized")
def kernelized_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return Σ_j exp(−scale/2 · ‖q_i − k_j‖²) v_j, computed in float32 at least, in value's dtype.

    Args:
        attn_mask: boolean, True = keep; or floating point: what softmax would add to its logits becomes a factor
            exp(mask) here, which overflows float32 from 88 on.
        dropout_p: the probability of dropping a weight.
        is_causal: key j counts for query i only if j ≤ i.
        scale: 1/√p by default, as in softmax attention.

    A query whose keys are all masked gets zeros.
    """
    check_inputs(query, key, value)
    query, key, value = autocast_like_sdpa(query, key, value)
    check_scale(scale)
    check_dropout(dropout_p)
    refuse_both(attn_mask, is_causal)
    if attn_mask is not None:
        check_mask(attn_mask, query, key)
    scale = 1 / math.sqrt(max(1, query.shape[-1])) if scale is None else scale
    if dropout_p > 0 or (attn_mask is not None and not one_row(attn_mask)):
        return _with_weights(query, key, value, attn_mask, dropout_p, is_causal, scale)
    mask = key_mask(attn_mask, query, key)
    if mask is None:
        return gaussian_product(query, key, value, scale=scale, is_causal=is_causal)
    values = value if mask.weights is None else weighted(value, mask.weights)
    return gaussian_product(query, key, values, scale=scale, keep=mask.keep).to(value.dtype)


def weighted(value: Tensor, weights: Tensor) -> Tensor:
    """Multiply each value by the weight of its key, in the wider of the two dtypes."""
    return value * weights[..., None]


def _with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> Tensor:
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    with no_autocast(query):
        weights = gaussian_weights(query, key, scale=scale, mask=attn_mask)
        return (F.dropout(weights, dropout_p) @ value.to(weights.dtype)).to(value.dtype)


KernelizedCore: type[AttentionCore] = find_attention("kernelized").core
KernelizedAttention: type[AttentionLayer] = find_attention("kernelized").layer
"""Multi-head kernelized attention, built like timm's Attention."""
