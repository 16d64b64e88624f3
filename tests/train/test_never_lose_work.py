"""kill -9 at any moment, with one process and with two: the same command goes on, and ends at the same bits."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from wellcond.train.checkpoint import latest, saved_steps

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


@pytest.mark.parametrize("world", [1, 2])
def test_killed_while_writing(
    command: Start, reference: Callable[[int], Path], assert_same_run: Any, tmp_path: Path, world: int
) -> None:
    expected, folder = reference(world), tmp_path / "killed"
    torn = 0
    for _ in range(3):
        started = command(folder, *SETTINGS, world=world, slow_disk=0.1)
        started.until(lambda: list((folder / "checkpoints").glob(".*.tmp")))
        assert -9 in started.kill(), started.output()
        torn += bool(list((folder / "checkpoints").glob(".*.tmp")))
    assert torn >= 1  # the window is some tenths of a second wide, and was met at least once
    run_to_the_end(command, folder, *SETTINGS, world=world)
    assert not list((folder / "checkpoints").glob(".*.tmp"))
    assert_same_run(folder, expected)


def test_sharded_parameters_are_saved_whole_and_resumed(command: Start, assert_same_run: Any, tmp_path: Path) -> None:
    settings = ("epochs=2", "save_every=2", "probe_every=4", "probe_samples=8", "clip_grad=1.0", "shard=true")
    run_to_the_end(command, tmp_path / "undisturbed", *settings, world=2)
    started = command(tmp_path / "killed", *settings, world=2)
    started.until(lambda: saved_steps(tmp_path / "killed/checkpoints"))
    assert -9 in started.kill(), started.output()
    assert max(saved_steps(tmp_path / "killed/checkpoints")) < 10
    run_to_the_end(command, tmp_path / "killed", *settings, world=2)
    assert_same_run(tmp_path / "killed", tmp_path / "undisturbed")

    # The file is the plain model's, and the same training without shards gives the same numbers, but for rounding.
    run_to_the_end(command, tmp_path / "plain", *settings[:-1], world=2)
    sharded, plain = (latest(tmp_path / name / "checkpoints") for name in ("killed", "plain"))
    assert sharded is not None
    assert plain is not None
    assert sharded.model.keys() == plain.model.keys()
    for name, tensor in plain.model.items():
        torch.testing.assert_close(sharded.model[name], tensor, rtol=1e-3, atol=1e-3)


def test_a_worker_that_dies_rejoins_under_elastic_restarts(
    command: Start, reference: Callable[[int], Path], assert_same_run: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "elastic"
    started = command(folder, *SETTINGS, elastic=2)
    started.until(lambda: saved_steps(folder / "checkpoints"))
    workers = children_of(started.pids[0])
    assert len(workers) == 2, started.output()
    os.kill(workers[1], signal.SIGKILL)
    assert started.wait() == [0], started.output()
    assert_same_run(folder, reference(2))


def children_of(pid: int) -> list[int]:
    """The processes that `pid` started, youngest last."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            if int(after_name[1]) == pid:
                found.append(int(entry.name))
    return sorted(found)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_ends_with_130(
    command: Start, reference: Callable[[int], Path], assert_same_run: Any, tmp_path: Path, world: int, number: int
) -> None:
    folder = tmp_path / "stopped"
    started = command(folder, *SETTINGS, "save_every=1000", world=world, slow_disk=0.2)
    started.until(lambda: (folder / "metrics.jsonl").exists())
    os.kill(started.pids[-1], number)  # one of them is enough
    assert set(started.wait()) == {130}, started.output()
    assert "the same command goes on" in started.output()
    (step,) = saved_steps(folder / "checkpoints")
    assert f"stopped at step {step} of 15" in started.output()
    run_to_the_end(command, folder, *SETTINGS, world=world)
    assert_same_run(folder, reference(world))


def test_a_broken_newest_state_is_passed_over(
    command: Start, reference: Callable[[int], Path], assert_same_run: Any, tmp_path: Path
) -> None:
    for damage in (half_the_weights, half_the_rest, no_average, no_weights):
        folder = tmp_path / damage.__name__
        shutil.copytree(reference(1), folder)
        newest = folder / "checkpoints" / f"step-{max(saved_steps(folder / 'checkpoints')):08d}"
        damage(newest)
        started = command(folder, *SETTINGS)
        assert started.wait() == [0], started.output()
        assert f"{newest.name} is not a whole saved state" in started.output()
        assert "going back to the state before" in started.output()
        assert_same_run(folder, reference(1))


def half_the_weights(state: Path) -> None:
    truncate(state / "model.safetensors")


def half_the_rest(state: Path) -> None:
    truncate(state / "state.pt")


def no_average(state: Path) -> None:
    (state / "ema.safetensors").unlink()


def no_weights(state: Path) -> None:
    (state / "model.safetensors").unlink()


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def test_without_any_whole_state_it_begins_again(
    command: Start, reference: Callable[[int], Path], assert_same_run: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "all-broken"
    shutil.copytree(reference(1), folder)
    for step in saved_steps(folder / "checkpoints"):
        no_weights(folder / "checkpoints" / f"step-{step:08d}")
    started = command(folder, *SETTINGS)
    assert started.wait() == [0], started.output()
    assert "to the beginning" in started.output()
    assert_same_run(folder, reference(1))


def test_two_processes_do_not_train_in_one_folder(command: Start, tmp_path: Path) -> None:
    first = command(tmp_path / "run", *SETTINGS, slow_disk=0.3)
    first.until(lambda: (tmp_path / "run/metrics.jsonl").exists())
    second = command(tmp_path / "run", *SETTINGS)
    assert second.wait() == [1], second.output()
    assert "another process is training in" in second.output()
    assert first.kill() == [-9], first.output()
    run_to_the_end(command, tmp_path / "run", *SETTINGS)  # the dead hold nothing


def test_a_disk_that_is_full_at_the_end_is_an_error(command: Start, tmp_path: Path) -> None:
    started = command(tmp_path / "run", "epochs=2", file_limit=3000)
    assert started.wait() == [1], started.output()
    assert "the state of step 5 could not be saved" in started.output()
    assert "training goes on" in started.output()
    assert "error: OSError: the state of step 10 could not be saved" in started.output()
    assert "make room, and start again" in started.output()


def test_one_process_of_two_without_room_ends_them_all(command: Start, tmp_path: Path) -> None:
    started = command(tmp_path / "run", "epochs=1", world=2, file_limit=3000)
    assert started.wait() == [1, 1], started.output()
    assert "the state of step 5 could not be saved" in started.output()


def test_a_folder_that_is_refused_ends_every_process(command: Start, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.txt").write_text("mine")
    started = command(tmp_path / "run", world=2)
    assert started.wait() == [1, 1]
    assert "holds other files" in started.output()
