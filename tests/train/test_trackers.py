"""Trackers by name: numbers arrive, and a package that is missing is named."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from wellcond.train.config import Config
from wellcond.train.folder import RunFolder
from wellcond.train.loop import train
from wellcond.train.trackers import Tracker, make_tracker

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
