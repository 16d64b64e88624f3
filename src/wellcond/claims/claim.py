"""What a claim is: an id, a statement, how it is tested, when it holds; and one of four ways to decide it.

    Claim(id="new-cures", claim=…, test=…, holds_if=…)            # stated, not built yet
    TrainedArms(…)                                               # arms that are trained and compared: arms.py
    Measured(…, measure=measure, judge=judge)                    # a measurement without training: here
    MeasuredOn(…, sets=…, measure=measure, judge=judge)          # the same on each of several data sets: here
    Statement(id="asa-eq6", …)                                   # theory, computed by `wellcond theory`: here

Each can `reproduce` its evidence, give a `verdict` on it, report it in `lines`, and `draw` it. Verdicts are always
computed anew from the rows of the evidence, so that a change of a rule changes them.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from wellcond.claims.sets import SETS, GivenData
from wellcond.progress import Steps, steps
from wellcond.records import read_json, write_record
from wellcond.train.stopping import OutOfTime
from wellcond.verdicts import SECOND_LOOK, Part, Whole, combine, not_run, undecided

if TYPE_CHECKING:
    from wellcond.claims.runs import Runs

__all__ = [
    "MORE_SEEDS",
    "SMOKE_RULE",
    "THE_PAPER",
    "Claim",
    "Line",
    "Measured",
    "MeasuredOn",
    "Options",
    "Record",
    "Statement",
    "TableRow",
    "rounded",
    "say",
    "with_title",
]

Record = Mapping[str, Any]
"""The content of one evidence file."""
THE_PAPER = "the paper"
"""The column of a table that has the paper's numbers; it comes last."""


class TableRow(NamedTuple):
    """A row of a table."""

    what: str
    cells: Mapping[str, str]
    """Numbers in words, by column; the paper's in the column THE_PAPER. Empty ones need not be there."""
    table: str = ""
    """The title of its table; none for the results themselves, which are never folded."""

    def __str__(self) -> str:
        said = "; ".join(f"{column} {cell}" for column, cell in self.cells.items() if cell)
        return f"{self.what}: {said.replace('**', '')}"


Line = str | TableRow
"""A result: a sentence with numbers, or a row of them."""


def with_title(title: str, lines: Iterable[Line]) -> list[Line]:
    """Return the lines, with the title of their set put before those that begin with a comma or a colon."""

    def after(text: str) -> str:
        return f"{title}{text}" if text[:1] in (",", ":") else text

    return [line._replace(what=after(line.what)) if isinstance(line, TableRow) else after(line) for line in lines]


SMOKE_RULE = "a smoke run shows that it runs, and nothing else"
SMOKE_DRAWS = 40
MORE_SEEDS = 2


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `wellcond reproduce`."""

    scale: str
    data: tuple[GivenData, ...] = ()
    seeds: int = 3
    second_look: bool = False
    """Whether to train two more seeds if the first leave a set undecided and a run takes under two minutes."""
    output: Path = Path("runs")
    """Where the run folders go, which are large. Another call with the same folder resumes them."""
    evidence: Path = Path("evidence")
    """Where the evidence goes: small files of numbers, to be kept."""
    settings: tuple[str, ...] = ()
    """Settings of every training, `key=value`, the same for all arms."""
    grid_epochs: int | None = None
    """Epochs of the trainings that choose a learning rate; None for those that the rules prescribe."""
    device: str | None = None
    known: Record = field(default_factory=dict)
    """For a measurement: the existing record with fewer seeds and the same settings, whose seeds need not be measured
    again."""
    keep: Callable[[Record], None] = lambda found: None
    """For a measurement of many minutes: to be called after each seed with what is measured so far. It is saved, and
    OutOfTime raised if another seed would not fit."""
    console: Console = field(default_factory=Console)
    results: Callable[[str], list[dict[str, Any]]] = lambda pattern: []
    """Returns the results of this scale's runs that are done and match a pattern: SET/RECIPE/ARM/seed-0-lr-0.001."""

    def say(self, text: str) -> None:
        """Print a line."""
        say(self.console, text)

    def steps(self, total: int, *, lines: bool = True) -> AbstractContextManager[Steps]:
        """Show the progress of a measurement of `total` steps; see `wellcond.progress`."""
        return steps(total, self.console, lines=lines)


def say(console: Console, text: str) -> None:
    """Print a line as it is: nothing in it is coloured, read as markup or broken."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def rounded(value: Any, digits: int = 6) -> float:
    """Return a number, or a tensor of one, with this many significant digits, as records keep it."""
    return float(f"{float(value):.{digits}g}")


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One statement, of a paper or of our own. This base class is for those that are stated but not built yet."""

    id: str
    claim: str
    test: str
    """How it is tested at `lab` scale, on real data."""
    holds_if: str
    paper_scale: str = ""
    """What the paper's scale would take, in a sentence."""

    sets: tuple[str, ...] = ()
    """The data sets it is decided on, if any: names in `sets.SETS`."""

    @property
    def built(self) -> bool:
        """Whether there is an experiment, not just the statement."""
        return type(self) is not Claim

    def reproduce(self, options: Options, runs: "Runs") -> list[Line]:
        """Make the evidence that is missing, and return the results in lines. Raises OutOfTime if time runs out."""
        raise NotImplementedError(f"{self.id} is stated, and not built yet")

    def verdict(self, records: Sequence[Record]) -> Whole:
        """Return the verdict on the evidence of one scale."""
        raise NotImplementedError(f"{self.id} is stated, and not built yet")

    def lines(self, record: Record) -> list[Line]:
        """Return the results, in sentences with numbers."""
        return []

    def finding(self, records: Sequence[Record]) -> str:
        """Return what was found, in one sentence; empty if the verdict says it all."""
        return ""

    def draw(self, records: Sequence[Record]) -> Any | None:
        """Return an Altair chart with the paper's numbers beside ours; None if there is nothing to draw."""
        return None

    def plan_paper(self, options: Options) -> list[str]:
        """Return what the paper's scale would take, in lines; nothing is run."""
        if self.paper_scale:
            return [f"{self.id} at paper scale: {self.paper_scale}. Nothing was run."]
        return [f"{self.id} at paper scale: not planned yet. It is tested on: {self.test}."]


@dataclass(frozen=True, kw_only=True)
class Measured(Claim):
    """A claim decided by a measurement without training: one record, evidence/ID/SCALE.json."""

    measure: Callable[[Options], Mapping[str, Any]]
    """Returns what goes into the record, as JSON values. `options.data` says where the data sets are, if the claim
    names any; `options.results("*/vit_tiny/*/seed-*")` gives the finished runs of other claims."""
    judge: Callable[[Record], Iterable[Part]]
    summary: Callable[[Record], Iterable[Line]] = lambda record: ()
    says: Callable[[Record], str] = lambda record: ""
    """The finding, in one sentence."""
    figure: Callable[[Record], Any] | None = None
    of_runs: bool = False
    """Whether it is made of other claims' results alone, so that `--no-training` makes it, too."""

    def reproduce(self, options: Options, runs: "Runs") -> list[Line]:
        options = replace(options, results=runs.results)
        record: dict[str, Any] = {"claim": self.id, "scale": options.scale, **self.measure(options)}
        path = options.evidence / self.id / f"{options.scale}.json"
        try:
            record["verdict"] = self.verdict([record]).as_json()
        finally:
            write_record(path, record, seed=0)  # a mistake in `judge` must not cost the measurement
        options.say(f"wrote {path}")
        return self.lines(record)

    def verdict(self, records: Sequence[Record]) -> Whole:
        parts = list(self.judge(records[0])) if records else [not_run(self.holds_if)]
        if any(record["scale"] == "smoke" for record in records):
            parts = [undecided(part, SMOKE_RULE) for part in parts]
        return combine(parts)

    def lines(self, record: Record) -> list[Line]:
        return list(self.summary(record))

    def finding(self, records: Sequence[Record]) -> str:
        return self.says(records[0])

    def draw(self, records: Sequence[Record]) -> Any | None:
        return self.figure(records[0]) if self.figure else None


@dataclass(frozen=True, kw_only=True)
class MeasuredOn(Claim):
    """A claim measured on each of its sets separately: evidence/ID/SCALE-SET.json. Existing records are not measured
    again, so an interrupted call resumes with the next set."""

    measure: Callable[[Options, GivenData], Mapping[str, Any]]
    """Measures one set; returns what goes into its record."""
    judge: Callable[[Mapping[str, Record]], Iterable[Part]]
    """Gets the records by set, of which some may be missing."""
    summary: Callable[[Record], Iterable[Line]] = lambda record: ()
    says: Callable[[Mapping[str, Record]], str] = lambda records: ""
    """The finding, in one sentence."""
    figure: Callable[[Sequence[Record]], Any] | None = None
    seconds: float = 60.0
    """How long one set may take: with less time left, none is begun."""
    second_look: Callable[[Record], bool] = lambda record: False
    """Whether two more seeds may be measured, once, if the first leave a set undecided. The record then states the
    `confidence` of its intervals."""

    def reproduce(self, options: Options, runs: "Runs") -> list[Line]:
        options, lines = replace(options, results=runs.results), list[Line]()
        late: OutOfTime | None = None
        for data in options.data:
            path = options.evidence / self.id / f"{options.scale}-{data.set.name}.json"
            record = read_json(path) if path.exists() else {}
            known = record if record and record["settings"] == list(options.settings) else {}
            try:
                if known.get("seeds", 0) < options.seeds:
                    record = self._measured(options, data, known, runs, path)
                elif not self._looks_again(options, record):
                    options.say(f"{self.id} on {data.set.title}: done before")
                if self._looks_again(options, record):
                    options.say(f"{self.id}: {options.seeds} seeds leave {data.set.title} undecided; {MORE_SEEDS} more")
                    more = replace(options, seeds=options.seeds + MORE_SEEDS)
                    record = self._measured(more, data, record, runs, path, confidence=SECOND_LOOK)
            except OutOfTime as over:
                late = over
            lines += self.lines(record) if record else []
        if late is not None:
            raise late
        return lines

    def _measured(
        self, options: Options, data: GivenData, known: Record, runs: "Runs", path: Path, **more: Any
    ) -> dict[str, Any]:
        """Measure one set and write its record. Raises OutOfTime if time is too short; seeds that are measured by then
        are kept, but those of a second look, which counts only as a whole."""
        what, began = f"{self.id} on {data.set.title}", time.monotonic()
        runs.check_time(what, self.seconds)
        asked = {"seeds": options.seeds, "settings": list(options.settings)}
        head = {"claim": self.id, "scale": options.scale, "data": data.set.name, **asked}

        def keep(found: Record) -> None:
            nonlocal began
            took, began = time.monotonic() - began, time.monotonic()
            if not more:
                seeds = min(found["seeds"], options.seeds - 1)  # fewer than asked for: it is not complete
                write_record(path, {**head, **found, "seeds": seeds}, seed=0)
            runs.check_time(what, took)

        record = {**head, **self.measure(replace(options, known=known, keep=keep), data), **more}
        write_record(path, record, seed=0)
        options.say(f"wrote {path}")
        return record

    def _looks_again(self, options: Options, record: Record) -> bool:
        first = record["seeds"] == options.seeds and "confidence" not in record
        if not (options.second_look and first and self.second_look(record)):
            return False
        return any(part.outcome == "undecided" for part in self.judge({record["data"]: record}))

    def verdict(self, records: Sequence[Record]) -> Whole:
        by_set = {record["data"]: record for record in records}
        parts = list(self.judge(by_set)) or [not_run(self.holds_if)]
        missing = [SETS[name].title for name in self.sets if name not in by_set]
        if missing and by_set:
            parts = [*parts, *(not_run(f"{title}: {self.holds_if}") for title in missing)]
        if any(record["scale"] == "smoke" for record in records):
            parts = [undecided(part, SMOKE_RULE) for part in parts]
        return combine(parts)

    def lines(self, record: Record) -> list[Line]:
        return with_title(SETS[record["data"]].title, [*self.summary(record), *self._looked_twice(record)])

    def _looked_twice(self, record: Record) -> Iterable[Line]:
        if "confidence" in record:
            level = f"{100 * record['confidence']:g} %"
            yield f": {record['seeds']} seeds, the last {MORE_SEEDS} added after a look at the first; {level} intervals"

    def finding(self, records: Sequence[Record]) -> str:
        return self.says({record["data"]: record for record in records})

    def draw(self, records: Sequence[Record]) -> Any | None:
        order = list(SETS)
        ordered = sorted(records, key=lambda record: order.index(record["data"]))
        return self.figure(ordered) if self.figure else None


@dataclass(frozen=True, kw_only=True)
class Statement(Claim):
    """A statement of theory, computed over many draws and examples; wellcond/theory has a file for each."""

    def reproduce(self, options: Options, runs: "Runs") -> list[Line]:
        from wellcond.claims.theory import run
        from wellcond.theory.registry import DRAWS

        smoke = options.scale == "smoke"  # not evidence, and must not replace any
        where = options.output / "smoke" / "theory" if smoke else options.evidence / "theory"
        run([self.id], draws=SMOKE_DRAWS if smoke else DRAWS, output=where, console=options.console)
        return []

    def verdict(self, records: Sequence[Record]) -> Whole:
        """Return the verdict in the record: a statement is judged case by case when it is computed."""
        return Whole(verdict=records[0]["verdict"], parts=())

    def lines(self, record: Record) -> list[Line]:
        facts = [f"*{fact['mark'].capitalize()}:* {fact['says']}" for fact in record["instead"]]
        return [*record["findings"], *facts]

    def finding(self, records: Sequence[Record]) -> str:
        return records[0]["plain"]
