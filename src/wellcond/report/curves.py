"""The page of a run that no probe has watched: its losses and accuracies, what happened to it, and how to see more.

    report_curves("runs/a")                   # metrics.jsonl and config.json become runs/a/report.html

A run with a probe has a richer page (runs.py).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wellcond.environment import own_version
from wellcond.records import read_json, read_rows

from .downloads import to_csv
from .figures import Axis, Chart, Series, line_chart
from .page import Page, bullets, code_block, note, section, side_by_side, tiles
from .steps import thin

__all__ = ["curves_page", "report_curves"]

DRAWN_MOST = 200  # points of one line; the CSV has them all
MARKS_MOST = 24  # more points than these are drawn as a line alone
LEAD = "How the training went, from the rows in metrics.jsonl."
LINES = {
    "Loss": ("loss", (("training", "train", "loss"), ("validation", "val", "loss"))),
    "Accuracy": ("share right", (("top-1", "val", "top1"), ("top-5", "val", "top5"))),
    "Learning rate": ("learning rate", (("learning rate", "train", "lr"),)),
}
"""Title → the axis, and (name of the line, split of its rows, field)."""
Rows = Sequence[Mapping[str, Any]]
Points = list[tuple[int, float]]


def report_curves(folder: str | Path, output: Path | None = None) -> Path:
    """Write the page of a run's folder, there or to `output`; its path. ValueError where there are no rows yet."""
    folder = Path(folder)
    file = folder / "metrics.jsonl"
    rows = read_rows(file) if file.exists() else []
    if not rows:
        raise ValueError(f"{file} has no rows yet; there is nothing to draw")
    known = folder / "config.json"
    config = read_json(known).get("config", {}) if known.exists() else {}
    return curves_page(rows, config, name=folder.resolve().name).write(output or folder / "report.html")


def curves_page(rows: Rows, config: Mapping[str, Any], *, name: str) -> Page:
    """The page, from the rows of metrics.jsonl and the run's settings; the latter may be unknown."""
    written = f"Written by wellcond {own_version()} on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC."
    model = config.get("model")
    page = Page(f"Training of {model}" if model else f"The run {name}", LEAD, footer=[written])
    page.add(_tiles(rows))
    events = [f"Step {row.get('step', '?')}: {row.get('event')}" for row in rows if row.get("split") == "event"]
    if events:
        page.add(note("What happened", bullets(*events)))
    charts = [chart for title in LINES if (chart := _chart(rows, title)) is not None]
    page.add(section("Over training", side_by_side(*charts)) if charts else "No step has been logged.")
    page.add(_more(config, name))
    return page


def _tiles(rows: Rows) -> Any:
    found = [("steps", f"{max(int(row.get('step', 0)) for row in rows):,}", "the last with a row")]
    for title, split, field, best in (
        ("training loss", "train", "loss", min),
        ("validation loss", "val", "loss", min),
        ("top-1", "val", "top1", max),
    ):
        points = _points(rows, split, field)
        finite = [value for _, value in points if math.isfinite(value)]
        if points:
            shown = "{:.1%}".format if field == "top1" else "{:.4g}".format
            found.append(
                (title, shown(points[-1][1]), f"at the end; the best was {shown(best(finite))}" if finite else "")
            )
    return tiles(*found)


def _chart(rows: Rows, title: str) -> Chart | None:
    label, lines = LINES[title]
    whole = [(name, points) for name, split, field in lines if (points := _points(rows, split, field))]
    if not whole:
        return None
    series = [Series(name, *_columns(_thinned(points)), marks=len(points) <= MARKS_MOST) for name, points in whole]
    longest = max(len(points) for _, points in whole)
    caption = ""
    if longest > DRAWN_MOST:
        caption = f"Of {longest:,} points {DRAWN_MOST} are drawn, the highest of each stretch; the CSV has all."
    step = Axis("step", whole=True)
    chart = line_chart(series, title=title, x=step, y=label, caption=caption)
    return replace(chart, csv=to_csv(step.label, [(name, *_columns(points)) for name, points in whole]))


def _points(rows: Rows, split: str, field: str) -> Points:
    found = ((row.get("step"), row.get(field)) for row in rows if row.get("split") == split)
    return [(step, float(y)) for step, y in found if isinstance(step, int) and isinstance(y, int | float)]


def _thinned(points: Points) -> Points:
    """By position, since a run that went back has a step twice."""
    kept = thin(range(len(points)), most=DRAWN_MOST, weight=lambda i: _or_high(points[i][1]))
    return [points[i] for i in kept]


def _or_high(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _columns(points: Iterable[tuple[int, float]]) -> tuple[list[int], list[float]]:
    points = list(points)
    return [step for step, _ in points], [value for _, value in points]


def _more(config: Mapping[str, Any], name: str) -> Any:
    """How to switch the probe on: in another folder, since it is another configuration."""
    recipe = config.get("recipe") or "RECIPE"
    return section(
        "Condition numbers",
        "This run was trained without a probe: nothing is known of how well-conditioned its blocks were. With "
        "probe_every the same command measures them as it trains, and its page shows them, block by block:",
        code_block(f"wellcond train {recipe} … --set probe_every=100 --output runs/{name}-probed"),
    )
