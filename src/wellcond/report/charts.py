"""Charts with Altair: from rows to a figure that zooms, toggles, highlights and downloads; or to a picture for docs.

    chart = line_chart(rows, title="Training loss", x=Axis("step"), y=Axis("loss"), by="run", looks={"a": Look(BLUE)})
    page.add(grid(chart, other))                    # side by side; lines of the same kind share one legend
    write_text(path, svg(titled(drawing, "A title", "what to know")))

Altair is imported only when something is drawn, so a training machine need not have it. A page's script (page.js)
draws what `Chart` writes: the specification without its data, and the rows as CSV, which readers can also download.
"""

import csv
import importlib.util
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as default
from functools import partial
from typing import Any, NamedTuple

from .colors import CATEGORIES, HEAT, INK_ON, LIGHT
from .markup import Html, csv_number, file_stem, tag

__all__ = [
    "Axis", "Shaded", "Chart", "Look", "altair", "anchor", "can_draw", "grid", "heat_ends", "heat_map", "line_chart",
    "looks_of", "plain_lines", "script_json", "svg", "titled",
]  # fmt: skip

FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"
HEIGHT, CELL_HEIGHT = 240, 34  # pixels
LINE_MOST = 88  # letters of a caption
LEGEND_ROOM = 24  # pixels: a reader's font may be wider than the one used to measure the picture
LARGEST, SMALLEST = 1e250, 1e-250  # beyond these, an axis with its margins would leave the range of doubles
DASHES = [5, 4]
LOG_LABEL = "datum.label && format(datum.value, datum.value >= 1e5 || datum.value < 1e-3 ? '.0e' : ',~g')"
MARKS_MOST = 24  # lines with more points than this are drawn without point marks
DIM = 0.15

Row = Mapping[str, Any]


def altair() -> Any:
    """Import and return the module; raises ValueError with the install command if it is missing."""
    try:
        import altair
        import vl_convert  # noqa: F401 (what makes an SVG of a chart, and the script of a page)
    except ImportError as missing:
        raise ValueError(
            f"charts need Altair, and {missing.name} is not installed: pip install altair vl-convert-python"
        ) from None
    return altair


def can_draw() -> bool:
    """Whether Altair is installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("altair", "vl_convert"))


def titled(chart: Any, title: str, *captions: str) -> Any:
    """Style a picture like all others: a title, and below it the captions, each starting on a new line."""
    alt = altair()
    lines = [line for caption in captions for line in _lines(caption)]
    heading = alt.Title(text=title, subtitle=lines, anchor="start", fontSize=14, subtitleFontSize=11)
    room = {"left": 12, "top": 12, "right": 12 + LEGEND_ROOM, "bottom": 12}
    return chart.properties(title=heading, background="white", padding=room, config=_style())


def svg(chart: Any) -> str:
    import vl_convert

    return vl_convert.vegalite_to_svg(chart.to_json())


def _style() -> dict[str, Any]:
    ink, muted, rule = LIGHT["ink"], LIGHT["muted"], LIGHT["rule"]
    return {
        "font": FONT,
        "title": {"color": ink, "subtitleColor": muted, "offset": 12},
        "axis": {
            "labelColor": muted, "titleColor": ink, "titleFontWeight": "normal", "gridColor": rule,
            "domainColor": muted, "tickColor": muted, "labelFontSize": 11, "titleFontSize": 12,
        },
        "legend": {"labelColor": ink, "titleColor": ink, "labelFontSize": 11, "symbolSize": 120, "labelLimit": 260},
        "header": {"labelColor": ink, "titleColor": ink, "labelFontSize": 12, "labelFontWeight": "bold"},
        "view": {"stroke": None},
    }  # fmt: skip


def _lines(text: str) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + len(word) >= LINE_MOST:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def plain_lines(rows: Sequence[Row], *, x: "Axis", y: "Axis", by: str, looks: Mapping[str, "Look"], **size: int) -> Any:
    """Return a line chart for a picture: with a legend below, and with point marks if there are few points."""
    alt = altair()
    color, dash = _look(
        by, looks, alt.Legend(title=None, orient="bottom", columns=4, symbolType="stroke", labelLimit=320)
    )
    marks = len(rows) <= MARKS_MOST * len(looks)
    chart = alt.Chart(alt.Data(values=[row for row in rows if x.drawable(row[x.field]) and y.drawable(row[y.field])]))
    return (
        chart.mark_line(point=marks, strokeWidth=2)
        .encode(
            x=x.encode(alt.X, (row[x.field] for row in rows)),
            y=y.encode(alt.Y, (row[y.field] for row in rows)),
            color=color,
            strokeDash=dash,
        )
        .properties(**size)
    )


def _look(by: str, looks: Mapping[str, "Look"], legend: Any) -> tuple[Any, Any]:
    """Return the encodings of a line's colour and dashes."""
    alt = altair()
    names = list(looks)
    ranges = [DASHES if look.dashed else [1, 0] for look in looks.values()]
    return (
        alt.Color(f"{by}:N", legend=legend, scale=alt.Scale(domain=names, range=[one.color for one in looks.values()])),
        alt.StrokeDash(f"{by}:N", legend=legend, scale=alt.Scale(domain=names, range=ranges)),
    )


class Look(NamedTuple):
    """How a line is drawn: its (light) colour, and whether it is dashed, which tells lines of one colour apart."""

    color: str
    dashed: bool = False


class Shaded(NamedTuple):
    """A band drawn behind the lines, where other models lie."""

    low: float
    high: float
    about: str


def looks_of(names: Sequence[str]) -> dict[str, Look]:
    """Return a look for each name: six colours, first solid, then dashed."""
    return {name: Look(CATEGORIES[i % len(CATEGORIES)], i >= len(CATEGORIES)) for i, name in enumerate(names)}


@dataclass(frozen=True)
class Axis:
    """Which field of the rows an axis shows, and how."""

    field: str
    title: str = ""
    """By default the field's name."""
    log: bool = default(default=False, kw_only=True)
    base: int = default(default=10, kw_only=True)
    """Base of the ticks of a logarithmic axis: for lengths that double, powers of 2 are easier to read."""
    whole: bool = default(default=False, kw_only=True)
    """Ticks at whole numbers only: there is no block 2.5."""
    least: float | None = default(default=None, kw_only=True)
    """The smallest span shown, so that noise does not look like a signal; by default a tenth of the largest value, or
    half a decade on a logarithmic axis."""
    ends: tuple[float, float] | None = default(default=None, kw_only=True)
    """Where the axis begins and ends, whatever the rows contain."""

    @property
    def label(self) -> str:
        """The title, or the field's name."""
        return self.title or self.field

    def drawable(self, value: Any) -> bool:
        """Whether a value can be drawn: finite, not absurdly large, and on a log axis positive."""
        if not isinstance(value, int | float) or not math.isfinite(value):
            return False
        return abs(value) <= LARGEST and (value >= SMALLEST or not self.log)

    def domain(self, values: Iterable[Any]) -> list[float]:
        """Return the ends of the axis: around all drawable values, with some margin, and at least `least` apart."""
        if self.ends:
            return list(self.ends)
        found = [float(value) for value in values if self.drawable(value)]
        if not found:
            return [1.0, 10.0] if self.log else [0.0, 1.0]
        low, high = min(found), max(found)
        if self.log:
            low, high = math.log10(low), math.log10(high)
        least = self.least if self.least is not None else 0.5 if self.log else 0.1 * max(abs(low), abs(high)) or 1.0
        room = max(0.04 * (high - low), (least - (high - low)) / 2)
        ends = [low - room, high + room]
        if self.log:
            return [10.0**end for end in ends]
        return [max(0.0, ends[0]) if min(found) >= 0 and not self.whole else ends[0], ends[1]]

    def encode(self, channel: Any, values: Iterable[Any]) -> Any:
        """Return the axis as an Altair encoding."""
        alt = altair()
        scale: dict[str, Any] = {"domain": self.domain(values), "nice": False, "reverse": False}
        axis: dict[str, Any] = {"tickMinStep": 1, "format": "d"} if self.whole else {}
        if self.log:
            scale |= {"type": "log", "base": self.base}
            axis = {"labelExpr": LOG_LABEL, "tickCount": 5}
        if self.log and self.base != 10:  # otherwise a short axis gets round ticks instead of powers of its base
            low, high = (math.log(end, self.base) for end in scale["domain"])
            powers = range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)
            axis = {"format": ",", "values": [float(self.base) ** k for k in powers][:: 1 + len(powers) // 8]}
        if channel is alt.X:
            axis |= {"grid": False, "labelOverlap": True, "labelFlush": True}
        return channel(f"{self.field}:Q", title=self.label, scale=alt.Scale(**scale), axis=alt.Axis(**axis))


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart on a page: a drawing whose data is named `rows`, and the rows."""

    title: str
    drawing: Callable[[], Any]
    """Creates the Altair chart, when it is needed."""
    rows: Sequence[Row]
    caption: Any = ""
    notes: Sequence[str] = ()
    by: str = ""
    """The field whose values are the lines."""
    looks: Mapping[str, Look] = default(default_factory=dict)
    axes: tuple[Axis, Axis] | None = None
    """The axes, if the chart can be zoomed."""
    description: str = ""
    """What the chart shows, for readers who cannot see it; the table of its numbers has the rest."""

    @property
    def id(self) -> str:
        """The chart's id, for links to it."""
        return file_stem(self.title)

    @property
    def csv(self) -> str:
        """The chart's rows as CSV."""
        file = io.StringIO()
        header = list(dict.fromkeys(key for row in self.rows for key in row))
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        for row in self.rows:
            writer.writerow([_cell(row.get(key)) for key in header])
        return file.getvalue()

    @property
    def spec(self) -> dict[str, Any]:
        """The Vega-Lite specification, without the rows."""
        drawn = self.drawing().to_dict(validate=False)
        return {**drawn, "config": _style(), "description": self.description or self.title}

    def __html__(self) -> str:
        return self.figure()

    def figure(self, *, legend: bool = True) -> Html:
        """Return the figure; without its legend if several charts share one."""
        content = {
            "spec": self.spec,
            "csv": self.csv,
            "parse": _types(self.rows),
            "zoom": [{"field": axis.field, "log": axis.log} for axis in self.axes or ()],
        }
        notes = [tag("p", text, class_="gap") for text in self.notes]
        caption = tag("figcaption", self.caption, notes) if self.caption or notes else None
        numbers = tag("details", tag("summary", "Numbers"), class_="numbers")
        return tag(
            "figure",
            tag("h3", self.title, anchor(self.id)),
            _legend(self.looks) if legend else None,
            tag("div", tag("div", class_="vega"), class_="drawing"),
            Html(f'<script type="application/json">{script_json(content)}</script>'),
            caption,
            tag("div", numbers, class_="foot needs-script", hidden=True),
            class_="chart",
            id=self.id,
        )


def grid(*charts: Chart | None) -> Html:
    """Put charts side by side, with one legend if their lines are of one kind."""
    found = [chart for chart in charts if chart is not None]
    kinds = {chart.by for chart in found if len(chart.looks) > 1}
    shared = len(found) > 1 and len(kinds) == 1
    looks = {name: look for chart in found for name, look in chart.looks.items() if chart.by in kinds}
    figures = [chart.figure(legend=not shared) for chart in found]
    return tag("div", _legend(looks) if shared else None, tag("div", figures, class_="grid"), class_="multiples")


def _legend(looks: Mapping[str, Look]) -> Html | None:
    """Return buttons that show and hide lines; None for a single line, which the chart's title names."""
    if len(looks) < 2:
        return None
    names = {light: f"var(--{name})" for name, light in LIGHT.items()}
    buttons = [
        tag(
            "button",
            tag(
                "i", style=f"border-top:3px {'dashed' if look.dashed else 'solid'} {names.get(look.color, look.color)}"
            ),
            name,
            type="button",
            aria_pressed="true",
            data_line=name,
        )
        for name, look in looks.items()
    ]
    return tag("div", buttons, class_="legend", role="group", aria_label="Lines shown")


def line_chart(
    rows: Sequence[Row],
    *,
    title: str,
    x: Axis,
    y: Axis,
    by: str,
    looks: Mapping[str, Look],
    caption: str = "",
    steps: Sequence[float] = (),
    start: int = -1,
    signal: str = "step",
    band: Shaded | None = None,
) -> Chart:
    """Return a chart of lines over common axes, one for each value of the field `by`.

    Args:
        rows: with the fields of both axes and `by`. A field `block` links the chart with others that have one.
        steps: the stops of a slider. The chart shows the rows whose field `signal` equals the slider's value, and rows
            without a value there.
        start: the position in `steps` at which the slider starts.
        band: where other models lie, drawn behind the lines.

    Raises ValueError if there are no rows.
    """
    if not rows:
        raise ValueError(f"the chart {title!r} has no rows; leave it out, or say in words that nothing was measured")
    lost = [row for row in rows if not (x.drawable(row[x.field]) and y.drawable(row[y.field]))]
    said = f"{title}: {y.label} against {x.label}"
    return Chart(
        title=title,
        drawing=partial(_draw_lines, rows, x, y, by, looks, steps, start, signal, band, lost),
        rows=rows,
        caption=f"{caption} Shaded: {band.about}.".strip() if band else caption,
        notes=_notes(rows, lost, by),
        by=by,
        looks=looks,
        axes=(x, y),
        description=said + (f"; lines: {', '.join(looks)}" if len(looks) > 1 else ""),
    )


def _draw_lines(
    rows: Sequence[Row], x: Axis, y: Axis, by: str, looks: Mapping[str, Look], steps: Sequence[float], start: int,
    signal: str, band: Shaded | None, lost: Sequence[Row],
) -> Any:  # fmt: skip
    alt = altair()
    color, dash = _look(by, looks, None)
    all_rows = alt.Chart(alt.NamedData("rows"))  # all layers derive from this: only then is its data the chart's
    base = all_rows.encode(
        x=x.encode(alt.X, (row[x.field] for row in rows)),
        y=y.encode(alt.Y, [*(row[y.field] for row in rows), *(band[:2] if band else ())]),
        color=color,
    )
    params = [alt.param(name="off", value=[])]
    base = base.transform_filter(f"indexof(off, datum['{by}']) < 0")
    for axis in (x, y):
        if any(not axis.drawable(row[axis.field]) for row in lost):
            at = f"datum['{axis.field}']"
            limits = f"abs({at}) <= {LARGEST}" + (f" && {at} >= {SMALLEST}" if axis.log else "")
            base = base.transform_calculate(**{axis.field: f"isFinite({at}) && {limits} ? {at} : null"})
    if steps:
        params.append(alt.param(name=signal, value=steps[start]))
        base = base.transform_filter(f"datum.{signal} == {signal} || !isValid(datum.{signal})")
    linked = "block" in rows[0]
    fades = linked and by == "block"
    if linked:
        params.append(alt.param(name="block", value=""))
    pointed = alt.condition("block == '' || datum.block == block", alt.value(1), alt.value(DIM))
    tooltip = [alt.Tooltip(f"{by}:N"), *(alt.Tooltip(f"{axis.field}:Q", title=axis.label) for axis in (x, y))]
    if linked and by != "block":
        tooltip.insert(1, alt.Tooltip("block:N"))
    near = alt.selection_point(name="near", nearest=True, on="pointerover", clear="pointerout", empty=False)
    few = len(rows) <= MARKS_MOST * max(1, len(looks)) * max(1, len(steps))
    points = base.mark_point(filled=True, size=30, clip=True).encode(
        tooltip=tooltip, opacity=alt.condition(near, alt.value(1), alt.value(int(few)))
    )
    zoom = alt.selection_interval(name="zoom", bind="scales", zoom="wheel![event.ctrlKey || event.metaKey]")
    layers = [
        base.mark_line(strokeWidth=2, clip=True).encode(strokeDash=dash, opacity=pointed if fades else alt.value(1))
    ]
    layers.append(points.transform_filter("isValid(datum['" + y.field + "'])").add_params(near, zoom))
    if linked and not fades:  # a vertical line at the block that the reader points at in any chart
        at = base.transform_filter("datum.block == block").mark_rule(color=LIGHT["muted"], strokeWidth=1)
        layers.insert(
            0, at.encode(x=f"{x.field}:Q", y=alt.value(0), y2=alt.value(HEIGHT), color=alt.value(LIGHT["muted"]))
        )
    if band:
        once = all_rows.transform_aggregate(rows="count()")
        low = alt.YDatum(band.low, type="quantitative", scale=alt.Scale(zero=False), axis=alt.Axis(grid=True))
        ends = {"y": low, "y2": alt.datum(band.high)}
        layers.insert(0, once.mark_rect(color=LIGHT["muted"], opacity=0.14, clip=True).encode(**ends))
    return _layered(layers, params, HEIGHT)


def _layered(layers: Sequence[Any], params: Sequence[Any], height: int) -> Any:
    """Return a chart as wide as its container. Built in one call: LayerChart's methods copy and check all of it."""
    return altair().LayerChart(
        layer=list(layers), width="container", height=height, params=[one.param for one in params]
    )


def heat_map(
    rows: Sequence[Row], *, title: str, columns: Sequence[Any], lines: Sequence[str], ends: tuple[float, float],
    caption: str = "", steps: Sequence[int] = (), start: int = -1, legend: bool = True,
) -> Chart:  # fmt: skip
    """Return a chart of log κ as colours: a column per block, first to last, a row per site, the number in each cell.

    Args:
        rows: block, place, site, log_kappa, status, capped, samples, and step if there is a slider.
        steps, start: as of `line_chart`.
        ends: of the colour scale, the same on all maps that are compared (`heat_ends`).
    """
    said = f"{title}: {len(columns)} blocks from left to right, {', '.join(lines)} from top to bottom"
    drawing = partial(_draw_heat, columns, lines, ends, steps, start, legend)
    return Chart(title=title, drawing=drawing, rows=rows, caption=caption, description=said)


def _draw_heat(
    columns: Sequence[Any],
    lines: Sequence[str],
    ends: tuple[float, float],
    steps: Sequence[int],
    start: int,
    legend: bool,
) -> Any:
    alt = altair()
    low, high = ends
    params = [alt.param(name="block", value="")]
    base = alt.Chart(alt.NamedData("rows"))
    if steps:
        params.append(alt.param(name="step", value=steps[start]))
        base = base.transform_filter("datum.step == step")
    value = "datum.log_kappa"
    doubt = f"datum.status == 'non_finite' || datum.status == 'zero' ? '!' : {BOUND} ? '≥' : ''"
    lost = f"datum.status == 'zero' ? '0' : isNaN({value}) ? 'NaN' : 'inf'"
    base = base.transform_calculate(
        number=f"isFinite({value}) ? ({doubt}) + format({value}, '.1f') : {lost}",
        fill=f"isFinite({value}) ? {value} : null",
    ).encode(
        x=alt.X("place:O", title="block", sort=list(columns), axis=alt.Axis(labelOverlap=True, labelAngle=0)),
        y=alt.Y("site:N", title=None, sort=list(lines), axis=alt.Axis(ticks=False, labelFontSize=13)),
        tooltip=[alt.Tooltip(f"{name}:N", title=title) for name, title in TOLD.items()],
    )  # fmt: skip
    scale = alt.Scale(type="quantize", domain=[low, high], range=[light for light, _ in HEAT])
    colors = alt.Legend(title="log κ", orient="bottom", type="gradient", gradientLength=270, format="~g")
    missing = alt.value("transparent")
    cells = base.mark_rect(strokeWidth=alt.expr("bandwidth('x') > 8 ? 2 : 0")).encode(
        color=alt.condition(
            "isValid(datum.fill)", alt.Color("fill:Q", scale=scale, legend=colors if legend else None), missing
        ),
        stroke=alt.when("datum.block == block")
        .then(alt.value(LIGHT["ink"]))
        .when("isValid(datum.fill)")
        .then(alt.value(LIGHT["paper"]))
        .otherwise(alt.value(LIGHT["c6"])),
    )
    on_dark = f"isValid(datum.fill) && datum.fill >= {low + INK_ON / len(HEAT) * (high - low)}"
    wide = "bandwidth('x')"
    text = base.mark_text(
        fontSize=alt.expr(f"{wide} > 36 ? 12 : 10"), opacity=alt.expr(f"{wide} > 24 ? 1 : 0"), aria=False
    ).encode(text="number:N", color=alt.condition(on_dark, alt.value(LIGHT["paper"]), alt.value(LIGHT["ink"])))
    return _layered([cells, text], params, CELL_HEIGHT * len(lines))


def heat_ends(values: Iterable[float]) -> tuple[float, float]:
    """Return the ends of the colour scale. Each colour spans a multiple of 0.5: a difference of 0.1 means nothing."""
    found = [value for value in values if math.isfinite(value) and abs(value) < LARGEST] or [0.0]
    low = math.floor(min(found))
    step = max(0.5, math.ceil(2 * (max(found) - low) / len(HEAT)) / 2)
    return low, low + step * len(HEAT)


BOUND = "(datum.status == 'ceiling' || datum.capped > 0)"
TOLD = {"block": "block", "site": "site", "number": "log κ", "status": "status", "capped": "at the ceiling",
        "samples": "samples"}  # fmt: skip


def _notes(rows: Sequence[Row], lost: Sequence[Row], by: str) -> list[str]:
    """Say which points are not drawn, line by line."""
    count, gone = Counter(row[by] for row in rows), Counter(row[by] for row in lost)
    return [f"{name}: {number} of {count[name]} points cannot be drawn on these axes." for name, number in gone.items()]


def _cell(value: Any) -> str:
    return csv_number(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value or "")


def _types(rows: Sequence[Row]) -> dict[str, str]:
    """Return whether each column holds numbers or text, for the script: a run may be called 7."""
    return {
        key: "number" if all(isinstance(row.get(key), int | float | None) for row in rows) else "string"
        for key in dict.fromkeys(key for row in rows for key in row)
    }


def anchor(id_: str) -> Html:
    return tag("a", "#", href=f"#{id_}", class_="anchor", aria_label="Link to this part")


def script_json(content: Any) -> str:
    """Return JSON for a script element of a page, which no name in it can close."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
