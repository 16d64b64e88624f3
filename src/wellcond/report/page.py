"""The page: a shell with inlined style and scripts, sections, tables and the small elements between figures.

    page = Page("Token Graying", "One sentence on what this is.", footer=["written on …"])
    page.add(section("Numbers", "A paragraph.", table(["ε", "κ"], [["0.95", 2370.0]], numeric={1})))
    page.write("demo/index.html")

Text is escaped wherever it enters. The page makes no network requests, which its content security policy enforces. The
policy also allows only our own two scripts, by digest, so that no name in a run can inject one.
"""

import base64
import functools
import hashlib
from collections.abc import Collection, Iterable, Sequence
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from typing import Any

from wellcond.records import write_text

from .charts import altair, anchor, script_json
from .colors import dark_of_light, stylesheet
from .markup import Html, file_stem, format_number, join, tag

__all__ = ["Page", "bullets", "code_block", "note", "paragraph", "section", "slider", "table", "tiles"]

TILES_MANY = 3  # with more tiles, a phone shows two columns, and their numbers wrap
CHARTS_ALONE = "figure.chart, .multiples, section:not(:has(> :not(h2, .chart, .multiples, [hidden])))"
WITHOUT_SCRIPT = "The charts need JavaScript, which is switched off; text and tables are complete without it."


class Page:
    """A page under construction: add sections, then write it.

    Args:
        title: what was found; previews of links to the page show it too.
        lead: one more sentence.
        about: what the page is about, shown above the title.
        card: the title of the chart on the card for sharing; by default the first chart.
    """

    def __init__(self, title: str, lead: Any = "", *, about: str = "", card: str = "", footer: Iterable[Any] = ()):
        self.title = title
        self.lead = lead
        self.about = about
        self.card = card
        self.footer: list[Any] = list(footer)
        self.blocks: list[Any] = []

    def add(self, *blocks: Any) -> None:
        """Add sections, figures or anything else; plain text becomes a paragraph."""
        self.blocks.extend(blocks)

    def to_html(self) -> str:
        """Return the page. Raises ValueError if Altair is not installed."""
        about = tag("p", self.about, class_="about") if self.about else None
        lead = tag("p", self.lead, class_="lead") if self.lead else None
        footer = tag("footer", [tag("p", line) for line in self.footer]) if self.footer else None
        parts = [block for block in self.blocks if isinstance(block, Section)]
        contents = [tag("a", part.heading, href=f"#{part.id}") for part in parts]
        scripts = [_charting(), _file("page.js")]
        body = tag(
            "body",
            tag("header", about, tag("h1", self.title), lead),
            tag("nav", contents, aria_label="Contents") if len(contents) > 1 else None,
            tag("p", WITHOUT_SCRIPT, id="without-script"),
            tag("main", _blocks(self.blocks)),
            footer,
            Html(f'<script type="application/json" id="dark">{script_json(dark_of_light())}</script>'),
            [Html(f"<script>{script}</script>") for script in scripts],
            data_card=file_stem(self.card) if self.card else None,
        )
        described = str(self.lead) or self.title
        head = tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=_policy(scripts)),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("title", f"{self.title} · {self.about}" if self.about else self.title),
            tag("meta", name="description", content=described),
            tag("meta", property="og:type", content="article"),
            tag("meta", property="og:site_name", content="wellcond"),
            tag("meta", property="og:title", content=self.title),
            tag("meta", property="og:description", content=described),
            tag("meta", name="twitter:card", content="summary"),
            tag("link", rel="icon", href="data:,"),
            Html(f"<style>{stylesheet()}\n{_file('page.css')}</style>"),
            Html(f"<noscript><style>{CHARTS_ALONE} {{ display: none; }}</style></noscript>"),
        )
        return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"

    def write(self, path: str | Path) -> Path:
        """Write the page to a temporary file, rename it to `path`, and return the path."""
        write_text(path, self.to_html())
        return Path(path)


class Section(Html):
    """A part of a page that is listed in its contents."""

    id: str
    heading: str


def section(title: str, *blocks: Any) -> Section:
    """Return a titled part of the page; its id is made from the title."""
    id_ = file_stem(title)
    found = Section(tag("section", tag("h2", title, anchor(id_)), _blocks(blocks), id=id_))
    found.id, found.heading = id_, title
    return found


def slider(signal: str, values: Sequence[float], label: str, *, at: int = -1) -> Html | None:
    """Return a slider that sets a parameter of all charts that have it; None for fewer than two values."""
    if len(values) < 2:
        return None
    at %= len(values)
    last = {"max": str(len(values) - 1), "value": str(at)}
    control = tag("input", type="range", min="0", **last, step="1", aria_label=label)
    name = tag("label", f"{label} ", tag("output", f"{values[at]:,}"))
    return tag("div", name, control, class_="stepper", hidden=True, data_signal=signal, data_values=str(list(values)))


def paragraph(*parts: Any) -> Html:
    """Return a paragraph; text is escaped."""
    return tag("p", *parts)


def note(title: str, *blocks: Any) -> Html:
    """Return a box set apart from the main text."""
    return tag("aside", tag("strong", title), _blocks(blocks))


def bullets(*items: Any) -> Html:
    """Return a bulleted list."""
    return tag("ul", [tag("li", item) for item in items])


def code_block(code: str) -> Html:
    """Return preformatted code, in a box that scrolls."""
    return tag("pre", tag("code", code), tabindex="0")


def tiles(*items: tuple[str, str, str]) -> Html:
    """Return a few numbers in large type: (what, number, explanation)."""
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
    blocks: Sequence[str] = (),
) -> Html:
    """Return a table that scrolls on its own if it is wider than the screen.

    Args:
        numeric: columns of numbers, to be aligned right. Floats are formatted with four digits.
        prose: columns of sentences: they wrap, and on a phone appear below the rest of their row.
        groups: draw a line wherever the first column changes, and leave out its repetitions.
        blocks: the block of each row; when the row is hovered or focused, charts highlight it.
    """
    header, body = list(header), [list(row) for row in rows]
    for row in body:
        if len(row) != len(header):
            raise ValueError(f"a row of {len(row)} cells does not fit the {len(header)} columns {', '.join(header)}")
    kinds = ["number" if i in numeric else "prose" if i in prose else None for i in range(len(header))]
    lines, before = [], object()
    for row, block in zip_longest(body, blocks):
        starts = groups and row[0] != before
        cells = [None if groups and not starts else row[0], *row[1:]]
        before = row[0]
        cells = [format_number(cell, 4) if isinstance(cell, float) else cell for cell in cells]
        lines.append(
            tag(
                "tr",
                [tag("td", c, class_=k) for c, k in zip(cells, kinds, strict=True)],
                class_="group" if starts else None,
                data_block=block,
                tabindex="0" if block else None,
            )
        )
    head = tag(
        "thead", tag("tr", [tag("th", name, scope="col", class_=k) for name, k in zip(header, kinds, strict=True)])
    )
    written = tag("table", head, tag("tbody", lines), class_="with-prose" if prose else None)
    # The caption is outside, so that it fits the screen even if the table does not.
    below = tag("p", caption, class_="caption") if caption else None
    return join(tag("div", written, class_="scroll", tabindex="0", role="region", aria_label=", ".join(header)), below)


def _blocks(blocks: Iterable[Any]) -> Html:
    return join(*(b if b is None or hasattr(b, "__html__") or isinstance(b, list) else paragraph(b) for b in blocks))


@functools.cache
def _charting() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script, which makes no requests."""
    altair()
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def _policy(scripts: Sequence[str]) -> str:
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {allowed}"


def _file(name: str) -> str:
    return resources.files("wellcond.report").joinpath(name).read_text(encoding="utf-8")
