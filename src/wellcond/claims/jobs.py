"""Several runs at once, each in a process of its own: in which order they start, how they stop together.

    jobs = Jobs(4)
    jobs.together([lambda: jobs.run(plan_a, …), lambda: jobs.run(plan_b, …)])       # side by side, results in order

Each call waits in a thread for its turn and for its process. No run starts while a call may still ask for one that
comes before it. After SIGINT, SIGTERM or the failure of a run every process saves and stops; `together` raises when the
last one has. A process is told to stop by the end of its standard input, which also comes if this process is killed, so
that no run is left behind. Runs are spread over all GPUs, or share one, or the cores. On a GPU that several share, one
starts after the other: while it reads and compiles, the rest keep the GPU busy, and the next finds what it compiled.
"""

import contextlib
import heapq
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from rich.console import Console

from wellcond.plugins import load_plugins
from wellcond.train.config import Config
from wellcond.train.folder import RunFolder
from wellcond.train.stopping import SIGNALS, TWICE, Interrupted, OutOfTime

__all__ = ["Jobs", "RunFailed", "deal", "one_run"]

T = TypeVar("T")
STOPPED = (130, -signal.SIGTERM, -signal.SIGINT)  # the last two: before there was anything to save
OUT_OF_TIME = 75  # the exit code of a run that its time limit has stopped
LOG_LINES = 12
PATIENCE = 60.0  # seconds for a run of an earlier, killed start to save and exit
GLANCE = 0.5  # seconds between two looks at whether a run has begun to train
ONE_RUN = "import sys; from wellcond.claims.jobs import one_run; sys.exit(one_run())"
"""The program of each process; its only argument, the name of the run, is for people who list processes."""
SAVED = "stopped, and what was running is saved"


class RunFailed(ValueError):  # noqa: N818 (a run's error, passed on)
    """A run's process ended with an error, or was killed."""

    def __init__(self, name: str, how: str, log: Path):
        super().__init__(f"{name} {how}; its log is {log}. The same command goes on, with what the others have saved")
        self.how = how
        """In words: failed, was killed by signal 9."""
        self.log: str = _last_lines(log)


class Jobs:
    """Up to `number` processes at once."""

    def __init__(self, number: int, *, device: str | None = None):
        self.device = device
        self._free = deal(number, device)
        self._one_by_one = device != "cpu" and torch.cuda.is_available()
        self._starting: list[dict[str, str]] = []  # places of processes that do not train yet, if one waits for them
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, int]] = []
        self._deciding = 0  # threads of `together` that neither wait for a place nor have one
        self._thread = threading.local()
        self._tickets = 0
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopping = self._listening = False

    # Threads

    def together(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Call each in a thread; their results, in order. After an error, when all have ended, that error is raised."""
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def work(number: int, call: Callable[[], T]) -> None:
            self._thread.counts = True
            try:
                results[number] = call()
            except BaseException as error:
                errors.append(error)
                self.stop()
            finally:
                self._decides(-1)

        threads = [threading.Thread(target=work, args=pair) for pair in enumerate(calls)]
        with self._signals():
            with self._changed:
                self._deciding += len(threads)
            self._decides(-1)  # while it waits for them, this thread asks for nothing
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self._decides(1)
        if errors:  # the others end with Interrupted
            raise next((error for error in errors if not isinstance(error, Interrupted)), errors[0])
        return [results[number] for number in range(len(calls))]

    def _decides(self, change: int) -> None:
        if getattr(self._thread, "counts", False):  # not the main one, which asks for nothing itself
            with self._changed:
                self._deciding += change
                self._changed.notify_all()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if self._listening or threading.current_thread() is not threading.main_thread():
            yield
            return
        first: list[float] = []

        def heard(_number: int, _frame: Any) -> None:
            if not first:
                first.append(time.monotonic())
                self.stop()
                print(
                    f"\n{len(self._running)} runs save after this step; once more to stop at once",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            elif time.monotonic() - first[0] > TWICE:
                for process in list(self._running):
                    process.kill()
                os._exit(130)

        self._listening, self._stopping = True, False
        before = {number: signal.signal(number, heard) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._listening = False

    # Processes

    def run(
        self, name: str, tell: Callable[[], bytes], *, log: Path, turn: int, started: Callable[[], None],
        trains: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Train one run when it is its turn; returns when it is done. Raises Interrupted, OutOfTime and RunFailed.

        Args:
            tell: called when the process starts; returns what it reads from its standard input.
            log: where its output goes, after that of earlier starts.
            turn: those with a lower number start first, those of one number in the order in which they were asked for.
            started: called before the process starts.
            trains: asked now and then whether the process has got to its first steps.
        """
        with self._place(turn) as variables:
            started()
            with open(log, "ab") as output, self._watched(variables, trains):
                code = self._process(name, tell(), variables, output)
        if code == OUT_OF_TIME:
            raise OutOfTime("the time is over, and what was running is saved")
        if code in STOPPED:
            raise Interrupted(SAVED)
        if code:
            how = f"was killed by signal {-code}" if code < 0 else "failed"
            raise RunFailed(name, how, log)

    @contextlib.contextmanager
    def _place(self, turn: int) -> Iterator[dict[str, str]]:
        """One of the places for processes, as environment variables; waits until one is free and it is its turn."""
        with self._changed:
            self._tickets += 1
            mine = (turn, self._tickets)
            heapq.heappush(self._waiting, mine)
            self._decides(-1)

            def free() -> list[dict[str, str]]:
                return [place for place in self._free if place not in self._starting]

            def may_start() -> bool:
                return bool(free()) and self._waiting[0] == mine and not self._deciding

            self._changed.wait_for(lambda: self._stopping or may_start())
            self._waiting.remove(mine)
            heapq.heapify(self._waiting)
            if self._stopping:
                self._decides(1)
                raise Interrupted(SAVED)
            # Where most places are free, so that no GPU has two while another has none.
            variables = max(free(), key=self._free.count)
            self._free.remove(variables)
            if self._one_by_one:
                self._starting.append(variables)
            self._changed.notify_all()
        try:
            yield variables
        finally:
            with self._changed:  # with its place it gives up its silence: it may ask for what comes before others
                self._free.append(variables)
                self._decides(1)
                self._has_started(variables)

    @contextlib.contextmanager
    def _watched(self, variables: dict[str, str], trains: Callable[[], bool]) -> Iterator[None]:
        """Notes when the process trains, so that the next one may start beside it."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(GLANCE) and not trains():
                pass
            self._has_started(variables)

        watcher = threading.Thread(target=watch, daemon=True)
        if self._one_by_one:
            watcher.start()
        try:
            yield
        finally:
            ended.set()
            if self._one_by_one:
                watcher.join()

    def _has_started(self, variables: dict[str, str]) -> None:
        with self._changed:
            if variables in self._starting:
                self._starting.remove(variables)
            self._changed.notify_all()

    def _process(self, name: str, told: bytes, variables: dict[str, str], output: IO[bytes]) -> int:
        # A process group of its own: Ctrl-C in a terminal reaches this process alone, which passes it on, once.
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", ONE_RUN, name], stdin=subprocess.PIPE, stdout=output,
            stderr=subprocess.STDOUT, env={**os.environ, **_import_path(), **variables}, process_group=0,
        )  # fmt: skip
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died; its exit code says so
            process.stdin.write(told)
            process.stdin.flush()
        with self._changed:
            self._running.add(process)
            if self._stopping:
                _close_input(process)
        try:
            return process.wait()
        finally:
            with self._changed:
                self._running.discard(process)
                _close_input(process)

    def stop(self) -> None:
        """Let every process save and stop, and start no more."""
        with self._changed:
            self._stopping = True
            for process in self._running:
                _close_input(process)
            self._changed.notify_all()


def _close_input(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()


def _import_path() -> dict[str, str]:
    """So that the other process finds a source tree that is not installed."""
    root = Path(__file__).resolve().parents[2]
    if root.name in ("site-packages", "dist-packages"):
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))}


def _last_lines(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_LINES:]
    return "\n".join(f"    {line}" for line in lines) or "    (nothing)"


def deal(jobs: int, device: str | None = None, *, gpus: int | None = None) -> list[dict[str, str]]:
    """For each job the variables to set for its process.

    Over all visible GPUs (`gpus` of them) in turn, unless `device` names one. On a CPU each gets its share of the
    cores, unless OMP_NUM_THREADS is set: more threads than cores slow each other down.
    """
    if gpus is None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu" or not gpus:
        share = {} if os.environ.get("OMP_NUM_THREADS") else {"OMP_NUM_THREADS": str(max(1, _cores() // jobs))}
        return [dict(share) for _ in range(jobs)]
    wanted = torch.device(device or "cuda")
    if wanted.type != "cuda" or gpus == 1:
        return [{} for _ in range(jobs)]
    names = _visible(gpus)
    if wanted.index is not None:  # the only one that its processes see, so that nothing lands on another
        names = [names[wanted.index]]
    return [{"CUDA_VISIBLE_DEVICES": names[job % len(names)]} for job in range(jobs)]


def _visible(count: int) -> list[str]:
    """The GPUs' names as CUDA_VISIBLE_DEVICES has them: numbers or identifiers, possibly not the first ones."""
    given = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return given[:count] if given else [str(number) for number in range(count)]


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# ---- inside the process of a run


def one_run() -> int:
    """What the process of a run does: it reads its plan, one line of JSON, from the standard input, and trains.

    The standard input stays open as long as the starting process wants this one to go on. When it ends, because that
    process asks for it or has died, this one saves and stops, as after SIGTERM. Exit codes: 0 done (a diverged run,
    too: its result says so), 1 failed, 75 out of time and 130 stopped, both after saving.
    """
    from wellcond.claims.runs import Planned, Runs  # which starts processes by this file

    with open(0, "rb", buffering=0, closefd=False) as standard_input:
        told = json.loads(standard_input.readline())
    _stop_when_input_ends()
    sys.argv = told["argv"]
    for problem in load_plugins():  # an arm may use what they register
        print(f"warning: {problem}", file=sys.stderr)
    root = Path(told["root"])
    plan = Planned(
        name=told["name"], config=Config.from_json(told["config"]), measure=tuple(told["measure"]),
        start=told["start"], keep_weights=told["keep_weights"],
    )  # fmt: skip
    try:
        _wait_for_earlier_process(root / plan.name)
        Runs(root, console=Console(stderr=True), device=told["device"]).run(plan, quiet=False)
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        return OUT_OF_TIME if isinstance(stopped, OutOfTime) else 130
    except ValueError as error:  # one of ours, which says it all
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


def _wait_for_earlier_process(folder: Path) -> None:
    """If an earlier main process was killed, its runs may still be saving: wait until the folder is free."""
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
