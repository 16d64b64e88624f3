"""asa-fig2: a ViT-Tiny's training loss with and without its skips: without the attention skip it is slow and diverges.

    wellcond reproduce asa-fig2 --scale smoke                                      # the digits, on a CPU
    wellcond reproduce asa-fig2 --scale lab --data-dir tiny-imagenet=data/tiny     # reads the runs of asa-fig1c

It trains nothing itself: it reads the runs of asa-fig1c. A run counts as diverged if its training was given up, or
ended with a loss above that at its start. One that ends at the accuracy of guessing has collapsed, which is reported
but is not divergence. The paper shows curves; its only number is the epoch of the divergence.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from wellcond.claims.arms import TrainedArms
from wellcond.claims.claim import THE_PAPER, Line, TableRow
from wellcond.claims.comparison import SKIPS, Comparison
from wellcond.claims.figures import altair, arm_color, by_set, titled
from wellcond.verdicts import Part, at_least, out_of

__all__ = ["CLAIM", "smallest_distances"]

FROM_EPOCH = 1.0  # before that, every arm is at the loss of guessing
PAPER = "slow; it diverges after about 30 epochs"
OTHERS = ("both", "no-mlp")


def judge(found: Comparison) -> Iterable[Part]:
    name = f"{CLAIM.asks}: the smallest distance, from epoch {FROM_EPOCH:g} on, ≥ 0"
    distances = smallest_distances(found).values()
    if distances:
        yield at_least(name, distances, 0.0, confidence=found.confidence)
    else:
        yield Part(name=name, outcome="undecided", why="no epoch was logged in every arm")
    lost = [_diverged(run) for run in found.runs("no-sa")]
    outcome = "holds" if lost and all(lost) else "undecided" if any(lost) or not lost else "does not hold"
    why = f"{_divergence(found, 'no-sa')}, in {found.record['epochs']} epochs"
    yield Part(name="without attention skips it diverges", outcome=outcome, why=why)


def smallest_distances(found: Comparison) -> dict[int, float]:
    """Return, by seed, the smallest distance of the loss without attention skips above the larger of the others."""
    curves = {arm: {run["seed"]: dict(map(tuple, run["losses"])) for run in found.runs(arm)} for arm in SKIPS}
    distances = {}
    for seed, mine in curves["no-sa"].items():
        others = [curves[arm][seed] for arm in OTHERS]
        common = [epoch for epoch in mine if epoch >= FROM_EPOCH and all(epoch in other for other in others)]
        above = [mine[epoch] - max(other[epoch] for other in others) for epoch in common]
        above = [distance for distance in above if math.isfinite(distance)]  # a diverged run ends with a NaN
        if above:
            distances[seed] = min(above)
    return distances


def says(sets: Mapping[str, Comparison]) -> str:
    (found,) = sets.values()
    distances = list(smallest_distances(found).values())
    if not distances:
        stays = "cannot be compared with the others'"
    elif (nearest := min(distances)) > 0:
        stays = f"stays above the others' (by {nearest:.2f} where they are nearest)"
    else:
        stays = f"does not stay above the others' (it is up to {-nearest:.2f} below)"
    lost, runs = sum(map(_diverged, found.runs("no-sa"))), len(found.runs("no-sa"))
    diverged = f"{'and' if lost else 'but'} {out_of(lost, runs)} seeds"
    return f"Without its attention skips a ViT-Tiny's training loss on {found.title} {stays}, {diverged} diverged."


def summary(found: Comparison) -> Iterable[Line]:
    for arm in found.trained:
        ends = [end for run in found.runs(arm) if run["losses"] and math.isfinite(end := end_of(run["losses"]))]
        cells = {
            "training loss over the last tenth of the epochs": f"{found.interval(ends)}" if ends else "not finite",
            "learning rate": f"{found.record['arms'][arm]['lr']:g}",
            "divergence": _divergence(found, arm),
            THE_PAPER: PAPER if arm == "no-sa" else "",
        }
        yield TableRow(f", {found.arms[arm].title}", cells)


def end_of(losses: Sequence[Sequence[float]]) -> float:
    """Return the mean loss over the last tenth of the epochs; each single loss is that of one batch of mixed images."""
    last = losses[-1][0]
    return fmean(loss for epoch, loss in losses if epoch >= 0.9 * last)


def _divergence(found: Comparison, arm: str) -> str:
    rates = found.record["arms"][arm].get("grid", {}).get("rates", [])
    lost = [f"{rate['lr']:g}" for rate in rates if _diverged(rate)]
    at = f"at the rates {', '.join(lost)} of its grid" if lost else "at no rate of its grid"
    guessing = 200 / found.set.classes  # in %, twice what guessing reaches
    fell = [f"{lr:g}" for lr, top1 in found.rates(arm).items() if top1 < guessing and f"{lr:g}" not in lost]
    collapsed = f"; at {', '.join(fell)} it collapsed to guessing" if fell else ""
    return f"{sum(map(_diverged, found.runs(arm)))} of {len(found.runs(arm))} seeds diverged, and {at}{collapsed}"


def _diverged(run: Mapping[str, Any]) -> bool:
    losses = run.get("losses") or [[0, 0.0]]
    return run["status"] == "diverged" or not losses[-1][1] <= losses[0][1]


def figure(sets: Sequence[Comparison]) -> Any:
    """Plot the loss over epochs, as in the paper's figure: the mean, and a thin line for each seed."""
    alt = altair()
    rows = [
        {"set": found.title, "arm": found.arms[arm].title, "run": f"{arm} {run['seed']}", "epoch": epoch, "loss": loss}
        for found in sets
        for arm in found.trained
        for run in found.runs(arm)
        for epoch, loss in run["losses"]
    ]
    names = [arm.title for arm in SKIPS.values()]
    base = alt.Chart().encode(
        x=alt.X("epoch:Q", title="epoch"),
        color=arm_color(names),
    )
    y = alt.Y("mean(loss):Q", title="training loss", scale=alt.Scale(zero=False))
    seeds = base.mark_line(strokeWidth=1, opacity=0.25).encode(y=y, detail="run:N")
    means = base.mark_line(strokeWidth=2).encode(y=y)
    chart = by_set([seeds, means], rows, sets, width=460, height=280)
    record = sets[0].record
    caption = (
        f"Losses of single steps on mixed images, at {record['scale']} scale, each arm at its own learning rate: means "
        f"over {record['seeds']} seeds, and thin each seed. The paper's figure has curves without numbers: slow, then "
        "divergence, without the attention skip."
    )
    return titled(chart, "Training loss of a ViT-Tiny with and without its skips", caption)


CLAIM = TrainedArms(
    id="asa-fig2",
    claim="without its attention skips a ViT-Tiny trains slowly and then diverges",
    test="the Tiny-ImageNet runs of asa-fig1c",
    holds_if="its loss stays above the others throughout; divergence seen or not, at which rates",
    arms=SKIPS,
    same_runs_as="asa-fig1c",
    sets=("tiny-imagenet",),
    asks="without attention skips the training loss stays above the others",
    judge=judge,
    says=says,
    summary=summary,
    figure=figure,
)
