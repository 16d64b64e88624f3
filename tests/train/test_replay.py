"""Which trainings replay their passes as CUDA graphs; what passes leave behind, and how fast they are said to be."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wellcond import records
from wellcond.train.config import Config
from wellcond.train.loop import train
from wellcond.train.progress import Progress
from wellcond.train.replay import can_replay
from wellcond.train.setup import build

Make = Callable[..., Config]
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("settings", [{}, {"amp_dtype": "float16"}, {"compile": True, "probe_every": 5}])
def test_one_gpu_replays(make_config: Make, settings: dict[str, Any]) -> None:
    assert can_replay(make_config(step_graph=True, **settings), GPU, world=1)


@pytest.mark.parametrize("settings", [{"step_graph": False}, {"accumulate": 2}, {"deterministic": True}])
def test_others_do_not(make_config: Make, settings: dict[str, Any]) -> None:
    assert not can_replay(make_config(**{"step_graph": True, **settings}), GPU, world=1)


def test_neither_several_processes_nor_a_cpu(make_config: Make) -> None:
    assert not can_replay(make_config(step_graph=True), GPU, world=2)
    assert not can_replay(make_config(step_graph=True), torch.device("cpu"), world=1)


def test_a_training_that_is_over_is_freed(make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and not when the garbage collector comes by: on a GPU the next training needs the memory."""
    models = []

    def built(*args: Any, **kwargs: Any) -> Any:
        parts = build(*args, **kwargs)
        models.append(weakref.ref(parts.model))
        return parts

    monkeypatch.setattr("wellcond.train.loop.build", built)
    gc.collect()
    gc.disable()
    try:
        train(make_config(epochs=1), tmp_path / "run", device="cpu", quiet=True)
        assert models
        assert models[0]() is None
    finally:
        gc.enable()


def test_a_rate_is_that_of_the_steps_since_the_row_before(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    real = Progress.step

    def step(self: Progress, number: int, *, samples: int) -> None:
        now[0] += 10.0 if number <= 5 else 1.0  # the first epoch takes longer, as with compilation
        real(self, number, samples=samples)

    monkeypatch.setattr(Progress, "step", step)
    monkeypatch.setattr("wellcond.train.progress.time", SimpleNamespace(perf_counter=lambda: now[0]))
    train(make_config(epochs=3, log_every=5, batch_size=256), tmp_path / "run", device="cpu", quiet=True)
    rows = [row for row in records.read_rows(tmp_path / "run" / "metrics.jsonl") if row["split"] == "train"]
    assert [row["images_per_second"] for row in rows] == pytest.approx([25.6, 256.0, 256.0])
