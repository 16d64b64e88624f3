"""Hugging Face's vision transformers: ViT, DeiT, MAE's ViT, DINOv2, DINOv3; and the encoders of CLIP and SigLIP."""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from wellcond.models.families.cait import ONE_DROP_PATH
from wellcond.models.families.family import (
    AttentionKind,
    BlockKind,
    Family,
    PatchProjection,
    WeightPaths,
    register,
    usual_block,
)
from wellcond.models.families.forwards import Skipless
from wellcond.models.families.hf_attention import HuggingFaceReplaced

HF = "transformers.models."
EMBED = HF + "vit.modeling_vit.ViTPatchEmbeddings"

VIT_5 = usual_block(
    "layernorm_before:output", "dropout:output:0", "layernorm_after:input", "dropout:output:1", ":output",
    attention="attention",
)  # fmt: skip
VIT_4 = replace(  # transformers 4 names the parts as in BERT
    usual_block(
        "layernorm_before:output", "attention:output", "layernorm_after:input", "output.dropout:output", ":output",
        attention="attention.attention",
    ),
    output="attention.output.dense",
)  # fmt: skip
VIT = BlockKind(taps={}, variant=lambda block: VIT_4 if hasattr(block, "intermediate") else VIT_5)
DINO = usual_block(*ONE_DROP_PATH, attention="attention", scales=("layer_scale1.lambda1", "layer_scale2.lambda1"))
CLIP = usual_block(
    "layer_norm1:output", "self_attn:output", "layer_norm2:input", "mlp:output", ":output", attention="self_attn"
)


class ViT(Skipless):
    _takes = ("hidden_states", "attention_mask", "kwargs")

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y, _ = self.attention(self.layernorm_before(hidden_states), *args, **kwargs)
        x = self.add_skip("sa", hidden_states, self.dropout(y))
        return self.add_skip("mlp", x, self.dropout(self.mlp(self.layernorm_after(x))))


class Dino(Skipless):
    _takes = ("hidden_states", "attention_mask", "kwargs")

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y, _ = self.attention(self.norm1(hidden_states), *args, **kwargs)
        x = self.add_skip("sa", hidden_states, self.layer_scale1(y), self.drop_path)
        return self.add_skip("mlp", x, self.layer_scale2(self.mlp(self.norm2(x))), self.drop_path)


class DinoV3(Dino):
    _takes = ("hidden_states", "attention_mask", "position_embeddings", "kwargs")


class Clip(Skipless):
    _takes = ("hidden_states", "attention_mask", "kwargs")

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y, _ = self.self_attn(self.layer_norm1(hidden_states), *args, **kwargs)
        x = self.add_skip("sa", hidden_states, y)
        return self.add_skip("mlp", x, self.mlp(self.layer_norm2(x)))


def _weights(module: nn.Module) -> WeightPaths:
    """Return the paths of the three projections; names of the output and of the head count differ between models."""
    heads = "num_heads" if hasattr(module, "num_heads") else "num_attention_heads"
    if not hasattr(module, "q_proj"):
        return WeightPaths(query="query", key="key", value="value", heads=heads)  # transformers 4
    output = "o_proj" if hasattr(module, "o_proj") else "out_proj"
    return WeightPaths(query="q_proj", key="k_proj", value="v_proj", output=output, heads=heads)


# folder, prefix of the class names, class of the blocks, their kind and their forward
MODELS = (
    ("vit", "ViT", "ViTLayer", VIT, ViT),
    ("deit", "DeiT", "DeiTLayer", VIT, ViT),
    ("vit_mae", "ViTMAE", "ViTMAELayer", VIT, ViT),
    ("dinov2", "Dinov2", "Dinov2Layer", DINO, Dino),
    ("dinov2_with_registers", "Dinov2WithRegisters", "Dinov2WithRegistersLayer", DINO, Dino),
    ("dinov3_vit", "DINOv3ViT", "DINOv3ViTLayer", DINO, DinoV3),
    ("clip", "CLIP", "CLIPEncoderLayer", CLIP, Clip),
    ("siglip", "Siglip", "SiglipEncoderLayer", CLIP, Clip),
)
ATTENTION = AttentionKind(weights=_weights, replaced=HuggingFaceReplaced)

for _folder, _start, _layer, _kind, _forward in MODELS:
    _module = f"{HF}{_folder}.modeling_{_folder}."
    register(
        Family(
            blocks={_module + _layer: _kind},
            skipless={_module + _layer: _forward},
            attention={_module + _start + end: ATTENTION for end in ("Attention", "SelfAttention")},
        )
    )

register(
    Family(
        models={
            HF + "vit.modeling_vit.ViTModel": PatchProjection(
                path="embeddings.patch_embeddings.projection", embeddings=(EMBED,)
            ),
            HF + "vit.modeling_vit.ViTForImageClassification": PatchProjection(
                path="vit.embeddings.patch_embeddings.projection", embeddings=(EMBED,)
            ),
        }
    )
)
