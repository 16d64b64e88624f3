"""What ends a run from outside. The first signal is remembered, a second one, not just the echo of the first, ends the
process at once. A time limit is understood as people write it, and counted from the process's start."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from wellcond.train.checkpoint import saved_steps
from wellcond.train.config import Config, as_seconds
from wellcond.train.stopping import Interrupted, TimeLimit, interruptible

PROGRAM = """
import os, signal, sys, time
from wellcond.train.stopping import TWICE, interruptible
number = int(sys.argv[1])
with interruptible() as asked:
    assert not asked()
    os.kill(os.getpid(), number)
    assert asked()
    print("once", flush=True)
    os.kill(os.getpid(), number)  # as `timeout` does: to the process, and to its group
    print("still once", flush=True)
    time.sleep(TWICE + 0.1)
    os.kill(os.getpid(), int(sys.argv[2]))
    print("twice", flush=True)
"""


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_process_at_once(second: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(int(signal.SIGTERM)), str(int(second))],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (130, "once\nstill once\n"), done.stderr
    assert "once more to stop at once" in done.stderr


BEFORE = """
import os, signal, sys
from wellcond.train.stopping import Interrupted, interruptible
try:
    with interruptible() as asked:
        try:
            os.kill(os.getpid(), int(sys.argv[1]))
            print("went on")
        except Exception:
            print("taken for an error")
except Interrupted as stopped:
    print(stopped)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_there_is_anything_to_save_ends_it_at_once(number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEFORE, str(int(number))], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.startswith("stopped before the first step"), done.stdout + done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_error_on_the_way_out_hides_no_signal(number: int) -> None:
    """As `threading.Condition` has one where a signal comes while it takes its lock back."""

    def wait() -> None:
        try:
            signal.raise_signal(number)
        finally:
            raise RuntimeError("release unlocked lock")

    with pytest.raises(Interrupted, match="before the first step"), interruptible():
        wait()
    with pytest.raises(RuntimeError, match="another"), interruptible():
        raise RuntimeError("another")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_last_step_is_not_lost(number: int) -> None:
    """The training has ended, and whoever started it hears of the signal: `reproduce` must not go on with the next."""
    heard: list[int] = []
    before = signal.signal(number, lambda one, _frame: heard.append(one))
    try:
        with interruptible() as asked:
            asked()
            signal.raise_signal(number)
            assert heard == []
        assert heard == [number]
    finally:
        signal.signal(number, before)


def test_a_forked_process_ends_as_any_other() -> None:
    """By the signal: it has no state to save, and whoever ends it should not have to wait."""
    with interruptible() as asked:
        asked()
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_the_handlers_of_before_come_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with interruptible():
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_another_thread_trains_without_handlers() -> None:
    found: list[bool] = []

    def work() -> None:
        with interruptible() as asked:
            found.append(asked())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_images_are_decoded(command: Callable[..., Any], tmp_path: Path, number: int) -> None:
    """Not all of them first: these would take minutes. Nothing half made is left, and nothing is held."""
    photos, cache = tmp_path / "photos", tmp_path / "cache"
    large = tmp_path / "large.png"
    Image.new("1", (5000, 5000)).save(large)
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            (photos / split / label).mkdir(parents=True)
            for index in range(1000):
                (photos / split / label / f"{index}.png").hardlink_to(large)
    settings = (f"data={photos}", f"cache_dir={cache}", "image_size=8")
    started = command(tmp_path / "run", *settings)
    assert started.until(lambda: list(cache.glob(".*.tmp/train.npy")))
    started.send(number)
    assert started.wait() == [130], started.output()
    assert "stopped before the first step; the same command" in started.output()
    assert [path.suffix for path in cache.iterdir()] in ([".lock"], [])
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    again = command(tmp_path / "run", *settings)  # the folder is free
    assert again.until(lambda: list(cache.glob(".*.tmp/train.npy")))
    again.kill()


# ---- a limit on the time


Make = Callable[..., Config]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("9m", 540),
        ("1h30m", 5400),
        ("540", 540),
        ("0.5", 0.5),
        ("1.5h", 5400),
        ("1d", 86400),
        ("1m30", 90),
    ],
)
def test_times_as_people_write_them(text: str, seconds: float) -> None:
    assert as_seconds(text) == seconds


@pytest.mark.parametrize("text", ["0", "-5", "9 minutes", "m", "30m1h", "inf", "nan", "1e3", "9m 5", ":30"])
def test_what_is_no_time_is_said_before_anything_starts(make_config: Make, text: str) -> None:
    with pytest.raises(ValueError, match=f"time_limit is a time such as 90s, 9m or 1h30m.*; got '{text}'"):
        make_config(time_limit=text).check()


def test_the_command_refuses_it_too(command: Any, tmp_path: Path) -> None:
    started = command(tmp_path / "run", "time_limit=soon")
    assert started.wait() == [2]
    assert "time_limit is a time such as" in started.output()
    assert not (tmp_path / "run").exists()


class Clock:
    """The time as the tests want it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        from wellcond.train import stopping

        self.now = 1000.0
        monkeypatch.setattr(stopping.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(stopping, "process_age", lambda: 100.0)  # imports and decoding took so long

    def steps(self, limit: TimeLimit, *, seconds: float, validates: bool = False) -> int:
        """How many steps of so many seconds there is time for."""
        for step in range(1, 10_000):
            self.now += seconds
            if limit.is_over(validates=validates):
                return step
        raise AssertionError("the limit never came")


def test_there_is_time_left_for_what_is_still_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    limit = TimeLimit("10m", validation_batches=20)
    with limit.timing("save"):
        clock.now += 40
    clock.steps(limit, seconds=2)
    assert 600 - 2 * 2 - 2 * 40 < limit.used < 600 - 40  # it ends in time, and not much too early
    validating = TimeLimit("10m", validation_batches=20)
    clock.steps(validating, seconds=2, validates=True)
    assert validating.used < 600 - 20 * 2  # a validation of which nothing is known yet


@pytest.mark.parametrize(("weights", "at_most"), [(22e6, 20), (1e12, 120)])
def test_a_small_model_needs_little_time_for_a_state_of_which_nothing_is_known_yet(
    monkeypatch: pytest.MonkeyPatch, weights: float, at_most: float
) -> None:
    clock = Clock(monkeypatch)
    limit = TimeLimit("10m", validation_batches=20, weights=weights)
    clock.steps(limit, seconds=0.1)
    assert 600 - at_most < limit.used < 600 - at_most / 2


def test_saving_and_validating_count_as_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    limit = TimeLimit("10m", validation_batches=1)
    clock.now += 1
    assert not limit.is_over(validates=False)
    for what in ("save", "validate"):
        with limit.timing(what):
            clock.now += 90
    clock.now += 1
    assert not limit.is_over(validates=False)  # 282 s are over; two steps of 180 s and a state would be too many
    assert limit.is_over(validates=True) is False
    clock.now += 150
    assert limit.is_over(validates=True)


def test_without_a_limit_it_is_never_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    limit = TimeLimit("", validation_batches=1)
    clock.now += 1e9
    assert not limit.is_over(validates=True)


def test_it_counts_from_the_start_of_the_process() -> None:
    program = "import time; time.sleep(1); from wellcond.train.stopping import process_age; print(process_age())"
    began = time.monotonic()
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert 1 <= float(said) <= time.monotonic() - began + 0.1  # a kernel counts in hundredths


def test_a_forked_process_is_as_old_as_itself() -> None:
    program = (
        "import os, time; from wellcond.train.stopping import process_age; time.sleep(1); child = os.fork()\n"
        "if child: os.waitpid(child, 0)\n"
        "print(process_age())"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    child, parent = map(float, said.split())
    assert child <= parent - 0.9


def test_under_torchrun_it_counts_from_torchruns_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from wellcond.train.stopping import process_age

    mine = process_age()
    monkeypatch.setattr(os, "getppid", lambda: 1)  # the oldest process there is
    assert process_age() < mine + 60
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    first = float(Path("/proc/uptime").read_text().split()[0])
    assert mine <= process_age() <= first + 60


@pytest.mark.parametrize("world", [1, 2])
def test_out_of_time_it_saves_ends_with_0_and_goes_on_to_the_same_bits(
    command: Any, assert_same_run: Any, tmp_path: Path, world: int
) -> None:
    """A limit that is over when the training begins: one step is made at each start, so that there is an end."""
    settings = ("epochs=1", "probe_every=2", "probe_samples=4", "save_every=1000")
    assert set(command(tmp_path / "whole", *settings, world=world).wait()) == {0}
    for step in (1, 2):
        started = command(tmp_path / "run", *settings, "time_limit=0.001s", world=world)
        assert set(started.wait()) == {0}, started.output()
        assert saved_steps(tmp_path / "run/checkpoints")[-1] == step
        assert f"stopped at step {step} of 5, " in started.output()
        assert "to go on, give the same command" in started.output()
    assert not (tmp_path / "run/report.html").exists()
    started = command(tmp_path / "run", *settings, "time_limit=1h", world=world)  # another one is not another run
    assert set(started.wait()) == {0}, started.output()
    assert_same_run(tmp_path / "run", tmp_path / "whole")
