"""Line charts as SVG, drawn by hand: crisp at any size, a few kilobytes each, coloured by the page they stand in.

    chart = line_chart(
        [Series("plain", range(1, 197), plain), Series("ε = 0.95", range(1, 197), grayed, color="r1")],
        title="Singular values", x="index", y=Axis("σ / σmax", log=True), caption="What to see in it.",
    )
    chart.svg, chart.csv     # the two downloads, complete files

What cannot be drawn (NaN, an infinity, a zero on a logarithmic axis) leaves a gap, is counted under the chart, and
stays in the CSV. A series without any values, or of unequal lengths, is a mistake and raises.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .axes import LARGEST, Scale, drawable
from .colors import CATEGORIES, RAMP, heat_style, resolve
from .markup import Html, attribute_number, data_link, file_stem, join, tag, to_csv

__all__ = [
    "CHARACTER", "HEIGHT", "LINE", "WIDTH", "Axis", "Chart", "Label", "Series", "legend", "legend_rows", "line_chart",
    "ordered_colors", "standalone",
]  # fmt: skip

FONT, CHARACTER = 13, 7.2  # pixels: the size of the letters, and about how wide one is
DASHES = ";stroke-dasharray:5 4"
LINE = 16  # from one label to the next
WIDTH, HEIGHT = 420, 310
TOP, BOTTOM = 30, 46
LABELS_MOST, LABEL_LONGEST = 9, 16  # more or longer names than these go below the chart instead of to the lines' ends

SVG_STYLE = (
    f"svg text{{font:{FONT}px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:var(--ink)}}"
    "svg .tick{fill:var(--muted)}svg .title{font-weight:600}svg .rule{stroke:var(--rule)}"
    "svg .line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}"
    "svg .none rect{fill:none}svg .none text{fill:var(--muted)}"
    "svg .bad rect{fill:none;stroke:var(--c6);stroke-width:2;stroke-dasharray:4 3}svg .bad text{font-weight:700}"
    + heat_style()
)


@dataclass(frozen=True)
class Axis:
    """The name of an axis, with its unit; whether it is logarithmic, runs from large to small, or counts things."""

    label: str
    log: bool = False
    reverse: bool = False
    whole: bool = False
    """Ticks at whole numbers alone: there is no block 2.5."""
    base: int = 10
    """Of the powers at the ticks of a logarithmic axis: lengths that double are read off powers of 2."""


@dataclass(frozen=True)
class Series:
    """One line: its name and its points."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: str = ""
    """A name of `colors.COLORS`; empty takes the next category."""
    marks: bool = field(default=False, kw_only=True)
    """Draw the points too, where they are few."""
    dashed: bool = field(default=False, kw_only=True)
    """A second mark beside the colour, where colours repeat or lines come in pairs."""


class Label(NamedTuple):
    """A line's name and colour, and the point in pixels where the line ends."""

    name: str
    color: str
    x: float
    y: float
    dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A drawn chart: put it into a page, or take its files."""

    title: str
    caption: Any
    drawing: Html
    svg: str
    csv: str
    notes: tuple[str, ...] = ()

    def __html__(self) -> str:
        stem = file_stem(self.title)
        links = tag(
            "span",
            data_link("SVG", f"{stem}.svg", "image/svg+xml", self.svg),
            data_link("CSV", f"{stem}.csv", "text/csv", self.csv),
            class_="downloads",
        )
        notes = [tag("p", text, class_="gap") for text in self.notes]
        head = tag("div", tag("h3", self.title), links, class_="figure-head")
        caption = tag("figcaption", self.caption, notes) if self.caption or notes else None
        return tag("figure", head, self.drawing, caption, class_="chart", id=stem)


def ordered_colors(count: int) -> list[str]:
    """Names of `count` colours for an ordered quantity."""
    if not 1 <= count <= len(RAMP):
        raise ValueError(f"there are 1 to {len(RAMP)} ordered colours, not {count}; draw fewer series in one chart")
    return list(RAMP[:count])


def line_chart(
    series: Iterable[Series],
    *,
    title: str,
    x: Axis | str,
    y: Axis | str,
    caption: Any = "",
    room: Iterable[tuple[float, float]] = (),
    names_below: bool = False,
    named: bool = True,
    attributes: Mapping[str, str] | None = None,
) -> Chart:
    """Lines over common axes, each named where it ends.

    Args:
        room: further points that the axes have to have room for, since a script will draw them later.
        names_below: name the lines below the chart, also where there is room at their ends.
        named: without it no line is named, since one legend stands for several charts (panels.py).
        attributes: attributes of the drawing, for a script.

    Raises ValueError for no series, a series without points, x and y of unequal length, and two series of one name.
    """
    lines = [_checked(line, index, title) for index, line in enumerate(series)]
    if not lines:
        raise ValueError(f"the chart {title!r} has no series; leave it out, or say in words that nothing was measured")
    names = [line.name for line in lines]
    if len(set(names)) < len(names):
        raise ValueError(
            f"two series of the chart {title!r} have the same name, and a reader could not tell them apart"
        )
    x, y = (axis if isinstance(axis, Axis) else Axis(axis) for axis in (x, y))
    layout = _Layout.of(lines, x, y, room, names_below, named)
    drawn, notes = _draw(lines, x, y, layout)
    size = {"viewBox": f"0 0 {WIDTH} {layout.height}", "width": str(WIDTH), "height": str(layout.height)}
    label = f"{title}: {y.label} against {x.label}; lines: {', '.join(names)}"
    extra = {"data_scales": json.dumps(layout.describe()), **(attributes or {})}
    drawing = tag("svg", drawn, **size, role="img", aria_label=label, tabindex="0", **extra)
    return Chart(
        title=title,
        caption=caption,
        drawing=drawing,
        svg=standalone(title, drawn, layout.height),
        csv=to_csv(x.label, [(line.name, line.x, line.y) for line in lines]),
        notes=tuple(notes),
    )


def _checked(line: Series, index: int, title: str) -> Series:
    xs, ys = [float(value) for value in line.x], [float(value) for value in line.y]
    if len(xs) != len(ys):
        raise ValueError(f"the series {line.name!r} of {title!r} has {len(xs)} x values, but {len(ys)} y values")
    if not xs:
        raise ValueError(
            f"the series {line.name!r} of {title!r} is empty; leave it out, or say that nothing was measured"
        )
    color = line.color or CATEGORIES[index % len(CATEGORIES)]
    return Series(line.name, xs, ys, color, marks=line.marks, dashed=line.dashed)


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Where the plot's rectangle lies, and whether the names stand beside it or below."""

    x: Scale
    y: Scale
    below: bool
    beside: bool
    height: int

    @classmethod
    def of(
        cls,
        lines: list[Series],
        x: Axis,
        y: Axis,
        room: Iterable[tuple[float, float]],
        names_below: bool,
        named: bool,
    ) -> "_Layout":
        longest = max(len(line.name) for line in lines)
        named = named and len(lines) > 1  # the title says what a line alone is
        below = named and (names_below or len(lines) > LABELS_MOST or longest > LABEL_LONGEST)
        beside = named and not below
        right = min(WIDTH * 0.4, 26 + CHARACTER * longest) if beside else 14
        places = [*room, *((a, b) for line in lines for a, b in zip(line.x, line.y, strict=True))]
        visible = [(a, b) for a, b in places if drawable(a, x.log) and drawable(b, y.log)]
        bottom = HEIGHT - BOTTOM
        start, end = (TOP, bottom) if y.reverse else (bottom, TOP)
        down = Scale.fit([b for _, b in visible], log=y.log, start=start, end=end, padding=0.04)
        left = 16 + CHARACTER * max((len(label) for _, label in down.ticks(base=y.base)), default=1)
        start, end = (WIDTH - right, left) if x.reverse else (left, WIDTH - right)
        across = Scale.fit([a for a, _ in visible], log=x.log, start=start, end=end)
        rows = len(legend_rows([_label(line) for line in lines], WIDTH)) if below else 0
        height = HEIGHT + rows * LINE + (6 if rows else 0)
        return cls(x=across, y=down, below=below, beside=beside, height=height)

    def describe(self) -> dict[str, Any]:
        """For the script that reads values off the chart."""
        return {
            name: {"log": scale.log, "values": [scale.low, scale.high], "pixels": [scale.start, scale.end]}
            for name, scale in (("x", self.x), ("y", self.y))
        }


def _draw(lines: list[Series], x: Axis, y: Axis, layout: _Layout) -> tuple[Html, list[str]]:
    across, down = layout.x, layout.y
    left, right = sorted((across.start, across.end))
    top, bottom = sorted((down.start, down.end))
    middle = (left + right) / 2
    parts = [tag("text", y.label, x=4.0, y=15.0, class_="title")]
    for value, label in down.ticks(base=y.base):
        at = down(value)
        parts.append(tag("line", x1=left, x2=right, y1=at, y2=at, class_="rule"))
        parts.append(tag("text", label, x=left - 8, y=at + 4.5, text_anchor="end", class_="tick"))
    for value, label in across.ticks(base=x.base):
        if x.whole and not math.isclose(value, round(value), abs_tol=1e-9):
            continue
        at, label = across(value), f"{value:.0f}" if x.whole and abs(value) < 1e5 else label
        parts.append(tag("line", x1=at, x2=at, y1=bottom, y2=bottom + 5, class_="rule"))
        inside = min(at, WIDTH - 1 - CHARACTER * len(label) / 2)
        parts.append(tag("text", label, x=inside, y=bottom + 19, text_anchor="middle", class_="tick"))
    parts.append(tag("text", x.label, x=middle, y=HEIGHT - 6.0, text_anchor="middle", class_="title"))
    parts.append(tag("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="rule"))
    notes, ends = [], []
    for line in lines:
        pieces, lost = _pieces(line, x, y, layout)
        if lost:
            notes.append(_note(line, lost))
        parts.append(_path(line, pieces))
        if pieces:
            ends.append(_label(line, *max(point for piece in pieces for point in piece)))
    if not ends:
        at = {"x": middle, "y": (top + bottom) / 2, "text_anchor": "middle", "class_": "tick"}
        parts.append(tag("text", "no value can be drawn", **at))
    if layout.below:
        parts.append(legend([_label(line) for line in lines], top=HEIGHT, width=WIDTH))
    elif layout.beside:
        parts.append(names_at_ends(ends, right=right, top=top, bottom=bottom))
    return join(parts), notes


def _label(line: Series, x: float = 0.0, y: float = 0.0) -> Label:
    return Label(line.name, line.color, x, y, line.dashed)


def _pieces(
    line: Series, x: Axis, y: Axis, layout: _Layout
) -> tuple[list[list[tuple[float, float]]], list[tuple[float, float]]]:
    """The line's points in pixels, cut where one cannot be drawn, and those that cannot."""
    pieces: list[list[tuple[float, float]]] = [[]]
    lost = []
    for a, b in zip(line.x, line.y, strict=True):
        if drawable(a, x.log) and drawable(b, y.log):
            pieces[-1].append((layout.x(a), layout.y(b)))
        else:
            lost.append((a, b))
            pieces.append([])
    return [piece for piece in pieces if piece], lost


def _note(line: Series, lost: list[tuple[float, float]]) -> str:
    kinds = Counter(_kind(a) or _kind(b) or "without a place on a logarithmic axis" for a, b in lost)
    found = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return f"{line.name}: {len(lost)} of {len(line.x)} points are not drawn ({found})."


def _kind(value: float) -> str:
    if math.isfinite(value):
        return "" if abs(value) <= LARGEST else "too large"
    return "NaN" if math.isnan(value) else "infinite"


def _path(line: Series, pieces: list[list[tuple[float, float]]]) -> Html:
    stroke = f"stroke:var(--{line.color}){DASHES if line.dashed else ''}"
    written = "".join(
        "M" + "L".join(f"{attribute_number(a)},{attribute_number(b)}" for a, b in piece) for piece in pieces
    )
    dots = [point for piece in pieces for point in piece if line.marks or len(piece) == 1]
    marks = [tag("circle", cx=a, cy=b, r=3.0, style=f"fill:var(--{line.color})") for a, b in dots]
    # Even if empty: the script counts them. The group is what it draws anew.
    return tag("g", tag("path", d=written, class_="line", style=stroke), marks)


def standalone(title: str, drawn: Html, height: int, width: int = WIDTH) -> str:
    """The chart as a file of its own: with a title, a background and the light colours."""
    head = 26
    content = join(
        tag("title", title),
        Html(f"<style>{SVG_STYLE}</style>"),
        tag(
            "rect",
            x="-8",
            y=str(-head - 8),
            width=str(width + 16),
            height=str(height + head + 16),
            style="fill:var(--paper)",
        ),
        tag("text", title, x="4", y="-12", style="font-weight:600;font-size:15px"),
        drawn,
    )
    size = {
        "viewBox": f"-8 {-head - 8} {width + 16} {height + head + 16}",
        "width": str(width + 16),
        "height": str(height + head + 16),
    }
    return resolve(tag("svg", content, xmlns="http://www.w3.org/2000/svg", **size)) + "\n"


# ---- the names of lines: at their ends where they fit, in rows below the chart where they do not


def names_at_ends(labels: list[Label], *, right: float, top: float, bottom: float) -> Html:
    """Each name to the right of `right`, at the height of its line's end, moved apart where two would overlap."""
    labels = sorted(labels, key=lambda label: label.y)
    places: list[float] = []
    for label in labels:
        places.append(max(label.y, places[-1] + LINE if places else top))
    limit = bottom
    for index in reversed(range(len(places))):  # push back up what ran out below
        places[index] = min(places[index], limit)
        limit = places[index] - LINE
    parts = []
    for label, place in zip(labels, places, strict=True):
        color, start = f"var(--{label.color})", right + 18
        leader = {"x1": label.x, "y1": label.y, "x2": start - 4, "y2": place}
        parts.append(tag("line", **leader, style=f"stroke:{color};opacity:.6"))
        parts.append(tag("circle", cx=label.x, cy=label.y, r=3.0, style=f"fill:{color}"))
        parts.append(tag("text", label.name, x=start, y=place + 4.5))
    return join(parts)


def legend_rows(labels: list[Label], width: float) -> list[list[tuple[Label, float]]]:
    """The names in as many rows as they need, each with its x."""
    rows: list[list[tuple[Label, float]]] = [[]]
    at = 4.0
    for label in labels:
        size = 40 + CHARACTER * len(label.name)
        if rows[-1] and at + size > width:
            rows.append([])
            at = 4.0
        rows[-1].append((label, at))
        at += size
    return rows


def legend(labels: list[Label], *, top: float, width: float) -> Html:
    """A stroke of each line's colour with its name, from `top` downwards."""
    parts = []
    for index, row in enumerate(legend_rows(labels, width)):
        y = top + 14.0 + index * LINE
        for label, at in row:
            stroke = {"x1": at, "x2": at + 18, "y1": y - 4.5, "y2": y - 4.5}
            parts.append(
                tag(
                    "line",
                    **stroke,
                    style=f"stroke:var(--{label.color});stroke-width:2{DASHES if label.dashed else ''}",
                )
            )
            parts.append(tag("text", label.name, x=at + 24, y=y))
    return join(parts)
