"""sky-approx: five approximations of softmax attention with one budget, on queries, keys and values of trained models.

    wellcond reproduce sky-approx --scale lab --data-dir lra_text=data/imdb …      # reads the softmax runs of sky-lra

The error is the spectral norm of the difference from the exact output, in float64, as the median over both layers,
heads, sequences and draws. Skyformer here is its Nyström method on softmax's own kernel, as in the paper's Figure 1.
That figure is about BERT, with heads of 64 and other values: its numbers are shown beside ours, but cannot be compared
one by one.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from wellcond.claims.claim import THE_PAPER, Line, TableRow
from wellcond.claims.comparison import Comparison
from wellcond.claims.figures import INK, altair, arm_color, titled
from wellcond.claims.lra import ARMS, ArenaArms, at_chance
from wellcond.verdicts import Part, at_least, listed, out_of, undecided

__all__ = ["CLAIM", "advantages", "falls"]

METHODS = {
    "skyformer": "Skyformer", "nystromformer": "Nyströmformer", "linformer": "Linformer", "performer": "Performer",
    "informer": "Informer",
}  # fmt: skip
COLORED = ("Linformer", "Performer", "Nyströmformer", "Skyformer", "Informer")  # the last two as in other figures
LANDMARKS, FROM = (16, 32, 64, 128, 256), 128
WEIGHTS = {"initial": "fresh weights", "trained": "trained"}
PAPER = {
    "initial": {
        "512": (1.45, 1.14, 0.89, 0.61, 0.36), "1024": (2.17, 1.74, 1.31, 0.91, 0.54),
        "2048": (3.10, 2.46, 1.92, 1.33, 0.81), "4096": (4.7, 3.72, 2.88, 2.01, 1.19),
    },
    "trained": {
        "512": (2.14, 1.47, 1.06, 0.76, 0.51), "1024": (2.53, 1.79, 1.31, 0.98, 0.69),
        "2048": (3.02, 2.15, 1.64, 1.26, 0.92), "4096": (3.79, 2.78, 2.16, 1.72, 1.27),
    },
}  # fmt: skip
"""Skyformer's errors in Figure 1, read off the picture: BERT's weights, fresh and pretrained, by LANDMARKS."""


def judge(found: Comparison) -> Iterable[Part]:
    runs = found.measurements("softmax", "approximations")
    if not runs:
        return
    for budget in (one for one in runs[0]["budgets"] if one >= FROM):
        name = f"with {budget} landmarks Skyformer's error is smallest: ln of the best other over its own ≥ 0"
        yield _at_least(name, [advantages(run, budget) for run in runs], found)
    yield _at_least("Skyformer's error falls with each doubling of landmarks: ln of the smallest factor ≥ 0",
                    [falls(run) for run in runs], found)  # fmt: skip


def _at_least(name: str, values: Sequence[float], found: Comparison) -> Part:
    if all(map(math.isfinite, values)):
        part = at_least(name, values, 0.0, confidence=found.confidence)
    else:
        part = Part(name=name, outcome="does not hold", why="half of Skyformer's draws have no value in some seed")
    guesses = f"softmax is at chance there ({found.mean('softmax'):.1f} %)"
    return undecided(part, guesses) if at_chance(found) else part


def advantages(run: Mapping[str, Any], budget: int) -> float:
    """Return ln of the smallest other error over Skyformer's with trained weights, averaged over lengths; −∞ if
    Skyformer's has no value."""
    at = run["budgets"].index(budget)
    ratios = []
    for errors in run["trained"].values():
        others = [errors[name][at] for name in METHODS if name != "skyformer" and errors[name][at] is not None]
        mine = errors["skyformer"][at]
        ratios.append(-math.inf if mine is None else math.log(min(others, default=math.inf) / mine))
    return fmean(ratios)


def falls(run: Mapping[str, Any]) -> float:
    """Return ln of the smallest factor by which Skyformer's error falls from one budget to the next, at any length."""
    factors = [
        -math.inf if more is None else math.inf if less is None else math.log(less / more)
        for errors in run["trained"].values()
        for less, more in pairwise(errors["skyformer"])
    ]
    finite = [one for one in factors if one != math.inf]
    return min(finite, default=-math.inf)


def says(tasks: Mapping[str, Comparison]) -> str:
    seen = [one for one in tasks.values() if one.measurements("softmax", "approximations")]
    if not seen:
        return ""
    runs = [one.measurements("softmax", "approximations") for one in seen]
    factors = [math.exp(fmean(advantages(run, FROM) for run in some)) for some in runs]
    best = sum(factor > 1 for factor in factors)
    guesses, learnt = (
        {one.title: factor for one, factor in zip(seen, factors, strict=True) if at_chance(one) is guessing}
        for guessing in (True, False)
    )
    where = " where softmax has learnt the task" if learnt and guesses else ""
    times = f"{_range(learnt or guesses)} times its own{where}"
    if where:
        times += f", {_range(guesses)} times on {listed(guesses)}, where softmax only guesses"
    rises = [one.title for one, some in zip(seen, runs, strict=True) if fmean(map(falls, some)) < 0]
    rising = f"; with more landmarks its error rises somewhere on {listed(rises)}" if rises else ""
    return (
        f"With {FROM} landmarks Skyformer approximates softmax attention best on {out_of(best, len(factors))} tasks; "
        f"the best other error is {times}{rising}."
    )


def _range(factors: Mapping[str, float]) -> str:
    ends = min(factors.values()), max(factors.values())
    return " to ".join(dict.fromkeys(f"{end:,.{1 if end < 10 else 0}f}" for end in ends))


def summary(found: Comparison) -> Iterable[Line]:
    runs = found.measurements("softmax", "approximations")
    for weights, title in WEIGHTS.items() if runs else ():
        for size in runs[0][weights]:
            last = len(runs[0]["budgets"]) - 1
            errors = {name: [run[weights][size][name][last] for run in runs] for name in METHODS}
            cells = {METHODS[name]: _mean(values) for name, values in errors.items()}
            norm = fmean(run[weights][size]["norm"] for run in runs)
            budget = runs[0]["budgets"][last]
            paper = dict(zip(LANDMARKS, PAPER[weights].get(size, ()), strict=False)).get(budget)
            cells |= {"the output itself": f"{norm:.2g}", THE_PAPER: f"Skyformer {paper:g}, of BERT" if paper else ""}
            yield TableRow(f", {title}, n = {size}, {budget} landmarks", cells)


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.2g}" if len(known) == len(values) else "without a value"


def figure(sets: Sequence[Comparison]) -> Any:
    """Plot errors over budgets, by length and weights, for the task with the longest sequences, beside the paper's."""
    alt = altair()
    measured = [found for found in sets if found.measurements("softmax", "approximations")]
    found = max(measured, key=lambda one: len(one.measurements("softmax", "approximations")[0]["trained"]))
    runs = found.measurements("softmax", "approximations")
    panels = []
    for weights, title in WEIGHTS.items():
        columns = []
        for size in runs[0][weights]:
            rows = [
                {"arm": METHODS[name], "budget": budget, "error": run[weights][size][name][at], "run": f"{name} {seed}"}
                for seed, run in enumerate(runs) for name in METHODS for at, budget in enumerate(run["budgets"])
                if run[weights][size][name][at] is not None
            ]  # fmt: skip
            paper = [
                {"budget": budget, "error": error, "mark": "Skyformer in the paper, of BERT"}
                for budget, error in zip(LANDMARKS, PAPER[weights].get(size, ()), strict=False)
            ]
            x = alt.X("budget:Q", title="landmarks", scale=alt.Scale(type="log", base=2), axis=alt.Axis(grid=False))
            y = alt.Y("error:Q", title="‖approximate − exact‖", scale=alt.Scale(type="log"))
            lines = (
                alt.Chart(alt.Data(values=rows))
                .mark_line(point=True, strokeWidth=1.8)
                .encode(x=x, y=y, color=arm_color(list(METHODS.values()), among=COLORED), detail="run:N")
            )
            marks = alt.Chart(alt.Data(values=paper)).mark_point(filled=True, size=60, opacity=1).encode(
                x=x, y=y, color=alt.value(INK),
                shape=alt.Shape("mark:N", scale=alt.Scale(range=["diamond"]), title=None),
            )  # fmt: skip
            columns.append(alt.layer(lines, marks).properties(width=190, height=170, title=f"{title}, n = {size}"))
        panels.append(alt.hconcat(*columns))
    caption = (
        f"{found.title}, softmax models, at {found.record['scale']} scale: medians over layers, heads, sequences and "
        "draws, a line for each seed. The paper's values are of another model, BERT, with heads of 64."
    )
    chart = alt.vconcat(*panels).resolve_scale(color="shared", shape="shared")
    return titled(chart, "Approximations of softmax attention", caption)


CLAIM = ArenaArms(
    id="sky-approx",
    claim="the more landmarks, the smaller the approximation error; from 128 on, Skyformer (for softmax) is best",
    test="Q, K and V from the trained softmax models of sky-lra; n 512–4096, d 16–256; against Nyströmformer, "
    "Linformer, Performer and Informer as approximations",
    holds_if="ordering at d ≥ 128",
    same_runs_as="sky-lra",
    arms={"softmax": ARMS["softmax"]},
    asks=f"Skyformer is nearest with {FROM} landmarks or more",
    judge=judge,
    shows=("approximations",),
    paper=dict.fromkeys(("lra_text", "lra_listops", "imdb_pairs", "lra_pathfinder", "lra_image"), PAPER),
    says=says,
    summary=summary,
    figure=figure,
)
