"""The runs of an experiment: planned by name, skipped where done, taken up where they stopped.

    runs = Runs(Path("runs/asa-fig1c"), console=Console())
    found = runs.run(Planned(name="cifar10/both/seed-0", config=config, measure=True))      # trains, or reads
    found["status"], found["metrics"]["top1"]                                               # "finished", 0.87
    Runs(…, jobs=4).together([lambda: runs.run(a), lambda: runs.run(b)])                    # up to four at once

Each run is a folder of `wellcond train`. When it ends, well or badly, its result is written there as result.json, and
that is what says "done": an interrupted run has none and goes on, a diverged one has one and is not tried again. Of a
run that is done nothing else is needed, so that these small files alone, carried elsewhere, are enough to go on.
With one job everything happens in this process; with more, each run in one of its own (jobs.py, one_run.py).
"""

import contextlib
import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from rich.console import Console

from wellcond import records
from wellcond.claims.ends import measure_ends
from wellcond.claims.jobs import Jobs, RunFailed
from wellcond.models.surgery import keep_compiled_code
from wellcond.train.config import Config
from wellcond.train.folder import MAY_CHANGE, RunFolder
from wellcond.train.interrupt import Interrupted
from wellcond.train.loop import Diverged, train

__all__ = ["Planned", "Result", "Runs", "config_difference", "made_by"]

T = TypeVar("T")
Result = dict[str, Any]
"""status (finished, diverged), why, metrics, losses, images_per_second, steps, measured (in the course of training),
log_kappa (at its ends), config, environment."""
RESULT = "result.json"
LOG = "log.txt"
ELSEWHERE = {*MAY_CHANGE, "data"}  # where the data lies does not change what it is
POINTS = 60  # of a curve of the training loss
FORM = {
    "task", "model", "model_kwargs", "remove_skips", "layer_scale", "attention", "attention_kwargs", "gray", "epsilon",
    "image_size", "batch_size", "accumulate", "drop_path", "mixup", "cutmix", "label_smoothing", "amp_dtype",
    "compile_mode", "mask_ratio", "normalize_pixels", "gray_masked", "decoder_dim", "decoder_depth", "decoder_heads",
}  # fmt: skip
"""Settings that the compiled code of a training depends on."""
KEPT = ("log_kappa", "capped", "attention_entropy", "largest_logit", "near_unit_share")
"""Of what was measured in the course of a training."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One training of an experiment."""

    name: str
    """Its folder below the experiment's: cifar10/both/seed-0."""
    config: Config
    measure: bool = False
    """Whether its condition numbers are measured at the end, beside those of its random start."""
    first: bool = False
    """Whether others wait for its result: with several jobs it starts before those that nothing waits for."""


class Runs:
    """The runs of one experiment, in one folder."""

    def __init__(
        self, root: Path, *, console: Console, device: str | None = None, jobs: int = 1, kept: Path | None = None
    ):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                "an experiment trains each run in one process; start it without torchrun, and with --jobs for several"
            )
        self.root, self.console, self.device = root, console, device
        self.kept = kept
        """Where results are kept beside the evidence: what is there is done, whichever machine trained it."""
        self.expected = 0
        """How many runs are planned, as far as is known."""
        self.done = self.trained = 0
        self._jobs = Jobs(jobs, device=device) if jobs > 1 else None
        self._counting = threading.Lock()
        self._compiled: dict[str, Any] | None = None  # what the compiled code that there is was compiled for

    def expect(self, number: int) -> None:
        """So many runs more are planned."""
        with self._counting:
            self.expected += number

    def together(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Calls that do not depend on each other, and what they return, in order: side by side, or one by one."""
        return [call() for call in calls] if self._jobs is None else self._jobs.together(calls)

    def finished(self, plan: Planned) -> Result | None:
        """The result of a run that is done; None where it is not. ValueError where the folder holds another run."""
        places = [root / plan.name / RESULT for root in (self.root, self.kept) if root is not None]
        path = next((place for place in places if place.exists()), None)
        if path is None:
            return None
        result = records.read_json(path)
        differ = config_difference(plan.config, result["config"])
        if differ:
            raise ValueError(
                f"{path.parent} holds a finished run with another configuration ({differ}). Give the same settings, or "
                "--output a new folder"
            )
        return result

    def run(self, plan: Planned, *, quiet: bool | None = None) -> Result:
        """Train it, or go on with it, or read its result. Raises Interrupted after a signal, with the state saved.

        With several jobs, to be called within `together`; RunFailed where the run's process fails.
        """
        result = self.finished(plan)
        if result is not None:
            self._say(self._count(), plan, f"done before: {_words(result)}")
            return result
        if self._jobs is not None:
            return self._run_apart(plan, self._jobs)
        number = self._count()
        self._say(number, plan, "training")
        result = self._train(plan, quiet=not self.console.is_terminal if quiet is None else quiet)
        records.write_record(self.root / plan.name / RESULT, result, seed=plan.config.seed)
        self.trained += 1
        self._say(number, plan, _words(result))
        return self._keep(plan)

    def _run_apart(self, plan: Planned, jobs: Jobs) -> Result:
        folder, number = self.root / plan.name, 0

        def started() -> None:
            nonlocal number
            number = self._count()
            RunFolder.open(folder, self._config(plan))  # first of all its configuration: it says what the folder is
            self._say(number, plan, "training")

        try:
            jobs.run(plan.name, self._told(plan), log=folder / LOG, urgent=plan.first, started=started)
        except Interrupted:
            if number:
                self._say(number, plan, "stopped")
            raise
        except RunFailed as failed:
            self._say(number, plan, f"{failed.how}. The end of its log:\n{failed.log}")
            raise
        result = self._keep(plan)
        with self._counting:
            self.trained += 1
        self._say(number, plan, _words(result))
        return result

    def _keep(self, plan: Planned) -> Result:
        """The result of a run that was just trained, put beside the evidence too."""
        result = records.read_json(self.root / plan.name / RESULT)
        if self.kept is not None:
            records.write_json(self.kept / plan.name / RESULT, result)
        return result

    def _told(self, plan: Planned) -> bytes:
        """What the run's process reads: the plan, and this command line, since that is what a result has to name."""
        device = "cuda" if self.device and self.device.startswith("cuda") else self.device  # which one, it cannot see
        told = {"name": plan.name, "config": plan.config.as_json(), "measure": plan.measure}
        return json.dumps(told | {"root": str(self.root), "device": device, "argv": sys.argv}).encode() + b"\n"

    def _config(self, plan: Planned) -> Config:
        return plan.config.changed({"cache_dir": plan.config.cache_dir or str(self.root / "cache")})

    def _count(self) -> int:
        with self._counting:
            self.done += 1
            return self.done

    def _train(self, plan: Planned, *, quiet: bool) -> Result:
        config, folder = self._config(plan), self.root / plan.name
        result: Result = {"name": plan.name, "config": _portable(config)}
        try:
            with self._compiled_once(config):
                outcome = train(config, folder, device=self.device, quiet=quiet)
        except Diverged as lost:
            result |= {"status": "diverged", "why": str(lost), "metrics": None, "steps": None}
        else:
            result |= {"status": "finished", "why": "", "metrics": outcome.metrics, "steps": outcome.steps}
        result |= {**_curves(folder), "measured": _measured(folder)}
        measured = plan.measure and result["status"] == "finished"
        result["log_kappa"] = measure_ends(config, folder, device=self.device) if measured else None
        return result

    @contextlib.contextmanager
    def _compiled_once(self, config: Config) -> Iterator[None]:
        """Runs of one form, one after the other, are compiled once. Before another form everything is forgotten: else
        the graphs of earlier ones count against torch's limit, beyond which it runs eagerly."""
        form = {name: value for name, value in config.as_json().items() if name in FORM}
        if not config.compile:
            yield
        elif form == self._compiled:
            with keep_compiled_code():
                yield
        else:
            torch.compiler.reset()
            yield
            self._compiled = form

    def _say(self, number: int, plan: Planned, text: str) -> None:
        of = f"{number}/{max(number, self.expected)}"
        self.console.print(f"[{of}] {plan.name}: {text}", highlight=False, markup=False, soft_wrap=True)


def made_by(result: Result) -> dict[str, Any]:
    """Which device and which state of the code trained it: the runs of one experiment may be of several days."""
    environment = result["environment"]
    return {"device": environment["device"], "commit": environment["commit"]}


def config_difference(config: Config, stored: dict[str, Any]) -> str:
    """In words, where a stored configuration is another training than `config`; empty where it is not."""
    mine = config.as_json()
    theirs = Config().as_json() | stored  # a setting that came later had its default
    names = [name for name in mine if name not in ELSEWHERE and mine[name] != theirs[name]]
    return ", ".join(f"{name}: {theirs[name]!r} there, {mine[name]!r} now" for name in names)


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


def _measured(folder: Path) -> dict[str, Any]:
    """{"steps": […], "gradient_norm": […], "log_kappa": {"sa": [[block by block], for each step]}, …}."""
    path, metrics = folder / "probe.jsonl", folder / "metrics.jsonl"
    rows = [row for row in records.read_rows(path) if row["name"] in KEPT] if path.exists() else []
    steps = sorted({row["step"] for row in rows})
    values: dict[str, dict[str, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for row in sorted(rows, key=lambda row: row["index"]):
        values[row["name"]][row["site"]][row["step"]].append(_short(row["value"]))
    logged = records.read_rows(metrics) if steps and metrics.exists() else []
    norms = {row["step"] - 1: row["gradient_norm"] for row in logged if "gradient_norm" in row}
    return {
        "steps": steps,
        "gradient_norm": [_short(norms[step]) if step in norms else None for step in steps],
        **{
            name: {site: [by_step.get(step) for step in steps] for site, by_step in by_site.items()}
            for name, by_site in values.items()
        },
    }


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _words(result: Result) -> str:
    if result["status"] == "diverged":
        return f"diverged ({result['why']})"
    return ", ".join(f"{name} {value:.4g}" for name, value in result["metrics"].items())
