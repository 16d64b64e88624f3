"""Trainings for tests: the smallest model on the built-in digits, in this process or in separate ones."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from wellcond import records
from wellcond.train.checkpoint import SavedState, latest, state_path
from wellcond.train.config import Config

SMALL = {"img_size": 8, "patch_size": 4, "depth": 2, "embed_dim": 16, "num_heads": 2}


@pytest.fixture(scope="session")
def make_config() -> Callable[..., Config]:
    """Two blocks, 16 wide, on digits of 8 × 8 pixels: 5 steps an epoch. Only what a test changes counts as given."""

    def make(**changes: Any) -> Config:
        settings: dict[str, Any] = {"data": "digits", "image_size": 8, "model_kwargs": SMALL, "epochs": 2}
        settings |= {"batch_size": 256, "log_every": 1, "padding": 1, "lr": 3e-3}
        return Config().changed(settings, given=False).changed(changes)

    return make


@pytest.fixture
def command(launcher: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Start `wellcond train digits` with the smallest model, in one or several processes; kill what a test leaves."""
    begun: list[Any] = []

    def start(output: Path, *settings: str, **how: Any) -> Any:
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
    """Return the rows that a run wrote, without the run's name and the numbers that depend on clock and memory."""
    found = {}
    for name in ("metrics.jsonl", "probe.jsonl"):
        rows = records.read_rows(folder / name) if (folder / name).exists() else []
        found[name] = [
            {k: v for k, v in row.items() if k not in ("images_per_second", "data_wait", "memory_mib", "run")}
            for row in rows
        ]
    return found


def assert_same_state(one: SavedState | None, other: SavedState | None) -> None:
    """Compare bit by bit: weights, optimiser, average, counters."""
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
    """Compare two runs: the last state and every row bit by bit, and the state's files byte by byte."""

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
