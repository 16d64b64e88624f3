"""Rows as a table to be read: one line per block, one column per site.

print(table(rows))          # ln κ at the last step; "≥" where some samples are beyond the ceiling
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from wellcond.records import Site

__all__ = ["table"]

ORDER = ("tokens", "embed", "in", "sa", "+sa", "mlp", "+mlp")
assert set(ORDER) == set(get_args(Site))


def table(rows: Iterable[Mapping[str, Any]], name: str = "log_kappa", *, notes: Sequence[str] = ()) -> str:
    """`name` at the last step of `rows`, block × site, with what the marks mean and the notes below it."""
    rows = [row for row in rows if row["name"] == name]
    if not rows:
        return f"no {name} was measured"
    step = max(row["step"] for row in rows)
    rows = [row for row in rows if row["step"] == step]
    cells = {(row["index"], row["block"], row["site"]): row for row in rows}
    blocks = list(dict.fromkeys((row["index"], row["block"]) for row in rows))
    columns = [site for site in ORDER if any(row["site"] == site for row in rows)]
    lines = [["block", *columns]]
    for index, block in blocks:
        lines.append([block, *(_cell(cells.get((index, block, site))) for site in columns)])
    means = [_mean([row for row in rows if row["site"] == site]) for site in columns]
    if len(blocks) > 1:
        lines.append(["mean", *means])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = ["  ".join(map(_align, line, widths, range(len(line)))) for line in lines]
    text.insert(1, "  ".join("─" * width for width in widths))
    counts, dtypes = {row["count"] for row in rows}, sorted({row["dtype"] for row in rows})
    title = "log κ" if name == "log_kappa" else name
    samples = "–".join(str(count) for count in sorted({min(counts), max(counts)}))
    below = [f"{title} at step {step}; {samples} samples; {', '.join(dtypes)}"]
    if any(row["status"] == "ceiling" for row in rows):
        below.append("≥ some samples are beyond what the dtype can see, and count as that ceiling")
    if any(row["status"] in ("non_finite", "zero") for row in rows):
        below.append("! some samples were not finite or all zero, and are left out")
    return "\n".join([*(line.rstrip() for line in text), "", *below, *notes])


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "–"
    mark = {"ceiling": "≥", "non_finite": "!", "zero": "!"}.get(row["status"], "")
    if math.isnan(row["value"]):
        return f"{mark}{row['status']}"
    return f"{mark}{row['value']:.2f}"


def _mean(rows: Sequence[Mapping[str, Any]]) -> str:
    values = [row["value"] for row in rows if math.isfinite(row["value"])]
    return f"{sum(values) / len(values):.2f}" if values else "–"


def _align(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)
