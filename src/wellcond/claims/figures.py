"""Figures of claims, drawn with Altair from the rows of the evidence when the ledger is written.

    chart = titled(bars + marks, "ViT-Tiny without skips", "Means over 3 seeds …")
    write_svg(chart, Path("evidence/asa-fig1c/lab.svg"), made_from=[Path("…/lab-cifar10.json")])
    is_current(Path("evidence/asa-fig1c/lab.svg"), made_from=[…])        # needs no Altair

A machine that trains does not need Altair: it is imported only when something is drawn. An SVG ends with a digest of
the files that it was drawn from, by which `wellcond ledger --check` recognises an outdated one.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wellcond.records import read_json, write_text
from wellcond.report.charts import altair, can_draw, svg, titled
from wellcond.report.colors import CATEGORIES, LIGHT, SITE_COLORS
from wellcond.verdicts import Interval
from wellcond.words import DEFAULT_SITES, VERDICTS

__all__ = [
    "ARM_COLORS",
    "INK",
    "MUTED",
    "SITE_COLORS",
    "VERDICT_COLORS",
    "WHEN",
    "accuracies",
    "accuracy_row",
    "altair",
    "arm_color",
    "by_block",
    "by_set",
    "can_draw",
    "is_current",
    "paper_lines",
    "paper_marks",
    "from_to",
    "seeds_in_words",
    "site_color",
    "titled",
    "tuning",
    "with_interval",
    "write_svg",
]

INK, MUTED = LIGHT["ink"], LIGHT["muted"]
ARM_COLORS = [*CATEGORIES, MUTED]
WHEN = {"trained": "trained", "untrained": "random start"}
"""The states of a model in a claim's records, in words for a legend."""
VERDICT_COLORS = dict(zip(VERDICTS, (LIGHT["c3"], LIGHT["c5"], LIGHT["c6"], MUTED, LIGHT["c4"]), strict=True))


def by_set(
    layers: Sequence[Any],
    rows: Sequence[Mapping[str, Any]],
    sets: Sequence[Any],
    *,
    title: Callable[[Any], str] = lambda found: found.title,
    **size: int,
) -> Any:
    """Return panels side by side, one for each of `sets` (comparisons), with the rows whose `set` is its title."""
    alt = altair()
    chart = alt.layer(*layers, data=alt.Data(values=rows)).properties(**size)
    return chart.facet(column=alt.Column("set:N", sort=[title(found) for found in sets], title=None))


def site_color(sites: Sequence[str] = DEFAULT_SITES) -> Any:
    """Return the encoding of a field `site`: a site has the same colour in every figure."""
    alt = altair()
    scale = alt.Scale(domain=list(sites), range=[SITE_COLORS[site] for site in sites])
    return alt.Color("site:N", scale=scale, legend=alt.Legend(symbolType="stroke", symbolStrokeWidth=3))


def arm_color(titles: Sequence[str], *, among: Sequence[str] = (), field: str = "arm", title: str | None = None) -> Any:
    """Return the colours of a field with these titles, in this order; each keeps the colour it has `among` others.
    `title` is that of the legend."""
    alt = altair()
    colors = [ARM_COLORS[(list(among) or list(titles)).index(title) % len(ARM_COLORS)] for title in titles]
    legend = alt.Legend(title=title, symbolOpacity=1)  # even if the first layer is faint
    return alt.Color(f"{field}:N", scale=alt.Scale(domain=list(titles), range=colors), legend=legend)


def accuracies(names: Sequence[str], *, mark: str, bars: bool = False, y: str = "top-1, %") -> list[Any]:
    """Return layers for rows with fields `arm` (one of `names`), `mean`, `low`, `high`, `label` and `paper` (or None):
    bars from 0, or points on a scale of their own, with intervals, numbers, and diamonds called `mark` at `paper`."""
    alt = altair()
    scale = alt.Scale(domain=[0, 100]) if bars else alt.Scale(zero=False, padding=16)
    base = alt.Chart().encode(
        x=alt.X("arm:N", sort=list(names), title=None, axis=alt.Axis(labels=False, ticks=False)),
        y=alt.Y("mean:Q", title=y, scale=scale),
    )
    shown = (base.mark_bar(size=38) if bars else base.mark_point(filled=True, size=90, opacity=1)).encode(
        color=arm_color(names)
    )
    errors = base.mark_rule(color=INK, strokeWidth=1.5).encode(y="low:Q", y2="high:Q")
    numbers = base.mark_text(dy=14, color="white", fontSize=11) if bars else base.mark_text(dx=20, color=INK)
    layers = [shown, errors] if bars else [errors, shown]
    return [*layers, numbers.encode(text="label:N"), paper_marks(base, mark, filled=bars)]


def accuracy_row(
    found: Any, arm: str, paper: float | None = None, *, name: str = "top1", **fields: Any
) -> dict[str, Any]:
    """Return the row of an arm of a comparison for `accuracies`, with these `fields` in place of its own."""
    ours = with_interval(found.interval(found.values(arm, name).values()))
    row = {"set": found.title, "arm": found.arms[arm].title, **ours, "label": f"{ours['mean']:.1f}", "paper": paper}
    return row | fields


def tuning(sets: Sequence[Any]) -> Any:
    """Plot what the trainings that choose learning rates reached, for comparisons that have no runs yet."""
    alt = altair()
    rows = [
        {"set": found.title, "arm": arm.title, "lr": lr, "top1": top1}
        for found in sets
        for name, arm in found.arms.items()
        for lr, top1 in found.rates(name).items()
    ]
    rates = sorted({row["lr"] for row in rows})
    x = alt.X(
        "lr:Q", title="learning rate", scale=alt.Scale(type="log", nice=False, padding=20), axis=alt.Axis(values=rates)
    )
    y = alt.Y("top1:Q", title="top-1 on held-out images, %", scale=alt.Scale(zero=False, padding=10))
    titles = list(dict.fromkeys(row["arm"] for row in rows))
    line = alt.Chart().mark_line(point=alt.OverlayMarkDef(size=70), strokeWidth=2)
    chart = by_set([line.encode(x=x, y=y, color=arm_color(titles))], rows, sets, width=340, height=240)
    epochs = from_to(one["grid"]["epochs"] for found in sets for one in found.record["arms"].values() if "grid" in one)
    caption = f"Trainings of {epochs} epochs, one seed each. The trainings that are compared are still to come."
    return titled(chart, "The trainings that choose the learning rates", caption)


def by_block(color: Any, *, y: str = "log κ", zero: bool = True) -> Any:
    """Return a layer of lines for rows with fields `block`, `value` and `when`, one of WHEN's; the start is dashed."""
    alt = altair()
    dashes = alt.Scale(domain=list(WHEN.values()), range=[[1, 0], [6, 3]])
    return alt.Chart().transform_filter("isValid(datum.block)").mark_line(strokeWidth=2).encode(
        x=alt.X("block:Q", title="block", axis=alt.Axis(tickMinStep=1, grid=False)),
        y=alt.Y("value:Q", title=y, scale=alt.Scale(zero=zero)),
        color=color,
        strokeDash=alt.StrokeDash("when:N", title=None, sort=None, legend=alt.Legend(symbolType="stroke"),
                                  scale=dashes),
    )  # fmt: skip


def paper_marks(base: Any, mark: str, *, x: bool = False, field: str = "paper", filled: bool = False) -> Any:
    """Return diamonds, called `mark` in the legend, for the rows of a chart that have a number of the paper in `field`,
    on the y axis or, if `x`, on the x axis."""
    alt = altair()
    rows = base.transform_filter(f"isValid(datum['{field}'])").transform_calculate(mark=repr(mark))
    return rows.mark_point(filled=filled, size=85, opacity=1, strokeWidth=1.5).encode(
        **{"x" if x else "y": alt.X(f"{field}:Q") if x else alt.Y(f"{field}:Q")},
        shape=alt.Shape("mark:N", scale=alt.Scale(range=["diamond"]), title=None),
        color=alt.value(INK),
    )


def from_to(counts: Iterable[int]) -> str:
    """Return the range of `counts` in words: "2 to 5", or "3" if all are equal."""
    counts = sorted(counts) or [0]
    return " to ".join(dict.fromkeys(map(str, (counts[0], counts[-1]))))


def seeds_in_words(sets: Sequence[Any]) -> str:
    """Return the number of seeds, the intervals and the scale of comparisons, in words for their caption."""
    seeds = from_to(len(found.runs(arm)) for found in sets for arm in found.trained if found.arms[arm].seeds is None)
    levels = " and ".join(dict.fromkeys(f"{100 * found.confidence:g} %" for found in sets))
    if seeds == "1":
        return f"One seed, at {sets[0].record['scale']} scale."
    return f"Means over {seeds} paired seeds with {levels} intervals, at {sets[0].record['scale']} scale."


def paper_lines() -> list[Any]:
    """Return layers with a dotted line and a `label` for each row that has a number of the paper, in field `paper`."""
    alt = altair()
    base = alt.Chart().transform_filter("isValid(datum.paper)").encode(y="paper:Q")
    line = base.mark_rule(color=INK, strokeDash=[1, 4], strokeWidth=2)
    text = base.mark_text(
        align="left", baseline="bottom", dx=64, dy=-2, color=INK, fontSize=11
    )  # right of steep starts
    return [line, text.encode(x=alt.value(0), text="label:N")]


def with_interval(found: Interval) -> dict[str, float | None]:
    """Return a mean and its interval as fields of a row; the ends are None for a single seed."""
    ends = (found.low, found.high) if found.count > 1 else (None, None)
    return {"mean": found.mean, "low": ends[0], "high": ends[1]}


def write_svg(chart: Any, path: Path, *, made_from: Sequence[Path | Mapping[str, Any]]) -> Path:
    """Write the chart as an SVG with digests of its rows and its form, unless the file has both already."""
    altair()
    mark = f"{_rows_mark(made_from)}, drawn as {_digest(chart.to_dict() | {'$schema': ''})} -->"
    if not _text(path).endswith(mark):
        write_text(path, f"{svg(chart)}\n{mark}\n")
    return path


def is_current(path: Path, *, made_from: Sequence[Path | Mapping[str, Any]]) -> bool:
    """Whether the SVG was drawn from the present content of these files, or from these rows."""
    return _rows_mark(made_from) in _text(path)


def _rows_mark(made_from: Sequence[Path | Mapping[str, Any]]) -> str:
    read = [read_json(one) if isinstance(one, Path) else one for one in made_from]
    rows = [{key: value for key, value in row.items() if key != "environment"} for row in read]
    return f"<!-- by wellcond ledger, of rows {_digest(rows)}"


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8").rstrip() if path.exists() else ""
