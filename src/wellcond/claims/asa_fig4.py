"""asa-fig4: graying lowers κ of attention's output (`+sa`) through training, more for lower ε.

    wellcond reproduce asa-fig4 --scale smoke                                         # the digits, on a CPU
    wellcond reproduce asa-fig4 --scale lab --data-dir tiny-imagenet=data/tiny        # shares the runs of asa-table3

Its runs are those of asa-table3 and asa-table2; it trains what is missing of them. Every run records κ at 5 %, 10 %,
20 %, … of its steps, on 64 validation images in float64; these marks stand for the epochs of the claim. The random
start is shown, but not judged: training has no part in it. The paper shows curves without numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from wellcond.claims.arms import TrainedArms
from wellcond.claims.claim import Line, TableRow
from wellcond.claims.comparison import Comparison
from wellcond.claims.figures import altair, arm_color, by_set, from_to, titled
from wellcond.claims.grayed import (
    GRAYED,
    METHODS,
    PLAIN,
    QUICK_GRID,
    WATCHED,
    changed,
    changes,
    kappa_of,
    least_falls,
)
from wellcond.verdicts import Interval, Part, in_most, listed

__all__ = ["CLAIM"]

SHARE = 0.9
SWEEPS = {"svd": ("svd-0.9", "svd-0.7", "svd-0.5"), "dct": ("dct-0.97", "dct-0.95", "dct-0.9")}
ARMS = {arm: GRAYED[arm] for arm in (PLAIN, *SWEEPS["svd"], *SWEEPS["dct"])}


def judge(found: Comparison) -> Iterable[Part]:
    for method, arms in SWEEPS.items():
        order = " > ".join(ARMS[arm].title for arm in (PLAIN, *arms))
        name = f"{METHODS[method]}: κ of +sa in the order {order}, by the smallest step ≥ 0, at ≥ 90 % of the marks"
        yield in_most(name, falls_of(found, arms), 0.0, share=SHARE, of="marks", about=(PLAIN, *arms))


def falls_of(found: Comparison, arms: Sequence[str]) -> list[Interval]:
    """Return the least certain fall of log κ from one ε to the next, at each mark after the random start."""
    return [found.interval(seeds) for seeds in least_falls(found, [PLAIN, *arms], "out")[1:]]


def says(sets: Mapping[str, Comparison]) -> str:
    (found,) = sets.values()
    seen = [[arm for arm in arms if changes(found, arm, "out")] for arms in SWEEPS.values()]
    if not any(seen):
        return ""
    falls = {METHODS[method]: falls_of(found, arms) for method, arms in SWEEPS.items()}
    marks = [f"{sum(one.low >= 0 for one in seen)} of {len(seen)} ({title})" for title, seen in falls.items() if seen]
    ordered = f"Log κ after attention is lower for lower ε at {listed(marks)} marks of training; at its end"
    start = ordered if marks else "At the end of training,"
    plain = fmean(one["out"][-1] for one in found.measurements(PLAIN, "kappa"))
    return (
        f"{start} graying changes log κ after attention by "
        f"{changed(found, [arms[-1] for arms in seen if arms], 'out')} ({plain:.2f} without graying)."
    )


def summary(found: Comparison) -> Iterable[Line]:
    for arm in found.trained:
        if seen := found.measurements(arm, "kappa"):
            means = [fmean(values) for values in zip(*(one["out"] for one in seen), strict=True)]
            ends = {"at the random start": means[0], "over training": fmean(means[1:]), "at its end": means[-1]}
            yield TableRow(f", {ARMS[arm].title}: log κ of +sa", {when: f"{mean:.2f}" for when, mean in ends.items()})


def figure(sets: Sequence[Comparison]) -> Any:
    """Plot log κ of `+sa` over epochs, a panel per method, as in the paper: means, and a thin line for each seed."""
    alt, found = altair(), sets[0]
    titles = {arm: one.title.split(" ", 1)[-1] for arm, one in ARMS.items()}
    rows = [
        {
            "set": f"{METHODS[method]} graying",
            "arm": titles[arm],
            "run": f"{arm} {number}",
            "epoch": epoch,
            "value": value,
        }
        for method, arms in SWEEPS.items()
        for arm in (PLAIN, *arms)
        for number, one in enumerate(found.measurements(arm, "kappa"))
        for epoch, value in zip(one["epochs"], one["out"], strict=True)
    ]
    names = [titles[PLAIN], *sorted({*titles.values()} - {titles[PLAIN]}, reverse=True)]  # the mildest ε first
    drawn = {row["arm"] for row in rows}
    color = arm_color([name for name in names if name in drawn], among=names)
    base = alt.Chart().encode(x=alt.X("epoch:Q", title="epoch"), color=color)
    y = alt.Y("mean(value):Q", title="log κ after attention (+sa)", scale=alt.Scale(zero=False))
    each = base.mark_line(strokeWidth=1, opacity=0.25).encode(y=y, detail="run:N")
    means = base.mark_line(strokeWidth=2, point=True).encode(y=y)
    panels = [f"{title} graying" for title in METHODS.values()]
    chart = by_set([means, each], rows, panels, title=str, width=360, height=280)
    seeds = from_to(count for arm in ARMS if (count := len(found.measurements(arm, "kappa"))))
    caption = (
        f"Means over {seeds} seeds, and thin each seed, at {found.record['scale']} scale; averaged "
        "over blocks and over images, the same throughout. Epoch 0 is the random start. The paper's figure has curves "
        "without numbers: lower ε, lower κ, throughout."
    )
    return titled(chart, f"κ after attention and its skip, while a ViT-Tiny trains on {found.title}", caption)


CLAIM = TrainedArms(
    id="asa-fig4",
    claim="graying lowers κ after attention (`+sa`) throughout training, more for lower ε",
    test="ViT-Tiny on Tiny-ImageNet, SVD ε ∈ {.9, .7, .5}, DCT ε ∈ {.97, .95, .9}: the runs of asa-table3",
    holds_if="ordered by ε at ≥ 90 % of epochs (of the marks at which runs record κ, the random start left out)",
    arms=ARMS,
    plain=PLAIN,
    sets=("tiny-imagenet",),
    asks="κ of +sa is ordered by ε at ≥ 90 % of the marks",
    settings=WATCHED,
    grid=QUICK_GRID,
    in_part=True,
    reads={"kappa": kappa_of},
    judge=judge,
    says=says,
    summary=summary,
    figure=figure,
)
