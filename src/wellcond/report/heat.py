"""Heat maps: a table of blocks and sites whose cells are coloured, with the number in each.

    chart = heat_map([frame], [1000], rows=["blocks.0", "blocks.1"], columns=["sa", "+sa"], title="…", value="log κ")

A frame is what one step shows, one `Reading` per cell, row by row. Colour is never alone: every cell has its number,
"≥" before one at the ceiling, "!" before one that leaves samples out, "NaN" and "0" where there is none, "–" where
nothing was measured. With several frames the slider of the section moves through them, over one scale of colours.
"""

import csv
import io
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from wellcond.words import LEFT_OUT

from .axes import LARGEST
from .colors import HEAT_LEVELS
from .figures import CHARACTER, WIDTH, Chart, standalone
from .markup import Html, csv_number, join, tag

__all__ = ["NOTHING", "Reading", "bounds_of", "heat_map"]

TOP, TALL, LOW, GAP = 24, 24, 19, 2  # pixels: the head, a cell's height (of few rows, of many), between cells
MANY_ROWS = 24
LABEL_MOST = 20  # characters of a row's name; a longer one keeps its end, which tells blocks apart
LEGEND = 46


class Reading(NamedTuple):
    """One cell: its number (None: not measured), its status, and how many of its samples were at the ceiling."""

    value: float | None
    status: str = "ok"
    capped: float = 0
    samples: int = 0


NOTHING = Reading(None)


def heat_map(
    frames: Sequence[Sequence[Reading]],
    steps: Sequence[int],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    wide: Sequence[str] = (),
    title: str,
    value: str,
    caption: Any = "",
    bounds: tuple[float, float] | None = None,
) -> Chart:
    """A heat map of the last frame.

    Args:
        frames: one list of readings per step: first one for each of `wide`, then row by row.
        wide: rows above the others that have one cell over all columns.
        bounds: the values of the first and the last colour, where several maps share a scale.
    """
    cells = len(wide) + len(rows) * len(columns)
    for frame in frames:
        if len(frame) != cells:
            raise ValueError(f"the heat map {title!r} has {cells} cells, but a frame has {len(frame)}")
    if not frames or len(frames) != len(steps) or not cells:
        raise ValueError(f"the heat map {title!r} has no cells, or not one frame for each of its {len(steps)} steps")
    low, high = bounds or bounds_of(frames)
    written = [[_cell(reading, low, high) for reading in frame] for frame in frames]
    drawn, height = _draw(written[-1], rows, columns, wide, value, low, high)
    moving = ";".join(",".join(" ".join(cell) for cell in frame) for frame in written) if len(frames) > 1 else None
    drawing = tag(
        "svg",
        drawn,
        viewBox=f"0 0 {WIDTH} {height}",
        width=str(WIDTH),
        height=str(height),
        role="img",
        aria_label=f"{title}: {value} of {len(rows)} blocks at {', '.join([*wide, *columns])}",
        data_cells=moving,
    )
    return Chart(
        title=title,
        caption=caption,
        drawing=drawing,
        svg=standalone(title, drawn, height),
        csv=_csv(frames, steps, rows, columns, wide, value),
    )


def bounds_of(frames: Sequence[Sequence[Reading]]) -> tuple[float, float]:
    """The smallest and the largest number of all frames."""
    values = [r.value for frame in frames for r in frame if r.value is not None and _finite(r.value)]
    return (min(values), max(values)) if values else (0.0, 1.0)


def _finite(value: float) -> bool:
    return math.isfinite(value) and abs(value) <= LARGEST


def _cell(reading: Reading, low: float, high: float) -> tuple[str, str]:
    """The class that colours a cell, and the text in it. Neither holds a comma, a semicolon or a space."""
    if reading.value is None:
        return "none", "–"
    if not _finite(reading.value):
        return "bad", "0" if reading.status == "zero" else "NaN" if math.isnan(reading.value) else "inf"
    share = (reading.value - low) / (high - low) if high > low else 0.5
    level = min(HEAT_LEVELS - 1, max(0, int(share * HEAT_LEVELS)))
    mark = "≥" if reading.status == "ceiling" or reading.capped else "!" if reading.status in LEFT_OUT else ""
    text = f"{reading.value:.1f}" if abs(reading.value) < 1e4 else f"{reading.value:.0e}"
    return f"h{level}", mark + text.replace("-", "−")


def _draw(
    cells: list[tuple[str, str]],
    rows: Sequence[str],
    columns: Sequence[str],
    wide: Sequence[str],
    value: str,
    low: float,
    high: float,
) -> tuple[Html, int]:
    names = [*wide, *(_shortened(name) for name in rows)]
    left = 12 + CHARACTER * max(len(name) for name in names)
    width = (WIDTH - left) / max(1, len(columns))
    tall = TALL if len(names) <= MANY_ROWS else LOW
    parts: list[Html] = []
    place = iter(cells)
    for line, name in enumerate(names):
        y = TOP + line * tall
        full = name if line < len(wide) else rows[line - len(wide)]
        parts.append(tag("text", name, x=left - 8, y=y + tall / 2 + 4.5, text_anchor="end", class_="tick"))
        if line < len(wide):
            parts.append(_rectangle(next(place), full, left, y, WIDTH - left, tall))
            continue
        for index, column in enumerate(columns):
            parts.append(_rectangle(next(place), f"{full} {column}", left + index * width, y, width, tall))
    if rows:
        for index, column in enumerate(columns):
            at = left + (index + 0.5) * width
            parts.append(tag("text", column, x=at, y=15.0, text_anchor="middle", class_="title"))
    bottom = TOP + len(names) * tall
    parts.append(_legend(value, low, high, left, bottom))
    return join(parts), math.ceil(bottom + LEGEND)


def _rectangle(cell: tuple[str, str], name: str, x: float, y: float, width: float, height: float) -> Html:
    kind, text = cell
    shape = tag("rect", x=x + GAP / 2, y=y + GAP / 2, width=width - GAP, height=height - GAP, rx="3")
    label = tag("text", text, x=x + width / 2, y=y + height / 2 + 4.5, text_anchor="middle")
    return tag("g", tag("title", f"{name}: {text}"), shape, label, class_=f"cell {kind}")


def _legend(value: str, low: float, high: float, left: float, top: float) -> Html:
    """The colours from low to high, with the numbers at the ends."""
    width = (WIDTH - left) / HEAT_LEVELS
    parts = [tag("text", value, x=left - 8, y=top + 22.0, text_anchor="end", class_="tick")]
    for level in range(HEAT_LEVELS if high > low else 0):
        box = tag("rect", x=left + level * width, y=top + 12, width=width + 0.3, height=12.0)
        parts.append(tag("g", box, class_=f"h{level}"))
    if high > low:
        for text, at, anchor in ((low, left, "start"), (high, float(WIDTH), "end")):
            parts.append(tag("text", f"{text:.1f}", x=at, y=top + 39.0, text_anchor=anchor, class_="tick"))
    else:
        parts.append(tag("text", f"{low:.1f} everywhere", x=left, y=top + 22.0, class_="tick"))
    return join(parts)


def _shortened(name: str) -> str:
    return name if len(name) <= LABEL_MOST else "…" + name[1 - LABEL_MOST :]


def _csv(
    frames: Sequence[Sequence[Reading]],
    steps: Sequence[int],
    rows: Sequence[str],
    columns: Sequence[str],
    wide: Sequence[str],
    value: str,
) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["step", "block", "site", value, "status", "capped", "samples"])
    places = [("", site) for site in wide] + [(row, column) for row in rows for column in columns]
    for step, frame in zip(steps, frames, strict=True):
        for (block, site), r in zip(places, frame, strict=True):
            if r.value is not None:
                writer.writerow([step, block, site, csv_number(r.value), r.status, csv_number(r.capped), r.samples])
    return file.getvalue()
