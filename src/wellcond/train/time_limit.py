"""A limit on how long a process may run, for queues that kill: it stops between two steps, with time left to save.

clock = TimeLimit("9m", validation_batches=40)      # from the start of the process: imports, decoding, compiling
with clock.timing("save"): …                        # how long that takes is known from then on
if clock.is_over(validates=False): …                # after each step: no time for another one, and for saving
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from wellcond.train.config import as_seconds
from wellcond.train.interrupt import Interrupted

__all__ = ["OutOfTime", "TimeLimit", "process_age"]

IMPORTED = time.monotonic()
STEPS = 50  # of the last steps, the longest tells how long the next one may take;
# where a GPU is waited for at every `log_every`-th step alone, that one has to be among them
UNKNOWN_SAVE = 60.0  # seconds for the first state; a tenth of the limit, if that is less
SLACK = 10.0  # seconds to end in; a twentieth of the limit, if that is less


class OutOfTime(Interrupted):
    """The time is over, and the state has been saved."""


class TimeLimit:
    def __init__(self, limit: str, *, validation_batches: int, log_every: int = 1):
        self.seconds = as_seconds(limit) if limit else None
        self._began = time.monotonic() - process_age()
        self._batches = validation_batches
        self._taken: dict[str, float] = {}
        self._steps: deque[float] = deque(maxlen=max(STEPS, 2 * log_every))
        self._last: float | None = None

    @property
    def used(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    @contextlib.contextmanager
    def timing(self, what: str) -> Iterator[None]:
        """Around what is no step: saving (`save`), validation (`validate`)."""
        start = time.monotonic()
        yield
        end = time.monotonic()
        self.took(what, end - start)
        if self._last is not None:
            self._last += end - start

    def took(self, what: str, seconds: float) -> None:
        self._taken[what] = max(seconds, self._taken.get(what, 0.0))

    def is_over(self, *, validates: bool) -> bool:
        """Whether the limit would be passed by one more step, by its validation if it `validates`, and by saving."""
        if self.seconds is None:
            return False
        now = time.monotonic()
        if self._last is not None:
            self._steps.append(now - self._last)
        self._last = now
        step = max(self._steps, default=0.0)
        needed = 2 * step + 1.5 * self._taken.get("save", min(UNKNOWN_SAVE, self.seconds / 10))
        if validates:  # as long as before, and before that, as long as so many steps
            needed += 1.5 * self._taken.get("validate", self._batches * step)
        return self.used + needed + min(SLACK, self.seconds / 20) >= self.seconds


def process_age() -> float:
    """Seconds since this process was started, or torchrun before it, which starts processes more than once."""
    pids = [os.getpid(), *([os.getppid()] if "TORCHELASTIC_RUN_ID" in os.environ else [])]
    ages = []
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
            after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            since_boot = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
            ages.append(time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
    return max(ages, default=time.monotonic() - IMPORTED)  # where the system does not tell
