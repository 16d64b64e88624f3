"""The rows of a probe, indexed: what was measured at which step, in which block, at which site.

    readings = Readings.of("my run", Run.open("runs/a").probe)
    readings.log_kappa(readings.steps[-1], "blocks.3", "sa")     # Cell(value=12.1, samples=64, …), or None
    readings.notes                                               # what was left out, in words

Anything may be missing: a parallel block has no `+sa`, a probe may watch one site only, and any value may be NaN.
Of two rows for the same place the later one counts, since a run that resumes after a crash measures some steps again.
A file that a second run was appended to is another matter: of that, only the rows of the last run count (`_last_run`).
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from wellcond.records import finite_or_inf
from wellcond.words import BLOCK_SITES, OUTSIDE_SITES

__all__ = [
    "BLOCK_SITES", "HALF", "OUTSIDE_SITES", "Block", "Cell", "Mean", "Readings", "SITE_WORDS", "badness", "bounded",
]  # fmt: skip

SITE_WORDS = {
    "in": "attention's input, after any norm",
    "sa": "the attention's output, before the add",
    "+sa": "the stream after the attention's add",
    "mlp": "the MLP's output, before the add",
    "+mlp": "the stream after the MLP's add: the block's output",
    "tokens": "the raw patches",
    "embed": "the embedded tokens, before the first block",
}
NAMES = {
    "log_kappa",
    "log_kappa_max",
    "sigma_max",
    "sigma_min",
    "stable_rank",
    "effective_rank",
    "capped",
    "excluded",
    "attention_entropy",
    "largest_logit",
    "near_unit_share",
}
SINGULAR_VALUE = re.compile(r"sigma\.(0|[1-9]\d*)", re.ASCII)
HALF = ("bfloat16", "float16")
NAMED_MOST = 4  # how many names of what was left out are spelled out


class Block(NamedTuple):
    """A block: its module path, and its place on an axis (its index, unless two blocks share one)."""

    name: str
    place: int


class Cell(NamedTuple):
    """One measured number, with the samples, dtype and status behind it."""

    value: float
    samples: int
    dtype: str
    status: str


class Mean(NamedTuple):
    """Mean log κ over blocks; a lower bound if any of the numbers is one."""

    value: float
    blocks: int
    left_out: int
    """Blocks without a number."""
    least: tuple[float, bool]
    """The smallest number, and whether it is a lower bound; an exact one is the smallest whatever the bounds hide."""
    most: tuple[float, bool]
    """The largest number, and whether it is a lower bound, which it is if any of the numbers is one."""

    @property
    def lower_bound(self) -> bool:
        return self.most[1]


@dataclass(frozen=True, kw_only=True)
class Readings:
    """Everything that one run measured."""

    run: str
    steps: list[int]
    """The steps with condition numbers, in order; at least one."""
    blocks: list[Block]
    """In the model's order, without what lies outside blocks."""
    sites: list[str]
    """The sites inside blocks with condition numbers, in the order of a forward pass."""
    outside: list[str]
    """`tokens` and `embed`, if they were measured."""
    singular: list[int]
    """Indices of the recorded singular values, from 0."""
    cells: dict[tuple[str, int, str, str], Cell]
    """(name, step, block, site) → cell; the block is "" outside blocks."""
    notes: list[str]

    @classmethod
    def of(cls, run: str, rows: Iterable[Mapping[str, Any]]) -> "Readings":
        """Index `rows`, in the order in which they were measured. Left out, with a note: unknown names and sites, and
        the rows of an earlier run.

        Raises ValueError if there are no rows, no condition numbers among them, or a malformed row.
        """
        cells: dict[tuple[str, int, str, str], Cell] = {}
        indexes: dict[str, int] = {}
        unknown: Counter[str] = Counter()
        single: dict[str, None] = {}
        parsed = [_parsed(run, number, row) for number, row in enumerate(rows, start=1)]
        start = _last_run(parsed)
        for name, step, block, site, index, cell in parsed[start:]:
            if site not in BLOCK_SITES and site not in OUTSIDE_SITES:
                unknown[f"the site {site!r}"] += 1
            elif name not in NAMES and not SINGULAR_VALUE.fullmatch(name):
                unknown[f"the name {name!r}"] += 1
            elif cell.status == "single":
                single[f"{block} {site}"] = None
            else:
                inside = site in BLOCK_SITES
                cells[name, step, block if inside else "", site] = cell
                if inside:
                    indexes.setdefault(block, index)
        if not parsed:
            raise ValueError(f"the run {run!r} has no rows; was the probe ever switched on, or was the file cut off?")
        steps = sorted({step for name, step, _, _ in cells if name == "log_kappa"})
        if not steps:
            raise ValueError(
                f"none of the {len(parsed) - start} rows of the run {run!r} is a log_kappa at a known site, so "
                "there is nothing to draw; give a probe.jsonl, as wellcond.Probe writes it"
            )
        found, names = {key[3] for key in cells if key[0] == "log_kappa"}, {key[0] for key in cells}
        return cls(
            run=run,
            steps=steps,
            blocks=_ordered(indexes),
            sites=[site for site in BLOCK_SITES if site in found],
            outside=[site for site in OUTSIDE_SITES if site in found],
            singular=sorted({int(match[1]) for name in names if (match := SINGULAR_VALUE.fullmatch(name))}),
            cells=cells,
            notes=[*_earlier(run, parsed[:start]), *_notes(run, unknown, list(single))],
        )

    @cached_property
    def last(self) -> int:
        """The step that a page opens at: the last whose numbers are all finite, or the last if there is none.

        After NaN or infinity there is little to see. Zeros and single tokens have no number, and nothing is wrong.
        """
        broken = {
            key[1]
            for key, cell in self.cells.items()
            if key[0] == "log_kappa" and (math.isinf(cell.value) or (math.isnan(cell.value) and cell.status != "zero"))
        }
        return max((step for step in self.steps if step not in broken), default=self.steps[-1])

    @property
    def places(self) -> list[tuple[str, str]]:
        """Every block and site, in the order of a forward pass but for what lies outside blocks, which comes first."""
        return [("", site) for site in self.outside] + [(b.name, site) for b in self.blocks for site in self.sites]

    def get(self, name: str, step: int, block: str, site: str) -> Cell | None:
        return self.cells.get((name, step, block, site))

    def log_kappa(self, step: int, block: str, site: str) -> Cell | None:
        return self.cells.get(("log_kappa", step, block, site))

    def value(self, name: str, step: int, block: str, site: str) -> float:
        """Return the number, or NaN if there is none."""
        cell = self.cells.get((name, step, block, site))
        return cell.value if cell else math.nan

    def badness(self, step: int, block: str, site: str) -> tuple[bool, float]:
        """Return what this place is ranked by (`badness`), less than for any number if it was not measured."""
        cell = self.log_kappa(step, block, site)
        return badness(cell, self.value("capped", step, block, site)) if cell else (False, -math.inf)

    def lower_bound(self, step: int, block: str, site: str) -> bool:
        """Whether some samples were at the ceiling, so that log κ is only a lower bound.

        A status names only the worst: NaN in one sample hides the ceiling in another, but `capped` still counts it.
        """
        cell = self.log_kappa(step, block, site)
        return cell is not None and (cell.status == "ceiling" or self.value("capped", step, block, site) > 0)

    def mean_over_blocks(self, step: int, site: str) -> "Mean | None":
        """Return the mean log κ of the blocks with a number at a site; None if no block was measured there."""
        cells = {b.name: cell for b in self.blocks if (cell := self.log_kappa(step, b.name, site))}
        finite = {name: cell.value for name, cell in cells.items() if math.isfinite(cell.value)}
        if not cells:
            return None
        bounds = {name for name in finite if self.lower_bound(step, name, site)}
        return Mean(
            value=sum(finite.values()) / len(finite) if finite else math.nan,
            blocks=len(cells),
            left_out=len(cells) - len(finite),
            least=min(((finite[name], name in bounds) for name in finite), default=(math.nan, False)),
            most=(max(finite.values(), default=math.nan), bool(bounds)),
        )

    def mean(self, step: int, site: str) -> float:
        """Return the mean log κ at a site; NaN if a block has no number, since the mean of the rest looks too good."""
        mean = self.mean_over_blocks(step, site)
        return mean.value if mean and not mean.left_out else math.nan

    @cached_property
    def capped_sites(self) -> set[str]:
        """The sites where log κ is a lower bound in some block at some step."""
        places = [key[1:] for key in self.cells if key[0] == "log_kappa"]
        return {place[2] for place in places if self.lower_bound(*place)}

    @property
    def only_ceilings(self) -> bool:
        """Whether every number is a ceiling, which says only that κ is beyond what its dtype can resolve."""
        places = [key[1:] for key, cell in self.cells.items() if key[0] == "log_kappa" and math.isfinite(cell.value)]
        return bool(places) and all(self.lower_bound(*place) for place in places)

    def worst(self, step: int) -> float:
        """Return the largest log κ of a step, infinite if one is not finite; it decides which steps to draw."""
        cells = [self.log_kappa(step, *place) for place in self.places]
        return max((finite_or_inf(cell.value) for cell in cells if cell), default=-math.inf)

    def last_step_with(self, *names: str, site: str = "") -> int | None:
        """Return the last step, up to `last` if possible, with one of `names`, which may be measured less often."""
        steps = {step for name, step, _, where in self.cells if name in names and site in ("", where)}
        return max((step for step in steps if step <= self.last), default=max(steps, default=None))

    def spectrum(self, step: int, block: str, site: str) -> list[tuple[int, float]]:
        """Return (i, σ_i/σ_0) for the recorded singular values, i from 0."""
        found = ((i, self.get(f"sigma.{i}", step, block, site)) for i in self.singular)
        return [(i, cell.value) for i, cell in found if cell]


def badness(cell: Cell, capped: float) -> tuple[bool, float]:
    """Return what log κ is ranked by where the worst is looked for; `capped` is the number of samples at the ceiling.

    NaN is worst. Then comes what half precision cannot see, with half the samples or more at the ceiling: κ lies above
    it, and bfloat16's ceiling, 4.9, is lower than exact numbers of healthy streams. All else is ranked by its number.
    """
    if not math.isfinite(cell.value):
        return True, math.inf
    beyond = 2 * capped >= cell.samples if capped > 0 else cell.status == "ceiling"
    return beyond and cell.dtype in HALF, cell.value


def bounded(value: float, bound: bool, *, digits: int = 1) -> str:
    """Format a number, marked with ≥ if it is a lower bound."""
    return f"{'≥ ' if bound else ''}{value:.{digits}f}" if math.isfinite(value) else "NaN"


class Parsed(NamedTuple):
    """A row, checked."""

    name: str
    step: int
    block: str
    site: str
    place: int
    cell: Cell


def _parsed(run: str, number: int, row: Any) -> Parsed:
    try:
        name, step, block, site = str(row["name"]), int(row["step"]), str(row["block"]), str(row["site"])
        cell = Cell(float(row["value"]), int(row["count"]), str(row["dtype"]), str(row["status"]))
        return Parsed(name, step, block, site, int(row["index"]), cell)
    except KeyError as error:
        raise ValueError(
            f"row {number} of the run {run!r} has no field {error}; was this file written by a probe?"
        ) from None
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"row {number} of the run {run!r} is not a measurement ({error}); it is {row!r}"[:300]
        ) from None


def _last_run(rows: Sequence[Parsed]) -> int:
    """Return where the last run begins among the rows of a file, to which every run of a script appends.

    Both a new run and a resumed one go back to earlier steps. A resumed run goes back to a checkpoint, which comes
    after the first step of the file; a new run starts at that step or before it. (One resumed from that very step
    measures everything again, and is a new run as far as rows are concerned.) The step has to go back at a block and
    site: where rows are sorted by block, or two probes wrote one after the other, the steps of each only go up.
    """
    start = begins = 0  # of the run, and of the rows of one step, whose first may be at a site that is new in this run
    latest: dict[tuple[str, str, str], int] = {}
    for number, row in enumerate(rows):
        if row.step != rows[number - 1].step:
            begins = number
        place = row.name, row.block, row.site
        if row.step < latest.get(place, row.step) and row.step <= rows[start].step:
            start, latest = begins, {}
        latest[place] = row.step
    return start


def _earlier(run: str, rows: Sequence[Parsed]) -> list[str]:
    if not rows:
        return []
    last = max(row.step for row in rows)
    return [f"{run}: rows of an earlier run in the same file were left out ({len(rows):,}, up to step {last:,})."]


def _ordered(indexes: Mapping[str, int]) -> list[Block]:
    """Sort blocks by index; if two share one (stages that restart at 0), keep the order in which they were measured."""
    if len(set(indexes.values())) == len(indexes):
        return [Block(name, index) for name, index in sorted(indexes.items(), key=lambda item: item[1])]
    return [Block(name, place) for place, name in enumerate(indexes)]


def _notes(run: str, unknown: Counter[str], single: list[str]) -> list[str]:
    found = []
    if single:
        more = f" and {len(single) - NAMED_MOST} more" if len(single) > NAMED_MOST else ""
        found = [f"{run}: a single token has no condition number: {', '.join(single[:NAMED_MOST])}{more}."]
    if not unknown:
        return found
    named = ", ".join(f"{what} ({count} rows)" for what, count in unknown.most_common(NAMED_MOST))
    more = f" and {len(unknown) - NAMED_MOST} more" if len(unknown) > NAMED_MOST else ""
    return [*found, f"{run}: left out, because this version does not know them: {named}{more}."]
