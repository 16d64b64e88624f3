"""The names of a chart's lines: at the lines' ends where they fit, in rows below the chart where they do not."""

from typing import NamedTuple

from .markup import Html, join, tag

__all__ = ["CHARACTER", "DASHES", "FONT", "LINE", "Label", "legend", "legend_rows", "names_at_ends"]

FONT, CHARACTER = 13, 7.2  # pixels: the size of the letters, and about how wide one is
DASHES = ";stroke-dasharray:5 4"
LINE = 16  # from one label to the next


class Label(NamedTuple):
    """A line's name and colour, and the point in pixels where the line ends."""

    name: str
    color: str
    x: float
    y: float
    dashed: bool = False


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
