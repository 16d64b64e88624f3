"""Several runs at once, in worker processes that each train one after the other: scheduling, and stopping together.

    jobs = Jobs(4)
    jobs.together([lambda: jobs.run(a), lambda: jobs.run(b)])       # two `Job`s side by side, results in order
    jobs.together([first, second], in_order=True)                   # runs of `second` fill the gaps that `first` leaves

Each call waits in a thread for its turn and for its run. No run starts while a call may still ask for one that comes
before it. A process prefers runs of the form that it has compiled; for another form it compiles anew. After SIGINT,
SIGTERM or the failure of a run, every process saves and stops; `together` raises once the last one has. A process is
told to stop by closing its standard input, which also happens if this process is killed, so that no run is left behind.
Processes are spread over all GPUs, or share one, or share the CPU cores.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from rich.console import Console

from wellcond.data.workers import cores
from wellcond.plugins import load_plugins
from wellcond.train.config import Config
from wellcond.train.folder import RunFolder
from wellcond.train.stopping import SIGNALS, TWICE, Interrupted, OutOfTime, process_age

__all__ = ["Job", "Jobs", "RunFailed", "deal", "work"]

T = TypeVar("T")
STOPPED = (130, -signal.SIGTERM, -signal.SIGINT)  # the last two: killed before there was anything to save
OUT_OF_TIME = 75  # the exit code of a run that its time limit has stopped
LOG_LINES = 12
PATIENCE = 60.0  # seconds to wait for a run of an earlier, killed command to save and exit
GLANCE = 0.2  # seconds between checks whether a run is done
WORK = "import sys; from wellcond.claims.jobs import work; sys.exit(work())"
"""The program that each worker process runs."""
SAVED = "stopped, and what was running is saved"


class RunFailed(ValueError):  # noqa: N818 (a run's error, passed on)
    """A run's process ended with an error, or was killed."""

    def __init__(self, name: str, how: str, log: Path):
        super().__init__(f"{name} {how}; its log is {log}. The same command goes on, with what the others have saved")
        self.how = how
        """How it ended, in words: failed, was killed by signal 9."""
        self.log: str = _last_lines(log)


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A run to be trained."""

    name: str
    log: Path
    """The file that its output is appended to."""
    turn: int
    """Runs with a lower number start first. But between 0 and 1, a process prefers a run that it need not compile."""
    order: tuple[int, ...] = ()
    """Of the runs of one turn, those with smaller numbers start first, and of equal ones those asked for first."""
    form: Any
    """What its code is compiled for: a process whose last run had the same form need not compile."""
    tell: Callable[[], bytes]
    """Returns the line that its process reads when it starts."""
    started: Callable[[bool], None]
    """Called before it starts, with whether its process already has code for its form."""
    done: Callable[[], bool]
    """Whether its result has been written; then its process is ready for the next run."""


class _Worker:
    """A slot for a process, and that process, from its first run until one ends badly."""

    def __init__(self, variables: dict[str, str]):
        self.variables = variables
        """Environment variables for the process: its GPU and its number of threads."""
        self.form: Any = None
        """The form of its last run."""
        self.compiled = False
        """Whether it already had code for that form."""
        self.name = ""
        self.process: subprocess.Popen[bytes] | None = None
        self._code = 0
        self._ended = threading.Event()

    def train(self, job: Job, *, stopping: Callable[[], bool]) -> int:
        """Train a run; return 0 if it is done, otherwise the exit code of the process, which has then ended."""
        self.name = job.name
        if self.process is None or self._ended.is_set():
            self._start(job.log)
        self._tell(job.tell())
        if stopping():  # stop() may have come before this process existed
            self.stop()
        while not self._ended.wait(GLANCE) and not job.done():
            pass
        if not self._ended.is_set():
            return 0
        self.process = None
        return 0 if job.done() else self._code or 130  # exit code 0: told to stop before it had read the plan

    def _start(self, log: Path) -> None:
        # A process group of its own: Ctrl-C in a terminal then reaches only this process, which passes it on, once.
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", WORK], stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, **_import_path(), **self.variables}, process_group=0,
            )  # fmt: skip
        self.process = process
        self._ended = ended = threading.Event()

        def wait() -> None:
            self._code = process.wait()
            self.let_go(process.stdin)
            ended.set()

        threading.Thread(target=wait, daemon=True).start()

    def _tell(self, line: bytes) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has died or been told to stop; its exit code says so
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def stop(self) -> None:
        """Let the process save what it is training, if anything, and exit."""
        if self.process is not None:
            self.let_go(self.process.stdin)

    @staticmethod
    def let_go(pipe: IO[bytes] | None) -> None:
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()

    def wait(self) -> None:
        """Wait until the process, if there is one, has ended."""
        if self.process is not None:
            self._ended.wait()
            self.process = None


class Jobs:
    """Up to `number` processes at once."""

    def __init__(self, number: int, *, device: str | None = None):
        self.device = device
        self._workers = [_Worker(variables) for variables in deal(number, device)]
        self._idle = list(self._workers)
        self._changed = threading.Condition()
        self._waiting: dict[Job, int] = {}  # in the order of asking, with the place of their call
        self._deciding = 0  # threads of `together` that neither have a process nor wait for one
        self._thread = threading.local()
        self._stopping = self._within = False

    # Threads

    def together(self, calls: Sequence[Callable[[], T]], *, in_order: bool = False) -> list[T]:
        """Make each call in a thread and return the results in order. An error is raised once all calls have ended.

        `in_order`: whatever the first call asks for, also in threads of its own, starts before what the second asks
        for, which gets the processes that the first leaves idle.
        """
        results: dict[int, T] = {}
        errors: list[BaseException] = []
        place = self._place

        def work(number: int, call: Callable[[], T]) -> None:
            self._thread.counts = True
            self._thread.place = number if in_order else place
            try:
                results[number] = call()
            except BaseException as error:
                errors.append(error)
                self.stop()
            finally:
                self._decides(-1)

        threads = [threading.Thread(target=work, args=pair) for pair in enumerate(calls)]
        with self._outermost():
            with self._changed:
                self._deciding += len(threads)
            self._decides(-1)  # this thread asks for nothing while it waits for them
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self._decides(1)
        if errors:  # the other calls end with Interrupted
            raise next((error for error in errors if not isinstance(error, Interrupted)), errors[0])
        return [results[number] for number in range(len(calls))]

    @property
    def _place(self) -> int:
        """The number of the call that this thread belongs to, among those of `together` that are in order."""
        return getattr(self._thread, "place", 0)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """For a thread of `together` that waits for something other than a process, and asks for nothing meanwhile."""
        self._decides(-1)
        try:
            yield
        finally:
            self._decides(1)

    def hasten(self, name: str) -> None:
        """Let a run that another call has asked for start no later than if this one, which waits for it, had asked."""
        with self._changed:
            for job in [job for job in self._waiting if job.name == name]:
                self._waiting[job] = min(self._waiting[job], self._place)

    def _decides(self, change: int) -> None:
        if getattr(self._thread, "counts", False):  # the main thread does not: it asks for nothing itself
            with self._changed:
                self._deciding += change
                self._changed.notify_all()

    @contextlib.contextmanager
    def _outermost(self) -> Iterator[None]:
        """In nested calls of `together`, let the outermost pass signals on and end the processes."""
        if self._within:
            yield
            return
        self._within, self._stopping = True, False
        try:
            with self._signals():
                yield
                self.stop()
                for worker in self._workers:
                    worker.wait()
        finally:
            self._within = False

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        first: list[float] = []

        def heard(_number: int, _frame: Any) -> None:
            if not first:
                first.append(time.monotonic())
                self.stop()
                number = len(self._workers) - len(self._idle)
                print(f"\n{number} runs save after this step; once more to stop at once", file=sys.stderr, flush=True)
            elif time.monotonic() - first[0] > TWICE:
                for worker in self._workers:
                    if worker.process is not None:
                        worker.process.kill()
                os._exit(130)

        before = {number: signal.signal(number, heard) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # Processes

    def run(self, job: Job) -> None:
        """Train one run when it is its turn; return when it is done. Raises Interrupted, OutOfTime or RunFailed."""
        with self._worker_for(job) as worker:
            job.started(worker.compiled)
            code = worker.train(job, stopping=lambda: self._stopping)
        if code == OUT_OF_TIME:
            raise OutOfTime("the time is over, and what was running is saved")
        if code in STOPPED:
            raise Interrupted(SAVED)
        if code:
            how = f"was killed by signal {-code}" if code < 0 else "failed"
            raise RunFailed(job.name, how, job.log)

    @contextlib.contextmanager
    def _worker_for(self, job: Job) -> Iterator[_Worker]:
        """Wait until it is the run's turn and a worker is free, and yield that worker."""
        with self._changed:
            self._waiting[job] = self._place
            self._decides(-1)
            worker = self._changed.wait_for(lambda: self._stopping or self._choice().get(job))
            del self._waiting[job]
            if not isinstance(worker, _Worker):
                self._decides(1)
                raise Interrupted(SAVED)
            worker.compiled, worker.form = _is_ready(worker, job), job.form
            self._idle.remove(worker)
            self._changed.notify_all()
        try:
            yield worker
        finally:
            with self._changed:  # without a process, this thread may again ask for runs that come before others
                self._idle.append(worker)
                self._decides(1)
                self._changed.notify_all()

    def _choice(self) -> dict[Job, _Worker]:
        """Return the run that starts next and its worker; nothing if it is too early to say or no worker is free."""
        if self._deciding or not self._waiting:
            return {}
        place, first = min((place, job.turn) for job, place in self._waiting.items())
        its = sorted((job for job in self._waiting if self._waiting[job] == place), key=lambda job: job.order)
        for job in its:  # turns 0 and 1 alike: a grid can wait for a compiled seed
            ready = [worker for worker in self._idle if _is_ready(worker, job)]
            if ready and job.turn <= max(first, 1):
                return {job: ready[0]}
        if not self._idle:
            return {}
        forms = [worker.form for worker in self._workers if worker not in self._idle]  # best left to these workers
        job = min((job for job in its if job.turn == first), key=lambda job: job.form in forms)
        # On the GPU with most idle workers, so that none has two runs while another has none; rather one without code.
        places = [worker.variables for worker in self._idle]
        return {job: max(self._idle, key=lambda worker: (places.count(worker.variables), worker.process is None))}

    def stop(self) -> None:
        """Let every process save and stop, and start no more runs."""
        with self._changed:
            self._stopping = True
            for worker in self._workers:
                worker.stop()
            self._changed.notify_all()


def _is_ready(worker: _Worker, job: Job) -> bool:
    return worker.process is not None and worker.form == job.form


def _import_path() -> dict[str, str]:
    """Return a PYTHONPATH with which the other process finds this source tree even if it is not installed."""
    root = Path(__file__).resolve().parents[2]
    if root.name in ("site-packages", "dist-packages"):
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))}


def _last_lines(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_LINES:]
    return "\n".join(f"    {line}" for line in lines) or "    (nothing)"


def deal(jobs: int, device: str | None = None, *, gpus: int | None = None) -> list[dict[str, str]]:
    """Return, for each job, the environment variables to set for its process.

    Jobs go to all visible GPUs (`gpus` of them) in turn, unless `device` names one. Each gets its share of the cores,
    unless OMP_NUM_THREADS is set: more threads than cores wait for each other, even if the GPU does most of the work.
    """
    share = {} if os.environ.get("OMP_NUM_THREADS") else {"OMP_NUM_THREADS": str(max(1, cores() // jobs))}
    if gpus is None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = torch.device(device or ("cuda" if gpus else "cpu"))
    if wanted.type != "cuda" or gpus <= 1:
        return [dict(share) for _ in range(jobs)]
    names = _visible(gpus)
    if wanted.index is not None:  # processes see only this one, so that nothing lands on another
        names = [names[wanted.index]]
    return [{**share, "CUDA_VISIBLE_DEVICES": names[job % len(names)]} for job in range(jobs)]


def _visible(count: int) -> list[str]:
    """Return the GPUs' names as in CUDA_VISIBLE_DEVICES: numbers or identifiers, not necessarily the first ones."""
    given = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return given[:count] if given else [str(number) for number in range(count)]


# ---- inside a worker's process


def work() -> int:
    """Run a worker's process: train plans read from standard input, a line of JSON each, and return the exit code.

    The parent process keeps standard input open as long as this one should go on. When it is closed, because the parent
    asks this one to stop or has died, it saves and stops, as after SIGTERM. It also ends with the first run that is not
    done. Exit codes: 0 all done (including diverged runs, whose results say so), 1 failed, 75 out of time and 130
    stopped, both after saving.
    """
    from wellcond.claims.runs import Planned, Runs  # imported here: runs.py imports this file

    runs: Runs | None = None
    for line in _lines_of_input():
        told = json.loads(line)
        _write_to(told["log"])
        sys.argv = told["argv"]
        root = Path(told["root"])
        if runs is None:
            for problem in load_plugins():  # an arm may use what these register
                print(f"warning: {problem}", file=sys.stderr)
            runs = Runs(root, console=Console(stderr=True), device=told["device"])
        config = Config.from_json(told["config"])
        if told["left"] is not None:  # a limit counts from the start of this process
            config = config.changed({"time_limit": f"{process_age() + told['left']:.1f}s"})
        plan = Planned(
            name=told["name"], config=config, measure=tuple(told["measure"]), start=told["start"],
            keep_weights=told["keep_weights"],
        )  # fmt: skip
        try:
            _wait_for_earlier_process(root / plan.name)
            runs.run(plan, quiet=False)
        except Interrupted as stopped:
            print(stopped, file=sys.stderr)
            return OUT_OF_TIME if isinstance(stopped, OutOfTime) else 130
        except ValueError as error:  # one of our own messages, which says it all
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


def _lines_of_input() -> Iterator[bytes]:
    """Yield lines until standard input is closed; then send SIGTERM to this process if it is still busy with one.

    No SIGTERM is sent if a signal has already come, since a second one would not let it save.
    """
    came, note = os.pipe()
    os.set_blocking(came, False)
    os.set_blocking(note, False)
    signal.set_wakeup_fd(note, warn_on_full_buffer=False)  # Python writes each signal that has a handler to it
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    over, busy = threading.Event(), threading.Event()

    def read() -> None:
        with open(0, "rb", buffering=0, closefd=False) as standard_input:
            while line := standard_input.readline():
                lines.put(line)
        over.set()
        lines.put(b"")
        if not busy.is_set():  # then it checks `over` before it begins a line
            return
        with contextlib.suppress(BlockingIOError):
            if set(os.read(came, 65536)) & set(SIGNALS):
                return
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=read, daemon=True).start()
    while line := lines.get():
        busy.set()
        if over.is_set():
            return
        yield line
        busy.clear()


def _write_to(log: str) -> None:
    """From now on, append what this process and its children print to this file."""
    sys.stdout.flush()
    sys.stderr.flush()
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.close(handle)


def _wait_for_earlier_process(folder: Path) -> None:
    """Wait until the folder is free: if an earlier main process was killed, its runs may still be saving."""
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
