"""kill -9 at any moment, with one process and with two: the same command goes on, and ends at the same bits."""

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., Any]
SETTINGS = ("epochs=3", "save_every=2", "probe_every=2", "probe_samples=8", "ema_decay=0.9", "drop_path=0.2")


def run_to_the_end(command: Start, folder: Path, *settings: str, world: int = 1) -> None:
    started = command(folder, *settings, world=world)
    assert set(started.wait()) == {0}, started.output()


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, Path]:
    """Runs that nobody killed, by number of processes: made once."""
    return {}


@pytest.fixture
def reference(
    undisturbed: dict[int, Path], command: Start, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    def get(world: int) -> Path:
        if world not in undisturbed:
            undisturbed[world] = tmp_path_factory.mktemp("undisturbed") / f"world-{world}"
            run_to_the_end(command, undisturbed[world], *SETTINGS, world=world)
        return undisturbed[world]

    return get


@pytest.mark.parametrize("world", [1, 2])
def test_killed_at_random_moments(
    command: Start, reference: Callable[[int], Path], assert_same_run: Any, tmp_path: Path, world: int
) -> None:
    expected, folder = reference(world), tmp_path / "killed"
    moments, kills = random.Random(world), 0
    for _ in range(50):
        started = command(folder, *SETTINGS, world=world)
        if kills < 6:
            # Some moments after the first row that this process wrote, or after its start.
            known = rows_written(folder)
            if moments.random() < 0.7:
                started.until(lambda known=known: rows_written(folder) != known)
            time.sleep(moments.uniform(0, 0.3))
            kills += -9 in started.kill()
            continue
        assert set(started.wait()) == {0}, started.output()
        break
    assert kills == 6
    assert_same_run(folder, expected)


def rows_written(folder: Path) -> tuple[int, float]:
    file = folder / "metrics.jsonl"
    try:
        found = file.stat()
    except FileNotFoundError:
        return 0, 0.0
    return found.st_size, found.st_mtime
