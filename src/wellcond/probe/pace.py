"""When to measure: every so many steps, or as often as a hundredth of the time allows.

    pace = Pace("auto")
    if pace.due(step):
        with pace.timed(device):
            …                           # the measurement
        pace.measured(step)

For "auto" the time since the last measurement is looked at 1, 2, 4, 8, … steps after it, so that processes, which have
to answer alike, ask each other seldom. The first measurement is dearer than the others (kernels are compiled), and so
it does not count: the second comes when training has taken as long as the first did.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Literal

import torch

__all__ = ["SHARE", "Pace"]

SHARE = 0.01  # of the time


class Pace:
    """`agree` turns an answer into the one that all processes give. ValueError for an `every` that is none."""

    def __init__(self, every: int | Literal["auto"], *, agree: Callable[[bool], bool] = bool):
        if every != "auto" and (not isinstance(every, int) or every < 1):
            raise ValueError(f'every must be a whole number from 1 on, or "auto", got {every!r}')
        self.every, self.agree = every, agree
        self.cost = 0.0
        """Seconds that the last measurement took."""
        self._timing, self._measurements = 0.0, 0
        self._step, self._ended, self._look = 0, 0.0, 1
        self._answer: tuple[int, bool] | None = None  # one question a step, however often it is put

    def due(self, step: int) -> bool:
        if isinstance(self.every, int):
            return step % self.every == 0
        if self._answer is None or self._answer[0] != step:
            self._answer = step, self._is_due(step)
        return self._answer[1]

    def _is_due(self, step: int) -> bool:
        since = step - self._step
        if self._measurements == 0 or since < 0:  # since < 0: the training went back to an earlier state
            return True
        if since < self._look:
            return False
        while self._look <= since:
            self._look *= 2
        rest = 1.0 if self._measurements == 1 else 1 / SHARE - 1
        return self.agree(time.perf_counter() - self._ended >= rest * self.cost)

    @contextlib.contextmanager
    def timed(self, device: torch.device) -> Iterator[None]:
        """What happens within it is (a part of) a measurement."""
        if self.every != "auto":
            yield
        elif device.type == "cuda":  # the work that was asked for before is none of it
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            try:
                yield
            finally:  # what fails has taken its time, too
                end.record()
                end.synchronize()
                self._timing += start.elapsed_time(end) / 1e3
        else:
            began = time.perf_counter()
            try:
                yield
            finally:
                self._timing += time.perf_counter() - began

    def measured(self, step: int) -> None:
        self.cost, self._timing = self._timing, 0.0
        self._step, self._ended, self._look = step, time.perf_counter(), 1
        self._measurements += 1
