"""timm's VisionTransformer: ViT, DeiT (distilled is a subclass), DINOv2, SigLIP, CLIP, MAE, and relative-position ViTs.

Other families with similar blocks reuse the paths and forwards defined here. Drop path comes last in a branch, so its
input is the branch, even if LayerScale is a bare parameter.
"""

from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention import AttentionCore, AttentionLayer
from wellcond.models.families.family import (
    AttentionKind,
    BlockKind,
    Family,
    PatchProjection,
    WeightPaths,
    full_name,
    register,
    usual_block,
)
from wellcond.models.families.forwards import Replaced, Skipless, split_qkv
from wellcond.words import SKIPS

__all__ = ["FUSED", "NORMS", "PATCHES", "POST_NORM", "PRE_NORM", "TIMM_EMBED", "PostNorm", "ReplacedViT"]

TIMM_EMBED = "timm.layers.patch_embed.PatchEmbed"
PATCHES = PatchProjection(path="patch_embed.proj", embeddings=(TIMM_EMBED,))
PRE_NORM = ("norm1:output", "drop_path1:input", "norm2:input", "drop_path2:input", ":output")
POST_NORM = (":input", "drop_path1:input", "mlp:input", "drop_path2:input", ":output")  # branches end in norms
LAYER_SCALE = ("ls1.gamma", "ls2.gamma")
NORMS = ("norm1.weight", "norm2.weight")
FUSED = WeightPaths()  # timm's usual names


def _parallel_scaling(block: nn.Module) -> BlockKind:
    """Return the kind of a block with parallel attention and MLP, whose outputs can be read only if they are not
    projected or scaled together."""
    one_skip = "a parallel block has one skip, around attention and MLP together"
    taps = {"in": "in_norm:output", "+mlp": ":output"}
    lacks = {"+sa": one_skip}
    if not isinstance(getattr(block, "attn_out_proj", None), nn.Module):
        lacks |= dict.fromkeys(SKIPS, "one projection makes the outputs of attention and MLP together")
    elif not isinstance(block.get_submodule("ls"), nn.Identity):
        lacks |= dict.fromkeys(SKIPS, "LayerScale comes after the sum of attention and MLP")
    else:
        taps |= {"sa": "attn_out_proj:output", "mlp": "mlp_out_proj:output"}
    return BlockKind(taps=taps, lacks=lacks, why_no_skip=one_skip)


PARALLEL_SCALING = BlockKind(taps={}, variant=_parallel_scaling)
PARALLEL_THINGS = BlockKind(
    taps={"+sa": "ffns.0.norm:input", "+mlp": ":output"},
    lacks={
        "in": "each of the parallel attentions has a norm of its own",
        "sa": "the parallel attentions are summed outside any module",
        "mlp": "the parallel MLPs are summed outside any module",
    },
    skips=dict.fromkeys(SKIPS, ""),
)


class PreNorm(Skipless):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = self.add_skip("sa", x, self.ls1(self.attn(self.norm1(x), *args, **kwargs)), self.drop_path1)
        return self.add_skip("mlp", x, self.ls2(self.mlp(self.norm2(x))), self.drop_path2)


class PostNorm(Skipless):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = self.add_skip("sa", x, self.norm1(self.attn(x, *args, **kwargs)), self.drop_path1)
        return self.add_skip("mlp", x, self.norm2(self.mlp(x)), self.drop_path2)


class ParallelThings(Skipless):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = self._sum("sa", x, [(a, a.attn(a.norm(x), *args, **kwargs)) for a in self.attns])
        return self._sum("mlp", x, [(f, f.mlp(f.norm(x))) for f in self.ffns])

    def _sum(self, skip: str, x: Tensor, things: list[tuple[Any, Tensor]]) -> Tensor:
        branches = [thing.ls(y) for thing, y in things]
        if skip not in self._removed_skips:  # each has its own drop path
            branches = [thing.drop_path(branch) for (thing, _), branch in zip(things, branches, strict=True)]
        return self.add_skip(skip, x, torch.stack(branches).sum(dim=0))


class ReplacedViT(Replaced):
    @classmethod
    def refuses(cls, module: Any, core: AttentionCore, model: nn.Module) -> str:
        if core.takes_pair_masks or not any(type(part).__name__ == "NaFlexVit" for part in model.modules()):
            return ""
        return (
            "NaFlexVit hides padding by numbers that it adds for each pair of tokens, which this attention has no "
            "place for; softmax and kernelized attention take them"
        )

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v = split_qkv(self.qkv(x), self.num_heads)
        y = self.norm(self.attend(self.q_norm(q), self.k_norm(k), v, attn_mask, is_causal))
        return self.proj_drop(self.proj(self._gated(x, y)))

    def _gated(self, x: Tensor, y: Tensor) -> Tensor:
        gate = getattr(self, "gate", None)  # missing in older versions of timm
        return y if gate is None else y * gate(x).sigmoid()


VIT = "timm.models.vision_transformer."
RELPOS = "timm.models.vision_transformer_relpos."
ATTENTION = AttentionKind(weights=FUSED, replaced=ReplacedViT)

register(
    Family(
        models={VIT + "VisionTransformer": PATCHES},
        blocks={
            VIT + "Block": usual_block(*PRE_NORM, scales=LAYER_SCALE),
            VIT + "ResPostBlock": usual_block(*POST_NORM, scales=NORMS),
            VIT + "ParallelScalingBlock": PARALLEL_SCALING,
            VIT + "DiffParallelScalingBlock": PARALLEL_SCALING,
            VIT + "ParallelThingsBlock": PARALLEL_THINGS,
            RELPOS + "RelPosBlock": usual_block(*PRE_NORM, scales=LAYER_SCALE),
            RELPOS + "ResPostRelPosBlock": usual_block(*POST_NORM, scales=NORMS),
        },
        skipless={
            VIT + "Block": PreNorm,
            VIT + "ResPostBlock": PostNorm,
            VIT + "ParallelThingsBlock": ParallelThings,
            RELPOS + "RelPosBlock": PreNorm,
            RELPOS + "ResPostRelPosBlock": PostNorm,
        },
        attention={
            "timm.layers.attention.Attention": ATTENTION,
            VIT + "Attention": ATTENTION,
            RELPOS + "RelPosAttention": AttentionKind(weights=FUSED),
            full_name(AttentionLayer): AttentionKind(weights=FUSED),  # ours, built with attn_layer=
        },
    )
)
