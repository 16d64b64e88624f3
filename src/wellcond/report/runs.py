"""Run folders become a report page.

    report_runs(["runs/a", "runs/b"], "report.html")      # probe.jsonl of each; metrics.jsonl and config.json if there
    report_runs(["runs/a/probe.jsonl"])                   # a file by itself; the page goes beside it
    report_runs(["measure-vit_tiny"])                     # the page that `wellcond measure` wrote there, made again

Nothing is written unless all of it could be read, and an old page stays until the new one is whole.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

from wellcond.records import check_writable, read_json, read_rows

from .conditioning import conditioning_page
from .curves import report_curves
from .measured import PAGE, ROWS, UNTRAINED, UNTRAINED_ROWS, Measured, measured_config
from .page import Page

__all__ = ["report_runs"]

PROBE, METRICS, CONFIG, REPORT = "probe.jsonl", "metrics.jsonl", "config.json", "report.html"
assert (PROBE, REPORT) == (ROWS, PAGE), "a measurement's folder reads like a run's"
LOSSES = ("loss", "train_loss")  # what a loss is called in metrics.jsonl


def report_runs(runs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write the page of these runs, each a folder or a .jsonl file, and return its path.

    Args:
        output: a file, or a folder that gets a report.html; by default beside the rows of a single run, or in the
            working folder for several.

    Raises ValueError for a run that is not there or has nothing to show, and for an output that cannot be written or is
    the page of another measurement.
    """
    if not runs:
        raise ValueError("no runs were given; name run folders, or .jsonl files of a probe")
    if len(runs) == 1 and _without_probe(Path(runs[0])):
        target = _target([Path(runs[0]) / PROBE], output)
        check_writable(target)
        return report_curves(runs[0], target)
    files = [_probe_file(Path(run)) for run in runs]
    target = _target(files, output)
    check_writable(target)
    page = (_measured_page(files[0]) if len(files) == 1 else None) or _runs_page(files)
    try:
        return page.write(target)
    except OSError as error:
        raise ValueError(
            f"the page cannot be written to {target} ({error.strerror}); choose another --output"
        ) from None


def _measured_page(file: Path) -> Page | None:
    """The page of a folder that `wellcond measure` made, with all that it knows; None for any other."""
    if file.name != ROWS:
        return None
    torn: list[str] = []
    measured = Measured.read(file.parent, lambda path: _read(path, torn))
    return replace(measured, notes=[*measured.notes, *torn]).page() if measured else None


def _runs_page(files: Sequence[Path]) -> Page:
    names = _names(files)
    notes: list[str] = []
    rows = {name: _read(file, notes) for name, file in zip(names, files, strict=True)}
    losses, models = {}, {}
    for name, file in zip(names, files, strict=True):
        losses[name] = _losses(file.with_name(METRICS), notes)
        models[name] = _model(file.with_name(CONFIG), notes)
        notes += _measured_notes(name, file)
    return conditioning_page(rows, notes=notes, losses=losses, models=models)


def _measured_notes(name: str, file: Path) -> list[str]:
    """What `wellcond measure` has to say of one run among several."""
    config = measured_config(file.parent) if file.name == ROWS else None
    if config is None:
        return []
    notes = [f"{name}: {text}" for text in config.get("notes") or () if not str(text).startswith(f"{UNTRAINED}:")]
    if file.with_name(UNTRAINED_ROWS).exists():
        notes.append(f"{name}: its untrained start is not among these runs; name its {UNTRAINED_ROWS} to have it.")
    return notes


def _without_probe(run: Path) -> bool:
    return run.is_dir() and not (run / PROBE).is_file() and (run / METRICS).is_file()


def _probe_file(run: Path) -> Path:
    if run.is_dir():
        if not (run / PROBE).is_file():
            more = "; alone it has a page of its losses" if _without_probe(run) else ""
            raise ValueError(f"the folder {run} has no {PROBE}; was this run trained with a probe?{more}")
        return run / PROBE
    if not run.exists():
        raise ValueError(f"there is no {run}; give a run folder with a {PROBE}, or a .jsonl file")
    return run


def _names(files: Sequence[Path]) -> list[str]:
    """The folder's name for a probe.jsonl, else the file's; longer where two are alike, else numbered."""
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


def _read(file: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The rows; a torn last line becomes a note, for a page that is read later should say so too."""
    with catch_warnings(record=True) as caught:
        simplefilter("always")
        try:
            rows = read_rows(file)
        except OSError as error:
            raise ValueError(f"{file} cannot be read ({error.strerror})") from None
    notes += [f"{file.parent.name}/{file.name}: its last line was torn, and is left out." for _ in caught]
    if not rows:
        raise ValueError(f"{file} has no rows; nothing has been measured yet")
    return rows


def _losses(file: Path, notes: list[str]) -> list[tuple[int, float]]:
    """(step, loss) of a metrics file, where there is one: from rows with a loss, or rows named loss with a value."""
    if not file.is_file():
        return []
    try:
        return sorted(_points(_read(file, notes)).items())
    except ValueError as error:
        notes.append(f"The loss is not shown: {str(error).replace(str(file), f'{file.parent.name}/{file.name}')}")
        return []


def _points(rows: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    found = {}
    for row in rows:
        value = next((row[name] for name in LOSSES if name in row), None)
        if value is None and row.get("name") in LOSSES:
            value = row.get("value")
        step = row.get("step")
        if isinstance(step, int) and isinstance(value, int | float):
            found[step] = float(value)
    return found


def _model(file: Path, notes: list[str]) -> str:
    """The model's name in a run's configuration, where it has one."""
    if not file.is_file():
        return ""
    try:
        config = read_json(file)
    except (OSError, ValueError) as error:
        why = str(error).replace(str(file.parent), file.parent.name)  # a page names no folders of a machine
        notes.append(f"{file.parent.name}/{file.name} cannot be read ({why}).")
        return ""
    model = config.get("model") if isinstance(config, dict) else None
    if isinstance(model, dict):
        model = model.get("name")
    return model if isinstance(model, str) else ""


def _target(files: Sequence[Path], output: str | Path | None) -> Path:
    if output is not None:
        output = Path(output)
        target = output / REPORT if output.is_dir() or not output.suffix else output
    elif len(files) > 1:
        target = Path(REPORT)
    else:  # beside its rows, and not over the page of others that lie there
        target = files[0].with_name(REPORT) if files[0].name == PROBE else files[0].with_suffix(".html")
    rows = target.with_name(ROWS)
    if target.name == PAGE and measured_config(target.parent) and [f.resolve() for f in files] != [rows.resolve()]:
        raise ValueError(
            f"{target} is the page that wellcond measure wrote, and would be lost; choose another --output"
        )
    return target
