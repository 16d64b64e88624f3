"""Bars in groups: one group per data set, one bar per arm, an interval on each, and a mark where another result lies.

    bars = [Bar(name="both skips", value=87.1, low=86.8, high=87.4), …]
    chart = bar_chart({"CIFAR-10": bars}, title="Without skips", y="top-1, %")

A value that cannot be drawn (NaN, infinite) has no bar, is named below the chart and stays in the CSV. An interval that
is infinite, as of a single run, is not drawn.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .axes import Scale
from .colors import CATEGORIES
from .figures import CHARACTER, HEIGHT, LINE, TOP, WIDTH, Chart, Label, legend, legend_rows, standalone
from .markup import Html, csv_number, join, tag

__all__ = ["Bar", "bar_chart"]

GAP = 0.35  # between groups, in parts of a group


@dataclass(frozen=True, kw_only=True)
class Bar:
    name: str
    value: float
    low: float = -math.inf
    high: float = math.inf
    mark: float | None = None
    """Where someone else's result lies."""


def bar_chart(
    groups: Mapping[str, Sequence[Bar]],
    *,
    title: str,
    y: str,
    mark: str = "",
    caption: Any = "",
    limits: tuple[float, float] | None = None,
) -> Chart:
    """Bars of one name have one colour in all groups.

    Args:
        mark: what the marks are, for the legend.
        limits: what the axis does not go beyond, e.g. 0 and 100 for a percentage.

    Raises ValueError for no bars, and for two bars of one name in a group.
    """
    names = list(dict.fromkeys(bar.name for bars in groups.values() for bar in bars))
    if not names:
        raise ValueError(f"the chart {title!r} has no bars; leave it out, or say in words that nothing was measured")
    for group, bars in groups.items():
        if len({bar.name for bar in bars}) < len(bars):
            raise ValueError(f"two bars of {group!r} in {title!r} have the same name")
    colors = {name: CATEGORIES[place % len(CATEGORIES)] for place, name in enumerate(names)}
    marked = any(bar.mark is not None for bars in groups.values() for bar in bars)
    labels = [Label(name, colors[name], 0.0, 0.0, False) for name in names]
    if marked:
        labels.append(Label(mark or "reference", "ink", 0.0, 0.0, False))
    bottom = HEIGHT - 30
    scale = _scale(groups, limits, bottom)
    drawn = join(_axis(scale, y, bottom), _groups(groups, names, colors, scale, bottom))
    drawn = join(drawn, legend(labels, top=HEIGHT, width=WIDTH))
    height = HEIGHT + len(legend_rows(labels, WIDTH)) * LINE + 6
    size = {"viewBox": f"0 0 {WIDTH} {height}", "width": str(WIDTH), "height": str(height)}
    about = f"{title}: {y}; groups: {', '.join(groups)}; bars: {', '.join(names)}"
    missing = [f"{group}, {bar.name}" for group, bars in groups.items() for bar in bars if not math.isfinite(bar.value)]
    return Chart(
        title=title,
        caption=caption,
        drawing=tag("svg", drawn, **size, role="img", aria_label=about),
        svg=standalone(title, drawn, height),
        csv=_csv(groups, y),
        notes=(f"Not drawn, since not finite: {'; '.join(missing)}.",) if missing else (),
    )


def _scale(groups: Mapping[str, Sequence[Bar]], limits: tuple[float, float] | None, bottom: float) -> Scale:
    values = [0.0]
    for bar in (bar for bars in groups.values() for bar in bars):
        values += [v for v in (bar.value, bar.low, bar.high, bar.mark) if v is not None and math.isfinite(v)]
    if limits is not None:
        values = [min(max(value, limits[0]), limits[1]) for value in values]
    return Scale.fit(values, log=False, start=bottom, end=TOP + 14.0)


def _axis(scale: Scale, y: str, bottom: float) -> Html:
    parts = [tag("text", y, x=4.0, y=15.0, class_="title")]
    left = _left(scale)
    for value, label in scale.ticks():
        at = scale(value)
        parts.append(tag("line", x1=left, x2=float(WIDTH), y1=at, y2=at, class_="rule"))
        parts.append(tag("text", label, x=left - 8, y=at + 4.5, text_anchor="end", class_="tick"))
    return join(parts)


def _left(scale: Scale) -> float:
    return 16 + CHARACTER * max((len(label) for _, label in scale.ticks()), default=1)


def _groups(
    groups: Mapping[str, Sequence[Bar]], names: Sequence[str], colors: Mapping[str, str], scale: Scale, bottom: float
) -> Html:
    left = _left(scale)
    wide = (WIDTH - left) / len(groups)
    each = wide * (1 - GAP) / len(names)
    parts = []
    for place, (group, bars) in enumerate(groups.items()):
        start = left + place * wide + wide * GAP / 2
        for bar in bars:
            x = start + names.index(bar.name) * each
            parts.append(_bar(bar, group, x, each, colors[bar.name], scale))
        middle = left + (place + 0.5) * wide
        parts.append(tag("text", group, x=middle, y=bottom + 19.0, text_anchor="middle", class_="title"))
    return join(parts)


def _bar(bar: Bar, group: str, x: float, each: float, color: str, scale: Scale) -> Html:
    if not math.isfinite(bar.value):
        return Html("")
    inside, middle = each * 0.84, x + each * 0.42
    top, foot = sorted((scale(bar.value), scale(max(0.0, scale.low))))
    parts = [
        tag("title", f"{group}, {bar.name}: {bar.value:.2f}"),
        tag("rect", x=x, y=top, width=inside, height=max(0.5, foot - top), rx="2", style=f"fill:var(--{color})"),
    ]
    above = top
    if math.isfinite(bar.low) and math.isfinite(bar.high):
        low, high = (scale(min(max(value, scale.low), scale.high)) for value in (bar.low, bar.high))
        above = min(above, high)
        stroke = "stroke:var(--ink);stroke-width:1.5"
        parts.append(tag("line", x1=middle, x2=middle, y1=low, y2=high, style=stroke))
        parts += [tag("line", x1=middle - 5, x2=middle + 5, y1=at, y2=at, style=stroke) for at in (low, high)]
    if bar.mark is not None and scale.low <= bar.mark <= scale.high:
        at = scale(bar.mark)
        dashes = "stroke:var(--ink);stroke-width:2;stroke-dasharray:4 3"
        parts.append(tag("line", x1=x - each * 0.06, x2=x + inside + each * 0.06, y1=at, y2=at, style=dashes))
    parts.append(tag("text", f"{bar.value:.1f}", x=middle, y=above - 6, text_anchor="middle"))
    return tag("g", parts)


def _csv(groups: Mapping[str, Sequence[Bar]], y: str) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["group", "bar", y, "low", "high", "mark"])
    for group, bars in groups.items():
        for bar in bars:
            writer.writerow([group, bar.name, *(csv_number(v) for v in (bar.value, bar.low, bar.high, bar.mark))])
    return file.getvalue()
