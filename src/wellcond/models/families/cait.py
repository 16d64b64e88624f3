"""timm's CaiT: blocks whose LayerScale starts near zero, talking heads, and class attention in the last two blocks.

Both branches of a block share one drop path, so taps have to say which of its calls is meant.
"""

import torch
from torch import Tensor

from wellcond.models.families.eva import GAMMA
from wellcond.models.families.family import AttentionKind, Family, WeightPaths, register, usual_block
from wellcond.models.families.forwards import Replaced, Skipless, split_heads, split_qkv
from wellcond.models.families.vit import FUSED, PATCHES

__all__ = ["ONE_DROP_PATH"]

ONE_DROP_PATH = ("norm1:output", "drop_path:input:0", "norm2:input", "drop_path:input:1", ":output")


class CaiT(Skipless):
    def forward(self, x: Tensor) -> Tensor:
        x = self.add_skip("sa", x, self.gamma_1 * self.attn(self.norm1(x)), self.drop_path)
        return self.add_skip("mlp", x, self.gamma_2 * self.mlp(self.norm2(x)), self.drop_path)


class CaiTClass(Skipless):
    def forward(self, x: Tensor, x_cls: Tensor) -> Tensor:
        attended = self.attn(self.norm1(torch.cat((x_cls, x), dim=1)))
        x_cls = self.add_skip("sa", x_cls, self.gamma_1 * attended, self.drop_path)
        return self.add_skip("mlp", x_cls, self.gamma_2 * self.mlp(self.norm2(x_cls)), self.drop_path)


class ReplacedTalkingHeads(Replaced):
    drops = "talking heads (proj_l and proj_w, which mix the weights of all heads, and get no gradient any more)"

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split_qkv(self.qkv(x), self.num_heads)
        return self.proj_drop(self.proj(self.attend(q, k, v)))


class ReplacedClassAttention(Replaced):
    def forward(self, x: Tensor) -> Tensor:
        q = split_heads(self.q(x[:, :1]), self.num_heads)
        k, v = split_heads(self.k(x), self.num_heads), split_heads(self.v(x), self.num_heads)
        return self.proj_drop(self.proj(self.attend(q, k, v)))


CAIT = "timm.models.cait."
SEPARATE = WeightPaths(query="q", key="k", value="v")

register(
    Family(
        models={CAIT + "Cait": PATCHES},
        blocks={
            CAIT + "LayerScaleBlock": usual_block(*ONE_DROP_PATH, scales=GAMMA),
            CAIT + "LayerScaleBlockClassAttn": usual_block(*ONE_DROP_PATH, scales=GAMMA),
        },
        skipless={CAIT + "LayerScaleBlock": CaiT, CAIT + "LayerScaleBlockClassAttn": CaiTClass},
        attention={
            CAIT + "TalkingHeadAttn": AttentionKind(weights=FUSED, replaced=ReplacedTalkingHeads),
            CAIT + "ClassAttn": AttentionKind(weights=SEPARATE, replaced=ReplacedClassAttention),
        },
    )
)
