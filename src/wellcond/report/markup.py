"""Markup that cannot be forgotten to be escaped: text goes in as text, and only `tag` makes elements.

    tag("p", "a < b, ", tag("code", "x & y"), class_="lead")     # <p class="lead">a &lt; b, <code>x &amp; y</code></p>

Whatever has an `__html__` method (the custom of the template engines) is taken as markup; everything else is text.
"""

import html
import re
from typing import Any

__all__ = ["Html", "attribute_number", "join", "tag"]

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
