"""A run's folder: what its files hold, who writes them, and the one way to read them.

    run = Run.open("runs/a")                     # or only a probe's file: "runs/a/early.jsonl"
    run.config["lr"], run.model                  # config.json
    run.train[-1].loss, run.validation[-1].metrics["top1"], run.events          # metrics.jsonl
    run.probe                                    # probe.jsonl: the rows of a probe, as dicts

    writer = RunWriter(path=Path("runs/a"))
    writer.begin(settings)                       # config.json
    writer.log(Event(step=3, event="diverged"))  # metrics.jsonl; if the disk is full, rows wait for the next write
    writer.measured(probe.rows())                # probe.jsonl
    writer.flush(sync=True)                      # flush everything to disk (fsync)

A folder holds config.json, metrics.jsonl, probe.jsonl, checkpoints/ and report.html. The rows of metrics.jsonl are of
three kinds, distinguished by `split`: `train`, `val` and `event`. config.json has the `version` of these formats; a
folder without one was written before there were versions, in the form of version 1.
"""

import contextlib
import itertools
import math
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from wellcond.environment import environment
from wellcond.records.rows import Row, append_rows, fsync, read_json, read_rows, replace_rows, write_json

__all__ = [
    "CONFIG", "METRICS", "PROBE", "REPORT", "VERSION", "Event", "MetricRow", "Run", "RunWriter", "TrainRow",
    "ValidationRow",
]  # fmt: skip

CONFIG = "config.json"
"""A run's file: settings, data and environment."""
METRICS = "metrics.jsonl"
"""A run's file: losses, validations and events."""
PROBE = "probe.jsonl"
"""A run's file: what the probe measured."""
REPORT = "report.html"
"""A run's file: its report page."""
VERSION = 1
"""The version of the formats of a run's files, as `config.json` records it."""


@dataclass(frozen=True, kw_only=True)
class TrainRow:
    """What was logged at one training step; fields that a row of an older run lacks are NaN."""

    step: int
    """The number of steps done."""
    epoch: float = math.nan
    """The number of epochs done, including the fraction of the current one."""
    loss: float
    """The loss of that step."""
    lr: float = math.nan
    gradient_norm: float = math.nan
    """The norm of that step's gradient, before clipping."""
    skipped: int = 0
    """Steps skipped so far because their gradient was not finite."""
    images_per_second: float = math.nan
    """Samples per second since the previous row."""
    data_wait: float = math.nan
    """The share of that time spent waiting for data."""
    memory_mib: float | None = None
    """Peak memory on the GPU so far, in MiB; None without a GPU."""

    def as_json(self) -> dict[str, Any]:
        """Return the row as it is written."""
        row = {"step": self.step, "epoch": self.epoch, "split": "train", **vars(self)}
        return {name: value for name, value in row.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class ValidationRow:
    """One validation."""

    step: int
    epoch: float = math.nan
    metrics: Mapping[str, float]
    """Values by name: `loss`, `top1`, …"""
    best: float = math.nan
    """The best value so far of the metric that the task is judged by."""

    def as_json(self) -> dict[str, Any]:
        """Return the row as it is written."""
        return {"step": self.step, "epoch": self.epoch, "split": "val", **self.metrics, "best": self.best}


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to the run: it diverged, went back, or was resumed under other circumstances."""

    step: int
    event: str
    """What happened, in words."""

    def as_json(self) -> dict[str, Any]:
        """Return the row as it is written."""
        return {"step": self.step, "split": "event", "event": self.event}


MetricRow = TrainRow | ValidationRow | Event
"""A row of `metrics.jsonl`."""


def _metric_row(row: Any) -> MetricRow | None:
    """Parse a line of metrics.jsonl; None if it is of no known kind.

    A row with a loss but no split is a training row: people with their own training loop write such rows.
    """
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    step, split = row["step"], row.get("split", "train")
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
    if split == "train" and "loss" in numbers:
        known = {name: numbers[name] for name in TrainRow.__dataclass_fields__ if name in numbers}
        return TrainRow(**cast(Any, known))
    if split == "val":
        metrics = {name: value for name, value in numbers.items() if name not in ("step", "epoch", "best")}
        own = {name: numbers[name] for name in ("epoch", "best") if name in numbers}
        return ValidationRow(step=step, metrics=metrics, **own)
    if split == "event":
        return Event(step=step, event=str(row.get("event")))
    return None


@dataclass(frozen=True, kw_only=True)
class Run:
    """Reads a run's folder, each file when it is first needed. A missing file counts as empty.

    Properties raise ValueError if their file is damaged. A torn last line is left out with a warning.
    """

    path: Path
    probe_file: Path

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """Open a run's folder, or a file of probe rows with what lies beside it. Raises ValueError if there is none."""
        path = Path(path)
        if not path.exists():
            raise ValueError(f"there is no {path}; give a run folder, with {METRICS} or {PROBE}, or a .jsonl file")
        version = VERSION
        run = cls(path=path, probe_file=path / PROBE) if path.is_dir() else cls(path=path.parent, probe_file=path)
        with contextlib.suppress(ValueError, OSError):  # damaged: reported when its content is asked for
            version = run.about.get("version", VERSION)
        if version > VERSION:
            raise ValueError(
                f"{run.path} is a run of version {version}, and this wellcond reads versions up to {VERSION}; install "
                "a newer wellcond"
            )
        return run

    @cached_property
    def about(self) -> dict[str, Any]:
        """All of config.json: what, version, config, environment, data, processes."""
        file = self.path / CONFIG
        about = read_json(file) if file.is_file() else {}
        if not isinstance(about, dict):
            raise ValueError(f"{file} does not describe a run; put it back from a copy, or move it away")
        if not isinstance(about.get("version", VERSION), int):
            raise ValueError(
                f"{file} has the version {about['version']!r}, which is no number; put it back from a copy"
            )
        return about

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the training; empty if they are not known."""
        config = self.about.get("config")
        return config if isinstance(config, dict) else {}

    @property
    def model(self) -> str:
        """The model's name; empty if it is not known."""
        model = self.config.get("model") or self.about.get("model")
        return model if isinstance(model, str) else ""

    @cached_property
    def _metrics(self) -> tuple[list[MetricRow], int]:
        file = self.path / METRICS
        rows = [_metric_row(row) for row in read_rows(file)] if file.is_file() else []
        found = [row for row in rows if row is not None]
        return found, len(rows) - len(found)

    @property
    def metrics(self) -> list[MetricRow]:
        """All rows of metrics.jsonl, as they were written."""
        return self._metrics[0]

    @property
    def unknown_rows(self) -> int:
        """How many rows of metrics.jsonl are of no known kind, and therefore left out."""
        return self._metrics[1]

    @property
    def train(self) -> list[TrainRow]:
        """Rows of the training: loss, learning rate, speed."""
        return [row for row in self.metrics if isinstance(row, TrainRow)]

    @property
    def validation(self) -> list[ValidationRow]:
        """Rows of the validations."""
        return [row for row in self.metrics if isinstance(row, ValidationRow)]

    @property
    def events(self) -> list[Event]:
        """Rows of events: what happened during the run."""
        return [row for row in self.metrics if isinstance(row, Event)]

    @cached_property
    def probe(self) -> list[Row]:
        """Rows of a probe. They are not checked: anyone may have written the file."""
        return cast(list[Row], read_rows(self.probe_file)) if self.probe_file.is_file() else []


@dataclass(frozen=True, kw_only=True)
class RunWriter:
    """Writes the files of a run: each row once, even if processes are killed; a full disk does not stop the run."""

    path: Path
    writes: bool = True
    """Whether this process is the one that writes."""
    unwritten: dict[Path, list[Mapping[str, Any]]] = field(default_factory=dict)
    """Rows that could not be written yet, by file."""

    @property
    def name(self) -> str:
        """The folder's name, which rows carry as `run`."""
        return self.path.resolve().name

    @property
    def config_file(self) -> Path:
        """The file with the settings."""
        return self.path / CONFIG

    @property
    def metrics_file(self) -> Path:
        """The file with losses, validations and events."""
        return self.path / METRICS

    @property
    def probe_file(self) -> Path:
        """The file with the probe's rows."""
        return self.path / PROBE

    def read(self) -> Run:
        """Read what has been written so far."""
        return Run.open(self.path)

    def begin(self, config: Mapping[str, Any]) -> None:
        """Write config.json: what the run is, and where it is trained."""
        about = {"what": "wellcond train", "version": VERSION, "config": dict(config), "environment": environment()}
        write_json(self.config_file, about)

    def describe(self, **facts: Any) -> None:
        """Add facts to config.json that became known later, or have changed."""
        write_json(self.config_file, self.read().about | facts)

    def log(self, row: MetricRow) -> None:
        """Append a row to the metrics."""
        self._append(self.metrics_file, [row.as_json()])

    def measured(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows of the probe."""
        self._append(self.probe_file, rows)

    def flush(self, *, sync: bool = False) -> None:
        """Write the rows for which there was no room before. Raises OSError if there still is none.

        With `sync` all rows are then flushed to disk (fsync), so that they survive a power failure.
        """
        failed = None
        for file, rows in list(self.unwritten.items()):
            size = file.stat().st_size if file.exists() else 0
            try:
                append_rows(file, rows)
            except OSError as error:
                if file.exists() and file.stat().st_size > size:
                    os.truncate(file, size)  # undo a partial write: its rows will be written again
                failed = error  # there may be room for the other file's rows
            else:
                del self.unwritten[file]
        if failed is not None:
            raise failed
        for file in (self.metrics_file, self.probe_file, self.path) if sync else ():
            if file.exists():
                fsync(file)

    def forget_after(self, step: int) -> None:
        """Drop the rows of steps that will be repeated, written by a process that died before it saved its next state.

        Metrics of step 20 are written before the state after 20 steps is saved, but a measurement of step 20 only
        after it, before the next step: a run that resumes from that state keeps the metrics of 20, and measures 20
        again. Events, such as a divergence, have happened whatever is repeated, and are kept.
        """
        for file, last in ((self.metrics_file, step), (self.probe_file, step - 1)) if self.writes else ():
            if file.exists():
                rows = read_rows(file)  # as dicts, with fields that this version may not know
                kept = [row for row in rows if row.get("step", 0) <= last or row.get("split") == "event"]
                if len(kept) < len(rows) or not rows:
                    replace_rows(file, kept)

    def put_aside(self, *others: Path) -> list[Path]:
        """Rename the files of rows, and `others`, so that the run can start over and nothing is lost."""
        files = (self.metrics_file, self.probe_file, *others) if self.writes else ()
        there = [file for file in files if file.exists() and file.stat().st_size]

        def aside(file: Path, number: int) -> Path:
            return file.with_name(f"{file.stem}.before-{number}{file.suffix}")

        number = next(n for n in itertools.count(1) if not any(aside(file, n).exists() for file in files))
        return [file.rename(aside(file, number)) for file in there]

    def _append(self, file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
        if not self.writes:
            return
        warned = file in self.unwritten
        self.unwritten.setdefault(file, []).extend(rows)
        try:
            self.flush()
        except OSError as error:
            if file in self.unwritten and not warned:
                warnings.warn(f"{file} cannot be written ({error}); its rows wait in memory", stacklevel=3)
