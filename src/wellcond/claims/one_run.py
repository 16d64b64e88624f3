"""One run of an experiment in a process of its own: what `wellcond reproduce --jobs` starts.

    python -m wellcond.claims.one_run NAME        # the plan comes as one line of JSON on the standard input

The standard input stays open as long as the starting process wants this one to go on. When it ends, because that
process asks for it or has died, this one saves and stops, as after SIGTERM. Exit codes: 0 done (a diverged run, too:
its result says so), 1 failed, 75 out of time and 130 stopped, both after saving.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from rich.console import Console

from wellcond.claims.jobs import OUT_OF_TIME
from wellcond.claims.runs import Planned, Runs
from wellcond.plugins import load_plugins
from wellcond.train.config import Config
from wellcond.train.folder import RunFolder
from wellcond.train.interrupt import SIGNALS, Interrupted
from wellcond.train.time_limit import OutOfTime

__all__ = ["main"]

PATIENCE = 60.0  # seconds for an orphan of an earlier start to save and leave


def main() -> int:
    with open(0, "rb", buffering=0, closefd=False) as standard_input:
        told = json.loads(standard_input.readline())
    _stop_when_input_ends()
    sys.argv = told["argv"]
    for problem in load_plugins():  # an arm may be of theirs
        print(f"warning: {problem}", file=sys.stderr)
    root = Path(told["root"])
    plan = Planned(name=told["name"], config=Config.from_json(told["config"]), measure=told["measure"])
    try:
        _wait_for_an_orphan(root / plan.name)
        Runs(root, console=Console(stderr=True), device=told["device"]).run(plan, quiet=False)
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        return OUT_OF_TIME if isinstance(stopped, OutOfTime) else 130
    except ValueError as error:  # ours: it speaks for itself
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _stop_when_input_ends() -> None:
    """From now on: SIGTERM to this process, unless a signal came already, since a second one would not let it save."""
    came, note = os.pipe()
    os.set_blocking(came, False)
    os.set_blocking(note, False)
    signal.set_wakeup_fd(note, warn_on_full_buffer=False)  # Python notes there each signal that has a handler

    def watch() -> None:
        while os.read(0, 1024):
            pass
        with contextlib.suppress(BlockingIOError):
            if set(os.read(came, 65536)) & set(SIGNALS):
                return
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _wait_for_an_orphan(folder: Path) -> None:
    """Of a start whose main process was killed, the runs are just saving: wait until the folder is free."""
    if not folder.exists():
        return
    until = time.monotonic() + PATIENCE
    while True:
        try:
            with RunFolder(path=folder).held():
                return
        except ValueError:
            if time.monotonic() > until:
                raise
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
