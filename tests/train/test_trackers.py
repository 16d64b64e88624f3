"""Trackers by name: numbers arrive, and a package that is missing is named."""

import errno
import importlib.util
import math
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wellcond import records
from wellcond.train import states
from wellcond.train.config import Config
from wellcond.train.folder import RunFolder
from wellcond.train.loop import _Run, train
from wellcond.train.progress import Tracker, make_tracker
from wellcond.train.tasks import Classify

Make = Callable[..., Config]


def test_none_is_asked_for(make_config: Make, tmp_path: Path) -> None:
    tracker = make_tracker(make_config(), RunFolder(path=tmp_path))
    assert type(tracker) is Tracker
    tracker.log({"loss": 1.0}, step=1)
    tracker.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_named(make_config: Make, tmp_path: Path, name: str) -> None:
    if importlib.util.find_spec(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(ValueError, match=f"'{name}' needs a package that is not installed.*pip install {name}"):
        train(make_config(tracker=name), tmp_path / "run", device="cpu", quiet=True)
    train(make_config(epochs=1), tmp_path / "run", device="cpu", quiet=True)  # without it, in the same folder


def test_tensorboard_gets_the_numbers(make_config: Make, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(make_config(tracker="tensorboard", probe_every=2, probe_samples=8), tmp_path, device="cpu", quiet=True)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert len(events.Scalars("train/loss")) == 10
    assert len(events.Scalars("val/top1")) == 2
    assert len(events.Scalars("probe/sa/worst_log_kappa")) == 6


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    names = [name for name in events.Tags()["scalars"] if not name.endswith(("per_second", "data_wait"))]
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}


def die_after(step: int, monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    """The training ends without a word in the step after `step`."""

    class Dead(BaseException):
        pass

    whole = _Run._log

    def log(self: _Run, at: int, loss: Any) -> None:
        whole(self, at, loss)
        if at > step:
            raise Dead

    monkeypatch.setattr(_Run, "_log", log)
    return Dead


def test_tensorboard_shows_a_resumed_run_as_one(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every number once: those of steps that are done again, too, and those of the step it goes on from."""
    pytest.importorskip("tensorboard")
    config = make_config(tracker="tensorboard", probe_every=2, probe_samples=8, save_every=4)
    train(config, tmp_path / "whole", device="cpu", quiet=True)
    with monkeypatch.context() as patch:
        dead = die_after(6, patch)
        with pytest.raises(dead):
            train(config, tmp_path / "run", device="cpu", quiet=True)
    assert (7 in dict(scalars(tmp_path / "run")["train/loss"])) is True  # it was closed: nothing is missing
    train(config, tmp_path / "run", device="cpu", quiet=True)
    assert scalars(tmp_path / "run") == scalars(tmp_path / "whole")


def test_tensorboard_has_all_of_a_state_before_it_is_saved(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever goes on from a state does not log its numbers again; they wait in a queue until they are flushed."""
    board = pytest.importorskip("torch.utils.tensorboard")
    order: list[str] = []
    flush, save = board.SummaryWriter.flush, states.save

    def flushed(self: Any) -> None:
        order.append("flush")
        flush(self)

    def saved(*arguments: Any, **how: Any) -> Path:
        order.append("save")
        return save(*arguments, **how)

    monkeypatch.setattr(board.SummaryWriter, "flush", flushed)
    monkeypatch.setattr(states, "save", saved)
    train(make_config(tracker="tensorboard"), tmp_path, device="cpu", quiet=True)
    assert [word for word, before in zip(order, ["", *order], strict=False) if word != before][:4] == [
        "flush", "save", "flush", "save",
    ]  # fmt: skip


def test_tensorboard_forgets_what_a_rollback_does_again(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    calls, whole = [0], Classify.loss

    def spoilt(self: Classify, *inputs: Any) -> Any:
        calls[0] += 1
        return whole(self, *inputs) * (math.nan if calls[0] == 8 else 1)

    monkeypatch.setattr(Classify, "loss", spoilt)
    config = make_config(tracker="tensorboard", on_divergence="rollback", skip_limit=1)
    with pytest.warns(UserWarning, match="back to step 5"):
        train(config, tmp_path, device="cpu", quiet=True)
    found = scalars(tmp_path)
    assert [step for step, _ in found["train/loss"]] == list(range(1, 11))
    rows = [row for row in records.read_rows(tmp_path / "metrics.jsonl") if row["split"] == "train"]
    assert dict(found["train/loss"]) == pytest.approx({row["step"]: row["loss"] for row in rows})


def test_a_full_disk_ends_tensorboard_and_not_the_training(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = pytest.importorskip("torch.utils.tensorboard")

    def full(self: Any, *arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(board.SummaryWriter, "add_scalar", full)
    with pytest.warns(UserWarning, match=rf"{tmp_path}/tensorboard cannot be written .*metrics\.jsonl has them"):
        train(make_config(tracker="tensorboard", epochs=1), tmp_path, device="cpu", quiet=True)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_other_trackers_go_on_with_the_same_run(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A module with the words of both, which notes what it is called with."""
    begun: list[dict[str, Any]] = []
    logged: list[int] = []
    ends: list[int] = []
    fake: Any = types.ModuleType(name)
    fake.init = lambda **settings: begun.append(settings)
    fake.log = lambda values, *, step: logged.append(step)
    fake.finish = lambda: ends.append(len(logged))
    monkeypatch.setitem(sys.modules, name, fake)
    config = make_config(tracker=name, save_every=4, eval_every=2)
    with monkeypatch.context() as patch:
        dead = die_after(6, patch)
        with pytest.raises(dead):
            train(config, tmp_path / "one", device="cpu", quiet=True)
    assert ends == [7]  # what it had is sent
    train(config, tmp_path / "one", device="cpu", quiet=True)
    assert logged == [1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8, 9, 10, 10]
    train(config, tmp_path / "other/one", device="cpu", quiet=True)  # another run in a folder of the same name
    key = "name" if name == "trackio" else "id"  # what each of them knows a run by
    first, again, other = ((settings[key], settings["resume"], settings["project"]) for settings in begun)
    assert first == again
    assert first[1:] == ("allow", "wellcond")
    assert first != other
    assert all(settings["name"].startswith("one") for settings in begun)
