"""torchvision's ViT and Swin. The ViT uses torch's nn.MultiheadAttention (torch_encoder.py)."""

from torch import Tensor

from wellcond.models.families.family import (
    AttentionKind,
    Family,
    PatchProjection,
    WeightPaths,
    register,
    usual_block,
)
from wellcond.models.families.forwards import Skipless
from wellcond.models.families.vit import FUSED, NORMS


class ViT(Skipless):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torchvision's own name)
        x = self.ln_1(input)
        x, _ = self.self_attention(x, x, x, need_weights=False)
        x = self.add_skip("sa", input, self.dropout(x))
        return self.add_skip("mlp", x, self.mlp(self.ln_2(x)))


class Swin(Skipless):
    def forward(self, x: Tensor) -> Tensor:
        x = self.add_skip("sa", x, self.attn(self.norm1(x)), self.stochastic_depth)
        return self.add_skip("mlp", x, self.mlp(self.norm2(x)), self.stochastic_depth)


class SwinV2(Skipless):
    def forward(self, x: Tensor) -> Tensor:
        x = self.add_skip("sa", x, self.norm1(self.attn(x)), self.stochastic_depth)
        return self.add_skip("mlp", x, self.norm2(self.mlp(x)), self.stochastic_depth)


VIT, SWIN = "torchvision.models.vision_transformer.", "torchvision.models.swin_transformer."
NO_KEY_BIAS = WeightPaths(biases={"key": None})  # V2's forward sets it to zero

register(
    Family(
        models={
            VIT + "VisionTransformer": PatchProjection(path="conv_proj"),
            SWIN + "SwinTransformer": PatchProjection(path="features.0.0"),
        },
        blocks={
            VIT + "EncoderBlock": usual_block(
                "ln_1:output", "dropout:output", "ln_2:input", "mlp:output", ":output", attention="self_attention"
            ),
            SWIN + "SwinTransformerBlock": usual_block(
                "norm1:output", "stochastic_depth:input:0", "norm2:input", "stochastic_depth:input:1", ":output"
            ),
            SWIN + "SwinTransformerBlockV2": usual_block(
                ":input", "stochastic_depth:input:0", "mlp:input", "stochastic_depth:input:1", ":output", scales=NORMS
            ),
        },
        skipless={
            VIT + "EncoderBlock": ViT,
            SWIN + "SwinTransformerBlock": Swin,
            SWIN + "SwinTransformerBlockV2": SwinV2,
        },
        attention={
            SWIN + "ShiftedWindowAttention": AttentionKind(weights=FUSED),
            SWIN + "ShiftedWindowAttentionV2": AttentionKind(weights=NO_KEY_BIAS),
        },
    )
)
