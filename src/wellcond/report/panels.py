"""Several charts of the same lines next to each other in one drawing, with one legend below them all.

    svg = panels_svg([Panel(x="n", y=Axis("ms", log=True), lines=times), …], title="Cost", notes=["a: …"])

A line keeps its colour and its dashes from panel to panel, and need not be in every one.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .colors import CATEGORIES
from .figures import CHARACTER, HEIGHT, LINE, WIDTH, Axis, Label, Series, legend, legend_rows, line_chart, standalone
from .markup import join, tag

__all__ = ["Panel", "panels_svg"]

GAP = 24  # pixels between two panels


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart among others: its axes and its lines."""

    x: Axis | str
    y: Axis | str
    lines: Sequence[Series]


def panels_svg(panels: Sequence[Panel], *, title: str, notes: Sequence[str] = ()) -> str:
    """The panels as one SVG file, their legend below them, and below it `notes`, each from a new line.

    How a line looks is taken from the first panel that has one of its name. Raises ValueError for no panels, and where
    `line_chart` does.
    """
    if not panels:
        raise ValueError(f"the drawing {title!r} has no panels; leave it out, or say that nothing was measured")
    width = len(panels) * WIDTH + (len(panels) - 1) * GAP
    looks: dict[str, Series] = {}
    parts, said = [], list(notes)
    for index, panel in enumerate(panels):
        for line in panel.lines:
            looks.setdefault(line.name, replace(line, color=line.color or CATEGORIES[len(looks) % len(CATEGORIES)]))
        lines = [replace(looks[line.name], x=line.x, y=line.y) for line in panel.lines]
        chart = line_chart(lines, title=title, x=panel.x, y=panel.y, named=False)
        said += [note for note in chart.notes if note not in said]
        parts.append(tag("g", chart.drawing, transform=f"translate({index * (WIDTH + GAP)} 0)"))
    labels = [Label(line.name, line.color, 0.0, 0.0, line.dashed) for line in looks.values()]
    height = HEIGHT + 6
    parts.append(legend(labels, top=height, width=width))
    height += LINE * len(legend_rows(labels, width)) + 8
    for line in (line for note in said for line in textwrap.wrap(note, int(width / CHARACTER))):
        height += LINE
        parts.append(tag("text", line, x="4", y=str(height), class_="tick"))
    return standalone(title, join(parts), height + 6, width)
