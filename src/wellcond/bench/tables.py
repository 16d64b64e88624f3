"""Print a benchmark's rows as a table and write them as JSON."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from wellcond.records import check_writable, write_record

__all__ = ["destination", "show", "write"]

LONG = 12  # characters; a longer word may be broken


def destination(output: Path | None, default: str) -> Path:
    """Return the path of the JSON and create its folder, so that an unwritable path fails before measuring starts."""
    path = output or Path("benchmarks") / default
    check_writable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def show(title: str, rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    """Print the non-empty columns as a table; only cells of several words are wrapped."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    columns = [column for column in columns if any(row.get(column) not in (None, "") for row in rows)]
    for place, column in enumerate(columns):
        justify = "left" if place == 0 else "right"
        words = [_cell(row.get(column)).split() for row in rows]
        longest = min(LONG, max(len(word) for cell in words for word in cell))
        table.add_column(
            column.replace(" ", "\n"), justify=justify, vertical="bottom", overflow="fold", min_width=longest,
            no_wrap=all(len(cell) < 2 for cell in words),
        )  # fmt: skip
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    Console().print(table)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        if not 1e-2 <= abs(value) < math.inf:
            return f"{value:.1e}"
        return f"{value:,.0f}" if abs(value) >= 1e3 else f"{value:.3g}"
    return str(value)


def write(path: Path, payload: dict[str, Any], *, seed: int) -> None:
    write_record(path, payload, seed=seed)
    Console().print(f"wrote {path}")
