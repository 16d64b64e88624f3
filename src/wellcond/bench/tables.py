"""Prints a benchmark's rows as a table and writes them as JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from wellcond.records import write_record

__all__ = ["destination", "show", "write"]


def destination(output: Path | None, default: str) -> Path:
    """Where the JSON goes, with its folder made: what cannot be written should fail before anything is measured."""
    path = output or Path("benchmarks") / default
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def show(title: str, rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    Console().print(table)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) >= 1e-2 else f"{value:.1e}"
    return str(value)


def write(path: Path, payload: dict[str, Any], *, seed: int) -> None:
    write_record(path, payload, seed=seed)
    Console().print(f"wrote {path}")
