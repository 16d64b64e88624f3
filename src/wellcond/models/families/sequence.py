"""wellcond's own Long Range Arena encoders (models/sequence.py)."""

from torch import Tensor

from wellcond.models.families.family import AttentionKind, Family, WeightPaths, register, usual_block
from wellcond.models.families.forwards import Replaced, Skipless, split_qkv

OURS = "wellcond.models.sequence."


class Block(Skipless):
    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        x = self.add_skip("sa", x, self.attn(self.norm1(x), attn_mask))
        return self.add_skip("mlp", x, self.mlp(self.norm2(x)))


class Attention(Replaced):
    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = split_qkv(self.qkv(x), self.num_heads)
        return self.proj_drop(self.proj(self.attend(q, k, v, attn_mask)))


register(
    Family(
        embeddings={OURS + "SequenceClassifier": "embedding"},
        blocks={
            OURS + "SequenceBlock": usual_block(
                "norm1:output", "attn:output", "norm2:input", "mlp:output", ":output"
            )
        },
        skipless={OURS + "SequenceBlock": Block},
        attention={OURS + "SequenceAttention": AttentionKind(weights=WeightPaths(), replaced=Attention)},
    )
)  # fmt: skip
