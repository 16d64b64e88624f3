"""The ledger: docs/claims.md, every claim with its verdict and figure, from the files under evidence/ alone.

    wellcond ledger                    # draw what is new, and write it
    wellcond ledger --check            # exit 1 where page and evidence differ
    entries(Path("evidence"))          # what the page says, as data

Verdicts are computed anew from the rows of each file, so that a change of the rules changes the page. A smoke run is no
evidence: it is named "smoke only" and decides nothing.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellcond.claims.catalogue import CLAIMS, OURS
from wellcond.claims.claim import Claim, Statement
from wellcond.claims.figures import can_draw, is_current, write_svg
from wellcond.claims.sets import IMAGE_SETS
from wellcond.records import read_json, write_text
from wellcond.verdicts import Part

__all__ = ["Entry", "check", "claim_of", "entries", "page", "run"]

SCALES = ("paper", "lab")  # whose evidence decides, the larger first
NO_EVIDENCE, SMOKE_ONLY = "no evidence yet", "smoke only"
LEAD = """\
# The claims, and what we found

Every claim of the two papers, some of the papers that followed them, and some of our own, each with an experiment and a
verdict. This page is written by

```sh
wellcond ledger
```

from the files in [evidence]({evidence}) and from nothing else; `wellcond ledger --check` fails where the two differ.
`wellcond reproduce ID --scale lab` and `wellcond theory ID` make the evidence.

**The rules.** Paired seeds, three; where three leave a set undecided and a run takes under two minutes, two more, once,
and the interval is then 97.5 % instead of 95 (Student's t). The same budget for every arm; each arm's learning rate
from the same grid, chosen on a held-out part of the training set and extended while the best lies at its edge; the test
set looked at once. The plain arm has to be respectable, in % top-1 ({respectable}),
after its epochs ({epochs}); otherwise the verdict is *undecided*. The tasks
of the Long Range Arena take the published rates and 50,000 steps, and no grid. "No difference" is shown by an interval
inside a stated margin. Condition numbers come from a forward pass of their own in float32 without TF32, checked in
float64, with the untrained model beside.

**The verdicts.** *holds* · *holds in part* · *does not hold* · *undecided*, with the smallest distance these runs would
have seen four times out of five · *out of reach here*, with what it would take. *{smoke}*: it has been run as a test of
the machinery, which shows nothing about the claim.

Not rebuilt as trained models: the other baselines of Skyformer's main table (BigBird, Reformer, Linformer, Informer,
Performer).
"""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One claim in the ledger."""

    id: str
    verdict: str
    parts: tuple[Part, ...] = ()
    lines: tuple[str, ...] = ()
    """What was found, in sentences with numbers."""
    files: tuple[Path, ...] = ()
    figures: tuple[Path, ...] = ()
    made: str = ""
    """By which command, on what, at which commit."""
    tested: str = ""
    """Of a statement: on what, as its own file says."""


def entries(evidence: Path) -> list[Entry]:
    """One entry for each claim, in their order. ValueError for a file that belongs to no claim, or cannot be read."""
    _refuse_unknown(evidence)
    return [
        _statement(evidence, one) if isinstance(one, Statement) else _claim(evidence, one)
        for id_, one in CLAIMS.items()
        if id_ in OURS or (evidence / id_).is_dir()  # claims of plug-ins may keep their evidence elsewhere
    ]


def run(evidence: Path, target: Path) -> Path:
    """Draw the figures, where rows or drawing have changed, and write the page."""
    for one, figure, files in _figures(evidence):
        if can_draw() or not is_current(figure, made_from=files):
            write_svg(one.draw([_read(path) for path in files]), figure, made_from=files)
    write_text(target, page(evidence, target))
    return target


def check(evidence: Path, target: Path) -> str:
    """Why the page is not that of the evidence, in words; empty where it is."""
    if not target.exists():
        return f"there is no {target}; wellcond ledger writes it"
    wanted, found = (text.splitlines() for text in (page(evidence, target), target.read_text(encoding="utf-8")))
    if wanted == found:
        old = [figure for _, figure, files in _figures(evidence) if not is_current(figure, made_from=files)]
        return f"{old[0]} shows other rows than {evidence} has; wellcond ledger draws it anew" if old else ""
    length = max(len(wanted), len(found))
    wanted, found = (lines + [""] * (length - len(lines)) for lines in (wanted, found))
    line = next(number for number in range(length) if wanted[number] != found[number])
    return (
        f"{target} is not what {evidence} says, from line {line + 1} on: {found[line]!r} there, {wanted[line]!r} by "
        "the evidence; wellcond ledger writes it anew"
    )


def page(evidence: Path, target: Path) -> str:
    """The page as text; its links start from `target`."""
    found = entries(evidence)
    sets = [one for one in IMAGE_SETS.values() if one.respectable]
    respectable = ", ".join(f"{one.title} {100 * one.respectable:g}" for one in sets)
    epochs = ", ".join(f"{one.title} {one.epochs}" for one in sets)
    link = _link(evidence, target)
    lead = LEAD.format(evidence=link, smoke=SMOKE_ONLY, respectable=respectable, epochs=epochs)
    parts = [lead, _table(found)]
    parts += [_section(entry, target) for entry in found if entry.files]
    return "\n".join(part.strip("\n") + "\n" for part in parts)


# ---- reading the evidence


def _claim(evidence: Path, one: Claim) -> Entry:
    """From the largest scale there is, over all its data sets."""
    scale, found = _deciding(evidence, one)
    if not found:
        return Entry(id=one.id, verdict=NO_EVIDENCE)
    files, made = tuple(found), _made(list(found.values()))
    if scale == "smoke":
        return Entry(id=one.id, verdict=SMOKE_ONLY, files=files, made=made)
    whole = one.verdict(list(found.values()))
    return Entry(
        id=one.id,
        verdict=whole.verdict,
        parts=whole.parts,
        lines=tuple(line for record in found.values() for line in one.lines(record)),
        files=files,
        figures=tuple(figure for other, figure, _ in _figures(evidence) if other is one),
        made=made,
    )


def _deciding(evidence: Path, one: Claim) -> tuple[str, dict[Path, dict[str, Any]]]:
    """The largest scale with evidence of a claim, and its files; smoke decides nothing, and comes last."""
    by_scale: dict[str, dict[Path, dict[str, Any]]] = {}
    for path in sorted((evidence / one.id).glob("*.json")) if one.built else ():
        record = _read(path)
        by_scale.setdefault(str(record.get("scale")), {})[path] = record
    return next(((scale, by_scale[scale]) for scale in (*SCALES, "smoke") if scale in by_scale), ("", {}))


def _figures(evidence: Path) -> list[tuple[Claim, Path, list[Path]]]:
    """Of each claim with evidence and a way to draw it: its figure, and the files that this shows."""
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
    """A file under a name that no claim has would silently be left out."""
    known = {*CLAIMS, "runs", "theory", "trained"}
    for path in sorted(evidence.glob("*")):
        if path.is_dir() and path.name not in known:
            raise ValueError(f"{path} belongs to no claim; the ids are {', '.join(CLAIMS)}")
    for path in sorted((evidence / "theory").glob("*.json")):
        if not isinstance(CLAIMS.get(path.stem), Statement):
            statements = ", ".join(id_ for id_, one in CLAIMS.items() if isinstance(one, Statement))
            raise ValueError(f"{path} belongs to no statement; those are {statements}")


def _made(records: Sequence[Mapping[str, Any]]) -> str:
    """The commands, devices, versions and commits behind the numbers."""
    said = []
    for record in records:
        where = record["environment"]
        commit = _short(where["commit"]) + (" with changes" if where["dirty"] else "")
        torch = where["versions"].get("torch", "?")
        device = where["device"] if where["device"] != "cpu" else where["cpu"]["name"]
        said.append(f"`{where['command']}` on {device}, torch {torch}, commit {commit}, {where['date'][:10]}")
        trained = dict.fromkeys(f"{run['device']}, commit {_short(run['commit'])}" for run in _runs_of(record))
        if trained:
            said.append(f"its runs on {' and '.join(trained)}")
    return "; ".join(dict.fromkeys(said))


def _runs_of(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The runs of all arms that name their device and commit, which may be older than the command's."""
    arms = record.get("arms", {}).values()
    runs = [run for arm in arms for run in arm["runs"]]
    return [run for run in runs if "commit" in run]


def _short(commit: str | None) -> str:
    return (commit or "unknown")[:12]


# ---- writing the page


def _table(found: Sequence[Entry]) -> str:
    lines = ["| id | claim | it holds if | verdict |", "|---|---|---|---|"]
    for entry in found:
        claim = CLAIMS[entry.id]
        name = f"[{entry.id}](#{entry.id.lower()})" if entry.files else entry.id
        bold = f"**{entry.verdict}**" if entry.verdict not in (NO_EVIDENCE, SMOKE_ONLY) else entry.verdict
        lines.append(f"| {name} | {_cell(claim.claim)} | {_cell(claim.holds_if)} | {bold} |")
    return "\n".join(lines)


def _section(entry: Entry, target: Path) -> str:
    claim = CLAIMS[entry.id]
    lines = [
        f"## {entry.id}",
        "",
        f"{claim_of(entry)} Tested on: {entry.tested or claim.test}. Verdict: **{entry.verdict}**.",
        "",
    ]
    if entry.verdict == SMOKE_ONLY:
        lines += ["The machinery has been run at smoke scale. That is a test of the program and says nothing here.", ""]
    lines += [f"- {part.name}: **{part.outcome}** ({part.why})" for part in entry.parts]
    lines += [""] if entry.parts else []
    lines += [f"- {line}" for line in entry.lines]
    lines += [""] if entry.lines else []
    for figure in entry.figures:
        lines += [f"![{entry.id}: {claim.claim}]({_link(figure, target)})", ""]
    files = ", ".join(f"[{path.name}]({_link(path, target)})" for path in entry.files)
    lines += [f"Evidence: {files}; {entry.made}.", ""]
    return "\n".join(lines)


def claim_of(entry: Entry) -> str:
    """What is claimed, as a sentence."""
    text = CLAIMS[entry.id].claim
    return text[0].upper() + text[1:] + "."


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _link(path: Path, target: Path) -> str:
    return Path(os.path.relpath(path, target.parent)).as_posix()
