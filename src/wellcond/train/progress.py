"""Follow a run while it trains: a progress bar or plain lines in the terminal, and TensorBoard, W&B or trackio.

progress = Progress(config, total, show=True)       # loss, samples per second, time left, the worst block's log κ
progress.left_out(data.skipped)                     # files that cannot be read, each named once
open_data(…, progress=Decoding(show=True))          # how far a data set is decoded
laps = Laps()                                       # where the time goes: data, compiling, steps, validation, saving

tracker = make_tracker(config, folder)              # one that does nothing if none is configured
tracker.begin(step)                                 # starts the run, or resumes it from that step
tracker.log({"train/loss": 1.9}, step=20)           # in addition to the JSON lines, which are always written
"""

import contextlib
import importlib
import math
import secrets
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from wellcond import records
from wellcond.train.config import IMAGE_TASKS, Config
from wellcond.train.folder import RunFolder
from wellcond.train.stopping import OutOfTime, as_seconds, process_age
from wellcond.words import DEFAULT_SITES

__all__ = ["Decoding", "Laps", "Progress", "Tracker", "make_tracker", "numbers_of"]

PLAIN_EVERY = 10.0  # seconds between lines without a terminal
MOVE_EVERY = 0.1  # seconds between updates of the bar, which is not drawn more often anyway
NAMED = 5  # unreadable files that are named at most; the others are counted


class Progress:
    def __init__(self, config: Config, total: int, *, show: bool):
        self.total: int = total
        self.show: bool = show
        self._batch, self._step = config.batch_size, 0
        self._unit = "img" if config.kind in IMAGE_TASKS else "samples"
        self.rate: float = 0.0
        """Samples per second over the last steps."""
        self.worst: str = ""
        """The block with the largest log κ at the last measurement, in words."""
        self.skipped = 0
        """Steps skipped so far."""
        self._loss = math.nan
        self._console = Console(stderr=True)
        self._bar: RichProgress | None = None
        self._task: Any = None
        self._samples, self._since, self._line, self._moved = 0, time.perf_counter(), 0.0, 0.0
        self._first: tuple[int, float] | None = None  # step and time of the first rate; compiling is over by then
        self._left_out: set[tuple[str, str]] = set()

    @contextlib.contextmanager
    def running(self, step: int) -> Iterator[None]:
        self._step = step
        if step and self.show:
            on = f"going on from step {step} of {self.total}"
            self._console.print(on if step < self.total else f"all {step} steps are done already", highlight=False)
        self._since = time.perf_counter()
        if not self.show or not self._console.is_terminal:
            yield
            return
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        with RichProgress(*columns, console=self._console) as self._bar:
            self._task = self._bar.add_task("", total=self.total, completed=step)
            yield
        self._bar = None

    def step(self, step: int, *, samples: int) -> None:
        self._samples += samples
        self._step = step
        if self._bar is None:
            return
        now = time.perf_counter()
        if now - self._moved > MOVE_EVERY or step == self.total:
            self._moved = now
            self._bar.update(self._task, completed=step)

    def logged(self, loss: float) -> None:
        """Show the loss and the rate. To be called after waiting for the device, otherwise the rate would be wrong."""
        now = time.perf_counter()
        self.rate = self._samples / max(1e-9, now - self._since)
        self._samples, self._since, self._loss = 0, now, loss
        self._first = self._first or (self._step, now)
        self._tell(now)

    def measured(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Note the worst output of a block; a block's input, if it comes from a norm, is singular by construction."""
        kappas = [row for row in rows if row["name"] == "log_kappa" and math.isfinite(row["value"])]
        if kappas:
            row = max(kappas, key=lambda row: (row["site"] in DEFAULT_SITES, row["value"]))
            mark = "≥ " if row["status"] == "ceiling" else ""
            self.worst = f"{row['block']} {row['site']}, log κ {mark}{row['value']:.1f}"

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        if self.show:
            words = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            self._console.print(f"step {self._step:,}  validation: {words}", highlight=False)

    def took(self, seconds: Mapping[str, float]) -> None:
        """Show where the time went, at the end."""
        if self.show:
            words = ", ".join(f"{phase} {time:,.1f} s" for phase, time in seconds.items())
            self._console.print(f"time: {words}", highlight=False, soft_wrap=True)

    def left_out(self, files: Sequence[tuple[str, str]]) -> None:
        """Show which files cannot be read, and why, each only once."""
        new = [file for file in dict.fromkeys(files) if file not in self._left_out]
        self._left_out.update(new)
        if new and self.show:
            named = "; ".join(f"{name} ({why})" for name, why in new[:NAMED])
            more = f"; and {len(new) - NAMED} more" if len(new) > NAMED else ""
            words = (
                f"{len(new)} file{'s' * (len(new) > 1)} cannot be read and {'are' if len(new) > 1 else 'is'} left out"
            )
            self._console.print(f"{words}: {named}{more}", highlight=False, markup=False, soft_wrap=True)

    def _tell(self, now: float) -> None:
        words = f"loss {self._loss:.4g}  {self.rate:,.0f} {self._unit}/s" + (
            f"  worst: {self.worst}" if self.worst else ""
        )
        words += f"  left out: {self.skipped}" if self.skipped else ""
        if self._bar is not None:
            self._bar.update(self._task, description=words)
        elif self.show and now - self._line > PLAIN_EVERY:
            self._line = now
            left = f"  {self._left(now)} left" if self.rate > 0 else ""
            where = f"step {self._step:,} of {self.total:,}  "
            self._console.print(where + words + left, highlight=False, markup=False, soft_wrap=True)

    def _left(self, now: float) -> str:
        """Return the time left, as 1:02:03, if steps and what comes between them take as long as so far."""
        step, since = self._first or (self._step, now)
        each = (now - since) / (self._step - step) if self._step > step else self._batch / self.rate
        return str(timedelta(seconds=round((self.total - self._step) * each)))


class Laps:
    """Where the wall time of a training goes, in seconds by phase.

    `with laps.timing("validation")` times one phase. `laps.lap("steps")` counts all other time since the last lap
    towards "steps". On a GPU, queued work counts towards whichever phase waits for it.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._since, self._apart = time.perf_counter(), 0.0

    @contextlib.contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            self.seconds[phase] += took
            self._apart += took

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self._since - self._apart
        self._since, self._apart = now, 0.0


class Decoding:
    """Shows how far a data set is decoded: a bar, or a line now and then. Raises OutOfTime at the time limit."""

    def __init__(self, *, show: bool, limit: str = ""):
        self.show = show
        self._until = time.perf_counter() - process_age() + as_seconds(limit) if limit else math.inf
        self._console = Console(stderr=True)
        self._bar: RichProgress | None = None
        self._line = time.perf_counter()

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.perf_counter()
        if now > self._until:
            if self._bar is not None:
                self._bar.stop()
            raise OutOfTime(f"{what}: {done:,} of {total:,} when the time was over; no step was trained yet")
        if self.show and self._console.is_terminal:
            if self._bar is None:
                columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
                self._bar = RichProgress(*columns, console=self._console)
                self._bar.start()
                self._bar.add_task(what, total=total)
            self._bar.update(self._bar.task_ids[-1], completed=done)
            if done >= total:
                self._bar.stop()
                self._bar = None
        elif self.show and now - self._line > PLAIN_EVERY:
            self._line = now
            self._console.print(f"{what}: {done:,} of {total:,}", highlight=False, markup=False)


# ---- trackers by name


class Tracker:
    """A tracker that ignores the numbers it gets."""

    def begin(self, step: int) -> None:
        """Start, or resume from `step`: whatever was logged for later steps will be logged again."""

    def log(self, values: dict[str, float], *, step: int) -> None:
        pass

    def flush(self) -> None:
        """Make everything logged so far survive whatever happens to this process."""

    def close(self) -> None:
        pass


def numbers_of(row: records.MetricRow) -> dict[str, float]:
    """Return the finite numbers of a row of metrics.jsonl, by the names that trackers show."""
    fields = row.as_json()
    return {f"{fields['split']}/{k}": v for k, v in fields.items() if isinstance(v, float) and math.isfinite(v)}


class _TensorBoard(Tracker):
    def __init__(self, folder: RunFolder):
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self.make, self.writer = folder, SummaryWriter, None
        self.failed = False

    def begin(self, step: int) -> None:
        self.close()
        # After resuming at `step`, the measurement of `step` is repeated, but its metrics are not. TensorBoard purges
        # both, so it gets the metrics once more.
        again = step or any((self.folder.path / "tensorboard").glob("events.*"))
        self.writer = self.make(str(self.folder.path / "tensorboard"), purge_step=step if again else None)
        for row in self.folder.read().metrics if again else ():
            if row.step == step:
                self.log(numbers_of(row), step=step)

    def log(self, values: dict[str, float], *, step: int) -> None:
        for name, value in values.items():
            self._try("add_scalar", name, value, step)

    def flush(self) -> None:
        self._try("flush")

    def close(self) -> None:
        self._try("close")
        self.writer = None

    def _try(self, call: str, *arguments: Any) -> None:
        """Call the writer. A full disk does not stop the training: metrics.jsonl has the same numbers."""
        if self.writer is None or self.failed:
            return
        try:
            getattr(self.writer, call)(*arguments)
        except OSError as error:
            self.failed = True
            warnings.warn(
                f"{self.folder.path / 'tensorboard'} cannot be written ({error}) and gets no more numbers; "
                f"{self.folder.metrics_file.name} has them, and training goes on",
                stacklevel=2,
            )


class _WithInit(Tracker):
    """Weights & Biases, and trackio, which has the same interface but identifies a run by its name."""

    def __init__(self, module: Any, config: Config, folder: RunFolder):
        self.module, self.config, self.folder, self.begun = module, config, folder, False

    def begin(self, step: int) -> None:
        if self.begun:  # a rollback in the same process stays in the same run
            return
        self.begun = True
        key, name = self._key(), self.folder.name
        who = {"name": f"{name}-{key}"} if self.config.tracker == "trackio" else {"id": key, "name": name}
        self.module.init(project="wellcond", config=self.config.as_json(), resume="allow", **who)

    def _key(self) -> str:
        """Return the key that identifies the run for the tracker; the folder keeps it."""
        file = self.folder.path / "tracker.json"
        known = records.read_json(file) if file.exists() else {}
        if self.config.tracker not in known:
            known[self.config.tracker] = secrets.token_hex(4)
            records.write_json(file, known)
        return known[self.config.tracker]

    def log(self, values: dict[str, float], *, step: int) -> None:
        self.module.log(values, step=step)

    def close(self) -> None:
        if self.begun:
            self.module.finish()
            self.begun = False


def make_tracker(config: Config, folder: RunFolder) -> Tracker:
    """Return the configured tracker. Raises ValueError if its package is not installed."""
    if not config.tracker:
        return Tracker()
    try:
        if config.tracker == "tensorboard":
            return _TensorBoard(folder)
        return _WithInit(importlib.import_module(config.tracker), config, folder)
    except ImportError as error:
        raise ValueError(
            f"the tracker {config.tracker!r} needs a package that is not installed ({error}); "
            f"pip install {config.tracker}"
        ) from None
