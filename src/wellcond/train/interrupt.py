"""SIGINT and SIGTERM asked for while training: the step is finished, the state saved, then exit 130.

with interruptible() as asked:
    for step in …:
        if asked():         # between steps; a second signal ends the process at once
            save()
            raise Interrupted
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Interrupted", "interruptible"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):  # noqa: N818 (it was asked for)
    """A signal asked for the end, and the state has been saved."""


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Within it the two signals are remembered instead of raised; yields the question whether one has come."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # only the main thread may set handlers
        return
    came: list[int] = []

    def remember(number: int, _frame: Any) -> None:
        if came:
            os._exit(130)
        came.append(number)
        print("\nsaving after this step; once more to stop at once", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, remember) for number in SIGNALS}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
