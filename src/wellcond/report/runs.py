"""Make a report page from run folders.

    report_runs(["runs/a"])                               # how it trained, and what its probe measured if it had one
    report_runs(["runs/a", "runs/b"], "report.html")      # compared
    report_runs(["runs/a/probe.jsonl"])                   # a single file; the page goes next to it
    report_runs(["measure-vit_tiny"])                     # regenerate the page that `wellcond measure` wrote there

Nothing is written unless everything could be read, and an old page is kept until the new one is complete.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from warnings import catch_warnings, simplefilter

from wellcond.records import (
    CONFIG,
    METRICS,
    PROBE,
    REPORT,
    Event,
    Run,
    TrainRow,
    ValidationRow,
    check_writable,
    read_rows,
)
from wellcond.usage import wrong_usage

from .measured import UNTRAINED, UNTRAINED_ROWS, Measured, measured_config
from .page import Page
from .reference import reference
from .run_charts import Shown
from .run_page import run_page

__all__ = ["report_runs"]

IMAGE_TASKS = ("classify", "linear_probe")  # with the same kind of token matrices as our evidence
T = TypeVar("T")


def report_runs(runs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write the page of these runs, each a folder or a probe's .jsonl file, and return its path.

    Args:
        output: a file, or a folder that gets a report.html; by default next to the rows of a single run, or in the
            working directory for several.

    Raises ValueError for a run that does not exist or has nothing to show, and for an output that cannot be written or
    is the page of another measurement.
    """
    with wrong_usage():
        if not runs:
            raise ValueError("no runs were given; name run folders, or .jsonl files of a probe")
        found = [_open(path) for path in runs]
        target = _target([run.probe_file for run in found], output)
        check_writable(target)
    page = (_measured_page(found[0].probe_file) if len(found) == 1 else None) or _runs_page(found)
    try:
        return page.write(target)
    except OSError as error:
        raise ValueError(
            f"the page cannot be written to {target} ({error.strerror}); choose another --output"
        ) from None


def _open(path: str | Path) -> Run:
    run = Run.open(path)
    if not run.probe_file.is_file() and not (run.path / METRICS).is_file():
        inside = sorted(str(file.parent) for name in (METRICS, PROBE) for file in run.path.glob(f"*/{name}"))
        runs = f"name its runs: {' '.join(dict.fromkeys(inside))}" if inside else "was a run trained there?"
        raise ValueError(f"the folder {path} has no {METRICS} and no {PROBE}; {runs}")
    return run


def _measured_page(file: Path) -> Page | None:
    """Return the page of a folder that `wellcond measure` wrote, with everything it knows; None for any other."""
    if file.name != PROBE:
        return None
    torn: list[str] = []
    measured = Measured.read(file.parent, lambda path: _some(path, _read(path, lambda: read_rows(path), torn)))
    return replace(measured, notes=[*measured.notes, *torn]).page() if measured else None


def _runs_page(runs: Sequence[Run]) -> Page:
    notes: list[str] = []
    shown = []
    for name, run in zip(_names([run.probe_file for run in runs]), runs, strict=True):
        shown.append(_shown(name, run, notes))
        notes += _measured_notes(name, run.probe_file)
    shapes = {run.shape for run in shown if run.probe is not None}
    shape = shapes.pop() if len(shapes) == 1 else None
    if shape is None:
        return run_page(shown, notes=notes)
    if (like := reference().nearest(*shape)) is None:
        return run_page(shown, notes=[*filter(None, [reference().too_far(*shape)]), *notes])
    notes.insert(0, like.beside(shape, ["trained"]))
    return run_page(shown, notes=notes, reference={f"trained {like.them}": like.trained})


def _shown(name: str, run: Run, notes: list[str]) -> Shown:
    """Collect what the page needs of a run. Damage to files beside the probe's rows becomes a note."""
    rows: list[Any] = _read(run.probe_file, lambda: run.probe, notes)
    metrics = run.path / METRICS
    model, recipe, shape = "", "", None
    config: dict[str, Any] = {}
    train: list[TrainRow] = []
    validation: list[ValidationRow] = []
    events: list[Event] = []
    try:
        train, validation, events = _read(metrics, lambda: (run.train, run.validation, run.events), notes)
        if run.unknown_rows:
            notes.append(f"{_short(metrics)}: {run.unknown_rows} rows of unknown kind are left out.")
    except ValueError as error:
        if not rows:
            raise
        notes.append(f"The losses are not shown: {str(error).replace(str(metrics), _short(metrics))}")
    try:
        model, config = run.model, run.config
        recipe = str(config.get("recipe") or "")
        kind = run.about.get("kind", config.get("task"))  # of a registered task, the built-in one that it is like
        shape = run.about.get("shape") if kind in IMAGE_TASKS else None
    except (ValueError, OSError) as error:
        why = str(error).replace(str(run.path), run.path.name)  # a page must not reveal a machine's folders
        notes.append(f"{_short(run.path / CONFIG)} cannot be read ({why}).")
    about: dict[str, Any] = {"name": name, "model": model, "recipe": recipe, "config": config}
    shown = Shown(**about, train=train, validation=validation, events=events)
    if rows:
        return replace(shown, probe=rows, shape=tuple(shape) if shape else None)
    if not shown.logged or run.probe_file.name != PROBE:  # a single file was requested
        raise ValueError(
            f"{run.probe_file if run.probe_file.is_file() else metrics} has no rows yet; there is nothing to draw"
        )
    return shown


def _measured_notes(name: str, file: Path) -> list[str]:
    """Return the notes of `wellcond measure` on one run among several."""
    config = measured_config(file.parent) if file.name == PROBE else None
    if config is None:
        return []
    notes = [f"{name}: {text}" for text in config.get("notes") or () if not str(text).startswith(f"{UNTRAINED}:")]
    if file.with_name(UNTRAINED_ROWS).exists():
        notes.append(f"{name}: its untrained start is not among these runs; add its {UNTRAINED_ROWS} to include it.")
    return notes


def _names(files: Sequence[Path]) -> list[str]:
    """Name runs by folder (for a probe.jsonl) or file; equal names get more of their path, else a number."""
    parts = [[p for p in file.resolve().parts[:-1] if p != file.anchor] for file in files]
    parts = [folder if file.name == PROBE else [*folder, file.stem] for folder, file in zip(parts, files, strict=True)]
    names = dict.fromkeys(map(tuple, parts), "")
    for taken in range(1, 1 + max(map(len, names))):
        repeated = {name for name, count in Counter(names.values()).items() if count > 1 or not name}
        names = {part: _tail(part, taken) if name in repeated else name for part, name in names.items()}
    seen: Counter[str] = Counter()
    numbered = []
    for name in (names[tuple(part)] for part in parts):
        seen[name] += 1
        numbered.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return numbered


def _tail(parts: Sequence[str], count: int) -> str:
    return "/".join(parts[-count:]) or "run"


def _read(file: Path, read: Callable[[], T], notes: list[str]) -> T:
    """Return `read()`; its warning of a torn last line becomes a note, so that readers of the page see it too."""
    with catch_warnings(record=True) as caught:
        simplefilter("always")
        try:
            found = read()
        except OSError as error:
            raise ValueError(f"{file} cannot be read ({error.strerror})") from None
    notes += [f"{_short(file)}: its last line was cut off and is left out." for _ in caught]
    return found


def _some(file: Path, rows: list[Any]) -> list[Any]:
    if not rows:
        raise ValueError(f"{file} has no rows; nothing has been measured yet")
    return rows


def _short(file: Path) -> str:
    return f"{file.resolve().parent.name}/{file.name}"


def _target(files: Sequence[Path], output: str | Path | None) -> Path:
    if output is not None:
        output = Path(output)
        target = output / REPORT if output.is_dir() or not output.suffix else output
    elif len(files) > 1:
        target = Path(REPORT)
    else:  # next to its rows, without overwriting the page of others in that folder
        target = files[0].with_name(REPORT) if files[0].name == PROBE else files[0].with_suffix(".html")
    rows = target.with_name(PROBE)
    if target.name == REPORT and measured_config(target.parent) and [f.resolve() for f in files] != [rows.resolve()]:
        raise ValueError(
            f"{target} is the page that wellcond measure wrote and would be overwritten; choose another --output"
        )
    return target
