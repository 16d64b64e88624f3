"""Rates by the number of the step: timm's in epochs and in steps, and torch's one-cycle policy to its last digits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from wellcond import records
from wellcond.train.config import Config
from wellcond.train.loop import train
from wellcond.train.schedules import make_schedule

Make = Callable[..., Config]


def rates(config: Config, *, total: int, steps_per_epoch: int = 5, at: range | None = None) -> list[float]:
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=config.lr)
    schedule = make_schedule(config, optimizer, total=total, steps_per_epoch=steps_per_epoch)
    found = []
    for step in at or range(total):
        schedule.step_update(step)
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize(("total", "warmup"), [(50, 10), (50, 2), (7, 3), (1000, 80)])
def test_onecycle_is_torchs_with_its_momentum(total: int, warmup: int) -> None:
    theirs = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=1.0)
    policy = torch.optim.lr_scheduler.OneCycleLR(
        theirs, max_lr=3e-4, total_steps=total, pct_start=warmup / total, anneal_strategy="linear"
    )
    ours = torch.optim.AdamW([torch.zeros(1)], lr=3e-4)
    config = Config().changed({"sched": "onecycle", "steps": total, "warmup_steps": warmup})
    schedule = make_schedule(config, ours, total=total, steps_per_epoch=1)
    for step in range(total):
        schedule.step_update(step)
        group, truth = ours.param_groups[0], theirs.param_groups[0]
        assert group["lr"] == pytest.approx(truth["lr"], rel=1e-9, abs=1e-15)
        assert group["betas"] == pytest.approx(truth["betas"], rel=1e-9)
        theirs.step()
        if step < total - 1:
            policy.step()


@pytest.mark.parametrize("sched", ["cosine", "onecycle", "poly"])
def test_a_step_knows_its_rate_by_its_number_alone(sched: str) -> None:
    config = Config().changed({"sched": sched, "epochs": 4, "warmup_epochs": 1, "lr": 1e-3})
    whole = rates(config, total=20)
    assert rates(config, total=20, at=range(13, 20)) == whole[13:]


def test_steps_and_epochs_mean_the_same() -> None:
    config = Config().changed({"epochs": 4, "warmup_epochs": 1, "lr": 1e-3})
    in_steps = config.changed({"steps": 20, "warmup_epochs": 0, "warmup_steps": 5})
    assert rates(in_steps, total=20) == pytest.approx(rates(config, total=20), rel=1e-12)


def test_a_warm_up_longer_than_the_training_is_as_long_as_it() -> None:
    config = Config().changed({"epochs": 1, "warmup_epochs": 5, "lr": 1e-3})
    found = rates(config, total=5)
    assert found == sorted(found)
    assert found[-1] < 1e-3


def test_a_training_in_steps_ends_validates_and_saves_by_them(make_config: Make, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 8, "eval_steps": 3, "sched": "onecycle", "warmup_steps": 2, "clip_value": 0.1}
    outcome = train(make_config(**settings), tmp_path, device="cpu", quiet=True)
    rows = records.read_rows(tmp_path / "metrics.jsonl")
    assert outcome.steps == 8
    assert [row["step"] for row in rows if row["split"] == "val"] == [3, 6, 8]
    assert [row["step"] for row in rows if row["split"] == "train"] == list(range(1, 9))
