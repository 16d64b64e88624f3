"""One chart of every statement that has been decided or tried, for the ledger's page and the demo's.

rows = overview_rows(entries(Path("evidence")))
write_svg(titled(overview(rows), TITLE, CAPTION), path, made_from=rows)
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from wellcond.claims.catalogue import CLAIMS
from wellcond.claims.figures import MUTED, VERDICT_COLORS, altair
from wellcond.report.colors import LIGHT
from wellcond.words import VERDICTS, Decided

if TYPE_CHECKING:
    from wellcond.claims.ledger import Entry

__all__ = ["CAPTION", "TITLE", "overview", "overview_rows"]

TITLE = "What we found, statement by statement"
CAPTION = (
    "A dot is a mean, a line its interval; in the pale bar the whole interval has to lie. Each claim has its own scale."
)
WIDE, TEXT_WIDE, NUMBERS_WIDE = 960, 560, 120  # pixels
LINE_HIGH, HEADING_HIGH = 16, 24


def overview_rows(found: Sequence["Entry"]) -> list[dict[str, Any]]:
    """Return the lines of the chart: for each claim and unit, a line that names it and then its statements, with their
    intervals; last the claims that are decided without a number."""
    groups: dict[tuple[str, str | None], list[dict[str, Any]]] = {}
    for entry in found:
        shown = [part for part in entry.parts if part.found is not None and part.asked is not None]
        for part in shown:
            assert part.found is not None
            assert part.asked is not None
            low, high = (None, None) if part.found.count < 2 else (part.found.low, part.found.high)
            row = {"claim": entry.id, "statement": _plain(part.name.partition(", that is")[0]), "outcome": part.outcome}
            row |= {"mean": part.found.mean, "low": low, "high": high, "from": part.asked[0], "to": part.asked[1]}
            groups.setdefault((entry.id, part.unit), []).append(row)
        for part in entry.parts if shown else ():
            if part.found is None and part.outcome in get_args(Decided):  # decided by counting: no dot
                row = {"claim": entry.id, "statement": _plain(part.name), "outcome": part.outcome}
                groups[entry.id, shown[-1].unit].append(row)
        if not shown and entry.verdict in VERDICTS:
            row = {"claim": entry.id, "statement": _named(entry.id), "outcome": entry.verdict}
            groups.setdefault(("", None), []).append(row)
    last = sorted(groups, key=lambda group: group[1] is None)
    return [row for claim, unit in last for row in _on_one_scale(claim, unit, groups[claim, unit])]


def _named(claim: str) -> str:
    return _plain(f"{claim}: {CLAIMS[claim].claim}")


def _plain(text: str) -> str:
    return text.replace("`", "")


def _on_one_scale(claim: str, unit: str | None, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a heading, then the statements, all on one scale, from `left` to `right`."""
    empty = dict.fromkeys(("claim", "statement", "outcome", "mean", "low", "high", "from", "to"))
    if unit is None:
        yield {
            **empty,
            "statement": "Without an interval: decided case by case",
            "unit": "",
            "left": None,
            "right": None,
        }
        yield from ({**empty, **row, "unit": "", "left": None, "right": None} for row in rows)
        return
    ends = [row.get(name) for row in rows for name in ("mean", "low", "high", "from", "to")]
    ends = [end for end in ends if end is not None and math.isfinite(end)]
    room = 0.05 * (max(ends) - min(ends) or 1.0)
    left, right = min(ends) - room, max(ends) + room
    more = {"unit": unit.strip(), "left": left, "right": right}
    yield {**empty, **more, "statement": _named(claim) + (f" ({more['unit']})" if more["unit"] else "")}
    for row in rows:
        asked = {name: min(max(row[name], left), right) for name in ("from", "to") if name in row}
        yield {**empty, **row, **asked, **more}


def overview(rows: Sequence[Mapping[str, Any]], *, on_page: bool = False) -> Any:
    """Chart every statement that has been decided or tried: its text, and dot and interval over what was asked.

    Args:
        rows: those of `overview_rows`.
        on_page: whether it is for a Chart with these rows, as wide as its place, perhaps a phone, whose legend toggles
            verdicts: then the dot stands below the text.
    """
    alt, below = altair(), int(on_page)
    present = [verdict for verdict in VERDICT_COLORS if any(row["outcome"] == verdict for row in rows)]
    color = alt.Color(
        "outcome:N",
        scale=alt.Scale(domain=present, range=[VERDICT_COLORS[one] for one in present]),
        legend=None if on_page else alt.Legend(title=None, orient="top"),
    )
    scaled = {
        f"{name}_at": f"isValid(datum['{name}']) ? (datum['{name}'] - datum.left) / (datum.right - datum.left) : null"
        for name in ("mean", "low", "high", "from", "to")
    }
    mean, low, high = (
        f"format(datum.{one}, abs(datum.{one}) < 0.1 ? '.1~r' : abs(datum.{one}) < 10 ? '.2f' : '.1f')"
        for one in ("mean", "low", "high")
    )
    interval = f"isValid(datum.low) ? ' [' + {low} + ', ' + {high} + ']' : ''"
    with_dot = LINE_HIGH * (1 + below)
    base = (
        alt.Chart(alt.NamedData("rows") if on_page else alt.Data(values=[dict(row) for row in rows]))
        .transform_filter("indexof(off, datum.outcome) < 0")
        .transform_calculate(
            **scaled,
            high_as=f"!datum.outcome ? {HEADING_HIGH} : isValid(datum.mean) ? {with_dot} : {LINE_HIGH}",
            text="datum.statement",
            number=f"isValid(datum.mean) ? {mean} + ({interval}) : datum.outcome",
        )
        .transform_window(end="sum(high_as)")
        .transform_calculate(
            dot_at=f"datum.end - {LINE_HIGH / 2}",
            text_at=f"datum.dot_at - (isValid(datum.mean) ? {0.9 * LINE_HIGH * below} : 0)",
        )
        .encode(tooltip=[alt.Tooltip("text:N", title="statement"), "number:N", "outcome:N"])
    )
    heights = (LINE_HIGH if row["mean"] is None else with_dot for row in rows if row["outcome"])
    height = sum(heights) + HEADING_HIGH * sum(not row["outcome"] for row in rows)
    right, begin = alt.expr("width"), 0 if on_page else TEXT_WIDE
    across = alt.Scale(domain=[0, 1], range=[begin, alt.expr(f"width - {NUMBERS_WIDE}")], nice=False)
    down = alt.Scale(domain=[0, height], range=[0, height], nice=False)

    def x(name: str) -> Any:
        return alt.X(f"{name}_at:Q", scale=across, axis=None)

    def y(name: str) -> Any:
        return alt.Y(f"{name}_at:Q", scale=down, axis=None)

    dots = base.transform_filter("isValid(datum.mean)").encode(y=y("dot"))
    told, headings = (
        base.transform_filter(one).encode(x=alt.value(0), y=y("text"), text="text:N")
        for one in ("datum.outcome", "!datum.outcome")
    )
    words = {"align": "left", "baseline": "middle", "fontSize": 11, "color": LIGHT["ink"]}
    layers = [
        dots.mark_bar(height=9, color=MUTED, opacity=0.14).encode(x=x("from"), x2="to_at:Q"),
        dots.mark_rule(strokeWidth=2).encode(x=x("low"), x2="high_at:Q", color=color),
        dots.mark_point(filled=True, size=60, opacity=1).encode(x=x("mean"), color=color),
        told.mark_text(align="right", baseline="middle", fontSize=11).encode(
            x=alt.value(right), y=y("dot"), text="number:N", color=color
        ),
        told.mark_text(**words, limit=right if on_page else TEXT_WIDE - 12),
        headings.mark_text(**words | {"color": MUTED}, limit=right, fontWeight="bold"),
    ]
    width: Any = "container" if on_page else WIDE
    return alt.layer(*layers, params=[alt.param(name="off", value=[]).param]).properties(width=width, height=height)
