"""Markup that is always escaped: text goes in as text, and only `tag` makes elements. Also files embedded in it: links
that download them without a server.

    tag("p", "a < b, ", tag("code", "x & y"), class_="lead")     # <p class="lead">a &lt; b, <code>x &amp; y</code></p>
    data_link("CSV", "spectrum.csv", "text/csv", "index,plain\n1,3.0\n")

Whatever has an `__html__` method (the convention of template engines) is taken as markup; everything else is text.
Non-finite numbers are written as "NaN", "Infinity" and "-Infinity", as in all our files.
"""

import base64
import html
import math
import re
import unicodedata
from typing import Any

__all__ = ["Html", "csv_number", "data_link", "file_stem", "format_number", "join", "tag"]

VOID = {"br", "hr", "img", "input", "link", "meta"}
# Not allowed in markup at all: one in a run's name would make a page unreadable.
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff]|[\ud800-\udfff]")
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Html(str):
    """Text that is already markup."""

    __slots__ = ()

    def __html__(self) -> str:
        return self


def escape(value: Any) -> str:
    return html.escape(CONTROL.sub("\ufffd", str(value)), quote=True)


def join(*children: Any) -> Html:
    """Concatenate children: markup unchanged, lists item by item, None as nothing, anything else escaped."""
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
    """Return one element. `class_` becomes `class`, `aria_label` `aria-label`; None and False omit an attribute."""
    written = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        value = "" if value is True else value
        written.append(f' {key}="{escape(value)}"')
    opening = f"<{name}{''.join(written)}>"
    if name in VOID:
        assert not children, f"<{name}> has no content"
        return Html(opening)
    return Html(f"{opening}{join(*children)}</{name}>")


def data_link(label: str, name: str, kind: str, content: str | bytes) -> Html:
    """Return a link that downloads `content` as the file `name`, without a server."""
    raw = content.encode() if isinstance(content, str) else content
    kind += ";charset=utf-8" if isinstance(content, str) else ""
    href = f"data:{kind};base64,{base64.b64encode(raw).decode()}"
    return tag("a", label, href=href, download=name, title=f"Download {name}")


def file_stem(title: str) -> str:
    """Make a file name (and element id) from a title: "κ of china, ε" → "kappa-of-china-epsilon"."""
    for letter, name in {"κ": "kappa", "σ": "sigma", "ε": "epsilon", "+": " after "}.items():
        title = title.replace(letter, name)
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-") or "figure"


def csv_number(value: float | None) -> str:
    """Format a number as in all our CSV files; None as an empty string."""
    if value is None:
        return ""
    if math.isfinite(value):
        return f"{value:.9g}"
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def format_number(value: float, digits: int = 3) -> str:
    """Format a number for readers: 0.0541, 3,567, 1.2·10⁷, ∞; NaN as NaN."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e6:
        places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
        return _minus(f"{value:,.{places}f}")
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    return _minus(mantissa) + "·10" + str(int(exponent)).translate(SUPERSCRIPTS)


def _minus(text: str) -> str:
    return text.replace("-", "−")
