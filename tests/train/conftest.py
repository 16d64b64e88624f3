"""Trainings for tests: the smallest model on the embedded digits, in this process or in processes of their own."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from wellcond import records
from wellcond.train.checkpoint import SavedState, latest, state_path
from wellcond.train.config import Config

SMALL = {"img_size": 8, "patch_size": 4, "depth": 2, "embed_dim": 16, "num_heads": 2}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "WELLCOND_COMMIT": "test", "COLUMNS": "1000"}
PATIENCE = 300.0  # seconds; a busy machine is slow, and only a process that hangs takes so long


@pytest.fixture(autouse=True)
def _few_threads(one_thread: None) -> None:
    del one_thread


@pytest.fixture(scope="session")
def make_config() -> Callable[..., Config]:
    """Two blocks, 16 wide, on digits of 8 × 8 pixels: 5 steps an epoch. Only what a test changes counts as given."""

    def make(**changes: Any) -> Config:
        settings: dict[str, Any] = {"data": "digits", "image_size": 8, "model_kwargs": SMALL, "epochs": 2}
        settings |= {"batch_size": 256, "log_every": 1, "padding": 1, "lr": 3e-3}
        return Config().changed(settings, given=False).changed(changes)

    return make


class Started:
    """A process, or several that train together."""

    def __init__(self, launcher: "Launcher", pids: list[int], log: Path):
        self.launcher, self.pids, self.log = launcher, pids, log
        self.codes: dict[int, int] = {}

    def alive(self) -> bool:
        for pid in self.pids:
            if pid not in self.codes:
                code = self.launcher.ask({"poll": pid})["code"]
                if code is not None:
                    self.codes[pid] = code
        return len(self.codes) < len(self.pids)

    def until(self, seen: Callable[[], Any]) -> Any:
        """Wait for something; None if the processes ended before."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            found = seen()
            if found:
                return found
            if not self.alive():
                return seen()
            time.sleep(0.002)
        raise TimeoutError(f"nothing happened: {self.output()}")

    def send(self, number: int) -> None:
        for pid in self.pids:
            if pid not in self.codes:  # not waited for yet, so that the number is still this process's
                os.kill(pid, number)

    def kill(self) -> list[int]:
        self.alive()
        self.send(signal.SIGKILL)
        return self.wait()

    def wait(self) -> list[int]:
        """The exit codes."""
        self.until(lambda: False)
        return [self.codes[pid] for pid in self.pids]

    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


class Launcher:
    def __init__(self) -> None:
        program = [sys.executable, str(Path(__file__).with_name("launcher.py"))]
        environment = {**os.environ, **ENVIRONMENT}
        self.process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        self.all: list[int] = []
        assert self._answer() == {"ready": True}

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the launcher has ended"
        return json.loads(line)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def start(
        self, arguments: list[str], *, log: Path, world: int = 1, elastic: int = 0, slow_disk: float = 0.0,
        file_limit: int = 0, spoilt: tuple[int, int] | None = None, again: bool = False,
    ) -> Started:  # fmt: skip
        """A command; with `world`, as many of it with the variables that torchrun would set.

        `elastic` is how many torchrun's own agent starts, and starts once more if one dies. With `slow_disk` it takes
        so many seconds until a file is on the disk; a file longer than `file_limit` bytes fails as on a full one. Of
        `spoilt`, a rank and a step, the loss is NaN. With `again` the newest state is loaded and saved, and no more.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pids = []
        for rank in range(world):
            together = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
            env = {k: str(v) for k, v in (together | {"MASTER_PORT": port}).items()} if world > 1 else {}
            request = {"start": arguments, "env": env, "log": str(log)}
            request |= {"elastic": elastic, "slow_disk": slow_disk, "file_limit": file_limit}
            request |= {"spoilt": spoilt[1] if spoilt and spoilt[0] == rank else 0, "again": again}
            pids.append(self.ask(request)["pid"])
        return Started(self, pids, log)

    def close(self) -> None:
        self.process.communicate(timeout=PATIENCE)  # closes its input, which ends it


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    here = Launcher()
    yield here
    here.close()


@pytest.fixture
def command(launcher: Launcher, tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Starts `wellcond train digits` with the smallest model, in a process or several; ends what a test left."""
    begun: list[Started] = []

    def start(output: Path, *settings: str, **how: Any) -> Started:
        model = ",".join(f"{k}={v}" for k, v in SMALL.items())
        arguments = ["train", "digits", "--output", str(output), "--device", "cpu"]
        for setting in (f"model_kwargs={model}", "batch_size=256", "log_every=1", "warmup_epochs=0", *settings):
            arguments += ["--set", setting]
        started = launcher.start(arguments, log=tmp_path / f"log-{len(begun)}.txt", **how)
        begun.append(started)
        return started

    yield start
    for started in begun:
        if started.alive():
            started.kill()


def rows_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What a run wrote, but for the one number that depends on the clock, and the folder's name."""
    found = {}
    for name in ("metrics.jsonl", "probe.jsonl"):
        rows = records.read_rows(folder / name) if (folder / name).exists() else []
        found[name] = [
            {k: v for k, v in row.items() if k not in ("images_per_second", "data_wait", "run")} for row in rows
        ]
    return found


def assert_same_state(one: SavedState | None, other: SavedState | None) -> None:
    """Bit by bit: weights, optimiser, average, counters."""
    assert one is not None
    assert other is not None
    assert one.step == other.step
    _assert_same(vars(one), vars(other), "state")


def _assert_same(one: Any, other: Any, where: str) -> None:
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            _assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            _assert_same(left, right, f"{where}[{index}]")
    else:
        assert one == other or (one != one and other != other), f"{where}: {one} and {other}"


@pytest.fixture(scope="session")
def assert_same_run() -> Callable[[Path, Path], None]:
    """The last state and every row of two runs, to the bit, and the state's files to the byte."""

    def check(one: Path, other: Path) -> None:
        states = [latest(run / "checkpoints") for run in (one, other)]
        assert_same_state(*states)
        assert rows_of(one) == rows_of(other)
        first, second = (state_path(run / "checkpoints", states[0].step) for run in (one, other))
        names = sorted(file.name for file in first.iterdir())
        assert names == sorted(file.name for file in second.iterdir())
        for name in names:
            assert (first / name).read_bytes() == (second / name).read_bytes(), name

    return check
