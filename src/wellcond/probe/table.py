"""Format rows as a text table: one line per block, one column per site.

    print(table(rows))          # ln κ at the last step; "≥" where some samples are beyond the ceiling
    lower_bounds(rows)          # at which step, block and site log κ is a lower bound

Whatever is computed from a marked number is marked, too: the mean of lower bounds is a lower bound.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from wellcond.words import LEFT_OUT, SITES, meant

__all__ = ["lower_bounds", "marks", "place_of", "table"]

BOUNDED = ("log_kappa", "log_kappa_max")  # cut off at the ceiling; ranks, say, are right beyond it
ROUNDED = ("sigma_min",)  # decided by rounding beyond the ceiling

Row = Mapping[str, Any]
Place = tuple[int, int, str, str]  # step, index, block, site


def table(rows: Iterable[Row], name: str = "log_kappa", *, notes: Sequence[str] = ()) -> str:
    """Return `name` at the last step of `rows` as block × site, with a legend of the marks and the notes below."""
    everything = list(rows)
    rows = [row for row in everything if row["name"] == name]
    if not rows:
        return f"no {name} was measured{meant(name, {row['name'] for row in everything})}"
    step = max(row["step"] for row in rows)
    rows = [row for row in rows if row["step"] == step]
    beyond = lower_bounds(everything) if name in BOUNDED + ROUNDED else set()
    cells = {(row["index"], row["block"], row["site"]): row for row in rows}
    blocks = list(dict.fromkeys((row["index"], row["block"]) for row in rows))
    columns = [site for site in SITES if any(row["site"] == site for row in rows)]
    lines = [["block", *columns]]
    for index, block in blocks:
        lines.append([block, *(_cell(cells.get((index, block, site)), beyond) for site in columns)])
    means = [_mean([row for row in rows if row["site"] == site], beyond) for site in columns]
    if len(blocks) > 1:
        lines.append(["mean", *means])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = ["  ".join(map(_align, line, widths, range(len(line)))) for line in lines]
    text.insert(1, "  ".join("─" * width for width in widths))
    counts = {row["count"] for row in rows if row["status"] != "single"} or {0}
    dtypes = sorted({row["dtype"] for row in rows})
    title = "log κ" if name == "log_kappa" else name
    samples = "–".join(str(count) for count in sorted({min(counts), max(counts)}))
    below = [f"{title} at step {step}; {samples} sample{'' if counts == {1} else 's'}; {', '.join(dtypes)}"]
    used = "".join(marks([row], beyond) for row in rows)
    if "≥" in used:
        below.append("≥ some samples are beyond what the dtype can see, and count as that ceiling: a lower bound")
    if "~" in used:
        below.append("~ of some samples it is below what the dtype can see: rounding has decided it")
    if any(row["status"] == "single" for row in rows):
        below.append("single: one token has no condition number, and is left out of the mean")
    if "!" in used:
        below.append("! some samples were not finite or all zero, and are left out")
    return "\n".join([*(line.rstrip() for line in text), "", *below, *notes])


def lower_bounds(rows: Iterable[Row]) -> set[Place]:
    """Return where some samples are beyond the ceiling.

    A row's status names only the worst, so the rows `capped` are read, too.
    """
    return {
        place_of(row)
        for row in rows
        if (row["name"] in BOUNDED and row["status"] == "ceiling") or (row["name"] == "capped" and row["value"] > 0)
    }


def place_of(row: Row) -> Place:
    return row["step"], row["index"], row["block"], row["site"]


def marks(rows: Iterable[Row], beyond: Collection[Place]) -> str:
    """Return the marks of a number made from these rows: "!" samples left out, "≥" lower bound, "~" rounding."""
    found = set()
    for row in rows:
        if row["status"] in LEFT_OUT:
            found.add("!")
        if place_of(row) in beyond and math.isfinite(row["value"]):
            found.add("≥" if row["name"] in BOUNDED else "~")
    return "".join(sorted(found))


def _cell(row: Row | None, beyond: Collection[Place]) -> str:
    if row is None:
        return "–"
    if math.isnan(row["value"]):
        return f"{marks([row], beyond)}{row['status']}"
    return f"{marks([row], beyond)}{row['value']:.2f}"


def _mean(rows: Sequence[Row], beyond: Collection[Place]) -> str:
    values = [row["value"] for row in rows if math.isfinite(row["value"])]
    return f"{marks(rows, beyond)}{sum(values) / len(values):.2f}" if values else "–"


def _align(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)
