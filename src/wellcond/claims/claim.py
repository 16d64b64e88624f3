"""What a claim is: an id, what is said, how it is tested, when it holds; and one of four ways to decide it.

    Claim(id="asa-fig6", claim=…, test=…, holds_if=…)            # stated, and not built yet
    TrainedArms(…)                                               # arms that are trained and compared: arms.py
    Measured(…, measure=measure, judge=judge)                    # a measurement that trains nothing: here
    MeasuredOn(…, sets=…, measure=measure, judge=judge)          # one on each of several sets: here
    Statement(id="asa-eq6", …)                                   # of theory, computed by `wellcond theory`: here

Each can `reproduce` (make its evidence), say its `verdict` on evidence, `lines` of what came out, and `draw` it.
Verdicts are made from the rows of the evidence whenever they are asked for, so that a change of a rule changes them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from wellcond.claims.sets import SETS, GivenData
from wellcond.records import read_json, write_record
from wellcond.train.stopping import OutOfTime
from wellcond.verdicts import SECOND_LOOK, Part, Whole, combine, not_run, undecided

if TYPE_CHECKING:
    from wellcond.claims.runs import Runs

__all__ = [
    "MORE_SEEDS",
    "SMOKE_RULE",
    "Beside",
    "Claim",
    "Line",
    "Measured",
    "MeasuredOn",
    "Options",
    "Record",
    "Statement",
    "with_title",
]

Record = Mapping[str, Any]
"""One file of evidence."""


class Beside(NamedTuple):
    """A number of ours with the paper's own."""

    what: str
    ours: str
    paper: str

    def __str__(self) -> str:
        return f"{self.what}: {self.ours}; the paper: {self.paper}"


Line = str | Beside
"""What came out, in a sentence with numbers."""


def with_title(title: str, lines: Iterable[Line]) -> list[Line]:
    """Lines that begin with a comma or a colon go on after the title of their set."""

    def after(text: str) -> str:
        return f"{title}{text}" if text[:1] in (",", ":") else text

    return [line._replace(what=after(line.what)) if isinstance(line, Beside) else after(line) for line in lines]


SMOKE_RULE = "a smoke run shows that it runs, and nothing else"
SMOKE_DRAWS = 40
MORE_SEEDS = 2


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `wellcond reproduce` was asked for."""

    scale: str
    data: tuple[GivenData, ...] = ()
    seeds: int = 3
    second_look: bool = False
    """Whether two more seeds are trained where the first leave it undecided and a run takes under two minutes."""
    output: Path = Path("runs")
    """For the run folders, which are large; another call with the same goes on."""
    evidence: Path = Path("evidence")
    """For what is kept: small files of numbers."""
    settings: tuple[str, ...] = ()
    """Fields of every training, `key=value`, the same for all arms."""
    grid_epochs: int | None = None
    """Epochs of the trainings that choose a learning rate; by default what the rules say."""
    device: str | None = None
    known: Record = field(default_factory=dict)
    """Of a measurement: the record with fewer seeds that there is, under the same settings. It need not be measured
    again."""
    console: Console = field(default_factory=Console)
    results: Callable[[str], list[dict[str, Any]]] = lambda pattern: []
    """The results of finished runs under names like this, SET/RECIPE/ARM/seed-0-lr-0.001, of this scale."""

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One statement of a paper or of ours. By itself: stated, and not built yet."""

    id: str
    claim: str
    test: str
    """At `lab` scale, on real data."""
    holds_if: str
    paper_scale: str = ""
    """What the paper's scale would take, in a sentence."""

    sets: tuple[str, ...] = ()
    """Names of `sets.SETS`, where it is decided on some."""

    @property
    def built(self) -> bool:
        """Whether there is an experiment, and not the statement alone."""
        return type(self) is not Claim

    def reproduce(self, options: Options, runs: "Runs") -> list[Line]:
        """Make its evidence, as far as it is missing; what came out, in lines. OutOfTime where that takes longer."""
        raise NotImplementedError(f"{self.id} is stated, and not built yet")

    def verdict(self, records: Sequence[Record]) -> Whole:
        """From the evidence of one scale."""
        raise NotImplementedError(f"{self.id} is stated, and not built yet")

    def lines(self, record: Record) -> list[Line]:
        """What came out, in sentences with numbers."""
        return []

    def finding(self, records: Sequence[Record]) -> str:
        """What was found, in one sentence; empty where the verdict says it all."""
        return ""

    def draw(self, records: Sequence[Record]) -> Any | None:
        """An Altair chart with the paper's numbers beside ours; None where there is nothing to draw."""
        return None

    def plan_paper(self, options: Options) -> list[str]:
        """What the paper's scale would take; nothing is run."""
        if self.paper_scale:
            return [f"{self.id} at paper scale: {self.paper_scale}. Nothing was run."]
        return [f"{self.id} at paper scale: not planned yet. It is tested on: {self.test}."]


@dataclass(frozen=True, kw_only=True)
class Measured(Claim):
    """Decided by a measurement that trains nothing: one record, evidence/ID/SCALE.json."""

    measure: Callable[[Options], Mapping[str, Any]]
    """What goes into the record: numbers that JSON can hold. `options.data` says where the sets lie, if it names some;
    `options.results("*/vit_tiny/*/seed-*")` gives the finished runs of other claims."""
    judge: Callable[[Record], Iterable[Part]]
    summary: Callable[[Record], Iterable[Line]] = lambda record: ()
    says: Callable[[Record], str] = lambda record: ""
    """The finding, in one sentence."""
    figure: Callable[[Record], Any] | None = None

    def reproduce(self, options: Options, runs: "Runs") -> list[Line]:
        options = replace(options, results=runs.results)
        record: dict[str, Any] = {"claim": self.id, "scale": options.scale, **self.measure(options)}
        record["verdict"] = self.verdict([record]).as_json()
        path = options.evidence / self.id / f"{options.scale}.json"
        write_record(path, record, seed=0)
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
    """Measured on each of its sets by itself: evidence/ID/SCALE-SET.json. What is there is not measured again, so that
    a call that was stopped goes on with the next set."""

    measure: Callable[[Options, GivenData], Mapping[str, Any]]
    """On one set: what goes into its record."""
    judge: Callable[[Mapping[str, Record]], Iterable[Part]]
    """Of the records by set, of which some may be missing."""
    summary: Callable[[Record], Iterable[Line]] = lambda record: ()
    says: Callable[[Mapping[str, Record]], str] = lambda records: ""
    """The finding, in one sentence."""
    figure: Callable[[Sequence[Record]], Any] | None = None
    seconds: float = 60.0
    """What one set may take: with less time left none is begun."""
    second_look: Callable[[Record], bool] = lambda record: False
    """Whether two more seeds may be measured, once, where the first leave a set undecided; a record then has the
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
        """Measure one set and write its record. OutOfTime, before anything is measured, where that takes too long."""
        runs.check_time(f"{self.id} on {data.set.title}", self.seconds)
        asked = {"seeds": options.seeds, "settings": list(options.settings)}
        head = {"claim": self.id, "scale": options.scale, "data": data.set.name, **asked}
        record = {**head, **self.measure(replace(options, known=known), data), **more}
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
        return with_title(SETS[record["data"]].title, self.summary(record))

    def finding(self, records: Sequence[Record]) -> str:
        return self.says({record["data"]: record for record in records})

    def draw(self, records: Sequence[Record]) -> Any | None:
        order = list(SETS)
        ordered = sorted(records, key=lambda record: order.index(record["data"]))
        return self.figure(ordered) if self.figure else None


@dataclass(frozen=True, kw_only=True)
class Statement(Claim):
    """A statement of theory, computed over many draws and examples: wellcond/theory has a file for each."""

    def reproduce(self, options: Options, runs: "Runs") -> list[Line]:
        from wellcond.claims.theory import run
        from wellcond.theory.registry import DRAWS

        smoke = options.scale == "smoke"  # which is no evidence, and must not replace any
        where = options.output / "smoke" / "theory" if smoke else options.evidence / "theory"
        run([self.id], draws=SMOKE_DRAWS if smoke else DRAWS, output=where, console=options.console)
        return []

    def verdict(self, records: Sequence[Record]) -> Whole:
        """As it was found: a statement is judged case by case, where it is computed."""
        return Whole(verdict=records[0]["verdict"], parts=())

    def lines(self, record: Record) -> list[Line]:
        facts = [f"*{fact['mark'].capitalize()}:* {fact['says']}" for fact in record["instead"]]
        return [*record["findings"], *facts]

    def finding(self, records: Sequence[Record]) -> str:
        return records[0]["plain"]
