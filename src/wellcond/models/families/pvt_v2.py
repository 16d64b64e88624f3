"""timm's PVT v2: overlapping patches, and attention whose keys and values come from a downsampled feature map."""

from torch import Tensor

from wellcond.models.families.family import (
    AttentionKind,
    Family,
    PatchProjection,
    WeightPaths,
    register,
    usual_block,
)
from wellcond.models.families.forwards import Replaced, Skipless, split_heads
from wellcond.models.families.vit import PRE_NORM

__all__ = ["EMBED"]


class PVTv2(Skipless):
    def forward(self, x: Tensor, feat_size: list[int]) -> Tensor:
        x = self.add_skip("sa", x, self.attn(self.norm1(x), feat_size), self.drop_path1)
        return self.add_skip("mlp", x, self.mlp(self.norm2(x), feat_size), self.drop_path2)


class ReplacedPVTv2(Replaced):
    """Takes keys and values from the downsampled feature map, as the plain forward does."""

    def forward(self, x: Tensor, feat_size: list[int]) -> Tensor:
        q, smaller = split_heads(self.q(x), self.num_heads), x
        if self.pool is not None or self.sr is not None:
            image = x.mT.unflatten(-1, tuple(feat_size))
            image = image if self.pool is None else self.pool(image)
            smaller = self.norm(self.sr(image).flatten(2).mT)
            smaller = smaller if self.act is None else self.act(smaller)
        k, v = self.kv(smaller).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj_drop(self.proj(self.attend(q, k, v)))


PVT = "timm.models.pvt_v2."
EMBED = PVT + "OverlapPatchEmbed"

register(
    Family(
        models={
            PVT + "PyramidVisionTransformerV2": PatchProjection(path="patch_embed.proj", embeddings=(EMBED,)),
        },
        blocks={PVT + "Block": usual_block(*PRE_NORM)},
        skipless={PVT + "Block": PVTv2},
        attention={
            PVT + "Attention": AttentionKind(
                weights=WeightPaths(query="q", key="kv:0/2", value="kv:1/2"), replaced=ReplacedPVTv2
            )
        },
    )
)
