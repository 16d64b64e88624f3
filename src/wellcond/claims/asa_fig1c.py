"""asa-fig1c: how much accuracy a ViT-Tiny loses without its attention skips, and without its MLP skips.

    wellcond reproduce asa-fig1c --scale smoke                                     # the digits, on a CPU
    wellcond reproduce asa-fig1c --scale lab --data-dir cifar10=data/cifar10       # one GPU, twenty minutes

Three arms: both skips, no attention skip, no MLP skip. The paper's figure has two numbers, on CIFAR-10; on
Tiny-ImageNet the model without attention skips "fails to train".
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from wellcond.claims.arms import SKIPS, Between, Comparison, TrainedArms
from wellcond.claims.claim import Beside, Line
from wellcond.claims.figures import INK, altair, arm_color, by_set, titled, with_interval
from wellcond.verdicts import Part, at_least

__all__ = ["CLAIM"]

RATIO = 3.0  # drop(sa) ≥ 3 × drop(mlp)
MARK = "the paper's drop, from our both skips"


def judge(found: Comparison) -> Iterable[Part]:
    sa, mlp = found.drops("no-sa"), found.drops("no-mlp")
    excess = [sa[seed] - RATIO * mlp[seed] for seed in sorted(sa)]
    name = f"{CLAIM.asks}, that is drop(sa) − {RATIO:g} × drop(mlp) ≥ 0"
    yield at_least(name, excess, 0.0, unit=" points", confidence=found.confidence)


def grows(name: str, smaller: Comparison, larger: Comparison) -> Part:
    """Paired by the seeds that both sets have."""
    less, more = smaller.drops("no-sa"), larger.drops("no-sa")
    values = [more[seed] - less[seed] for seed in sorted(less.keys() & more.keys())]
    return at_least(name, values, 0.0, unit=" points", confidence=max(smaller.confidence, larger.confidence))


def says(sets: Mapping[str, Comparison]) -> str:
    sa, mlp = (
        ", ".join(f"{fmean(found.drops(arm).values()):.1f} on {found.title}" for found in sets.values())
        for arm in ("no-sa", "no-mlp")
    )
    return f"Without its attention skip a ViT-Tiny loses, in points, {sa}; without its MLP skip {mlp}."


def summary(found: Comparison) -> Iterable[Line]:
    for arm in found.trained:
        one = found.record["arms"][arm]
        top1, top5 = (found.interval(found.values(arm, name).values()) for name in ("top1", "top5"))
        lost = sum(run["status"] == "diverged" for run in one["runs"])
        said = f", {found.arms[arm].title}: top-1 {top1} %, top-5 {top5} %, at lr {one['lr']:g}"
        yield f"{said}{f', {lost} diverged' if lost else ''}; held out: {', '.join(map(_tried, one['grid']['rates']))}"
    for arm in ("no-sa", "no-mlp"):
        paper = found.paper.get(arm)
        what, ours = f", drop with {found.arms[arm].title}", f"{found.interval(found.drops(arm).values())} points"
        yield f"{what}: {ours}" if paper is None else Beside(what, ours, f"{-paper:g}")


def _tried(rate: Mapping[str, Any]) -> str:
    return f"{rate['lr']:g} → " + ("diverged" if rate["status"] == "diverged" else f"{rate['top1']:.1f}")


def figure(sets: Sequence[Comparison]) -> Any:
    """Top-1 of the three arms on each set, as in the paper; a mark where the paper's drop would lie."""
    alt = altair()
    rows = []
    for found in sets:
        plain = found.interval(found.values("both").values()).mean
        for arm in found.trained:
            drop = found.paper.get(arm)
            ours = with_interval(found.interval(found.values(arm).values()))
            row = {"set": found.title, "arm": found.arms[arm].title, **ours, "label": f"{ours['mean']:.1f}"}
            rows.append(row | {"paper": None if drop is None else plain + drop})
    names = [arm.title for arm in SKIPS.values()]
    base = alt.Chart().encode(
        x=alt.X("arm:N", sort=names, title=None, axis=alt.Axis(labels=False, ticks=False)),
        y=alt.Y("mean:Q", title="top-1, %", scale=alt.Scale(domain=[0, 100])),
    )
    bars = base.mark_bar(size=38).encode(color=arm_color(names))
    errors = base.mark_rule(color=INK, strokeWidth=1.5).encode(y="low:Q", y2="high:Q")
    numbers = base.mark_text(dy=14, color="white", fontSize=11).encode(text="label:N")
    paper = base.transform_filter("datum.paper !== null").transform_calculate(mark=repr(MARK))
    paper = paper.mark_point(shape="diamond", filled=True, size=90, opacity=1).encode(
        y="paper:Q",
        shape=alt.Shape("mark:N", scale=alt.Scale(range=["diamond"]), title=None),
        color=alt.value(INK),
    )
    chart = by_set([bars, errors, numbers, paper], rows, sets, width=170, height=240).resolve_scale(shape="shared")
    seeds = "/".join(dict.fromkeys(str(found.record["seeds"]) for found in sets))
    levels = " and ".join(dict.fromkeys(f"{100 * found.confidence:g} %" for found in sets))
    caption = f"Means over {seeds} paired seeds with {levels} intervals, at {sets[0].record['scale']} scale."
    return titled(chart, "Accuracy of a ViT-Tiny without its skips", caption)


CLAIM = TrainedArms(
    id="asa-fig1c",
    claim="removing the attention skip is catastrophic, the MLP skip modest; worse on larger data",
    test="CIFAR-10, CIFAR-100, Tiny-ImageNet × three arms",
    holds_if="drop(sa) ≥ 3 × drop(mlp) on each; drop(sa) grows with the data set",
    arms=SKIPS,
    sets=("cifar10", "cifar100", "tiny-imagenet"),
    asks=f"drop(sa) ≥ {RATIO:g} × drop(mlp)",
    paper={"cifar10": {"no-sa": -22.0, "no-mlp": -2.0}},  # points of top-1 against both skips
    judge=judge,
    between=Between(asks="drop(sa) is larger on {larger} than on {smaller}", judge=grows),
    says=says,
    summary=summary,
    figure=figure,
)
