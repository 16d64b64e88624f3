"""Attentions: each is a function with the signature of torch's scaled_dot_product_attention, and a module with timm's.

    from wellcond.attention import skyformer_attention, SkyformerAttention
    out = skyformer_attention(query, key, value, num_landmarks=128)
    model = timm.create_model("vit_tiny_patch16_224", attn_layer=SkyformerAttention)
    find_attention("skyformer").function                         # the same by name

`wellcond.replace_attention(model, "skyformer")` puts one into an existing model, which keeps its weights.
`register_attention` adds one: docs/adding-an-attention.md.
"""

from .compat import skyformer_compat
from .kernelized import KernelizedAttention, kernelized_attention
from .layer import AttentionCore, AttentionLayer
from .linear import LinearAttention, linear_attention
from .nystrom import NystromAttention, nystrom_attention
from .registry import ATTENTIONS, AttentionKind, find_attention, register_attention
from .skyformer import SkyformerAttention, skyformer_attention
from .softmax import SoftmaxAttention, softmax_attention

__all__ = [
    "ATTENTIONS",
    "AttentionCore",
    "AttentionKind",
    "AttentionLayer",
    "KernelizedAttention",
    "LinearAttention",
    "NystromAttention",
    "SkyformerAttention",
    "SoftmaxAttention",
    "find_attention",
    "kernelized_attention",
    "linear_attention",
    "nystrom_attention",
    "register_attention",
    "skyformer_attention",
    "skyformer_compat",
    "softmax_attention",
]
