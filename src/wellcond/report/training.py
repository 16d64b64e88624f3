"""Everything over training: losses, accuracy, learning rate and gradient norm of a run's rows, and κ of its probe's.

    shown = Shown(name="my run", train=run.train, validation=run.validation, events=run.events)
    section("Over training", *training_charts([shown], last=440), *kappa_charts([readings], last=440))

One run has a chart per quantity; several have the same charts, with a line per run. Training and validation never share
one. A chart of thousands of steps draws the highest of each stretch, says so, and keeps the others in its CSV.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wellcond.records import Event, TrainRow, ValidationRow
from wellcond.words import BRANCH_SITES

from .axes import drawable
from .colors import CATEGORIES, SITE_COLORS
from .figures import Axis, Chart, Series, line_chart
from .markup import to_csv
from .readings import Readings
from .steps import MARKS_MOST, thin

__all__ = [
    "RUNS_MOST", "Shown", "alone", "below_truth", "kappa_charts", "metric_name", "run_style", "training_charts",
]  # fmt: skip

DRAWN_MOST, CSV_MOST = 200, 5000  # steps
BLOCKS_MOST = 5  # lines of single blocks in one chart
RUNS_MOST = 12  # six colours, plain and dashed
NEAR_END = 0.85  # of the axis: lines that all end beyond it are named where they end
STEP = Axis("step", whole=True)
METRICS = {"loss": "validation loss", "top1": "top-1", "top5": "top-5"}
"""What the metrics of a validation are called on a page; others keep their names."""
ACCURACIES = ("top1", "top5")
VALIDATED = "Over the whole validation set."
OTHERS = {
    "lr": ("Learning rate", Axis("learning rate"), "The largest of the optimiser's groups."),
    "gradient_norm": ("Gradient norm", Axis("norm", log=True), "Of all gradients, before clipping."),
}
"""Fields of a training row that have a chart of their own: its title, its axis and its caption."""
Points = Sequence[tuple[int, float]]
Line = tuple[str, Points, str, bool]
"""Its name, points, colour, and whether it is dashed."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One run, as a page shows it."""

    name: str
    model: str = ""
    recipe: str = ""
    train: Sequence[TrainRow] = ()
    validation: Sequence[ValidationRow] = ()
    events: Sequence[Event] = ()
    probe: Iterable[Mapping[str, Any]] | None = None
    """The rows of its probe; None where it had none."""

    @property
    def logged(self) -> bool:
        return bool(self.train or self.validation or self.events)

    @property
    def last_step(self) -> int:
        return max((row.step for row in (*self.train, *self.validation, *self.events)), default=0)

    def metric(self, name: str) -> Points:
        return [(row.step, row.metrics[name]) for row in self.validation if name in row.metrics]

    def trained(self, field: str) -> Points:
        """(step, value) of a field of the training rows; none where an older run did not write it."""
        points = [(row.step, getattr(row, field)) for row in self.train]
        missing = field != "loss" and all(math.isnan(value) for _, value in points)
        return [] if missing else points


def metric_name(name: str) -> str:
    return METRICS.get(name, name)


def run_style(position: int) -> tuple[str, bool]:
    """The colour of a run's lines, and whether they are dashed."""
    return CATEGORIES[position % len(CATEGORIES)], position >= len(CATEGORIES)


def alone(names: Sequence[str], runs: Sequence[Any]) -> str:
    """Which run a line belongs to where a chart of several runs has only one, which then has no label."""
    return f" Measured in {names[0]} alone." if len(runs) > 1 and len(names) == 1 else ""


def below_truth(runs: Sequence[Readings], *sites: str) -> str:
    """What to know of lines at these sites where some of their points are lower bounds."""
    if not any(run.capped_sites & set(sites) for run in runs):
        return ""
    return " Some samples were at the ceiling: near it, the truth may lie above a line."


def training_charts(runs: Sequence[Shown], *, last: int) -> list[Chart]:
    """Training loss, validation loss, accuracy, learning rate and gradient norm, as far as there are rows of them.

    All charts over training go from step 0 to `last`, so that they can be read one below the other.
    """

    def chart(title: str, y: Axis, points: Callable[[Shown], Points], caption: str = "") -> list[Chart]:
        lines = [(run.name, points(run), *run_style(i)) for i, run in enumerate(runs) if points(run)]
        if not lines:
            return []
        caption = (caption + alone([name for name, *_ in lines], runs)).strip()
        return [_over_steps(lines, title=title, y=y, caption=caption, last=last, marks_most=MARKS_MOST)]

    names = list(dict.fromkeys(name for run in runs for row in run.validation for name in row.metrics))
    charts = chart("Training loss", Axis("loss"), lambda run: run.trained("loss"), "Of the batch of each logged step.")
    charts += chart("Validation loss", Axis("loss"), lambda run: run.metric("loss"), VALIDATED)
    if len(runs) == 1 and any(name in names for name in ACCURACIES):
        both = [
            (metric_name(name), runs[0].metric(name), color, False)
            for name, color in zip(ACCURACIES, CATEGORIES, strict=False)
            if name in names
        ]
        about: dict[str, Any] = {"y": Axis("share right"), "caption": VALIDATED, "marks_most": MARKS_MOST}
        charts.append(_over_steps(both, title="Accuracy", last=last, **about))
    elif "top1" in names:
        charts += chart("Top-1 accuracy", Axis("share right"), lambda run: run.metric("top1"), VALIDATED)
    for name in names:
        if name not in METRICS:
            charts += chart(f"Validation {name}", Axis(name), lambda run, name=name: run.metric(name), VALIDATED)
    for field, (title, y, caption) in OTHERS.items():
        charts += chart(title, y, lambda run, field=field: run.trained(field), caption)
    return charts


def kappa_charts(runs: Sequence[Readings], *, last: int) -> list[Chart]:
    """log κ over training, from step 0 to `last`; none for runs of one step."""
    if not any(len(run.steps) > 1 for run in runs):
        return []
    return _of_one_run(runs[0], last) if len(runs) == 1 else _of_runs(runs, last)


def _of_one_run(run: Readings, end: int) -> list[Chart]:
    means = [
        (site, [(step, run.mean(step, site)) for step in run.steps], SITE_COLORS[site], site in BRANCH_SITES)
        for site in run.sites
    ]
    charts = []
    if means:
        caption = "Natural logarithm, mean over blocks." + below_truth([run], *run.sites)
        charts.append(_over_steps(means, title="log κ over training, by site", y="log κ", caption=caption, last=end))
    if len(run.blocks) > 1 and run.sites:
        last = run.steps[-1]
        site = max(run.sites, key=lambda s: max(map(_finite_or_high, run.over_blocks(last, s)), default=-math.inf))
        ranked = sorted(
            (block for block in run.blocks if any(run.log_kappa(step, block.name, site) for step in run.steps)),
            key=lambda block: _finite_or_high(run.value("log_kappa", last, block.name, site)),
            reverse=True,
        )[:BLOCKS_MOST]
        blocks = [
            (block.name, [(s, run.value("log_kappa", s, block.name, site)) for s in run.steps], color, False)
            for block, color in zip(sorted(ranked, key=lambda block: block.place), CATEGORIES, strict=False)
        ]
        caption = f"The site that is worst at the last step, {site}, and the {len(blocks)} blocks worst there."
        caption += below_truth([run], site)
        charts.append(_over_steps(blocks, title=f"log κ over training, {site}", y="log κ", caption=caption, last=end))
    return charts


def _of_runs(runs: Sequence[Readings], end: int) -> list[Chart]:
    charts = []
    for site in SITE_COLORS:
        lines = [
            (run.run, [(step, run.mean(step, site)) for step in run.steps], *run_style(position))
            for position, run in enumerate(runs)
            if site in run.sites
        ]
        if lines:
            title = f"log κ over training, {site}"
            caption = "Mean over blocks." + alone([name for name, *_ in lines], runs) + below_truth(runs, site)
            charts.append(_over_steps(lines, title=title, y="log κ", caption=caption, last=end))
    return charts


def _over_steps(
    lines: Sequence[Line], *, title: str, y: Axis | str, caption: str, last: int, marks_most: int = 2
) -> Chart:
    """A chart of lines over steps, from 0 to `last`, thinned where the points are many."""
    longest = max(len(points) for _, points, _, _ in lines)
    drawn = [
        Series(name, *_columns(_thinned(points, DRAWN_MOST)), color, dashed=dashed, marks=longest <= marks_most)
        for name, points, color, dashed in lines
    ]
    if longest > DRAWN_MOST:
        kept = "all" if longest <= CSV_MOST else f"{CSV_MOST:,}"
        caption += f" Of {longest:,} points {DRAWN_MOST} are drawn, the highest of each stretch; the CSV has {kept}."
    # From an early end to a name beside the chart there would be a line that looks like data.
    early = any(points[-1][0] < NEAR_END * last for _, points, _, _ in lines)
    y = y if isinstance(y, Axis) else Axis(y)
    values = (value for _, points, _, _ in lines for _, value in points if drawable(value, y.log))
    ends = [(step, value) for value in [*values][:1] for step in (0, last)]  # of the axis, at a height that fits anyway
    chart = line_chart(drawn, title=title, x=STEP, y=y, caption=caption.strip(), room=ends, names_below=early)
    whole = [(name, *_columns(_thinned(points, CSV_MOST))) for name, points, _, _ in lines]
    return replace(chart, csv=to_csv(STEP.label, whole))


def _thinned(points: Points, most: int) -> Points:
    """By position, since a run that went on may have a step twice."""
    kept = thin(range(len(points)), most=most, weight=lambda i: _finite_or_high(points[i][1]))
    return [points[i] for i in kept]


def _columns(points: Points) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def _finite_or_high(value: float) -> float:
    return value if math.isfinite(value) else math.inf
