"""Nyström attention (Nyströmformer): softmax attention through segment means and an iterated pseudo-inverse.

    out = nystrom_attention(query, key, value, num_landmarks=64)        # (…, heads, n, p) → (…, heads, n, c)
    layer = NystromAttention(192, num_heads=3, conv_kernel=33)          # a module with timm's constructor

With Q̃ and K̃ the means of consecutive segments, the output is softmax(QK̃ᵀ) softmax(Q̃K̃ᵀ)⁺ softmax(Q̃Kᵀ) V. A sample with
no more keys than landmarks gets exact softmax attention: each segment is then a token, and the pseudo-inverse cancels.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellcond.attention.checks import check_dropout, check_inputs, check_scale
from wellcond.attention.landmarks import check_counts, segment_means
from wellcond.attention.layer import AttentionCore, AttentionLayer
from wellcond.attention.masks import KeyMask, key_mask, query_keep
from wellcond.attention.nystrom_fused import can_fuse, fused_nystrom
from wellcond.attention.registry import find_attention, register_attention
from wellcond.attention.softmax import softmax_attention
from wellcond.numerics.autocast import autocast_like_sdpa, no_autocast
from wellcond.numerics.inverse import invert_by_iteration
from wellcond.numerics.tall import flat_product, tall_product, thin_product

__all__ = ["NystromAttention", "NystromCore", "nystrom_attention"]


class NystromCore(AttentionCore):
    """`nystrom_attention` inside a module; with `conv_kernel=33` it has a parameter `conv`, (num_heads, 33)."""

    defaults: ClassVar[Mapping[str, Any]] = {"conv_kernel": None}
    drops_weights = takes_bias = takes_pair_masks = False
    softmax_over_keys = False  # but over means of keys

    def __init__(
        self,
        *,
        num_heads: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        size = self.settings["conv_kernel"]
        self.conv: nn.Parameter | None = None
        if size is not None:
            if num_heads is None:
                raise ValueError(
                    "conv_kernel has weights for each head; build a NystromAttention, which knows its heads"
                )
            self.conv_kernel: int = int(size)
            self.conv = nn.Parameter(torch.empty(num_heads, size, device=device, dtype=dtype))
            nn.init.uniform_(self.conv, -(size**-0.5), size**-0.5)

    @classmethod
    def check(cls, **settings: Any) -> None:
        check_counts(settings["num_landmarks"], settings["num_iterations"])
        size = settings["conv_kernel"]
        if size is not None and (size < 1 or size % 2 == 0):
            raise ValueError(f"conv_kernel={size} must be odd, so that it has a middle; 33 is usual")

    @classmethod
    def for_layer(cls, settings: Mapping[str, Any], *, num_heads: int, **factory: Any) -> Self:
        return cls(**settings, num_heads=num_heads, **factory)

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
        settings = {**self.settings, "conv_kernel": self.conv}
        return nystrom_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, **settings)


@register_attention("nystrom", core=NystromCore)
def nystrom_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    num_landmarks: int = 64,
    num_iterations: int = 6,
    conv_kernel: Tensor | None = None,
    query_mask: Tensor | None = None,
) -> Tensor:
    """Approximate softmax attention through segment means, in value's dtype.

    The softmax and the pseudo-inverse are computed in float32 at least.

    Args:
        attn_mask: a mask of keys, (b, 1, 1, m): True = keep, or numbers added to the logits, where only differences
            matter. Masked tokens are in no segment. A mask that differs from query to query raises, and so does
            `is_causal`: segments mix tokens.
        dropout_p: must be 0.
        scale: 1/√p by default.
        num_landmarks: the number of segments of the queries, and of the keys; lengths differ by one at most. With no
            more keys than this, the result is exact softmax attention.
        num_iterations: steps of the pseudo-inverse; each matrix has its own starting point.
        conv_kernel: (heads, k), k odd: the weights of a depthwise convolution of the values along the tokens, added to
            the output. It needs as many queries as keys.
        query_mask: bool, broadcastable to (…, heads, n), or (b, 1, 1, n): False for queries that are padding, which
            are then in no segment. Defaults to the mask of the keys, if there are as many queries as keys.

    A sample whose keys are all masked gets zeros.
    """
    check_inputs(query, key, value)
    query, key, value = autocast_like_sdpa(query, key, value)
    check_scale(scale, negative=True)
    check_counts(num_landmarks, num_iterations)
    check_dropout(dropout_p)
    if conv_kernel is not None:
        _check_convolution(conv_kernel, value, query.shape[-2])
    if dropout_p > 0:
        raise ValueError(
            f"Nyström attention never computes the weights that dropout_p={dropout_p} would drop; set it to 0"
        )
    if is_causal:
        raise ValueError("Nyström attention cannot be causal, its segments mix tokens; use softmax_attention")
    mask = key_mask(attn_mask, query, key, method="Nyström attention", relative=True)
    query_mask = None if query_mask is None else query_keep(query_mask, query)
    if key.shape[-2] <= num_landmarks:
        row = None
        if mask is not None:
            row = (mask.keep if mask.bias is None else mask.bias.to(query.dtype))[..., None, :]
        common = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
        tokens = (query.to(common), key.to(common), value.to(common))
        row = row if row is None or row.dtype == torch.bool else row.to(common)
        out = softmax_attention(*tokens, row, scale=scale).to(value.dtype)
    else:
        keep = None if mask is None else mask.keep
        alike = query_mask is None and (keep is None or query.shape[-2] == key.shape[-2])  # one mask for both
        if query_mask is None and query.shape[-2] == key.shape[-2]:
            query_mask = keep
        scale = 1 / math.sqrt(max(1, query.shape[-1])) if scale is None else scale
        counts = {"num_landmarks": num_landmarks, "num_iterations": num_iterations}
        boolean = mask is None or mask.bias is None
        if alike and boolean and can_fuse(query, key, value, keep, **counts):
            out = fused_nystrom(query, key, value, keep, **counts, scale=scale)
        else:
            with no_autocast(query):
                out = _by_segments(query, key, value, mask, query_mask, scale, num_landmarks, num_iterations)
    if conv_kernel is not None:
        out = out + _convolved(value, conv_kernel, mask).to(out.dtype)
    return out


def _by_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: KeyMask | None,
    query_keep: Tensor | None,
    scale: float,
    num_landmarks: int,
    num_iterations: int,
) -> Tensor:
    wide = torch.promote_types(value.dtype, torch.float32)
    # Widen and make contiguous in one pass: every product below needs both.
    q, k, v = (t.to(wide, memory_format=torch.contiguous_format) for t in (query, key, value))
    keep = None if mask is None else mask.keep
    times = torch.matmul
    if keep is None and query_keep is None:
        times = torch.bmm  # the same with fewer operations, forward and backward
        q, k, v = (t.flatten(0, -3) if t.ndim > 2 else t[None] for t in (q, k, v))
    of_queries, real_queries = segment_means(q, num_landmarks, query_keep)
    of_keys, real_keys = segment_means(k, num_landmarks, keep)
    scaled_keys = of_keys * scale
    left_logits = thin_product(q, scaled_keys.mT)
    left = _softmax(left_logits, real_keys)
    middle = _softmax(times(of_queries, scaled_keys.mT), real_keys)
    logits = flat_product(of_queries * scale, k)
    if mask is not None and mask.bias is not None:
        logits = logits + mask.bias.to(wide)[..., None, :]
    right = _softmax(logits, keep)
    if real_queries is not None:  # zero rows stay zero in the pseudo-inverse
        middle = middle.masked_fill(~real_queries[..., None], 0)
    inverse = invert_by_iteration(
        middle, num_iterations=num_iterations, start=_start(middle, real_queries is not None or real_keys is not None)
    )
    solved = times(inverse, tall_product(right.mT, v))
    if mask is not None:
        few = mask.keep.sum(-1)[..., None, None] <= num_landmarks  # every key is a segment of its own
        solved = torch.where(few, segment_means(v, num_landmarks, keep)[0], solved)
        if mask.bias is not None:
            biases = segment_means(mask.bias.to(wide)[..., None], num_landmarks, keep)[0].mT
            left = torch.where(few, _softmax(left_logits + biases, real_keys), left)
    out = thin_product(left, solved, dtype=value.dtype)
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _start(middle: Tensor, masked: bool) -> Tensor:
    """`transposed_start` for a non-negative matrix whose rows sum to 1, or to 0 where masked."""
    bound = middle.sum(-2, keepdim=True).amax(-1, keepdim=True)
    return middle.mT / (bound.clamp_min(torch.finfo(bound.dtype).tiny) if masked else bound)


def _softmax(logits: Tensor, keep: Tensor | None) -> Tensor:
    """Return the softmax of each row over the kept columns; zeros if there are none."""
    if keep is None:
        return logits.softmax(-1)
    gone = ~keep[..., None, :]
    return logits.masked_fill(gone, torch.finfo(logits.dtype).min).softmax(-1).masked_fill(gone, 0)


def _check_convolution(weight: Tensor, value: Tensor, n: int) -> None:
    if not isinstance(weight, Tensor):
        raise TypeError(
            f"conv_kernel={weight!r} must be a tensor of weights, (heads, odd size); its size alone is for the module, "
            "NystromAttention(…, conv_kernel=33), which creates the weights"
        )
    if weight.ndim != 2 or value.ndim < 3 or value.shape[-3] != weight.shape[0] or weight.shape[1] % 2 == 0:
        raise ValueError(
            f"conv_kernel {tuple(weight.shape)} does not fit: (heads, odd size) for values {tuple(value.shape)}"
        )
    if value.shape[-2] != n:
        raise ValueError(f"conv_kernel needs as many queries as values; got {n} and {value.shape[-2]}. Leave it out")


def _convolved(value: Tensor, weight: Tensor, mask: KeyMask | None) -> Tensor:
    heads, size = weight.shape
    if mask is not None:
        value = value.masked_fill(~mask.keep[..., None], 0)
    lead = value.shape[:-3]
    stacked = value.reshape(-1, *value.shape[-3:])
    kernel = weight.to(value.dtype)[:, None, :, None]
    return F.conv2d(stacked, kernel, padding=(size // 2, 0), groups=heads).reshape(*lead, *value.shape[-3:])


NystromAttention: type[AttentionLayer] = find_attention("nystrom").layer
"""Multi-head Nyström attention, built like timm's Attention; settings: those of `nystrom_attention`."""
