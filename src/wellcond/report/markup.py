"""Markup that cannot be forgotten to be escaped: text goes in as text, and only `tag` makes elements. And files inside
it: links that download them with no server, numbers as CSV.

    tag("p", "a < b, ", tag("code", "x & y"), class_="lead")     # <p class="lead">a &lt; b, <code>x &amp; y</code></p>
    data_link("CSV", "spectrum.csv", "text/csv", to_csv("index", [("plain", [1, 2], [3.0, 0.5])]))

Whatever has an `__html__` method (the custom of the template engines) is taken as markup; everything else is text.
Non-finite numbers are written as "NaN", "Infinity" and "-Infinity", as in all our files.
"""

import base64
import csv
import html
import io
import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

__all__ = ["Html", "attribute_number", "csv_number", "data_link", "file_stem", "join", "tag", "to_csv"]

VOID = {"br", "hr", "img", "input", "link", "meta"}
# XML has no place for these at all, and one in a series' name would make its SVG unreadable.
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff]|[\ud800-\udfff]")


class Html(str):
    """Text that is markup already."""

    __slots__ = ()

    def __html__(self) -> str:
        return self


def escape(value: Any) -> str:
    return html.escape(CONTROL.sub("\ufffd", str(value)), quote=True)


def join(*children: Any) -> Html:
    """Children one after the other: markup as it is, lists item by item, None as nothing, anything else escaped."""
    parts = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, list | tuple):
            parts.append(join(*child))
        elif hasattr(child, "__html__"):
            parts.append(child.__html__())
        else:
            parts.append(escape(child))
    return Html("".join(parts))


def tag(name: str, /, *children: Any, **attributes: Any) -> Html:
    """One element. `class_` becomes `class`, `stroke_width` `stroke-width`; None and False leave an attribute out."""
    written = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        value = "" if value is True else attribute_number(value) if isinstance(value, float) else value
        written.append(f' {key}="{escape(value)}"')
    opening = f"<{name}{''.join(written)}>"
    if name in VOID:
        assert not children, f"<{name}> has no content"
        return Html(opening)
    return Html(f"{opening}{join(*children)}</{name}>")


def attribute_number(value: float) -> str:
    """A coordinate with a tenth of a pixel, and no more digits than it needs."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


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
