"""timm's Swin and Swin V2: window attention with a relative position bias; V2 has norms at the end of its branches."""

from torch import Tensor

from wellcond.models.families.eva import ReplacedWithBias, query_and_value_biases
from wellcond.models.families.family import AttentionKind, Family, register, usual_block
from wellcond.models.families.forwards import Skipless, split_qkv
from wellcond.models.families.vit import FUSED, NORMS, PATCHES, POST_NORM, PRE_NORM


class Swin(Skipless):
    def forward(self, x: Tensor) -> Tensor:
        tokens = self.add_skip("sa", x, self._attn(self.norm1(x)), self.drop_path1).flatten(1, 2)
        return self.add_skip("mlp", tokens, self.mlp(self.norm2(tokens)), self.drop_path2).reshape(x.shape)


class SwinV2(Skipless):
    def forward(self, x: Tensor) -> Tensor:
        tokens = self.add_skip("sa", x, self.norm1(self._attn(x)), self.drop_path1).flatten(1, 2)
        return self.add_skip("mlp", tokens, self.norm2(self.mlp(tokens)), self.drop_path2).reshape(x.shape)


class ReplacedSwin(ReplacedWithBias):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = split_qkv(self.qkv(x), self.num_heads)
        keep = None
        if mask is not None:  # 0 within the same region of a window, -100 across regions
            keep = (mask > -50)[:, None].repeat(len(x) // len(mask), 1, 1, 1)
        return self.proj_drop(self.proj(self.attend(q, k, v, bias=self._get_rel_pos_bias(), keep=keep)))


V1, V2 = "timm.models.swin_transformer.", "timm.models.swin_transformer_v2."

register(
    Family(
        models={V1 + "SwinTransformer": PATCHES, V2 + "SwinTransformerV2": PATCHES},
        blocks={
            V1 + "SwinTransformerBlock": usual_block(*PRE_NORM),
            V2 + "SwinTransformerV2Block": usual_block(*POST_NORM, scales=NORMS),
        },
        skipless={V1 + "SwinTransformerBlock": Swin, V2 + "SwinTransformerV2Block": SwinV2},
        attention={
            V1 + "WindowAttention": AttentionKind(weights=FUSED, replaced=ReplacedSwin),
            V2 + "WindowAttention": AttentionKind(weights=query_and_value_biases),
        },
    )
)
