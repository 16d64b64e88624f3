"""Files inside a page: links that download them with no server, and numbers as CSV.

    data_link("CSV", "spectrum.csv", "text/csv", to_csv("index", [("plain", [1, 2], [3.0, 0.5])]))

Non-finite numbers are written as "NaN", "Infinity" and "-Infinity", as in all our files.
"""

import base64
import csv
import io
import math
import re
import unicodedata
from collections.abc import Sequence

from .markup import Html, tag

__all__ = ["csv_number", "data_link", "file_stem", "to_csv"]


def data_link(label: str, name: str, kind: str, content: str | bytes) -> Html:
    """A link that downloads `content` as the file `name`, with no server."""
    raw = content.encode() if isinstance(content, str) else content
    kind += ";charset=utf-8" if isinstance(content, str) else ""
    href = f"data:{kind};base64,{base64.b64encode(raw).decode()}"
    return tag("a", label, href=href, download=name, title=f"Download {name}")


def file_stem(title: str) -> str:
    """A name for a file (and an id for an element) made from a title: "κ of china, ε" → "kappa-of-china-epsilon"."""
    for letter, name in {"κ": "kappa", "σ": "sigma", "ε": "epsilon", "+": " after "}.items():
        title = title.replace(letter, name)
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-") or "figure"


def to_csv(x_label: str, series: Sequence[tuple[str, Sequence[float], Sequence[float]]]) -> str:
    """One column per series (name, x, y) beside the x values. A cell is empty where a series lacks that x."""
    columns = [_column(xs, ys) for _, xs, ys in series]
    rows: dict[tuple[float, int], None] = {}
    for column in columns:
        rows |= dict.fromkeys(column)
    keys = list(rows)
    if not any(math.isnan(value) for value, _ in keys):
        keys.sort()
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([x_label, *(name for name, _, _ in series)])
    for key in keys:
        writer.writerow([csv_number(key[0]), *(csv_number(column.get(key)) for column in columns)])
    return file.getvalue()


def _column(xs: Sequence[float], ys: Sequence[float]) -> dict[tuple[float, int], float]:
    """(x, how often this x came before) → y, so that a line that goes back over an x loses no point."""
    seen: dict[float, int] = {}
    column = {}
    for a, b in zip(xs, ys, strict=True):
        column[a, seen.get(a, 0)] = b
        seen[a] = seen.get(a, 0) + 1
    return column


def csv_number(value: float | None) -> str:
    """A number as all our CSV files write it; nothing for None."""
    if value is None:
        return ""
    if math.isfinite(value):
        return f"{value:.9g}"
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
