"""log κ by block: lines and heat maps of the last step, which one slider moves through all steps.

page.add(block_section([Readings.of("my run", rows)]))
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from wellcond.words import BRANCH_SITES

from .colors import SITE_COLORS
from .figures import Axis
from .heat import NOTHING, Reading, bounds_of, heat_map
from .markup import Html, join, tag
from .page import section, side_by_side
from .readings import BLOCK_SITES, SITE_WORDS, Readings
from .steps import SteppedLine, slider, stepped_lines, thin
from .training import alone, below_truth, run_style

__all__ = ["block_section"]

SLIDER_MOST, SLIDER_LEAST = 100, 10  # steps the slider stops at
CELLS_MOST = 6000  # numbers that the slider's figures hold, so that a page stays below some hundred kilobytes
HEAT_MAPS_MOST = 6
BLOCK = Axis("block", whole=True)


def block_section(runs: Sequence[Readings]) -> Html:
    """log κ by block: lines and heat maps, all moved by one slider."""
    steps = sorted({step for run in runs for step in run.steps})
    cells = sum(max(1, len(run.blocks) * len(run.sites)) for run in runs)
    most = max(SLIDER_LEAST, min(SLIDER_MOST, CELLS_MOST // cells))
    shown = thin(
        steps, most=most, weight=lambda s: max(run.worst(at) for run in runs if (at := _at(run, s)) is not None)
    )
    parts: list[Any] = []
    if len(shown) > 1:
        text = f"Move the slider to see step {shown[0]:,} to {shown[-1]:,}."
        if len(runs) > 1:
            text += " Each run shows its latest measurement up to that step."
        if len(shown) < len(steps):
            text += (
                f" It stops at {len(shown)} of {len(steps):,} steps, the worst of each stretch, and the CSV files here "
                "hold those; probe.jsonl has all."
            )
        parts += [tag("p", text, class_="needs-script", hidden=True), slider(shown)]
    lines = _lines(runs, shown)
    maps = _heat_maps(runs, shown)
    if len(runs) == 1:
        parts.append(side_by_side(*lines, *maps))
    else:
        parts += [block for block in (side_by_side(*lines), side_by_side(*maps)) if block]
    if len(runs) > HEAT_MAPS_MOST:
        parts.append(f"The heat maps show the first {HEAT_MAPS_MOST} runs.")
    return section("By block and site", *(part for part in parts if part is not None))


def _at(run: Readings, step: int) -> int | None:
    """The run's latest step up to `step`."""
    position = bisect_right(run.steps, step)
    return run.steps[position - 1] if position else None


def _lines(runs: Sequence[Readings], shown: Sequence[int]) -> list[Html]:
    """Of one run one chart with a line per site; of several one chart per site with a line per run."""
    places = {block.name: block.place for run in reversed(runs) for block in run.blocks}
    blocks = sorted(((place, name) for name, place in places.items()), key=lambda item: item[0])
    if not blocks:
        return []
    options: dict[str, Any] = {"places": blocks, "x": BLOCK, "y": "log κ"}

    def frames(run: Readings, site: str) -> list[list[float | None]]:
        found = [
            [run.log_kappa(at, name, site) for _, name in blocks] if (at := _at(run, s)) is not None else None
            for s in shown
        ]
        return [[cell.value if cell else None for cell in frame] if frame else [None] * len(blocks) for frame in found]

    if len(runs) == 1:
        lines = [
            SteppedLine(name=site, frames=frames(runs[0], site), color=SITE_COLORS[site], dashed=site in BRANCH_SITES)
            for site in runs[0].sites
        ]
        caption = "Dashed: what a branch puts out. Plain: the stream after its add, where the skip has come in."
        caption += below_truth(runs, *runs[0].sites)
        return [join(stepped_lines(lines, shown, title="log κ by block", caption=caption, **options))]
    charts = []
    for site in (site for site in BLOCK_SITES if any(site in run.sites for run in runs)):
        lines = []
        for position, run in enumerate(runs):
            if site in run.sites:
                color, dashed = run_style(position)
                lines.append(SteppedLine(name=run.run, frames=frames(run, site), color=color, dashed=dashed))
        caption = f"{site}: {SITE_WORDS[site]}.{alone([line.name for line in lines], runs)}{below_truth(runs, site)}"
        charts.append(join(stepped_lines(lines, shown, title=f"log κ by block, {site}", caption=caption, **options)))
    return charts


def _heat_maps(runs: Sequence[Readings], shown: Sequence[int]) -> list[Html]:
    """One per run, over one scale of colours."""
    drawn = [(run, [_frame(run, _at(run, step)) for step in shown]) for run in runs[:HEAT_MAPS_MOST]]
    bounds = bounds_of([frame for _, frames in drawn for frame in frames])
    caption = (
        "≥: some samples were at the ceiling, so that the mean is a lower bound. !: samples that were not finite, or "
        "all zero, are left out. –: not measured."
    )
    return [
        join(
            heat_map(
                frames,
                shown,
                rows=[block.name for block in run.blocks],
                columns=run.sites,
                wide=run.outside,
                title="log κ by block and site" if len(runs) == 1 else f"log κ by block and site, {run.run}",
                value="log κ",
                caption=caption if run is runs[0] else "",
                bounds=bounds,
            )
        )
        for run, frames in drawn
    ]


def _frame(run: Readings, step: int | None) -> list[Reading]:
    places = [*(("", site) for site in run.outside), *((b.name, site) for b in run.blocks for site in run.sites)]
    return [_reading(run, step, *place) if step is not None else NOTHING for place in places]


def _reading(run: Readings, step: int, block: str, site: str) -> Reading:
    cell = run.log_kappa(step, block, site)
    if not cell:
        return NOTHING
    capped = run.value("capped", step, block, site)
    return Reading(cell.value, cell.status, capped if capped > 0 else 0, cell.samples)
