"""The attentions by name.

kind = find_attention("skyformer")
kind.function(query, key, value)                    # with SDPA's signature
kind.layer(192, num_heads=3)                        # with timm's constructor
kind.core(num_landmarks=64)                         # the settings and the attention, without projections
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from wellcond.attention.kernelized import KernelizedAttention, kernelized_attention
from wellcond.attention.layer import AttentionCore, AttentionLayer
from wellcond.attention.linear import LinearAttention, linear_attention
from wellcond.attention.nystrom import NystromAttention, nystrom_attention
from wellcond.attention.skyformer import SkyformerAttention, skyformer_attention
from wellcond.attention.softmax import SoftmaxAttention, softmax_attention

__all__ = ["ATTENTIONS", "AttentionKind", "find_attention"]


@dataclass(frozen=True, kw_only=True)
class AttentionKind:
    """One attention in its three forms."""

    name: str
    function: Callable[..., Tensor]
    """With the signature of scaled_dot_product_attention; settings are keywords."""
    layer: type[AttentionLayer]
    """With the constructor and the forward of timm's Attention; settings are keywords."""

    @property
    def core(self) -> type[AttentionCore]:
        """What both hold: the settings, and the attention without projections."""
        return self.layer.core_class


ATTENTIONS = {
    kind.name: kind
    for kind in (
        AttentionKind(name="softmax", function=softmax_attention, layer=SoftmaxAttention),
        AttentionKind(name="linear", function=linear_attention, layer=LinearAttention),
        AttentionKind(name="kernelized", function=kernelized_attention, layer=KernelizedAttention),
        AttentionKind(name="skyformer", function=skyformer_attention, layer=SkyformerAttention),
        AttentionKind(name="nystrom", function=nystrom_attention, layer=NystromAttention),
    )
}


def find_attention(name: str) -> AttentionKind:
    """The attention of this name; ValueError, with the names there are, for any other."""
    if name not in ATTENTIONS:
        raise ValueError(f"there is no attention {name!r}; use one of {', '.join(ATTENTIONS)}")
    return ATTENTIONS[name]
