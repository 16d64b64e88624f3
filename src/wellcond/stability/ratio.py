"""Compare the instability scores of models trained on the same batches from the same start, step by step.

    found = instability_ratio({"softmax": a, "skyformer": b}, batches, make_step, baseline="softmax")
    found["skyformer"].mean, found["skyformer"].standard_error, found.unshared["skyformer"]

Adam moves the weights about equally far in every model, so a ratio mostly shows how the embeddings change. The steps of
one training are not independent: the standard error is that of this training only; repeat it with other seeds.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .score import STEPS, Embed, InstabilityScore, Step, check_count, cloned, instability_scores, seeded

__all__ = ["InstabilityRatio", "InstabilityRatios", "instability_ratio"]


@dataclass(frozen=True, kw_only=True)
class InstabilityRatio:
    """τ of one model over τ of the baseline, for one embedding."""

    mean: float
    """The mean over the steps in which both models moved; NaN if a score is not finite, or no step is left."""
    standard_error: float
    """The standard error of that mean; NaN for fewer than two steps."""
    count: int
    """How many steps the mean is over; those with status `zero` are left out."""
    status: str
    """`non_finite` or `low_precision` if any step is, else `ok`; `zero` if no step is left."""
    ratios: tuple[float, ...]
    """One for each step; NaN where either model has no τ or both are 0, inf where only the baseline's is 0."""


@dataclass(frozen=True, kw_only=True)
class InstabilityRatios:
    """The results of `instability_ratio`: `found["skyformer"]`, or `found["skyformer", "after"]` if it has several."""

    baseline: str
    ratios: Mapping[str, Mapping[str, InstabilityRatio]]
    """By model, then by embedding."""
    scores: Mapping[str, Sequence[InstabilityScore]]
    """By model, including the baseline: one for each step."""
    shared: Mapping[str, Sequence[str]]
    """By model, the parameters that it shares with the baseline, bit for bit equal at the start."""
    unshared: Mapping[str, Sequence[str]]
    """By model, the parameters that only it or only the baseline has, or that differ in shape."""

    def __getitem__(self, key: str | tuple[str, str]) -> InstabilityRatio:
        model, embedding = (key, None) if isinstance(key, str) else key
        by_embedding = self.ratios[model]
        return next(iter(by_embedding.values())) if embedding is None else by_embedding[embedding]


def instability_ratio(
    models: Mapping[str, nn.Module],
    batches: Iterable[Any],
    make_step: Callable[[nn.Module], Step],
    *,
    baseline: str,
    embed: Embed | None = None,
    steps: int = STEPS,
    seed: int = 0,
) -> InstabilityRatios:
    """Train each model on the same `steps` batches, from the same start and the same random state, and compare their τ.

    `make_step(model)` returns the function that does one update, with its own optimiser. The models are trained in
    place. Parameters and buffers that a model shares with the baseline, by name and shape, must be equal at the start,
    else ValueError: load the baseline's into the others first. The batches are held in memory.
    """
    if baseline not in models or len(models) < 2:
        raise ValueError(f"the baseline {baseline!r} must be one of two models or more, got {', '.join(models)}")
    if len({id(model) for model in models.values()}) < len(models):
        raise ValueError("one model stands under two names; each needs a copy of its own, for they are trained")
    others = [name for name in models if name != baseline]
    shared, unshared = {}, {}
    for name in others:
        shared[name], unshared[name] = _compare_start(name, models[name], baseline, models[baseline])
    kept = list(itertools.islice(batches, steps))
    check_count(kept, steps)
    scores = {}
    for name, model in models.items():
        with seeded(model, seed):
            own = map(cloned, kept)  # for what the steps of one model change in place, another's would see
            scores[name] = instability_scores(model, own, make_step(model), embed=embed, steps=steps, seed=seed)
    embeddings = scores[baseline][0].embeddings()
    return InstabilityRatios(
        baseline=baseline,
        ratios={n: {e: _ratio(scores[n], scores[baseline], e) for e in embeddings} for n in others},
        scores=scores,
        shared=shared,
        unshared=unshared,
    )


def _ratio(
    scores: Sequence[InstabilityScore], baseline: Sequence[InstabilityScore], embedding: str
) -> InstabilityRatio:
    pairs = [(a[embedding], b[embedding]) for a, b in zip(scores, baseline, strict=True)]
    ratios = tuple(a.tau / b.tau if b.tau != 0 else (math.inf if a.tau > 0 else math.nan) for a, b in pairs)
    statuses = {score.status for pair in pairs for score in pair}
    used = [r for r, (a, b) in zip(ratios, pairs, strict=True) if "zero" not in (a.status, b.status)]
    status = next((s for s in ("non_finite", "low_precision") if s in statuses), "ok" if used else "zero")
    if not used:
        return InstabilityRatio(mean=math.nan, standard_error=math.nan, count=0, status=status, ratios=ratios)
    if not all(map(math.isfinite, used)):
        status = "non_finite"
    mean = sum(used) / len(used) if status != "non_finite" else math.nan
    spread = len(used) > 1 and status != "non_finite"
    error = statistics.stdev(used) / math.sqrt(len(used)) if spread else math.nan
    return InstabilityRatio(mean=mean, standard_error=error, count=len(used), status=status, ratios=ratios)


def _compare_start(name: str, model: nn.Module, baseline: str, other: nn.Module) -> tuple[list[str], list[str]]:
    """Return the names of the common parameters and of all others; ValueError if values of common tensors differ."""
    mine, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    common = [key for key in mine if key in theirs and mine[key].shape == theirs[key].shape]
    if not common:
        raise ValueError(f"{name!r} and {baseline!r} have no parameter in common; the ratio compares kindred models")
    buffers, other_buffers = dict(model.named_buffers()), dict(other.named_buffers())
    pairs = {key: (mine[key], theirs[key]) for key in common}
    pairs |= {key: (b, other_buffers[key]) for key, b in buffers.items() if key in other_buffers}
    different = [key for key, (a, b) in pairs.items() if a.shape == b.shape and not torch.equal(a, b.to(a.device))]
    if different:
        raise ValueError(
            f"{name!r} does not start where {baseline!r} does: {len(different)} of their common tensors differ, e.g. "
            f"{', '.join(different[:3])}; load the baseline's first: load_state_dict(…, strict=False)"
        )
    return common, [key for key in {**mine, **theirs} if key not in common]
