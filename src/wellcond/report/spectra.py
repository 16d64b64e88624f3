"""Singular values of chosen blocks, and what attention itself says: its entropy and its largest logit.

    section("Singular values", *spectra([readings]))
    section("Attention", *attention([readings]))

Both return no charts where nothing of the kind was measured.
"""

import math
from collections.abc import Sequence

from .colors import RAMP, SITE_COLORS
from .figures import Axis, Chart, Series, line_chart, ordered_colors
from .readings import BLOCK_SITES, OUTSIDE_SITES, SITE_WORDS, Block, Readings
from .training import alone, run_style

__all__ = ["attention", "spectra"]

ATTENTION = {
    "attention_entropy": ("Attention entropy by block", "entropy (nats)", "0 is one token alone, ln n all n alike."),
    "largest_logit": ("Largest attention logit by block", "largest logit", "Before softmax, over heads and samples."),
}

OUTSIDE = Block("", -1)  # stands for what lies before the first block


def spectra(runs: Sequence[Readings]) -> list[Chart]:
    """One chart per site: of one run some blocks from first to last and the worst, of several runs the worst block."""
    charts = []
    for site in BLOCK_SITES:
        found = [(run, step) for run in runs if (step := _step_with_spectrum(run, site)) is not None]
        if not found:
            continue
        run, step = found[0]
        if len(runs) == 1:
            chosen = _chosen(run, step, site)
            colors = ordered_colors(len(chosen))
            lines = [_line(run, step, b, site, b.name, color) for b, color in zip(chosen, colors, strict=True)]
            title, caption = f"Spectrum at {site}", f"Step {step:,}. The flatter a line, the better conditioned."
        else:
            block = _worst(run, step, site)
            lines = [
                _line(run, step, block, site, run.run, *run_style(runs.index(run)))
                for run, step in found
                if run.spectrum(step, block.name, site)
            ]
            title, caption = f"Spectrum at {site}, {block.name}", f"The block that is worst there in {run.run}."
            caption += alone([line.name for line in lines], runs)
        caption += " Geometric mean over samples."
        charts.append(_chart(lines, title, caption))
    for site in OUTSIDE_SITES:
        found = [(run, step) for run in runs if (step := _step_with_spectrum(run, site)) is not None]
        lines = [_line(run, step, OUTSIDE, site, run.run, *run_style(runs.index(run))) for run, step in found]
        if lines:
            caption = f"{site}: {SITE_WORDS[site]}.{alone([line.name for line in lines], runs)}"
            charts.append(_chart(lines, f"Spectrum at {site}", caption))
    return charts


def _chart(lines: Sequence[Series], title: str, caption: str) -> Chart:
    return line_chart(lines, title=title, x="i, from the largest", y=Axis("σᵢ / σmax", log=True), caption=caption)


def _step_with_spectrum(run: Readings, site: str) -> int | None:
    """The last step with singular values at a site."""
    if not run.singular:
        return None
    names = {f"sigma.{i}" for i in run.singular}
    return max((step for name, step, _, where in run.cells if where == site and name in names), default=None)


def _line(run: Readings, step: int, block: Block, site: str, name: str, color: str, dashed: bool = False) -> Series:
    points = run.spectrum(step, block.name, site)
    return Series(name, [i + 1 for i, _ in points], [value for _, value in points], color, dashed=dashed)


def _chosen(run: Readings, step: int, site: str) -> list[Block]:
    """At most as many blocks as there are ordered colours: the first, the last, some between, and the worst."""
    blocks = [block for block in run.blocks if run.spectrum(step, block.name, site)]
    if len(blocks) <= len(RAMP):
        return blocks
    spread = {round(k * (len(blocks) - 1) / (len(RAMP) - 2)) for k in range(len(RAMP) - 1)}
    worst = blocks.index(_worst(run, step, site))
    return [block for i, block in enumerate(blocks) if i in spread or i == worst]


def _worst(run: Readings, step: int, site: str) -> Block:
    blocks = [block for block in run.blocks if run.spectrum(step, block.name, site)]

    def smallest(block: Block) -> float:
        last = run.spectrum(step, block.name, site)[-1][1]
        return last if math.isfinite(last) else -math.inf

    return min(blocks, key=smallest)


def attention(runs: Sequence[Readings]) -> list[Chart]:
    """Entropy and largest logit over blocks, one line per run."""
    charts = []
    for name, (title, label, caption) in ATTENTION.items():
        lines = []
        for position, run in enumerate(runs):
            step = run.last_step_with(name)
            if step is None:
                continue
            cells = [(block.place, run.get(name, step, block.name, "sa")) for block in run.blocks]
            points = [(place, cell.value) for place, cell in cells if cell]
            if not points:
                continue
            color, dashed = run_style(position) if len(runs) > 1 else (SITE_COLORS["sa"], False)
            x, y = zip(*points, strict=True)
            lines.append(Series(run.run, x, y, color, marks=True, dashed=dashed))
        if lines:
            caption += alone([line.name for line in lines], runs)
            charts.append(line_chart(lines, title=title, x=Axis("block", whole=True), y=label, caption=caption))
    return charts
