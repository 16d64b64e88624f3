"""The first signal is remembered, a second one, not just the echo of the first, ends the process at once."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from wellcond.train.interrupt import interruptible

PROGRAM = """
import os, signal, sys, time
from wellcond.train.interrupt import TWICE, interruptible
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
from wellcond.train.interrupt import Interrupted, interruptible
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
