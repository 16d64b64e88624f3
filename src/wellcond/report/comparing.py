"""Compare runs: a summary of each, and where they differ from the first, worst change first.

section("The runs", summary(runs))
section("Differences", *differences(runs))

At the ceiling log κ is a lower bound, and so is what is computed from it: a mean, or a change from an exact number. A
change between two lower bounds is not known.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .markup import Html, csv_number, data_link, tag
from .page import paragraph, table
from .readings import BLOCK_SITES, Readings, bounded

__all__ = ["Difference", "compare", "differences", "largest_rise", "share_at_ceiling", "summary"]

ROWS_MOST = 20
SENSES = {  # of a change, by whether the first and the other number are lower bounds
    (False, False): "exact",
    (False, True): "at least",
    (True, False): "at most",
    (True, True): "not known",
}
BOUND = "≥: a lower bound, because some samples were at the ceiling."


class Difference(NamedTuple):
    """log κ at one place in the first run and in another, each at its last step; and whether each is a lower bound."""

    run: str
    block: str
    site: str
    first: float
    other: float
    first_bound: bool = False
    other_bound: bool = False

    @property
    def change(self) -> float:
        """How much worse the other run is: inf if only it has no number, −inf if only the first has none, NaN if both.

        Also NaN if both are lower bounds: the difference of two unknown numbers is unknown.
        """
        if math.isfinite(self.first):
            if self.first_bound and self.other_bound and math.isfinite(self.other):
                return math.nan
            return self.other - self.first if math.isfinite(self.other) else math.inf
        return -math.inf if math.isfinite(self.other) else math.nan

    @property
    def sense(self) -> str:
        """What `change` is: "exact", "at least", "at most", "not known", or "no number" if one of the two has none."""
        if not (math.isfinite(self.first) and math.isfinite(self.other)):
            return "no number"
        return SENSES[self.first_bound, self.other_bound]

    def __str__(self) -> str:
        """Return the change in words, or as a number with its bound mark and sign."""
        if self.sense == "no number":
            return "NaN in both" if math.isnan(self.change) else "NaN now" if self.change > 0 else "NaN before"
        if self.sense == "not known":
            return "not known"
        mark = {"at least": "≥ ", "at most": "≤ "}.get(self.sense, "")
        return mark + f"{self.change:+.2f}".replace("-", "−")


def compare(runs: Sequence[Readings]) -> list[Difference]:
    """Compare every place that the first run shares with another: worst change first, unknown changes last."""
    first, *others = runs
    found = []
    for other in others:
        for block, site in first.places:
            here, there = (first.steps[-1], block, site), (other.steps[-1], block, site)
            before, after = first.log_kappa(*here), other.log_kappa(*there)
            if before and after:
                bounds = first.lower_bound(*here), other.lower_bound(*there)
                found.append(Difference(other.run, block, site, before.value, after.value, *bounds))
    return sorted(found, key=lambda d: (not math.isnan(d.change), d.change), reverse=True)


def largest_rise(found: Sequence[Difference]) -> tuple[Difference, bool] | None:
    """Return the worst change that is certain, of those from `compare`, and whether no other can be worse."""
    rise = next((d for d in found if d.change > 0 and d.sense != "at most"), None)
    if rise is None:
        return None
    others = [d for d in found if d is not rise]
    open_ended = any(d.sense in ("at least", "not known") for d in others)
    return rise, not open_ended and all(d.change <= rise.change for d in others if d.sense == "at most")


def summary(runs: Sequence[Readings], models: Mapping[str, str]) -> Html:
    """Return a table with a row per run: its last step, the mean log κ by site, and the share at the ceiling."""
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
    if any("≥" in cell for row in rows for cell in row):
        caption += f" {BOUND}"
    return table(header, rows, numeric=set(range(start - 1, len(header))), caption=caption)


def _mean(run: Readings, step: int, site: str) -> str:
    mean = run.mean_over_blocks(step, site)
    if mean is None:
        return "–"
    if not math.isfinite(mean.value):
        return "NaN"
    return f"{'! ' if mean.left_out else ''}{bounded(mean.value, mean.lower_bound, digits=2)}"


def share_at_ceiling(run: Readings, step: int) -> tuple[str, str]:
    """Return how many samples had a κ beyond what their dtype can resolve: as a share, and as a count."""
    capped = samples = 0.0
    for block, site in run.places:
        cell = run.log_kappa(step, block, site)
        number = run.value("capped", step, block, site)
        if cell:
            samples += cell.samples
            capped += number if math.isfinite(number) else 0
    share = capped / samples if samples else 0.0
    text = "0 %" if not capped else "< 0.1 %" if share < 0.001 else f"{100 * share:.1f} %"
    return text, f"{capped:,.0f} of {samples:,.0f} matrices"


def differences(runs: Sequence[Readings]) -> list[Html]:
    """Return a table of the worst changes, and a link to all of them as CSV."""
    found = compare(runs)
    if not found:
        return [paragraph(f"No other run measured a block and site of {runs[0].run}, so there is nothing to compare.")]
    several = len(runs) > 2
    rows = [[*([d.run] if several else []), d.block or "–", d.site, str(d), *_texts(d)] for d in found[:ROWS_MOST]]
    names = [runs[0].run, "this run" if several else runs[1].run]
    header = [*(["run"] if several else []), "block", "site", "change", *names]
    start = 3 if several else 2
    more = f" These are the first {ROWS_MOST} of {len(found)}." if len(found) > ROWS_MOST else ""
    caption = f"log κ at each run's last step, worst change first.{more}"
    if any(d.first_bound or d.other_bound for d in found):
        unknown = sum(d.sense == "not known" for d in found)
        at = f"at {unknown} of {len(found)} places, listed last"
        last = f" Between two lower bounds the change is not known: {at}." if unknown else ""
        caption += f" {BOUND}{last}"
    link = tag("p", data_link("All differences as CSV", "differences.csv", "text/csv", _csv(runs[0].run, found)))
    return [table(header, rows, numeric=set(range(start, len(header))), caption=caption), link]


def _texts(d: Difference) -> list[str]:
    return [bounded(d.first, d.first_bound, digits=2), bounded(d.other, d.other_bound, digits=2)]


def _csv(first: str, found: Sequence[Difference]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["run", "block", "site", f"log_kappa of {first}", "log_kappa", "change", "change is"])
    for d in found:
        numbers = [csv_number(value) for value in (d.first, d.other, d.change)]
        writer.writerow([d.run, d.block, d.site, *numbers, d.sense])
    return file.getvalue()
