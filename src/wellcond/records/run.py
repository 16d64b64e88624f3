"""A run's folder: what its files hold, who writes them, and the one way to read them.

    run = Run.open("runs/a")                     # or the file of a probe by itself: "runs/a/early.jsonl"
    run.config["lr"], run.model                  # config.json
    run.train[-1].loss, run.validation[-1].metrics["top1"], run.events          # metrics.jsonl
    run.probe                                    # probe.jsonl: the rows of a probe, as dicts

    writer = RunWriter(path=Path("runs/a"))
    writer.begin(settings)                       # config.json
    writer.log(Event(step=3, event="diverged"))  # metrics.jsonl; on a full disk rows wait for the next time
    writer.measured(probe.rows())                # probe.jsonl
    writer.flush(sync=True)                      # all of it past the system's own memory

A folder holds config.json, metrics.jsonl, probe.jsonl, checkpoints/ and report.html. The rows of metrics.jsonl are of
three kinds, told apart by `split`: `train`, `val` and `event`. config.json has the `version` of all this; a folder
without one was written before there were versions, in the form of version 1.
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
"""A run's file: its page."""
VERSION = 1
"""Of the folder's files; `config.json` has it."""


@dataclass(frozen=True, kw_only=True)
class TrainRow:
    """Some of the training's own steps; what a row of an older run lacks is NaN."""

    step: int
    """How many steps are done."""
    epoch: float = math.nan
    """How many epochs are done, the share of the present one included."""
    loss: float
    """Of that step."""
    lr: float = math.nan
    gradient_norm: float = math.nan
    """Of that step, before clipping."""
    skipped: int = 0
    """Steps so far that were left out, because their gradient was not finite."""
    images_per_second: float = math.nan
    """Of the steps since the row before."""
    data_wait: float = math.nan
    """The share of that time spent waiting for data."""
    memory_mib: float | None = None
    """The most memory that was in use on the GPU so far; None without one."""

    def as_json(self) -> dict[str, Any]:
        """The row as it is written."""
        row: dict[str, Any] = {
            "step": self.step,
            "epoch": self.epoch,
            "split": "train",
            "loss": self.loss,
            "lr": self.lr,
            "gradient_norm": self.gradient_norm,
            "skipped": self.skipped,
            "images_per_second": self.images_per_second,
            "data_wait": self.data_wait,
        }
        return row if self.memory_mib is None else row | {"memory_mib": self.memory_mib}


@dataclass(frozen=True, kw_only=True)
class ValidationRow:
    """One validation."""

    step: int
    epoch: float = math.nan
    metrics: Mapping[str, float]
    """By name: `loss`, `top1`, …"""
    best: float = math.nan
    """The best value so far of the metric that the task is judged by."""

    def as_json(self) -> dict[str, Any]:
        """The row as it is written."""
        return {"step": self.step, "epoch": self.epoch, "split": "val", **self.metrics, "best": self.best}


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to the run: it diverged, went back, or goes on under other circumstances."""

    step: int
    event: str
    """In words."""

    def as_json(self) -> dict[str, Any]:
        """The row as it is written."""
        return {"step": self.step, "split": "event", "event": self.event}


MetricRow = TrainRow | ValidationRow | Event
"""A row of `metrics.jsonl`."""


def _metric_row(row: Any) -> MetricRow | None:
    """A line of metrics.jsonl; None where it is of no known kind.

    A loss without a split is a training's: so do people write whose training loop is their own.
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
    """A run's folder, read: each file when it is first asked for. What is not there is empty.

    Each of them raises ValueError where its file is damaged. A torn last line is left out, with a warning.
    """

    path: Path
    probe_file: Path

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """The run in a folder, or of a file of probe rows with what lies beside it. ValueError where nothing is."""
        path = Path(path)
        if not path.exists():
            raise ValueError(f"there is no {path}; give a run folder, with {METRICS} or {PROBE}, or a .jsonl file")
        version = VERSION
        run = cls(path=path, probe_file=path / PROBE) if path.is_dir() else cls(path=path.parent, probe_file=path)
        with contextlib.suppress(ValueError, OSError):  # damaged: who asks for what it holds is told
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
        """The settings of the training; empty where they are not known."""
        config = self.about.get("config")
        return config if isinstance(config, dict) else {}

    @property
    def model(self) -> str:
        """The model's name; empty where it is not known."""
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
        """How many rows of metrics.jsonl are of no known kind, and left out."""
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
        """What happened on the way."""
        return [row for row in self.metrics if isinstance(row, Event)]

    @cached_property
    def probe(self) -> list[Row]:
        """What a probe measured. Nothing is checked here: the file may be anybody's."""
        return cast(list[Row], read_rows(self.probe_file)) if self.probe_file.is_file() else []


@dataclass(frozen=True, kw_only=True)
class RunWriter:
    """Writes the files of a run: each row once, whatever is killed, and no room is no reason to stop."""

    path: Path
    writes: bool = True
    """Whether this process is the one that writes."""
    unwritten: dict[Path, list[Mapping[str, Any]]] = field(default_factory=dict)
    """Rows that found no room yet."""

    @property
    def name(self) -> str:
        """The folder's name, which rows carry as `run`."""
        return self.path.resolve().name

    @property
    def config_file(self) -> Path:
        """Where the settings are."""
        return self.path / CONFIG

    @property
    def metrics_file(self) -> Path:
        """Where losses, validations and events are."""
        return self.path / METRICS

    @property
    def probe_file(self) -> Path:
        """Where the probe's rows are."""
        return self.path / PROBE

    def read(self) -> Run:
        """What is written so far."""
        return Run.open(self.path)

    def begin(self, config: Mapping[str, Any]) -> None:
        """Write config.json: what the run is, and where it is trained."""
        about = {"what": "wellcond train", "version": VERSION, "config": dict(config), "environment": environment()}
        write_json(self.config_file, about)

    def describe(self, **facts: Any) -> None:
        """Add to config.json what is known later, or has changed."""
        write_json(self.config_file, self.read().about | facts)

    def log(self, row: MetricRow) -> None:
        """Append a row to the metrics."""
        self._append(self.metrics_file, [row.as_json()])

    def measured(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows of the probe."""
        self._append(self.probe_file, rows)

    def flush(self, *, sync: bool = False) -> None:
        """Write the rows that found no room before; OSError where there still is none.

        With `sync` all rows are on the disk afterwards, also if the machine loses power.
        """
        failed = None
        for file, rows in list(self.unwritten.items()):
            size = file.stat().st_size if file.exists() else 0
            try:
                append_rows(file, rows)
            except OSError as error:
                if file.exists() and file.stat().st_size > size:
                    os.truncate(file, size)  # some of the rows may have been written: they will be again
                failed = error  # there may be room for the other file's rows
            else:
                del self.unwritten[file]
        if failed is not None:
            raise failed
        for file in (self.metrics_file, self.probe_file, self.path) if sync else ():
            if file.exists():
                fsync(file)

    def forget_after(self, step: int) -> None:
        """Drop the rows of what will be done again: they are of a process that died before it saved its next state.

        A metric stands under the number of steps done, a measurement under that of the steps done before it: the
        state after 20 steps has the metrics of 20, and measures 20 again. An event (the training was lost) happened,
        whatever is done again after it.
        """
        for file, last in ((self.metrics_file, step), (self.probe_file, step - 1)) if self.writes else ():
            if file.exists():
                rows = read_rows(file)  # as they are, with fields that this version may not know
                kept = [row for row in rows if row.get("step", 0) <= last or row.get("split") == "event"]
                if len(kept) < len(rows) or not rows:
                    replace_rows(file, kept)

    def put_aside(self, *others: Path) -> list[Path]:
        """Rename all rows, and `others`, so that the run begins anew and nothing is lost."""
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
