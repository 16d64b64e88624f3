"""The ledger, docs/claims.md: every claim with its verdict and figure, from nothing but the files under evidence/.

    wellcond ledger                    # redraw figures; write it, report/reference.json and the README's table
    wellcond ledger --check            # exit with 1 if one of these differs from the evidence
    entries(Path("evidence"))          # the content of the page, as data

Verdicts are computed anew from the rows of each file, so that a change of the rules changes the page. A smoke run is no
evidence: it is listed as "smoke only" and decides nothing.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from wellcond.claims.catalogue import CLAIMS, OURS
from wellcond.claims.claim import THE_PAPER, Claim, Line, Statement, TableRow
from wellcond.claims.figures import can_draw, is_current, titled, write_svg
from wellcond.claims.overview import CAPTION, TITLE, overview, overview_rows
from wellcond.claims.reference import reference as reference_of
from wellcond.claims.sets import IMAGE_SETS
from wellcond.progress import steps
from wellcond.records import read_json, write_text
from wellcond.verdicts import ONE_SEED, Part
from wellcond.words import VERDICTS

__all__ = ["Entry", "check", "entries", "overview", "overview_rows", "page", "run"]

SCALES = ("paper", "lab")  # whose evidence decides, largest first
NO_EVIDENCE, NOT_BUILT, SMOKE_ONLY = "no evidence yet", "not built yet", "smoke only"
WITHOUT_EVIDENCE = (NO_EVIDENCE, NOT_BUILT, SMOKE_ONLY)
HEADLINES = (
    "asa-fig1b",
    "asa-fig1c",
    "asa-prop42",
    "asa-table2",
    "sky-table1",
    "sky-lra",
    "sky-time",
    "new-kernel-skip",
)
MARKS = ("<!-- ledger -->", "<!-- end of ledger -->")
"""Where the README's table stands; HEADLINES are its claims."""
OVERVIEW = "overview.svg"
LEAD = """\
# The claims, and what we found

{counts}
"""
CHART = """\
## Statement by statement

![{alt}]({chart})

Each dot is a mean with its interval, over paired seeds unless the statement says otherwise (images, rounds, trainings).
A statement holds if the whole interval lies inside the pale bar. Claims without runs appear only in the table above.
"""
RULES = """\
## How it is decided

`wellcond ledger` writes this page from the files in [evidence]({evidence}) and from nothing else; `wellcond ledger
--check` fails if the two differ.

- `wellcond reproduce ID --scale lab` and `wellcond theory ID` make the evidence.
- `wellcond reproduce ID --scale lab --no-training` recomputes it from the results in `evidence/runs`, in seconds and
  without data. (For the first runs, on CIFAR-10, only the summary records were kept, not the results of single runs.)

**The rules**

- **Seeds:** three, paired. If they leave a set undecided and a run takes under two minutes, two more are added, once,
  and the interval is then 97.5 % instead of 95 % (Student's t).
- **Budget:** the same for every arm. Each arm's learning rate comes from the same grid. It is chosen on a held-out part
  of the training set, by trainings of 10 epochs, 5 of which are warm-up, and the grid is extended while the best rate
  lies at its edge. The test set is looked at once.
- **A respectable baseline:** the plain arm has to reach, in % top-1, {respectable}, after the fixed number of epochs
  ({epochs}). Otherwise the verdict is *undecided*.
- **The Long Range Arena** uses the published rates and 50,000 steps, without a grid.
- **"No difference"** is shown by an interval inside a stated margin.
- **Condition numbers** come from a separate forward pass in float32 without TF32, are checked in float64, and are shown
  beside the untrained model. log κ is the natural logarithm.
- Claims that depart from this (one seed, no grid) say so under "Tested on".

**The verdicts**

- *holds*, *holds in part*, *does not hold*;
- *undecided*, with the smallest effect that these runs would have detected with a probability of 80 %;
- *out of reach here*, with what it would take;
- *{smoke}*: run only as a test of the machinery, which shows nothing about the claim.

Not trained here: the other baselines of Skyformer's main table (BigBird, Reformer, Linformer, Informer, Performer).
"""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One claim in the ledger."""

    id: str
    verdict: str
    parts: tuple[Part, ...] = ()
    finding: str = ""
    """What was found, in one sentence."""
    lines: tuple[Line, ...] = ()
    """Results, as sentences and as rows of tables."""
    files: tuple[Path, ...] = ()
    figures: tuple[Path, ...] = ()
    made: str = ""
    """By which command, on which device and at which commit the evidence was made."""
    waits: bool = False
    """Whether it has evidence, but none of the runs that its verdict needs."""
    tested: str = ""
    """For a statement: what it was tested on, as its file says."""


def entries(evidence: Path) -> list[Entry]:
    """Return an entry per claim, in order. Raises ValueError for a file that belongs to no claim or cannot be read."""
    _refuse_unknown(evidence)
    found = []
    for id_, one in CLAIMS.items():
        if id_ in OURS or (evidence / id_).is_dir():  # plug-ins' claims may keep their evidence elsewhere
            with _naming(one):
                found.append(_statement(evidence, one) if isinstance(one, Statement) else _claim(evidence, one))
    return found


@contextlib.contextmanager
def _naming(one: Claim) -> Iterator[None]:
    """Name the claim whose code fails on its evidence, which may be anybody's."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{one.id} cannot be told from its evidence ({why}; WELLCOND_DEBUG=1 shows where)") from error


def run(evidence: Path, target: Path, reference: Path | None = None, readme: Path | None = None) -> Path:
    """Draw the figures that have changed; write the page and, if given, the reference and the README's table."""
    figures = _figures(evidence)
    with steps(len(figures), lines=False) as begin:
        for one, figure, files in figures:
            begin(f"drawing {figure}")
            if can_draw() or not is_current(figure, made_from=files):
                with _naming(one):
                    chart = one.draw([_read(path) for path in files])
                    if chart is not None:
                        write_svg(chart, figure, made_from=files)
                    else:
                        figure.unlink(missing_ok=True)
    found, chart = entries(evidence), evidence / OVERVIEW
    rows = overview_rows(found)
    if can_draw() or not is_current(chart, made_from=rows):
        write_svg(titled(overview(rows), TITLE, CAPTION), chart, made_from=rows)
    write_text(target, page(evidence, target, found))
    if reference is not None:
        write_text(reference, _reference(evidence, found))
    if readme is not None:
        write_text(readme, _with_headlines(readme, found))
    return target


def check(evidence: Path, target: Path, reference: Path | None = None, readme: Path | None = None) -> str:
    """Return in words what does not match the evidence: page, reference, table or a figure; empty if all do."""
    now = entries(evidence)
    texts = [(reference, _reference(evidence, now))] if reference else []
    texts += [(readme, _with_headlines(readme, now))] if readme else []
    for path, text in texts:
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            return f"{path} is not what {evidence} says; wellcond ledger writes it anew"
    if not target.exists():
        return f"there is no {target}; wellcond ledger writes it"
    wanted, found = (text.splitlines() for text in (page(evidence, target, now), target.read_text(encoding="utf-8")))
    for number, (ours, there) in enumerate(zip_longest(wanted, found), start=1):
        if ours != there:
            return (
                f"{target} is not what {evidence} says, from line {number} on: {there!r} there, {ours!r} by the "
                "evidence; wellcond ledger writes it anew"
            )
    drawn = [
        (figure, files)
        for one, figure, files in _figures(evidence)
        if figure.exists() or not can_draw() or one.draw([_read(path) for path in files]) is not None
    ]
    for figure, rows in [*drawn, (evidence / OVERVIEW, overview_rows(now))]:
        if not is_current(figure, made_from=rows):
            return f"{figure} shows other rows than {evidence} has; wellcond ledger draws it anew"
    return ""


def _reference(evidence: Path, found: Sequence[Entry]) -> str:
    payload = reference_of(evidence, {entry.id: entry for entry in found})
    return json.dumps(payload, indent=1, ensure_ascii=False) + "\n"


def _with_headlines(readme: Path, found: Sequence[Entry]) -> str:
    """Return the README's text with the table of headline claims between its marks."""
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    begin, end = MARKS
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{readme} needs {begin} and {end}, each once, where its table of claims goes")
    by_id = {entry.id: entry for entry in found}
    lines = ["| claim | what we found | verdict |", "|---|---|---|"]
    for id_ in HEADLINES:
        entry, claim = by_id[id_], CLAIMS[id_].claim
        said = _cell(entry.finding.partition(". ")[0].rstrip("."))
        name = f"[{id_}](docs/claims.md#{id_.lower()})" if entry.files else id_
        lines.append(f"| {name}: {_cell(claim)} | {said} | {entry.verdict} |")
    before, after = text.partition(begin)[0], text.partition(end)[2]
    return "\n".join([before + begin, *lines, end + after])


def page(evidence: Path, target: Path, found: Sequence[Entry] | None = None) -> str:
    """Return the page's text, for these entries or those of the evidence; its links are relative to `target`."""
    found = entries(evidence) if found is None else found
    sets = [one for one in IMAGE_SETS.values() if one.respectable]
    respectable = ", ".join(f"{one.title} {100 * one.respectable:g}" for one in sets)
    epochs = ", ".join(f"{one.title} {one.epochs}" for one in sets)
    lead = LEAD.format(counts=_counts(found))
    chart = CHART.format(alt=TITLE, chart=_link(evidence / OVERVIEW, target))
    rules = RULES.format(evidence=_link(evidence, target), smoke=SMOKE_ONLY, respectable=respectable, epochs=epochs)
    parts = [lead, _table(found), chart, rules]
    parts += [_section(entry, target) for entry in found if entry.files]
    return "\n".join(part.strip("\n") + "\n" for part in parts)


# ---- reading the evidence


def _claim(evidence: Path, one: Claim) -> Entry:
    """Return a claim's entry, from its evidence at the largest scale there is, over all data sets."""
    scale, found = _deciding(evidence, one)
    if not found:
        return Entry(id=one.id, verdict=NO_EVIDENCE if one.built else NOT_BUILT)
    records, files = list(found.values()), tuple(found)
    made = _made(records)
    if scale == "smoke":
        return Entry(id=one.id, verdict=SMOKE_ONLY, files=files, made=made)
    whole = one.verdict(records)
    return Entry(
        id=one.id,
        verdict=whole.verdict,
        parts=whole.parts,
        finding=one.finding(records),
        lines=tuple(line for record in records for line in one.lines(record)),
        files=files,
        figures=tuple(figure for figure in [evidence / one.id / f"{scale}.svg"] if figure.exists()),
        made=made,
        waits={part.outcome for part in whole.parts} == {"not run"},
    )


def _deciding(evidence: Path, one: Claim) -> tuple[str, dict[Path, dict[str, Any]]]:
    """Return the largest scale with evidence of a claim, and its files; smoke, which decides nothing, comes last."""
    by_scale: dict[str, dict[Path, dict[str, Any]]] = {}
    for path in sorted((evidence / one.id).glob("*.json")) if one.built else ():
        record = _read(path)
        by_scale.setdefault(str(record.get("scale")), {})[path] = record
    for scale, found in by_scale.items():  # in the claim's order of sets
        order = {name: number for number, name in enumerate(one.sets)}
        ordered = sorted(found.items(), key=lambda item: order.get(item[1].get("data", ""), len(order)))
        by_scale[scale] = dict(ordered)
    return next(((scale, by_scale[scale]) for scale in (*SCALES, "smoke") if scale in by_scale), ("", {}))


def _figures(evidence: Path) -> list[tuple[Claim, Path, list[Path]]]:
    """Return, for each claim with evidence and a way to draw it, its figure and the files that the figure shows."""
    found = []
    for one in CLAIMS.values():
        scale, files = _deciding(evidence, one) if getattr(one, "figure", None) else ("", {})
        if files and scale != "smoke":
            found.append((one, evidence / one.id / f"{scale}.svg", list(files)))
    return found


def _statement(evidence: Path, one: Statement) -> Entry:
    path = evidence / "theory" / f"{one.id}.json"
    if not path.exists():
        return Entry(id=one.id, verdict=NO_EVIDENCE)
    record = _read(path)
    return Entry(
        id=one.id,
        verdict=one.verdict([record]).verdict,
        finding=one.finding([record]),
        lines=tuple(one.lines(record)),
        files=(path,),
        made=_made([record]),
        tested=record["tested"].rstrip("."),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        record = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as evidence: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{path} is no evidence; it holds a {type(record).__name__}")
    return record


def _refuse_unknown(evidence: Path) -> None:
    """Raise ValueError for a folder or file that belongs to no claim, which would otherwise be left out silently."""
    known = {*CLAIMS, "runs", "theory", "trained"}
    for path in sorted(evidence.glob("*")):
        if path.is_dir() and path.name not in known:
            raise ValueError(f"{path} belongs to no claim; the ids are {', '.join(CLAIMS)}")
    for path in sorted((evidence / "theory").glob("*.json")):
        if not isinstance(CLAIMS.get(path.stem), Statement):
            statements = ", ".join(id_ for id_, one in CLAIMS.items() if isinstance(one, Statement))
            raise ValueError(f"{path} belongs to no statement; those are {statements}")


def _made(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the commands, devices, versions and commits behind the numbers."""
    said = []
    for record in records:
        where = record["environment"]
        commit = _short(where["commit"]) + (" with changes" if where["dirty"] else "")
        torch = where["versions"].get("torch", "?")
        device = where["device"] if where["device"] != "cpu" else where["cpu"]["name"]
        said.append(f"`{where['command']}` on {device}, torch {torch}, commit {commit}, {where['date'][:10]}")
        for one in record.get("earlier", []):
            made = f"`{one['command']}`, commit {_short(one['commit'])}, {one['date'][:10]}"
            said.append(f"its first {one['seeds']} seeds by {made}")
    arms = [arm for record in records for arm in record.get("arms", {}).values()]
    said += _trained("its runs", [run for arm in arms for run in arm["runs"]])
    said += _trained("its rates chosen", [run for arm in arms for run in arm.get("grid", {}).get("rates", [])])
    return "; ".join(dict.fromkeys(said))


def _trained(what: str, runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the devices and commits of trainings that name them; they may be older than those of the command."""
    commits = dict[str, dict[str, None]]()
    for run in runs:
        if "commit" in run:
            commits.setdefault(run["device"], {})[_short(run["commit"])] = None
    return [f"{what} on {device}, by commit {', '.join(one)}" for device, one in commits.items()]


def _short(commit: str | None) -> str:
    return (commit or "unknown")[:12]


# ---- writing the page


def _counts(found: Sequence[Entry]) -> str:
    """Return a sentence that says how many claims have which verdict."""
    verdicts = [entry.verdict for entry in found]
    counted = [f"{one}: {verdicts.count(one)}" for one in VERDICTS if one in verdicts]
    unbuilt = verdicts.count(NOT_BUILT)
    missing = sum(verdict in WITHOUT_EVIDENCE for verdict in verdicts) - unbuilt
    waiting = sum(entry.waits for entry in found)
    if waiting:
        counted = [f"{one} ({waiting} for want of runs)" if one.startswith("undecided") else one for one in counted]
    said = ", ".join(counted) or "none is decided"
    said += f"; no evidence yet: {missing}" if missing else ""
    said += f"; not built yet: {unbuilt}" if unbuilt else ""
    return (
        f"{len(found)} claims: of the two papers, of those that followed them, and of our own. "
        f"**{said.capitalize()}.** All that are built can be repeated, with one command each."
    )


def _table(found: Sequence[Entry]) -> str:
    lines = ["| id | claim | what we found | verdict |", "|---|---|---|---|"]
    for entry in found:
        claim = CLAIMS[entry.id]
        name = f"[{entry.id}](#{entry.id.lower()})" if entry.files else entry.id
        bold = f"**{entry.verdict}**" if entry.verdict not in WITHOUT_EVIDENCE else entry.verdict
        bold += ", runs missing" if entry.waits else ""
        finding = entry.finding.partition(". ")[0].rstrip(".")
        lines.append(f"| {name} | {_cell(claim.claim)} | {_cell(finding)} | {bold} |")
    return "\n".join(lines)


def _section(entry: Entry, target: Path) -> str:
    claim = CLAIMS[entry.id]
    lines = [f"## {entry.id}", "", *([entry.finding, ""] if entry.finding else [])]
    waits = ", since the runs that it asks for are missing" if entry.waits else ""
    lines += [f"The claim: {claim.claim}. Verdict: **{entry.verdict}**{waits}.", ""]
    if entry.verdict == SMOKE_ONLY:
        lines += ["The machinery has been run at smoke scale. That is a test of the program and says nothing here.", ""]
    for figure in entry.figures:
        lines += [f"![{entry.id}: {claim.claim}]({_link(figure, target)})", ""]
    tables: dict[str, list[TableRow]] = {}
    for line in entry.lines:
        if isinstance(line, TableRow):
            tables.setdefault(line.table, []).append(line)
    lines += _rows(tables.pop("", []))
    lines += [
        "<details><summary>When it holds, statement by statement; more numbers, and how they were made</summary>",
        "",
    ]
    lines += [f"It holds if: {claim.holds_if}. Tested on: {entry.tested or claim.test}.", ""]
    lines += [f"- {part.name}: **{part.outcome}** ({part.why})" for part in entry.parts]
    lines += [""] if entry.parts else []
    for title, rows in tables.items():
        lines += [f"{title}:", "", *_rows(rows)]
    plain = [line for line in entry.lines if not isinstance(line, TableRow)]
    lines += [f"- {line}" for line in plain]
    lines += [""] if plain else []
    files = ", ".join(f"[{path.name}]({_link(path, target)})" for path in entry.files)
    lines += [f"Evidence: {files}; {entry.made}.", "", "</details>", ""]
    return "\n".join(lines)


def _rows(rows: Sequence[TableRow]) -> list[str]:
    """Return a table of all columns that the rows have, in their order, the paper's last. If no cell has an interval,
    it says once that all are of one seed."""
    columns: list[str] = []
    for row in rows:
        at = 0
        for column in row.cells:
            if column not in columns:
                columns.insert(at, column)
            at = columns.index(column) + 1
    columns = [column for column in columns if any(row.cells.get(column) for row in rows)]
    columns.sort(key=lambda column: column == THE_PAPER)
    with contextlib.suppress(ValueError):  # learning rates, which no row need have all of
        columns.sort(key=float)
    lines = [[row.what, *(row.cells.get(column, "") for column in columns)] for row in rows]
    cells = "".join(chain(*lines))
    single = ONE_SEED in cells and "[" not in cells
    if single:
        lines = [[cell.replace(ONE_SEED, "") for cell in line] for line in lines]
    lines = [["one seed" if single else "", *columns], ["---"] * (1 + len(columns)), *lines]
    return [*(f"| {' | '.join(map(_cell, line))} |" for line in lines), ""] if rows else []


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _link(path: Path, target: Path) -> str:
    return Path(os.path.relpath(path, target.parent)).as_posix()
