"""asa-fig1c: how much accuracy a ViT-Tiny loses without its attention skips, and without its MLP skips.

    wellcond reproduce asa-fig1c --scale smoke                                     # the digits, on a CPU
    wellcond reproduce asa-fig1c --scale lab --data-dir cifar10=data/cifar10       # one GPU, twenty minutes

Three arms: both skips, no attention skip, no MLP skip. The paper's figure has two numbers, on CIFAR-10; on
Tiny-ImageNet the model without attention skips "fails to train".
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from wellcond.claims.arms import Between, TrainedArms
from wellcond.claims.claim import THE_PAPER, Line, TableRow
from wellcond.claims.comparison import SKIPS, Comparison
from wellcond.claims.figures import accuracies, accuracy_row, by_set, seeds_in_words, titled
from wellcond.verdicts import Part, at_least, listed, written

__all__ = ["CLAIM"]

RATIO = 3.0  # drop(sa) ≥ 3 × drop(mlp)
MARK = "the paper's drop, from our both skips"
FAILS = {("tiny-imagenet", "no-sa"): "fails to train"}  # where the paper has words instead of a number


def judge(found: Comparison) -> Iterable[Part]:
    name = f"{CLAIM.asks}, that is drop(sa) − {RATIO:g} × drop(mlp) ≥ 0"
    yield at_least(name, excess(found, RATIO), 0.0, unit=" points", confidence=found.confidence)


def excess(found: Comparison, factor: float, name: str = "top1") -> list[float]:
    """Return drop(sa) − factor × drop(mlp) for each seed, in points."""
    sa, mlp = found.drops("no-sa", name), found.drops("no-mlp", name)
    return [sa[seed] - factor * mlp[seed] for seed in sorted(sa)]


def grows(name: str, smaller: Comparison, larger: Comparison) -> Part:
    """Judge whether drop(sa) is larger on the larger set, paired by the seeds that both sets have."""
    less, more = smaller.drops("no-sa"), larger.drops("no-sa")
    values = [more[seed] - less[seed] for seed in sorted(less.keys() & more.keys())]
    return at_least(name, values, 0.0, unit=" points", confidence=max(smaller.confidence, larger.confidence))


def says(sets: Mapping[str, Comparison]) -> str:
    lost = [
        (found.title, *(fmean(found.drops(arm).values()) for arm in ("no-sa", "no-mlp"))) for found in sets.values()
    ]
    first = " points of top-1"
    sa = listed(f"{written(drop)}{'' if number else first} on {title}" for number, (title, drop, _) in enumerate(lost))
    mlp = listed(written(drop) for _, _, drop in lost)
    more = all(found.interval(excess(found, 1)).low > 0 for found in sets.values())
    shares = listed(
        f"{100 * drop / found.mean('both'):.0f}" for found, (_, drop, _) in zip(sets.values(), lost, strict=True)
    )
    lead = "Attention skips matter more than MLP skips: without them" if more else "Without its attention skips"
    return f"{lead} a ViT-Tiny loses {sa} ({shares} % of what it had), against {mlp} without its MLP skips."


def summary(found: Comparison) -> Iterable[Line]:
    for arm in found.trained:
        yield TableRow(f", {found.arms[arm].title}", found.reached(arm))
    for arm in ("no-sa", "no-mlp"):
        drops = {title: found.told(found.drops(arm, name), " points") for name, title in found.metrics.items()}
        share = f"{written(100 * fmean(found.drops(arm).values()) / found.mean('both'), 'z.0f')} %"
        paper = found.paper.get(arm)
        paper = FAILS.get((found.set.name, arm), "") if paper is None else f"{-paper:g} points"
        yield TableRow(f", drop with {found.arms[arm].title}", {**drops, "share of top-1": share, THE_PAPER: paper})
    for times, factor in (("", 1.0), (f"{RATIO:g} × ", RATIO)):
        more = {
            title: found.interval(excess(found, factor, name)).with_unit(" points")
            for name, title in found.metrics.items()
        }
        yield TableRow(f", drop(sa) − {times}drop(mlp)", more)
    lr = found.record["arms"]["both"]["lr"]
    tuning = {found.arms[arm].title: found.rates(arm).get(lr) for arm in SKIPS}
    shared = ", ".join(f"{title} {top1:.1f} %" for title, top1 in tuning.items() if top1 is not None)
    if shared:
        yield f": at one rate for all, {lr:g}, the trainings that chose the rates had {shared}; the paper names no rate"
    if found.set.name == "cifar100":
        yield ": it has as many images as CIFAR-10: what grows from one to the other is the number of classes"


def figure(sets: Sequence[Comparison]) -> Any:
    """Plot top-1 of the three arms on each set, as in the paper, with a mark where the paper's drop would lie."""
    rows = []
    for found in sets:
        for arm in found.trained:
            drop = found.paper.get(arm)
            rows.append(accuracy_row(found, arm, None if drop is None else found.mean("both") + drop))
    layers = accuracies([arm.title for arm in SKIPS.values()], mark=MARK, bars=True)
    chart = by_set(layers, rows, sets, width=170, height=240).resolve_scale(shape="shared")
    return titled(chart, "Accuracy of a ViT-Tiny without its skips", seeds_in_words(sets))


CLAIM = TrainedArms(
    id="asa-fig1c",
    claim="removing the attention skip is catastrophic, the MLP skip modest; worse on larger data",
    test="CIFAR-10, CIFAR-100, Tiny-ImageNet × three arms; 100 epochs on CIFAR, 50 on Tiny-ImageNet",
    holds_if="drop(sa) ≥ 3 × drop(mlp) on each; drop(sa) grows with the data set",
    arms=SKIPS,
    sets=("cifar10", "cifar100", "tiny-imagenet"),
    asks=f"the attention skip is worth at least {RATIO:g} times the points of the MLP skip",
    paper={"cifar10": {"no-sa": -22.0, "no-mlp": -2.0}},  # points of top-1 against both skips
    judge=judge,
    between=Between(asks="the attention skip is worth more on {larger} than on {smaller}", judge=grows),
    says=says,
    summary=summary,
    figure=figure,
)
