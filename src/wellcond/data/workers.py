"""Work in several new interpreters at once, where threads would only wait for each other's Python.

    codes = in_interpreters("wellcond.data.cache:decode_files", jobs, meanwhile=show)     # their exit codes

Each interpreter calls the function with its job, which is pickled, and with `alive`, to be asked now and then: False
once the parent process has died. They are no forks: the caller may hold a GPU or threads, or be a script without a
main guard. They see no GPU, use one thread each, and are killed if the caller is interrupted.
"""

import contextlib
import importlib
import os
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["cores", "in_interpreters", "work"]

GLANCE = 0.2  # seconds between two looks at whether they are done
WORK = "from wellcond.data.workers import work; work()"


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_interpreters(function: str, jobs: Sequence[Any], *, meanwhile: Callable[[], None]) -> list[int]:
    """Call "module:function" with each job and return the exit codes; `meanwhile` is called until all are done.

    If the system starts no more processes, the remaining jobs are left, and have no exit codes. Callers have to finish
    what is left, by these jobs or by a process that died; a warning says that there is some.
    """
    source = str(Path(__file__).parents[2])
    path = os.pathsep.join([source, *map(str, filter(None, sys.path))])  # they import what this process would
    alone = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    running: list[subprocess.Popen[bytes]] = []
    problems: list[str] = []
    try:
        for _ in jobs:  # all start before the first is read; in process groups of their own, where Ctrl-C is not sent
            command = [sys.executable, "-P", "-c", WORK]
            try:
                running.append(subprocess.Popen(command, stdin=subprocess.PIPE, env=alone, process_group=0))
            except OSError as error:  # no memory, or too many processes
                problems.append(f"{len(jobs) - len(running)} could not be started ({error.strerror})")
                break
        for process, job in zip(running, jobs, strict=False):
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # it has died: its exit code tells
                stdin.write(pickle.dumps((function, os.getpid(), job)))
        while any(process.poll() is None for process in running):
            time.sleep(GLANCE)
            meanwhile()
    finally:
        for process in running:
            process.kill()
            process.wait()
    codes = [process.returncode for process in running]
    if failed := [code for code in codes if code]:
        problems.append(f"{len(failed)} failed (exit code {', '.join(map(str, sorted(set(failed))))})")
    if problems:
        warnings.warn(
            f"of {len(jobs)} processes for {function}, {' and '.join(problems)}; this one does their work", stacklevel=2
        )
    return codes


def work() -> None:
    """Run such an interpreter."""
    function, parent, job = pickle.load(sys.stdin.buffer)
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(job, lambda: os.getppid() == parent)
