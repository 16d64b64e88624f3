"""The runs of an experiment: planned by name, skipped where done, taken up where they stopped.

    runs = Runs(Path("runs/asa-fig1c"), console=Console())
    found = runs.run(Planned(name="cifar10/both/seed-0", config=config, measure=True))      # trains, or reads
    found["status"], found["metrics"]["top1"]                                               # "finished", 0.87

Each run is a folder of `wellcond train`. When it ends, well or badly, its result is written there as result.json, and
that is what says "done": an interrupted run has none and goes on, a diverged one has one and is not tried again. Of a
run that is done nothing else is needed, so that these small files alone, carried elsewhere, are enough to go on.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from wellcond import records
from wellcond.experiments.ends import measure_ends
from wellcond.train.config import Config
from wellcond.train.folder import MAY_CHANGE
from wellcond.train.loop import Diverged, train

__all__ = ["Planned", "Result", "Runs", "config_difference"]

Result = dict[str, Any]
"""status (finished, diverged), why, metrics, losses, images_per_second, steps, log_kappa, config, environment."""
RESULT = "result.json"
ELSEWHERE = {*MAY_CHANGE, "data"}  # where the data lies does not change what it is
POINTS = 60  # of a curve of the training loss


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One training of an experiment."""

    name: str
    """Its folder below the experiment's: cifar10/both/seed-0."""
    config: Config
    measure: bool = False
    """Whether its condition numbers are measured at the end, beside those of its random start."""


class Runs:
    """The runs of one experiment, in one folder."""

    def __init__(self, root: Path, *, console: Console, device: str | None = None):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("an experiment trains one run after the other in one process; start it without torchrun")
        self.root, self.console, self.device = root, console, device
        self.expected = 0
        """How many runs are planned, as far as is known."""
        self.done = self.trained = 0

    def finished(self, plan: Planned) -> Result | None:
        """The result of a run that is done; None where it is not. ValueError where the folder holds another run."""
        path = self.root / plan.name / RESULT
        if not path.exists():
            return None
        result = records.read_json(path)
        differ = config_difference(plan.config, result["config"])
        if differ:
            raise ValueError(
                f"{path.parent} holds a finished run with another configuration ({differ}). Give the same settings, or "
                "--output a new folder"
            )
        return result

    def run(self, plan: Planned) -> Result:
        """Train it, or go on with it, or read its result. Raises Interrupted after a signal, with the state saved."""
        self.done += 1
        result = self.finished(plan)
        if result is not None:
            self._say(plan, f"done before: {_words(result)}")
            return result
        self._say(plan, "training")
        result = self._train(plan)
        records.write_record(self.root / plan.name / RESULT, result, seed=plan.config.seed)
        self.trained += 1
        self._say(plan, _words(result))
        return records.read_json(self.root / plan.name / RESULT)

    def _train(self, plan: Planned) -> Result:
        config, folder = plan.config, self.root / plan.name
        if config.compile:
            torch.compiler.reset()  # else the graphs of earlier runs count against the limit, and this one runs eagerly
        config = config.changed({"cache_dir": config.cache_dir or str(self.root / "cache")})
        result: Result = {"name": plan.name, "config": _portable(config)}
        try:
            outcome = train(config, folder, device=self.device, quiet=not self.console.is_terminal)
        except Diverged as lost:
            result |= {"status": "diverged", "why": str(lost), "metrics": None, "steps": None}
        else:
            result |= {"status": "finished", "why": "", "metrics": outcome.metrics, "steps": outcome.steps}
        result |= _curves(folder)
        measured = plan.measure and result["status"] == "finished"
        result["log_kappa"] = measure_ends(config, folder, device=self.device) if measured else None
        return result

    def _say(self, plan: Planned, text: str) -> None:
        of = f"{self.done}/{max(self.done, self.expected)}"
        self.console.print(f"[{of}] {plan.name}: {text}", highlight=False, markup=False, soft_wrap=True)


def config_difference(config: Config, stored: dict[str, Any]) -> str:
    """In words, where a stored configuration is another training than `config`; empty where it is not."""
    mine = config.as_json()
    names = [name for name in mine if name not in ELSEWHERE and mine[name] != stored.get(name)]
    return ", ".join(f"{name}: {stored.get(name)!r} there, {mine[name]!r} now" for name in names)


def _portable(config: Config) -> dict[str, Any]:
    """Without the paths of this machine."""
    stored = config.as_json() | {"cache_dir": ""}
    kind, colon, _ = stored["data"].partition(":")
    return stored | {"data": kind if colon else Path(stored["data"]).name}


def _curves(folder: Path) -> dict[str, Any]:
    path = folder / "metrics.jsonl"
    rows = [row for row in records.read_rows(path) if row["split"] == "train"] if path.exists() else []
    stride = max(1, -(-len(rows) // POINTS))
    drawn = [*rows[:-1:stride], *rows[-1:]]
    rates = [row["images_per_second"] for row in rows if row["images_per_second"] > 0]
    return {
        "losses": [[round(row["epoch"], 3), round(row["loss"], 5)] for row in drawn],
        "images_per_second": round(median(rates), 1) if rates else None,
    }


def _words(result: Result) -> str:
    if result["status"] == "diverged":
        return f"diverged ({result['why']})"
    return ", ".join(f"{name} {value:.4g}" for name, value in result["metrics"].items())
