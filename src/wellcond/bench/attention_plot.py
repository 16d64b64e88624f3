"""The log–log plot of `wellcond bench attention`: time and peak memory over the length, a line for each method.

    plot(Path("benchmarks/attention-h200.json"))      # → benchmarks/attention-h200.svg

It is drawn from the JSON alone, so that it can be drawn again anywhere. All lengths have the same number of tokens in
all; the longest, a single sequence with more of them, is shown per that number too. Points that are missing have their
reason below the plot. Where rows have the GPU's time without the host, a panel shows it between the two.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wellcond.records import read_json, write_text
from wellcond.report.figures import Axis, Series
from wellcond.report.panels import Panel, panels_svg

__all__ = ["plot"]

# Colours by method; dashed is another way to compute what the line of the same colour is.
LOOKS = {
    "softmax (SDPA)": ("c1", False),
    "skyformer": ("c2", False),
    "skyformer, as published": ("c2", True),
    "nystrom": ("c3", False),
    "nystrom, as published": ("c3", True),
    "kernelized": ("c4", False),
    "kernelized by FlexAttention": ("c4", True),
    "linear": ("c5", False),
}


def plot(json_path: Path) -> Path:
    """Draws the benchmark written at `json_path` beside it, as SVG, and returns the drawing's path.

    Raises ValueError where the file is not this benchmark, or holds no time.
    """
    json_path = Path(json_path)
    record = read_json(json_path)
    if record.get("benchmark") != "attention":
        raise ValueError(f"{json_path} is not a record of `wellcond bench attention`; give the JSON that it wrote")
    rows = [row for row in record["rows"] if row["kind"] == "length"]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    tokens = record["tokens"]
    columns = {
        "forward + backward, ms": "both ms",
        "the same on the GPU alone, ms": "gpu ms",
        "peak memory, MiB": "memory MiB",
    }
    panels = [
        Panel(x=Axis("tokens in a sequence, n", log=True, base=2), y=Axis(label, log=True), lines=lines)
        for label, column in columns.items()
        if (lines := [line for method in methods if (line := _line(rows, method, column, tokens))])
    ]
    if not any(row["both ms"] for row in rows):
        raise ValueError(f"{json_path} holds no time to draw: every method failed, and its rows say why")
    path = json_path.with_suffix(".svg")
    write_text(path, panels_svg(panels, title="Attention over the length", notes=_notes(record, rows)))
    return path


def _line(rows: Sequence[dict[str, Any]], method: str, column: str, tokens: int) -> Series | None:
    """What was measured of a method, per `tokens` tokens; None where nothing was."""
    found = sorted((row["n"], row[column] * tokens / row["tokens"]) for row in rows if _is(row, method, column))
    if not found:
        return None
    color, dashed = LOOKS.get(method, ("", False))
    return Series(method, [n for n, _ in found], [value for _, value in found], color, marks=True, dashed=dashed)


def _is(row: dict[str, Any], method: str, column: str) -> bool:
    return row["method"] == method and row.get(column) is not None


def _notes(record: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    """What was measured where, and what the rows say of themselves, each once with its lengths."""
    where, tokens = record["environment"], record["tokens"]
    device = where["cpu"]["name"] if record["on"] == "cpu" else where["device"]
    shape = f"{tokens:,} tokens in all, {rows[0]['heads']} heads of {rows[0]['width']}"
    notes = [f"{shape}, {record['landmarks']} landmarks; torch {where['versions']['torch']}, {device}."]
    if any(row.get("gpu ms") for row in rows):
        notes.append(
            "On the GPU alone: captured as a CUDA graph, without the time of the host that starts its kernels."
        )
    longer = sorted({row["n"] for row in rows if row["tokens"] != tokens})
    notes += [f"n = {n:,} is one sequence, shown per {tokens:,} tokens too." for n in longer]
    said: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["note"]:
            said.setdefault((row["method"], row["note"]), []).append(f"{row['n']:,}")
    return notes + [f"{method} at n = {'; '.join(ns)}: {note}" for (method, note), ns in said.items()]
