"""Real processes: each takes some seconds to import torch, so that there are few, and a test asks much of them. Where
how a process is started is not what is tested, it is forked from one that has imported everything."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import wellcond.claims.jobs as jobs_module
import wellcond.claims.runs as runs_module
from wellcond.claims.jobs import Job, Jobs, RunFailed
from wellcond.claims.reproduce import reproduce
from wellcond.claims.runs import Planned, Runs
from wellcond.records import read_json, read_rows
from wellcond.train.checkpoint import saved_steps
from wellcond.train.recipes import recipe
from wellcond.train.stopping import Interrupted, OutOfTime

SIZE = {"img_size": 8, "patch_size": 4, "depth": 1, "embed_dim": 16, "num_heads": 2}
EVERY = 20  # steps, a row
ENDLESS = 1_000_000  # epochs: no machine is fast enough to finish before the signal comes
LONG = 120.0  # seconds until a test gives up
CLAIMS = ["asa-fig1b", "asa-fig1c"]  # the first has one arm of the second's
PROCESS: Any = object()  # of a worker that is never told anything


def plan(name, **changes):
    config = recipe("digits", epochs=ENDLESS, batch_size=256, log_every=EVERY, eval_every=ENDLESS, model_kwargs=SIZE)
    return Planned(name=name, config=config.changed({"save_every": ENDLESS, **changes}))


def steps(folder):
    """Of the rows that are written so far."""
    try:
        return [row["step"] for row in read_rows(folder / "metrics.jsonl")]
    except (FileNotFoundError, json.JSONDecodeError, ValueError):
        return []


def wait_for(happened):
    until = time.monotonic() + LONG
    while not happened():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


def when(happened, act):
    """Do it as soon as the other has happened, in a thread."""

    def watch():
        wait_for(happened)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def runs_in(folder, jobs=2, console=None):
    return Runs(folder, console=console or Console(quiet=True), device="cpu", jobs=jobs)


class Forked:
    """In the place of a `subprocess.Popen` of a run's program: a pipe to its standard input, and its number."""

    def __init__(self, launcher, folder, arguments, *, output):
        self.args = arguments
        pipe = folder / f"input-{threading.get_native_id()}-{time.monotonic_ns()}"
        os.mkfifo(pipe)
        program, *names = arguments[3:]
        self.started = launcher.program(program, *names, log=output, standard_input=pipe)
        self.stdin = os.fdopen(os.open(pipe, os.O_WRONLY), "wb")  # when the process has opened it, too
        pipe.unlink()

    def wait(self):
        (code,) = self.started.wait()
        return code

    def kill(self):
        self.started.send(signal.SIGKILL)


@pytest.fixture
def forked(launcher, tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("pipes")

    def start(arguments, *, stdin, stdout, stderr, env, process_group):
        assert (stdin, stderr, process_group) == (subprocess.PIPE, subprocess.STDOUT, 0)
        assert arguments == [sys.executable, "-P", "-c", jobs_module.WORK]
        return Forked(launcher, folder, arguments, output=stdout.name)

    class Subprocess:
        PIPE, STDOUT, Popen = subprocess.PIPE, subprocess.STDOUT, staticmethod(start)

    monkeypatch.setattr(jobs_module, "subprocess", Subprocess)


def both(runs):
    return runs.together([lambda: runs.run(plan("a")), lambda: runs.run(plan("b", lr=1e-4))])


@pytest.mark.slow
def test_several_at_once_come_to_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # a sum over two threads is another sum
    quick = [
        "epochs=1",
        "batch_size=256",
        "model_kwargs=" + ",".join(f"{name}={value}" for name, value in SIZE.items()),
    ]
    found, said, started = {}, {}, []
    start = jobs_module._Worker._start
    monkeypatch.setattr(jobs_module._Worker, "_start", lambda *given: started.append(given) or start(*given))
    for jobs in (1, 2):
        console = Console(record=True, width=200, file=io.StringIO())
        folder = tmp_path / str(jobs)
        code = reproduce(
            CLAIMS, scale="smoke", seeds=1, settings=quick, output=folder / "runs", evidence=folder, jobs=jobs,
            device="cpu", console=console,
        )  # fmt: skip
        assert code == 0
        found[jobs] = [read_json(folder / one / "smoke-digits.json") for one in CLAIMS]
        lines = console.export_text().splitlines()
        said[jobs] = sorted(line for line in lines if line.startswith("Digits"))
        told = [line.split(": ")[1].split()[0] for line in lines if line.startswith("[")]
        assert sorted(told) == ["loss"] * 9 + ["training"] * 9  # those of the arm that both claims have once
    for record in (*found[1], *found[2]):
        assert record.pop("environment")["command"]
        for run in [run for arm in record["arms"].values() for run in arm["runs"]]:
            assert run.pop("images per second") is not None
    assert found[1] == found[2]
    assert found[1][0]["arms"]["no-mlp"]["runs"]  # asa-fig1b comes last: it shows what the other has trained
    assert said[1] == said[2]
    assert len(started) == 2  # for nine runs of two claims
    results = {jobs: sorted((tmp_path / str(jobs)).rglob("result.json")) for jobs in (1, 2)}
    for one, other in zip(results[1], results[2], strict=True):
        one, other = read_json(one), read_json(other)
        differ = dict.fromkeys(("images_per_second", "seconds", "environment"))
        assert {**one, **differ} == {**other, **differ}
        assert one["environment"]["command"] == other["environment"]["command"]
    # What is done is read, whoever trained it: no process is started, and nothing is written.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "2" / "runs").rglob("*")}
    monkeypatch.setattr(sys, "executable", "/nothing/there")
    reproduce(
        CLAIMS, scale="smoke", seeds=1, settings=quick, output=tmp_path / "2" / "runs", evidence=tmp_path, jobs=2,
        console=Console(quiet=True),
    )  # fmt: skip
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "2" / "runs").rglob("*")} == before


def test_signals_let_every_run_save_and_the_same_call_goes_on(tmp_path, capfd, request, forked):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    folders, reached = [tmp_path / "a", tmp_path / "b"], [0, 0]
    for number in (signal.SIGTERM, signal.SIGINT):
        runs = runs_in(tmp_path)

        def twice(number=number):  # as `timeout` does it
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)

        def trained(reached=tuple(reached)):
            return all(max(steps(f), default=0) > last for f, last in zip(folders, reached, strict=True))

        watcher = when(trained, twice)
        with pytest.raises(Interrupted, match="saved"):
            both(runs)
        watcher.join()
        for index, folder in enumerate(folders):
            assert not (folder / "result.json").exists()
            saved = max(saved_steps(folder / "checkpoints"))
            assert saved > reached[index]
            assert steps(folder) == list(
                range(EVERY, saved + 1, EVERY)
            )  # the second time it went on from the first one's state
            reached[index] = saved
    assert "2 runs save after this step" in capfd.readouterr().err


def test_a_killed_run_is_named_and_the_other_saves(tmp_path, forked):
    console = Console(record=True, width=200, file=io.StringIO())
    runs = runs_in(tmp_path, console=console)

    def kill_one():
        assert runs._jobs is not None
        (victim,) = (worker for worker in runs._jobs._workers if worker.name == "b")
        assert victim.process is not None
        victim.process.kill()

    when(lambda: steps(tmp_path / "a") and steps(tmp_path / "b"), kill_one)
    with pytest.raises(RunFailed, match=r"^b was killed by signal 9; its log is .*b/log.txt"):
        both(runs)
    assert max(saved_steps(tmp_path / "a" / "checkpoints")) >= EVERY
    assert saved_steps(tmp_path / "b" / "checkpoints") == []
    assert "a: stopped" in console.export_text(clear=False)
    assert "b: was killed by signal 9. The end of its log:" in console.export_text()


def test_an_error_is_shown_with_the_name_of_its_run(tmp_path, forked):
    console = Console(record=True, width=200, file=io.StringIO())
    runs = runs_in(tmp_path, console=console)
    with pytest.raises(RunFailed, match=r"^big failed"):
        runs.together([lambda: runs.run(plan("big", batch_size=5000))])
    assert "error: 1437 training images are less than one batch of 5000" in console.export_text()
    assert "Traceback" not in (tmp_path / "big" / "log.txt").read_text(encoding="utf-8")
    # The mistake mended, the same folder serves; what the processes said stays.
    found = runs_in(tmp_path, jobs=1).run(plan("big", epochs=1, eval_every=1))
    assert found["status"] == "finished"
    assert (tmp_path / "big" / "log.txt").exists()


def test_out_of_time_every_run_saves_and_is_named(tmp_path, monkeypatch, forked):
    """Its limit counts from the start of this process, that of a run's process from its own."""
    # This process is ten seconds old when a run is started, and 99.5 when that is told how much is left of the 100.
    ages = threading.local()

    def age():
        ages.next = getattr(ages, "next", iter((10.0, 99.5)))
        return next(ages.next)

    monkeypatch.setattr(runs_module, "process_age", age)
    told = []
    monkeypatch.setattr(Runs, "_told", lambda *given, real=Runs._told: told.append(real(*given)) or told[-1])
    console = Console(record=True, width=200, file=io.StringIO())
    runs = Runs(tmp_path, console=console, device="cpu", jobs=2, time_limit="100s")
    with pytest.raises(OutOfTime):
        both(runs)
    assert [json.loads(line)["left"] for line in told] == [1.0] * 2  # the least that any is given
    assert sorted(runs.left) == ["a", "b"]
    for name in "ab":
        assert saved_steps(tmp_path / name / "checkpoints")  # also of one that comes to its first step too late
        assert not (tmp_path / name / "result.json").exists()
    assert "a: the time is over; saved" in console.export_text(clear=False)
    assert "b: the time is over; saved" in console.export_text()


ALONE = """
import sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1]).parent))
from test_jobs import both, runs_in
both(runs_in(Path(sys.argv[2])))
"""


@pytest.mark.slow
def test_no_run_goes_on_alone_when_its_parent_is_killed(tmp_path, launcher):
    parent = launcher.program(ALONE, __file__, tmp_path, log=tmp_path / "log.txt")
    folders = [tmp_path / "a", tmp_path / "b"]
    try:
        wait_for(lambda: all(steps(folder) for folder in folders))
    finally:
        assert parent.kill() == [-signal.SIGKILL], parent.output()
    wait_for(lambda: all(saved_steps(folder / "checkpoints") for folder in folders))
    wait_for(lambda: all("stopped at step" in (folder / "log.txt").read_text() for folder in folders))


def job(name, turn=1, form=None, started=lambda compiled: None, order=()):
    places = {"log": Path("log.txt"), "tell": bytes, "started": started, "done": bool}
    return Job(name=name, turn=turn, form=form, order=order, **places)


def waits_for(jobs, one, order):
    """A thread that has waited for a worker, when there is one, and gives it back at once."""

    def wait():
        with jobs._worker_for(one) as worker:
            order.append((one.name, worker))

    thread = threading.Thread(target=wait)
    number = len(jobs._waiting) + 1
    thread.start()
    wait_for(lambda: len(jobs._waiting) == number)
    return thread


def order_of(wanted, *, number=1, running=None, forms=()):
    """In which order these jobs start while one is running, and where: (name, number of the worker)."""
    jobs, order = Jobs(number, device="cpu"), []
    for worker, form in zip(jobs._workers, forms, strict=False):
        worker.form, worker.process = form, PROCESS
    with contextlib.ExitStack() as stack:
        for _ in range(number):
            stack.enter_context(jobs._worker_for(running or job("running")))
        threads = [waits_for(jobs, one, order) for one in wanted]
    for thread in threads:
        thread.join()
    assert len(jobs._idle) == number
    return [(name, jobs._workers.index(worker)) for name, worker in order]


def test_those_that_others_wait_for_come_first():
    wanted = [job("exploration", 2), job("seed 0", 1), job("seed 1", 1), job("grid", 0)]
    assert [name for name, _ in order_of(wanted)] == ["grid", "seed 0", "seed 1", "exploration"]


def test_of_one_turn_smaller_numbers_come_first():
    """As of two arms: the first seed of each, then the next, whichever thread has asked first."""
    wanted = [job("seed 1", order=(1, 0)), job("other arm", order=(0, 1)), job("one arm", order=(0, 0))]
    assert [name for name, _ in order_of(wanted)] == ["one arm", "other arm", "seed 1"]


def test_a_process_goes_on_with_what_it_has_compiled():
    """Before a grid of another form come the seeds of its own; exploration does not, whatever its form."""
    wanted = [job("other grid", 0, "b"), job("exploration", 2, "a"), job("seed", 1, "a"), job("grid", 0, "a")]
    found = order_of(wanted, running=job("running", form="a"), forms=["a"])
    assert [name for name, _ in found] == ["seed", "grid", "other grid", "exploration"]


def test_a_form_that_another_has_compiled_is_left_to_that_one():
    jobs, order = Jobs(2, device="cpu"), []
    first, second = jobs._workers
    first.form, first.process = "a", PROCESS
    with jobs._worker_for(job("running", form="a")) as worker:
        assert worker is first
        with jobs._worker_for(job("also running", form="c")) as worker:
            assert worker is second
            threads = [waits_for(jobs, one, order) for one in (job("a 1", form="a"), job("b 1", form="b"))]
        for thread in threads:
            thread.join()
    assert order == [("b 1", second), ("a 1", second)]  # the latter when there is nothing else to do


def test_processes_start_where_most_are_idle():
    jobs = Jobs(4, device="cpu")
    for worker, gpu in zip(jobs._workers, "0101", strict=True):
        worker.variables = {"GPU": gpu}
    with jobs._worker_for(job("a")) as first, jobs._worker_for(job("b")) as second, jobs._worker_for(job("c")) as third:
        assert first.variables != second.variables
        assert third not in (first, second)


@pytest.mark.parametrize("before", [(), ("a",)])
def test_what_is_stopped_before_it_is_told_is_interrupted(before, tmp_path, forked, monkeypatch):
    """A new process, and one that had another run."""
    runs = runs_in(tmp_path)

    def run(self, job, real=Jobs.run):
        def then_stop(compiled):
            job.started(compiled)
            self.stop()

        real(self, replace(job, started=then_stop) if job.name == "b" else job)

    monkeypatch.setattr(Jobs, "run", run)

    def one_after_the_other():
        for name in (*before, "b"):
            runs.run(plan(name, epochs=1, save_every=1))

    with pytest.raises(Interrupted):
        runs.together([one_after_the_other])
    assert [(tmp_path / name / "result.json").exists() for name in (*before, "b")] == [*(True for _ in before), False]
    assert runs._jobs is not None
    assert all(worker.process is None for worker in runs._jobs._workers)


def test_none_starts_while_another_may_come_before_it():
    """A call that first looks at what is done, and then asks, is waited for; what has a place is not."""
    jobs, order, looked = Jobs(2, device="cpu"), [], threading.Event()

    def run(name, turn):
        with jobs._worker_for(job(name, turn)):
            order.append(name)

    def looks():
        looked.wait(10)
        run("grid", 0)
        time.sleep(0.2)  # the exploration, which asked long ago, has a place now, and waits all the same
        run("seed", 1)

    def explores():
        threading.Timer(0.2, looked.set).start()
        run("exploration", 2)

    def several():
        jobs.together([explores, looks])

    jobs._idle.pop()
    jobs.together([several])
    assert order == ["grid", "seed", "exploration"]
    assert jobs._deciding == 0


def test_a_call_gets_what_the_one_before_it_leaves_idle():
    """Whatever the turn: a grid of the second call waits for an exploration of the first, in whose thread it may be."""
    jobs, order = Jobs(1, device="cpu"), []

    def run(name, turn):
        with jobs._worker_for(job(name, turn)):
            order.append(name)

    def first():
        run("first", 1)
        jobs.together([lambda: run("grid", 0), lambda: run("exploration", 2)])

    def second():
        jobs.together([lambda: run("second's seed", 1), lambda: run("second's grid", 0)])

    jobs.together([first, second], in_order=True)
    assert order == ["first", "grid", "exploration", "second's grid", "second's seed"]
    assert (jobs._deciding, jobs._waiting) == (0, {})


def test_two_calls_that_ask_for_one_run_share_it(tmp_path, forked):
    """The second reads its result; and it starts when the first of them wants it, whoever asked first."""
    console = Console(record=True, width=200, file=io.StringIO())
    runs = runs_in(tmp_path, console=console)
    assert runs._jobs is not None
    asked = threading.Event()

    def first():
        asked.wait(10)
        return runs.run(plan("shared", epochs=1))

    def second():
        threading.Timer(0.3, asked.set).start()
        own = [runs.run(plan("own", epochs=1))]
        return [*own, runs.run(plan("shared", epochs=1))]

    one, (own, other) = runs.together([first, second], in_order=True)
    assert one == other != own
    told = [line.split(": ") for line in console.export_text().splitlines()]
    assert sorted(name.split()[-1] for name, what in told if what == "training") == ["own", "shared"]
    assert runs.trained == 2


def test_a_run_that_another_call_waits_for_starts_no_later():
    jobs, order = Jobs(1, device="cpu"), []

    def run(name):
        with jobs._worker_for(job(name)):
            order.append(name)

    def first():
        wait_for(lambda: len(jobs._waiting) == 2)
        jobs.hasten("wanted")
        with jobs.waiting():
            wait_for(lambda: order)

    def second():
        jobs.together([lambda: run("another"), lambda: run("wanted")])

    jobs.together([first, second], in_order=True)
    assert order == ["wanted", "another"]


def test_an_error_in_one_thread_lets_nothing_more_start():
    jobs = Jobs(1, device="cpu")

    def fails():
        with jobs._worker_for(job("fails", 0)):
            wait_for(lambda: len(jobs._waiting) == 1)
            raise ZeroDivisionError

    def waits():
        with jobs._worker_for(job("waits")):
            raise AssertionError("it was started")

    with pytest.raises(ZeroDivisionError):
        jobs.together([waits, fails])
    assert jobs._deciding == 0
