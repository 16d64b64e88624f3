"""A slider over training steps, and line charts that it redraws.

    shown = thin(readings.steps, most=100, weight=readings.worst)
    chart = stepped_lines(lines, shown, title="log κ by block", x=Axis("block", whole=True), y="log κ", …)
    section("By block", slider(shown), chart)          # one slider moves every stepped figure of its section

Without a script there is no slider, and the figures show the last step. The y axis has room for all steps, so that a
reader sees the lines move and not the axis.
"""

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .figures import Axis, Chart, Series, line_chart
from .markup import Html, csv_number, tag

__all__ = ["SteppedLine", "slider", "stepped_lines", "thin"]


MARKS_MOST = 24  # more points than these are drawn as a line alone


@dataclass(frozen=True, kw_only=True)
class SteppedLine:
    """One line at every step: `frames[k][i]` is its value at step k and place i, None where nothing was measured."""

    name: str
    frames: Sequence[Sequence[float | None]]
    color: str = ""
    dashed: bool = False


def thin(steps: Sequence[int], *, most: int, weight: Callable[[int], float]) -> list[int]:
    """At most `most` of the steps: the first, the last, and of each stretch between them the one of largest weight.

    Evenly spaced ones would miss the one step at which everything went wrong, and people look for that one.
    """
    if len(steps) <= most:
        return list(steps)
    assert most >= 3, "the first, the last, and something between"
    inner, kept = steps[1:-1], [steps[0]]
    for part in range(most - 2):
        stretch = inner[part * len(inner) // (most - 2) : (part + 1) * len(inner) // (most - 2)]
        kept.append(max(stretch, key=weight))
    return [*kept, steps[-1]]


def slider(steps: Sequence[int]) -> Html | None:
    """A slider that the script shows; None where there is nothing to slide over."""
    if len(steps) < 2:
        return None
    last = str(len(steps) - 1)
    control = tag("input", type="range", min="0", max=last, value=last, step="1", aria_label="training step")
    label = tag("label", "step ", tag("output", f"{steps[-1]:,}"))
    return tag("div", label, control, class_="stepper", hidden=True, data_steps=json.dumps(list(steps)))


def stepped_lines(
    lines: Sequence[SteppedLine],
    steps: Sequence[int],
    *,
    places: Sequence[tuple[int, str]],
    title: str,
    x: Axis,
    y: Axis | str,
    caption: Any = "",
) -> Chart:
    """A line chart of the last step that the slider of its section moves through all of `steps`.

    Args:
        places: the position on the x axis and the name of each point.
    """
    xs = [place for place, _ in places]
    frames = [[[_short(value) for value in line.frames[k]] for line in lines] for k in range(len(steps))]
    moving = {
        "x": xs,
        "header": [x.label, *(line.name for line in lines)],
        "frames": frames,
        "marks": len(xs) <= MARKS_MOST,
    }
    chart = line_chart(
        [_series(line, xs) for line in lines],
        title=title,
        x=x,
        y=y,
        caption=caption,
        room=[
            (place, value)
            for line in lines
            for frame in line.frames
            for place, value in zip(xs, frame, strict=True)
            if value is not None
        ],
        names_below=True,
        attributes={"data_moving": json.dumps(moving, separators=(",", ":"))},
    )
    return replace(chart, csv=_csv(lines, steps, places, x.label))


def _series(line: SteppedLine, xs: Sequence[int]) -> Series:
    """The last step. A place without a measurement is passed over; one with NaN is a gap in the line."""
    points = [(x, value) for x, value in zip(xs, line.frames[-1], strict=True) if value is not None]
    points = points or [(xs[0], math.nan)]
    x, y = zip(*points, strict=True)
    return Series(line.name, x, y, line.color, marks=len(xs) <= MARKS_MOST, dashed=line.dashed)


def _short(value: float | None) -> float | str | None:
    """null is passed over by the script, and text is a gap."""
    return value if value is None else round(value, 3) if math.isfinite(value) else "NaN"


def _csv(lines: Sequence[SteppedLine], steps: Sequence[int], places: Sequence[tuple[int, str]], label: str) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["step", label, "name", *(line.name for line in lines)])
    for k, step in enumerate(steps):
        for i, (place, name) in enumerate(places):
            writer.writerow([step, place, name, *(csv_number(line.frames[k][i]) for line in lines)])
    return file.getvalue()
