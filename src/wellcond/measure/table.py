"""Show a model's log κ in the terminal: blocks × sites, coloured from green (well conditioned) to red.

    for table in kappa_tables(console, rows, untrained_rows):      # several if the terminal is narrow
        console.print(table)
    console.print(*legend(console, rows, untrained_rows))

Colours follow rich: there are none outside a terminal or with NO_COLOR. Numbers and marks say the same without them.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.style import Style
from rich.table import Table
from rich.text import Text

from wellcond.probe.table import lower_bounds, marks
from wellcond.words import SITES

__all__ = ["kappa_table", "kappa_tables", "legend"]

CEILING = 15.9  # the largest ln κ that float32 can resolve
SCALE = (
    (0x2E, 0x9E, 0x5B),
    (0xB8, 0x96, 0x0B),
    (0xD8, 0x3A, 0x34),
)  # green, yellow, red: legible on black and on white

Row = Mapping[str, Any]
Bands = Mapping[str, Mapping[str, Any]]  # group of models → site → where their values lie


def kappa_tables(
    console: Console, rows: Sequence[Row], untrained: Sequence[Row] | None = None, reference: Bands | None = None
) -> list[Table]:
    """Return `kappa_table` split by sites into as many parts as the console's width requires: no digit is cut off."""
    unlimited = console.options.update(width=10_000)
    tables, left = [], _sites(rows)
    while left:
        parts = [kappa_table(rows, untrained, reference, sites=left[:count]) for count in range(1, len(left) + 1)]
        widths = [Measurement.get(console, unlimited, part).maximum for part in parts]
        count = max(1, sum(width <= console.width for width in widths))  # at least one site, even if its lines wrap
        tables.append(parts[count - 1])
        left = left[count:]
    return tables


def kappa_table(
    rows: Sequence[Row],
    untrained: Sequence[Row] | None = None,
    reference: Bands | None = None,
    *,
    sites: Collection[str] | None = None,
) -> Table:
    """Return a table with a line per block and a column per site; the untrained model's numbers, if any, in brackets.

    The last lines, one for each of `reference`, show where other models lie.
    """
    kappas, starts = _Kappas(rows), _Kappas(untrained or ())
    sites = _sites(rows) if sites is None else sites
    blocks = list(dict.fromkeys(place[:2] for place in kappas.rows))
    table = Table(pad_edge=False)
    table.add_column("block", overflow="fold")  # wraps if even one site is too wide: nothing is cut off
    for site in sites:
        table.add_column(Text(site), justify="right", overflow="fold")

    def beside(cell: Text, start: Text) -> Text:
        return cell if untrained is None else Text.assemble(cell, " (", start, ")")

    for number, block in enumerate(blocks):
        cells = [beside(kappas.cell(*block, site), starts.cell(*block, site)) for site in sites]
        table.add_row(Text(block[1]), *cells, end_section=number == len(blocks) - 1)
    if len(blocks) > 1:
        means = (beside(kappas.mean(site), starts.mean(site)) for site in sites)
        table.add_row("mean", *means, end_section=bool(reference))
    for who, bands in (reference or {}).items():
        table.add_row(Text(who), *(Text(str(bands.get(site, "–")), style="dim") for site in sites), style="dim")
    return table


def legend(console: Console, rows: Sequence[Row], untrained: Sequence[Row] | None = None) -> list[Text]:
    """Explain the colours, brackets and marks that the table has."""
    lines = []
    if console.is_terminal and not console.no_color:
        colors = [Text(f" {value} ", Style(color=_color(value), reverse=True)) for value in (0, 4, 8, 12, 16)]
        lines.append(Text.assemble("log κ ", *colors))
    if untrained is not None:
        lines.append(Text("In brackets: the same model with random weights."))
    used = "".join(marks(kappas.rows.values(), kappas.bounds) for kappas in (_Kappas(rows), _Kappas(untrained or ())))
    if "≥" in used:
        lines.append(Text("≥ some samples are beyond what the dtype can resolve and count as that ceiling."))
    if "!" in used:
        lines.append(Text("! some samples are NaN, infinite or all zero and are left out."))
    return lines


def _sites(rows: Iterable[Row]) -> list[str]:
    found = {row["site"] for row in rows if row["name"] == "log_kappa"}
    return [site for site in SITES if site in found]


class _Kappas:
    """log κ by (index, block, site), and which of them are lower bounds."""

    def __init__(self, rows: Iterable[Row]) -> None:
        rows = list(rows)
        self.rows = {(row["index"], row["block"], row["site"]): row for row in rows if row["name"] == "log_kappa"}
        self.bounds = lower_bounds(rows)

    def cell(self, index: int, block: str, site: str) -> Text:
        row = self.rows.get((index, block, site))
        if row is None:
            return Text("–", style="dim")
        mark = marks([row], self.bounds)
        if not math.isfinite(row["value"]):
            return Text(f"{mark}{row['status']}", style="bold red")
        return Text(f"{mark}{row['value']:.2f}", style=Style(color=_color(row["value"])))

    def mean(self, site: str) -> Text:
        rows = [row for place, row in self.rows.items() if place[2] == site]
        values = [row["value"] for row in rows if math.isfinite(row["value"])]
        if not values:
            return Text("–", style="dim")
        mean = sum(values) / len(values)
        return Text(f"{marks(rows, self.bounds)}{mean:.2f}", style=Style(color=_color(mean)))


def _color(value: float) -> str:
    """Return the colour on the scale: its first at 0, its last at float32's ceiling and beyond."""
    place = min(max(value / CEILING, 0.0), 1.0) * (len(SCALE) - 1)
    left = min(int(place), len(SCALE) - 2)
    part = place - left
    mixed = [round(a + (b - a) * part) for a, b in zip(SCALE[left], SCALE[left + 1], strict=True)]
    return "#{:02x}{:02x}{:02x}".format(*mixed)
