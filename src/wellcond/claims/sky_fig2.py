"""sky-fig2: singular values of attention's output decay fast, and more slowly on harder tasks.

    wellcond reproduce sky-fig2 --scale lab --data-dir lra_text=data/imdb …        # reads the softmax runs of sky-lra

The values are the 64 singular values of the second layer's attention output in trained softmax models, averaged over
one batch of the test set. The claim compares how far the 10th and the 64th lie below the first, in natural logarithms.
The paper has four tasks in this order, slowest decay first: Retrieval (here its stand-in), Pathfinder, Text, ListOps.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from wellcond.claims.claim import THE_PAPER, Line, TableRow
from wellcond.claims.comparison import Comparison
from wellcond.claims.figures import altair, arm_color, titled
from wellcond.claims.lra import ARMS, STAND_IN, ArenaArms, at_chance, column
from wellcond.verdicts import Part, at_least, listed, undecided

__all__ = ["CLAIM", "depths"]

ORDER = (STAND_IN, "lra_pathfinder", "lra_text", "lra_listops")  # from the slowest decay to the fastest
INDICES = (10, 64)
PAPER = {
    STAND_IN: {"10": 1.2, "64": 3.5e-3}, "lra_pathfinder": {"10": 0.9, "64": 2.5e-3},
    "lra_text": {"10": 0.2, "64": 5e-4}, "lra_listops": {"10": 0.07, "64": 1e-4},
}  # fmt: skip
"""Singular values read off the appendix's Figure 2, by index; the first is 140 to 280 on all tasks."""


def judge(tasks: Mapping[str, Comparison]) -> Iterable[Part]:
    for index in INDICES:
        for slower, faster in pairwise(ORDER):
            if slower not in tasks or faster not in tasks:
                continue  # reported once, for all parts together
            less, more = depths(tasks[slower], index), depths(tasks[faster], index)
            values = [more[seed] - less[seed] for seed in sorted(less.keys() & more.keys())]
            name = (
                f"singular values fall further from the 1st to the {index}th on {column(tasks[faster])} than on "
                f"{column(tasks[slower])} (ln)"
            )
            part = at_least(name, values, 0.0)
            guessing = [found for found in (tasks[slower], tasks[faster]) if values and at_chance(found)]
            said = ", ".join(f"{column(found)} ({found.mean('softmax'):.1f} %)" for found in guessing)
            yield undecided(part, f"softmax is at chance on {said}") if said else part


def depths(found: Comparison, index: int) -> dict[int, float]:
    """Return, by seed, ln of the first singular value over the one at this index (or the last), counted from 1."""
    depths = {}
    for run in found.runs("softmax"):
        if run.get("attention_spectrum"):
            values = run["attention_spectrum"]["values"]
            at = values[min(index, len(values)) - 1]
            depths[run["seed"]] = math.log(values[0] / max(at, 1e-300))
    return depths


def says(tasks: Mapping[str, Comparison]) -> str:
    seen = [one for one in tasks.values() if depths(one, INDICES[-1])]
    below = {one.title: fmean(depths(one, INDICES[-1]).values()) / math.log(10) for one in seen}
    if not below:
        return ""
    order = ", ".join(sorted(below, key=lambda task: below[task]))
    ends = " to ".join(dict.fromkeys(f"{end:.1f}" for end in (min(below.values()), max(below.values()))))
    guesses = [one.title for one in seen if at_chance(one)]
    guessed = f"; on {listed(guesses)} softmax only guesses" if guesses else ""
    what = f"The singular values of attention's output fall by {ends} orders of magnitude"
    return f"{what}, from the slowest: {order} (the paper: Retrieval, Pathfinder, Text, ListOps){guessed}."


def summary(found: Comparison) -> Iterable[Line]:
    curves = [one["values"] for one in found.measurements("softmax", "attention_spectrum")]
    if not curves:
        return
    means = [fmean(values) for values in zip(*curves, strict=True)]
    cells = {f"σ{index}": f"{means[min(index, len(means)) - 1]:.3g}" for index in (1, *INDICES)}
    cells |= {f"ln σ1/σ{INDICES[-1]}": f"{fmean(depths(found, INDICES[-1]).values()):.1f}"}
    paper = ", ".join(f"σ{index} ≈ {value:g}" for index, value in found.paper.items())
    yield TableRow(", softmax, layer 2", cells | {THE_PAPER: f"σ1 140 to 280, {paper}" if paper else "not shown"})


def figure(sets: Sequence[Comparison]) -> Any:
    """Plot the singular values, as in the paper, with marks at its values for index 10 and 64."""
    alt = altair()
    lines = [
        {"task": column(found), "run": f"{found.title} {run['seed']}", "index": index, "value": value}
        for found in sets
        for run in found.runs("softmax")
        if run.get("attention_spectrum")
        for index, value in enumerate(run["attention_spectrum"]["values"], start=1)
        if value > 0
    ]
    marks = [
        {"task": column(found), "index": int(index), "value": value, "mark": "the paper"}
        for found in sets
        for index, value in found.paper.items()
    ]
    color = arm_color([column(found) for found in sets], field="task")
    base = alt.Chart(alt.Data(values=lines)).mark_line(strokeWidth=1.8).encode(
        x=alt.X("index:Q", title="index of the singular value"),
        y=alt.Y("value:Q", title="singular value", scale=alt.Scale(type="log"), axis=alt.Axis(format=".0e")),
        color=color, detail="run:N",
    )  # fmt: skip
    points = alt.Chart(alt.Data(values=marks)).mark_point(filled=True, size=90, opacity=1).encode(
        x="index:Q", y="value:Q", color=color,
        shape=alt.Shape("mark:N", scale=alt.Scale(range=["diamond"]), title=None),
    )  # fmt: skip
    caption = (
        f"Second layer of trained softmax models, the mean over a batch of the test set, a line for each seed, at "
        f"{sets[0].record['scale']} scale. Diamonds: the appendix's Figure 2, read from the picture; its Retrieval is "
        "not our pairs of reviews."
    )
    chart = alt.layer(base, points).properties(width=560, height=320)
    return titled(chart, "Singular values of attention's output", caption)


CLAIM = ArenaArms(
    id="sky-fig2",
    claim="singular values of attention outputs decay fast, slower on harder tasks",
    test="layer 2 of the trained softmax models of sky-lra, one batch of the test set; Retrieval by its stand-in",
    holds_if="decay ordered as published: Retrieval slowest, then Pathfinder, Text, ListOps",
    same_runs_as="sky-lra",
    arms={"softmax": ARMS["softmax"]},
    apart=("lra_image",),  # which the paper does not show
    across=judge,
    shows=("attention_spectrum",),
    paper=PAPER,
    says=says,
    summary=summary,
    figure=figure,
)
