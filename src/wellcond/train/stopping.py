"""What may stop a run from outside: a signal or a time limit. Either way it finishes its step and saves.

with interruptible() as asked:                      # SIGINT, SIGTERM
    …                                               # nothing to save yet: a signal raises Interrupted
    for step in …:
        if asked():                                 # between steps; a second signal, over a second later, exits at once
            save()
            raise Interrupted

clock = TimeLimit("9m", validation_batches=40)      # since the process started: includes imports, decoding, compiling
with clock.timing("save"): …                        # remembers how long that takes
if clock.is_over(validates=False): …                # after each step: no time left for another one and for saving
"""

import contextlib
import math
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["SIGNALS", "TWICE", "Interrupted", "OutOfTime", "TimeLimit", "as_seconds", "interruptible", "process_age"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)
TWICE = 1.0  # seconds; `timeout` and schedulers signal both a process and its group, and mean one signal
IMPORTED = time.monotonic()
STEPS = 50  # the longest of this many last steps is the estimate for the next one;
# if a GPU is waited for only at every `log_every`-th step, one of those has to be among them
UNKNOWN_SAVE = 60.0  # seconds at most for the first state; a tenth of the limit if that is less
SLOW_DISK, STATE = 50e6, 4  # bytes per second; size of a state in multiples of the weights: moments, averages
SLACK = 10.0  # seconds to exit in; a twentieth of the limit if that is less


class Interrupted(Exception):  # noqa: N818 (it was asked for)
    """A signal stopped the training; its state, if there was any, has been saved."""


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether a signal has come. After its first call, signals are only remembered.

    Before that, while data are decoded and the model is built, there is nothing to save: a signal raises
    KeyboardInterrupt, which no `except Exception` mistakes for a damaged image, and this context turns it into
    Interrupted. A signal that came too late, in the last step, is sent again at the end, to whoever handles it then.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # only the main thread may set handlers
        return
    came: list[float] = []  # when each signal came
    last = 0
    training, here = False, os.getpid()

    def remember(number: int, _frame: Any) -> None:
        nonlocal last
        last = number
        if os.getpid() != here:  # a process forked by the training: it has nothing to save
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        came.append(time.monotonic())
        if len(came) > 1 and came[-1] - came[0] > TWICE:
            os._exit(130)
        if len(came) > 1:
            return
        if not training:
            raise KeyboardInterrupt
        print("\nsaving after this step; once more to stop at once", file=sys.stderr, flush=True)

    def asked() -> bool:
        nonlocal training
        training = True
        return bool(came)

    before = {number: signal.signal(number, remember) for number in SIGNALS}
    try:
        yield asked
    except BaseException as error:
        if not came or not _follows_interrupt(error):
            raise
        raise Interrupted("stopped before the first step; the same command begins again, or goes on") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(last)


def _follows_interrupt(error: BaseException | None) -> bool:
    """Whether an error is a KeyboardInterrupt, or was raised while one propagated: if it interrupts the wait for a
    lock, threading complains that the lock is not held."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


# ---- a limit on the time


def as_seconds(text: str) -> float:
    """Convert a duration (90s, 9m, 1h30m, 2d, plain seconds) to seconds. Raises ValueError for all else, and for 0."""
    number = r"(\d+(?:\.\d+)?)"
    found = re.fullmatch(f"(?:{number}d)?(?:{number}h)?(?:{number}m)?(?:{number}s?)?", text.strip().lower())
    parts = [float(part or 0) for part in found.groups()] if found else []
    seconds = sum(part * unit for part, unit in zip(parts, (86400, 3600, 60, 1), strict=False))
    if not 0 < seconds < math.inf:
        raise ValueError(f"is a time such as 90s, 9m or 1h30m, or a number of seconds; got {text!r}")
    return seconds


class OutOfTime(Interrupted):
    """The time limit was reached; the state, if there was any, has been saved."""


class TimeLimit:
    def __init__(self, limit: str, *, validation_batches: int, weights: float = math.inf, log_every: int = 1):
        self.seconds: float | None = as_seconds(limit) if limit else None
        self._began = time.monotonic() - process_age()
        self._batches, self._first_save = validation_batches, min(UNKNOWN_SAVE, 2 + STATE * weights / SLOW_DISK)
        self._taken: dict[str, float] = {}
        self._steps: deque[float] = deque(maxlen=max(STEPS, 2 * log_every))
        self._last: float | None = None

    @property
    def used(self) -> float:
        """Seconds since the process started."""
        return time.monotonic() - self._began

    @contextlib.contextmanager
    def timing(self, what: str) -> Iterator[None]:
        """Time what is not a step: saving (`save`), validation (`validate`)."""
        start = time.monotonic()
        yield
        end = time.monotonic()
        self.took(what, end - start)
        if self._last is not None:
            self._last += end - start

    def took(self, what: str, seconds: float) -> None:
        self._taken[what] = max(seconds, self._taken.get(what, 0.0))

    def is_over(self, *, validates: bool) -> bool:
        """Whether one more step, its validation if it `validates`, and saving would exceed the limit."""
        if self.seconds is None:
            return False
        now = time.monotonic()
        if self._last is not None:
            self._steps.append(now - self._last)
        self._last = now
        step = max(self._steps, default=0.0)
        needed = 2 * step + 1.5 * self._taken.get("save", min(self._first_save, self.seconds / 10))
        if validates:  # as long as before; the first, as long as a step per batch
            needed += 1.5 * self._taken.get("validate", self._batches * step)
        return self.used + needed + min(SLACK, self.seconds / 20) >= self.seconds


def process_age() -> float:
    """Return the seconds since this process started, or torchrun before it, which may restart its processes."""
    pids = [os.getpid(), *([os.getppid()] if "TORCHELASTIC_RUN_ID" in os.environ else [])]
    ages = []
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
            after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            since_boot = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
            ages.append(time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
    return max(ages, default=time.monotonic() - IMPORTED)  # if the system does not tell
