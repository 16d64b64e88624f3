"""The queue of runs: planned by name, skipped if done, resumed where they stopped, as many as fit into the time.

    runs = Runs(Path("runs/lab"), console=Console(), time_limit="9m")
    plan = Planned(name="cifar10/vit_tiny/both/seed-0", config=config, measure=("log_kappa",))
    found = runs.run(plan)                                                      # trains it, or reads its result
    found["status"], found["metrics"]["top1"], found["log_kappa"]["trained"]    # "finished", 0.87, {"sa": [8.4, …], …}
    Runs(…, jobs=4).together([lambda: runs.run(a), lambda: runs.run(b)])        # up to four at once

Each run is a folder of `wellcond train`. When it ends, well or badly, its result is written there as result.json. This
file marks the run as done: an interrupted run has none and is resumed, a diverged one has one and is not tried again. A
run that is done needs nothing else, so these small files alone, copied to another machine, are enough to go on there.
Measurements of the trained model are taken before the run ends, by name (measurements.py); those that another claim
asks for later are taken then, if the weights still exist. A run may start from another's weights (`start`), which are
kept in that one's folder; if they are gone, that one is trained again.
With one job everything happens in this process; with several, in worker processes side by side (jobs.py).
Under a time limit, which counts from the start of the process, a run is not started if the speed of earlier ones says
that it will not be done in time; any other is saved when the time is over. Both raise OutOfTime.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from rich.console import Console

from wellcond import records
from wellcond.claims.claim import rounded, say
from wellcond.claims.jobs import Job, Jobs, RunFailed
from wellcond.claims.measurements import MEASUREMENTS
from wellcond.environment import environment
from wellcond.models.surgery import keep_compiled_code
from wellcond.models.weights import write_weights
from wellcond.train.checkpoint import latest, saved_steps
from wellcond.train.config import Config, as_seconds
from wellcond.train.folder import MAY_CHANGE, RunFolder
from wellcond.train.loop import Diverged, train
from wellcond.train.stopping import Interrupted, OutOfTime, process_age

__all__ = ["ELSEWHERE", "RESULT", "Planned", "Result", "Runs", "config_difference", "made_by"]

T = TypeVar("T")
Result = dict[str, Any]
"""status (finished, diverged), why, metrics, losses, images_per_second (with whatever else used the device),
memory_mib, steps, seconds (by phase, of the call that finished it), validation, measured (during training), data
(a checksum), config, environment, and under its name each of MEASUREMENTS that was asked for (None if it could not be
taken)."""
RESULT = "result.json"
WEIGHTS = "weights.safetensors"  # of a run that others start from, in float16: small enough to copy
LOG = "log.txt"
ELSEWHERE = {
    *MAY_CHANGE, "data", "probe_every", "probe_marks", "probe_samples", "probe_sites", "probe_exact",
}  # fmt: skip
"""Settings that do not change what is trained, such as where the data are and what is measured during training."""
POINTS = 60  # kept of the curve of the training loss
VALIDATIONS = 200  # points kept of the validation curve
DIGITS = 5  # kept of a number
LEAST_TIME = 30.0  # seconds that must be left to start anything; a tenth of the limit if that is less
AROUND = 10.0  # seconds a run takes besides its steps: validation, measurements at its end, saving
COMPILING = 40.0  # seconds to compile, if there is no code for the run's form yet
NOT_COMPILED = {
    *ELSEWHERE, "recipe", "pretrained", "checkpoint", "holdout", "padding", "scale_min", "flip", "color_jitter",
    "erasing", "auto_augment", "mixup", "cutmix", "label_smoothing", "epochs", "steps", "opt", "lr", "weight_decay",
    "opt_betas", "layer_decay", "clip_grad", "clip_value", "sched", "warmup_epochs", "warmup_steps", "warmup_lr",
    "min_lr", "ema_decay", "seed", "eval_every", "eval_steps", "log_every", "eval_batches", "opt_eps", "keep_best",
    "keep_best_after",
} - {"data"}  # fmt: skip
"""Settings that a training's compiled code does not depend on: runs that differ only in these share the code."""
CURVES = ("loss", "top1")
"""Metrics kept of each validation."""
KEPT = ("log_kappa", "capped", "attention_entropy", "largest_logit", "near_unit_share")
"""Measurements during training that are kept."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One training of an experiment."""

    name: str
    """Its folder within the scale's: cifar10/vit_tiny/both/seed-0-lr-0.001."""
    config: Config
    images: int = 0
    """How many images it trains on, over all epochs, to estimate its time; 0 if unknown."""
    measure: tuple[str, ...] = ()
    """Measurements of the trained model before the run ends: names in MEASUREMENTS."""
    start: str = ""
    """The name of another run whose weights it starts from."""
    keep_weights: bool = False
    """Whether others start from its weights; then it is done only if these are here, too."""
    order: tuple[int, ...] = ()
    """With several jobs, which of the runs of one turn start first: the smaller ones."""
    turn: int = 1
    """With several jobs, which runs start first: 0 for those that others wait for, 1 for those that are compared, 2 for
    those that no verdict needs."""


class Runs:
    """The runs of one scale, in one folder."""

    def __init__(
        self,
        root: Path,
        *,
        console: Console,
        device: str | None = None,
        jobs: int = 1,
        kept: Path | None = None,
        time_limit: str = "",
        training: bool = True,
        arms: Sequence[str] = (),
        seeds: int | None = None,
    ):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                "an experiment trains each run in one process; start it without torchrun, and with --jobs for several"
            )
        self.root: Path = root
        self.console: Console = console
        self.device: str | None = device
        self.kept = kept
        """Where results are kept with the evidence; a run with one there is done, whichever machine trained it."""
        self.expected: int = 0
        """How many runs are planned, as far as known."""
        self.done: int = 0
        self.trained: int = 0
        self._told_done: set[str] = set()  # runs already reported as done
        self._told_data: set[str] = set()  # sets of which it was said that the data differ
        self.left: list[str] = []
        """Names of runs that there was no time, or not enough, for."""
        self.left_out: list[str] = []
        """Names of runs that `training`, `arms` or `seeds` leave out, or that start from one that diverged."""
        self.limit: float | None = as_seconds(time_limit) if time_limit else None
        self.training: bool = training
        """Whether to train and measure what is missing; if not, it is treated as if there were no time for it."""
        self.arms: Sequence[str] = arms
        """If not empty, only these arms are trained; others are treated as if there were no time for them."""
        self.seeds: int | None = seeds
        """If given, only seeds below it are trained, likewise."""
        self._speeds: dict[str, float] = {}  # images per second so far on this device, by arm and by recipe
        self._jobs = Jobs(jobs, device=device) if jobs > 1 else None
        self._counting = threading.Lock()
        self._asked: set[str] = set()  # runs that a thread is reading, training or waiting to train
        self._answered = threading.Condition()
        self._compiled: dict[str, Any] | None = None  # the form that the current code was compiled for

    def expect(self, number: int) -> None:
        """Announce that `number` more runs are planned."""
        with self._counting:
            self.expected += number

    @property
    def side_by_side(self) -> bool:
        """Whether there are several jobs."""
        return self._jobs is not None

    def together(self, calls: Sequence[Callable[[], T]], *, in_order: bool = False) -> list[T]:
        """Make independent calls, side by side or one by one, and return their results in order.

        If one is out of time, the others are still called, since a shorter one may fit; then OutOfTime is raised.
        `in_order`: runs of earlier calls come first.
        """

        def attempt(call: Callable[[], T]) -> T | OutOfTime:
            try:
                return call()
            except OutOfTime as over:
                return over

        tries = [partial(attempt, call) for call in calls]
        found = [call() for call in tries] if self._jobs is None else self._jobs.together(tries, in_order=in_order)
        for one in found:
            if isinstance(one, OutOfTime):
                raise one
        return [one for one in found if not isinstance(one, OutOfTime)]

    def results(self, pattern: str) -> list[Result]:
        """Return the results of runs that are done and whose names match, here or with the evidence, each run once."""
        paths = {}
        for root in (self.kept, self.root):
            if root is not None:
                paths |= {path.relative_to(root): path for path in root.glob(f"{pattern}/{RESULT}")}
        return [records.read_json(paths[name]) for name in sorted(paths)]

    def finished(self, plan: Planned) -> Result | None:
        """Return the result of a run, None if it is not done. Raises ValueError if the folder holds another run."""
        places = [root / plan.name / RESULT for root in (self.root, self.kept) if root is not None]
        path = next((place for place in places if place.exists()), None)
        if path is None:
            return None
        result = records.read_json(path)
        if plan.keep_weights and result["status"] == "finished" and not (self.root / plan.name / WEIGHTS).exists():
            return None
        differ = config_difference(plan.config, result["config"])
        if differ:
            raise ValueError(
                f"{path.parent} holds a finished run with another configuration ({differ}). Give the same settings, or "
                "--output a new folder, and --evidence another one"
            )
        self._note_speed(plan.name, result)
        return result

    def run(self, plan: Planned, *, quiet: bool | None = None) -> Result:
        """Train or resume a run, or read its result. Raises Interrupted after a signal, with its state saved.

        With several jobs, call this within `together`; it raises RunFailed if the run's process fails.
        """
        for name in plan.measure:
            if name not in MEASUREMENTS:
                raise ValueError(f"there is no measurement {name!r}; they are {', '.join(MEASUREMENTS)}")
        with self._alone(plan.name):
            return self._run(plan, quiet)

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Let one thread at a time handle a run: another that asks for the same one waits, then reads its result."""
        with self._answered:
            if name in self._asked:
                assert self._jobs is not None
                self._jobs.hasten(name)
                with self._jobs.waiting():
                    self._answered.wait_for(lambda: name not in self._asked)
            self._asked.add(name)
        try:
            yield
        finally:
            with self._answered:
                self._asked.remove(name)
                self._answered.notify_all()

    def _run(self, plan: Planned, quiet: bool | None) -> Result:
        result = self.finished(plan)
        if result is not None:
            self._copy(plan, result, again=False)  # its process may have been killed before it could
            with self._counting:
                first = plan.name not in self._told_done
                self._told_done.add(plan.name)
            if first:
                self._say(self._count(), plan, f"done before: {_words(result)}")
            return self._measure_later(plan, result)
        if not self._trains(plan):
            self.left_out.append(plan.name)
            raise OutOfTime(f"{plan.name} is not trained")
        plan = self._started(plan)
        if self._jobs is not None:
            return self._run_apart(plan, self._jobs)
        self._check_time(plan, compiled=self._form(plan.config) == self._compiled)
        number = self._count()
        self._say(number, plan, "training")
        try:
            result = self._train(plan, quiet=not self.console.is_terminal if quiet is None else quiet)
        except OutOfTime as over:
            self.left.append(plan.name)
            self._say(number, plan, str(over))
            raise
        records.write_record(self.root / plan.name / RESULT, result, seed=plan.config.seed)
        self.trained += 1
        self._say(number, plan, _words(result))
        return self._keep(plan)

    def _trains(self, plan: Planned) -> bool:
        arm = Path(plan.name).parent.name
        wanted = (not self.arms or arm in self.arms) and (self.seeds is None or plan.config.seed < self.seeds)
        return self.training and wanted

    def _started(self, plan: Planned) -> Planned:
        """Return the plan with its start weights as checkpoint. Raises OutOfTime if these have not been trained."""
        if not plan.start:
            return plan
        if not self._has_start(plan):
            diverged = any(one["status"] == "diverged" for one in self.results(plan.start))
            (self.left_out if diverged or plan.start in self.left_out else self.left).append(plan.name)
            why = "it diverged" if diverged else f"these are not in {self.root}"
            raise OutOfTime(f"{plan.name} starts from the weights of {plan.start}, and {why}")
        return replace(plan, config=plan.config.changed({"checkpoint": str(self.root / plan.start / WEIGHTS)}))

    def _has_start(self, plan: Planned) -> bool:
        return not plan.start or (self.root / plan.start / WEIGHTS).exists()

    def _run_apart(self, plan: Planned, jobs: Jobs) -> Result:
        folder, number = self.root / plan.name, 0

        def started(compiled: bool) -> None:
            nonlocal number
            self._check_time(plan, compiled=compiled)
            number = self._count()
            RunFolder.open(folder, self._config(plan))  # writes its configuration first
            (folder / RESULT).unlink(missing_ok=True)  # of a run whose weights are gone but needed
            self._say(number, plan, "training")

        job = Job(
            name=plan.name, log=folder / LOG, turn=plan.turn, order=plan.order,
            form=self._form(plan.config) if plan.config.compile else None, tell=partial(self._told, plan),
            started=started, done=(folder / RESULT).exists,
        )  # fmt: skip
        try:
            jobs.run(job)
        except OutOfTime:
            if number:
                self.left.append(plan.name)
                self._say(number, plan, "the time is over; saved")
            raise
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
        """Return the result of a run that has just been trained, after copying it to the evidence."""
        result = records.read_json(self.root / plan.name / RESULT)
        self._told_done.add(plan.name)
        self._note_speed(plan.name, result)
        self._check_data(plan.name, result)
        self._copy(plan, result)
        return result

    def _copy(self, plan: Planned, result: Result, *, again: bool = True) -> None:
        """Copy a result to the evidence; not `again` if there is one."""
        path = self.kept / plan.name / RESULT if self.kept is not None else None
        if path is not None and (again or not path.exists()):
            records.write_json(path, result)

    def _check_data(self, name: str, result: Result) -> None:
        """Say, once for each set, if a run had other samples or another order than earlier runs, so not paired."""
        set_ = name.partition("/")[0]
        earlier = [run for run in self.results(f"{set_}/*/*/*") if run["name"] != name and _part(run) == _part(result)]
        contents = {run["data"] for run in earlier if run.get("data")}
        with self._counting:
            if set_ in self._told_data or not contents or result["data"] in contents:
                return
            self._told_data.add(set_)
        say(
            self.console,
            f"{set_}: these data differ from those of earlier results, in content or in order: runs of one seed are "
            "not paired across the two. Were shards given before, and a folder now?",
        )

    def _told(self, plan: Planned) -> bytes:
        """Return what the run's process reads: the plan, and this process's command line for the result to record."""
        device = "cuda" if self.device and self.device.startswith("cuda") else self.device  # deal() sets which
        left = None if self.limit is None else max(1.0, self._time_to_train(plan) - process_age())
        told = {"name": plan.name, "config": plan.config.as_json(), "measure": list(plan.measure), "left": left}
        told |= {"start": plan.start, "keep_weights": plan.keep_weights, "log": str(self.root / plan.name / LOG)}
        return json.dumps(told | {"root": str(self.root), "device": device, "argv": sys.argv}).encode() + b"\n"

    def _config(self, plan: Planned) -> Config:
        changes = {"cache_dir": plan.config.cache_dir or str(self.root / "cache")}
        if self.limit is not None:
            changes["time_limit"] = f"{self._time_to_train(plan):g}s"
        return plan.config.changed(changes)

    # Time

    def _time_to_train(self, plan: Planned) -> float:
        """Return the time limit, less a reserve for measurements at the end of the run."""
        assert self.limit is not None
        return self.limit - min(AROUND, self.limit / 20) if plan.measure else self.limit

    def _check_time(self, plan: Planned, *, compiled: bool) -> None:
        """Raise OutOfTime if a run would not be done in time, since its progress might be lost with the machine."""
        if self.limit is None:
            return
        left, needed = self.limit - process_age(), self._needed(plan, compiled=compiled)
        least = min(LEAST_TIME, self.limit / 10)
        if left >= least and (needed is None or needed <= left):
            return
        # A run longer than the whole limit is started anyway: saved and resumed, it gets done in several calls.
        if left >= least and needed is not None and needed > self.limit - AROUND:
            return
        takes = "" if needed is None else f"it takes about {needed:.0f} s, and "
        why = f"not started: {takes}{max(0.0, left):.0f} s are left"
        with self._counting:
            if plan.name not in self.left:  # said once, even if several claims ask for it
                say(self.console, f"{plan.name}: {why}")
            self.left.append(plan.name)
        raise OutOfTime(why)

    def check_time(self, name: str, seconds: float) -> None:
        """Raise OutOfTime if something other than a run, which takes `seconds`, would not be done in time."""
        if self.limit is not None and self.limit - process_age() < min(seconds, self.limit / 2):
            self.left.append(name)
            say(self.console, f"{name}: not started: {max(0.0, self.limit - process_age()):.0f} s are left")
            raise OutOfTime(f"{name} was not started")

    def _needed(self, plan: Planned, *, compiled: bool) -> float | None:
        """Return the seconds a run still needs, by the speed of its arm, else its recipe; None if neither is known."""
        arm = plan.name.rpartition("/")[0]
        speed = self._speeds.get(arm) or self._speeds.get(arm.rpartition("/")[0])
        if not speed or not plan.images:
            return None
        saved = max(saved_steps(self.root / plan.name / "checkpoints"), default=0) * plan.config.batch_size
        compiling = COMPILING if plan.config.compile and not compiled else 0.0
        return 1.05 * max(0, plan.images - saved) / speed + AROUND + compiling

    @cached_property
    def _this_device(self) -> str:
        return environment()["device"]

    def _note_speed(self, name: str, result: Result) -> None:
        speed = result["images_per_second"]
        if speed and self.limit is not None and result["environment"]["device"] == self._this_device:
            arm = name.rpartition("/")[0]
            for place in (arm, arm.rpartition("/")[0]):  # keep the fastest: older results may be slower
                self._speeds[place] = max(speed, self._speeds.get(place, 0.0))

    def _count(self) -> int:
        with self._counting:
            self.done += 1
            return self.done

    def _train(self, plan: Planned, *, quiet: bool) -> Result:
        config, folder = self._config(plan), self.root / plan.name
        result: Result = {"name": plan.name, "config": _portable(config)}
        result |= {"start": plan.start} if plan.start else {}
        if torch.cuda.is_available() and self.device != "cpu":
            torch.cuda.reset_peak_memory_stats(self.device)  # left by the previous run in this process
        try:
            with self._compiled_once(config):
                outcome = train(config, folder, device=self.device, quiet=quiet)
        except Diverged as lost:
            rows = records.Run.open(folder).train
            done = rows[-1].step + 1 if rows else 0
            result |= {"status": "diverged", "why": str(lost), "metrics": None, "steps": done}
        else:
            result |= {"status": "finished", "why": "", "metrics": outcome.metrics, "steps": outcome.steps}
            result["seconds"] = outcome.seconds
            if plan.keep_weights:
                _keep_weights(folder)
        result |= {**_curves(folder), "measured": _measured(folder), "data": _content(folder)}
        began = time.perf_counter()
        result |= self._measure(plan.measure, result, config, folder)
        if plan.measure and "seconds" in result:
            result["seconds"] |= {"measuring at the end": round(time.perf_counter() - began, 2)}
        return result

    def _measure(self, names: Sequence[str], result: Result, config: Config, folder: Path) -> Result:
        """Take measurements by name; all are None if the run diverged."""
        finished = result["status"] == "finished"
        with keep_compiled_code():  # they build models, which run eagerly; the next run's code stays
            return {name: MEASUREMENTS[name](config, folder, self.device) if finished else None for name in names}

    def _measure_later(self, plan: Planned, result: Result) -> Result:
        """Add measurements that were not asked for when the run was trained, if its weights are here."""
        missing = [name for name in plan.measure if name not in result]
        if not missing:
            return result
        if not self.training:  # and there are no data either
            self._say(self.done, plan, f"without {', '.join(missing)}: it was not measured")
            return result | dict.fromkeys(missing)
        folder = self.root / plan.name
        here = bool(saved_steps(folder / "checkpoints")) and self._has_start(plan)
        if result["status"] == "finished" and not here:
            self._say(self.done, plan, f"without {', '.join(missing)}: its weights are not here")
            return result | dict.fromkeys(missing)
        result |= self._measure(missing, result, self._config(self._started(plan)), folder)
        records.write_json(self.root / plan.name / RESULT, result)
        self._copy(plan, result)
        return result

    @contextlib.contextmanager
    def _compiled_once(self, config: Config) -> Iterator[None]:
        """Compile successive runs of one form only once. Before another form, reset the compiler: earlier graphs would
        count against torch's recompile limit, beyond which it runs eagerly."""
        form = self._form(config)
        if not config.compile:
            yield
        elif form == self._compiled:
            with keep_compiled_code():
                yield
        else:
            torch.compiler.reset()
            self._compiled = form  # set now, so that it holds even if the training diverges
            yield

    @staticmethod
    def _form(config: Config) -> dict[str, Any]:
        return {name: value for name, value in config.as_json().items() if name not in NOT_COMPILED}

    def _say(self, number: int, plan: Planned, text: str) -> None:
        of = f"{number}/{max(number, self.expected)}"
        say(self.console, f"[{of}] {plan.name}: {text}")


def made_by(result: Result) -> dict[str, Any]:
    """Return the device and commit that trained a run; the runs of one experiment may be days apart."""
    environment = result["environment"]
    return {"device": environment["device"], "commit": environment["commit"]}


def config_difference(config: Config, stored: dict[str, Any]) -> str:
    """Return in words how a stored configuration differs from `config` in what is trained; empty if it does not."""
    mine = config.as_json()
    theirs = Config().as_json() | stored  # a setting added later had its default
    names = [name for name in mine if name not in ELSEWHERE and mine[name] != theirs[name]]
    return ", ".join(f"{name}: {theirs[name]!r} there, {mine[name]!r} now" for name in names)


def _portable(config: Config) -> dict[str, Any]:
    """Return the configuration without paths and limits that belong to this machine."""
    stored = config.as_json() | {"cache_dir": "", "time_limit": "", "checkpoint": ""}
    kind, colon, _ = stored["data"].partition(":")
    return stored | {"data": kind if colon else Path(stored["data"]).name}


def _keep_weights(folder: Path) -> None:
    """Write the weights of a run's last state, for a masked autoencoder only those of its encoder."""
    state = latest(folder / "checkpoints")
    assert state is not None
    weights = dict(state.ema or state.model)
    wanted = {name: tensor for name, tensor in weights.items() if name.startswith("encoder.")} or weights
    aside = folder / f".{WEIGHTS}"
    write_weights(aside, {name: tensor.half() for name, tensor in wanted.items()}, state.metadata)
    aside.replace(folder / WEIGHTS)


def _curves(folder: Path) -> dict[str, Any]:
    run = records.Run.open(folder)
    rows = run.train
    rates = [row.images_per_second for row in rows if row.images_per_second > 0]
    memory = [row.memory_mib for row in rows if row.memory_mib is not None]
    shown = _thinned(run.validation, VALIDATIONS)
    return {
        "losses": [[round(row.epoch, 3), round(row.loss, 5)] for row in _thinned(rows, POINTS)],
        "images_per_second": round(median(rates), 1) if rates else None,
        "memory_mib": round(max(memory), 1) if memory else None,
        "validation": [
            {"step": row.step, **{name: rounded(row.metrics[name], DIGITS) for name in CURVES if name in row.metrics}}
            for row in shown
        ],
    }


def _content(folder: Path) -> str | None:
    """Return a checksum that is equal for runs trained on the same samples in the same order."""
    return records.Run.open(folder).about.get("data", {}).get("train_content")


def _part(result: Result) -> tuple[float, int | None]:
    """Which part of a set a run was trained on: what is held out depends on the seed."""
    config = result["config"]
    return config["holdout"], config["seed"] if config["holdout"] else None


def _thinned(rows: Sequence[T], points: int) -> list[T]:
    """Return about `points` rows, evenly spaced, including the first and the last."""
    return [*rows[: -1 : max(1, -(-len(rows) // points))], *rows[-1:]]


def _measured(folder: Path) -> dict[str, Any]:
    """Return {"steps": […], "gradient_norm": […], "log_kappa": {"sa": [[one per block], for each step]}, …}."""
    run = records.Run.open(folder)
    rows = [row for row in run.probe if row["name"] in KEPT]
    steps = sorted({row["step"] for row in rows})
    values: dict[str, dict[str, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for row in sorted(rows, key=lambda row: row["index"]):
        values[row["name"]][row["site"]][row["step"]].append(rounded(row["value"], DIGITS))
    norms = {row.step - 1: row.gradient_norm for row in run.train} if steps else {}
    return {
        "steps": steps,
        "gradient_norm": [rounded(norms[step], DIGITS) if step in norms else None for step in steps],
        **{
            name: {site: [by_step.get(step) for step in steps] for site, by_step in by_site.items()}
            for name, by_site in values.items()
        },
    }


def _words(result: Result) -> str:
    if result["status"] == "diverged":
        return f"diverged ({result['why']})"
    return ", ".join(f"{name} {value:.4g}" for name, value in result["metrics"].items())
