"""The training loop: read it from top to bottom.

    outcome = train(config, "runs/a")       # resumes where it stopped; the same call under torchrun for many processes

No random state is carried from step to step: data order and augmentation are derived from (seed, epoch, index), and the
model's own random numbers (dropout, masks, landmarks) from (seed, step, rank). A state is therefore the weights, the
optimiser and a step number, and a run that was killed resumes to the same bits; on a GPU only if it is
`deterministic`.
"""

import contextlib
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import Tensor

from wellcond.data import Augmentation, Batch, DataSet, train_batches
from wellcond.probe.steps import StepProbe, summary
from wellcond.records import Event, MetricRow, TrainRow, ValidationRow
from wellcond.train.checkpoint import export, saved_steps, state_path, whole_states
from wellcond.train.computing import deterministic, float32_precision, seed_by
from wellcond.train.config import IMAGE_TASKS, Config
from wellcond.train.divergence import Divergence, Lost, Watch
from wellcond.train.folder import RunFolder, data_facts
from wellcond.train.processes import Processes, join
from wellcond.train.progress import Decoding, Laps, Progress, Tracker, make_tracker, numbers_of
from wellcond.train.replay import WARM, Passes
from wellcond.train.setup import Parts, build, data_of
from wellcond.train.states import States
from wellcond.train.stopping import Interrupted, OutOfTime, TimeLimit, interruptible
from wellcond.train.tasks import Task, Validation, make_task
from wellcond.train.update import Update

__all__ = ["MARKS", "Diverged", "Outcome", "train"]

MARKS: tuple[float, ...] = (0.0, 0.05, *(share / 10 for share in range(1, 11)))
"""Where `probe_marks` measures, as fractions of the steps of a training."""
NEVER = 2**62  # steps


class Diverged(Exception):  # noqa: N818 (nothing is broken but the training)
    """The training diverged; the message names the step and the block with the worst condition number."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a training that ran to its end."""

    folder: Path
    steps: int
    metrics: dict[str, float]
    """The metrics of the last validation."""
    seconds: dict[str, float]
    """Where the time of this call went, by phase: data, building, first steps (compiling included), steps, …"""


def train(config: Config, output: str | Path, *, device: str | None = None, quiet: bool = False) -> Outcome:
    """Train `config` in the folder `output`, or resume its run there.

    Raises ValueError before anything starts for what cannot be trained, Interrupted after SIGINT or SIGTERM and
    OutOfTime at the time limit (with the state saved), and Diverged if the training diverges.
    """
    here = join(device)
    try:
        config.check(world=here.world, begun=bool(saved_steps(Path(output) / "checkpoints")))
        with (
            _opened(output, config, here) as folder,
            deterministic(config),
            float32_precision(config),
            interruptible() as asked,
        ):
            run = _Run(config, folder, here, quiet=quiet)  # may decode for hours: a signal ends it at once
            try:
                asked()  # from here on, a signal takes effect at the end of a step
                return run.go(asked)
            finally:
                run.states.close()
                run.tracker.close()
                run.parts.release()
    finally:
        here.leave()


@contextlib.contextmanager
def _opened(output: str | Path, config: Config, here: Processes) -> Iterator[RunFolder]:
    """Yield the run's folder, which the main process creates or checks, and locks; the others wait for the outcome."""
    with contextlib.ExitStack() as stack:
        problem, folder = None, RunFolder(path=Path(output), writes=False)
        if here.is_main:
            try:
                folder = stack.enter_context(RunFolder.opened(output, config))
            except (ValueError, OSError) as error:
                problem = error
        if here.any(problem is not None):
            raise problem or ValueError("the main process could not open the run's folder; it says why")
        yield folder


@contextlib.contextmanager
def _startable(config: Config, folder: RunFolder) -> Iterator[Config]:
    """Yield the configuration; if the file it started from is gone, with the weights of the run's newest state as that
    file. They have its form, and the state itself is restored afterwards."""
    if not config.checkpoint or Path(config.checkpoint).exists():
        yield config
        return
    state = next(whole_states(folder.checkpoints), None)
    if state is None:
        raise ValueError(
            f"there is no checkpoint {config.checkpoint} to start from, and no saved state to go on from; put it back"
        )
    with TemporaryDirectory() as scratch:
        file = Path(scratch) / "model.safetensors"
        export(state_path(folder.checkpoints, state.step), file)
        yield config.changed({"checkpoint": str(file)}, given=False)


class _Run:
    """One process's part of a run."""

    def __init__(self, config: Config, folder: RunFolder, here: Processes, *, quiet: bool):
        self.config, self.folder, self.here = config, folder, here
        self.laps = Laps()
        # Any process may be the one that decodes, and the others would wait for it if it gave up at a limit.
        decoding = Decoding(show=not quiet or not here.is_main, limit=config.time_limit if here.world == 1 else "")
        self.data: DataSet = data_of(config, progress=decoding)
        self.laps.lap("data")
        self.notes = self._compare()
        self.batches = train_batches(
            self.data.train,
            batch_size=config.batch_size // (here.world * config.accumulate),
            seed=config.seed,
            rank=here.rank,
            world=here.world,
            device=here.device,
            augmentation=augmentation_of(config),
            num_classes=len(self.data.classes),
            workers=config.workers,
        )
        self.steps_per_epoch = self.batches.steps_per_epoch // config.accumulate
        if self.steps_per_epoch < 1:
            raise ValueError(
                f"batch_size={config.batch_size} is more than the {len(self.data.train)} training samples of "
                f"{self.data.name}; lower it"
            )
        with _startable(config, folder) as start:
            self.task: Task = make_task(start, self.data)
            self.validation = Validation(config, self.task, self.data.val, here)
            self.parts: Parts = build(config, self.task, here, total=self.total, steps_per_epoch=self.steps_per_epoch)
        self.watch = Watch(
            patience=max(200, self.total // 10), chance=self.task.chance, skip_limit=config.skip_limit,
            scaled=self.parts.scaler.is_enabled(),
        )  # fmt: skip
        self.update = Update(config, self.parts)
        self.waited, self.logged_at = 0.0, time.perf_counter()
        self.whole = 0
        """The number of steps that the weights are the result of; 0 in the middle of an update."""
        self.marks = {round(share * self.total) for share in MARKS} if config.probe_marks else set[int]()
        """Steps at which everything is measured, whatever `probe_every` is."""
        self.listens = config.probe_exact == "no"
        self.probe = self._make_probe()
        self.tracker: Tracker = make_tracker(config, folder) if here.is_main else Tracker()
        self.progress = Progress(config, self.total, show=here.is_main and not quiet)
        self.progress.left_out(self.data.skipped)
        self.states = States(config, folder, here, self.parts, self.watch, self.progress)
        self.metrics: dict[str, float] = {}
        self.passes = Passes(config, self.task, self.parts, here)
        validation_batches = -(-len(self.data.val) // config.batch_size)
        weights = sum(parameter.nbytes for parameter in self.parts.model.parameters())
        self.clock = TimeLimit(
            config.time_limit, validation_batches=validation_batches, weights=weights, log_every=config.log_every
        )
        self.laps.lap("building")
        self.warm = 0
        """The step by which code has been compiled and a pass captured."""

    def _compare(self) -> list[str]:
        """Return notes on what has changed since the run began; raise ValueError, in all processes, if it must not."""
        here, facts, problem, notes = self.here, data_facts(self.data), None, []
        number = int(sha256(repr(facts).encode()).hexdigest()[:12], 16)
        if here.any(number != here.of_main(number)):
            raise ValueError(f"the processes find different data in {self.config.data}: all machines need the same")
        if here.is_main:
            try:
                force = self.config.resume == "force"
                notes = self.folder.compare(facts, world=here.world, force=force, place=self.config.data)
            except (ValueError, OSError) as error:
                problem = error
        if here.any(problem is not None):
            raise problem or ValueError("the main process cannot go on with this run; it says why")
        return notes

    @property
    def total(self) -> int:
        return self.config.steps or self.config.epochs * self.steps_per_epoch

    def go(self, asked: Any) -> Outcome:
        step = self.states.restore()
        self.tracker.begin(step)
        for note in self.notes:
            warnings.warn(f"going on from step {step}: {note}", stacklevel=2)
            self.folder.log(Event(step=step, event=note))
        if step == 0 and self.config.on_divergence == "rollback":
            self.states.save(0)  # there has to be a state to go back to
        self.whole = step
        self.warm = step + WARM + 1
        with self.progress.running(step), self._rescued():
            while step < self.total:
                try:
                    step = self._epoch(step, asked)
                except Lost as lost:
                    self.whole = 0
                    step = self.whole = self._lost(lost.divergence)
            if not self.metrics:  # the run was already finished
                with self.laps.timing("validation"):
                    self.metrics = self._evaluate(step)
                self._measure(step)  # resuming dropped this measurement: it counts as part of the next step
        self.laps.lap("steps" if step > self.warm else "first steps")
        seconds = {phase: round(took, 2) for phase, took in self.laps.seconds.items()}
        self.progress.took(seconds)
        return Outcome(folder=self.folder.path, steps=step, metrics=self.metrics, seconds=seconds)

    @contextlib.contextmanager
    def _rescued(self) -> Iterator[None]:
        """Save the progress so far if anything else ends the training: no memory, a bug, a damaged file."""
        try:
            yield
        except Exception as error:
            # One process only: others would have to take part, but may be waiting for this one in the middle of a pass.
            if self.here.world == 1 and self.whole and not isinstance(error, Diverged | Interrupted):
                with contextlib.suppress(Lost, OSError):
                    self.states.save(self.whole, must=True)  # if this fails, no note is added
                    error.add_note(f"the state after step {self.whole} is saved: the same command goes on from it")
            raise

    def _epoch(self, step: int, asked: Any) -> int:
        """Train from `step` to the end of its epoch; return the number of steps done."""
        config, epoch = self.config, step // self.steps_per_epoch
        first = step % self.steps_per_epoch
        batches = self.batches.epoch(epoch, start=first * config.accumulate)
        self.parts.called.train()  # once per epoch: walking over all modules takes as long as a small step
        while step < min((epoch + 1) * self.steps_per_epoch, self.total):
            loss, skipped = self._step(step, batches)
            marked = step in self.marks
            step += 1
            if step == self.warm:
                self.laps.lap("first steps")
            self.watch.see(step, loss, skipped)
            self.progress.step(step, samples=config.batch_size)
            if step % config.log_every == 0 or step == self.total or marked:
                self._log(step, loss)
            if step == self.total:
                self._measure(step)
            at_end = step % self.steps_per_epoch == 0
            if self._validates(step):
                with self.clock.timing("validate"), self.laps.timing("validation"):
                    self._validate(step)
            # A state is saved once all that belongs to its step has been written: a run resumed from it misses nothing.
            late = self.clock.is_over(validates=self._validates(step + 1))
            stop = self.here.largest(2 if asked() else 1 if late else 0)  # all processes decide the same
            best = self.states.best == step
            if stop or best or step == self.total or (step % config.save_every == 0 if config.save_every else at_end):
                with self.clock.timing("save"), self.laps.timing("saving"):
                    self.tracker.flush()
                    self.states.save(step, must=bool(stop) or step == self.total)
                if self.states.shards is not None:
                    self.clock.took("save", self.states.shards.took)  # the time of a save that is waited for
            if stop and step < self.total:
                where = f"stopped at step {step} of {self.total}"
                if stop == 2:
                    raise Interrupted(f"{where}; the same command goes on")
                raise OutOfTime(
                    f"{where}, {timedelta(seconds=round(self.clock.used))} after the start, for time_limit="
                    f"{config.time_limit}. The state is saved: to go on, give the same command"
                )
        return step

    def _validates(self, step: int) -> bool:
        if step == self.total:
            return True
        if self.config.eval_steps:
            return step % self.config.eval_steps == 0
        epoch, rest = divmod(step, self.steps_per_epoch)
        return rest == 0 and epoch % self.config.eval_every == 0

    def _step(self, step: int, batches: Iterator[Batch]) -> tuple[Tensor, Tensor | None]:
        """Run one optimiser step over `accumulate` micro-batches; return its mean loss, and whether it was skipped."""
        config, parts = self.config, self.parts
        self._measure(step)
        seed_by(self.here.device, config.seed, step, self.here.rank)
        parts.schedule.step_update(step)
        for group in parts.optimizer.param_groups:
            group["lr"] *= self.states.counters["lr_factor"]
        self.update.begin()
        total = None
        for part in range(config.accumulate):
            asked_at = time.perf_counter()
            batch = next(batches)
            self.waited += time.perf_counter() - asked_at
            last = part == config.accumulate - 1
            hooked = self.listens and self.probe is not None and self.probe.due(step)
            with self._sync(last), self._listening(step):
                loss = self.passes(batch, hooked=hooked)
            total = loss if total is None else total + loss
        assert total is not None
        logged = (step + 1) % config.log_every == 0 or step + 1 == self.total or step in self.marks
        self.whole = 0
        skipped = self.update(step, logged=logged)
        self.whole = step + 1
        return total, skipped

    def _validate(self, step: int) -> None:
        self.states.judge(step)
        self.metrics = self._evaluate(step)
        counters, epoch = self.states.counters, step // self.steps_per_epoch
        if self.metrics.get(self.task.metric, -math.inf) > counters["best"]:
            counters["best"], counters["best_step"] = self.metrics[self.task.metric], step
        raw = self.validation.of(self.parts.model, self._validated(step)) if self.parts.ema is not None else {}
        raw = {f"raw_{name}": value for name, value in raw.items()}  # in addition to those of the average
        metrics = {**self.metrics, **raw}
        self._record(ValidationRow(step=step, epoch=epoch, metrics=metrics, best=counters["best"]))
        self.progress.evaluated(self.metrics)
        self.progress.left_out([*getattr(self.batches, "skipped", []), *self.validation.skipped])

    def _validated(self, step: int) -> int:
        """Return the number of validations before that of `step`."""
        return (step - 1) // (self.config.eval_steps or self.steps_per_epoch * self.config.eval_every)

    def _evaluate(self, step: int) -> dict[str, float]:
        model = self.parts.ema.module if self.parts.ema is not None else self.parts.model
        return self.validation.of(model, self._validated(step))

    def _log(self, step: int, loss: Tensor) -> None:
        self.states.judge(step)
        mean = self.here.total(loss.detach().clone()).item() / self.here.world
        self.progress.skipped = self.watch.skipped
        self.progress.logged(mean)
        lr = max(group["lr"] for group in self.parts.optimizer.param_groups)
        self._record(
            TrainRow(
                step=step,
                epoch=step / self.steps_per_epoch,
                loss=mean,
                lr=lr,
                gradient_norm=self.update.gradient_norm.item(),
                skipped=self.watch.skipped,
                images_per_second=self.progress.rate,
                **self._costs(),
            )
        )

    def _costs(self) -> dict[str, float]:
        """Return the share of time spent waiting for data since the previous row, and the GPU's peak memory so far."""
        now, since = time.perf_counter(), self.logged_at
        found = {"data_wait": min(1.0, self.waited / max(1e-9, now - since))}
        self.waited, self.logged_at = 0.0, now
        if self.here.device.type == "cuda":
            found["memory_mib"] = torch.cuda.max_memory_allocated(self.here.device) / 2**20
        return found

    def _record(self, row: MetricRow) -> None:
        self.folder.log(row)
        self.tracker.log(numbers_of(row), step=row.step)

    def _lost(self, problem: Divergence) -> int:
        """Go back to a good state with half the learning rate and return its step, or raise Diverged."""
        self._record(Event(step=problem.step, event=f"diverged: {problem.why}"))
        step = self.states.go_back(problem)
        if step is None:
            self.states.keep_lost(problem.step)
            raise Diverged(self._what_was_lost(problem))
        self.probe = self._make_probe()  # a new one, which has measured nothing yet
        self.tracker.begin(step)
        return step

    def _what_was_lost(self, problem: Divergence) -> str:
        worst = self.progress.worst
        where = f"; the worst block at the last measurement was {worst}" if worst else ""
        start = f"diverged at step {problem.step} of {self.total}: {problem.why}{where}"
        clipped = self.config.clip_grad or self.config.clip_value
        return f"{start}. A smaller lr{'' if clipped else ', or clip_grad=1,'} may help"

    # Around a forward pass

    def _sync(self, last: bool) -> Any:
        """Return a context in which processes synchronise gradients only for the last micro-batch."""
        if last:
            return contextlib.nullcontext()
        called = self.parts.called
        inner: Any = getattr(called, "_orig_mod", called)
        return inner.no_sync() if hasattr(inner, "no_sync") else contextlib.nullcontext()

    def _make_probe(self) -> StepProbe | None:
        config = self.config
        if not config.probe_every and not self.marks:
            return None
        exact = {"float32": True, "float64": "float64", "no": False}[config.probe_exact]
        return StepProbe(
            self.parts.called if self.listens else self.parts.model,
            config.probe_sites or None,
            every=cast(Any, config.probe_every or NEVER),
            last=self.total - 1 if self.listens else self.total,  # the last training pass, or the final weights
            max_samples=config.probe_samples,
            exact=cast(Any, exact),
            samples=None if self.listens else self.validation.samples(config.probe_samples),
            run=self.folder.name,
        )

    def _measure(self, step: int) -> None:
        """Measure the weights after `step` steps, if due: an exact pass, always over the same validation samples."""
        if self.probe is None or self.listens:
            return
        if step in self.marks or self.probe.due(step):
            with self.laps.timing("measuring"):
                self.probe.near_unit = step in self.marks
                self.probe.measure(step)
                self._measured(step)

    @contextlib.contextmanager
    def _listening(self, step: int) -> Iterator[None]:
        """Measure training's own pass inside this context, if that is what the probe is to measure."""
        if self.probe is None or not self.listens:
            yield
            return
        self.probe.begin(step)
        yield
        if self.probe.end():
            self._measured(step)

    def _measured(self, step: int) -> None:
        assert self.probe is not None
        rows = [row for row in self.probe.rows() if row["step"] == step]
        self.probe.clear()  # written below; kept, they would fill the memory in a long training
        if self.probe.shape and self.folder.writes and "shape" not in self.folder.read().about:
            with contextlib.suppress(OSError):  # a page without reference bands is no reason to stop
                self.folder.describe(shape=self.probe.shape, kind=self.config.kind)
        self.folder.measured(rows)
        self.tracker.log(summary(rows), step=step)
        self.progress.measured(rows)


def augmentation_of(config: Config) -> Augmentation:
    """Return the augmentation of a configuration, in which its fields have the same names; none for a task that does
    not take the settings of images."""
    if config.kind not in IMAGE_TASKS:
        return Augmentation()
    return Augmentation(**{name: getattr(config, name) for name in Augmentation.__dataclass_fields__})
