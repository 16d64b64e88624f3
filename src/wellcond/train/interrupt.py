"""SIGINT and SIGTERM asked for while training: the step is finished, the state saved, then exit 130.

with interruptible() as asked:
    …                       # nothing to save yet: a signal ends it with Interrupted
    for step in …:
        if asked():         # between steps; a second signal, a second later, ends the process at once
            save()
            raise Interrupted
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["SIGNALS", "TWICE", "Interrupted", "interruptible"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)
TWICE = 1.0  # seconds; `timeout` and schedulers send a signal to a process and to its group, and mean it once


class Interrupted(Exception):  # noqa: N818 (it was asked for)
    """A signal asked for the end, and the state, if there was any, has been saved."""


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yields the question whether a signal has come. Once it was asked, signals are remembered until it is asked again.

    Before, while data are decoded and the model is built, there is nothing to save: a signal leaves what runs by a
    KeyboardInterrupt, which no `except Exception` takes for a damaged image, and Interrupted is raised from here.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # only the main thread may set handlers
        return
    came: list[float] = []  # when each signal came
    training, here = False, os.getpid()

    def remember(number: int, _frame: Any) -> None:
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
    except KeyboardInterrupt:
        if not came:
            raise
        raise Interrupted("stopped before the first step; the same command begins again, or goes on") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
