"""Compare the instability scores of attentions on one task, over several seeds (Skyformer's appendix, Table 1).

    found = attention_stability(
        lambda name: wellcond.models.sequence.build("text", name),      # a model with the named attention
        lambda seed: batches_of(seed),                                  # the batches of the 20 steps
        schedule=OneCycle(lr=1e-4, warmup=80),
        seeds=range(5),
    )
    found.means("skyformer", "after")              # one ratio to softmax per seed: the mean of its 20 steps
    found.rows()                                   # every step's τ and ratio, flat

For each seed every attention starts from the same weights and reads the same batches in the same order. Its 20 updates
follow the paper's training: AdamW with one cycle of learning rate and momentum, gradients clipped by value, in float32
(or whatever dtype the model is built in). τ of a step compares the token embeddings after the two layers, `before` and
`after` the final norm, without padding; they are computed in eval mode, without dropout and with the same landmarks
before and after the update. W is all parameters.

The two embeddings answer different questions. Kernelized attention and Skyformer sum over the keys instead of
averaging. So before the norm their embeddings, and all changes to these, are many times larger than softmax's; after it
they are not.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .ratio import InstabilityRatios, instability_ratio
from .score import STEPS, Step, seeded

__all__ = ["ATTENTIONS", "AttentionStability", "OneCycle", "attention_stability", "embed_features"]

ATTENTIONS = ("nystrom", "kernelized", "skyformer")  # the rows of the paper's table


@dataclass(frozen=True, kw_only=True)
class OneCycle:
    """AdamW and its schedule as in Skyformer's training: torch's OneCycleLR, linear, otherwise with its defaults.

    The learning rate rises from lr/25 to lr within `warmup` steps and falls to lr/25/1e4 at `steps`; Adam's first beta
    goes from 0.95 to 0.85 and back.
    """

    lr: float
    warmup: int
    steps: int = 50_000
    eps: float = 1e-6
    clip: float | None = 1.0
    """The largest absolute value of a gradient's entries; None for no clipping."""

    def make_step(self, model: nn.Module) -> Step:
        """Return a function that does one update of the model on a batch, which has `inputs` and `targets`."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.lr, eps=self.eps, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=self.lr,
            total_steps=self.steps,
            pct_start=self.warmup / self.steps,
            anneal_strategy="linear",
        )

        def step(model: nn.Module, batch: Any) -> None:
            model.train()
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(*batch.inputs), batch.targets).backward()
            if self.clip is not None:
                nn.utils.clip_grad_value_(model.parameters(), self.clip)
            optimizer.step()
            schedule.step()

        return step


@dataclass(frozen=True, kw_only=True)
class AttentionStability:
    """The results of `attention_stability`, seed by seed."""

    baseline: str
    seeds: tuple[int, ...]
    found: tuple[InstabilityRatios, ...]
    """One per seed."""

    @property
    def attentions(self) -> list[str]:
        """The attentions that were compared, by name."""
        return list(self.found[0].ratios)

    @property
    def embeddings(self) -> list[str]:
        """The embeddings whose movement was measured, by name."""
        return list(self.found[0].ratios[self.attentions[0]])

    def means(self, attention: str, embedding: str) -> list[float]:
        """Return one ratio to the baseline per seed, the mean of its steps; NaN where a training gave none."""
        return [found[attention, embedding].mean for found in self.found]

    def rows(self, run: str = "") -> list[dict[str, Any]]:
        """Return flat dicts, by seed, attention, embedding and step: `tau` and, except for the baseline, `ratio`."""
        rows = []
        for seed, found in zip(self.seeds, self.found, strict=True):
            for attention, scores in found.scores.items():
                for score in scores:
                    for row in score.rows(run):
                        rows.append({**row, "seed": seed, "attention": attention})
                        if attention != found.baseline:
                            ratio = found[attention, row["embedding"]].ratios[score.step - 1]
                            rows.append({**rows[-1], "name": "ratio", "value": ratio})
        return rows


def attention_stability(
    build: Callable[[str], nn.Module],
    batches: Callable[[int], Iterable[Any]],
    *,
    schedule: OneCycle,
    attentions: Sequence[str] = ATTENTIONS,
    baseline: str = "softmax",
    steps: int = STEPS,
    seeds: Iterable[int] = range(5),
    device: torch.device | str = "cpu",
    progress: Callable[[int, str], None] | None = None,
) -> AttentionStability:
    """For each seed, train every attention for `steps` steps from the same start and compare its τ with the baseline's.

    Args:
        build: returns the model with the named attention, its weights drawn from torch's generator. All models must
            have the same parameters, by name and shape, and a method `features`, as in `wellcond.models.sequence`.
        batches: returns the batches of a seed, each with `inputs`, a tuple of arguments for the model, and `targets`.
        schedule: the optimiser's settings.
        device: where to put models and batches.
        progress: called with the seed and the attention before each training.

    The global random state is left as it was. Raises ValueError for too few batches, and if the models differ in
    their parameters.
    """
    seeds = tuple(seeds)
    if not seeds:
        raise ValueError("no seeds, no trainings: give at least one")
    names = (baseline, *(name for name in attentions if name != baseline))
    found = []
    for seed in seeds:
        models = _from_one_start(build, names, seed, device)
        here = (_moved(batch, device) for batch in batches(seed))

        def make_step(model: nn.Module, seed: int = seed, models: Mapping[str, nn.Module] = models) -> Step:
            if progress is not None:
                progress(seed, next(name for name, one in models.items() if one is model))
            return schedule.make_step(model)

        found.append(
            instability_ratio(
                models, here, make_step, baseline=baseline, embed=embed_features, steps=steps, seed=seed
            )
        )  # fmt: skip
    return AttentionStability(baseline=baseline, seeds=seeds, found=tuple(found))


def embed_features(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Return `model.features(*batch.inputs)`, the token embeddings by name with padding set to 0: an `embed`."""
    features: Any = model.features
    return features(*batch.inputs)


def _from_one_start(
    build: Callable[[str], nn.Module], names: Sequence[str], seed: int, device: torch.device | str
) -> dict[str, nn.Module]:
    """Return a model for each name, all with the weights that the first one draws from the seed."""
    models: dict[str, nn.Module] = {}
    with seeded(nn.Module(), seed):  # the CPU's generator: weights do not depend on the device
        for name in names:
            models[name] = build(name)
    start = models[names[0]].state_dict()
    for name, model in models.items():
        try:
            model.load_state_dict(start)
        except RuntimeError as error:
            raise ValueError(
                f"{name!r} and {names[0]!r} have other parameters, and cannot start alike: {error}"
            ) from None
        model.to(device)
    return models


@dataclass(frozen=True)
class _Batch:
    inputs: tuple[Any, ...]
    targets: Tensor


def _moved(batch: Any, device: torch.device | str) -> _Batch:
    inputs = tuple(part.to(device) if isinstance(part, Tensor) else part for part in batch.inputs)
    return _Batch(inputs=inputs, targets=batch.targets.to(device))
