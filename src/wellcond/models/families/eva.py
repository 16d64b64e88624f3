"""timm's EVA and BEiT, and the models built from their blocks: EVA-02, DINOv3, RoPE ViTs, BEiT v2.

Their LayerScale is a bare parameter, and their keys have no bias of their own. EVA applies rotary position embeddings
to queries and keys; BEiT adds a relative position bias.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellcond.attention import AttentionCore
from wellcond.models.families.family import AttentionKind, Family, WeightPaths, register, usual_block
from wellcond.models.families.forwards import Replaced, Skipless, split_heads, split_qkv
from wellcond.models.families.vit import FUSED, NORMS, PATCHES, POST_NORM, PRE_NORM, PostNorm, ReplacedViT

__all__ = ["GAMMA", "ReplacedWithBias", "query_and_value_biases"]

GAMMA = ("gamma_1", "gamma_2")
SEPARATE = WeightPaths(query="q_proj", key="k_proj", value="v_proj")
BIASES_APART = WeightPaths(biases={"query": "q_bias", "key": None, "value": "v_bias"})


def query_and_value_biases(module: nn.Module) -> WeightPaths:
    """Return the paths for one q, k, v projection, perhaps with separate query and value biases, or three (EVA-02)."""
    if getattr(module, "qkv", None) is None:
        return SEPARATE
    return FUSED if getattr(module, "q_bias", None) is None else BIASES_APART


class Gamma(Skipless):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = self.attn(self.norm1(x), *args, **kwargs)
        x = self.add_skip("sa", x, y if self.gamma_1 is None else self.gamma_1 * y, self.drop_path1)
        y = self.mlp(self.norm2(x))
        return self.add_skip("mlp", x, y if self.gamma_2 is None else self.gamma_2 * y, self.drop_path2)


class ReplacedRope(ReplacedViT):
    """Rotates queries and keys by their positions before attention, whichever attention that is."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        q, k, v = self._project(x)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = self._rotated(q, rope).type_as(v), self._rotated(k, rope).type_as(v)
        if (groups := getattr(self, "num_kv_groups", 1)) > 1:
            k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        y = self.norm(self.attend(q, k, v, attn_mask, is_causal))
        return self.proj_drop(self.proj(self._gated(x, y)))

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.qkv is None:
            kv_heads = getattr(self, "num_kv_heads", self.num_heads)
            return (
                split_heads(self.q_proj(x), self.num_heads),
                split_heads(self.k_proj(x), kv_heads),
                split_heads(self.v_proj(x), kv_heads),
            )
        return split_qkv(_with_query_bias(self, x), self.num_heads)

    def _rotated(self, t: Tensor, rope: Tensor) -> Tensor:
        from timm.layers.pos_embed_sincos import apply_rot_embed_cat

        first = self.num_prefix_tokens  # the class token and registers have no position
        turned = apply_rot_embed_cat(t[:, :, first:], rope, half=getattr(self, "rotate_half", False))
        return torch.cat([t[:, :, :first], turned], dim=2)


def _with_query_bias(module: Any, x: Tensor) -> Tensor:
    """Return qkv(x) with the separate biases of queries and values, if any; keys have none of their own."""
    if getattr(module, "q_bias", None) is None:
        return module.qkv(x)
    bias = torch.cat((module.q_bias, module.k_bias, module.v_bias))
    if getattr(module, "qkv_bias_separate", False):
        return module.qkv(x) + bias
    return F.linear(x, weight=module.qkv.weight, bias=bias)


class ReplacedWithBias(Replaced):
    """For modules with a relative position bias, a number per pair of tokens: their own, or shared by the model."""

    @classmethod
    def refuses(cls, module: Any, core: AttentionCore, model: nn.Module) -> str:
        own = getattr(module, "relative_position_bias_table", None) is not None
        shared = any(getattr(part, "rel_pos_bias", None) is not None for part in model.modules())
        if core.takes_bias or not (own or shared):
            return ""
        return (
            "it has a relative position bias, a number for each pair of tokens, which this attention cannot take "
            "(landmarks know no pairs); softmax, kernelized and linear attention keep it"
        )


class ReplacedBeit(ReplacedWithBias):
    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        q, k, v = split_qkv(_with_query_bias(self, x), self.num_heads)
        bias = shared_rel_pos_bias
        if self.relative_position_bias_table is not None:
            own = self._get_rel_pos_bias()
            bias = own if bias is None else own + bias
        if bias is not None and not self.attention_core.takes_bias:
            raise ValueError("this model shares a relative position bias among its blocks, and landmarks know no pairs")
        return self.proj_drop(self.proj(self.attend(q, k, v, bias=bias)))


EVA, BEIT = "timm.models.eva.", "timm.models.beit."
ROPE = AttentionKind(weights=query_and_value_biases, replaced=ReplacedRope)

register(
    Family(
        models={EVA + "Eva": PATCHES, BEIT + "Beit": PATCHES},
        blocks={
            EVA + "EvaBlock": usual_block(*PRE_NORM, scales=GAMMA),
            EVA + "EvaBlockPostNorm": usual_block(*POST_NORM, scales=NORMS),
            BEIT + "Block": usual_block(*PRE_NORM, scales=GAMMA),
        },
        skipless={EVA + "EvaBlock": Gamma, EVA + "EvaBlockPostNorm": PostNorm, BEIT + "Block": Gamma},
        attention={
            "timm.layers.attention.AttentionRope": ROPE,
            EVA + "EvaAttention": ROPE,
            BEIT + "Attention": AttentionKind(weights=query_and_value_biases, replaced=ReplacedBeit),
        },
    )
)
