"""A run's folder: one run, one writer, each row once, and no room is no reason to stop."""

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from wellcond import records
from wellcond.records import Event, TrainRow
from wellcond.train import checkpoint, states
from wellcond.train.config import Config
from wellcond.train.folder import RunFolder, data_facts
from wellcond.train.loop import train

Make = Callable[..., Config]


def logged(step: int) -> TrainRow:
    return TrainRow(step=step, epoch=1.0, loss=0.5, lr=0.1, gradient_norm=1.0, images_per_second=9.0)


def test_the_configuration_is_kept_whole(make_config: Make, tmp_path: Path) -> None:
    config = make_config(remove_skips=["sa"])
    RunFolder.open(tmp_path / "a/run", config)
    kept = records.read_json(tmp_path / "a/run/config.json")
    assert Config.from_json(kept["config"]) == config
    assert kept["environment"]["versions"]["torch"]
    RunFolder.open(tmp_path / "a/run", config)  # again


def test_another_configuration_is_refused_with_the_difference(make_config: Make, tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path, make_config(lr=1e-3))
    folder.log(logged(1))
    with pytest.raises(
        ValueError, match=r"another configuration \(gray: '' there, 'dct' now, lr: 0.001 there, 0.002 now\)"
    ):
        RunFolder.open(tmp_path, make_config(gray="dct", lr=2e-3))


def test_what_does_not_change_the_training_may_change(make_config: Make, tmp_path: Path) -> None:
    RunFolder.open(tmp_path, make_config()).log(logged(1))
    changes = {"keep": 7, "log_every": 3, "workers": 0, "on_divergence": "rollback", "save_every": 4, "cache_dir": "c"}
    RunFolder.open(tmp_path, make_config(**changes, tracker="tensorboard", step_graph=False))


def test_a_run_that_never_began_may_be_changed(make_config: Make, tmp_path: Path) -> None:
    RunFolder.open(tmp_path, make_config(lr=1e-3))
    RunFolder.open(tmp_path, make_config(lr=2e-3))
    assert records.read_json(tmp_path / "config.json")["config"]["lr"] == 2e-3


HOLD = "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX); print(); sys.stdin.read()"


def test_a_run_of_another_process_is_not_changed(make_config: Make, tmp_path: Path) -> None:
    """It may still decode its data, and nothing tells yet that it has begun."""
    mine, others = make_config(lr=1e-3), make_config(lr=2e-3)
    RunFolder.open(tmp_path, mine)
    before = (tmp_path / "config.json").read_bytes()
    command = [sys.executable, "-c", HOLD, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        for config in (mine, others):
            with pytest.raises(ValueError, match="another process is training in"):
                train(config, tmp_path, device="cpu", quiet=True)
        with pytest.raises(ValueError, match="another process is training in"):
            RunFolder.open(tmp_path, others)
        RunFolder.open(tmp_path, mine)  # changes nothing
        assert (tmp_path / "config.json").read_bytes() == before
        holder.communicate()


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


# ---- the same data, processes and versions


def make_images(folder: Path, *, train: int = 12, val: int = 3, shade: int = 0) -> None:
    """Two classes of small images, dark and light."""
    for split, count in (("train", train), ("val", val)):
        for label in (0, 1):
            (folder / split / f"class-{label}").mkdir(parents=True, exist_ok=True)
            for number in range(count):
                color = (label * 200 + number, shade, number)
                Image.new("RGB", (8, 8), color).save(folder / split / f"class-{label}" / f"{number}.png")


@pytest.mark.parametrize("streamed", [False, True], ids=["cached", "streamed"])
def test_other_data_are_refused_with_the_difference(make_config: Make, tmp_path: Path, streamed: bool) -> None:
    data = tmp_path / "images"
    make_images(data)
    how = {"cache_limit": 0, "workers": 0, "padding": 0} if streamed else {}
    config = make_config(data=str(data), cache_dir=str(tmp_path / "cache"), batch_size=8, epochs=1, **how)
    assert train(config, tmp_path / "run", device="cpu", quiet=True).steps == 3
    kept = records.read_json(tmp_path / "run/config.json")
    assert (kept["data"]["train_images"], kept["data"]["val_images"], kept["processes"]) == (24, 6, 1)
    before = (tmp_path / "run/metrics.jsonl").read_bytes()

    make_images(data, train=20)
    with pytest.raises(
        ValueError, match=r"holds a run on other data \(train_images: 24 there, 40 now.*Put the data back.*resume=force"
    ):
        train(config, tmp_path / "run", device="cpu", quiet=True)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before
    force = config.changed({"resume": "force"})
    with pytest.warns(UserWarning, match=r"going on from step 3: the data are others than before \(train_images: 24"):
        assert train(force, tmp_path / "run", device="cpu", quiet=True).steps == 5
    assert records.read_json(tmp_path / "run/config.json")["data"]["train_images"] == 40
    train(config, tmp_path / "run", device="cpu", quiet=True)  # it is the run's data now


@pytest.mark.parametrize("streamed", [False, True], ids=["cached", "streamed"])
def test_data_may_be_moved(make_config: Make, tmp_path: Path, streamed: bool) -> None:
    make_images(tmp_path / "images")
    how = {"cache_limit": 0, "workers": 0, "padding": 0} if streamed else {}
    config = make_config(cache_dir=str(tmp_path / "cache"), data=str(tmp_path / "images"), batch_size=8, **how)
    train(config, tmp_path / "run", device="cpu", quiet=True)
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000006")
    (tmp_path / "images").rename(tmp_path / "moved")
    moved = config.changed({"data": f"folder:{tmp_path / 'moved'}"})
    with pytest.warns(UserWarning, match=r"going on from step 3: the data are now folder:.*moved, and were .*images"):
        train(moved, tmp_path / "run", device="cpu", quiet=True)
    train(moved, tmp_path / "run", device="cpu", quiet=True)  # said once
    assert records.read_json(tmp_path / "run/config.json")["config"]["data"] == moved.data
    make_images(tmp_path / "others", val=4)
    with pytest.raises(ValueError, match=r"holds a run on other data \(val_images: 6 there, 8 now"):
        train(moved.changed({"data": str(tmp_path / "others")}), tmp_path / "run", device="cpu", quiet=True)
    with pytest.raises(ValueError, match=r"holds a run with another configuration .*data: .*'cifar10:.*' now"):
        train(moved.changed({"data": f"cifar10:{tmp_path}"}), tmp_path / "run", device="cpu", quiet=True)


def test_as_many_images_of_other_content_are_other_data(tmp_path: Path) -> None:
    from wellcond.data import open_data

    facts = []
    for name, change in (("a", {}), ("b", {"shade": 1}), ("c", {})):
        make_images(tmp_path / name, **change)
        facts.append(data_facts(open_data(str(tmp_path / name), image_size=8, cache_dir=tmp_path / "cache")))
    assert facts[0] == facts[2]  # the same somewhere else
    differ = {name for name in facts[0] if facts[0][name] != facts[1][name]}
    assert differ == {"train_content", "val_content"}
    (tmp_path / "c/train/class-1").rename(tmp_path / "c/train/klass-1")
    (tmp_path / "c/val/class-1").rename(tmp_path / "c/val/klass-1")
    renamed = data_facts(open_data(str(tmp_path / "c"), image_size=8, cache_dir=tmp_path / "cache"))
    assert {name for name in renamed if renamed[name] != facts[0][name]} == {"class_names"}


def test_data_may_change_before_anything_was_trained(make_config: Make, tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path, make_config())
    assert folder.compare({"train_images": 5}, world=1) == []
    assert folder.compare({"train_images": 6}, world=2) == []
    folder.log(logged(1))
    with pytest.raises(ValueError, match="train_images: 6 there, 7 now"):
        folder.compare({"train_images": 7}, world=2)


def test_a_run_of_before_data_were_noted_goes_on(make_config: Make, tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path, make_config())
    folder.log(logged(1))
    assert folder.compare({"train_images": 5}, world=1) == []
    with pytest.raises(ValueError, match="train_images: 5 there, 6 now"):
        folder.compare({"train_images": 6}, world=1)


def test_other_versions_are_told(make_config: Make, tmp_path: Path) -> None:
    config = make_config(epochs=1)
    train(config, tmp_path, device="cpu", quiet=True)
    kept = records.read_json(tmp_path / "config.json")
    kept["environment"]["versions"] |= {"timm": "0.9", "pillow": "1.0"}
    records.write_json(tmp_path / "config.json", kept)
    with pytest.warns(
        UserWarning, match=r"going on from step 5: the run began with timm 0\.9 and goes on with timm 1\."
    ):
        train(config, tmp_path, device="cpu", quiet=True)
    assert "began with timm 0.9" in records.read_rows(tmp_path / "metrics.jsonl")[-1]["event"]


def test_another_number_of_processes_is_told_and_other_data_end_them_all(command: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert command(folder, "epochs=1", "time_limit=0.001").wait() == [0]
    started = command(folder, "epochs=1", world=2)
    assert started.wait() == [0, 0], started.output()
    assert "going on from step 1: the run began with 1 process and goes on with 2" in started.output()
    events = [row for row in records.read_rows(folder / "metrics.jsonl") if row["split"] == "event"]
    assert [row["step"] for row in events] == [1]
    kept = records.read_json(folder / "config.json")
    records.write_json(folder / "config.json", kept | {"data": kept["data"] | {"train_images": 17}})
    started = command(folder, "epochs=1", world=2)
    assert started.wait() == [1, 1], started.output()
    assert "train_images: 17 there, 1437 now" in started.output()


def test_rows_of_what_is_done_again_are_dropped(make_config: Make, tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path, make_config())
    for step in range(1, 6):
        folder.log(logged(step))
        folder.measured([{"step": step - 1}])  # a measurement is of the weights before its step
    event = Event(step=5, event="diverged")
    folder.log(event)
    folder.forget_after(3)
    assert folder.read().metrics == [*map(logged, (1, 2, 3)), event]  # that happened
    assert [row["step"] for row in folder.read().probe] == [0, 1, 2]
    folder.forget_after(0)
    assert folder.read().metrics == [event]
    assert records.read_rows(folder.probe_file) == []


def test_a_process_that_is_not_the_main_one_writes_nothing(make_config: Make, tmp_path: Path) -> None:
    RunFolder.open(tmp_path, make_config())
    other = RunFolder(path=tmp_path, writes=False)
    other.log(logged(1))
    other.measured([{"step": 1}])
    other.forget_after(0)
    assert not other.metrics_file.exists()
    assert not other.probe_file.exists()


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
    folder.log(logged(1))
    limit(os.path.getsize(folder.metrics_file) + 20)  # room for one row and a half
    with pytest.warns(UserWarning, match="rows wait in memory"):
        folder.log(Event(step=2, event="x" * 100))
    folder.log(logged(3))  # said once
    with pytest.raises(OSError, match="too large"):
        folder.flush()
    limit(10**9)
    folder.log(logged(4))
    assert [row["step"] for row in records.read_rows(folder.metrics_file)] == [1, 2, 3, 4]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that is always full")
def test_a_full_disk_names_the_file_and_says_what_is_kept(make_config: Make, tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path, make_config())
    os.symlink("/dev/full", folder.metrics_file)
    with pytest.warns(UserWarning, match=r"metrics\.jsonl cannot be written .*No space left.*its rows wait in memory"):
        folder.log(logged(1))
    with pytest.raises(OSError, match=r"No space left on device: .*metrics\.jsonl'") as caught:
        folder.flush()
    assert caught.value.errno == errno.ENOSPC
    folder.measured([{"step": 0}])  # for these there is room, and nothing to say
    assert records.read_rows(folder.probe_file) == [{"step": 0}]
    folder.metrics_file.unlink()
    folder.flush(sync=True)
    assert folder.read().metrics == [logged(1)]


@pytest.mark.parametrize("what", ["config.json", "checkpoints"])
def test_a_disk_that_is_full_when_it_syncs_names_the_file(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Some file systems say only then that there was no room; a descriptor has no name to tell."""
    state = checkpoint.SavedState(step=9, model={"weight": torch.zeros(1)}, optimizer={})
    calls = {
        "config.json": lambda: RunFolder.open(tmp_path, make_config()),
        "checkpoints": lambda: checkpoint.save(tmp_path / what, state, keep=1),
    }
    if what == "checkpoints":
        train(make_config(epochs=1), tmp_path, device="cpu", quiet=True)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device.*{tmp_path}.*{what}"):
        calls[what]()
    assert not list(tmp_path.rglob("*.tmp"))
    assert checkpoint.saved_steps(tmp_path / "checkpoints") == ([5] if what == "checkpoints" else [])


@pytest.mark.usefixtures("_no_limit_after")
def test_training_goes_on_without_room_and_says_so_at_the_end(
    make_config: Make, assert_same_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(epochs=3)
    train(config, tmp_path / "roomy", device="cpu", quiet=True)

    def fill_up(folder: Path, state: Any, **how: Any) -> Path:
        if state.step > 5:
            limit(6000)  # from now on the disk is full; a state is larger
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
