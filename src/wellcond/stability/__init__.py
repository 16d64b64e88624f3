"""The instability score of Skyformer's appendix: how far an update moves the embeddings relative to the weights.

    score = instability_score(model, batch, step)          # step(model, batch) does one optimiser update
    scores = instability_scores(model, batches, step)      # of 20 steps
    found = instability_ratio({"softmax": a, "skyformer": b}, batches, make_step, baseline="softmax")
    found["skyformer"].mean                                # below 1: more stable than the baseline
    attention_stability(build, batches, schedule=OneCycle(lr=1e-4, warmup=80))     # the paper's protocol, several seeds

What the numbers mean: docs/jacobian.md.
"""

from .attentions import AttentionStability, OneCycle, attention_stability
from .ratio import InstabilityRatio, InstabilityRatios, instability_ratio
from .score import InstabilityScore, around, instability_score, instability_scores

__all__ = [
    "AttentionStability",
    "InstabilityRatio",
    "InstabilityRatios",
    "InstabilityScore",
    "OneCycle",
    "around",
    "attention_stability",
    "instability_ratio",
    "instability_score",
    "instability_scores",
]
