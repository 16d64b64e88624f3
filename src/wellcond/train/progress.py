"""The progress bar: loss, images per second, time left, and the worst block's log κ. Plain lines without a terminal.

progress = Progress(config, total, show=True)
progress.left_out(data.skipped)                     # files that cannot be read, each named once
open_data(…, progress=Decoding(show=True))          # how far a set is decoded
"""

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from wellcond.train.config import Config

__all__ = ["Decoding", "Progress"]

PLAIN_EVERY = 10.0  # seconds between lines where there is no terminal
MOVE_EVERY = 0.1  # seconds between moves of the bar: it is drawn no more often than that
NAMED = 5  # files that cannot be read, of many


class Progress:
    def __init__(self, config: Config, total: int, *, show: bool):
        self.total, self.show = total, show
        self._batch, self._step = config.batch_size, 0
        self.rate = 0.0
        """Images per second over the last steps."""
        self.worst = ""
        """The block with the largest log κ at the last measurement, in words."""
        self.skipped = 0
        """Steps left out."""
        self._loss = math.nan
        self._console = Console(stderr=True)
        self._bar: RichProgress | None = None
        self._task: Any = None
        self._images, self._since, self._line, self._moved = 0, time.perf_counter(), 0.0, 0.0
        self._left_out: set[tuple[str, str]] = set()

    @contextlib.contextmanager
    def running(self, step: int) -> Iterator[None]:
        self._step = step
        if step and self.show:
            self._console.print(f"going on from step {step} of {self.total}", highlight=False)
        self._since = time.perf_counter()
        if not self.show or not self._console.is_terminal:
            yield
            return
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        with RichProgress(*columns, console=self._console) as self._bar:
            self._task = self._bar.add_task("", total=self.total, completed=step)
            yield
        self._bar = None

    def step(self, step: int, *, images: int) -> None:
        self._images += images
        self._step = step
        if self._bar is None:
            return
        now = time.perf_counter()
        if now - self._moved > MOVE_EVERY or step == self.total:
            self._moved = now
            self._bar.update(self._task, completed=step)

    def logged(self, loss: float) -> None:
        """After a wait for the device: the only honest time to take a rate."""
        now = time.perf_counter()
        self.rate = self._images / max(1e-9, now - self._since)
        self._images, self._since, self._loss = 0, now, loss
        self._tell(now)

    def measured(self, rows: Iterable[Mapping[str, Any]]) -> None:
        kappas = [row for row in rows if row["name"] == "log_kappa" and math.isfinite(row["value"])]
        if kappas:
            row = max(kappas, key=lambda row: row["value"])
            mark = "≥ " if row["status"] == "ceiling" else ""
            self.worst = f"{row['block']} {row['site']}, log κ {mark}{row['value']:.1f}"

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        if self.show:
            words = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            self._console.print(f"validation: {words}", highlight=False)

    def left_out(self, files: Sequence[tuple[str, str]]) -> None:
        """Name files that cannot be read, with the reason, each once."""
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
        words = f"loss {self._loss:.4g}  {self.rate:,.0f} img/s" + (f"  worst: {self.worst}" if self.worst else "")
        words += f"  left out: {self.skipped}" if self.skipped else ""
        if self._bar is not None:
            self._bar.update(self._task, description=words)
        elif self.show and now - self._line > PLAIN_EVERY:
            self._line = now
            left = f"  {self._left()} left" if self.rate > 0 else ""
            where = f"step {self._step:,} of {self.total:,}  "
            self._console.print(where + words + left, highlight=False, markup=False, soft_wrap=True)

    def _left(self) -> str:
        """The time that the steps to come take at this rate: 1:02:03."""
        return str(timedelta(seconds=round((self.total - self._step) * self._batch / self.rate)))


class Decoding:
    """How far a data set is decoded into its cache: a bar, or a line now and then."""

    def __init__(self, *, show: bool):
        self.show = show
        self._console = Console(stderr=True)
        self._bar: RichProgress | None = None
        self._line = time.perf_counter()

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.perf_counter()
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
