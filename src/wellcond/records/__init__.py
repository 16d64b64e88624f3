"""Rows and run files: the one place that writes and reads config.json, metrics.jsonl and probe.jsonl.

    run = Run.open("runs/a")                                         # run.py: reads a run's folder
    run.config["lr"], run.train[-1].loss, run.validation[-1].metrics["top1"], run.events, run.probe
    RunWriter(path=Path("runs/a")).log(Event(step=3, event="…"))     # run.py: and writes it
    write_record("benchmarks/kappa.json", {"ratio": 120.0}, seed=0)  # rows.py: JSON, safe to interrupt

Nothing here needs torch, so that a page can be rendered where torch is not installed.
"""

from .rows import (
    MARKS,
    Row,
    Site,
    Status,
    append_rows,
    check_writable,
    finite_or_inf,
    fsync,
    read_json,
    read_rows,
    replace_rows,
    row,
    write_json,
    write_record,
    write_text,
)
from .run import CONFIG, METRICS, PROBE, REPORT, VERSION, Event, MetricRow, Run, RunWriter, TrainRow, ValidationRow

__all__ = [
    "CONFIG",
    "MARKS",
    "METRICS",
    "PROBE",
    "REPORT",
    "VERSION",
    "Event",
    "MetricRow",
    "Row",
    "Run",
    "RunWriter",
    "Site",
    "Status",
    "TrainRow",
    "ValidationRow",
    "append_rows",
    "check_writable",
    "finite_or_inf",
    "fsync",
    "read_json",
    "read_rows",
    "replace_rows",
    "row",
    "write_json",
    "write_record",
    "write_text",
]
