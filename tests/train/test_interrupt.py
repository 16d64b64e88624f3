"""The first signal is remembered, the second ends the process at once."""

import signal
import subprocess
import sys
import threading

import pytest

from wellcond.train.interrupt import interruptible

PROGRAM = """
import os, signal, sys
from wellcond.train.interrupt import interruptible
number = int(sys.argv[1])
with interruptible() as asked:
    assert not asked()
    os.kill(os.getpid(), number)
    assert asked()
    print("once", flush=True)
    os.kill(os.getpid(), int(sys.argv[2]))
    print("twice", flush=True)
"""


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_process_at_once(second: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(int(signal.SIGTERM)), str(int(second))],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (130, "once\n"), done.stderr
    assert "once more to stop at once" in done.stderr


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
