"""Condition numbers over training: one line per site, per block or per run, over steps, with the loss beneath.

    section("Over training", *over_training([readings], losses={"my run": [(0, 2.3), (100, 1.9)]}))

A chart of thousands of steps draws the worst step of each stretch, says so, and keeps the others in its CSV.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .colors import CATEGORIES, SITES
from .downloads import to_csv
from .figures import Axis, Chart, Series, line_chart
from .readings import Readings
from .steps import thin

__all__ = ["RUNS_MOST", "alone", "below_truth", "over_training", "run_style"]

DRAWN_MOST, CSV_MOST = 200, 5000  # steps
BLOCKS_MOST = 5  # lines of single blocks in one chart
RUNS_MOST = 12  # six colours, plain and dashed
STEP = Axis("step", whole=True)
Points = Sequence[tuple[int, float]]


def run_style(position: int) -> tuple[str, bool]:
    """The colour of a run's lines, and whether they are dashed."""
    return CATEGORIES[position % len(CATEGORIES)], position >= len(CATEGORIES)


def alone(names: Sequence[str], runs: Sequence[Readings]) -> str:
    """Whose line it is where a chart of several runs has only one, which then bears no name."""
    return f" Measured in {names[0]} alone." if len(runs) > 1 and len(names) == 1 else ""


def below_truth(runs: Sequence[Readings], *sites: str) -> str:
    """What to know of lines at these sites where some of their points are lower bounds."""
    if not any(run.capped_sites & set(sites) for run in runs):
        return ""
    return " Some samples were at the ceiling: near it, the truth may lie above a line."


def over_training(runs: Sequence[Readings], *, losses: Mapping[str, Points]) -> list[Chart]:
    """The charts; none for runs of one step without a loss."""
    charts: list[Chart] = []
    if any(len(run.steps) > 1 for run in runs):
        charts = _of_one_run(runs[0]) if len(runs) == 1 else _of_runs(runs)
    lines = [
        (run.run, losses[run.run], *((SITES["+sa"], False) if len(runs) == 1 else run_style(position)))
        for position, run in enumerate(runs)
        if losses.get(run.run)
    ]
    if lines:
        caption = "From metrics.jsonl." + alone([name for name, *_ in lines], runs)
        charts.append(_over_steps(lines, title="Training loss", y="loss", caption=caption))
    return charts


def _of_one_run(run: Readings) -> list[Chart]:
    means = [
        (site, [(step, run.mean(step, site)) for step in run.steps], SITES[site], site in ("sa", "mlp"))
        for site in run.sites
    ]
    charts = []
    if means:
        caption = "Natural logarithm, mean over blocks." + below_truth([run], *run.sites)
        charts.append(_over_steps(means, title="log κ over training, by site", y="log κ", caption=caption))
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
        charts.append(_over_steps(blocks, title=f"log κ over training, {site}", y="log κ", caption=caption))
    return charts


def _of_runs(runs: Sequence[Readings]) -> list[Chart]:
    charts = []
    for site in SITES:
        lines = [
            (run.run, [(step, run.mean(step, site)) for step in run.steps], *run_style(position))
            for position, run in enumerate(runs)
            if site in run.sites
        ]
        if lines:
            title = f"log κ over training, {site}"
            caption = "Mean over blocks." + alone([name for name, *_ in lines], runs) + below_truth(runs, site)
            charts.append(_over_steps(lines, title=title, y="log κ", caption=caption))
    return charts


def _over_steps(lines: Sequence[tuple[str, Points, str, bool]], *, title: str, y: str, caption: str) -> Chart:
    """A chart of (name, points, colour, dashed), thinned where the points are many."""
    drawn = [
        Series(name, *_columns(_thinned(points, DRAWN_MOST)), color, dashed=dashed, marks=len(points) <= 2)
        for name, points, color, dashed in lines
    ]
    longest = max(len(points) for _, points, _, _ in lines)
    if longest > DRAWN_MOST:
        kept = "all" if longest <= CSV_MOST else f"{CSV_MOST:,}"
        caption += f" Of {longest:,} steps {DRAWN_MOST} are drawn, the highest of each stretch; the CSV has {kept}."
    chart = line_chart(drawn, title=title, x=STEP, y=y, caption=caption)
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
