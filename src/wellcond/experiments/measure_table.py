"""log κ of a model in the terminal: blocks × sites, coloured from harmless to hopeless.

    console.print(kappa_table(rows, untrained_rows), *legend(console, rows, untrained_rows))

Colours follow rich: none where there is no terminal, none with NO_COLOR. The marks say the same without them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

__all__ = ["kappa_table", "legend"]

SITES = ("tokens", "embed", "in", "sa", "+sa", "mlp", "+mlp")
CEILING = 15.9  # ln κ beyond which float32 cannot see
SCALE = (
    (0x2E, 0x9E, 0x5B),
    (0xB8, 0x96, 0x0B),
    (0xD8, 0x3A, 0x34),
)  # green, yellow, red: legible on black and on white

Row = Mapping[str, Any]


def kappa_table(rows: Sequence[Row], untrained: Sequence[Row] | None = None) -> Table:
    """One line per block, one column per site; in brackets beside each number that of the untrained model, if given."""
    kappas, starts = _by_place(rows), _by_place(untrained or ())
    sites = [site for site in SITES if any(place[2] == site for place in kappas)]
    blocks = list(dict.fromkeys(place[:2] for place in kappas))
    table = Table("block", pad_edge=False)
    for site in sites:
        table.add_column(Text(site), justify="right")
    for number, (index, block) in enumerate(blocks):
        cells = [_cell(kappas.get((index, block, site))) for site in sites]
        if untrained is not None:
            cells = [_beside(c, _cell(starts.get((index, block, s)))) for c, s in zip(cells, sites, strict=True)]
        table.add_row(Text(block), *cells, end_section=number == len(blocks) - 1)
    if len(blocks) > 1:
        cells = [_mean(kappas, site) for site in sites]
        if untrained is not None:
            cells = [_beside(cell, _mean(starts, site)) for cell, site in zip(cells, sites, strict=True)]
        table.add_row("mean", *cells)
    return table


def _beside(cell: Text, start: Text) -> Text:
    return Text.assemble(cell, " (", start, ")")


def legend(console: Console, rows: Sequence[Row], untrained: Sequence[Row] | None = None) -> list[Text]:
    """What the table's colours, brackets and marks mean, as far as it has them."""
    lines = []
    if console.is_terminal and not console.no_color:
        colors = [Text(f" {value} ", Style(color=_color(value), reverse=True)) for value in (0, 4, 8, 12, 16)]
        lines.append(Text.assemble("log κ ", *colors))
    if untrained is not None:
        lines.append(Text("In brackets: the same model with random weights."))
    statuses = {row["status"] for row in [*rows, *(untrained or ())] if row["name"] == "log_kappa"}
    if "ceiling" in statuses:
        lines.append(Text("≥ some samples are beyond what the dtype can see, and count as that ceiling."))
    if statuses & {"non_finite", "zero"}:
        lines.append(Text("! some samples are NaN, infinite or all zero, and are left out."))
    return lines


def _by_place(rows: Iterable[Row]) -> dict[tuple[int, str, str], Row]:
    return {(row["index"], row["block"], row["site"]): row for row in rows if row["name"] == "log_kappa"}


def _cell(row: Row | None) -> Text:
    if row is None:
        return Text("–", style="dim")
    mark = {"ceiling": "≥", "non_finite": "!", "zero": "!"}.get(row["status"], "")
    if not math.isfinite(row["value"]):
        return Text(f"{mark}{row['status']}", style="bold red")
    return Text(f"{mark}{row['value']:.2f}", style=Style(color=_color(row["value"])))


def _mean(kappas: Mapping[tuple[int, str, str], Row], site: str) -> Text:
    rows = [row for place, row in kappas.items() if place[2] == site and math.isfinite(row["value"])]
    if not rows:
        return Text("–", style="dim")
    mean = sum(row["value"] for row in rows) / len(rows)
    mark = "≥" if any(row["status"] == "ceiling" for row in rows) else ""
    return Text(f"{mark}{mean:.2f}", style=Style(color=_color(mean)))


def _color(value: float) -> str:
    """Along the scale: its first colour at 0, its last at float32's ceiling and beyond."""
    place = min(max(value / CEILING, 0.0), 1.0) * (len(SCALE) - 1)
    left = min(int(place), len(SCALE) - 2)
    part = place - left
    mixed = [round(a + (b - a) * part) for a, b in zip(SCALE[left], SCALE[left + 1], strict=True)]
    return "#{:02x}{:02x}{:02x}".format(*mixed)
