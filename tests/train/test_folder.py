"""A run's folder: one run, one writer, each row once, and no room is no reason to stop."""

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wellcond import records
from wellcond.train.config import Config
from wellcond.train.folder import RunFolder
from wellcond.train.loop import train

Make = Callable[..., Config]


def test_the_configuration_is_kept_whole(make_config: Make, tmp_path: Path) -> None:
    config = make_config(remove_skips=["sa"])
    RunFolder.open(tmp_path / "a/run", config)
    kept = records.read_json(tmp_path / "a/run/config.json")
    assert Config.from_json(kept["config"]) == config
    assert kept["environment"]["versions"]["torch"]
    RunFolder.open(tmp_path / "a/run", config)  # again


def test_another_configuration_is_refused_with_the_difference(make_config: Make, tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path, make_config(lr=1e-3))
    folder.log({"step": 1})
    with pytest.raises(
        ValueError, match=r"another configuration \(gray: '' there, 'dct' now, lr: 0.001 there, 0.002 now\)"
    ):
        RunFolder.open(tmp_path, make_config(gray="dct", lr=2e-3))


def test_what_does_not_change_the_training_may_change(make_config: Make, tmp_path: Path) -> None:
    RunFolder.open(tmp_path, make_config()).log({"step": 1})
    changes = {"keep": 7, "log_every": 3, "workers": 0, "on_divergence": "rollback", "save_every": 4, "cache_dir": "c"}
    RunFolder.open(tmp_path, make_config(**changes, tracker="tensorboard", step_graph=False))


def test_a_run_that_never_began_may_be_changed(make_config: Make, tmp_path: Path) -> None:
    RunFolder.open(tmp_path, make_config(lr=1e-3))
    RunFolder.open(tmp_path, make_config(lr=2e-3))
    assert records.read_json(tmp_path / "config.json")["config"]["lr"] == 2e-3


def test_a_folder_that_is_no_run_is_left_alone(make_config: Make, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files"):
        RunFolder.open(tmp_path, make_config())
    with pytest.raises(ValueError, match="is a file"):
        RunFolder.open(tmp_path / "thesis.txt", make_config())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_saved_states_without_their_configuration_are_refused(make_config: Make, tmp_path: Path) -> None:
    (tmp_path / "checkpoints/step-00000003").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"saved states but no config\.json.*Put the config\.json back"):
        RunFolder.open(tmp_path, make_config())


@pytest.mark.parametrize("content", ["", "{", "[]", '{"config": 3}', '{"config": {"lrr": 1}}'])
def test_a_damaged_configuration_is_named(make_config: Make, tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json cannot be read as a run"):
        RunFolder.open(tmp_path, make_config())


def test_killed_before_its_configuration_was_written_it_begins(make_config: Make, tmp_path: Path) -> None:
    (tmp_path / ".config.json.12ab.tmp").write_text("{")
    (tmp_path / "checkpoints").mkdir()
    RunFolder.open(tmp_path, make_config())
    assert (tmp_path / "config.json").exists()


def test_rows_of_what_is_done_again_are_dropped(make_config: Make, tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path, make_config())
    for step in range(1, 6):
        folder.log({"step": step})
        folder.measured([{"step": step - 1}])  # a measurement is of the weights before its step
    event = {"step": 5, "split": "event", "event": "diverged"}
    folder.log(event)
    folder.forget_after(3)
    assert records.read_rows(folder.metrics) == [{"step": 1}, {"step": 2}, {"step": 3}, event]  # that happened
    assert [row["step"] for row in records.read_rows(folder.probe)] == [0, 1, 2]
    folder.forget_after(0)
    assert records.read_rows(folder.metrics) == [event]
    assert records.read_rows(folder.probe) == []


def test_a_process_that_is_not_the_main_one_writes_nothing(make_config: Make, tmp_path: Path) -> None:
    RunFolder.open(tmp_path, make_config())
    other = RunFolder(path=tmp_path, writes=False)
    other.log({"step": 1})
    other.measured([{"step": 1}])
    other.forget_after(0)
    assert not other.metrics.exists()
    assert not other.probe.exists()


def limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def _no_limit_after() -> Any:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("_no_limit_after")
def test_rows_wait_until_there_is_room(make_config: Make, tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path, make_config())
    folder.log({"step": 1})
    limit(os.path.getsize(folder.metrics) + 20)  # room for one row and a half
    with pytest.warns(UserWarning, match="rows wait in memory"):
        folder.log({"step": 2, "text": "x" * 100})
    folder.log({"step": 3})  # said once
    with pytest.raises(OSError, match="too large"):
        folder.flush()
    limit(10**9)
    folder.log({"step": 4})
    assert [row["step"] for row in records.read_rows(folder.metrics)] == [1, 2, 3, 4]


@pytest.mark.usefixtures("_no_limit_after")
def test_training_goes_on_without_room_and_says_so_at_the_end(
    make_config: Make, assert_same_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wellcond.train import checkpoint, states

    config = make_config(epochs=3)
    train(config, tmp_path / "roomy", device="cpu", quiet=True)

    def fill_up(folder: Path, state: Any, **how: Any) -> Path:
        if state.step > 5:
            limit(3000)  # from now on the disk is full; a state is larger
        return checkpoint.save(folder, state, **how)

    monkeypatch.setattr(states, "save", fill_up)
    with (
        pytest.warns(
            UserWarning, match=r"state of step 10 could not be saved.*That of step 5 is still there; training"
        ),
        pytest.raises(OSError, match=r"state of step 15 could not be saved.*make room, and start again"),
    ):
        train(config, tmp_path / "full", device="cpu", quiet=True)
    assert checkpoint.saved_steps(tmp_path / "full/checkpoints") == [5]
    limit(10**9)
    monkeypatch.undo()
    train(config, tmp_path / "full", device="cpu", quiet=True)
    assert_same_run(tmp_path / "full", tmp_path / "roomy")
