"""torch's nn.TransformerEncoderLayer and nn.MultiheadAttention; torchvision's ViT uses the latter."""

from torch import Tensor, nn

from wellcond.models.families.family import AttentionKind, BlockKind, Family, WeightPaths, register, usual_block
from wellcond.models.families.forwards import Skipless
from wellcond.words import BLOCK_SITES

PRE_NORM = usual_block(
    "norm1:output", "dropout1:output", "norm2:input", "dropout2:output", ":output", attention="self_attn"
)
POST_NORM = usual_block(
    ":input", "dropout1:output", "norm1:input", "dropout2:output", "norm2:input", attention="self_attn"
)


def _encoder_layer(block: nn.Module) -> BlockKind:
    if not getattr(block.get_submodule("self_attn"), "batch_first", True):
        why = "batch_first=False keeps tokens as (n, b, d), where samples cannot be told apart; build it with True"
        return BlockKind(taps={}, lacks=dict.fromkeys(BLOCK_SITES, why))
    return PRE_NORM if getattr(block, "norm_first", False) else POST_NORM


class EncoderLayer(Skipless):
    _takes = ("src", "src_mask", "src_key_padding_mask", "is_causal")

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        y = self._sa_block(
            self.norm1(src) if self.norm_first else src, src_mask, src_key_padding_mask, is_causal=is_causal
        )
        x = self.add_skip("sa", src, y)
        if self.norm_first:
            return self.add_skip("mlp", x, self._ff_block(self.norm2(x)))
        x = self.norm1(x)
        return self.norm2(self.add_skip("mlp", x, self._ff_block(x)))


BIASES = {"query": "in_proj_bias:0/3", "key": "in_proj_bias:1/3", "value": "in_proj_bias:2/3"}


def _multihead_attention(module: nn.Module) -> WeightPaths:
    """Return the paths: one parameter for q, k and v, or three if keys or values have another width."""
    if getattr(module, "in_proj_weight", None) is None:
        names = {"query": "q_proj_weight", "key": "k_proj_weight", "value": "v_proj_weight"}
    else:
        names = {name: f"in_proj_weight:{part}/3" for part, name in enumerate(("query", "key", "value"))}
    return WeightPaths(**names, output="out_proj", biases=BIASES)


LAYER = "torch.nn.modules.transformer.TransformerEncoderLayer"

register(
    Family(
        blocks={LAYER: BlockKind(taps={}, variant=_encoder_layer)},
        skipless={LAYER: EncoderLayer},
        attention={"torch.nn.modules.activation.MultiheadAttention": AttentionKind(weights=_multihead_attention)},
    )
)
