"""Runs side by side: a summary of each, and where they differ from the first, the worst change first.

section("The runs", summary(runs))
section("Differences", *differences(runs))
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .downloads import csv_number, data_link
from .markup import Html, tag
from .page import paragraph, table
from .readings import BLOCK_SITES, Readings

__all__ = ["Difference", "compare", "differences", "share_at_ceiling", "signed", "summary"]

ROWS_MOST = 20


class Difference(NamedTuple):
    """log κ at one place, in the first run and in another, each at its last step."""

    run: str
    block: str
    site: str
    first: float
    other: float

    @property
    def change(self) -> float:
        """How much worse the other run is; infinite where it alone has no number, NaN where both have none."""
        if math.isfinite(self.first):
            return self.other - self.first if math.isfinite(self.other) else math.inf
        return -math.inf if math.isfinite(self.other) else math.nan


def compare(runs: Sequence[Readings]) -> list[Difference]:
    """Every place that the first run shares with another, the worst change first."""
    first, *others = runs
    found = []
    for other in others:
        for block, site in _places(first):
            before = first.log_kappa(first.steps[-1], block, site)
            after = other.log_kappa(other.steps[-1], block, site)
            if before and after:
                found.append(Difference(other.run, block, site, before.value, after.value))
    return sorted(found, key=lambda d: -math.inf if math.isnan(d.change) else d.change, reverse=True)


def _places(run: Readings) -> list[tuple[str, str]]:
    inside = [(block.name, site) for block in run.blocks for site in run.sites]
    return [*(("", site) for site in run.outside), *inside]


def summary(runs: Sequence[Readings], models: Mapping[str, str]) -> Html:
    """One line per run: its last step, the mean log κ by site, and how much of it was at the ceiling."""
    sites = [site for site in BLOCK_SITES if any(site in run.sites for run in runs)]
    with_models = any(models.get(run.run) for run in runs)
    rows: list[list[Any]] = []
    for run in runs:
        last = run.steps[-1]
        means = [_mean(run, last, site) for site in sites]
        model = [models.get(run.run, "")] if with_models else []
        rows.append([run.run, *model, f"{last:,}", *means, share_at_ceiling(run, last)[0]])
    header = ["run", *(["model"] if with_models else []), "step", *sites, "at the ceiling"]
    start = 3 if with_models else 2
    caption = "Mean log κ over blocks, at the last step of each run. !: blocks without a number are left out."
    return table(header, rows, numeric=set(range(start - 1, len(header))), caption=caption)


def _mean(run: Readings, step: int, site: str) -> str:
    values = run.over_blocks(step, site)
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "NaN" if values else "–"
    return f"{'' if len(finite) == len(values) else '! '}{sum(finite) / len(finite):.2f}"


def share_at_ceiling(run: Readings, step: int) -> tuple[str, str]:
    """How many samples had a κ beyond what their dtype can see: as a share, and counted."""
    capped = samples = 0.0
    for block, site in _places(run):
        cell = run.log_kappa(step, block, site)
        number = run.value("capped", step, block, site)
        if cell:
            samples += cell.samples
            capped += number if math.isfinite(number) else 0
    share = capped / samples if samples else 0.0
    text = "0 %" if not capped else "< 0.1 %" if share < 0.001 else f"{100 * share:.1f} %"
    return text, f"{capped:,.0f} of {samples:,.0f} matrices"


def differences(runs: Sequence[Readings]) -> list[Html]:
    """A table of the worst changes, and all of them as a file."""
    found = compare(runs)
    if not found:
        return [
            paragraph(f"No block and site of {runs[0].run} was measured in another run, so nothing can be compared.")
        ]
    several = len(runs) > 2
    rows = [
        [*([d.run] if several else []), d.block or "–", d.site, signed(d.change), _text(d.first), _text(d.other)]
        for d in found[:ROWS_MOST]
    ]
    names = [runs[0].run, "this run" if several else runs[1].run]
    header = [*(["run"] if several else []), "block", "site", "change", *names]
    start = 3 if several else 2
    more = f" These are the first {ROWS_MOST} of {len(found)}." if len(found) > ROWS_MOST else ""
    caption = f"log κ at each run's last step, the worst change first.{more}"
    link = tag("p", data_link("All differences as CSV", "differences.csv", "text/csv", _csv(runs[0].run, found)))
    return [table(header, rows, numeric=set(range(start, len(header))), caption=caption), link]


def _text(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "NaN"


def signed(change: float) -> str:
    """A change in words where one of the two has no number."""
    if math.isnan(change):
        return "NaN in both"
    if math.isinf(change):
        return "NaN now" if change > 0 else "NaN before"
    return f"{change:+.2f}".replace("-", "−")


def _csv(first: str, found: Sequence[Difference]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["run", "block", "site", f"log_kappa of {first}", "log_kappa", "change"])
    for d in found:
        numbers = [csv_number(value) for value in (d.first, d.other, d.change)]
        writer.writerow([d.run, d.block, d.site, *numbers])
    return file.getvalue()
