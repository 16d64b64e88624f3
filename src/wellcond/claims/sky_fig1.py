"""sky-fig1: validation loss and accuracy over training time: Skyformer converges faster than softmax.

    wellcond reproduce sky-fig1 --scale lab --data-dir lra_text=data/imdb …        # reads the runs of sky-lra

Time is that of training, without validations: the number of steps times what sky-time measured for a step of that
attention alone on a GPU, because several runs may share one. The same is shown over steps. The paper's figures are of
one trial each: accuracy (Figure 2) and loss (appendix, Figure 1); two remarks go with them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from wellcond.claims.claim import THE_PAPER, Line, TableRow
from wellcond.claims.comparison import Comparison
from wellcond.claims.figures import altair, titled
from wellcond.claims.lra import ARMS, ArenaArms, at_chance, attention_color, column, shown, unpaired
from wellcond.verdicts import Interval, Part, in_most, listed, out_of

__all__ = ["CLAIM", "earlier", "ratios", "reached", "remarks"]

SHARE = 3 / 5  # of the tasks
DRAWN = ("softmax", "kernelized", "skyformer")  # the attentions in the paper's figures
TITLES = {
    "loss": "validation loss", "accuracy": "accuracy, %", "minutes": "minutes of training", "step": "steps",
}  # fmt: skip
OVERFIT = 1.1  # the last loss over the smallest
STALLED, LEARNT, DELAY = 0.60, 0.65, 0.1  # two accuracies, and a share of the training
UNKNOWN = Interval(mean=math.inf, low=-math.inf, high=math.inf, count=0)
"""Of a task where softmax only guesses: its best loss is a matter of chance."""
PAPER = {
    "lra_text": {"softmax": 1.4, "kernelized": 1.7, "skyformer": 1.8},
    "lra_listops": {"softmax": 1.6, "kernelized": 1.6, "skyformer": 1.6},
    "lra_pathfinder": {"kernelized": 0.55, "skyformer": 0.55},
    "lra_image": {"softmax": 3.2, "kernelized": 3.5, "skyformer": 4.0},
}  # the loss at the end, read off the appendix's Figure 1


def judge(tasks: Mapping[str, Comparison]) -> Iterable[Part]:
    name = "Skyformer is earlier at softmax's best validation loss on at least three tasks, that is 1 − time ratio ≥ 0"
    timed = [one for one in tasks.values() if earlier(one) is not None]
    found = [UNKNOWN if at_chance(one) else earlier(one) or UNKNOWN for one in timed]
    part = in_most(name, found, 0.0, share=SHARE, of="tasks")
    guessing = ", ".join(column(one) for one in timed if at_chance(one))
    why = f"{part.why}; unknown on {guessing}, where softmax is at chance"
    yield replace(part, why=why) if guessing else part


def reached(run: Mapping[str, Any], loss: float) -> int | None:
    """Return the first step at which the validation loss of a run was as low as `loss`; None if it never was."""
    return next((row["step"] for row in run["validation"] if row["loss"] <= loss), None)


def ratios(found: Comparison, unit: str = "seconds") -> list[float]:
    """Return Skyformer's time to softmax's best loss over softmax's own time to it, for paired seeds; inf for never.

    Empty if there are no runs or, in seconds, if sky-time has not measured a step yet."""
    mine, theirs = (
        {run["seed"]: run for run in found.runs(name) if run.get("validation")} for name in ("skyformer", "softmax")
    )
    alone = found.record["ms alone"]
    if unit == "seconds" and not alone:
        return []
    factor = alone["skyformer"] / alone["softmax"] if unit == "seconds" else 1.0
    times = []
    for seed in sorted(mine.keys() & theirs.keys()):
        best = min(row["loss"] for row in theirs[seed]["validation"])
        at, own = reached(mine[seed], best), reached(theirs[seed], best)
        assert own is not None
        times.append(math.inf if at is None else factor * at / own)
    return times


def earlier(found: Comparison, unit: str = "seconds") -> Interval | None:
    """Return the interval of 1 − time ratio; −1 for a ratio above 2, or for never. None if there are no ratios."""
    times = ratios(found, unit)
    return found.interval([max(-1.0, 1 - time) for time in times]) if times else None


def remarks(found: Comparison) -> Iterable[str]:
    """Yield whether the paper's two remarks were seen, on their tasks; one counts as seen if every seed shows it."""
    runs = [rows for arm in DRAWN for rows in found.measurements(arm, "validation")]
    if found.set.name == "lra_text" and runs:
        ratios = [rows[-1]["loss"] / min(row["loss"] for row in rows) for rows in runs]
        seen = "seen" if min(ratios) >= OVERFIT else "not seen in every run"
        yield f", it over-fits: {seen} (the last loss is {min(ratios):.2f} to {max(ratios):.2f} × the smallest)"
    if found.set.name == "lra_pathfinder":
        learnt, left = ({run["seed"]: _left(run, level) for run in found.runs(arm) if run.get("validation")}
                        for arm, level in (("skyformer", LEARNT), ("softmax", STALLED)))  # fmt: skip
        both = sorted(learnt.keys() & left.keys())
        if both:
            delays = [left[seed] - learnt[seed] for seed in both]
            seen = "seen" if min(delays) >= DELAY else "not seen in every seed"
            never = sum(learnt[seed] == left[seed] == 1 for seed in both)
            if never == len(both):
                best = {arm: max(100 * row["top1"] for run in found.runs(arm) for row in run.get("validation", []))
                        for arm in ("softmax", "skyformer")}  # fmt: skip
                yield (
                    f", softmax stalls: cannot be told, since neither softmax (at best {best['softmax']:.1f} %) nor "
                    f"Skyformer ({best['skyformer']:.1f} %) learns the task (the paper: softmax does so later, by "
                    "about a third of the training)"
                )
                return
            said = ", ".join(f"{100 * delay:.0f}" for delay in delays)
            neither = f", neither does in {never} of {len(both)} seeds" if never else ""
            yield (
                f", softmax stalls: {seen} (it leaves {100 * STALLED:.0f} % later than Skyformer reaches "
                f"{100 * LEARNT:.0f} %, by {said} % of the training{neither}; the paper: by about a third of it)"
            )


def _left(run: Mapping[str, Any], level: float) -> float:
    """Return the share of the training after which the accuracy is first above a level; 1 for never."""
    rows = run["validation"]
    return next((row["step"] for row in rows if row["top1"] > level), rows[-1]["step"]) / rows[-1]["step"]


def says(tasks: Mapping[str, Comparison]) -> str:
    unit = "seconds" if any(one.record["ms alone"] for one in tasks.values()) else "steps"
    told = [one for one in tasks.values() if ratios(one, unit)]
    learnt = {column(one): ratios(one, unit) for one in told if not at_chance(one)}
    sooner = sum(fmean(times) < 1 for times in learnt.values())
    other = {column(one): ", on other validation data than softmax" for one in told if unpaired(one)}
    each = ", ".join(f"{task} {_ratio(times)}{other.get(task, '')}" for task, times in learnt.items())
    guessed = ""
    for neither, words in ((True, "neither does better than guessing"), (False, "softmax only guesses")):
        titles = [one.title for one in told if at_chance(one) and at_chance(one, "skyformer") is neither]
        guessed += f"; on {listed(titles)} {words}" if titles else ""
    reaches = f"Skyformer reaches softmax's best validation loss in fewer {unit} on {out_of(sooner, len(learnt))} tasks"
    return f"{reaches} ({each}){guessed}." if learnt else f"O{guessed[3:]}." if guessed else ""


def _ratio(times: Sequence[float]) -> str:
    never = sum(map(math.isinf, times))
    if not never:
        return f"{fmean(times):.2f} × softmax's"
    return "never" if never == len(times) else f"never in {never} of {len(times)} seeds"


def summary(found: Comparison) -> Iterable[Line]:
    if shares := {unit: share for unit in ("seconds", "steps") if (share := earlier(found, unit)) is not None}:
        cells = {f"in {unit}": f"{_ratio(ratios(found, unit))}; 1 − ratio {share}" for unit, share in shares.items()}
        table = "When Skyformer reaches softmax's best loss (1 − ratio is −1 if it takes twice as long or more)"
        yield TableRow(", Skyformer", cells, table)
    for arm in found.trained:
        if runs := found.measurements(arm, "validation"):
            least = found.interval([min(row["loss"] for row in rows) for rows in runs])
            last = found.interval([rows[-1]["loss"] for rows in runs])
            best = found.interval([100 * max(row["top1"] for row in rows) for rows in runs])
            paper = found.paper.get(arm)
            cells = {"last loss": f"{last}", "smallest loss": f"{least}", "best accuracy": best.with_unit(" %")}
            yield TableRow(f", {ARMS[arm].title}", cells | {THE_PAPER: f"last loss near {paper:g}" if paper else ""})
    yield from remarks(found)


def figure(sets: Sequence[Comparison]) -> Any:
    """Plot loss and accuracy over steps, and over minutes if sky-time has timed a step; one column per task. Diamonds
    mark the paper's loss at the end."""
    alt = altair()
    timed = all(found.record["ms alone"] for found in sets)
    panels_of = [(y, x) for y in ("loss", "accuracy") for x in ("minutes", "step") if x == "step" or timed]
    rows = [
        {"task": column(found), "arm": ARMS[arm].title, "run": f"{arm} {run['seed']}", **row,
         "minutes": row["step"] * found.record["ms alone"][arm] / 6e4 if timed else None,
         "accuracy": 100 * row["top1"]}
        for found, arm in shown(sets, DRAWN)
        for run in found.runs(arm)
        for row in run.get("validation", [])
    ]  # fmt: skip
    columns = []
    for found in sets:
        mine = alt.Data(values=[row for row in rows if row["task"] == column(found)])
        last = found.record["steps"]
        ends = [{"arm": ARMS[arm].title, "step": last, "loss": loss} for arm, loss in found.paper.items()]
        panels = []
        for y, x in panels_of:
            lines = alt.Chart(mine).mark_line(strokeWidth=1.3, opacity=0.8).encode(
                x=alt.X(f"{x}:Q", title=TITLES[x]),
                y=alt.Y(f"{y}:Q", title=TITLES[y], scale=alt.Scale(zero=False)),
                color=attention_color(DRAWN), detail="run:N",
            )  # fmt: skip
            layers = [lines]
            if (y, x) == ("loss", "step") and ends:
                marks = alt.Chart(alt.Data(values=ends)).mark_point(shape="diamond", filled=True, size=80, opacity=1)
                layers.append(marks.encode(x="step:Q", y="loss:Q", color=attention_color(DRAWN)))
            panels.append(alt.layer(*layers).properties(width=190, height=130))
        heading = alt.Title(text=column(found), anchor="middle", fontSize=12)
        columns.append(alt.vconcat(*panels, title=heading))
    time = "Time is that of training, a step as long as sky-time found it; the paper's is a V100's. " if timed else ""
    caption = (
        f"A line for each seed, at {sets[0].record['scale']} scale. {time}Diamonds: the loss at the end that the "
        "appendix's Figure 1 shows, read from the picture."
    )
    return titled(alt.hconcat(*columns).resolve_scale(color="shared"), "Validation over training", caption)


CLAIM = ArenaArms(
    id="sky-fig1",
    claim="Skyformer converges faster than softmax; Text over-fits at once; softmax stalls on Pathfinder",
    test="the runs of sky-lra; Retrieval by its stand-in",
    holds_if="earlier at softmax's best loss on at least three tasks; the two remarks seen or not",
    same_runs_as="sky-lra",
    across=judge,
    shows=("validation",),
    paper=PAPER,
    says=says,
    summary=summary,
    figure=figure,
)
