"""Hugging Face's BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA and DistilBERT, with norms after the residual adds.

BERT adds each skip in a separate module, which also holds the output projection of the branch.
"""

import dataclasses
from typing import Any

from torch import Tensor, nn

from wellcond.models.families.family import AttentionKind, BlockKind, Family, WeightPaths, register, usual_block
from wellcond.models.families.forwards import Skipless
from wellcond.models.families.hf_attention import HuggingFaceReplaced

HF = "transformers.models."
BERTS = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm_roberta": "XLMRoberta",
    "camembert": "Camembert",
    "electra": "Electra",
}


def _bert(block: nn.Module) -> BlockKind:
    if not getattr(block, "chunk_size_feed_forward", 0):
        return BERT
    chunked = "chunk_size_feed_forward cuts the MLP into pieces; set it to 0 to measure"
    taps = {site: tap for site, tap in BERT.taps.items() if site not in ("mlp", "+mlp")}
    return dataclasses.replace(BERT, taps=taps, lacks={"mlp": chunked, "+mlp": chunked})


BERT = BlockKind(
    taps={
        "in": ":input",
        "sa": "attention.output.dropout:output",
        "+sa": "attention.output.LayerNorm:input",
        "mlp": "output.dropout:output",
        "+mlp": "output.LayerNorm:input",
    },
    attention="attention.self",
    output="attention.output.dense",
    skips={"sa": "attention.output", "mlp": "output"},
    variant=_bert,
)


class Output(Skipless):
    _skip: str

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.add_skip(self._skip, input_tensor, self.dropout(self.dense(hidden_states))))


class AttentionOutput(Output):
    _skip = "sa"


class MlpOutput(Output):
    _skip = "mlp"


class DistilBert(Skipless):
    _takes = ("hidden_states", "attention_mask", "kwargs")

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y, _ = self.attention(hidden_states, *args, **kwargs)
        x = self.sa_layer_norm(self.add_skip("sa", hidden_states, y))
        return self.output_layer_norm(self.add_skip("mlp", x, self.ffn(x)))


ATTENTION = AttentionKind(
    weights=WeightPaths(query="query", key="key", value="value", heads="num_attention_heads"),
    replaced=HuggingFaceReplaced,
)

for _folder, _start in BERTS.items():
    _names = f"{HF}{_folder}.modeling_{_folder}.{_start}"
    register(
        Family(
            blocks={_names + "Layer": BERT},
            skipless={_names + "SelfOutput": AttentionOutput, _names + "Output": MlpOutput},
            attention={_names + "SelfAttention": ATTENTION},
        )
    )

DISTILBERT = HF + "distilbert.modeling_distilbert."

register(
    Family(
        blocks={
            DISTILBERT + "TransformerBlock": usual_block(
                ":input", "attention:output", "sa_layer_norm:input", "ffn:output", "output_layer_norm:input",
                attention="attention",
            )
        },
        skipless={DISTILBERT + "TransformerBlock": DistilBert},
        attention={
            DISTILBERT + "DistilBertSelfAttention": AttentionKind(
                weights=WeightPaths(query="q_lin", key="k_lin", value="v_lin", output="out_lin", heads="n_heads"),
                replaced=HuggingFaceReplaced,
            )
        },
    )
)  # fmt: skip
