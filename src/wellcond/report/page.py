"""The page: a shell with style and script inside, sections, tables and the small things between figures.

    page = Page("Token Graying", "One sentence on what this is.", footer=["written on …"])
    page.add(section("Numbers", "A paragraph.", table(["ε", "κ"], [["0.95", 2370.0]], numeric={1})))
    page.write("demo/index.html")

Text is escaped wherever it enters. The page asks the network for nothing, and its content security policy
makes the browser hold it to that.
"""

from collections.abc import Collection, Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from wellcond.records import write_text

from .axes import format_number
from .colors import stylesheet
from .figures import SVG_STYLE
from .markup import Html, file_stem, join, tag

__all__ = ["Page", "bullets", "code_block", "note", "paragraph", "section", "side_by_side", "table", "tiles"]

TILES_MANY = 4  # more than these stand in two columns on a phone, and their numbers wrap
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


class Page:
    """A page in the making: add sections, then write it."""

    def __init__(self, title: str, lead: Any = "", *, footer: Iterable[Any] = ()):
        self.title = title
        self.lead = lead
        self.footer: list[Any] = list(footer)
        self.blocks: list[Any] = []

    def add(self, *blocks: Any) -> None:
        """Add sections, figures or anything else; plain text becomes a paragraph."""
        self.blocks.extend(blocks)

    def to_html(self) -> str:
        """The page as one HTML text."""
        lead = tag("p", self.lead, class_="lead") if self.lead else None
        footer = tag("footer", [tag("p", line) for line in self.footer]) if self.footer else None
        body = tag(
            "body", tag("header", tag("h1", self.title), lead), tag("main", _blocks(self.blocks)), footer, _script()
        )
        head = tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("title", self.title),
            tag("link", rel="icon", href="data:,"),
            Html(f"<style>{stylesheet()}\n{_file('page.css')}\n{SVG_STYLE}</style>"),
        )
        return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"

    def write(self, path: str | Path) -> Path:
        """Write the page aside and put it in place at once; returns its path."""
        write_text(path, self.to_html())
        return Path(path)


def section(title: str, *blocks: Any) -> Html:
    """A titled part of the page; its id is made from the title."""
    return tag("section", tag("h2", title), _blocks(blocks), id=file_stem(title))


def paragraph(*parts: Any) -> Html:
    """A paragraph; text is escaped."""
    return tag("p", *parts)


def note(title: str, *blocks: Any) -> Html:
    """A box beside the main thread."""
    return tag("aside", tag("strong", title), _blocks(blocks))


def bullets(*items: Any) -> Html:
    """A list with bullets."""
    return tag("ul", [tag("li", item) for item in items])


def code_block(code: str) -> Html:
    """Code as it is, in a box that scrolls."""
    return tag("pre", tag("code", code), tabindex="0")


def side_by_side(*blocks: Any) -> Html:
    """Blocks in one row where there is room, one below the other on a phone."""
    return tag("div", list(blocks), class_="side-by-side")


def tiles(*items: tuple[str, str, str]) -> Html:
    """A few numbers set large: (what, number, explanation)."""
    return tag(
        "dl",
        [tag("div", tag("dt", what), tag("dd", value), tag("dd", text, class_="small")) for what, value, text in items],
        class_="tiles many" if len(items) > TILES_MANY else "tiles",
    )


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    caption: Any = "",
    numeric: Collection[int] = (),
    groups: bool = False,
    prose: Collection[int] = (),
) -> Html:
    """A table that scrolls by itself where it is wider than the screen.

    Args:
        numeric: the columns that are numbers, to be set flush right. Floats are formatted with four digits.
        prose: the columns that are sentences: they wrap, and on a phone stand below the rest of their row.
        groups: draw a line wherever the first column changes, and leave its repetitions out.
    """
    header, body = list(header), [list(row) for row in rows]
    for row in body:
        if len(row) != len(header):
            raise ValueError(f"a row of {len(row)} cells does not fit the {len(header)} columns {', '.join(header)}")
    kinds = ["number" if i in numeric else "prose" if i in prose else None for i in range(len(header))]
    lines, before = [], object()
    for row in body:
        starts = groups and row[0] != before
        cells = [None if groups and not starts else row[0], *row[1:]]
        before = row[0]
        cells = [format_number(cell, 4) if isinstance(cell, float) else cell for cell in cells]
        lines.append(
            tag(
                "tr",
                [tag("td", c, class_=k) for c, k in zip(cells, kinds, strict=True)],
                class_="group" if starts else None,
            )
        )
    head = tag(
        "thead", tag("tr", [tag("th", name, scope="col", class_=k) for name, k in zip(header, kinds, strict=True)])
    )
    written = tag("table", head, tag("tbody", lines), class_="with-prose" if prose else None)
    # The caption stands outside, so that it keeps to the screen where the table does not.
    below = tag("p", caption, class_="caption") if caption else None
    return join(tag("div", written, class_="scroll", tabindex="0", role="region", aria_label=", ".join(header)), below)


def _blocks(blocks: Iterable[Any]) -> Html:
    return join(*(block if hasattr(block, "__html__") else paragraph(block) for block in blocks))


def _script() -> Html:
    return Html(f"<script>{_file('page.js')}</script>")


def _file(name: str) -> str:
    return resources.files("wellcond.report").joinpath(name).read_text(encoding="utf-8")
