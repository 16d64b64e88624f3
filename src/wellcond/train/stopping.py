"""What may end a run from outside: a signal, or a limit on its time. Either way it finishes its step and saves.

with interruptible() as asked:                      # SIGINT, SIGTERM
    …                                               # nothing to save yet: a signal ends it with Interrupted
    for step in …:
        if asked():                                 # between steps; a second signal, a second later, ends it at once
            save()
            raise Interrupted

clock = TimeLimit("9m", validation_batches=40)      # from the start of the process: imports, decoding, compiling
with clock.timing("save"): …                        # how long that takes is known from then on
if clock.is_over(validates=False): …                # after each step: no time for another one, and for saving
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
TWICE = 1.0  # seconds; `timeout` and schedulers send a signal to a process and to its group, and mean it once
IMPORTED = time.monotonic()
STEPS = 50  # of the last steps, the longest tells how long the next one may take;
# where a GPU is waited for at every `log_every`-th step alone, that one has to be among them
UNKNOWN_SAVE = 60.0  # seconds for the first state, at most; a tenth of the limit, if that is less
SLOW_DISK, STATE = 50e6, 4  # bytes a second; a state is so many times the weights: moments, averages
SLACK = 10.0  # seconds to end in; a twentieth of the limit, if that is less


class Interrupted(Exception):  # noqa: N818 (it was asked for)
    """A signal asked for the end, and the state, if there was any, has been saved."""


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yields the question whether a signal has come. Once it was asked, signals are remembered until it is asked again.

    Before, while data are decoded and the model is built, there is nothing to save: a signal leaves what runs by a
    KeyboardInterrupt, which no `except Exception` takes for a damaged image, and Interrupted is raised from here. One
    that came too late, in the last step, is sent again at the end, to whoever handles it then.
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
        if os.getpid() != here:  # forked by a training: it has nothing to save
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
    """Whether it is a KeyboardInterrupt, or came up while one passed: of a lock that is waited for just then, threading
    says that it is not held."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


# ---- a limit on the time


def as_seconds(text: str) -> float:
    """A duration: 90s, 9m, 1h30m, 2d, or plain seconds. ValueError for anything else, and for none at all."""
    number = r"(\d+(?:\.\d+)?)"
    found = re.fullmatch(f"(?:{number}d)?(?:{number}h)?(?:{number}m)?(?:{number}s?)?", text.strip().lower())
    parts = [float(part or 0) for part in found.groups()] if found else []
    seconds = sum(part * unit for part, unit in zip(parts, (86400, 3600, 60, 1), strict=False))
    if not 0 < seconds < math.inf:
        raise ValueError(f"is a time such as 90s, 9m or 1h30m, or a number of seconds; got {text!r}")
    return seconds


class OutOfTime(Interrupted):
    """The time is over, and the state has been saved."""


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
        needed = 2 * step + 1.5 * self._taken.get("save", min(self._first_save, self.seconds / 10))
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
