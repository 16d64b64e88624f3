"""The charts of a page of runs: log κ by block and site with a slider, everything over training, spectra, attention.

    steps = shown_steps(readings)
    grid(*heat_maps(readings, steps)), grid(*by_block(readings, steps))
    grid(*training_charts([shown], last=440), *kappa_charts(readings, last=440))

One run gets a chart per quantity; several runs get the same charts, with a line per run. Long series are thinned to the
worst point of each stretch, since that is what readers look for; the chart says so.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wellcond.records import Event, TrainRow, ValidationRow, finite_or_inf
from wellcond.words import BRANCH_SITES

from .charts import Axis, Chart, Look, Shaded, heat_ends, heat_map, line_chart, looks_of
from .colors import LIGHT, RAMP, SITE_COLORS
from .readings import BLOCK_SITES, OUTSIDE_SITES, SITE_WORDS, Block, Cell, Readings

__all__ = [
    "RUNS_MOST", "Shown", "attention", "by_block", "heat_maps", "kappa_charts", "metric_name",
    "shown_steps", "spectra", "start_of", "thin", "training_charts",
]  # fmt: skip

RUNS_MOST = 12  # six colours, plain and dashed
HEAT_MAPS_MOST = 6
STEPS_MOST, STEPS_LEAST = 100, 10  # number of stops of the slider
CELLS_MOST = 6000  # numbers in the slider's figures, so that a page stays small
POINTS_MOST = 500  # per line
BLOCKS_MOST = 5  # lines of single blocks in one chart
STEP, BLOCK = Axis("step", whole=True), Axis("place", "block", whole=True)
KAPPA = Axis("log_kappa", "log κ", least=3.0)
METRICS = {"loss": "validation loss", "top1": "top-1", "top5": "top-5"}
"""Names of validation metrics on a page; others keep their own."""
MAP, BY_BLOCK = "log κ by block and site", "log κ by block, {}"  # titles of a run's heat map, and of a site's lines
VALIDATED = "Over the validation set; with eval_batches, over its next part each time."
OTHERS = {
    "lr": ("Learning rate", Axis("lr", "learning rate"), "The largest of the optimiser's parameter groups."),
    "gradient_norm": ("Gradient norm", Axis("gradient_norm", "norm", log=True), "Of all gradients, before clipping."),
}
"""Fields of a training row with a chart of their own: title, axis and caption."""
ATTENTION = {
    "attention_entropy": (
        "Attention entropy by block",
        "entropy (nats)",
        "0: all weight on one token. ln n: equal weight on all n.",
    ),
    "largest_logit": ("Largest attention logit by block", "largest logit", "Before softmax, over heads and samples."),
}
OUTSIDE = Block("", -1)  # placeholder for what comes before the first block
MARKS = (
    "≥: the mean is a lower bound, because some samples were at the ceiling. !: samples that were not finite or all "
    "zero are left out."
)
Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One run, as a page shows it."""

    name: str
    model: str = ""
    recipe: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The settings of the training, as config.json has them; empty if they are not known."""
    train: Sequence[TrainRow] = ()
    validation: Sequence[ValidationRow] = ()
    events: Sequence[Event] = ()
    probe: Iterable[Mapping[str, Any]] | None = None
    """The rows of its probe; None if it had none."""
    shape: tuple[int, int] | None = None
    """Tokens and width of its matrices of image patches, if all have the same."""

    @property
    def logged(self) -> bool:
        return bool(self.train or self.validation or self.events)

    @property
    def last_step(self) -> int:
        return max((row.step for row in (*self.train, *self.validation, *self.events)), default=0)

    def metric(self, name: str) -> Points:
        return [(row.step, row.metrics[name]) for row in self.validation if name in row.metrics]

    def trained(self, field: str) -> Points:
        """Return (step, value) for a field of the training rows; empty if an older run did not write it."""
        points = [(row.step, getattr(row, field)) for row in self.train]
        missing = field != "loss" and all(math.isnan(value) for _, value in points)
        return [] if missing else points


def metric_name(name: str) -> str:
    return METRICS.get(name, name)


# ---- by block and site, moved by a slider


def thin(items: Sequence[Any], *, most: int, weight: Callable[[Any], float]) -> list[Any]:
    """Return at most `most` items: the first, the last, and from each stretch in between the one of largest weight."""
    if len(items) <= most:
        return list(items)
    inner, parts = items[1:-1], most - 2
    stretches = (inner[part * len(inner) // parts : (part + 1) * len(inner) // parts] for part in range(parts))
    return [items[0], *(max(stretch, key=weight) for stretch in stretches), items[-1]]


def shown_steps(runs: Sequence[Readings]) -> list[int]:
    """Return the steps at which the slider stops, among them that at which it starts."""
    steps = sorted({step for run in runs for step in run.steps})
    cells = sum(max(1, len(run.blocks) * len(run.sites)) for run in runs)
    most = max(STEPS_LEAST, min(STEPS_MOST, CELLS_MOST // cells))
    found = thin(steps, most=most, weight=lambda s: max(r.worst(at) for r in runs if (at := _at(r, s)) is not None))
    return sorted({*found, max(run.last for run in runs)})


def start_of(runs: Sequence[Readings], steps: Sequence[int]) -> int:
    """Return where among `steps` the slider starts: the last at which some run has only finite numbers."""
    return bisect_right(steps, max(run.last for run in runs)) - 1


def _at(run: Readings, step: int) -> int | None:
    """Return the run's latest step up to `step`, if there is one."""
    position = bisect_right(run.steps, step)
    return run.steps[position - 1] if position else None


def _cells(run: Readings, steps: Sequence[int], sites: Sequence[str]) -> Iterator[tuple[dict[str, Any], Cell, float]]:
    """Yield a run's latest measurements at each step of the slider: place, log κ, samples at the ceiling."""
    for step in steps:
        at = _at(run, step)
        if at is None:
            continue
        for block in run.blocks:
            for site in sites:
                if cell := run.log_kappa(at, block.name, site):
                    capped = run.value("capped", at, block.name, site)
                    place = {"step": step, "block": block.name, "place": block.place, "site": site}
                    yield place, cell, capped if capped > 0 else 0


def _kappas(runs: Sequence[Readings]) -> list[float]:
    """Return all log κ inside blocks, for scales that fit every step."""
    cells = ((key, cell) for run in runs for key, cell in run.cells.items())
    return [cell.value for (name, _, block, _), cell in cells if name == "log_kappa" and block]


def heat_maps(runs: Sequence[Readings], steps: Sequence[int]) -> list[Chart]:
    """Return a heat map per run, on one colour scale."""
    drawn = [run for run in runs[:HEAT_MAPS_MOST] if run.sites]
    ends = heat_ends(_kappas(drawn))
    return [
        heat_map(
            [
                {**place, "log_kappa": cell.value, "status": cell.status, "capped": capped, "samples": cell.samples}
                for place, cell, capped in _cells(run, steps, run.sites)
            ],
            title=MAP + (f", {run.run}" if len(runs) > 1 else ""),
            columns=[block.place for block in run.blocks],
            lines=run.sites,
            ends=ends,
            caption=MARKS if run is drawn[-1] else "",
            steps=steps,
            start=start_of(runs, steps),
            legend=run is drawn[-1],
        )
        for run in drawn
    ]


def by_block(runs: Sequence[Readings], steps: Sequence[int], bands: Mapping[str, Shaded] | None = None) -> list[Chart]:
    """Return a chart per site over blocks, with a line per run; `bands`, by site, are where other models lie."""
    charts, bands = [], bands or {}
    low, high = KAPPA.domain([*_kappas(runs), *(end for band in bands.values() for end in band[:2])])
    y = Axis(KAPPA.field, KAPPA.title, ends=(low, high))
    looks = looks_of([run.run for run in runs])
    for site in (site for site in BLOCK_SITES if any(site in run.sites for run in runs)):
        rows = [
            {"run": run.run, **place, "log_kappa": cell.value}
            for run in runs
            for place, cell, _ in _cells(run, steps, [site])
        ]
        here = {name: look for name, look in looks.items() if any(row["run"] == name for row in rows)}
        if len(runs) == 1:
            here = {runs[0].run: Look(SITE_COLORS[site])}
        caption = f"{_sentence(SITE_WORDS[site])}{_alone(here, runs)}{_below_truth(runs, site)}"
        about: dict[str, Any] = {
            "caption": caption,
            "steps": steps,
            "start": start_of(runs, steps),
            "band": bands.get(site),
        }
        charts.append(line_chart(rows, title=BY_BLOCK.format(site), x=BLOCK, y=y, by="run", looks=here, **about))
    return charts


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def _alone(names: Iterable[str], runs: Sequence[Any]) -> str:
    """Say which run was measured if a chart of several runs has only one line."""
    names = list(names)
    return f" Measured only in {names[0]}." if len(runs) > 1 and len(names) == 1 else ""


def _below_truth(runs: Sequence[Readings], *sites: str) -> str:
    """Return a caveat for lines at these sites if some of their points are lower bounds."""
    if not any(run.capped_sites & set(sites) for run in runs):
        return ""
    return " Some samples were at the ceiling: near it, the true value may lie above the line."


# ---- over training


def training_charts(runs: Sequence[Shown], *, last: int) -> list[Chart]:
    """Return charts of training and validation loss, accuracies, learning rate and gradient norm, if there are rows.

    All charts over training go from step 0 to `last`, so that they line up one below the other.
    """
    looks = looks_of([run.name for run in runs])

    def chart(title: str, y: Axis, points: Callable[[Shown], Points], caption: str = "") -> list[Chart]:
        lines = {run.name: points(run) for run in runs if points(run)}
        if not lines:
            return []
        here = {name: looks[name] for name in lines}
        return [
            _over_steps(lines, title=title, y=y, caption=caption + _alone(lines, runs), looks=here, by="run", last=last)
        ]

    names = list(dict.fromkeys(name for run in runs for row in run.validation for name in row.metrics))
    charts = chart("Training loss", Axis("loss"), lambda run: run.trained("loss"), "Of the batch at each logged step.")
    for name in names:
        title = {"loss": "Validation loss", "top1": "Top-1 accuracy", "top5": "Top-5 accuracy"}.get(name)
        field, share = name if name.isidentifier() else "value", name in ("top1", "top5")
        y = Axis(field, "share correct", least=0.1) if share else Axis(field, name)
        charts += chart(title or f"Validation {name}", y, lambda run, name=name: run.metric(name), VALIDATED)
    for field, (title, y, caption) in OTHERS.items():
        charts += chart(title, y, lambda run, field=field: run.trained(field), caption)
    return charts


def kappa_charts(runs: Sequence[Readings], *, last: int) -> list[Chart]:
    """Return charts of log κ over training, from step 0 to `last`; none if no run has more than one step."""
    if not any(len(run.steps) > 1 for run in runs):
        return []
    return _of_one_run(runs[0], last) if len(runs) == 1 else _of_runs(runs, last)


def _of_one_run(run: Readings, end: int) -> list[Chart]:
    means = {site: [(step, run.mean(step, site)) for step in run.steps] for site in run.sites}
    looks = {site: Look(SITE_COLORS[site], site in BRANCH_SITES) for site in run.sites}
    for site, color in zip(run.outside, (LIGHT["ink"], LIGHT["muted"]), strict=False):
        means[site] = [(step, run.value("log_kappa", step, "", site)) for step in run.steps]
        looks[site] = Look(color)
    caption = "Natural logarithm, mean over blocks. Dashed: before the skip." + _below_truth([run], *means)
    title = "log κ over training, by site"
    charts = [_over_steps(means, title=title, y=KAPPA, caption=caption, looks=looks, by="site", last=end)]
    if len(run.blocks) > 1 and run.sites:
        at = run.last
        site = max(run.sites, key=lambda s: max(run.badness(at, block.name, s) for block in run.blocks))
        ranked = sorted(
            (block for block in run.blocks if any(run.log_kappa(step, block.name, site) for step in run.steps)),
            key=lambda block: run.badness(at, block.name, site),
            reverse=True,
        )[:BLOCKS_MOST]
        lines = {
            block.name: [(step, run.value("log_kappa", step, block.name, site)) for step in run.steps]
            for block in sorted(ranked, key=lambda block: block.place)
        }
        when = "the last step" if at == run.steps[-1] else f"step {at:,}, the last without NaN"
        caption = f"The worst site at {when}, {site}, and the {len(lines)} worst blocks there."
        caption += _below_truth([run], site)
        title = f"log κ over training, {site}"
        looks = looks_of(list(lines))
        charts.append(_over_steps(lines, title=title, y=KAPPA, caption=caption, looks=looks, by="block", last=end))
    return charts


def _of_runs(runs: Sequence[Readings], end: int) -> list[Chart]:
    charts, looks = [], looks_of([run.run for run in runs])
    by_site = {
        site: {run.run: [(step, run.mean(step, site)) for step in run.steps] for run in runs if site in run.sites}
        for site in SITE_COLORS
    }
    values = [value for lines in by_site.values() for points in lines.values() for _, value in points]
    low, high = KAPPA.domain(values)
    y = Axis(KAPPA.field, KAPPA.title, ends=(low, high))
    for site, lines in by_site.items():
        if lines:
            title = f"log κ over training, {site}"
            caption = "Mean over blocks." + _alone(lines, runs) + _below_truth(runs, site)
            here = {name: looks[name] for name in lines}
            charts.append(_over_steps(lines, title=title, y=y, caption=caption, looks=here, by="run", last=end))
    return charts


def _over_steps(
    lines: Mapping[str, Points], *, title: str, y: Axis, caption: str, looks: Mapping[str, Look], by: str, last: int
) -> Chart:
    """Return a chart of lines over steps, from 0 to `last`, thinned if there are many points."""
    longest = max(len(points) for points in lines.values())
    if longest > POINTS_MOST:
        caption += (
            f" {POINTS_MOST} of {longest:,} points are shown, the highest of each stretch; the run's files have all."
        )
    rows = [
        {by: name, "step": step, y.field: value}
        for name, points in lines.items()
        for step, value in thin(points, most=POINTS_MOST, weight=lambda point: finite_or_inf(point[1]))
    ]
    x = Axis(STEP.field, whole=True, ends=(0, max(1, last)))
    return line_chart(rows, title=title, x=x, y=y, by=by, looks=looks, caption=caption.strip())


# ---- singular values, and attention's own statistics


def spectra(runs: Sequence[Readings]) -> list[Chart]:
    """Return a chart per site: for one run, the worst and some other blocks; for several runs, the worst block."""
    charts, looks = [], looks_of([run.run for run in runs])
    chosen = _chosen(runs[0]) if len(runs) == 1 else []
    for site in (*BLOCK_SITES, *OUTSIDE_SITES):
        found = [(run, step) for run in runs if (step := _step_with_spectrum(run, site)) is not None]
        if not found:
            continue
        run, step = found[0]
        title, caption, by, here = f"Spectrum at {site}", f"{_sentence(SITE_WORDS[site])}", "run", looks
        if site in OUTSIDE_SITES:
            rows = [row for run, step in found for row in _spectrum(run, step, OUTSIDE, site, {"run": run.run})]
        elif len(runs) == 1:
            rows = [row for block in chosen for row in _spectrum(run, step, block, site, {"block": block.name})]
            by, here = "block", {b.name: Look(color) for b, color in zip(chosen, RAMP, strict=False)}
            caption += f" Step {step:,}. The flatter the line, the better conditioned."
        else:
            block = _worst(run, step, site)
            rows = [row for run, step in found for row in _spectrum(run, step, block, site, {"run": run.run})]
            title, caption = f"Spectrum at {site}, {block.name}", f"The worst block at this site in {run.run}."
        here = {name: look for name, look in here.items() if any(row[by] == name for row in rows)}
        caption += (_alone(here, runs) if by == "run" else "") + " Geometric mean over samples."
        if rows:
            x, y = Axis("i", "i, from the largest", whole=True), Axis("ratio", "σᵢ / σmax", log=True, least=1.0)
            charts.append(line_chart(rows, title=title, x=x, y=y, by=by, looks=here, caption=caption))
    return charts


def _spectrum(run: Readings, step: int, block: Block, site: str, of: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{**of, "i": i + 1, "ratio": value} for i, value in run.spectrum(step, block.name, site)]


def _step_with_spectrum(run: Readings, site: str) -> int | None:
    """Return the last step with singular values at a site, before any NaN if possible."""
    return run.last_step_with(*(f"sigma.{i}" for i in run.singular), site=site)


def _chosen(run: Readings) -> list[Block]:
    """Choose at most as many blocks as there are ordered colours: the first, the last, some between, and the worst."""
    measured = {block for name, _, block, _ in run.cells if name.startswith("sigma.")}
    blocks = [block for block in run.blocks if block.name in measured]
    if len(blocks) <= len(RAMP):
        return blocks
    last = run.last
    worst = max(blocks, key=lambda block: max(run.badness(last, block.name, site) for site in run.sites))
    spread = {round(k * (len(blocks) - 1) / (len(RAMP) - 2)) for k in range(len(RAMP) - 1)}
    return [block for i, block in enumerate(blocks) if i in spread or block is worst]


def _worst(run: Readings, step: int, site: str) -> Block:
    blocks = [block for block in run.blocks if run.spectrum(step, block.name, site)]

    def smallest(block: Block) -> float:
        last = run.spectrum(step, block.name, site)[-1][1]
        return last if math.isfinite(last) else -math.inf

    return min(blocks, key=smallest)


def attention(runs: Sequence[Readings]) -> list[Chart]:
    """Return charts of entropy and largest logit over blocks, with a line per run."""
    charts, looks = [], looks_of([run.run for run in runs])
    for name, (title, label, caption) in ATTENTION.items():
        rows = [
            {"run": run.run, "block": block.name, "place": block.place, name: cell.value}
            for run in runs
            if (step := run.last_step_with(name)) is not None
            for block in run.blocks
            if (cell := run.get(name, step, block.name, "sa"))
        ]
        if rows:
            here = {run: look for run, look in looks.items() if any(row["run"] == run for row in rows)}
            y = Axis(name, label, least=1.0)  # both are in nats
            told = caption + _alone(here, runs)
            charts.append(line_chart(rows, title=title, x=BLOCK, y=y, by="run", looks=here, caption=told))
    return charts
