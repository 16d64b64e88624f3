"""The queue of runs: planned by name, skipped where done, taken up where they stopped, as many as fit the time.

    runs = Runs(Path("runs/lab"), console=Console(), time_limit="9m")
    plan = Planned(name="cifar10/vit_tiny/both/seed-0", config=config, measure=("log_kappa",))
    found = runs.run(plan)                                                      # trains, or reads
    found["status"], found["metrics"]["top1"], found["log_kappa"]["trained"]    # "finished", 0.87, {"sa": [8.4, …], …}
    Runs(…, jobs=4).together([lambda: runs.run(a), lambda: runs.run(b)])        # up to four at once

Each run is a folder of `wellcond train`. When it ends, well or badly, its result is written there as result.json, and
that is what says "done": an interrupted run has none and goes on, a diverged one has one and is not tried again. Of a
run that is done nothing else is needed, so that these small files alone, carried elsewhere, are enough to go on. What
is measured of the trained model is measured before the run ends, by name (measurements.py). What another claim asks for
later is measured then, if the weights are still there. A run may start from another's weights (`start`), which are kept
in its folder; where they are gone, that one is trained again.
With one job everything happens in this process; with more, in others, beside each other (jobs.py).
Under a time limit, which counts from the start of the process, a run whose speed is known from earlier ones and says
that it will not be done in time is not started; any other is saved when the time is over. Both raise OutOfTime.
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

__all__ = ["RESULT", "Planned", "Result", "Runs", "config_difference", "made_by"]

T = TypeVar("T")
Result = dict[str, Any]
"""status (finished, diverged), why, metrics, losses, images_per_second (together with whatever shared the device),
memory_mib, steps, seconds (of the call that finished it, by phase), validation, measured (in the course of training),
data (a checksum), config, environment, and under its name each of MEASUREMENTS that was asked for (None where it could
not be taken)."""
RESULT = "result.json"
WEIGHTS = "weights.safetensors"  # of a run that others start from, in float16: small enough to carry
LOG = "log.txt"
ELSEWHERE = {
    *MAY_CHANGE, "data", "probe_every", "probe_marks", "probe_samples", "probe_sites", "probe_exact",
}  # fmt: skip
"""Neither where the data lies nor what is measured on the way changes what is trained."""
POINTS = 60  # of a curve of the training loss
VALIDATIONS = 200  # of a curve of the validation
LEAST_TIME = 30.0  # seconds that must be left to start anything; a tenth of the limit, if that is less
AROUND = 10.0  # seconds that a run takes in addition to its steps: validation, measurements at its end, saving
COMPILING = 40.0  # seconds, where the code for its form is not there yet
NOT_COMPILED = {
    *ELSEWHERE, "recipe", "pretrained", "checkpoint", "holdout", "padding", "scale_min", "flip", "color_jitter",
    "erasing", "auto_augment", "mixup", "cutmix", "label_smoothing", "epochs", "steps", "opt", "lr", "weight_decay",
    "opt_betas", "layer_decay", "clip_grad", "clip_value", "sched", "warmup_epochs", "warmup_steps", "warmup_lr",
    "min_lr", "ema_decay", "seed", "eval_every", "eval_steps", "log_every", "eval_batches", "opt_eps", "keep_best",
    "keep_best_after",
} - {"data"}  # fmt: skip
"""Settings that the compiled code of a training does not depend on: runs that differ in these alone share it."""
CURVES = ("loss", "top1")
"""Of a validation."""
KEPT = ("log_kappa", "capped", "attention_entropy", "largest_logit", "near_unit_share")
"""Of what was measured in the course of a training."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One training of an experiment."""

    name: str
    """Its folder below the scale's: cifar10/vit_tiny/both/seed-0-lr-0.001."""
    config: Config
    images: int = 0
    """How many it trains on, over all epochs, for an estimate of its time; 0 where that is not known."""
    measure: tuple[str, ...] = ()
    """What is measured of the trained model before the run ends: names of MEASUREMENTS."""
    start: str = ""
    """The name of another run, whose weights it starts from."""
    keep_weights: bool = False
    """Whether others start from its weights: then it is done where these are here, too."""
    turn: int = 1
    """With several jobs, which starts first: 0 for one that others wait for, 1 for one that is compared, 2 for one that
    no verdict asks for."""


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
    ):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                "an experiment trains each run in one process; start it without torchrun, and with --jobs for several"
            )
        self.root: Path = root
        self.console: Console = console
        self.device: str | None = device
        self.kept = kept
        """Where results are kept with the evidence: what is there is done, whichever machine trained it."""
        self.expected: int = 0
        """How many runs are planned, as far as is known."""
        self.done: int = 0
        self.trained: int = 0
        self._told_done: set[str] = set()  # runs of which it was said that they are done
        self.left: list[str] = []
        """Names of runs that there was no time for, or not enough."""
        self.limit: float | None = as_seconds(time_limit) if time_limit else None
        self.training: bool = training
        """Whether what is not done is trained, and what was not measured is; otherwise there is no time for it."""
        self.arms: Sequence[str] = arms
        """If there are any, of others nothing is trained, as if there were no time for it."""
        self._speeds: dict[str, float] = {}  # images per second of earlier runs on this device, by arm and by set
        self._jobs = Jobs(jobs, device=device) if jobs > 1 else None
        self._counting = threading.Lock()
        self._asked: set[str] = set()  # runs that a thread trains, reads or waits for
        self._answered = threading.Condition()
        self._compiled: dict[str, Any] | None = None  # what the compiled code that there is was compiled for

    def expect(self, number: int) -> None:
        """So many runs more are planned."""
        with self._counting:
            self.expected += number

    @property
    def side_by_side(self) -> bool:
        """Whether there are several jobs."""
        return self._jobs is not None

    def together(self, calls: Sequence[Callable[[], T]], *, in_order: bool = False) -> list[T]:
        """Calls that do not depend on each other, and what they return, in order: side by side, or one by one.

        Where one is out of time, the others are called all the same: a shorter one may fit. Then OutOfTime is raised.
        `in_order`: what an earlier call runs comes first.
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
        """Of all finished runs with names that match the pattern, here and with the evidence; each once."""
        paths = {}
        for root in (self.kept, self.root):
            if root is not None:
                paths |= {path.relative_to(root): path for path in root.glob(f"{pattern}/{RESULT}")}
        return [records.read_json(paths[name]) for name in sorted(paths)]

    def finished(self, plan: Planned) -> Result | None:
        """The result of a run that is done; None where it is not. ValueError where the folder holds another run."""
        places = [root / plan.name / RESULT for root in (self.root, self.kept) if root is not None]
        path = next((place for place in places if place.exists()), None)
        if path is None or (plan.keep_weights and not (self.root / plan.name / WEIGHTS).exists()):
            return None
        result = records.read_json(path)
        differ = config_difference(plan.config, result["config"])
        if differ:
            raise ValueError(
                f"{path.parent} holds a finished run with another configuration ({differ}). Give the same settings, or "
                "--output a new folder, and --evidence another one"
            )
        self._note_speed(plan.name, result)
        return result

    def run(self, plan: Planned, *, quiet: bool | None = None) -> Result:
        """Train it, or go on with it, or read its result. Raises Interrupted after a signal, with the state saved.

        With several jobs, to be called within `together`; RunFailed where the run's process fails.
        """
        for name in plan.measure:
            if name not in MEASUREMENTS:
                raise ValueError(f"there is no measurement {name!r}; they are {', '.join(MEASUREMENTS)}")
        with self._alone(plan.name):
            return self._run(plan, quiet)

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Claims that are reproduced side by side may ask for the same run: the second waits, and reads its result."""
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
            with self._counting:
                first = plan.name not in self._told_done
                self._told_done.add(plan.name)
            if first:
                self._say(self._count(), plan, f"done before: {_words(result)}")
            return self._measure_later(plan, result)
        if not self.training or (self.arms and plan.name.split("/")[-2] not in self.arms):
            self.left.append(plan.name)
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

    def _started(self, plan: Planned) -> Planned:
        """With the weights that it starts from as its checkpoint; OutOfTime where there was no time for these."""
        if not plan.start:
            return plan
        if not self._has_start(plan):
            self.left.append(plan.name)
            raise OutOfTime(f"{plan.name} starts from the weights of {plan.start}, and these are not in {self.root}")
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
            (folder / RESULT).unlink(missing_ok=True)  # one whose weights are gone, and wanted
            self._say(number, plan, "training")

        job = Job(
            name=plan.name, log=folder / LOG, turn=plan.turn,
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
        """The result of a run that was just trained, also copied to the evidence."""
        result = records.read_json(self.root / plan.name / RESULT)
        self._told_done.add(plan.name)
        self._note_speed(plan.name, result)
        if self.kept is not None:
            records.write_json(self.kept / plan.name / RESULT, result)
        return result

    def _told(self, plan: Planned) -> bytes:
        """What the run's process reads: the plan, and this command line, since that is what a result has to name."""
        device = "cuda" if self.device and self.device.startswith("cuda") else self.device  # deal() says which
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
        """Of the limit, what is left when the measurements at its ends are taken off."""
        assert self.limit is not None
        return self.limit - min(AROUND, self.limit / 20) if plan.measure else self.limit

    def _check_time(self, plan: Planned, *, compiled: bool) -> None:
        """OutOfTime where a run would not be done in time: what is trained of it might be lost with the machine."""
        if self.limit is None:
            return
        left, needed = self.limit - process_age(), self._needed(plan, compiled=compiled)
        least = min(LEAST_TIME, self.limit / 10)
        if left >= least and (needed is None or needed <= left):
            return
        # One that takes longer than any call is started all the same: saved and resumed, it gets done.
        if left >= least and needed is not None and needed > self.limit - AROUND:
            return
        takes = "" if needed is None else f"it takes about {needed:.0f} s, and "
        why = f"not started: {takes}{max(0.0, left):.0f} s are left"
        with self._counting:
            if plan.name not in self.left:  # several claims may ask for it
                self.console.print(f"{plan.name}: {why}", highlight=False, markup=False, soft_wrap=True)
            self.left.append(plan.name)
        raise OutOfTime(why)

    def check_time(self, name: str, seconds: float) -> None:
        """OutOfTime where something that is no run, and takes so long, would not be done in time."""
        if self.limit is not None and self.limit - process_age() < min(seconds, self.limit / 2):
            self.left.append(name)
            self.console.print(
                f"{name}: not started: {max(0.0, self.limit - process_age()):.0f} s are left", highlight=False,
                markup=False, soft_wrap=True,
            )  # fmt: skip
            raise OutOfTime(f"{name} was not started")

    def _needed(self, plan: Planned, *, compiled: bool) -> float | None:
        """Seconds to its end, by the speed of the same arm, or of another on the same set; None where none was seen."""
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
            for place in (arm, arm.rpartition("/")[0]):  # the fastest: older results may be slower
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
            torch.cuda.reset_peak_memory_stats(self.device)  # of the run before, in this process
        try:
            with self._compiled_once(config):
                outcome = train(config, folder, device=self.device, quiet=quiet)
        except Diverged as lost:
            result |= {"status": "diverged", "why": str(lost), "metrics": None, "steps": None}
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
        """Of a run that diverged there is nothing to measure."""
        finished = result["status"] == "finished"
        return {name: MEASUREMENTS[name](config, folder, self.device) if finished else None for name in names}

    def _measure_later(self, plan: Planned, result: Result) -> Result:
        """What a run that is done was not asked for when it was trained: measured now, if its weights are here."""
        missing = [name for name in plan.measure if name not in result]
        if not missing:
            return result
        if not self.training:  # nor is there any data
            self._say(self.done, plan, f"without {', '.join(missing)}: it was not measured")
            return result | dict.fromkeys(missing)
        folder = self.root / plan.name
        here = bool(saved_steps(folder / "checkpoints")) and self._has_start(plan)
        if result["status"] == "finished" and not here:
            self._say(self.done, plan, f"without {', '.join(missing)}: its weights are not here")
            return result | dict.fromkeys(missing)
        result |= self._measure(missing, result, self._config(self._started(plan)), folder)
        for root in (self.root, self.kept):
            if root is not None:
                records.write_json(root / plan.name / RESULT, result)
        return result

    @contextlib.contextmanager
    def _compiled_once(self, config: Config) -> Iterator[None]:
        """Runs of one form, one after the other, are compiled once. Before another form the compiler is reset:
        otherwise earlier graphs count against torch's recompile limit, beyond which it runs eagerly."""
        form = self._form(config)
        if not config.compile:
            yield
        elif form == self._compiled:
            with keep_compiled_code():
                yield
        else:
            torch.compiler.reset()
            self._compiled = form  # also where the training diverges
            yield

    @staticmethod
    def _form(config: Config) -> dict[str, Any]:
        return {name: value for name, value in config.as_json().items() if name not in NOT_COMPILED}

    def _say(self, number: int, plan: Planned, text: str) -> None:
        of = f"{number}/{max(number, self.expected)}"
        self.console.print(f"[{of}] {plan.name}: {text}", highlight=False, markup=False, soft_wrap=True)


def made_by(result: Result) -> dict[str, Any]:
    """Which device and which commit trained it: the runs of one experiment may be days apart."""
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
    stored = config.as_json() | {"cache_dir": "", "time_limit": "", "checkpoint": ""}
    kind, colon, _ = stored["data"].partition(":")
    return stored | {"data": kind if colon else Path(stored["data"]).name}


def _keep_weights(folder: Path) -> None:
    """The weights of a run's last state, of a masked autoencoder those of its encoder."""
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
            {"step": row.step, **{name: _short(row.metrics[name]) for name in CURVES if name in row.metrics}}
            for row in shown
        ],
    }


def _content(folder: Path) -> str | None:
    """What says whether two runs were trained on the same samples in the same order."""
    return records.Run.open(folder).about.get("data", {}).get("train_content")


def _thinned(rows: Sequence[T], points: int) -> list[T]:
    """Evenly, the first and the last among them."""
    return [*rows[: -1 : max(1, -(-len(rows) // points))], *rows[-1:]]


def _measured(folder: Path) -> dict[str, Any]:
    """{"steps": […], "gradient_norm": […], "log_kappa": {"sa": [[block by block], for each step]}, …}."""
    run = records.Run.open(folder)
    rows = [row for row in run.probe if row["name"] in KEPT]
    steps = sorted({row["step"] for row in rows})
    values: dict[str, dict[str, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for row in sorted(rows, key=lambda row: row["index"]):
        values[row["name"]][row["site"]][row["step"]].append(_short(row["value"]))
    norms = {row.step - 1: row.gradient_norm for row in run.train} if steps else {}
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
